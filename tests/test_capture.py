"""Capture: addresses are found and nothing else is, the driver's graph is read back whole, and templates bind."""

from __future__ import annotations

import ctypes
import itertools
import json
import struct
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from shutil import which
from subprocess import run
from typing import Any

import pytest

from tokenspeed.compile import capture_build, capture_worker
from tokenspeed.compile.capture import (
    ARGUMENT_SPAN,
    CapturedCall,
    CapturedLaunch,
    CapturedParameter,
    CaptureJob,
    RawLaunch,
    Relocation,
    job_key,
    launches_from_bytes,
    launches_to_bytes,
    relocate,
    stand_ins,
)
from tokenspeed.compile.capture_toolchain import source_folder
from tokenspeed.compile.cuda_driver import CudaDriver
from tokenspeed.errors import TargetError
from tokenspeed.graph import Access, Bytes, Int, Launch, LaunchGraph, Pointer, Region
from tokenspeed.graph_verify import verify_graph
from tokenspeed.kernels.library import LibraryKernel, parts, parts_bytes
from tokenspeed.target import Target

H200 = Target("cuda", "sm_90a")
Build = Callable[[tuple[int, ...]], Sequence[bytes]]


def raw(*parameters: bytes, symbol: str = "k", grid: tuple[int, int, int] = (4, 1, 2)) -> RawLaunch:
    return RawLaunch(symbol, grid, (128, 1, 1), (1, 1, 1), 4096, tuple(parameters))


def captured(build: Build, num_arguments: int) -> tuple[CapturedLaunch, ...]:
    """One launch whose parameters ``build`` makes from the addresses of the arguments, captured twice."""
    first, second = ([raw(*build(stand_ins(num_arguments, n)))] for n in (0, 1))
    return relocate(first, second, num_arguments, "here")


def parameters(build: Build, num_arguments: int) -> tuple[CapturedParameter, ...]:
    (launch,) = captured(build, num_arguments)
    return launch.parameters


# --- relocation -----------------------------------------------------------------------------------


def test_stand_ins_are_apart_and_no_two_move_alike() -> None:
    a, b = stand_ins(64, 0), stand_ins(64, 1)
    assert len({*a, *b}) == 128 and all(x % 256 == 0 and x + ARGUMENT_SPAN < 1 << 47 for x in (*a, *b))
    assert len({y - x for x, y in zip(a, b, strict=True)}) == 64
    ranges = sorted((*a, *b))
    assert all(y - x >= ARGUMENT_SPAN for x, y in itertools.pairwise(ranges))


def test_addresses_of_a_struct_become_arguments_and_offsets() -> None:
    def build(at: tuple[int, ...]) -> list[bytes]:
        return [
            struct.pack("<iiQfiQ", 7, -1, at[1] + 48, 0.5, 9, at[0]),
            struct.pack("<i", 3),
            struct.pack("<Q", at[1]),
        ]

    struct_, number, pointer = parameters(build, 2)
    assert struct_.data == struct.pack("<iiQfiQ", 7, -1, 0, 0.5, 9, 0)
    assert struct_.relocations == (Relocation(8, 1, 48), Relocation(24, 0, 0))
    assert number == CapturedParameter(struct.pack("<i", 3))
    assert pointer == CapturedParameter(bytes(8), (Relocation(0, 1, 0),))


def test_a_number_that_looks_like_an_address_stays_a_number() -> None:
    """It lies in the range of an argument in one capture, but does not move with it."""
    number = stand_ins(1, 0)[0] + 64

    def build(at: tuple[int, ...]) -> list[bytes]:
        return [struct.pack("<QQ", number, at[0])]

    (parameter,) = parameters(build, 1)
    assert parameter.data == struct.pack("<QQ", number, 0) and parameter.relocations == (Relocation(8, 0, 0),)


def test_a_byte_left_to_chance_is_refused() -> None:
    def padding(at: tuple[int, ...]) -> list[bytes]:
        return [struct.pack("<iBBBBQ", 1, 2, 0, 0, at[0] & 1 | (at[0] >> 40 & 0xFE), at[0])]

    with pytest.raises(
        TargetError, match=r"here: parameter 0 of k: need bytes that depend on nothing but addresses"
    ) as e:
        captured(padding, 1)
    assert "at 7, which are no address of an argument" in e.value.message
    assert e.value.hint == "zero the launcher's structs before they are filled: padding must not be left to chance"


