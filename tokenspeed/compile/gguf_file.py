"""The GGUF container: metadata and tensor index, parsed with every length checked against the file.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md (versions 2 and 3, little-endian). The ``gguf``
package's own reader makes a NumPy view of every string, which takes seconds for a 50,000-token vocabulary and
does not notice truncation; only its table of types and its dequantization are used here, imported when needed.
"""

from __future__ import annotations

import math
import mmap
import struct
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tokenspeed.compile.checkpoint import BFLOAT16, TensorInfo
from tokenspeed.errors import CheckpointError

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_DEFAULT_ALIGNMENT = 32
_MAX_DIMS = 4
_STRING, _ARRAY, _BOOL = 8, 9, 7
# Metadata value type -> struct format of one value.
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", _BOOL: "?", 10: "Q", 11: "q", 12: "d"}
# Tensor types that NumPy (with ml_dtypes) holds as they are; all others are dequantized to float32.
_PLAIN = {"F32": np.dtype(np.float32), "F16": np.dtype(np.float16), "BF16": BFLOAT16}


@dataclass(frozen=True)
class GGUFTensor:
    """One entry of the tensor index: ``shape`` is row-major, ``offset`` and ``num_bytes`` lie within the file."""

    name: str
    type_name: str
    shape: tuple[int, ...]
    offset: int
    num_bytes: int

    @property
    def info(self) -> TensorInfo:
        return TensorInfo(_PLAIN.get(self.type_name, np.dtype(np.float32)), self.shape)


class GGUFFile:
    """An open GGUF file: ``metadata`` by key and ``tensors`` by name. Tensor data stays on disk until ``read``."""

    def __init__(self, path: Path):
        self.path = path
        self._map = _map_file(path)
        cursor = _Cursor(self._map, path)
        num_tensors, num_keys = _read_header(cursor)
        self.metadata: dict[str, Any] = {}
        for _ in range(num_keys):
            key = cursor.text()
            self.metadata[key] = cursor.value(cursor.number("I"))
        entries = [_read_entry(cursor) for _ in range(num_tensors)]
        alignment = self.metadata.get("general.alignment", _DEFAULT_ALIGNMENT)
        if not isinstance(alignment, int) or alignment < 1 or alignment & (alignment - 1):
            raise CheckpointError(f"{path}: need a power of two as general.alignment, have {alignment!r}")
        data_start = -(-cursor.position // alignment) * alignment
        self.tensors: dict[str, GGUFTensor] = {}
        for entry in entries:
            tensor = _locate(entry, data_start, len(self._map), path)
            if tensor.name in self.tensors:
                raise CheckpointError(f"{path}: tensor {tensor.name} is listed twice")
            self.tensors[tensor.name] = tensor

    def read(self, tensor: GGUFTensor, row_order: NDArray[np.intp] | None = None) -> NDArray[Any]:
        """A tensor's values, dequantized if need be, its rows (first dimension) picked in ``row_order``."""
        raw = np.frombuffer(self._map, np.uint8, tensor.num_bytes, tensor.offset)
        plain = _PLAIN.get(tensor.type_name)
        # Rows are permuted before dequantization: a row is whole blocks, and the bytes are fewer.
        rows = raw.reshape(tensor.shape[0], -1) if len(tensor.shape) > 1 else raw.reshape(1, -1)
        if row_order is not None:
            rows = rows[row_order]
        values: NDArray[Any] = _dequantize(rows, tensor.type_name) if plain is None else rows.view(plain)
        return values.reshape(tensor.shape)


class _Cursor:
    """Reads values one after another; a value that would end past the file is a CheckpointError."""

    def __init__(self, data: mmap.mmap, path: Path):
        self.data = data
        self.path = path
        self.position = 0

    def take(self, num_bytes: int) -> int:
        """Advance over ``num_bytes`` and return where they start."""
        start = self.position
        if num_bytes > len(self.data) - start:
            raise CheckpointError(
                f"{self.path} is truncated or damaged: need {num_bytes} bytes of header at offset {start}, "
                f"but the file has {len(self.data)} bytes",
                hint="fetch the checkpoint again",
            )
        self.position = start + num_bytes
        return start

    def number(self, code: str) -> Any:
        start = self.take(struct.calcsize(code))
        return struct.unpack_from("<" + code, self.data, start)[0]

    def text(self) -> str:
        length = self.number("Q")
        start = self.take(length)
        # Vocabularies hold the odd broken character; it must not keep the file from opening.
        return self.data[start : start + length].decode("utf-8", errors="replace")

    def value(self, kind: int) -> Any:
        if kind == _STRING:
            return self.text()
        if kind in _SCALARS:
            return self.number(_SCALARS[kind])
        if kind == _ARRAY:
            return self._array()
        raise CheckpointError(
            f"{self.path} is damaged: unknown metadata type {kind} at offset {self.position}",
            hint="fetch the checkpoint again",
        )

    def _array(self) -> list[Any]:
        kind, count = self.number("I"), self.number("Q")
        if kind == _STRING:
            return [self.text() for _ in range(count)]
        if kind in _SCALARS:
            code = _SCALARS[kind]
            start = self.take(count * struct.calcsize(code))
            return list(struct.unpack_from(f"<{count}{code}", self.data, start))
        raise CheckpointError(
            f"{self.path} is damaged: unknown metadata array type {kind} at offset {self.position}",
            hint="fetch the checkpoint again",
        )


def _map_file(path: Path) -> mmap.mmap:
    try:
        with path.open("rb") as file:
            if path.stat().st_size == 0:
                raise CheckpointError(f"{path} is empty: need a GGUF file", hint="fetch the checkpoint again")
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror}") from error


