"""The scheduler's trace, from a real engine to what `tokenspeed explain-step` says; and files that are no trace."""

from __future__ import annotations

import itertools
import json
import re
import threading
from pathlib import Path
from typing import Any

import pytest
from tiny_artifact import write_checkpoint

import tokenspeed
from tokenspeed import SamplingParams
from tokenspeed.cli import main
from tokenspeed.compile.build import build
from tokenspeed.errors import ResourceError
from tokenspeed.json_check import check
from tokenspeed.runtime import scheduler_trace
from tokenspeed.runtime.loader import LoadOptions
from tokenspeed.runtime.request import FinishReason, RequestOptions
from tokenspeed.runtime.sampling import tenant_number
from tokenspeed.runtime.scheduler_trace import END, HEADER, STEP, SchedulerTrace, StepTimes
from tokenspeed.runtime.waiting import Place

PAGE = 32
SHARED = [(7 * i) % 250 for i in range(2 * PAGE)]
PROMPTS = [[*SHARED, *[i] * (10 + i)] for i in range(1, 7)]


@pytest.fixture(scope="module")
def traced(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, int]]:
    """A trace with preemptions and hits, and the scheduler's counters at its end."""
    folder = tmp_path_factory.mktemp("traced")
    write_checkpoint(folder / "tiny")
    limits = {"max_num_seqs": 4, "max_model_len": 512, "page_size": PAGE, "max_prefill_tokens": 128}
    build(folder / "tiny", folder / "artifact", dtype="float32", **limits)
    few = LoadOptions(kv_gib=0.00016, threads=1)  # a few pages more than the longest request has
    params = SamplingParams(max_tokens=250, ignore_eos=True, temperature=0)
    with (
        SchedulerTrace(folder / "trace") as trace,
        tokenspeed.load(folder / "artifact", options=few, scheduler_trace=trace) as engine,
    ):
        outputs = engine.generate(PROMPTS, params, scheduling=RequestOptions(priority=2, tenant="ann"))
        assert [o.finish_reason for o in outputs] == [FinishReason.LENGTH] * 6
        ended = threading.Event()
        late = RequestOptions(timeout=1e-6)
        engine.submit([1], SamplingParams(max_tokens=500, ignore_eos=True), lambda e: e.finish_reason and ended.set(),
                      options=late)  # fmt: skip
        assert ended.wait(10)
        engine.generate([9, 9], SamplingParams(max_tokens=2, ignore_eos=True))
        counters = {**engine.stats().scheduler, "steps": engine.stats().steps, "pages": engine.info.num_pages}
    assert counters["preemptions"] > 0, str(counters)
    return folder / "trace", counters


def lines_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def explain(capsys: pytest.CaptureFixture[str], *args: str | Path) -> str:
    capsys.readouterr()
    assert main(["explain-step", *map(str, args)]) == 0
    return capsys.readouterr().out


def explained(capsys: pytest.CaptureFixture[str], *args: str | Path) -> Any:
    return json.loads(explain(capsys, *args, "--json"))


def test_every_step_has_a_line_and_the_lines_add_up(traced: tuple[Path, dict[str, int]]) -> None:
    path, counters = traced
    header, *steps, end = lines_of(path)
    check(header, HEADER)
    check(end, END)
    for step in steps:
        check(step, STEP)
    assert header["limits"]["max_num_seqs"] == 4 and header["limits"]["num_pages"] == counters["pages"]
    assert end == {"end": True, "steps": counters["steps"], "dropped": 0, "submitted": [], "ended": []}
    assert [step["step"] for step in steps] == list(range(1, counters["steps"] + 1))
    assert all(a["at"] < b["at"] for a, b in itertools.pairwise(steps))
    assert sum(len(step["preempted"]) for step in steps) == counters["preemptions"]
    admitted = [item for step in steps for item in step["admitted"]]
    assert len(admitted) == counters["admissions"] == 7 + counters["preemptions"]
    firsts = [item for item in admitted if not item["resumed"]]
    assert sum(item["cached_tokens"] for item in firsts) == counters["cached_tokens"] > 0
    assert sum(step["prefill_tokens"] for step in steps) == counters["computed_tokens"]
    submitted = {item["request"]: item for step in steps for item in step["submitted"]}
    assert [submitted[i]["prompt_tokens"] for i in range(6)] == [len(prompt) for prompt in PROMPTS]
    assert {submitted[i]["priority"] for i in range(6)} == {2} and submitted[6]["priority"] == 0
    assert submitted[0]["tenant"] != submitted[6]["tenant"]
    ended = {item["request"]: item["reason"] for step in steps for item in step["ended"]}
    assert ended == {**dict.fromkeys(range(6), "length"), 6: "timeout", 7: "length"}
    drawn = [request for step in steps for request in step["drew"]]
    assert all(drawn.count(i) == 250 for i in range(6))


