"""What a client asks of the engine, and what the engine answers: plain values without behaviour."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum


@dataclass(frozen=True)
class SamplingParams:
    """How the tokens of one request are drawn and when it ends. Names are vLLM's.

    ``temperature`` 0 is greedy (lowest token id on exact ties). ``top_k`` 0 or -1 is off.
    ``seed`` None draws a fresh seed at submit. ``logprobs`` k reports the drawn token's log-probability
    and the k likeliest (0: only the drawn one; None: nothing); ``prompt_logprobs`` likewise for the prompt.
    """

    max_tokens: int | None = None
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    n: int = 1
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None


class FinishReason(StrEnum):
    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


@dataclass(frozen=True)
class TokenLogprobs:
    """Log-probability (natural log, of the unscaled logits) of one token and the likeliest alternatives.

    ``rank`` is 1 for the likeliest token. ``top`` is ``(token id, logprob)``, likeliest first.
    """

    token_id: int
    logprob: float
    rank: int
    top: tuple[tuple[int, float], ...] = ()


@dataclass(slots=True)
class EngineEvent:
    """News of one request: new tokens, prompt log-probabilities (once, with the first token), or its end.

    One per token and request: not frozen, which would make it several times as slow to make. Nobody changes it.

    ``logprobs`` is parallel to ``token_ids`` when they were asked for. ``prompt_logprobs`` has one entry
    per prompt token, the first of which is None. After an event with ``finish_reason`` none follows.
    """

    request_id: int
    token_ids: Sequence[int] = ()
    logprobs: Sequence[TokenLogprobs] = ()
    prompt_logprobs: Sequence[TokenLogprobs | None] | None = None
    finish_reason: FinishReason | None = None
    error: str | None = None
    stop_token_id: int | None = field(default=None)


EventSink = Callable[[EngineEvent], None]
"""Called on the engine's thread; must return quickly and never raise."""
