"""The example of a training loop, on a tiny model: trainer and server have the same bits at every step."""

from __future__ import annotations

import json
import subprocess
import sys
import xml.etree.ElementTree as ET
from pathlib import Path

from tiny_artifact import cli_environment
from trainer_cases import artifact_of, write

EXAMPLE = Path(__file__).resolve().parent.parent / "examples" / "grpo.py"


def test_every_step_finds_a_difference_of_zero(tmp_path: Path) -> None:
    """From the second step on that takes weights which the server got back: those of the first would differ."""
    artifact = artifact_of(write(tmp_path / "tiny"), tmp_path / "artifact", "bfloat16", max_num_seqs=16)
    done = subprocess.run(
        [sys.executable, str(EXAMPLE), str(artifact), "--steps", "3", "--questions", "2", "--group", "4",
         "--max-tokens", "12", "--learning-rate", "1e-2", "--threads", "2", "--unattested", "a test",
         "--json", str(tmp_path / "steps.json"), "--svg", str(tmp_path / "steps.svg")],
        capture_output=True, text=True, timeout=120, env=cli_environment(OMP_NUM_THREADS="2"),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "greatest difference of a log-probability 0.0 (plain transformers: " in done.stdout
    steps = json.loads((tmp_path / "steps.json").read_text())["steps"]
    assert [(s["max_difference"], s["different_tokens"]) for s in steps] == [(0.0, 0)] * 3
    assert all(s["tokens"] == 2 * 4 * 12 and s["plain_max_difference"] > 0 for s in steps)
    assert ET.parse(tmp_path / "steps.svg").getroot().tag.endswith("svg")
