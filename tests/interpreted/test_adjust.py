"""The Triton kernel of adjusted logits under the interpreter: the reference's bits, and every target."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from adjust_cases import adjust_operands, old_counts
from harness import run
from numpy.typing import NDArray
from test_sample import check, spread

from tokenspeed.compile import sampler
from tokenspeed.compile.codegen import compile_kernels
from tokenspeed.kernels.registry import Request
from tokenspeed.kernels.triton import adjust
from tokenspeed.target import GPU_TARGETS, Target

Array = NDArray[Any]


def run_kernel(step: dict[str, Array], counts: Array, seed: int) -> Array:
    """Adjusted logits of a bucket with a row to spare; ``counts`` are updated. Rows that nobody wrote hold 7."""
    (spec,) = adjust.specs()
    count, vocab = len(step["adjust_seq"]), step["logits"].shape[1]
    sizes = {"V": vocab, "num_seqs": count + 1}
    (stage,) = spec.stages(Request("adjust_logits", Target.parse("cuda:sm_90a"), "float32", sizes))
    assert stage.kernel is not None
    numbers = [len(step["token_ids"]), len(step["cu_seqlens"]) - 1, len(step["logits"]), count]
    memory = {
        **step,
        "token_counts": counts,
        "adjusted": np.full((count + 1, vocab), 7, np.float32),
        "step_sizes": np.array([*numbers, len(step["bias_ids"]), len(step["token_masks"]), 0, 0], np.int32),
    }
    outputs = ("token_counts", "adjusted")
    run(adjust.adjust_logits, stage.grid, memory, dict(stage.kernel.constants) | {"PDL": False}, outputs=outputs,
        seed=seed)  # fmt: skip
    return memory["adjusted"]


@pytest.mark.parametrize(("vocab", "num_adjustments"), [(37, 5), (1024, 3), (1100, 5), (2500, 5), (101, 0)])
def test_bits_are_those_of_the_reference(vocab: int, num_adjustments: int) -> None:
    rng = np.random.default_rng(vocab)
    for seed in range(2):
        step = adjust_operands(rng, vocab, num_adjustments)
        counts = old_counts(rng, vocab)
        expected_counts = counts.copy()
        expected = sampler.adjust_rows(step["logits"], step, expected_counts)
        got = run_kernel(step, counts, seed)
        np.testing.assert_array_equal(counts, expected_counts)
        for i, row in enumerate(step["adjust_row"]):
            np.testing.assert_array_equal(got[i], expected[i] if row >= 0 else np.float32(7), err_msg=str(i))
        assert (got[num_adjustments] == 7).all()


def test_rows_with_adjustments_draw_from_them_and_are_scored_without() -> None:
    rng = np.random.default_rng(8)
    logits, adjusted = spread(rng, 8, 4100), spread(rng, 3, 4100)
    adjusted[1, 5:] = -np.inf
    asked: list[dict[str, Any]] = [
        {"adjustment": 2, "num_logprobs": 3, "state_slot": 1},
        {"num_logprobs": 2},
        {"adjustment": 0, "temperature": 1.0, "seed": 5, "num_logprobs": 0},
        {"adjustment": 1, "temperature": 1.5, "seed": 6, "num_logprobs": 1},
        {"adjustment": 2, "temperature": 1.0, "top_k": 5, "seed": 7},
        {"adjustment": 0, "temperature": 0.8, "top_p": 0.3, "seed": 8, "state_slot": 0},
        {"temperature": 0.8, "top_p": 0.3, "min_p": 0.05, "seed": 9},
        {"adjustment": 2, "temperature": 0.8, "top_p": 0.9, "top_k": 70, "min_p": 0.05, "seed": 10},
    ]
    got = check(logits, asked, adjusted)
    assert got["out_token"][0] == adjusted[2].argmax() and got["out_rank"][0] > 1 and got["out_token"][3] < 5


def test_compiles_for_every_target_without_spilling() -> None:
    (spec,) = adjust.specs()
    sizes = {"V": 128256, "num_seqs": 256}
    targets = [Target.parse(name) for name in GPU_TARGETS]
    stages = [(spec.stages(Request("adjust_logits", t, "bfloat16", sizes))[0], t) for t in targets]
    assert {stage.grid for stage, _ in stages} == {(126, 4, 1)}
    for (kernel, target), code in compile_kernels([(s.kernel, t) for s, t in stages if s.kernel], workers=2).items():
        assert code.info.stack_bytes == 0, f"{kernel} on {target} spills"
