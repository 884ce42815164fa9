"""Triton's language on NumPy arrays: its own interpreter, with a GPU's arithmetic and checked addresses.

``interpreting`` patches ``triton.language`` for as long as kernels run; ``rewritten`` makes a kernel callable.
Triton's interpreter (triton.runtime.interpreter) supplies the builder that each operation ends in; what it does
otherwise than a GPU is overridden here.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import ml_dtypes
import numpy as np
import numpy.typing as npt
import triton.language as tl
from triton.runtime import interpreter as stock
from triton.runtime.jit import JITFunction

from tokenspeed.errors import ProgramError

Array: TypeAlias = npt.NDArray[Any]

_BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
_TYPES: Mapping[str, Any] = {
    "fp32": tl.float32, "fp64": tl.float64, "fp16": tl.float16, "bf16": tl.bfloat16, "i1": tl.int1,
    "i8": tl.int8, "i16": tl.int16, "i32": tl.int32, "i64": tl.int64,
    "u8": tl.uint8, "u16": tl.uint16, "u32": tl.uint32, "u64": tl.uint64,
}  # fmt: skip
"""Triton's types by the names that signatures use."""


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


def argument(kind: str, value: int | float) -> Any:
    """What a kernel receives for a parameter of type ``kind`` (``*bf16``, ``i32``): an address or a number."""
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


