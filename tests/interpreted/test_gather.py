"""The Triton gather kernel under the interpreter."""

from __future__ import annotations

import numpy as np
import pytest
import triton
from harness import run

from tokenspeed.compile.codegen import compile_kernels
from tokenspeed.kernels.registry import Request
from tokenspeed.kernels.triton import gather
from tokenspeed.target import GPU_TARGETS, Target


@pytest.mark.parametrize("hidden", [1, 37, 576, 2500])
def test_packs_the_rows_that_need_logits(hidden: int) -> None:
    x = np.random.default_rng(hidden).standard_normal((9, hidden)).astype(np.float32)
    out = np.full((4, hidden), np.nan, np.float32)
    block = min(triton.next_power_of_2(hidden), 2048)
    run(
        gather.gather_rows,
        (4, triton.cdiv(hidden, block)),
        {"x": x, "logit_rows": np.array([0, 3, 8, 99], np.int32), "out": out,
         "step_sizes": np.array([9, 3, 3, 0], np.int32)},
        {"H": hidden, "BLOCK": block},
        outputs=["out"],
    )  # fmt: skip
    np.testing.assert_array_equal(out[:3], x[[0, 3, 8]])
    assert np.isnan(out[3]).all()  # beyond the step's logit rows


def test_compiles_for_every_target_without_spilling() -> None:
    sizes = {"H": 4096, "rows": 0, "M": 8, "num_tokens": 8, "num_logit_rows": 8}
    jobs = []
    for target in map(Target.parse, GPU_TARGETS):
        for spec in gather.specs():
            (stage,) = spec.stages(Request(spec.op, target, spec.dtypes[0], sizes))
            assert stage.kernel is not None
            jobs.append((stage.kernel, target))
    compiled = compile_kernels(jobs, workers=2)
    assert len(compiled) == 1 * len(GPU_TARGETS)
    assert all(code.info.stack_bytes == 0 for code in compiled.values())
