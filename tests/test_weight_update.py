"""Weights of a running engine are replaced: bit for bit those of the file, and nothing of the old is read again."""

from __future__ import annotations

import hashlib
import json
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from gpu_double import gpu_artifact, plug_in
from tiny_artifact import write_checkpoint

import tokenspeed
from tokenspeed import SamplingParams, _native
from tokenspeed.artifact import Artifact
from tokenspeed.compile.build import build
from tokenspeed.errors import EngineClosedError, EngineFailedError, UsageError, WeightsError
from tokenspeed.runtime.engine import Engine
from tokenspeed.runtime.loader import LoadOptions
from tokenspeed.runtime.request import EngineEvent, FinishReason, RequestOptions
from tokenspeed.runtime.weight_update import UNKNOWN_VERSION

OPTIONS = LoadOptions(threads=2, kv_gib=0.02)
PROMPT = list(range(1, 40))
GREEDY = SamplingParams(max_tokens=12, temperature=0.0, logprobs=2)
LONG = SamplingParams(max_tokens=3000, temperature=0.0)
FOREVER = SamplingParams(max_tokens=60000, temperature=0.0)
DRAWN = SamplingParams(max_tokens=12, temperature=1.0, seed=7, logprobs=0)


@pytest.fixture(scope="module")
def other_artifact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The artifact of a checkpoint that differs in its numbers alone."""
    folder = tmp_path_factory.mktemp("other")
    build(write_checkpoint(folder / "checkpoint", seed=1), folder / "artifact", dtype="float32", max_num_seqs=8)
    return folder / "artifact"


def weights_of(artifact: Path) -> Path:
    (section,) = Artifact.open(artifact).manifest.targets
    return artifact / section.weights


@pytest.fixture(scope="module")
def new_weights(other_artifact: Path) -> Path:
    return weights_of(other_artifact)


@pytest.fixture
def engine(tiny_artifact: Path) -> Iterator[Engine]:
    with tokenspeed.load(tiny_artifact, options=OPTIONS) as engine:
        yield engine


def answers(engine: Engine) -> list[Any]:
    """Of two prompts, greedy and drawn: ids and logprobs."""
    found = []
    for params in (GREEDY, DRAWN):
        for output in engine.generate([PROMPT, PROMPT[::-1]], params):
            found.append((output.token_ids, output.logprobs))
    return found


class Recorder:
    """The events of one request."""

    def __init__(self, engine: Engine, prompt: list[int], params: SamplingParams, **options: Any):
        self.events: list[EngineEvent] = []
        self.ended = threading.Event()
        self.id = engine.submit(prompt, params, self._sink, options=RequestOptions(**options))

    def _sink(self, event: EngineEvent) -> None:
        self.events.append(event)
        if event.finish_reason is not None:
            self.ended.set()

    def wait_for_tokens(self, number: int) -> None:
        wait_until(lambda: len(self.events) >= number)

    @property
    def reason(self) -> FinishReason | None:
        assert self.ended.wait(20)
        return self.events[-1].finish_reason

    @property
    def tokens(self) -> list[int]:
        return [token for event in self.events for token in event.token_ids]

    @property
    def versions(self) -> list[str]:
        return list(dict.fromkeys(e.weights_version for e in self.events if e.weights_version is not None))


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)


class Background(threading.Thread):
    """An update on a thread of its own; ``join`` returns what it returned, or raised."""

    def __init__(self, engine: Engine, path: Path, **arguments: Any):
        super().__init__()
        self._call = lambda: engine.update_weights(path, **arguments)
        self.outcome: Any = None
        self.start()
        wait_until(lambda: engine.weight_counters.started > 0 or not self.is_alive())

    def run(self) -> None:
        try:
            self.outcome = self._call()
        except Exception as e:
            self.outcome = e

    def end(self) -> Any:
        self.join(20)
        assert not self.is_alive()
        return self.outcome


def test_the_new_weights_are_those_of_the_file(
    engine: Engine, tiny_artifact: Path, other_artifact: Path, new_weights: Path
) -> None:
    with tokenspeed.load(other_artifact, options=OPTIONS) as other:
        expected = answers(other)
    own = weights_of(tiny_artifact)
    digest = hashlib.sha256(own.read_bytes()).hexdigest()
    before = answers(engine)
    assert before != expected and engine.info.weights_version == engine.info.artifact_digest
    result = engine.update_weights(new_weights, version="step-1")
    assert result["version"] == "step-1" and result["bytes"] == engine.loaded.section.weights_bytes
    assert result["seconds"] > 0 and result["wait_seconds"] >= 0
    assert engine.info.weights_version == "step-1" and answers(engine) == expected
    again = engine.update_weights(own)
    assert again["version"] == f"{engine.info.artifact_digest[:12]}+2" and answers(engine) == before
    stats = engine.stats()
    assert stats.weight_updates == 2 and stats.weight_update_seconds > 0
    assert not any(stats.after_ready.values())
    assert hashlib.sha256(own.read_bytes()).hexdigest() == digest


def test_a_file_that_goes_afterwards_does_not_matter(engine: Engine, new_weights: Path, tmp_path: Path) -> None:
    copy = tmp_path / "w.safetensors"
    copy.write_bytes(new_weights.read_bytes())
    engine.update_weights(copy)
    found = answers(engine)
    copy.write_bytes(b"")
    assert answers(engine) == found


def test_a_file_that_takes_its_name_meanwhile_is_not_read(
    engine: Engine, new_weights: Path, other_artifact: Path, tmp_path: Path
) -> None:
    path = tmp_path / "w.safetensors"
    path.write_bytes(new_weights.read_bytes())
    running = Recorder(engine, PROMPT, FOREVER)
    running.wait_for_tokens(3)
    update = Background(engine, path)
    (tmp_path / "next").write_bytes(b"other" * 100)
    (tmp_path / "next").rename(path)
    engine.abort(running.id)
    assert update.end()["bytes"] == engine.loaded.section.weights_bytes
    with tokenspeed.load(other_artifact, options=OPTIONS) as other:
        assert answers(engine) == answers(other)


def test_nothing_cached_before_is_used_after(engine: Engine, new_weights: Path) -> None:
    page = engine.info.page_size
    prompt = [1 + i % 200 for i in range(2 * page + 7)]

    def cached() -> int | None:
        (output,) = engine.generate([prompt], GREEDY)
        return output.cached_tokens

    assert cached() == 0 and cached() == 2 * page
    engine.update_weights(new_weights)
    assert cached() == 0 and cached() == 2 * page


def test_pages_on_the_host_go_too(tiny_checkpoint: Path, tmp_path: Path) -> None:
    artifact = tmp_path / "artifact"
    build(tiny_checkpoint, artifact, dtype="float32", max_num_seqs=2, max_model_len=1024)
    with tokenspeed.load(artifact, options=LoadOptions(threads=2, host_kv_gib=0.01)) as engine:
        one = SamplingParams(max_tokens=1, temperature=0.0)
        first = [1 + i % 200 for i in range(4 * engine.info.page_size + 1)]
        engine.generate([first], one)
        # Others fill the device's pages, so that the first go to the host.
        number = engine.stats().num_pages * engine.info.page_size // 1000 + 1
        engine.generate([[(7 * i + n) % 200 for i in range(1000)] for n in range(number)], one)
        assert engine.stats().num_host_pages_used > 0
        engine.update_weights(weights_of(artifact))
        stats = engine.stats()
        assert stats.num_host_pages_used == 0 and stats.num_cached_pages == 0
        assert engine.generate([first], one)[0].cached_tokens == 0


def test_two_steps_in_flight(
    tiny_artifact: Path, other_artifact: Path, new_weights: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with tokenspeed.load(other_artifact, options=OPTIONS) as other:
        expected = answers(other)
    plug_in(monkeypatch)
    artifact = gpu_artifact(tiny_artifact, tmp_path / "gpu", keep_cpu=False)
    for when in ("drain", "preempt", "abort"):
        with tokenspeed.load(artifact, options=LoadOptions(kv_gib=0.02)) as engine:
            request = Recorder(engine, PROMPT, LONG if when == "drain" else FOREVER)
            request.wait_for_tokens(9)
            engine.update_weights(new_weights, version="new", when=when)
            assert answers(engine) == expected and engine._executor.device.most_in_flight == 2
            engine.abort(request.id)
            assert request.reason is (FinishReason.LENGTH if when == "drain" else FinishReason.ABORT)
            assert request.versions[1:] == (["new"] if when == "preempt" else [])


def test_routers_forget_what_was_cached(tiny_artifact: Path, new_weights: Path) -> None:
    class Publisher:
        dropped = 0

        def __init__(self) -> None:
            self.events: list[tuple[Any, ...]] = []

        def begin(self, page_size: int) -> None:
            self.page_size = page_size

        def put(self, events: Sequence[tuple[Any, ...]]) -> None:
            self.events += events

        def take(self) -> list[tuple[Any, ...]]:
            events, self.events = self.events, []
            return events

    router: Any = Publisher()
    with tokenspeed.load(tiny_artifact, options=OPTIONS, kv_events=router) as engine:
        prompt = [1 + i % 200 for i in range(2 * engine.info.page_size + 3)]
        engine.generate([prompt], GREEDY)
        wait_until(lambda: len(router.events) >= 2)
        before = router.take()
        engine.update_weights(new_weights)
        assert router.take() == [("cleared",)]
        engine.generate([prompt], GREEDY)
        wait_until(lambda: len(router.events) >= 2)
        after = router.take()
    assert [e[0] for e in before] == [e[0] for e in after] == ["stored"] * 2
    assert [e[4] for e in before] == [e[4] for e in after] and {e[1] for e in before}.isdisjoint(e[1] for e in after)


def test_drained_requests_end_under_the_weights_they_began_with(engine: Engine, new_weights: Path) -> None:
    expected = engine.generate([PROMPT], SamplingParams(max_tokens=3000, temperature=0.0))[0].token_ids
    running = Recorder(engine, PROMPT, LONG)
    running.wait_for_tokens(3)
    update = Background(engine, new_weights, version="new")
    later = Recorder(engine, PROMPT, GREEDY)
    assert update.end()["version"] == "new"
    assert running.reason is FinishReason.LENGTH and tuple(running.tokens) == expected
    assert running.versions == [engine.info.artifact_digest] and later.reason is FinishReason.LENGTH
    assert later.versions == ["new"]
    assert later.tokens == list(engine.generate([PROMPT], GREEDY)[0].token_ids)


def test_preempted_requests_go_on_under_the_new_weights(
    engine: Engine, other_artifact: Path, new_weights: Path
) -> None:
    requests = [Recorder(engine, PROMPT[:n], LONG) for n in (39, 20, 11)]
    for request in requests:
        request.wait_for_tokens(5)
    waiting = [Recorder(engine, PROMPT[3:], GREEDY) for _ in range(8)]
    engine.update_weights(new_weights, version="new", when="preempt")
    assert all(not r.ended.is_set() for r in requests)
    wait_until(lambda: all(r.versions == [engine.info.artifact_digest, "new"] for r in requests))
    for request in requests:
        engine.abort(request.id)
        assert request.reason is FinishReason.ABORT
    assert all(w.reason is FinishReason.LENGTH and w.versions[-1] == "new" for w in waiting)
    with tokenspeed.load(other_artifact, options=OPTIONS) as other:
        for request, n in zip(requests, (39, 20, 11), strict=True):
            old = [t for e in request.events if e.weights_version != "new" for t in e.token_ids]
            new = request.tokens[len(old) : len(old) + 8]
            params = SamplingParams(max_tokens=len(new), temperature=0.0)
            assert new == list(other.generate([PROMPT[:n] + old], params)[0].token_ids)


def test_a_prompt_that_is_half_computed_is_computed_again(tiny_artifact: Path, new_weights: Path) -> None:
    with tokenspeed.load(tiny_artifact, options=OPTIONS, max_step_tokens=16) as engine:
        prompt = [1 + i % 200 for i in range(8000)]
        request = Recorder(engine, prompt, replace(GREEDY, prompt_logprobs=0))
        wait_until(lambda: engine.stats().steps >= 3)
        engine.update_weights(new_weights, version="new", when="preempt")
        assert request.reason is FinishReason.LENGTH and request.versions == ["new"]
        fresh = Recorder(engine, prompt, replace(GREEDY, prompt_logprobs=0), cache_key="apart")
        assert fresh.reason is FinishReason.LENGTH and fresh.tokens == request.tokens
        told, new = (next(e.prompt_logprobs for e in r.events if e.prompt_logprobs) for r in (request, fresh))
        assert len(told) == len(new) == len(prompt) and told[-1000:] == new[-1000:] and told[:16] != new[:16]


def test_aborted_requests_end(engine: Engine, new_weights: Path) -> None:
    running = Recorder(engine, PROMPT, LONG)
    running.wait_for_tokens(3)
    engine.update_weights(new_weights, when="abort")
    assert running.reason is FinishReason.ABORT and running.versions == [engine.info.artifact_digest]


def test_requests_behind_an_update_may_be_aborted_and_time_out(engine: Engine, new_weights: Path) -> None:
    running = Recorder(engine, PROMPT, FOREVER)
    running.wait_for_tokens(3)
    update = Background(engine, new_weights, version="new")
    held, late, stays = (Recorder(engine, PROMPT, GREEDY, timeout=t) for t in (None, 0.01, 60))
    engine.abort(held.id)
    assert held.reason is FinishReason.ABORT and late.reason is FinishReason.TIMEOUT
    assert engine.stats().num_waiting == 1 and not stays.ended.is_set() and not running.ended.is_set()
    engine.abort(running.id)
    assert update.end()["version"] == "new" and stays.reason is FinishReason.LENGTH and stays.versions == ["new"]
    assert engine.stats().num_waiting == 0


def test_updates_follow_each_other(engine: Engine, tiny_artifact: Path, new_weights: Path) -> None:
    before = answers(engine)
    running = Recorder(engine, PROMPT, LONG)
    running.wait_for_tokens(3)
    updates = [Background(engine, new_weights, version="a")]
    between = Recorder(engine, PROMPT, GREEDY)
    updates.append(Background(engine, weights_of(tiny_artifact), version="b"))
    assert [u.end()["version"] for u in updates] == ["a", "b"]
    assert running.reason is FinishReason.LENGTH and between.versions == ["a"]
    assert engine.info.weights_version == "b" and answers(engine) == before


def test_what_waits_ends_with_the_engine(tiny_artifact: Path, new_weights: Path) -> None:
    engine = tokenspeed.load(tiny_artifact, options=OPTIONS)
    running = Recorder(engine, PROMPT, FOREVER)
    running.wait_for_tokens(3)
    update = Background(engine, new_weights)
    held = Recorder(engine, PROMPT, GREEDY)
    engine.close(drain=False)
    assert isinstance(update.end(), EngineClosedError)
    assert running.reason is FinishReason.ABORT and held.reason is FinishReason.ABORT
    with pytest.raises(EngineClosedError, match="takes no new weights"):
        engine.update_weights(new_weights)


def test_draining_an_engine_waits_for_its_update(tiny_artifact: Path, new_weights: Path) -> None:
    engine = tokenspeed.load(tiny_artifact, options=OPTIONS)
    running = Recorder(engine, PROMPT, LONG)
    running.wait_for_tokens(3)
    update = Background(engine, new_weights, version="new")
    held = Recorder(engine, PROMPT, GREEDY)
    assert engine.close()
    assert update.end()["version"] == "new" and held.versions == ["new"] and held.reason is FinishReason.LENGTH


def test_calls_that_make_no_sense(engine: Engine, new_weights: Path) -> None:
    for version in ("", "x" * 201, "a\nb", "\u00e9", UNKNOWN_VERSION):
        with pytest.raises(UsageError, match="version"):
            engine.update_weights(new_weights, version=version)
    with pytest.raises(UsageError, match="when is 'now'; it must be one of drain, preempt, abort"):
        engine.update_weights(new_weights, when="now")
    errors = []

    def sink(event: EngineEvent) -> None:
        if event.finish_reason is not None:
            with pytest.raises(UsageError, match="call it on another one") as e:
                engine.update_weights(new_weights)
            errors.append(e)

    engine.submit(PROMPT, GREEDY, sink)
    wait_until(lambda: bool(errors))


# ---- files that do not fit ------------------------------------------------------------------------------------------


def changed_header(weights: Path, to: Path, change: Callable[[dict[str, Any]], None]) -> Path:
    data = weights.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    change(header)
    text = json.dumps(header).encode()
    to.write_bytes(len(text).to_bytes(8, "little") + text + data[8 + length :])
    return to


def swap(header: dict[str, Any]) -> None:
    first, second = (f"model.layers.0.{name}_layernorm.weight" for name in ("input", "post_attention"))
    header[first], header[second] = header[second], header[first]


CHANGES: list[tuple[Callable[[dict[str, Any]], Any], str]] = [
    (lambda h: h.pop("model.norm.weight"), "tensor model.norm.weight is missing"),
    (
        lambda h: h["model.norm.weight"].update(dtype="I32"),
        r"tensor model.norm.weight: need F32 \[\d+\] at \d+, have I32",
    ),
    (
        lambda h: h["model.norm.weight"].update(shape=[1, *h["model.norm.weight"]["shape"]]),
        r"tensor model.norm.weight: need .* have F32 \[1, ",
    ),
    (lambda h: h.update(extra={"dtype": "U8", "shape": [0], "data_offsets": [0, 0]}), "tensor extra is none of the"),
    (lambda h: h["model.norm.weight"].update(shape=[3]), "damaged: tensor model.norm.weight of F32"),
    (swap, r"input_layernorm.weight: need F32 .* at \d+, have F32 .* at \d+"),
    (lambda h: h["model.norm.weight"].pop("shape"), "damaged: tensor model.norm.weight lacks 'shape'"),
    (lambda h: h.update({"__metadata__": {"a": 1}}), "damaged: its metadata.a must be a text"),
]


@pytest.mark.parametrize(("change", "text"), CHANGES, ids=lambda v: v[:24] if isinstance(v, str) else "")
def test_headers_that_differ(
    engine: Engine, new_weights: Path, tmp_path: Path, change: Callable[[dict[str, Any]], Any], text: str
) -> None:
    file = changed_header(new_weights, tmp_path / "w.safetensors", change)
    with pytest.raises(WeightsError, match=text):
        engine.update_weights(file)
    assert engine.info.weights_version == engine.info.artifact_digest and engine.stats().weight_updates == 0


def test_files_that_are_none(engine: Engine, new_weights: Path, tmp_path: Path) -> None:
    before, data = answers(engine), new_weights.read_bytes()
    length = int.from_bytes(data[:8], "little")
    file = tmp_path / "w.safetensors"
    for content, text in [
        (b"", "no safetensors file, or cut short: it has 0 bytes"),
        (b"x" * 100, "no safetensors file"),
        ((8).to_bytes(8, "little") + b"not json", "its header is not JSON"),
        ((2).to_bytes(8, "little") + b"[]", "its header must be an object"),
        ((1 << 62).to_bytes(8, "little") + data[8:], "no safetensors file, or cut short"),
        (data[: 8 + length - 1], "no safetensors file, or cut short"),
        (data[:-1], "it is cut short: tensor"),
        (data + bytes(64), "need .* bytes behind the header"),
        ((40000).to_bytes(8, "little") + b'{"a":' + b"[" * 39995 + bytes(100), "damaged: its header"),
    ]:
        file.write_bytes(content)
        with pytest.raises(WeightsError, match=text) as e:
            engine.update_weights(file)
        assert e.value.http_status == 400 and e.value.param == "path"
    with pytest.raises(WeightsError, match="No such file"):
        engine.update_weights(tmp_path / "none")
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(WeightsError, match="pipe: it is no ordinary file"):  # at once, though nobody writes to it
        engine.update_weights(tmp_path / "pipe")
    with pytest.raises(WeightsError, match="Is a directory"):
        engine.update_weights(tmp_path)
    assert answers(engine) == before


# ---- devices that fail ----------------------------------------------------------------------------------------------


class FailingDevice:
    """The engine's device, but for updates, which raise what ``errors`` has next."""

    def __init__(self, device: Any, errors: list[Exception]):
        self._device, self._errors, self.unknown = device, errors, False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._device, name)

    def update_weights(self, path: str, offset: int, nbytes: int) -> None:
        if self._errors:
            error = self._errors.pop(0)
            self.unknown = isinstance(error, _native.WeightsUnknownError)
            raise error
        self._device.update_weights(path, offset, nbytes)
        self.unknown = False

    def submit(self, *args: Any) -> Any:
        if self.unknown:
            raise _native.WeightsUnknownError("what region weights holds is unknown")
        return self._device.submit(*args)


