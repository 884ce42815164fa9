"""The memory layout of one target: where every value of a Program lives, the same in all of its buckets.

Inputs lie in region io, outputs beside them or, on a GPU, in host_io; KV pages in kv; last tokens and token counts in
state, behind them what a prelude fills; packed weights in weights; everything else in the arena. Arena rows are padded
to ROW_PADDING: kernels may read (never write) whole tiles of rows.
"""

from __future__ import annotations

from collections.abc import Container, Mapping
from dataclasses import dataclass
from math import prod

from tokenspeed.bucket import Bucket, BucketKind, StepLimits
from tokenspeed.compile.memory import ArenaPlan, Buffer, plan_arena
from tokenspeed.compile.ops import Dim, round_up
from tokenspeed.compile.program import Op, Program, Role, Value
from tokenspeed.errors import ProgramError
from tokenspeed.graph import Access, Pointer, Region
from tokenspeed.step import DTYPE_BYTES, IO, MAX_LOGIT_BIAS, OUTPUTS, STATE, STEP_SIZES, PlacedTensor, align, place

ROW_PADDING = 32
"""Rows to a multiple of which arena buffers are padded: the tile of rows that matrix kernels may read."""

SCRATCH_ALIGNMENT = 256
"""Of the scratch memory of a launch: tensor maps need 128."""
_SCRATCH = "scratch"
_OUTPUT_NAMES = frozenset(tensor.name for tensor in OUTPUTS)


@dataclass(frozen=True)
class Layout:
    """Where every value is. ``places`` gives region and byte offset of the storage of each value (for kv inside
    a page); several values share storage where an op overwrites its operand. With ``host_io`` a step's inputs come from
    that region and its outputs go there; its layout is that of region io. ``tables`` are what the prelude fills, in
    region state. Sizes in bytes."""

    program: Program
    limits: StepLimits
    places: Mapping[str, tuple[Region, int]]
    workspaces: Mapping[str, int]
    shared_workspaces: Mapping[str, int]
    scratch: Mapping[str, int]
    weights_bytes: int
    arena: ArenaPlan
    kv_page_bytes: int
    io: tuple[PlacedTensor, ...]
    io_bytes: int
    state: tuple[PlacedTensor, ...]
    state_bytes: int
    host_io: bool
    tables: tuple[PlacedTensor, ...] = ()

    @property
    def region_sizes(self) -> dict[Region, int]:
        """What a graph may touch; of region kv, one page."""
        return {
            Region.WEIGHTS: self.weights_bytes,
            Region.KV: self.kv_page_bytes,
            Region.ARENA: self.arena.nbytes,
            Region.IO: self.io_bytes,
            Region.STATE: self.state_bytes,
            Region.HOST_IO: self.io_bytes if self.host_io else 0,
        }

    @property
    def input_bytes(self) -> int:
        """Bytes of region io that hold what a step brings: its sizes and its inputs."""
        return min(tensor.offset for tensor in self.io if tensor.name in _OUTPUT_NAMES)

    def pointer(self, name: str, bucket: Bucket, access: Access) -> Pointer:
        """The most bytes of value ``name`` that a kernel touches in ``bucket``. Weights have no place here."""
        region, offset = self.places[name]
        value = self.program.values[name]
        if region is Region.KV:
            return Pointer(region, offset, kv_layer_bytes(value), access)
        rows, row_bytes = _rows(value, bucket, self.limits), _row_bytes(value)
        if region is Region.ARENA and not access & Access.WRITE:
            rows = round_up(rows, ROW_PADDING)
        return Pointer(region, offset, rows * row_bytes, access)

    def step_sizes(self) -> Pointer:
        """Where a GPU kernel reads the sizes of the step."""
        tensor = next(tensor for tensor in self.io if tensor.name == STEP_SIZES.name)
        return Pointer(Region.IO, tensor.offset, tensor.nbytes, Access.READ)

    def workspace(self, op: Op, nbytes: int) -> Pointer:
        """The workspace of ``op``, of which it uses ``nbytes``."""
        return Pointer(Region.ARENA, self.workspaces[op.name], nbytes, Access.READ | Access.WRITE)

    def scratch_memory(self, node: str, nbytes: int) -> Pointer:
        """The scratch memory of the launch ``node``, of which it uses ``nbytes``."""
        return Pointer(Region.ARENA, self.scratch[node], nbytes, Access.READ | Access.WRITE)

    def shared_workspace(self, kind: str, nbytes: int, access: Access) -> Pointer:
        """The workspace that the ops of ``kind`` share, of which ``nbytes`` are used."""
        return Pointer(Region.ARENA, self.shared_workspaces[kind], nbytes, access)


