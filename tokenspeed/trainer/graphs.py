"""Parts of a LaunchGraph that keep what they compute: what a trainer replays.

A served graph puts a value where another one that nobody needs any more has been. A trainer reads some values after
the step, so these get places of their own: *relocation* gives every value to keep new bytes behind the arena, and
changes the pointers of the nodes that write or read it. Kernels, numbers, launches and order stay, and so do the bits.

The nodes before the op ``gather_rows`` are the *head*: they run once for a step of whole sequences. The rest is the
*tail*, from the rows that need logits to the sampler. It runs as often as a step has groups of ``num_logit_rows`` rows.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod

from tokenspeed.bucket import Bucket
from tokenspeed.errors import ProgramError
from tokenspeed.graph import Access, Argument, Bytes, LaunchGraph, Node, Pointer, Region
from tokenspeed.graph_verify import writes_inputs
from tokenspeed.step import DTYPE_BYTES, align
from tokenspeed.values import PlacedValue, StepOp, StepValues

TAIL_BEGINS = "gather_rows"
"""Kind of the op that takes the rows which need logits."""
KEPT_ALIGNMENT = 256
ROW_PADDING = 32
"""Kernels may read, and never write, whole tiles of so many rows."""


@dataclass(frozen=True)
class KeptValue:
    """Where a kept value lies in region arena: ``[rows, columns]`` of ``dtype`` at ``offset`` bytes."""

    name: str
    dtype: str
    rows: int
    columns: int
    offset: int

    @property
    def nbytes(self) -> int:
        """With the rows that a kernel may read beyond the last one."""
        return align(self.rows, ROW_PADDING) * self.columns * DTYPE_BYTES[self.dtype]


@dataclass(frozen=True)
class StepParts:
    """The two parts of a bucket's graph, and where they leave the values that were to be kept.

    Attributes:
        head, tail: graphs over the same regions.
        head_ops, tail_ops: the ops that each runs, in order.
        kept: by name.
        arena_bytes: what region arena needs for both.
    """

    head: LaunchGraph
    tail: LaunchGraph
    head_ops: tuple[StepOp, ...]
    tail_ops: tuple[StepOp, ...]
    kept: Mapping[str, KeptValue]
    arena_bytes: int


def split_step(
    graph: LaunchGraph, values: StepValues, bucket: Bucket, arena_bytes: int, keep: Collection[str]
) -> StepParts:
    """Cut the graph of ``bucket`` into head and tail that leave the values ``keep`` in place.

    Args:
        graph: of a mixed bucket.
        values: of the graph's target.
        arena_bytes: of the artifact's region arena.

    Raises:
        ProgramError: the graph has no tail, or a pointer leads into the middle of a value that is kept.
    """
    kept = place_kept([values.values[name] for name in values.values if name in keep], bucket, arena_bytes)
    begins = next((i for i, op in enumerate(values.ops) if op.kind == TAIL_BEGINS), None)
    if begins is None:
        raise ProgramError(f"need a graph with an op {TAIL_BEGINS}, after which only rows that need logits are left")
    tail_ops = values.ops[begins:]
    homes = _Homes(values, kept)
    nodes = [homes.moved(node) for node in graph.nodes]
    names = {op.name for op in values.ops}
    of_tail = {op.name for op in tail_ops}
    ops = [node.name.partition("/")[0] for node in nodes]
    serves_all = [op not in names for op in ops]  # a GPU's first node, which brings the inputs
    head = [i for i, op in enumerate(ops) if serves_all[i] or op not in of_tail]
    tail = [i for i, op in enumerate(ops) if serves_all[i] or op in of_tail]
    end = max((value.offset + value.nbytes for value in kept.values()), default=arena_bytes)
    return StepParts(
        part_of(nodes, head), part_of(nodes, tail), values.ops[:begins], tail_ops, kept, align(end, KEPT_ALIGNMENT)
    )


def place_kept(values: Iterable[PlacedValue], bucket: Bucket, begin: int) -> dict[str, KeptValue]:
    """Places for ``values``, one after another from ``begin`` on, of the rows that ``bucket`` may have."""
    sizes = {"num_tokens": bucket.num_tokens, "num_logit_rows": bucket.num_logit_rows}
    kept: dict[str, KeptValue] = {}
    offset = align(begin, KEPT_ALIGNMENT)
    for value in values:
        rows, *others = value.shape
        columns = prod(n for n in others if isinstance(n, int))
        if str(value.region) != str(Region.ARENA) or not isinstance(rows, str) or rows not in sizes:
            raise ProgramError(f"value {value.name!r}: need rows of the step in region arena to keep, have {value}")
        kept[value.name] = KeptValue(value.name, value.dtype, sizes[rows], columns, offset)
        offset = align(offset + kept[value.name].nbytes, KEPT_ALIGNMENT)
    return kept


def part_of(nodes: Sequence[Node], wanted: Sequence[int]) -> LaunchGraph:
    """The graph of the nodes at the ascending indexes ``wanted``. Who waited for a node that is left out waits for
    those that it waited for."""
    place = {index: i for i, index in enumerate(wanted)}
    before: list[frozenset[int]] = []  # of every node: wanted ones that it needs, through others or itself
    part: list[Node] = []
    for index, node in enumerate(nodes):
        needs = frozenset(n for edge in node.predecessors for n in ((edge,) if edge in place else before[edge]))
        before.append(needs)
        if index in place:
            edges = tuple(sorted(place[n] for n in needs))
            part.append(_started_after_inputs(replace(node, predecessors=edges), part))
    return LaunchGraph(tuple(part))


def _started_after_inputs(node: Node, part: Sequence[Node]) -> Node:
    """``node``, which may not start early if it comes right after one that brings the inputs."""
    if node.launch is None or not any(writes_inputs(part[edge]) for edge in node.predecessors):
        return node
    return replace(node, launch=replace(node.launch, programmatic=False))


class _Homes:
    """Follows, node by node, which value lies at each place of the arena, and where that value is to lie."""

    def __init__(self, values: StepValues, kept: Mapping[str, KeptValue]):
        self._values = values
        self._kept = kept
        self._ops = {op.name: op for op in values.ops}
        self._held: dict[int, str] = {}  # place in the served arena -> the value that was written there last

    def moved(self, node: Node) -> Node:
        op = self._ops.get(node.name.partition("/")[0])
        if op is None:
            return node
        written: dict[int, str] = {}
        outputs = {self._place(name): name for name in op.outputs if self._in_arena(name)}
        args = tuple(self._argument(node, op, outputs, arg, written) for arg in node.args)
        self._held |= written
        return replace(node, args=args)

    def _in_arena(self, name: str) -> bool:
        return self._values.values[name].region == str(Region.ARENA)

    def _place(self, name: str) -> int:
        return self._values.values[name].offset

    def _argument(
        self, node: Node, op: StepOp, outputs: Mapping[int, str], arg: Argument, written: dict[int, str]
    ) -> Argument:
        match arg:
            case Pointer():
                return self._pointer(node, op, outputs, arg, written)
            case Bytes(_, pointers):
                moved = ((at, self._pointer(node, op, outputs, pointer, written)) for at, pointer in pointers)
                return replace(arg, pointers=tuple(moved))
        return arg

    def _pointer(
        self, node: Node, op: StepOp, outputs: Mapping[int, str], pointer: Pointer, written: dict[int, str]
    ) -> Pointer:
        if pointer.region is not Region.ARENA:
            return pointer
        if pointer.writes and pointer.offset in outputs:
            name = outputs[pointer.offset]
            written[pointer.offset] = name
            held = self._held.get(pointer.offset)
            if (
                pointer.access & Access.READ
                and held in (*op.inputs, *op.outputs)
                and self._home(held) != self._home(name)
            ):
                raise ProgramError(
                    f"node {node.name!r}: need {held!r} apart from {name!r}, which it overwrites, to keep one of them"
                )
        else:
            held = self._held.get(pointer.offset)
            if held not in (*op.inputs, *op.outputs):
                self._require_apart(node, op, pointer)
                return pointer  # a workspace
            name = held
        return replace(pointer, offset=self._home(name))

    def _home(self, name: str) -> int:
        return self._kept[name].offset if name in self._kept else self._place(name)

    def _require_apart(self, node: Node, op: StepOp, pointer: Pointer) -> None:
        """Refuse a pointer into a value that moves away."""
        for name in {*op.inputs, *op.outputs} & self._kept.keys():
            begin = self._place(name)
            if begin < pointer.end and pointer.offset < begin + self._kept[name].nbytes:
                raise ProgramError(
                    f"node {node.name!r}: need pointers to the beginning of {name!r}, which is kept, have {pointer}"
                )
