"""A MessagePack decoder (https://github.com/msgpack/msgpack/blob/master/spec.md) for metadata of code objects."""

from __future__ import annotations

import struct
from typing import Any

from tokenspeed.device_code.model import damaged

MAX_BYTES = 8 << 20
"""Most bytes that are decoded: values take some ten times the memory of their bytes."""
_MAX_DEPTH = 32
_SCALARS = {
    0xCA: ">f", 0xCB: ">d", 0xCC: ">B", 0xCD: ">H", 0xCE: ">I", 0xCF: ">Q",
    0xD0: ">b", 0xD1: ">h", 0xD2: ">i", 0xD3: ">q",
}  # fmt: skip
_LENGTHS = {
    0xC4: ">B", 0xC5: ">H", 0xC6: ">I", 0xD9: ">B", 0xDA: ">H", 0xDB: ">I",
    0xDC: ">H", 0xDD: ">I", 0xDE: ">H", 0xDF: ">I",
}  # fmt: skip
_CONSTANTS = {0xC0: None, 0xC2: False, 0xC3: True}


def decode(data: bytes | memoryview) -> Any:
    """The one value that ``data`` holds: None, bool, int, float, str, bytes, list, or dict with texts as keys.

    Raises ArtifactError, and nothing else, for any other bytes.
    """
    if len(data) > MAX_BYTES:
        raise damaged(f"need metadata of at most {MAX_BYTES} bytes, have {len(data)}")
    decoder = _Decoder(bytes(data))
    value = decoder.value(0)
    if decoder.at != len(data):
        raise damaged(f"need {decoder.at} bytes of metadata, have {len(data)}")
    return value


class _Decoder:
    def __init__(self, data: bytes):
        self._data = data
        self.at = 0

    def value(self, depth: int) -> Any:
        if depth > _MAX_DEPTH:
            raise damaged(f"need metadata nested at most {_MAX_DEPTH} deep, have more")
        tag = self._take(1)[0]
        if tag <= 0x7F or tag >= 0xE0:
            return tag if tag <= 0x7F else tag - 0x100
        if tag in _CONSTANTS:
            return _CONSTANTS[tag]
        if tag in _SCALARS:
            return self._number(_SCALARS[tag])
        if tag <= 0xBF:
            kind, length = (0xDE, tag & 15) if tag <= 0x8F else (0xDC, tag & 15) if tag <= 0x9F else (0xD9, tag & 31)
        elif tag in _LENGTHS:
            kind, length = tag, self._number(_LENGTHS[tag])
        else:
            raise damaged(f"need a plain value in metadata, have kind {tag:#x}")
        if kind <= 0xC6:
            return self._take(length)
        if kind <= 0xDB:
            return self._text(length)
        if length > len(self._data) - self.at:
            raise damaged(f"need {length} values in metadata, have {len(self._data) - self.at} bytes")
        return self._array(length, depth) if kind <= 0xDD else self._map(length, depth)

    def _take(self, size: int) -> bytes:
        if size > len(self._data) - self.at:
            raise damaged(f"need {size} bytes of metadata at {self.at}, have {len(self._data) - self.at}")
        self.at += size
        return self._data[self.at - size : self.at]

    def _number(self, form: str) -> Any:
        return struct.unpack(form, self._take(struct.calcsize(form)))[0]

    def _text(self, length: int) -> str:
        try:
            return self._take(length).decode()
        except UnicodeDecodeError:
            raise damaged("need texts in UTF-8 in metadata, have another") from None

    def _array(self, length: int, depth: int) -> list[Any]:
        return [self.value(depth + 1) for _ in range(length)]

    def _map(self, length: int, depth: int) -> dict[str, Any]:
        result: dict[str, Any] = {}
        for _ in range(length):
            key = self.value(depth + 1)
            if not isinstance(key, str) or key in result:
                raise damaged(f"need texts as keys of metadata, each once, have {key!r:.40}")
            result[key] = self.value(depth + 1)
        return result
