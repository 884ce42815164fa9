"""Traces and generators of `tokenspeed simulate`: what a line may say, what hostile lines get, equal seeds."""

from __future__ import annotations

import io
import json
import math
import statistics
from collections import defaultdict
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tokenspeed.errors import UsageError
from tokenspeed.simulate.generate import KINDS, Draw, generate, with_parameters
from tokenspeed.simulate.trace import (
    MOST_ID,
    MOST_LINE_BYTES,
    MOST_TOKENS,
    TraceError,
    TraceRequest,
    parse_line,
    read_trace,
    write_trace,
)

PUBLIC = b'{"timestamp": 27482, "input_length": 6955, "output_length": 52, "hash_ids": [46, 47, 48, 49, 50, 51, 52, 53, 54, 55, 56, 57, 2353, 2354]}\n'  # noqa: E501


def line(**fields: Any) -> bytes:
    whole = {"timestamp": 5, "input_length": 700, "output_length": 3, "hash_ids": [1, 2]} | fields
    return json.dumps({name: value for name, value in whole.items() if value is not ...}).encode()


def test_a_line_of_a_public_trace() -> None:
    request = parse_line(PUBLIC, 512)
    assert request is not None
    assert (request.timestamp, request.input_length, request.output_length) == (27482, 6955, 52)
    assert len(request.hash_ids) == 14 and request.hash_ids[0] == 46
    assert (request.priority, request.tenant, request.deadline, request.session) == (0, "", None, "")


def test_optional_fields_and_unknown_ones() -> None:
    request = parse_line(
        line(priority=3, tenant="acme", deadline=1500.5, session_id=17, delay=250, chat_id=9, output_hash_ids=[]), 512
    )
    assert request == TraceRequest(5, 700, 3, (1, 2), (), 3, "acme", 1500.5, "17", 250)
    assert parse_line(line(hash_ids=..., tenant=None, session=None, deadline=None), 512) == TraceRequest(5, 700, 3)
    assert parse_line(b" \r\n", 512) is None


def test_a_later_turn_may_leave_its_timestamp_out() -> None:
    request = parse_line(line(timestamp=..., session="a", delay=3), 512, before=12.5)
    assert request is not None and request.timestamp == 12.5
    with pytest.raises(ValueError, match="need the field timestamp"):
        parse_line(line(timestamp=..., session="a", delay=3), 512)


REFUSED: list[tuple[bytes, str]] = [
    (b"{", "need one JSON object: Expecting property name"),
    (b"[1]", r"need a JSON object, have \[1\]"),
    (b"nonsense", "need one JSON object: Expecting value at column 1"),
    (PUBLIC.strip() + PUBLIC, "need one JSON object: Extra data"),
    (b'{"timestamp": "\xff"}', "need UTF-8, have byte 0xff at column 16"),
    (b"[" * 100_000, "brackets nested too deep"),
    (b'{"timestamp": ' + b"9" * 5000 + b"}", "a number of too many digits"),
    (b" " * (MOST_LINE_BYTES + 1), f"need at most {MOST_LINE_BYTES} bytes"),
    (b"{}", "need the field input_length, have none"),
    (line(input_length=...), "need the field input_length, have 'timestamp', 'output_length', 'hash_ids'"),
    (line(input_length=0), f"input_length: need a whole number from 1 to {MOST_TOKENS}, have 0"),
    (line(input_length=True), "input_length: need a whole number from 1 to .* have True"),
    (line(output_length=0), "output_length: need a whole number from 1 to .* have 0"),
    (line(output_length=2.5), "output_length: need a whole number .* have 2.5"),
    (line(input_length=MOST_TOKENS, hash_ids=[]), f"need at most {MOST_TOKENS} tokens in all, have {MOST_TOKENS + 3}"),
    (line(timestamp=-1), "timestamp: need milliseconds from 0 to 1e.12, have -1"),
    (line(timestamp=math.nan), "timestamp: need milliseconds from 0 to 1e.12, have nan"),
    (line(timestamp=1e300), "timestamp: need milliseconds from 0 to 1e.12, have 1e.300"),
    (line(timestamp=False), "timestamp: need milliseconds from 0 to 1e.12, have False"),
    (line(timestamp="5"), "timestamp: need milliseconds from 0 to 1e.12, have '5'"),
    (line(timestamp=4), "need timestamps that never fall, have 4 after 5"),
    (line(hash_ids=7), "hash_ids: need a list of whole numbers, have 7"),
    (line(hash_ids=[1, -2]), r"hash_ids: need whole numbers from 0 to 2\^63 - 1, have -2"),
    (line(hash_ids=[1, MOST_ID + 1]), "hash_ids: need whole numbers"),
    (line(hash_ids=[1, 10**100]), "hash_ids: need whole numbers .* have a number of too many digits"),
    (line(hash_ids=[1, [2]]), r"hash_ids: need whole numbers .* have \[2\]"),
    (line(hash_ids=[1, 2, 3]), "hash_ids: need 2 for 700 tokens in blocks of 512, have 3"),
    (line(input_length=2000, hash_ids=[1, 2]), "hash_ids: need 4 for 2000 tokens in blocks of 512, have 2"),
    (line(output_hash_ids=[9]), "output_hash_ids: need at most 0, have 1"),
    (line(hash_ids=[1], output_length=900, output_hash_ids=[9]), "output_hash_ids: need 2 hash_ids before them"),
    (line(priority=10), "priority: need a whole number from 0 to 9, have 10"),
    (line(priority="high"), "priority: need a whole number from 0 to 9, have 'high'"),
    (line(tenant="a\nb"), r"tenant: need a printable text of at most 256 characters, have 'a\\nb'"),
    (line(tenant="\ud800"), "tenant: need a printable text"),
    (line(session="x" * 257), "session: need a printable text"),
    (line(delay=3), "need a session beside delay, have none"),
    (line(deadline=-2), "deadline: need milliseconds from 0"),
]


