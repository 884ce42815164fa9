"""Tokenizers: whatever a checkpoint has becomes one tokenizer.json, chat template and special tokens.

Two families are built here from a Vocabulary: byte-level BPE (GPT-2, Llama 3, SmolLM2, Mistral's Tekken) and
SentencePiece (Llama 2, Mistral 7B). ``tokenizer_gguf`` and ``tokenizer_hf`` fill the Vocabulary in.

A built tokenizer.json adds a begin-of-sequence token exactly when ``add_bos`` is true: encoding with special
tokens gives what a bare prompt needs, without gives what a rendered chat template needs.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from tokenspeed.errors import CheckpointError

SPACE_MARK = "\u2581"
"""SentencePiece's visible stand-in for a space."""


@dataclass(frozen=True)
class TokenizerFiles:
    """What the artifact carries to turn text into tokens and back.

    Attributes:
        tokenizer_json: a file of the ``tokenizers`` library, UTF-8.
        chat_template: Jinja source that renders messages, or None.
        bos_token, eos_token, pad_token, unk_token: texts of these tokens, for the template; None where unnamed.
        eos_token_ids: tokens that end a generation, sorted.
        add_bos: whether tokenizer_json puts bos_token before a text encoded with special tokens.
    """

    tokenizer_json: bytes
    chat_template: str | None
    bos_token: str | None
    eos_token: str | None
    pad_token: str | None
    unk_token: str | None
    eos_token_ids: tuple[int, ...]
    add_bos: bool


class TokenType(IntEnum):
    """What a token is. SentencePiece's numbers, which GGUF shares."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


_SPECIAL_TYPES = (TokenType.CONTROL, TokenType.UNKNOWN)


@dataclass(frozen=True)
class Vocabulary:
    """Token texts by id, with their types and the ids that have a role.

    ``extra`` are tokens appended after the vocabulary, as (text, special). ``eos_id`` is used only with ``add_eos``.
    """

    tokens: Sequence[str]
    types: Sequence[int]
    bos_id: int | None = None
    eos_id: int | None = None
    unk_id: int | None = None
    add_bos: bool = False
    add_eos: bool = False
    extra: tuple[tuple[str, bool], ...] = ()


# ---- byte-level BPE -------------------------------------------------------------------------------------------

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_UPPER, _LOWER = r"\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}", r"\p{Ll}\p{Lm}\p{Lo}\p{M}"
_TEKKEN = (
    rf"[^\r\n\p{{L}}\p{{N}}]?[{_UPPER}]*[{_LOWER}]+|[^\r\n\p{{L}}\p{{N}}]?[{_UPPER}]+[{_LOWER}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@dataclass(frozen=True)
class PreTokenizer:
    """How a byte-level BPE family cuts text into words before it merges.

    Each pattern of ``splits`` cuts every piece that the one before left, keeping matches and gaps alike.
    ``ignore_merges``: a word that is itself a token is taken whole. ``add_bos``: the default for a checkpoint that
    does not say.
    """

    splits: tuple[str, ...]
    ignore_merges: bool = False
    add_bos: bool = False


_DIGITS_THEN_GPT2 = PreTokenizer((r"\p{N}", _GPT2))
_FAMILIES: dict[str, PreTokenizer] = {
    "gpt-2": PreTokenizer((_GPT2,)),
    "smollm": _DIGITS_THEN_GPT2,
    "llama-bpe": PreTokenizer((rf"{_WORDS}|\p{{N}}{{1,3}}|{_REST}",), ignore_merges=True, add_bos=True),
    "qwen2": PreTokenizer((rf"{_WORDS}|\p{{N}}|{_REST}",)),
    "tekken": PreTokenizer((_TEKKEN,), ignore_merges=True, add_bos=True),
    "default": PreTokenizer((r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]")),
}
# Names that stand for the same cuts. Llama 3's cover models that reuse its tokenizer's pattern.
_ALIASES = {
    "gpt2": "gpt-2",
    "mpt": "gpt-2",
    "olmo": "gpt-2",
    "starcoder": "smollm",
    "refact": "smollm",
    "command-r": "smollm",
    "codeshell": "smollm",
    "minerva-7b": "smollm",
    "llama3": "llama-bpe",
    "llama-v3": "llama-bpe",
    "falcon3": "llama-bpe",
    "pixtral": "llama-bpe",
    "deepseek-r1-qwen": "qwen2",
}


def pre_tokenizer(name: str) -> PreTokenizer:
    """The cuts of a family by GGUF's name for it (``tokenizer.ggml.pre``). Raises CheckpointError if unknown."""
    family = _FAMILIES.get(_ALIASES.get(name, name))
    if family is None:
        known = ", ".join(sorted(set(_FAMILIES) | set(_ALIASES)))
        raise CheckpointError(
            f"unknown pre-tokenizer {name!r}: need one of {known}",
            hint="use the model's Hugging Face directory, whose tokenizer.json needs no such name",
        )
    return family


