"""``tokenspeed serve`` as a process: ready line, streams, draining, clients that leave, keys, ports."""

from __future__ import annotations

import json
import re
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from tiny_artifact import cli_environment, command

READY = re.compile(r"ready: (\S+) on (cpu:\S+) at (http://127\.0\.0\.1:(\d+)) \((\d+\.\d\d) s after exec\)\n")
CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "hello"}], "temperature": 0, "ignore_eos": True}


class Server:
    """A server process that is ready."""

    def __init__(self, artifact: Path, *args: str):
        self.process = subprocess.Popen(
            command("serve", artifact, "--port", "0", "--kv-gib", "0.2", *args),
            stderr=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=cli_environment(),
        )
        assert self.process.stderr is not None
        line = self.process.stderr.readline()
        ready = READY.fullmatch(line)
        assert ready, line + self.process.stderr.read()
        self.model, self.target, self.url, self.port = ready[1], ready[2], ready[3], int(ready[4])
        self.client = httpx.Client(base_url=self.url, timeout=30)

    def stats(self) -> dict[str, Any]:
        stats: dict[str, Any] = self.client.get("/get_server_info").json()["stats"]
        return stats

    def pages_held(self) -> int:
        stats = self.stats()
        return int(stats["num_pages"] - stats["num_free_pages"])

    def finish(self, number: signal.Signals | None = None) -> tuple[int, str, str]:
        if number is not None:
            self.process.send_signal(number)
        out, err = self.process.communicate(timeout=30)
        return self.process.returncode, out, err


@contextmanager
def serving(artifact: Path, *args: str) -> Iterator[Server]:
    server = Server(artifact, *args)
    try:
        yield server
    finally:
        server.client.close()
        server.process.kill()
        server.process.wait()


@pytest.fixture(scope="module")
def server(tiny_artifact: Path) -> Iterator[Server]:
    with serving(tiny_artifact) as server:
        yield server


def eventually(condition: Callable[[], bool], seconds: float = 10.0) -> bool:
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.01)
    return condition()


def test_an_openai_client_streams_a_chat(server: Server) -> None:
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none")
    assert [model.id for model in client.models.list()] == [server.model] == ["tiny-llama"]
    whole = client.chat.completions.create(
        model=server.model, messages=[{"role": "user", "content": "hello"}], temperature=0, max_tokens=20
    )
    chunks = list(
        client.chat.completions.create(
            model=server.model,
            messages=[{"role": "user", "content": "hello"}],
            temperature=0,
            max_tokens=20,
            stream=True,
            stream_options={"include_usage": True},
        )
    )
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == whole.choices[0].message.content and text
    assert chunks[-1].usage is not None and chunks[-1].usage.completion_tokens == 20
    assert whole.choices[0].finish_reason == "length"


def test_the_same_bits_alone_and_in_company(server: Server) -> None:
    prompts = [[token % 283 for token in range(i, i * 40)] for i in range(1, 8)]
    body = {
        "temperature": 0.9,
        "seed": 3,
        "max_tokens": 16,
        "ignore_eos": True,
        "logprobs": 2,
        "return_token_ids": True,
    }

    def choices(prompt: Any) -> Any:
        r = server.client.post("/v1/completions", json={**body, "prompt": prompt})
        assert r.status_code == 200, r.text
        return [{**choice, "index": 0} for choice in r.json()["choices"]]

    together = choices(prompts)
    assert [choices(prompt)[0] for prompt in prompts] == together


@pytest.mark.parametrize(
    ("body", "status", "text"),
    [
        ({"prompt": "x", "temperature": -1}, 400, "temperature must be 0 (greedy) or a number from 1e-05 to 100"),
        ({"prompt": "x", "top_p": 1e300}, 400, "top_p must be a number above 0 and at most 1"),
        ({"prompt": ""}, 400, "the prompt is empty"),
        ({"prompt": [7] * 65536}, 400, "the prompt has 65536 tokens; this artifact was built for max_model_len 65536"),
        ({"prompt": [283]}, 400, "prompt token 0 is 283: token ids of this model go from 0 to 282"),
        ({"prompt": "x", "model": "gpt-9"}, 404, "the model 'gpt-9' is not served here"),
        (b'{"prompt": ', 400, "the request body is not valid JSON"),
        (b'{"prompt": "' + b"x" * (33 << 20) + b'"}', 413, "longer than the 33554432 bytes"),
    ],
)
def test_bad_requests(server: Server, body: Any, status: int, text: str) -> None:
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    r = server.client.post("/v1/completions", content=content)
    assert r.status_code == status and text in r.json()["error"]["message"]
    assert server.client.get("/health").status_code == 200 and server.pages_held() == 0


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_frees_its_pages_at_once(server: Server, stream: bool) -> None:
    body = json.dumps({**CHAT, "stream": stream, "n": 2}).encode()  # as many tokens as fit: some 65000
    head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n\r\n".encode()
    aborted = 'tokenspeed:request_success_total{finished_reason="abort",model_name="tiny-llama"} '
    with socket.create_connection(("127.0.0.1", server.port)) as client:
        client.sendall(head + body)
        assert eventually(lambda: server.stats()["num_running"] == 2 and server.pages_held() >= 2)
    assert eventually(lambda: server.pages_held() == 0, 2.0)
    assert server.stats()["num_running"] == 0
    metrics = server.client.get("/metrics").text
    assert any(line.startswith(aborted) and float(line.split()[-1]) >= 2 for line in metrics.splitlines())


