"""Sampling parameters against what the artifact was built for: every illegal value is refused by name.

Nothing is clamped or replaced silently: a request either runs exactly as written or ends here with a
RequestError that says what is needed, what was found and what to do.
"""

from __future__ import annotations

import hashlib
import math
import secrets
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Protocol

from tokenspeed.errors import RequestError
from tokenspeed.runtime.request import MAX_PRIORITY, RequestOptions, SamplingParams
from tokenspeed.step import MAX_LOGIT_BIAS, mask_words

MIN_TEMPERATURE = 1e-5
"""The smallest temperature above 0: logits divided by less would leave the range of float32."""
MAX_TEMPERATURE = 100.0
MAX_PENALTY = 2.0
"""Presence and frequency penalties go from minus this to this, as OpenAI has them."""
MIN_REPETITION_PENALTY, MAX_REPETITION_PENALTY = 0.01, 100.0
MAX_BIAS = 100.0
MAX_REPLICAS = 128
MAX_STOP_STRINGS = 32
MAX_STOP_LENGTH = 1024
MAX_STOP_TOKEN_IDS = 128
MAX_TIMEOUT = 86400.0
MAX_KEY_BYTES = 1024
"""Of the name of a tenant, and of a cache key."""
MAX_SEED = (1 << 64) - 1
"""A seed is an unsigned 64-bit number: the key of the counter-based generator on the device."""


class Limits(Protocol):
    """What the artifact was built for, as far as one request is concerned."""

    @property
    def max_model_len(self) -> int: ...
    @property
    def vocab_size(self) -> int: ...
    @property
    def max_top_logprobs(self) -> int: ...
    @property
    def penalties(self) -> bool: ...


class ContextLengthError(RequestError):
    """Prompt and output together are longer than the artifact's ``max_model_len``."""

    code = "context_length_exceeded"


def resolve(prompt_ids: Sequence[int], params: SamplingParams, limits: Limits) -> SamplingParams:
    """Check a request whole; returns ``params`` with ``max_tokens`` set (None becomes what still fits).

    Raises:
        RequestError: a value is illegal; ``param`` names the field.
        ContextLengthError: prompt and ``max_tokens`` do not fit in ``max_model_len``.
    """
    check_params(params, limits)
    check_prompt(prompt_ids, limits)
    if params.logprob_start_len > len(prompt_ids):
        raise RequestError(
            f"logprob_start_len must be at most the prompt's {len(prompt_ids)} tokens; got {params.logprob_start_len}",
            param="logprob_start_len",
            hint="count the tokens of the prompt as it is sent, those of a chat template among them",
        )
    room = limits.max_model_len - len(prompt_ids)
    if params.max_tokens is None:
        return replace(params, max_tokens=room)
    if params.max_tokens > room:
        raise ContextLengthError(
            f"max_tokens {params.max_tokens} does not fit: the prompt has {len(prompt_ids)} tokens and this artifact"
            f" was built for max_model_len {limits.max_model_len}, prompt and output together",
            param="max_tokens",
            hint=f"ask for at most {room} tokens, or rebuild with a larger `tokenspeed build --max-model-len`",
        )
    return params


def check_prompt(prompt_ids: Sequence[int], limits: Limits) -> None:
    """Raises RequestError if the prompt is empty, too long, or has what is no token id of the vocabulary."""
    if not prompt_ids:
        raise RequestError(
            "the prompt is empty: at least one token is needed", param="prompt", hint="send some text or a token id"
        )
    if len(prompt_ids) > limits.max_model_len - 1:
        raise ContextLengthError(
            f"the prompt has {len(prompt_ids)} tokens; this artifact was built for max_model_len"
            f" {limits.max_model_len}, prompt and output together, so a prompt has at most {limits.max_model_len - 1}",
            param="prompt",
            hint="shorten the prompt, or rebuild with a larger `tokenspeed build --max-model-len`",
        )
    for kind in set(map(type, prompt_ids)):
        if kind is bool or not hasattr(kind, "__index__"):
            raise RequestError(f"the prompt must be whole numbers, have a {kind.__name__} among them", param="prompt")
    if min(prompt_ids) < 0 or max(prompt_ids) >= limits.vocab_size:
        position, bad = next((i, t) for i, t in enumerate(prompt_ids) if not 0 <= t < limits.vocab_size)
        raise RequestError(
            f"prompt token {position} is {bad}: token ids of this model go from 0 to {limits.vocab_size - 1}",
            param="prompt",
            hint="use the tokenizer of the model that is served",
        )


