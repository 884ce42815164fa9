"""`bench`: shares of ceilings, and a GPU's own times of its steps (a double stands in for the GPU)."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from gpu_double import GpuDouble, gpu_artifact, plug_in

from tokenspeed.cli import main
from tokenspeed.runtime import bench
from tokenspeed.runtime.bench import Case
from tokenspeed.runtime.engine import load
from tokenspeed.runtime.guard import StepParts
from tokenspeed.runtime.loader import LoadedCeiling, LoadOptions

MEASURED = LoadOptions(kv_gib=0.05, threads=1, measure=True)
CASES = [Case("decode", 2), Case("prefill", 40)]


@pytest.fixture
def gpu(tiny_artifact: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    plug_in(monkeypatch)
    return gpu_artifact(tiny_artifact, tmp_path / "gpu", keep_cpu=False)


def test_a_gpu_times_its_steps(gpu: Path) -> None:
    with load(gpu, options=MEASURED) as engine:
        (decode, prefill), ceilings = bench.measure(engine, CASES, rounds=2)
    assert ceilings == bench.Ceilings(None, None)  # a tiny model brings none
    assert decode.share_of_read_bandwidth is None and decode.share_of_matmul is None
    assert (decode.graph_seconds, decode.idle_seconds) == (0.01, 1e-6)
    assert decode.host_parts is not None and tuple(decode.host_parts) == StepParts._fields
    assert decode.host_seconds is not None and decode.host_seconds >= max(decode.host_parts.values())
    assert decode.bare_step_seconds is not None and decode.step_seconds is not None
    assert prefill.graph_seconds is prefill.idle_seconds is prefill.host_parts is prefill.step_seconds is None


def test_shares_count_weights_and_kv(gpu: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The double's ceilings: whatever the graph, its nodes take a millisecond, the first two."""
    with load(gpu, options=MEASURED) as engine:
        loaded = engine.loaded
        asked: list[tuple[int, int]] = []

        def time_graph(graph: int, num_tokens: int) -> list[float]:
            asked.append((graph, num_tokens))
            return [2e-3, 1e-3, 1e-3, 1e-3]

        monkeypatch.setattr(loaded.executor, "time_graph", time_graph)
        loaded.ceilings = {"read": LoadedCeiling(7, 4_000_000, 1), "matmul": LoadedCeiling(8, 9_000_000_000, 2048)}
        (decode, prefill), ceilings = bench.measure(engine, CASES, rounds=1)
        assert ceilings == bench.Ceilings(4e9, 9e12) and set(asked) == {(7, 1), (8, 2048)}
        section, page_size = loaded.section, loaded.artifact.manifest.envelope.page_size
        kv = 96 * section.kv_page_bytes / page_size  # 64 tokens of prompt and half of 64 new ones
        expected = decode.tokens_per_second * (section.cost.weight_bytes / 2 + kv) / 4e9
        assert decode.share_of_read_bandwidth == pytest.approx(expected)
        expected = prefill.tokens_per_second * section.cost.weight_bytes / 40 / 4e9
        assert prefill.share_of_read_bandwidth == pytest.approx(expected)
        flops = section.cost.flops_per_token + section.cost.flops_per_logit_row
        assert decode.share_of_matmul == pytest.approx(decode.tokens_per_second * flops / 9e12)


def test_time_graph_writes_the_sizes_that_kernels_read(gpu: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(GpuDouble, "profile", lambda _, *asked: [("inputs", 1.0), (str(asked), 0.5), ("second", 0.25)])
    with load(gpu, options=replace(MEASURED, measure=False)) as engine:
        executor = engine.loaded.executor
        assert executor.time_graph(5, 3) == [0.5, 0.25]
        at = next(t for t in engine.loaded.section.io if t.name == "step_sizes").offset
        assert executor.device.view("io")[at : at + 32].cast("i").tolist() == [3, 1, 1, 0, 0, 0, 0, 0]


def test_the_command_says_what_it_measured(gpu: Path, capsys: pytest.CaptureFixture[str]) -> None:
    args = ["bench", str(gpu), "--decode", "2", "--prefill", "16", "--rounds", "1", "--kv-gib", "0.05"]
    assert main([*args, "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["ceilings"]["matmul_by"].startswith("the artifact's own kernel of projections")
    decode, prefill = data["figures"]
    assert (decode["case"], prefill["case"]) == ("decode 2", "prefill 16")
    assert decode["idle_seconds"] == 1e-6 and set(decode["host_parts"]) == {"plan", "submit", "commit"}
    assert main(args) == 0
    out = capsys.readouterr().out.splitlines()
    assert out[-1].startswith("host us of decode 2: plan ") and "ceiling" not in "".join(out)
    assert out[-3].split()[:2] == ["decode", "2"] and out[-3].split()[-1] == "1.0"
