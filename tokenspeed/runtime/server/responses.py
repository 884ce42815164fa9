"""Outputs in OpenAI's JSON, with vLLM's extras; log-probabilities in both endpoints' forms."""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from tokenspeed.runtime.output import RequestOutput
from tokenspeed.runtime.request import TokenLogprobs
from tokenspeed.runtime.server.protocol import ChatRequest, Common, CompletionRequest
from tokenspeed.runtime.tokenizer import Tokenizer

LOWEST_LOGPROB = -9999.0
"""Stands for minus infinity, which JSON has no number for (vLLM's convention)."""


class Logprobs:
    """Writes log-probabilities; ``as_ids`` names tokens ``token_id:123`` instead of by their text."""

    def __init__(self, tokenizer: Tokenizer, *, as_ids: bool):
        self._tokenizer = tokenizer
        self._as_ids = as_ids

    def name(self, token_id: int) -> str:
        return f"token_id:{token_id}" if self._as_ids else self._tokenizer.token_text(token_id)

    def chat(self, entries: Iterable[TokenLogprobs]) -> dict[str, Any]:
        """Chat form: one object per token, with its bytes and the likeliest alternatives."""
        return {
            "content": [
                {
                    **self._chat_entry(entry.token_id, entry.logprob),
                    "top_logprobs": [self._chat_entry(token, logprob) for token, logprob in entry.top],
                }
                for entry in entries
            ]
        }

    def completion(
        self, token_ids: Iterable[int], entries: Sequence[TokenLogprobs | None], offset: int
    ) -> tuple[dict[str, Any], int]:
        """Completions form: parallel lists. ``offset`` is where the first token's text begins.

        Returns the object and the offset after the last token, in characters of the tokens' texts.
        """
        tokens = [self.name(token) for token in token_ids]
        offsets = []
        for name in tokens:
            offsets.append(offset)
            offset += len(name)
        form = {
            "tokens": tokens,
            "token_logprobs": [None if e is None else _finite(e.logprob) for e in entries],
            "top_logprobs": [None if e is None else self._alternatives(e) for e in entries],
            "text_offset": offsets,
        }
        return form, offset

    def prompt(self, entries: Iterable[TokenLogprobs | None]) -> list[dict[str, Any] | None]:
        """vLLM's prompt_logprobs: by token id, the prompt's own token and the likeliest ones."""
        return [None if entry is None else self._prompt_entry(entry) for entry in entries]

    def _chat_entry(self, token_id: int, logprob: float) -> dict[str, Any]:
        raw = self._tokenizer.token_bytes(token_id)
        return {"token": self.name(token_id), "logprob": _finite(logprob), "bytes": list(raw)}

    def _alternatives(self, entry: TokenLogprobs) -> dict[str, float]:
        found: dict[str, float] = {}
        for token, logprob in (*entry.top, (entry.token_id, entry.logprob)):
            found.setdefault(self.name(token), _finite(logprob))  # two tokens may read the same: the likelier stays
        return found

    def _prompt_entry(self, entry: TokenLogprobs) -> dict[str, Any]:
        ranked = [(token, logprob, rank) for rank, (token, logprob) in enumerate(entry.top, 1)]
        if entry.token_id not in {token for token, _, _ in ranked}:
            ranked.append((entry.token_id, entry.logprob, entry.rank))
        return {
            str(token): {"logprob": _finite(logprob), "rank": rank, "decoded_token": self._tokenizer.token_text(token)}
            for token, logprob, rank in ranked
        }


def _finite(logprob: float) -> float:
    return max(logprob, LOWEST_LOGPROB)


def usage(num_prompt_tokens: int, num_output_tokens: int, num_cached_tokens: int) -> dict[str, Any]:
    return {
        "prompt_tokens": num_prompt_tokens,
        "completion_tokens": num_output_tokens,
        "total_tokens": num_prompt_tokens + num_output_tokens,
        "prompt_tokens_details": {"cached_tokens": num_cached_tokens},
    }


