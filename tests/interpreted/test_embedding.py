"""The Triton embedding kernel under the interpreter."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
import triton
from harness import run

from tokenspeed.compile.codegen import compile_kernels
from tokenspeed.kernels.registry import Request
from tokenspeed.kernels.triton import embedding
from tokenspeed.target import GPU_TARGETS, Target


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
@pytest.mark.parametrize("hidden", [1, 37, 576, 2500])
def test_rows_of_the_table_and_of_the_last_tokens(dtype: type, hidden: int) -> None:
    rng = np.random.default_rng(hidden)
    table = rng.standard_normal((50, hidden)).astype(dtype)
    last_tokens = np.array([7, 49, 3], np.int32)
    token_ids = np.array([0, -1, 49, -2, 11, -3, 5, 5], np.int32)
    out = np.full((8, hidden), np.nan, np.float32)
    block = min(triton.next_power_of_2(hidden), 2048)
    run(
        embedding.embedding,
        (8, triton.cdiv(hidden, block)),
        {"token_ids": token_ids, "last_tokens": last_tokens, "table": table, "out": out,
         "step_sizes": np.array([7, 3, 2, 0], np.int32)},
        {"H": hidden, "BLOCK": block},
        outputs=["out"],
    )  # fmt: skip
    np.testing.assert_array_equal(out[:7], table[[0, 7, 49, 49, 11, 3, 5]].astype(np.float32))
    assert np.isnan(out[7]).all()  # beyond the step's tokens


def test_compiles_for_every_target_without_spilling() -> None:
    sizes = {"H": 4096, "rows": 0, "M": 8, "num_tokens": 8, "num_logit_rows": 8}
    jobs = []
    for target in map(Target.parse, GPU_TARGETS):
        for spec in embedding.specs():
            (stage,) = spec.stages(Request(spec.op, target, spec.dtypes[0], sizes))
            assert stage.kernel is not None
            jobs.append((stage.kernel, target))
    compiled = compile_kernels(jobs, workers=2)
    assert len(compiled) == 2 * len(GPU_TARGETS)
    assert all(code.info.stack_bytes == 0 for code in compiled.values())
