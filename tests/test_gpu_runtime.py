"""Loading on a GPU and steps in flight there, with a double in place of the GPU (gpu_double.py)."""

from __future__ import annotations

import json
import queue
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from gpu_double import H200, LOST, ContextDouble, GpuDouble, gpu_artifact, plug_in
from server_harness import running
from tiny_artifact import cli_environment

from tokenspeed import SamplingParams, _native
from tokenspeed.errors import ArtifactError, EngineClosedError, EngineFailedError, ResourceError, UsageError
from tokenspeed.runtime import drivers, loader
from tokenspeed.runtime.engine import Engine, load
from tokenspeed.runtime.loader import LoadOptions
from tokenspeed.runtime.request import EngineEvent, FinishReason
from tokenspeed.runtime.sweep import sweep
from tokenspeed.target import Target

SMALL = LoadOptions(kv_gib=0.05, threads=1)
HERE = Path(__file__).resolve().parent


@pytest.fixture(scope="module")
def artifact(tiny_artifact: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return gpu_artifact(tiny_artifact, tmp_path_factory.mktemp("gpu") / "both")


@pytest.fixture(autouse=True)
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    plug_in(monkeypatch)


class Collect:
    """Everything that one request was told."""

    def __init__(self) -> None:
        self.events: queue.SimpleQueue[EngineEvent] = queue.SimpleQueue()

    def __call__(self, event: EngineEvent) -> None:
        self.events.put(event)

    def all(self) -> list[EngineEvent]:
        found = [self.events.get(timeout=20)]
        while found[-1].finish_reason is None:
            found.append(self.events.get(timeout=20))
        return found


def outcomes(engine: Engine) -> list[Any]:
    """A mix of requests, more than fit at once: greedy and drawn, stopped, with and without log-probabilities."""
    sinks = []
    for i in range(24):
        params = SamplingParams(
            max_tokens=3 + 5 * (i % 7),
            temperature=0.0 if i % 3 else 1.1,
            top_k=(0, 5)[i % 2],
            seed=i,
            stop_token_ids=tuple(range(i % 5, 283, 31)) if i % 4 == 0 else (),
            logprobs=2 if i % 3 == 0 else None,
            prompt_logprobs=1 if i % 6 == 0 else None,
            ignore_eos=True,
        )
        sink = Collect()
        engine.submit([(7 * i + j) % 283 for j in range(1 + 9 * (i % 8))], params, sink)
        sinks.append(sink)
    return [
        [(e.token_ids, e.logprobs, e.prompt_logprobs, e.finish_reason, e.stop_token_id) for e in sink.all()]
        for sink in sinks
    ]


def test_two_steps_in_flight_change_no_bit(artifact: Path) -> None:
    with load(artifact, options=LoadOptions(target=Target.native(), kv_gib=0.05, threads=1)) as engine:
        expected = outcomes(engine)
        assert engine.info.target.startswith("cpu:") and not GpuDouble.made
    with load(artifact, options=SMALL) as engine:
        assert (engine.info.target, engine.info.device) == ("cuda:sm_90a", "NVIDIA H200")
        assert outcomes(engine) == expected
        stats = engine.stats()
        assert stats.num_free_pages == stats.num_pages and stats.num_running == 0
        assert stats.after_ready == dict.fromkeys(stats.after_ready, 0) and len(stats.after_ready) == 5
        assert stats.host["submit"]["count"] >= stats.steps > 0
    (device,) = GpuDouble.made
    assert device.most_in_flight == 2 and device.closed and list(device.binaries) == ["norm"]


def test_a_sweep_goes_by_the_clock_of_the_device(artifact: Path) -> None:
    with load(artifact, options=replace(SMALL, measure=True)) as engine:
        report = sweep(engine, steps_per_bucket=2)
    assert report.clock == "device" and report.closed
    assert all(b.p50 == b.max == 0.01 and 0 < b.longest_wait != 0.01 for b in report.buckets)


def test_preempted_requests_too(artifact: Path) -> None:
    params = SamplingParams(max_tokens=150, temperature=0, ignore_eos=True)
    found = []
    for target in (Target.native(), None):
        loaded = loader.load(artifact, LoadOptions(target=target, kv_gib=0.05, threads=1))
        loaded.num_pages = 10  # four sequences grow to four pages each
        engine = Engine(loaded)
        sinks = [Collect() for _ in range(4)]
        for i, sink in enumerate(sinks):
            engine.submit([i + 1] * 80, params, sink)
        found.append([[e.token_ids for e in sink.all()] for sink in sinks])
        assert engine.stats().preemptions > 0
        engine.close()
    assert found[0] == found[1]


def test_an_abort_while_steps_are_in_flight(artifact: Path) -> None:
    with load(artifact, options=SMALL) as engine:
        sinks = [Collect() for _ in range(4)]
        params = SamplingParams(max_tokens=5000, ignore_eos=True)
        ids = [engine.submit([1, 2, 3], params, sink) for sink in sinks]
        for sink in sinks:
            assert sink.events.get(timeout=20).token_ids
        for request_id in ids:
            engine.abort(request_id)
        assert {sink.all()[-1].finish_reason for sink in sinks} == {FinishReason.ABORT}
        assert engine.close(timeout=20)
    stats = engine.stats()
    assert stats.num_running == 0


def test_a_step_that_fails_ends_its_requests_only(artifact: Path) -> None:
    with load(artifact, options=SMALL) as engine:
        params = SamplingParams(max_tokens=50, temperature=0, ignore_eos=True)
        GpuDouble.fail = frozenset({5})
        sink = Collect()
        engine.submit([1, 2, 3], params, sink)
        *tokens, last = sink.all()
        assert len(tokens) == 4 and last.finish_reason is FinishReason.ERROR
        assert last.error == "the device failed: an illegal instruction"
        after = Collect()
        engine.submit([1, 2, 3], params, after)
        assert sum(len(e.token_ids) for e in after.all()) == 50
        assert engine.alive and engine.stats().num_free_pages == engine.stats().num_pages


def test_a_lost_device_ends_every_request_and_the_engine(artifact: Path) -> None:
    engine = load(artifact, options=SMALL)
    told: list[str] = []
    engine.watch(told.append)
    GpuDouble.lose = 4
    GpuDouble.gate.clear()
    sinks = [Collect() for _ in range(3)]
    for sink in sinks:
        engine.submit([1, 2, 3], SamplingParams(max_tokens=500, ignore_eos=True), sink)
    GpuDouble.gate.set()
    for sink in sinks:
        last = sink.all()[-1]
        assert last.finish_reason is FinishReason.ERROR
        assert last.error == LOST
    engine._thread.join(10)
    assert not engine.alive and told == [LOST]
    with pytest.raises(EngineClosedError):
        engine.submit([1], SamplingParams(), Collect())
    late: list[str] = []
    engine.watch(late.append)
    assert late == told
    assert engine.close(timeout=5)


def test_closing_does_not_wait_for_a_device_that_hangs(artifact: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tokenspeed.runtime.engine.HANG_SECONDS", 0.3)
    engine = load(artifact, options=SMALL)
    GpuDouble.gate.clear()
    engine.submit([1, 2, 3], SamplingParams(max_tokens=5, ignore_eos=True), Collect())
    began = time.monotonic()
    while not GpuDouble.made[0].most_in_flight and time.monotonic() - began < 10:
        time.sleep(0.001)
    assert not engine.close(timeout=0.1)
    assert time.monotonic() - began < 10 and GpuDouble.made[0].closed
    engine._thread.join(10)


def test_a_server_whose_device_is_lost_ends(artifact: Path) -> None:
    engine = load(artifact, options=SMALL)
    with running(engine) as server:
        metrics = server.client.get("/metrics").text
        for name in ("compilations", "module_loads", "captures", "instantiations", "allocations"):
            assert f'tokenspeed:after_ready_{name}_total{{model_name="tiny-llama"}} 0.0' in metrics
        assert server.client.post("/v1/completions", json={"prompt": "x", "max_tokens": 3}).status_code == 200
        assert 'tokenspeed:step_host_seconds_count{model_name="tiny-llama",part="submit"}' in (
            server.client.get("/metrics").text
        )
        GpuDouble.lose = GpuDouble.made[0]._tickets + 3
        r = server.client.post("/v1/completions", json={"prompt": "x", "max_tokens": 100, "ignore_eos": True})
        assert r.status_code == 500 and LOST in r.json()["error"]["message"]
        server.join()
    assert isinstance(server.failure, EngineFailedError)
    assert server.failure.message == LOST
    engine.close(drain=False)


SERVE = """
import sys
sys.path.insert(0, sys.argv[1])
import gpu_double
from tokenspeed.cli import main
gpu_double.install()
gpu_double.GpuDouble.lose = 6
sys.exit(main(sys.argv[2:]))
"""


def test_the_serving_process_exits_with_an_error_of_its_own(artifact: Path, tmp_path: Path) -> None:
    import httpx

    trace = tmp_path / "trace.json"
    server = subprocess.Popen(
        [sys.executable, "-c", SERVE, HERE, "serve", artifact, "--port", "0", "--kv-gib", "0.05", "--trace", trace],
        env=cli_environment(),
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert server.stderr is not None
        ready = server.stderr.readline()
        assert ready.startswith("ready: tiny-llama on cuda:sm_90a at ")
        url = ready.split(" at ")[1].split()[0]
        body = {"prompt": "x", "max_tokens": 100, "ignore_eos": True, "stream": True}
        with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=20) as r:
            assert LOST in r.read().decode()
        began = time.monotonic()
        _, err = server.communicate(timeout=20)
        assert time.monotonic() - began < 10
        assert err.splitlines() == [
            f"error: {LOST}",
            "hint: start the server again; the requests that ran were ended",
        ]
        assert server.returncode == EngineFailedError.exit_code == 10
    finally:
        server.kill()
    events = json.loads(trace.read_text())["traceEvents"]
    names = {e["name"] for e in events}
    for name in ("interpreter, command line", "import web stack", "import engine", "weights", "graphs", "tokenizer",
                 "driver", "context", "ready", "first token", "plan", "submit", "commit", "step"):  # fmt: skip
        assert name in names, name
    by_name = {e["name"]: e for e in events}
    assert by_name["interpreter, command line"]["ts"] == 0
    assert by_name["weights"]["ts"] < by_name["ready"]["ts"] < by_name["first token"]["ts"]
    steps = [e for e in events if e["name"] == "step"]
    assert [s["args"]["step"] for s in steps] == list(range(1, 6)) and all(s["tid"] == 0 for s in steps)


# ---- what cannot be loaded -------------------------------------------------------------------------------------


def test_a_gpu_is_preferred_and_a_target_chooses(artifact: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert loader.load(artifact, SMALL).section.target == "cuda:sm_90a"
    assert loader.load(artifact, LoadOptions(device=0, kv_gib=0.05)).section.target == "cuda:sm_90a"
    plug_in(monkeypatch, gpus=())
    assert loader.load(artifact, SMALL).section.target.startswith("cpu:")
    monkeypatch.setattr("tokenspeed.runtime.places.GPU_BACKENDS", {"cuda": "/dev/null", "hip": "/dev/none"})
    with pytest.raises(ResourceError, match="has a GPU whose driver does not start: no driver is installed") as caught:
        plug_in(monkeypatch, gpus=(), reason="no driver is installed")
        loader.load(artifact, SMALL)
    assert caught.value.hint is not None and "pass --target cpu:" in caught.value.hint


def test_drivers_start_early_where_there_is_a_device_file(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drivers, "GPU_BACKENDS", {"cuda": "/dev/null", "hip": "/dev/none"})
    for arguments, expected in (
        (["serve", "a"], [("cuda", 0)]),
        (["serve", "a", "--target", "cuda:sm_90a", "--device", "3"], [("cuda", 3)]),
        (["run", "a", "--device=2", "--target=cuda:sm_90a"], [("cuda", 2)]),
        (["serve", "a", "--device", "x"], [("cuda", 0)]),
        (["serve", "a", "--target=cpu:x86-64-v3"], []),
        (["bench", "a", "--target", "hip:gfx950"], []),
    ):
        for thread in drivers.start_for(arguments):
            thread.join(10)
        assert ContextDouble.opened == expected, arguments
        drivers.let_go()
        assert not ContextDouble.opened


def test_a_driver_that_starts_too_late_or_not_at_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drivers, "GPU_BACKENDS", {"cuda": "/dev/null"})
    gate = threading.Event()

    class Slow(ContextDouble):
        def __init__(self, backend: str, ordinal: int):
            gate.wait(10)
            super().__init__(backend, ordinal)
            made.append(self)

    made: list[Slow] = []
    monkeypatch.setattr(_native, "GpuContext", Slow)
    (thread,) = drivers.start_drivers()
    drivers.let_go()
    gate.set()
    thread.join(10)
    assert len(made) == 1 and not ContextDouble.opened

    def broken(backend: str, ordinal: int) -> None:
        raise _native.DeviceError("no driver is installed")

    monkeypatch.setattr(_native, "GpuContext", broken)
    (thread,) = drivers.start_drivers()
    thread.join(10)
    drivers.let_go()


def test_loading_lets_go_of_what_was_opened_early(artifact: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drivers, "GPU_BACKENDS", {"cuda": "/dev/null"})
    (thread,) = drivers.start_drivers()
    thread.join(10)
    assert ContextDouble.opened == [("cuda", 0)]
    loader.load(artifact, SMALL).executor.device.close()
    assert not ContextDouble.opened


def test_the_wrong_gpu(artifact: Path, tiny_artifact: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UsageError, match=r"there is no GPU 3: have 0 \(NVIDIA H200\)") as caught:
        loader.load(artifact, LoadOptions(device=3))
    assert caught.value.hint == "see `tokenspeed doctor`"
    with pytest.raises(UsageError, match="--device 0 asks for a GPU; the target cpu:"):
        loader.load(tiny_artifact, LoadOptions(device=0, target=Target.native()))
    blackwell = gpu_artifact(tiny_artifact, tmp_path / "b", keep_cpu=False, target="cuda:sm_100a")
    with pytest.raises(ArtifactError) as error:
        loader.load(blackwell, SMALL)
    assert error.value.message.startswith("the artifact was built for cuda:sm_100a; this machine runs cpu:")
    assert error.value.message.endswith("cuda:sm_90a; GPU 0 is NVIDIA H200, sm_90")
    assert error.value.hint == "rebuild it with `tokenspeed build --target cuda:sm_90a`"


@pytest.mark.parametrize(
    ("reason", "shown"),
    [
        ("no NVIDIA driver is installed: need libcuda.so.1, have none (it): install it (or not)",
         "no NVIDIA driver is installed"),
        ("the NVIDIA driver finds no GPU (CUDA_ERROR_NO_DEVICE (100): no device): install it",
         "the NVIDIA driver finds no GPU"),
        ("the NVIDIA driver does not start: CUDA_ERROR_UNKNOWN (999): why: install it",
         "the NVIDIA driver does not start"),
    ],
)  # fmt: skip
def test_a_machine_without_a_gpu_says_so_in_a_line(
    tiny_artifact: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reason: str, shown: str
) -> None:
    artifact = gpu_artifact(tiny_artifact, tmp_path / "h", keep_cpu=False)
    plug_in(monkeypatch, gpus=(), reason=reason)
    with pytest.raises(ArtifactError) as error:
        loader.load(artifact, SMALL)
    assert error.value.message.startswith("the artifact was built for cuda:sm_90a; this machine runs cpu:")
    assert error.value.message.endswith(f"; {shown}") and len(error.value.message) < 200
    assert error.value.hint is not None and error.value.hint.startswith(
        "rebuild it with `tokenspeed build --target cpu"
    )
    assert error.value.hint.endswith(", or see `tokenspeed doctor` for why it finds no GPU")
    with pytest.raises(ArtifactError, match="this machine cannot run cuda:sm_90a: it runs cpu:") as error:
        loader.load(artifact, LoadOptions(target=Target.parse("cuda:sm_90a")))
    assert error.value.message.endswith(f"; {shown}") and "`tokenspeed doctor`" in (error.value.hint or "")


def test_a_driver_that_is_too_old(artifact: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plug_in(monkeypatch, gpus=[(*H200[:4], 12020)])
    with pytest.raises(ResourceError) as caught:
        loader.load(artifact, SMALL)
    assert "cuda:sm_90a needs a driver of CUDA 12.8 or later; GPU 0 (NVIDIA H200) has one of CUDA 12.2" in str(caught)
    assert caught.value.hint == "update the GPU driver"


def test_too_little_memory_says_by_how_much(artifact: Path) -> None:
    GpuDouble.free, reserve = 600 << 20, (512 << 20) + GpuDouble.total // 100
    need = loader.load(artifact, SMALL).section
    assert need.weights_bytes + need.arena_bytes < 60 << 20
    GpuDouble.free = reserve + (1 << 10)
    with pytest.raises(ResourceError, match=r"does not fit in memory of GPU 0 \(NVIDIA H200\): weights and") as caught:
        loader.load(artifact, LoadOptions())
    assert "are missing" in caught.value.message
    assert caught.value.hint is not None and "another one with --device, or rebuild with a smaller" in caught.value.hint
    GpuDouble.free = reserve + need.weights_bytes + need.arena_bytes + need.io_bytes + need.state_bytes + (8 << 20)
    with pytest.raises(ResourceError, match=r"needs 16\.0 MiB of KV pages, and 8\.0 MiB may be .*: 8\.0 MiB are m"):
        loader.load(artifact, LoadOptions())
    with pytest.raises(ResourceError, match=r"1\.00 GiB of KV pages and .* of weights and buffers need more than"):
        loader.load(artifact, LoadOptions(kv_gib=1.0))


def test_pages_take_what_is_free(artifact: Path) -> None:
    GpuDouble.free = (512 << 20) + GpuDouble.total // 100 + (200 << 20)
    loaded = loader.load(artifact, LoadOptions())
    section = loaded.section
    fixed = section.weights_bytes + section.arena_bytes + 2 * section.io_bytes + section.state_bytes
    most = loaded.artifact.manifest.envelope.max_num_seqs * loaded.artifact.manifest.envelope.pages_per_seq
    assert loaded.num_pages == min(((200 << 20) - fixed) // section.kv_page_bytes, most)


def test_a_damaged_binary(artifact: Path, tmp_path: Path, tiny_artifact: Path) -> None:
    damaged = gpu_artifact(tiny_artifact, tmp_path / "a")
    (damaged / "kernels" / "norm.cubin").write_bytes(b"no ELF at all")
    with pytest.raises(ArtifactError, match=r"kernels/norm.cubin is damaged: its SHA-256 is"):
        loader.load(damaged, SMALL)
    with pytest.raises(ArtifactError, match=r"kernels/norm.cubin cannot be loaded: the code object 'norm' is damaged"):
        loader.load(damaged, LoadOptions(kv_gib=0.05, verify="structure"))
    assert [device.closed for device in GpuDouble.made] == [True, True]


def test_a_driver_in_trouble(artifact: Path) -> None:
    GpuDouble.graphs_fail = True
    with pytest.raises(ResourceError) as caught:
        loader.load(artifact, SMALL)
    assert caught.value.message == (
        "cannot load onto NVIDIA H200: the device NVIDIA H200 cannot instantiate a graph: out of memory"
    )
    assert caught.value.hint == "lower --kv-gib" and GpuDouble.made[0].closed


def test_what_only_another_target_uses_is_not_hashed(artifact: Path, tmp_path: Path, tiny_artifact: Path) -> None:
    damaged = gpu_artifact(tiny_artifact, tmp_path / "a")
    (damaged / "kernels" / "norm.cubin").write_bytes(b"\x7fELF and mor3")
    opened = loader.Artifact.open(damaged)
    whole, cpu = opened.verify("structure"), str(Target.native())
    assert whole == 0 and opened.verify("quick", target=cpu) > 0
    loader.load(damaged, LoadOptions(kv_gib=0.05, threads=1, target=Target.native()))
    for level, target in (("quick", None), ("quick", "cuda:sm_90a"), ("full", cpu)):
        with pytest.raises(ArtifactError, match=r"kernels/norm\.cubin is damaged"):
            opened.verify(level, target=target)


def test_steps_copy_themselves_as_their_arrays_say() -> None:
    config = _native.SchedulerConfig(
        max_num_seqs=3, max_prefill_tokens=40, max_logit_rows=9, max_model_len=64, page_size=16, num_pages=12,
        max_waiting=9,
    )  # fmt: skip
    from tokenspeed.step import INPUTS, IO, STEP_SIZES, place

    placed, nbytes = place(IO, {"T": 40, "S": 3, "P": 4, "R": 9, "V": 70, "C": 3})
    io = bytearray(nbytes)
    offsets = [t.offset for t in placed[: 1 + len(INPUTS)]]
    scheduler = _native.Scheduler(config, [io], offsets)
    for i in range(3):
        params = _native.RequestParams(
            max_new_tokens=4, temperature=0.5 + i, top_p=0.9, top_k=i, min_p=0.1, seed=1 << 63 | i, num_logprobs=i,
            num_prompt_logprobs=1,
        )  # fmt: skip
        scheduler.submit(i, list(range(5 + 15 * i)), params)
    step = scheduler.next_step()
    assert step is not None and step.num_seqs >= 2
    formats: dict[str, Any] = {"int32": "i", "int64": "q", "uint64": "Q", "float32": "f"}
    for tensor in placed[1 : 1 + len(INPUTS)]:
        have = memoryview(io)[tensor.offset : tensor.offset + tensor.nbytes].cast(formats[tensor.dtype])
        want = getattr(step, tensor.name)
        if tensor.name == "page_table":
            for i, length in enumerate(step.context_lens):
                held = -(-length // 16)
                assert list(have[4 * i : 4 * i + held]) == list(want[4 * i : 4 * i + held])
        else:
            assert list(have[: len(want)]) == list(want), tensor.name
    sizes = memoryview(io)[:32].cast("i")
    assert STEP_SIZES.name == placed[0].name
    assert list(sizes) == [step.num_tokens, step.num_seqs, step.num_logit_rows, 0, 0, 0, 0, 0]
    with pytest.raises(ValueError, match="step inputs: need 30 offsets, have 29"):
        _native.Scheduler(config, [io], offsets[1:])
    with pytest.raises(ValueError, match=r"step inputs: tensor 0 needs 32 bytes at byte 4096 of \d+"):
        _native.Scheduler(config, [memoryview(io)[:4096]], [4096, *offsets[1:]])
    with pytest.raises((BufferError, TypeError)):
        _native.Scheduler(config, [bytes(io)], offsets)
    with pytest.raises(ValueError, match="need memory for each of max_in_flight 1 steps, have it for 2"):
        _native.Scheduler(config, [io, io], offsets)