class Answer:
    """What every response and chunk of one request shares: its id, time, model name and fingerprint."""

    def __init__(
        self, request: Common, tokenizer: Tokenizer, model: str, fingerprint: str, *, tells_versions: bool = False
    ):
        self._tells_versions = tells_versions  # of weights
        self.request = request
        self.tokenizer = tokenizer
        self.logprobs = Logprobs(tokenizer, as_ids=request.token_id_names)
        prefix = "chatcmpl" if isinstance(request, ChatRequest) else "cmpl"
        self.id = f"{prefix}-{uuid.uuid4().hex}"
        self._head = {"created": int(time.time()), "model": model, "system_fingerprint": fingerprint}

    def envelope(self, kind: str, choices: list[dict[str, Any]], **extra: Any) -> dict[str, Any]:
        return {"id": self.id, "object": kind, **self._head, "choices": choices, **extra}

    def finish(self, output: RequestOutput) -> dict[str, Any]:
        """How a choice ended, if it did, and by which weights its tokens were drawn."""
        reason = None if output.finish_reason is None else output.finish_reason.value
        versions = {"weights_versions": list(output.weights_versions)} if self._tells_versions else {}
        return {"finish_reason": reason, "stop_reason": output.stop_reason, **versions}


def chat_completion(
    answer: Answer, request: ChatRequest, prompt_ids: list[int], outputs: Sequence[RequestOutput]
) -> dict[str, Any]:
    """The body of a chat answer that is not streamed. ``outputs`` are whole, by replica."""
    choices = []
    for output in outputs:
        choice: dict[str, Any] = {
            "index": output.index,
            "message": {"role": "assistant", "content": output.text},
            "logprobs": answer.logprobs.chat(output.logprobs) if request.params.logprobs is not None else None,
            **answer.finish(output),
        }
        if request.token_ids:
            choice["token_ids"] = list(output.token_ids)
        choices.append(choice)
    drawn, cached = sum(len(o.token_ids) for o in outputs), outputs[0].cached_tokens or 0
    extra: dict[str, Any] = {"usage": usage(len(prompt_ids), drawn, cached)}
    if request.params.prompt_logprobs is not None:
        extra["prompt_logprobs"] = answer.logprobs.prompt(outputs[0].prompt_logprobs or ())
    if request.token_ids:
        extra["prompt_token_ids"] = prompt_ids
    return answer.envelope("chat.completion", choices, **extra)


class CompletionText:
    """The text and log-probabilities of one choice of /v1/completions, whole or piece by piece."""

    def __init__(self, answer: Answer, request: CompletionRequest, prompt: str | list[int], prompt_ids: list[int]):
        self._answer = answer
        self._request = request
        self._prompt = prompt
        self._prompt_ids = prompt_ids
        self._echo_due = request.echo
        self._offset = 0
        self._first = True

    def piece(self, output: RequestOutput) -> dict[str, Any]:
        """The fields of a choice for ``output``; the first piece carries the echo and what is said once."""
        request = self._request
        text, token_ids, entries = output.text, output.token_ids, tuple[TokenLogprobs | None, ...](output.logprobs)
        if request.prompt_only:
            text, token_ids, entries = "", (), ()
        if self._echo_due:
            self._echo_due = False
            text = self._prompt_text() + text
            token_ids = (*self._prompt_ids, *token_ids)
            entries = (*(output.prompt_logprobs or ()), *entries)
        logprobs = None
        if request.params.logprobs is not None:
            logprobs, self._offset = self._answer.logprobs.completion(token_ids, entries, self._offset)
        fields: dict[str, Any] = {"text": text, "logprobs": logprobs, **self._answer.finish(output)}
        if request.prompt_only:
            fields["finish_reason"] = "length"
        fields.update(self._extras(output))
        return fields

    def _extras(self, output: RequestOutput) -> Mapping[str, Any]:
        extras: dict[str, Any] = {}
        if self._request.token_ids:
            extras["token_ids"] = [] if self._request.prompt_only else list(output.token_ids)
            if self._first:
                extras["prompt_token_ids"] = self._prompt_ids
        if output.prompt_logprobs is not None and not self._request.stream:
            extras["prompt_logprobs"] = self._answer.logprobs.prompt(output.prompt_logprobs)
        self._first = False
        return extras

    def _prompt_text(self) -> str:
        return self._prompt if isinstance(self._prompt, str) else self._answer.tokenizer.decode(self._prompt)