def test_a_summary(traced: tuple[Path, dict[str, int]], capsys: pytest.CaptureFixture[str]) -> None:
    path, counters = traced
    text = explain(capsys, path)
    assert f"steps      {counters['steps']}, from 1 to {counters['steps']}" in text
    assert "8 came, 7 were admitted; ended: 7 length, 1 timeout" in text
    assert f"{counters['preemptions']} preemption" in text and f"{counters['cached_tokens']} cached (" in text
    assert re.search(r"\d+ +\d+%  decodes: pages ran out for requests that decode", text)
    summary = explained(capsys, path)["summary"]
    assert (
        summary["cached_tokens"] == counters["cached_tokens"] and summary["prompt_tokens"] == counters["prompt_tokens"]
    )
    assert sum(summary["held"].values()) == counters["steps"] and summary["ended"] == {"length": 7, "timeout": 1}


def test_one_step(traced: tuple[Path, dict[str, int]], capsys: pytest.CaptureFixture[str]) -> None:
    path, _ = traced
    steps = lines_of(path)[1:-1]
    first = next(step for step in steps if step["preempted"])
    text = explain(capsys, path, "--step", str(first["step"]))
    assert text.startswith(f"step {first['step']} at {first['at']:.3f} s: {first['running']} running")
    for request in first["preempted"]:
        assert f"preempted  request {request}: no page was free for a request before it in line" in text
    hit = next(step for step in steps if any(a["cached_tokens"] and not a["resumed"] for a in step["admitted"]))
    text = explain(capsys, path, "--step", str(hit["step"]))
    assert re.search(r"admitted   request \d+: waited .*; \d+ of \d+ prompt tokens cached \(\d+%\)\n", text)
    assert explained(capsys, path, "--step", "1")["steps"][0]["submitted"] == steps[0]["submitted"]
    assert main(["explain-step", str(path), "--step", "999999"]) == 2
    assert capsys.readouterr().err.startswith("error: the trace has no step 999999\n")


def test_the_life_of_a_request(traced: tuple[Path, dict[str, int]], capsys: pytest.CaptureFixture[str]) -> None:
    path, _ = traced
    victim = next(step["preempted"][0] for step in lines_of(path)[1:-1] if step["preempted"])
    text = explain(capsys, path, "--request", str(victim))
    order = [
        "came before step",
        "admitted to step",
        "drew",
        "preempted by step",
        "resumed after preemption",
        "ended with",
    ]
    places = [text.index(words) for words in order]
    assert places == sorted(places) and f"{len(PROMPTS[victim])} prompt tokens, at most 250 to draw; priority 2" in text
    assert sum(map(int, re.findall(r"drew (\d+) tokens? in", text))) == 250
    assert "ended with 'timeout' before step" in explain(capsys, path, "--request", "6")
    assert main(["explain-step", str(path), "--request", "77"]) == 2
    assert "the trace says nothing of request 77" in capsys.readouterr().err


