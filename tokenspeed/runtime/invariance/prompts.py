"""Prompts for the harness: made from a seed, or read from a file."""

from __future__ import annotations

import hashlib
import json
import math
import random
from collections.abc import Callable, Sequence
from pathlib import Path

from tokenspeed.errors import UsageError

MOST_TOKENS = 600
"""Of a prompt that is made here: several pages, and chunks in some engines."""
SHARED_SHARE = 0.25
"""Of the prompts, how many begin with the tokens of an earlier one."""
_TEXT = (
    "the order of a sum decides its last bit when numbers are kept in few digits so who wants to see the same result"
    " twice must add in one order whatever stands beside it on the machine river stone light seven winter market Anna"
    " 1907 x = y + 2 ; return None ( not yet ) { } \n \n\n \t é 東京 🙂 -0.5 ..."
)

Encode = Callable[[str], list[int]]


def make_prompts(seed: int, number: int, *, vocab_size: int, most_tokens: int, encode: Encode) -> list[list[int]]:
    """``number`` prompts: token ids drawn from the whole vocabulary, and texts, of 1 to MOST_TOKENS tokens. The first
    is one token, the second ``most_tokens``, which may be more; some begin with what an earlier one has."""
    prompts: list[list[int]] = []
    for i in range(number):
        rng = random.Random(f"prompt {seed} {i}")
        length = 1 if i == 0 else most_tokens if i == 1 else _length(rng, min(MOST_TOKENS, most_tokens))
        ids = _text(rng, length, encode) if i % 2 and i > 1 else rng.choices(range(vocab_size), k=length)
        if i > 1 and rng.random() < SHARED_SHARE:
            ids = _continued(rng, prompts, ids, most_tokens)
        prompts.append(ids)
    return prompts


def _length(rng: random.Random, most: int) -> int:
    return min(most, max(1, int(math.exp(rng.uniform(0.0, math.log(most + 1))))))


def _text(rng: random.Random, length: int, encode: Encode) -> list[int]:
    ids = encode(" ".join(rng.choices(_TEXT.split(" "), k=length)))
    return ids[:length] or [0]


def _continued(rng: random.Random, prompts: Sequence[list[int]], ids: list[int], most: int) -> list[int]:
    """The longer part of one of the longest prompts so far, then ``ids``."""
    longest = sorted(prompts, key=len, reverse=True)[:4]
    prefix = rng.choice(longest)
    prefix = prefix[: rng.randint(len(prefix) // 2, len(prefix))]
    return [*prefix[: most - 1], *ids][:most]


def read_prompts(path: Path, encode: Encode) -> list[list[int]]:
    """One prompt a line: a JSON array of token ids, a JSON string, or plain text. Empty lines are left out.

    Raises UsageError.
    """
    try:
        lines = path.read_text(encoding="utf-8").split("\n")  # other separators may stand in a JSON string
    except (OSError, UnicodeDecodeError) as e:
        raise UsageError(f"cannot read --prompt-file {path}: {getattr(e, 'strerror', None) or e}") from None
    prompts = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            value = json.loads(line)
        except (ValueError, RecursionError):
            value = line
        ids = value if isinstance(value, list) else encode(value if isinstance(value, str) else line)
        if not ids or not all(type(token) is int for token in ids):
            raise UsageError(f"{path}, line {number}: need a text or an array of token ids, have {line[:60]!r}")
        prompts.append(ids)
    if not prompts:
        raise UsageError(f"{path} has no prompt", hint="write one prompt a line")
    return prompts


def digest_of(prompts: Sequence[Sequence[int]]) -> str:
    """SHA-256 of the token ids of all prompts, in order."""
    return hashlib.sha256(json.dumps([list(ids) for ids in prompts], separators=(",", ":")).encode()).hexdigest()
