"""The CUDA driver, as far as capture needs it, through ctypes: contexts, stream capture, and reading a graph back.

Only a build that captures loads this, in a process of its own (capture_worker.py). Structs and numbers are those of
cuda.h (CUDA Driver API, sections "Stream Management", "Graph Management", "Execution Control"); the newest call
used, cuFuncGetParamInfo, came with CUDA 12.4.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from ctypes import POINTER, byref, c_char_p, c_int, c_size_t, c_uint, c_uint8, c_void_p
from typing import Any

from tokenspeed.compile.capture import RawLaunch
from tokenspeed.errors import TargetError
from tokenspeed.graph import Dim3

_KERNEL, _EMPTY = 0, 5
_NODE_KINDS = ("kernel", "memcpy", "memset", "host", "graph", "empty", "event wait", "event record")
_INVALID_VALUE = 1
_NON_BLOCKING, _RELAXED = 1, 2
_COMPUTE_CAPABILITY_MAJOR, _COMPUTE_CAPABILITY_MINOR = 75, 76
_COOPERATIVE, _CLUSTER_DIMENSION = 2, 4
_REQUIRED_CLUSTER = (11, 12, 13)
_MAX_PARAMETERS = 1024


class _KernelNodeParams(ctypes.Structure):
    """CUDA_KERNEL_NODE_PARAMS_v2."""

    _fields_ = (
        ("func", c_void_p),
        ("grid", c_uint * 3),
        ("block", c_uint * 3),
        ("shared_bytes", c_uint),
        ("params", POINTER(c_void_p)),
        ("extra", c_void_p),
        ("kern", c_void_p),
        ("context", c_void_p),
    )


class _EdgeData(ctypes.Structure):
    """CUgraphEdgeData."""

    _fields_ = (("from_port", c_uint8), ("to_port", c_uint8), ("type", c_uint8), ("reserved", c_uint8 * 5))


class CudaDriver:
    """Calls of libcuda. ``library`` is it, or a stand-in with the same functions. Raises TargetError."""

    def __init__(self, library: Any = None):
        self._library = _load() if library is None else library
        self._call("cuInit", c_uint(0))

    def devices(self) -> list[tuple[str, tuple[int, int]]]:
        """(name, compute capability) of each GPU, by ordinal."""
        count = c_int()
        self._call("cuDeviceGetCount", byref(count))
        return [(self._name(ordinal), self._capability(ordinal)) for ordinal in range(count.value)]

    def _name(self, ordinal: int) -> str:
        text = ctypes.create_string_buffer(256)
        self._call("cuDeviceGetName", text, c_int(len(text)), c_int(ordinal))
        return text.value.decode(errors="replace")

    def _capability(self, ordinal: int) -> tuple[int, int]:
        major, minor = c_int(), c_int()
        self._call("cuDeviceGetAttribute", byref(major), c_int(_COMPUTE_CAPABILITY_MAJOR), c_int(ordinal))
        self._call("cuDeviceGetAttribute", byref(minor), c_int(_COMPUTE_CAPABILITY_MINOR), c_int(ordinal))
        return major.value, minor.value

    @contextmanager
    def stream(self, ordinal: int) -> Iterator[int]:
        """A stream of the device's primary context, which is current inside; libraries launch there too."""
        context, stream = c_void_p(), c_void_p()
        self._call("cuDevicePrimaryCtxRetain", byref(context), c_int(ordinal))
        try:
            self._call("cuCtxSetCurrent", context)
            self._call("cuStreamCreate", byref(stream), c_uint(_NON_BLOCKING))
            try:
                yield stream.value or 0
            finally:
                self._call("cuStreamDestroy_v2", stream)
        finally:
            self._call("cuDevicePrimaryCtxRelease_v2", c_int(ordinal))

    def capture(self, stream: int, launch: Callable[[], None]) -> tuple[RawLaunch, ...]:
        """The kernels that ``launch`` puts into ``stream``, in an order that respects their edges. None runs."""
        graph = c_void_p()
        self._call("cuStreamBeginCapture_v2", c_void_p(stream), c_int(_RELAXED))
        try:
            launch()
        except BaseException:
            self._library.cuStreamEndCapture(c_void_p(stream), byref(graph))  # it fails too: the first error counts
            raise
        self._call("cuStreamEndCapture", c_void_p(stream), byref(graph))
        try:
            return tuple(self._launch(node) for node in self._nodes(graph))
        finally:
            self._call("cuGraphDestroy", graph)

    def _nodes(self, graph: c_void_p) -> list[int]:
        """Kernel nodes in topological order, first recorded first."""
        count = c_size_t()
        self._call("cuGraphGetNodes", graph, None, byref(count))
        nodes = (c_void_p * count.value)()
        if count.value:
            self._call("cuGraphGetNodes", graph, nodes, byref(count))
        waiting = [node or 0 for node in nodes]
        before = self._predecessors(graph)
        done: list[int] = []
        while waiting:
            ready = next(node for node in waiting if before.get(node, set()) <= set(done))
            waiting.remove(ready)
            done.append(ready)
        return [node for node in done if self._is_kernel(node)]

    def _predecessors(self, graph: c_void_p) -> dict[int, set[int]]:
        count = c_size_t()
        self._call("cuGraphGetEdges_v2", graph, None, None, None, byref(count))
        sources, ends, data = (c_void_p * count.value)(), (c_void_p * count.value)(), (_EdgeData * count.value)()
        if count.value:
            self._call("cuGraphGetEdges_v2", graph, sources, ends, data, byref(count))
        before: dict[int, set[int]] = {}
        for source, end in zip(sources, ends, strict=True):
            before.setdefault(end or 0, set()).add(source or 0)
        return before

    def _is_kernel(self, node: int) -> bool:
        kind = c_int()
        self._call("cuGraphNodeGetType", c_void_p(node), byref(kind))
        if kind.value not in (_KERNEL, _EMPTY):
            name = _NODE_KINDS[kind.value] if kind.value < len(_NODE_KINDS) else f"kind {kind.value}"
            raise TargetError(
                f"capture: need a launcher that launches kernels alone, have a {name} node",
                hint="let a kernel of the launcher do it",
            )
        return kind.value == _KERNEL

    def _launch(self, node: int) -> RawLaunch:
        params = _KernelNodeParams()
        self._call("cuGraphKernelNodeGetParams_v2", c_void_p(node), byref(params))
        function = c_void_p(params.func)
        if not params.func:
            self._call("cuKernelGetFunction", byref(function), c_void_p(params.kern))
        name = c_char_p()
        self._call("cuFuncGetName", byref(name), function)
        symbol = (name.value or b"").decode()
        if params.extra or self._attribute(node, _COOPERATIVE)[0]:
            raise TargetError(
                f"capture: need {symbol} launched with separate parameters and not cooperatively, have it otherwise",
                hint="choose another solution for this op with --solution",
            )
        values = [ctypes.string_at(params.params[i], size) for i, size in enumerate(self._parameter_sizes(function))]
        return RawLaunch(
            symbol, _dims(params.grid), _dims(params.block), self._cluster(node, function), params.shared_bytes,
            tuple(values),
        )  # fmt: skip

    def _parameter_sizes(self, function: c_void_p) -> Iterator[int]:
        for index in range(_MAX_PARAMETERS):
            offset, size = c_size_t(), c_size_t()
            code = self._library.cuFuncGetParamInfo(function, c_size_t(index), byref(offset), byref(size))
            if code == _INVALID_VALUE:
                return
            self._check("cuFuncGetParamInfo", code)
            yield size.value

    def _cluster(self, node: int, function: c_void_p) -> Dim3:
        """From the launch, else what the kernel demands."""
        asked = self._attribute(node, _CLUSTER_DIMENSION)
        if asked[0]:
            return asked[0], asked[1], asked[2]
        required = []
        for attribute in _REQUIRED_CLUSTER:
            value = c_int()
            self._call("cuFuncGetAttribute", byref(value), c_int(attribute), function)
            required.append(max(1, value.value))
        return required[0], required[1], required[2]

    def _attribute(self, node: int, attribute: int) -> Any:
        """A launch attribute of a kernel node: the first words of a CUlaunchAttributeValue of 64 bytes."""
        value = (c_uint * 16)()
        self._call("cuGraphKernelNodeGetAttribute", c_void_p(node), c_int(attribute), byref(value))
        return value

    def _call(self, name: str, *args: Any) -> None:
        function = getattr(self._library, name, None)
        if function is None:
            raise TargetError(
                f"capture: need a driver with {name}, have an older one", hint="update the driver to CUDA 12.4 or later"
            )
        self._check(name, function(*args))

    def _check(self, name: str, code: int) -> None:
        if code == 0:
            return
        text = c_char_p()
        known = self._library.cuGetErrorName(c_int(code), byref(text)) == 0 and text.value
        raise TargetError(
            f"capture: {name} failed: {text.value.decode() if known and text.value else f'error {code}'}",
            hint="see that no other process uses up the GPU, and that `nvidia-smi` shows it",
        )


def _dims(values: Any) -> Dim3:
    x, y, z = values
    return x, y, z


def _load() -> Any:
    try:
        return ctypes.CDLL("libcuda.so.1")
    except OSError:
        raise TargetError(
            "capture: need an NVIDIA driver (libcuda.so.1), have none",
            hint="build on a machine with a GPU of the target",
        ) from None
