"""An artifact that promises equal bits is served where an attestation proves it, or where somebody says why not."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from gpu_double import gpu_artifact
from test_serve_process import READY
from tiny_artifact import cli, cli_environment, command, tiny, write_checkpoint

from tokenspeed import _native
from tokenspeed.artifact import DEVICE_ABI, Artifact
from tokenspeed.compile.build import build
from tokenspeed.errors import AttestationError
from tokenspeed.runtime.engine import load
from tokenspeed.runtime.invariance.attestation import kernels, path_of, require
from tokenspeed.runtime.invariance.plan import LEGS
from tokenspeed.runtime.loader import LoadOptions
from tokenspeed.target import Target

NEEDED = "the artifact promises equal bits (numerics = rl-bitwise), and nothing proves it here: "
ATTESTED = LoadOptions(attested=True, kv_gib=0.02)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("attestation") / "tiny", tiny())


@pytest.fixture(scope="module")
def proven(checkpoint: Path) -> Path:
    """An artifact with its attestation. Not to be changed."""
    path = checkpoint.parent / "proven"
    build(
        checkpoint, path, dtype="float32", numerics="rl-bitwise", max_num_seqs=16, max_model_len=512,
        max_prefill_tokens=256, page_size=32, split_positions=32,
    )  # fmt: skip
    done = cli("invariance", path, "--prompts", "12", "--tokens", "40", "--seed", "3")
    assert done.returncode == 0 and "attested in" in done.stdout, done.stdout + done.stderr
    return path


@pytest.fixture
def artifact(proven: Path, tmp_path: Path) -> Path:
    """A copy of it and its attestation."""
    place = tmp_path / "copy"
    shutil.copytree(proven, place)
    shutil.copytree(proven.with_name("proven.attestations"), tmp_path / "copy.attestations")
    return place


def attestation_of(artifact: Path) -> Path:
    [path] = artifact.with_name(f"{artifact.name}.attestations").iterdir()
    return path


def sign(data: dict[str, Any]) -> dict[str, Any]:
    """With the digest that belongs to it, made here from what the documentation says."""
    rest = {name: value for name, value in data.items() if name != "digest"}
    text = json.dumps(rest, sort_keys=True, separators=(",", ":"))
    return {**rest, "digest": hashlib.sha256(text.encode()).hexdigest()}


def test_what_an_attestation_says(proven: Path) -> None:
    opened = Artifact.open(proven)
    path = attestation_of(proven)
    data = json.loads(path.read_text())
    [section] = opened.manifest.targets
    assert path == path_of(proven, section.target) == path_of(proven.with_name("proven.tar"), section.target)
    assert path.name == f"{section.target.replace(':', '-')}.json"
    assert data == sign(data)
    assert (data["artifact"], data["target"], data["numerics"]) == (opened.digest, section.target, "rl-bitwise")
    module = hashlib.sha256(Path(_native.__file__).read_bytes()).hexdigest()
    assert data["kernels"] == {"library": "native", "abi": _native.KERNEL_ABI, "module_sha256": module}
    assert list(data["legs"]) == list(LEGS) and data["temperatures"] == [0.0, 1.0]
    assert {name: data["prompts"][name] for name in ("number", "tokens", "seed")} == {
        "number": 12, "tokens": 40, "seed": 3,
    }  # fmt: skip
    assert data["legs"]["preempted"]["preemptions"] > 0 and data["legs"]["packed"]["requests"] == 24


def test_serving_with_an_attestation(artifact: Path) -> None:
    with load(artifact, options=ATTESTED) as engine:
        data = json.loads(attestation_of(artifact).read_text())
        assert engine.info.attestation == {"digest": data["digest"], "date": data["date"]}


def test_others_do_not_ask(artifact: Path, tiny_artifact: Path) -> None:
    """`run`, `bench` and tokenspeed.load: they are how an artifact is tried. Nor is `auto` a promise."""
    attestation_of(artifact).unlink()
    for path, options in ((artifact, LoadOptions(kv_gib=0.02)), (tiny_artifact, ATTESTED)):
        with load(path, options=options) as engine:
            assert engine.info.attestation == {}


def damaged(data: dict[str, Any]) -> str:
    return json.dumps(data)[:-30]


def edited(data: dict[str, Any]) -> str:
    return json.dumps({**data, "prompts": {**data["prompts"], "number": 4096}})


def of_another_artifact(data: dict[str, Any]) -> str:
    return json.dumps(sign({**data, "artifact": "0" * 64}))


def of_another_target(data: dict[str, Any]) -> str:
    return json.dumps(sign({**data, "target": "cuda:sm_90a"}))


def of_another_module(data: dict[str, Any]) -> str:
    return json.dumps(sign({**data, "kernels": {**data["kernels"], "module_sha256": "ab" * 32}}))


def of_another_abi(data: dict[str, Any]) -> str:
    return json.dumps(sign({**data, "kernels": {**data["kernels"], "abi": 1}}))


def partial(data: dict[str, Any]) -> str:
    return json.dumps(sign({**data, "legs": {"alone": data["legs"]["alone"]}}))


def of_few_prompts(data: dict[str, Any]) -> str:
    return json.dumps(sign({**data, "prompts": {**data["prompts"], "number": 1}}))


def of_another_version(data: dict[str, Any]) -> str:
    return json.dumps(sign({**data, "version": 99}))


def without_a_field(data: dict[str, Any]) -> str:
    return json.dumps(sign({name: value for name, value in data.items() if name != "kernels"}))


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (damaged, "is no attestation: "),
        (edited, "was damaged or edited: its digest is not that of its contents"),
        (of_another_artifact, "attests another artifact: need "),
        (of_another_target, "attests another target: need cpu:"),
        (of_another_module, "attests another kernel library: need native ABI "),
        (of_another_abi, "have native ABI 1"),
        (partial, "lacks leg packed"),
        (of_few_prompts, "proves too little: need 8 prompts of 16 tokens or more, have 1 of 40"),
        (of_another_version, "has version 99, this TokenSpeed reads version 1"),
        (without_a_field, "lacks 'kernels'"),
    ],
)
def test_one_that_does_not_hold_is_refused(
    artifact: Path, change: Callable[[dict[str, Any]], str], reason: str
) -> None:
    path = attestation_of(artifact)
    path.write_text(change(json.loads(path.read_text())))
    with pytest.raises(AttestationError) as refused:
        load(artifact, options=ATTESTED)
    assert refused.value.message.startswith(NEEDED) and reason in refused.value.message
    assert refused.value.hint is not None and "tokenspeed invariance" in refused.value.hint


def test_what_is_no_file_is_refused_at_once(artifact: Path) -> None:
    """A pipe would wait for its writer, and a file may be larger than memory."""
    path = attestation_of(artifact)
    path.unlink()
    for make, reason in (
        (os.mkfifo, "is no attestation"),
        (Path.mkdir, "cannot be read: Is a directory"),
        (lambda path: path.symlink_to(path.name), "cannot be read: Too many levels"),
        (lambda path: os.truncate(os.open(path, os.O_CREAT | os.O_RDWR), 1 << 40), "has more than 1048576 bytes"),
    ):
        make(path)
        with pytest.raises(AttestationError, match=reason):
            load(artifact, options=ATTESTED)
        path.rmdir() if path.is_dir() else path.unlink()


def test_one_that_cannot_be_written(artifact: Path) -> None:
    """What was found is told all the same, and nothing is left behind."""
    path = attestation_of(artifact)
    path.unlink()
    path.mkdir()
    done = cli("invariance", artifact, "--prompts", "12", "--tokens", "40", "--seed", "3", "--json")
    found = json.loads(done.stdout)
    assert found["passed"] and found["attestation"] is None and "cannot be written" in found["not_attested"][0]
    assert done.returncode == 9 and f"cannot be written to {path}: Is a directory" in done.stderr
    assert list(path.parent.iterdir()) == [path]


def test_serve_refuses_without_one(artifact: Path) -> None:
    attestation_of(artifact).unlink()
    done = cli("serve", artifact, "--port", "0")
    assert done.returncode == AttestationError.exit_code
    assert f"error: {NEEDED}need " in done.stderr and ", have no such file" in done.stderr
    assert "hint: run `tokenspeed invariance ARTIFACT`" in done.stderr and "--unattested REASON" in done.stderr


def test_a_reason_is_recorded(artifact: Path) -> None:
    """In the log, in /get_server_info and in a metric."""
    attestation_of(artifact).unlink()
    args = command("serve", artifact, "--port", "0", "--kv-gib", "0.01", "--unattested", "a trial of 30 November")
    process = subprocess.Popen(args, stderr=subprocess.PIPE, text=True, env=cli_environment())
    try:
        assert process.stderr is not None
        log = [process.stderr.readline(), process.stderr.readline()]
        assert log[0].startswith(NEEDED) and log[0].endswith("; loaded all the same: a trial of 30 November\n")
        ready = READY.fullmatch(log[1])
        assert ready, log
        found = httpx.get(f"{ready[3]}/get_server_info").json()["engine"]["attestation"]
        assert found["unattested"] == "a trial of 30 November" and "have no such file" in found["missing"]
        metrics = httpx.get(f"{ready[3]}/metrics").text.splitlines()
        [line] = [line for line in metrics if line.startswith("tokenspeed:attested{")]
        assert 'unattested="a trial of 30 November"' in line and line.endswith(" 0.0")
    finally:
        process.terminate()
        process.communicate(timeout=30)


def test_what_is_proven_needs_no_reason(artifact: Path) -> None:
    with load(artifact, options=LoadOptions(attested=True, unattested="just in case", kv_gib=0.01)) as engine:
        assert "digest" in engine.info.attestation and "unattested" not in engine.info.attestation


@pytest.mark.parametrize("reason", ["", "  ", "two\nlines"])
def test_a_reason_says_something(artifact: Path, reason: str) -> None:
    done = cli("serve", artifact, "--unattested", reason)
    assert done.returncode == 2 and "--unattested is" in done.stderr


def test_kernels_of_a_gpu_are_the_artifacts_own(proven: Path, tmp_path: Path) -> None:
    artifact = Artifact.open(gpu_artifact(proven, tmp_path / "gpu"))
    section = artifact.manifest.section(Target.parse("cuda:sm_90a"))
    assert kernels(section) == {"library": "device", "abi": DEVICE_ABI, "module_sha256": None}
    with pytest.raises(AttestationError, match=r"need .*gpu\.attestations/cuda-sm_90a\.json for cuda:sm_90a, have no"):
        require(artifact, section)