def test_an_update_that_fails_at_once_changes_nothing(engine: Engine, new_weights: Path) -> None:
    before = answers(engine)
    engine._executor.device = FailingDevice(engine._executor.device, [_native.DeviceError("the file has gone")])
    with pytest.raises(WeightsError, match=r"the weights .* could not be taken: the file has gone"):
        engine.update_weights(new_weights)
    assert engine.info.weights_version == engine.info.artifact_digest and answers(engine) == before


def test_an_update_that_fails_half_way_ends_requests_until_the_next(
    engine: Engine, other_artifact: Path, new_weights: Path
) -> None:
    device = FailingDevice(engine._executor.device, [_native.WeightsUnknownError("half of it is unknown")])
    engine._executor.device = device
    with pytest.raises(WeightsError, match="half of it is unknown"):
        engine.update_weights(new_weights, version="new")
    assert engine.info.weights_version == UNKNOWN_VERSION and engine.alive
    assert Recorder(engine, PROMPT, GREEDY).reason is FinishReason.ERROR
    engine.update_weights(new_weights, version="new")
    with tokenspeed.load(other_artifact, options=OPTIONS) as other:
        assert answers(engine) == answers(other)


def test_a_device_that_is_lost_ends_the_engine(tiny_artifact: Path, new_weights: Path) -> None:
    engine = tokenspeed.load(tiny_artifact, options=OPTIONS)
    engine._executor.device = FailingDevice(engine._executor.device, [_native.DeviceLostError("it fell off the bus")])
    with pytest.raises(EngineFailedError, match="it fell off the bus"):
        engine.update_weights(new_weights)
    wait_until(lambda: engine.failure is not None)
    assert not engine.alive
    engine.close()
