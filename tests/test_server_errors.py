"""Bad input over real HTTP: the right status, the field at fault, and what to do."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Iterator
from typing import Any

import pytest
from fake_engine import FakeEngine
from server_harness import Running, running
from tiny_tokenizers import byte_level

from tokenspeed.errors import ResourceError, UsageError
from tokenspeed.runtime.server.settings import ServerSettings, bind, url

TOKENIZER = byte_level()
USER = [{"role": "user", "content": "hello"}]


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    engine = FakeEngine(TOKENIZER)
    with running(engine, max_body_bytes=100_000) as server:
        yield server
    engine.close(drain=False)


def refused(server: Running, path: str, body: Any, status: int = 400) -> dict[str, Any]:
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    r = server.client.post(path, content=content)
    assert r.status_code == status, r.text
    error: dict[str, Any] = r.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return error


@pytest.mark.parametrize(
    ("body", "text"),
    [
        (b"", "the request body is not valid JSON"),
        (b'{"prompt": "x"', "the request body is not valid JSON"),
        (b"\xff\xfe{}", "the request body is not valid JSON"),
        (b'{"prompt": "x", "temperature": NaN}', "NaN is not a JSON number"),
        (b'{"prompt": "x", "logit_bias": {"5": 1, "5": 2}}', 'valid JSON: an object names "5" twice'),
        (b'{"prompt": "x", "n": 1, "n": 2}', 'valid JSON: an object names "n" twice'),
        (b"[1, 2]", "the request body must be a JSON object; got a list"),
        (b"null", "the request body must be a JSON object; got null"),
        (b"[" * 50_000, "nested too deeply"),
        (b'{"max_tokens": ' + b"9" * 5000 + b"}", "the request body is not valid JSON"),
    ],
)
def test_malformed_json(server: Running, body: bytes, text: str) -> None:
    assert text in refused(server, "/v1/completions", body)["message"]


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ({"temperature": "hot"}, 'temperature must be a number; got a string: "hot"'),
        ({"temperature": True}, "temperature must be a number; got a boolean: true"),
        ({"temperature": -0.5}, "temperature must be 0 (greedy) or a number from 1e-05 to 100; got -0.5"),
        ({"top_p": 10**400}, "top_p must be a finite number; got one too large"),
        ({"top_p": 2}, "top_p must be a number above 0 and at most 1; got 2.0 (leave it at 1 to turn it off)"),
        ({"top_k": 1.5}, "top_k must be an integer; got a number: 1.5"),
        ({"min_p": -1}, "min_p must be a number from 0 to 1"),
        ({"n": False}, "n must be an integer; got a boolean: false"),
        ({"n": 1000}, "n must be an integer from 1 to 128; got 1000"),
        ({"max_tokens": -5}, "max_tokens must be an integer of at least 1; got -5"),
        ({"max_tokens": 16.5}, "max_tokens must be an integer; got a number: 16.5"),
        ({"seed": -1}, "seed must be an integer from 0 to 18446744073709551615; got -1"),
        ({"stop": [1]}, "stop must be a string or a list of strings"),
        ({"stop": ""}, "stop must be strings of 1 to 1024 characters"),
        ({"stop": "\ud800"}, "stop must be valid Unicode"),
        ({"stop_token_ids": [True]}, "stop_token_ids must be a list of integers"),
        ({"stream": "yes"}, "stream must be true or false; got a string"),
        ({"logprobs": 21}, "logprobs must be an integer from 0 to 20; got 21"),
        ({"prompt_logprobs": 99}, "prompt_logprobs must be an integer from 0 to 20"),
        ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs cannot be streamed"),
        ({"return_logprob": 1}, "return_logprob must be true or false; got an integer: 1"),
        ({"return_logprob": False, "logprobs": 0}, "return_logprob is false, but logprobs asks for them"),
        ({"return_logprob": False, "prompt_logprobs": 0}, "return_logprob is false, but prompt_logprobs asks for them"),
        ({"logprob_start_len": "2", "return_logprob": True}, "logprob_start_len must be an integer; got a string"),
        ({"logprob_start_len": True, "return_logprob": True}, "logprob_start_len must be an integer; got a boolean"),
        ({"logprob_start_len": -2, "return_logprob": True}, "logprob_start_len must be -1 (the prompt's end) or more"),
        ({"logprob_start_len": 99, "return_logprob": True}, "logprob_start_len must be at most the prompt's "),
        ({"logprob_start_len": 0, "return_logprob": True, "stream": True}, "logprob_start_len cannot be streamed"),
        ({"logprob_start_len": 0}, "logprob_start_len needs return_logprob or prompt_logprobs"),
        ({"logprob_start_len": -1}, "logprob_start_len needs return_logprob or prompt_logprobs"),
        ({"logprob_start_len": 0, "logprobs": 1}, "logprob_start_len needs return_logprob or prompt_logprobs"),
        (
            {"logprob_start_len": -1, "prompt_logprobs": 0},
            "logprob_start_len is -1, the prompt's end, but log-probabilities of the prompt are asked for",
        ),
        ({"stream_options": {"include_usage": True}}, "stream_options need stream to be true"),
        ({"prompt": None}, "prompt is missing: it must be a string, a list of strings, a list of token ids"),
        ({"prompt": []}, "the prompt is empty"),
        ({"prompt": ""}, "the prompt is empty"),
        ({"prompt": [[]]}, "the prompt is empty"),
        ({"prompt": [1, "a"]}, "prompt must be a string, a list of strings"),
        ({"prompt": [[1], [True]]}, "prompt must be a string, a list of strings"),
        ({"prompt": {"a": 1}}, "prompt must be a string"),
        ({"prompt": "\udfff"}, "prompt must be valid Unicode"),
        ({"prompt": ["x"] * 1025}, "prompt must hold at most 1024 prompts; got 1025"),
        ({"prompt": [3, 100_000]}, "prompt token 1 is 100000: token ids of this model go from 0 to"),
        ({"prompt": [-7]}, "prompt token 0 is -7"),
        ({"presence_penalty": 2.5}, "presence_penalty must be a number from -2 to 2; got 2.5 (0 turns it off)"),
        ({"frequency_penalty": "a"}, "frequency_penalty must be a number; got a string"),
        ({"repetition_penalty": 0}, "repetition_penalty must be a number from 0.01 to 100; got 0"),
        ({"logit_bias": [5]}, "logit_bias must be an object; got a list"),
        ({"logit_bias": {"five": 1}}, "logit_bias must be an object whose keys are token ids; got an object"),
        ({"logit_bias": {"-1": 1}}, "logit_bias must be an object whose keys are token ids"),
        ({"logit_bias": {"5": "x"}}, "logit_bias must be an object of numbers"),
        (
            {"logit_bias": {"5": 1, "05": 2}},
            "logit_bias must be an object that names each token once, and names token 5 twice; got an object",
        ),
        ({"logit_bias": {"5": 101}}, "logit_bias must be numbers from -100 to 100; got 101 for token 5"),
        ({"logit_bias": {"99999": 1}}, "logit_bias must be a mapping of token ids from 0 to"),
        (
            {"logit_bias": {str(i): 1 for i in range(1025)}},
            "logit_bias must be a mapping of at most 1024 token ids; got",
        ),
        ({"allowed_token_ids": []}, "allowed_token_ids must be at least one token id; got none"),
        ({"allowed_token_ids": [-1]}, "allowed_token_ids must be token ids from 0 to"),
        ({"allowed_token_ids": "abc"}, "allowed_token_ids must be a list of integers; got a string"),
        ({"suffix": "end"}, "suffix is not supported"),
        ({"best_of": 3}, "best_of 3 is not supported with n 1"),
        ({"min_tokens": 2}, "min_tokens is not supported"),
    ],
)
def test_illegal_fields(server: Running, values: dict[str, Any], text: str) -> None:
    error = refused(server, "/v1/completions", {"prompt": "hello", **values})
    assert text in error["message"]
    assert error["type"] == "invalid_request_error" and error["param"] == next(iter(values))


@pytest.mark.parametrize(
    ("values", "text", "param"),
    [
        ({"messages": None}, "messages must be a list of messages", "messages"),
        ({"messages": []}, "messages must be a list of at least one message", "messages"),
        ({"messages": [{"role": "user"}]}, "messages[0].content must be", "messages[0].content"),
        ({"top_logprobs": 2}, "top_logprobs needs logprobs to be true", "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs must be an integer from 0 to 20", "top_logprobs"),
        ({"logprobs": 3}, "logprobs must be true or false", "logprobs"),
        ({"tools": [{"type": "function"}]}, "tools is not supported", "tools"),
        ({"tool_choice": "required"}, "tool_choice is not supported", "tool_choice"),
        ({"response_format": {"type": "json_object"}}, "response_format is not supported", "response_format"),
        ({"chat_template": "{{ x }}"}, "the artifact's own template is used", "chat_template"),
        ({"chat_template_kwargs": {"messages": 1}}, "must not set messages", "chat_template_kwargs"),
        ({"echo": True}, "echo is not supported for chats", "echo"),
        ({"max_completion_tokens": 500}, "max_tokens 500 does not fit", "max_tokens"),
    ],
)
def test_illegal_chats(server: Running, values: dict[str, Any], text: str, param: str) -> None:
    error = refused(server, "/v1/chat/completions", {"messages": USER, **values})
    assert text in error["message"] and error["param"] == param


def test_too_long_prompts_say_what_fits(server: Running) -> None:
    error = refused(server, "/v1/completions", {"prompt": [5] * 256})
    assert error["code"] == "context_length_exceeded"
    assert "the prompt has 256 tokens; this artifact was built for max_model_len 256" in error["message"]
    assert "tokenspeed build --max-model-len" in error["message"]
    error = refused(server, "/v1/completions", {"prompt": [5] * 200, "max_tokens": 57})
    assert error["code"] == "context_length_exceeded" and "ask for at most 56 tokens" in error["message"]


def test_unknown_model_path_and_method(server: Running) -> None:
    error = refused(server, "/v1/completions", {"model": "gpt-9", "prompt": "x"}, 404)
    assert error["message"] == "the model 'gpt-9' is not served here (ask for 'fake-1b')"
    assert error["code"] == "model_not_found" and error["param"] == "model"
    r = server.client.get("/v1/models/gpt-9")
    assert r.status_code == 404 and r.json()["error"]["code"] == "model_not_found"
    assert refused(server, "/v2/nothing", {}, 404)["message"] == "there is no POST /v2/nothing here"
    r = server.client.get("/v1/completions")
    assert r.status_code == 405 and r.json()["error"]["code"] == "method_not_allowed"


def test_oversized_bodies_are_not_read(server: Running) -> None:
    error = refused(server, "/v1/completions", b'{"prompt": "' + b"x" * 200_000 + b'"}', 413)
    assert "longer than the 100000 bytes" in error["message"] and error["code"] == "body_too_large"

    def chunks() -> Iterator[bytes]:
        for _ in range(40):
            yield b"x" * 10_000

    r = server.client.post("/v1/completions", content=chunks())
    assert r.status_code == 413
    with socket.create_connection(server.listener.getsockname()[:2]) as s:  # says so before the body is sent
        s.sendall(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 999999999\r\n\r\n")
        assert s.recv(4096).startswith(b"HTTP/1.1 413 ")
    assert server.client.get("/health").status_code == 200


def test_the_api_key_guards_everything_but_health_and_the_page() -> None:
    engine = FakeEngine(TOKENIZER)
    with running(engine, api_keys={"": "s3cret"}) as server:
        get = server.client.get
        assert get("/health").status_code == get("/").status_code == 200
        for path in ("/v1/models", "/metrics", "/get_server_info", "/version", "/nothing"):
            r = get(path)
            assert r.status_code == 401 and r.headers["www-authenticate"] == "Bearer"
            assert "an API key is needed" in r.json()["error"]["message"]
        r = get("/v1/models", headers={"authorization": "Bearer wrong"})
        assert r.status_code == 401 and r.json()["error"]["code"] == "invalid_api_key"
        assert get("/v1/models", headers={"authorization": "Bearer s3cret"}).status_code == 200
        assert "s3cret" not in get("/get_server_info", headers={"authorization": "Bearer s3cret"}).text
    engine.close(drain=False)


def test_a_full_queue_is_429_and_says_when_to_retry() -> None:
    engine = FakeEngine(TOKENIZER, max_running=1, max_waiting=3)
    engine.hold.set()
    with running(engine) as server:
        body = {"prompt": ["a", "b", "c"], "max_tokens": 2}
        with server.client.stream("POST", "/v1/completions", json={**body, "stream": True}) as answered:
            while engine.waiting_room.num_waiting != 2:  # one runs
                time.sleep(0.005)
            r = server.client.post("/v1/completions", json={**body, "prompt": ["d", "e"]})
            assert r.status_code == 429 and r.headers["retry-after"] == "1"
            error = r.json()["error"]
            assert (error["type"], error["code"]) == ("rate_limit_error", "queue_full")
            assert "3 requests wait already, which is the limit (retry in 1 s)" in error["message"]
            engine.hold.clear()
            assert answered.read().endswith(b"data: [DONE]\n\n")
        assert engine.wait_until_idle() and engine.aborted == [3]  # that was admitted of the refused ones
        assert server.client.post("/v1/completions", json={**body, "prompt": "a"}).status_code == 200
    engine.close(drain=False)


def test_what_can_never_wait_at_once_is_not_to_be_retried() -> None:
    engine = FakeEngine(TOKENIZER, max_waiting=3, max_waiting_per_tenant=2)
    with running(engine) as server:
        text = "prompts times n is {}, and at most 2 completions may wait at once (send fewer in one request)"
        error = refused(server, "/v1/completions", {"prompt": ["a", "b"], "n": 2})
        assert (error["message"], error["param"]) == (text.format(4), "prompt")
        assert refused(server, "/v1/chat/completions", {"messages": USER, "n": 3})["message"] == text.format(3)
        assert engine.submitted == []
    engine.close(drain=False)


def test_an_artifact_without_a_template_still_completes() -> None:
    engine = FakeEngine(byte_level(chat_template=None))
    with running(engine, served_names=("mine", "ours")) as server:
        error = refused(server, "/v1/chat/completions", {"messages": USER})
        assert "this artifact has no chat template" in error["message"] and "/v1/completions" in error["message"]
        body = server.client.post("/v1/completions", json={"model": "ours", "prompt": "a"}).json()
        assert body["model"] == "ours"
        assert [card["id"] for card in server.client.get("/v1/models").json()["data"]] == ["mine", "ours"]
        assert refused(server, "/v1/completions", {"model": "fake-1b", "prompt": "a"}, 404)
    engine.close(drain=False)


def test_a_broken_template_is_the_servers_fault() -> None:
    engine = FakeEngine(byte_level(chat_template="{% for %}"))
    with running(engine) as server:
        error = refused(server, "/v1/chat/completions", {"messages": USER}, 500)
        assert error["message"].startswith("the chat template is not valid Jinja: line 1: ")
    engine.close(drain=False)


def test_a_bug_of_ours_is_a_500_that_tells_nothing(caplog: pytest.LogCaptureFixture) -> None:
    engine = FakeEngine(TOKENIZER)
    engine.submit = None  # type: ignore[assignment]
    with running(engine) as server:
        error = refused(server, "/v1/completions", {"prompt": "x"}, 500)
        assert error["message"] == "the server failed on this request; its log says why"
    engine.close(drain=False)
    assert "'NoneType' object is not callable" in caplog.text


def test_ports_and_hosts() -> None:
    with bind(ServerSettings(port=0)) as taken:
        port = taken.getsockname()[1]
        assert url(taken) == f"http://127.0.0.1:{port}"
        with pytest.raises(ResourceError) as caught:
            bind(ServerSettings(port=port))
        assert str(caught.value) == (
            f"cannot listen on 127.0.0.1:{port}: another process listens there already"
            " (stop that process, or choose another port with --port (0 picks a free one))"
        )
    with pytest.raises(UsageError, match="--port must be from 0 to 65535; got 70000"):
        bind(ServerSettings(port=70000))
    with pytest.raises(UsageError, match="--host no such host at all: no such host"):
        bind(ServerSettings(host="no such host at all"))
    with pytest.raises(ResourceError, match=r"cannot listen on 203\.0\.113\.7:0"):
        bind(ServerSettings(host="203.0.113.7", port=0))
