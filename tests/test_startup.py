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
    tiny_artifact: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, value in cli_environment().items():
        monkeypatch.setenv(name, value)
    script = str(ROOT / "benchmarks" / "startup.py")
    command = f"{sys.executable} -m tokenspeed"
    options = ["--rounds", "1", "--pause", "0", "--tokenspeed", command]
    benchmark = runpy.run_path(script)

    monkeypatch.setattr(sys, "argv", [script, str(tiny_artifact), *options, "--json"])
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

    benchmark["show"](str(tiny_artifact), figures)
    text = capsys.readouterr().out
    assert "exec to ready" in text and "loader: tokenizer" in text and "device: graphs" in text
