"""KV events as routers read them: bytes of the wire, a subscriber, the replay, and that nothing blocks the engine."""

from __future__ import annotations

import builtins
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq

import tokenspeed
from tokenspeed import SamplingParams
from tokenspeed.cli import main
from tokenspeed.errors import ResourceError, UsageError
from tokenspeed.runtime import kv_events
from tokenspeed.runtime.kv_events import END, KvEventPublisher, wire_events
from tokenspeed.runtime.loader import LoadOptions
from tokenspeed.runtime.request import RequestOptions

PAGE = 4


def stored(page: int, parent: int | None, *tokens: int, key: str = "") -> tuple[Any, ...]:
    return ("stored", page, parent, key, list(tokens))


# ---- what vLLM's subscribers decode with; the fields and their order are those of its kv_events.py -------------------


class Batch(msgspec.Struct, array_like=True):
    ts: float
    events: list[Stored | Removed | Cleared]
    data_parallel_rank: int | None = None


class Stored(msgspec.Struct, array_like=True, tag="BlockStored"):
    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: list[tuple[Any, ...] | None] | None = None


class Removed(msgspec.Struct, array_like=True, tag="BlockRemoved"):
    block_hashes: list[int]
    medium: str | None


class Cleared(msgspec.Struct, array_like=True, tag="AllBlocksCleared"):
    pass


class EarlyBatch(msgspec.Struct, array_like=True):
    ts: float
    events: list[EarlyStored | EarlyRemoved | Cleared]


class EarlyStored(msgspec.Struct, array_like=True, tag="BlockStored"):
    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None


class EarlyRemoved(msgspec.Struct, array_like=True, tag="BlockRemoved"):
    block_hashes: list[int]


# ---- the wire -------------------------------------------------------------------------------------------------


def test_pages_of_one_prefix_are_one_event() -> None:
    events = [
        stored(11, None, 1, 2, 3, 4),
        stored(12, 11, 5, 6, 7, 8),
        stored(13, 11, 9, 9, 9, 9),  # another child of 11
        stored(21, None, 1, 2, 3, 4, key="a"),
        stored(22, 21, 5, 6, 7, 8, key="a"),
        ("removed", 12),
        ("removed", 13),
        stored(14, 13, 0, 0, 0, 0),
        ("cleared",),
    ]
    assert wire_events(events, PAGE) == [
        ["BlockStored", [11, 12], None, [1, 2, 3, 4, 5, 6, 7, 8], 4, None, "GPU", None],
        ["BlockStored", [13], 11, [9, 9, 9, 9], 4, None, "GPU", None],
        ["BlockStored", [21, 22], None, [1, 2, 3, 4, 5, 6, 7, 8], 4, None, "GPU", None, [["a"], ["a"]]],
        ["BlockRemoved", [12, 13], "GPU"],
        ["BlockStored", [14], 13, [0, 0, 0, 0], 4, None, "GPU", None],
        ["AllBlocksCleared"],
    ]
    assert wire_events([], PAGE) == []


class Subscriber:
    """A router: it subscribes, and asks for what it missed."""

    def __init__(self, publisher: KvEventPublisher, topic: str = "kv-events"):
        self.context = zmq.Context()
        events, replay = publisher.endpoints
        self.events = self.context.socket(zmq.SUB)
        self.events.setsockopt_string(zmq.SUBSCRIBE, topic)
        self.events.connect(events)
        self.replay = self.context.socket(zmq.DEALER)
        if replay is not None:
            self.replay.connect(replay)

    def next(self, milliseconds: int = 5000) -> tuple[int, bytes]:
        assert self.events.poll(milliseconds)
        topic, number, batch = self.events.recv_multipart()
        assert topic == b"kv-events" and len(number) == 8
        return int.from_bytes(number, "big"), batch

    def replayed(self, first: int) -> list[tuple[int, bytes]]:
        self.replay.send_multipart([b"", first.to_bytes(8, "big")])
        found = []
        while True:
            assert self.replay.poll(5000)
            empty, number, batch = self.replay.recv_multipart()
            assert empty == b""
            if number == END:
                assert batch == b""
                return found
            found.append((int.from_bytes(number, "big"), batch))


