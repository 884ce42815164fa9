"""The C++ scheduler, through its Python binding, against a simple model (tests/scheduler_model.py)."""

from __future__ import annotations

import gc
import random
from array import array
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
    """Any order of submit, plan, commit, fail and abort; ends by draining."""

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

    def teardown(self) -> None:
        if hasattr(self, "harness"):
            self.harness.drain()


class DepthTwoMachine(SchedulerMachine):
    max_in_flight = 2


MACHINE_SETTINGS = settings(max_examples=100, stateful_step_count=40, deadline=None, derandomize=True, database=None)
TestDepthOne = SchedulerMachine.TestCase
TestDepthOne.settings = MACHINE_SETTINGS
TestDepthTwo = DepthTwoMachine.TestCase
TestDepthTwo.settings = MACHINE_SETTINGS


@pytest.mark.parametrize("max_in_flight", [1, 2])
def test_long_random_runs(max_in_flight: int) -> None:
    """Hundreds of requests through crowded pools; preemption and every kind of end must occur."""
    preemptions = 0
    for seed in range(60):
        rng = random.Random(seed)
        harness = Harness(random_config(rng, max_in_flight))
        for _ in range(300):
            action = rng.choices(["submit", "plan", "commit", "fail", "abort"], [4, 10, 9, 0.2, 0.3])[0]
            if action == "submit":
                random_submit(rng, harness)
            elif action == "plan":
                harness.plan()
            elif action == "abort" and harness.next_id > 1:
                harness.abort(rng.randrange(1, harness.next_id))
            elif harness.flying and action in ("commit", "fail"):
                getattr(harness, action)()
        harness.drain()
        preemptions += harness.scheduler.num_preemptions
    assert preemptions >= 50


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


def test_a_view_keeps_its_step_alive() -> None:
    scheduler = _native.Scheduler(config())
    scheduler.submit(1, [5, 6, 7], params(max_new_tokens=40))
    step = scheduler.next_step()
    view = step.token_ids
    scheduler.commit(step.id, array("i", [9]))
    del step
    for _ in range(20):
        later = scheduler.next_step()
        scheduler.commit(later.id, array("i", [9]))
    del scheduler, later
    gc.collect()
    assert view.tolist() == [5, 6, 7]


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
