"""Build a checkpoint, serve the artifact, stream one chat reply over HTTP, and say where the time went.

    python examples/demo.py CHECKPOINT ARTIFACT

Uses nothing but the standard library and the `tokenspeed` command beside this interpreter.
"""

from __future__ import annotations

import http.client
import json
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import IO

PROMPT = "What is the capital of France, and what is it famous for?"
TOKENSPEED = str(Path(sys.executable).with_name("tokenspeed"))
READY = re.compile(r"ready\b.*?http://([\w.\[\]:]+):(\d+)")


def main() -> int:
    checkpoint, artifact = sys.argv[1:3]
    laps: list[tuple[str, str]] = []

    print(f"== tokenspeed build {checkpoint}", flush=True)
    started = time.perf_counter()
    subprocess.run([TOKENSPEED, "build", checkpoint, "-o", artifact, "--force"], check=True)
    laps.append(("build", f"{time.perf_counter() - started:.2f} s"))

    print(f"\n== tokenspeed serve {artifact}", flush=True)
    started = time.perf_counter()
    server = subprocess.Popen([TOKENSPEED, "serve", artifact, "--port", "0"], stderr=subprocess.PIPE, text=True)
    assert server.stderr is not None
    try:
        host, port = wait_until_ready(server, server.stderr)
        laps.append(("exec to ready", f"{time.perf_counter() - started:.2f} s"))
        laps.extend((f"  load: {name}", f"{seconds:.3f} s") for name, seconds in load_seconds(host, port).items())
        threading.Thread(target=forward, args=(server.stderr,), daemon=True).start()
        print(f"\n== POST /v1/chat/completions\nuser: {PROMPT}\nassistant: ", end="", flush=True)
        asked = time.perf_counter()
        first, last, tokens = stream_chat(host, port)
        laps.append(("request to first token", f"{first - asked:.3f} s"))
        laps.append(("exec to first token", f"{first - started:.2f} s"))
        laps.append(("decode", f"{(tokens - 1) / (last - first):.0f} tokens/s over {tokens} tokens"))
    finally:
        server.send_signal(signal.SIGTERM)
        code = server.wait(timeout=60)
    print("\n\n== where the time went")
    for name, value in laps:
        print(f"{name:<24}{value}")
    return code


def wait_until_ready(server: subprocess.Popen[str], stderr: IO[str]) -> tuple[str, int]:
    """Read the server's log until it says where it listens."""
    for line in stderr:
        print(line, end="", file=sys.stderr, flush=True)
        if found := READY.search(line):
            return found[1], int(found[2])
    raise SystemExit(f"the server ended with code {server.wait()} before it was ready")


def forward(stderr: IO[str]) -> None:
    for line in stderr:
        print(line, end="", file=sys.stderr, flush=True)


def load_seconds(host: str, port: int) -> dict[str, float]:
    """How long each part of loading took, by the server's own account."""
    connection = http.client.HTTPConnection(host, port, timeout=30)
    connection.request("GET", "/get_server_info")
    return dict(json.loads(connection.getresponse().read())["load_seconds"])


def stream_chat(host: str, port: int) -> tuple[float, float, int]:
    """Print the reply as it streams. Returns the times of its first and last token and how many it had."""
    connection = http.client.HTTPConnection(host, port, timeout=120)
    body = {
        "messages": [{"role": "user", "content": PROMPT}],
        "stream": True,
        "stream_options": {"include_usage": True},
        "temperature": 0,
        "max_tokens": 128,
    }
    connection.request("POST", "/v1/chat/completions", json.dumps(body), {"Content-Type": "application/json"})
    response = connection.getresponse()
    if response.status != 200:
        raise SystemExit(f"the server answered {response.status}: {response.read().decode()}")
    first = last = 0.0
    tokens = 0
    for raw in response:
        line = raw.decode().strip()
        if not line.startswith("data: ") or line == "data: [DONE]":
            continue
        chunk = json.loads(line.removeprefix("data: "))
        if usage := chunk.get("usage"):
            tokens = usage["completion_tokens"]
        for choice in chunk["choices"]:
            if text := choice["delta"].get("content"):
                last = time.perf_counter()
                first = first or last
                print(text, end="", flush=True)
    return first, last, tokens


if __name__ == "__main__":
    sys.exit(main())
