"""The Triton projections under the interpreter, their tile shapes, and that every target compiles them."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import triton
import triton.language as tl
from harness import run
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from tokenspeed.kernels.registry import DeviceKernel, MultipleOf, Request, Stage
from tokenspeed.kernels.triton import linear, linear_config
from tokenspeed.kernels.triton.linear import linear_add
from tokenspeed.kernels.triton.linear_candidates import candidates
from tokenspeed.kernels.triton.linear_config import Config, choose, rule, to_json, usable
from tokenspeed.target import GPU_TARGETS, Target

BF16 = np.dtype(ml_dtypes.bfloat16)
HOPPER = Target.parse("cuda:sm_90a")
POISON = -77.0
STRAIGHT = Config(16, 32, 32, 4, 2, swapped=False, group_m=2)
SWAPPED = Config(16, 32, 32, 4, 2, swapped=True, group_m=2)


def operands(op: str, m: int, n: int, k: int, dtype: Any, seed: int = 0) -> dict[str, np.ndarray]:
    """Operands of ``op`` with ``m`` rows; ``n`` counts features of the result."""
    rng = np.random.default_rng(seed)
    rows = 2 * -(-n // 16) * 16 if op == "linear_silu_mul" else n
    arrays = {
        "x": rng.standard_normal((m, k)).astype(dtype),
        "weight": (rng.standard_normal((rows, k)) / k**0.5).astype(dtype),
        "out": np.full((m, n), POISON, dtype if op == "linear_silu_mul" else np.float32),
    }
    if op.startswith("linear_add"):
        arrays["residual"] = rng.standard_normal((m, n)).astype(np.float32)
    return arrays


def launch(op: str, arrays: dict[str, np.ndarray], real: int, config: Config, bucket: int | None = None) -> np.ndarray:
    """Run ``op`` over a bucket (by default, of all rows) of which ``real`` rows are the step's: the result."""
    rows, k = arrays["weight"].shape
    constants = {"N": rows, "K": k, "ROWS": 1, **config.constants(HOPPER)}
    if op == "linear_silu_mul":
        constants["F"] = arrays["out"].shape[1]
    grid = (config.programs(bucket or len(arrays["out"]), rows),)
    sizes = np.array([1000, real, 1000, 0], np.int32)
    run(getattr(linear, op), grid, {**arrays, "step_sizes": sizes}, constants, outputs=["out"], seed=5)
    return arrays["out"]


def expected(op: str, arrays: dict[str, np.ndarray]) -> np.ndarray:
    """The result in float64."""
    product = arrays["x"].astype(np.float64) @ arrays["weight"].astype(np.float64).T
    if op == "linear_add":
        return arrays["residual"] + product
    if op == "linear_silu_mul":
        groups = product.reshape(len(product), -1, 2, 16)
        gate, up = (groups[:, :, i].reshape(len(product), -1) for i in (0, 1))
        return (gate / (1 + np.exp(-gate)) * up)[:, : arrays["out"].shape[1]]
    return product


def assert_close(op: str, out: np.ndarray, exact: np.ndarray) -> None:
    rounding = 2.0**-8 if out.dtype == BF16 else 1e-5
    np.testing.assert_allclose(out.astype(np.float64), exact, rtol=rounding, atol=rounding / 4)


@pytest.mark.parametrize("dtype", [BF16, np.dtype(np.float32)], ids=str)
@pytest.mark.parametrize("config", [STRAIGHT, SWAPPED], ids=str)
@pytest.mark.parametrize("op", ["linear", "linear_add", "linear_silu_mul"])
def test_odd_shapes_agree_with_float64(op: str, config: Config, dtype: np.dtype[Any]) -> None:
    # Rows, features and columns all end inside a tile, and there are several tiles of each.
    arrays = operands(op, 37, 71, 80, dtype)
    assert_close(op, launch(op, arrays, 37, config), expected(op, arrays))


@pytest.mark.parametrize("config", [STRAIGHT, SWAPPED], ids=str)
@pytest.mark.parametrize("op", ["linear", "linear_add", "linear_silu_mul"])
def test_shapes_that_the_tile_divides(op: str, config: Config) -> None:
    arrays = operands(op, 32, 64, 64, BF16)
    assert_close(op, launch(op, arrays, 32, config), expected(op, arrays))


