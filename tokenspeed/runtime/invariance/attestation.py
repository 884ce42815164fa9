"""Attestations: the record that an artifact passed the invariance harness on a target, signed by its own digest.

They lie beside the artifact, as it is published whole and never changes: ``PATH.attestations/TARGET.json`` for an
artifact at PATH (without ``.tar``). docs/invariance.md explains the fields.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import platform
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tokenspeed import __version__, _native, json_check
from tokenspeed.artifact import DEVICE_LIBRARY, Artifact, TargetSection
from tokenspeed.errors import AttestationError, ResourceError
from tokenspeed.runtime.invariance.plan import LEAST_PROMPTS, LEAST_TOKENS, LEGS
from tokenspeed.target import Target
from tokenspeed.tensor_file import open_at_once

if TYPE_CHECKING:
    from tokenspeed.runtime.invariance.harness import Result

_log = logging.getLogger("tokenspeed.attestation")

VERSION = 1
_MOST_BYTES = 1 << 20
"""Of an attestation, which has some thousand."""
_LEG = {"requests": int, "compared": int, "steps": int, "preemptions": int, "cached_tokens": int, "seconds": float}
_SHAPE: Mapping[str, Any] = {
    "version": int,
    "artifact": str,
    "model": str,
    "numerics": str,
    "target": str,
    "device": str,
    "threads": int,
    "machine": str,
    "tokenspeed": str,
    "kernels": {"library": str, "abi": int, "module_sha256": object},
    "legs": {...: _LEG},
    "buckets_not_run": [str],
    "temperatures": [float],
    "prompts": {"number": int, "tokens": int, "seed": int, "sha256": str},
    "date": str,
    "digest": str,
}


@dataclass(frozen=True)
class Attestation:
    """The contents of an attestation, whose digest is that of all the rest."""

    data: Mapping[str, Any]

    @property
    def digest(self) -> str:
        return str(self.data["digest"])

    @property
    def date(self) -> str:
        return str(self.data["date"])


@dataclass(frozen=True)
class Standing:
    """What proves that a loaded artifact keeps its promise of equal bits: an attestation, whose ``digest`` and ``date``
    these are, or nothing; then ``unattested`` is why it was loaded all the same, and ``missing`` what was wrong."""

    digest: str = ""
    date: str = ""
    unattested: str = ""
    missing: str = ""


def standing_of(artifact: Artifact, section: TargetSection, unattested: str | None) -> Standing:
    """How an artifact that promises equal bits stands on a target. Without proof and without a reason to do without
    (``unattested``) it is refused with AttestationError."""
    try:
        found = require(artifact, section)
    except AttestationError as e:
        if unattested is None:
            raise
        _log.warning("%s; loaded all the same: %s", e.message, unattested)
        return Standing(unattested=unattested, missing=e.message)
    return Standing(digest=found.digest, date=found.date)


def path_of(artifact: Path, target: str) -> Path:
    """Where the attestation of the artifact at ``artifact`` for ``target`` lies."""
    place = artifact.resolve()
    name = place.name.removesuffix(".tar")
    return place.with_name(f"{name}.attestations") / f"{Target.parse(target).path_name}.json"


def lacks(result: Result) -> tuple[str, ...]:
    """Why a run proves too little for an attestation, whatever it found; nothing if it does not."""
    legs = [leg.name for leg in result.legs]
    missing = [leg for leg in LEGS if leg not in legs]
    found = []
    if missing:
        found.append(f"it lacks leg{'s' if len(missing) > 1 else ''} {', '.join(missing)}")
    if result.num_prompts < LEAST_PROMPTS:
        found.append(f"it has {result.num_prompts} prompts of the {LEAST_PROMPTS} that are needed")
    if result.plan.tokens < LEAST_TOKENS:
        found.append(f"it has {result.plan.tokens} tokens a reply of the {LEAST_TOKENS} that are needed")
    found += [f"in leg {leg.name} {leg.problem}" for leg in result.legs if leg.problem is not None]
    return tuple(found)


def attest(result: Result) -> Attestation | None:
    """The attestation of a run that passed; None if it proves too little."""
    assert result.passed
    if lacks(result):
        return None
    manifest = result.artifact.manifest
    data: dict[str, Any] = {
        "version": VERSION,
        "artifact": result.artifact.digest,
        "model": manifest.envelope.model,
        "numerics": manifest.envelope.numerics,
        "target": result.section.target,
        "device": result.device,
        "threads": result.threads,
        "machine": machine(),
        "tokenspeed": __version__,
        "kernels": kernels(result.section),
        "legs": {leg.name: {name: getattr(leg, name) for name in _LEG} for leg in result.legs},
        "buckets_not_run": result.buckets_not_run,
        "temperatures": [0.0, 1.0],
        "prompts": {
            "number": result.num_prompts, "tokens": result.plan.tokens, "seed": result.plan.seed,
            "sha256": result.prompts_sha256,
        },
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
    }  # fmt: skip
    return Attestation({**data, "digest": _digest(data)})


def kernels(section: TargetSection) -> dict[str, Any]:
    """The library of a target's kernels, and for one that is part of the native module that file's digest: the code
    that was proven. A GPU's kernels are in the artifact."""
    in_module = section.kernel_library != DEVICE_LIBRARY
    return {
        "library": section.kernel_library,
        "abi": section.kernel_abi,
        "module_sha256": _sha256(Path(_native.__file__)) if in_module else None,
    }


