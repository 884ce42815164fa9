"""What the engine tells the scheduler: the limits of an artifact and its policy once, and each request's parameters."""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterable
from typing import Any

from tokenspeed import _native
from tokenspeed.errors import UsageError
from tokenspeed.runtime.loader import Loaded
from tokenspeed.runtime.request import RequestOptions, SamplingParams
from tokenspeed.runtime.sampling import tenant_number, token_mask

MAX_AGING_SECONDS = 86400.0
MOST_WAITING = 1 << 20
"""Of requests in the queue."""


def scheduler_config(
    loaded: Loaded,
    max_waiting: int,
    max_step_tokens: int | None,
    prefix_index: bool,
    aging_seconds: float,
    *,
    record_kv_events: bool,
) -> Any:
    """The scheduler's configuration; the arguments are those of ``Engine``. Raises UsageError."""
    envelope = loaded.artifact.manifest.envelope
    step_tokens = envelope.max_prefill_tokens if max_step_tokens is None else max_step_tokens
    if not 1 <= step_tokens <= envelope.max_prefill_tokens:
        raise UsageError(
            f"max_step_tokens is {step_tokens}; it must lie between 1 and {envelope.max_prefill_tokens}, the"
            " artifact's max_prefill_tokens"
        )
    if not 1 <= max_waiting <= MOST_WAITING:
        raise UsageError(f"max_waiting is {max_waiting}; it must lie between 1 and {MOST_WAITING}")
    if not 0 <= aging_seconds <= MAX_AGING_SECONDS:
        raise UsageError(f"aging_seconds is {aging_seconds}; it must lie between 0 and {MAX_AGING_SECONDS:.0f}")
    return _native.SchedulerConfig(
        max_num_seqs=min(envelope.max_num_seqs, step_tokens),
        max_prefill_tokens=step_tokens,
        max_logit_rows=min(envelope.max_logit_rows, step_tokens),
        max_model_len=envelope.max_model_len,
        page_size=envelope.page_size,
        num_pages=loaded.num_pages,
        max_waiting=max_waiting,  # kept by the waiting room, where those on their way count too
        max_in_flight=loaded.executor.io_sets,
        vocab_size=loaded.artifact.manifest.model.vocab_size,
        prefix_index=prefix_index,
        num_host_pages=loaded.num_host_pages,
        cache_salt=loaded.artifact.digest,
        record_kv_events=record_kv_events,
        aging_ns=int(aging_seconds * 1e9),
    )


def settled_seed(params: SamplingParams, seed: int | None) -> int:
    """The key of every draw of a request: ``seed``, or that of its parameters, or a fresh one."""
    if seed is None:
        seed = params.seed if params.seed is not None else secrets.randbits(64)
    return seed & (1 << 64) - 1


def request_params(
    params: SamplingParams, options: RequestOptions, seed: int, eos_token_ids: Iterable[int], vocab_size: int
) -> Any:
    """What the scheduler is told of a request whose ``params`` are resolved."""
    assert params.max_tokens is not None  # resolved
    stop_ids = frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else frozenset(eos_token_ids))
    bias = sorted((params.logit_bias or {}).items())
    allowed = params.allowed_token_ids
    return _native.RequestParams(
        max_new_tokens=params.max_tokens,
        temperature=params.temperature,
        top_p=params.top_p,
        top_k=max(0, params.top_k),
        min_p=params.min_p,
        seed=seed,
        num_logprobs=-1 if params.logprobs is None else params.logprobs,
        num_prompt_logprobs=-1 if params.prompt_logprobs is None else params.prompt_logprobs,
        logprob_start_len=params.logprob_start_len,
        stop_token_ids=sorted(stop_ids),
        repetition_penalty=params.repetition_penalty,
        presence_penalty=params.presence_penalty,
        frequency_penalty=params.frequency_penalty,
        bias_ids=[token for token, _ in bias],
        bias_values=[value for _, value in bias],
        token_mask=[] if allowed is None else token_mask(allowed, vocab_size),
        priority=options.priority,
        tenant=tenant_number(options.tenant),
        deadline_ns=None if options.timeout is None else time.monotonic_ns() + int(options.timeout * 1e9),
        cache_key=options.cache_key,
    )
