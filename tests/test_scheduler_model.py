"""The C++ scheduler, through its Python binding, against a simple model (tests/scheduler_model.py)."""

from __future__ import annotations

import gc
import random
from array import array
from collections import Counter
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule
from scheduler_model import Harness, random_config, random_submit

from tokenspeed import _native
from tokenspeed.step import INPUTS

FORMATS = {"int32": "i", "int64": "q", "float32": "f", "uint64": "Q"}


class SchedulerMachine(RuleBasedStateMachine):
    """Any order of submit, plan, commit, fail, abort, preempt, expire and flush; ends by draining."""

    max_in_flight = 1

    @initialize(seed=st.integers(0, 10**6))
    def start(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.harness = Harness(random_config(self.rng, self.max_in_flight))

    @rule()
    def submit(self) -> None:
        random_submit(self.rng, self.harness)

    @rule()
    def plan(self) -> None:
        self.harness.plan()

    @precondition(lambda self: self.harness.flying)
    @rule()
    def commit(self) -> None:
        self.harness.commit()

    @rule(rounds=st.integers(1, 8))
    def run(self, rounds: int) -> None:
        for _ in range(rounds):
            self.harness.plan()
            if self.harness.flying:
                self.harness.commit()

    @precondition(lambda self: self.harness.flying)
    @rule()
    def fail(self) -> None:
        self.harness.fail()

    @precondition(lambda self: self.harness.next_id > 1)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        self.harness.abort(data.draw(st.integers(1, self.harness.next_id - 1)))

    @precondition(lambda self: self.harness.next_id > 1)
    @rule(data=st.data())
    def preempt(self, data: st.DataObject) -> None:
        self.harness.preempt(data.draw(st.integers(1, self.harness.next_id - 1)))

    @rule(ns=st.integers(0, 60))
    def wait(self, ns: int) -> None:
        self.harness.wait(ns)

    @rule()
    def flush(self) -> None:
        self.harness.scheduler.flush_prefixes()
        assert self.harness.scheduler.num_cached_pages == 0
        self.harness.check()

    def teardown(self) -> None:
        if hasattr(self, "harness"):
            self.harness.drain()


class DepthTwoMachine(SchedulerMachine):
    max_in_flight = 2


class DepthThreeMachine(SchedulerMachine):
    max_in_flight = 3


MACHINE_SETTINGS = settings(max_examples=60, stateful_step_count=40, deadline=None, derandomize=True, database=None)
TestDepthOne = SchedulerMachine.TestCase
TestDepthOne.settings = MACHINE_SETTINGS
TestDepthTwo = DepthTwoMachine.TestCase
TestDepthTwo.settings = MACHINE_SETTINGS


TestDepthThree = DepthThreeMachine.TestCase
TestDepthThree.settings = MACHINE_SETTINGS


@pytest.mark.parametrize("max_in_flight", [1, 2, 3])
def test_long_random_runs(max_in_flight: int) -> None:
    """Hundreds of requests through crowded pools; preemption, hits and every kind of end must occur."""
    seen: Counter[str] = Counter()
    for seed in range(40):
        rng = random.Random(seed)
        harness = Harness(random_config(rng, max_in_flight))
        for _ in range(300):
            action = rng.choices(["submit", "plan", "commit", "fail", "abort", "preempt"], [4, 10, 9, 0.2, 0.3, 0.2])[0]
            if action == "submit":
                random_submit(rng, harness)
            elif action == "plan":
                harness.plan()
            elif action in ("abort", "preempt") and harness.next_id > 1:
                getattr(harness, action)(rng.randrange(1, harness.next_id))
            elif harness.flying and action in ("commit", "fail"):
                getattr(harness, action)()
        harness.drain()
        seen.update(preemptions=harness.scheduler.num_preemptions, hits=harness.num_hits, restored=harness.num_restored)
        seen["hits_with_rows"] += harness.num_hits_with_rows
        counters = harness.scheduler.counters()
        assert counters["preemptions"] == harness.scheduler.num_preemptions
        assert counters["restored_tokens"] <= counters["cached_tokens"] <= counters["prompt_tokens"]
    assert seen["preemptions"] >= 30 and seen["hits"] >= 30 and seen["restored"] >= 3
    assert seen["hits_with_rows"] >= 3


def config(**changes: int) -> Any:
    sizes = {"max_num_seqs": 4, "max_prefill_tokens": 16, "max_logit_rows": 16, "max_model_len": 64, "page_size": 4}
    return _native.SchedulerConfig(**{**sizes, "num_pages": 32, "max_waiting": 8, **changes})


def params(**changes: Any) -> Any:
    sampling = {"temperature": 0.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "seed": 1}
    return _native.RequestParams(**{"max_new_tokens": 8, **sampling, **changes})


def test_arrays_are_read_only_buffers_of_the_declared_types() -> None:
    scheduler = _native.Scheduler(config())
    scheduler.submit(1, [5, 6, 7], params(seed=2**64 - 1))
    scheduler.submit(2, [8] * 20, params())
    step = scheduler.next_step()
    sizes = {"T": step.num_tokens, "S": step.num_seqs, "S+1": step.num_seqs + 1, "R": step.num_logit_rows, "P": 16}
    sizes |= {"A": 0, "A+1": 1, "B": 0, "M": 0, "W": 0}
    for tensor in INPUTS:
        view = getattr(step, tensor.name)
        length = 1
        for dim in tensor.shape:
            length *= sizes[dim] if isinstance(dim, str) else dim
        assert isinstance(view, memoryview) and view.readonly and view.ndim == 1
        assert (view.format, view.shape) == (FORMATS[tensor.dtype], (length,)), tensor.name
    assert step.seed[0] == 2**64 - 1
    with pytest.raises(TypeError):
        step.token_ids[0] = 1


def test_a_view_keeps_the_scheduler_alive_and_is_written_anew() -> None:
    scheduler = _native.Scheduler(config())
    scheduler.submit(1, [5, 6, 7], params(max_new_tokens=40))
    step = scheduler.next_step()
    view = step.token_ids
    assert view.tolist() == [5, 6, 7]
    scheduler.commit(step.id, array("i", [9]))
    assert scheduler.next_step() is step and step.token_ids.tolist() == [
        -1
    ]  # the same Step, which has another step now
    assert view.tolist()[0] == -1
    del step, scheduler
    gc.collect()
    assert view.tolist()[0] == -1


def test_steps_are_written_to_the_buffers_that_are_given() -> None:
    buffers = [bytearray(1 << 16) for _ in range(2)]
    offsets = [2048 * i for i in range(1 + len(INPUTS))]
    scheduler = _native.Scheduler(config(max_in_flight=2), [memoryview(b) for b in buffers], offsets)
    scheduler.submit(1, [5, 6, 7], params())
    first, second = scheduler.next_step(), scheduler.next_step()
    for step, tokens in ((first, [5, 6, 7]), (second, [-1])):
        ints = memoryview(buffers[step.id % 2]).cast("i")
        assert ints[:3].tolist() == [len(tokens), 1, 1] and ints[512 : 512 + len(tokens)].tolist() == tokens
    with pytest.raises(BufferError):  # while the scheduler lives, its buffers stay where they are
        buffers[0].extend(b"more")
    with pytest.raises(ValueError, match="need memory for each of max_in_flight 2 steps, have it for 1"):
        _native.Scheduler(config(max_in_flight=2), [memoryview(buffers[0])], offsets)
    with pytest.raises(ValueError, match="need 30 offsets, have 1"):
        _native.Scheduler(config(), [memoryview(buffers[0])], [0])


def test_a_step_explains_itself() -> None:
    scheduler = _native.Scheduler(config(num_host_pages=4))
    scheduler.submit(1, [5] * 20, params(), now_ns=100)
    scheduler.submit(2, [6], params(), now_ns=150)
    step = scheduler.next_step(now_ns=400)
    admitted = {"request": 1, "cached_tokens": 0, "restored_tokens": 0, "waited_ns": 300, "resumed": False}
    assert step.decision == {
        "step": 1,
        "now_ns": 400,
        "decodes": 0,
        "chunks": 1,
        "decode_tokens": 0,
        "prefill_tokens": 16,
        "waiting": 1,
        "running": 1,
        "free_pages": 28,
        "cached_pages": 0,
        "evicted_pages": 0,
        "moved_out": 0,
        "moved_in": 0,
        "held": "chunk first",
        "admitted": [admitted],
        "preempted": [],
    }
    assert scheduler.oldest_wait(500) == 350 and step.moves_in == step.moves_out == []


def test_transitions_are_those_of_the_header() -> None:
    edges = _native.transitions()
    assert len(edges) == len(set(edges)) == len({edge[:2] for edge in edges}) == 41
    assert ("decoding", "plan_decode", "decoding+1") in edges and ("preempted", "admit", "prefilling") in edges


def test_commit_takes_int32_buffers_only() -> None:
    scheduler = _native.Scheduler(config())
    scheduler.submit(1, [5], params())
    step = scheduler.next_step()
    with pytest.raises(TypeError, match=r"need a buffer of one dimension of int32 \(format 'i'\), have .* format 'q'"):
        scheduler.commit(step.id, array("q", [1]))
    with pytest.raises(TypeError, match="bytes-like object is required"):
        scheduler.commit(step.id, [1])
    with pytest.raises(ValueError, match="commit of step 1: need 1 tokens, have 2"):
        scheduler.commit(step.id, array("i", [1, 2]))
    drawn = scheduler.commit(step.id, array("i", [1]))
    assert list(drawn) == [(1, 1, None)] and len(drawn) == 1


def test_refusals_reach_python() -> None:
    scheduler = _native.Scheduler(config(num_pages=4, max_waiting=1))
    with pytest.raises(ValueError, match="need 5 pages of 4 positions for 10 prompt \\+ 8 new tokens, have 4"):
        scheduler.submit(1, [1] * 10, params())
    scheduler.submit(1, [1], params())
    with pytest.raises(_native.QueueFull, match="need a place in the queue, have max_waiting 1 waiting already"):
        scheduler.submit(2, [1], params())
    with pytest.raises(ValueError, match=r"max_prefill_tokens needs max_num_seqs \(4\) or more, have 3"):
        _native.Scheduler(config(max_prefill_tokens=3))
    assert scheduler.requests() == [(1, "waiting", 0, 0, 0)]
