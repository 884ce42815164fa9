"""Reading the results of an op from a device: the bytes of each row."""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping, Sequence
from typing import Any

from tokenspeed.artifact import DEVICE_LIBRARY, TargetSection
from tokenspeed.runtime.invariance.recording import RecordedStep
from tokenspeed.step import DTYPE_BYTES
from tokenspeed.values import PlacedValue

_LANES = 16
"""Positions or dimensions that lie side by side in the KV pages of a CPU (artifacts/README.md)."""


class Reader:
    """Bytes of a device's regions; of region host_io those of a GPU's first io set."""

    def __init__(self, device: Any):
        self._device = device

    def read(self, region: str, offset: int, nbytes: int) -> bytes:
        if region == "host_io":
            return bytes(self._device.view("io")[offset : offset + nbytes])
        return bytes(self._device.read(region, offset, nbytes))


class RowReader:
    """Reads rows of values. ``rows`` are ascending row numbers."""

    def __init__(self, reader: Reader, section: TargetSection, page_size: int):
        self._reader = reader
        self._page_bytes = section.kv_page_bytes
        self._page_size = page_size
        self._plain_pages = section.kernel_library == DEVICE_LIBRARY

    def rows(self, value: PlacedValue, rows: Sequence[int]) -> list[bytes]:
        """Of a value whose first dimension counts tokens or logit rows."""
        if not rows:
            return []
        nbytes = _elements(value) * DTYPE_BYTES[value.dtype]
        first, last = rows[0], rows[-1]
        data = self._reader.read(value.region, value.offset + first * nbytes, (last - first + 1) * nbytes)
        return [data[(row - first) * nbytes : (row - first + 1) * nbytes] for row in rows]

    def positions(self, value: PlacedValue, step: RecordedStep, rows: Sequence[int]) -> list[bytes]:
        """K, then V, of the tokens in ``rows`` of a step, from one layer of their KV pages."""
        nbytes = _elements(value) * DTYPE_BYTES[value.dtype]
        pages: dict[int, memoryview] = {}
        found = []
        for row in rows:
            page, at = divmod(step.input("slot_mapping")[row], self._page_size)
            if page not in pages:
                pages[page] = memoryview(self._reader.read("kv", page * self._page_bytes + value.offset, nbytes))
            found.append(self._position(pages[page], value, at))
        return found

    def _position(self, page: memoryview, value: PlacedValue, at: int) -> bytes:
        _, heads, size, dim = value.shape[1:]
        assert isinstance(heads, int) and isinstance(size, int) and isinstance(dim, int)
        if self._plain_pages:
            row = dim * DTYPE_BYTES[value.dtype]
            return b"".join(page[(head * size + at) * row : (head * size + at + 1) * row] for head in range(2 * heads))
        gather = _position_f32 if value.dtype == "float32" else _position_bf16
        return gather(page, heads, size, dim, at)


def _position_f32(page: memoryview, heads: int, size: int, dim: int, at: int) -> bytes:
    """K [H][S/16][D][16] and V [H][D/16][S][16], float32."""
    words = page.cast("I")
    parts = []
    for head in range(heads):
        begin = head * size * dim + at // _LANES * dim * _LANES + at % _LANES
        parts.append(words[begin : begin + dim * _LANES : _LANES].tobytes())
    for head in range(heads):
        for block in range(dim // _LANES):
            begin = (heads + head) * size * dim + (block * size + at) * _LANES
            parts.append(words[begin : begin + _LANES].tobytes())
    return b"".join(parts)


def _position_bf16(page: memoryview, heads: int, size: int, dim: int, at: int) -> bytes:
    """K [H][S/16][D/2][16][2] and V [H][D/16][S/2][16][2], bfloat16."""
    pairs, halves = page.cast("I"), page.cast("H")
    parts = []
    for head in range(heads):
        begin = (head * size * dim + at // _LANES * dim * _LANES) // 2 + at % _LANES
        parts.append(pairs[begin : begin + dim // 2 * _LANES : _LANES].tobytes())
    for head in range(heads):
        for block in range(dim // _LANES):
            begin = (heads + head) * size * dim + block * size * _LANES + at // 2 * 2 * _LANES + at % 2
            parts.append(halves[begin : begin + 2 * _LANES : 2].tobytes())
    return b"".join(parts)


def _elements(value: PlacedValue) -> int:
    """Of one row, or of one KV page's layer."""
    return math.prod(n for n in value.shape[1:] if isinstance(n, int))


def numbers_of(data: bytes, dtype: str) -> list[float]:
    """The elements of a row as numbers."""
    if dtype == "bfloat16":
        halves = memoryview(data).cast("H")
        return list(struct.unpack(f"<{len(halves)}f", b"".join(struct.pack("<I", half << 16) for half in halves)))
    formats: Mapping[str, Any] = {"float32": "f", "int32": "i", "int64": "q", "uint64": "Q", "uint8": "B"}
    return list(memoryview(data).cast(formats[dtype]))
