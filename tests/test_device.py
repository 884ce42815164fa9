"""The CPU device through its Python binding: hostile graphs, sealing, counters, views, tickets and refusals."""

from __future__ import annotations

import gc
import random
import struct
import threading
import time
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tokenspeed import _native
from tokenspeed.compile import sampler
from tokenspeed.graph import Access, Argument, Float, Int, LaunchGraph, Node, Pointer, Region, StepScalar
from tokenspeed.step import INPUTS, MAX_TOP_LOGPROBS, OUTPUTS, STATE, place
from tokenspeed.target import Target

R, W, RW = Access.READ, Access.WRITE, Access.READ | Access.WRITE
ISA = "avx512" if Target.native().arch != "x86-64-v3" else "avx2"
WIDTH = 64
ROWS = 64


def norm_graph(repeat: int = 1, io_out: int = ROWS * WIDTH * 4) -> LaunchGraph:
    """``repeat`` times: io rows at 0, weighted by region weights, normalized into io at ``io_out``."""
    args = (
        Pointer(Region.IO, 0, ROWS * WIDTH * 4, R),
        Pointer(Region.WEIGHTS, 0, WIDTH * 4, R),
        Pointer(Region.IO, io_out, ROWS * WIDTH * 4, W),
        StepScalar(0),
        Int(WIDTH),
        Float(1e-5),
    )
    names = [f"norm{i}" for i in range(repeat)]
    return LaunchGraph(tuple(Node(n, f"rms_norm_f32_{ISA}", args, (i - 1,) if i else ()) for i, n in enumerate(names)))


@pytest.fixture
def weights_file(tmp_path: Path) -> Path:
    path = tmp_path / "weights"
    path.write_bytes(b"head" + np.arange(WIDTH, dtype=np.float32).tobytes())
    return path


@pytest.fixture
def device(weights_file: Path) -> Any:
    made = _native.CpuDevice(2)
    made.load_weights(str(weights_file), 4, WIDTH * 4)
    made.allocate("io", 4 * ROWS * WIDTH * 4)
    yield made
    made.close()


def normalized(x: Any) -> Any:
    exact = x.astype(np.float64)
    return exact / np.sqrt((exact**2).mean(axis=1, keepdims=True) + 1e-5) * np.arange(WIDTH)


def rows_of(device: Any, offset: int) -> Any:
    return np.frombuffer(device.view("io"), np.float32, ROWS * WIDTH, offset).reshape(ROWS, WIDTH)


def test_a_step_computes_what_its_graph_says(device: Any) -> None:
    graph = device.load_graph(norm_graph().encode(), 0)
    device.seal()
    x = np.random.default_rng(0).normal(size=(ROWS, WIDTH)).astype(np.float32)
    rows_of(device, 0)[:] = x
    device.wait(device.submit(graph, 5, 1, 1))
    out = rows_of(device, ROWS * WIDTH * 4)
    np.testing.assert_allclose(out[:5], normalized(x)[:5], rtol=2e-6)
    assert not out[5:].any()


def test_two_steps_in_flight_have_their_own_io(device: Any) -> None:
    graph = device.load_graph(norm_graph().encode(), 0)
    size = ROWS * WIDTH * 4
    x = np.random.default_rng(1).normal(size=(2, ROWS, WIDTH)).astype(np.float32)
    rows_of(device, 0)[:] = x[0]
    rows_of(device, 2 * size)[:] = x[1]
    first = device.submit(graph, ROWS, 1, 1)
    second = device.submit(graph, ROWS, 1, 1, io_offset=2 * size)
    assert second == first + 1
    device.wait(second)
    device.wait(first)
    np.testing.assert_allclose(rows_of(device, size), normalized(x[0]), rtol=2e-6)
    np.testing.assert_allclose(rows_of(device, 3 * size), normalized(x[1]), rtol=2e-6)


def test_the_queue_has_an_end(device: Any) -> None:
    graph = device.load_graph(norm_graph(2000).encode(), 0)
    tickets = []
    with pytest.raises(_native.DeviceError, match="8 steps are in flight, which is the most: wait for one first"):
        for _ in range(100):
            tickets.append(device.submit(graph, ROWS, 1, 1))
    assert len(tickets) >= 8
    device.wait(tickets[-1])


def test_waiting_releases_the_interpreter(device: Any) -> None:
    graph = device.load_graph(norm_graph(5000).encode(), 0)
    ticks = 0
    stop = threading.Event()

    def tick() -> None:
        nonlocal ticks
        while not stop.is_set():
            ticks += 1
            time.sleep(0)

    thread = threading.Thread(target=tick)
    thread.start()
    ticket = [device.submit(graph, ROWS, 1, 1) for _ in range(8)][-1]
    before = ticks
    device.wait(ticket)
    after = ticks
    stop.set()
    thread.join()
    assert after > before


