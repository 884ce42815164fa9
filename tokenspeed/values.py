"""Where the values of a step lie: what lets a part of a LaunchGraph be run and its results be looked at.

An artifact has one ``graphs/<target>/values.json`` per target: the Program's ops in the order in which they run, and
for each of their values its type and its place. A device replays graphs without it; the invariance harness finds the
first op that differs by it, and the trainer its activations.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from tokenspeed.artifact import Artifact, TargetSection
from tokenspeed.errors import ArtifactError
from tokenspeed.graph import Region
from tokenspeed.json_check import record
from tokenspeed.step import PlacedTensor

ROLES = ("input", "weight", "state", "temp", "output")


@dataclass(frozen=True)
class PlacedValue:
    """One value of a step.

    Attributes:
        name: as in the Program; nodes of graphs are named after the ops.
        role: one of ROLES; a weight's place is in ``StepValues.weights``.
        dtype, shape: of the tensor; sizes of the step by name (``num_tokens``), others as numbers.
        region: region of its storage, ``""`` for a weight. A value that overwrites another has its place. What a GPU
            brings from or to the host lies in host_io.
        offset: bytes from the region's begin; in region kv from a page's begin. Rows follow one another closely.
    """

    name: str
    role: str
    dtype: str
    shape: tuple[int | str, ...]
    region: str
    offset: int


@dataclass(frozen=True)
class PackedValue:
    """A weight in the layout of the kernels that read it: ``tensor`` is its name, type and place in region weights."""

    value: str
    layout: str
    tensor: PlacedTensor


@dataclass(frozen=True)
class StepOp:
    """One op: its nodes are named ``name`` or begin with ``name/``. ``attrs`` are numbers and texts."""

    name: str
    kind: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    attrs: Mapping[str, Any]


@dataclass(frozen=True)
class StepValues:
    """The ops of a target's graphs, in order, and their values by name."""

    ops: tuple[StepOp, ...]
    values: Mapping[str, PlacedValue]
    weights: tuple[PackedValue, ...]

    def to_bytes(self) -> bytes:
        """The file: one op, value or weight a line; equal values give equal bytes."""
        parts = {
            "ops": [asdict(op) for op in self.ops],
            "values": [asdict(value) for value in self.values.values()],
            "weights": [asdict(weight) for weight in self.weights],
        }
        return ("{\n" + ",\n".join(_lines(parts)) + "\n}\n").encode()


def _lines(parts: Mapping[str, list[Any]]) -> Iterator[str]:
    for name, items in parts.items():
        rows = ",\n".join(json.dumps(item, separators=(",", ":"), ensure_ascii=False) for item in items)
        yield f'"{name}":[\n{rows}\n]'


_SHAPE = {
    "ops": [{"name": str, "kind": str, "inputs": [str], "outputs": [str], "attrs": {...: object}}],
    "values": [{"name": str, "role": str, "dtype": str, "shape": list, "region": str, "offset": int}],
    "weights": [{"value": str, "layout": str, "tensor": {"name": str, "dtype": str, "shape": [int], "offset": int}}],
}


def read_values(artifact: Artifact, section: TargetSection) -> StepValues:
    """The StepValues of a target. Raises ArtifactError for a damaged file, or one that contradicts itself."""
    raw = artifact.read_json(section.values, _SHAPE)
    try:
        ops = tuple(record(StepOp, op, inputs=tuple(op["inputs"]), outputs=tuple(op["outputs"])) for op in raw["ops"])
        values = {value["name"]: record(PlacedValue, value, shape=tuple(value["shape"])) for value in raw["values"]}
        weights = tuple(
            record(PackedValue, w, tensor=record(PlacedTensor, w["tensor"], shape=tuple(w["tensor"]["shape"])))
            for w in raw["weights"]
        )
        _check(ops, values, weights)
    except (TypeError, ValueError) as e:
        raise ArtifactError(
            f"{artifact.path}: {section.values} is malformed: {e}", hint="rebuild the artifact"
        ) from None
    return StepValues(ops, values, weights)


def _check(
    ops: tuple[StepOp, ...], values: Mapping[str, PlacedValue], weights: tuple[PackedValue, ...]
) -> None:  # fmt: skip
    regions = {*map(str, Region), ""}
    for value in values.values():
        if value.role not in ROLES or value.region not in regions:
            raise ValueError(f"value {value.name!r} is a {value.role!r} in region {value.region!r}")
        if not all(isinstance(n, str) or (type(n) is int and n >= 0) for n in value.shape):
            raise ValueError(f"value {value.name!r} has the shape {value.shape!r}")
    for name in (name for op in ops for name in (*op.inputs, *op.outputs)):
        if name not in values:
            raise ValueError(f"an op has the value {name!r}, which has no place")
    for weight in weights:
        if weight.value not in values:
            raise ValueError(f"a weight is made of the value {weight.value!r}, which there is not")