def plan_layout(
    program: Program,
    limits: StepLimits,
    weights_bytes: int,
    workspaces: Mapping[str, int],
    shared: Mapping[str, int] | None = None,
    scratch: Mapping[str, int] | None = None,
    *,
    host_io: bool = False,
) -> Layout:
    """Lay out a Program for the largest step. ``workspaces`` gives the most bytes that an op needs for itself,
    ``shared`` the most that the ops of a kind need together, from the first of them to the last, ``scratch`` the most
    that a launch needs, by its name. ``host_io``: for a GPU, whose outputs go to that region.

    Raises ProgramError for a value that has no home: an unknown input, output or state.
    """
    sizes = {
        "T": limits.max_prefill_tokens,
        "S": limits.max_num_seqs,
        "P": pages_per_seq(program),
        "R": limits.max_logit_rows,
        "V": program.metadata.integer("vocab_size"),
        "C": _count_rows(program, limits),
    }
    io, io_bytes = place(IO, sizes)
    state, state_bytes = place(STATE, sizes)
    outputs = Region.HOST_IO if host_io else Region.IO
    places = {tensor.name: (outputs if tensor.name in _OUTPUT_NAMES else Region.IO, tensor.offset) for tensor in io}
    places |= {tensor.name: (Region.STATE, tensor.offset) for tensor in state}
    kv_bytes = 0
    for value in kv_values(program):
        places[value.name] = (Region.KV, kv_bytes)
        kv_bytes += align(kv_layer_bytes(value))
    tables, state_bytes = _place_tables(program, places, state_bytes)
    places |= {tensor.name: (Region.STATE, tensor.offset) for tensor in tables}
    for value in program.with_role(Role.INPUT, Role.STATE, Role.OUTPUT):
        if value.name not in places:
            raise ProgramError(f"value {value.name!r}: need a {value.role} of tokenspeed/step.py or a KV state")
    storage = _storage(program)
    buffers = [*_buffers(program, storage, limits, workspaces), *_shared_buffers(program, shared or {})]
    buffers += _scratch_buffers(program, scratch or {})
    arena = plan_arena(buffers)
    for name, root in storage.items():
        places[name] = places[root] if root in places else (Region.ARENA, arena.offsets[root])
    own = {name: arena.offsets[_workspace_name(name)] for name in workspaces}
    together = {kind: arena.offsets[_shared_name(kind)] for kind in shared or {}}
    slots = _scratch_slots(scratch or {}, arena)
    return Layout(
        program, limits, places, own, together, slots, weights_bytes, arena, kv_bytes, io, io_bytes, state, state_bytes,
        host_io, tables,
    )  # fmt: skip


def _place_tables(program: Program, known: Container[str], offset: int) -> tuple[tuple[PlacedTensor, ...], int]:
    """The state that the prelude fills, from ``offset`` of region state on, and where it ends."""
    tables = []
    for name in dict.fromkeys(program.root(name) for op in program.prelude for name in op.outputs):
        if name not in known:
            value = program.values[name]
            tables.append(PlacedTensor(name, value.dtype, tuple(_numbers(value.shape)), offset))
            offset = align(offset + tables[-1].nbytes)
    return tuple(tables), offset