@pytest.mark.parametrize(("data", "text"), REFUSED, ids=[text[:40] for _, text in REFUSED])
def test_hostile_lines_name_the_file_and_the_line(tmp_path: Path, data: bytes, text: str) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_bytes(line() + b"\n\n" + data + (b"\n" if data[-1:] != b"\n" else b""))
    with pytest.raises(TraceError, match=text) as refused:
        list(read_trace(path))
    assert refused.value.message.startswith(f"{path}, line 3: ") and refused.value.hint
    assert refused.value.message.isascii() and len(refused.value.message) < 400 + len(str(path))


def test_block_sizes() -> None:
    assert parse_line(line(input_length=64, hash_ids=[1, 2, 3, 4]), 16) is not None
    assert parse_line(line(input_length=70, hash_ids=[1, 2, 3, 4]), 16) is not None  # without the last, short block
    with pytest.raises(ValueError, match="need 1 for 64 tokens") as refused:
        parse_line(line(input_length=64, hash_ids=[1, 2, 3, 4]), 512)
    assert "--block-tokens" in getattr(refused.value, "hint", "")


requests = st.builds(
    TraceRequest,
    st.one_of(st.integers(0, 10**9), st.floats(0, 1e9)),
    st.integers(1, 2000),
    st.integers(1, 5000),
    tenant=st.sampled_from(["", "acme", "ümlaut", "7"]),
    priority=st.integers(0, 9),
    deadline=st.one_of(st.none(), st.floats(0, 1e9)),
)


@given(st.lists(requests, max_size=6))
def test_what_is_written_is_read_back(wanted: list[TraceRequest]) -> None:
    wanted.sort(key=lambda request: request.timestamp)
    out = io.StringIO()
    assert write_trace(out, wanted) == len(wanted)
    read = [parse_line(text.encode(), 512) for text in out.getvalue().splitlines()]
    assert read == wanted


# ---- generators -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_generated_traces_are_traces(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    wanted = list(generate(KINDS[kind], num_requests=1500, seed=3, rate=20))
    with path.open("w") as file:
        assert write_trace(file, wanted) == 1500
    assert list(read_trace(path)) == wanted
    assert list(generate(KINDS[kind], num_requests=1500, seed=3, rate=20)) == wanted
    assert list(generate(KINDS[kind], num_requests=1500, seed=4, rate=20)) != wanted
    assert list(generate(KINDS[kind], num_requests=700, seed=3, rate=20)) == wanted[:700]


@pytest.mark.parametrize("kind", ["agentic", "chat", "rl-rollout"])
def test_the_rate_is_the_one_asked_for(kind: str) -> None:
    """Over a time that is long against a conversation: before that the first ones are still at their beginning."""
    made = list(generate(KINDS[kind], num_requests=40_000, seed=1, rate=50))
    late = made[20_000:]
    seconds = (late[-1].timestamp - late[0].timestamp) / 1e3
    assert len(late) / seconds == pytest.approx(50, rel=0.15)