@pytest.mark.parametrize(
    "build",
    [
        pytest.param(lambda at: [b"\0\0\0\0" + struct.pack("<Q", at[0]) + b"\0\0\0\0"], id="unaligned"),
        pytest.param(lambda at: [struct.pack("<I", at[0] >> 32), struct.pack("<Q", at[0])], id="half of one"),
        pytest.param(lambda at: [struct.pack("<Q", at[0] - 8)], id="before the argument"),
        pytest.param(lambda at: [struct.pack("<Q", at[0] >> 4)], id="encoded"),
        pytest.param(lambda at: [struct.pack("<Q", at[0] ^ at[1]), struct.pack("<QQ", *at)], id="of two by xor"),
        pytest.param(lambda at: [struct.pack("<Q", abs(at[0] - at[1])), struct.pack("<QQ", *at)], id="a distance"),
    ],
)
def test_what_holds_an_address_that_cannot_be_relocated_is_refused(build: Build) -> None:
    with pytest.raises(TargetError, match="which are no address of an argument"):
        captured(build, 2)


def test_launches_must_not_depend_on_addresses() -> None:
    a, b = raw(struct.pack("<Q", stand_ins(1, 0)[0])), raw(struct.pack("<Q", stand_ins(1, 1)[0]))
    for first, second in (([a, a], [b]), ([a], [replace(b, grid=(5, 1, 2))]), ([a], [replace(b, symbol="other")])):
        with pytest.raises(TargetError, match=r"here: need equal launches whatever the addresses, have k \(4, 1, 2\)"):
            relocate(first, second, 1, "here")
    with pytest.raises(TargetError, match="need parameters of equal sizes in both captures of k"):
        relocate([a], [replace(b, parameters=(bytes(16),))], 1, "here")


def test_an_argument_that_reaches_no_kernel_is_an_error() -> None:
    with pytest.raises(TargetError, match="here: need every pointer to be passed to a kernel, have none that"):
        captured(lambda at: [struct.pack("<Q", at[0])], 2)


# --- binding --------------------------------------------------------------------------------------

IN = Pointer(Region.IO, 64, 256, Access.READ)
OUT = Pointer(Region.ARENA, 128, 64, Access.WRITE)


def call() -> CapturedCall:
    def build(at: tuple[int, ...]) -> list[bytes]:
        return [struct.pack("<QiiQi", at[0] + 16, 5, 6, at[1], -2), struct.pack("<Q", at[1]), struct.pack("<i", -4)]

    first, second = (
        [raw(*build(stand_ins(2, n))), raw(struct.pack("<Q", stand_ins(2, n)[1]), bytes(8), symbol="m")] for n in (0, 1)
    )
    return CapturedCall("lib-01", relocate(first, second, 2, "here"))


def test_a_captured_call_becomes_nodes() -> None:
    first, second = call().nodes("layers.3.attention", (IN, OUT))
    inside = Pointer(Region.IO, 80, 240, Access.READ)
    assert first.name == "layers.3.attention" and second.name == "layers.3.attention.1" and second.symbol == "m"
    assert first.args == (Bytes(struct.pack("<QiiQi", 0, 5, 6, 0, -2), ((0, inside), (16, OUT))), OUT, Int(-4, 4))
    assert second.args == (OUT, Int(0, 8))
    assert first.launch == Launch("lib-01", (4, 1, 2), (128, 1, 1), 4096)
    graph = LaunchGraph((first, replace(second, predecessors=(0,))))
    assert LaunchGraph.decode(graph.encode()) == graph
    verify_graph(graph, {Region.IO: 320, Region.ARENA: 192}, 0)
    with pytest.raises(Exception, match="need 320 bytes of region io, have 319"):
        verify_graph(graph, {Region.IO: 319, Region.ARENA: 192}, 0)


def test_an_address_beyond_its_argument_is_refused() -> None:
    with pytest.raises(
        TargetError, match=r"k: need addresses inside the arguments, have byte 16 of io\[64:80\]r, argu"
    ):
        list(call().nodes("n", (replace(IN, extent=16), OUT)))


def test_a_captured_call_survives_the_cache() -> None:
    launches = call().launches
    assert launches_from_bytes(launches_to_bytes(launches)) == launches


