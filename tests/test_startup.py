"""Starting `tokenspeed serve`: what is imported, and that it says where the time went. Nothing here is timed."""

from __future__ import annotations

import json
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
from tiny_artifact import cli_environment

ROOT = Path(__file__).resolve().parent.parent


def test_a_command_imports_no_other_command() -> None:
    code = (
        "import sys, tokenspeed.cli.main as _; from tokenspeed.cli.main import parse; parse(['serve', 'a']);"
        "print(*sorted(m for m in sys.modules if m.startswith('tokenspeed.')))"
    )
    found = subprocess.run(
        [sys.executable, "-c", code], env=cli_environment(), capture_output=True, text=True, check=True
    )
    own = ("tokenspeed.cli", "tokenspeed.cli.main", "tokenspeed.cli.options", "tokenspeed.cli.serve")
    assert found.stdout.split() == [*own, "tokenspeed.errors"]


def test_the_benchmark_splits_a_start(
    tiny_artifact: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, value in cli_environment().items():
        monkeypatch.setenv(name, value)
    script = str(ROOT / "benchmarks" / "startup.py")
    command = f"{sys.executable} -m tokenspeed"
    options = ["--rounds", "1", "--pause", "0", "--tokenspeed", command]
    benchmark = runpy.run_path(script)

    files = ["--runs", str(tmp_path / "runs.json"), "--trace", str(tmp_path / "trace.json")]
    monkeypatch.setattr(sys, "argv", [script, str(tiny_artifact), *options, "--json", *files])
    assert benchmark["main"]() == 0
    report = json.loads(capsys.readouterr().out)
    (run,) = report["starts"][str(tiny_artifact)]
    marks = run["startup_seconds"]
    assert 0 < marks["bound"] <= min(marks["web"], marks["engine"]) <= marks["ready"]
    assert set(run["load_seconds"]) == {"verify", "tokenizer", "choose", "open", "weights", "modules", "graphs"}
    figures = report["artifacts"][str(tiny_artifact)]
    assert figures["first_token"]["median"] > figures["ready"]["median"] > 0
    assert all(seconds >= 0 for seconds in figures["split"].values()), figures["split"]
    assert figures["within_memory_allowance"] and figures["peak_bytes"] > 1 << 20
    assert json.loads((tmp_path / "runs.json").read_text())[str(tiny_artifact)] == [run]
    assert run["target"].startswith("cpu:") and run["settled"] >= run["ready"] and run["split"] == figures["split"]
    names = {event["name"] for event in json.loads((tmp_path / "trace.json").read_text())["traceEvents"]}
    assert {"ready", "first request", "first token"} <= names

    benchmark["show"](str(tiny_artifact), figures)
    text = capsys.readouterr().out
    assert "exec to ready" in text and "loader: tokenizer" in text and "device: graphs" in text


def test_a_gpu_has_no_weights_to_settle() -> None:
    """Figures of a GPU: host memory is counted whole, and the parts pass as they do there."""
    benchmark = runpy.run_path(str(ROOT / "benchmarks" / "startup.py"))
    load = {"choose": 0.2, "open": 0.1, "modules": 0.1, "graphs": 0.05, "weights": 0.4, "tokenizer": 0.1, "verify": 0.0}
    run = {
        "target": "cuda:sm_90a", "device": "NVIDIA H200", "ready": 1.0, "first_token": 1.1, "cpu_until_ready": 0.9,
        "settled": None, "peak_bytes": 300 << 20, "load_seconds": load,
        "startup_seconds": {"bound": 0.1, "web": 0.4, "engine": 0.95, "ready": 0.96},
    }  # fmt: skip
    run["split"] = benchmark["split"](run)
    assert run["split"]["loader: imports, engine"] == pytest.approx(0.15)
    figures = benchmark["summary"]("/nowhere", [run, run])
    assert "settled" not in figures and figures["peak_bytes_beside_weights"] == 300 << 20
    assert figures["within_memory_allowance"] is None and figures["first_token"]["median"] == 1.1
    benchmark["show"]("/nowhere", figures)
