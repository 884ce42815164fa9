"""The host tier from option to reply: prefixes that leave the device and come back change no bit of any reply, and
pages that cannot move end the requests concerned and no others."""

from __future__ import annotations

import logging
import queue
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from gpu_double import GpuDouble, gpu_artifact, plug_in
from test_smollm2 import Outcome, run
from tiny_artifact import cli

from tokenspeed import _native
from tokenspeed.compile.build import build
from tokenspeed.errors import ResourceError, UsageError
from tokenspeed.runtime import loader
from tokenspeed.runtime.engine import Engine
from tokenspeed.runtime.loader import Loaded, LoadOptions
from tokenspeed.runtime.request import EngineEvent, FinishReason, SamplingParams
from tokenspeed.runtime.stepper import MOVE_FAILURES

GIB = 1 << 30
NUM_PAGES, NUM_HOST_PAGES, PAGE_SIZE = 16, 96, 32
SESSIONS, TURNS = 6, 3
DRAWN = SamplingParams(temperature=0.8, top_k=40, seed=3, max_tokens=20, ignore_eos=True, logprobs=2)
GREEDY = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True, logprobs=2)


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def artifact(request: pytest.FixtureRequest, tiny_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("host") / "artifact"
    build(tiny_checkpoint, path, dtype=request.param, max_num_seqs=4, max_model_len=512, page_size=PAGE_SIZE)
    return path


def load(artifact: Path, host_pages: int = NUM_HOST_PAGES) -> Loaded:
    """A model with NUM_PAGES pages on the device: one sequence of full length, and far fewer than all sessions use."""
    page_bytes = loader.load(artifact, LoadOptions(kv_gib=0.01, threads=1)).section.kv_page_bytes
    options = LoadOptions(kv_gib=0.01, host_kv_gib=host_pages * page_bytes / GIB, threads=2)
    loaded = loader.load(artifact, options)
    assert loaded.num_host_pages == host_pages
    loaded.num_pages = NUM_PAGES
    return loaded


def talk(engine: Engine, *, together: int) -> list[list[Outcome]]:
    """SESSIONS conversations that share a beginning, in TURNS turns, ``together`` of them at a time."""
    shared = [(5 * i) % 283 for i in range(50)]
    histories = [[*shared, *((31 * s + 7 * i) % 283 for i in range(90 + 13 * s))] for s in range(SESSIONS)]
    turns = []
    for turn in range(TURNS):
        outcomes: list[Outcome] = []
        for first in range(0, SESSIONS, together):
            group = range(first, min(SESSIONS, first + together))
            outcomes += run(engine, [histories[s] for s in group], [DRAWN if s % 2 else GREEDY for s in group])
        for s, outcome in enumerate(outcomes):
            histories[s] += [*outcome.tokens, *((11 * s + 3 * turn + i) % 283 for i in range(25))]
        turns.append(outcomes)
    return turns


@pytest.fixture(scope="module")
def expected(artifact: Path) -> list[list[Outcome]]:
    with Engine(loader.load(artifact, LoadOptions(kv_gib=0.01, threads=2)), prefix_index=False) as engine:
        return talk(engine, together=1)


def moved(engine: Engine) -> tuple[int, int]:
    counters = engine.stats().device
    return counters["pages_moved_out"], counters["pages_moved_in"]


@pytest.mark.parametrize("together", [1, 3])
def test_prefixes_that_come_back_change_no_bit(artifact: Path, expected: list[list[Outcome]], together: int) -> None:
    with Engine(load(artifact)) as engine:
        assert talk(engine, together=together) == expected
        stats = engine.stats()
        out, back = moved(engine)
        assert stats.scheduler["restored_tokens"] >= SESSIONS * PAGE_SIZE and out > NUM_PAGES
        assert back * PAGE_SIZE >= stats.scheduler["restored_tokens"]
        assert stats.num_host_pages == engine.info.num_host_pages == NUM_HOST_PAGES
        assert 0 < stats.num_host_pages_used <= NUM_HOST_PAGES
        assert stats.after_ready == dict.fromkeys(stats.after_ready, 0)


def test_a_tier_that_is_too_small_as_well(artifact: Path, expected: list[list[Outcome]]) -> None:
    with Engine(load(artifact, host_pages=7)) as engine:
        assert talk(engine, together=2) == expected
        assert engine.stats().num_host_pages_used <= 7 and moved(engine)[0] > 0


class FailingMoves:
    """A device whose moves fail by number, from 1."""

    def __init__(self, device: Any, failing: set[int]):
        self._device, self.failing, self.moves = device, failing, 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._device, name)

    def move_pages(self, moves_out: list[tuple[int, int]], moves_in: list[tuple[int, int]]) -> None:
        assert moves_out or moves_in
        self.moves += 1
        if self.moves in self.failing:
            raise _native.DeviceError("the host has taken its memory back")
        self._device.move_pages(moves_out, moves_in)