@pytest.mark.parametrize("config", [STRAIGHT, SWAPPED], ids=str)
@pytest.mark.parametrize("op", ["linear", "linear_add", "linear_silu_mul"])
@pytest.mark.parametrize("real", [1, 16, 21])
def test_rows_beyond_the_step_are_neither_read_nor_written(op: str, config: Config, real: int) -> None:
    # The bucket has 64 rows, memory 24: tiles beyond the step return, and the last one is masked.
    arrays = operands(op, 24, 48, 32, BF16)
    arrays["x"][real:] = np.nan
    if op == "linear_add":
        arrays["residual"][real:] = np.nan
    out = launch(op, arrays, real, config, bucket=64)
    assert_close(op, out[:real], expected(op, {name: array[:real] if name != "weight" else array
                                               for name, array in arrays.items()}))  # fmt: skip
    assert (out[real:].astype(np.float32) == POISON).all()


@pytest.mark.parametrize("config", [STRAIGHT, SWAPPED], ids=str)
def test_rounded_sums_are_the_rounded_product_added_and_rounded(config: Config) -> None:
    arrays = operands("linear_add_rounded", 37, 71, 80, BF16)
    plain = {"x": arrays["x"], "weight": arrays["weight"], "out": arrays["out"].copy()}
    product = launch("linear", plain, 37, config)  # the same sums, in the same order
    expected = (arrays["residual"] + product.astype(BF16).astype(np.float32)).astype(BF16).astype(np.float32)
    np.testing.assert_array_equal(launch("linear_add_rounded", arrays, 37, config), expected)


@triton.jit
def add_in_place(x, weight, residual, step_sizes, N: tl.constexpr, K: tl.constexpr, ROWS: tl.constexpr,
                 BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr,
                 SWAPPED: tl.constexpr, PREFETCH: tl.constexpr, LANES: tl.constexpr, PDL: tl.constexpr):  # fmt: skip
    """linear_add whose result goes where its residual is."""
    linear_add(x, weight, residual, residual, step_sizes, N, K, ROWS, BLOCK_M, BLOCK_N, BLOCK_K, GROUP_M, SWAPPED,
               PREFETCH, LANES, PDL)  # fmt: skip


@pytest.mark.parametrize("config", [STRAIGHT, SWAPPED], ids=str)
def test_out_may_be_the_residual(config: Config) -> None:
    arrays = operands("linear_add", 20, 40, 32, BF16)
    in_place = {"x": arrays["x"], "weight": arrays["weight"], "residual": arrays["residual"].copy()}
    in_place["step_sizes"] = np.array([20, 0, 0, 0], np.int32)
    constants = {"N": 40, "K": 32, "ROWS": 0, **config.constants(HOPPER)}
    run(add_in_place, (config.programs(20, 40),), in_place, constants, outputs=["residual"])
    np.testing.assert_array_equal(in_place["residual"], launch("linear_add", arrays, 20, config))


@pytest.mark.parametrize("op", ["linear", "linear_add", "linear_silu_mul"])
def test_a_row_alone_equals_the_row_in_a_batch_whatever_the_tile(op: str) -> None:
    # One block_k: the interpreter rounds once per block, where the matrix unit rounds at its own steps.
    arrays = operands(op, 40, 64, 96, BF16)
    batch = launch(op, arrays, 40, Config(64, 64, 32, 4, 2, swapped=False)).copy()
    for row in (0, 17, 39):
        alone = {name: array if name == "weight" else array[row : row + 1].copy() for name, array in arrays.items()}
        np.testing.assert_array_equal(launch(op, alone, 1, Config(8, 32, 32, 4, 2, swapped=True)), batch[row : row + 1])


def test_gate_that_underflows_and_overflows() -> None:
    arrays = operands("linear_silu_mul", 4, 16, 16, np.dtype(np.float32))
    arrays["weight"][:] = np.tile(np.eye(16, dtype=np.float32), (2, 1))  # gate and up are both x
    arrays["x"][:] = np.array([[-200.0], [-88.0], [0.0], [200.0]], np.float32)
    out = launch("linear_silu_mul", arrays, 4, STRAIGHT)
    np.testing.assert_allclose(out[:, 0], [0, 0, 0, 40000], atol=1e-30)


# --- the choice of a tile shape ---------------------------------------------------------------------

LLAMA_8B = (("linear", 6144, 4096), ("linear_add", 4096, 14336), ("linear_silu_mul", 28672, 4096))
SMALL = (("linear", 960, 576), ("linear_add", 576, 1536), ("linear_silu_mul", 3072, 576))


@pytest.mark.parametrize("name", GPU_TARGETS)
def test_every_choice_fits_and_keeps_to_one_instruction(name: str) -> None:
    target = Target.parse(name)
    for op, n, k in (*LLAMA_8B, *SMALL):
        for m in (1, 2, 8, 9, 31, 64, 65, 200, 1000, 8192):
            for config in (choose(target, op, m, n, k, "bfloat16"), rule(target, op, m, n, k, "bfloat16")):
                assert usable(config, target, op), (op, m, n, k, str(config))
            assert choose(target, op, m, n, k, "float32").shared_bytes(target, 4) <= target.gpu.max_shared_bytes
    assert all(usable(c, target, "linear") for c in candidates(target, "linear", 64, 4096, 4096))