@pytest.fixture
def publisher() -> Iterator[KvEventPublisher]:
    with KvEventPublisher("tcp://*:*", replay="tcp://127.0.0.1:*") as publisher:
        yield publisher


@pytest.fixture
def subscriber(publisher: KvEventPublisher) -> Iterator[Subscriber]:
    subscriber = Subscriber(publisher)
    yield subscriber
    subscriber.context.destroy(linger=0)


def settle(publisher: KvEventPublisher, sent: int) -> None:
    deadline = time.monotonic() + 5
    while publisher.sent < sent and time.monotonic() < deadline:
        time.sleep(0.002)
    assert publisher.sent == sent


def test_the_bytes_of_a_batch(
    publisher: KvEventPublisher, subscriber: Subscriber, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kv_events.time, "time", lambda: 1.5)
    publisher.begin(PAGE)
    publisher.put([stored(2**64 - 1, None, 1, 2, 300, 70000), stored(5, 2**64 - 1, 0, 0, 0, 0)])
    publisher.put([("removed", 5)])
    settle(publisher, 3)
    time_ = b"\xcb\x3f\xf8\x00\x00\x00\x00\x00\x00"  # float64 1.5
    batches = subscriber.replayed(0)
    assert batches[0] == (0, b"\x93" + time_ + b"\x91\x91\xb0AllBlocksCleared\x00")
    hashes = b"\x92\xcf" + b"\xff" * 8 + b"\x05"
    tokens = b"\x98\x01\x02\xcd\x01\x2c\xce\x00\x01\x11\x70\x00\x00\x00\x00"
    event = b"\x98\xabBlockStored" + hashes + b"\xc0" + tokens + b"\x04\xc0\xa3GPU\xc0"
    assert batches[1] == (1, b"\x93" + time_ + b"\x91" + event + b"\x00")
    assert batches[2] == (2, b"\x93" + time_ + b"\x91\x93\xacBlockRemoved\x91\x05\xa3GPU\x00")


def test_subscribers_of_every_version_decode_it() -> None:
    events = [stored(1, None, 1, 2, 3, 4, key="salt"), ("removed", 1), ("cleared",)]
    raw = msgspec.msgpack.encode([2.5, wire_events(events, PAGE), 0])
    new = msgspec.msgpack.decode(raw, type=Batch)
    assert (new.ts, new.data_parallel_rank) == (2.5, 0)
    assert new.events == [
        Stored([1], None, [1, 2, 3, 4], PAGE, None, "GPU", None, [("salt",)]), Removed([1], "GPU"), Cleared(),
    ]  # fmt: skip
    early = msgspec.msgpack.decode(raw, type=EarlyBatch)
    assert early.events == [EarlyStored([1], None, [1, 2, 3, 4], PAGE, None), EarlyRemoved([1]), Cleared()]


def test_a_subscriber_gets_all_from_when_it_came_and_the_rest_by_replay(
    publisher: KvEventPublisher, subscriber: Subscriber
) -> None:
    publisher.begin(PAGE)
    publisher.put([stored(1, None, 1, 2, 3, 4)])
    settle(publisher, 2)
    live: list[tuple[int, bytes]] = []
    for number in range(200):  # the subscription takes a moment to be known
        publisher.put([("removed", number)])
        if subscriber.events.poll(20):
            live.append(subscriber.next())
            break
    first = live[0][0]
    for number in range(50):
        publisher.put([("removed", 1000 + number)])
    total = publisher._next  # more than one may have been on its way when the first came
    live += [subscriber.next() for _ in range(total - first - 1)]
    assert [number for number, _ in live] == list(range(first, total))
    missed = subscriber.replayed(0)
    assert [number for number, _ in missed] == list(range(total))
    assert missed[first:] == live
    assert subscriber.replayed(first + 40) == live[40:] and subscriber.replayed(10**6) == []