def check_params(params: SamplingParams, limits: Limits) -> None:
    """Raises RequestError for the first parameter that is of the wrong type or out of range."""
    _check_draw(params)
    _integer("n", params.n, 1, MAX_REPLICAS)
    if params.max_tokens is not None:
        _integer("max_tokens", params.max_tokens, 1, None)
    if params.seed is not None:
        _integer("seed", params.seed, 0, MAX_SEED)
    for name, value in (("logprobs", params.logprobs), ("prompt_logprobs", params.prompt_logprobs)):
        if value is not None:
            _integer(name, value, 0, limits.max_top_logprobs)
    _integer("logprob_start_len", params.logprob_start_len, 0, None)
    if params.logprob_start_len > 0 and params.prompt_logprobs is None:
        raise RequestError(
            "logprob_start_len needs prompt_logprobs: it says where they begin",
            param="logprob_start_len",
            hint="set prompt_logprobs too, or leave both out",
        )
    _check_stops(params, limits)
    _check_penalties(params, limits)
    if params.logit_bias is not None:
        _check_bias(params.logit_bias, limits)
    if params.allowed_token_ids is not None:
        _check_allowed(params.allowed_token_ids, limits)


def check_options(options: RequestOptions) -> None:
    """Raise RequestError, naming the field, unless the scheduler can do what ``options`` ask."""
    _integer("priority", options.priority, 0, MAX_PRIORITY)
    if options.timeout is not None and not 0 < _number("timeout", options.timeout) <= MAX_TIMEOUT:
        raise _refused("timeout", options.timeout, f"seconds above 0, at most {MAX_TIMEOUT:.0f}", None)
    for name, text in (("tenant", options.tenant), ("cache_key", options.cache_key)):
        if not isinstance(text, str) or len(text.encode("utf-8", "replace")) > MAX_KEY_BYTES:
            raise _refused(name, text, f"text of at most {MAX_KEY_BYTES} bytes", None)
        if any("\ud800" <= c <= "\udfff" for c in text):
            raise _refused(name, ascii(text), "valid Unicode", None)


def tenant_number(tenant: str) -> int:
    """The number under which the scheduler counts a tenant's share: 31 bits of a hash, so that no list is kept. Two
    tenants in two billion share one."""
    return int.from_bytes(hashlib.blake2b(tenant.encode("utf-8", "replace"), digest_size=4).digest()) >> 1


def _check_penalties(params: SamplingParams, limits: Limits) -> None:
    for name in ("presence_penalty", "frequency_penalty"):
        if not -MAX_PENALTY <= _number(name, getattr(params, name)) <= MAX_PENALTY:
            needed = f"a number from {-MAX_PENALTY:g} to {MAX_PENALTY:g}"
            raise _refused(name, getattr(params, name), needed, "0 turns it off")
    low, high, repetition = MIN_REPETITION_PENALTY, MAX_REPETITION_PENALTY, params.repetition_penalty
    if not low <= _number("repetition_penalty", repetition) <= high:
        raise _refused("repetition_penalty", repetition, f"a number from {low:g} to {high:g}", "1 turns it off")
    if params.has_penalties and not limits.penalties:
        off = {"presence_penalty": 0, "frequency_penalty": 0, "repetition_penalty": 1}
        name = next(name for name, value in off.items() if getattr(params, name) != value)
        raise RequestError(
            f"{name} needs an artifact that counts tokens; this one was built with penalties off",
            param=name,
            hint="leave it out, or rebuild with `tokenspeed build --penalties on`",
        )


def _check_bias(bias: Mapping[int, float], limits: Limits) -> None:
    if not isinstance(bias, Mapping) or len(bias) > MAX_LOGIT_BIAS:
        found = f"{len(bias)}" if isinstance(bias, Mapping) else repr(bias)
        raise _refused("logit_bias", found, f"a mapping of at most {MAX_LOGIT_BIAS} token ids", "send fewer")
    for token, value in bias.items():
        if not _is_integer(token) or not 0 <= token < limits.vocab_size:
            needed = f"a mapping of token ids from 0 to {limits.vocab_size - 1}"
            raise _refused("logit_bias", token, needed, "use the tokenizer of the model that is served")
        if not -MAX_BIAS <= _number("logit_bias", value) <= MAX_BIAS:
            raise _refused(
                "logit_bias", f"{value} for token {token}", f"numbers from {-MAX_BIAS:g} to {MAX_BIAS:g}", None
            )


