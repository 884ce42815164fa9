"""The command line: every command on a tiny artifact, what goes to stdout and what to stderr, exit codes, signals."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from tiny_artifact import cli_environment, command

import tokenspeed
from tokenspeed import __version__
from tokenspeed.artifact import Artifact
from tokenspeed.cli import main
from tokenspeed.cli.main import COMMANDS
from tokenspeed.target import ALL_TARGETS, Target, runnable_targets

GREEDY = ("--temperature", "0", "--max-tokens", "8")


@dataclass(frozen=True)
class Ran:
    """What one command gave."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)

    def refused(self, code: int, error: str, hint: str | None = None) -> None:
        """Exit code, the two lines on stderr (after any progress), nothing on stdout."""
        assert (self.code, self.out) == (code, ""), self
        lines = self.err.splitlines()
        first = next(i for i, line in enumerate(lines) if line.startswith("error: "))
        assert error in "\n".join(lines[first:]), self.err
        if hint is not None:
            assert lines[-1].startswith("hint: ") and hint in lines[-1], self.err
        assert "Traceback" not in self.err


class Terminal(io.StringIO):
    """Stands for a terminal that nobody types on."""

    def isatty(self) -> bool:
        return True


Run = Callable[..., Ran]


@pytest.fixture
def run(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    """Runs a command in this process; ``stdin`` is the text of a pipe, a stream, or None: closed."""

    def call(*args: str | Path, stdin: str | io.StringIO | None = "") -> Ran:
        monkeypatch.setattr("sys.stdin", io.StringIO(stdin) if isinstance(stdin, str) else stdin)
        capfd.readouterr()
        try:
            code = main([str(arg) for arg in args])
        except SystemExit as e:  # argparse's own refusals
            code = int(e.code or 0)
        captured = capfd.readouterr()
        return Ran(code, captured.out, captured.err)

    return call


# ---- build ----------------------------------------------------------------------------------------------------


def test_sources_without_the_native_module_say_so(tmp_path: Path) -> None:
    """What Python finds in a checkout from which the package was installed."""
    (tmp_path / "tokenspeed").mkdir()
    (tmp_path / "tokenspeed" / "__init__.py").write_bytes(Path(tokenspeed.__file__).read_bytes())
    done = subprocess.run(
        [sys.executable, "-c", "from tokenspeed import _native"], cwd=tmp_path,
        capture_output=True, text=True, timeout=60, env=cli_environment(PYTHONSAFEPATH=""),
    )  # fmt: skip
    assert done.returncode == 1 and "tokenspeed needs its native module, and" in done.stderr
    assert f"{tmp_path}/tokenspeed has none" in done.stderr and "python -P" in done.stderr


def test_build_with_defaults_goes_to_artifacts_by_name(
    run: Run, tiny_checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    ran = run("build", tiny_checkpoint)
    assert ran.code == 0 and ran.out.startswith("artifacts/tiny-llama  ")
    artifact = Artifact.open("artifacts/tiny-llama")
    assert ran.out.strip().endswith(f"sha256:{artifact.digest}")
    envelope = artifact.manifest.envelope
    assert (envelope.dtype, envelope.max_model_len, envelope.max_num_seqs) == ("bfloat16", 65536, 64)
    assert envelope.targets == (Target.native(),)
    stages = [line.split()[0] for line in ran.err.splitlines()]
    assert stages == ["checkpoint", "program", "select", "lower", "weights", "graphs", "seal"]
    assert [p.name for p in Path("artifacts").iterdir()] == ["tiny-llama"]
    run("build", tiny_checkpoint).refused(7, "artifacts/tiny-llama exists already", "pass --force to replace it")


def test_a_model_name_cannot_lead_out_of_artifacts(
    run: Run, tiny_checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    for name, place in (("../../evil", "evil"), ("/evil", "evil"), ("org/model", "org/model")):
        assert run("build", tiny_checkpoint, "--force", "--model-name", name).code == 0
        assert Artifact.open(Path("artifacts", place)).manifest.envelope.model == name
    assert [p.name for p in tmp_path.iterdir()] == ["here"]
    run("build", tiny_checkpoint, "--model-name", "..").refused(2, "the model name '..' makes no path", "with -o")
    run("build", tiny_checkpoint, "--model-name", "a\nb").refused(4, "must be a non-empty name of printable characters")


def test_build_json_and_tar(run: Run, tiny_checkpoint: Path, tmp_path: Path) -> None:
    ran = run("build", tiny_checkpoint, "-o", tmp_path / "a.tar", "--json", "--max-model-len", "256")
    artifact = Artifact.open(tmp_path / "a.tar")
    assert ran.json["digest"] == artifact.digest and ran.json["path"] == str(tmp_path / "a.tar")
    assert set(ran.json) == {"path", "digest", "bytes", "seconds"}
    assert run("verify", tmp_path / "a.tar").code == 0
    first = (tmp_path / "a.tar").read_bytes()
    assert run("build", tiny_checkpoint, "-o", tmp_path / "a.tar", "--force", "--max-model-len", "256").code == 0
    assert (tmp_path / "a.tar").read_bytes() == first  # the same inputs give the same bytes
    said = run("run", tmp_path / "a.tar", "hello", *GREEDY)
    run("build", tiny_checkpoint, "-o", tmp_path / "a", "--max-model-len", "256")
    assert run("run", tmp_path / "a", "hello", *GREEDY) == said and said.code == 0


def test_recipe_flags_and_print_envelope(run: Run, tiny_checkpoint: Path, tmp_path: Path) -> None:
    recipe = tmp_path / "r.toml"
    recipe.write_text('[envelope]\nmax_num_seqs = 3\nmax_model_len = 512\ndtype = "fp32"\n')
    args = ("build", tiny_checkpoint, "--recipe", recipe, "--max-model-len", "128", "--print-envelope")
    settings = run(*args, "--json").json
    assert settings["max_num_seqs"] == {"value": 3, "source": "recipe"}
    assert settings["max_model_len"] == {"value": 128, "source": "flag"}
    assert settings["dtype"] == {"value": "float32", "source": "recipe"}
    assert settings["page_size"] == {"value": 64, "source": "default"}
    lines = run(*args).out.splitlines()
    assert [line.split()[:3] for line in lines if line.startswith("max_model_len")] == [
        ["max_model_len", "128", "flag"]
    ]
    recipe.write_text("[envelope]\nmax_nums_seqs = 3\n")
    run(*args).refused(4, "max_nums_seqs")
    recipe.write_text("nonsense")
    run(*args).refused(4, "is not valid TOML")


def test_force_replaces_artifacts_and_nothing_else(run: Run, tiny_checkpoint: Path, tmp_path: Path) -> None:
    home = tmp_path / "home"
    home.mkdir()
    (home / "thesis.txt").write_text("years of work")
    (tmp_path / "notes.tar").write_bytes(b"no archive")
    (tmp_path / "link").symlink_to("home")
    for victim in ("home", "notes.tar", "link", "home/thesis.txt"):
        ran = run("build", tiny_checkpoint, "-o", tmp_path / victim, "--force")
        ran.refused(7, f"{victim} is no artifact: --force replaces only what `tokenspeed build` made", "another path")
    os.mkfifo(tmp_path / "pipe")
    run("build", tiny_checkpoint, "-o", tmp_path / "pipe", "--force").refused(7, "pipe is no artifact")
    assert (home / "thesis.txt").read_text() == "years of work"
    # A link to an artifact: what it points to is replaced, and it still points there.
    for name in ("v1", "v2"):
        run("build", tiny_checkpoint, "-o", tmp_path / "v", "--force", "--model-name", name, "--max-model-len", "128")
        if name == "v1":
            (tmp_path / "current").symlink_to("v")
    run("build", tiny_checkpoint, "-o", tmp_path / "current", "--force", "--model-name", "v3", "--max-model-len", "128")
    assert (tmp_path / "current").is_symlink()
    assert Artifact.open(tmp_path / "v").manifest.envelope.model == "v3"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["current", "home", "link", "notes.tar", "pipe", "v"]


def test_pinned_solutions(run: Run, tiny_checkpoint: Path, tmp_path: Path) -> None:
    out = ("-o", tmp_path / "a", "--max-model-len", "128")
    assert run("build", tiny_checkpoint, *out, "--solution", "linear=native").code == 0
    ran = run("build", tiny_checkpoint, *out, "--force", "--solution", "linear=triton")
    ran.refused(5, "solution: need triton (pinned), have native", "pin op 'linear' to aok or native, or pin nothing")
    ran = run("build", tiny_checkpoint, *out, "--force", "--solution", "convolution=native")
    ran.refused(5, "op 'convolution' is pinned to 'native', but the program has only adjust_logits, ")
    ran = run("build", tiny_checkpoint, *out, "--force", "--solution", "linear")
    ran.refused(2, "--solution is 'linear'; it must look like OP=SOLUTION, e.g. linear=native")
    ran = run("build", tiny_checkpoint, *out, "--force", "--solution", "linear=native", "--solution", "linear=aok")
    ran.refused(2, "--solution pins op 'linear' twice, to native and to aok")
    ran = run("build", tiny_checkpoint, "--print-envelope", "--numerics", "rl-bitwise", "--solution", "linear=native")
    ran.refused(4, "numerics = rl-bitwise needs solution aok for every op; op 'linear' is pinned to native")


def test_rl_bitwise_requires_features(run: Run, tiny_checkpoint: Path, tmp_path: Path) -> None:
    assert (
        run("build", tiny_checkpoint, "-o", tmp_path / "a", "--numerics", "rl-bitwise", "--max-model-len", "128").code
        == 0
    )
    target = run("explain", tmp_path / "a", "--json").json["targets"][0]
    assert "batch_invariant" in target["required_features"]


# ---- run ------------------------------------------------------------------------------------------------------


def test_run_one_prompt(run: Run, tiny_artifact: Path) -> None:
    chat = run("run", tiny_artifact, "hello", *GREEDY)
    assert chat.code == 0 and chat.err == "" and chat.out.endswith("\n")
    assert run("run", tiny_artifact, *GREEDY, stdin="hello") == chat
    raw = run("run", tiny_artifact, "--raw", "hello", *GREEDY)
    assert raw.code == 0 and raw.out != chat.out
    system = run("run", tiny_artifact, "hello", "--system", "Be brief.", *GREEDY)
    assert system.code == 0 and system.out != chat.out


@pytest.mark.parametrize(
    "args",
    [
        ("--raw", "hello", *GREEDY),
        ("--raw", *GREEDY, "hello"),
        (*GREEDY, "--raw", "--", "hello"),
        (*GREEDY, "hello", "--raw"),
    ],
)
def test_the_prompt_may_stand_anywhere(run: Run, tiny_artifact: Path, args: tuple[str, ...]) -> None:
    assert run("run", tiny_artifact, *args) == run("run", tiny_artifact, "hello", "--raw", *GREEDY)


def test_a_prompt_that_looks_like_an_option(run: Run, tiny_artifact: Path) -> None:
    assert run("run", tiny_artifact, *GREEDY, "--", "--raw").code == 0
    ran = run("run", tiny_artifact, "--rawr")
    assert ran.code == 2 and "unrecognized arguments: --rawr" in ran.err
    ran = run("run", tiny_artifact, "a", "b")
    assert ran.code == 2 and "unrecognized arguments: b" in ran.err


def test_run_json_and_seeds(run: Run, tiny_artifact: Path) -> None:
    args = ("run", tiny_artifact, "hello", "--json", "--max-tokens", "6", "--temperature", "1")
    one, two = run(*args, "--seed", "5").json, run(*args, "--seed", "5").json
    assert one["text"] == two["text"] != run(*args, "--seed", "6").json["text"]
    assert (one["finish_reason"], one["completion_tokens"], one["cached_tokens"]) == ("length", 6, 0)
    assert one["seconds_to_first_token"] > 0 and one["tokens_per_second"] > 0
    greedy = (*args[:-3], "40", "--temperature", "0")
    penalized = run(*greedy, "--repetition-penalty", "5", "--presence-penalty", "2").json
    assert penalized["text"] != run(*greedy).json["text"]
    ran = run(*args, "--frequency-penalty", "3")
    ran.refused(1, "frequency_penalty must be a number from -2 to 2; got 3", "0 turns it off")
    stopped = run(*args, "--seed", "5", "--stop", one["text"][0]).json
    assert (stopped["text"], stopped["finish_reason"]) == ("", "stop")


def test_run_needs_a_prompt(run: Run, tiny_artifact: Path) -> None:
    for args in (("",), ("  \n",), ("--raw", ""), ()):
        run("run", tiny_artifact, *args).refused(2, "the prompt is empty", "give some text as PROMPT or on stdin")
    ran = run("run", tiny_artifact, stdin=None)
    ran.refused(2, "there is no PROMPT, and stdin is closed", "give a prompt as an argument")
    terminal = Terminal()
    ran = run("run", tiny_artifact, "--raw", stdin=terminal)
    ran.refused(2, "--raw needs a PROMPT to complete", "leave --raw out to chat")
    ran = run("run", tiny_artifact, "--json", stdin=terminal)
    ran.refused(2, "--json needs a PROMPT", "give one as an argument or on stdin")


# ---- looking into an artifact ---------------------------------------------------------------------------------


def test_verify(run: Run, tiny_artifact: Path) -> None:
    ran = run("verify", tiny_artifact)
    assert ran.code == 0 and f"{tiny_artifact}: ok (" in ran.out
    report = run("verify", tiny_artifact, "--json").json
    assert report["ok"] and report["digest"] == Artifact.open(tiny_artifact).digest
    assert report["graphs"] == len(Artifact.open(tiny_artifact).manifest.targets[0].buckets) and report["nodes"] > 50
    quick = run("verify", tiny_artifact, "--level", "quick", "--json").json
    assert 0 < quick["bytes_hashed"] < report["bytes_hashed"]


def test_doctor(run: Run) -> None:
    report = run("doctor", "--json")
    assert report.code == 0 and report.json["tokenspeed"] == __version__
    assert [t["target"] for t in report.json["targets"]] == list(ALL_TARGETS)
    on_cpu = [t for t in report.json["targets"] if t["target"].startswith("cpu:")]
    assert [t["target"] for t in on_cpu if t["runs"]] == [str(t) for t in runnable_targets()]
    assert report.json["extras"]["build"] == report.json["extras"]["trainer"] == {"installed": True, "missing": []}
    text = run("doctor").out
    assert text.startswith(f"tokenspeed {__version__} on Python ") and "kernel ABI" in text
    for target in report.json["targets"]:
        assert target["target"] in text and all(flag in text for flag in target["missing_flags"])


def test_doctor_on_a_machine_that_runs_nothing(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tokenspeed.target.cpu_flags", lambda: frozenset({"sse2"}))
    ran = run("doctor")
    assert ran.code == 1 and "this CPU lacks abm, avx2, bmi1, bmi2, f16c, fma, movbe" in ran.out


def test_bench(run: Run, tiny_artifact: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tokenspeed.runtime.bench.CEILING_BYTES", 1 << 24)
    args = ("bench", tiny_artifact, "--decode", "1,2", "--prefill", "16", "--rounds", "1")
    report = run(*args, "--json").json
    assert [f["case"] for f in report["figures"]] == ["decode 1", "decode 2", "prefill 16"]
    assert all(f["tokens_per_second"] > 0 for f in report["figures"])
    profile = run("bench", tiny_artifact, "--profile", "decode:2", "--json").json
    assert profile[0]["node"] == "embedding" and profile[-1]["node"] == "sample"
    assert run("bench", tiny_artifact, "--profile", "prefill:16").out.splitlines()[-1].startswith("total ")
    for flag, value, text in (
        ("--decode", "0", "--decode is '0'; it must be whole numbers above 0 with commas between"),
        ("--prefill", "1,x", "--prefill is '1,x'; it must be whole numbers above 0"),
        ("--rounds", "0", "--rounds is 0; it must be at least 1"),
        ("--profile", "decode", "--profile is 'decode'; it must look like decode:8 or prefill:512"),
        ("--profile", "decode:9", "decode 9 is beyond what the artifact was built for"),
    ):
        run("bench", tiny_artifact, flag, value).refused(2, text)


def test_export(run: Run, tiny_checkpoint: Path, tmp_path: Path) -> None:
    onnx = pytest.importorskip("onnx")
    path = tmp_path / "m.onnx"
    ran = run("export", tiny_checkpoint, "--onnx", path, "--max-model-len", "64")
    assert (ran.code, ran.out) == (0, f"{path}\n")
    onnx.checker.check_model(onnx.load(path))
    run("export", tiny_checkpoint, "--onnx", path).refused(2, "m.onnx exists already", "--force to replace it")
    again = run("export", tiny_checkpoint, "--onnx", path, "--max-model-len", "64", "--force", "--json").json
    assert again == {"path": str(path), "bytes": path.stat().st_size}
    run("export", tiny_checkpoint, "--onnx", tmp_path, "--force").refused(2, "is no file: --force replaces only files")
    run("export", tiny_checkpoint, "--onnx", tmp_path / "no" / "m.onnx").refused(9, "No such file or directory")


# ---- help, errors, exit codes ---------------------------------------------------------------------------------


@pytest.mark.parametrize("name", COMMANDS)
def test_help_has_examples(run: Run, name: str) -> None:
    ran = run(name, "--help")
    assert ran.code == 0 and ran.err == ""
    examples = ran.out.partition("\nexamples:\n")[2]
    assert f"  tokenspeed {name}" in examples
    assert all(len(line) <= 120 for line in ran.out.splitlines())


def test_version_and_usage(run: Run) -> None:
    assert run("--version") == Ran(0, f"tokenspeed {__version__}\n", "")
    assert "the usual walk:" in run("--help").out
    for args in ((), ("nonsense",), ("build",), ("run",), ("serve", "a", "--port", "x")):
        ran = run(*args)
        assert (ran.code, ran.out) == (2, "") and ran.err.startswith("usage: tokenspeed")


def test_exit_codes_say_what_kind_of_thing_went_wrong(run: Run, tiny_checkpoint: Path, tiny_artifact: Path) -> None:
    cases: list[tuple[int, str, tuple[str | Path, ...]]] = [
        (1, "max_tokens must be an integer of at least 1; got 0", ("run", tiny_artifact, "x", "--max-tokens", "0")),
        (2, "--threads is 0; it must lie between 1 and 1024", ("run", tiny_artifact, "x", "--threads", "0")),
        (3, "no checkpoint at absent", ("build", "absent")),
        (4, "dtype (set by flag) is 'int4'", ("build", tiny_checkpoint, "--dtype", "int4")),
        (5, "need triton (pinned)", ("build", tiny_checkpoint, "--solution", "sample=triton")),
        (7, "no artifact at absent", ("verify", "absent")),
        (8, "unknown target 'cuda:sm_75'", ("build", tiny_checkpoint, "--target", "cuda:sm_75")),
        (8, "unknown target 'cpu:z80'", ("run", tiny_artifact, "x", "--target", "cpu:z80")),
        (9, "does not fit in memory", ("run", tiny_artifact, "x", "--kv-gib", "0.0001")),
    ]
    for code, text, args in cases:
        run(*args).refused(code, text)


# ---- processes ------------------------------------------------------------------------------------------------


def shell(script: str, artifact: Path, **environment: str) -> subprocess.CompletedProcess[bytes]:
    """Run a bash script in which $ts is the command and $a the artifact; the code is the first of the pipe's."""
    own = cli_environment(ts=" ".join(command()), a=str(artifact), **environment)
    return subprocess.run(
        ["bash", "-c", f"{script}; exit ${{PIPESTATUS[0]}}"], capture_output=True, timeout=60, env=own
    )


def test_a_reader_that_leaves_is_no_error(tiny_artifact: Path) -> None:
    ran = shell("$ts run $a hi --temperature 0 | head -c 1", tiny_artifact)
    assert (ran.returncode, ran.stderr) == (0, b"") and len(ran.stdout) == 1


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="this system has no /dev/full")
def test_a_full_disk_under_stdout_is_an_error(tiny_artifact: Path) -> None:
    ran = shell("$ts inspect $a --json > /dev/full", tiny_artifact)
    assert (ran.returncode, ran.stderr) == (9, b"error: No space left on device\n")


def test_a_closed_stderr_changes_nothing_else(tiny_artifact: Path) -> None:
    ran = shell("$ts run $a hi --temperature 0 2>&-", tiny_artifact)
    assert (ran.returncode, ran.stdout) == (0, shell("$ts run $a hi --temperature 0", tiny_artifact).stdout)
    assert shell("$ts verify $a/none 2>&-", tiny_artifact).returncode == 7


def test_an_ascii_terminal(tiny_artifact: Path) -> None:
    plain = shell("$ts run $a hi --temperature 0 --max-tokens 200", tiny_artifact, PYTHONIOENCODING="ascii")
    assert (plain.returncode, plain.stderr) == (0, b"") and plain.stdout.isascii() and b"?" in plain.stdout
    asked = shell("$ts run $a hi --temperature 0 --max-tokens 200 --json", tiny_artifact, PYTHONIOENCODING="ascii")
    full = shell("$ts run $a hi --temperature 0 --max-tokens 200 --json", tiny_artifact)
    assert asked.stdout.isascii() and not full.stdout.isascii()
    assert json.loads(asked.stdout)["text"] == json.loads(full.stdout)["text"]


def test_ctrl_c_ends_a_single_reply(tiny_artifact: Path) -> None:
    process = subprocess.Popen(
        command("run", tiny_artifact, "hi", "--temperature", "1", "--seed", "4", "--raw"),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=cli_environment(),
    )
    assert process.stdout is not None
    assert process.stdout.read(1)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=20)
    assert (process.returncode, err) == (130, b"") and out.endswith(b"\n")