def test_sessions_grow_and_keep_their_blocks() -> None:
    sessions: dict[str, list[TraceRequest]] = defaultdict(list)
    for request in generate(KINDS["agentic"], num_requests=4000, seed=5, rate=10):
        sessions[request.session].append(request)
    assert statistics.mean(map(len, sessions.values())) > 4
    for turns in sessions.values():
        assert turns[0].delay is None
        for earlier, later in pairwise(turns):
            assert later.delay is not None and later.delay > 0
            assert later.timestamp >= earlier.timestamp + later.delay
            assert later.input_length > earlier.input_length + earlier.output_length
            known = earlier.hash_ids + earlier.output_hash_ids
            assert later.hash_ids[: len(known)] == known
    firsts = {turns[0].hash_ids[:8] for turns in sessions.values()}  # 4096 tokens of system prompt
    assert len(firsts) == 4
    own = [turns[0].hash_ids[8] for turns in sessions.values()]
    assert len(set(own)) == len(own)


def test_a_system_prompt_that_ends_within_a_block_shares_its_whole_blocks() -> None:
    traffic = with_parameters(KINDS["agentic"], {"system-tokens": "600", "system-prompts": "1", "turns": "1"})
    made = list(generate(traffic, num_requests=50, seed=0))
    assert len({r.hash_ids[0] for r in made}) == 1 and len({r.hash_ids[1] for r in made}) == 50
    fine = list(generate(traffic, num_requests=50, seed=0, block_tokens=64))
    assert len({r.hash_ids[:9] for r in fine}) == 1 and len({r.hash_ids[9] for r in fine}) == 50


def test_rollouts_come_in_bursts_with_a_heavy_tail() -> None:
    traffic = with_parameters(KINDS["rl-rollout"], {"samples": "8", "prompts": "4", "epochs": "2"})
    made = list(generate(traffic, num_requests=320, seed=2, rate=16))
    assert sorted({r.timestamp for r in made}) == [2000 * burst for burst in range(10)]
    assert [len({r.hash_ids for r in made[i : i + 32]}) for i in range(0, 320, 32)] == [4] * 10
    assert len({r.hash_ids for r in made}) == 20
    lengths = sorted(r.output_length for r in generate(KINDS["rl-rollout"], num_requests=5000, seed=2, rate=16))
    assert lengths[2500] == pytest.approx(1200, rel=0.1) and lengths[-5] > 10 * lengths[2500]


def test_batches_arrive_at_once() -> None:
    made = list(generate(KINDS["batch"], num_requests=300, seed=0))
    assert {r.timestamp for r in made} == {0} and len({r.hash_ids[:2] for r in made}) == 1


def test_draws_have_the_shapes_that_they_promise() -> None:
    draw = Draw(7)
    assert statistics.mean(draw.exponential(3.0) for _ in range(20_000)) == pytest.approx(3.0, rel=0.05)
    values = [math.log(draw.lognormal(100, 0.5)) for _ in range(20_000)]
    assert statistics.mean(values) == pytest.approx(math.log(100), abs=0.02)
    assert statistics.stdev(values) == pytest.approx(0.5, rel=0.03)
    assert statistics.mean(draw.turns(12) for _ in range(20_000)) == pytest.approx(12, rel=0.05)
    assert draw.turns(1) == 1
    drawn = [draw.zipf(4) for _ in range(20_000)]
    assert drawn.count(0) / drawn.count(3) == pytest.approx(4, rel=0.1) and set(drawn) == {0, 1, 2, 3}


@pytest.mark.parametrize(
    ("kind", "given", "text"),
    [
        ("agentic", {"colour": "1"}, "agentic has no parameter 'colour'"),
        ("chat", {"turns": "many"}, "turns: need a number from 1 to 1e.09, have 'many'"),
        ("chat", {"turns": "nan"}, "turns: need a number from 1"),
        ("chat", {"system-tokens": "1.5"}, "system-tokens: need a whole number from 0 to 1.*, have '1.5'"),
        ("rl-rollout", {"samples": "0"}, "samples: need a whole number from 1"),
        ("rl-rollout", {"output-spread": "9"}, "output-spread: need a number from 0 to 8, have '9'"),
    ],
)
def test_bad_parameters(kind: str, given: dict[str, str], text: str) -> None:
    with pytest.raises(UsageError, match=text):
        with_parameters(KINDS[kind], given)


@pytest.mark.parametrize("wrong", [{"num_requests": 0}, {"rate": 0.0}, {"rate": math.nan}, {"block_tokens": 0}])
def test_bad_sizes(wrong: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match="need"):
        generate(KINDS["chat"], **({"num_requests": 5} | wrong))