def byte_level_tokenizer(vocabulary: Vocabulary, merges: Sequence[tuple[str, str]], cuts: PreTokenizer) -> bytes:
    """tokenizer.json of a byte-level BPE.

    A byte that no token stands for becomes the unknown token, or vanishes if the checkpoint names none.
    """
    tokens = _respell(vocabulary)
    ids = _ids_by_text(tokens)
    unk = None if vocabulary.unk_id is None else tokens[vocabulary.unk_id]
    try:
        model = models.BPE(
            vocab=ids, merges=list(merges), unk_token=unk, fuse_unk=False, ignore_merges=cuts.ignore_merges
        )
    except Exception as error:  # the library raises bare Exception
        raise CheckpointError(f"the tokenizer's merges do not fit its vocabulary: {error}") from error
    tokenizer = Tokenizer(model)
    steps = [pre_tokenizers.Split(Regex(pattern), behavior="isolated") for pattern in cuts.splits]
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [*steps, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    return _finish(tokenizer, vocabulary)


def _respell(vocabulary: Vocabulary) -> list[str]:
    """Token texts with normal tokens in the byte-level alphabet (some writers decode single tokens by mistake)."""
    alphabet = set(pre_tokenizers.ByteLevel.alphabet())
    return [
        text if kind != TokenType.NORMAL or alphabet.issuperset(text) else _byte_level(text)
        for text, kind in zip(vocabulary.tokens, vocabulary.types, strict=True)
    ]


def _byte_level(text: str) -> str:
    encoder = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return "".join(piece for piece, _ in encoder.pre_tokenize_str(text))


# ---- SentencePiece --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class SentencePieceOptions:
    """How a SentencePiece model treats text.

    Attributes:
        unigram: a unigram model; otherwise BPE by scores.
        add_space_prefix: a space is put before a text.
        prefix_every_segment: ... also before a text that follows a special token (the older convention).
        collapse_spaces: runs of spaces become one, outer ones vanish.
        charsmap: SentencePiece's compiled normalization rules; empty for none.
    """

    unigram: bool = False
    add_space_prefix: bool = True
    prefix_every_segment: bool = True
    collapse_spaces: bool = False
    charsmap: bytes = b""


def sentencepiece_tokenizer(vocabulary: Vocabulary, scores: Sequence[float], options: SentencePieceOptions) -> bytes:
    """tokenizer.json of a SentencePiece model; text without tokens falls back to byte tokens where all 256 exist."""
    tokens = vocabulary.tokens
    ids = _ids_by_text(tokens)
    byte_fallback = all(f"<0x{byte:02X}>" in ids for byte in range(256))
    try:
        if options.unigram:
            pieces = list(zip(tokens, scores, strict=True))
            tokenizer = Tokenizer(models.Unigram(pieces, vocabulary.unk_id, byte_fallback))
        else:
            unk = None if vocabulary.unk_id is None else tokens[vocabulary.unk_id]
            merges = list(_merges_by_score(vocabulary, scores, ids))
            tokenizer = Tokenizer(
                models.BPE(vocab=ids, merges=merges, unk_token=unk, fuse_unk=True, byte_fallback=byte_fallback)
            )
        _set_space_handling(tokenizer, options)
    except Exception as error:  # the library raises bare Exception
        raise CheckpointError(f"the SentencePiece vocabulary cannot be used: {error}") from error
    return _finish(tokenizer, vocabulary)


def _merges_by_score(vocabulary: Vocabulary, scores: Sequence[float], ids: dict[str, int]) -> Iterator[tuple[str, str]]:
    """Merges, best first: SentencePiece always joins the pair whose joined piece scores highest.

    Which of a piece's own splits comes first cannot matter: they never compete for the same characters.
    """
    mergeable = (TokenType.NORMAL, TokenType.USER_DEFINED, TokenType.UNUSED)
    pieces = [i for i, kind in enumerate(vocabulary.types) if kind in mergeable]
    for piece in sorted(pieces, key=lambda i: -scores[i]):
        text = vocabulary.tokens[piece]
        for cut in range(1, len(text)):
            left, right = text[:cut], text[cut:]
            if left in ids and right in ids:
                yield left, right


def _set_space_handling(tokenizer: Tokenizer, options: SentencePieceOptions) -> None:
    steps: list[normalizers.Normalizer] = []
    if options.charsmap:
        steps.append(normalizers.Precompiled(options.charsmap))
    if options.collapse_spaces:
        steps += [normalizers.Strip(), normalizers.Replace(Regex(" {2,}"), " ")]
    if options.add_space_prefix and not options.prefix_every_segment:
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(SPACE_MARK, prepend_scheme="first", split=False)
    else:
        if options.add_space_prefix:
            steps.append(normalizers.Prepend(SPACE_MARK))
        steps.append(normalizers.Replace(" ", SPACE_MARK))
    if steps:
        tokenizer.normalizer = normalizers.Sequence(steps)
    undo: list[decoders.Decoder] = [decoders.Replace(SPACE_MARK, " "), decoders.ByteFallback(), decoders.Fuse()]
    if options.add_space_prefix:
        undo.append(decoders.Strip(" ", 1, 0))
    tokenizer.decoder = decoders.Sequence(undo)


# ---- shared ---------------------------------------------------------------------------------------------------


def load_tokenizer(tokenizer_json: bytes, source: str) -> Tokenizer:
    """Parse a tokenizer.json; ``source`` names it in the CheckpointError."""
    try:
        return Tokenizer.from_str(tokenizer_json.decode())
    except Exception as error:  # the library raises bare Exception
        raise CheckpointError(
            f"cannot read the tokenizer {source}: {error}", hint="fetch the checkpoint again"
        ) from error


def adds_bos(tokenizer: Tokenizer, bos_token: str | None) -> bool:
    """Whether encoding with special tokens puts ``bos_token`` first."""
    if bos_token is None:
        return False
    ids = tokenizer.encode("", add_special_tokens=True).ids
    return bool(ids) and ids[0] == tokenizer.token_to_id(bos_token)


def _ids_by_text(tokens: Sequence[str]) -> dict[str, int]:
    ids: dict[str, int] = {}
    for index, text in enumerate(tokens):
        if ids.setdefault(text, index) != index:
            raise CheckpointError(f"tokens {ids[text]} and {index} of the tokenizer have the same text {text!r}")
    return ids


def _finish(tokenizer: Tokenizer, vocabulary: Vocabulary) -> bytes:
    """Register special tokens, add the post-processor where one is needed, and serialize."""
    # normalized=False: these match the raw text, before any space handling.
    special = [t for t, kind in zip(vocabulary.tokens, vocabulary.types, strict=True) if kind in _SPECIAL_TYPES]
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in special])
    plain = [t for t, kind in zip(vocabulary.tokens, vocabulary.types, strict=True) if kind == TokenType.USER_DEFINED]
    tokenizer.add_tokens([AddedToken(text, special=False, normalized=False) for text in plain])
    for text, is_special in vocabulary.extra:
        add = tokenizer.add_special_tokens if is_special else tokenizer.add_tokens
        add([AddedToken(text, special=is_special, normalized=False)])
    outer = [
        vocabulary.bos_id if vocabulary.add_bos else None,
        vocabulary.eos_id if vocabulary.add_eos else None,
    ]
    if outer != [None, None]:
        first, last = (None if i is None else vocabulary.tokens[i] for i in outer)
        template = [*([] if first is None else [first]), "$A", *([] if last is None else [last])]
        named = [(vocabulary.tokens[i], i) for i in outer if i is not None]
        tokenizer.post_processor = processors.TemplateProcessing(single=template, special_tokens=named)
    return quick_to_load(tokenizer.to_str(pretty=False).encode())


def quick_to_load(tokenizer_json: bytes) -> bytes:
    """The same tokenizer with its merges as ``"a b"`` rather than ``["a", "b"]``, where the two forms say the same.

    The library reads both; this one takes it a third less time and memory, and a server that starts waits for it.
    """
    data = json.loads(tokenizer_json)
    merges = (data.get("model") or {}).get("merges") or []
    # A string is cut at its spaces, and taken for a comment if it begins like one.
    if not merges or any(
        isinstance(merge, str) or any(" " in part for part in merge) or merge[0].startswith("#version")
        for merge in merges
    ):
        return tokenizer_json
    data["model"]["merges"] = [" ".join(merge) for merge in merges]
    return json.dumps(data, ensure_ascii=False, separators=(",", ":")).encode()
