"""Weights: repacking checkpoint tensors into the layouts that the chosen kernels read, and writing them.

Layouts (a KernelSpec names one):

- ``panel16``: a matrix [N][K] in panels of 16 rows, N padded with zero rows to whole panels.
  float32: [N/16][K][16]. bfloat16: [N/16][K/2][16][2], K padded with a zero column to an even number.
- ``rows``: row-major as it is, in the value's own dtype (norm weights and the rope table: float32).

The file is a safetensors file (https://github.com/huggingface/safetensors, "Format") whose tensors start at
multiples of 64 bytes of a data section that itself starts at one, so that it can be read straight into place.
Packing streams: at any time it holds the tensors that one or two weights are made of, and some megabytes per thread.
"""

from __future__ import annotations

import json
import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Any, BinaryIO, Protocol, TypeAlias

import ml_dtypes
import numpy as np
import numpy.typing as npt

from tokenspeed.compile.derive import interleave, rope_frequencies, rope_table
from tokenspeed.compile.ops import PANEL, round_up
from tokenspeed.compile.program import Program, Value
from tokenspeed.errors import CheckpointError, ProgramError
from tokenspeed.step import ALIGNMENT, PlacedTensor, align

Array: TypeAlias = npt.NDArray[Any]
Progress: TypeAlias = Callable[[int, int], None]
"""Called with (bytes written, bytes in all) after each block."""

LAYOUTS = ("panel16", "rows")
_SAFETENSORS_DTYPES = {"float32": "F32", "bfloat16": "BF16"}
_BLOCK_BYTES = 8 << 20
"""Matrix bytes that are packed at a time: small enough for the caches, large enough for NumPy."""


class TensorSource(Protocol):
    """What packing asks of a checkpoint."""

    def read(self, name: str) -> Array:
        """The tensor ``name`` in the shape that the Program says; float32, float16 or bfloat16."""


@dataclass(frozen=True)
class PackedWeight:
    """One weight of the Program in one layout, placed in the data section of the file."""

    value: str
    layout: str
    tensor: PlacedTensor


@dataclass(frozen=True)
class WeightPlan:
    """Where every packed weight lies; known before any tensor is read.

    ``header`` are the bytes of the file before its data section, so ``data_offset`` is where that starts.
    Targets with equal plans share one file.
    """

    weights: tuple[PackedWeight, ...]
    nbytes: int
    header: bytes

    @property
    def data_offset(self) -> int:
        return len(self.header)

    @property
    def file_bytes(self) -> int:
        return len(self.header) + self.nbytes

    @property
    def name(self) -> str:
        """The layouts as a file stem."""
        dtypes = {w.tensor.dtype for w in self.weights if w.layout != "rows"} or {"float32"}
        return "-".join((*sorted({w.layout for w in self.weights}), *sorted(dtypes)))

    def tensors(self) -> dict[tuple[str, str], PlacedTensor]:
        """The packed tensors by (value, layout)."""
        return {(w.value, w.layout): w.tensor for w in self.weights}


def plan_weights(program: Program, needed: Iterable[tuple[str, str]]) -> WeightPlan:
    """Place the weights ``needed``, pairs of (value, layout), in the order of the Program's values.

    A pair that several ops need is stored once. A weight in two layouts is stored in both.
    """
    pairs = sorted(set(needed))
    order = {name: i for i, name in enumerate(program.values)}
    pairs.sort(key=lambda pair: (order[pair[0]], pair[1]))
    several = {name for name, _ in pairs if sum(name == other for other, _ in pairs) > 1}
    weights, offset = [], 0
    for name, layout in pairs:
        value = program.values[name]
        stored = f"{name}.{layout}" if name in several else name
        tensor = PlacedTensor(stored, value.dtype, packed_shape(value, layout), offset)
        weights.append(PackedWeight(name, layout, tensor))
        offset = align(offset + tensor.nbytes)
    return WeightPlan(tuple(weights), offset, _safetensors_header(weights, offset))


