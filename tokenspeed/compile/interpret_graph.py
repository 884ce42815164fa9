"""Runs a LaunchGraph node by node in NumPy, over regions of bytes: the oracle of layouts and of lowering.

Where interpret.py knows values and shapes, this knows what a device knows: a symbol, pointers into regions,
numbers. It unpacks panels and KV pages from their bytes, computes in float32, and refuses every access beyond
what the pointer promises, so it also proves that the extents in a graph are large enough.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, TypeAlias

import ml_dtypes
import numpy as np
import numpy.typing as npt

from tokenspeed.compile.derive import deinterleave, rope_table_of
from tokenspeed.compile.ops import ADJUST_OPERANDS, PANEL, SAMPLE_OPERANDS, round_up
from tokenspeed.compile.sampler import adjust_rows, sample_rows
from tokenspeed.compile.weights import unpack_panel16
from tokenspeed.errors import ProgramError
from tokenspeed.graph import Access, Argument, Bytes, LaunchGraph, Node, Pointer, Region, StepScalar
from tokenspeed.kernels.registry import KernelSpec, Registry
from tokenspeed.step import STEP_COUNTS, STEP_SCALARS, PlacedTensor, mask_words

Array: TypeAlias = npt.NDArray[Any]

BLOCK = 32
"""Positions of a page whose V is zeroed together when the first of them is written."""
_DTYPES: Mapping[str, np.dtype[Any]] = {
    name: np.dtype(ml_dtypes.bfloat16 if name == "bfloat16" else name)
    for name in ("float32", "bfloat16", "int32", "int64", "uint64")
}


class Memory:
    """The regions of a device as bytes.

    Args:
        sizes: bytes of weights, arena, io, state and host_io (as in ``Layout.region_sizes``).
        kv_page_bytes, num_pages: the kv region.
        fill: what every byte holds at first. 0xff makes every float a NaN, which no step may let through.
    """

    def __init__(self, sizes: Mapping[Region, int], kv_page_bytes: int, num_pages: int, fill: int = 0):
        self.kv_page_bytes = kv_page_bytes
        self.regions = {region: np.full(sizes[region], fill, np.uint8) for region in Region}
        self.regions[Region.KV] = np.full(kv_page_bytes * num_pages, fill, np.uint8)

    def write(self, region: Region, tensor: PlacedTensor, array: Array) -> None:
        """Store the first ``len(array)`` rows of a placed tensor."""
        data = np.ascontiguousarray(array, _DTYPES[tensor.dtype]).reshape(-1).view(np.uint8)
        assert array.shape[1:] == tensor.shape[1:] and data.nbytes <= tensor.nbytes, (tensor, array.shape)
        self.regions[region][tensor.offset : tensor.offset + data.nbytes] = data

    def read(self, region: Region, tensor: PlacedTensor, rows: int) -> Array:
        """The first ``rows`` rows of a placed tensor."""
        data = self.regions[region][tensor.offset : tensor.offset + tensor.nbytes]
        return data.view(_DTYPES[tensor.dtype]).reshape(tensor.shape)[:rows].copy()


class Call:
    """The arguments of one node, by the names of its KernelSpec's rules."""

    def __init__(self, node: Node, spec: KernelSpec, memory: Memory, step: Mapping[str, int]):
        if len(node.args) != len(spec.arguments):
            raise ProgramError(
                f"node {node.name!r}: need {len(spec.arguments)} arguments for {spec.symbol}, have {len(node.args)}"
            )
        self._node, self._memory, self._step = node, memory, step
        self._args = {
            rule.name: arg for rule, arg in zip(spec.arguments, node.args, strict=True) if rule.kind != "rows"
        }
        self._rows = [arg for rule, arg in zip(spec.arguments, node.args, strict=True) if rule.kind == "rows"]
        self.dtype = _DTYPES[spec.dtypes[0]]

    def _value(self, arg: Argument) -> Any:
        assert not isinstance(arg, Pointer | Bytes), self._node.name
        return self._step[STEP_SCALARS[arg.index]] if isinstance(arg, StepScalar) else arg.value

    def integer(self, name: str) -> int:
        """An integer or step scalar."""
        return int(self._value(self._args[name]))

    def number(self, name: str) -> Any:
        """A number, as the float32 that kernels compute with."""
        return np.float32(self._value(self._args[name]))

    @property
    def rows(self) -> int:
        """The step scalar that counts the rows of the operand named by the rule ``rows``."""
        return int(self._value(self._rows[0]))

    def _bytes(self, name: str, nbytes: int, access: Access, page: int = 0) -> Array:
        pointer = self._args[name]
        if not isinstance(pointer, Pointer) or not pointer.access & access or nbytes > pointer.extent:
            raise ProgramError(
                f"node {self._node.name!r} argument {name}: need to {access.name} {nbytes} bytes, have {pointer}"
            )
        start = pointer.offset + page * self._memory.kv_page_bytes
        return self._memory.regions[pointer.region][start : start + nbytes]

    def read(self, name: str, shape: tuple[int, ...], dtype: str | np.dtype[Any] = "float32") -> Array:
        """An operand; bfloat16 comes widened to float32."""
        kind = _DTYPES[dtype] if isinstance(dtype, str) else dtype
        array = self._bytes(name, int(np.prod(shape)) * kind.itemsize, Access.READ).view(kind).reshape(shape)
        return array.astype(np.float32) if kind == ml_dtypes.bfloat16 else array.copy()

    def write(self, name: str, array: Array, dtype: str | np.dtype[Any] = "float32") -> None:
        """A result, rounded to ``dtype``."""
        kind = _DTYPES[dtype] if isinstance(dtype, str) else dtype
        data = np.ascontiguousarray(array.astype(kind)).reshape(-1).view(np.uint8)
        self._bytes(name, data.nbytes, Access.WRITE)[:] = data

    def round(self, array: Array) -> Array:
        """float32, rounded to the kernel's dtype."""
        return array.astype(self.dtype).astype(np.float32)

    def write_row(self, name: str, index: int, row: Any) -> None:
        """One row of a result: an array, or a numpy scalar where the result has one dimension."""
        data = np.atleast_1d(row).view(np.uint8)
        self._bytes(name, data.nbytes * (index + 1), Access.WRITE)[data.nbytes * index :] = data

    def page(self, number: int, count: int, access: Access) -> Array:
        """The ``count`` stored elements of this layer in page ``number``, as a view."""
        return self._bytes("kv", count * self.dtype.itemsize, access, number).view(self.dtype)


