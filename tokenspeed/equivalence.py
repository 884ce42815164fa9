"""``equivalence.json`` of an artifact: which kernels were shown to give equal bits, on what and where.

A build with ``numerics = rl-bitwise`` writes it: for every target, and every op that sums, the bitwise equivalence
class whose members serve the op, with the proof (docs/equivalence.md). Other artifacts have none.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tokenspeed.artifact import Artifact
from tokenspeed.errors import ArtifactError
from tokenspeed.values import read_values

FILE = "equivalence.json"
PROVEN_BY = ("build", "table")
"""``build``: the machine that built the artifact compared them; ``table``: kernels/tuning/<arch>.classes.json."""
SUMMING = ("linear", "linear_add", "linear_silu_mul", "paged_attention", "rms_norm", "sample")
"""Kinds of op whose bits depend on an order; the others add nothing up, and need no proof."""
_REASON = {"member": dict, "reason": str}
_CLASS = {
    "op": str, "dtype": str, "key": {...: int}, "members": [dict], "used": [dict], "instead_of": [dict],
    "outside": [_REASON], "shapes": [str], "probes": dict, "rows": int, "functions": [str], "source": str,
    "compiler": str, "device": str, "driver": str, "date": str, "proven_by": str,
}  # fmt: skip
_FORM = {"targets": [{"target": str, "classes": [_CLASS]}]}


def read_equivalence(artifact: Artifact) -> dict[str, list[Mapping[str, Any]]]:
    """The classes of each target, by its name; nothing for an artifact that promises none.

    Raises ArtifactError for a file that is missing though it is promised, damaged, or that contradicts itself.
    """
    manifest = artifact.manifest
    if FILE not in manifest.files:
        if manifest.envelope.numerics == "rl-bitwise":
            raise ArtifactError(
                f"{artifact.path}: {FILE} is missing, which numerics = rl-bitwise promises", hint="rebuild the artifact"
            )
        return {}
    raw = artifact.read_json(FILE, _FORM)
    found: dict[str, list[Mapping[str, Any]]] = {entry["target"]: entry["classes"] for entry in raw["targets"]}
    targets, named = (sorted(t) for t in ({s.target for s in manifest.targets}, (e["target"] for e in raw["targets"])))
    if named != targets:
        raise _malformed(artifact, f"need the targets {', '.join(targets)}, have {', '.join(named) or 'none'}")
    for target, classes in found.items():
        for proven in classes:
            where = f"{target}, {proven['op']} {proven['dtype']}"
            if proven["proven_by"] not in PROVEN_BY:
                raise _malformed(artifact, f"{where}: proven_by is {proven['proven_by']!r}")
            if not proven["used"] or any(member not in proven["members"] for member in proven["used"]):
                raise _malformed(artifact, f"{where}: what is used is not in the class")
            if proven["rows"] <= 0 or not proven["shapes"]:
                raise _malformed(artifact, f"{where}: nothing was compared")
    for section in manifest.targets:
        have = {proven["op"] for proven in found[section.target]}
        missing = sorted({op.kind for op in read_values(artifact, section).ops if op.kind in SUMMING} - have)
        if missing:
            raise _malformed(artifact, f"{section.target}: need a class for op {missing[0]}, have none")
    return found


def _malformed(artifact: Artifact, what: str) -> ArtifactError:
    return ArtifactError(f"{artifact.path}: {FILE} is malformed: {what}", hint="rebuild the artifact")
