"""Runs Triton kernels, and whole LaunchGraphs made of them, on the CPU: the oracle of the GPU targets.

Triton's own interpreter (triton.runtime.interpreter) executes a kernel's Python on NumPy arrays. It wants
torch tensors, computes bfloat16 as if it were integers, and checks no address. This module drives its pieces
instead: pointers are plain addresses, bfloat16 and fused multiply-add round as a GPU does, sums run in float64
so that their order does not show, and every load and store must lie inside memory that the caller named.
Functions compiled by ``triton.jit`` work as they are; TRITON_INTERPRET need not be set, but may be.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import product
from typing import Any, TypeAlias

import ml_dtypes
import numpy as np
import numpy.typing as npt
import triton.language as tl
from triton.runtime import interpreter as stock
from triton.runtime.jit import JITFunction

from tokenspeed.compile.interpret_graph import Memory
from tokenspeed.compile.lower import SCRATCH_PARAMETERS
from tokenspeed.errors import ProgramError
from tokenspeed.graph import Access, Argument, LaunchGraph, Node, Pointer, Region, StepScalar
from tokenspeed.kernels.registry import DeviceKernel
from tokenspeed.step import PlacedTensor

Array: TypeAlias = npt.NDArray[Any]
Scalar: TypeAlias = int | float

_BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
_TYPES: Mapping[str, Any] = {
    "fp32": tl.float32, "fp64": tl.float64, "fp16": tl.float16, "bf16": tl.bfloat16, "i1": tl.int1,
    "i8": tl.int8, "i16": tl.int16, "i32": tl.int32, "i64": tl.int64,
    "u8": tl.uint8, "u16": tl.uint16, "u32": tl.uint32, "u64": tl.uint64,
}  # fmt: skip
"""Triton's types by the names that signatures use."""


# --- LaunchGraphs ---------------------------------------------------------------------------------


def run_gpu_graph(
    graph: LaunchGraph,
    kernels: Mapping[str, DeviceKernel],
    memory: Memory,
    step_sizes: PlacedTensor,
    sizes: tuple[int, int, int],
    *,
    order: Sequence[int] | None = None,
    seed: int | None = None,
) -> None:
    """Run one step of a GPU graph, node by node.

    Args:
        kernels: binary name -> the kernel in it.
        memory: the device's regions; inputs are in place but for ``step_sizes``, which this fills.
        step_sizes: where region io holds the sizes of the step.
        sizes: num_tokens, num_seqs, num_logit_rows.
        order: any order of the nodes that respects the edges; None: as they stand.
        seed: run the programs of each launch in a random order.

    Raises:
        ProgramError: a node that does not fit its kernel, an order that breaks an edge, or an access outside what
            the node's pointers promise.
    """
    memory.regions[Region.IO][step_sizes.offset : step_sizes.offset + step_sizes.nbytes].view(np.int32)[:] = (*sizes, 0)
    done: set[int] = set()
    with _interpreting():
        for index in range(len(graph.nodes)) if order is None else order:
            node = graph.nodes[index]
            if not done.issuperset(node.predecessors):
                raise ProgramError(f"node {node.name!r} ({node.symbol}): need its predecessors to have run")
            launch = _node_launch(node, kernels, memory, None if seed is None else seed + index)
            try:
                run_launch(launch)
            except ProgramError as error:
                raise ProgramError(f"node {node.name!r}: {error.message}", hint=error.hint) from error
            done.add(index)


def _node_launch(node: Node, kernels: Mapping[str, DeviceKernel], memory: Memory, seed: int | None) -> KernelLaunch:
    kernel = None if node.launch is None else kernels.get(node.launch.binary)
    if node.launch is None or kernel is None or kernel.function != node.symbol:
        raise ProgramError(f"node {node.name!r} ({node.symbol}): need a binary of this kernel, have {node.launch}")
    args, need = node.args[: len(kernel.signature)], len(kernel.signature) + len(SCRATCH_PARAMETERS)
    if len(node.args) != need or node.args[len(args) :] != SCRATCH_PARAMETERS:
        raise ProgramError(f"node {node.name!r}: need {need} arguments for {kernel}, the last ones null, have {node}")
    arguments, windows = {}, []
    for (name, kind), arg in zip(kernel.signature, args, strict=True):
        if isinstance(arg, StepScalar) or isinstance(arg, Pointer) != kind.startswith("*"):
            raise ProgramError(f"node {node.name!r} argument {name}: need {kind}, have {arg}")
        arguments[name] = (kind, _value(arg, memory))
        if isinstance(arg, Pointer):
            windows.append(_window(name, arg, memory))
    # The interpreter runs one kernel after another: there is nothing to wait for.
    constants = {**dict(kernel.constants), "PDL": False} if "PDL" in dict(kernel.constants) else dict(kernel.constants)
    function = getattr(importlib.import_module(kernel.module), kernel.function)
    return KernelLaunch(function, node.launch.grid, arguments, constants, windows, seed)


