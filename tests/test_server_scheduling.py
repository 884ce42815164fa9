"""What clients ask of the scheduler and read of it over HTTP: priorities, shares, timeouts, cached tokens, limits."""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from fake_engine import FakeEngine
from server_harness import Running, running
from tiny_tokenizers import byte_level

from tokenspeed.cli.main import parse
from tokenspeed.cli.serve import api_keys
from tokenspeed.errors import QueueFullError, UsageError
from tokenspeed.runtime.request import RequestOptions
from tokenspeed.runtime.server.keys import names_tenants, parse_keys
from tokenspeed.runtime.waiting import MAX_RETRY_SECONDS, WaitingRoom

TOKENIZER = byte_level()
USER = [{"role": "user", "content": "hello"}]
PATHS = ("/v1/completions", "/v1/chat/completions")


@pytest.fixture
def engine() -> Iterator[FakeEngine]:
    engine = FakeEngine(TOKENIZER, cached_tokens=4)
    yield engine
    engine.close(drain=False)


@pytest.fixture
def server(engine: FakeEngine) -> Iterator[Running]:
    with running(engine) as server:
        yield server


def body_of(path: str, **more: Any) -> dict[str, Any]:
    prompt: dict[str, Any] = {"prompt": "hello"} if path == PATHS[0] else {"messages": USER}
    return {**prompt, "max_tokens": 3, "ignore_eos": True, **more}


def stream(server: Running, path: str, **more: Any) -> list[dict[str, Any]]:
    with server.client.stream("POST", path, json=body_of(path, stream=True, **more)) as r:
        assert r.status_code == 200
        lines = [line.removeprefix("data: ") for line in r.iter_lines() if line]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


@pytest.mark.parametrize("path", PATHS)
def test_fields_reach_the_engine(server: Running, engine: FakeEngine, path: str) -> None:
    asked = {"priority": 3, "timeout": 2.5, "cache_salt": "mine", "user": "ann"}
    assert server.client.post(path, json=body_of(path, n=2, **asked)).status_code == 200
    assert engine.scheduling == [RequestOptions(3, "ann", 2.5, "mine")] * 2
    assert server.client.post(path, json=body_of(path, priority=None, timeout=None)).status_code == 200
    assert engine.scheduling[-1] == RequestOptions()


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ({"priority": 10}, "priority must be an integer from 0 to 9; got 10"),
        ({"priority": -1}, "priority must be an integer from 0 to 9; got -1"),
        ({"priority": "high"}, "priority must be an integer; got a string"),
        ({"timeout": 0}, "timeout must be seconds above 0, at most 86400; got 0"),
        ({"timeout": 1e9}, "timeout must be seconds above 0, at most 86400"),
        ({"timeout": "1s"}, "timeout must be a number; got a string"),
        ({"cache_salt": 5}, "cache_salt must be a string; got an integer"),
        ({"cache_salt": "\u20ac" * 400}, "cache_salt must be a string of at most 1024 bytes"),
        ({"cache_salt": "\ud800"}, "cache_salt must be valid Unicode"),
        ({"user": ["a"]}, "user must be a string; got a list"),
        ({"user": "u" * 1025}, "user must be a string of at most 1024 bytes"),
    ],
)
def test_illegal_fields(server: Running, engine: FakeEngine, values: dict[str, Any], text: str) -> None:
    for path in PATHS:
        r = server.client.post(path, content=json.dumps(body_of(path, **values)))
        assert r.status_code == 400 and text in r.json()["error"]["message"]
        assert r.json()["error"]["param"] == next(iter(values))
    assert engine.scheduling == []


@pytest.mark.parametrize("path", PATHS)
def test_usage_tells_cached_tokens(server: Running, path: str) -> None:
    usage = server.client.post(path, json=body_of(path, n=2)).json()["usage"]
    assert usage["prompt_tokens_details"] == {"cached_tokens": 4}  # the prompt counts once, whatever n is
    last = stream(server, path, n=2, stream_options={"include_usage": True})[-1]
    assert last["choices"] == [] and last["usage"] == usage
    chunks = stream(server, path, stream_options={"continuous_usage_stats": True})
    told = [c["usage"]["prompt_tokens_details"]["cached_tokens"] for c in chunks if c["choices"]]
    assert told and set(told) == {4}


