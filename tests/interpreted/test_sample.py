"""The Triton sampling kernels under the interpreter, against the reference sampler."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import triton
import triton.language as tl
from harness import run
from numpy.typing import NDArray

from tokenspeed.compile import sampler
from tokenspeed.compile.codegen import compile_kernels
from tokenspeed.compile.ops import SAMPLE_OPERANDS
from tokenspeed.kernels.registry import Request
from tokenspeed.kernels.triton import sample
from tokenspeed.kernels.triton.sample_math import exponentials, logit_of, order_of, token_of
from tokenspeed.step import MAX_TOP_LOGPROBS, STEP_SCALARS
from tokenspeed.target import GPU_TARGETS, Target

Array = NDArray[Any]
DEFAULTS = {
    "logit_target": -1, "temperature": 0.0, "top_p": 1.0, "min_p": 0.0, "top_k": 0, "seed": 0, "draw_position": 0,
    "num_logprobs": -1, "state_slot": -1, "adjustment": -1,
}  # fmt: skip
OUTPUTS = ("out_token", "out_logprob", "out_rank", "out_top_ids", "out_top_logprobs", "last_tokens")
SPARE = 2
"""Rows of the bucket beyond those of the step."""


def operands(rows: list[dict[str, Any]]) -> dict[str, Array]:
    """Operands of the op from what each row asks for."""
    return {n: np.array([{**DEFAULTS, **row}[n] for row in rows], dtype=d) for n, d in SAMPLE_OPERANDS.items()}


def run_kernels(
    logits: Array,
    rows: dict[str, Array],
    bucket: int | None = None,
    adjusted: Array | None = None,
    shards: int = 1,
) -> dict[str, Array]:
    """All stages on a bucket with room to spare; every byte that nobody wrote is poison."""
    count, vocab = logits.shape
    bucket = count + SPARE if bucket is None else bucket
    (spec,) = sample.specs()
    sizes = {"V": vocab, "logprob_shards": shards, **dict.fromkeys(STEP_SCALARS, bucket)}

    def padded(array: Array) -> Array:
        poison = np.full((bucket, *array.shape[1:]), 0x7F, array.dtype)
        poison[:count] = array
        return poison

    memory = {
        "logits": padded(logits),
        "adjusted": np.full((1, vocab), 0x7F, np.float32) if adjusted is None else adjusted,
        **{name: padded(array) for name, array in rows.items()},
        "last_tokens": np.full(bucket + 1, -77, np.int32),
        "out_token": np.full(bucket, -77, np.int32),
        "out_logprob": np.full(bucket, -77, np.float32),
        "out_rank": np.full(bucket, -77, np.int32),
        "out_top_ids": np.full((bucket, MAX_TOP_LOGPROBS), -77, np.int32),
        "out_top_logprobs": np.full((bucket, MAX_TOP_LOGPROBS), -77, np.float32),
        "partials": np.full(spec.workspace_bytes(sizes) // 4, -1, np.int32),
        "step_sizes": np.array([count, count, count, 0, 0, 0, 0, 0], np.int32),
    }
    for stage in spec.stages(Request("sample", Target.parse("cuda:sm_90a"), "float32", sizes)):
        assert stage.kernel is not None
        names = {rule.name: parameter for rule, (parameter, _) in zip(
            stage.arguments, stage.kernel.signature, strict=True)}  # fmt: skip
        written = [names[rule.name] for rule in stage.arguments if rule.kind in ("write", "workspace")]
        run(
            getattr(sample, stage.kernel.function),
            stage.grid,
            {parameter: memory[name] for name, parameter in names.items()},
            {**dict(stage.kernel.constants), "PDL": False},
            outputs=written,
            seed=1,
        )
    for name in OUTPUTS[:-1]:
        assert (memory[name][count:] == -77).all(), f"{name} beyond the step's rows"
    return {name: memory[name] for name in OUTPUTS}


def check(
    logits: Array, asked: list[dict[str, Any]], adjusted: Array | None = None, shards: int = 1
) -> dict[str, Array]:
    """The kernels agree with the reference on rows that each ask for something."""
    rows = operands(asked)
    last_tokens = np.full(len(asked) + SPARE + 1, -77, np.int32)
    with np.errstate(invalid="ignore", over="ignore"):
        expected = dict(zip(OUTPUTS, sampler.sample_rows(logits, adjusted, rows, last_tokens, shards), strict=True))
    got = run_kernels(logits, rows, adjusted=adjusted, shards=shards)
    for name in OUTPUTS:
        have = got[name] if name == "last_tokens" else got[name][: len(asked)]
        if have.dtype == np.float32:
            np.testing.assert_allclose(have, expected[name], rtol=2e-6, atol=4e-6, err_msg=name)
        else:
            np.testing.assert_array_equal(have, expected[name], err_msg=name)
    return got


def spread(rng: np.random.Generator, rows: int, vocab: int, scale: float = 2.0) -> Array:
    return (rng.standard_normal((rows, vocab)) * scale).astype(np.float32)


VARIANTS: list[dict[str, Any]] = [
    {},
    {"state_slot": 3},
    {"num_logprobs": 0},
    {"num_logprobs": 5},
    {"temperature": 1.0, "seed": 2**64 - 1, "draw_position": 2**31 - 1, "state_slot": 0},
    {"temperature": 0.3, "num_logprobs": 20},
    {"temperature": 1e-42},
    {"temperature": 1.0, "top_k": 1},
    {"temperature": 1.0, "top_k": 7},
    {"temperature": 1.0, "top_k": 10**6},
    {"temperature": 1.0, "top_p": 0.9},
    {"temperature": 1.0, "top_p": 0.1},
    {"temperature": 1.0, "top_p": 0.0},
    {"temperature": 1.0, "min_p": 0.3},
    {"temperature": 1.0, "min_p": 1.0},
    {"temperature": 2.0, "top_k": 20, "top_p": 0.8},
    {"temperature": 0.7, "top_k": 20, "top_p": 0.95, "min_p": 0.05, "num_logprobs": 3},
    {"logit_target": 11},
    {"logit_target": 36, "num_logprobs": 2, "temperature": 1.0, "state_slot": 5, "top_p": 0.5},
]  # fmt: skip


@pytest.mark.parametrize("vocab", [37, 1000, 4100])
def test_every_variant_agrees_with_the_reference(vocab: int) -> None:
    rng = np.random.default_rng(vocab)
    asked = [{"seed": int(rng.integers(2**63)), "draw_position": i, **variant} for i, variant in enumerate(VARIANTS)]
    check(spread(rng, len(asked), vocab), asked)


def test_a_real_vocabulary() -> None:
    rng = np.random.default_rng(1)
    asked = [{}, {"temperature": 1.0, "seed": 5}, {"temperature": 1.0, "top_p": 0.3, "seed": 6}, {"num_logprobs": 20}]
    check(spread(rng, 4, 49152), asked)


@pytest.mark.parametrize("variant", [{"top_p": 0.05}, {"top_k": 2}, {"min_p": 0.9}, {"top_k": 3, "top_p": 0.5}])
def test_races_again_until_the_winner_is_kept(variant: dict[str, Any]) -> None:
    """Flat rows whose keep sets are a small part: most first winners are not kept."""
    rng = np.random.default_rng(7)
    rows = 6
    asked = [{"temperature": 1.5, "seed": seed, "draw_position": 9, **variant} for seed in range(rows)]
    logits = spread(rng, rows, 2100, 0.3)
    check(logits, asked)
    plain = run_kernels(logits, operands([{**row, "top_p": 1.0, "top_k": 0, "min_p": 0.0} for row in asked]))
    kept = run_kernels(logits, operands(asked))
    assert (plain["out_token"] != kept["out_token"]).sum() > rows // 2


@pytest.mark.parametrize("top_k", [64, 65, 300, 4099])
def test_mass_of_many_first_tokens(top_k: int) -> None:
    rng = np.random.default_rng(top_k)
    logits = spread(rng, 4, 4100, 0.5)
    logits[1] = np.round(logits[1])  # the threshold has many equals
    logits[2, 50:] = -np.inf
    logits[3] = -0.0
    logits[3, ::2] = 0.0
    asked = [{"temperature": 1.0, "top_k": top_k, "top_p": 0.4, "seed": seed} for seed in range(4)]
    check(logits, asked)


@triton.jit
def noise_kernel(seed, position, out, FIRST: tl.constexpr, SIZE: tl.constexpr):
    tl.store(out + tl.arange(0, SIZE), exponentials(tl.load(seed), tl.load(position), FIRST, SIZE))


@triton.jit
def order_kernel(logits, orders, values, tokens, SIZE: tl.constexpr):
    places = tl.arange(0, SIZE)
    order = order_of(tl.load(logits + places), places)
    tl.store(orders + places, order)
    tl.store(values + places, logit_of(order))
    tl.store(tokens + places, token_of(order))


def test_noise_is_precise_at_both_ends() -> None:
    seed, position, first, size = 0xFEDCBA9876543210, 12345, 4096, 1 << 17
    out = np.zeros(size, np.float32)
    memory = {"seed": np.array([seed], np.uint64), "position": np.array([position], np.int32), "out": out}
    run(noise_kernel, (1,), memory, {"FIRST": first, "SIZE": size}, outputs=["out"])
    u = sampler.uniforms(seed, position, first + size)[first:]
    exact = -np.log(u)
    assert u.max() > 1 - 2**-15 and u.min() < 2**-15
    assert np.abs(out / exact - 1).max() < 4e-7


def test_order_values() -> None:
    special = [0.0, -0.0, np.inf, -np.inf, 1e-45, -1e-45, 3.4e38, -3.4e38, 1.0, 1.0, -1.0, -1.0]
    logits = np.array([*special, *np.random.default_rng(0).standard_normal(52)], np.float32)
    orders, values, tokens = np.zeros(64, np.int64), np.zeros(64, np.float32), np.zeros(64, np.int32)
    memory = {"logits": logits, "orders": orders, "values": values, "tokens": tokens}
    run(order_kernel, (1,), memory, {"SIZE": 64}, outputs=["orders", "values", "tokens"])
    np.testing.assert_array_equal(np.argsort(-orders, kind="stable"), sampler.by_likelihood(logits))
    np.testing.assert_array_equal(values, logits)
    np.testing.assert_array_equal(tokens, np.arange(64))
    assert len(set(orders.tolist())) == 64


def test_ties_go_to_the_lowest_id() -> None:
    logits = np.zeros((6, 2500), np.float32)
    logits[1, [2100, 17, 2400]] = 1
    logits[2, ::2] = -0.0  # equal to 0
    logits[5] = np.arange(2500) // 100 % 3
    asked = [{"num_logprobs": 4}, {"num_logprobs": 5}, {"num_logprobs": 2}, {"logit_target": 2499},
             {"temperature": 1.0, "top_p": 0.5, "seed": 3}, {"temperature": 1.0, "top_k": 50, "seed": 8}]  # fmt: skip
    got = check(logits, asked)
    assert got["out_token"][:3].tolist() == [0, 17, 0]
    assert got["out_rank"][3] == 2500
    assert got["out_token"][4] < 1250


def test_equal_tokens_are_kept_by_id() -> None:
    """top_k among equals: whatever the seed, the draw is one of the first ids."""
    rows = 8
    logits = np.ones((rows, 37), np.float32)
    got = check(logits, [{"temperature": 1.0, "top_k": 3, "seed": seed} for seed in range(rows)])
    assert set(got["out_token"][:rows].tolist()) == {0, 1, 2}


def test_rows_that_are_not_finite() -> None:
    nan, inf = np.float32(np.nan), np.float32(np.inf)
    logits = spread(np.random.default_rng(3), 7, 2100)
    logits[0, ::3] = nan
    logits[1] = nan
    logits[2] = -inf
    logits[3, [70, 2090]] = inf
    logits[4, :2048] = -inf  # a chunk of nothing
    logits[5, 1:] = -inf
    logits[6, [3, 2049]] = nan
    logits[6, 5] = -inf
    draw = {"temperature": 1.0, "top_p": 0.9, "num_logprobs": 3, "seed": 4}
    check(logits, [{"num_logprobs": 2}, draw, draw, draw, draw, draw, {"logit_target": 5, "num_logprobs": 1}])


def test_a_draw_depends_on_its_row_alone() -> None:
    """Bitwise: the row, its neighbours and the bucket do not show."""
    rng = np.random.default_rng(9)
    asked = [{"temperature": 0.8, "top_p": 0.7, "seed": i, "num_logprobs": 2} for i in range(5)]
    logits = spread(rng, 5, 3000)
    together = run_kernels(logits, operands(asked))
    for row in (0, 4):
        alone = run_kernels(logits[row : row + 1], operands(asked[row : row + 1]), bucket=1)
        for name in OUTPUTS[:-1]:
            np.testing.assert_array_equal(alone[name][0], together[name][row], err_msg=name)


@pytest.mark.parametrize(("vocab", "shards"), [(4100, 2), (4100, 4), (1000, 8), (37, 37), (49152, 8)])
def test_the_vocabulary_is_folded_in_shards(vocab: int, shards: int) -> None:
    """Shards that are no multiples of 16, shorter than a chunk, or of several; only log-probabilities may differ."""
    rng = np.random.default_rng(vocab + shards)
    asked = [{"num_logprobs": 5}, {"logit_target": 11}, {"temperature": 0.8, "top_p": 0.7, "seed": 4}]
    logits = spread(rng, 3, vocab)
    got, whole = check(logits, asked, shards=shards), run_kernels(logits, operands(asked))
    for name in ("out_token", "out_rank", "out_top_ids", "last_tokens"):
        np.testing.assert_array_equal(got[name], whole[name], err_msg=name)


def test_shards_are_rounded_to_float32_and_added_in_order() -> None:
    """A sum that the order of float32 additions decides: with ones of e^-16.7 behind a first 1, each is lost."""
    vocab, shards = 64, 64
    logits = np.full((2, vocab), -16.7, np.float32)
    logits[0, 0] = logits[1, -1] = 0.0
    asked = operands([{"logit_target": 0}, {"logit_target": vocab - 1}])
    lost, kept = run_kernels(logits, asked, shards=shards)["out_logprob"][:2]
    assert lost == 0.0 and kept == np.float32(-np.log(np.float64(np.float32(1 + 63 * np.exp(-16.7)))))
    assert run_kernels(logits, asked)["out_logprob"][0] < 0.0


def test_a_folded_row_depends_on_itself_alone() -> None:
    rng = np.random.default_rng(19)
    asked = [{"temperature": 0.8, "seed": i, "num_logprobs": 2} for i in range(4)]
    logits = spread(rng, 4, 4500)
    together = run_kernels(logits, operands(asked), shards=3)
    alone = run_kernels(logits[3:], operands(asked[3:]), bucket=1, shards=3)
    for name in OUTPUTS[:-1]:
        np.testing.assert_array_equal(alone[name][0], together[name][3], err_msg=name)


def test_folded_rows_that_are_not_finite() -> None:
    logits = spread(np.random.default_rng(3), 4, 4100)
    logits[0, ::3] = np.nan
    logits[1] = -np.inf
    logits[2, 70] = np.inf
    logits[3, :2050] = -np.inf  # a shard of nothing
    check(logits, [{"num_logprobs": 2}] * 4, shards=2)


def test_draws_follow_the_distribution() -> None:
    rows = 150
    probabilities = np.array([0.5, 0.25, 0.15, 0.1])
    logits = np.tile(np.log(probabilities).astype(np.float32), (rows, 1))
    got = run_kernels(logits, operands([{"temperature": 1.0, "seed": 77, "draw_position": i} for i in range(rows)]))
    observed = np.bincount(got["out_token"][:rows], minlength=4)
    chi2 = ((observed - rows * probabilities) ** 2 / (rows * probabilities)).sum()
    assert chi2 < 16.3  # 3 degrees of freedom, p = 0.001


def test_one_configuration_for_every_bucket() -> None:
    (spec,) = sample.specs()
    target = Target.parse("hip:gfx942")
    stages = [
        spec.stages(Request("sample", target, "bfloat16", {"V": 128256, "num_logit_rows": rows, "logprob_shards": 1}))
        for rows in (1, 256)
    ]
    assert [stage.kernel for stage in stages[0]] == [stage.kernel for stage in stages[1]]
    assert [stage.grid for stage in stages[1]] == [(63, 256, 1), (63, 256, 1), (256, 1, 1)]


def test_compiles_for_every_target_without_spilling() -> None:
    (spec,) = sample.specs()
    targets = [Target.parse(name) for name in GPU_TARGETS]
    shapes = [{"V": 128256, "num_logit_rows": 8, "logprob_shards": shards} for shards in (1, 8)]
    jobs = {(s.kernel, t) for sizes in shapes for t in targets
            for s in spec.stages(Request("sample", t, "bfloat16", sizes)) if s.kernel}  # fmt: skip
    compiled = compile_kernels(sorted(jobs, key=str), workers=2)
    assert len(compiled) == (3 + 4) * len(GPU_TARGETS)
    for (kernel, target), code in compiled.items():
        assert code.info.stack_bytes == 0, f"{kernel} on {target} spills"
