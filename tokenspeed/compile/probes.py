"""Probes: data on which a sum in another order gives other bits, for proofs that two kernels sum in the same order.

Rows of a left and a right operand are multiplied all with all, so each kind of one meets each kind of the other. Half
of the places come in pairs that lie far apart: the left operand has one value at both, the right one +B and -B where
its kind is ``cancelling``. Their products cancel exactly, and what else there is lies below the resolution of B in
float32: whether it survives depends on which terms were added before. docs/equivalence.md says what each kind is for.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import ml_dtypes
import numpy as np

KINDS = ("cancelling", "random", "denormal", "wide")
"""Row i of an operand is of kind i % 4, unless it says otherwise."""
SEED = 20261130
VERSION = 1
"""Of the data that a seed gives."""
_DTYPES = {"float32": np.dtype(np.float32), "bfloat16": np.dtype(ml_dtypes.bfloat16)}
_BIG = 2.0**18
_LEAST_EXPONENT = {"float32": -149, "bfloat16": -133}
"""Of a subnormal number."""

Array: TypeAlias = "np.ndarray[Any, np.dtype[Any]]"


def describe() -> dict[str, Any]:
    """What a proof records of its probes."""
    return {"kinds": list(KINDS), "seed": SEED, "version": VERSION}


def pairs(length: int) -> tuple[Array, Array]:
    """Places (first, second) of ``length`` that cancel each other: a quarter of it each, no place twice, spread all
    over. The same for all operands of this length."""
    order = np.random.default_rng((SEED, length)).permutation(length)
    quarter = length // 4
    return order[:quarter], order[quarter : 2 * quarter]


def left(rows: int, length: int, dtype: str, kinds: Sequence[str] = KINDS) -> Array:
    """[rows, length]: equal at both places of a pair. Row i is of kind i of ``kinds``, over and over."""
    values = _values(np.random.default_rng((SEED, 1, rows, length)), rows, length, dtype, kinds)
    first, second = pairs(length)
    values[:, second] = values[:, first]
    return values


def right(rows: int, length: int, dtype: str, kinds: Sequence[str] = KINDS) -> Array:
    """[rows, length]: as ``left``, but in rows of kind ``cancelling`` +B and -B at the places of a pair."""
    generator = np.random.default_rng((SEED, 2, rows, length))
    values = _values(generator, rows, length, dtype, kinds)
    first, second = pairs(length)
    big = generator.uniform(_BIG, 2 * _BIG, (rows, len(first))).astype(_DTYPES[dtype])
    rows_of_kind = np.arange(kinds.index("cancelling"), rows, len(kinds))
    values[np.ix_(rows_of_kind, first)] = big[rows_of_kind]
    values[np.ix_(rows_of_kind, second)] = -big[rows_of_kind]
    return values


def _values(generator: Any, rows: int, length: int, dtype: str, kinds: Sequence[str]) -> Array:
    """Numbers of either sign by the kind of their row, in float64 until they are rounded once."""
    sign = generator.choice((-1.0, 1.0), (rows, length))
    size = generator.uniform(1.0, 2.0, (rows, length))
    wide = generator.uniform(-24.0, 24.0, (rows, length))
    least = 2.0 ** _LEAST_EXPONENT[dtype]
    values = np.empty((rows, length))
    for row in range(rows):
        match kinds[row % len(kinds)]:
            case "cancelling":
                values[row] = size[row] * 2.0**-4
            case "random":
                values[row] = generator.standard_normal(length)
            case "denormal":
                values[row] = sign[row] * np.round(size[row] * 40) * least
            case "wide":
                values[row] = sign[row] * size[row] * np.exp2(wide[row])
    return values.astype(_DTYPES[dtype])


def order_sensitivity(a: Array, b: Array) -> float:
    """The share of the elements of ``a b^T`` that change when the float32 sum runs backwards: of a good probe, most.

    Denormal rows times denormal rows are 0 in any order; they count as unchanged.
    """
    products = a.astype(np.float32)[:, None, :] * b.astype(np.float32)[None, :, :]
    forwards, backwards = (np.zeros(products.shape[:2], np.float32) for _ in range(2))
    for k in range(products.shape[2]):
        forwards += products[:, :, k]
        backwards += products[:, :, -1 - k]
    return float(np.mean(forwards.view(np.int32) != backwards.view(np.int32)))
