"""The safetensors container: its index, checked against the file, and tensors as views of the mapped file.

Format: https://huggingface.co/docs/safetensors: an 8-byte little-endian length, a JSON header of that length, data.
"""

from __future__ import annotations

import json
import math
import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tokenspeed.compile.checkpoint import BFLOAT16, TensorInfo
from tokenspeed.errors import CheckpointError

_DTYPES = {"F32": np.dtype(np.float32), "F16": np.dtype(np.float16), "BF16": BFLOAT16}
_LENGTH_BYTES = 8


@dataclass(frozen=True)
class _Entry:
    info: TensorInfo
    offset: int


class SafetensorsFile:
    """An open safetensors file; ``tensors`` maps names to element types and shapes."""

    def __init__(self, path: Path):
        self.path = path
        self._map = _map_file(path)
        header, data_start = self._read_header()
        header.pop("__metadata__", None)
        self._entries = {name: self._entry(name, fields, data_start) for name, fields in header.items()}
        self.tensors = {name: entry.info for name, entry in self._entries.items()}

    def read(self, name: str) -> NDArray[Any]:
        """A read-only view of one tensor; its pages are read from disk when they are touched."""
        info, offset = self._entries[name].info, self._entries[name].offset
        return np.frombuffer(self._map, info.dtype, math.prod(info.shape), offset).reshape(info.shape)

    def _read_header(self) -> tuple[dict[str, Any], int]:
        size = len(self._map)
        length = struct.unpack_from("<Q", self._map)[0] if size >= _LENGTH_BYTES else 0
        if length == 0 or length > size - _LENGTH_BYTES:
            raise CheckpointError(
                f"{self.path} is truncated or not a safetensors file: its header claims {length} bytes, "
                f"but the file has {size}",
                hint="fetch the checkpoint again",
            )
        end = _LENGTH_BYTES + length
        try:
            header = json.loads(self._map[_LENGTH_BYTES:end])
        except (ValueError, RecursionError) as error:  # ValueError also covers bad UTF-8
            raise CheckpointError(
                f"{self.path} is damaged: its header is not JSON ({error})", hint="fetch the checkpoint again"
            ) from error
        if not isinstance(header, dict):
            raise CheckpointError(f"{self.path} is damaged: its header is not a JSON object")
        return header, end

    def _entry(self, name: str, fields: Any, data_start: int) -> _Entry:
        try:
            dtype_name, shape = fields["dtype"], tuple(fields["shape"])
            begin, end = fields["data_offsets"]
            sound = all(isinstance(n, int) and n >= 0 for n in (*shape, begin, end))
        except (TypeError, KeyError, ValueError):
            sound = False
        if not sound:
            raise CheckpointError(
                f"{self.path} is damaged: the header's entry for {name} needs dtype, shape and data_offsets, "
                f"has {fields!r}",
                hint="fetch the checkpoint again",
            )
        dtype = _DTYPES.get(dtype_name)
        if dtype is None:
            raise CheckpointError(
                f"{self.path}: tensor {name} has type {dtype_name}: need one of {', '.join(_DTYPES)}",
                hint="use the unquantized checkpoint",
            )
        num_bytes = math.prod(shape) * dtype.itemsize
        if end - begin != num_bytes:
            raise CheckpointError(
                f"{self.path} is damaged: tensor {name} needs {num_bytes} bytes for {dtype_name} {list(shape)}, "
                f"its entry spans {end - begin}"
            )
        if data_start + end > len(self._map):
            raise CheckpointError(
                f"{self.path} is truncated: tensor {name} needs bytes up to {data_start + end}, "
                f"but the file has {len(self._map)}",
                hint="fetch the checkpoint again",
            )
        return _Entry(TensorInfo(dtype, shape), data_start + begin)


def _map_file(path: Path) -> mmap.mmap:
    try:
        with path.open("rb") as file:
            if path.stat().st_size == 0:
                raise CheckpointError(f"{path} is empty: need a safetensors file", hint="fetch the checkpoint again")
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror}") from error
