"""More than a server can do: everybody has an answer, nothing is lost, and all is free again afterwards.

The whole benchmark runs for a few seconds on a tiny model. What depends on this machine's speed is not asserted.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tiny_artifact import cli_environment, tiny, write_checkpoint

BENCHMARKS = str(Path(__file__).resolve().parent.parent / "benchmarks")
INFO = {"vocab_size": 283}


@pytest.fixture(scope="module")
def benchmark() -> Iterator[Any]:
    """The module benchmarks/overload.py."""
    sys.path.insert(0, BENCHMARKS)
    try:
        import overload

        yield overload
    finally:
        sys.path.remove(BENCHMARKS)


@pytest.fixture(scope="module")
def small_artifact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """4 sequences of 2048 positions: soon full."""
    from tokenspeed.compile.build import build

    folder = tmp_path_factory.mktemp("overload")
    checkpoint = write_checkpoint(folder / "tiny-llama", tiny(max_position_embeddings=2048))
    build(checkpoint, folder / "artifact", dtype="float32", max_num_seqs=4)
    return folder / "artifact"


WORK = {
    "prompt_tokens": (8, 40),
    "long_prompt_tokens": (200, 400),
    "reply_tokens": (200, 400),
    "leave_early_seconds": 0.05,
}


@pytest.fixture(scope="module")
def result(benchmark: Any, small_artifact: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    words = [str(small_artifact), "--seconds", "4", "--capacity-seconds", "1", "--warm-up", "5", "--period", "0.2"]
    words += ["--max-waiting", "8", "--kv-gib", "0.01", "--factor", "6", "--idle-seconds", "20", "--patience", "60"]
    words += ["--requests", str(tmp_path_factory.mktemp("records") / "requests.jsonl")]
    args = benchmark.parse([*words, "--tokenspeed", f"{sys.executable} -m tokenspeed"])
    with pytest.MonkeyPatch.context() as patch:
        for name, value in cli_environment().items():
            patch.setenv(name, value)
        found: dict[str, Any] = benchmark.run(args, benchmark.Workload(**WORK))
    found["lines"] = args.requests.read_text().splitlines()
    return found


def test_a_short_overload(result: dict[str, Any], benchmark: Any, capsys: pytest.CaptureFixture[str]) -> None:
    untimed = {one["name"]: one for one in result["verdicts"] if not one["timed"]}
    assert {name: one["found"] for name, one in untimed.items() if not one["holds"]} == {}
    assert set(untimed) == {
        "refused some, served some", "everybody answered", "refused politely", "memory flat", "queue bounded",
        "idle afterwards", "connections closed", "each ended once", "same answer as before",
        "nothing built while serving", "ends cleanly",
    }  # fmt: skip
    figures = result["figures"]
    assert sum(figures["outcomes"].values()) == figures["requests"] == len(result["lines"])
    assert figures["every_page_used_before"] and figures["most_running"] == 4
    assert {one["served_tokens"] > 0 for one in figures["tenants"].values()} == {True}
    benchmark.show(result, sys.stdout)
    assert "holds everybody answered: 0 not" in capsys.readouterr().out


# ---- the clients ----------------------------------------------------------------------------------------------

STREAM = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"


def chunk(token_ids: list[int], reason: str | None = None) -> bytes:
    return b"data: " + json.dumps({"choices": [{"token_ids": token_ids, "finish_reason": reason}]}).encode() + b"\n\n"


def stream(*events: bytes) -> bytes:
    return STREAM + b"".join(b"%x\r\n%s\r\n" % (len(event), event) for event in events)


def refusal(status: int, headers: str, code: str) -> bytes:
    body = json.dumps({"error": {"message": "no", "code": code}})
    return f"HTTP/1.1 {status} X\r\n{headers}content-length: {len(body)}\r\n\r\n{body}".encode()


DONE = b"data: [DONE]\n\n"
WHOLE = (chunk([5]), chunk([6, 7]), chunk([8], "length"))


@pytest.mark.parametrize(
    ("answer", "outcome", "error"),
    [
        (stream(*WHOLE, DONE), "served", None),
        (stream(b"".join(WHOLE) + DONE), "served", None),  # all events in one chunk
        (stream(WHOLE[0][:9], WHOLE[0][9:], *WHOLE[1:], DONE), "served", None),  # one event in two
        (stream(*WHOLE), "failed", "IncompleteReadError"),
        (stream(*WHOLE) + b"0\r\n\r\n", "failed", "the stream ended without [DONE]"),
        (stream(WHOLE[0], DONE), "failed", "finish reason None, 1 tokens"),
        (stream(*WHOLE[:2], chunk([8], "error"), DONE), "failed", "finish reason error, 4 tokens"),
        (stream(WHOLE[0], b'data: {"error": {"message": "it broke"}}\n\n', DONE), "failed", "it broke"),
        (refusal(429, "Retry-After: 3\r\n", "queue_full"), "refused", None),
        (refusal(503, "retry-after: 1\r\n", "unavailable"), "failed", '"code": "unavailable"'),
        (b"", "failed", "IncompleteReadError"),
        (b"nonsense\r\n\r\n", "failed", "IndexError"),
        (STREAM, "failed", "no answer in 0.3 s"),  # and nothing more, but the connection stays
    ],
)
def test_what_a_client_makes_of_an_answer(benchmark: Any, answer: bytes, outcome: str, error: str | None) -> None:
    record = asyncio.run(exchange_with(benchmark, answer, stay=answer == STREAM))
    assert record.outcome == outcome, record
    assert record.error is None if error is None else error in record.error
    if outcome == "served":
        assert record.tokens == [5, 6, 7, 8] and 0 < record.first_token <= record.total
        assert record.num_served_tokens == 14
    if outcome == "refused":
        assert (record.retry_after, record.code, record.num_served_tokens) == ("3", "queue_full", 0)


@pytest.mark.parametrize("leaves", [{"leave_after_tokens": 2}, {"leave_after_seconds": 0.2}])
def test_a_client_that_leaves(benchmark: Any, leaves: dict[str, Any]) -> None:
    record = asyncio.run(exchange_with(benchmark, stream(*WHOLE[:2]), stay=True, **leaves))
    assert (record.outcome, record.status, record.error, record.tokens) == ("left", 200, None, [5, 6, 7])


async def exchange_with(benchmark: Any, answer: bytes, *, stay: bool, **more: Any) -> Any:
    """What a client records that gets ``answer``, after which the connection is closed unless it shall ``stay``."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(answer)
        if stay:
            await reader.read()  # until the client has gone
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server:
        port = server.sockets[0].getsockname()[1]
        wire = benchmark.wire("GET", "/", "team")
        return await benchmark.exchange(port, benchmark.Request("team", 1, wire, 10, 4, **more), 0.3)


