"""Events of cached pages for routers that send a request to where its prefix is: vLLM's format over ZeroMQ.

A message has three parts: topic, sequence number (8 bytes, big endian, from 0), and a batch in msgpack, which is

    [seconds since 1970, [event, ...], 0]                      the last is vLLM's data-parallel rank

    ["BlockStored", hashes, parent hash or nil, token ids, page size, nil, "GPU", nil, extra keys or absent]
    ["BlockRemoved", hashes, "GPU"]
    ["AllBlocksCleared"]

Field order is that of vLLM's ``BlockStored``: block_hashes, parent_block_hash, token_ids, block_size, lora_id, medium,
lora_name, extra_keys; readers of earlier versions take the first five and skip the rest. A block is a KV page. A hash
is an unsigned 64-bit number over all tokens up to the page's end, the cache key, the artifact's digest and how often
its weights were updated: equal on every replica of an artifact, and no number that vLLM would give. Extra keys are
``[[cache key], ...]``, one for each hash. What goes to the host tier stays stored, since it can still be hit.

A subscriber that sees a gap in the numbers asks the replay socket, with a first number of 8 bytes behind an empty part,
and gets (empty, number, batch) for each message from there on that is still kept, then (empty, -1, empty).
"""

from __future__ import annotations

import logging
import queue
import re
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

from tokenspeed.errors import ResourceError, UsageError

TOPIC = "kv-events"
MEDIUM = "GPU"
"""vLLM's name for pages that a step reads where they are; those of a CPU target are called so too."""
RANK = 0
MOST_QUEUED = 100_000
"""Batches that may wait to be sent. What is more is dropped, which subscribers see as a gap."""
MOST_KEPT = 10_000
"""Batches kept for replay, as long as they fit in MOST_KEPT_BYTES."""
MOST_KEPT_BYTES = 64 << 20
SUBSCRIBER_LIMIT = 100_000
"""Messages that wait for one slow subscriber; it misses further ones, and sees the gap."""
POLL_MILLISECONDS = 100
SEND_MILLISECONDS = 1000
LINGER_MILLISECONDS = 1000
END = (-1).to_bytes(8, "big", signed=True)
_TCP = re.compile(r"tcp://[^:\s\[\]]+:(\*|[0-9]{1,9})|tcp://\[[0-9A-Fa-f:.%a-z]*\]:(\*|[0-9]{1,9})")

NativeEvent = tuple[Any, ...]  # of _native.Scheduler.take_events
_log = logging.getLogger("tokenspeed.kv_events")


def wire_events(events: Sequence[NativeEvent], page_size: int) -> list[list[Any]]:
    """The scheduler's events in vLLM's form. Pages of one prefix, each the next one's parent, become one event."""
    found: list[list[Any]] = []
    key = ""  # of the last BlockStored
    for event in events:
        last = found[-1] if found else None
        if event[0] == "stored":
            _, page, parent, own, tokens = event
            if last is not None and last[0] == "BlockStored" and own == key and parent == last[1][-1]:
                last[1].append(page)
                last[3].extend(tokens)
                if own:
                    last[8].append([own])
            else:
                extra = [[[own]]] if own else []
                found.append(["BlockStored", [page], parent, list(tokens), page_size, None, MEDIUM, None, *extra])
            key = own
        elif event[0] == "removed":
            if last is not None and last[0] == "BlockRemoved":
                last[1].append(event[1])
            else:
                found.append(["BlockRemoved", [event[1]], MEDIUM])
        else:
            found.append(["AllBlocksCleared"])
    return found


