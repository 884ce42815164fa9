"""What a client asks of the engine, and what the engine answers: plain values without behaviour."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum


@dataclass(frozen=True)
class SamplingParams:
    """How the tokens of one request are drawn and when it ends. Names are vLLM's.

    ``temperature`` 0 is greedy (lowest token id on exact ties). ``top_k`` 0 or -1 is off.
    ``seed`` None draws a fresh seed at submit. ``logprobs`` k reports the drawn token's log-probability
    and the k likeliest (0: only the drawn one; None: nothing); ``prompt_logprobs`` likewise for the prompt, from
    position ``logprob_start_len`` on (SGLang's name; at most the prompt's length, where none is left). What lies before
    it need not be computed where it is cached.

    Logits are adjusted before a draw, in this order: ``logit_bias`` (token id -> added); ``repetition_penalty`` divides
    positive logits of tokens in prompt or output, and multiplies others (1 is off); ``frequency_penalty`` times how
    often a token was drawn, and ``presence_penalty`` if it was at all, are subtracted; with ``allowed_token_ids`` only
    those can be drawn. Log-probabilities are those of the logits before all this.
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
    logprob_start_len: int = 0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] | None = None
    allowed_token_ids: tuple[int, ...] | None = None

    @property
    def has_penalties(self) -> bool:
        """Whether drawing needs to know which tokens came before."""
        return (self.presence_penalty, self.frequency_penalty, self.repetition_penalty) != (0, 0, 1)


MAX_PRIORITY = 9


@dataclass(frozen=True)
class RequestOptions:
    """What a request asks of the scheduler; no token of it changes by any of this.

    Attributes:
        priority: class 0 (first) to MAX_PRIORITY.
        tenant: whose fair share it counts for, among requests of one priority: an API key, say.
        timeout: seconds from submission after which it ends with finish_reason 'timeout'; None: never.
        cache_key: cached prefixes are shared between requests with the same key alone.
    """

    priority: int = 0
    tenant: str = ""
    timeout: float | None = None
    cache_key: str = ""


class FinishReason(StrEnum):
    STOP = "stop"
    LENGTH = "length"
    TIMEOUT = "timeout"
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

    ``logprobs`` is parallel to ``token_ids`` when they were asked for. ``prompt_logprobs`` has one entry per prompt
    token: None for the first, and before logprob_start_len. With the first token, ``cached_tokens`` is how many tokens
    of the prompt were not computed, since their keys and values were in the prefix index, and ``queue_seconds`` how
    long it waited before it ran. ``weights_version`` is that of the weights which drew the tokens. After an event with
    ``finish_reason`` none follows.
    """

    request_id: int
    token_ids: Sequence[int] = ()
    logprobs: Sequence[TokenLogprobs] = ()
    prompt_logprobs: Sequence[TokenLogprobs | None] | None = None
    finish_reason: FinishReason | None = None
    error: str | None = None
    stop_token_id: int | None = None
    cached_tokens: int | None = None
    queue_seconds: float | None = None
    weights_version: str | None = None


EventSink = Callable[[EngineEvent], None]
"""Called on the engine's thread; must return quickly and never raise."""