def test_parts_of_a_workspace() -> None:
    placed = parts(request=4, valid=65, chunk=4)
    assert [(p.name, p.offset, p.nbytes) for p in placed] == [("request", 0, 4), ("valid", 64, 65), ("chunk", 192, 4)]
    assert parts_bytes(placed) == 196 and parts_bytes(()) == 0
    kernel = LibraryKernel("flashinfer", "flashinfer/decode.cu", "f", (("A", 1),), (("n", 2),), placed)
    assert kernel.part("valid") == placed[1] and str(kernel) == "f[A=1, n=2]"


def test_the_key_of_a_call_holds_all_that_its_launches_depend_on() -> None:
    kernel = LibraryKernel("flashinfer", "flashinfer/decode.cu", "f", (("A", 1),), (("n", 2),))
    jobs = [
        CaptureJob(kernel, 3, (0.5,)),
        CaptureJob(kernel, 3, (0.25,)),
        CaptureJob(kernel, 4, (0.5,)),
        CaptureJob(replace(kernel, integers=(("n", 3),)), 3, (0.5,)),
        CaptureJob(replace(kernel, function="g"), 3, (0.5,)),
    ]
    assert len({job_key(job, launcher) for job in jobs for launcher in ("a", "b")}) == 10


# --- the driver -----------------------------------------------------------------------------------


class FakeCuda:
    """A libcuda whose graphs hold what a test puts there; nodes are handles from 1, functions from 1001."""

    def __init__(self) -> None:
        self.nodes: list[int] = []
        self.kinds: dict[int, int] = {}
        self.edges: list[tuple[int, int]] = []
        self.functions: dict[int, tuple[str, tuple[int, ...]]] = {}
        self.launches: dict[int, tuple[int, Any, tuple[bytes, ...]]] = {}
        self.attributes: dict[tuple[int, int], tuple[int, ...]] = {}
        self.required: dict[int, int] = {}
        self.by_kernel: set[int] = set()
        self.calls: list[str] = []
        self.fail: dict[str, int] = {}
        self._keep: list[Any] = []

    def kernel(self, symbol: str, *values: bytes, after: Sequence[int] = (), grid: Any = (3, 2, 1)) -> int:
        node = self.add(0, after)
        self.functions[1000 + node] = (symbol, tuple(map(len, values)))
        self.launches[node] = (1000 + node, grid, values)
        return node

    def add(self, kind: int, after: Sequence[int] = ()) -> int:
        node = len(self.nodes) + 1
        self.nodes.append(node)
        self.kinds[node] = kind
        self.edges += [(a, node) for a in after]
        return node

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("cu"):
            raise AttributeError(name)
        body = getattr(FakeCuda, f"_{name}", None)

        def function(*args: Any) -> int:
            self.calls.append(name)
            if name in self.fail:
                return self.fail[name]
            return (body(self, *args) if body is not None else None) or 0

        return function

    def _cuGetErrorName(self, code: Any, text: Any) -> None:
        text._obj.value = {700: b"CUDA_ERROR_ILLEGAL_ADDRESS"}.get(code.value, b"CUDA_ERROR_UNKNOWN")

    def _cuStreamCreate(self, stream: Any, flags: Any) -> None:
        stream._obj.value = 77

    def _cuStreamEndCapture(self, stream: Any, graph: Any) -> None:
        assert stream.value == 77
        graph._obj.value = 88

    def _cuGraphGetNodes(self, graph: Any, nodes: Any, count: Any) -> None:
        for i, node in enumerate(reversed(self.nodes)):
            if nodes is not None:
                nodes[i] = node
        count._obj.value = len(self.nodes)

    def _cuGraphGetEdges_v2(self, graph: Any, sources: Any, ends: Any, data: Any, count: Any) -> None:
        for i, (source, end) in enumerate(self.edges):
            if sources is not None:
                sources[i], ends[i] = source, end
        count._obj.value = len(self.edges)

    def _cuGraphNodeGetType(self, node: Any, kind: Any) -> None:
        kind._obj.value = self.kinds[node.value]

    def _cuGraphKernelNodeGetParams_v2(self, node: Any, params: Any) -> None:
        function, grid, values = self.launches[node.value]
        buffers = [ctypes.create_string_buffer(value, len(value)) for value in values]
        array = (ctypes.c_void_p * max(1, len(values)))(*map(ctypes.addressof, buffers))
        self._keep += [buffers, array]
        to = params._obj
        to.func, to.kern = (None, 5000 + function) if function in self.by_kernel else (function, None)
        to.grid, to.block, to.shared_bytes = grid, (64, 2, 1), 512
        to.params = ctypes.cast(array, ctypes.POINTER(ctypes.c_void_p))

    def _cuKernelGetFunction(self, function: Any, kernel: Any) -> None:
        function._obj.value = kernel.value - 5000

    def _cuFuncGetName(self, name: Any, function: Any) -> None:
        name._obj.value = self.functions[function.value][0].encode()

    def _cuFuncGetParamInfo(self, function: Any, index: Any, offset: Any, size: Any) -> int:
        sizes = self.functions[function.value][1]
        if index.value >= len(sizes):
            return 1
        size._obj.value = sizes[index.value]
        return 0

    def _cuGraphKernelNodeGetAttribute(self, node: Any, attribute: Any, value: Any) -> None:
        for i, word in enumerate(self.attributes.get((node.value, attribute.value), ())):
            value._obj[i] = word

    def _cuFuncGetAttribute(self, value: Any, attribute: Any, function: Any) -> None:
        value._obj.value = self.required.get(attribute.value, 0)

    def _cuDeviceGetCount(self, count: Any) -> None:
        count._obj.value = 1

    def _cuDeviceGetName(self, text: Any, size: Any, ordinal: Any) -> None:
        text.value = b"NVIDIA H200"

    def _cuDeviceGetAttribute(self, value: Any, attribute: Any, ordinal: Any) -> None:
        value._obj.value = {75: 9, 76: 0}[attribute.value]


