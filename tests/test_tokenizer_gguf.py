"""Tokenizers rebuilt from GGUF metadata: exact ids, exact round trips, and how each family cuts text."""

from __future__ import annotations

import random
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from checkpoint_files import byte_level_alphabet, byte_level_metadata, sentencepiece_vocabulary
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from tokenspeed.compile.checkpoint import open_checkpoint
from tokenspeed.compile.tokenizer import TokenizerFiles
from tokenspeed.compile.tokenizer_gguf import end_token_ids, read_tokenizer
from tokenspeed.errors import CheckpointError

PATH = Path("x.gguf")

HARD_TEXTS = [
    "",
    " ",
    "Où est l'élève naïf? Ça va: 'Ünïcödé' ñandú",
    "🎉 👩🏽\u200d🚀 🇵🇹 ❤️\u200d🔥 e\u0301",
    "日本語のテキスト。한국어 문장. 中文\uff0c标点\uff01 مرحبا हिन्दी नमस्ते",
    "def f(x):\n    if x == 10:\n\t\treturn {'a': [1, 2]}  # comment\n",
    "a  b   c    d     e          f",
    "   leading and trailing   ",
    "\t\t\ttabs\tand \t mixed",
    "line\r\nline\r\n\r\n\n\n  x\r",
    "x = 3.14159  +  1234567890 - 0x1F ½ ² ٣",
    "<|im_start|>user\nhi<|im_end|>\n<|endoftext|>",
    "\u00a0nbsp\u2003em\u3000wide\u200bzero\ufeff",
]


def build(metadata: dict[str, Any]) -> tuple[TokenizerFiles, Tokenizer]:
    files = read_tokenizer(metadata, PATH, end_token_ids(metadata, PATH))
    return files, Tokenizer.from_str(files.tokenizer_json.decode())


def refusal(metadata: dict[str, Any]) -> str:
    with pytest.raises(CheckpointError) as caught:
        build(metadata)
    return str(caught.value)


def encode(tokenizer: Tokenizer, text: str) -> list[int]:
    ids: list[int] = tokenizer.encode(text, add_special_tokens=False).ids
    return ids


def decode(tokenizer: Tokenizer, ids: list[int]) -> str:
    return str(tokenizer.decode(ids, skip_special_tokens=False))


# ---- SmolLM2 --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def smollm2_files(smollm2_gguf: Path) -> TokenizerFiles:
    return open_checkpoint(smollm2_gguf).tokenizer()


@pytest.fixture(scope="module")
def smollm2(smollm2_files: TokenizerFiles) -> Tokenizer:
    return Tokenizer.from_str(smollm2_files.tokenizer_json.decode())


def test_smollm2_reference_ids(smollm2: Tokenizer, smollm2_reference: dict[str, Any]) -> None:
    for prompt in smollm2_reference["prompts"]:
        ids = encode(smollm2, prompt["text"])
        assert ids == prompt["ids"], prompt["name"]
        assert (decode(smollm2, ids) == prompt["text"]) == prompt["roundtrip"], prompt["name"]


def test_smollm2_special_tokens(smollm2_files: TokenizerFiles, smollm2: Tokenizer) -> None:
    files = smollm2_files
    assert (files.bos_token, files.eos_token, files.pad_token) == ("<|im_start|>", "<|im_end|>", "<|im_end|>")
    assert (files.unk_token, files.eos_token_ids, files.add_bos) == ("<|endoftext|>", (0, 2), False)
    assert files.chat_template is not None and "<|im_start|>" in files.chat_template
    # A begin token is named but not added, with or without special tokens.
    assert smollm2.encode("Hi").ids == encode(smollm2, "Hi")
    assert encode(smollm2, "<|im_start|>user\n<|im_end|>") == [1, 4093, 198, 2]
    assert smollm2.decode([1, 4093, 2]) == "user"


@pytest.mark.parametrize("text", HARD_TEXTS)
def test_smollm2_round_trips(smollm2: Tokenizer, text: str) -> None:
    assert decode(smollm2, encode(smollm2, text)) == text


_MISSING = "\x04\x06\x13\x14\x16\x1d"


