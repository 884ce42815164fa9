"""Text out of tokens, piece by piece: equal to the whole, no half characters, stop strings never leak."""

from __future__ import annotations

import random
from dataclasses import asdict
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_tokenizers import byte_fallback, byte_level

from tokenspeed.errors import ArtifactError, RequestError
from tokenspeed.runtime.detokenizer import Detokenizer, StopMatcher
from tokenspeed.runtime.tokenizer import Tokenizer

BYTE_LEVEL = byte_level()
BYTE_FALLBACK = byte_fallback()
token_lists = st.lists(st.integers(0, BYTE_LEVEL.vocab_size + 3), max_size=40)
short_texts = st.text("abAB\u00e9\U0001f600", max_size=24)
stop_lists = st.lists(st.text("abAB\u00e9\U0001f600", min_size=1, max_size=4), min_size=1, max_size=4)


def pieces(tokenizer: Tokenizer, tokens: list[int], **options: object) -> tuple[list[str], Detokenizer]:
    detokenizer = Detokenizer(tokenizer, **options)  # type: ignore[arg-type]
    found = [detokenizer.push(token) for token in tokens]
    return [*found, detokenizer.finish()], detokenizer


@given(token_lists, st.booleans())
def test_pieces_add_up_to_the_whole_text(tokens: list[int], skip: bool) -> None:
    found, _ = pieces(BYTE_LEVEL, tokens, skip_special_tokens=skip)
    assert "".join(found) == BYTE_LEVEL.decode(tokens, skip_special_tokens=skip)


@given(short_texts)
def test_a_character_comes_whole_or_not_yet(text: str) -> None:
    for tokenizer in (BYTE_LEVEL, BYTE_FALLBACK):
        tokens = tokenizer.encode(text, add_special_tokens=False)
        found, _ = pieces(tokenizer, tokens)
        assert "\ufffd" not in "".join(found)
        assert "".join(found).removeprefix(" ") == text


@given(st.lists(st.integers(3, 265), max_size=30))
def test_byte_fallback_pieces_are_the_bytes_of_the_tokens(tokens: list[int]) -> None:
    found, _ = pieces(BYTE_FALLBACK, tokens)
    whole = b"".join(BYTE_FALLBACK.token_bytes(token) for token in tokens)
    assert "".join(found) == whole.decode("utf-8", "replace")


def test_a_continuation_keeps_its_leading_space_which_a_text_drops() -> None:
    tokens = [BYTE_FALLBACK.token_id("▁hello"), BYTE_FALLBACK.token_id("▁wor"), BYTE_FALLBACK.token_id("ld")]
    assert BYTE_FALLBACK.decode(tokens) == "hello world"
    assert "".join(pieces(BYTE_FALLBACK, tokens)[0]) == " hello world"


def test_an_unfinished_character_becomes_a_replacement_only_at_the_end() -> None:
    first, second, *_ = BYTE_LEVEL.encode("\U0001f600")
    found, _ = pieces(BYTE_LEVEL, [first, second])
    assert found == ["", "", "\ufffd"]


def test_added_tokens_and_unknown_ids() -> None:
    added = BYTE_LEVEL.token_id("two words")
    assert added is not None
    assert pieces(BYTE_LEVEL, [added, 10_000])[0] == ["two words", "", ""]
    assert BYTE_LEVEL.token_bytes(-1) == b""


def first_stop(text: str, stops: list[str], include: bool) -> tuple[str, str | None]:
    """The definition, read off the whole text: the stop string that is complete at the earliest character."""
    for end in range(1, len(text) + 1):
        hits = [stop for stop in stops if text[:end].endswith(stop)]
        if hits:
            longest = max(hits, key=len)
            return text[: end if include else end - len(longest)], longest
    return text, None


@settings(max_examples=300)
@given(st.lists(short_texts, max_size=6), stop_lists, st.booleans())
def test_stop_strings_do_not_depend_on_how_text_arrives(chunks: list[str], stops: list[str], include: bool) -> None:
    text, expected = first_stop("".join(chunks), stops, include)
    matcher = StopMatcher(stops, include=include)
    emitted = ""
    for chunk in chunks:
        emitted += matcher.push(chunk)
        assert text.startswith(emitted)  # nothing of a stop string ever went out
    if matcher.matched is None:
        emitted += matcher.finish()
    assert (emitted, matcher.matched) == (text, expected)