def walk(cuda: FakeCuda) -> tuple[RawLaunch, ...]:
    return CudaDriver(cuda).capture(77, lambda: None)


def test_a_graph_is_read_back_in_an_order_that_respects_its_edges() -> None:
    cuda = FakeCuda()
    plan = cuda.kernel("plan", b"12345678", b"abcd")
    empty = cuda.add(5, [plan])
    decode = cuda.kernel("decode", b"x" * 232, after=[empty], grid=(7, 8, 1))
    cuda.kernel("merge", after=[decode])
    cuda.by_kernel = {1000 + decode}
    first, second, third = walk(cuda)
    assert first == RawLaunch("plan", (3, 2, 1), (64, 2, 1), (1, 1, 1), 512, (b"12345678", b"abcd"))
    assert second.symbol == "decode" and second.grid == (7, 8, 1) and second.parameters == (b"x" * 232,)
    assert third.symbol == "merge" and third.parameters == ()
    assert cuda.calls[-1] == "cuGraphDestroy"
    assert RawLaunch.from_json(json.loads(json.dumps(first.to_json()))) == first


def test_clusters_come_from_the_launch_or_else_from_the_kernel() -> None:
    cuda = FakeCuda()
    node = cuda.kernel("k")
    cuda.required = {11: 2, 12: 1, 13: 1}
    assert walk(cuda)[0].cluster == (2, 1, 1)
    cuda.attributes[node, 4] = (1, 4, 1)
    assert walk(cuda)[0].cluster == (1, 4, 1)


def test_what_is_no_plain_kernel_launch_is_refused() -> None:
    cuda = FakeCuda()
    cuda.add(2)
    with pytest.raises(TargetError, match="need a launcher that launches kernels alone, have a memset node"):
        walk(cuda)
    assert cuda.calls[-1] == "cuGraphDestroy"
    cuda = FakeCuda()
    cuda.attributes[cuda.kernel("grid_sync"), 2] = (1,)
    with pytest.raises(TargetError, match="need grid_sync launched with separate parameters and not cooperatively"):
        walk(cuda)


def test_errors_of_the_driver_are_named() -> None:
    cuda = FakeCuda()
    cuda.fail["cuStreamEndCapture"] = 700
    with pytest.raises(TargetError, match="capture: cuStreamEndCapture failed: CUDA_ERROR_ILLEGAL_ADDRESS"):
        walk(cuda)

    def broken() -> None:
        raise TargetError("the launcher says no")

    with pytest.raises(TargetError, match="the launcher says no"):
        CudaDriver(cuda).capture(77, broken)

    class Old:
        def cuInit(self, flags: Any) -> int:
            return 0

    with pytest.raises(TargetError, match="need a driver with cuDeviceGetCount, have an older one"):
        CudaDriver(Old()).devices()


