"""The picture of a trace: what goes into it. Drawing needs matplotlib, which tests do without."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

import pytest

from tokenspeed.runtime.trace import Trace

SCRIPT = Path(__file__).resolve().parent.parent / "benchmarks" / "trace_picture.py"
arrange = runpy.run_path(str(SCRIPT))["arrange"]


def span(thread: int, name: str, start: float, end: float) -> dict[str, Any]:
    """Times in milliseconds."""
    return {"ph": "X", "pid": 1, "tid": thread, "name": name, "ts": start * 1e3, "dur": (end - start) * 1e3}


def mark(name: str, at: float) -> dict[str, Any]:
    return {"ph": "i", "pid": 1, "tid": 1, "name": name, "ts": at * 1e3, "s": "p"}


def test_a_lane_a_thread_and_nested_spans() -> None:
    events = [
        {"ph": "M", "name": "thread_name", "pid": 1, "tid": 7, "args": {"name": "loader"}},
        span(7, "open", 11, 15),
        span(7, "load linear_4f2a", 20, 30),
        span(7, "load", 10, 40),
        span(7, "after", 40, 50),
        span(3, "interpreter, command line", 0, 9),
        span(7, "too short to be seen", 41, 41.1),
        span(7, "beyond", 140, 150),
        span(9, "short, but alone", 60, 60.01),
        mark("ready", 80),
        mark("first token", 100),
        mark("later", 130),
    ]
    picture = arrange({"traceEvents": events})
    assert picture.until == pytest.approx(104)
    assert [lane.name for lane in picture.lanes] == ["thread 3", "loader", "thread 9"]
    loader = picture.lanes[1]
    assert [(s.name, s.start, s.end, s.depth) for s in loader.spans] == [
        ("load", 10, 40, 0), ("open", 11, 15, 1), ("load linear_4f2a", 20, 30, 1), ("after", 40, 50, 0),
    ]  # fmt: skip
    assert loader.depth == 2 and [s.kind for s in loader.spans] == ["load", "open", "load", "after"]
    assert [s.name for s in picture.lanes[2].spans] == ["short, but alone"]
    assert picture.marks == (("ready", 80), ("first token", 100))
    assert arrange({"traceEvents": events}, 35).lanes[1].spans[0].end == 35


def test_a_real_trace_fits() -> None:
    trace = Trace()
    with trace.span("outer"), trace.span("inner"):
        pass
    trace.add("on a thread that has ended", trace.exec_time, trace.exec_time + 0.5, track=99)
    picture = arrange(trace.to_json())
    assert {lane.name for lane in picture.lanes} == {"MainThread", "driver"}
    with pytest.raises(ValueError, match="no spans"):
        arrange({"traceEvents": []})