def test_weights_settle_behind_the_same_view(tmp_path: Path) -> None:
    path = tmp_path / "weights"
    path.write_bytes(random.Random(0).randbytes(3 << 20))
    device = _native.CpuDevice(2)
    device.load_weights(str(path), 4096, (3 << 20) - 4096)
    device.seal()
    view, expected = device.view("weights"), path.read_bytes()[4096:]
    assert view.readonly and device.counters()["bytes_settled"] == 0 and view == expected
    device.settle()
    path.write_bytes(b"")  # what settled does not follow its file
    assert device.counters()["bytes_settled"] == len(expected) and view == expected
    device.settle()
    assert device.counters()["allocations_after_seal"] == device.counters()["refused_after_seal"] == 0
    device.close()


def test_counters_and_seal(device: Any, weights_file: Path) -> None:
    graph = device.load_graph(norm_graph(3).encode(), 0)
    device.seal()
    calls: list[Callable[[], object]] = [
        lambda: device.allocate("arena", 4096),
        lambda: device.load_graph(norm_graph().encode(), 0),
        lambda: device.load_weights(str(weights_file), 0, 4),
    ]
    for call in calls:
        with pytest.raises(_native.DeviceError, match=r"the device is sealed, so it cannot .*: do so before seal\(\)"):
            call()
    device.wait(device.submit(graph, 1, 1, 1))
    device.wait(device.submit(graph, 1, 1, 1))
    counters = device.counters()
    assert 0 < counters["busy_seconds"] < 10 and counters["worker_sleeps"] >= 0
    expected = {
        "steps": 2,
        "nodes": 6,
        "graphs_loaded": 1,
        "regions_allocated": 2,
        "bytes_allocated": 4 * WIDTH + 4 * ROWS * WIDTH * 4,
        "bytes_settled": 4 * WIDTH,  # at once: the file's offset is no multiple of 64
        "graphs_loaded_after_seal": 0,
        "allocations_after_seal": 0,
        "refused_after_seal": 3,
    }
    assert {name: counters[name] for name in expected} == expected


def test_profile_times_each_node(device: Any) -> None:
    graph = device.load_graph(norm_graph(3).encode(), 0)
    profile = device.profile(graph, ROWS, 1, 1)
    assert [name for name, _ in profile] == ["norm0", "norm1", "norm2"]
    assert all(0 < seconds < 1 for _, seconds in profile)


def test_views(weights_file: Path) -> None:
    device = _native.CpuDevice(1)
    device.load_weights(str(weights_file), 4, WIDTH * 4)
    device.allocate("state", 256)
    weights, state = device.view("weights"), device.view("state")
    assert weights.readonly and weights.nbytes == WIDTH * 4 and weights.cast("f")[5] == 5.0
    assert not state.readonly and state.format == "B" and bytes(state) == bytes(256)
    state.cast("i")[3] = 77
    assert device.view("state")[12] == 77
    with pytest.raises(TypeError):
        weights[0] = 1
    device.close()
    with pytest.raises(_native.DeviceError, match="the device is closed: make a new one"):
        device.view("state")
    del device
    gc.collect()
    state[0] = 1  # the memory lives as long as its views
    assert bytes(state[:1]) == b"\1" and weights.cast("f")[6] == 6.0


def test_refusals_say_what_to_do(device: Any, tmp_path: Path) -> None:
    graph = device.load_graph(norm_graph().encode(), 0)
    cases: list[tuple[Callable[[], object], str]] = [
        (lambda: _native.CpuDevice(0), "a device needs 1 to 1024 workers, but 0 were asked for"),
        (lambda: device.allocate("vram", 1), "no region is called 'vram': use one of weights, kv, arena, io, state"),
        (lambda: device.allocate("io", 1), "region io is allocated already with 65536 bytes"),
        (lambda: device.allocate("weights", 1), "region weights is filled from a file: use load_weights"),
        (lambda: device.allocate("kv", 0), "region kv needs at least 1 byte"),
        (
            lambda: device.allocate("kv", 1 << 50),
            r"region kv needs 1125899906842624 bytes of memory, but \d+ are avail",
        ),
        (lambda: device.view("kv"), "region kv is not allocated: allocate it first"),
        (lambda: device.submit(graph + 1, 1, 1, 1), "graph 1 is not loaded: this device has 1 graphs"),
        (lambda: device.submit(graph, -1, 1, 1), "a step needs sizes of 0 or more, but has -1 tokens"),
        (lambda: device.submit(graph, 1, 1, 1, 60), "at a multiple of 64, but io_offset is 60 of 65536"),
        (lambda: device.wait(5), "ticket 5 was never given out: the last one is"),
        (
            lambda: _native.measure_matmul("float64", 1),
            "no matmul ceiling for dtype 'float64': use float32 or bfloat16",
        ),
        (
            lambda: _native.CpuDevice(1).load_weights(str(tmp_path / "none"), 0, 1),
            "cannot open the weights file .*/none: No such file or directory",
        ),
        (
            lambda: _native.CpuDevice(1).load_weights(str(tmp_path / "weights"), 4, 257),
            "the weights need 257 bytes at offset 4 of .*, but the file has 260: copy it again or build",
        ),
    ]
    for call, text in cases:
        with pytest.raises(_native.DeviceError, match=text):
            call()


