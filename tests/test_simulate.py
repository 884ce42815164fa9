"""`tokenspeed simulate`: the fleet in virtual time, its report, its pictures, the command."""

from __future__ import annotations

import csv
import io
import json
import random
import xml.etree.ElementTree as ElementTree
from array import array
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tokenspeed import _native
from tokenspeed.artifact import Artifact
from tokenspeed.bucket import Bucket, BucketKind, BucketTable, StepLimits
from tokenspeed.compile.buckets import ladder
from tokenspeed.errors import ResourceError, UsageError
from tokenspeed.simulate.cost import CostModel, Costs, Point, buckets_of, model, parse_step_cost
from tokenspeed.simulate.fleet import ROUTINGS, Deployment, Fleet, Outcome, simulate
from tokenspeed.simulate.generate import KINDS, generate, with_parameters
from tokenspeed.simulate.measured import load_costs
from tokenspeed.simulate.picture import draw
from tokenspeed.simulate.report import Slo, latency, report, write_records
from tokenspeed.simulate.resolve import Wanted, resolve
from tokenspeed.simulate.svg import Line, Panel, picture
from tokenspeed.simulate.text import table
from tokenspeed.simulate.trace import TraceRequest

RESULTS = Path(__file__).resolve().parent.parent / "benchmarks" / "results"
LIMITS = StepLimits(max_prefill_tokens=512, max_num_seqs=16, max_logit_rows=16)
COSTS = parse_step_cost(["decode:16=2ms,mixed:16=2ms,mixed:512=10ms,context=20ns,pair=2ns"])
MODEL = model(COSTS, ladder(LIMITS), LIMITS)
DEPLOYMENT = Deployment(LIMITS, max_model_len=16384, page_size=64, num_pages=600)


def small(kind: str, num_requests: int, rate: float = 4.0, **given: str) -> list[TraceRequest]:
    traffic = with_parameters(KINDS[kind], {name.replace("_", "-"): value for name, value in given.items()})
    return list(generate(traffic, num_requests=num_requests, seed=1, rate=rate))


AGENTS = small("agentic", 250, system_tokens="1024", turns="6", max_tokens="12000", tenants="3")


# ---- costs ----------------------------------------------------------------------------------------------------


def native(priced: CostModel) -> Any:
    return _native.StepCosts(
        [
            (b.kind is BucketKind.DECODE, b.num_tokens, b.num_seqs, b.num_logit_rows, s)
            for b, s in zip(priced.buckets, priced.seconds, strict=True)
        ],
        priced.per_context_token,
        priced.per_pair,
        0.0,
    )


def test_cpp_looks_buckets_up_as_the_artifact_does() -> None:
    limits = StepLimits(max_prefill_tokens=700, max_num_seqs=40, max_logit_rows=90)
    priced = model(
        parse_step_cost(["decode:1=1ms,decode:40=3ms,mixed:16=2ms,mixed:700=20ms,context=1us,pair=3ns"]),
        ladder(limits),
        limits,
    )
    lookup, rng = BucketTable(priced.buckets), random.Random(3)
    for _ in range(2000):
        seqs = rng.randint(1, 40)
        decodes = rng.random() < 0.3
        tokens = seqs if decodes else rng.randint(seqs, 700)
        rows = seqs if decodes else rng.randint(0, min(tokens, 90))
        place, ns = native(priced).step_ns(tokens, seqs, rows, decodes, 1000, 500.0)
        assert priced.buckets[place] == lookup.find(tokens, seqs, rows, decode_only=decodes)
        seconds = priced.step_seconds(tokens, seqs, rows, decode_only=decodes, context_tokens=1000, pairs=500)
        assert ns == pytest.approx(seconds * 1e9, abs=1)
    with pytest.raises(ValueError, match="need a bucket for a decode step of 41 tokens, 41 sequences"):
        native(priced).step_ns(41, 41, 41, True)


# ---- the fleet ------------------------------------------------------------------------------------------------


def columns(outcome: Outcome) -> tuple[Any, ...]:
    return (outcome.arrival, outcome.admitted, outcome.first_token, outcome.end, outcome.num_cached, outcome.replica,
            outcome.status, outcome.timeline)  # fmt: skip


@pytest.mark.parametrize("routing", ROUTINGS)
def test_the_same_trace_gives_the_same_numbers(routing: str) -> None:
    fleet = Fleet(num_replicas=3, routing=routing)
    first = simulate(AGENTS, DEPLOYMENT, MODEL, fleet)
    assert columns(simulate(iter(AGENTS), DEPLOYMENT, MODEL, replace(fleet, num_threads=3))) == columns(first)
    assert set(first.status) == {1} and set(first.replica) == {0, 1, 2}
    assert len(first.status) == 250 and set(first.tenants) == {"t0", "t1", "t2"}