@dataclass(frozen=True)
class GraphInterpreter:
    """Runs LaunchGraphs over ``memory``; ``registry`` says what each symbol computes."""

    registry: Registry
    memory: Memory

    def run(
        self,
        graph: LaunchGraph,
        num_tokens: int,
        num_seqs: int,
        num_logit_rows: int,
        order: Sequence[int] | None = None,
    ) -> None:
        """Run one step of these sizes. ``order`` may be any order of the nodes that respects the edges.

        Raises ProgramError for an unknown symbol, an access beyond an extent, or an order that breaks an edge.
        """
        step = dict(zip(STEP_SCALARS, (num_tokens, num_seqs, num_logit_rows), strict=True))
        specs = {spec.symbol: spec for spec in self.registry.specs}
        done: set[int] = set()
        for index in range(len(graph.nodes)) if order is None else order:
            node = graph.nodes[index]
            spec = specs.get(node.symbol)
            if spec is None or not done.issuperset(node.predecessors):
                need = "a known symbol" if spec is None else "its predecessors to have run"
                raise ProgramError(f"node {node.name!r} ({node.symbol}): need {need}")
            REFERENCES[spec.op](Call(node, spec, self.memory, step))
            done.add(index)


# --- one reference function per op, over bytes ----------------------------------------------------


