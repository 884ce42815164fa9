"""Lowering: Program -> for each bucket a Plan -> a LaunchGraph, over one memory layout for all buckets."""

from __future__ import annotations

import struct
from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from tokenspeed.bucket import Bucket, StepLimits, prove_coverage
from tokenspeed.compile.buckets import ladder
from tokenspeed.compile.capture import CaptureJob, Captures
from tokenspeed.compile.ceilings import REPEATS, Ceiling, plan_ceilings
from tokenspeed.compile.layout import Layout, kv_page_bytes, pages_per_seq, plan_layout
from tokenspeed.compile.ops import Dim
from tokenspeed.compile.program import Program, Role
from tokenspeed.compile.select import PRELUDE, KernelCall, Plan, Selection, select
from tokenspeed.compile.weights import WeightPlan, plan_weights
from tokenspeed.errors import ProgramError
from tokenspeed.graph import Access, Argument, Float, Int, Launch, LaunchGraph, Node, Pointer, Region, StepScalar
from tokenspeed.graph_verify import verify_graph, writes_inputs
from tokenspeed.kernels.registry import ArgumentKind, ArgumentRule, DeviceKernel, Registry, Stage
from tokenspeed.step import STEP_SCALARS, PlacedTensor
from tokenspeed.target import Target
from tokenspeed.values import PackedValue, PlacedValue, StepOp, StepValues


@dataclass(frozen=True)
class Binary:
    """What lowering asks of a compiled GPU kernel: its name in the artifact, the threads of its block, and its
    dynamic shared memory in bytes."""

    name: str
    threads: int
    shared_bytes: int


@dataclass(frozen=True)
class LoweredTarget:
    """All that an artifact holds for one target, but for the bytes of the weights and of the kernels.

    Sizes in bytes. ``kernels`` are the GPU kernels that the graphs launch, by the names of their binaries;
    ``captured`` are the code objects of kernels that libraries launch, by name; ``ceilings`` are measured and have
    graphs beside those of the buckets; ``prelude`` runs once, before the first step.
    """

    target: Target
    graphs: Mapping[Bucket, LaunchGraph]
    ceilings: tuple[tuple[Ceiling, LaunchGraph], ...]
    kernels: Mapping[str, DeviceKernel]
    captured: Mapping[str, bytes]
    weights: WeightPlan
    arena_bytes: int
    kv_page_bytes: int
    io: tuple[PlacedTensor, ...]
    io_bytes: int
    state: tuple[PlacedTensor, ...]
    state_bytes: int
    selection: Selection
    layout: Layout
    prelude: LaunchGraph | None = None

    @property
    def values(self) -> StepValues:
        """Where the values of its graphs lie."""
        return step_values(self.layout, self.weights)


@dataclass(frozen=True)
class TargetPlan:
    """What is decided of one target before any GPU kernel is compiled: kernels, weights, memory."""

    program: Program
    selection: Selection
    weights: WeightPlan
    layout: Layout
    ceilings: tuple[Ceiling, ...] = ()
    inputs: Mapping[Bucket, Stage] = field(default_factory=dict)
    """On a GPU, the launch by which each bucket's step gets its inputs."""

    @property
    def kernels(self) -> tuple[DeviceKernel, ...]:
        """The GPU kernels of all buckets and ceilings, each once, in the order of their first use."""
        stages = list(self.inputs.values())
        stages += [stage for plan in self.selection.all_plans for call in plan.calls for stage in call.stages]
        stages += [ceiling.stage for ceiling in self.ceilings]
        return tuple(dict.fromkeys(stage.kernel for stage in stages if stage.kernel is not None))

    @property
    def captures(self) -> tuple[CaptureJob, ...]:
        """The calls of libraries of all buckets, each once, in the order of their first use."""
        stages = ((c, stage) for plan in self.selection.plans for c in plan.calls for stage in c.stages)
        return tuple(dict.fromkeys(capture_job(c, s) for c, s in stages if s.library is not None))


