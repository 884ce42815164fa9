"""The tokenizer files of a Hugging Face directory: tokenizer.json as it is, or one made from tokenizer.model."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from tokenspeed.compile.checkpoint import ModelConfig
from tokenspeed.compile.json_file import Fields, read_json
from tokenspeed.compile.sentencepiece_file import SentencePieceModel, read_sentencepiece
from tokenspeed.compile.tokenizer import (
    SentencePieceOptions,
    TokenizerFiles,
    TokenType,
    Vocabulary,
    adds_bos,
    load_tokenizer,
    quick_to_load,
    sentencepiece_tokenizer,
)
from tokenspeed.errors import CheckpointError

_JSON, _SENTENCEPIECE = "tokenizer.json", "tokenizer.model"
_CONFIG, _SPECIAL_MAP = "tokenizer_config.json", "special_tokens_map.json"
_TEMPLATE = "chat_template.jinja"
FILES = (_JSON, _SENTENCEPIECE, _CONFIG, _SPECIAL_MAP, _TEMPLATE)
"""Files of a directory that make up the tokenizer, where present."""


def read_tokenizer(directory: Path, config: ModelConfig) -> TokenizerFiles:
    """Collect a directory's tokenizer. Raises CheckpointError if there is none that can be used."""
    settings = _optional_json(directory / _CONFIG)
    special_map = _optional_json(directory / _SPECIAL_MAP)
    if (directory / _JSON).is_file():
        tokenizer_json = (directory / _JSON).read_bytes()
        source = directory / _JSON
    elif (directory / _SENTENCEPIECE).is_file():
        source = directory / _SENTENCEPIECE
        tokenizer_json = _from_sentencepiece(read_sentencepiece(source), settings, source)
    else:
        raise CheckpointError(
            f"{directory} has no tokenizer: need {_JSON} or a SentencePiece {_SENTENCEPIECE}",
            hint="save one with AutoTokenizer.from_pretrained(...).save_pretrained(...)",
        )
    tokenizer = load_tokenizer(tokenizer_json, str(source))
    if tokenizer.truncation or tokenizer.padding:
        # Left behind by a training script: every prompt would be cut or padded.
        tokenizer.no_truncation()
        tokenizer.no_padding()
        tokenizer_json = tokenizer.to_str(pretty=False).encode()

    def text_of(role: str, token_id: int | None = None) -> str | None:
        for values in (settings, special_map):
            if role in values:
                return _token_text(values[role], role, directory)
        return None if token_id is None else tokenizer.id_to_token(token_id)

    bos = text_of("bos_token", config.bos_token_id)
    eos = text_of("eos_token", config.eos_token_ids[0] if config.eos_token_ids else None)
    return TokenizerFiles(
        tokenizer_json=quick_to_load(tokenizer_json),
        chat_template=_chat_template(directory, settings),
        bos_token=bos,
        eos_token=eos,
        pad_token=text_of("pad_token"),
        unk_token=text_of("unk_token"),
        eos_token_ids=_end_token_ids(config, tokenizer, eos),
        add_bos=adds_bos(tokenizer, bos),
    )


def _optional_json(path: Path) -> dict[str, Any]:
    return read_json(path) if path.is_file() else {}


def _token_text(value: Any, role: str, directory: Path) -> str | None:
    """A token given as text, as an AddedToken object, or as null."""
    content = value.get("content") if isinstance(value, dict) else value
    if isinstance(content, str) and not content.isascii() and any(0xD800 <= ord(c) < 0xE000 for c in content):
        raise CheckpointError(f"{directory}: {role} holds half of a surrogate pair: {content!r:.60}")
    if content is not None and not isinstance(content, str):
        raise CheckpointError(f"{directory}: need a text or an object with content as {role}, have {value!r}")
    return content


def _end_token_ids(config: ModelConfig, tokenizer: Tokenizer, eos: str | None) -> tuple[int, ...]:
    """The model's end tokens and the tokenizer's own, which chat fine-tunes sometimes name only there."""
    own = None if eos is None else tokenizer.token_to_id(eos)
    return tuple(sorted({*config.eos_token_ids, *([] if own is None else [own])}))


def _chat_template(directory: Path, settings: Mapping[str, Any]) -> str | None:
    """chat_template.jinja, else tokenizer_config.json's: one text, or named texts of which 'default' counts."""
    path = directory / _TEMPLATE
    if path.is_file():
        try:
            return path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise CheckpointError(f"cannot read {path}: {error}") from error
    template = settings.get("chat_template")
    if isinstance(template, list):
        named = {t.get("name"): t.get("template") for t in template if isinstance(t, dict)}
        if "default" not in named:
            raise CheckpointError(
                f"{directory / _CONFIG}: need a chat template named 'default', have {sorted(map(str, named))}"
            )
        template = named["default"]
    if template is not None and not isinstance(template, str):
        raise CheckpointError(f"{directory / _CONFIG}: need a text as chat_template, have {type(template).__name__}")
    return template


def _from_sentencepiece(model: SentencePieceModel, settings: Mapping[str, Any], source: Path) -> bytes:
    """tokenizer.json of a tokenizer.model, with the switches of tokenizer_config.json (Llama's defaults)."""
    fields = Fields(settings, source.parent / _CONFIG)
    ids = {piece: index for index, piece in enumerate(model.pieces)}
    types = list(model.types)
    extra = _added_tokens(settings, len(model.pieces), source.parent)
    for text, index, special in extra:
        if index < len(types):
            types[index] = TokenType.CONTROL if special else TokenType.USER_DEFINED
            if model.pieces[index] != text:
                raise CheckpointError(
                    f"{source.parent / _CONFIG}: added token {index} is {text!r}, but the vocabulary has "
                    f"{model.pieces[index]!r} there"
                )

    def id_of(role: str, default: int) -> int | None:
        text = _token_text(settings.get(role), role, source.parent)
        if text is not None:
            return ids.get(text)
        return default if 0 <= default < len(model.pieces) else None

    vocabulary = Vocabulary(
        tokens=model.pieces,
        types=types,
        bos_id=id_of("bos_token", model.bos_id),
        eos_id=id_of("eos_token", model.eos_id),
        unk_id=model.unk_id,
        add_bos=fields.boolean("add_bos_token", True),
        add_eos=fields.boolean("add_eos_token", False),
        extra=tuple((text, special) for text, index, special in extra if index >= len(types)),
    )
    options = SentencePieceOptions(
        unigram=model.unigram,
        add_space_prefix=fields.boolean("add_prefix_space", model.add_space_prefix),
        prefix_every_segment=fields.boolean("legacy", True),
        collapse_spaces=model.collapse_spaces,
        charsmap=model.charsmap,
    )
    return sentencepiece_tokenizer(vocabulary, model.scores, options)


def _added_tokens(settings: Mapping[str, Any], num_pieces: int, directory: Path) -> list[tuple[str, int, bool]]:
    """(text, id, special) of added_tokens_decoder by id; those beyond the vocabulary must follow it without gaps."""
    entries = settings.get("added_tokens_decoder", {})
    try:
        tokens = sorted(
            ((str(value["content"]), int(key), bool(value.get("special", False))) for key, value in entries.items()),
            key=lambda token: token[1],
        )
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"{directory / _CONFIG}: added_tokens_decoder is damaged: {error!r}") from error
    beyond = [index for _, index, _ in tokens if index >= num_pieces]
    if beyond != list(range(num_pieces, num_pieces + len(beyond))):
        raise CheckpointError(
            f"{directory / _CONFIG}: need added tokens that follow the {num_pieces} of the vocabulary without gaps, "
            f"have {beyond}"
        )
    return tokens