def test_nothing_is_allocated_or_loaded_while_serving(server: Server) -> None:
    assert server.client.post("/v1/chat/completions", json={**CHAT, "max_tokens": 30}).status_code == 200
    device = server.stats()["device"]
    assert device["steps"] > 0
    assert device["allocations_after_seal"] == device["graphs_loaded_after_seal"] == 0


def test_sigterm_lets_a_running_stream_finish(tiny_artifact: Path) -> None:
    with serving(tiny_artifact) as server:
        lines: list[str] = []
        begun = threading.Event()

        def stream() -> None:
            body = {**CHAT, "stream": True, "max_tokens": 6000}
            with httpx.stream("POST", f"{server.url}/v1/chat/completions", json=body, timeout=30) as r:
                for line in r.iter_lines():
                    lines.append(line)
                    begun.set()

        thread = threading.Thread(target=stream)
        thread.start()
        assert begun.wait(20)
        server.process.send_signal(signal.SIGTERM)
        if eventually(lambda: server.client.get("/health").status_code == 503, 1.0):
            assert server.client.post("/v1/chat/completions", json=CHAT).status_code == 503
        thread.join(30)
        assert lines[-2] == "data: [DONE]" or lines[-1] == "data: [DONE]"
        last = next(line for line in reversed(lines) if '"finish_reason":"length"' in line.replace(" ", ""))
        assert json.loads(last.removeprefix("data: "))["choices"][0]["finish_reason"] == "length"
        assert server.finish() == (0, "", "")


def test_a_second_signal_does_not_wait(tiny_artifact: Path) -> None:
    with serving(tiny_artifact) as server:
        with httpx.stream("POST", f"{server.url}/v1/chat/completions", json={**CHAT, "stream": True}, timeout=30) as r:
            next(r.iter_lines())
            server.process.send_signal(signal.SIGINT)
            time.sleep(0.1)
            code, out, _ = server.finish(signal.SIGINT)
        assert (code, out) == (0, "")


def test_the_api_key(tiny_artifact: Path) -> None:
    with serving(tiny_artifact, "--api-key", "s3cret", "--served-model-name", "mine") as server:
        r = server.client.get("/v1/models")
        assert r.status_code == 401 and "an API key is needed" in r.json()["error"]["message"]
        assert server.client.get("/health").status_code == 200
        client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="s3cret")
        assert [model.id for model in client.models.list()] == ["mine"]
        with pytest.raises(openai.AuthenticationError, match="the API key is wrong"):
            openai.OpenAI(base_url=f"{server.url}/v1", api_key="guess").models.list()
        assert server.finish(signal.SIGTERM) == (0, "", "")


@pytest.mark.parametrize(
    ("args", "code", "text"),
    [
        (("--port", "70000"), 2, "error: --port must be from 0 to 65535; got 70000\n"),
        (("--host", "no such host"), 2, "error: --host no such host: no such host"),
        (("--drain-timeout", "-1"), 2, "error: --drain-timeout is -1.0; it must be a number of seconds, 0 or more\n"),
        (("--api-key", ""), 2, "error: API key 1 is empty or holds more than printable ASCII\nhint: write KEY"),
        (
            ("--served-model-name", ""),
            2,
            "error: --served-model-name is ''; it must be a name of printable characters\n",
        ),
        (("--port", "0", "--max-waiting", "0"), 2, "error: --max-waiting is 0; it must lie between 1 and 1048576\n"),
        (("--max-waiting", "9" * 20), 2, f"error: --max-waiting is {'9' * 20}; it must lie between 1 and 1048576\n"),
        (("--max-waiting-per-key", "-1"), 2, "error: --max-waiting-per-key is -1; it must lie between 1 and"),
        (("--aging-seconds", "-1"), 2, "error: --aging-seconds is -1; it must lie between 0 (off) and 86400\n"),
        (("--aging-seconds", "nan"), 2, "error: --aging-seconds is nan; it must lie between 0 (off) and 86400\n"),
        (("--api-key-file", "/nothing/here"), 2, "error: cannot read the API keys in /nothing/here: No such file"),
        (("--port", "0", "--kv-gib", "0.001"), 9, "error: max_model_len = 65536 does not fit in memory"),
        (("--port", "0", "--target", "cpu:z80"), 8, "error: unknown target 'cpu:z80'\nhint: use one of cpu:x86"),
    ],
)
def test_refusals_before_serving(
    tiny_artifact: Path, args: tuple[str, ...], code: int, text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    from tokenspeed.cli import main

    assert main(["serve", str(tiny_artifact), *args]) == code
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.startswith(text)


def test_a_port_in_use(tiny_artifact: Path, server: Server) -> None:
    ran = subprocess.run(
        command("serve", tiny_artifact, "--port", str(server.port)),
        capture_output=True,
        text=True,
        timeout=30,
        env=cli_environment(),
    )
    assert (ran.returncode, ran.stdout) == (9, "")
    assert ran.stderr == (
        f"error: cannot listen on 127.0.0.1:{server.port}: another process listens there already\n"
        "hint: stop that process, or choose another port with --port (0 picks a free one)\n"
    )
