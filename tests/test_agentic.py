"""Sessions of several turns on the real model: the prefix index changes no bit and saves what the workload allows."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

BENCHMARK = runpy.run_path(str(Path(__file__).resolve().parent.parent / "benchmarks" / "agentic.py"))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_replayed_sessions(smollm2_artifacts: dict[str, Path], dtype: str) -> None:
    work = BENCHMARK["Workload"](sessions=3, turns=3, system_tokens=200, message_tokens=20, reply_tokens=12)
    result = BENCHMARK["measure"](smollm2_artifacts[dtype], work, rounds=1, kv_gib=0.5)
    [figures] = result["rounds"]
    assert figures["same_bits"]
    # Whole pages of 64 are found: of each turn, at most one page less than what could be reused; and sessions that
    # start side by side compute some of the system prompt twice.
    lost = (64 * 9 + 2 * 200) / figures["prompt_tokens"]
    assert figures["reusable_share"] >= figures["cached_share"] >= figures["reusable_share"] - lost
    assert figures["cached_share"] > 0.4