def pages_per_seq(program: Program) -> int:
    """Row length of the page table."""
    return -(-program.max_model_len // program.page_size)


def _count_rows(program: Program, limits: StepLimits) -> int:
    """Rows of token_counts."""
    rows = program.values["token_counts"].shape[0]
    return rows if isinstance(rows, int) else limits.max_num_seqs


def kv_values(program: Program) -> tuple[Value, ...]:
    """The KV state of each layer, in order: [num_pages, 2, num_kv_heads, page_size, head_dim]."""
    return tuple(value for value in program.states if value.shape[0] == "num_pages")


def kv_layer_bytes(value: Value) -> int:
    """Bytes of one page of one layer: K, then V."""
    return prod(_numbers(value.shape[1:])) * DTYPE_BYTES[value.dtype]


def kv_page_bytes(program: Program) -> int:
    """Bytes of one page of all layers, each aligned: the stride between pages."""
    return sum(align(kv_layer_bytes(value)) for value in kv_values(program))


def _numbers(shape: tuple[Dim, ...]) -> list[int]:
    assert all(isinstance(dim, int) for dim in shape), shape
    return [dim for dim in shape if isinstance(dim, int)]


def _row_bytes(value: Value) -> int:
    return prod(_numbers(value.shape[1:])) * DTYPE_BYTES[value.dtype]


def _rows(value: Value, bucket: Bucket, limits: StepLimits) -> int:
    """The first dimension of ``value`` in ``bucket``."""
    dim = value.shape[0]
    if isinstance(dim, int):
        return dim
    known = {
        "num_tokens": bucket.num_tokens,
        "num_seqs": bucket.num_seqs,
        "num_seqs+1": bucket.num_seqs + 1,
        "num_logit_rows": bucket.num_logit_rows,
        "num_adjustments": bucket.num_seqs,
        "num_adjustments+1": bucket.num_seqs + 1,
        "num_biases": bucket.num_seqs * MAX_LOGIT_BIAS,
        "num_masks": bucket.num_seqs,
        "num_slots": limits.max_num_seqs,
    }
    return known[dim]


def _storage(program: Program) -> dict[str, str]:
    """Result value -> the value whose storage it uses: its own name, or that of an operand it overwrites.

    Besides the aliases that the schemas demand, linear_add overwrites its residual where that is a temporary
    which nothing reads afterwards: the residual stream stays in one buffer through all layers.
    """
    last_read: dict[str, int] = {}
    for index, op in enumerate(program.ops):
        last_read |= dict.fromkeys(op.inputs, index)
    storage = {result: program.root(result) for op in program.prelude for result in op.aliases()}
    members: dict[str, list[str]] = {}
    for index, op in enumerate(program.ops):
        overwritten = dict(op.aliases())
        if op.kind == "linear_add":
            residual = op.operand("residual")
            root = storage.get(residual, residual)
            others = [name for name in members.get(root, ()) if last_read.get(name, -1) >= index]
            temporary = program.values[root].role is Role.TEMP and program.values[op.outputs[0]].role is Role.TEMP
            if temporary and others == [residual] and last_read[residual] == index and op.inputs.count(residual) == 1:
                overwritten[op.outputs[0]] = residual
        for name in op.outputs:
            operand = overwritten.get(name, name)
            root = storage.get(operand, operand)
            storage[name] = root
            members.setdefault(root, []).append(name)
    return storage


def _buffers(
    program: Program, storage: Mapping[str, str], limits: StepLimits, workspaces: Mapping[str, int]
) -> list[Buffer]:
    """The arena buffers: one per storage that only temporaries use, and one per workspace."""
    largest = Bucket(BucketKind.MIXED, limits.max_prefill_tokens, limits.max_num_seqs, limits.max_logit_rows)
    lives: dict[str, tuple[int, int]] = {}
    buffers = []
    for index, op in enumerate(program.ops):
        for name in (*op.inputs, *op.outputs):
            root = storage.get(name)
            if root is not None and program.values[root].role is Role.TEMP:
                lives[root] = (lives.get(root, (index, index))[0], index)
        if op.name in workspaces:
            buffers.append(Buffer(_workspace_name(op.name), workspaces[op.name], index, index))
    for root, (first, last) in lives.items():
        value = program.values[root]
        rows = round_up(_rows(value, largest, limits), ROW_PADDING)
        buffers.append(Buffer(root, rows * _row_bytes(value), first, last))
    return buffers


def _shared_buffers(program: Program, shared: Mapping[str, int]) -> list[Buffer]:
    buffers = []
    for kind, nbytes in shared.items():
        users = [index for index, op in enumerate(program.ops) if op.kind == kind]
        buffers.append(Buffer(_shared_name(kind), nbytes, users[0], users[-1]))
    return buffers


def _scratch_buffers(program: Program, scratch: Mapping[str, int]) -> list[Buffer]:
    """One buffer through the whole step for the scratch memory of all launches, each with bytes of its own.

    A programmatic launch writes it before it has waited for its predecessors (DeviceKernel.scratch_bytes): the edges
    of the graph order those writes with nothing, and a chain of launches that all let the next one start may be long.
    So no two launches of a step share a byte of it, nor does any other value.
    """
    if not scratch:
        return []
    nbytes = sum(align(size, SCRATCH_ALIGNMENT) for size in scratch.values())
    return [Buffer(_SCRATCH, nbytes + SCRATCH_ALIGNMENT, 0, len(program.ops) - 1)]


def _scratch_slots(scratch: Mapping[str, int], arena: ArenaPlan) -> dict[str, int]:
    slots, end = {}, align(arena.offsets.get(_SCRATCH, 0), SCRATCH_ALIGNMENT)
    for name, size in scratch.items():
        slots[name], end = end, end + align(size, SCRATCH_ALIGNMENT)
    return slots


def _workspace_name(op: str) -> str:
    return f"{op}.workspace"


def _shared_name(kind: str) -> str:
    return f"{kind}.shared"
