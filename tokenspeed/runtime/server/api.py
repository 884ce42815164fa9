"""The two generating endpoints: /v1/chat/completions and /v1/completions."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from tokenspeed.errors import EngineClosedError, TokenSpeedError
from tokenspeed.runtime.async_llm import AsyncLLM, Generation
from tokenspeed.runtime.output import RequestOutput
from tokenspeed.runtime.request import FinishReason, RequestOptions
from tokenspeed.runtime.server.errors import BodyTooLargeError, RequestTimeoutError, error_body, json_response
from tokenspeed.runtime.server.fields import parse_body
from tokenspeed.runtime.server.protocol import ChatRequest, Common, CompletionRequest, parse_chat, parse_completion
from tokenspeed.runtime.server.responses import Answer, CompletionText, chat_completion, usage
from tokenspeed.runtime.server.state import ServerState
from tokenspeed.runtime.server.streaming import EventStream, event, merge, while_connected

TENANT = "tokenspeed.tenant"
"""Name, in a request's scope, of the API key that it came with; not there when keys have no names."""


async def chat_completions(request: Request) -> Response:
    state: ServerState = request.app.state.server
    llm = state.require_llm()
    parsed = parse_chat(parse_body(await read_body(request, state.settings.max_body_bytes)), llm.engine.info)
    answer = _answer(state, llm, parsed)
    prompt = llm.tokenizer.chat.render(
        parsed.messages,
        add_generation_prompt=parsed.add_generation_prompt,
        variables=parsed.template_variables,
    )
    prompt_ids = await llm.encode_text(prompt, add_special_tokens=False)
    scheduling = _scheduling(request, parsed)
    generation = state.require_llm().submit(prompt_ids, parsed.params, options=parsed.options, scheduling=scheduling)
    if parsed.stream:
        return EventStream(_chat_events(answer, parsed, generation), [generation], answer.id)
    outputs = await while_connected(request.receive, [generation], generation.result())
    _raise_failure([outputs])
    return json_response(chat_completion(answer, parsed, prompt_ids, outputs), headers={"x-request-id": answer.id})


async def completions(request: Request) -> Response:
    state: ServerState = request.app.state.server
    llm = state.require_llm()
    parsed = parse_completion(parse_body(await read_body(request, state.settings.max_body_bytes)), llm.engine.info)
    answer = _answer(state, llm, parsed)
    encoded = [
        await llm.encode_text(p, add_special_tokens=parsed.add_special_tokens) if isinstance(p, str) else p
        for p in parsed.prompts
    ]
    generations = _submit_all(state.require_llm(), encoded, parsed, _scheduling(request, parsed))
    if parsed.stream:
        return EventStream(_completion_events(answer, parsed, generations), generations, answer.id)
    results = await while_connected(request.receive, generations, _results(generations))
    _raise_failure(results)
    choices: list[dict[str, Any]] = []
    for prompt, generation, outputs in zip(parsed.prompts, generations, results, strict=True):
        for output in outputs:
            text = CompletionText(answer, parsed, prompt, generation.prompt_ids)
            choices.append({"index": len(choices), **text.piece(output)})
    body = answer.envelope("text_completion", choices, usage=_total_usage(parsed, generations))
    return json_response(body, headers={"x-request-id": answer.id})


async def read_body(request: Request, limit: int) -> bytes:
    """The request body.

    Raises BodyTooLargeError as soon as it is known to be longer than ``limit`` bytes, and EngineClosedError when the
    server ends before all of it has come: uvicorn then cancels what still runs.
    """
    declared = request.headers.get("content-length", "")
    if declared.isdecimal() and int(declared) > limit:
        raise _too_large(limit)
    chunks, size = [], 0
    try:
        async for chunk in request.stream():
            size += len(chunk)
            if size > limit:
                raise _too_large(limit)
            chunks.append(chunk)
    except asyncio.CancelledError:
        raise EngineClosedError("the server ends, and the request is not whole", hint="retry elsewhere") from None
    return b"".join(chunks)


def _too_large(limit: int) -> BodyTooLargeError:
    return BodyTooLargeError(
        f"the request body is longer than the {limit} bytes that this server reads",
        hint="send less in one request",
    )


def _answer(state: ServerState, llm: AsyncLLM, parsed: Common) -> Answer:
    name = parsed.model or state.served_names[0]
    state.check_model(name)
    fingerprint = f"fp_{llm.engine.info.artifact_digest[:12]}"
    tells_versions = state.settings.weights_dir is not None
    return Answer(parsed, llm.tokenizer, name, fingerprint, tells_versions=tells_versions)


def _scheduling(request: Request, parsed: Common) -> RequestOptions:
    """What it asks of the scheduler; with named API keys its share is that of its key, whatever user it names."""
    tenant = request.scope.get(TENANT)
    return parsed.scheduling if tenant is None else replace(parsed.scheduling, tenant=tenant)