@given(token_lists, stop_lists, st.booleans())
def test_streamed_text_equals_the_whole_cut_at_the_stop_string(tokens: list[int], stops: list[str], inc: bool) -> None:
    found, detokenizer = pieces(BYTE_LEVEL, tokens, stop=stops, include_stop=inc)
    whole = BYTE_LEVEL.decode(tokens, skip_special_tokens=True)
    assert ("".join(found), detokenizer.matched) == first_stop(whole, stops, inc)


def test_only_what_may_begin_a_stop_string_is_held_back() -> None:
    matcher = StopMatcher(["</s>"])
    assert [matcher.push(c) for c in "a<b</s"] == ["a", "", "<b", "", "", ""]
    assert matcher.push("x") == "</sx"
    assert matcher.push("</s>y") == ""
    assert matcher.matched == "</s>"
    assert matcher.push("more") == ""


def test_work_per_token_does_not_grow_with_the_text() -> None:
    matcher = StopMatcher(["needle"])
    for _ in range(50_000):
        matcher.push("needl")
    assert len(matcher.finish()) <= len("needle")


def test_encode_adds_bos_where_the_model_expects_it() -> None:
    assert BYTE_FALLBACK.encode("a")[0] == BYTE_FALLBACK.token_id("<s>")
    assert BYTE_FALLBACK.encode("<s>a").count(1) == 1
    assert BYTE_FALLBACK.encode("a", add_special_tokens=False)[0] != 1


@given(st.text(max_size=40).filter(lambda t: "<|" not in t))
def test_byte_level_text_survives_the_round_trip(text: str) -> None:
    assert BYTE_LEVEL.decode(BYTE_LEVEL.encode(text)) == text


def test_text_that_is_no_unicode_is_refused() -> None:
    with pytest.raises(RequestError, match="half of a surrogate pair"):
        BYTE_LEVEL.encode("a\ud800")


def test_damaged_and_unsupported_tokenizers_are_named() -> None:
    with pytest.raises(ArtifactError, match=r"tokenizer/tokenizer\.json cannot be read"):
        Tokenizer(b"{}", {})
    with pytest.raises(ArtifactError, match="cannot stream a tokenizer with decoder null"):
        Tokenizer(b'{"model": {"type": "BPE", "vocab": {"a": 0}, "merges": []}}', {})
    with pytest.raises(ArtifactError, match="add_bos needs a bos_token, have '<nope>'"):
        byte_level(add_bos=True, bos_token="<nope>")


def test_a_real_vocabulary(smollm2_gguf: Path) -> None:
    """Random tokens of SmolLM2, invalid bytes and special tokens among them; and text of every kind."""
    checkpoint = pytest.importorskip("tokenspeed.compile.checkpoint", reason="needs the build extra")
    files = asdict(checkpoint.open_checkpoint(smollm2_gguf).tokenizer())
    tokenizer = Tokenizer(files.pop("tokenizer_json"), files)
    rng = random.Random(1)
    for skip in (True, False):
        for _ in range(100):
            tokens = [rng.randrange(tokenizer.vocab_size) for _ in range(60)]
            found, _ = pieces(tokenizer, tokens, skip_special_tokens=skip)
            assert "".join(found) == tokenizer.decode(tokens, skip_special_tokens=skip)
    text = "Caf\u00e9 1234, \u4f60\u597d \U0001f469\u200d\U0001f469\u200d\U0001f467!\n\n  def f(x):\n\treturn   x  "
    assert "".join(pieces(tokenizer, tokenizer.encode(text))[0]) == text
    prompt = tokenizer.chat.render([{"role": "user", "content": "Hi"}])
    assert prompt.endswith("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")
    assert tokenizer.encode(prompt, add_special_tokens=False)[0] == tokenizer.token_id("<|im_start|>")