@pytest.fixture
def failing(artifact: Path) -> Iterator[tuple[Engine, FailingMoves]]:
    loaded = load(artifact)
    loaded.executor.device = device = FailingMoves(loaded.executor.device, set())
    with Engine(loaded) as engine:
        yield engine, device


Ending = tuple[list[int], FinishReason, str | None]


def endings(engine: Engine, prompts: list[list[int]]) -> list[Ending]:
    """Tokens, reason and error of each request, one after another."""
    found = []
    for prompt in prompts:
        events: queue.SimpleQueue[EngineEvent] = queue.SimpleQueue()
        engine.submit(prompt, GREEDY, events.put)
        tokens: list[int] = []
        while True:
            event = events.get(timeout=60)
            tokens += event.token_ids
            if event.finish_reason is not None:
                found.append((tokens, event.finish_reason, event.error))
                break
    return found


PROMPTS = [[(17 * s + 3 * i) % 283 for i in range(200)] for s in range(6)]


@pytest.fixture(scope="module")
def completions(artifact: Path) -> list[Ending]:
    with Engine(loader.load(artifact, LoadOptions(kv_gib=0.01, threads=2)), prefix_index=False) as engine:
        return endings(engine, PROMPTS)


def test_a_move_that_fails_ends_the_requests_of_its_step(
    failing: tuple[Engine, FailingMoves], completions: list[Ending]
) -> None:
    engine, device = failing
    device.failing |= {2, 5}
    failed, rounds = 0, 0
    while device.moves < 8:
        rounds += 1
        for found, expected in zip(endings(engine, PROMPTS), completions, strict=True):
            if found[1] is FinishReason.ERROR:
                failed += 1
                assert found[2] is not None
                assert found[2].endswith(
                    "pages could not move between device and host: the host has taken its memory back"
                )
            else:
                assert found == expected
    assert failed == 2 and rounds > 1
    stats = engine.stats()
    assert stats.num_host_pages == NUM_HOST_PAGES and stats.num_running == 0 and stats.num_free_pages == NUM_PAGES


def test_requests_that_share_the_pages_end_too(failing: tuple[Engine, FailingMoves], completions: list[Ending]) -> None:
    """Several at once: whoever fails says why, and all others have the right tokens."""
    engine, device = failing
    endings(engine, PROMPTS)
    device.failing |= {device.moves + 1, device.moves + 3}
    events: queue.SimpleQueue[tuple[int, EngineEvent]] = queue.SimpleQueue()
    asked = [s for s in range(len(PROMPTS)) for _ in range(2)]
    for i, s in enumerate(asked):
        engine.submit(PROMPTS[s], GREEDY, lambda event, i=i: events.put((i, event)))  # type: ignore[misc]
    tokens: list[list[int]] = [[] for _ in asked]
    ends: dict[int, EngineEvent] = {}
    while len(ends) < len(asked):
        i, event = events.get(timeout=60)
        tokens[i] += event.token_ids
        if event.finish_reason is not None:
            assert i not in ends
            ends[i] = event
    failed = [i for i, event in ends.items() if event.finish_reason is FinishReason.ERROR]
    assert 2 <= len(failed) < len(asked)
    assert all("could not move" in str(ends[i].error) for i in failed)
    assert all(tokens[i] == completions[s][0] for i, s in enumerate(asked) if i not in failed)
    assert endings(engine, PROMPTS) == completions


def test_a_host_tier_that_keeps_failing_is_given_up(
    failing: tuple[Engine, FailingMoves], completions: list[Ending], caplog: pytest.LogCaptureFixture
) -> None:
    engine, device = failing
    device.failing |= set(range(4, 1000))
    with caplog.at_level(logging.WARNING, "tokenspeed.engine"):
        found = endings(engine, PROMPTS) + endings(engine, PROMPTS) + endings(engine, PROMPTS)
    failed = [end for end in found if end[1] is FinishReason.ERROR]
    assert len(failed) == MOVE_FAILURES and device.moves == 3 + MOVE_FAILURES
    assert [end for end in found if end[1] is not FinishReason.ERROR] == [
        expected for end, expected in zip(found, 3 * completions, strict=True) if end[1] is not FinishReason.ERROR
    ]
    assert [record.levelname for record in caplog.records] == ["WARNING"] * MOVE_FAILURES + ["ERROR"]
    assert "the host tier is given up after 3 failures in a row" in caplog.records[-1].getMessage()
    assert engine.stats().num_host_pages == engine.stats().num_host_pages_used == 0
    assert endings(engine, PROMPTS) == completions and device.moves == 3 + MOVE_FAILURES


