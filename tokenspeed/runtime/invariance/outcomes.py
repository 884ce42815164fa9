"""What a request gave, to the last bit, and where two outcomes part."""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tokenspeed.runtime.request import EngineEvent, SamplingParams, TokenLogprobs

TOP = 2
"""Of each position the log-probabilities of so many likeliest tokens are compared too."""


@dataclass(frozen=True)
class Case:
    """One request that every leg runs. ``prompt`` is its number among the prompts."""

    prompt: int
    ids: tuple[int, ...]
    temperature: float
    seed: int
    tokens: int

    @property
    def name(self) -> str:
        return f"prompt {self.prompt}, {'greedy' if self.temperature == 0 else f'temperature {self.temperature:g}'}"

    def params(self, *, prompt_logprobs: bool = True) -> SamplingParams:
        return SamplingParams(
            max_tokens=self.tokens,
            temperature=self.temperature,
            seed=self.seed,
            ignore_eos=True,
            logprobs=TOP,
            prompt_logprobs=0 if prompt_logprobs else None,
        )


def make_cases(prompts: Sequence[Sequence[int]], tokens: int, seed: int) -> list[Case]:
    """Each prompt greedy, and at temperature 1 with a seed of its own."""
    cases = []
    for i, ids in enumerate(prompts):
        cases += [Case(i, tuple(ids), t, (seed * 1_000_003 + i) & ((1 << 64) - 1), tokens) for t in (0.0, 1.0)]
    return cases


def bits_of(value: float) -> int:
    """The bits of a float32, which ``value`` is exactly; every NaN has the same ones."""
    return 0x7FC00000 if value != value else int(struct.unpack("<I", struct.pack("<f", value))[0])


Position = tuple[int, ...]
"""What was found at one position: token id, bits of its log-probability, rank, and (id, bits) of the likeliest."""


def _position(found: TokenLogprobs) -> Position:
    top = tuple(part for token, value in found.top for part in (token, bits_of(value)))
    return (found.token_id, bits_of(found.logprob), found.rank, *top)


@dataclass
class Outcome:
    """The positions of one request: ``prompt`` has none for the first token, and is None if nobody asked."""

    output: list[Position] = field(default_factory=list)
    prompt: list[Position] | None = field(default_factory=list)
    cached_tokens: int = 0
    error: str | None = None

    def feed(self, event: EngineEvent) -> None:
        self.output += map(_position, event.logprobs)
        if self.prompt is not None:
            self.prompt += [_position(p) for p in event.prompt_logprobs or () if p is not None]
        self.cached_tokens += event.cached_tokens or 0
        self.error = event.error or self.error

    @property
    def num_compared(self) -> int:
        return len(self.output) + len(self.prompt or ())

    def to_json(self) -> dict[str, Any]:
        return {
            "output": self.output, "prompt": self.prompt, "cached_tokens": self.cached_tokens, "error": self.error,
        }  # fmt: skip

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Outcome:
        prompt = None if data["prompt"] is None else [tuple(p) for p in data["prompt"]]
        return cls([tuple(p) for p in data["output"]], prompt, data["cached_tokens"], data["error"])


@dataclass(frozen=True)
class Divergence:
    """The first position at which a request differs from the reference.

    Attributes:
        case: its number among the cases.
        position: of the token in the sequence, from 0: positions of the prompt come first.
        in_prompt: whether it is a prompt's log-probability.
        expected, found: what the reference and the leg have there; None where one of them has ended.
    """

    leg: str
    case: int
    name: str
    position: int
    in_prompt: bool
    expected: Position | None
    found: Position | None

    def to_json(self) -> dict[str, Any]:
        return {
            "leg": self.leg, "case": self.case, "request": self.name, "position": self.position,
            "in_prompt": self.in_prompt, "expected": _shown(self.expected), "found": _shown(self.found),
        }  # fmt: skip


def _shown(position: Position | None) -> dict[str, Any] | None:
    if position is None:
        return None
    token, bits, rank, *top = position
    likeliest = [{"token": t, "bits": f"{b:#010x}"} for t, b in zip(top[::2], top[1::2], strict=True)]
    return {"token": token, "logprob": _float(bits), "bits": f"{bits:#010x}", "rank": rank, "top": likeliest}


def _float(bits: int) -> float | None:
    value = float(struct.unpack("<f", struct.pack("<I", bits))[0])
    return value if abs(value) < float("inf") else None  # JSON has no other


def differences(
    leg: str, cases: Sequence[Case], reference: Sequence[Outcome], found: Mapping[int, Outcome]
) -> Iterator[Divergence]:
    """Where each of ``found``, by the number of its case, first differs. Prompts are compared where they were asked."""
    for number, outcome in sorted(found.items()):
        case, expected = cases[number], reference[number]
        parts = [(False, len(case.ids), expected.output, outcome.output)]
        if outcome.prompt is not None:
            assert expected.prompt is not None, "the reference asks for prompts"
            parts.insert(0, (True, 1, expected.prompt, outcome.prompt))
        for in_prompt, first, ours, theirs in parts:
            at = first_difference(ours, theirs)
            if at is not None:
                pair = (ours[at] if at < len(ours) else None, theirs[at] if at < len(theirs) else None)
                yield Divergence(leg, number, case.name, first + at, in_prompt, *pair)
                break


def first_difference(ours: Sequence[Position], theirs: Sequence[Position]) -> int | None:
    """Index of the first element that differs, or that only one has."""
    for i, (a, b) in enumerate(zip(ours, theirs, strict=False)):
        if a != b:
            return i
    return None if len(ours) == len(theirs) else min(len(ours), len(theirs))