def test_times_of_one_request() -> None:
    """A chunk of 512 and one of 88 tokens, then two decodes."""
    outcome = simulate([TraceRequest(500, 600, 3)], DEPLOYMENT, MODEL, Fleet())
    first, second = (MODEL.step_seconds(n, 1, n == 88, decode_only=False, pairs=pairs)
                     for n, pairs in ((512, 512 * 256), (88, 88 * (600 - 44))))  # fmt: skip
    decodes = [MODEL.step_seconds(1, 1, 1, decode_only=True, context_tokens=n) for n in (601, 602)]
    assert list(outcome.arrival) == [0] and list(outcome.admitted) == [0]
    assert outcome.first_token[0] == pytest.approx((first + second) * 1e9, abs=3)
    assert outcome.end[0] == pytest.approx((first + second + sum(decodes)) * 1e9, abs=5)


H200 = RESULTS / "h200-llama-3.1-8b.json"
SPEEDS = {figure["case"]: figure["tokens_per_second"] for figure in json.loads(H200.read_text())["bench"]["figures"]}


@pytest.mark.parametrize("sequences", [1, 8, 64, 256])
def test_decodes_take_what_the_bench_measured(sequences: int) -> None:
    """As `tokenspeed bench` runs them, from its figures on an H200."""
    ms = sequences / SPEEDS[f"decode {sequences}"] * 1e3
    limits = StepLimits(8192, 256, 256)
    costs = load_costs([H200])
    deployment = Deployment(limits, max_model_len=16384, page_size=64, num_pages=1000)
    prompts = [TraceRequest(0, 64, 64)] * sequences
    told = report(simulate(prompts, deployment, model(costs, buckets_of(costs, limits), limits), Fleet()))
    assert told.all.tpot is not None and told.all.tpot.p50 * 1e3 == pytest.approx(ms, rel=0.01)


@pytest.mark.parametrize("tokens", [512, 8192])
def test_prompts_take_about_what_the_bench_measured(tokens: int) -> None:
    """By the sweep of the same machine, which was measured with other steps beside them."""
    ms = tokens / SPEEDS[f"prefill {tokens}"] * 1e3
    limits = StepLimits(8192, 256, 256)
    costs = load_costs([H200])
    deployment = Deployment(limits, max_model_len=16384, page_size=64, num_pages=1000)
    told = report(
        simulate([TraceRequest(0, tokens, 1)], deployment, model(costs, buckets_of(costs, limits), limits), Fleet())
    )
    assert told.all.ttft is not None and told.all.ttft.p50 * 1e3 == pytest.approx(ms, rel=0.35)


def test_prefixes_are_found_as_the_trace_allows() -> None:
    """One session on a replica with room for it: what a turn finds are the whole pages of the one before."""
    made = small("agentic", 60, system_tokens="1000", turns="1000", max_tokens="12000")
    turns = [request for request in made if request.session == "s0"]
    assert len(turns) > 5
    outcome = simulate(turns, DEPLOYMENT, MODEL, Fleet())
    for i in range(1, len(turns)):
        known = turns[i - 1].input_length + turns[i - 1].output_length - 1  # the last token drawn has no KV
        assert outcome.num_cached[i] == known // 64 * 64
    off = simulate(turns, replace(DEPLOYMENT, prefix_index=False), MODEL, Fleet())
    assert set(off.num_cached) == {0}
    assert off.first_token[-1] - off.arrival[-1] > 2 * (outcome.first_token[-1] - outcome.arrival[-1])


def test_prefix_aware_routing_finds_more() -> None:
    hits = {}
    for routing in ROUTINGS:
        outcome = simulate(AGENTS, DEPLOYMENT, MODEL, Fleet(num_replicas=4, routing=routing))
        hits[routing] = report(outcome).all.hit_rate
    assert hits["prefix-aware"] > 0.7 and hits["prefix-aware"] > 1.15 * max(hits[r] for r in ROUTINGS[:3])