def test_usage_of_several_prompts_is_summed_and_openais_client_reads_it(server: Running) -> None:
    body = server.client.post(PATHS[0], json={**body_of(PATHS[0]), "prompt": ["hello", "hello", "hello"]}).json()
    assert body["usage"]["prompt_tokens_details"] == {"cached_tokens": 12}
    client = openai.OpenAI(base_url=f"{server.server.url}/v1", api_key="none")
    answer = client.chat.completions.create(
        model="fake-1b",
        messages=USER,
        user="bob",
        max_tokens=2,
        extra_body={"priority": 1},  # type: ignore[arg-type]
    )
    assert answer.usage is not None and answer.usage.prompt_tokens_details is not None
    assert answer.usage.prompt_tokens_details.cached_tokens == 4


@pytest.mark.parametrize("path", PATHS)
def test_a_timeout_before_the_first_token_is_a_504_that_is_not_retried(path: str) -> None:
    engine = FakeEngine(TOKENIZER)
    engine.hold.set()
    with running(engine) as server:
        r = server.client.post(path, json=body_of(path, timeout=0.02, n=2))
        assert (r.status_code, r.headers["x-should-retry"]) == (504, "false")
        error = r.json()["error"]
        assert (error["type"], error["code"]) == ("timeout_error", "timeout")
        assert "timeout was up before its first token" in error["message"]
        client = openai.OpenAI(base_url=f"{server.server.url}/v1", api_key="none")
        with pytest.raises(openai.InternalServerError):
            client.completions.create(model="fake-1b", prompt="x", extra_body={"timeout": 0.02})
        assert len(engine.submitted) == 3  # OpenAI's client did not try again
        # A stream has answered 200 by then: its last chunk tells.
        chunks = stream(server, path, timeout=0.02)
        assert chunks[-1]["choices"][0]["finish_reason"] == "timeout"
        metrics = server.client.get("/metrics").text
        assert 'tokenspeed:request_success_total{finished_reason="timeout",model_name="fake-1b"} 4.0' in metrics
    engine.close(drain=False)


@pytest.mark.parametrize("path", PATHS)
def test_a_timeout_after_the_first_token_keeps_what_there_is(path: str) -> None:
    engine = FakeEngine(TOKENIZER, step_seconds=0.01)
    with running(engine) as server:
        more = {"timeout": 0.6, "max_tokens": 200}  # it would take 2 s
        body = server.client.post(path, json=body_of(path, **more)).json()
        (choice,) = body["choices"]
        assert choice["finish_reason"] == "timeout" and 0 < body["usage"]["completion_tokens"] < 200
        chunks = stream(server, path, **more)
        reasons = [c["choices"][0]["finish_reason"] for c in chunks]
        assert reasons[-1] == "timeout" and set(reasons[:-1]) == {None}
    engine.close(drain=False)


# ---- metrics --------------------------------------------------------------------------------------------------


def scrape(server: Running, **headers: str) -> dict[str, float]:
    lines = server.client.get("/metrics", headers=headers).text.splitlines()
    return {line.rsplit(" ", 1)[0]: float(line.rsplit(" ", 1)[1]) for line in lines if line[0] != "#"}


