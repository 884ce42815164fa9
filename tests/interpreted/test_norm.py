"""The Triton RMS norm kernel under the interpreter."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
import triton
from harness import run

from tokenspeed.compile.codegen import compile_kernels
from tokenspeed.kernels.registry import Request
from tokenspeed.kernels.triton import norm
from tokenspeed.target import GPU_TARGETS, Target


def normed(x: np.ndarray, weight: np.ndarray, rows: int, dtype: type, eps: float = 1e-5) -> np.ndarray:
    out = np.full(x.shape, 77, dtype)
    run(
        norm.rms_norm,
        (len(x),),
        {"x": x, "weight": weight, "out": out, "step_sizes": np.array([100, rows, 50, 0], np.int32), "eps": eps},
        {"H": x.shape[1], "BLOCK": triton.next_power_of_2(x.shape[1]), "ROWS": 1},
        outputs=["out"],
    )
    return out


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
@pytest.mark.parametrize("hidden", [1, 37, 576, 4096])
def test_agrees_with_the_formula_in_float64(dtype: type, hidden: int) -> None:
    rng = np.random.default_rng(hidden)
    x = (rng.standard_normal((5, hidden)) * np.array([[1e-4], [1], [3], [50], [3000]])).astype(np.float32)
    weight = rng.standard_normal(hidden).astype(np.float32)
    out = normed(x, weight, 4, dtype)
    exact = x.astype(np.float64)
    expected = exact / np.sqrt((exact**2).mean(axis=1, keepdims=True) + 1e-5) * weight
    rounding = 2.0**-8 if dtype == ml_dtypes.bfloat16 else 1e-6
    np.testing.assert_allclose(out[:4].astype(np.float64), expected[:4], rtol=rounding, atol=1e-30)
    assert (out[4] == dtype(77)).all()  # beyond the step's rows


def test_a_row_does_not_depend_on_the_others() -> None:
    rng = np.random.default_rng(0)
    x, weight = rng.standard_normal((6, 576)).astype(np.float32), np.ones(576, np.float32)
    np.testing.assert_array_equal(normed(x, weight, 6, np.float32)[3:4], normed(x[3:4], weight, 1, np.float32))


def test_one_configuration_for_every_bucket() -> None:
    (spec,) = (s for s in norm.specs() if s.dtypes == ("bfloat16",))
    sizes = {"H": 4096, "rows": 0, "num_tokens": 1, "num_seqs": 1, "num_logit_rows": 1}
    target = Target.parse("cuda:sm_90a")
    stages = [
        spec.stages(Request("rms_norm", target, "bfloat16", {**sizes, "M": rows})) for rows in (1, 64, 8192)
    ]  # fmt: skip
    assert len({stage.kernel for (stage,) in stages}) == 1
    assert [stage.grid for (stage,) in stages] == [(1, 1, 1), (64, 1, 1), (8192, 1, 1)]


def test_compiles_for_every_target_without_spilling() -> None:
    sizes = {"H": 4096, "rows": 0, "M": 8, "num_tokens": 8, "num_logit_rows": 8}
    jobs = []
    for target in map(Target.parse, GPU_TARGETS):
        for spec in norm.specs():
            (stage,) = spec.stages(Request(spec.op, target, spec.dtypes[0], sizes))
            assert stage.kernel is not None
            jobs.append((stage.kernel, target))
    compiled = compile_kernels(jobs, workers=2)
    assert len(compiled) == 2 * len(GPU_TARGETS)
    assert all(code.info.stack_bytes == 0 for code in compiled.values())
