"""SentencePiece's tokenizer.model: the few fields of its protobuf that a tokenizer needs.

Schema: https://github.com/google/sentencepiece/blob/master/src/sentencepiece_model.proto; wire format:
https://protobuf.dev/programming-guides/encoding.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tokenspeed.compile.tokenizer import TokenType
from tokenspeed.errors import CheckpointError

_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5
_UNIGRAM, _BPE = 1, 2
_Value = int | bytes


@dataclass(frozen=True)
class SentencePieceModel:
    """A vocabulary with scores and types, and how text is normalized. Ids are -1 where a role is unused."""

    pieces: tuple[str, ...]
    scores: tuple[float, ...]
    types: tuple[int, ...]
    unigram: bool
    unk_id: int
    bos_id: int
    eos_id: int
    add_space_prefix: bool
    collapse_spaces: bool
    charsmap: bytes


def read_sentencepiece(path: Path) -> SentencePieceModel:
    """Parse a tokenizer.model. Raises CheckpointError if it is no SentencePiece BPE or unigram model."""
    try:
        return _parse(path.read_bytes(), path)
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror}") from error
    except (ValueError, struct.error, IndexError, TypeError) as error:
        raise CheckpointError(
            f"{path} is not a SentencePiece model, or is damaged: {error}",
            hint="use a directory with a tokenizer.json",
        ) from error


def _parse(data: bytes, path: Path) -> SentencePieceModel:
    pieces: list[tuple[str, float, int]] = []
    trainer: dict[int, _Value] = {}
    normalizer: dict[int, _Value] = {}
    for field, value in _fields(data):
        if field == 1:
            pieces.append(_piece(_as_bytes(value)))
        elif field == 2:
            trainer = dict(_fields(_as_bytes(value)))
        elif field == 3:
            normalizer = dict(_fields(_as_bytes(value)))
    if not pieces:
        raise ValueError("it has no pieces")
    kind = _as_int(trainer.get(3, _UNIGRAM))
    if kind not in (_UNIGRAM, _BPE):
        raise CheckpointError(f"{path}: need a SentencePiece unigram or BPE model, have model type {kind}")
    if _as_int(trainer.get(24, 0)) or not _as_int(normalizer.get(5, 1)):
        raise CheckpointError(f"{path}: need spaces marked before words, has them marked after or not at all")
    texts, scores, types = zip(*pieces, strict=True)
    unk_id = next((i for i, kind in enumerate(types) if kind == TokenType.UNKNOWN), None)
    if unk_id is None:
        raise ValueError("it has no unknown piece")
    return SentencePieceModel(
        pieces=texts,
        scores=scores,
        types=types,
        unigram=kind == _UNIGRAM,
        unk_id=unk_id,
        bos_id=_as_int(trainer.get(41, 1)),
        eos_id=_as_int(trainer.get(42, 2)),
        add_space_prefix=bool(normalizer.get(3, 1)),
        collapse_spaces=bool(normalizer.get(4, 1)),
        charsmap=_as_bytes(normalizer.get(2, b"")),
    )


def _piece(data: bytes) -> tuple[str, float, int]:
    fields = dict(_fields(data))
    score = struct.unpack("<f", _as_bytes(fields.get(2, bytes(4))))[0]
    return _as_bytes(fields[1]).decode(), score, _as_int(fields.get(3, TokenType.NORMAL))


def _fields(data: bytes) -> Iterator[tuple[int, _Value]]:
    """(field number, value) of a protobuf message: integers for varints, raw bytes for everything else."""
    position = 0
    while position < len(data):
        key, position = _varint(data, position)
        wire = key & 7
        if wire == _VARINT:
            number, position = _varint(data, position)
            yield key >> 3, number
            continue
        if wire == _BYTES:
            length, position = _varint(data, position)
        elif wire in (_FIXED32, _FIXED64):
            length = 4 if wire == _FIXED32 else 8
        else:
            raise ValueError(f"unknown wire type {wire} at offset {position}")
        if length > len(data) - position:
            raise ValueError(f"a field of {length} bytes at offset {position} ends past the end")
        yield key >> 3, data[position : position + length]
        position += length


def _varint(data: bytes, position: int) -> tuple[int, int]:
    """A base-128 integer (two's complement of 64 bits) and the position after it."""
    value = 0
    for shift in range(0, 70, 7):
        byte = data[position]
        position += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            value &= (1 << 64) - 1
            return (value - (1 << 64) if value >> 63 else value), position
    raise ValueError(f"an integer at offset {position} does not end")


def _as_bytes(value: _Value) -> bytes:
    if not isinstance(value, bytes):
        raise TypeError("an integer where bytes are needed")
    return value


def _as_int(value: _Value) -> int:
    if not isinstance(value, int):
        raise TypeError("bytes where an integer is needed")
    return value