def plan_target(
    program: Program,
    target: Target,
    limits: StepLimits,
    registry: Registry,
    *,
    split_positions: int,
    features: frozenset[str] = frozenset(),
    op_features: Mapping[str, frozenset[str]] | None = None,
    pinned: Mapping[str, str] | None = None,
    solution: str | None = None,
    buckets: Sequence[Bucket] | None = None,
) -> TargetPlan:
    """Choose kernels and lay out memory for a fully fused ``program`` on ``target``.

    Args:
        limits: the largest step; the buckets are proven to cover every step within it.
        split_positions: attention restarts its sums at every multiple of it; a multiple of the page size.
        features, op_features, pinned, solution: see ``select``.
        buckets: the ladder to use instead of the default one.

    Raises:
        SelectionError: an op has no kernel.
        ProgramError: the buckets leave a step uncovered.
    """
    rungs = tuple(ladder(limits) if buckets is None else buckets)
    prove_coverage(rungs, limits)
    deployment = {
        "page_size": program.page_size,
        "page_stride": kv_page_bytes(program),
        "pages_per_seq": pages_per_seq(program),
        "split_positions": split_positions,
    }
    selection = select(program, target, rungs, registry, deployment, features=features, op_features=op_features,
                       pinned=pinned, solution=solution)  # fmt: skip
    weights = plan_weights(program, _needed_weights(program, selection.all_plans))
    shared = _shared_workspaces(selection.plans)
    scratch = _scratch(selection.plans)
    layout = plan_layout(
        program, limits, weights.nbytes, _workspaces(selection.plans), shared, scratch, host_io=target.is_gpu
    )
    ceilings = plan_ceilings(target, program.dtype, layout, registry)
    return TargetPlan(program, selection, weights, layout, ceilings, _plan_inputs(target, layout, rungs))


def _plan_inputs(target: Target, layout: Layout, buckets: Sequence[Bucket]) -> dict[Bucket, Stage]:
    if not target.is_gpu:
        return {}
    from tokenspeed.kernels.triton.stage import inputs_stage

    return {bucket: inputs_stage(target, layout.io, layout.program.page_size, bucket) for bucket in buckets}


def lower_target(
    plan: TargetPlan, binaries: Mapping[DeviceKernel, Binary] | None = None, captures: Captures | None = None
) -> LoweredTarget:
    """Write the LaunchGraphs of a planned target. ``binaries`` has every one of ``plan.kernels``, ``captures`` every
    one of ``plan.captures``.

    Raises ProgramError when a graph fails its verification.
    """
    binaries, layout, captures = binaries or {}, plan.layout, captures or Captures({}, {})
    target = plan.selection.target
    heads = {bucket: [inputs_node(layout, bucket, stage, binaries)] for bucket, stage in plan.inputs.items()}
    graphs = {
        p.bucket: lower_plan(plan.program, p, layout, plan.weights, binaries, captures, heads.get(p.bucket, ()))
        for p in plan.selection.plans
    }
    smallest = next(iter(heads.values()), [])
    ceilings = tuple((ceiling, lower_ceiling(ceiling, binaries, smallest)) for ceiling in plan.ceilings)
    prelude = _lower_prelude(plan, binaries, captures)
    named = [(bucket.name, graph) for bucket, graph in graphs.items()]
    named += [] if prelude is None else [(PRELUDE, prelude)]
    for name, graph in (*named, *((ceiling.kind, graph) for ceiling, graph in ceilings)):
        try:
            verify_graph(graph, layout.region_sizes, layout.kv_page_bytes)
        except ProgramError as error:
            raise ProgramError(f"{target} {name}: {error.message}", hint=error.hint) from error
    return LoweredTarget(
        target=target,
        graphs=graphs,
        ceilings=ceilings,
        kernels={binaries[kernel].name: kernel for kernel in plan.kernels},
        captured=captures.binaries,
        weights=plan.weights,
        arena_bytes=layout.arena.nbytes,
        kv_page_bytes=layout.kv_page_bytes,
        io=layout.io,
        io_bytes=layout.io_bytes,
        state=layout.state,
        state_bytes=layout.state_bytes,
        selection=plan.selection,
        layout=layout,
        prelude=prelude,
    )