def test_slowest_and_held(traced: tuple[Path, dict[str, int]], capsys: pytest.CaptureFixture[str]) -> None:
    path, _ = traced
    steps = lines_of(path)[1:-1]
    slowest = explained(capsys, path, "--slowest", "3")["steps"]
    assert [s["run_seconds"] for s in slowest] == sorted((s["run_seconds"] for s in steps), reverse=True)[:3]
    assert explain(capsys, path, "--slowest", "2").count("\n  ran ") == 2
    held = [step for step in steps if step["held"] == "pages"]
    text = explain(capsys, path, "--held", "pages")
    assert held and text.count(" ran ") == len(held)
    assert text.splitlines()[-1].startswith(f"{len(held)} step") and "more pages than are free" in text


def test_a_trace_that_is_still_written(
    traced: tuple[Path, dict[str, int]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    raw = traced[0].read_bytes().splitlines(keepends=True)
    path = tmp_path / "cut"
    path.write_bytes(b"".join(raw[:5]))
    assert "the trace has no end: it is still being written" in explain(capsys, path)
    path.write_bytes(b"".join(raw[:5]) + raw[5][:40])
    assert "the trace ends within a line" in explain(capsys, path)
    assert main(["explain-step", str(path), "--step", "1"]) == 0
    path.write_bytes(raw[0])
    assert "no step ran" in explain(capsys, path)


@pytest.mark.parametrize(
    ("content", "error"),
    [
        (b"", "line 1 is not the header in JSON"),
        (b"\x00\xff\n", "line 1 is not the header in JSON"),
        (b"[1]\n", "is no trace of the scheduler"),
        (b'{"traceEvents": []}\n', "is no trace of the scheduler"),
        (b'{"format": "tokenspeed scheduler trace", "version": 9}\n', "has format version 9; this tokenspeed reads 1"),
        (b'{"format": "tokenspeed scheduler trace", "version": 1}\n', "line 1 lacks 'tokenspeed'"),
        (b"HEADER" + b"nonsense\n", "line 2 is not a step in JSON"),
        (b"HEADER" + b"[" * 100_000 + b"\n", "line 2 is not a step in JSON"),
        (b"HEADER" + b'{"step": "one"}\n', "line 2.step must be"),
        (b"HEADER" + b'{"end": true}\n', "line 2 lacks 'steps'"),
        (b"HEADER" + b'{"end": 1, "steps": 1}\n', "line 2.end must be true or false, not 1"),
    ],
)
def test_files_that_are_no_trace(
    traced: tuple[Path, dict[str, int]], tmp_path: Path, capsys: pytest.CaptureFixture[str], content: bytes, error: str
) -> None:
    path = tmp_path / "odd"
    path.write_bytes(content.replace(b"HEADER", traced[0].read_bytes().splitlines(keepends=True)[0]))
    assert main(["explain-step", str(path)]) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and error in captured.err.splitlines()[0], captured.err


def test_lines_without_end(
    traced: tuple[Path, dict[str, int]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr("tokenspeed.cli.explain_step.MOST_LINE_BYTES", 1 << 20)
    header = traced[0].read_bytes().splitlines(keepends=True)[0]
    path = tmp_path / "endless"
    for number, before in enumerate((b"", header), 1):
        path.write_bytes(before + b" " * ((1 << 20) + 1))
        assert main(["explain-step", str(path)]) == 2
        assert capsys.readouterr().err.startswith(f"error: {path}: line {number} has more than 1 MiB\n")


def test_words_of_a_hostile_trace_are_only_shown(
    traced: tuple[Path, dict[str, int]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    raw = lines_of(traced[0])
    raw[1]["held"] = "{0.__class__} {max_num_seqs}"
    path = tmp_path / "hostile"
    path.write_text("".join(json.dumps(line) + "\n" for line in (raw[0], raw[1])))
    assert "{0.__class__} {max_num_seqs}" in explain(capsys, path, "--step", "1")
    raw[0]["model"] = raw[1]["held"] = raw[1]["error"] = "\x1b[31mred"
    raw[1]["ended"] = [{"request": 0, "reason": "\x1b[31mred"}]
    path.write_text("".join(json.dumps(line) + "\n" for line in (raw[0], raw[1])))
    for choice in ((), ("--step", "1"), ("--request", "0")):
        text = explain(capsys, path, *choice)
        assert "\x1b" not in text and r"\x1b[31mred" in text


def test_numbers_out_of_all_bounds(
    traced: tuple[Path, dict[str, int]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    raw = lines_of(traced[0])
    raw[1]["admitted"][0]["waited_ns"] = 10**400
    path = tmp_path / "large"
    path.write_text("".join(json.dumps(line) + "\n" for line in (raw[0], raw[1])))
    for choice in ((), ("--step", "1"), ("--request", "0"), ("--slowest", "1")):
        assert main(["explain-step", str(path), *choice]) == 2
        assert "holds a number that is out of all bounds" in capsys.readouterr().err
    for file, reason in ((tmp_path / "none", "No such file or directory"), (tmp_path, "Is a directory")):
        assert main(["explain-step", str(file)]) == 2
        assert capsys.readouterr().err == f"error: cannot read {file}: {reason}\n"


# ---- the writer -----------------------------------------------------------------------------------------------

_COUNTS = dict.fromkeys((name for name, kind in STEP.items() if kind is int and name != "dropped?"), 0)
DECISION = {"now_ns": 5, **_COUNTS, "held": "slots", "admitted": [], "preempted": []}
TIMES = StepTimes(1.0, 1.1, 1.2, 1.5, 1.6)


def test_a_full_queue_drops_lines_and_says_how_many(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scheduler_trace, "WRITE_SECONDS", 60.0)  # the writer sleeps until it is woken to close
    with SchedulerTrace(tmp_path / "t", most_queued=3) as trace:
        trace.begin("m", "t", "a", {})
        trace.submitted(4, 1, 2, Place("", 0))
        for number in range(5):
            trace.step({**DECISION, "step": number}, TIMES, [(4, 11, None), (5, 12, "stop")])
        trace.ended(4, "abort")
        assert trace.dropped == 4
    _, first, second, end = lines_of(tmp_path / "t")
    assert (first["step"], first["dropped"], second["step"]) == (0, 4, 1) and "dropped" not in second
    assert first["submitted"] == [
        {"request": 4, "prompt_tokens": 1, "max_tokens": 2, "priority": 0, "tenant": tenant_number("")}
    ]
    assert first["drew"] == [4, 5]
    assert first["ended"] == [{"request": 5, "reason": "stop"}]
    assert (first["plan_seconds"], first["run_seconds"], first["commit_seconds"]) == (0.1, 0.3, 0.1)
    assert end == {"end": True, "steps": 2, "dropped": 4, "submitted": [], "ended": []}


def test_a_failed_step_says_why(tmp_path: Path) -> None:
    with SchedulerTrace(tmp_path / "t") as trace:
        trace.begin("m", "t", "a", {})
        trace.step({**DECISION, "step": 3}, TIMES, error="the device failed")
    _, step, _ = lines_of(tmp_path / "t")
    assert step["error"] == "the device failed" and step["drew"] == []


def test_a_full_disk_ends_the_trace_and_nothing_else(capsys: pytest.CaptureFixture[str]) -> None:
    with SchedulerTrace("/dev/full") as trace:
        trace.begin("m", "t", "a", {})
        for number in range(3):
            trace.step({**DECISION, "step": number}, TIMES)
    assert trace.dropped >= 1
    err = capsys.readouterr().err
    assert err == "the scheduler's trace ends: cannot write to /dev/full: No space left on device\n"


def test_a_file_that_cannot_be_made(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ResourceError, match=r"cannot write the scheduler's trace to .*: No such file or directory"):
        SchedulerTrace(tmp_path / "none" / "t")
    assert main(["serve", "nothing", "--trace-scheduler", str(tmp_path / "none" / "t")]) == 9
    assert "cannot write the scheduler's trace" in capsys.readouterr().err
