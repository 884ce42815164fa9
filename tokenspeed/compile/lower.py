"""Lowering: Program -> for each bucket a Plan -> a LaunchGraph, over one memory layout for all buckets."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from tokenspeed.bucket import Bucket, StepLimits
from tokenspeed.compile.buckets import ladder, prove_coverage
from tokenspeed.compile.layout import Layout, kv_page_bytes, pages_per_seq, plan_layout
from tokenspeed.compile.ops import Dim
from tokenspeed.compile.program import Program, Role
from tokenspeed.compile.select import KernelCall, Plan, Selection, select
from tokenspeed.compile.weights import WeightPlan, plan_weights
from tokenspeed.errors import ProgramError
from tokenspeed.graph import Access, Argument, Float, Int, LaunchGraph, Node, Pointer, Region, StepScalar
from tokenspeed.graph_verify import verify_graph
from tokenspeed.kernels.registry import ArgumentKind, ArgumentRule, Registry
from tokenspeed.step import STEP_SCALARS, PlacedTensor
from tokenspeed.target import Target


@dataclass(frozen=True)
class LoweredTarget:
    """All that an artifact holds for one target, but for the bytes of the weights. Sizes in bytes."""

    target: Target
    graphs: Mapping[Bucket, LaunchGraph]
    weights: WeightPlan
    arena_bytes: int
    kv_page_bytes: int
    io: tuple[PlacedTensor, ...]
    io_bytes: int
    state: tuple[PlacedTensor, ...]
    state_bytes: int
    selection: Selection
    layout: Layout


def lower_program(
    program: Program,
    target: Target,
    limits: StepLimits,
    registry: Registry,
    *,
    split_positions: int,
    features: frozenset[str] = frozenset(),
    pinned: Mapping[str, str] | None = None,
    buckets: Sequence[Bucket] | None = None,
) -> LoweredTarget:
    """Lower a fully fused ``program`` for ``target``.

    Args:
        limits: the largest step; the buckets are proven to cover every step within it.
        split_positions: attention restarts its sums at every multiple of it; a multiple of the page size.
        features: what every selected kernel must guarantee.
        pinned: kind of op -> the only solution allowed for it.
        buckets: the ladder to use instead of the default one.

    Raises:
        SelectionError: an op has no kernel.
        ProgramError: the buckets leave a step uncovered, or a graph fails its verification.
    """
    rungs = tuple(ladder(limits) if buckets is None else buckets)
    prove_coverage(rungs, limits)
    deployment = {
        "page_size": program.page_size,
        "page_stride": kv_page_bytes(program),
        "pages_per_seq": pages_per_seq(program),
        "split_positions": split_positions,
    }
    selection = select(program, target, rungs, registry, deployment, features=features, pinned=pinned)
    weights = plan_weights(program, _needed_weights(program, selection.plans))
    layout = plan_layout(program, limits, weights.nbytes, _workspaces(selection.plans))
    graphs = {plan.bucket: lower_plan(program, plan, layout, weights) for plan in selection.plans}
    for bucket, graph in graphs.items():
        try:
            verify_graph(graph, layout.region_sizes, layout.kv_page_bytes)
        except ProgramError as error:
            raise ProgramError(f"{target} {bucket.name}: {error.message}", hint=error.hint) from error
    return LoweredTarget(
        target=target,
        graphs=graphs,
        weights=weights,
        arena_bytes=layout.arena.nbytes,
        kv_page_bytes=layout.kv_page_bytes,
        io=layout.io,
        io_bytes=layout.io_bytes,
        state=layout.state,
        state_bytes=layout.state_bytes,
        selection=selection,
        layout=layout,
    )


def _needed_weights(program: Program, plans: Sequence[Plan]) -> set[tuple[str, str]]:
    """(weight, layout) of every call: a kernel reads all weights among its operands in its layout."""
    needed = set()
    for plan in plans:
        for call in plan.calls:
            for name in call.op.inputs:
                if program.values[name].role is Role.WEIGHT:
                    needed.add((name, _weight_layout(call)))
    return needed


def _weight_layout(call: KernelCall) -> str:
    layout = call.spec.weight_layout
    assert layout is not None, f"{call.spec.symbol} reads weights but declares no layout"
    return layout


def _workspaces(plans: Sequence[Plan]) -> dict[str, int]:
    """Op name -> the most bytes of workspace that it needs in any bucket; ops that need none are left out."""
    most: dict[str, int] = {}
    for plan in plans:
        for call in plan.calls:
            nbytes = call.spec.workspace_bytes(call.sizes)
            if nbytes:
                most[call.op.name] = max(most.get(call.op.name, 0), nbytes)
    return most


def lower_plan(program: Program, plan: Plan, layout: Layout, weights: WeightPlan) -> LaunchGraph:
    """One node per call, named after its op, with exactly the edges that its memory accesses need."""
    tensors = weights.tensors()
    calls = [(call, _Arguments(program, plan.bucket, layout, tensors, call).all()) for call in plan.calls]
    edges = dependencies([args for _, args in calls])
    return LaunchGraph(
        tuple(Node(call.op.name, call.spec.symbol, args, before)
              for (call, args), before in zip(calls, edges, strict=True))
    )  # fmt: skip


@dataclass(frozen=True)
class _Arguments:
    """Makes the arguments of one call by the rules of its KernelSpec."""

    program: Program
    bucket: Bucket
    layout: Layout
    weights: Mapping[tuple[str, str], PlacedTensor]
    call: KernelCall

    def all(self) -> tuple[Argument, ...]:
        return tuple(self._argument(rule) for rule in self.call.spec.arguments)

    def _argument(self, rule: ArgumentRule) -> Argument:
        op = self.call.op
        match rule.kind:
            case ArgumentKind.READ:
                return self._read(op.operand(rule.name))
            case ArgumentKind.WRITE:
                return self.layout.pointer(op.result(rule.name), self.bucket, Access.WRITE)
            case ArgumentKind.WORKSPACE:
                return self.layout.workspace(op, self.call.spec.workspace_bytes(self.call.sizes))
            case ArgumentKind.ROWS:
                return _step_scalar(self.program.values[op.operand(rule.name)].shape[0])
            case ArgumentKind.STEP:
                return _step_scalar(rule.name)
            case ArgumentKind.INT:
                return Int(self.call.sizes[rule.name])
            case ArgumentKind.FLOAT:
                return Float(op.attrs.number(rule.name))

    def _read(self, name: str) -> Pointer:
        if self.program.values[name].role is not Role.WEIGHT:
            return self.layout.pointer(name, self.bucket, Access.READ)
        tensor = self.weights[name, _weight_layout(self.call)]
        return Pointer(Region.WEIGHTS, tensor.offset, tensor.nbytes, Access.READ)


def _step_scalar(dim: Dim) -> StepScalar:
    assert dim in STEP_SCALARS, dim
    return StepScalar(STEP_SCALARS.index(str(dim)))


def dependencies(arguments: Sequence[Sequence[Argument]]) -> list[tuple[int, ...]]:
    """Predecessors of each node of a sequence, from the bytes that its arguments touch.

    A node comes after every earlier one that wrote what it touches, or that read what it writes; an edge that
    other edges imply is left out.
    """
    nodes = [[arg for arg in args if isinstance(arg, Pointer)] for args in arguments]
    histories = {region: _History(p for pointers in nodes for p in pointers if p.region is region) for region in Region}
    edges: list[tuple[int, ...]] = []
    ancestors: list[int] = []
    for node, pointers in enumerate(nodes):
        conflicts: set[int] = set()
        for pointer in pointers:
            conflicts |= histories[pointer.region].conflicts(pointer)
        own, reached = [], 0
        for earlier in sorted(conflicts, reverse=True):
            if not reached >> earlier & 1:
                own.append(earlier)
                reached |= ancestors[earlier] | 1 << earlier
        edges.append(tuple(reversed(own)))
        ancestors.append(reached)
        for pointer in sorted(pointers, key=lambda p: p.writes):  # a node that reads and writes counts as writer
            histories[pointer.region].record(node, pointer)
    return edges


class _History:
    """Who touched which bytes of a region last: for each piece between the ends of all accesses, its last writer
    and the readers since. Earlier ones need no edge, as the last writer comes after them."""

    def __init__(self, accesses: Iterable[Pointer]):
        self._cuts = sorted({cut for pointer in accesses for cut in (pointer.offset, pointer.end)})
        self._writer: list[tuple[int, ...]] = [()] * len(self._cuts)
        self._readers: list[list[int]] = [[] for _ in self._cuts]

    def _pieces(self, pointer: Pointer) -> range:
        return range(bisect_left(self._cuts, pointer.offset), bisect_left(self._cuts, pointer.end))

    def conflicts(self, pointer: Pointer) -> set[int]:
        """Earlier nodes that must have finished before this access."""
        found: set[int] = set()
        for piece in self._pieces(pointer):
            found.update(self._writer[piece])
            if pointer.writes:
                found.update(self._readers[piece])
        return found

    def record(self, node: int, pointer: Pointer) -> None:
        for piece in self._pieces(pointer):
            if pointer.writes:
                self._writer[piece], self._readers[piece] = (node,), []
            else:
                self._readers[piece].append(node)