def _lower_prelude(plan: TargetPlan, binaries: Mapping[DeviceKernel, Binary], captures: Captures) -> LaunchGraph | None:
    """The graph of what runs once. Nothing comes before it, and it brings no inputs: there is no step."""
    prelude = plan.selection.prelude
    if prelude is None:
        return None
    assert not any(call.spec.workspace_bytes(call.sizes) for call in prelude.calls), "memory for it is not laid out"
    return lower_plan(plan.program, prelude, plan.layout, plan.weights, binaries, captures)


def lower_program(
    program: Program,
    target: Target,
    limits: StepLimits,
    registry: Registry,
    *,
    split_positions: int,
    features: frozenset[str] = frozenset(),
    op_features: Mapping[str, frozenset[str]] | None = None,
    pinned: Mapping[str, str] | None = None,
    solution: str | None = None,
    buckets: Sequence[Bucket] | None = None,
    compile_kernels: Callable[[Sequence[DeviceKernel]], Mapping[DeviceKernel, Binary]] | None = None,
) -> LoweredTarget:
    """``plan_target``, whose arguments these are, and ``lower_target`` with what ``compile_kernels`` makes."""
    plan = plan_target(program, target, limits, registry, split_positions=split_positions, features=features,
                       op_features=op_features, pinned=pinned, solution=solution, buckets=buckets)  # fmt: skip
    return lower_target(plan, compile_kernels(plan.kernels) if compile_kernels and plan.kernels else None)


def step_values(layout: Layout, weights: WeightPlan) -> StepValues:
    """The ops of the layout's Program, of a step alone, and the places of all values, for the artifact."""
    program, values = layout.program, {}
    for name in dict.fromkeys(name for op in (*program.ops, *program.prelude) for name in (*op.inputs, *op.outputs)):
        value = program.values[name]
        region, offset = layout.places.get(name, ("", 0))
        values[name] = PlacedValue(name, value.role.value, value.dtype, value.shape, str(region), offset)
    ops = tuple(StepOp(op.name, op.kind, op.inputs, op.outputs, dict(op.attrs)) for op in program.ops)
    packed = tuple(PackedValue(w.value, w.layout, w.tensor) for w in weights.weights)
    return StepValues(ops, values, packed)


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


def _most(needs: Iterable[tuple[str, int]]) -> dict[str, int]:
    """The most bytes that each name needs; names that need none are left out."""
    most: dict[str, int] = {}
    for name, nbytes in needs:
        if nbytes:
            most[name] = max(most.get(name, 0), nbytes)
    return most


def _workspaces(plans: Sequence[Plan]) -> dict[str, int]:
    """Op name -> the most bytes of workspace that it needs in any bucket."""
    return _most((call.op.name, call.spec.workspace_bytes(call.sizes)) for plan in plans for call in plan.calls)


def _shared_workspaces(plans: Sequence[Plan]) -> dict[str, int]:
    """Kind of op -> the most bytes of workspace that its ops share in any bucket."""
    return _most((call.op.kind, call.spec.shared_workspace_bytes(call.sizes)) for plan in plans for call in plan.calls)


def _scratch(plans: Sequence[Plan]) -> dict[str, int]:
    """Node name -> the most bytes of scratch memory that its kernel needs in any bucket."""
    calls = (call for plan in plans for call in plan.calls)
    return _most((_node_name(call, stage), stage.scratch_bytes) for call in calls for stage in call.stages)


def _node_name(call: KernelCall, stage: Stage) -> str:
    return f"{call.op.name}/{stage.name}" if stage.name else call.op.name


