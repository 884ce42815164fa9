"""What a run of the harness is asked to do."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from tokenspeed.errors import UsageError

ALONE = "alone"
PROCESS = "process"
LEGS: Mapping[str, str] = {
    ALONE: "one request at a time: the reference",
    "packed": "packed with random other requests, in random order, at random times",
    "repeated": "the same as packed, once more",
    "chunks": "in engines whose steps hold different numbers of tokens",
    "preempted": "with so few KV pages that requests are pushed back and computed again",
    "cached": "where the prefix index has what a prompt begins with",
    PROCESS: "in a fresh process",
}
"""Names, and what they are, in the order in which they run."""
PROMPTS, TOKENS = 64, 128
"""Of a run, when nothing else is said."""
LEAST_PROMPTS, LEAST_TOKENS = 8, 16
"""Fewer prove too little to be attested."""
_MOST = 1 << 16


@dataclass(frozen=True)
class Plan:
    """What to run; leg alone runs always. ``prompt_file`` takes the place of ``prompts`` made from ``seed``. Raises
    UsageError."""

    prompts: int = PROMPTS
    tokens: int = TOKENS
    seed: int = 0
    legs: tuple[str, ...] = tuple(LEGS)
    prompt_file: Path | None = None

    def __post_init__(self) -> None:
        for name, value in (("prompts", self.prompts), ("tokens", self.tokens)):
            if not 1 <= value <= _MOST:
                raise UsageError(f"--{name} is {value}; it must lie between 1 and {_MOST}")
        if not 0 <= self.seed < 1 << 63:
            raise UsageError(f"--seed is {self.seed}; it must lie between 0 and {(1 << 63) - 1}")
        if unknown := [leg for leg in self.legs if leg not in LEGS]:
            raise UsageError(f"--legs names {unknown[0]!r}; the legs are {', '.join(LEGS)}")