def test_speed_and_open_arrivals() -> None:
    plain = simulate(AGENTS, DEPLOYMENT, MODEL, Fleet(keeps_delays=False, num_replicas=2))
    assert [round(ns / 1e6, 3) for ns in plain.arrival] == [round(r.timestamp, 3) for r in AGENTS]
    fast = simulate(AGENTS, DEPLOYMENT, MODEL, Fleet(keeps_delays=False, num_replicas=2, speed=4))
    assert fast.arrival[-1] == pytest.approx(plain.arrival[-1] / 4)
    closed = simulate(AGENTS, DEPLOYMENT, MODEL, Fleet(num_replicas=2))
    ends: dict[str, int] = {}
    for i, request in enumerate(AGENTS):
        if request.delay is not None:
            assert closed.arrival[i] >= ends[request.session] + round(request.delay * 1e6)
        ends[request.session] = closed.end[i]


def test_deadlines_priorities_and_full_queues() -> None:
    rush = [TraceRequest(0, 400, 50, priority=9 if i % 2 else 0, deadline=300) for i in range(60)]
    deployment = replace(DEPLOYMENT, num_pages=64, max_waiting=30)
    told = report(simulate(rush, deployment, MODEL, Fleet(waits_when_full=False))).all
    assert told.refused == 30 and told.finished + told.expired == 30 and told.expired > 0
    waits = simulate(rush, deployment, MODEL, Fleet())
    assert report(waits).all.refused == 0
    patient = simulate([replace(r, deadline=None) for r in rush], replace(deployment, max_waiting=60), MODEL, Fleet())
    first = [patient.admitted[i] for i in range(0, 60, 2)]
    assert max(first) <= min(patient.admitted[i] for i in range(1, 60, 2))
    long = report(simulate([TraceRequest(0, 16000, 500)], DEPLOYMENT, MODEL, Fleet())).all
    assert (long.too_long, long.finished, long.ttft, long.hit_rate) == (1, 0, None, 0.0)


def test_a_host_tier_finds_what_the_device_forgot() -> None:
    deployment = replace(DEPLOYMENT, num_pages=220)
    alone = report(simulate(AGENTS, deployment, MODEL, Fleet()))
    tier = report(simulate(AGENTS, replace(deployment, num_host_pages=4000, page_move_seconds=1e-4), MODEL, Fleet()))
    assert tier.restored_tokens > 0 and tier.all.hit_rate > alone.all.hit_rate


def test_settings_that_the_simulator_refuses() -> None:
    for fleet, text in (
        (Fleet(num_replicas=0), "need 1 to 4096 replicas, have 0"),
        (Fleet(routing="nearest"), "have nearest"),
        (Fleet(interval_ms=0), "need an interval of 1 ns or more"),
        (Fleet(block_tokens=0), "need blocks of 1 token or more"),
        (Fleet(num_threads=0), "need 1 to 1024 threads"),
        (Fleet(num_replicas=1 << 40), "a number is too large"),
    ):
        with pytest.raises(UsageError, match=text):
            simulate(AGENTS, DEPLOYMENT, MODEL, fleet)
    with pytest.raises(UsageError, match="page_size needs 1 or more, have 0"):
        simulate(AGENTS, replace(DEPLOYMENT, page_size=0), MODEL, Fleet())
    with pytest.raises(UsageError, match="the trace has no requests"):
        simulate([], DEPLOYMENT, MODEL, Fleet())


def test_a_fleet_beyond_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise MemoryError

    monkeypatch.setattr("tokenspeed.simulate.fleet._native.Simulator", refuse)
    with pytest.raises(ResourceError, match="2 replicas of 600 KV pages need more memory than there is"):
        simulate(AGENTS, DEPLOYMENT, MODEL, Fleet(num_replicas=2))


# ---- the report -----------------------------------------------------------------------------------------------


def outcome_of(rows: list[tuple[int, int, int, int, int, str]]) -> Outcome:
    """From (arrival, first token, end in ms; output tokens; status; tenant)."""
    names = tuple(dict.fromkeys(row[5] for row in rows))

    def ns(column: int) -> array[int]:
        return array("q", [row[column] * 1_000_000 if row[column] >= 0 else -1 for row in rows])

    def same(value: int) -> array[int]:
        return array("i", [value] * len(rows))

    totals = {"steps": 10, "busy_ns": 50_000_000, "step_tokens": 60, "bucket_tokens": 80, "computed_tokens": 40,
              "restored_tokens": 0, "cached_tokens": 25, "prompt_tokens": 100,
              "steps_by_bucket": [3] + [0] * (len(MODEL.buckets) - 1)}  # fmt: skip
    num_output, status = array("i", [row[3] for row in rows]), array("B", [row[4] for row in rows])
    tenant = array("i", [names.index(row[5]) for row in rows])
    return Outcome(
        DEPLOYMENT, Fleet(), MODEL, ns(0), ns(0), ns(1), ns(2), same(100), num_output, same(25), same(1), tenant,
        same(0), status, names, (), (totals,), 0.5,
    )  # fmt: skip