def test_metrics_of_the_engine(engine: FakeEngine, server: Running) -> None:
    engine.hold.set()
    before = scrape(server)
    for name, value in {
        "prefix_cache_queries_total": 80, "prefix_cache_hits_total": 60, "oldest_wait_seconds": 0,
        "kv_cache_usage_perc": 0,
    }.items():  # fmt: skip
        assert before[f'tokenspeed:{name}{{model_name="fake-1b"}}'] == value
    assert [before[f'tokenspeed:kv_pages{{model_name="fake-1b",state="{s}"}}'] for s in ("used", "cached", "free")] == [
        0, 30, 70,
    ]  # fmt: skip
    assert [before[f'tokenspeed:host_kv_pages{{model_name="fake-1b",state="{s}"}}'] for s in ("used", "free")] == [
        20,
        30,
    ]
    waiting = 'tokenspeed:num_requests_waiting_by_priority{model_name="fake-1b",priority="%d"}'
    assert [before[waiting % priority] for priority in range(10)] == [0] * 10
    engine.hold.clear()


def test_refusals_are_counted_by_why() -> None:
    engine = FakeEngine(TOKENIZER, max_running=1, max_waiting=2, max_waiting_per_tenant=1)
    engine.hold.set()
    with running(engine, api_keys={"red": "k1", "blue": "k2"}) as server:

        def post(key: str, **body: Any) -> int:
            headers = {"authorization": f"Bearer {key}"}
            return server.client.post(PATHS[0], json=body_of(PATHS[0], **body), headers=headers).status_code

        assert post("k3") == 401 and post("k1", priority=11) == 400
        body, headers = body_of(PATHS[0], stream=True), {"authorization": "Bearer k1"}
        with contextlib.ExitStack() as stack:
            for waiting in (0, 1):  # one runs, one of this key waits
                stack.enter_context(server.client.stream("POST", PATHS[0], json=body, headers=headers))
                while engine.waiting_room.num_waiting != waiting:
                    time.sleep(0.005)
            assert post("k1") == 429
        assert engine.wait_until_idle()
        server.call(server.server.state.drain)
        assert post("k1") == 503
        found = scrape(server, authorization="Bearer k1")
        refused = {
            reason: found[f'tokenspeed:requests_refused_total{{model_name="fake-1b",reason="{reason}"}}']
            for reason in ("queue_full", "key_queue_full", "unavailable", "unauthorized", "invalid")
        }
        assert refused == {
            "queue_full": 0, "key_queue_full": 1, "unavailable": 1, "unauthorized": 1, "invalid": 1,
        }  # fmt: skip
    engine.close(drain=False)


# ---- API keys and shares --------------------------------------------------------------------------------------


def test_the_share_is_that_of_a_named_key_whatever_user_is_named(engine: FakeEngine) -> None:
    with running(engine, api_keys={"red": "k1", "blue": "k2"}) as server:
        for key, name in (("k1", "red"), ("k2", "blue")):
            headers = {"authorization": f"Bearer {key}"}
            for path in PATHS:
                assert server.client.post(path, json=body_of(path, user="x"), headers=headers).status_code == 200
                assert engine.scheduling[-1].tenant == name
        for wrong in ("Bearer k3", "Bearer k", "k1", "bearer k1", "Bearer k1k2"):
            r = httpx.post(f"{server.server.url}{PATHS[0]}", json=body_of(PATHS[0]), headers={"authorization": wrong})
            assert r.status_code == 401
        info = server.client.get("/get_server_info", headers=headers).text
        assert json.loads(info)["settings"]["api_keys"] == 2 and "k1" not in info


def test_with_one_unnamed_key_or_none_the_share_is_the_users(engine: FakeEngine) -> None:
    for keys in ({}, {"": "secret"}):
        with running(engine, api_keys=keys) as server:
            r = server.client.post(
                PATHS[0], json=body_of(PATHS[0], user="ann"), headers={"authorization": "Bearer secret"}
            )
            assert r.status_code == 200 and engine.scheduling[-1].tenant == "ann"