def test_requests_depend_on_the_seed_alone(benchmark: Any) -> None:
    def first(seed: str, **more: Any) -> list[Any]:
        return list(itertools.islice(benchmark.requests(benchmark.Workload(), seed, INFO, **more), 400))

    found = first("a")
    assert found == first("a") and found != first("b")
    shares = Counter(request.tenant for request in found)
    assert [name for name, _ in shares.most_common()] == ["greedy", "team", "app", "modest"]
    assert {request.priority for request in found} == {0, 1, 2}
    assert any(r.leave_after_tokens for r in found) and any(r.leave_after_seconds for r in found)
    assert not any(r.leave_after_tokens or r.leave_after_seconds for r in first("a", leavers=False))


# ---- the verdicts ---------------------------------------------------------------------------------------------


def finding(benchmark: Any) -> dict[str, Any]:
    """What a good server leaves: 28 served in 10 s at 36 tokens/s, 60 refused."""
    record, tenants = benchmark.Record, list(benchmark.TENANTS)
    common = {"outcome": "served", "status": 200, "first_token": 2.0, "finish_reason": "length"}
    records = [record(tenants[i % 4], i % 3, 10, 100 + i / 3, tokens=[1, 2], total=3.0, **common) for i in range(28)]
    records += [record("greedy", 0, 10, 100.0, "refused", 429, "4", "queue_full", total=0.01) for _ in range(60)]
    samples = [benchmark.Sample(100 + i, 500_000_000, 20, 4, 9, 8, 6, 2, 36 * i, 0.01) for i in range(12)]
    idle = benchmark.Sample(113.0, 500_000_000, 14, 0, 0, 0, 0, 9, 400, 0.01)
    closed = [record("team", 0, 10, 90.0, tokens=[1], total=1.0, **{**common, "first_token": 0.5})]
    return {
        "capacity": 3.0, "mean_tokens": 12.0, "closed": closed, "began": 100.0, "records": records,
        "late": [0.001], "samples": samples,
        "scrapes": [0.01], "idle_before": idle, "idle_after_seconds": 0.1, "after": idle, "same_answer": True,
        "ended": 29, "after_ready": {"compilations": 0}, "preemptions": 0, "every_page_used_before": True,
    }  # fmt: skip