def _submit_all(
    llm: AsyncLLM, encoded: Sequence[list[int]], parsed: CompletionRequest, scheduling: RequestOptions
) -> list[Generation]:
    """All prompts or none."""
    if len(encoded) > 1:
        llm.engine.waiting_room.check_size(parsed.params.n * len(encoded))
    generations: list[Generation] = []
    try:
        for prompt_ids in encoded:
            generations.append(llm.submit(prompt_ids, parsed.params, options=parsed.options, scheduling=scheduling))
    except TokenSpeedError:
        for generation in generations:
            generation.abort()
        raise
    return generations


async def _results(generations: Sequence[Generation]) -> list[list[RequestOutput]]:
    return [await generation.result() for generation in generations]


def _raise_failure(results: Sequence[Sequence[RequestOutput]]) -> None:
    """Raise for an answer that is none: a choice failed, or the time was up before a token of any was drawn."""
    outputs = [output for result in results for output in result]
    for output in outputs:
        if output.finish_reason is FinishReason.ERROR:
            raise TokenSpeedError(f"the request failed: {output.error}")
    if all(o.finish_reason is FinishReason.TIMEOUT and not o.token_ids for o in outputs):
        raise RequestTimeoutError(
            "the request's timeout was up before its first token", hint="allow it more time, or retry under less load"
        )


def _total_usage(parsed: Common, generations: Sequence[Generation]) -> dict[str, Any]:
    drawn = sum(g.num_output_tokens for g in generations)
    only_scored = isinstance(parsed, CompletionRequest) and parsed.prompt_only
    prompted, cached = sum(len(g.prompt_ids) for g in generations), sum(g.cached_tokens for g in generations)
    return usage(prompted, 0 if only_scored else drawn, cached)


class _Chunks:
    """Chunks of one stream, with usage where it was asked for."""

    def __init__(self, answer: Answer, kind: str, parsed: Common, generations: Sequence[Generation]):
        self._answer = answer
        self._kind = kind
        self._parsed = parsed
        self._generations = generations

    def chunk(self, choice: dict[str, Any], **extra: Any) -> bytes:
        if self._parsed.usage_always:
            extra["usage"] = _total_usage(self._parsed, self._generations)
        elif self._parsed.usage:
            extra["usage"] = None
        return event(self._answer.envelope(self._kind, [choice], **extra))

    def last(self) -> bytes | None:
        """The chunk without choices that carries the usage of the whole request."""
        if not self._parsed.usage:
            return None
        return event(self._answer.envelope(self._kind, [], usage=_total_usage(self._parsed, self._generations)))

    def failure(self, output: RequestOutput) -> bytes:
        return event(error_body(TokenSpeedError(f"the request failed: {output.error}")))


async def _chat_events(answer: Answer, parsed: ChatRequest, generation: Generation) -> AsyncIterator[bytes]:
    chunks = _Chunks(answer, "chat.completion.chunk", parsed, [generation])
    started: set[int] = set()
    async for output in generation:
        if output.finish_reason is FinishReason.ERROR:
            yield chunks.failure(output)
            continue
        if output.index not in started:
            started.add(output.index)
            role = {"index": output.index, "delta": {"role": "assistant", "content": ""}, "logprobs": None}
            once = {"prompt_token_ids": generation.prompt_ids} if parsed.token_ids else {}
            yield chunks.chunk({**role, "finish_reason": None}, **once)
        logprobs = answer.logprobs.chat(output.logprobs) if output.logprobs else None
        if not (output.text or output.finish_reason or logprobs or parsed.token_ids):
            continue
        choice: dict[str, Any] = {
            "index": output.index,
            "delta": {"content": output.text} if output.text or logprobs else {},
            "logprobs": logprobs,
            **answer.finish(output),
        }
        if parsed.token_ids:
            choice["token_ids"] = list(output.token_ids)
        yield chunks.chunk(choice)
    if (last := chunks.last()) is not None:
        yield last


async def _completion_events(
    answer: Answer, parsed: CompletionRequest, generations: Sequence[Generation]
) -> AsyncIterator[bytes]:
    chunks = _Chunks(answer, "text_completion", parsed, generations)
    texts: dict[int, CompletionText] = {}
    async for position, output in merge(generations):
        if output.finish_reason is FinishReason.ERROR:
            yield chunks.failure(output)
            continue
        index = position * parsed.params.n + output.index
        if index not in texts:
            texts[index] = CompletionText(answer, parsed, parsed.prompts[position], generations[position].prompt_ids)
        piece = texts[index].piece(output)
        if piece["text"] or piece["finish_reason"] or piece["logprobs"] or parsed.token_ids:
            yield chunks.chunk({"index": index, **piece})
    if (last := chunks.last()) is not None:
        yield last
