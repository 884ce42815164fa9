"""OpenAI requests, with vLLM's extras and two of SGLang's, as plain values.

Field names and defaults are OpenAI's, vLLM's and (return_logprob, logprob_start_len) SGLang's. Unknown fields are
ignored; fields that are known and not implemented are refused when they ask for something (``fields.UNSUPPORTED``).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tokenspeed.errors import RequestError
from tokenspeed.runtime.chat import normalize_messages
from tokenspeed.runtime.output import TextOptions
from tokenspeed.runtime.request import RequestOptions, SamplingParams
from tokenspeed.runtime.sampling import MAX_KEY_BYTES, Limits, check_options
from tokenspeed.runtime.server.fields import Fields, check_unicode, refuse_unsupported

DEFAULT_COMPLETION_TOKENS = 16
"""OpenAI's ``max_tokens`` for /v1/completions; a chat may use all that fits."""
MAX_PROMPTS = 1024


@dataclass(frozen=True)
class Common:
    """What both endpoints read.

    Attributes:
        model: name asked for, or None.
        scheduling: priority, share, timeout and cache key; the tenant is what the request says of its ``user``.
        usage: send usage with the last chunk of a stream; ``usage_always``: with every chunk.
        token_ids: return prompt and output token ids.
        token_id_names: write tokens of log-probabilities as ``token_id:123``.
    """

    model: str | None
    params: SamplingParams
    options: TextOptions
    scheduling: RequestOptions
    stream: bool
    usage: bool
    usage_always: bool
    token_ids: bool
    token_id_names: bool


@dataclass(frozen=True)
class ChatRequest(Common):
    """POST /v1/chat/completions."""

    messages: list[dict[str, Any]]
    add_generation_prompt: bool
    template_variables: Mapping[str, Any]


@dataclass(frozen=True)
class CompletionRequest(Common):
    """POST /v1/completions. ``prompts`` are texts or token ids, each completed ``params.n`` times.

    ``echo`` repeats the prompt before the output; ``prompt_only`` (echo with ``max_tokens`` 0) scores it only.
    """

    prompts: list[str | list[int]]
    add_special_tokens: bool
    echo: bool
    prompt_only: bool


def parse_chat(body: Mapping[str, Any], limits: Limits) -> ChatRequest:
    """Raises RequestError naming the field that is missing, of the wrong type, or not supported."""
    refuse_unsupported(body)
    fields = Fields(body)
    if fields.boolean("echo", False):
        raise RequestError("echo is not supported for chats", param="echo", hint="use /v1/completions")
    top = _top_logprobs(fields, limits)
    max_tokens = fields.integer("max_completion_tokens", fields.integer("max_tokens", None))
    common = _common(fields, _params(fields, logprobs=top, max_tokens=max_tokens))
    return ChatRequest(
        **common,
        messages=normalize_messages(body.get("messages")),
        add_generation_prompt=fields.boolean("add_generation_prompt", True),
        template_variables=fields.mapping("chat_template_kwargs"),
    )


def parse_completion(body: Mapping[str, Any], limits: Limits) -> CompletionRequest:
    """Raises RequestError naming the field that is missing, of the wrong type, or not supported."""
    refuse_unsupported(body)
    fields = Fields(body)
    max_tokens = fields.integer("max_tokens", None if "max_tokens" in body else DEFAULT_COMPLETION_TOKENS)
    echo = fields.boolean("echo", False)
    prompt_only = echo and max_tokens == 0
    most, logprobs = 1 if prompt_only else max_tokens, fields.integer("logprobs", None)
    params = _params(fields, logprobs=logprobs, max_tokens=most, echo=echo)
    _check_best_of(fields, params.n)
    return CompletionRequest(
        **_common(fields, params),
        prompts=_prompts(body.get("prompt")),
        add_special_tokens=fields.boolean("add_special_tokens", True),
        echo=echo,
        prompt_only=prompt_only,
    )


def _params(fields: Fields, *, logprobs: int | None, max_tokens: int | None, echo: bool = False) -> SamplingParams:
    logprobs = _output_logprobs(fields, logprobs)
    prompt_logprobs, logprob_start_len = _prompt_logprobs(fields, logprobs, echo)
    n = fields.integer("n", 1)
    top_k = fields.integer("top_k", 0)
    assert n is not None and top_k is not None
    return SamplingParams(
        max_tokens=max_tokens,
        temperature=fields.number("temperature", 1.0),
        top_p=fields.number("top_p", 1.0),
        top_k=top_k,
        min_p=fields.number("min_p", 0.0),
        seed=fields.integer("seed", None),
        n=n,
        stop=fields.strings("stop"),
        stop_token_ids=fields.integers("stop_token_ids"),
        ignore_eos=fields.boolean("ignore_eos", False),
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
        logprob_start_len=logprob_start_len,
        presence_penalty=fields.number("presence_penalty", 0.0),
        frequency_penalty=fields.number("frequency_penalty", 0.0),
        repetition_penalty=fields.number("repetition_penalty", 1.0),
        logit_bias=fields.biases("logit_bias"),
        allowed_token_ids=None if fields.raw("allowed_token_ids") is None else fields.integers("allowed_token_ids"),
    )


