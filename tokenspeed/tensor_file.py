"""Files of named tensors in the safetensors format, read and written without numpy.

Format: https://github.com/huggingface/safetensors ("Format"): the header's length as 8 little-endian bytes, the header
(a JSON object: name -> dtype, shape, data_offsets; texts under ``__metadata__``), then the tensors' bytes.

The runtime compares packed weights by their headers, and keeps log-probabilities to align by in such files. Checkpoints
have a reader of their own, ``compile/safetensors_file.py``, which gives numpy arrays.
"""

from __future__ import annotations

import json
import math
import os
import stat
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tokenspeed import json_check

ITEM_BYTES = {
    "F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I64": 8, "I32": 4, "I16": 2, "I8": 1,
    "U64": 8, "U32": 4, "U16": 2, "U8": 1, "BOOL": 1,
}  # fmt: skip
"""Bytes of one element, by the format's name of the type."""
MAX_HEADER_BYTES = 100_000_000
"""Of the format."""
_LENGTH_BYTES = 8


@dataclass(frozen=True)
class TensorEntry:
    """One tensor: ``offset`` and ``nbytes`` count within the data, behind the header."""

    dtype: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int


@dataclass(frozen=True)
class TensorIndex:
    """What a header says. ``data_offset`` is where the data begins, ``data_bytes`` what of it the file has."""

    entries: Mapping[str, TensorEntry]
    metadata: Mapping[str, str]
    data_offset: int
    data_bytes: int


@dataclass(frozen=True)
class Tensor:
    """One tensor to be written; ``data`` is little-endian."""

    dtype: str
    shape: tuple[int, ...]
    data: bytes = field(repr=False)


def open_at_once(path: str, flags: int) -> int:
    """An ``opener`` for files that others name: a pipe without a writer would keep its opening waiting for one."""
    return os.open(path, flags | os.O_NONBLOCK)


def read_index(path: str | os.PathLike[str], *, offset: int = 0, nbytes: int | None = None) -> TensorIndex:
    """The header of the file at ``path``, or of ``nbytes`` that begin at ``offset`` in it.

    Raises:
        OSError: it cannot be read.
        ValueError: it is not such a file, or is damaged or cut short; the text says how.
    """
    with open(path, "rb", opener=open_at_once) as file:
        status = os.fstat(file.fileno())
        if not stat.S_ISREG(status.st_mode):
            raise ValueError("it is no ordinary file")
        size = status.st_size - offset if nbytes is None else nbytes
        file.seek(offset)
        first = file.read(_LENGTH_BYTES)
        length = int.from_bytes(first, "little")
        if len(first) < _LENGTH_BYTES or not 2 <= length <= min(MAX_HEADER_BYTES, size - _LENGTH_BYTES):
            raise ValueError(f"it is no safetensors file, or cut short: it has {max(size, 0)} bytes")
        text = file.read(length)
    if len(text) < length:
        raise ValueError("it became shorter while it was read")
    return _parse_index(text, _LENGTH_BYTES + length, size)


def _parse_index(text: bytes, data_offset: int, size: int) -> TensorIndex:
    try:
        raw = json_check.parse(text)
        json_check.check(raw, {...: dict}, "its header")
        metadata = raw.pop("__metadata__", {})
        json_check.check(metadata, {...: str}, "its metadata")
        entries = {name: _entry(name, fields) for name, fields in raw.items()}
    except RecursionError:
        raise ValueError("its header is nested too deeply") from None
    except json.JSONDecodeError as e:
        raise ValueError(f"its header is not JSON ({e})") from None
    data_bytes = size - data_offset
    for name, entry in entries.items():
        if entry.offset + entry.nbytes > data_bytes:
            end = data_offset + entry.offset + entry.nbytes
            raise ValueError(f"it is cut short: tensor {name} ends at byte {end}, and there are {size}")
    return TensorIndex(entries, metadata, data_offset, data_bytes)


def _entry(name: str, fields: Any) -> TensorEntry:
    where = f"tensor {name}"
    json_check.check(fields, {"dtype": str, "shape": [int], "data_offsets": [int]}, where)
    dtype, shape, offsets = fields["dtype"], tuple(fields["shape"]), fields["data_offsets"]
    if dtype not in ITEM_BYTES:
        raise ValueError(f"{where} has the unknown type {dtype[:20]!r}")
    if len(offsets) != 2 or not 0 <= offsets[0] <= offsets[1] or min(shape, default=0) < 0:
        raise ValueError(f"{where} has a shape or offsets that are none: {shape}, {offsets}")
    nbytes = math.prod(shape) * ITEM_BYTES[dtype]
    if nbytes != offsets[1] - offsets[0]:
        raise ValueError(f"{where} of {dtype} {list(shape)} needs {nbytes} bytes, and its offsets span another number")
    return TensorEntry(dtype, shape, offsets[0], nbytes)


def read_tensor(path: str | os.PathLike[str], index: TensorIndex, name: str) -> bytes:
    """The bytes of one tensor. Raises OSError, ValueError when the file has become shorter."""
    entry = index.entries[name]
    with open(path, "rb") as file:
        file.seek(index.data_offset + entry.offset)
        data = file.read(entry.nbytes)
    if len(data) < entry.nbytes:
        raise ValueError("it became shorter while it was read")
    return data


def encode(tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> bytes:
    """The whole file; equal arguments give equal bytes. Data follows the order of ``tensors``, each closely."""
    header: dict[str, Any] = {"__metadata__": {name: metadata[name] for name in sorted(metadata)}}
    at = 0
    for name, tensor in tensors.items():
        assert len(tensor.data) == math.prod(tensor.shape) * ITEM_BYTES[tensor.dtype], name
        header[name] = {"dtype": tensor.dtype, "shape": list(tensor.shape), "data_offsets": [at, at + len(tensor.data)]}
        at += len(tensor.data)
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text = text.ljust(-(-(len(text) + _LENGTH_BYTES) // 64) * 64 - _LENGTH_BYTES)  # the data begins at a multiple of 64
    return b"".join([len(text).to_bytes(_LENGTH_BYTES, "little"), text, *(t.data for t in tensors.values())])


def write(path: str | os.PathLike[str], tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> None:
    """Write a file that is there whole or not at all. Raises OSError."""
    target = Path(path)
    part = target.with_name(f".{target.name}.{os.getpid()}")
    try:
        with open(part, "wb") as file:
            file.write(encode(tensors, metadata))
        part.replace(target)
    except BaseException:
        part.unlink(missing_ok=True)
        raise