class KvEventPublisher:
    """Sends events from a thread of its own. ``begin`` and ``put`` belong to the engine's thread and never block.

    Args:
        endpoint: ZeroMQ address to publish at. One with ``*``, ``0.0.0.0`` or ``[::]`` for its host, and any ipc://, is
            bound: subscribers connect to it. Any other is connected to: a router binds it.
        replay: address to bind for replay, or None: there is none.
        topic: first part of every message.

    Attributes:
        dropped: events that found the queue full.
        sent: messages sent.

    Raises:
        UsageError: a package is missing, or an address makes no sense.
        ResourceError: an address is taken.
    """

    def __init__(self, endpoint: str, *, replay: str | None = None, topic: str = TOPIC, most_queued: int = MOST_QUEUED):
        zmq, msgspec = _packages()
        self.dropped = self.sent = 0
        self._encode = msgspec.msgpack.Encoder().encode
        self._zmq = zmq
        self._topic = topic.encode()
        self._page_size = 0
        self._next = 0
        self._most_queued = most_queued
        self._queue: queue.SimpleQueue[tuple[int, float, Sequence[NativeEvent]] | None] = queue.SimpleQueue()
        self._kept: deque[tuple[int, bytes]] = deque()
        self._kept_bytes = 0
        self._kept_lock = threading.Lock()
        self._stopping = threading.Event()
        self._context = zmq.Context()
        self._threads: list[threading.Thread] = []
        try:
            limit = {zmq.SNDHWM: SUBSCRIBER_LIMIT}
            self._publisher = self._socket(zmq.PUB, endpoint, limit, bind=_is_bound(endpoint))
            # A slow client of the replay is waited for: nothing is dropped without a word.
            waiting = {zmq.ROUTER_MANDATORY: 1, zmq.SNDTIMEO: SEND_MILLISECONDS}
            self._replayer = None if replay is None else self._socket(zmq.ROUTER, replay, waiting, bind=True)
        except BaseException:
            self._context.destroy(linger=0)
            raise

    @property
    def endpoints(self) -> tuple[str, str | None]:
        """Addresses as ZeroMQ has them, with the port that it chose for ``*``: of the events and of the replay."""
        last = self._zmq.LAST_ENDPOINT
        found = [None if s is None else str(s.getsockopt_string(last)) for s in (self._publisher, self._replayer)]
        return str(found[0]), found[1]

    def begin(self, page_size: int) -> None:
        """Pages hold ``page_size`` tokens. Subscribers are told to forget what an earlier process had."""
        self._page_size = page_size
        targets = [self._publish] if self._replayer is None else [self._publish, self._answer]
        for target in targets:
            thread = threading.Thread(target=target, name=f"tokenspeed-kv-events{target.__name__}", daemon=True)
            self._threads.append(thread)
            thread.start()
        self.put([("cleared",)])

    def put(self, events: Sequence[NativeEvent]) -> None:
        """Send what ``take_events`` gave. The number is taken here, so that what is dropped leaves a gap."""
        number, self._next = self._next, self._next + 1
        if self._queue.qsize() >= self._most_queued:
            self.dropped += len(events)
        else:
            self._queue.put((number, time.time(), events))

    def close(self) -> None:
        """Send what is queued and free the addresses. The engine must have stopped."""
        self._queue.put(None)
        self._stopping.set()
        for thread in self._threads:
            thread.join()
        self._context.destroy(linger=LINGER_MILLISECONDS)

    def __enter__(self) -> KvEventPublisher:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _socket(self, kind: int, address: str, options: Mapping[int, int], *, bind: bool) -> Any:
        zmq = self._zmq
        hint = "write tcp://*:PORT to let subscribers connect, or tcp://HOST:PORT to connect to one"
        if (wrong := _wrong_with(address)) is not None:
            raise UsageError(f"{address!r} is no address for KV events: {wrong}", hint=hint)
        socket = self._context.socket(kind)
        for option, value in {zmq.IPV6: int("[" in address), **options}.items():
            socket.setsockopt(option, value)
        try:
            if bind:
                socket.bind(address)
            else:
                socket.connect(address)
        except zmq.ZMQError as e:
            if e.errno in (zmq.EADDRINUSE, zmq.EADDRNOTAVAIL):
                taken = "choose another port, or stop what listens there"
                raise ResourceError(f"cannot publish KV events at {address}: {e.strerror}", hint=taken) from None
            raise UsageError(f"{address!r} is no address for KV events: {e.strerror}", hint=hint) from None
        return socket

    # -- on the publisher's thread -----------------------------------------------------------------------

    def _publish(self) -> None:
        while (item := self._queue.get()) is not None:
            number, at, events = item
            batch = self._encode([at, wire_events(events, self._page_size), RANK])
            self._keep(number, batch)
            self._publisher.send_multipart((self._topic, number.to_bytes(8, "big"), batch))
            self.sent += 1

    def _keep(self, number: int, batch: bytes) -> None:
        with self._kept_lock:
            self._kept.append((number, batch))
            self._kept_bytes += len(batch)
            while len(self._kept) > MOST_KEPT or (self._kept_bytes > MOST_KEPT_BYTES and len(self._kept) > 1):
                self._kept_bytes -= len(self._kept.popleft()[1])

    # -- on the replayer's thread ------------------------------------------------------------------------

    def _answer(self) -> None:
        assert self._replayer is not None
        while not self._stopping.is_set():
            if self._replayer.poll(POLL_MILLISECONDS):
                parts = self._replayer.recv_multipart()
                if len(parts) == 3 and len(parts[2]) == 8:
                    self._replay(parts[0], int.from_bytes(parts[2], "big"))
                else:
                    _log.warning(
                        "a replay request of %d parts: need an empty one and a number of 8 bytes", len(parts) - 1
                    )

    def _replay(self, client: bytes, first: int) -> None:
        assert self._replayer is not None
        with self._kept_lock:
            kept = [(number, batch) for number, batch in self._kept if number >= first]
        try:
            for number, batch in kept:
                if self._stopping.is_set():
                    return
                self._replayer.send_multipart((client, b"", number.to_bytes(8, "big"), batch))
            self._replayer.send_multipart((client, b"", END, b""))
        except self._zmq.ZMQError as e:  # it has gone, or reads nothing: it may ask again
            _log.warning("a replay of KV events ended early: %s", e.strerror)


def _is_bound(endpoint: str) -> bool:
    return endpoint.startswith(("ipc://", "inproc://")) or any(host in endpoint for host in ("*", "0.0.0.0", "[::]"))


def _wrong_with(address: str) -> str | None:
    """What ZeroMQ takes and should not: it cuts a port to 16 bits, and takes digits with anything before or behind."""
    if not address.startswith("tcp://"):
        return None
    match = _TCP.fullmatch(address)
    if match is None:
        return "need a host and a port"
    port = match[1] or match[2]
    if port != "*" and int(port) > 65535:
        return f"need a port up to 65535, have {port}"
    return None


def _packages() -> tuple[Any, Any]:
    try:
        import msgspec
        import zmq
    except ModuleNotFoundError as e:
        raise UsageError(
            f"KV events need the package {e.name!r}, which is not installed",
            hint="install it with `pip install 'tokenspeed[kv-events]'`",
        ) from None
    return zmq, msgspec
