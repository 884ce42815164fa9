"""Capture: the driver's graph is read back whole, and what a worker does with a launcher and a GPU."""

from __future__ import annotations

import ctypes
import json
from collections.abc import Sequence
from pathlib import Path
from shutil import which
from subprocess import run
from typing import Any

import pytest

from tokenspeed.compile import capture_build, capture_worker
from tokenspeed.compile.capture import RawLaunch
from tokenspeed.compile.cuda_driver import CudaDriver
from tokenspeed.errors import TargetError
from tokenspeed.target import Target

H200 = Target("cuda", "sm_90a")


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
