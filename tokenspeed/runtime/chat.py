"""Chat messages to a prompt, through the checkpoint's own template in Jinja's immutable sandbox.

A template is data from a checkpoint: it cannot reach the file system, attributes with underscores or our
objects, and it cannot change what it is given. Jinja is imported with the first template, not with this file.
"""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Any

from tokenspeed.errors import ArtifactError, RequestError, TokenSpeedError

if TYPE_CHECKING:
    from jinja2 import Template

_REBUILD = "rebuild the artifact from a checkpoint with a working chat template, or use /v1/completions"
_RESERVED = frozenset({"messages", "add_generation_prompt", "raise_exception", "strftime_now"})

Message = Mapping[str, Any]


class ChatTemplate:
    """The chat template of one artifact.

    Args:
        source: Jinja text, or None if the checkpoint has no template.
        special_tokens: names that the template may use (``bos_token``, ``eos_token``, ...) and their text.
    """

    def __init__(self, source: str | None, special_tokens: Mapping[str, str]):
        self._source = source
        self._special_tokens = dict(special_tokens)
        self._template: Template | None = None
        self._lock = threading.Lock()

    def prepare(self) -> None:
        """Compile the template now (on any thread), so that the first request does not wait for it.

        Raises:
            RequestError: the artifact has no chat template.
            ArtifactError: the template is not valid Jinja.
        """
        self._compiled()

    def prepare_quietly(self) -> None:
        """``prepare``, but what is wrong with the template is told to the first request that needs it."""
        with contextlib.suppress(RequestError, ArtifactError):
            self._compiled()

    def render(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool = True,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """The prompt for ``messages``, already normalized (see ``normalize_messages``).

        ``variables`` are further names that the template sees (``chat_template_kwargs`` of a request).

        Raises:
            RequestError: no template, the template refuses the messages, or it fails on them.
            ArtifactError: the template itself is broken.
        """
        extra = dict(variables or {})
        if taken := sorted(_RESERVED & extra.keys()):
            raise RequestError(
                f"chat_template_kwargs must not set {', '.join(taken)}: the server sets it",
                param="chat_template_kwargs",
                hint="remove it",
            )
        template = self._compiled()
        from jinja2.exceptions import SecurityError, TemplateError

        try:
            return template.render(
                **{**self._special_tokens, **extra},
                messages=[dict(m) for m in messages],
                add_generation_prompt=add_generation_prompt,
            )
        except SecurityError as e:
            raise ArtifactError(f"the chat template does what the sandbox forbids: {e}", hint=_REBUILD) from None
        except _Refusal as e:
            raise RequestError(f"the chat template refuses these messages: {e}", param="messages") from None
        except (TemplateError, ArithmeticError, LookupError, TypeError, ValueError, AttributeError) as e:
            # A template that assumes more of its messages than they have: the client's to change.
            raise RequestError(
                f"the chat template fails on these messages: {type(e).__name__}: {e}",
                param="messages",
                hint="check roles, their order and chat_template_kwargs",
            ) from None
        except RecursionError:
            raise ArtifactError("the chat template never ends: it recurses too deeply", hint=_REBUILD) from None

    def _compiled(self) -> Template:
        with self._lock:
            if self._template is None:
                if self._source is None:
                    raise RequestError(
                        "this artifact has no chat template: its checkpoint came without one",
                        param="messages",
                        hint="use /v1/completions, or rebuild from an instruction-tuned checkpoint",
                    )
                self._template = _compile(self._source)
            return self._template


class _Refusal(Exception):
    """Raised by ``raise_exception`` in a template."""


def _compile(source: str) -> Template:
    from jinja2 import TemplateSyntaxError, nodes
    from jinja2.ext import Extension, loopcontrols
    from jinja2.parser import Parser
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class GenerationBlock(Extension):
        """``{% generation %}`` marks what an assistant said for training; in serving it is just its body."""

        tags = {"generation"}  # noqa: RUF012 (Jinja's interface)

        def parse(self, parser: Parser) -> nodes.Node | list[nodes.Node]:
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    def raise_exception(message: object) -> None:
        raise _Refusal(str(message))

    def strftime_now(form: str) -> str:
        return datetime.now().strftime(form)

    env = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, GenerationBlock]
    )
    env.filters["tojson"] = _tojson
    env.globals.update(raise_exception=raise_exception, strftime_now=strftime_now)
    try:
        return env.from_string(source)
    except TemplateSyntaxError as e:
        raise ArtifactError(
            f"the chat template is not valid Jinja: line {e.lineno}: {e.message}", hint=_REBUILD
        ) from None
    except RecursionError:
        raise ArtifactError("the chat template is nested too deeply", hint=_REBUILD) from None


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Plain JSON: Jinja's own filter escapes for HTML, which no model was trained on."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def normalize_messages(messages: object) -> list[dict[str, Any]]:
    """Check the shape of chat messages and flatten content parts of type text (joined by newlines).

    Raises RequestError naming the message and the field.
    """
    if not isinstance(messages, Sequence) or isinstance(messages, str | bytes):
        raise _bad("messages", f"a list of messages; got {type(messages).__name__}")
    if not messages:
        raise _bad("messages", "a list of at least one message; got an empty list")
    return [_message(f"messages[{i}]", message) for i, message in enumerate(messages)]


def _message(where: str, message: object) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise _bad(where, f"an object with role and content; got {type(message).__name__}")
    role = message.get("role")
    if not isinstance(role, str) or not role:
        raise _bad(f"{where}.role", f"a string such as 'user'; got {role!r}")
    for name in ("tool_calls", "function_call"):
        if message.get(name):
            raise _bad(f"{where}.{name}", "empty: tool calls are not supported by this server; write them as text")
    return {**message, "role": role, "content": _content(f"{where}.content", message.get("content"))}


def _content(where: str, content: object) -> str:
    if isinstance(content, str):
        _check_text(where, content)
        return content
    if not isinstance(content, list):
        raise _bad(where, f"a string or a list of text parts; got {'null' if content is None else repr(content)[:40]}")
    texts = []
    for i, part in enumerate(content):
        kind = part.get("type") if isinstance(part, Mapping) else None
        if not isinstance(part, Mapping) or kind not in ("text", "input_text"):
            raise _bad(f"{where}[{i}].type", f"'text': this model reads text only; got {kind!r}")
        text = part.get("text")
        if not isinstance(text, str):
            raise _bad(f"{where}[{i}].text", f"a string; got {type(text).__name__}")
        _check_text(f"{where}[{i}].text", text)
        texts.append(text)
    return "\n".join(texts)


def _check_text(where: str, text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError:
        raise _bad(where, "valid Unicode; it holds half of a surrogate pair") from None


def _bad(where: str, needed: str) -> TokenSpeedError:
    return RequestError(f"{where} must be {needed}", param=where)