def _output_logprobs(fields: Fields, logprobs: int | None) -> int | None:
    """``logprobs``, or 0 where only ``return_logprob`` asks for those of the output. What contradicts it is refused."""
    returned = fields.boolean("return_logprob", False)
    if fields.raw("return_logprob") is None:
        return logprobs
    other = "logprobs is false" if returned and fields.raw("logprobs") is False else None
    if not returned:
        asked = {"logprobs": logprobs, "prompt_logprobs": fields.raw("prompt_logprobs")}
        other = next((f"{name} asks for them" for name, value in asked.items() if value is not None), None)
    if other is not None:
        raise RequestError(
            f"return_logprob is {str(returned).lower()}, but {other}",
            param="return_logprob",
            hint="leave one of them out",
        )
    return logprobs or 0 if returned else None


def _prompt_logprobs(fields: Fields, logprobs: int | None, echo: bool) -> tuple[int | None, int]:
    """How many log-probabilities each token of the prompt has, and from which position on.

    ``prompt_logprobs`` and an ``echo`` with log-probabilities ask for them, from ``logprob_start_len`` (0) on, and so
    does ``return_logprob`` where a ``logprob_start_len`` is given; -1 is the prompt's end, which leaves none.
    """
    own, start = fields.integer("prompt_logprobs", None), fields.integer("logprob_start_len", None)
    returned = fields.boolean("return_logprob", False)
    asked = own
    if echo and logprobs is not None:
        asked = max(logprobs, own or 0)
    elif own is None and returned and start is not None and start >= 0:
        asked = logprobs
    if start is not None:
        _check_start(start, asked, returned)
    if fields.boolean("stream", False) and asked is not None and (own is not None or not echo):
        name = "logprob_start_len" if own is None else "prompt_logprobs"
        raise RequestError(f"{name} cannot be streamed", param=name, hint='send it with "stream": false')
    return asked, max(0, start or 0)


def _check_start(start: int, asked: int | None, returned: bool) -> None:
    """Refuse a logprob_start_len that makes no sense, or not beside what else is ``asked``."""
    name = "logprob_start_len"
    if start < -1:
        raise RequestError(f"{name} must be -1 (the prompt's end) or more; got {start}", param=name)
    if asked is None and not returned:
        raise RequestError(
            f"{name} needs return_logprob or prompt_logprobs", param=name, hint='add "return_logprob": true'
        )
    if start == -1 and asked is not None:
        raise RequestError(
            f"{name} is -1, the prompt's end, but log-probabilities of the prompt are asked for",
            param=name,
            hint="leave it out, or leave out prompt_logprobs and echo",
        )


def _common(fields: Fields, params: SamplingParams) -> dict[str, Any]:
    stream = fields.boolean("stream", False)
    stream_options = fields.mapping("stream_options")
    if stream_options and not stream:
        raise RequestError(
            "stream_options need stream to be true", param="stream_options", hint='leave them out or add "stream": true'
        )
    usage = Fields(stream_options, "stream_options.")
    always = usage.boolean("continuous_usage_stats", False)
    return {
        "model": fields.string("model"),
        "params": params,
        "options": TextOptions(
            skip_special_tokens=fields.boolean("skip_special_tokens", True),
            include_stop_str_in_output=fields.boolean("include_stop_str_in_output", False),
        ),
        "scheduling": _scheduling(fields),
        "stream": stream,
        "usage": usage.boolean("include_usage", False),
        "usage_always": always,
        "token_ids": fields.boolean("return_token_ids", False),
        "token_id_names": fields.boolean("return_tokens_as_token_ids", False),
    }


def _scheduling(fields: Fields) -> RequestOptions:
    priority = fields.integer("priority", 0)
    assert priority is not None
    options = RequestOptions(
        priority=priority,
        tenant=fields.text("user", MAX_KEY_BYTES),
        timeout=None if fields.raw("timeout") is None else fields.number("timeout", 0.0),
        cache_key=fields.text("cache_salt", MAX_KEY_BYTES),
    )
    check_options(options)
    return options


def _top_logprobs(fields: Fields, limits: Limits) -> int | None:
    wanted = fields.boolean("logprobs", False)
    top = fields.integer("top_logprobs", None)
    if top is not None and not 0 <= top <= limits.max_top_logprobs:
        raise RequestError(
            f"top_logprobs must be an integer from 0 to {limits.max_top_logprobs}; got {top}", param="top_logprobs"
        )
    if top and not wanted:
        raise RequestError("top_logprobs needs logprobs to be true", param="top_logprobs", hint='add "logprobs": true')
    return (top or 0) if wanted else None


def _check_best_of(fields: Fields, n: int) -> None:
    best_of = fields.integer("best_of", n)
    if best_of != n:
        raise RequestError(
            f"best_of {best_of} is not supported with n {n}", param="best_of", hint="ask for n and choose yourself"
        )


def _prompts(prompt: object) -> list[str | list[int]]:
    """A string, a list of strings, a list of token ids, or a list of such lists."""
    needed = "a string, a list of strings, a list of token ids, or a list of lists of token ids"
    if isinstance(prompt, str):
        check_unicode("prompt", prompt)
        return [prompt]
    if prompt is None:
        raise RequestError(f"prompt is missing: it must be {needed}", param="prompt")
    if not isinstance(prompt, list):
        Fields({}).refuse("prompt", needed, prompt)
    if not prompt:
        raise RequestError("the prompt is empty: at least one token is needed", param="prompt")
    if all(type(item) is int for item in prompt):
        return [prompt]
    if len(prompt) > MAX_PROMPTS:
        raise RequestError(f"prompt must hold at most {MAX_PROMPTS} prompts; got {len(prompt)}", param="prompt")
    for item in prompt:
        if isinstance(item, str):
            check_unicode("prompt", item)
        elif not isinstance(item, list) or not all(type(token) is int for token in item):
            Fields({}).refuse("prompt", needed, prompt)
    return prompt