def test_devices_and_streams() -> None:
    cuda = FakeCuda()
    driver = CudaDriver(cuda)
    assert driver.devices() == [("NVIDIA H200", (9, 0))]
    with driver.stream(0) as stream:
        assert stream == 77
    assert cuda.calls[-2:] == ["cuStreamDestroy_v2", "cuDevicePrimaryCtxRelease_v2"]


# --- the plan of FlashInfer's attention -------------------------------------------------------------

PLAN_SIZES = ("num_seqs", "pages_per_seq", "page_size", "tiles", "query_rows", "group", "min_chunk")


@pytest.fixture(scope="module")
def plan_program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """kernels/flashinfer/plan.cuh as a program of the host."""
    if which("g++") is None:
        pytest.skip("needs a C++ compiler")
    source = (source_folder() / "flashinfer" / "plan.cuh").read_text()
    for old, new in (
        ("#pragma once", ""),
        ("#include <cuda_runtime.h>", ""),
        ("constexpr int kPlanThreads = 256;", "constexpr int kPlanThreads = kThreads;"),
        ("extern __shared__ int32_t first_tile[];", "static int32_t first_tile[4096];"),
        ("__shared__ int32_t scratch", "static int32_t scratch"),
    ):
        assert source.count(old) == 1, old
        source = source.replace(old, new)
    folder = tmp_path_factory.mktemp("plan")
    program = (Path(__file__).parent / "capture_plan.cpp").read_text().replace("\nPLAN\n", f"\n{source}\n")
    (folder / "plan.cpp").write_text(program)
    run(["g++", "-std=c++20", "-O1", "-pthread", "-o", folder / "plan", folder / "plan.cpp"], check=True)
    return folder / "plan"


def run_plan(program: Path, sizes: dict[str, int], lengths: list[int], contexts: list[int]) -> dict[str, list[int]]:
    numbers = [*(sizes[name] for name in PLAN_SIZES), len(lengths), *lengths, *contexts]
    printed = run([program], input=" ".join(map(str, numbers)), capture_output=True, text=True, check=True).stdout
    return {name: [int(n) for n in values] for name, *values in (line.split() for line in printed.splitlines())}


def check_lengths(plan: dict[str, list[int]], sizes: dict[str, int], contexts: list[int]) -> None:
    """FlashInfer's arithmetic in unsigned 32 bits gives each sequence its length, and its row of the page table."""
    pages, page_size = sizes["pages_per_seq"], sizes["page_size"]
    assert plan["indptr"] == [pages * i for i in range(sizes["num_seqs"] + 1)]
    got = [((pages - 1) * page_size + last) % 2**32 for last in plan["last"]]
    assert got == contexts + [1] * (sizes["num_seqs"] - len(contexts))