def _value(arg: Argument, memory: Memory) -> Scalar:
    assert not isinstance(arg, StepScalar), arg
    return _address(arg, memory) if isinstance(arg, Pointer) else arg.value


def _address(pointer: Pointer, memory: Memory) -> int:
    return int(memory.regions[pointer.region].ctypes.data) + pointer.offset


def _window(name: str, pointer: Pointer, memory: Memory) -> Window:
    """What ``pointer`` promises: its extent; of region kv, that much of every page."""
    paged = pointer.region is Region.KV
    return Window(
        name,
        _address(pointer, memory),
        pointer.extent,
        readable=bool(pointer.access & Access.READ),
        writable=bool(pointer.access & Access.WRITE),
        stride=memory.kv_page_bytes if paged else 0,
        count=len(memory.regions[Region.KV]) // memory.kv_page_bytes if paged else 1,
    )


# --- launches -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Window:
    """Memory that a launch may touch: ``count`` pieces of ``nbytes`` that start ``stride`` bytes apart."""

    name: str
    address: int
    nbytes: int
    readable: bool = True
    writable: bool = True
    stride: int = 0
    count: int = 1

    def __str__(self) -> str:
        often = f" every {self.stride}, {self.count} times" if self.stride else ""
        only = "" if self.readable and self.writable else f" for {'reading' if self.readable else 'writing'} only"
        return f"{self.name!r}, which has {self.nbytes} bytes{often}{only}"

    def covers(self, addresses: Array, size: int) -> Array:
        """For each of ``addresses`` (uint64): do ``size`` bytes from it on lie inside?"""
        offsets = addresses - np.uint64(self.address)  # below the window it wraps to a huge number
        if self.stride:
            pieces, offsets = np.divmod(offsets, np.uint64(self.stride))
            inside: Array = (pieces < self.count) & (offsets < self.nbytes) & (offsets + np.uint64(size) <= self.nbytes)
            return inside
        inside = (offsets < self.nbytes) & (offsets + np.uint64(size) <= self.nbytes)
        return inside


@dataclass(frozen=True)
class KernelLaunch:
    """One launch of a kernel.

    Attributes:
        kernel: what ``triton.jit`` made.
        grid: number of programs in x, y and z.
        arguments: parameter -> (type as in a signature, such as ``*bf16`` or ``i32``; address or number).
        constants: constexpr parameter -> value.
        windows: the memory that it may touch.
        seed: run the programs of the grid in a random order; None: in order.
    """

    kernel: Any
    grid: tuple[int, int, int]
    arguments: Mapping[str, tuple[str, Scalar]]
    constants: Mapping[str, Any] = field(default_factory=dict)
    windows: Sequence[Window] = ()
    seed: int | None = None


def run_launch(launch: KernelLaunch) -> None:
    """Run every program of ``launch``, one after another.

    Raises ProgramError for an access outside its windows; what the kernel itself raises passes through.
    """
    function = _rewritten(launch.kernel)
    arguments = {name: _argument(kind, value) for name, (kind, value) in launch.arguments.items()}
    programs: Iterable[tuple[int, ...]] = product(*(range(size) for size in launch.grid))
    if launch.seed is not None:
        listed = list(programs)
        programs = [listed[i] for i in np.random.default_rng(launch.seed).permutation(len(listed))]
    with _interpreting() as builder, np.errstate(all="ignore"):
        builder.enter(launch)
        for program in programs:
            builder.set_grid_idx(*program)
            function(**arguments, **launch.constants)


