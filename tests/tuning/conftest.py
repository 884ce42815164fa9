"""Tests in this folder make packs, time them on a stand-in for the GPU, and merge what was measured."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from tiny_artifact import tiny, write_checkpoint
from tuning_gpu import HOPPER, plug_in, three_candidates

from tokenspeed.compile.tuning import pack
from tokenspeed.kernels.triton import linear_config


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = tiny(num_layers=2, hidden_size=64, intermediate_size=96, num_heads=4, num_kv_heads=2, head_dim=16)
    return write_checkpoint(tmp_path_factory.mktemp("tune") / "tiny-llama", config)


@pytest.fixture(scope="session")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("code")


@pytest.fixture(scope="session")
def packed(checkpoint: Path, cache: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("packs") / "tiny.tunepack"
    with three_candidates():
        result = pack([checkpoint], path, HOPPER, rows=[512, 1], ops=["linear_add"], workers=2, cache=cache)
    assert dict(result.counts) == {"shapes": 2, "cases": 4, "candidates": 12, "binaries": 10} and not result.failures
    assert result.nbytes == path.stat().st_size < 100_000
    return path


@pytest.fixture(autouse=True)
def an_h200(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Three candidates, and one H200."""
    plug_in(monkeypatch)
    with three_candidates():
        yield


@pytest.fixture
def tables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty folder of tables, which builds use."""
    folder = tmp_path / "tables"
    monkeypatch.setattr(linear_config, "TUNING_FOLDER", folder)
    linear_config._table.cache_clear()
    yield folder
    linear_config._table.cache_clear()