def test_a_request_socket_may_ask_as_well_and_nonsense_is_not_answered(publisher: KvEventPublisher) -> None:
    publisher.begin(PAGE)
    settle(publisher, 1)
    asking = Subscriber(publisher)
    asking.replay.send_multipart([b"", b"123"])
    asking.replay.send_multipart([b"nothing"])
    assert len(asking.replayed(0)) == 1  # the first answer is to this
    request = asking.context.socket(zmq.REQ)
    request.connect(str(publisher.endpoints[1]))
    request.send((0).to_bytes(8, "big"))
    assert request.poll(5000)
    number, batch = request.recv_multipart()
    assert number == bytes(8) and msgspec.msgpack.decode(batch)[1] == [["AllBlocksCleared"]]
    asking.context.destroy(linger=0)


def test_a_topic_keeps_other_topics_out() -> None:
    with KvEventPublisher("tcp://0.0.0.0:*", topic="kv@pod-1@model") as publisher:
        context = zmq.Context()
        sockets = []
        for topic in ("kv@pod-1", "other"):
            socket = context.socket(zmq.SUB)
            socket.setsockopt_string(zmq.SUBSCRIBE, topic)
            socket.connect(publisher.endpoints[0].replace("0.0.0.0", "127.0.0.1"))
            sockets.append(socket)
        assert publisher.endpoints[1] is None
        publisher.begin(PAGE)
        for _ in range(200):
            publisher.put([("removed", 1)])
            if sockets[0].poll(20):
                break
        assert sockets[0].recv_multipart()[0] == b"kv@pod-1@model" and not sockets[1].poll(20)
        context.destroy(linger=0)


def test_it_connects_to_a_router_that_binds() -> None:
    context = zmq.Context()
    router = context.socket(zmq.SUB)
    router.setsockopt_string(zmq.SUBSCRIBE, "")
    port = router.bind_to_random_port("tcp://127.0.0.1")
    with KvEventPublisher(f"tcp://127.0.0.1:{port}") as publisher:
        publisher.begin(PAGE)
        for _ in range(200):
            publisher.put([("removed", 1)])
            if router.poll(20):
                break
        assert router.recv_multipart()[0] == b"kv-events"
    context.destroy(linger=0)


# ---- bounds ---------------------------------------------------------------------------------------------------


def test_a_full_queue_leaves_a_gap_in_the_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    with KvEventPublisher("tcp://*:*", replay="tcp://127.0.0.1:*", most_queued=3) as publisher:
        started: list[Any] = []
        monkeypatch.setattr(kv_events.threading.Thread, "start", lambda thread: started.append(thread))
        publisher.begin(PAGE)  # number 0
        for number in range(1, 6):
            publisher.put([("removed", number)] * 2)
        assert publisher.dropped == 6  # numbers 3 to 5
        monkeypatch.undo()
        for thread in started:
            thread.start()
        settle(publisher, 3)
        publisher.put([("removed", 9)])
        settle(publisher, 4)
        subscriber = Subscriber(publisher)
        assert [number for number, _ in subscriber.replayed(0)] == [0, 1, 2, 6]
        subscriber.context.destroy(linger=0)


def test_what_is_kept_for_replay_is_bounded(
    publisher: KvEventPublisher, subscriber: Subscriber, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kv_events, "MOST_KEPT", 10)
    publisher.begin(PAGE)
    for number in range(1, 31):
        publisher.put([("removed", number)])
    settle(publisher, 31)
    assert [number for number, _ in subscriber.replayed(0)] == list(range(21, 31))
    monkeypatch.setattr(kv_events, "MOST_KEPT_BYTES", 2000)
    for number in range(31, 34):
        publisher.put([stored(number, None, *range(100_000, 100_160))])  # 5 bytes a token
    settle(publisher, 34)
    assert [number for number, _ in subscriber.replayed(0)] == [32, 33]