def _read_header(cursor: _Cursor) -> tuple[int, int]:
    """Check magic and version; return the numbers of tensors and of metadata keys."""
    path, data = cursor.path, cursor.data
    magic = data[:4]
    if magic != _MAGIC:
        raise CheckpointError(
            f"{path} is not a GGUF file: need it to begin with {_MAGIC!r}, have {magic!r}",
            hint="give a .gguf file or a Hugging Face directory",
        )
    cursor.take(4)
    version = cursor.number("I")
    if version not in _VERSIONS:
        kind = "a big-endian file" if version and not version & 0xFFFF else f"version {version}"
        raise CheckpointError(
            f"{path}: need a little-endian GGUF file of version 2 or 3, have {kind}",
            hint="convert the model again with a current converter",
        )
    return cursor.number("Q"), cursor.number("Q")


def _read_entry(cursor: _Cursor) -> tuple[str, list[int], int, int]:
    """One entry of the tensor index: name, dimensions (fastest first), type number, offset in the data."""
    name, num_dims = cursor.text(), cursor.number("I")
    if not 1 <= num_dims <= _MAX_DIMS:
        raise CheckpointError(
            f"{cursor.path} is damaged: tensor {name!r} claims {num_dims} dimensions: need 1 to {_MAX_DIMS}",
            hint="fetch the checkpoint again",
        )
    return name, [cursor.number("Q") for _ in range(num_dims)], cursor.number("I"), cursor.number("Q")


def _locate(entry: tuple[str, list[int], int, int], data_start: int, file_size: int, path: Path) -> GGUFTensor:
    from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

    name, dims, type_number, offset = entry
    try:
        kind = GGMLQuantizationType(type_number)
    except ValueError:
        raise CheckpointError(
            f"{path}: tensor {name} has the unknown type number {type_number}",
            hint="upgrade the gguf package, or convert the model to a common type such as Q8_0",
        ) from None
    block_values, block_bytes = GGML_QUANT_SIZES[kind]
    if dims[0] % block_values or not all(dims):
        raise CheckpointError(
            f"{path} is damaged: tensor {name} of type {kind.name} needs rows that are a positive multiple of "
            f"{block_values} values, has shape {dims[::-1]}"
        )
    num_bytes = math.prod(dims) // block_values * block_bytes
    start = data_start + offset
    if start + num_bytes > file_size:
        raise CheckpointError(
            f"{path} is truncated: tensor {name} needs bytes {start} to {start + num_bytes}, "
            f"but the file has {file_size} bytes",
            hint="fetch the checkpoint again",
        )
    return GGUFTensor(name, kind.name, tuple(reversed(dims)), start, num_bytes)


@cache
def can_read(type_name: str) -> bool:
    """Whether tensors of this GGUF type can be read."""
    from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

    if type_name in _PLAIN:
        return True
    block_bytes = GGML_QUANT_SIZES[GGMLQuantizationType[type_name]][1]
    try:
        _dequantize(np.zeros((1, block_bytes), dtype=np.uint8), type_name)
    except NotImplementedError:
        return False
    return True


def _dequantize(rows: NDArray[np.uint8], type_name: str) -> NDArray[np.float32]:
    from gguf import quants
    from gguf.constants import GGMLQuantizationType

    values: NDArray[np.float32] = quants.dequantize(rows, GGMLQuantizationType[type_name])
    return values
