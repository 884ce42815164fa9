"""Tokenizers of Hugging Face directories: tokenizer.json as it is, tokenizer.model converted, templates, roles."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from checkpoint_files import HF_CONFIG, byte_level_metadata, sentencepiece_model, sentencepiece_vocabulary, write_hf
from tokenizers import Tokenizer

from tokenspeed.compile.checkpoint import open_checkpoint
from tokenspeed.compile.tokenizer import TokenizerFiles, quick_to_load
from tokenspeed.compile.tokenizer_gguf import read_tokenizer as read_gguf_tokenizer
from tokenspeed.errors import CheckpointError

WORDS = ["▁t", "he", "▁the", "▁", "▁▁", "at", "cat", "▁cat", "▁a", "nd", "▁and"]


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """A checkpoint without a tokenizer."""
    write_hf(tmp_path)
    return tmp_path


def tokenizer_json(add_bos: bool = False) -> bytes:
    metadata = byte_level_metadata("gpt-2", ["a b"], **{"ggml.add_bos_token": add_bos})
    return read_gguf_tokenizer(metadata, Path("x.gguf"), (2,)).tokenizer_json


def with_json(directory: Path, settings: dict[str, Any] | None = None, *, add_bos: bool = False) -> TokenizerFiles:
    (directory / "tokenizer.json").write_bytes(tokenizer_json(add_bos))
    if settings is not None:
        (directory / "tokenizer_config.json").write_text(json.dumps(settings))
    return open_checkpoint(directory).tokenizer()


def with_model(
    directory: Path, settings: dict[str, Any] | None = None, **model: Any
) -> tuple[TokenizerFiles, Tokenizer]:
    pieces, scores, types = sentencepiece_vocabulary(WORDS)
    (directory / "tokenizer.model").write_bytes(sentencepiece_model(pieces, scores, types, **model))
    (directory / "tokenizer_config.json").write_text(json.dumps(settings or {}))
    files = open_checkpoint(directory).tokenizer()
    return files, Tokenizer.from_str(files.tokenizer_json.decode())


def refusal(directory: Path) -> str:
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(directory).tokenizer()
    return str(caught.value)


# ---- tokenizer.json -------------------------------------------------------------------------------------------


def test_tokenizer_json_is_taken_as_it_is(directory: Path) -> None:
    files = with_json(directory)
    assert files.tokenizer_json == tokenizer_json()
    # Without tokenizer_config.json the roles come from config.json's ids.
    assert (files.bos_token, files.eos_token, files.pad_token) == ("<s>", "</s>", None)
    assert files.chat_template is None and files.add_bos is False
    assert with_json(directory, add_bos=True).add_bos is True


def test_stored_truncation_and_padding_are_switched_off(directory: Path) -> None:
    tokenizer = Tokenizer.from_str(tokenizer_json().decode())
    tokenizer.enable_truncation(2)
    tokenizer.enable_padding(length=8)
    (directory / "tokenizer.json").write_text(tokenizer.to_str())
    files = open_checkpoint(directory).tokenizer()
    assert len(Tokenizer.from_str(files.tokenizer_json.decode()).encode("x y z").ids) == 5


def test_special_tokens_as_text_as_object_and_as_null(directory: Path) -> None:
    files = with_json(
        directory,
        {
            "bos_token": None,
            "eos_token": {"content": "</s>", "lstrip": False},
            "pad_token": "<unk>",
            "unk_token": "<unk>",
        },
    )
    assert (files.bos_token, files.eos_token, files.pad_token, files.unk_token) == (None, "</s>", "<unk>", "<unk>")


def test_special_tokens_map_is_the_second_source(directory: Path) -> None:
    (directory / "special_tokens_map.json").write_text(json.dumps({"pad_token": "<s>", "eos_token": "<unk>"}))
    files = with_json(directory, {"eos_token": "</s>"})
    assert (files.pad_token, files.eos_token) == ("<s>", "</s>")


def test_end_tokens_of_model_and_tokenizer(tmp_path: Path) -> None:
    write_hf(tmp_path, HF_CONFIG | {"eos_token_id": [5, 2]})
    assert with_json(tmp_path, {"eos_token": "<s>"}).eos_token_ids == (1, 2, 5)


def test_chat_template_sources(directory: Path) -> None:
    assert with_json(directory, {"chat_template": "one"}).chat_template == "one"
    named = [{"name": "tool_use", "template": "tools"}, {"name": "default", "template": "plain"}]
    assert with_json(directory, {"chat_template": named}).chat_template == "plain"
    (directory / "chat_template.jinja").write_text("{# é #}file", encoding="utf-8")
    assert with_json(directory, {"chat_template": "one"}).chat_template == "{# é #}file"
    assert "chat_template.jinja" in open_checkpoint(directory).digests()


# ---- tokenizer.model ------------------------------------------------------------------------------------------


def test_sentencepiece_bpe(directory: Path) -> None:
    files, tokenizer = with_model(directory)
    assert tokenizer.encode("the cat and").tokens == ["<s>", "▁the", "▁cat", "▁and"]
    assert (files.bos_token, files.eos_token, files.add_bos, files.eos_token_ids) == ("<s>", "</s>", True, (2,))
    for text in ("é", "日本 🎉", "  the\t cat\r\n", "x" * 40):
        assert tokenizer.decode(tokenizer.encode(text).ids) == text
    assert tokenizer.encode("é", add_special_tokens=False).tokens == ["▁", "<0xC3>", "<0xA9>"]


def tokens(tokenizer: Tokenizer, text: str) -> Sequence[str]:
    result: Sequence[str] = tokenizer.encode(text, add_special_tokens=False).tokens
    return result


def test_space_prefix_before_every_segment_or_only_the_first(directory: Path) -> None:
    _, legacy = with_model(directory)
    assert tokens(legacy, "the</s>cat") == ["▁the", "</s>", "▁cat"]
    _, current = with_model(directory, {"legacy": False})
    assert tokens(current, "the</s>cat") == ["▁the", "</s>", "cat"]
    assert tokens(current, "<s>cat the") == ["<s>", "cat", "▁the"]
    _, bare = with_model(directory, {"add_prefix_space": False})
    assert tokens(bare, "cat") == ["cat"]
    _, bare = with_model(directory, normalizer={3: 0})
    assert tokens(bare, "cat") == ["cat"]


def test_begin_and_end_switches(directory: Path) -> None:
    files, tokenizer = with_model(directory, {"add_bos_token": False, "add_eos_token": True})
    assert files.add_bos is False
    assert tokenizer.encode("the").tokens == ["▁the", "</s>"]


def test_added_tokens(directory: Path) -> None:
    pieces = len(sentencepiece_vocabulary(WORDS)[0])
    added = {
        "1": {"content": "<s>", "special": True},
        str(pieces): {"content": "<pad>", "special": True},
        str(pieces + 1): {"content": "<tool>", "special": False},
    }
    _, tokenizer = with_model(directory, {"added_tokens_decoder": added})
    assert tokenizer.encode("the<tool><pad>", add_special_tokens=False).ids[-2:] == [pieces + 1, pieces]
    assert tokenizer.decode([pieces, pieces + 1]) == "<tool>"


def test_normalization_that_collapses_spaces(directory: Path) -> None:
    _, tokenizer = with_model(directory, normalizer={4: 1})
    assert tokens(tokenizer, "  the   cat ") == ["▁the", "▁cat"]


def test_sentencepiece_unigram(directory: Path) -> None:
    _, tokenizer = with_model(directory, model_type=1)
    # The best sum of scores: ▁t (0) and he (-1) beat ▁the (-2).
    assert tokens(tokenizer, "the cat") == ["▁t", "he", "▁cat"]
    assert tokenizer.decode(tokenizer.encode("日本 the").ids) == "日本 the"


# ---- refusals -------------------------------------------------------------------------------------------------


def test_no_tokenizer(directory: Path) -> None:
    message = refusal(directory)
    assert "has no tokenizer: need tokenizer.json or a SentencePiece tokenizer.model" in message
    assert "save_pretrained" in message


def test_damaged_tokenizer_json(directory: Path) -> None:
    for content in (b"{}", b"\xff", b'{"model": 1'):
        (directory / "tokenizer.json").write_bytes(content)
        message = refusal(directory)
        assert f"cannot read the tokenizer {directory / 'tokenizer.json'}" in message
        assert "(fetch the checkpoint again)" in message


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"eos_token": 5}, "need a text or an object with content as eos_token, have 5"),
        ({"chat_template": 5}, "need a text as chat_template, have int"),
        ({"chat_template": [{"name": "x", "template": "y"}]}, "need a chat template named 'default', have ['x']"),
    ],
)
def test_settings_refusals(directory: Path, settings: dict[str, Any], expected: str) -> None:
    (directory / "tokenizer.json").write_bytes(tokenizer_json())
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))
    assert expected in refusal(directory)


def test_added_tokens_refusals(directory: Path) -> None:
    for added, expected in (
        ({"9999": {"content": "<pad>"}}, "without gaps, have [9999]"),
        ({"1": {"content": "<bos>"}}, "added token 1 is '<bos>', but the vocabulary has '<s>' there"),
        ({"x": {"content": "<bos>"}}, "added_tokens_decoder is damaged"),
    ):
        with pytest.raises(CheckpointError) as caught:
            with_model(directory, {"added_tokens_decoder": added})
        assert expected in str(caught.value)


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (b"", "is not a SentencePiece model, or is damaged: it has no pieces"),
        (b"IQ== 0\nIg== 1\n", "is not a SentencePiece model, or is damaged: "),
        (
            sentencepiece_model(["a"], [0.0], [1]),
            "is not a SentencePiece model, or is damaged: it has no unknown piece",
        ),
        (
            sentencepiece_model(["a"], [0.0], [2], model_type=3),
            "need a SentencePiece unigram or BPE model, have model type 3",
        ),
        (sentencepiece_model(["a"], [0.0], [2], trainer={24: 1}), "need spaces marked before words"),
        (sentencepiece_model(["a", "a"], [0.0, 0.0], [2, 1]), "tokens 0 and 1 of the tokenizer have the same text 'a'"),
        (
            sentencepiece_model(["a"], [0.0], [2], normalizer={2: b"junk"}),
            "the SentencePiece vocabulary cannot be used",
        ),
    ],
)
def test_sentencepiece_refusals(directory: Path, data: bytes, expected: str) -> None:
    (directory / "tokenizer.model").write_bytes(data)
    assert expected in refusal(directory)


def test_truncated_sentencepiece_never_crashes(directory: Path) -> None:
    data = sentencepiece_model(*sentencepiece_vocabulary(WORDS))
    for size in range(1, len(data), 97):
        (directory / "tokenizer.model").write_bytes(data[:size])
        try:
            open_checkpoint(directory).tokenizer()
        except CheckpointError as error:
            assert "tokenizer.model" in str(error)


# ---- the form that loads quickly ------------------------------------------------------------------------------


def bpe(merges: list[Any], **model: Any) -> bytes:
    parts = {part for merge in merges for part in merge}
    vocab = {token: i for i, token in enumerate(sorted(parts | {"".join(m) for m in merges}))}
    return json.dumps({"version": "1.0", "model": {"type": "BPE", "vocab": vocab, "merges": merges, **model}}).encode()


def test_merges_become_strings_and_the_tokenizer_stays_the_same() -> None:
    pairs = bpe([["a", "b"], ["ab", "é"], ["#versio", "n"]])
    quick = quick_to_load(pairs)
    assert json.loads(quick)["model"]["merges"] == ["a b", "ab é", "#versio n"]
    assert Tokenizer.from_str(quick.decode()).to_str() == Tokenizer.from_str(pairs.decode()).to_str()
    assert quick_to_load(quick) == quick


@pytest.mark.parametrize("merges", [[["a", "b"], ["a", " "]], [["#version", "b"]], []])
def test_merges_that_strings_cannot_say_stay_pairs(merges: list[Any]) -> None:
    assert quick_to_load(bpe(merges)) == bpe(merges)


def test_models_without_merges_stay_as_they_are() -> None:
    for model in ({"type": "Unigram", "unk_id": 0, "vocab": [["a", -1.5]]}, None):
        data = json.dumps({"model": model}).encode()
        assert quick_to_load(data) == data
