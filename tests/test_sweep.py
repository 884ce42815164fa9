"""`bench --sweep`: made steps are what the scheduler would plan, every bucket is met, and the guard can fail."""

from __future__ import annotations

import json
import random
from array import array
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from gpu_double import GpuDouble, gpu_artifact, plug_in

from tokenspeed import _native
from tokenspeed.bucket import Bucket, BucketKind
from tokenspeed.cli import main
from tokenspeed.compile.build import build
from tokenspeed.errors import UsageError
from tokenspeed.runtime.engine import Engine, load
from tokenspeed.runtime.guard import AFTER_READY, HostTimes, StepParts, after_ready, compilers, percentiles
from tokenspeed.runtime.loader import LoadOptions
from tokenspeed.runtime.steps import MadeStep, Sampling, SequencePart
from tokenspeed.runtime.sweep import (
    MIXED_ROWS,
    P99_STEPS,
    SHAPES,
    VARIANTS,
    StepFigures,
    _figures,
    _Maker,
    sweep,
)
from tokenspeed.step import INPUTS, IO, place


@pytest.fixture(scope="module")
def artifact(tiny_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Small limits that are no powers of two, in every direction."""
    path = tmp_path_factory.mktemp("sweep") / "artifact"
    build(
        tiny_checkpoint, path, dtype="float32", max_num_seqs=6, max_model_len=300, max_prefill_tokens=200, page_size=32
    )
    return path


@pytest.fixture(scope="module")
def engine(artifact: Path) -> Iterator[Engine]:
    with load(artifact, options=LoadOptions(kv_gib=0.02, threads=1)) as engine:
        yield engine


def test_a_sweep_meets_everything(engine: Engine) -> None:
    lines: list[str] = []
    report = sweep(engine, steps_per_bucket=9, progress=lines.append)
    assert [b.bucket for b in report.buckets] == sorted(e.bucket for e in engine.loaded.section.buckets)
    assert all(b.steps == 9 and 0 < b.p50 <= b.max and b.p99 is None for b in report.buckets)
    assert all(b.max_over_median == b.max / b.p50 and b.longest_context > 0 for b in report.buckets)
    assert set(report.variants) == {*VARIANTS, MIXED_ROWS} and set(report.shapes) == set(SHAPES)
    assert report.steps == 9 * len(report.buckets) == sum(report.variants.values()) == sum(report.shapes.values())
    assert report.after_ready == dict.fromkeys(AFTER_READY, 0) and report.closed and not report.bad_tokens
    assert report.clock == "host" and all(b.longest_wait == b.max for b in report.buckets)
    assert lines[-1] == f"round 9: {len(report.buckets)} buckets"
    with pytest.raises(UsageError, match="at least one step per bucket"):
        sweep(engine, steps_per_bucket=0)


def test_a_percentile_needs_steps_enough() -> None:
    bucket = Bucket(BucketKind.DECODE, 8, 8, 8)

    def steps(count: int, shape: str = "full") -> list[StepFigures]:
        return [StepFigures(shape, "greedy", 8, 8, 8, 0.001 * number, 0.002 * number) for number in range(1, count + 1)]

    few, many = (_figures(bucket, steps(count)) for count in (P99_STEPS - 1, P99_STEPS))
    assert few.longest_wait == 0.002 * (P99_STEPS - 1)
    assert few.p99 is None and many.p99 == 0.001 * 99 < many.max == 0.1
    assert _figures(bucket, [*steps(P99_STEPS - 1), *steps(50, "long")]).p99 is None  # long contexts count apart


def test_a_sweep_for_a_time(engine: Engine) -> None:
    report = sweep(engine, seconds=0.01, seed=3)
    assert report.seconds >= 0.01 and report.steps % len(report.buckets) == 0 and report.steps > 0


def test_every_step_keeps_the_rules_of_a_step(engine: Engine) -> None:
    """Of its bucket, within the limits, writing only to pages that no other sequence has."""
    maker = _Maker(engine, random.Random(5))
    maker.fill_shared_pages()
    full: set[Any] = set()
    for bucket in maker.buckets:
        for number in range(2 * len(SHAPES)):
            shape, step = maker.step(bucket, SHAPES[number % len(SHAPES)], maker.variant(number))
            arrays = step._arrays
            assert engine.loaded.executor.bucket_for(step) == bucket
            sizes = (step.num_tokens, step.num_seqs, step.num_logit_rows)
            assert list(arrays["step_sizes"][:3]) == list(sizes)
            if sizes == (bucket.num_tokens, bucket.num_seqs, bucket.num_logit_rows):
                full.add(bucket)
            assert list(arrays["logit_rows"]) == sorted(set(arrays["logit_rows"]))
            written = [slot // 32 for slot in arrays["slot_mapping"]]
            assert len(set(arrays["slot_mapping"])) == step.num_tokens
            assert not set(written) & set(maker._shared)
            tables = [arrays["page_table"][i * 10 : i * 10 + 10] for i in range(step.num_seqs)]
            assert max(arrays["context_lens"]) <= 300 and max(arrays["positions"]) < 300
            for row, (position, slot) in enumerate(zip(arrays["positions"], arrays["slot_mapping"], strict=True)):
                (seq,) = (
                    i for i in range(step.num_seqs) if arrays["cu_seqlens"][i] <= row < arrays["cu_seqlens"][i + 1]
                )
                assert slot == tables[seq][position // 32] * 32 + position % 32
            if shape == "long":
                assert max(arrays["context_lens"]) > 300 - 32
    assert {b for b in full if b.kind.value == "decode"} == {b for b in maker.buckets if b.kind.value == "decode"}


def test_made_steps_are_those_of_the_scheduler() -> None:
    config = _native.SchedulerConfig(
        max_num_seqs=3, max_prefill_tokens=64, max_logit_rows=20, max_model_len=64, page_size=16, num_pages=12,
        max_waiting=9,
    )  # fmt: skip
    placed, nbytes = place(IO, {"T": 64, "S": 3, "P": 4, "R": 20, "V": 70, "C": 3})
    theirs, offsets = bytearray(nbytes), [t.offset for t in placed[: 1 + len(INPUTS)]]
    scheduler = _native.Scheduler(config, [theirs], offsets)
    sampling = Sampling(temperature=0.5, top_p=0.75, min_p=0.25, top_k=7, num_logprobs=0)
    prompts = [[3, 1, 4, 1, 5, 9], [2, 7, 1, 8] * 5]
    for i, prompt in enumerate(prompts):
        params = _native.RequestParams(
            max_new_tokens=4, temperature=0.5, top_p=0.75, top_k=7, min_p=0.25, seed=10 + i, num_logprobs=0,
            num_prompt_logprobs=0 if i == 0 else -1,
        )  # fmt: skip
        scheduler.submit(i, prompt, params)

    def same(planned: Any, parts: list[SequencePart]) -> None:
        # Over what the planned step has: where its inputs end, a set holds those of steps before.
        ours = bytearray(theirs)
        made = MadeStep(planned.id, parts, 16, 4, 70)
        made.copy_to(memoryview(ours), offsets)
        assert (made.num_tokens, made.num_seqs, made.num_logit_rows) == (
            planned.num_tokens, planned.num_seqs, planned.num_logit_rows,
        )  # fmt: skip
        assert ours == theirs

    step = scheduler.next_step()
    assert step is not None
    pages = list(step.page_table)
    first = SequencePart(prompts[0], 0, pages[:1], 0, range(5), sampling, 10)
    same(step, [first, SequencePart(prompts[1], 0, pages[4:6], 1, (), sampling, 11)])
    scheduler.commit(step.id, memoryview(array("i", [0] * step.num_logit_rows)))
    step = scheduler.next_step()
    assert step is not None
    first = SequencePart([None], 6, pages[:1], 0, (), sampling, 10)
    same(step, [first, SequencePart([None], 20, pages[4:6], 1, (), sampling, 11)])


def test_the_command(artifact: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    args = ["bench", str(artifact), "--sweep", "--steps-per-bucket", "2", "--kv-gib", "0.02", "--threads", "1"]
    trace = tmp_path / "trace.json"
    assert main([*args, "--json", "--trace", str(trace)]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["closed"] and report["after_ready"] == dict.fromkeys(AFTER_READY, 0)
    assert {b["name"] for b in report["buckets"]} >= {"decode-1", "decode-6", "mixed-200"}
    for b in report["buckets"]:
        assert b["slowest"]["seconds"] == b["max"] and b["slowest"]["num_tokens"] <= b["bucket"]["num_tokens"]
        assert set(b["by_variant"]) <= {*VARIANTS, MIXED_ROWS} and set(b["by_shape"]) <= set(SHAPES)
        assert b["slowest"]["variant"] in b["by_variant"] and b["slowest"]["shape"] in b["by_shape"]
    assert any(e["name"] == "graphs" for e in json.loads(trace.read_text())["traceEvents"])
    assert main(args) == 0
    out = capsys.readouterr().out
    assert all(line.split()[3] == "-" for line in out.splitlines()[1 : 1 + len(report["buckets"])])  # p99 of two steps
    assert out.splitlines()[-1] == "after ready: " + ", ".join(f"{name} 0" for name in AFTER_READY)
    assert main([*args[:3], "--seconds", "-1"]) == 2
    assert "--seconds is -1.0; it must be above 0" in capsys.readouterr().err


def test_a_runtime_that_is_not_closed_fails(
    artifact: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    plug_in(monkeypatch)
    counters = GpuDouble.counters

    def leaky(self: GpuDouble) -> dict[str, Any]:
        return {**counters(self), "allocations_after_seal": self._tickets}

    gpu = gpu_artifact(artifact, tmp_path / "gpu", keep_cpu=False)
    args = ["bench", str(gpu), "--sweep", "--steps-per-bucket", "1", "--kv-gib", "0.02"]
    assert main(args) == 0
    capsys.readouterr()
    monkeypatch.setattr(GpuDouble, "counters", leaky)
    assert main(args) == 1
    captured = capsys.readouterr()
    assert "error: the runtime is not closed: see the counters after ready" in captured.err
    assert "allocations 0" not in captured.out and "instantiations 0" in captured.out


def test_what_counts_as_after_ready(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tokenspeed.runtime.guard.COMPILERS", frozenset({"pycuda"}))  # which no test imports
    assert after_ready({"graphs_loaded_after_seal": 2, "allocations_after_seal": 1}) == {
        "compilations": 0, "module_loads": 0, "captures": 0, "instantiations": 2, "allocations": 1,
    }  # fmt: skip
    gpu = {
        "compilations_after_seal": 1, "modules_loaded_after_seal": 2, "captures_after_seal": 3,
        "graphs_loaded_after_seal": 4, "graph_instantiations_after_seal": 5, "allocations_after_seal": 6,
    }  # fmt: skip
    assert list(after_ready(gpu).values()) == [1, 2, 3, 5, 6]
    monkeypatch.setitem(__import__("sys").modules, "pycuda", object())
    assert after_ready(gpu)["compilations"] == 2
    assert compilers() == {"pycuda"} and after_ready(gpu, compilers())["compilations"] == 1  # it was there before


def test_percentiles_and_host_times() -> None:
    assert percentiles([]) == {"p50": 0.0, "p99": 0.0, "max": 0.0}
    assert percentiles([float(i) for i in range(100, 0, -1)]) == {"p50": 50.0, "p99": 99.0, "max": 100.0}
    times = HostTimes()
    times.add(4, StepParts(1.0, 2.0, 3.0))
    times.add(8, StepParts(3.0, 2.0, 1.0))
    assert times.to_json()["plan"] == {"count": 2, "seconds": 4.0, "p50": 1.0, "p99": 3.0, "max": 3.0}
    assert [(seqs, sum(parts)) for seqs, parts in times.steps] == [(4, 6.0), (8, 6.0)]
    assert list(times.to_json()) == ["plan", "submit", "commit", "publish"]
    assert times.to_json()["publish"]["count"] == 0
