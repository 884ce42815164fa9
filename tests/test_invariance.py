"""The invariance harness on tiny models: an honest artifact passes every leg, one whose attention splits by occupancy
fails, and the op is named."""

from __future__ import annotations

import json
import runpy
from pathlib import Path
from typing import Any

import pytest
from tiny_artifact import cli, tiny, write_checkpoint

from tokenspeed.compile.build import build
from tokenspeed.runtime.invariance.plan import LEGS

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
    assert result["buckets_not_run"] == []
    assert Path(result["attestation"]).is_file() and result["not_attested"] == []


def test_split_by_occupancy_is_found_and_named(faulty: Path) -> None:
    done = cli("invariance", faulty, *SMALL, "--json")
    assert done.returncode == 12, done.stdout + done.stderr
    result = json.loads(done.stdout)
    assert not result["passed"] and result["attestation"] is None
    culprit = result["culprit"]
    assert (culprit["kind"], culprit["op"], culprit["value"]) == ("paged_attention", *["layers.0.attention"] * 2)
    # Up to one split there is nothing to merge: the fault shows at the first position behind it.
    assert culprit["position"] == FIELDS["split_positions"] <= result["divergence"]["position"]
    assert 0 < culprit["num_different"] <= culprit["num_elements"] == 64
    assert 0 < culprit["largest_difference"] < 1e-2
    few, many = culprit["reference"], culprit["leg"]
    assert few["bucket"] != many["bucket"] and few["kernels"][0].startswith("paged_attention")


def test_a_part_is_reported_and_not_attested(checkpoint: Path, honest: Path) -> None:
    target = checkpoint.parent / f"{honest.name}.attestations"
    before = {path: path.read_bytes() for path in target.iterdir()}
    done = cli("invariance", honest, "--prompts", "4", "--tokens", "8", "--legs", "packed,chunks")
    assert done.returncode == 0, done.stderr
    assert "equal to the last bit; not attested, as it lacks legs repeated, preempted, cached, process" in done.stdout
    assert "4 prompts of the 8" in done.stdout and "8 tokens a reply of the 16" in done.stdout
    assert before == {path: path.read_bytes() for path in target.iterdir()}
