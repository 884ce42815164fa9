"""`tokenspeed simulate`, the command: traces made and replayed, costs from `tokenspeed bench`, files, refusals."""

from __future__ import annotations

import io
import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tokenspeed.artifact import Artifact
from tokenspeed.cli import main
from tokenspeed.simulate.fleet import ROUTINGS
from tokenspeed.simulate.generate import KINDS, generate
from tokenspeed.simulate.trace import write_trace
from tokenspeed.target import Target, runnable_targets

CHATS = list(generate(KINDS["chat"], num_requests=100, seed=1, rate=4.0))
STEPS = ("--step-cost", "decode:16=2ms,mixed:16=2ms,mixed:512=10ms,context=20ns,pair=2ns", "--kv-pages", "600")
Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(capfd: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    monkeypatch.chdir(tmp_path)

    def call(*args: str) -> tuple[int, str, str]:
        capfd.readouterr()
        try:
            code = main(["simulate", *args])
        except SystemExit as e:
            code = int(e.code or 0)
        return code, *capfd.readouterr()

    return call


def test_a_trace_is_made_and_replayed(run: Run, tmp_path: Path) -> None:
    made = ("--generate", "chat", "--requests", "120", "--rate", "5", "--seed", "3", "--set", "tenants=2")
    assert run(*made, "-o", "t.jsonl") == (0, "t.jsonl: 120 requests\n", "")
    code, out, err = run(*made, "-o", "-")
    assert (code, err) == (0, "") and out == (tmp_path / "t.jsonl").read_text()
    assert run(*made, "-o", "t.jsonl")[0] == 2 and run(*made, "-o", "t.jsonl", "--force", "--json")[0] == 0

    args = ("t.jsonl", *STEPS, "--replicas", "2", "--routing", "all", "--picture", "p.svg", "--ttft-slo", "200")
    code, out, err = run(*args)
    assert (code, err) == (0, "") and out.startswith(
        "t.jsonl: 2 replicas\neach: 600 KV pages of 64, 16 sequences, 512 "
    )
    assert all(routing in out for routing in ROUTINGS) and "prefix-aware: tenants" in out
    assert (tmp_path / "p.svg").read_text().count("<polyline") == 4 * 6
    assert run(*args)[0] == 2  # p.svg exists

    code, out, err = run("t.jsonl", *STEPS, "--json", "--records", "r.csv")
    told = json.loads(out)
    assert (code, err) == (0, "") and told["runs"][0]["all"]["finished"] == 120
    assert len((tmp_path / "r.csv").read_text().splitlines()) == 121
    code, out, _ = run(*made, *STEPS, "--json")
    again = json.loads(out)
    for name in ("all", "tenants", "occupancy", "steps_by_bucket"):
        assert again["runs"][0][name] == told["runs"][0][name]


def test_what_bench_prints_is_what_simulate_reads(
    run: Run, tiny_artifact: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Measured on the engine of this very machine, then simulated with the same artifact."""
    monkeypatch.setattr("tokenspeed.runtime.bench.CEILING_BYTES", 1 << 24)
    artifact = ("bench", str(tiny_artifact), "--kv-gib", "0.02", "--threads", "1", "--json")
    for name, options in (
        ("bench.json", ("--decode", "1,2", "--prefill", "16,64", "--rounds", "1")),
        ("sweep.json", ("--sweep", "--steps-per-bucket", "1")),
    ):
        assert main([*artifact, *options]) == 0
        Path(name).write_text(capfd.readouterr().out)
    limits = ("--artifact", str(tiny_artifact), "--kv-pages", "40")
    traffic = ("--generate", "chat", "--requests", "40", "--block-tokens", "16", "--set", "system-tokens=32",
               "--set", "first-tokens=20", "--set", "message-tokens=5", "--set", "output-tokens=9",
               "--set", "max-tokens=120")  # fmt: skip
    code, out, err = run(*traffic, *limits, "--cost", "bench.json", "--cost", "sweep.json", "--json")
    told = json.loads(out)
    buckets = [e.bucket for e in Artifact.open(tiny_artifact).manifest.section(best_target(tiny_artifact)).buckets]
    assert (code, err) == (0, "") and told["runs"][0]["all"]["finished"] == 40
    assert {b["num_tokens"] for b in told["costs"]["buckets"]} == {b.num_tokens for b in buckets}
    assert told["costs"]["per_context_token"] > 0 and told["runs"][0]["all"]["ttft"]["p50"] > 0
    assert told["costs"]["provenance"]["artifact"] == Artifact.open(tiny_artifact).digest


def best_target(path: Path) -> Target:
    built = {section.target for section in Artifact.open(path).manifest.targets}
    return next(target for target in runnable_targets() if str(target) in built)


def test_costs_are_written_and_read(run: Run, tmp_path: Path) -> None:
    assert run(*STEPS, "--write-cost", "c.json") == (0, "", "costs: c.json\n")
    made = ("--generate", "batch", "--requests", "20", "--json")
    by_hand, by_file = (
        json.loads(run(*made, *costs, "--kv-pages", "600")[1]) for costs in (STEPS[:2], ("--cost", "c.json"))
    )
    assert by_hand["runs"][0]["all"] == by_file["runs"][0]["all"]
    assert by_file["costs"]["provenance"]["source"] == "--step-cost"


def test_progress_of_what_takes_long(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter(range(0, 10**9, 20))
    monkeypatch.setattr("tokenspeed.cli.simulate.time.monotonic", lambda: next(clock))
    code, _, err = run("--generate", "chat", "--requests", "1500", "-o", "t.jsonl")
    assert (code, err) == (0, "simulate: 1000 of 1500 requests made\n")
    code, _, err = run("t.jsonl", *STEPS, "--replicas", "4")
    lines = err.splitlines()
    assert (
        code == 0
        and len(lines) >= 3
        and all(re.match(r"simulate: round-robin: \d+ of 1500 requests", s) for s in lines)
    )


def test_nothing_is_left_of_a_trace_that_fails(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*args: object) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("tokenspeed.simulate.trace.write_trace", full)
    assert run("--generate", "chat", "-o", "t.jsonl")[::2] == (9, "error: No space left on device\n")
    assert list(tmp_path.iterdir()) == []


def test_the_command_loads_nothing_but_the_base_install() -> None:
    code = (
        "import sys; from tokenspeed.cli import main\n"
        f"assert main(['simulate', '--generate', 'chat', '--requests', '30', *{STEPS!r}]) == 0\n"
        "heavy = ('numpy', 'torch', 'triton', 'tokenspeed.compile', 'tokenspeed.kernels', 'tokenspeed.runtime')\n"
        "print('loaded:', [name for name in heavy if name in sys.modules])"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert ran.returncode == 0 and ran.stdout.endswith("loaded: []\n"), ran.stderr


def test_stdin(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = io.StringIO()
    write_trace(text, CHATS)
    (tmp_path / "t.jsonl").write_text(text.getvalue())
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(text.getvalue().encode())))
    piped, read = (json.loads(run(name, *STEPS, "--json")[1]) for name in ("-", "t.jsonl"))
    assert piped["runs"][0]["all"] == read["runs"][0]["all"]
    monkeypatch.setattr("sys.stdin", None)
    code, _, err = run("-", *STEPS)
    assert code == 2 and "need a trace on stdin, which is closed" in err


def test_parameters_are_listed(run: Run) -> None:
    code, out, _ = run("--parameters")
    assert code == 0 and all(f"\n{kind}: " in f"\n{out}" for kind in KINDS) and "system-tokens" in out


@pytest.mark.parametrize(
    ("code", "error", "args"),
    [
        (2, "need a TRACE, or --generate KIND", ()),
        (2, "need a TRACE or --generate KIND, have both", ("t.jsonl", "--generate", "chat")),
        (2, "--set and -o belong to --generate KIND", ("t.jsonl", "-o", "x")),
        (2, "need what steps cost", ("--generate", "chat", "--kv-pages", "5")),
        (2, "chat has no parameter 'colour'", ("--generate", "chat", "--set", "colour=1", *STEPS)),
        (2, "--set needs NAME=VALUE, have 'turns'", ("--generate", "chat", "--set", "turns", *STEPS)),
        (2, "--routing knows no 'nearest'", ("--generate", "chat", "--routing", "nearest", *STEPS)),
        (2, "several routings read the trace as often", ("-", "--routing", "all", *STEPS)),
        (2, "--records is of one routing", ("t.jsonl", "--routing", "all", "--records", "r", *STEPS)),
        (2, "--replicas is 0; it must lie between 1 and 4096", ("t.jsonl", "--replicas", "0", *STEPS)),
        (2, "--speed is 0; it must lie between 1e-06", ("t.jsonl", "--speed", "0", *STEPS)),
        (2, "--ttft-slo is -1; it must be above 0 ms", ("t.jsonl", "--ttft-slo", "-1", *STEPS)),
        (2, "bad.jsonl, line 1: need one JSON object", ("bad.jsonl", *STEPS)),
        (2, "bad.jsonl holds no step costs", ("t.jsonl", "--cost", "bad.jsonl", "--kv-pages", "5")),
        (2, "no/p.svg: there is no folder no", ("t.jsonl", "--picture", "no/p.svg", *STEPS)),
        (2, "bad.jsonl exists already", ("t.jsonl", "--records", "bad.jsonl", *STEPS)),
        (2, ". is no file: --force replaces only files", ("t.jsonl", "--picture", ".", "--force", *STEPS)),
        (7, "no artifact at absent", ("t.jsonl", "--artifact", "absent", *STEPS)),
        (9, "absent.jsonl: No such file or directory", ("absent.jsonl", *STEPS)),
    ],
)
def test_refusals(run: Run, tmp_path: Path, code: int, error: str, args: tuple[str, ...]) -> None:
    (tmp_path / "bad.jsonl").write_text("nonsense\n")
    with (tmp_path / "t.jsonl").open("w") as file:
        write_trace(file, CHATS[:3])
    ended, out, err = run(*args)
    assert (ended, out) == (code, "") and f"error: {error}" in err and "Traceback" not in err
