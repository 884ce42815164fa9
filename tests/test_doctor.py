"""`tokenspeed doctor` on machines with GPUs, without, and with drivers that are too old."""

from __future__ import annotations

import json

import pytest
from gpu_double import H200, plug_in

from tokenspeed.cli import main
from tokenspeed.target import ALL_TARGETS, GPU_TARGETS, Target


def report(capsys: pytest.CaptureFixture[str]) -> dict[str, dict[str, object]]:
    assert main(["doctor", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    found["by_target"] = {t["target"]: t for t in found["targets"]}
    assert tuple(found["by_target"]) == ALL_TARGETS
    return found  # type: ignore[no-any-return]


def test_an_h200(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    plug_in(monkeypatch, reason="no AMD driver is installed")
    found = report(capsys)
    assert found["gpus"] == [
        {
            "device": 0, "backend": "cuda", "name": "NVIDIA H200", "arch": "sm_90", "target": "cuda:sm_90a",
            "memory_bytes": 140 << 30, "driver": "CUDA 13.0",
        }
    ]  # fmt: skip
    assert found["no_gpus"] == {"hip": "no AMD driver is installed"}
    runs = {name: t["runs"] for name, t in found["by_target"].items() if name in GPU_TARGETS}  # type: ignore[index]
    assert runs == {name: name == "cuda:sm_90a" for name in GPU_TARGETS}
    assert main(["doctor"]) == 0
    out = capsys.readouterr().out
    assert "GPU 0: NVIDIA H200, 140 GiB, sm_90, driver CUDA 13.0, runs cuda:sm_90a\n" in out
    assert "no hip GPU: no AMD driver is installed\n" in out
    lines = {line.split()[0]: line for line in out.splitlines() if ":" in line.split(" ")[0]}
    for name in GPU_TARGETS:
        assert Target.parse(name).gpu.proven in lines[name]
    assert "run on an H200" in lines["cuda:sm_90a"] and "never run by this project" in lines["cuda:sm_100a"]
    assert lines["hip:gfx950"].endswith("no such GPU here")


def test_an_old_driver_and_an_unknown_gpu(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    old = (*H200[:4], 12040)
    plug_in(monkeypatch, gpus=[old, (1, "Tesla T4", "sm_75", 16 << 30, 12040)])
    found = report(capsys)
    hopper = found["by_target"]["cuda:sm_90a"]
    assert isinstance(hopper, dict)
    assert (hopper["runs"], hopper["why_not"]) == (False, "the driver is too old: CUDA 12.4")
    assert main(["doctor"]) == 0
    assert "GPU 1: Tesla T4, 16 GiB, sm_75, driver CUDA 12.4, runs no target\n" in capsys.readouterr().out