@pytest.mark.parametrize("late", [False, True])
def test_two_steps_in_flight_and_their_moves(
    artifact: Path, expected: list[list[Outcome]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, late: bool
) -> None:
    plug_in(monkeypatch)
    monkeypatch.setattr(GpuDouble, "moves_late", late)
    with Engine(load(gpu_artifact(artifact, tmp_path / "gpu", keep_cpu=False))) as engine:
        assert talk(engine, together=3) == expected
        assert engine.stats().scheduler["restored_tokens"] > 0 and moved(engine)[1] > 0
        assert GpuDouble.made[-1].most_in_flight == 2


def test_moves_that_fail_with_two_steps_in_flight(
    artifact: Path, completions: list[Ending], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plug_in(monkeypatch)
    loaded = load(gpu_artifact(artifact, tmp_path / "gpu", keep_cpu=False))
    loaded.executor.device = FailingMoves(loaded.executor.device, {3, 4, 9})
    with Engine(loaded) as engine:
        found = endings(engine, PROMPTS) + endings(engine, PROMPTS) + endings(engine, PROMPTS)
        good = [i for i, end in enumerate(found) if end[1] is not FinishReason.ERROR]
        assert len(found) - 3 <= len(good) < len(found)
        assert all(found[i] == completions[i % len(PROMPTS)] for i in good)
        assert engine.stats().num_host_pages == NUM_HOST_PAGES


def test_sizes_that_make_no_sense(artifact: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UsageError, match=r"the host tier is -1 GiB; it must be 0 or more"):
        loader.load(artifact, LoadOptions(host_kv_gib=-1))
    with pytest.raises(UsageError, match="it must be 0 or more"):
        loader.load(artifact, LoadOptions(host_kv_gib=float("nan")))
    with pytest.raises(UsageError, match=r"the host tier is 1e-09 GiB, and one KV page takes .* MiB") as usage:
        loader.load(artifact, LoadOptions(host_kv_gib=1e-9))
    assert usage.value.hint == "raise --host-kv-gib, or leave it out"
    with pytest.raises(
        ResourceError, match=r"the host tier needs 1000000.00 GiB, and .* are free: .* are missing"
    ) as e:
        loader.load(artifact, LoadOptions(host_kv_gib=1e6))
    assert e.value.hint == "lower --host-kv-gib, or free memory"
    # On a CPU both kinds of page lie in the same memory.
    monkeypatch.setattr(loader, "available_memory", lambda: 2 * GIB)
    monkeypatch.setattr("tokenspeed.runtime.places.available_memory", lambda: 2 * GIB)
    with pytest.raises(ResourceError, match="KV pages"):
        loader.load(artifact, LoadOptions(kv_gib=1.5, host_kv_gib=1.0))


def test_memory_that_cannot_be_pinned(artifact: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plug_in(monkeypatch)

    def refuse(*args: object) -> None:
        raise _native.DeviceError("the device NVIDIA H200 cannot pin 1048576 bytes of host memory")

    monkeypatch.setattr(GpuDouble, "allocate_host_pages", refuse)
    with pytest.raises(ResourceError, match="cannot allocate the host tier: the device NVIDIA H200 cannot pin") as e:
        loader.load(gpu_artifact(artifact, tmp_path / "gpu"), LoadOptions(kv_gib=0.01, host_kv_gib=0.01))
    assert e.value.hint == "lower --host-kv-gib" and GpuDouble.made[-1].closed


def test_the_option(artifact: Path) -> None:
    done = cli("run", artifact, "x", "--max-tokens", "2", "--kv-gib", "0.01", "--host-kv-gib", "0.01")
    assert done.returncode == 0, done.stderr
    done = cli("run", artifact, "x", "--host-kv-gib", "-2")
    assert done.returncode == 2 and "the host tier is -2.0 GiB; it must be 0 or more" in done.stderr