def _check_allowed(token_ids: Sequence[int], limits: Limits) -> None:
    if len(token_ids) == 0:
        raise _refused("allowed_token_ids", "none", "at least one token id", "leave it out to allow every token")
    for token in token_ids:
        if not _is_integer(token) or not 0 <= token < limits.vocab_size:
            needed = f"token ids from 0 to {limits.vocab_size - 1}"
            raise _refused("allowed_token_ids", token, needed, "use the tokenizer of the model that is served")


def token_mask(token_ids: Sequence[int], vocab_size: int) -> list[int]:
    """``token_ids`` as a row of token_masks (tokenspeed/step.py): int32 words."""
    words = array("i", bytes(4 * mask_words(vocab_size)))
    bits = memoryview(words).cast("B")
    for token in token_ids:
        bits[token >> 3] |= 1 << (token & 7)  # machines that serve are little-endian
    return words.tolist()


def _check_draw(params: SamplingParams) -> None:
    temperature = _number("temperature", params.temperature)
    if temperature != 0 and not MIN_TEMPERATURE <= temperature <= MAX_TEMPERATURE:
        raise _refused(
            "temperature",
            params.temperature,
            f"0 (greedy) or a number from {MIN_TEMPERATURE:g} to {MAX_TEMPERATURE:g}",
            "use 0 for greedy decoding" if temperature < MIN_TEMPERATURE else "choose a lower temperature",
        )
    if not 0 < _number("top_p", params.top_p) <= 1:
        raise _refused("top_p", params.top_p, "a number above 0 and at most 1", "leave it at 1 to turn it off")
    if not 0 <= _number("min_p", params.min_p) <= 1:
        raise _refused("min_p", params.min_p, "a number from 0 to 1", "leave it at 0 to turn it off")
    if not _is_integer(params.top_k) or not -1 <= params.top_k <= 2**31 - 1:
        raise _refused("top_k", params.top_k, "a positive integer, or 0 or -1", "0 turns it off")


def _check_stops(params: SamplingParams, limits: Limits) -> None:
    if len(params.stop) > MAX_STOP_STRINGS:
        raise _refused("stop", f"{len(params.stop)}", f"at most {MAX_STOP_STRINGS} strings", "send fewer")
    for text in params.stop:
        if not isinstance(text, str) or not 0 < len(text) <= MAX_STOP_LENGTH:
            found = f"one of {len(text)} characters" if isinstance(text, str) else repr(text)[:40]
            raise _refused("stop", found, f"strings of 1 to {MAX_STOP_LENGTH} characters", "leave empty ones out")
    if len(params.stop_token_ids) > MAX_STOP_TOKEN_IDS:
        found = f"{len(params.stop_token_ids)}"
        raise _refused("stop_token_ids", found, f"at most {MAX_STOP_TOKEN_IDS} token ids", "send fewer")
    for token in params.stop_token_ids:
        if not _is_integer(token) or not 0 <= token < limits.vocab_size:
            needed = f"token ids from 0 to {limits.vocab_size - 1}"
            raise _refused("stop_token_ids", token, needed, "use the tokenizer of the model that is served")


def _is_integer(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _number(name: str, value: float) -> float:
    try:
        good = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    except OverflowError:
        good, value = False, "one too large"  # type: ignore[assignment]
    if not good:
        raise _refused(name, value, "a finite number", None)
    return value


def _integer(name: str, value: int, low: int, high: int | None) -> None:
    if not _is_integer(value) or value < low or (high is not None and value > high):
        needed = f"an integer of at least {low}" if high is None else f"an integer from {low} to {high}"
        raise _refused(name, value, needed, None)


def _refused(name: str, found: object, needed: str, hint: str | None) -> RequestError:
    shown = repr(found) if not isinstance(found, str) else found
    return RequestError(f"{name} must be {needed}; got {shown[:60]}", param=name, hint=hint)


def fresh_seed() -> int:
    """A seed for a request that names none, from the operating system's entropy."""
    return secrets.randbits(64)


_GOLDEN = 0x9E3779B97F4A7C15


def replica_seed(seed: int, index: int) -> int:
    """The seed of replica ``index`` of a request with ``n`` > 1.

    Replica 0 uses ``seed`` itself, so it is the answer that ``n`` = 1 would give. Replica i > 0 uses
    ``mix(mix(seed) + i * 0x9E3779B97F4A7C15)`` modulo 2**64, where ``mix`` is the finalizer of SplitMix64
    (Steele, Lea, Flood 2014): a bijection, so the replicas of one request never share a seed among i > 0.
    """
    return seed if index == 0 else _mix(_mix(seed) + index * _GOLDEN)


def _mix(value: int) -> int:
    value &= MAX_SEED
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & MAX_SEED
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & MAX_SEED
    return value ^ (value >> 31)
