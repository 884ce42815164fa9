"""The Triton interpreter that the other tests of this folder rely on: a GPU's arithmetic, and checked addresses."""

# mypy: allow-untyped-defs, allow-untyped-calls
from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
import triton
import triton.language as tl
from harness import run

from tokenspeed.errors import ProgramError

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)


@triton.jit
def _twice(x):
    y = x * 2
    return y


@triton.jit
def _larger(value, index, other_value, other_index):
    first = (value > other_value) | ((value == other_value) & (index < other_index))
    return tl.where(first, value, other_value), tl.where(first, index, other_index)


@triton.jit
def _first(a, b):
    return a + 0 * b


@triton.jit
def matmul(x, w, out, num_rows, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr, PDL: tl.constexpr):
    rows, columns, k = tl.program_id(0) * M + tl.arange(0, M), tl.arange(0, N), tl.arange(0, K)
    inside = (rows < num_rows)[:, None]
    a = tl.load(x + rows[:, None] * K + k[None, :], mask=inside, other=0.0)
    b = tl.load(w + columns[:, None] * K + k[None, :])
    acc = tl.dot(a, b.T, tl.zeros((M, N), tl.float32), input_precision="ieee")
    if not PDL:
        acc = _twice(acc)
    tl.store(out + rows[:, None] * N + columns[None, :], acc.to(out.dtype.element_ty), mask=inside)


@triton.jit
def reductions(x, largest, where, sums, carried, N: tl.constexpr):
    at = tl.arange(0, N)
    values = tl.load(x + at)
    value, index = tl.reduce((values, at), 0, _larger)
    tl.store(largest, value)
    tl.store(where, index)
    tl.store(where + 1, tl.argmax(values, axis=0))
    tl.store(sums + at, tl.cumsum(values, axis=0))
    tl.store(carried + at, tl.associative_scan(values, 0, _first))


@triton.jit
def block_condition(x, out):
    if tl.load(x + tl.arange(0, 4)) > 0:
        tl.store(out, 1.0)


@triton.jit
def arithmetic(x, y, z, fused, rounded, least):
    a, b, c = tl.load(x), tl.load(y), tl.load(z)
    tl.store(fused, tl.fma(a, b, c))
    tl.store(rounded, a.to(tl.bfloat16))
    tl.store(least, tl.minimum(a, float("nan")))


def matrices(dtype: Any, rows: int = 10) -> tuple[Any, Any, Any]:
    rng = np.random.default_rng(0)
    x, w = (rng.standard_normal((n, 32)).astype(dtype) for n in (rows, 16))
    return x, w, np.full((rows, 16), np.nan, dtype)


@pytest.mark.parametrize("dtype", [np.dtype(np.float32), BFLOAT16])
def test_a_product_of_either_dtype_is_right_and_constants_choose_code(dtype: Any) -> None:
    x, w, out = matrices(dtype)
    exact = x.astype(np.float64) @ w.astype(np.float64).T
    for pdl, factor in ((False, 2), (True, 1)):
        constants = {"M": 4, "N": 16, "K": 32, **({"PDL": True} if pdl else {})}
        run(matmul, (3,), {"x": x, "w": w, "out": out, "num_rows": 10}, constants, outputs=["out"], seed=1)
        np.testing.assert_array_equal(out, (factor * exact).astype(np.float32).astype(dtype))


def test_accesses_outside_the_arrays_are_refused_and_say_where() -> None:
    x, w, out = matrices(np.float32)
    constants = {"M": 4, "N": 16, "K": 32}
    outside = r"kernel matmul program \(2, 0, 0\): need to read inside its arguments, have 64 accesses of 4 bytes " \
        r"outside; the first one at byte 1280 of 'x', which has 1280 bytes for reading only$"  # fmt: skip
    with pytest.raises(ProgramError, match=outside):
        run(matmul, (3,), {"x": x, "w": w, "out": out, "num_rows": 12}, constants, outputs=["out"])
    with pytest.raises(ProgramError, match=r"need to write .* at byte 576 of 'out', which has 576 bytes$"):
        run(matmul, (3,), {"x": x, "w": w, "out": out[:9], "num_rows": 10}, constants)
    with pytest.raises(
        ProgramError, match=r"need to write .* at byte 0 of 'out', which has 640 bytes for reading only"
    ):
        run(matmul, (3,), {"x": x, "w": w, "out": out, "num_rows": 10}, constants, outputs=[])


def test_reductions_and_scans_with_any_function() -> None:
    x = np.random.default_rng(1).integers(-9, 9, 64).astype(np.float32)
    largest, where = np.zeros(1, np.float32), np.zeros(2, np.int32)
    sums, carried = np.zeros(64, np.float32), np.zeros(64, np.float32)
    run(reductions, (1,), {"x": x, "largest": largest, "where": where, "sums": sums, "carried": carried}, {"N": 64})
    assert largest[0] == x.max() and where.tolist() == [x.argmax()] * 2
    np.testing.assert_array_equal(sums, np.cumsum(x))
    np.testing.assert_array_equal(carried, np.full(64, x[0]))


def test_a_block_decides_nothing() -> None:
    x, out = np.ones(4, np.float32), np.zeros(1, np.float32)
    with pytest.raises(ProgramError, match=r"need a scalar as condition, have a block of shape \(4,\)"):
        run(block_condition, (1,), {"x": x, "out": out})


def test_fused_multiply_add_rounds_once_bfloat16_to_even_and_nan_loses() -> None:
    a = np.float32(1 + 2**-12)  # its square is 1 + 2^-11 + 2^-24, which has one bit too many
    fused, least = np.zeros(1, np.float32), np.zeros(1, np.float32)
    rounded = np.zeros(1, BFLOAT16)
    arrays = {"x": np.array([a]), "y": np.array([a]), "z": np.array([-1 - 2**-11], np.float32)}
    run(arithmetic, (1,), {**arrays, "fused": fused, "rounded": rounded, "least": least})
    assert fused[0] == 2.0**-24 and a * a - np.float32(1 + 2**-11) == 0
    assert least[0] == a
    for bits, expected in ((0x3F808000, 0x3F80), (0x3F818000, 0x3F82), (0x3F808001, 0x3F81)):
        arrays["x"] = np.array([bits], np.uint32).view(np.float32)
        run(arithmetic, (1,), {**arrays, "fused": fused, "rounded": rounded, "least": least})
        assert rounded.view(np.uint16)[0] == expected
