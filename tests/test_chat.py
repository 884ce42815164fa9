"""Chat templates: what they see, what the sandbox forbids, and how failures read."""

from __future__ import annotations

import re
from datetime import datetime
from typing import Any

import pytest
from tiny_tokenizers import CHATML

from tokenspeed.errors import ArtifactError, RequestError, TokenSpeedError
from tokenspeed.runtime.chat import ChatTemplate, normalize_messages

USER = [{"role": "user", "content": "Hi"}]


def render(source: str | None, messages: list[dict[str, Any]] = USER, **options: Any) -> str:
    return ChatTemplate(source, {"bos_token": "<s>", "eos_token": "</s>"}).render(messages, **options)


def test_chatml_with_and_without_a_generation_prompt() -> None:
    assert render(CHATML) == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    assert render(CHATML, add_generation_prompt=False) == "<|im_start|>user\nHi<|im_end|>\n"


def test_templates_see_special_tokens_helpers_and_variables() -> None:
    assert render("{{ bos_token }}{{ messages[0].content }}{{ eos_token }}") == "<s>Hi</s>"
    assert render("{{ strftime_now('%Y') }}") == str(datetime.now().year)
    assert render('{{ {"a": "<é>"} | tojson }}') == '{"a": "<é>"}'
    assert render("{{ mood }}", variables={"mood": "calm"}) == "calm"
    assert render("{% for i in range(9) %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}") == "01"
    assert render("{% generation %}x{% endgeneration %}") == "x"


def test_blocks_are_trimmed_as_templates_expect() -> None:
    assert render("  {% if true %}\nyes\n  {% endif %}\n") == "yes\n"


@pytest.mark.parametrize(
    ("source", "kind", "text"),
    [
        (None, RequestError, "this artifact has no chat template"),
        ("{% for %}", ArtifactError, r"the chat template is not valid Jinja: line 1: "),
        ("{{ raise_exception('no system role') }}", RequestError, "refuses these messages: no system role"),
        ("{{ messages[0].content + 1 }}", RequestError, "fails on these messages: TypeError"),
        ("{{ nothing.at.all }}", RequestError, "fails on these messages: UndefinedError"),
        ("{{ messages.append(1) }}", ArtifactError, "does what the sandbox forbids"),
        ("{{ ''.__class__.__mro__[1].__subclasses__() }}", ArtifactError, "does what the sandbox forbids"),
        ("{{ range(10**9) | list }}", RequestError, "OverflowError: Range too big"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", ArtifactError, "it recurses too deeply"),
    ],
)
def test_failures_say_whose_fault_it_is(source: str | None, kind: type[TokenSpeedError], text: str) -> None:
    with pytest.raises(kind, match=text):
        render(source)


def test_variables_cannot_replace_what_the_server_sets() -> None:
    with pytest.raises(RequestError, match="chat_template_kwargs must not set messages") as caught:
        render(CHATML, variables={"messages": []})
    assert caught.value.param == "chat_template_kwargs"


def test_a_template_cannot_change_the_messages() -> None:
    messages = [{"role": "user", "content": "Hi"}]
    with pytest.raises(ArtifactError):
        render("{% set _ = messages[0].update(content='x') %}", messages)
    assert messages == USER


def test_text_parts_become_one_text() -> None:
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    assert normalize_messages([{"role": "user", "content": parts}])[0]["content"] == "one\ntwo"


@pytest.mark.parametrize(
    ("messages", "text"),
    [
        (None, "messages must be a list of messages; got NoneType"),
        ([], "messages must be a list of at least one message"),
        (["hi"], "messages[0] must be an object with role and content; got str"),
        ([{"content": "x"}], "messages[0].role must be a string such as 'user'; got None"),
        ([{"role": "user"}], "messages[0].content must be a string or a list of text parts; got null"),
        ([*USER, {"role": "user", "content": 5}], "messages[1].content must be a string"),
        (
            [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}],
            "messages[0].content[0].type must be 'text': this model reads text only; got 'image_url'",
        ),
        ([{"role": "user", "content": [{"type": "text"}]}], "messages[0].content[0].text must be a string"),
        ([{"role": "user", "content": "\ud800"}], "messages[0].content must be valid Unicode"),
        ([{"role": "assistant", "content": "", "tool_calls": [{}]}], "messages[0].tool_calls must be empty"),
    ],
)
def test_malformed_messages_are_named(messages: Any, text: str) -> None:
    with pytest.raises(RequestError, match=re.escape(text)):
        normalize_messages(messages)
