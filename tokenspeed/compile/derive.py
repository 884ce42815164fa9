"""Makes derived weights (fused projections, the rope table) from what their ``Source`` says."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from tokenspeed.compile.ops import PANEL, round_up
from tokenspeed.compile.program import Program, Source, Value
from tokenspeed.errors import ProgramError

Array: TypeAlias = npt.NDArray[Any]

SOURCES = ("concat", "interleave16", "rope_table", "rope_frequencies")


def derive(program: Program, name: str, fetch: Callable[[str], Array]) -> Array:
    """The weight ``name`` of ``program`` in its logical shape.

    ``fetch`` gives checkpoint tensors by name; a fused weight has the dtype of what it is made from.
    Raises ProgramError when a tensor does not have the shape that the Program says.
    """
    value = program.values[name]
    if value.source is None:
        made = fetch(name)
    elif value.source.how == "concat":
        made = np.concatenate([derive(program, part, fetch) for part in value.source.inputs])
    elif value.source.how == "interleave16":
        gate, up = (derive(program, part, fetch) for part in value.source.inputs)
        made = interleave(gate, up)
    elif value.source.how == "rope_table":
        made = rope_table(value.source, _rows(value))
    elif value.source.how == "rope_frequencies":
        made = rope_frequencies(value.source)
    else:
        raise ProgramError(f"weight {name!r}: need a source of {', '.join(SOURCES)}, have {value.source.how!r}")
    if made.shape != value.shape:
        raise ProgramError(f"weight {name!r}: need shape {value.shape}, have {made.shape}")
    return made


def _rows(value: Value) -> int:
    rows = value.shape[0]
    assert isinstance(rows, int), value
    return rows


def interleave(gate: Array, up: Array) -> Array:
    """[F][K] twice -> [2 * F'][K], F' = F padded to whole panels: 16 rows of gate, 16 of up, and so on."""
    features, width = gate.shape
    padding = ((0, round_up(features, PANEL) - features), (0, 0))
    panels = [np.pad(part, padding).reshape(-1, 1, PANEL, width) for part in (gate, up)]
    interleaved: Array = np.concatenate(panels, axis=1).reshape(-1, width)
    return interleaved


def deinterleave(columns: Array, features: int) -> tuple[Array, Array]:
    """The gate and up halves, [M][features] each, of what an interleaved weight projects to, [M][2 * F']."""
    rows, width = columns.shape
    panels = columns.reshape(rows, width // (2 * PANEL), 2, PANEL)  # a step may have no rows at all
    gate, up = (panels[:, :, half].reshape(rows, width // 2)[:, :features] for half in (0, 1))
    return gate, up


def rope_parameters(program: Program) -> tuple[tuple[float, ...], float]:
    """(inverse frequencies in radians per position, attention factor) of the Program's rope table, whoever makes it."""
    made = next((op for op in program.prelude if op.kind == "rope_table"), None)
    source = program.values["rope_table" if made is None else made.operand("inverse_frequencies")].source
    assert source is not None, "a rope table is made, not read"
    frequencies = source.attrs["inverse_frequencies"]
    assert isinstance(frequencies, tuple), frequencies
    return frequencies, (source.attrs if made is None else made.attrs).number("attention_factor")


def rope_frequencies(source: Source) -> Array:
    """float32 [D/2]: the inverse frequencies, each rounded once."""
    return np.asarray(source.attrs["inverse_frequencies"], np.float64).astype(np.float32)


def rope_table_of(frequencies: Array, rows: int, factor: float) -> Array:
    """The rope table [rows][D] as a device computes it in the precision of ``frequencies`` [D/2]: positions and
    products are rounded to it, so are cosines and sines of the rounded products (here from float64), and their products
    with ``factor``."""
    dtype = frequencies.dtype
    angles = (np.arange(rows).astype(dtype)[:, None] * frequencies).astype(np.float64)
    turns = np.concatenate([np.cos(angles), np.sin(angles)], axis=1).astype(dtype)
    table: Array = turns * dtype.type(factor)
    return table


def rope_table(source: Source, rows: int) -> Array:
    """float32 [rows][D]: D/2 cosines, then D/2 sines, of position * frequency; computed in float64."""
    frequencies = source.attrs["inverse_frequencies"]
    angles = np.outer(np.arange(rows, dtype=np.float64), np.asarray(frequencies, dtype=np.float64))
    factor = source.attrs.number("attention_factor")
    table: Array = (factor * np.concatenate([np.cos(angles), np.sin(angles)], axis=1)).astype(np.float32)
    return table