def _matrix(call: Call, name: str, rows: int, columns: int) -> Array:
    """A packed projection, [rows][columns] float32."""
    panels, pair = round_up(rows, PANEL) // PANEL, call.dtype == ml_dtypes.bfloat16
    shape = (panels, round_up(columns, 2) // 2, PANEL, 2) if pair else (panels, columns, PANEL)
    return unpack_panel16(call.read(name, shape, call.dtype), rows, columns)


def _embedding(call: Call) -> None:
    tokens, hidden = call.integer("num_tokens"), call.integer("H")
    ids = call.read("token_ids", (tokens,), "int32")
    if (ids < 0).any():
        slots = -1 - ids[ids < 0]
        ids[ids < 0] = call.read("last_tokens", (int(slots.max()) + 1,), "int32")[slots]
    table = _matrix(call, "table", int(ids.max()) + 1, hidden)
    call.write("out", table[ids])


def _rms_norm(call: Call) -> None:
    hidden = call.integer("H")
    x, weight = call.read("x", (call.rows, hidden)), call.read("weight", (hidden,))
    scale = np.sqrt(np.mean(x * x, axis=1, keepdims=True) + call.number("eps"))
    call.write("out", x / scale * weight, call.dtype)


def _project(call: Call, features: int) -> Array:
    columns = call.integer("K")
    return call.read("x", (call.rows, columns), call.dtype) @ _matrix(call, "weight", features, columns).T


def _linear(call: Call) -> None:
    call.write("out", _project(call, call.integer("N")))


def _linear_add(call: Call) -> None:
    residual = call.read("residual", (call.rows, call.integer("N")))
    product = _project(call, call.integer("N"))
    if call.integer("rounded"):
        call.write("out", call.round(residual + call.round(product)))
    else:
        call.write("out", residual + product)


def _linear_silu_mul(call: Call) -> None:
    features = call.integer("F")
    gate, up = deinterleave(_project(call, 2 * round_up(features, PANEL)), features)
    with np.errstate(over="ignore"):  # exp(-gate) may be inf: gate / inf is the right limit, -0
        call.write("out", gate / (1 + np.exp(-gate)) * up, call.dtype)


@lru_cache
def page_index(heads: int, page_size: int, head_dim: int, pairs: bool) -> tuple[Array, Array]:
    """Where K and V of (head, position, dim) lie in a layer's page: element indexes [heads][page_size][head_dim].

    K panels hold 16 positions and V panels 16 dims; ``pairs`` (bfloat16) interleaves two dims of K, two
    positions of V.
    """
    half = heads * page_size * head_dim
    flat = np.arange(half)
    if pairs:
        k = flat.reshape(heads, page_size // PANEL, head_dim // 2, PANEL, 2).transpose(0, 1, 3, 2, 4)
        v = flat.reshape(heads, head_dim // PANEL, page_size // 2, PANEL, 2).transpose(0, 2, 4, 1, 3)
    else:
        k = flat.reshape(heads, page_size // PANEL, head_dim, PANEL).transpose(0, 1, 3, 2)
        v = flat.reshape(heads, head_dim // PANEL, page_size, PANEL).transpose(0, 2, 1, 3)
    shape = (heads, page_size, head_dim)
    return k.reshape(shape), half + v.reshape(shape)


def _kv_index(call: Call) -> tuple[Array, Array]:
    pairs = call.dtype == ml_dtypes.bfloat16
    return page_index(call.integer("num_kv_heads"), call.integer("page_size"), call.integer("head_dim"), pairs)


def _rope_table(call: Call) -> None:
    frequencies = call.read("inverse_frequencies", (call.integer("head_dim") // 2,))
    call.write("table", rope_table_of(frequencies, call.integer("num_positions"), call.number("attention_factor")))


def _rope_kv_write(call: Call) -> None:
    tokens, page_size, dim = call.integer("num_tokens"), call.integer("page_size"), call.integer("head_dim")
    heads, kv_heads = call.integer("num_heads"), call.integer("num_kv_heads")
    qkv = call.read("qkv", (tokens, heads + 2 * kv_heads, dim))
    positions = call.read("positions", (tokens,), "int32")
    table = call.read("rope_table", (int(positions.max()) + 1, dim))[positions][:, None]
    cos, sin = np.split(table, 2, axis=2)
    a, b = np.split(qkv[:, : heads + kv_heads], 2, axis=2)
    rotated = np.concatenate([a * cos - b * sin, b * cos + a * sin], axis=2)
    call.write("q", rotated[:, :heads], call.dtype)
    k_index, v_index = _kv_index(call)
    slots = call.read("slot_mapping", (tokens,), "int64")
    for token, (number, offset) in enumerate(zip(*np.divmod(slots, page_size), strict=True)):
        page = call.page(int(number), 2 * k_index.size, Access.WRITE)
        if positions[token] % BLOCK == 0:
            page[v_index[:, offset : offset + BLOCK]] = 0
        page[k_index[:, offset]] = rotated[token, heads:]
        page[v_index[:, offset]] = qkv[token, heads + kv_heads :]


def _paged_attention(call: Call) -> None:
    tokens, seqs, dim = call.integer("num_tokens"), call.integer("num_seqs"), call.integer("head_dim")
    heads, kv_heads, page_size = call.integer("num_heads"), call.integer("num_kv_heads"), call.integer("page_size")
    q = call.read("q", (tokens, kv_heads, heads // kv_heads, dim), call.dtype)
    ends = call.read("cu_seqlens", (seqs + 1,), "int32")
    context_lens = call.read("context_lens", (seqs,), "int32")
    table = call.read("page_table", (seqs, call.integer("pages_per_seq")), "int32")
    index = _kv_index(call)
    out = np.zeros_like(q)
    for seq, context in enumerate(context_lens):
        pages = [call.page(int(n), 2 * index[0].size, Access.READ) for n in table[seq, : -(-context // page_size)]]
        k, v = (
            np.concatenate([page[i] for page in pages], axis=1)[:, :context].astype(np.float32) for i in index
        )  # fmt: skip
        rows = slice(ends[seq], ends[seq + 1])
        out[rows] = _attend(call, q[rows], k, v)
    call.write("out", out, call.dtype)


def _attend(call: Call, q: Array, k: Array, v: Array) -> Array:
    """Causal attention of the last n of L positions: q [n][KV][G][D], k and v [KV][L][D]."""
    scores = np.einsum("nhgd,hld->hgnl", q, k) * call.number("scale")
    last = np.arange(k.shape[1] - len(q), k.shape[1])
    scores = np.where(np.arange(k.shape[1]) <= last[:, None], scores, np.float32(-np.inf))
    weights = np.exp(scores - scores.max(axis=3, keepdims=True))
    stored = weights.astype(call.dtype).astype(np.float32)
    attended = np.einsum("hgnl,hld->hgnd", stored, v) / weights.sum(axis=3, keepdims=True)
    result: Array = attended.transpose(2, 0, 1, 3)
    return result


def _gather_rows(call: Call) -> None:
    rows = call.read("logit_rows", (call.integer("num_logit_rows"),), "int32")
    if len(rows):
        call.write("out", call.read("x", (int(rows.max()) + 1, call.integer("H")))[rows])


def _counts(call: Call) -> dict[str, int]:
    """The sizes of the step by name, as the kernel reads them from step_sizes; and the boundaries of its parts."""
    sizes = dict(zip(STEP_COUNTS, map(int, call.read("step_sizes", (len(STEP_COUNTS),), "int32")), strict=True))
    return {**sizes, **{f"{name}+1": size + 1 for name, size in sizes.items()}}


def _adjust_logits(call: Call) -> None:
    sizes, vocab = _counts(call), call.integer("V")
    if not sizes["num_adjustments"]:
        return
    step = {name: call.read(name, (sizes[str(dim)],), dtype) for name, (dtype, dim) in ADJUST_OPERANDS.items()}
    for name, dim in (("token_ids", "num_tokens"), ("positions", "num_tokens"), ("cu_seqlens", "num_seqs+1")):
        step[name] = call.read(name, (sizes[dim],), "int32")
    ids, slots, rows = step["token_ids"], step["count_slot"], step["adjust_row"]
    step["last_tokens"] = call.read("last_tokens", (int(max(-ids.min(), 0)),), "int32")
    step["token_masks"] = call.read("token_masks", (sizes["num_masks"], mask_words(vocab)), "int32")
    counts = call.read("token_counts", (int(slots.max()) + 1, vocab), "int32")
    adjusted = adjust_rows(call.read("logits", (int(rows.max()) + 1, vocab)), step, counts)
    for slot in slots[slots >= 0]:
        call.write_row("token_counts", int(slot), counts[slot])
    for i in np.flatnonzero(rows >= 0):
        call.write_row("adjusted", int(i), adjusted[i])


def _sample(call: Call) -> None:
    rows = call.integer("num_logit_rows")
    operands = {name: call.read(name, (rows,), dtype) for name, dtype in SAMPLE_OPERANDS.items()}
    slots, vocab = operands["state_slot"], call.integer("V")
    *outputs, last_tokens = sample_rows(
        call.read("logits", (rows, vocab)),
        call.read("adjusted", (int(operands["adjustment"].max(initial=-1)) + 1, vocab)),
        operands,
        np.zeros(int(slots.max(initial=0)) + 1, np.int32),
        call.integer("logprob_shards"),
    )
    names = ("out_token", "out_logprob", "out_rank", "out_top_ids", "out_top_logprobs")
    for name, output in zip(names, outputs, strict=True):
        call.write(name, output, output.dtype)
    for slot in slots[slots >= 0]:
        call.write_row("last_tokens", int(slot), last_tokens[slot])


REFERENCES: Mapping[str, Callable[[Call], None]] = {
    "embedding": _embedding,
    "rms_norm": _rms_norm,
    "linear": _linear,
    "linear_add": _linear_add,
    "linear_silu_mul": _linear_silu_mul,
    "rope_table": _rope_table,
    "rope_kv_write": _rope_kv_write,
    "paged_attention": _paged_attention,
    "gather_rows": _gather_rows,
    "adjust_logits": _adjust_logits,
    "sample": _sample,
}