@given(st.text(st.characters(max_codepoint=0x3FFFF, exclude_characters=_MISSING, exclude_categories=["Cs"])))
@settings(max_examples=300, deadline=None)
def test_smollm2_round_trips_any_text_whose_bytes_have_tokens(smollm2: Tokenizer, text: str) -> None:
    assert decode(smollm2, encode(smollm2, text)) == text


def test_smollm2_splits_digits_one_by_one(smollm2: Tokenizer) -> None:
    digits = [encode(smollm2, d)[0] for d in "1234567890"]
    assert encode(smollm2, "1234567890") == digits
    # The space before a number is a token of its own, never part of one with the digit.
    assert encode(smollm2, "a 42") == [*encode(smollm2, "a"), *encode(smollm2, " "), digits[3], digits[1]]


def test_smollm2_bytes_without_a_token_become_the_unknown_token(smollm2: Tokenizer) -> None:
    assert smollm2.token_to_id("<|endoftext|>") == 0
    for char in _MISSING:
        assert encode(smollm2, f"a{char}b") == [*encode(smollm2, "a"), 0, *encode(smollm2, "b")]
    # U+50000 is f1 90 80 80 in UTF-8; only f1 is missing.
    assert encode(smollm2, "\U00050000")[0] == 0 and len(encode(smollm2, "\U00050000")) == 4


# ---- byte-level families --------------------------------------------------------------------------------------


def words(pre: str | None, text: str) -> list[str]:
    """The words that a family cuts text into, before any merge."""
    _, tokenizer = build(byte_level_metadata(pre))
    values = {char: byte for byte, char in enumerate(byte_level_alphabet())}
    pieces = tokenizer.pre_tokenizer.pre_tokenize_str(text)
    return [bytes(values[c] for c in piece).decode() for piece, _ in pieces]


TEXT = "It's IT'S 12345 x1  (foo_Bar)\n\n\tDone... ok"


@pytest.mark.parametrize(
    ("pre", "expected"),
    [
        (
            "gpt-2",
            "It|'s| IT|'|S| 12345| x|1| | (|foo|_|Bar|)|\n\n|\t|Done|...| ok",
        ),
        (
            "smollm",
            "It|'s| IT|'|S| |1|2|3|4|5| x|1| | (|foo|_|Bar|)|\n\n|\t|Done|...| ok",
        ),
        (
            "llama-bpe",
            "It|'s| IT|'S| |123|45| x|1| | (|foo|_Bar|)\n\n|\tDone|...| ok",
        ),
        (
            "qwen2",
            "It|'s| IT|'S| |1|2|3|4|5| x|1| | (|foo|_Bar|)\n\n|\tDone|...| ok",
        ),
        (
            "tekken",
            "It|'s| IT|'S| |1|2|3|4|5| x|1| | (|foo|_Bar|)\n\n|\tDone|...| ok",
        ),
        (
            "default",
            "It|'|s| IT|'|S| |123|45| x|1|  |(|foo|_|Bar|)|\n\n|\t|Done|...| ok",
        ),
    ],
)
def test_how_families_cut(pre: str, expected: str) -> None:
    assert words(pre, TEXT) == expected.split("|")


def test_tekken_cuts_where_case_changes() -> None:
    assert words("tekken", "camelCase HTTPServer") == ["camel", "Case", " HTTPServer"]
    assert words("llama-bpe", "camelCase HTTPServer") == ["camelCase", " HTTPServer"]


@pytest.mark.parametrize(("alias", "family"), [("llama3", "llama-bpe"), ("starcoder", "smollm"), ("mpt", "gpt-2")])
def test_aliases(alias: str, family: str) -> None:
    assert words(alias, TEXT) == words(family, TEXT)


def test_a_missing_name_is_the_default_family(caplog: pytest.LogCaptureFixture) -> None:
    assert words(None, TEXT) == words("default", TEXT)
    assert "x.gguf names no pre-tokenizer: using 'default'" in caplog.text


@pytest.mark.parametrize("pre", ["gpt-2", "smollm", "llama-bpe", "qwen2", "tekken", "default"])
@pytest.mark.parametrize("text", HARD_TEXTS)
def test_families_round_trip(pre: str, text: str) -> None:
    _, tokenizer = build(byte_level_metadata(pre, ["Ġ Ġ", "a b", "ĠĠ Ġ", "Ã ©"]))
    assert decode(tokenizer, encode(tokenizer, text)) == text