def capture_job(call: KernelCall, stage: Stage) -> CaptureJob:
    """What is captured for a stage whose launches a library makes."""
    assert stage.library is not None, stage
    floats = [call.op.attrs.number(rule.name) for rule in stage.arguments if rule.kind is ArgumentKind.FLOAT]
    return CaptureJob(stage.library, len(stage.arguments) - len(floats), tuple(floats))


def lower_plan(
    program: Program,
    plan: Plan,
    layout: Layout,
    weights: WeightPlan,
    binaries: Mapping[DeviceKernel, Binary],
    captures: Captures,
    head: Sequence[Node] = (),
) -> LaunchGraph:
    """``head``, then a node per launch of each call, named after its op, with exactly the edges that their memory
    accesses need."""
    tensors = weights.tensors()
    nodes = list(head)
    once: set[object] = set()
    for call in plan.calls:
        for stage in call.stages:
            args = _Arguments(program, plan.bucket, layout, tensors, call, stage).all()
            if stage.once and (stage, args) in once:
                continue
            if stage.once:
                once.add((stage, args))
            name = _node_name(call, stage)
            if stage.library is not None:
                pointers = [arg for arg in args if isinstance(arg, Pointer)]
                nodes += captures.calls[capture_job(call, stage)].nodes(name, pointers)
            else:
                nodes.append(Node(name, stage.symbol, args, (), _launch(stage, binaries)))
    edges = dependencies([[pointer for _, pointer in node.pointers()] for node in nodes])
    return connected(nodes, edges)


def connected(nodes: Sequence[Node], edges: Sequence[tuple[int, ...]]) -> LaunchGraph:
    """The graph of ``nodes`` with these predecessors. Those that come right after one that writes region io start when
    it has ended: kernels may read a step's inputs before they wait."""
    writers = {index for index, node in enumerate(nodes) if writes_inputs(node)}
    linked = []
    for node, before in zip(nodes, edges, strict=True):
        launch = node.launch
        if launch is not None and launch.programmatic and not writers.isdisjoint(before):
            launch = replace(launch, programmatic=False)
        linked.append(replace(node, predecessors=before, launch=launch))
    return LaunchGraph(tuple(linked))


def inputs_node(layout: Layout, bucket: Bucket, stage: Stage, binaries: Mapping[DeviceKernel, Binary]) -> Node:
    """The node that brings a step's sizes and inputs from region host_io to region io."""
    sizes = replace(layout.step_sizes(), region=Region.HOST_IO)
    source = Pointer(Region.HOST_IO, 0, layout.input_bytes, Access.READ)
    target = Pointer(Region.IO, 0, layout.input_bytes, Access.WRITE)
    most = tuple(Int(getattr(bucket, name), 4) for name in STEP_SCALARS)
    args: tuple[Argument, ...] = (sizes, source, target, *most, *SCRATCH_PARAMETERS)
    return Node(INPUTS_NODE, stage.symbol, args, (), _launch(stage, binaries))


def lower_ceiling(ceiling: Ceiling, binaries: Mapping[DeviceKernel, Binary], head: Sequence[Node]) -> LaunchGraph:
    """``head``, then the launch of ``ceiling``, REPEATS times in a row."""
    launch = _launch(ceiling.stage, binaries)
    scratch = ceiling.scratch or (SCRATCH_PARAMETERS[0],) * REPEATS
    assert bool(ceiling.scratch) == bool(ceiling.stage.scratch_bytes), ceiling
    nodes = [
        *head,
        *(
            Node(
                f"{ceiling.kind}/{i}",
                ceiling.stage.symbol,
                (*ceiling.arguments, scratch[i], *SCRATCH_PARAMETERS[1:]),
                launch=launch,
            )
            for i in range(REPEATS)
        ),
    ]
    return connected(nodes, [(i - 1,) if i else () for i in range(len(nodes))])


def _launch(stage: Stage, binaries: Mapping[DeviceKernel, Binary]) -> Launch | None:
    if stage.kernel is None:
        return None
    binary = binaries[stage.kernel]
    return Launch(binary.name, stage.grid, (binary.threads, 1, 1), binary.shared_bytes, programmatic=stage.programmatic)


