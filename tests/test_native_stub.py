"""The committed type stub of the compiled module says what the module is."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def test_stub_matches_the_module(tmp_path: Path) -> None:
    out = tmp_path / "_native.pyi"
    command = [sys.executable, "-m", "nanobind.stubgen", "-q", "-m", "tokenspeed._native", "-o", out]
    subprocess.run(command, check=True, cwd=tmp_path)  # it looks into the current folder first
    committed = (ROOT / "tokenspeed" / "_native.pyi").read_text().partition("\n")[2]
    assert committed == out.read_text(), "regenerate tokenspeed/_native.pyi as its first line says"