# ---- refusals -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("package", ["zmq", "msgspec"])
def test_a_missing_package_is_named(package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def missing(name: str, *rest: Any) -> Any:
        if name == package:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
        return real(name, *rest)

    monkeypatch.setattr(builtins, "__import__", missing)
    with pytest.raises(UsageError) as caught:
        KvEventPublisher("tcp://*:*")
    assert caught.value.message == f"KV events need the package {package!r}, which is not installed"
    assert caught.value.hint == "install it with `pip install 'tokenspeed[kv-events]'`"


def test_bad_addresses(capsys: pytest.CaptureFixture[str]) -> None:
    for address in ("nonsense", "tcp://*", "tcp://*:port", "carrier-pigeon://*:1", ""):
        with pytest.raises(UsageError, match="is no address for KV events"):
            KvEventPublisher(address)
    for address in (
        "tcp://*:65536",
        "tcp://*:-1",
        "tcp://*:1\n",
        "tcp://a:1:2",
        "tcp://*:" + "9" * 30,
        "tcp://[::]:70000",
    ):
        with pytest.raises(UsageError, match=r"is no address for KV events: need a (host and a )?port"):
            KvEventPublisher(address)
    KvEventPublisher("tcp://[::1]:5557").close()
    with KvEventPublisher("tcp://*:*") as publisher:
        port = publisher.endpoints[0].rpartition(":")[2]
        with pytest.raises(
            ResourceError, match=rf"cannot publish KV events at tcp://\*:{port}: Address already in use"
        ):
            KvEventPublisher(f"tcp://*:{port}")
        assert main(["serve", "nothing", "--kv-events", f"tcp://*:{port}"]) == 9
    capsys.readouterr()
    assert main(["serve", "nothing", "--kv-events-replay", "tcp://*:1"]) == 2
    assert "--kv-events-replay answers for --kv-events, which is not there" in capsys.readouterr().err
    assert main(["serve", "nothing", "--kv-events", "tcp://*:*", "--no-prefix-cache"]) == 2
    assert "--no-prefix-cache has none" in capsys.readouterr().err


# ---- a real engine --------------------------------------------------------------------------------------------


def test_a_router_knows_what_an_engine_has_cached(
    tiny_artifact: Path, publisher: KvEventPublisher, subscriber: Subscriber
) -> None:
    small = LoadOptions(kv_gib=0.2, threads=1)
    with tokenspeed.load(tiny_artifact, options=small, kv_events=publisher) as engine:
        page = engine.info.page_size
        prompt = [(11 * i) % 250 for i in range(2 * page + 5)]
        params = SamplingParams(max_tokens=page, ignore_eos=True, temperature=0)
        [output] = engine.generate(prompt, params)
        engine.generate(prompt, SamplingParams(max_tokens=1), scheduling=RequestOptions(cache_key="apart"))
        [again] = engine.generate(prompt, params)
        assert again.cached_tokens == 2 * page
    settle(publisher, publisher._next)
    events = [e for _, raw in subscriber.replayed(0) for e in msgspec.msgpack.decode(raw, type=Batch).events]
    assert isinstance(events[0], Cleared) and all(isinstance(e, Stored) for e in events[1:])
    pages: dict[str, dict[int, list[int]]] = {"": {}, "apart": {}}  # tokens of the whole prefix, by hash
    for event in events[1:]:
        assert isinstance(event, Stored) and event.block_size == page
        key = event.extra_keys[0][0] if event.extra_keys and event.extra_keys[0] else ""
        prefix = pages[key][event.parent_block_hash] if event.parent_block_hash is not None else []
        for i, one in enumerate(event.block_hashes):
            prefix = prefix + event.token_ids[i * page : (i + 1) * page]
            pages[key][one] = prefix
    whole = [*prompt, *output.token_ids]
    assert sorted(pages[""].values(), key=len) == [whole[: n * page] for n in (1, 2, 3)]
    assert sorted(pages["apart"].values(), key=len) == [whole[: n * page] for n in (1, 2)]
    assert not set(pages[""]) & set(pages["apart"])


def test_no_events_are_recorded_when_nobody_publishes(tiny_artifact: Path) -> None:
    with tokenspeed.load(tiny_artifact, options=LoadOptions(kv_gib=0.2, threads=1)) as engine:
        engine.generate([1] * 200, SamplingParams(max_tokens=2))
        assert engine.stats().scheduler["computed_tokens"] == 200 and engine._scheduler.take_events() == []