class Builder(stock.InterpreterBuilder):  # type: ignore[misc]
    """Triton's interpreting builder with a GPU's arithmetic and checked addresses."""

    options: Any
    grid_idx: tuple[int, int, int]

    def __init__(self) -> None:
        super().__init__()
        # The checks for integer overflow that this skips are never reported: they need options.debug.
        self.options = replace(self.options, sanitize_overflow=False)
        self._kernel, self._windows = "", tuple[Window, ...]()

    def enter(self, kernel: str, grid: tuple[int, int, int], windows: Sequence[Window]) -> None:
        """What runs next: its name, its programs, and the memory that it may touch."""
        self._kernel, self._windows = kernel, tuple(windows)
        self.set_grid_dim(*grid)

    # memory

    def _check(self, pointers: Any, mask: Array, write: bool) -> None:
        addresses = pointers.data[mask] if not mask.all() else pointers.data
        if addresses.size == 0:
            return
        size = max(1, pointers.get_element_ty().primitive_bitwidth // 8)
        windows = [w for w in self._windows if (w.writable if write else w.readable)]
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
        known = [w for w in self._windows if w.address <= address] or list(self._windows)
        near = max(known, key=lambda w: w.address, default=None)
        where = "no memory at all" if near is None else f"byte {address - near.address} of {near}"
        raise ProgramError(
            f"kernel {self._kernel} program {self.grid_idx}: need to {'write' if write else 'read'} inside its "
            f"arguments, have {outside.size} accesses of {size} bytes outside; the first one at {where}"
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

_BUILDER = Builder()
_SEMANTIC = stock.TritonSemantic(_BUILDER)
_REWRITTEN: dict[Any, Callable[..., Any]] = {}


class _Logic(stock.ASTTransformer):  # type: ignore[misc]
    """Besides assignments, makes ``and``, ``or`` and ``not`` work on blocks: functions that combine the two sides of
    a reduction are written for scalars, and run here on all pairs at once."""

    def visit_Assign(self, node: ast.Assign) -> Any:
        return super().visit_Assign(self.generic_visit(node))

    def visit_BoolOp(self, node: ast.BoolOp) -> Any:
        self.generic_visit(node)
        name = "interpreter_and" if isinstance(node.op, ast.And) else "interpreter_or"
        nothing = ast.arguments(posonlyargs=[], args=[], kwonlyargs=[], kw_defaults=[], defaults=[])
        operands: list[ast.expr] = [ast.Lambda(nothing, value) for value in node.values]
        return ast.Call(ast.Name(name, ast.Load()), operands, [])

    def visit_UnaryOp(self, node: ast.UnaryOp) -> Any:
        self.generic_visit(node)
        if not isinstance(node.op, ast.Not):
            return node
        return ast.Call(ast.Name("interpreter_not", ast.Load()), [node.operand], [])

    def _decide(self, node: Any) -> Any:
        self.generic_visit(node)
        node.test = ast.Call(ast.Name("interpreter_condition", ast.Load()), [node.test], [])
        return node

    visit_If = visit_While = visit_IfExp = _decide


def _and(*operands: Callable[[], Any]) -> Any:
    """``and``: of two tensors elementwise; anything else decides as in Python."""
    value = operands[0]()
    for operand in operands[1:]:
        if isinstance(value, tl.tensor):
            value = value.logical_and(operand())
        elif value:
            value = operand()
    return value


def _or(*operands: Callable[[], Any]) -> Any:
    """``or``, likewise."""
    value = operands[0]()
    for operand in operands[1:]:
        if isinstance(value, tl.tensor):
            value = value.logical_or(operand())
        elif not value:
            value = operand()
    return value


def _not(value: Any) -> Any:
    return value.__not__() if isinstance(value, tl.tensor) else not value


def _condition(value: Any) -> Any:
    """What decides an ``if``: a scalar."""
    if isinstance(value, tl.tensor) and value.handle.data.size != 1:
        raise ProgramError(f"need a scalar as condition, have a block of shape {value.handle.data.shape}")
    return value


_LOGIC = {
    "interpreter_and": _and,
    "interpreter_or": _or,
    "interpreter_not": _not,
    "interpreter_condition": _condition,
}


class _Rewriter(stock.FunctionRewriter):  # type: ignore[misc]
    """Rewrites a kernel for interpretation, in a copy of its module's globals."""

    ast_transformer = _Logic()

    def _compile_and_exec(self, transformed_ast: Any) -> Any:
        code = compile(transformed_ast, filename=self.filename, mode="exec")
        logic = {
            "interpreter_and": _and,
            "interpreter_or": _or,
            "interpreter_not": _not,
            "interpreter_condition": _condition,
        }
        scope = {**self.fn.__globals__, **logic, "interpreter_semantic": _SEMANTIC}
        exec(code, scope)
        return scope[self.fn.__name__]


def rewritten(kernel: Any) -> Callable[..., Any]:
    """The function of a kernel (what ``triton.jit`` made), ready to be called while ``interpreting``."""
    function = kernel.fn
    if function not in _REWRITTEN:
        _REWRITTEN[function] = _Rewriter(function).rewrite_ast()
    return _REWRITTEN[function]


def _call(self: Any, *args: Any, **kwargs: Any) -> Any:
    """A jit function called from a kernel."""
    return rewritten(self)(*args, **kwargs)


_SHAPES: dict[Any, tuple[Any, Any, Any, str]] = {}
_make_block_type, _make_tensor = tl.block_type.__init__, tl.tensor.__init__


def _block_type(self: Any, element_ty: Any, shape: Any) -> None:
    """block_type's constructor, which otherwise takes a third of the time: it checks and names each shape anew."""
    key = (element_ty.name, *(tl.core._unwrap_if_constexpr(size) for size in shape))
    if key not in _SHAPES:
        _make_block_type(self, element_ty, shape)
        sample = object.__new__(tl.tensor)
        _make_tensor(sample, None, self)
        _SHAPES[key] = (self.shape, self.numel, sample.shape, self.name)
    self.element_ty = element_ty
    self.shape, self.numel, self.constant_shape, self.name = _SHAPES[key]


def _tensor(self: Any, handle: Any, type: Any) -> None:
    """tensor's constructor, likewise."""
    if not hasattr(type, "constant_shape"):
        _make_tensor(self, handle, type)
        return
    self.handle, self.type, self.dtype = handle, type, type.element_ty
    self.shape, self.numel = type.constant_shape, tl.constexpr(type.numel)


_NUMPY_DTYPES: dict[str, np.dtype[Any]] = {}
_find_numpy_dtype = stock._get_np_dtype


def _numpy_dtype(type: Any) -> np.dtype[Any]:
    """Of a type of the language, likewise."""
    if type.name not in _NUMPY_DTYPES:
        _NUMPY_DTYPES[type.name] = _find_numpy_dtype(type)
    return _NUMPY_DTYPES[type.name]


@contextmanager
def interpreting() -> Iterator[Builder]:
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
    scope.set_attr(tl.block_type, "__init__", _block_type)
    scope.set_attr(tl.tensor, "__init__", _tensor)
    scope.set_attr(stock, "_get_np_dtype", _numpy_dtype)
    for kind in (JITFunction, stock.InterpretedFunction):
        scope.set_attr(kind, "__call__", _call)
    try:
        yield _BUILDER
    finally:
        scope.restore()