def test_merges_apply_in_order() -> None:
    _, tokenizer = build(byte_level_metadata("gpt-2", ["b c", "a b", "a bc"]))
    assert tokenizer.encode("abc ab").tokens == ["abc", "Ġ", "ab"]


def test_whole_words_are_taken_without_merges() -> None:
    metadata = byte_level_metadata("llama-bpe", ["a b"])
    metadata["tokenizer.ggml.tokens"].append("hello")
    metadata["tokenizer.ggml.token_type"].append(1)
    _, tokenizer = build(metadata)
    assert tokenizer.encode("hello", add_special_tokens=False).tokens == ["hello"]
    metadata["tokenizer.ggml.pre"] = "gpt-2"
    assert build(metadata)[1].encode("hello").tokens == list("hello")


def test_a_token_that_a_writer_decoded_is_spelled_in_bytes_again() -> None:
    metadata = byte_level_metadata("gpt-2", ["ï ¿", "ï¿ ½"])
    tokens = metadata["tokenizer.ggml.tokens"]
    tokens[tokens.index("ï¿½")] = "\ufffd"  # efbfbd in UTF-8
    _, tokenizer = build(metadata)
    assert tokenizer.encode("\ufffd").tokens == ["ï¿½"]


@pytest.mark.parametrize(
    ("pre", "extra", "add_bos"),
    [
        ("gpt-2", {}, False),
        ("llama-bpe", {}, True),
        ("llama-bpe", {"ggml.add_bos_token": False}, False),
        ("gpt-2", {"ggml.add_bos_token": True}, True),
    ],
)
def test_begin_token(pre: str, extra: dict[str, Any], add_bos: bool) -> None:
    files, tokenizer = build(byte_level_metadata(pre, **extra))
    assert files.add_bos is add_bos
    assert tokenizer.encode("ab").ids == ([1] if add_bos else []) + encode(tokenizer, "ab")


def test_end_token_is_added_only_on_request() -> None:
    _, tokenizer = build(byte_level_metadata("gpt-2", **{"ggml.add_eos_token": True}))
    assert tokenizer.encode("ab").ids == [*encode(tokenizer, "ab"), 2]


def test_user_defined_tokens_are_matched_but_not_special() -> None:
    metadata = byte_level_metadata("gpt-2", special=("<unk>", "<s>", "</s>", "<tool>"))
    metadata["tokenizer.ggml.token_type"][3] = 4
    _, tokenizer = build(metadata)
    assert encode(tokenizer, "ab<tool>") == [*encode(tokenizer, "ab"), 3]
    assert tokenizer.decode([1, 3], skip_special_tokens=True) == "<tool>"


def test_bytes_vanish_only_where_no_unknown_token_is_named() -> None:
    metadata = byte_level_metadata("gpt-2")
    tokens = metadata["tokenizer.ggml.tokens"]
    tokens[tokens.index("z")] = "[gone]"
    assert build(metadata)[1].encode("xzy").tokens == ["x", "y"]
    metadata["tokenizer.ggml.unknown_token_id"] = 0
    assert build(metadata)[1].encode("xzzy").tokens == ["x", "<unk>", "<unk>", "y"]


# ---- SentencePiece --------------------------------------------------------------------------------------------

WORDS = [
    "▁t",
    "he",
    "▁the",
    "▁",
    "▁▁",
    "▁▁▁▁",
    "in",
    "ing",
    "th",
    "er",
    "▁a",
    "nd",
    "▁and",
    "▁thing",
    "at",
    "cat",
    "▁cat",
]


def sentencepiece_metadata(**extra: Any) -> dict[str, Any]:
    pieces, scores, types = sentencepiece_vocabulary(WORDS)
    metadata = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": pieces,
        "tokenizer.ggml.scores": scores,
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
    }
    return metadata | {f"tokenizer.{key.replace('__', '.')}": value for key, value in extra.items()}


