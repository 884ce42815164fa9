"""A bucket's LaunchGraph op by op: parts that a device runs one after another, so that each one's results can be read
before the next overwrites them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from tokenspeed.artifact import Artifact, TargetSection
from tokenspeed.graph import LaunchGraph, Node
from tokenspeed.values import StepOp, StepValues


@dataclass(frozen=True)
class Slice:
    """Consecutive nodes that serve one op, loaded. ``op`` is the number of the op whose results are whole after it;
    None where they are not yet, or where the nodes serve no op."""

    handle: int
    op: int | None


@dataclass(frozen=True)
class _Part:
    op: int | None
    nodes: tuple[Node, ...]


class SlicedGraphs:
    """The graphs of a target in slices, loaded onto ``device`` when they are first asked for: it must not be sealed."""

    def __init__(self, device: Any, artifact: Artifact, section: TargetSection, values: StepValues):
        self._device = device
        self._artifact = artifact
        self._section = section
        self._numbers = {op.name: i for i, op in enumerate(values.ops)}
        self._slices: dict[int, tuple[Slice, ...]] = {}
        self._graphs: dict[int, LaunchGraph] = {}

    def of(self, bucket: int) -> tuple[Slice, ...]:
        """The slices of a bucket, by its number in the section, in order."""
        if bucket not in self._slices:
            parts = _parts(self.graph(bucket).nodes, self._numbers)
            last = {part.op: i for i, part in enumerate(parts)}
            stride = self._section.kv_page_bytes
            self._slices[bucket] = tuple(
                Slice(
                    int(self._device.load_graph(LaunchGraph(part.nodes).encode(), stride)),
                    part.op if last[part.op] == i else None,
                )
                for i, part in enumerate(parts)
            )
        return self._slices[bucket]

    def graph(self, bucket: int) -> LaunchGraph:
        if bucket not in self._graphs:
            self._graphs[bucket] = LaunchGraph.decode(self._artifact.read(self._section.buckets[bucket].graph))
        return self._graphs[bucket]

    def symbols(self, bucket: int, op: StepOp) -> list[str]:
        """The kernels that compute ``op`` in a bucket."""
        nodes = (node for node in self.graph(bucket).nodes if node.name.partition("/")[0] == op.name)
        return list(dict.fromkeys(node.symbol for node in nodes))


def _parts(nodes: Sequence[Node], numbers: Mapping[str, int]) -> list[_Part]:
    """Runs of nodes of one op; an edge is kept where both of its ends lie in the part."""
    parts: list[_Part] = []
    begin = 0
    for end in range(1, len(nodes) + 1):
        op = numbers.get(nodes[begin].name.partition("/")[0])
        if end == len(nodes) or numbers.get(nodes[end].name.partition("/")[0]) != op:
            inside = tuple(
                replace(node, predecessors=tuple(p - begin for p in node.predecessors if p >= begin))
                for node in nodes[begin:end]
            )
            parts.append(_Part(op, inside))
            begin = end
    return parts