def packed_shape(value: Value, layout: str) -> tuple[int, ...]:
    """Shape of ``value`` in ``layout``. Raises ProgramError for a value that has no such layout."""
    shape = tuple(dim for dim in value.shape if isinstance(dim, int))
    if len(shape) != len(value.shape) or value.dtype not in _SAFETENSORS_DTYPES:
        raise ProgramError(f"weight {value.name!r}: need a fixed shape of float32 or bfloat16, have {value.type}")
    if layout == "rows":
        return shape
    if layout != "panel16" or len(shape) != 2:
        raise ProgramError(f"weight {value.name!r}: need layout {' or '.join(LAYOUTS)} of a matrix, have {layout!r} "
                           f"of {value.type}")  # fmt: skip
    panels, columns = round_up(shape[0], PANEL) // PANEL, shape[1]
    if value.dtype == "float32":
        return (panels, columns, PANEL)
    return (panels, round_up(columns, 2) // 2, PANEL, 2)


def _safetensors_header(weights: Iterable[PackedWeight], nbytes: int) -> bytes:
    """Length and JSON, padded with spaces to the alignment. Gaps between tensors, which the format forbids, are
    tensors of their own named ``padding.N``."""
    entries: dict[str, Any] = {"__metadata__": {"format": "tokenspeed"}}
    end = 0

    def fill(upto: int) -> None:
        if upto > end:
            entries[f"padding.{end}"] = {"dtype": "U8", "shape": [upto - end], "data_offsets": [end, upto]}

    for weight in weights:
        tensor = weight.tensor
        fill(tensor.offset)
        end = tensor.offset + tensor.nbytes
        entries[tensor.name] = {
            "dtype": _SAFETENSORS_DTYPES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [tensor.offset, end],
        }
    fill(nbytes)
    text = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
    text = text.ljust(align(8 + len(text)) - 8)
    return len(text).to_bytes(8, "little") + text


def write_weights(
    plan: WeightPlan, program: Program, source: TensorSource, out: BinaryIO, progress: Progress | None = None
) -> None:
    """Write the file of ``plan`` to ``out``, strictly forwards (so ``out`` may hash what passes).

    Blocks are packed by all processors that this process may use, ahead of the one that is written.

    Raises CheckpointError for a tensor of another shape than the Program says; OSError of ``out`` passes through.
    """
    out.write(plan.header)
    done = 0
    threads = len(os.sched_getaffinity(0))
    with ThreadPoolExecutor(threads) as pool:
        for start, block in _ahead(pool, _placed_blocks(plan, program, source), 2 * threads):
            if start is not None:
                assert 0 <= start - done < ALIGNMENT, f"packed {done} bytes of a weight that ends near {start}"
                out.write(bytes(start - done))
                done = start
            packed = block.result()
            out.write(packed.data)
            done += packed.nbytes
            if progress is not None:
                progress(done, plan.nbytes)
    assert 0 <= plan.nbytes - done < ALIGNMENT, f"packed {done} bytes of {plan.nbytes}"
    out.write(bytes(plan.nbytes - done))
    if progress is not None:
        progress(plan.nbytes, plan.nbytes)


def _placed_blocks(
    plan: WeightPlan, program: Program, source: TensorSource
) -> Iterator[tuple[int | None, Callable[[], Array]]]:
    """What makes each block of the data section, in order; with the first of a weight, where that starts."""
    for weight in plan.weights:
        start: int | None = weight.tensor.offset
        for block in packed_blocks(program, program.values[weight.value], weight.layout, source):
            yield start, block
            start = None


def _ahead(
    pool: ThreadPoolExecutor, tasks: Iterable[tuple[int | None, Callable[[], Array]]], depth: int
) -> Iterator[tuple[int | None, Future[Array]]]:
    """The tasks in order, running; at most ``depth`` of them started beyond the one that is asked for."""
    running: deque[tuple[int | None, Future[Array]]] = deque()
    for start, task in tasks:
        running.append((start, pool.submit(task)))
        if len(running) > depth:
            yield running.popleft()
    yield from running


def packed_blocks(program: Program, value: Value, layout: str, source: TensorSource) -> Iterator[Callable[[], Array]]:
    """What makes the packed bytes of ``value``, in order, as C-contiguous uint8 arrays of some megabytes.

    The results may be made in any thread and order; their tensors are read here.
    """
    blocks = _row_blocks(program, value, source)
    if layout == "rows":
        for make in blocks:
            yield partial(_packed_rows, value, make)
        return
    for rows in _whole_panels(make() for make in blocks):
        yield partial(_packed_panels, value, rows)


def _packed_rows(value: Value, make: Callable[[], Array]) -> Array:
    return _bytes(_finite(value, _cast(make(), value.dtype)))


def _packed_panels(value: Value, rows: Array) -> Array:
    return _bytes(pack_panel16(_finite(value, _cast(rows, value.dtype))))


def pack_panel16(matrix: Array) -> Array:
    """[N][K] float32 or bfloat16 -> panels (see the module), N and K padded with zeros."""
    rows, columns = matrix.shape
    pair = 2 if matrix.dtype == ml_dtypes.bfloat16 else 1
    padded = round_up(rows, PANEL), round_up(columns, pair)
    if padded != matrix.shape:
        matrix = np.pad(matrix, ((0, padded[0] - rows), (0, padded[1] - columns)))
    # A pair of bfloat16 moves as one 32-bit element, which is also what float32 is.
    elements = np.ascontiguousarray(matrix).view(np.uint32)
    panels = elements.reshape(-1, PANEL, padded[1] // pair).transpose(0, 2, 1)
    packed = np.ascontiguousarray(panels).view(matrix.dtype)
    return packed if pair == 1 else packed.reshape(*panels.shape, 2)


def unpack_panel16(panels: Array, rows: int, columns: int) -> Array:
    """The inverse of ``pack_panel16``: [rows][columns] of the packed dtype."""
    matrix = panels.swapaxes(1, 2)
    return matrix.reshape(panels.shape[0] * PANEL, -1)[:rows, :columns]


def _cast(array: Array, dtype: str) -> Array:
    """``array`` in ``dtype``; bfloat16 is rounded to nearest even (from float16 through float32, exactly)."""
    if dtype == "float32" or array.dtype == np.float16:
        array = array.astype(np.float32, copy=False)
    with np.errstate(all="ignore"):  # what becomes infinite is refused by name
        return array if dtype == "float32" else array.astype(ml_dtypes.bfloat16, copy=False)


def _finite(value: Value, array: Array) -> Array:
    """``array``, unless it holds NaN or infinity: a model with such a weight answers every prompt with noise."""
    if array.dtype == np.float32:
        sound = bool(np.isfinite(array).all())
    else:  # all ones in the exponent of a bfloat16; faster than a conversion
        sound = not bool(((np.ascontiguousarray(array).view(np.uint16) & 0x7F80) == 0x7F80).any())
    if not sound:
        raise CheckpointError(
            f"weight {value.name!r} holds values that are not finite in {value.dtype}",
            hint="fetch the checkpoint again; if it is whole, build it with --dtype float32",
        )
    return array


def _bytes(array: Array) -> Array:
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)


def _whole_panels(blocks: Iterable[Array]) -> Iterator[Array]:
    """The rows of ``blocks`` again, cut so that every block but the last holds whole panels."""
    rest: Array | None = None
    for block in blocks:
        rows = block if rest is None or not len(rest) else np.concatenate([rest, block])
        whole = len(rows) // PANEL * PANEL
        if whole:
            yield rows[:whole]
        rest = rows[whole:]
    if rest is not None and len(rest):
        yield rest


def _row_blocks(program: Program, value: Value, source: TensorSource) -> Iterator[Callable[[], Array]]:
    """What makes the rows of a weight in its logical shape, in blocks, whatever it is made from."""
    made = value.source
    if made is None:
        for block in _cut(_read(source, value)):
            yield partial(np.asarray, block)
        return
    parts = [program.values[name] for name in made.inputs]
    match made.how:
        case "concat":
            for part in parts:
                yield from _row_blocks(program, part, source)
        case "interleave16":
            gate, up = (_whole(program, part, source) for part in parts)
            for g, u in zip(_cut(gate), _cut(up), strict=True):
                yield partial(interleave, g, u)
        case "rope_table":
            rows = value.shape[0]
            assert isinstance(rows, int), value
            yield partial(rope_table, made, rows)
        case "rope_frequencies":
            yield partial(rope_frequencies, made)
        case _:
            raise ProgramError(f"weight {value.name!r}: need a source that can be packed, have {made.how!r}")


def _whole(program: Program, value: Value, source: TensorSource) -> Array:
    if value.source is None:
        return _read(source, value)
    return np.concatenate([make() for make in _row_blocks(program, value, source)])


def _read(source: TensorSource, value: Value) -> Array:
    array = source.read(value.name)
    if array.shape != value.shape:
        raise CheckpointError(f"tensor {value.name!r}: need shape {value.shape}, have {array.shape}")
    return array


def _cut(array: Array) -> Iterator[Array]:
    """Blocks of whole panels of rows (of anything, for a vector)."""
    row_bytes = prod(array.shape[1:]) * 4
    rows = max(1, _BLOCK_BYTES // (row_bytes * PANEL)) * PANEL
    return (array[start : start + rows] for start in range(0, len(array), rows))