def spm_encode(text: str, metadata: dict[str, Any]) -> list[str]:
    """SentencePiece's BPE as it is defined: join the neighbours whose union scores highest, leftmost on ties."""
    score = dict(zip(metadata["tokenizer.ggml.tokens"], metadata["tokenizer.ggml.scores"], strict=True))
    symbols = list(("▁" + text.replace(" ", "▁")) if text else "")
    while True:
        joins = [(-score[a + b], i) for i, (a, b) in enumerate(pairwise(symbols)) if a + b in score]
        if not joins:
            break
        _, at = min(joins)
        symbols[at : at + 2] = [symbols[at] + symbols[at + 1]]
    pieces: list[str] = []
    for symbol in symbols:
        pieces += [symbol] if symbol in score else [f"<0x{byte:02X}>" for byte in symbol.encode()]
    return pieces


def test_sentencepiece_joins_by_score_with_byte_fallback() -> None:
    metadata = sentencepiece_metadata()
    _, tokenizer = build(metadata)
    rng = random.Random(11)
    texts = ["the thing and the cat", "é", "", "   the", *HARD_TEXTS[:8]]
    texts += ["".join(rng.choices("theincatrd  gx", k=rng.randrange(1, 40))) for _ in range(200)]
    for text in texts:
        assert tokenizer.encode(text, add_special_tokens=False).tokens == spm_encode(text, metadata), text


@pytest.mark.parametrize("text", HARD_TEXTS)
@pytest.mark.parametrize("prefix", [True, False])
def test_sentencepiece_round_trips(text: str, prefix: bool) -> None:
    _, tokenizer = build(sentencepiece_metadata(ggml__add_space_prefix=prefix))
    assert decode(tokenizer, encode(tokenizer, text)) == text


def test_sentencepiece_special_tokens_and_prefix() -> None:
    files, tokenizer = build(sentencepiece_metadata(chat_template="{{ x }}"))
    assert (files.bos_token, files.eos_token, files.unk_token, files.add_bos) == ("<s>", "</s>", "<unk>", True)
    assert files.chat_template == "{{ x }}" and files.eos_token_ids == (2,)
    assert tokenizer.encode("the").tokens == ["<s>", "▁the"]
    # The space is also put before text that follows a special token.
    assert tokenizer.encode("<s>the</s>cat", add_special_tokens=False).tokens == ["<s>", "▁the", "</s>", "▁cat"]
    _, bare = build(sentencepiece_metadata(ggml__add_space_prefix=False, ggml__add_bos_token=False))
    assert bare.encode("the cat").tokens == ["t", "he", "▁cat"]


# ---- refusals -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"model": "bert"}, "unknown tokenizer model 'bert': need gpt2 (byte-level BPE) or llama (SentencePiece)"),
        ({"model": None}, "unknown tokenizer model None"),
        (
            {"pre": "blorp"},
            "unknown pre-tokenizer 'blorp': need one of codeshell, command-r, deepseek-r1-qwen, default",
        ),
        ({"merges": None}, "the tokenizer is incomplete: need a list of str as tokenizer.ggml.merges, have none"),
        ({"merges": [1, 2]}, "need a list of str as tokenizer.ggml.merges, have list"),
        ({"merges": ["ab"]}, "need two tokens with a space between as a merge, have 'ab'"),
        ({"merges": ["a nope"]}, "the tokenizer's merges do not fit its vocabulary"),
        ({"token_type": [1]}, "need one token type per token, 260, have 1"),
        ({"unknown_token_id": 999}, "need a token id below 260 as tokenizer.ggml.unknown_token_id, have 999"),
    ],
)
def test_refusals(changes: dict[str, Any], expected: str) -> None:
    metadata = byte_level_metadata("gpt-2") | {f"tokenizer.ggml.{key}": value for key, value in changes.items()}
    assert expected in refusal(metadata)


def test_other_refusals() -> None:
    metadata = byte_level_metadata("gpt-2")
    metadata["tokenizer.ggml.tokens"][5] = metadata["tokenizer.ggml.tokens"][4]
    assert "tokens 4 and 5 of the tokenizer have the same text" in refusal(metadata)
    metadata = sentencepiece_metadata(ggml__scores=[0.0])
    assert "need one score per token" in refusal(metadata)
    assert "need a text as tokenizer.chat_template, have int" in refusal(sentencepiece_metadata(chat_template=3))