def test_latencies_by_hand() -> None:
    outcome = outcome_of(
        [(0, 10, 40, 4, 1, "a"), (10, 40, 40, 1, 1, "b"), (20, 100, 200, 11, 1, "a"), (0, -1, 50, 5, 4, "b")]
    )
    told = report(outcome, Slo(ttft=0.030, tpot=0.009))
    assert told.all.ttft is not None and told.all.tpot is not None and told.all.e2e is not None
    assert (told.all.ttft.p50, told.all.ttft.p99, told.all.ttft.mean) == (0.030, 0.080, 0.040)
    assert (told.all.tpot.count, told.all.tpot.p50, told.all.tpot.max) == (2, 0.010, 0.010)
    assert told.all.e2e.max == 0.180
    assert (told.all.requests, told.all.finished, told.all.expired, told.all.good) == (4, 3, 1, 1)
    assert told.all.goodput == 0.25 and told.all.hit_rate == 0.25 and told.all.preemptions == 4
    assert told.seconds == 0.2 and told.requests_per_second == pytest.approx(15) and told.busy == pytest.approx(0.25)
    assert told.padding == 0.25 and told.tokens_per_step == 6 and told.steps_by_bucket == {"decode-1": 3}
    assert set(told.tenants) == {"a", "b"} and told.tenants["b"].expired == 1
    assert report(outcome).all.good == 3
    assert json.loads(json.dumps(told.to_json()))["all"]["goodput"] == 0.25


def test_percentiles_are_by_nearest_rank() -> None:
    found = latency([i * 1e9 for i in range(1, 201)])
    assert found is not None and (found.p50, found.p90, found.p99, found.max) == (100, 180, 198, 200)
    assert found.cdf[0] == 1 and len(found.cdf) == 101 and latency([]) is None


def test_the_table_names_what_happened() -> None:
    outcome = outcome_of([(0, 10, 40, 4, 1, "a"), (0, -1, 50, 5, 4, "b")])
    lines = list(table([report(outcome, Slo(ttft=0.5)), report(outcome, Slo(ttft=0.5))]))
    text = "\n".join(lines)
    assert "goodput (TTFT 500 ms)" in text and "expired at their deadline" in text and "refused" not in text
    assert "round-robin: tenants" in text and all(len(line) <= 120 for line in lines)


def test_records_as_csv() -> None:
    out = io.StringIO()
    assert write_records(out, outcome_of([(0, 10, 40, 4, 1, "a,b"), (0, -1, 50, 5, 4, "")])) == 2
    rows = list(csv.DictReader(io.StringIO(out.getvalue())))
    assert rows[0]["tenant"] == "a,b" and rows[0]["first_token"] == "0.010000000" and rows[0]["status"] == "finished"
    assert rows[1]["first_token"] == "" and rows[1]["status"] == "expired" and rows[1]["end"] == "0.050000000"


# ---- pictures -------------------------------------------------------------------------------------------------

SVG = "{http://www.w3.org/2000/svg}"


def lines_of(svg: str) -> list[list[tuple[float, float]]]:
    found = ElementTree.fromstring(svg).iter(f"{SVG}polyline")
    return [[(float(x), float(y)) for x, y in (p.split(",") for p in e.attrib["points"].split())] for e in found]


def test_points_lie_where_the_axes_say() -> None:
    panels = [
        Panel("a <b>", "x", "y", [Line("one & two", [(0, 0), (5, 5), (10, 10)])]),
        Panel(
            "log", "x", "y", [Line("one & two", [(0, 0.5), (0.01, 0.0), (1, 0.5), (100, 1.0)])], log_x=True, y_max=1.0
        ),
        Panel("empty", "x", "y"),
        Panel("flat", "x", "y", [Line("three", [(3, 0), (3, float("nan"))], dashed=True)]),
    ]
    svg = picture("title & more", panels)
    first, second, flat = lines_of(svg)
    assert [x for x, _ in first] == [64.0, 284.0, 504.0] and [y for _, y in first] == [256.0, 145.0, 34.0]
    assert [x for x, _ in second] == [64.0, 284.0, 504.0]  # the point at 0 has no place
    assert len(flat) == 1
    texts = ["".join(e.itertext()) for e in ElementTree.fromstring(svg).iter(f"{SVG}text")]
    assert {"a <b>", "one & two", "title & more", "nothing to show", "0.01", "100"} <= set(texts)