def test_graphs_that_the_device_must_not_run(device: Any) -> None:
    good = norm_graph().nodes[0]

    def changed(index: int, arg: Any) -> bytes:
        args = [*good.args[:index], arg, *good.args[index + 1 :]]
        return LaunchGraph((Node(good.name, good.symbol, tuple(args)),)).encode()

    where = rf"launch graph node 0 \('norm0', kernel rms_norm_f32_{ISA}\): "
    cases = [
        (
            changed(0, Pointer(Region.IO, 0, 65537, R)),
            "argument 0 needs 65537 bytes at offset 0 of region io, which has 65536",
        ),
        (changed(0, Pointer(Region.ARENA, 0, 4, R)), "argument 0 points into region arena, which is not allocated"),
        (changed(2, Pointer(Region.WEIGHTS, 0, 4, RW)), "argument 2 writes to region weights, which is read-only"),
        (changed(3, Float(1.0)), "argument 3 must be an integer, but is a float"),
        (changed(5, Int(1)), "argument 5 must be a float, but is an integer"),
        (LaunchGraph((Node(good.name, good.symbol, good.args[:5]),)).encode(), "takes 6 arguments, but the node has 5"),
    ]
    for data, text in cases:
        with pytest.raises(_native.GraphError, match=where + ".*" + text):
            device.load_graph(data, 0)
    unknown = LaunchGraph((Node("n", "conv_f32_avx2", ()),)).encode()
    with pytest.raises(_native.GraphError, match="this runtime has no such kernel: build the artifact with this"):
        device.load_graph(unknown, 0)


@pytest.mark.skipif(Target.native().arch == "x86-64-v4+amx", reason="this machine has AMX: nothing to refuse")
def test_a_kernel_for_another_processor_is_refused(device: Any) -> None:
    signature = {symbol: s for symbol, s, _ in _native.kernel_table()}["linear_bf16_amx"]
    args = tuple(Pointer(Region.IO, 0, 64, RW) if c == "p" else Int(16) for c in signature)
    data = LaunchGraph((Node("qkv", "linear_bf16_amx", args),)).encode()
    with pytest.raises(_native.GraphError, match=r"'qkv', kernel linear_bf16_amx\): the kernel needs amx instr"):
        device.load_graph(data, 0)


def test_no_bytes_crash_the_reader(device: Any) -> None:
    data = bytearray(norm_graph(2).encode())

    def resealed(bytes_: bytearray) -> bytes:
        struct.pack_into("<I", bytes_, 8, len(bytes_))
        struct.pack_into("<I", bytes_, 32, zlib.crc32(bytes_[64:]))
        return bytes(bytes_)

    random_ = random.Random(3)
    refused = 0
    for trial in range(4000):
        hostile = bytearray(data)
        if trial % 3 == 0:
            del hostile[random_.randrange(64, len(hostile)) :]
        for _ in range(random_.randrange(1, 6)):
            hostile[random_.randrange(len(hostile))] = random_.choice((0, 1, 0x7F, 0x80, 0xFF, random_.randrange(256)))
        try:
            device.load_graph(resealed(hostile) if trial % 4 else bytes(hostile), 0)
        except _native.GraphError as error:
            assert str(error)
            refused += 1
    assert refused > 3000
    for position in range(len(data)):  # without a new checksum, every flipped bit is noticed
        data[position] ^= 0x10
        with pytest.raises(_native.GraphError):
            device.load_graph(bytes(data), 0)
        data[position] ^= 0x10


def test_the_kernel_table() -> None:
    table = _native.kernel_table()
    symbols = [symbol for symbol, _, _ in table]
    assert symbols == sorted(set(symbols)) and _native.KERNEL_ABI >= 1
    for op in ("embedding_bf16", "gather_rows_f32", "linear_f32", "paged_attention_f32", "rope_kv_write_f32", "sample"):
        assert f"{op}_avx2" in symbols and f"{op}_avx512" in symbols
    assert all(set(signature) <= set("pif") and scratch >= 0 for _, signature, scratch in table)


def test_ceilings_are_plausible() -> None:
    assert 1e8 < _native.measure_read_bandwidth(1, 8 << 20) < 1e13
    for dtype in ("float32", "bfloat16"):
        assert 1e8 < _native.measure_matmul(dtype, 1) < 1e15


