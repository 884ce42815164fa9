"""Packing by torch against packing at build, byte by byte."""

from __future__ import annotations

import io
from typing import Any

import numpy as np
import pytest
import torch
from lowered import DictSource
from tiny_llama import tiny_config, tiny_program, tiny_weights

from tokenspeed.compile.passes import CPU_PASSES, run_passes
from tokenspeed.compile.weights import plan_weights, write_weights
from tokenspeed.errors import ProgramError
from tokenspeed.trainer.packing import Parameters, deinterleave, interleave, pack, unpack, write_packed
from tokenspeed.values import PackedValue


def packed_by_build(
    dtype: str, layout: str, **changes: Any
) -> tuple[Parameters, list[PackedValue], np.ndarray[Any, Any]]:
    """Parameters of a tiny model, the places of its packed weights, and the bytes that a build puts there."""
    config = tiny_config(**changes)
    program = run_passes(tiny_program(config, dtype), CPU_PASSES)
    weights = tiny_weights(config)
    pairs = [(v.name, layout if len(v.shape) == 2 and v.name != "rope_table" else "rows") for v in program.op_weights]
    plan = plan_weights(program, pairs)
    file = io.BytesIO()
    write_weights(plan, program, DictSource(weights), file)
    data = np.frombuffer(file.getvalue()[plan.data_offset :], np.uint8)
    tensors = {name: torch.nn.Parameter(torch.from_numpy(array.copy())) for name, array in weights.items()}
    return Parameters(program, tensors), [PackedValue(w.value, w.layout, w.tensor) for w in plan.weights], data


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("layout", ["panel16", "rows"])
@pytest.mark.parametrize("changes", [{}, {"tie_word_embeddings": False, "hidden_size": 31, "intermediate_size": 41}])
def test_every_byte_is_that_of_the_build(dtype: str, layout: str, changes: dict[str, Any]) -> None:
    """Rows and columns that fill no panel or pair, fused and tied weights, rounding to bfloat16."""
    parameters, packed, expected = packed_by_build(dtype, layout, **changes)
    region = torch.from_numpy(expected.copy())
    for weight in packed:
        if weight.value != "rope_table":  # which no parameter makes, so that its bytes must stay
            region[weight.tensor.offset : weight.tensor.offset + weight.tensor.nbytes] = 0xAA
    pack(parameters, packed, region)
    np.testing.assert_array_equal(region.numpy(), expected)


@pytest.mark.parametrize("layout", ["panel16", "rows"])
def test_unpacking_gives_the_parameters_back(layout: str) -> None:
    parameters, packed, data = packed_by_build("float32", layout, intermediate_size=41)
    before = {name: p.detach().clone() for name, p in parameters.tensors.items()}
    for parameter in parameters.tensors.values():
        parameter.data.zero_()
    unpack(parameters, packed, torch.from_numpy(data.copy()))
    for name, parameter in parameters.tensors.items():
        assert torch.equal(parameter, before[name]), name


def test_parameters_of_another_dtype_are_rounded_once() -> None:
    parameters, packed, expected = packed_by_build("bfloat16", "panel16")
    low = {name: torch.nn.Parameter(p.detach().bfloat16()) for name, p in parameters.tensors.items()}
    region = torch.from_numpy(expected.copy())
    pack(Parameters(parameters.program, low), packed, region)
    projections = [w for w in packed if w.layout == "panel16"]
    for weight in projections:
        at = slice(weight.tensor.offset, weight.tensor.offset + weight.tensor.nbytes)
        np.testing.assert_array_equal(region[at].numpy(), expected[at])
    assert projections


def test_interleaving_has_an_inverse() -> None:
    gate, up = torch.randn(21, 5), torch.randn(21, 5)
    both = interleave(gate, up)
    assert both.shape == (64, 5) and torch.equal(both[:16], gate[:16]) and torch.equal(both[16:32], up[:16])
    assert not both[37:48].any() and not both[53:].any()
    for have, expected in zip(deinterleave(both, 21), (gate, up), strict=True):
        assert torch.equal(have, expected)


def test_an_unknown_layout_is_refused() -> None:
    with pytest.raises(ProgramError, match="need weights in layout rows or panel16, have 'tiles'"):
        write_packed(torch.zeros(16, 4), "tiles", torch.zeros(16, 4))