def test_the_picture_of_runs() -> None:
    reports = [report(simulate(AGENTS, DEPLOYMENT, MODEL, Fleet(num_replicas=2, routing=r))) for r in ROUTINGS[:2]]
    svg = draw("two runs", reports)
    assert len(lines_of(svg)) == 2 * 6
    for points in lines_of(svg):
        assert all(64 <= x <= 504 and 34 <= y <= 256 for x, y in points)
    longest = max(lines_of(svg), key=len)
    assert 100 < len(longest) <= 240
    failed = report(simulate([TraceRequest(0, 16000, 500)], DEPLOYMENT, MODEL, Fleet()))
    assert "nothing to show" in draw("none", [failed])


# ---- what is simulated ----------------------------------------------------------------------------------------


def test_an_artifact_gives_limits_buckets_and_kv_bytes(tiny_artifact: Path) -> None:
    manifest = Artifact.open(tiny_artifact).manifest
    section, envelope = manifest.targets[0], manifest.envelope
    costs = Costs((Point(BucketKind.DECODE, 1, 0.001), Point(BucketKind.MIXED, 16, 0.002)), read_bytes_per_second=1e9)
    found = resolve(Wanted(costs, artifact=tiny_artifact, target=section.target, kv_gib=0.01, host_kv_gib=0.02))
    assert found.model.buckets == tuple(sorted(entry.bucket for entry in section.buckets))
    assert found.deployment.limits.max_num_seqs == envelope.max_num_seqs
    assert found.deployment.num_pages == int(0.01 * 2**30 / section.kv_page_bytes)
    assert found.deployment.num_host_pages == int(0.02 * 2**30 / section.kv_page_bytes)
    assert found.model.per_context_token == pytest.approx(section.kv_page_bytes / envelope.page_size / 1e9)
    assert found.deployment.page_move_seconds == pytest.approx(section.kv_page_bytes / 50e9)
    assert found.deployment.steps_in_flight == 1  # a CPU's engine
    assert resolve(Wanted(COSTS, kv_pages=10)).deployment.steps_in_flight == 2
    other = replace(costs, provenance=replace(costs.provenance, artifact="ab" * 32, target="cuda:sm_90a"))
    notes = resolve(Wanted(other, artifact=tiny_artifact, target=section.target, kv_pages=10)).notes
    assert any("measured with artifact abababababab" in note for note in notes)
    assert any("measured on cuda:sm_90a" in note for note in notes)
    with pytest.raises(UsageError, match="--page-size is 8"):
        resolve(Wanted(costs, artifact=tiny_artifact, target=section.target, kv_pages=10, page_size=8))


def test_the_usual_policy_is_that_of_the_server() -> None:
    from tokenspeed.runtime import engine

    assert (DEPLOYMENT.max_waiting, DEPLOYMENT.aging_seconds) == (engine.MAX_WAITING, engine.AGING_SECONDS)
    wanted = Wanted(COSTS)
    assert (wanted.max_waiting, wanted.aging_seconds) == (engine.MAX_WAITING, engine.AGING_SECONDS)


def test_without_an_artifact_the_largest_known_steps_are_the_limits() -> None:
    found = resolve(Wanted(COSTS, kv_pages=100))
    assert (found.deployment.limits, found.deployment.page_size) == (LIMITS, 64) and not found.notes
    assert found.model.buckets == (
        Bucket(BucketKind.DECODE, 16, 16, 16),
        Bucket(BucketKind.MIXED, 16, 16, 16),
        Bucket(BucketKind.MIXED, 512, 16, 16),
    )
    silent = parse_step_cost(["decode:16=2ms,mixed:512=10ms"])
    assert "it costs nothing" in resolve(Wanted(silent, kv_pages=100)).notes[0]
    for wanted, text in (
        (Wanted(COSTS), "need the size of a replica's KV cache"),
        (Wanted(COSTS, kv_pages=5, kv_gib=1), "need the size of a replica's KV cache"),
        (Wanted(COSTS, kv_gib=1), "--kv-gib needs the bytes of a KV page"),
        (Wanted(COSTS, kv_pages=5, max_num_seqs=64), "do not cover the scheduler"),
        (Wanted(COSTS, kv_pages=5, max_prefill_tokens=8), "step limits: need"),
        (Wanted(parse_step_cost(["decode:1=1ms"]), kv_pages=5), "the costs have no mixed step"),
    ):
        with pytest.raises(UsageError, match=text):
            resolve(wanted)
