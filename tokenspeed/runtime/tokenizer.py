"""The artifact's tokenizer: text to token ids and back, and the bytes that each token stands for.

``tokenizers`` does the encoding and whole-text decoding. Streaming needs more: the bytes of one token,
independent of its neighbours, which the tokenizer's decoder section defines (byte-level BPE, or
SentencePiece-like pieces with byte fallback).
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as _Backend

from tokenspeed.artifact import Artifact
from tokenspeed.errors import ArtifactError, RequestError
from tokenspeed.runtime.chat import ChatTemplate

_REBUILD = "rebuild the artifact from its checkpoint"


class Tokenizer:
    """Tokenizer of one artifact.

    Args:
        tokenizer_json: contents of ``tokenizer/tokenizer.json``.
        config: contents of ``tokenizer/config.json``: ``chat_template``, ``bos_token``, ``eos_token``,
            ``pad_token``, ``unk_token`` (strings or None), ``eos_token_ids`` and ``add_bos``.

    Raises:
        ArtifactError: the tokenizer is damaged or of a kind that cannot be streamed.
    """

    def __init__(self, tokenizer_json: bytes, config: Mapping[str, Any]):
        try:
            self._backend = _Backend.from_buffer(tokenizer_json)
        except Exception as e:  # the library raises bare Exception
            raise ArtifactError(f"tokenizer/tokenizer.json cannot be read: {e}", hint=_REBUILD) from None
        self.special_tokens: dict[str, str] = {
            name: config[name] for name in ("bos_token", "eos_token", "pad_token", "unk_token") if config.get(name)
        }
        self.chat = ChatTemplate(config.get("chat_template"), self.special_tokens)
        self.eos_token_ids: tuple[int, ...] = tuple(config.get("eos_token_ids") or ())
        self.special_ids = frozenset(
            token_id for token_id, token in self._backend.get_added_tokens_decoder().items() if token.special
        )
        self._bos_id = self._resolve_bos(config)
        self._piece_to_bytes = _piece_decoder(self._backend)
        self._bytes: dict[int, bytes] = {}

    @classmethod
    def load(cls, folder: Path) -> Tokenizer:
        """Load from a folder that holds ``tokenizer.json`` and ``config.json``."""
        try:
            return cls((folder / "tokenizer.json").read_bytes(), _config((folder / "config.json").read_bytes()))
        except OSError as e:
            raise ArtifactError(f"{folder}: cannot read the tokenizer: {e.strerror}", hint=_REBUILD) from None

    @classmethod
    def from_artifact(cls, artifact: Artifact) -> Tokenizer:
        return cls(artifact.read("tokenizer/tokenizer.json"), _config(artifact.read("tokenizer/config.json")))

    def _resolve_bos(self, config: Mapping[str, Any]) -> int | None:
        if not config.get("add_bos"):
            return None
        bos = self._backend.token_to_id(str(config.get("bos_token")))
        if bos is None:
            found = config.get("bos_token")
            raise ArtifactError(f"tokenizer/config.json: add_bos needs a bos_token, have {found!r}", hint=_REBUILD)
        return bos

    @property
    def vocab_size(self) -> int:
        """Number of token ids that have a token, added ones included (the model's table may be larger)."""
        return self._backend.get_vocab_size(with_added_tokens=True)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of ``text``. A BOS that the model expects is added unless ``add_special_tokens`` is false.

        Raises RequestError for text that is no valid Unicode (a lone surrogate).
        """
        try:
            ids: list[int] = self._backend.encode(text, add_special_tokens=add_special_tokens).ids
        except (UnicodeEncodeError, TypeError):
            raise RequestError("the text is not valid Unicode: it holds half of a surrogate pair") from None
        if add_special_tokens and self._bos_id is not None and ids[:1] != [self._bos_id]:
            ids.insert(0, self._bos_id)
        return ids

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        """Text of a whole sequence, as the tokenizer defines it. Ids that have no token give no text."""
        return self._backend.decode(list(token_ids), skip_special_tokens=skip_special_tokens)

    def token_id(self, token: str) -> int | None:
        return self._backend.token_to_id(token)

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that ``token_id`` adds to a text, alone perhaps no whole character; empty if it has no token."""
        found = self._bytes.get(token_id)
        if found is None:
            piece = self._backend.id_to_token(token_id) if token_id >= 0 else None
            found = self._bytes[token_id] = b"" if piece is None else self._piece_to_bytes(piece)
        return found

    def token_text(self, token_id: int) -> str:
        """``token_bytes`` for showing: bytes that are no whole character become U+FFFD."""
        return self.token_bytes(token_id).decode("utf-8", "replace")


def _config(raw: bytes) -> Mapping[str, Any]:
    try:
        config = json.loads(raw)
    except (ValueError, RecursionError) as e:
        raise ArtifactError(f"tokenizer/config.json is not JSON: {e}", hint=_REBUILD) from None
    if not isinstance(config, dict):
        raise ArtifactError("tokenizer/config.json must hold a JSON object", hint=_REBUILD)
    for name in ("chat_template", "bos_token", "eos_token", "pad_token", "unk_token"):
        if not isinstance(config.get(name), str | None):
            raise ArtifactError(f"tokenizer/config.json: need a text or null as {name}", hint=_REBUILD)
    ids = config.get("eos_token_ids")
    if not isinstance(ids, list) or not all(type(i) is int and 0 <= i < 1 << 31 for i in ids):
        raise ArtifactError("tokenizer/config.json: need token ids as eos_token_ids", hint=_REBUILD)
    return config


def _piece_decoder(backend: _Backend) -> Callable[[str], bytes]:
    """How the tokenizer's decoder turns one piece into bytes. Raises ArtifactError for a kind we do not know."""
    state = json.loads(backend.decoder.__getstate__()) if backend.decoder is not None else None
    steps = [] if state is None else state["decoders"] if state["type"] == "Sequence" else [state]
    kinds = [step["type"] for step in steps]
    if kinds == ["ByteLevel"]:
        return _byte_level_bytes
    known = {"Replace", "ByteFallback", "Fuse", "Strip", "Metaspace"}
    if kinds and set(kinds) <= known and all(s["type"] != "Replace" or "String" in s["pattern"] for s in steps):
        return _space_piece_decoder(steps)
    raise ArtifactError(
        f"tokenizer/tokenizer.json: cannot stream a tokenizer with decoder {' + '.join(kinds) or 'null'};"
        " need ByteLevel, or Replace/Metaspace with ByteFallback",
        hint="convert the checkpoint's tokenizer to one of these",
    )


def _byte_alphabet() -> dict[str, int]:
    """Byte-level BPE writes byte b as chr(b) if that is printable, else as the next character from U+0100 on."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = (b for b in range(256) if b not in printable)
    return {**{chr(b): b for b in printable}, **{chr(0x100 + i): b for i, b in enumerate(others)}}


_BYTE_ALPHABET = _byte_alphabet()


def _byte_level_bytes(piece: str) -> bytes:
    try:
        return bytes([_BYTE_ALPHABET[c] for c in piece])
    except KeyError:  # an added token is plain text
        return piece.encode()


def _space_piece_decoder(steps: Sequence[Mapping[str, Any]]) -> Callable[[str], bytes]:
    """Pieces that write a space as U+2581 (or another character), and lone bytes as ``<0xAB>``.

    Strip and Metaspace also drop one space at the very start of a text; a continuation keeps it.
    """
    replacements = [(s["pattern"]["String"], s["content"]) for s in steps if s["type"] == "Replace"]
    replacements += [(s["replacement"], " ") for s in steps if s["type"] == "Metaspace"]
    fallback = any(s["type"] == "ByteFallback" for s in steps)
    byte_piece = re.compile(r"<0x([0-9A-Fa-f]{2})>")

    def to_bytes(piece: str) -> bytes:
        if fallback and (match := byte_piece.fullmatch(piece)):
            return bytes([int(match[1], 16)])
        for old, new in replacements:
            piece = piece.replace(old, new)
        return piece.encode()

    return to_bytes