INPUTS_NODE = "inputs"
"""The first node of a GPU's graphs."""
SCRATCH_PARAMETERS = (Int(0), Int(0))
"""Triton's kernels end in two pointers to scratch memory, null for kernels that use none, as most of ours."""


@dataclass(frozen=True)
class _Arguments:
    """Makes the arguments of one launch by the rules of its Stage."""

    program: Program
    bucket: Bucket
    layout: Layout
    weights: Mapping[tuple[str, str], PlacedTensor]
    call: KernelCall
    stage: Stage

    def all(self) -> tuple[Argument, ...]:
        args = tuple(self._argument(rule) for rule in self.stage.arguments)
        if self.stage.kernel is None:
            return args
        if not self.stage.scratch_bytes:
            return args + SCRATCH_PARAMETERS
        name = _node_name(self.call, self.stage)
        return (*args, self.layout.scratch_memory(name, self.stage.scratch_bytes), *SCRATCH_PARAMETERS[1:])

    def _argument(self, rule: ArgumentRule) -> Argument:
        op = self.call.op
        number_bytes = 8 if self.stage.kernel is None else 4
        match rule.kind:
            case ArgumentKind.READ:
                return self._read(op.operand(rule.name))
            case ArgumentKind.WRITE:
                return self.layout.pointer(op.result(rule.name), self.bucket, Access.WRITE)
            case ArgumentKind.UPDATE:
                return self.layout.pointer(op.result(rule.name), self.bucket, Access.READ | Access.WRITE)
            case ArgumentKind.WORKSPACE:
                return self._part(rule, self.layout.workspace(op, self.call.spec.workspace_bytes(self.call.sizes)))
            case ArgumentKind.SHARED:
                nbytes = self.call.spec.shared_workspace_bytes(self.call.sizes)
                access = Access.WRITE if self.stage.once else Access.READ
                return self._part(rule, self.layout.shared_workspace(op.kind, nbytes, access))
            case ArgumentKind.SIZES:
                return self.layout.step_sizes()
            case ArgumentKind.ROWS:
                return _step_scalar(self.program.values[op.operand(rule.name)].shape[0])
            case ArgumentKind.STEP:
                return _step_scalar(rule.name)
            case ArgumentKind.INT:
                return Int(self.call.sizes[rule.name], number_bytes)
            case ArgumentKind.FLOAT:
                return float_argument(op.attrs.number(rule.name), number_bytes)

    def _part(self, rule: ArgumentRule, whole: Pointer) -> Pointer:
        """What ``rule`` names of a workspace: all of it, but for the kernels of libraries."""
        if self.stage.library is None:
            return whole
        part = self.stage.library.part(rule.name)
        return replace(whole, offset=whole.offset + part.offset, extent=part.nbytes)

    def _read(self, name: str) -> Pointer:
        if self.program.values[name].role is not Role.WEIGHT:
            return self.layout.pointer(name, self.bucket, Access.READ)
        tensor = self.weights[name, _weight_layout(self.call)]
        return Pointer(Region.WEIGHTS, tensor.offset, tensor.nbytes, Access.READ)


def float_argument(value: float, nbytes: int) -> Float:
    """``value``, as the nearest float32 for a parameter of 4 bytes."""
    return Float(value) if nbytes == 8 else Float(struct.unpack("<f", struct.pack("<f", value))[0], nbytes)


def _step_scalar(dim: Dim) -> StepScalar:
    assert dim in STEP_SCALARS, dim
    return StepScalar(STEP_SCALARS.index(str(dim)))


def dependencies(nodes: Sequence[Sequence[Pointer]]) -> list[tuple[int, ...]]:
    """Predecessors of each node of a sequence, from the bytes that its pointers touch.

    A node comes after every earlier one that wrote what it touches, or that read what it writes; an edge that
    other edges imply is left out.
    """
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
