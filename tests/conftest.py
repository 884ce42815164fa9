"""Fixtures that several test files share: the real checkpoint and its reference outputs."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent
CHECKPOINT_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"


@pytest.fixture(scope="session")
def smollm2_gguf() -> Path:
    """The SmolLM2-135M-Instruct GGUF (``make checkpoint`` fetches it into checkpoints/)."""
    path = Path(os.environ.get("TOKENSPEED_TEST_CHECKPOINT", ROOT / "checkpoints" / CHECKPOINT_NAME))
    if not path.is_file():
        pytest.fail(f"the test checkpoint is missing: need {path}; run `make checkpoint` to fetch it")
    return path


@pytest.fixture(scope="session")
def smollm2_reference() -> dict[str, Any]:
    """Reference outputs by file stem: prompts, ref_fp32, ref_fp32_bf16weights (tests/data/README.md)."""
    folder = Path(os.environ.get("TOKENSPEED_TEST_REFERENCE", ROOT / "tests" / "data" / "smollm2"))
    return {path.stem: json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))}


@pytest.fixture(scope="session")
def smollm2_artifacts(smollm2_gguf: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Artifacts of SmolLM2 by dtype, built once for this machine's best target."""
    from tokenspeed.compile.build import build

    folder = tmp_path_factory.mktemp("smollm2")
    for dtype in ("float32", "bfloat16"):
        build(smollm2_gguf, folder / dtype, dtype=dtype, model="smollm2")
    return {dtype: folder / dtype for dtype in ("float32", "bfloat16")}
