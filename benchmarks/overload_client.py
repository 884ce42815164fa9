"""The clients of benchmarks/overload.py: what they ask, HTTP/1.1 by hand, and what became of each request.

A client costs one task and one socket, so that one thread can send hundreds of requests a second beside the server.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import random
import time
from collections.abc import AsyncIterator, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

TENANTS = {"greedy": 0.45, "team": 0.25, "app": 0.18, "modest": 0.12}
"""Names of API keys, and their shares of the arrivals; each has the right to an equal share of the server."""
PRIORITIES = {0: 0.25, 1: 0.6, 2: 0.15}
"""Classes and their shares of the arrivals."""
CLEAN_ENDS = ("length", "stop")


@dataclass(frozen=True)
class Workload:
    """What is asked: ranges of tokens, both ends included, and shares of the requests, from 0 to 1."""

    prompt_tokens: tuple[int, int] = (24, 120)
    long_prompt_tokens: tuple[int, int] = (768, 1280)
    reply_tokens: tuple[int, int] = (16, 64)
    long_share: float = 0.06
    leave_midway_share: float = 0.08
    leave_early_share: float = 0.04
    leave_early_seconds: float = 0.5

    @property
    def mean_tokens(self) -> float:
        """Of a request that runs to its end, prompt and reply."""
        prompt, long, reply = map(sum, (self.prompt_tokens, self.long_prompt_tokens, self.reply_tokens))
        return (prompt * (1 - self.long_share) + long * self.long_share + reply) / 2


@dataclass(frozen=True)
class Request:
    """One request to come: its bytes, and how its client behaves. It leaves after ``leave_after_tokens`` tokens or
    ``leave_after_seconds``, by a reset if ``rude``; None: it stays."""

    tenant: str
    priority: int
    wire: bytes
    num_prompt_tokens: int
    num_reply_tokens: int
    leave_after_tokens: int | None = None
    leave_after_seconds: float | None = None
    rude: bool = False


@dataclass
class Record:
    """What became of a request. Seconds count from before its connection is made. ``outcome``: served, refused, left,
    or else failed, and then ``error`` says how."""

    tenant: str
    priority: int
    num_prompt_tokens: int
    sent: float
    outcome: str = "failed"
    status: int = 0
    retry_after: str | None = None
    code: str | None = None
    first_token: float | None = None
    total: float = 0.0
    tokens: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    error: str | None = None

    @property
    def num_served_tokens(self) -> int:
        """Of its prompt and its reply, once it ran."""
        return self.num_prompt_tokens + len(self.tokens) if self.tokens else 0


@dataclass
class Sample:
    """The server at one moment. ``num_queued``: of the waiting those that never ran, which are bounded. ``num_tokens``:
    what it has read and drawn so far. ``seconds``: how long it took to say all this."""

    at: float
    resident_bytes: int
    num_files: int
    num_running: int
    num_waiting: int
    num_queued: int
    num_pages_in_use: int
    num_cached_pages: int
    num_tokens: int
    seconds: float


def requests(work: Workload, seed: str, info: Mapping[str, Any], leavers: bool = True) -> Iterator[Request]:
    """Endless and the same for the same arguments. ``info`` is the engine's of /get_server_info."""
    rng = random.Random(seed)
    for number in itertools.count():
        tenant = rng.choices(list(TENANTS), list(TENANTS.values()))[0]
        priority = rng.choices(list(PRIORITIES), list(PRIORITIES.values()))[0]
        num_prompt = rng.randint(*(work.long_prompt_tokens if rng.random() < work.long_share else work.prompt_tokens))
        num_reply = rng.randint(*work.reply_tokens)
        kind, rude, after = rng.random(), rng.random() < 0.5, rng.randint(1, max(1, num_reply // 2))
        midway = leavers and kind < work.leave_midway_share
        early = leavers and not midway and kind < work.leave_midway_share + work.leave_early_share
        body = {
            "prompt": rng.choices(range(info["vocab_size"]), k=num_prompt),
            "max_tokens": num_reply,
            "ignore_eos": True,
            "temperature": 1.0 if number % 2 else 0.0,
            "seed": number,
            "priority": priority,
            "user": f"{tenant} {number}" if tenant == "greedy" else tenant,
            "stream": True,
            "return_token_ids": True,
        }
        yield Request(
            tenant,
            priority,
            wire("POST", "/v1/completions", tenant, body),
            num_prompt,
            num_reply,
            after if midway else None,
            work.leave_early_seconds if early else None,
            rude,
        )


def wire(method: str, path: str, tenant: str, body: object = None) -> bytes:
    """A request as it is sent."""
    content = b"" if body is None else json.dumps(body, separators=(",", ":")).encode()
    head = f"{method} {path} HTTP/1.1\r\nhost: localhost\r\nauthorization: Bearer {key_of(tenant)}\r\n"
    return f"{head}content-length: {len(content)}\r\nconnection: close\r\n\r\n".encode() + content


def key_of(tenant: str) -> str:
    return f"overload-{tenant}"


class Left(Exception):
    """The client goes, as it was to do."""


async def exchange(port: int, request: Request, patience: float) -> Record:
    """Send ``request`` and note what comes of it; never raises. ``patience``: seconds until it counts as failed."""
    record = Record(request.tenant, request.priority, request.num_prompt_tokens, time.monotonic())
    leaves = request.leave_after_seconds
    writer: asyncio.StreamWriter | None = None
    try:
        async with asyncio.timeout(patience if leaves is None else leaves):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(request.wire)
            await read_answer(reader, request, record)
    except Left:
        record.outcome = "left"
    except TimeoutError:
        record.outcome = "failed" if leaves is None else "left"
        record.error = f"no answer in {patience} s" if leaves is None else None
    except (OSError, EOFError, ValueError, KeyError, IndexError, asyncio.LimitOverrunError) as e:
        record.error = f"{type(e).__name__}: {e}"
    finally:
        record.total = time.monotonic() - record.sent
        if writer is not None:
            writer.transport.abort() if record.outcome == "left" and request.rude else writer.close()
    return record


async def read_answer(reader: asyncio.StreamReader, request: Request, record: Record) -> None:
    record.status, headers = await read_head(reader)
    if record.status != 200:
        content = await read_body(reader, headers)
        record.code = json.loads(content)["error"]["code"]
        record.retry_after = headers.get("retry-after")
        record.outcome = "refused" if record.status == 429 else "failed"
        record.error = None if record.status == 429 else content.decode()[:300]
        return
    async for event in read_events(reader):
        if event == b"[DONE]":
            clean = record.finish_reason in CLEAN_ENDS and len(record.tokens) == request.num_reply_tokens
            record.outcome = "served" if clean else "failed"
            record.error = None if clean else f"finish reason {record.finish_reason}, {len(record.tokens)} tokens"
            return
        chunk = json.loads(event)
        if "error" in chunk:
            raise ValueError(chunk["error"]["message"])
        (choice,) = chunk["choices"]
        if choice["token_ids"] and record.first_token is None:
            record.first_token = time.monotonic() - record.sent
        record.tokens += choice["token_ids"]
        record.finish_reason = choice["finish_reason"]
        if request.leave_after_tokens is not None and len(record.tokens) >= request.leave_after_tokens:
            raise Left
    raise EOFError("the stream ended without [DONE]")


async def read_head(reader: asyncio.StreamReader) -> tuple[int, dict[str, str]]:
    """Status and headers, their names in lower case."""
    lines = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
    pairs = (line.partition(":") for line in lines[1:] if line)
    return int(lines[0].split()[1]), {name.lower(): value.strip() for name, _, value in pairs}


async def read_body(reader: asyncio.StreamReader, headers: Mapping[str, str]) -> bytes:
    return await reader.readexactly(int(headers["content-length"]))


async def read_events(reader: asyncio.StreamReader) -> AsyncIterator[bytes]:
    """The data of each server-sent event of a body in chunks."""
    buffer = b""
    while size := int(await reader.readuntil(b"\r\n"), 16):
        buffer += (await reader.readexactly(size + 2))[:-2]
        *events, buffer = buffer.split(b"\n\n")
        for event in events:
            yield event.removeprefix(b"data: ")


async def get(port: int, path: str) -> bytes:
    """Raises OSError, EOFError or ValueError when there is no answer, or none of status 200."""
    async with asyncio.timeout(30):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        try:
            writer.write(wire("GET", path, next(iter(TENANTS))))
            status, headers = await read_head(reader)
            if status != 200:
                raise ValueError(f"{path} answers {status}")
            return await read_body(reader, headers)
        finally:
            writer.close()
