"""The invariance harness on tiny models: an honest artifact passes every leg, one whose attention splits by occupancy
fails, and the op is named."""

from __future__ import annotations

import json
import math
import runpy
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tiny_artifact import cli, cli_environment, tiny, write_checkpoint

from tokenspeed.artifact import Artifact
from tokenspeed.cli import main
from tokenspeed.compile.build import build
from tokenspeed.runtime.invariance.attestation import path_of
from tokenspeed.runtime.invariance.outcomes import Outcome, bits_of, differences, make_cases
from tokenspeed.runtime.invariance.plan import LEGS
from tokenspeed.runtime.invariance.prompts import make_prompts, read_prompts

SPLIT = runpy.run_path(str(Path(__file__).resolve().parent.parent / "benchmarks" / "occupancy_split.py"))
FIELDS: dict[str, Any] = {
    "max_num_seqs": 16, "max_model_len": 512, "max_prefill_tokens": 256, "page_size": 32, "split_positions": 32,
}  # fmt: skip
SMALL = ("--prompts", "12", "--tokens", "40")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("invariance") / "tiny", tiny(num_layers=2))


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def dtype(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def honest(checkpoint: Path, dtype: str) -> Path:
    return build(checkpoint, checkpoint.parent / dtype, dtype=dtype, numerics="rl-bitwise", **FIELDS).path


@pytest.fixture(scope="module")
def faulty(checkpoint: Path, dtype: str) -> Path:
    with SPLIT["split_by_occupancy"](4):
        return build(checkpoint, checkpoint.parent / f"{dtype}-faulty", dtype=dtype, **FIELDS).path


def test_an_honest_artifact_passes_every_leg(honest: Path) -> None:
    done = cli("invariance", honest, *SMALL, "--json")
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads(done.stdout)
    legs = {leg["name"]: leg for leg in result["legs"]}
    assert list(legs) == list(LEGS) and result["passed"] and result["divergence"] is None
    assert [leg["verdict"] for leg in legs.values()] == ["reference", *["equal"] * (len(LEGS) - 1)]
    assert all(leg["requests"] == 24 and leg["steps"] for leg in legs.values())
    # What only some legs do, and that they did it.
    assert legs["preempted"]["preemptions"] and legs["cached"]["cached_tokens"]
    assert not legs["alone"]["preemptions"] and not legs["alone"]["cached_tokens"]
    # Of a prompt's two requests one asks for its prompt's log-probabilities, and all for those of their replies.
    assert legs["alone"]["compared"] > legs["packed"]["compared"] > 24 * 40
    assert set(result["buckets_not_run"]) <= {"mixed-32", "mixed-64", "mixed-128"}  # which of these, timing decides
    assert Path(result["attestation"]).is_file() and result["not_attested"] == []


def test_split_by_occupancy_is_found_and_named(faulty: Path) -> None:
    [section] = Artifact.open(faulty).manifest.targets
    earlier = path_of(faulty, section.target)
    earlier.parent.mkdir()
    earlier.write_text("{}")
    done = cli("invariance", faulty, *SMALL, "--json")
    assert done.returncode == 12, done.stdout + done.stderr
    result = json.loads(done.stdout)
    assert not result["passed"] and result["attestation"] is None
    assert result["revoked"] == str(earlier) and not earlier.exists()
    culprit = result["culprit"]
    assert (culprit["kind"], culprit["op"], culprit["value"]) == ("paged_attention", *["layers.0.attention"] * 2)
    # Up to one split there is nothing to merge: the fault shows at the first position behind it.
    assert culprit["position"] == FIELDS["split_positions"] <= result["divergence"]["position"]
    assert 0 < culprit["num_different"] <= culprit["num_elements"] == 64
    assert 0 < culprit["largest_difference"] < 1e-2
    few, many = culprit["reference"], culprit["leg"]
    assert few["bucket"] != many["bucket"] and few["kernels"][0].startswith("paged_attention")


def test_a_part_is_reported_and_not_attested(honest: Path) -> None:
    def attestations() -> dict[Path, bytes]:
        return {path: path.read_bytes() for path in honest.parent.glob(f"{honest.name}.attestations/*")}

    before = attestations()
    done = cli("invariance", honest, "--prompts", "4", "--tokens", "8", "--legs", "packed,chunks")
    assert done.returncode == 0, done.stderr
    assert "equal to the last bit; not attested, as it lacks legs repeated, preempted, cached, process" in done.stdout
    assert "4 prompts of the 8" in done.stdout and "8 tokens a reply of the 16" in done.stdout
    assert attestations() == before


def test_the_fresh_process_runs_the_same_package(honest: Path, tmp_path: Path) -> None:
    """Also in a folder with sources of another one, as is a checkout from which TokenSpeed was installed."""
    (tmp_path / "tokenspeed").mkdir()
    (tmp_path / "tokenspeed" / "__init__.py").write_text("raise SystemExit('not this one')\n")
    args = ("invariance", str(honest), "--prompts", "1", "--tokens", "2", "--legs", "process", "--json")
    command, env = [sys.executable, "-P", "-m", "tokenspeed", *args], cli_environment(PYTHONSAFEPATH="")
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, env=env, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert [leg["verdict"] for leg in json.loads(done.stdout)["legs"]] == ["reference", "equal"]


def test_a_leg_that_is_not_what_it_stands_for_proves_nothing(honest: Path, tmp_path: Path) -> None:
    """Single tokens are shorter than a page: none is cached, and none grows into pages that others need."""
    prompts = tmp_path / "prompts"
    prompts.write_text("[1]\n[2]\n")
    done = cli("invariance", honest, "--prompt-file", prompts, "--tokens", "4", "--legs", "preempted,cached", "--json")
    result = json.loads(done.stdout)
    assert done.returncode == 0 and [leg["verdict"] for leg in result["legs"]] == ["reference", *["not exercised"] * 2]
    assert result["attestation"] is None
    assert any(
        reason.startswith("in leg cached nothing was found in the prefix index") for reason in result["not_attested"]
    )
    assert any(reason.startswith("in leg preempted nothing was preempted") for reason in result["not_attested"])


def test_made_prompts_are_of_many_kinds() -> None:
    def encode(text: str) -> list[int]:
        return list(text.encode())

    made = make_prompts(5, 64, vocab_size=500, most_tokens=600, encode=encode)
    assert (
        made
        == make_prompts(5, 64, vocab_size=500, most_tokens=600, encode=encode)
        != make_prompts(6, 64, vocab_size=500, most_tokens=600, encode=encode)
    )
    lengths = sorted(map(len, made))
    assert (lengths[0], lengths[-1]) == (1, 600) and len(set(lengths)) > 25
    assert max(max(ids) for ids in made) > 490  # of the whole vocabulary, where they are no texts
    long = [tuple(ids[:64]) for ids in made if len(ids) >= 64]
    assert len(set(long)) < len(long)  # some begin alike
    assert {len(ids) for ids in make_prompts(5, 8, vocab_size=9, most_tokens=1, encode=encode)} == {1}


def test_prompts_of_a_file(tmp_path: Path) -> None:
    path = tmp_path / "prompts"
    path.write_text('[5, 6]\n\n"two \\u00e9"\nplain text\n7\n"one\u2028line"\n', encoding="utf-8")
    assert read_prompts(path, lambda text: list(text.encode())) == [
        [5, 6], list("two é".encode()), list(b"plain text"), list(b"7"), list("one\u2028line".encode()),
    ]  # fmt: skip


@pytest.mark.parametrize("limits", [{"max_num_seqs": 1}, {"max_model_len": 63}], ids=["one sequence", "one page"])
def test_artifacts_in_which_nothing_can_be_preempted_are_attested(tmp_path: Path, limits: dict[str, int]) -> None:
    fields: dict[str, Any] = {
        "max_model_len": 256,
        "max_num_seqs": 4,
        "max_prefill_tokens": 64,
        "page_size": 64,
        **limits,
    }
    build(write_checkpoint(tmp_path / "checkpoint"), tmp_path / "artifact", dtype="float32", numerics="rl-bitwise",
          **fields)  # fmt: skip
    done = cli("invariance", tmp_path / "artifact", "--prompts", "8", "--tokens", "40")
    assert done.returncode == 0 and "attested in " in done.stdout, done.stdout + done.stderr
    assert "not exercised" not in done.stdout


@pytest.mark.parametrize(
    ("args", "text"),
    [
        (("--legs", "packed,twice"), "error: --legs names 'twice'; the legs are alone, packed, repeated, chunks,"),
        (("--prompts", "0"), "error: --prompts is 0; it must lie between 1 and 65536\n"),
        (("--tokens", "70000"), "error: --tokens is 70000; it must lie between 1 and 65536\n"),
        (("--tokens", "512"), "error: --tokens is 512, and the artifact was built for max_model_len 512,"),
        (("--seed", "-1"), "error: --seed is -1; it must lie between 0 and"),
        (("--host-kv-gib", "1"), "error: the harness runs without a host tier\nhint: leave --host-kv-gib out\n"),
        (("--prompt-file", "{}/none"), "error: cannot read --prompt-file"),
        (("--prompt-file", "{}/empty"), "error: {}/empty has no prompt\nhint: write one prompt a line\n"),
        (
            ("--prompt-file", "{}/floats"),
            "error: {}/floats, line 1: need a text or an array of token ids, have '[1.5]'",
        ),
        (("--prompt-file", "{}/beyond"), "error: prompt 2 has a token id outside the vocabulary of 283 tokens\n"),
        (
            ("--prompt-file", "{}/long", "--tokens", "500"),
            "error: prompt 1 has 13 tokens; with --tokens at most 12 fit",
        ),
        (("--prompt-file", "x", "--prompts", "3"), "error: --prompts makes prompts, and --prompt-file brings them\n"),
    ],
)
def test_refusals(
    honest: Path, tmp_path: Path, args: tuple[str, ...], text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    files = {"empty": "\n\n", "floats": "[1.5]\n", "beyond": "[1]\n[283]\n", "long": "[1" + ",1" * 12 + "]"}
    for name, content in files.items():
        (tmp_path / name).write_text(content)
    code = main(["invariance", str(honest), "--kv-gib", "0.05", *(arg.replace("{}", str(tmp_path)) for arg in args)])
    captured = capsys.readouterr()
    assert code == 2 and captured.out == "" and captured.err.startswith(text.replace("{}", str(tmp_path)))


def test_bits_are_compared_not_numbers() -> None:
    assert bits_of(0.0) == 0 and bits_of(-0.0) == 0x80000000 and bits_of(1.0) == 0x3F800000
    assert bits_of(math.nan) == bits_of(-math.nan) and bits_of(-math.inf) == 0xFF800000
    # The least float32, which Python has as a float64.
    assert bits_of(2.0**-149) == 1


def test_where_outcomes_part() -> None:
    cases = make_cases([[5, 6, 7], [8]], tokens=2, seed=3)
    assert [(c.prompt, c.temperature) for c in cases] == [(0, 0.0), (0, 1.0), (1, 0.0), (1, 1.0)]
    assert cases[1].seed == cases[0].seed != cases[2].seed  # greedy ones draw nothing
    reference = [Outcome([(1, 10, 1), (2, 20, 1)], [(6, 3, 1), (7, 4, 1)]) for _ in cases]
    same = Outcome([(1, 10, 1), (2, 20, 1)], [(6, 3, 1), (7, 4, 1)])
    assert list(differences("packed", cases, reference, {0: same, 1: replace(same, prompt=None)})) == []
    prompt_first = replace(same, output=[(1, 11, 1), (2, 20, 1)], prompt=[(6, 3, 1), (7, 5, 1)])
    shorter, longer = replace(same, output=same.output[:1]), replace(same, output=[*same.output, (9, 9, 9)])
    found = list(differences("packed", cases, reference, {0: prompt_first, 1: shorter, 2: longer}))
    assert [(d.case, d.position, d.in_prompt) for d in found] == [(0, 2, True), (1, 4, False), (2, 3, False)]
    assert (found[0].expected, found[0].found) == ((7, 4, 1), (7, 5, 1))
    assert found[1].found is None and found[2].expected is None
    # Nothing reported of a prompt, where it was asked, is a difference as well.
    [missing] = differences("packed", cases, reference, {0: replace(same, prompt=[])})
    assert (missing.position, missing.in_prompt, missing.found) == (1, True, None)