def test_amd_and_blackwell_keep_clear_of_their_second_instruction() -> None:
    small, flat = Config(16, 32, 64, 4, 2, swapped=True), Config(16, 64, 64, 4, 2, swapped=True)
    assert usable(small, HOPPER, "linear") and usable(small, Target.parse("cuda:sm_120a"), "linear")
    for arch in ("sm_100a", "sm_103a"):
        assert not usable(small, Target.parse(f"cuda:{arch}"), "linear")
        assert usable(flat, Target.parse(f"cuda:{arch}"), "linear")
    assert not usable(flat, Target.parse("hip:gfx942"), "linear")


def test_few_rows_fill_the_device() -> None:
    for op, n, k in LLAMA_8B:
        config = rule(HOPPER, op, 1, n, k, "bfloat16")
        assert config.swapped and config.block_m <= 16 and config.programs(1, n) >= 99


def test_measured_entries_win_and_cover_the_rows_up_to_theirs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    few, many = Config(8, 64, 128, 4, 4, swapped=True), Config(128, 128, 64, 8, 3, swapped=False)
    key = {"op": "linear", "N": 640, "K": 320, "dtype": "bfloat16"}
    entries = [{**key, "M": 512, "config": to_json(many)}, {**key, "M": 8, "config": to_json(few)}]
    (tmp_path / "sm_90a.json").write_text(json.dumps({"format_version": 1, "linear": entries}))
    monkeypatch.setattr(linear_config, "TUNING_FOLDER", tmp_path)
    linear_config._table.cache_clear()
    try:
        chosen = [choose(HOPPER, "linear", m, 640, 320, "bfloat16") for m in (1, 8, 9, 512, 9000)]
        assert chosen == [few, few, many, many, many]
        other = choose(HOPPER, "linear", 8, 641, 320, "bfloat16")
        assert other == rule(HOPPER, "linear", 8, 641, 320, "bfloat16")
        unmeasured = Target.parse("cuda:sm_120a")
        assert choose(unmeasured, "linear", 8, 640, 320, "bfloat16") != few
    finally:
        linear_config._table.cache_clear()


TABLES = sorted(p for p in linear_config.TUNING_FOLDER.glob("*.json") if not p.name.endswith(".classes.json"))


@pytest.mark.parametrize("path", TABLES, ids=lambda path: path.stem)
def test_tables_say_where_they_come_from(path: Path) -> None:
    (target,) = (Target.parse(name) for name in GPU_TARGETS if name.endswith(f":{path.stem}"))
    table = json.loads(path.read_text())
    linear_config.parse_table(table)
    for entry in table["linear"]:
        assert entry["device"] and entry["date"] and entry["us"] > 0 and entry["runner_up"]["us"] >= entry["us"]
        assert usable(Config(**entry["config"]), target, entry["op"]), entry


# --- what the registry gets -------------------------------------------------------------------------


