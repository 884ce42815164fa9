"""Engine events to what a caller reads: text, token ids, log-probabilities, and how the request ended.

Shared by the blocking API, ``AsyncLLM`` and the server. Everything here is per replica: one engine request.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from tokenspeed.runtime.detokenizer import Detokenizer
from tokenspeed.runtime.request import EngineEvent, FinishReason, SamplingParams, TokenLogprobs
from tokenspeed.runtime.tokenizer import Tokenizer


@dataclass(frozen=True)
class TextOptions:
    """How output tokens become text. Names are vLLM's."""

    skip_special_tokens: bool = True
    include_stop_str_in_output: bool = False


@dataclass(slots=True)
class RequestOutput:
    """News of one replica of a request, or (joined) all of it.

    Attributes:
        index: replica, from 0 to n - 1.
        text: new text; what may be part of a stop string or of a character is held back.
        token_ids: new tokens, a stop token included, whether or not their text is out yet.
        logprobs: parallel to ``token_ids`` when asked for.
        prompt_logprobs: one entry per prompt token, in the first output only; the first is None, and so are those
            before logprob_start_len.
        cached_tokens: tokens of the prompt that the prefix index had, so that they were not computed; in the first
            output only, and None when no token was drawn.
        queue_seconds: how long it waited before it ran, in the first output only.
        weights_versions: versions of the weights that drew ``token_ids``, in order; more than one where an update
            preempted the request.
        finish_reason: set in the last output.
        stop_reason: the stop string or token id that ended it; None at the model's own end of sequence or length.
        error: what went wrong, when finish_reason is ERROR.
        time: when it happened, by ``time.perf_counter`` (seconds).
    """

    index: int = 0
    text: str = ""
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] = ()
    prompt_logprobs: tuple[TokenLogprobs | None, ...] | None = None
    cached_tokens: int | None = None
    queue_seconds: float | None = None
    weights_versions: tuple[str, ...] = ()
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    error: str | None = None
    time: float = 0.0


def join(outputs: Iterable[RequestOutput]) -> RequestOutput:
    """The outputs of one replica, in order, as one."""
    parts = list(outputs)
    last = parts[-1]
    return RequestOutput(
        index=last.index,
        text="".join(o.text for o in parts),
        token_ids=tuple(t for o in parts for t in o.token_ids),
        logprobs=tuple(p for o in parts for p in o.logprobs),
        prompt_logprobs=next((o.prompt_logprobs for o in parts if o.prompt_logprobs is not None), None),
        cached_tokens=next((o.cached_tokens for o in parts if o.cached_tokens is not None), None),
        queue_seconds=next((o.queue_seconds for o in parts if o.queue_seconds is not None), None),
        weights_versions=tuple(dict.fromkeys(v for o in parts for v in o.weights_versions)),
        finish_reason=last.finish_reason,
        stop_reason=last.stop_reason,
        error=last.error,
        time=last.time,
    )


class Assembler:
    """Turns the events of one engine request into outputs.

    ``feed`` after the end returns None: the engine may draw a few tokens more before it learns of a stop string.
    """

    def __init__(self, tokenizer: Tokenizer, params: SamplingParams, options: TextOptions, index: int):
        self.index = index
        self.finished = False
        self._detokenizer = Detokenizer(
            tokenizer,
            skip_special_tokens=options.skip_special_tokens,
            stop=params.stop,
            include_stop=options.include_stop_str_in_output,
        )
        self._keep_stop_token = options.include_stop_str_in_output
        self._reported_stops = frozenset(params.stop_token_ids)

    def feed(self, event: EngineEvent, time: float) -> RequestOutput | None:
        if self.finished:
            return None
        pieces, used = [], 0
        for token in event.token_ids:
            used += 1
            if token == event.stop_token_id and used == len(event.token_ids) and not self._keep_stop_token:
                break
            pieces.append(self._detokenizer.push(token))
            if self._detokenizer.matched is not None:
                break
        reason = event.finish_reason
        stop_reason: str | int | None = event.stop_token_id if event.stop_token_id in self._reported_stops else None
        if reason is not None and self._detokenizer.matched is None:
            pieces.append(self._detokenizer.finish())
        if self._detokenizer.matched is not None:
            reason, stop_reason = FinishReason.STOP, self._detokenizer.matched
        self.finished = reason is not None
        return RequestOutput(
            index=self.index,
            text="".join(pieces),
            token_ids=tuple(event.token_ids[:used]),
            logprobs=tuple(event.logprobs[:used]),
            prompt_logprobs=None if event.prompt_logprobs is None else tuple(event.prompt_logprobs),
            cached_tokens=event.cached_tokens,
            queue_seconds=event.queue_seconds,
            weights_versions=() if event.weights_version is None else (event.weights_version,),
            finish_reason=reason,
            stop_reason=stop_reason,
            error=event.error,
            time=time,
        )

    def abort(self, time: float) -> RequestOutput | None:
        """End now: what was held back is released."""
        if self.finished:
            return None
        self.finished = True
        text = self._detokenizer.finish()
        return RequestOutput(index=self.index, text=text, finish_reason=FinishReason.ABORT, time=time)
