"""Region weights of an artifact, and files that an engine updates it from: a safetensors file with the header of the
artifact's own, and other bytes behind it."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import torch

from tokenspeed.artifact import Artifact, TargetSection
from tokenspeed.errors import ArtifactError, ResourceError

_BLOCK = 16 << 20


def copy_weights(artifact: Artifact, section: TargetSection, file: int) -> None:
    """Write the artifact's region weights to the beginning of an open file."""
    os.truncate(file, section.weights_bytes)
    at = 0
    for block in _blocks(artifact, section):
        at += os.pwrite(file, block, at)


def read_weights_region(artifact: Artifact, section: TargetSection) -> torch.Tensor:
    """The artifact's region weights: uint8."""
    return torch.frombuffer(bytearray().join(_blocks(artifact, section)), dtype=torch.uint8)


def _blocks(artifact: Artifact, section: TargetSection) -> Iterator[bytes]:
    at = artifact.locate(section.weights)
    with at.path.open("rb") as source:
        source.seek(at.offset + section.weights_offset)
        left = section.weights_bytes
        while left:
            block = source.read(min(_BLOCK, left))
            if not block:
                raise ArtifactError(f"{section.weights} is too short: the manifest places weights beyond its end")
            left -= len(block)
            yield block


def write_weights_file(artifact: Artifact, section: TargetSection, region: torch.Tensor, path: Path) -> Path:
    """Write ``region``, on any device, to ``path``, which appears whole or not at all.

    Raises ResourceError when it cannot be written.
    """
    at = artifact.locate(section.weights)
    with at.path.open("rb") as source:
        source.seek(at.offset)
        header = source.read(section.weights_offset)
    try:
        descriptor, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
        try:
            with open(descriptor, "wb") as out:
                out.write(header)
                for begin in range(0, len(region), _BLOCK):
                    out.write(memoryview(region[begin : begin + _BLOCK].cpu().numpy()))
            os.replace(name, path)
        except BaseException:
            os.unlink(name)
            raise
    except OSError as e:
        raise ResourceError(f"cannot write the weights to {path}: {e.strerror}") from None
    return path
