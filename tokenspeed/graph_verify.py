"""The static verifier of LaunchGraphs: a proof over the data that replaying a graph is safe."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tokenspeed.errors import ProgramError
from tokenspeed.graph import POINTER_ALIGNMENT, LaunchGraph, Node, Pointer, Region, StepScalar
from tokenspeed.step import STEP_SCALARS


def ancestor_sets(predecessors: Sequence[Sequence[int]]) -> list[int]:
    """For each node the bit set of the nodes that finish before it starts (bit i is node i)."""
    ancestors: list[int] = []
    for edges in predecessors:
        reached = 0
        for edge in edges:
            reached |= ancestors[edge] | 1 << edge
        ancestors.append(reached)
    return ancestors


def verify_graph(graph: LaunchGraph, region_sizes: Mapping[Region, int], kv_page_stride: int) -> None:
    """Prove that ``graph`` is safe to replay over regions of the given sizes (bytes).

    Every access lies inside its region (in kv: inside one page of ``kv_page_stride`` bytes), weights are
    only read, edges point backwards, names are unique, and of two nodes that touch the same bytes, one of
    them writing, one runs after the other. A programmatic node may read region io before it waits, so none comes
    right after a node that writes there. Raises ProgramError naming node and argument.
    """
    names: set[str] = set()
    for index, node in enumerate(graph.nodes):
        if not node.name or node.name in names:
            raise ProgramError(f"node {index}: need a unique name, have {node.name!r}")
        names.add(node.name)
        if not node.symbol:
            raise ProgramError(f"node {node.name!r}: need the symbol of a kernel, have an empty one")
        _check_edges(index, node)
        for position, arg in enumerate(node.args):
            if isinstance(arg, StepScalar) and not 0 <= arg.index < len(STEP_SCALARS):
                raise ProgramError(
                    f"node {node.name!r} arg {position}: need a step scalar below {len(STEP_SCALARS)}, have {arg.index}"
                )
        for position, pointer in node.pointers():
            _check_pointer(f"node {node.name!r} arg {position}", pointer, region_sizes, kv_page_stride)
        _check_aliases(node)
    _check_early_reads(graph)
    _check_order(graph)


def _check_edges(index: int, node: Node) -> None:
    previous = -1
    for edge in node.predecessors:
        if not previous < edge < index:
            raise ProgramError(
                f"node {node.name!r}: need predecessors in ascending order, each before node {index}, "
                f"have {list(node.predecessors)}"
            )
        previous = edge


def _check_pointer(where: str, arg: Pointer, sizes: Mapping[Region, int], kv_page_stride: int) -> None:
    have = sizes.get(arg.region, 0)
    limit, unit = (min(have, kv_page_stride), "page of region kv") if arg.region is Region.KV else (have, "")
    if not arg.access:
        raise ProgramError(f"{where}: need read or write access, have neither")
    if arg.writes and arg.region is Region.WEIGHTS:
        raise ProgramError(f"{where}: need read-only access to region weights, have {arg}")
    if arg.offset < 0 or arg.extent <= 0 or arg.offset % POINTER_ALIGNMENT:
        raise ProgramError(f"{where}: need a positive extent at a multiple of {POINTER_ALIGNMENT} bytes, have {arg}")
    if arg.end > limit:
        raise ProgramError(f"{where}: need {arg.end} bytes of {unit or f'region {arg.region}'}, have {limit} ({arg})")


def _check_aliases(node: Node) -> None:
    """Inside one node, bytes that are written may be those of another argument only as a whole (in place)."""
    pointers = list(node.pointers())
    for n, (i, a) in enumerate(pointers):
        for j, b in pointers[n + 1 :]:
            if a.region != b.region or not (a.writes or b.writes) or a.offset == b.offset:
                continue
            if a.offset < b.end and b.offset < a.end:
                raise ProgramError(
                    f"node {node.name!r}: need args {i} and {j} apart or at one offset, have {a} and {b}: "
                    f"it would write what it still reads"
                )


def writes_inputs(node: Node) -> bool:
    """Whether ``node`` writes to region io, where kernels read a step's inputs before they wait for others."""
    return any(pointer.writes and pointer.region is Region.IO for _, pointer in node.pointers())


def _check_early_reads(graph: LaunchGraph) -> None:
    """Whoever starts right after inputs were written starts when all of them are there; the rest start after it."""
    writers = {index for index, node in enumerate(graph.nodes) if node.launch is not None and writes_inputs(node)}
    for node in graph.nodes:
        if node.launch is not None and node.launch.programmatic and not writers.isdisjoint(node.predecessors):
            before = graph.nodes[min(writers.intersection(node.predecessors))]
            raise ProgramError(
                f"node {node.name!r}: need a launch that is not programmatic after node {before.name!r}, which writes "
                f"region io: a kernel may read there before it waits"
            )


def _check_order(graph: LaunchGraph) -> None:
    """No two unordered nodes touch the same bytes with a write.

    Bytes are cut at the ends of all accesses; inside a piece, every writer must be ordered with every other
    node that touches it. Sets of nodes are bits of integers, so a piece costs one operation a writer.
    """
    before = ancestor_sets([node.predecessors for node in graph.nodes])
    after = [0] * len(before)
    for index, reached in enumerate(before):
        while reached:
            low = reached & -reached
            after[low.bit_length() - 1] |= 1 << index
            reached ^= low
    for region in Region:
        accesses = [(i, p) for i, node in enumerate(graph.nodes) for _, p in node.pointers() if p.region is region]
        if any(p.writes for _, p in accesses):
            _check_region_order(graph, accesses, before, after)


def _check_region_order(
    graph: LaunchGraph, accesses: list[tuple[int, Pointer]], before: list[int], after: list[int]
) -> None:
    starts: dict[int, list[int]] = {}
    ends: dict[int, list[int]] = {}
    for number, (_, pointer) in enumerate(accesses):
        starts.setdefault(pointer.offset, []).append(number)
        ends.setdefault(pointer.end, []).append(number)
    live: set[int] = set()
    for cut in sorted(starts.keys() | ends.keys()):
        live.difference_update(ends.get(cut, ()))
        live.update(starts.get(cut, ()))
        if cut not in starts:  # fewer accesses than in the piece before: nothing new can conflict
            continue
        touching, writing = 0, 0
        for number in live:
            node, pointer = accesses[number]
            touching |= 1 << node
            if pointer.writes:
                writing |= 1 << node
        rest = writing
        while rest:
            low = rest & -rest
            rest ^= low
            writer = low.bit_length() - 1
            unordered = touching & ~(before[writer] | after[writer] | low)
            if unordered:
                other = (unordered & -unordered).bit_length() - 1
                raise ProgramError(_race_text(graph, writer, other, accesses, cut))


def _race_text(graph: LaunchGraph, writer: int, other: int, accesses: list[tuple[int, Pointer]], at: int) -> str:
    def access(node: int) -> Pointer:
        return max(
            (p for i, p in accesses if i == node and p.offset <= at < p.end), key=lambda p: (p.writes, -p.offset)
        )

    def argument(node: int) -> int:
        return next(i for i, p in graph.nodes[node].pointers() if p == access(node))

    first, second = sorted((writer, other))
    return (
        f"node {graph.nodes[second].name!r} arg {argument(second)}: need an edge path from node "
        f"{graph.nodes[first].name!r} (arg {argument(first)}), have none: "
        f"{access(first)} and {access(second)} touch the same bytes and one of them writes"
    )
