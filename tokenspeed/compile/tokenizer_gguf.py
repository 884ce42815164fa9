"""The tokenizer inside a GGUF file, rebuilt as a tokenizer.json.

``tokenizer.ggml.model`` says which family: ``gpt2`` is byte-level BPE with merges, whose cuts
``tokenizer.ggml.pre`` names; ``llama`` is SentencePiece BPE by scores. Token types are SentencePiece's.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tokenspeed.compile.tokenizer import (
    SentencePieceOptions,
    TokenizerFiles,
    TokenType,
    Vocabulary,
    byte_level_tokenizer,
    pre_tokenizer,
    sentencepiece_tokenizer,
)
from tokenspeed.errors import CheckpointError

_log = logging.getLogger(__name__)

_PREFIX = "tokenizer.ggml."
_ROLE_KEYS = {
    "bos": "bos_token_id",
    "eos": "eos_token_id",
    "eot": "eot_token_id",
    "eom": "eom_token_id",
    "unk": "unknown_token_id",
    "pad": "padding_token_id",
}
# A GGUF names one end token, where a Hugging Face checkpoint lists all of them in generation_config.json. These
# control tokens end a turn or a document in every model that has them.
_END_TEXTS = frozenset(
    ("</s>", "<|endoftext|>", "<|end_of_text|>", "<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|end|>", "<EOT>")
)


def token_id(metadata: Mapping[str, Any], role: str, path: Path) -> int | None:
    """The id that the metadata gives to ``role`` (bos, eos, eot, eom, unk, pad), or None."""
    key = _PREFIX + _ROLE_KEYS[role]
    value = metadata.get(key)
    if value is None:
        return None
    num_tokens = len(metadata.get(_PREFIX + "tokens", ()))
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < num_tokens:
        raise CheckpointError(f"{path}: need a token id below {num_tokens} as {key}, have {value!r}")
    return value


def end_token_ids(metadata: Mapping[str, Any], path: Path) -> tuple[int, ...]:
    """Ids of all tokens that end a generation, sorted: those named by role and the well-known control tokens."""
    named = {token_id(metadata, role, path) for role in ("eos", "eot", "eom")}
    tokens, types = metadata.get(_PREFIX + "tokens", ()), metadata.get(_PREFIX + "token_type", ())
    known = {
        index
        for index, (text, kind) in enumerate(zip(tokens, types, strict=False))
        if kind == TokenType.CONTROL and text in _END_TEXTS
    }
    return tuple(sorted({i for i in named if i is not None} | known))


def read_tokenizer(metadata: Mapping[str, Any], path: Path, eos_token_ids: tuple[int, ...]) -> TokenizerFiles:
    """Build the tokenizer of a GGUF's metadata. Raises CheckpointError where it is absent or of an unknown kind."""
    model = metadata.get(_PREFIX + "model")
    if model == "gpt2":
        tokenizer_json, vocabulary = _byte_level(metadata, path)
    elif model == "llama":
        tokenizer_json, vocabulary = _sentencepiece(metadata, path)
    else:
        raise CheckpointError(
            f"{path}: unknown tokenizer model {model!r}: need gpt2 (byte-level BPE) or llama (SentencePiece)",
            hint="use the model's Hugging Face directory, which carries a tokenizer.json",
        )

    def text_of(role: str) -> str | None:
        index = token_id(metadata, role, path)
        return None if index is None else vocabulary.tokens[index]

    chat_template = metadata.get("tokenizer.chat_template")
    if chat_template is not None and not isinstance(chat_template, str):
        raise CheckpointError(f"{path}: need a text as tokenizer.chat_template, have {type(chat_template).__name__}")
    return TokenizerFiles(
        tokenizer_json=tokenizer_json,
        chat_template=chat_template,
        bos_token=text_of("bos"),
        eos_token=text_of("eos"),
        pad_token=text_of("pad"),
        unk_token=text_of("unk"),
        eos_token_ids=eos_token_ids,
        add_bos=vocabulary.add_bos,
    )


def _byte_level(metadata: Mapping[str, Any], path: Path) -> tuple[bytes, Vocabulary]:
    name = metadata.get(_PREFIX + "pre")
    if name is None:
        _log.warning("%s names no pre-tokenizer: using 'default', which may not be how the model was trained", path)
        name = "default"
    cuts = pre_tokenizer(name)
    vocabulary = _vocabulary(metadata, path, add_bos=cuts.add_bos)
    merges = [_split_merge(merge, path) for merge in _list(metadata, "merges", str, path)]
    return byte_level_tokenizer(vocabulary, merges, cuts), vocabulary


def _sentencepiece(metadata: Mapping[str, Any], path: Path) -> tuple[bytes, Vocabulary]:
    vocabulary = _vocabulary(metadata, path, add_bos=True)
    scores = _list(metadata, "scores", float, path)
    if len(scores) != len(vocabulary.tokens):
        raise CheckpointError(f"{path}: need one score per token, {len(vocabulary.tokens)}, have {len(scores)}")
    options = SentencePieceOptions(
        add_space_prefix=bool(metadata.get(_PREFIX + "add_space_prefix", True)),
        collapse_spaces=bool(metadata.get(_PREFIX + "remove_extra_whitespaces", False)),
    )
    return sentencepiece_tokenizer(vocabulary, scores, options), vocabulary


def _vocabulary(metadata: Mapping[str, Any], path: Path, *, add_bos: bool) -> Vocabulary:
    """The tokens and their roles; ``add_bos`` is the family's default where the file is silent."""
    tokens = _list(metadata, "tokens", str, path)
    types = metadata.get(_PREFIX + "token_type") or [TokenType.NORMAL] * len(tokens)
    if len(types) != len(tokens):
        raise CheckpointError(f"{path}: need one token type per token, {len(tokens)}, have {len(types)}")
    bos_id, eos_id = token_id(metadata, "bos", path), token_id(metadata, "eos", path)
    return Vocabulary(
        tokens=tokens,
        types=types,
        bos_id=bos_id,
        eos_id=eos_id,
        unk_id=token_id(metadata, "unk", path),
        add_bos=bool(metadata.get(_PREFIX + "add_bos_token", add_bos)) and bos_id is not None,
        add_eos=bool(metadata.get(_PREFIX + "add_eos_token", False)) and eos_id is not None,
    )


def _list(metadata: Mapping[str, Any], key: str, kind: type, path: Path) -> list[Any]:
    value = metadata.get(_PREFIX + key)
    if not isinstance(value, list) or not value or not isinstance(value[0], kind):
        raise CheckpointError(
            f"{path}: the tokenizer is incomplete: need a list of {kind.__name__} as {_PREFIX}{key}, "
            f"have {'none' if not value else type(value).__name__}",
            hint="use a file that was converted with its vocabulary",
        )
    return value


def _split_merge(merge: str, path: Path) -> tuple[str, str]:
    # The first half is never empty, and may itself begin with a space.
    cut = merge.find(" ", 1)
    if cut < 0:
        raise CheckpointError(f"{path}: need two tokens with a space between as a merge, have {merge!r}")
    return merge[:cut], merge[cut + 1 :]
