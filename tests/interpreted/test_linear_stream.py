"""Projections whose programs stay on their multiprocessor: results, and what is asked for before the wait."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
import triton
from harness import run
from test_linear import BF16, POISON, assert_close, expected, launch, operands
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.experimental.gluon._runtime import GluonASTSource

from tokenspeed.kernels.triton import linear_stream, linear_wide
from tokenspeed.kernels.triton.linear_config import Config

OPS = ("linear", "linear_add", "linear_silu_mul")


def stream(
    op: str, arrays: dict[str, np.ndarray], real: int, blocks: tuple[int, int, int], programs: int
) -> np.ndarray:
    """Run the streaming kernel of ``op`` with ``real`` rows on ``programs`` programs: the result."""
    rows, k = arrays["weight"].shape
    constants: dict[str, Any] = {"N": rows, "K": k, "ROWS": 1}
    constants.update(zip(("BLOCK_M", "BLOCK_N", "BLOCK_K"), blocks, strict=True))
    if op == "linear_silu_mul":
        constants["F"] = arrays["out"].shape[1]
    sizes = np.array([1000, real, 1000, 0], np.int32)
    kernel = getattr(linear_stream, f"{op}_stream")
    run(kernel, (programs,), {**arrays, "step_sizes": sizes}, constants, outputs=["out"], seed=7)
    return arrays["out"]


@pytest.mark.parametrize("dtype", [BF16, np.dtype(np.float32)], ids=str)
@pytest.mark.parametrize("op", OPS)
def test_odd_shapes_agree_with_float64(op: str, dtype: np.dtype[Any]) -> None:
    # 71 features and 80 columns end inside a tile; three programs share the tiles unevenly where there are five.
    arrays = operands(op, 5, 71, 80, dtype)
    programs = 3 if op == "linear_silu_mul" else 2
    assert_close(op, stream(op, arrays, 5, (8, 32, 32), programs), expected(op, arrays))


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("programs", [1, 2, 3, 4])
def test_any_number_of_programs_gives_the_bits_of_one_tile_a_program(op: str, programs: int) -> None:
    arrays = operands(op, 8, 128, 96, BF16)
    tiles = launch(op, {name: array.copy() for name, array in arrays.items()}, 8, Config(8, 32, 32, 4, 2, swapped=True))
    np.testing.assert_array_equal(stream(op, arrays, 8, (8, 32, 32), programs), tiles)


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("real", [0, 1, 6])
def test_rows_beyond_the_step_are_neither_read_nor_written(op: str, real: int) -> None:
    arrays = operands(op, 8, 64, 64, BF16)
    arrays["x"][real:] = np.nan
    if op == "linear_add":
        arrays["residual"][real:] = np.nan
    out = stream(op, arrays, real, (8, 32, 64), 2)
    if real > 0:
        within = {name: array if name == "weight" else array[:real] for name, array in arrays.items()}
        assert_close(op, out[:real], expected(op, within))
    assert (out[real:].astype(np.float32) == POISON).all()


# --- what the compiler makes of them on Hopper, the one target of both ------------------------------


def compile_for_hopper(kernel: Any, constants: dict[str, Any], warps: int, stages: int) -> Any:
    names = kernel.arg_names
    out = "*bf16" if "F" in names else "*fp32"
    types = {"x": "*bf16", "weight": "*bf16", "residual": "*fp32", "out": out, "step_sizes": "*i32"}
    values = {"ROWS": 0, "PDL": True, **({"F": constants["N"] // 2} if "F" in names else {}), **constants}
    source = (GluonASTSource if kernel.is_gluon() else ASTSource)(
        kernel,
        {name: types.get(name, "constexpr") for name in names},
        {(names.index(name),): value for name, value in values.items()},
        {(names.index(name),): [["tt.divisibility", 16]] for name in names if name in types},
    )
    options = {"num_warps": warps, "num_stages": stages, "enable_fp_fusion": False}
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("blocks", [(8, 32, 256), (32, 64, 128)], ids=str)
def test_weights_alone_are_loaded_before_the_wait(op: str, blocks: tuple[int, int, int]) -> None:
    constants = {"N": 4096, "K": 4096, **dict(zip(("BLOCK_M", "BLOCK_N", "BLOCK_K"), blocks, strict=True))}
    ptx = compile_for_hopper(getattr(linear_stream, f"{op}_stream"), constants, 4, 6).asm["ptx"]
    before, after = ptx.split("griddepcontrol.wait", 1)
    copies = blocks[1] * blocks[2] * 2 // 16 // 128  # of 16 bytes, by each of 128 threads, for one tile of W
    assert before.count("cp.async.cg") == 5 * copies and after.count("cp.async.cg") == copies
    assert before.count("ld.global") == 1  # the step's sizes
    assert "griddepcontrol.wait" not in after and "griddepcontrol.launch_dependents" in before


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize(
    ("blocks", "stages", "consumers", "swapped"),
    [((128, 256, 64), 4, 2, False), ((8, 64, 128), 8, 1, True)],
    ids=["many rows", "few rows"],
)
def test_wide_kernels_keep_their_sums_in_registers(
    op: str, blocks: tuple[int, int, int], stages: int, consumers: int, swapped: bool
) -> None:
    constants = {
        "N": 4096, "K": 4096, "GROUP_M": 8, "STAGES": stages, "CONSUMERS": consumers, "SWAPPED": swapped,
        **dict(zip(("BLOCK_M", "BLOCK_N", "BLOCK_K"), blocks, strict=True)),
    }  # fmt: skip
    compiled = compile_for_hopper(getattr(linear_wide, f"{op}_wide"), constants, 4, 1)
    ptx = compiled.asm["ptx"]
    side = blocks[0] if swapped else blocks[1]
    assert set(re.findall(r"wgmma\.mma_async\S*?(m64n\d+k16)", ptx)) == {f"m64n{side}k16"}
    assert ptx.count("cp.async.bulk.tensor") >= 2 and "st.local" not in ptx
    assert compiled.metadata.shared <= 232448
    assert compiled.metadata.global_scratch_size == linear_wide.SCRATCH_BYTES
