"""Step costs of `tokenspeed simulate`: from benches, sweeps, cost files and by hand; buckets; hostile files."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from tokenspeed.bucket import Bucket, BucketKind, StepLimits
from tokenspeed.compile.buckets import ladder
from tokenspeed.errors import ProgramError, UsageError
from tokenspeed.runtime import bench, sweep
from tokenspeed.simulate import measured
from tokenspeed.simulate.cost import (
    Costs,
    Point,
    Provenance,
    buckets_of,
    dumps,
    from_json,
    model,
    parse_step_cost,
    with_attention,
)
from tokenspeed.simulate.measured import load_costs

RESULTS = Path(__file__).resolve().parent.parent / "benchmarks" / "results"
DECODE, MIXED = BucketKind.DECODE, BucketKind.MIXED
LIMITS = StepLimits(max_prefill_tokens=512, max_num_seqs=8, max_logit_rows=8)


def written(path: Path, data: Any) -> Path:
    path.write_text(json.dumps(data))
    return path


# ---- the model ------------------------------------------------------------------------------------------------


def test_interpolation() -> None:
    costs = parse_step_cost(["decode:2=4ms,decode:10=12ms", "mixed:100=50ms"])
    at = [costs.seconds(DECODE, n) for n in (1, 2, 6, 10, 20)]
    assert at == pytest.approx([0.004, 0.004, 0.008, 0.012, 0.024])
    assert costs.seconds(MIXED, 7) == pytest.approx(0.05)
    with pytest.raises(UsageError, match="the costs have no mixed step"):
        parse_step_cost(["decode:2=4ms"]).seconds(MIXED, 4)


def test_attention_is_taken_off_and_added_again() -> None:
    points = (Point(DECODE, 8, 0.010, context_tokens=800), Point(MIXED, 512, 0.100, pairs=512 * 256))
    whole = model(Costs(points, 1e-6, 1e-7), ladder(LIMITS), LIMITS)
    again = whole.step_seconds(8, 8, 8, decode_only=True, context_tokens=800)
    assert again == pytest.approx(0.010)
    assert whole.step_seconds(512, 1, 1, decode_only=False, pairs=512 * 256) == pytest.approx(0.100)
    assert whole.step_seconds(8, 8, 8, decode_only=True) == pytest.approx(0.0092)
    overrated = Costs(points, 1.0, 0.0)
    assert overrated.seconds(DECODE, 8) == pytest.approx(0.001)


def test_steps_cost_what_their_buckets_do_by_their_tokens() -> None:
    buckets = ladder(LIMITS)
    costs = Costs(tuple(Point(b.kind, b.num_tokens, b.num_tokens / 1e3) for b in buckets))
    priced = model(costs, buckets, LIMITS)
    assert priced.step_seconds(3, 3, 3, decode_only=False) == pytest.approx(0.016)  # the smallest of its kind
    assert priced.step_seconds(300, 1, 1, decode_only=False) == pytest.approx(0.300)
    uneven = replace(priced, seconds=tuple(b.num_tokens / (2e3 if b.num_tokens == 4 else 1e3) for b in priced.buckets))
    assert uneven.step_seconds(3, 3, 3, decode_only=True) == pytest.approx(0.002)  # between 2 ms and 2 ms
    assert uneven.step_seconds(6, 6, 6, decode_only=True) == pytest.approx(0.005)  # between 2 ms and 8 ms
    with pytest.raises(ProgramError, match="no bucket for a step of 9 tokens"):
        priced.step_seconds(9, 9, 9, decode_only=True)


def test_lower_limits_use_the_artifacts_own_buckets() -> None:
    buckets = ladder(StepLimits(512, 8, 8))
    small = StepLimits(max_prefill_tokens=100, max_num_seqs=5, max_logit_rows=5)
    assert model(parse_step_cost(["decode:8=1ms,mixed:512=9ms"]), buckets, small).buckets == tuple(sorted(buckets))
    large = StepLimits(max_prefill_tokens=1024, max_num_seqs=8, max_logit_rows=8)
    with pytest.raises(UsageError, match=r"do not cover the scheduler: .* a mixed step of 513 tokens") as refused:
        model(parse_step_cost(["decode:8=1ms,mixed:512=9ms"]), buckets, large)
    assert "--max-step-tokens" in str(refused.value.hint)


def test_points_are_buckets_where_nothing_else_is() -> None:
    costs = parse_step_cost(["decode:1=1ms,decode:8=2ms,mixed:512=9ms"])
    assert buckets_of(costs, LIMITS) == (Bucket(DECODE, 1, 1, 1), Bucket(DECODE, 8, 8, 8), Bucket(MIXED, 512, 8, 8))
    assert model(costs, buckets_of(costs, LIMITS), LIMITS).seconds == pytest.approx((0.001, 0.002, 0.009))


# ---- by hand --------------------------------------------------------------------------------------------------


def test_units() -> None:
    costs = parse_step_cost(["decode:1=1.5s, decode:2=2ms", "mixed:3=3us,context=29ns,pair=0ns"])
    assert [p.seconds for p in costs.points] == pytest.approx([1.5, 2e-3, 3e-6])
    assert costs.per_context_token == pytest.approx(29e-9) and costs.per_pair == 0


@pytest.mark.parametrize(
    "text",
    ["", "decode", "decode:1", "decode:1=5", "decode:1=ms", "decode:x=5ms", "prefill:1=5ms", "decode:1=nans",
     "decode:1=-1ms", "decode:1=1e999s", "decode:1=infs", "context=5", "decode:1=1ms,", "decode:²=1ms", "pair:1=1ms"],
)  # fmt: skip
def test_bad_step_costs(text: str) -> None:
    with pytest.raises(UsageError, match="--step-cost: need KIND:TOKENS=TIME"):
        parse_step_cost([text])


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("decode:0=1ms", "need 1 to 16777216 tokens"),
        ("decode:1=0ms", "need 1 to .* have decode:1 = 0.0"),
        ("decode:1=1ms,decode:1=2ms", "have two for decode:1"),
    ],
)
def test_senseless_step_costs(text: str, error: str) -> None:
    with pytest.raises(UsageError, match=error):
        parse_step_cost([text])


# ---- what was measured ----------------------------------------------------------------------------------------


def test_constants_are_those_of_bench_and_sweep() -> None:
    assert measured.DECODE_CONTEXT == bench.DECODE_PROMPT_TOKENS + bench.DECODE_NEW_TOKENS / 2
    assert measured.SWEEP_CONTEXT == sweep.USUAL_CONTEXT / 2


def test_a_bench_with_a_known_truth() -> None:
    """Figures made from a machine that reads 1 GB/s, a model of 100 MB with 1000 bytes of KV a token."""
    bandwidth, weights, kv, pair = 1e9, 1e8, 1e3, 2e-7

    def decode(n: int) -> dict[str, Any]:
        seconds = (weights + kv * 96 * n) / (bandwidth * 0.5)
        share = (weights / n + kv * 96) * n / seconds / bandwidth
        return {"case": f"decode {n}", "tokens_per_second": n / seconds, "share_of_read_bandwidth": share}

    def prefill(n: int) -> dict[str, Any]:
        return {"case": f"prefill {n}", "tokens_per_second": n / (n * 1e-4 + pair * n * n / 2)}

    raw = {
        "ceilings": {"read_bytes_per_second": bandwidth},
        "figures": [decode(1), decode(32), prefill(512), prefill(2048)],
    }
    costs = measured.from_bench(raw, Provenance())
    assert costs.per_context_token == pytest.approx(kv / bandwidth)
    assert costs.per_pair == pytest.approx(pair)
    assert costs.seconds(MIXED, 2048) == pytest.approx(0.2048) and costs.seconds(MIXED, 512) == pytest.approx(0.0512)
    assert costs.seconds(DECODE, 1) == pytest.approx(0.2, rel=1e-3) and costs.seconds(MIXED, 1) == costs.seconds(
        DECODE, 1
    )


def test_measured_results_of_this_project() -> None:
    results = json.loads((RESULTS / "h200-llama-3.1-8b.json").read_text())
    speed = next(f["tokens_per_second"] for f in results["bench"]["figures"] if f["case"] == "decode 256")
    costs = load_costs([RESULTS / "h200-llama-3.1-8b.json"])
    assert costs.per_context_token is not None and costs.read_bytes_per_second is not None
    kv_bytes = costs.per_context_token * costs.read_bytes_per_second
    assert kv_bytes == pytest.approx(2 * 8 * 128 * 2 * 32, rel=0.02)  # keys and values of 8 heads of 128 in 32 layers
    limits = StepLimits(8192, 256, 256)
    priced = model(costs, buckets_of(costs, limits), limits)
    assert priced.buckets == tuple(sorted(ladder(limits)))
    assert priced.step_seconds(256, 256, 256, decode_only=True, context_tokens=256 * 96) == pytest.approx(
        256 / speed, rel=0.01
    )
    assert priced.provenance.device == "NVIDIA H200" and priced.provenance.commit == results["commit"]
    assert str(priced.provenance).startswith("h200-llama-3.1-8b.json, bench; h200-llama-3.1-8b.json, sweep, llama8b")


def test_files_in_any_order(tmp_path: Path) -> None:
    raw = json.loads((RESULTS / "h200-llama-3.1-8b.json").read_text())
    files = [written(tmp_path / f"{name}.json", raw[name]) for name in ("bench", "sweep")]
    costs = load_costs(files)
    assert replace(load_costs(files[::-1]), provenance=costs.provenance) == costs
    together = load_costs([RESULTS / "h200-llama-3.1-8b.json"])
    assert (costs.points, costs.per_pair, costs.buckets) == (together.points, together.per_pair, together.buckets)
    (bench_only,) = {load_costs(files[:1]).buckets}
    assert bench_only == ()


def test_a_cost_file_is_read_back(tmp_path: Path) -> None:
    costs = load_costs([RESULTS / "h200-llama-3.1-8b.json"])
    path = tmp_path / "cost.json"
    path.write_text(dumps(costs))
    assert load_costs([path]) == costs
    assert from_json(json.loads(dumps(costs))) == costs
    assert set(json.loads(path.read_text())["provenance"]) == set(asdict(Provenance()))


def test_context_from_the_kv_bytes_of_an_artifact() -> None:
    costs = Costs((Point(DECODE, 1, 0.1),), read_bytes_per_second=1e9)
    assert with_attention(costs, 1000.0).per_context_token == pytest.approx(1e-6)
    told = replace(costs, per_context_token=3e-6)
    assert with_attention(told, 1000.0) == told
    assert with_attention(replace(costs, read_bytes_per_second=None), 1000.0).per_context_token is None


SIZES = {"kind": "mixed", "num_tokens": 1, "num_seqs": 1, "num_logit_rows": 1}
GOOD_COST = {
    "format": "tokenspeed step cost",
    "format_version": 1,
    "provenance": {},
    "points": [{"kind": "decode", "num_tokens": 1, "seconds": 0.1}],
}
GOOD_BENCH: dict[str, Any] = {"figures": [{"case": "decode 1", "tokens_per_second": 10}]}


@pytest.mark.parametrize(
    ("data", "text"),
    [
        ([], "it must be an object"),
        ({}, r"it has the fields \(none\)"),
        ({"bfloat16": {}, "float32": {}}, "it has the fields 'bfloat16', 'float32'"),
        (GOOD_COST | {"format_version": 2}, "it has format version 2"),
        (GOOD_COST | {"points": {}}, "it.points must be a list"),
        (GOOD_COST | {"points": [{"kind": "prefill", "num_tokens": 1, "seconds": 1}]}, "a kind is 'prefill'"),
        (GOOD_COST | {"points": [{"kind": "mixed", "num_tokens": 1, "seconds": -1}]}, "seconds above 0"),
        (GOOD_COST | {"points": [{"kind": "mixed", "num_tokens": True, "seconds": 1}]}, "must be a whole number"),
        (GOOD_COST | {"points": [GOOD_COST["points"][0] | {"pairs": "many"}]}, "a point.pairs must be a number"),  # type: ignore[index]
        (GOOD_COST | {"per_pair": 2}, "per_pair must be at most 1 second"),
        (GOOD_COST | {"per_context_token": -1}, "per_context_token must be above 0"),
        (
            GOOD_COST | {"buckets": [{"kind": "mixed", "num_tokens": 0, "num_seqs": 1, "num_logit_rows": 1}]},
            "the sizes",
        ),
        (GOOD_COST | {"provenance": {"device": 5}}, "provenance.device must be a text"),
        ({"figures": [{"case": "decode 1", "tokens_per_second": 0}]}, "decode 1 has 0 tokens/s"),
        ({"figures": [{"case": "decode x", "tokens_per_second": 1}]}, "a case is 'decode x'"),
        ({"figures": [{"case": "decode 1"}]}, "lacks 'tokens_per_second'"),
        (GOOD_BENCH | {"ceilings": {"read_bytes_per_second": "fast"}}, "read_bytes_per_second must be a number"),
        ({"buckets": [{"bucket": {"kind": "mixed"}, "p50": 1}]}, "lacks 'num_tokens'"),
        ({"buckets": [{"p50": 1}]}, "lacks 'bucket'"),
        ({"buckets": [{"bucket": SIZES, "p50": 1, "by_shape": {"full": "x"}}]}, "by_shape.full must be a number"),
    ],
)
def test_hostile_files(tmp_path: Path, data: Any, text: str) -> None:
    path = written(tmp_path / "costs.json", data)
    with pytest.raises(UsageError, match=text) as refused:
        load_costs([path])
    assert refused.value.message.startswith(f"{path} holds no step costs: ") and refused.value.hint


def test_files_that_are_no_json(tmp_path: Path) -> None:
    for number, data in enumerate((b"", b"\xff\xfe", b"[" * 100_000, b'{"figures": NaN')):
        path = tmp_path / str(number)
        path.write_bytes(data)
        with pytest.raises(UsageError, match="holds no step costs"):
            load_costs([path])
    with pytest.raises(OSError, match="No such file"):
        load_costs([tmp_path / "absent"])