def _argument(kind: str, value: Scalar) -> Any:
    if kind.startswith("*"):
        pointer = tl.pointer_type(_TYPES[kind[1:]])
        return tl.tensor(stock.TensorHandle(np.array([value], np.uint64), pointer), pointer)
    dtype = _TYPES[kind]
    return tl.tensor(stock.TensorHandle(np.array([value], stock._get_np_dtype(dtype)), dtype), dtype)


# --- the builder: what the operations of the language do ------------------------------------------


def _is_bfloat16(handle: Any) -> bool:
    return bool(handle.dtype.scalar == tl.bfloat16)


def _widened(handle: Any) -> Array:
    """The numbers of a handle: bfloat16, which it stores as bits, as float32."""
    data: Array = handle.data
    return data.view(_BFLOAT16).astype(np.float32) if _is_bfloat16(handle) else data


def _stored(numbers: Array, dtype: Any) -> Any:
    """A handle of ``numbers`` in ``dtype``, rounded to nearest even."""
    if dtype.scalar == tl.bfloat16:
        return stock.TensorHandle(numbers.astype(_BFLOAT16).view(np.uint16), dtype.scalar)
    return stock.TensorHandle(numbers.astype(stock._get_np_dtype(dtype.scalar)), dtype.scalar)


class _Builder(stock.InterpreterBuilder):  # type: ignore[misc]
    """Triton's interpreting builder with a GPU's arithmetic and checked addresses."""

    options: Any
    grid_idx: tuple[int, int, int]

    def __init__(self) -> None:
        super().__init__()
        # The checks for integer overflow that this skips are never reported: they need options.debug.
        self.options = replace(self.options, sanitize_overflow=False)
        self._launch = KernelLaunch(None, (0, 0, 0), {})

    def enter(self, launch: KernelLaunch) -> None:
        self._launch = launch
        self.set_grid_dim(*launch.grid)

    # memory

    def _check(self, pointers: Any, mask: Array, write: bool) -> None:
        addresses = pointers.data[mask] if not mask.all() else pointers.data
        if addresses.size == 0:
            return
        size = max(1, pointers.get_element_ty().primitive_bitwidth // 8)
        windows = [w for w in self._launch.windows if (w.writable if write else w.readable)]
        ends = np.array([addresses.min(), addresses.max()], np.uint64)
        if any(w.stride == 0 and w.covers(ends, size).all() for w in windows):
            return
        inside = np.zeros(addresses.shape, bool)
        for window in windows:
            inside |= window.covers(addresses, size)
        if not inside.all():
            self._refuse(addresses[~inside], size, write)

    def _refuse(self, outside: Array, size: int, write: bool) -> None:
        address = int(outside.flat[0])
        known = [w for w in self._launch.windows if w.address <= address] or list(self._launch.windows)
        near = max(known, key=lambda w: w.address, default=None)
        where = "no memory at all" if near is None else f"byte {address - near.address} of {near}"
        name = getattr(self._launch.kernel, "__name__", "kernel")
        raise ProgramError(
            f"kernel {name} program {self.grid_idx}: need to {'write' if write else 'read'} inside its arguments, "
            f"have {outside.size} accesses of {size} bytes outside; the first one at {where}"
        )

    def create_masked_load(self, ptrs: Any, mask: Any, other: Any, *rest: Any) -> Any:
        self._check(ptrs, mask.data, write=False)
        return super().create_masked_load(ptrs, mask, other, *rest)

    def create_masked_store(self, ptrs: Any, value: Any, mask: Any, *rest: Any) -> Any:
        self._check(ptrs, mask.data, write=True)
        return super().create_masked_store(ptrs, value, mask, *rest)

    def create_atomic_rmw(self, rmw: Any, ptr: Any, val: Any, mask: Any, *rest: Any) -> Any:
        self._check(ptr, mask.data, write=True)
        return super().create_atomic_rmw(rmw, ptr, val, mask, *rest)

    def create_atomic_cas(self, ptr: Any, *rest: Any) -> Any:
        self._check(ptr, np.ones(ptr.data.shape, bool), write=True)
        return super().create_atomic_cas(ptr, *rest)

    # arithmetic

    def cast_impl(self, src: Any, dst_type: Any) -> Any:
        return _stored(_widened(src), dst_type)

    def create_fp_to_fp(self, src: Any, dst_type: Any, rounding_mode: Any) -> Any:
        if rounding_mode == stock._ir.ROUNDING_MODE.RTNE:
            return self.cast_impl(src, dst_type)
        return super().create_fp_to_fp(src, dst_type, rounding_mode)

    def binary_op(self, lhs: Any, rhs: Any, op: Any) -> Any:
        if not _is_bfloat16(lhs):
            return super().binary_op(lhs, rhs, op)
        output = op(_widened(lhs), _widened(rhs))
        return stock.TensorHandle(output, tl.int1) if output.dtype == bool else _stored(output, tl.bfloat16)

    def unary_op(self, arg: Any, op: Any) -> Any:
        return _stored(op(_widened(arg)), tl.bfloat16) if _is_bfloat16(arg) else super().unary_op(arg, op)

    # The language's minimum and maximum drop a NaN unless they are asked to propagate it.
    create_minnumf = lambda self, lhs, rhs: self.binary_op(lhs, rhs, np.fmin)  # noqa: E731
    create_maxnumf = lambda self, lhs, rhs: self.binary_op(lhs, rhs, np.fmax)  # noqa: E731

    def create_clampf(self, arg: Any, lo: Any, hi: Any, propagate_nans: Any) -> Any:
        return _stored(np.fmin(np.fmax(_widened(arg), _widened(lo)), _widened(hi)), arg.dtype)

    def create_fma(self, x: Any, y: Any, z: Any) -> Any:
        a, b, c = (_widened(handle).astype(np.float64) for handle in (x, y, z))
        return _stored(a * b + c, z.dtype)

    def create_dot(self, a: Any, b: Any, d: Any, input_precision: Any, max_num_imprecise_acc: Any) -> Any:
        x, y = (_widened(handle).astype(np.float64) for handle in (a, b))
        return _stored(np.matmul(x, y) + d.data, d.dtype)


# --- reductions and scans -------------------------------------------------------------------------


def _combine(function: Any, dtypes: Sequence[Any], lefts: Sequence[Array], rights: Sequence[Array]) -> list[Array]:
    """``function`` on blocks of pairs."""
    blocks = [_block(data, dtype) for data, dtype in zip((*lefts, *rights), (*dtypes, *dtypes), strict=True)]
    results = function(*blocks)
    results = results if isinstance(results, tuple) else (results,)
    return [np.broadcast_to(r.handle.data, data.shape) for r, data in zip(results, lefts, strict=True)]


def _block(data: Array, dtype: Any) -> Any:
    """``data`` as the language sees it: a block, or a scalar where there is no dimension left."""
    if data.ndim == 0:
        return tl.tensor(stock.TensorHandle(data.reshape(1), dtype), dtype)
    return tl.tensor(stock.TensorHandle(data, dtype), tl.block_type(dtype, list(data.shape)))


def _reduce_pairs(function: Any, dtypes: Sequence[Any], parts: list[Array]) -> list[Array]:
    """Reduce axis 0 by combining neighbours, in order."""
    while (count := len(parts[0])) > 1:
        even = count // 2 * 2
        merged = _combine(function, dtypes, [p[0:even:2] for p in parts], [p[1:even:2] for p in parts])
        parts = [np.concatenate([m, p[even:]]) for m, p in zip(merged, parts, strict=True)]
    return [part[0] for part in parts]


def _scan_pairs(function: Any, dtypes: Sequence[Any], parts: list[Array]) -> list[Array]:
    """Inclusive scan of axis 0 in a logarithmic number of rounds."""
    step = 1
    while step < len(parts[0]):
        merged = _combine(function, dtypes, [p[:-step] for p in parts], [p[step:] for p in parts])
        parts = [np.concatenate([p[:step], m]) for m, p in zip(merged, parts, strict=True)]
        step *= 2
    return parts


def _sum(data: Array, axis: int) -> Array:
    total: Array = data.sum(axis=axis, dtype=np.float64 if data.dtype.kind == "f" else None)
    return total.astype(data.dtype)


def _reduce(input: Any, axis: Any, combine_fn: Any, keep_dims: Any = False, **_: Any) -> Any:
    several = isinstance(input, tuple)
    inputs = tuple(input) if several else (input,)
    axis, keep = tl.core._unwrap_if_constexpr(axis), bool(tl.core._unwrap_if_constexpr(keep_dims))
    dtypes = [value.dtype for value in inputs]
    parts = [value.handle.data for value in inputs]
    rank = parts[0].ndim
    if axis is None:
        parts = [part.reshape(-1) for part in parts]
    at = 0 if axis is None else axis % rank
    simple: Any = {
        tl.standard._sum_combine.fn: _sum,
        tl.standard._elementwise_max.fn: np.fmax.reduce,
        tl.standard._elementwise_min.fn: np.fmin.reduce,
    }.get(combine_fn.fn)
    if simple is not None and dtypes[0] != tl.bfloat16:
        results = [simple(parts[0], axis=at)]
    else:
        results = _reduce_pairs(combine_fn, dtypes, [np.moveaxis(part, at, 0) for part in parts])
    if keep:
        results = [np.expand_dims(r, tuple(range(rank)) if axis is None else at) for r in results]
    made = tuple(_block(np.asarray(r, p.dtype), d) for r, p, d in zip(results, parts, dtypes, strict=True))
    return made if several else made[0]


def _scan(input: Any, axis: Any, combine_fn: Any, reverse: Any = False, **_: Any) -> Any:
    several = isinstance(input, tuple)
    inputs = tuple(input) if several else (input,)
    at, backwards = tl.core._unwrap_if_constexpr(axis), bool(tl.core._unwrap_if_constexpr(reverse))
    dtypes = [value.dtype for value in inputs]
    parts = [np.moveaxis(value.handle.data, at, 0) for value in inputs]
    turned = [part[::-1] for part in parts] if backwards else parts
    if combine_fn.fn is tl.standard._sum_combine.fn and dtypes[0] != tl.bfloat16:
        wide = np.float64 if parts[0].dtype.kind == "f" else None
        results = [np.cumsum(turned[0], axis=0, dtype=wide).astype(parts[0].dtype)]
    else:
        results = _scan_pairs(combine_fn, dtypes, turned)
    turned = [result[::-1] for result in results] if backwards else results
    made = tuple(_block(np.moveaxis(r, 0, at), dtype) for r, dtype in zip(turned, dtypes, strict=True))
    return made if several else made[0]


# --- executing the language -----------------------------------------------------------------------

_BUILDER = _Builder()
_SEMANTIC = stock.TritonSemantic(_BUILDER)
_REWRITTEN: dict[Any, Callable[..., Any]] = {}


class _Rewriter(stock.FunctionRewriter):  # type: ignore[misc]
    """Rewrites a kernel's assignments for interpretation, in a copy of its module's globals."""

    def _compile_and_exec(self, transformed_ast: Any) -> Any:
        code = compile(transformed_ast, filename=self.filename, mode="exec")
        scope = {**self.fn.__globals__, "interpreter_semantic": _SEMANTIC}
        exec(code, scope)
        return scope[self.fn.__name__]


def _rewritten(kernel: Any) -> Callable[..., Any]:
    function = kernel.fn
    if function not in _REWRITTEN:
        _REWRITTEN[function] = _Rewriter(function).rewrite_ast()
    return _REWRITTEN[function]


def _call(self: Any, *args: Any, **kwargs: Any) -> Any:
    """A jit function called from a kernel."""
    return _rewritten(self)(*args, **kwargs)


@contextmanager
def _interpreting() -> Iterator[_Builder]:
    """While inside, ``triton.language`` computes on NumPy arrays and jit functions can be called. May be nested."""
    if tl.reduce is _reduce:
        yield _BUILDER
        return
    scope = stock._LangPatchScope()
    for language in (tl, tl.core):
        stock._patch_builtin(language, _BUILDER, scope)
        stock._patch_builtin(language.tensor, _BUILDER, scope)
        stock._patch_lang_tensor(language.tensor, scope)
        stock._patch_lang_core(language, scope)
        scope.set_attr(language, "reduce", _reduce)
        scope.set_attr(language, "associative_scan", _scan)
    stock._patch_builtin(tl.math, _BUILDER, scope)
    stock._patch_builtin(tl.core.tensor_descriptor_base, _BUILDER, scope)
    scope.set_attr(tl.tensor, "__index__", lambda self: int(self.handle.data.item()))
    for kind in (JITFunction, stock.InterpretedFunction):
        scope.set_attr(kind, "__call__", _call)
    try:
        yield _BUILDER
    finally:
        scope.restore()
