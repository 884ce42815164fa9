"""``tokenspeed inspect`` and ``tokenspeed explain``: what is printed of an artifact's targets and kernels."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from gpu_double import gpu_artifact
from lowered import LIMITS, fused_program
from tiny_llama import tiny_config

from tokenspeed.artifact import DEVICE_ABI, DIGEST, MANIFEST, Artifact
from tokenspeed.cli import main
from tokenspeed.compile.lower import plan_target
from tokenspeed.kernels.registry import Registry
from tokenspeed.target import Target

Run = Callable[..., str]
H200 = Target("cuda", "sm_90a")


@pytest.fixture
def run(capfd: pytest.CaptureFixture[str]) -> Run:
    """What a command prints; with ``code``, what it says on stderr as it ends with that code and prints nothing."""

    def call(*args: str | Path, code: int = 0) -> str:
        capfd.readouterr()
        assert main([str(arg) for arg in args]) == code
        out, err = capfd.readouterr()
        assert (out if code else err) == ""
        return err if code else out

    return call


# ---- inspect --------------------------------------------------------------------------------------------------


def test_inspect(run: Run, tiny_artifact: Path) -> None:
    manifest = json.loads(run("inspect", tiny_artifact, "--json"))
    assert manifest["digest"] == Artifact.open(tiny_artifact).digest and manifest["model"]["num_layers"] == 1
    full = run("inspect", tiny_artifact, "--full")
    for text in (run("inspect", tiny_artifact), full):
        assert "model tiny-llama: llama" in text and "vocabulary 283" in text
        assert f"target {Target.native()}: kernels native ABI" in text
    assert all(name in full for name in manifest["files"])
    graph = manifest["targets"][0]["buckets"][0]["graph"]
    nodes = json.loads(run("inspect", tiny_artifact, "--graph", graph, "--json"))["nodes"]
    listed = run("inspect", tiny_artifact, "--graph", graph).splitlines()
    assert [line.split()[1] for line in listed][-len(nodes) :] == [node["name"] for node in nodes]
    ops = json.loads(run("inspect", tiny_artifact, "--program", "--json"))["ops"]
    names = [line.split()[0] for line in run("inspect", tiny_artifact, "--program").splitlines()]
    assert names == [op["name"] for op in ops]
    refused = run("inspect", tiny_artifact, "--graph", "x", code=2)
    assert refused.startswith("error: the artifact has no graph 'x'\nhint: ") and graph in refused


def test_inspect_sums_up_each_target(run: Run, tiny_artifact: Path, tmp_path: Path) -> None:
    artifact = gpu_artifact(tiny_artifact, tmp_path / "both")
    manifest = Artifact.open(artifact).manifest
    section, text = manifest.targets[1], run("inspect", artifact)
    kinds = [entry.bucket.kind for entry in section.buckets]
    graphs = sum(manifest.files[name].bytes for name in set(section.graphs)) / 1e6
    lines = text[text.index(f"target {H200}: kernels device ABI {DEVICE_ABI}") :].splitlines()
    assert lines[1].startswith(
        f"  buckets   {kinds.count('decode')} decode (tokens: 1 to 8), {kinds.count('mixed')} mixed"
    )
    assert lines[1].endswith(f"; graphs of {graphs:.2f} MB")
    assert lines[2] == "  binaries  1 of 0.00 MB"
    assert lines[3] == f"  weights   {section.weights_bytes / 1e6:.2f} MB in {section.weights}"
    assert lines[4].startswith("  memory    arena ") and lines[4].endswith(f"{section.kv_page_bytes / 1e6:.2f} MB")
    assert "  binaries" not in text[: text.index(f"target {H200}")]  # a CPU's target has none
    assert text.splitlines()[-1].startswith(f"{len(manifest.files)} files of ")
    assert not any(name in text for name in section.graphs)
    assert len(text.splitlines()) < 40 < len(run("inspect", artifact, "--full").splitlines())


# ---- explain --------------------------------------------------------------------------------------------------


def test_explain(run: Run, tiny_artifact: Path) -> None:
    text = run("explain", tiny_artifact)
    assert text.startswith(f"target {Target.native()} (features required: none)\n")
    assert "chosen    " in text and "rejected  " in text and "dtype: need float32, serves bfloat16" in text
    assert "launches" not in text and "a row for each token)" in text and "a row for each logit row)" in text
    assert "rows=" not in text
    found = json.loads(run("explain", tiny_artifact, "--op", "linear", "--json"))["targets"]
    assert {d["op"] for d in found[0]["decisions"]} == {"linear"}
    assert all(d["chosen"].startswith("linear_f32_") for d in found[0]["decisions"])
    assert all(d["launches"] == [] for d in found[0]["decisions"])
    refused = run("explain", tiny_artifact, "--op", "conv", code=2)
    assert refused.startswith("error: nothing matches\nhint: ") and "the ops are adjust_logits, embedding" in refused
    assert f"the targets are {Target.native()}" in run("explain", tiny_artifact, "--target", "cpu:z80", code=2)


def with_report(artifact: Path, path: Path, report: Any) -> Path:
    """A copy of the artifact with another selection report."""
    shutil.copytree(artifact, path)
    data = json.dumps(report).encode()
    (path / "selection.json").write_bytes(data)
    manifest = json.loads((path / MANIFEST).read_text())
    manifest["files"]["selection.json"] = {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    raw = json.dumps(manifest).encode()
    (path / MANIFEST).write_bytes(raw)
    (path / DIGEST).write_text(hashlib.sha256(raw).hexdigest() + "\n")
    return path


def gpu_report(**pinned: str) -> Any:
    pytest.importorskip("triton")
    from tokenspeed.kernels.flashinfer_specs import flashinfer_specs
    from tokenspeed.kernels.triton_specs import triton_registry

    program = fused_program(replace(tiny_config(), head_dim=64, intermediate_size=64), "bfloat16")
    registry = Registry([*triton_registry().specs, *flashinfer_specs(None)])
    plan = plan_target(program, H200, LIMITS, registry, split_positions=64, pinned=pinned)
    return {"targets": [plan.selection.to_json()]}


def test_explain_names_what_a_gpu_launches(run: Run, tiny_artifact: Path, tmp_path: Path) -> None:
    report = gpu_report()
    artifact = with_report(tiny_artifact, tmp_path / "a", report)
    text = run("explain", artifact, "--op", "linear")
    for decision in report["targets"][0]["decisions"]:
        assert [b for launch in decision["launches"] for b in launch["buckets"]] == decision["buckets"]
    decision = next(d for d in report["targets"][0]["decisions"] if d["op"] == "linear")
    assert len(decision["launches"]) > 1  # tiles differ with the rows
    for launch in decision["launches"]:
        (kernel,) = launch["kernels"]
        constants = ", ".join(f"{name}={value}" for name, value in kernel["constants"].items())
        shape = f"{constants}; {kernel['num_warps']} warps, {kernel['num_stages']} stages"
        assert f"  launches  linear[{shape}]  in {', '.join(launch['buckets'])}\n" in text
        assert "BLOCK_N=" in constants
    one = run("explain", artifact, "--op", "gather_rows")
    assert one.count("  launches  gather_rows[") == 1 and "  in " not in one  # the same in every bucket


def test_explain_names_what_a_library_is_asked(run: Run, tiny_artifact: Path, tmp_path: Path) -> None:
    artifact = with_report(tiny_artifact, tmp_path / "a", gpu_report(paged_attention="flashinfer"))
    text = run("explain", artifact, "--op", "paged_attention")
    assert (
        "  launches  tokenspeed_flashinfer_decode_plan[TOKENSPEED_GROUP=2, TOKENSPEED_HEAD_DIM=64, num_seqs=1" in text
    )
    assert "  launches  tokenspeed_flashinfer_prefill[" in text and "warps" not in text


def test_explain_of_an_older_build_and_of_a_malformed_one(run: Run, tiny_artifact: Path, tmp_path: Path) -> None:
    report = gpu_report()
    decision = report["targets"][0]["decisions"][0]
    for number, (launches, text) in enumerate(
        (
            (5, "decisions[0].launches must be a list, not 5"),
            ([{"buckets": []}], "decisions[0].launches[0] lacks 'kernels'"),
            ([{"buckets": [], "kernels": [{"function": "f", "constants": {}, "num_warps": "4"}]}],
             "launches[0].kernels[0].num_warps must be a whole number, not '4'"),
        )
    ):  # fmt: skip
        decision["launches"] = launches
        assert text in run("explain", with_report(tiny_artifact, tmp_path / str(number), report), code=7)
    for other in report["targets"][0]["decisions"]:
        del other["launches"]
    decision["sizes"]["rows"] = 7
    text = run("explain", with_report(tiny_artifact, tmp_path / "old", report))
    assert "launches" not in text and "rows=7)" in text