def failing(benchmark: Any, found: dict[str, Any]) -> set[str]:
    args = benchmark.parse(["artifact", "--seconds", "10", "--max-waiting", "8", "--aging-seconds", "1"])
    return {one["name"] for one in benchmark.judge(found, benchmark.summary(found, args), args) if not one["holds"]}


def test_a_good_server_fails_nothing(benchmark: Any) -> None:
    assert failing(benchmark, finding(benchmark)) == set()


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({"ended": 28}, "each ended once"),
        ({"ended": 30}, "each ended once"),
        ({"ended": None}, "each ended once"),
        ({"same_answer": False}, "same answer as before"),
        ({"after_ready": {"compilations": 1}}, "nothing built while serving"),
        ({"after_ready": None}, "nothing built while serving"),
        ({"idle_after_seconds": None}, "idle afterwards"),
        ({"after": None}, "connections closed"),
        ({"capacity": 9.0}, "goes on serving"),
    ],
)
def test_a_verdict_on_the_whole_fails(benchmark: Any, changes: dict[str, Any], name: str) -> None:
    assert failing(benchmark, {**finding(benchmark), **changes}) == {name}


@pytest.mark.parametrize(
    ("index", "changes", "name"),
    [
        (30, {"retry_after": None}, "refused politely"),
        (30, {"retry_after": "0"}, "refused politely"),
        (30, {"retry_after": "soon"}, "refused politely"),
        (30, {"code": "rate_limit"}, "refused politely"),
        (30, {"total": 0.3}, "refused quickly"),
        (30, {"outcome": "failed", "status": 503}, "everybody answered"),
        (0, {"first_token": 6.0}, "waits bounded"),  # 1.5 * 8 / 3 + 1 + 0.5 seconds may class 0 wait
    ],
)
def test_one_bad_record_fails_a_verdict(benchmark: Any, index: int, changes: dict[str, Any], name: str) -> None:
    found = finding(benchmark)
    for key, value in changes.items():
        setattr(found["records"][index], key, value)
    assert failing(benchmark, found) == {name}


def test_verdicts_on_samples_and_shares(benchmark: Any) -> None:
    found = finding(benchmark)
    found["samples"][-1].resident_bytes += 26_000_000
    assert failing(benchmark, found) == {"memory flat"}
    found = finding(benchmark)
    found["samples"][3].num_queued = 9
    assert failing(benchmark, found) == {"queue bounded"}
    found = finding(benchmark)
    found["after"] = replace(found["after"], num_files=17)
    assert failing(benchmark, found) == {"connections closed"}
    found = finding(benchmark)
    for record in found["records"][:28]:
        record.tenant = "greedy" if record.tenant == "modest" else record.tenant
    found["records"] += [benchmark.Record("modest", 0, 10, 105.0, "refused", 429, "4", "queue_full")] * 20
    assert failing(benchmark, found) == {"fair shares"}
    found = finding(benchmark)
    found["records"] = found["records"][:28]
    assert failing(benchmark, found) == {"refused some, served some", "refused quickly", "overloaded"}


def test_tokens_of_requests(benchmark: Any) -> None:
    work = benchmark.Workload(long_share=0.25)
    found = [
        r.num_prompt_tokens + r.num_reply_tokens for r in itertools.islice(benchmark.requests(work, "a", INFO), 2000)
    ]
    assert sum(found) / len(found) == pytest.approx(work.mean_tokens, rel=0.1)


def test_shares_that_are_due() -> None:
    sys.path.insert(0, BENCHMARKS)
    from overload_verdicts import entitlements

    sys.path.remove(BENCHMARKS)
    assert entitlements({"a": 10, "b": 50, "c": 90}, 90) == {"a": 10, "b": 40, "c": 40}
    assert entitlements({"a": 10, "b": 50}, 1000) == {"a": 10, "b": 50}
    assert entitlements({"a": 0, "b": 0}, 0) == {"a": 0, "b": 0}
