"""Selection of a whole Program: one call per op and bucket, and a report that explains each."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from lowered import LIMITS, REGISTRY, fused_program

from tokenspeed.bucket import BucketKind
from tokenspeed.compile.buckets import ladder
from tokenspeed.compile.select import Selection, op_sizes, select
from tokenspeed.errors import SelectionError
from tokenspeed.kernels.native_specs import FEATURES
from tokenspeed.kernels.registry import Band, Registry
from tokenspeed.target import Target

DEPLOYMENT = {"page_size": 32, "page_stride": 8192, "pages_per_seq": 3, "split_positions": 64}
BUCKETS = ladder(LIMITS)


def choose(dtype: str = "float32", registry: Registry = REGISTRY, arch: str = "x86-64-v4", **options: Any) -> Selection:
    return select(fused_program(dtype=dtype), Target("cpu", arch), BUCKETS, registry, DEPLOYMENT, **options)


def test_every_op_of_every_bucket_gets_a_kernel() -> None:
    program = fused_program()
    selection = choose(features=FEATURES)
    assert [plan.bucket for plan in selection.plans] == list(BUCKETS)
    for plan in selection.plans:
        assert [call.op for call in plan.calls] == list(program.ops)
        assert all(call.spec.op == call.op.kind and call.spec.symbol.endswith("avx512") for call in plan.calls)
        assert all(call.sizes["num_tokens"] == plan.bucket.num_tokens for call in plan.calls)
        drawn = [call.sizes["M"] for call in plan.calls if call.sizes.get("rows") == 2]
        assert drawn == [plan.bucket.num_logit_rows] * len(drawn) and plan.calls[0].sizes["M"] == plan.bucket.num_tokens


def test_sizes_of_ops() -> None:
    program = fused_program()
    sizes = {op.kind: op_sizes(program, op, DEPLOYMENT) for op in program.ops}
    tokens, rows = {"rows": 0}, {"rows": 2}  # the dictionary holds the last op of a kind
    assert sizes["embedding"] == {"H": 48, **tokens} and sizes["rms_norm"] == sizes["gather_rows"] == {"H": 48, **rows}
    assert sizes["linear"] == {"N": 101, "K": 48, **rows} and sizes["linear_silu_mul"] == {"F": 72, "K": 48, **rows}
    assert sizes["linear_add"] == {"N": 48, "K": 72, "rounded": 0, **rows}
    assert sizes["sample"] == {"V": 101, "logprob_shards": 1, **rows}
    heads = {"num_heads": 4, "num_kv_heads": 2, "head_dim": 16}
    assert sizes["paged_attention"] == sizes["rope_kv_write"] == {**heads, **DEPLOYMENT, **tokens}


def test_the_report_names_ops_buckets_and_reasons() -> None:
    report = json.loads(json.dumps(choose("bfloat16", arch="x86-64-v4+bf16").to_json()))
    assert report["target"] == "cpu:x86-64-v4+bf16" and report["pinned"] == {}
    qkv = next(d for d in report["decisions"] if "layers.0.qkv" in d["ops"])
    assert qkv["ops"] == ["layers.0.qkv", "layers.1.qkv"] and qkv["sizes"] == {"K": 48, "N": 128, "rows": 0}
    assert qkv["chosen"] == "linear_bf16_avx512bf16" and qkv["buckets"] == [b.name for b in BUCKETS]
    answers = {c["kernel"]: (c["accepted"], c["reasons"]) for c in qkv["candidates"]}
    assert answers["linear_bf16_avx512bf16"] == (True, [])
    outranked = "outranked by linear_bf16_avx512bf16: band dot_product over vector"
    assert answers["linear_bf16_avx512"] == (True, [outranked])
    assert answers["linear_bf16_amx"][0] is False
    named = [op for decision in report["decisions"] for op in decision["ops"]]
    assert sorted(named) == sorted(op.name for op in fused_program().ops)


def test_pins_are_kept_or_fail_by_name() -> None:
    assert choose(pinned={"linear": "native"}).to_json()["pinned"] == {"linear": "native"}
    with pytest.raises(SelectionError, match="no kernel of pinned solution onednn for op 'linear' on cpu:x86-64-v4"):
        choose(pinned={"linear": "onednn"})
    with pytest.raises(
        SelectionError, match="op 'conv' is pinned to 'native', but the program has only adjust_logits, embed"
    ):
        choose(pinned={"conv": "native"})


def with_decode_kernel(bitwise_class: str) -> Registry:
    """The native kernels and one more, made for decode."""
    base = REGISTRY.by_name["linear_f32_avx512"]
    traits = {"phase": frozenset({"decode"})}
    gemv = replace(base, symbol="gemv", traits=traits, band=Band.MATRIX, bitwise_class=bitwise_class)
    return Registry([*REGISTRY.specs, gemv])


def test_buckets_may_choose_differently_unless_bits_would_change() -> None:
    free = choose(registry=with_decode_kernel("gemv"))
    for plan in free.plans:
        symbol = next(call.spec.symbol for call in plan.calls if call.op.kind == "linear")
        assert symbol == ("gemv" if plan.bucket.kind is BucketKind.DECODE else "linear_f32_avx512")
    decisions = [d for d in free.decisions if d.op_names[0] == "layers.0.qkv"]
    assert [d.chosen.symbol for d in decisions] == ["gemv", "linear_f32_avx512"]
    assert decisions[0].buckets == ("decode-1", "decode-2", "decode-4", "decode-6")
    with pytest.raises(SelectionError, match=r"op 'layers\.0\.qkv' \(linear\): need kernels of one bitwise class in"):
        choose(registry=with_decode_kernel("gemv"), features=FEATURES)
    equal = REGISTRY.by_name["linear_f32_avx512"].bitwise_class
    choose(registry=with_decode_kernel(equal), features=FEATURES)