def test_keys_are_parsed(tmp_path: Path) -> None:
    assert parse_keys(["abc=="]) == {"": "abc=="} and parse_keys(["sk-1="]) == {"": "sk-1="}
    assert parse_keys(["team=abc="]) == {"team": "abc="} and parse_keys(["s3"]) == {"": "s3"}
    assert parse_keys(["one", "b=two", "three"]) == {"key-1": "one", "b": "two", "key-3": "three"}
    file = tmp_path / "keys"
    file.write_text("# ours\n\nred=k1\n  blue=k2\n")
    assert parse_keys([], file) == {"red": "k1", "blue": "k2"} and parse_keys(["c=x"], file).keys() == {
        "c", "red", "blue"
    }  # fmt: skip
    assert not names_tenants({}) and not names_tenants(parse_keys(["x"])) and names_tenants(parse_keys(["a=x"]))


def test_the_command_line_goes_before_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def keys(*options: str) -> dict[str, str]:
        return api_keys(parse(["serve", "artifact", *options]))

    (tmp_path / "keys").write_text("file=k1\n")
    monkeypatch.setenv("TOKENSPEED_API_KEY", "")
    assert keys() == {}
    monkeypatch.setenv("TOKENSPEED_API_KEY", "env=k0")
    assert keys() == {"env": "k0"}
    assert keys("--api-key", "k2") == {"": "k2"}
    assert keys("--api-key-file", str(tmp_path / "keys")) == {"file": "k1"}
    both = keys("--api-key", "a=k2", "--api-key-file", str(tmp_path / "keys"))
    assert both == {"a": "k2", "file": "k1"}


