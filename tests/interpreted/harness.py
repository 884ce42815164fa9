"""Runs one Triton kernel on NumPy arrays: pointers are arrays, and every access outside them is an error."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from tokenspeed.compile.interpret_triton import KernelLaunch, run_launch
from tokenspeed.compile.triton_language import Window
from tokenspeed.step import ALIGNMENT, align

TYPES = {
    "float32": "fp32", "float64": "fp64", "float16": "fp16", "bfloat16": "bf16", "bool": "i1",
    "int8": "i8", "int16": "i16", "int32": "i32", "int64": "i64",
    "uint8": "u8", "uint16": "u16", "uint32": "u32", "uint64": "u64",
}  # fmt: skip
BFLOAT16 = np.dtype(ml_dtypes.bfloat16)


def run(
    kernel: Any,
    grid: tuple[int, ...],
    arguments: Mapping[str, NDArray[Any] | int | float],
    constants: Mapping[str, Any] | None = None,
    *,
    outputs: Collection[str] | None = None,
    seed: int | None = None,
) -> None:
    """Run ``kernel`` over ``grid``; arrays are written in place.

    Args:
        kernel: what ``triton.jit`` made.
        arguments: parameter -> array (a pointer to its first element, 64-byte aligned), int (i32; i64 where it
            does not fit), float (fp32) or NumPy scalar (its own type).
        constants: constexpr parameter -> value; ``PDL`` is False unless given.
        outputs: the arrays that may be written; None: all of them.
        seed: run the programs in a random order.

    Raises:
        ProgramError: a load or store outside the arrays, or a store to one that is no output.
    """
    arrays = {name: value for name, value in arguments.items() if isinstance(value, np.ndarray)}
    memory = _Arena(arrays)
    values = {name: _number(value) for name, value in arguments.items() if not isinstance(value, np.ndarray)}
    pointers = {name: (f"*{TYPES[a.dtype.name]}", memory.address(name)) for name, a in arrays.items()}
    written = set(arrays) if outputs is None else set(outputs)
    windows = [Window(name, memory.address(name), a.nbytes, True, name in written) for name, a in arrays.items()]
    parameters = list(kernel.arg_names)
    named = {"PDL": False, **(constants or {})} if "PDL" in parameters else dict(constants or {})
    missing = set(parameters) ^ {*arguments, *named}
    assert not missing, f"{kernel.__name__}: arguments and constants must be {parameters}; differ in {sorted(missing)}"
    x, y, z = (*grid, 1, 1)[:3]
    run_launch(KernelLaunch(kernel, (x, y, z), {**pointers, **values}, named, windows, seed))
    for name in written:
        arrays[name][...] = memory.array(name)


def _number(value: int | float | np.generic[Any]) -> tuple[str, int | float]:
    if isinstance(value, np.generic):
        return TYPES[value.dtype.name], value.item()
    if isinstance(value, float):
        return "fp32", value
    return ("i32" if -(2**31) <= value < 2**31 else "i64"), int(value)


class _Arena:
    """Copies of arrays, so far apart that an address computed from one cannot fall into another by a small mistake."""

    def __init__(self, arrays: Mapping[str, NDArray[Any]]):
        gap = align(max([1 << 20, *(a.nbytes for a in arrays.values())]))
        self._arrays, self._offsets, offset = arrays, {}, gap
        for name, array in arrays.items():
            self._offsets[name] = offset
            offset += align(array.nbytes) + gap
        memory = np.empty(offset + ALIGNMENT, np.uint8)  # untouched gaps take no memory
        start = -memory.ctypes.data % ALIGNMENT
        self._bytes = memory[start:]
        for name, array in arrays.items():
            self.array(name)[...] = array

    def address(self, name: str) -> int:
        return int(self._bytes.ctypes.data) + self._offsets[name]

    def array(self, name: str) -> NDArray[Any]:
        array, offset = self._arrays[name], self._offsets[name]
        view: NDArray[Any] = self._bytes[offset : offset + array.nbytes].view(array.dtype).reshape(array.shape)
        return view
