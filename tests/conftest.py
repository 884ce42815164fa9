"""Fixtures that several test files share: the real checkpoint and its reference outputs."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

# Programs that tests start take the installed package, never the checkout they happen to be started in.
os.environ["PYTHONSAFEPATH"] = "1"

ROOT = Path(__file__).resolve().parent.parent
os.environ.setdefault("XDG_CACHE_HOME", str(ROOT / "build" / "test-cache"))  # compiled kernels; not the user's own
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
    """Artifacts of SmolLM2 by dtype, built once for TOKENSPEED_TEST_TARGET (this machine's best CPU target if unset);
    or those in the folder TOKENSPEED_TEST_ARTIFACTS, built somewhere else."""
    from tokenspeed.compile.build import build

    if "TOKENSPEED_TEST_ARTIFACTS" in os.environ:
        folder = Path(os.environ["TOKENSPEED_TEST_ARTIFACTS"])
    else:
        folder = tmp_path_factory.mktemp("smollm2")
        for dtype in ("float32", "bfloat16"):
            target = os.environ.get("TOKENSPEED_TEST_TARGET")
            build(smollm2_gguf, folder / dtype, dtype=dtype, model="smollm2", targets=target)
    return {dtype: folder / dtype for dtype in ("float32", "bfloat16")}


@pytest.fixture(scope="session")
def tiny_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Llama of a few kilobytes with a tokenizer (see tiny_artifact.py). Not to be changed."""
    from tiny_artifact import write_checkpoint

    return write_checkpoint(tmp_path_factory.mktemp("tiny") / "tiny-llama")


@pytest.fixture(scope="session")
def tiny_artifact(tiny_checkpoint: Path) -> Path:
    """Its float32 artifact for this machine, with 65536 positions and 8 sequences. Not to be changed."""
    from tokenspeed.compile.build import build

    path = tiny_checkpoint.parent / "artifact"
    build(tiny_checkpoint, path, dtype="float32", max_num_seqs=8)
    return path


@pytest.fixture
def out(tmp_path: Path) -> Path:
    """A folder to build into, which a refused build must leave empty."""
    folder = tmp_path / "out"
    folder.mkdir()
    return folder
