"""Reading a JSON request: typed fields with errors that name them; what is not supported is refused, not ignored."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, NoReturn

from tokenspeed.errors import RequestError


def parse_body(raw: bytes) -> dict[str, Any]:
    """The JSON object of a request body. Raises RequestError if it is not one."""
    try:
        body = json.loads(raw, parse_constant=_refuse_constant, object_pairs_hook=_once)
    except RecursionError:
        raise RequestError("the request body is not usable JSON: it is nested too deeply") from None
    except ValueError as e:  # also UnicodeDecodeError
        raise RequestError(
            f"the request body is not valid JSON: {e}", hint="send one JSON object, encoded as UTF-8"
        ) from None
    if not isinstance(body, dict):
        raise RequestError(f"the request body must be a JSON object; got {_kind(body)}")
    return body


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON number")


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object whose names differ: of equal ones JSON leaves open which counts, so none is taken."""
    found: dict[str, Any] = {}
    for name, value in pairs:
        if name in found:
            raise ValueError(f"an object names {json.dumps(name)[:60]} twice")
        found[name] = value
    return found


def _kind(value: object) -> str:
    if value is None:
        return "null"
    names: Mapping[type, str] = {
        bool: "a boolean", int: "an integer", float: "a number", str: "a string", list: "a list", dict: "an object"
    }  # fmt: skip
    return names[type(value)]


class Fields:
    """Typed access to the fields of one JSON object; null counts as absent. Ranges are checked by ``sampling``."""

    def __init__(self, body: Mapping[str, Any], prefix: str = ""):
        self._body = body
        self._prefix = prefix

    def raw(self, name: str) -> Any:
        return self._body.get(name)

    def boolean(self, name: str, default: bool) -> bool:
        value = self._body.get(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            self.refuse(name, "true or false", value)
        return value

    def integer(self, name: str, default: int | None) -> int | None:
        value = self._body.get(name)
        if value is None:
            return default
        if isinstance(value, bool) or not isinstance(value, int):
            self.refuse(name, "an integer", value)
        return value

    def number(self, name: str, default: float) -> float:
        value = self._body.get(name)
        if value is None:
            return default
        if isinstance(value, bool) or not isinstance(value, int | float):
            self.refuse(name, "a number", value)
        try:
            return float(value)
        except OverflowError:
            raise RequestError(f"{name} must be a finite number; got one too large", param=name) from None

    def string(self, name: str) -> str | None:
        value = self._body.get(name)
        if value is not None and not isinstance(value, str):
            self.refuse(name, "a string", value)
        return value

    def text(self, name: str, most_bytes: int) -> str:
        """A string of at most ``most_bytes`` bytes of UTF-8; "" when it is absent."""
        value = self.string(name) or ""
        check_unicode(name, value)
        if len(value.encode()) > most_bytes:
            raise RequestError(f"{name} must be a string of at most {most_bytes} bytes", param=name)
        return value

    def mapping(self, name: str) -> Mapping[str, Any]:
        value = self._body.get(name)
        if value is None:
            return {}
        if not isinstance(value, dict):
            self.refuse(name, "an object", value)
        return value

    def strings(self, name: str) -> tuple[str, ...]:
        """A string or a list of strings."""
        value = self._body.get(name)
        if value is None:
            return ()
        found = [value] if isinstance(value, str) else value
        if not isinstance(found, list) or not all(isinstance(text, str) for text in found):
            self.refuse(name, "a string or a list of strings", value)
        for text in found:
            check_unicode(name, text)
        return tuple(found)

    def integers(self, name: str) -> tuple[int, ...]:
        value = self._body.get(name)
        if value is None:
            return ()
        if not isinstance(value, list) or not all(type(item) is int for item in value):
            self.refuse(name, "a list of integers", value)
        return tuple(value)

    def biases(self, name: str) -> dict[int, float] | None:
        """An object of numbers whose keys are token ids, written as JSON must: as strings. An empty one is none."""
        found = self.mapping(name)
        for key, value in found.items():
            if not (key.isascii() and key.isdecimal() and len(key) < 16):
                self.refuse(name, "an object whose keys are token ids", found)
            if isinstance(value, bool) or not isinstance(value, int | float):
                self.refuse(name, "an object of numbers", found)
        biases: dict[int, float] = {}
        for key, value in found.items():
            if int(key) in biases:
                self.refuse(name, f"an object that names each token once, and names token {int(key)} twice", found)
            biases[int(key)] = value
        return biases or None

    def refuse(self, name: str, needed: str, value: object) -> NoReturn:
        name = self._prefix + name
        raise RequestError(f"{name} must be {needed}; got {_kind(value)}: {json.dumps(value)[:60]}", param=name)


def check_unicode(name: str, text: str) -> None:
    """JSON can spell half of a surrogate pair; no tokenizer can read it."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise RequestError(f"{name} must be valid Unicode; it holds half of a surrogate pair", param=name) from None


_NO_GRAMMAR = (
    "constrained decoding is not in this artifact's sampler: leave the field out and check the output yourself"
)
_NO_TOOLS = "tool calling is not supported: describe the tools in a message and parse the answer"
_FREE_TEXT: tuple[Any, ...] = ({"type": "text"}, {})

UNSUPPORTED: Mapping[str, tuple[tuple[Any, ...], str]] = {
    "length_penalty": ((1,), "beam search is not supported: leave it out"),
    "bad_words": (([],), "give the tokens a logit_bias of -100"),
    "response_format": (_FREE_TEXT, _NO_GRAMMAR),
    "structured_outputs": (({},), _NO_GRAMMAR),
    "guided_json": ((), _NO_GRAMMAR),
    "guided_regex": ((), _NO_GRAMMAR),
    "guided_choice": ((), _NO_GRAMMAR),
    "guided_grammar": ((), _NO_GRAMMAR),
    "tools": (([],), _NO_TOOLS),
    "functions": (([],), _NO_TOOLS),
    "tool_choice": (("none", "auto"), _NO_TOOLS),
    "function_call": (("none", "auto"), _NO_TOOLS),
    "min_tokens": ((0,), "leave it out, or use ignore_eos with max_tokens for a fixed length"),
    "use_beam_search": ((False,), "beam search is not supported: use n with a temperature"),
    "logits_processors": (([],), "custom code never runs in this server"),
    "chat_template": ((), "the artifact's own template is used: leave the field out"),
    "documents": (([],), "put the documents into a message"),
    "continue_final_message": ((False,), "render the prompt yourself and use /v1/completions"),
    "modalities": ((["text"],), "this model reads and writes text"),
    "audio": ((), "this model reads and writes text"),
    "prompt_embeds": ((), "send text or token ids"),
    "suffix": (("",), "infilling is not supported: write the model's own infill tokens into the prompt"),
    "truncate_prompt_tokens": ((), "shorten the prompt before sending it"),
}
"""Known fields this server does not implement: the values that change nothing, and what to do instead."""


def refuse_unsupported(body: Mapping[str, Any]) -> None:
    """Raises RequestError for the first known field whose value asks for what this server does not do."""
    for name, value in body.items():
        if name in UNSUPPORTED and value is not None:
            harmless, advice = UNSUPPORTED[name]
            if not any(_same(value, other) for other in harmless):
                raise RequestError(f"{name} is not supported; got {json.dumps(value)[:60]}", param=name, hint=advice)


def _same(value: object, other: object) -> bool:
    return value == other and isinstance(value, bool) == isinstance(other, bool)