def stage(op: str, target: Target, m: int, n: int, k: int, dtype: str = "bfloat16", **sizes: int) -> Stage:
    """The launch of ``op``; ``n`` counts rows of W, ``sizes`` are more of the request's."""
    (spec,) = (s for s in linear.specs() if s.op == op and dtype in s.dtypes)
    features = {"F": n // 2} if op == "linear_silu_mul" else {"N": n}
    (only,) = spec.stages(Request(op, target, dtype, {**features, "K": k, "M": m, "rows": 0, **sizes}))
    return only


def test_stages_name_their_operands() -> None:
    add = stage("linear_add", HOPPER, 1, 4096, 14336)
    assert add.kernel is not None and add.programmatic
    assert [name for name, _ in add.kernel.signature] == ["x", "weight", "residual", "out", "step_sizes"]
    assert [str(rule) for rule in add.arguments] == [
        "read x", "read weight", "read residual", "write out", "sizes step_sizes",
    ]  # fmt: skip
    assert [kind for _, kind in add.kernel.signature] == ["*bf16", "*bf16", "*fp32", "*fp32", "*i32"]
    gated = stage("linear_silu_mul", Target.parse("hip:gfx942"), 1, 28672, 4096)
    assert gated.kernel is not None and not gated.programmatic
    assert dict(gated.kernel.constants)["F"] == 14336 and dict(gated.kernel.signature)["out"] == "*bf16"
    assert not dict(gated.kernel.constants)["PREFETCH"]


def test_a_sum_that_is_rounded_has_a_kernel_of_its_own() -> None:
    for target, many in ((HOPPER, 8192), (Target.parse("hip:gfx942"), 64)):
        for m in (1, many):
            fused, rounded = (stage("linear_add", target, m, 4096, 14336, rounded=r) for r in (0, 1))
            assert fused == stage("linear_add", target, m, 4096, 14336) and fused.kernel and rounded.kernel
            assert rounded.symbol == fused.symbol.replace("linear_add", "linear_add_rounded") != fused.symbol
            assert rounded.kernel == replace(fused.kernel, function=rounded.symbol) and rounded.grid == fused.grid


@pytest.fixture
def untuned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tile shapes by rule: what tables say changes with every tuning."""
    monkeypatch.setattr(linear_config, "_table", lambda arch: {})


@pytest.mark.usefixtures("untuned")
def test_one_kernel_serves_many_buckets() -> None:
    """The bucket's rows are in the grid alone, so buckets share binaries."""
    blackwell = Target.parse("cuda:sm_100a")
    kernels = {stage("linear", blackwell, m, 6144, 4096).kernel for m in range(1024, 8193, 512)}
    assert len(kernels) <= 3
    grids = [stage("linear", blackwell, m, 6144, 4096).grid for m in (4096, 8192)]
    assert grids[1][0] == 2 * grids[0][0]


def test_columns_must_divide_by_sixteen() -> None:
    (spec,) = (s for s in linear.specs() if s.symbol == "linear_bf16")
    assert spec.constraints == (MultipleOf("K", 16),)


INSTRUCTIONS = {
    "cuda": re.compile(r"(wgmma\.mma_async|mma\.sync|tcgen05\.mma)\S*"),
    "hip": re.compile(r"v_mfma_\w+_bf16"),
}
SHAPES = {
    "cuda:sm_90a": {"wgmma.mma_async", "mma.sync"},
    "cuda:sm_100a": {"tcgen05.mma"},
    "cuda:sm_103a": {"tcgen05.mma"},
    "cuda:sm_120a": {"mma.sync"},
    "hip:gfx942": {"v_mfma_f32_32x32x8_bf16"},
    "hip:gfx950": {"v_mfma_f32_32x32x16_bf16"},
}
"""Matrix instructions by target; Hopper's two give equal bits (benchmarks/gpu/bench_linear.py asserts it there)."""


@pytest.mark.usefixtures("untuned")
@pytest.mark.parametrize("name", GPU_TARGETS)
def test_compiles_to_one_matrix_instruction(name: str) -> None:
    target, found = Target.parse(name), set()
    for op, m, n, k in (("linear", 1, 960, 576), ("linear_add", 64, 4096, 14336),
                        ("linear_silu_mul", 8, 28672, 4096), ("linear_silu_mul", 512, 28672, 4096)):  # fmt: skip
        compiled = compile_kernel(stage(op, target, m, n, k).kernel, target)
        text = compiled.asm["ptx" if target.backend == "cuda" else "amdgcn"]
        assert compiled.metadata.shared <= target.gpu.max_shared_bytes
        assert ("griddepcontrol.wait" in text) == (target.backend == "cuda")
        found |= {
            match.group(1) if match.re.groups else match.group()
            for match in INSTRUCTIONS[target.backend].finditer(text)
        }
    assert found == SHAPES[name]


@pytest.mark.parametrize("name", GPU_TARGETS)
def test_float32_compiles_without_reduced_precision(name: str) -> None:
    target = Target.parse(name)
    compiled = compile_kernel(stage("linear", target, 5, 96, 48, "float32").kernel, target)
    text = compiled.asm["ptx" if target.backend == "cuda" else "amdgcn"]
    assert "tf32" not in text and "xf32" not in text
    assert ("fma.rn" if target.backend == "cuda" else "v_mfma_f32_32x32x2_f32") in text


def compile_kernel(kernel: DeviceKernel | None, target: Target) -> Any:
    """What Triton makes of ``kernel``."""
    assert kernel is not None
    function = getattr(linear, kernel.function)
    names, kinds = function.arg_names, dict(kernel.signature)
    source = ASTSource(
        function,
        {name: kinds.get(name, "constexpr") for name in names},
        {(names.index(name),): value for name, value in kernel.constants},
        {(names.index(name),): [["tt.divisibility", 16]] for name in kinds},
    )
    gpu = GPUTarget(target.backend, target.gpu.compiler_arch, target.gpu.warp_size)
    options = {"num_warps": kernel.num_warps, "num_stages": kernel.num_stages, "enable_fp_fusion": False}
    return triton.compile(source, target=gpu, options=options)