@pytest.mark.parametrize(
    ("contexts", "seqs", "spare", "chunk"),
    [
        ([1000], 1, 64, 128),
        ([1], 4, 8, 128),
        ([5000, 3, 128, 129, 2000, 1], 8, 4, 1024),
        ([4096] * 32, 32, 64, 1536),
        ([128] * 70 + [8192], 128, 2, 256),
        ([64, 640], 2, 0, 640),
    ],
)
def test_the_plan_of_a_decode_step_covers_every_position_once(
    plan_program: Path, contexts: list[int], seqs: int, spare: int, chunk: int
) -> None:
    sizes = {"num_seqs": seqs, "pages_per_seq": 128, "page_size": 64, "tiles": seqs + spare, "query_rows": 0,
             "group": 1, "min_chunk": 128}  # fmt: skip
    plan = run_plan(plan_program, sizes, [1] * len(contexts), contexts)
    check_lengths(plan, sizes, contexts)
    assert plan["chunk"] == [chunk]
    pieces = [(seq, piece) for seq, context in enumerate(contexts) for piece in range(-(-context // chunk))]
    assert list(zip(plan["request"], plan["kv"], strict=True))[: len(pieces)] == pieces
    assert plan["valid"] == [1] * len(pieces) + [0] * (seqs + spare - len(pieces))
    counts = [-(-context // chunk) for context in contexts] + [0] * (seqs - len(contexts))
    assert plan["out"] == [0, *itertools.accumulate(counts)]
    smaller = [c for c in range(128, chunk, 128) if sum(-(-n // c) for n in contexts) <= seqs + spare]
    assert not smaller or smaller[0] >= chunk * 0.75  # no finer cut that is a rung of the ladder


def test_a_plan_without_cuts_gives_each_sequence_a_block(plan_program: Path) -> None:
    sizes = {"num_seqs": 70, "pages_per_seq": 4, "page_size": 64, "tiles": 70, "query_rows": 0, "group": 1,
             "min_chunk": 0}  # fmt: skip
    contexts = [1 + 3 * i for i in range(66)]
    plan = run_plan(plan_program, sizes, [1] * 66, contexts)
    check_lengths(plan, sizes, contexts)
    assert plan["request"][:66] == list(range(66)) and plan["valid"] == [1] * 66 + [0] * 4 and plan["chunk"] == [0]


def test_the_plan_of_a_mixed_step_covers_every_row_once_and_the_last_first(plan_program: Path) -> None:
    lengths = [1, 1, 700, 33, 32, 31, 1, 300]
    contexts = [5, 900, 700, 40, 32, 64, 1, 301]
    sizes = {"num_seqs": 12, "pages_per_seq": 16, "page_size": 64, "tiles": 1200 * 3 // 64 + 12, "query_rows": 64,
             "group": 3, "min_chunk": 0}  # fmt: skip
    plan = run_plan(plan_program, sizes, lengths, contexts)
    check_lengths(plan, sizes, contexts)
    tiles = [(seq, tile) for seq, length in enumerate(lengths) for tile in range(-(-length * 3 // 64))]
    assert list(zip(plan["request"], plan["query"], strict=True))[: len(tiles)] == tiles[::-1]
    assert plan["valid"] == [1] * len(tiles) + [0] * (sizes["tiles"] - len(tiles))
    assert set(plan["kv"]) == {0}


# --- whole builds -----------------------------------------------------------------------------------

LAUNCHER = r"""
#include <cstdint>
extern "C" const char* fine(void*, void* const* pointers, const int64_t* integers, const double* floats) {
  return pointers[1] > pointers[0] && integers[0] == 5 && floats[0] == 0.25 ? nullptr : "other arguments";
}
extern "C" const char* tokenspeed_launcher_prepare() { return nullptr; }
extern "C" const char* broken(void*, void* const*, const int64_t*, const double*) { return "no such kernel"; }
"""


@pytest.fixture(scope="module")
def launcher(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A launcher that launches nothing, compiled for the host."""
    if which("g++") is None:
        pytest.skip("needs a C++ compiler")
    folder = tmp_path_factory.mktemp("launcher")
    (folder / "launcher.cpp").write_text(LAUNCHER)
    run(["g++", "-shared", "-fPIC", "-o", folder / "launcher.so", folder / "launcher.cpp"], check=True)
    return str(folder / "launcher.so")


def test_the_worker_calls_a_launcher_twice_and_reads_what_it_launched(launcher: str) -> None:
    cuda = FakeCuda()
    cuda.kernel("k", b"12345678")
    job = {"launcher": launcher, "function": "fine", "num_pointers": 2, "integers": [5], "floats": [0.25]}
    with pytest.raises(TargetError, match="fine: other arguments"):  # the second capture has them the other way round
        capture_worker.capture_all(CudaDriver(cuda), {"device": 0, "jobs": [job]})
    assert cuda.calls.count("cuStreamEndCapture") == 2
    with pytest.raises(TargetError, match="broken: no such kernel"):
        capture_worker.capture_all(CudaDriver(cuda), {"device": 0, "jobs": [{**job, "function": "broken"}]})
    found = capture_worker.capture_all(CudaDriver(cuda), {"device": 0, "jobs": []})
    assert found == []


def test_a_machine_without_a_gpu_says_what_is_needed() -> None:
    if Path("/dev/nvidia0").exists():
        pytest.skip("this machine has a GPU")
    with pytest.raises(TargetError, match=r"capture: need an NVIDIA driver \(libcuda.so.1\), have none") as e:
        capture_build._device_of(H200)
    assert e.value.hint == "build on a machine with a GPU of the target"


def test_another_gpu_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(capture_build, "_run_worker", lambda request: {"devices": [["NVIDIA H200", [9, 0]]]})
    assert capture_build._device_of(H200) == 0
    with pytest.raises(TargetError, match=r"need a GPU of cuda:sm_100a on this machine, have NVIDIA H200 \(sm_90\)"):
        capture_build._device_of(Target("cuda", "sm_100a"))
    assert capture_build.capture_problem("flashinfer", Target("hip", "gfx942")) == (
        "need a CUDA target to capture for, have hip:gfx942"
    )
