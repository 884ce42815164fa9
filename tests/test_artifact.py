"""The artifact is published whole or not at all, and any flipped byte is noticed."""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path

import pytest

from tokenspeed.artifact import (
    FORMAT_VERSION,
    Artifact,
    BucketEntry,
    Manifest,
    ModelSection,
    StepCost,
    TargetSection,
    choose_target,
)
from tokenspeed.bucket import Bucket, BucketKind
from tokenspeed.envelope import resolve
from tokenspeed.errors import ArtifactError, ResourceError
from tokenspeed.publish import publishing, seal
from tokenspeed.step import IO, STATE, place
from tokenspeed.target import Target

V3, V4 = Target("cpu", "x86-64-v3"), Target("cpu", "x86-64-v4")


def manifest() -> Manifest:
    sizes = {"T": 2, "S": 1, "P": 1, "R": 1, "V": 40, "C": 1}
    io, io_bytes = place(IO, sizes)
    state, state_bytes = place(STATE, sizes)
    section = TargetSection(
        target=str(V3),
        kernel_library="native",
        kernel_abi=1,
        weights="weights/w.safetensors",
        weights_offset=8,
        weights_bytes=64,
        arena_bytes=64,
        kv_page_bytes=64,
        io_bytes=io_bytes,
        io=io,
        state_bytes=state_bytes,
        state=state,
        binaries=(),
        buckets=(BucketEntry(Bucket(BucketKind.DECODE, 1, 1, 1), "graphs/a.tslg"),),
        cost=StepCost(1, 2, 3),
        values="graphs/values.json",
    )
    model = ModelSection("m", "llama", 32, 1, 16, 1, 1, 16, 100, "gguf", "00")
    envelope = resolve(model="m", max_position_embeddings=64, vocab_size=64, default_targets=(V3,))
    return Manifest(FORMAT_VERSION, "0", model, envelope, (section,))


@pytest.fixture
def artifact(tmp_path: Path) -> Path:
    path = tmp_path / "a"
    with publishing(path) as folder:
        (folder / "weights").mkdir()
        (folder / "weights" / "w.safetensors").write_bytes(bytes(range(200)))
        (folder / "graphs").mkdir()
        (folder / "graphs" / "a.tslg").write_bytes(b"graph")
        seal(folder, manifest())
    return path


def test_round_trip(artifact: Path, tmp_path: Path) -> None:
    opened = Artifact.open(artifact)
    assert opened.verify("full") == 205
    assert opened.manifest.targets == manifest().targets
    assert opened.manifest.envelope.to_json() == manifest().envelope.to_json()
    with publishing(tmp_path / "a.tar", archive=True) as folder:
        shutil.copytree(artifact, folder, dirs_exist_ok=True)
    archived = Artifact.open(tmp_path / "a.tar")
    assert archived.digest == opened.digest and archived.verify("full") == 205
    assert archived.read("graphs/a.tslg") == b"graph"


def test_any_flipped_byte_is_noticed(artifact: Path) -> None:
    for path in sorted(p for p in artifact.rglob("*") if p.is_file()):
        original = path.read_bytes()
        for position in range(0, len(original), max(1, len(original) // 40)):
            damaged = bytearray(original)
            damaged[position] ^= 1
            path.write_bytes(damaged)
            with pytest.raises(ArtifactError):
                Artifact.open(artifact).verify("full")
        path.write_bytes(original)
    Artifact.open(artifact).verify("full")


def test_damage_is_named(artifact: Path) -> None:
    weights = artifact / "weights" / "w.safetensors"
    original = weights.read_bytes()
    weights.write_bytes(original[:-1])
    with pytest.raises(ArtifactError, match=r"weights/w.safetensors has 199 bytes; the manifest says 200"):
        Artifact.open(artifact).verify("structure")
    weights.write_bytes(original[:-1] + b"x")
    assert Artifact.open(artifact).verify("quick") == 5  # quick does not hash weights
    with pytest.raises(ArtifactError, match=r"weights/w.safetensors is damaged"):
        Artifact.open(artifact).verify("full")
    weights.unlink()
    with pytest.raises(ArtifactError, match=r"the file weights/w.safetensors is missing"):
        Artifact.open(artifact).verify("structure")
    weights.write_bytes(original)
    (artifact / "extra").write_text("x")
    with pytest.raises(ArtifactError, match="extra is not listed in the manifest"):
        Artifact.open(artifact).verify("full")


def test_no_artifact(tmp_path: Path) -> None:
    with pytest.raises(ArtifactError, match="no artifact at"):
        Artifact.open(tmp_path / "absent")
    with pytest.raises(ArtifactError, match=r"the file manifest.json is missing"):
        Artifact.open(tmp_path)
    (tmp_path / "x.tar").write_bytes(b"no tar")
    with pytest.raises(ArtifactError, match=r"is no artifact: need a directory or an uncompressed \.tar file"):
        Artifact.open(tmp_path / "x.tar")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b"[]", "is not a manifest"),
        (b"{}", "is not a manifest"),
        (b'{"format_version": 99}', "format version 99; this TokenSpeed reads version 3"),
        (b'{"format_version": 3}', "manifest.json is malformed"),
        (b"\xff\xfe", "is not a manifest"),
    ],
)
def test_malformed_manifests(text: bytes, message: str) -> None:
    with pytest.raises(ArtifactError, match=message):
        Manifest.from_bytes(text)


def test_failure_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(ValueError), publishing(tmp_path / "a") as folder:
        (folder / "half").write_text("x")
        raise ValueError
    assert list(tmp_path.iterdir()) == []


def test_full_disk_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(ResourceError, match="the disk is full while writing"), publishing(tmp_path / "a") as folder:
        (folder / "half").write_text("x")
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    assert list(tmp_path.iterdir()) == []


def test_replacing_needs_force(artifact: Path) -> None:
    with pytest.raises(ArtifactError, match="exists already"), publishing(artifact):
        pass
    with pytest.raises(KeyError), publishing(artifact, force=True):
        raise KeyError
    Artifact.open(artifact).verify("full")  # the failed replacement left the old one in place
    with publishing(artifact, force=True) as folder:
        seal(folder, manifest())
    assert sorted(p.name for p in artifact.iterdir()) == ["DIGEST", "manifest.json"]
    assert [p.name for p in artifact.parent.iterdir()] == ["a"]


def test_choosing_a_target() -> None:
    assert choose_target(manifest(), (V3, V4)).target == str(V3)
    assert choose_target(manifest(), (V3,), V3).target == str(V3)
    with pytest.raises(ArtifactError, match="the artifact was built for cpu:x86-64-v3; this machine runs no target"):
        choose_target(manifest(), ())
    with pytest.raises(ArtifactError, match="this machine cannot run cpu:x86-64-v4"):
        choose_target(manifest(), (V3,), V4)
    with pytest.raises(ArtifactError, match="the artifact holds no target cpu:x86-64-v4"):
        choose_target(manifest(), (V3, V4), V4)