@pytest.mark.parametrize(
    ("texts", "error"),
    [
        ([""], "API key 1 is empty or holds more than printable ASCII"),
        (["a=secret-1", "b=secr\u00e9t"], "API key 2 is empty or holds more"),
        (["a=sec ret"], "API key 1 is empty or holds more"),
        (["a=secret-1", "a=secret-2"], "API key 2: the name 'a' is there twice"),
        (["a=secret-1", "b=secret-1"], "API key 2 (b) is that of another name"),
    ],
)
def test_bad_keys_are_refused_and_not_shown(texts: list[str], error: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse_keys(texts)
    assert error in caught.value.message and "secr" not in str(caught.value)


def test_bad_key_files(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"cannot read the API keys in .*: No such file"):
        parse_keys([], tmp_path / "none")
    (tmp_path / "empty").write_text("# nothing\n")
    with pytest.raises(UsageError, match="there are no API keys in"):
        parse_keys([], tmp_path / "empty")
    (tmp_path / "binary").write_bytes(b"\xff\xfe")
    with pytest.raises(UsageError, match="it is not UTF-8 text"):
        parse_keys([], tmp_path / "binary")


def test_a_key_file_may_begin_with_a_byte_order_mark(tmp_path: Path) -> None:
    (tmp_path / "keys").write_bytes(b"\xef\xbb\xbfa=secret-1\nb=secret-2\n")
    (tmp_path / "plain").write_bytes(b"a=secret-1\nb=secret-2\n")
    assert parse_keys([], tmp_path / "keys") == parse_keys([], tmp_path / "plain")


# ---- limits ---------------------------------------------------------------------------------------------------


def test_a_full_share_is_refused_and_others_get_in() -> None:
    engine = FakeEngine(TOKENIZER, max_running=1, max_waiting=8, max_waiting_per_tenant=2)
    engine.hold.set()
    with running(engine, api_keys={"red": "k1", "blue": "k2"}) as server:

        def ask(key: str) -> httpx.Response:
            headers = {"authorization": f"Bearer {key}"}
            return httpx.post(f"{server.server.url}{PATHS[0]}", json=body_of(PATHS[0]), headers=headers, timeout=20)

        waiters: list[httpx.Response] = []
        threads = [threading.Thread(target=lambda: waiters.append(ask("k1"))) for _ in range(3)]
        for n, thread in enumerate(threads):  # the first runs, two wait
            thread.start()
            deadline = time.monotonic() + 5
            while (len(engine.submitted), engine.waiting_room.num_waiting) != (n + 1, n):
                assert time.monotonic() < deadline
                time.sleep(0.005)
        refused = ask("k1")
        assert refused.status_code == 429 and int(refused.headers["retry-after"]) >= 1
        error = refused.json()["error"]
        assert (error["type"], error["code"]) == ("rate_limit_error", "key_queue_full")
        assert "2 requests of this key or user wait already, which is the limit" in error["message"]
        blue = threading.Thread(target=lambda: waiters.append(ask("k2")))
        blue.start()
        engine.hold.clear()
        for thread in (*threads, blue):
            thread.join(10)
        assert [r.status_code for r in waiters] == [200] * 4
    engine.close(drain=False)


def test_retry_after_is_how_long_the_queue_takes_to_drain() -> None:
    room = WaitingRoom(40)
    places = [room.enter("t", i % 3, now=100.0) for i in range(40)]
    for i in range(20):  # four leave a second, and others come
        room.leave(places[i], now=100 + 0.25 * (i + 1))
        room.enter("t", 9, now=100 + 0.25 * (i + 1))
    with pytest.raises(QueueFullError, match=r"40 requests wait already, which is the limit \(retry in 10 s\)") as e:
        room.enter("t", 0, now=105.0)
    assert e.value.retry_after == 10 and not e.value.of_tenant
    assert room.num_waiting == 40 and room.by_priority == (7, 6, 7, 0, 0, 0, 0, 0, 0, 20)


def test_retry_after_is_bounded_and_grows_while_nothing_leaves() -> None:
    room = WaitingRoom(2)
    place = room.enter("a", 0, now=10.0)
    room.enter("b", 0, now=10.0)

    def refused(now: float) -> int:
        with pytest.raises(QueueFullError) as e:
            room.enter("c", 0, now)
        return e.value.retry_after

    assert [refused(now) for now in (10.0, 10.5, 14.2, 39.0, 500.0)] == [1, 1, 5, 29, 30]
    room.leave(place, now=500.0)
    room.leave(place, now=501.0)  # again: nothing
    assert room.num_waiting == 1
    room.enter("c", 0, now=501.0)
    assert refused(530.0) == MAX_RETRY_SECONDS  # one in 30 s


def test_a_tenant_comes_back_when_its_own_requests_have_left() -> None:
    room = WaitingRoom(1000, most_per_tenant=2)
    busy = [room.enter("red", 0, now=0.0) for _ in range(2)]
    others = [room.enter(f"user {i}", 0, now=0.0) for i in range(100)]
    for place in others:
        room.leave(place, now=4.0)
    with pytest.raises(QueueFullError) as e:
        room.enter("red", 0, now=8.0)
    assert e.value.of_tenant and e.value.retry_after == 8  # none of its own has left so far
    room.leave(busy[0], now=8.0)
    room.enter("red", 0, now=8.0)
    with pytest.raises(QueueFullError) as e:
        room.enter("red", 0, now=8.0)
    assert e.value.retry_after == 16  # one in 8 s
    assert room._by_tenant == {"red": 2}  # who has nothing there is forgotten


def test_a_queue_that_was_empty_is_not_slow() -> None:
    room = WaitingRoom(2)
    room.leave(room.enter("a", 0, now=0.0), now=0.1)
    places = [room.enter("a", 0, now=20.0) for _ in range(2)]
    room.leave(places[0], now=20.5)
    room.enter("a", 0, now=20.5)
    with pytest.raises(QueueFullError) as e:
        room.enter("a", 0, now=21.0)
    assert e.value.retry_after == 2  # one a second since it filled, not one in 21 s


def test_the_rate_of_a_fast_queue_is_that_of_its_last_requests() -> None:
    room = WaitingRoom(1000)
    places = [room.enter("a", 0, now=0.0) for _ in range(1000)]
    for i, place in enumerate(places[:400]):  # none for 20 s, then a hundred a second
        room.leave(place, now=20 + i / 100)
        room.enter("a", 0, now=20 + i / 100)
    with pytest.raises(QueueFullError) as e:
        room.enter("a", 0, now=24.0)
    assert e.value.retry_after == 10