# --- the sample kernel against the reference sampler ---------------------------------------------

VOCAB = 1000
SAMPLE_INPUTS = tuple(t for t in INPUTS if t.shape == ("R",) and t.name != "logit_rows")


def sample_device(rows: int, shards: int) -> tuple[Any, int, dict[str, Any]]:
    """A device with one sample node; its tensors by name, as arrays over the regions."""
    sizes = {"T": rows, "S": rows, "P": 1, "R": rows, "V": VOCAB, "C": 1}
    inputs, io_bytes = place((*SAMPLE_INPUTS, *OUTPUTS), sizes)
    state, state_bytes = place(STATE, sizes)
    device = _native.CpuDevice(2)
    device.allocate("arena", 2 * rows * VOCAB * 4)
    device.allocate("io", io_bytes)
    device.allocate("state", state_bytes)
    read = {t.name for t in SAMPLE_INPUTS}
    at = {t.name: Pointer(Region.IO, t.offset, t.nbytes, R if t.name in read else W) for t in inputs}
    at["last_tokens"] = Pointer(Region.STATE, state[0].offset, state[0].nbytes, RW)
    order = (*(t.name for t in SAMPLE_INPUTS), "last_tokens", *(t.name for t in OUTPUTS))
    logits, adjusted = (Pointer(Region.ARENA, i * rows * VOCAB * 4, rows * VOCAB * 4, R) for i in range(2))
    numbers = (StepScalar(2), Int(VOCAB), Int(shards))
    args: tuple[Argument, ...] = (logits, adjusted, *(at[name] for name in order), *numbers)
    graph = device.load_graph(LaunchGraph((Node("sample", f"sample_{ISA}", args),)).encode(), 0)
    arrays = {
        t.name: np.frombuffer(device.view(str(region)), t.dtype, int(np.prod(t.shape)), t.offset).reshape(t.shape)
        for region, tensors in ((Region.IO, inputs), (Region.STATE, state))
        for t in tensors
    }
    arrays["logits"], arrays["adjusted"] = np.frombuffer(device.view("arena"), np.float32).reshape(2, rows, VOCAB)
    return device, graph, arrays


@pytest.mark.parametrize("shards", [1, 8])
def test_sample_agrees_with_the_reference(shards: int) -> None:
    rows = 256
    device, graph, arrays = sample_device(rows, shards)
    rng = np.random.default_rng(7)
    arrays["logits"][:] = rng.normal(size=(rows, VOCAB)) * rng.choice([0.5, 2, 6], size=(rows, 1))
    arrays["logits"][::3] = np.round(arrays["logits"][::3] * 2) / 2  # exact ties
    arrays["logits"][5] = np.nan
    arrays["logits"][6, ::2] = np.nan
    arrays["adjusted"][:] = arrays["logits"][::-1] + 1
    arrays["logit_target"][:] = np.where(rng.random(rows) < 0.3, rng.integers(0, VOCAB, rows), -1)
    arrays["temperature"][:] = rng.choice([0, 0.5, 1, 1.7], size=rows)
    arrays["top_p"][:] = rng.choice([1, 0.9, 0.3], size=rows)
    arrays["min_p"][:] = rng.choice([0, 0.07], size=rows)
    arrays["top_k"][:] = rng.choice([0, 1, 12, 400], size=rows)
    arrays["seed"][:] = rng.integers(0, 1 << 63, size=rows, dtype=np.uint64)
    arrays["draw_position"][:] = rng.integers(0, 4096, size=rows)
    arrays["num_logprobs"][:] = rng.integers(-1, MAX_TOP_LOGPROBS + 1, size=rows)
    arrays["state_slot"][:] = np.where(rng.random(rows) < 0.5, np.arange(rows), -1)
    arrays["adjustment"][:] = np.where(rng.random(rows) < 0.4, rng.integers(0, rows, rows), -1)
    arrays["last_tokens"][:] = -7
    last_tokens = arrays["last_tokens"].copy()
    device.wait(device.submit(graph, rows, rows, rows))

    per_row = {name: arrays[name] for name in arrays if name not in ("logits", "adjusted")}
    token, logprob, rank, top_ids, top_logprobs, last = sampler.sample_rows(
        arrays["logits"], arrays["adjusted"], per_row, last_tokens, shards
    )
    np.testing.assert_array_equal(arrays["out_token"], token)
    np.testing.assert_array_equal(arrays["out_rank"], rank)
    np.testing.assert_array_equal(arrays["out_top_ids"], top_ids)
    np.testing.assert_array_equal(arrays["last_tokens"], last)
    np.testing.assert_allclose(arrays["out_logprob"], logprob, atol=2e-5)
    np.testing.assert_allclose(arrays["out_top_logprobs"], top_logprobs, atol=2e-5)
    device.close()
