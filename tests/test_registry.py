"""Selection among kernels: traits rank, features guarantee, and every refusal says why."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from tokenspeed.errors import SelectionError
from tokenspeed.kernels.equivalence import Choice
from tokenspeed.kernels.native_specs import FEATURES, attention_workspace, native_registry, native_specs
from tokenspeed.kernels.registry import (
    FIXED_ORDER,
    Band,
    KernelSpec,
    MultipleOf,
    Registry,
    Request,
    argument_rules,
    fixed_order,
)
from tokenspeed.target import CPU_ARCHS, Target

NATIVE = Path(__file__).resolve().parent.parent / "kernels" / "native"
V4 = Target.parse("cpu:x86-64-v4")
BF16 = Target.parse("cpu:x86-64-v4+bf16")

PLAIN = KernelSpec(
    op="linear",
    solution="native",
    symbol="plain",
    targets=("cpu:x86-64-v3", "cpu:x86-64-v4"),
    dtypes=("float32",),
    arguments=argument_rules("read x, write out, rows x, int N, float eps"),
    band=Band.PORTABLE,
    features=frozenset({"run_invariant"}),
)
ASK = Request("linear", V4, "float32", {"N": 24, "K": 8})


def reasons(registry: Registry, request: Request) -> dict[str, tuple[str, ...]]:
    return {c.spec.symbol: c.reasons for c in registry.candidates(request)}


def test_a_signature_follows_from_the_argument_rules() -> None:
    assert PLAIN.signature == "ppiif"
    assert [str(rule) for rule in PLAIN.arguments] == ["read x", "write out", "rows x", "int N", "float eps"]


def test_a_trait_ranks_when_declared_and_is_skipped_when_not() -> None:
    decode = replace(PLAIN, symbol="zz_decode", traits={"phase": frozenset({"decode"})})
    registry = Registry([PLAIN, decode])
    assert registry.select(replace(ASK, traits={"phase": "decode"}))[0] is decode
    assert registry.select(ASK)[0] is PLAIN  # no trait wanted: first by name
    assert reasons(registry, replace(ASK, traits={"phase": "mixed"})) == {
        "plain": (),
        "zz_decode": ("trait phase: need mixed, made for decode",),
    }
    assert reasons(registry, replace(ASK, traits={"phase": "decode"})) == {
        "zz_decode": (),
        "plain": ("outranked by zz_decode: made for more of the wanted traits, or first by name",),
    }


def test_a_higher_band_wins_whatever_the_traits() -> None:
    fast = replace(PLAIN, symbol="fast", band=Band.VECTOR)
    slow = replace(PLAIN, traits={"phase": frozenset({"decode"})})
    chosen, candidates = Registry([slow, fast]).select(replace(ASK, traits={"phase": "decode"}))
    assert chosen is fast
    assert candidates[1].reasons == ("outranked by fast: band vector over portable",)


def test_a_feature_is_required_and_silence_is_refusal() -> None:
    strict = replace(PLAIN, symbol="strict", features=FEATURES)
    registry = Registry([PLAIN, strict])
    assert reasons(registry, replace(ASK, features=FEATURES)) == {
        "strict": (),
        "plain": ("features: need batch_invariant, fixed_reduction_order, not declared",),
    }


def test_every_reason_for_a_refusal_is_given() -> None:
    spec = replace(PLAIN, constraints=(MultipleOf("N", 16), MultipleOf("N", "K")), targets=("cpu:x86-64-v4+amx",))
    request = replace(ASK, dtype="bfloat16", sizes={"N": 24, "K": 7}, solution="aok")
    assert reasons(Registry([spec]), request)["plain"] == (
        "solution: need aok (pinned), have native",
        "target: need cpu:x86-64-v4, runs on cpu:x86-64-v4+amx",
        "dtype: need bfloat16, serves float32",
        "sizes: need N to be a multiple of 16, have 24",
        "sizes: need N to be a multiple of 7, have 24",
    )


def test_a_pinned_solution_without_a_kernel_fails_by_name() -> None:
    request = replace(ASK, solution="aok", features=frozenset({"batch_invariant"}))
    with pytest.raises(SelectionError) as caught:
        Registry([PLAIN]).select(request)
    assert caught.value.message.splitlines() == [
        "no kernel of pinned solution aok for op 'linear' on cpu:x86-64-v4: "
        "need dtype float32, features batch_invariant; have 1 to choose from",
        "  no kernel of this op declares batch_invariant",
        "  plain: solution: need aok (pinned), have native; features: need batch_invariant, not declared",
    ]
    assert caught.value.hint == "pin op 'linear' to native, or pin nothing"


def test_an_op_without_any_kernel_fails_by_name() -> None:
    with pytest.raises(SelectionError, match="no kernel for op 'conv' on cpu:x86-64-v4: need dtype float32; have 0"):
        Registry([PLAIN]).select(replace(ASK, op="conv"))


# --- the native kernels ---------------------------------------------------------------------------


def test_specs_are_exactly_the_entries_of_the_kernel_table() -> None:
    entries: dict[str, str] = {}
    for path in NATIVE.glob("*_entries.inc"):
        entries.update(re.findall(r'\{"(\w+)",\s*\w+,\s*"(\w+)"', path.read_text()))
    assert {spec.symbol: spec.signature for spec in native_specs()} == entries


def test_the_best_bfloat16_projection_of_each_target() -> None:
    sizes = {"N": 960, "K": 576}
    best = {
        arch: native_registry().select(Request("linear", Target("cpu", arch), "bfloat16", sizes))[0].symbol
        for arch in CPU_ARCHS
    }
    assert best == {
        "x86-64-v3": "linear_bf16_avx2",
        "x86-64-v4": "linear_bf16_avx512",
        "x86-64-v4+bf16": "linear_bf16_avx512bf16",
        "x86-64-v4+amx": "linear_bf16_amx",
    }


def test_narrower_kernels_say_what_outranks_them() -> None:
    request = Request("linear", BF16, "bfloat16", {"N": 960, "K": 576}, features=FEATURES)
    text = [str(candidate) for candidate in native_registry().candidates(request)]
    assert text == [
        "linear_bf16_avx512bf16: chosen",
        "linear_bf16_avx512: outranked by linear_bf16_avx512bf16: band dot_product over vector",
        "linear_bf16_avx2: outranked by linear_bf16_avx512bf16: band dot_product over portable",
        "aok:linear_bf16_avx512bf16: outranked by linear_bf16_avx512bf16: band dot_product over reference",
        "aok:linear_bf16_avx512: outranked by linear_bf16_avx512bf16: band dot_product over reference",
        "aok:linear_bf16_avx2: outranked by linear_bf16_avx512bf16: band dot_product over reference",
        "linear_bf16_amx: target: need cpu:x86-64-v4+bf16, runs on cpu:x86-64-v4+amx",
        "linear_f32_avx512: dtype: need bfloat16, serves float32",
        "linear_f32_avx2: dtype: need bfloat16, serves float32",
        "aok:linear_bf16_amx: target: need cpu:x86-64-v4+bf16, runs on cpu:x86-64-v4+amx",
        "aok:linear_f32_avx512: dtype: need bfloat16, serves float32",
        "aok:linear_f32_avx2: dtype: need bfloat16, serves float32",
    ]


@pytest.mark.parametrize("arch", CPU_ARCHS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_pinned_to_aok_the_best_kernel_of_the_target_still_wins(arch: str, dtype: str) -> None:
    registry, sizes = native_registry(), {"N": 960, "K": 576}
    for op in ("linear", "linear_add", "linear_silu_mul"):
        request = Request(op, Target("cpu", arch), dtype, sizes, features=FEATURES)
        auto, _ = registry.select(request)
        pinned, candidates = registry.select(replace(request, solution="aok"))
        assert (auto.solution, pinned.solution, pinned.name) == ("native", "aok", f"aok:{auto.symbol}")
        assert (pinned.symbol, pinned.arguments, pinned.weight_layout, pinned.bitwise_class) == (
            auto.symbol, auto.arguments, auto.weight_layout, auto.bitwise_class,
        )  # fmt: skip
        losers = [str(c) for c in candidates if c.accepted][1:]
        assert all(f"outranked by {pinned.name}: rank {pinned.rank} over " in text for text in losers)


def test_only_kernels_that_declare_every_feature_of_a_fixed_order_are_aok() -> None:
    whole, partly = replace(PLAIN, features=FIXED_ORDER), replace(PLAIN, symbol="partly")
    assert [spec.name for spec in fixed_order([whole, partly])] == ["plain", "aok:plain", "partly"]
    with pytest.raises(SelectionError) as caught:
        Registry(fixed_order([partly])).select(replace(ASK, features=FIXED_ORDER, solution="aok"))
    assert caught.value.message.splitlines() == [
        "no kernel of pinned solution aok for op 'linear' on cpu:x86-64-v4: need dtype float32, features"
        " batch_invariant, fixed_reduction_order, run_invariant; have 1 to choose from",
        "  no kernel of this op declares batch_invariant, fixed_reduction_order",
        "  partly: solution: need aok (pinned), have native; features: need batch_invariant, fixed_reduction_order,"
        " not declared",
    ]


def test_samplers_declare_what_they_promise_of_ties_and_draws() -> None:
    promised = {"canonical_ties", "request_keyed_draws"}
    assert all(promised <= s.features for s in native_specs() if s.op == "sample")
    assert not any(promised & s.features for s in native_specs() if s.op != "sample")


class NoProof:
    def choose(self, request: Request) -> Choice:
        raise LookupError(f"need N to be 8, have {request.sizes['N']}")


def test_a_kernel_whose_guarantee_is_not_proven_says_so() -> None:
    with pytest.raises(SelectionError, match="plain: proof: need N to be 8, have 24") as caught:
        Registry([replace(PLAIN, proof=NoProof())]).select(ASK)
    assert caught.value.hint is not None and "docs/equivalence.md" in caught.value.hint


def test_sizes_that_no_kernel_serves_are_named() -> None:
    sizes = {"num_heads": 4, "num_kv_heads": 2, "head_dim": 80, "page_size": 512, "split_positions": 768}
    request = Request("paged_attention", V4, "float32", {**sizes, "head_dim": 40})
    with pytest.raises(SelectionError) as caught:
        native_registry().select(request)
    for reason in (
        "need head_dim to be a multiple of 16, have 40",
        "need page_size to be at most 256, have 512",
        "need split_positions to be a multiple of 512, have 768",
    ):
        assert reason in caught.value.message


def test_limits_and_workspace_are_those_of_the_attention_header() -> None:
    header = (NATIVE / "attention.h").read_text()
    rope = (NATIVE / "rope.h").read_text()
    assert "kAttentionMaxHeadDim = 256" in header and "kRopeMaxHeadDim = 256" in rope
    assert "kAttentionMaxPageSize = 256" in header and "kAttentionSplitSeqs = 64" in header
    assert "seqs * num_q_heads * max_splits * (head_dim + 16)) * sizeof(float)" in header
    sizes = {"num_seqs": 3, "num_heads": 9, "head_dim": 64, "pages_per_seq": 33, "page_size": 64}
    assert attention_workspace({**sizes, "split_positions": 1024}) == 3 * 9 * 3 * (64 + 16) * 4
    assert attention_workspace({**sizes, "num_seqs": 200, "split_positions": 1024}) == 64 * 9 * 3 * (64 + 16) * 4