def machine() -> str:
    """The processor, for people."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor() or platform.machine())


def write(attestation: Attestation, artifact: Path) -> Path:
    """Put ``attestation`` beside the artifact, in place of an older one; returns its path. Raises ResourceError."""
    path = path_of(artifact, str(attestation.data["target"]))
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with temporary.open("w", encoding="utf-8") as out:
            out.write(json.dumps(attestation.data, indent=1, ensure_ascii=False) + "\n")
            out.flush()
            os.fsync(out.fileno())
        temporary.replace(path)
    except OSError as e:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise ResourceError(
            f"the harness passed, but its attestation cannot be written to {path}: {e.strerror}",
            hint="make the folder beside the artifact writable",
        ) from None
    return path


def revoke(artifact: Path, target: str) -> Path | None:
    """Remove the attestation of an artifact whose bits differ after all; returns its path if there was one. Raises
    ResourceError."""
    path = path_of(artifact, target)
    try:
        path.unlink()
    except FileNotFoundError:
        return None
    except OSError as e:
        raise ResourceError(
            f"bits differ, but the attestation {path} cannot be removed: {e.strerror}", hint="remove it yourself"
        ) from None
    return path


def require(artifact: Artifact, section: TargetSection) -> Attestation:
    """The attestation of an artifact for a target. Raises AttestationError unless there is a valid one."""
    path = path_of(artifact.path, section.target)
    data = _read(path, section)
    have = kernels(section)
    for what, needed, found in (
        ("artifact", artifact.digest, data["artifact"]),
        ("target", section.target, data["target"]),
        ("kernel library", _name(have), _name(data["kernels"])),
    ):
        if needed != found:
            raise _refused(f"{path} attests another {what}: need {_short(needed)}, have {_short(found)}")
    return Attestation(data)


def _read(path: Path, section: TargetSection) -> dict[str, Any]:
    try:
        with open(path, "rb", opener=open_at_once) as file:
            raw = file.read(_MOST_BYTES + 1)
    except FileNotFoundError:
        raise _refused(f"need {path} for {section.target}, have no such file") from None
    except OSError as e:
        raise _refused(f"{path} cannot be read: {e.strerror}") from None
    if len(raw) > _MOST_BYTES:
        raise _refused(f"{path} is no attestation: it has more than {_MOST_BYTES} bytes")
    try:
        data = json_check.parse(raw)
        json_check.check(data, _SHAPE)
    except (ValueError, RecursionError) as e:
        raise _refused(f"{path} is no attestation: {e}") from None
    if data["version"] != VERSION:
        raise _refused(f"{path} has version {data['version']}, this TokenSpeed reads version {VERSION}")
    if _digest({name: value for name, value in data.items() if name != "digest"}) != data["digest"]:
        raise _refused(f"{path} was damaged or edited: its digest is not that of its contents")
    missing = [leg for leg in LEGS if leg not in data["legs"]]
    if missing:
        raise _refused(f"{path} lacks leg {missing[0]}")
    number, tokens = data["prompts"]["number"], data["prompts"]["tokens"]
    if number < LEAST_PROMPTS or tokens < LEAST_TOKENS:
        raise _refused(
            f"{path} proves too little: need {LEAST_PROMPTS} prompts of {LEAST_TOKENS} tokens or more, have {number} of"
            f" {tokens}"
        )
    return dict(data)


def _refused(reason: str) -> AttestationError:
    return AttestationError(
        f"the artifact promises equal bits (numerics = rl-bitwise), and nothing proves it here: {reason}",
        hint="run `tokenspeed invariance ARTIFACT` on this kind of machine, or serve it without proof with --unattested"
        " REASON, which is recorded",
    )


def _digest(data: Mapping[str, Any]) -> str:
    text = json.dumps(data, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return hashlib.sha256(text.encode()).hexdigest()


def _sha256(path: Path) -> str:
    with path.open("rb") as f:
        return hashlib.file_digest(f, "sha256").hexdigest()


def _name(kernels: Mapping[str, Any]) -> str:
    module = kernels["module_sha256"]
    return f"{kernels['library']} ABI {kernels['abi']}" + (f", module {module}" if module else "")


def _short(text: str) -> str:
    return text if len(text) <= 90 else f"{text[:90]}..."
