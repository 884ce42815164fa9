"""Scheduling from the command line to a real engine: keys, timeouts, cached prefixes, traces, events, limits."""

from __future__ import annotations

import contextlib
import json
import queue
import signal
import socket
import time
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
import zmq
from test_serve_process import serving

import tokenspeed
from tokenspeed import SamplingParams
from tokenspeed.cli import main
from tokenspeed.errors import QueueFullError, RequestError, UsageError
from tokenspeed.runtime.async_llm import stream_blocking
from tokenspeed.runtime.engine import AGING_SECONDS, Engine
from tokenspeed.runtime.kv_events import END
from tokenspeed.runtime.loader import LoadOptions
from tokenspeed.runtime.request import EngineEvent, FinishReason, RequestOptions

SMALL = LoadOptions(kv_gib=0.2, threads=1)
PROMPT = [(13 * i) % 250 for i in range(200)]
BODY: dict[str, Any] = {"prompt": PROMPT, "max_tokens": 4, "ignore_eos": True, "temperature": 0}


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port: int = taken.getsockname()[1]
        return port


def test_a_server_with_all_of_it(tiny_artifact: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    keys, trace = tmp_path / "keys", tmp_path / "trace"
    keys.write_text("# who may\nblue=k2\n")
    events, replay = (f"tcp://*:{free_port()}" for _ in range(2))
    limits = ("--max-waiting", "64", "--max-waiting-per-key", "8", "--aging-seconds", "0", "--max-step-tokens", "96")
    files = ("--api-key-file", str(keys), "--trace-scheduler", str(trace))
    options = (*limits, *files, "--api-key", "red=k1", "--kv-events", events, "--kv-events-replay", replay)
    with serving(tiny_artifact, *options, "--threads", "1") as server:

        def post(key: str = "k1", **more: Any) -> httpx.Response:
            headers = {"authorization": f"Bearer {key}"}
            return server.client.post("/v1/completions", json={**BODY, **more}, headers=headers)

        def cached(answer: httpx.Response) -> int:
            assert answer.status_code == 200, answer.text
            found: int = answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"]
            return found

        first, again = post(), post("k2")
        assert (cached(first), cached(again)) == (0, 192)  # three pages of 64; the prompt's end is computed
        assert first.json()["choices"] == again.json()["choices"]
        assert [cached(post(cache_salt="apart")) for _ in range(2)] == [0, 192]
        assert cached(post(prompt_logprobs=0)) == 0
        late = post(timeout=1e-6)
        assert (late.status_code, late.json()["error"]["code"]) == (504, "timeout")
        assert post(prompt=[[i] for i in range(9)]).status_code == 400  # eight of a key may wait
        long = {**BODY, "prompt": [[i] for i in range(8)], "max_tokens": 60_000, "stream": True}
        with contextlib.ExitStack() as streams:
            for _ in range(3):  # eight run, eight wait
                many = streams.enter_context(
                    server.client.stream("POST", "/v1/completions", json=long, headers={"authorization": "Bearer k1"})
                )
                if many.status_code != 200:
                    break
                # The next eight wait behind the first once those have left the queue.
                deadline, eight = time.monotonic() + 20, 'num_requests_running{model_name="tiny-llama"} 8.0'
                while eight not in server.client.get("/metrics", headers={"authorization": "Bearer k2"}).text:
                    assert time.monotonic() < deadline
            error = json.loads(many.read())["error"]
            assert (many.status_code, error["code"]) == (429, "key_queue_full")
            assert int(many.headers["retry-after"]) >= 1
            assert post("k2", timeout=0.05).status_code == 504  # others may wait, and did
        assert post("k3").status_code == 401

        def metric(name: str, labels: str) -> float:
            text = server.client.get("/metrics", headers={"authorization": "Bearer k2"}).text
            (line,) = [line for line in text.splitlines() if line.startswith(f"tokenspeed:{name}{{{labels}}} ")]
            return float(line.rsplit(" ", 1)[1])

        model = 'model_name="tiny-llama"'
        assert metric("prefix_cache_hits_total", model) >= 384
        assert metric("request_success_total", f'finished_reason="timeout",{model}') == 2
        assert metric("requests_refused_total", f'{model},reason="key_queue_full"') == 1
        assert metric("telemetry_dropped_total", f'{model},of="scheduler_trace"') == 0
        assert metric("kv_pages", f'{model},state="cached"') > 0
        context = zmq.Context()
        router = context.socket(zmq.DEALER)
        router.connect(replay.replace("*", "127.0.0.1"))
        router.send_multipart([b"", bytes(8)])
        told = []
        while (message := router.recv_multipart())[1] != END:
            told += msgspec.msgpack.decode(message[2])[1]
        context.destroy(linger=0)
        assert told[0] == ["AllBlocksCleared"] and told[1][0] == "BlockStored"
        assert (told[1][2], told[1][3][:64], told[1][4]) == (None, PROMPT[:64], 64)
        assert server.finish(signal.SIGTERM) == (0, "", "")
    assert main(["explain-step", str(trace), "--json"]) == 0
    summary = json.loads(capsys.readouterr().out)["summary"]
    assert summary["ended"]["timeout"] == 2 and summary["cached_tokens"] >= 384 and summary["dropped"] == 0
    assert main(["explain-step", str(trace), "--step", "1"]) == 0
    assert "0 of 200 prompt tokens cached" in capsys.readouterr().out


def test_no_prefix_cache(tiny_artifact: Path) -> None:
    with serving(tiny_artifact, "--no-prefix-cache", "--threads", "1") as server:
        usages = [server.client.post("/v1/completions", json=BODY).json()["usage"] for _ in range(2)]
        assert usages[0] == usages[1] and usages[0]["prompt_tokens_details"] == {"cached_tokens": 0}


def test_outputs_tell_what_was_cached_and_how_long_they_waited(tiny_artifact: Path) -> None:
    params = SamplingParams(max_tokens=3, ignore_eos=True, temperature=0)
    with tokenspeed.load(tiny_artifact, options=SMALL) as engine:
        [first] = engine.generate(PROMPT, params)
        parts = list(stream_blocking(engine, PROMPT, params))
        assert first.cached_tokens == 0 and [part.cached_tokens for part in parts] == [192, None, None]
        assert first.queue_seconds is not None and 0 <= first.queue_seconds < 10
        assert [part.queue_seconds is None for part in parts] == [False, True, True]
        [late] = engine.generate(PROMPT, params, scheduling=RequestOptions(timeout=1e-6))
        assert (late.finish_reason, late.token_ids, late.cached_tokens) == (FinishReason.TIMEOUT, (), None)
        with pytest.raises(RequestError, match="priority must be an integer from 0 to 9"):
            engine.generate(PROMPT, params, scheduling=RequestOptions(priority=10))


def ended(events: queue.SimpleQueue[EngineEvent], number: int) -> dict[int, FinishReason]:
    """How the next ``number`` requests end."""
    found: dict[int, FinishReason] = {}
    while len(found) < number:
        event = events.get(timeout=20)
        if event.finish_reason is not None:
            found[event.request_id] = event.finish_reason
    return found


def test_the_room_of_an_engine_is_left_by_all_ways(tiny_artifact: Path) -> None:
    """Whether a request ran, was aborted or timed out in the queue, its place is free again."""
    long = SamplingParams(max_tokens=60_000, ignore_eos=True)
    events: queue.SimpleQueue[EngineEvent] = queue.SimpleQueue()
    with tokenspeed.load(tiny_artifact, options=SMALL, max_waiting=6, max_waiting_per_tenant=2) as engine:

        def submit(tenant: str, **options: Any) -> int:
            return engine.submit([1], long, events.put, options=RequestOptions(tenant=tenant, **options))

        running = []
        while len(running) < 8:  # as many as may run at once; each has left the queue before the next comes
            running.append(submit("first"))
            while engine.waiting_room.num_waiting:
                events.get(timeout=20)
        waiting = [submit("red", priority=3), submit("red", priority=5), submit("blue", priority=3)]
        with pytest.raises(QueueFullError, match="2 requests of this key or user wait already"):
            submit("red")
        assert engine.stats().waiting_by_priority == (0, 0, 0, 2, 0, 1, 0, 0, 0, 0)
        timed = [submit(f"late {i}", timeout=0.001) for i in range(3)]
        found = ended(events, 3)
        assert found == dict.fromkeys(timed, FinishReason.TIMEOUT)
        for request in (*running, *waiting):
            engine.abort(request)
        assert set(ended(events, 11).values()) == {FinishReason.ABORT}
        assert engine.waiting_room.num_waiting == 0 and engine.stats().waiting_by_priority == (0,) * 10
        assert engine.stats().num_free_pages == engine.stats().num_pages


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"max_waiting_per_tenant": 0}, "max_waiting_per_tenant is 0; it must be at least 1"),
        ({"aging_seconds": -1.0}, "aging_seconds is -1.0; it must lie between 0 and 86400"),
        ({"aging_seconds": float("nan")}, "aging_seconds is nan; it must lie between 0 and 86400"),
    ],
)
def test_bad_limits(tiny_artifact: Path, options: dict[str, Any], error: str) -> None:
    with pytest.raises(UsageError, match=error):
        tokenspeed.load(tiny_artifact, options=SMALL, **options)


def test_aging_reaches_the_scheduler(tiny_artifact: Path) -> None:
    def config_of(engine: Engine) -> Any:
        with engine:
            return engine._config

    assert config_of(tokenspeed.load(tiny_artifact, options=SMALL)).aging_ns == AGING_SECONDS * 1e9
    changed = config_of(tokenspeed.load(tiny_artifact, options=SMALL, aging_seconds=0.25, prefix_index=False))
    assert (changed.aging_ns, changed.prefix_index) == (250_000_000, False)
