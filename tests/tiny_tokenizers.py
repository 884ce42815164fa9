"""Small tokenizers for tests: byte-level BPE, and SentencePiece-like pieces with byte fallback."""

from __future__ import annotations

from typing import Any

from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Backend

from tokenspeed.runtime.tokenizer import Tokenizer

CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
CONFIG: dict[str, Any] = {
    "chat_template": CHATML,
    "bos_token": "<|endoftext|>",
    "eos_token": "<|im_end|>",
    "pad_token": None,
    "unk_token": None,
    "eos_token_ids": [2],
    "add_bos": False,
}


def byte_level(**config: Any) -> Tokenizer:
    """``byte_level_json`` with CONFIG, or what ``config`` changes of it."""
    return Tokenizer(byte_level_json(), {**CONFIG, **config})


def byte_level_json(limit: int | None = None) -> bytes:
    """Every byte, a few merges; ids 0 to 2 are special, an added token with spaces follows the vocabulary. With a
    ``limit`` only that many tokens: some bytes have none then."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [("h", "e"), ("l", "l"), ("he", "ll"), ("hell", "o"), ("Ġ", "w"), ("Ġw", "o"), ("Ã", "©")]
    tokens = [*SPECIAL, *alphabet, *("".join(m) for m in merges)][:limit]
    merges = merges if limit is None else []
    backend = Backend(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL])
    if limit is None:
        backend.add_tokens([AddedToken("two words", special=False, normalized=False)])
    return bytes(backend.to_str().encode())


def byte_fallback(**config: Any) -> Tokenizer:
    """Pieces with U+2581 for a space, and one token for each byte."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{b:02X}>" for b in range(256)), "▁", "▁hello", "▁wor", "ld", "é", "a", "b"]
    vocab = {token: i for i, token in enumerate(pieces)}
    backend = Backend(models.BPE(vocab=vocab, merges=[], byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    backend.decoder = decoders.Sequence(steps)
    backend.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in ("<s>", "</s>")])
    own = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "add_bos": True, **config}
    return Tokenizer(backend.to_str().encode(), {**CONFIG, **own})
