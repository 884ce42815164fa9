"""`tokenspeed tune` on the command line."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from gpu_double import ContextDouble
from tiny_artifact import cli_environment
from tuning_gpu import FAST, WRONG, FakeGpu, binaries, outcomes, speed

from tokenspeed.cli import main
from tokenspeed.errors import ResourceError


def test_the_walk_on_the_command_line(
    checkpoint: Path, tmp_path: Path, tables: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, found = str(tmp_path / "p"), tmp_path / "r.json"
    words = [
        "tune",
        "pack",
        str(checkpoint),
        "-o",
        path,
        "--target",
        "cuda:sm_90a",
        "--rows",
        "2",
        "--op",
        "linear_add",
    ]
    assert main([*words, "--no-cache", "--jobs", "2"]) == 0
    assert capsys.readouterr().out.splitlines()[1] == "2 shapes, 2 cases, 6 candidates, 10 binaries for cuda:sm_90a"
    FakeGpu.wrong = binaries(Path(path), WRONG)
    speed(Path(path), FAST, 4.0)
    assert main(["tune", "run", path, "-o", str(found)]) == 0
    out, err = capsys.readouterr()
    assert out.splitlines()[1].split()[:8] == ["linear_add", "N=64", "K=64", "2", "4.00", "10.01", "2", "1"]
    assert out.splitlines()[-1] == f"{found}: 2 cases on NVIDIA H200"
    assert "out: linear_add N=64 K=64 bfloat16 M=2: 16x32x64 warps 4, stages 2, swapped, group 8, prefetch 0:" in err
    assert "other bits" in err and "tune: case 1 of 2" in err
    assert main(["tune", "merge", str(found)]) == 0
    assert capsys.readouterr().out == (
        f"{tables / 'sm_90a.json'}: 2 added, 0 replaced, 0 kept as measured later, 2 entries for cuda:sm_90a\n"
    )
    assert main(["tune", "show", "--target", "cuda:sm_90a", "--op", "linear_add"]) == 0
    shown = capsys.readouterr().out.splitlines()
    assert shown[0].split() == ["op", "sizes", "M", "us", "share", "config", "runner-up", "device", "date"]
    assert len(shown) == 3 and "16x32x64 warps 2, stages 2, swapped" in shown[1] and "NVIDIA H200" in shown[1]
    assert main(["tune", "show", "--target", "cuda:sm_90a", "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)["entries"]) == 2
    assert main(["tune", "show", "--target", "hip:gfx950"]) == 0
    assert "nothing was measured for hip:gfx950: builds choose by rule" in capsys.readouterr().err


def test_a_lost_device_keeps_what_was_measured(
    packed: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    outcomes(packed)
    FakeGpu.lose = FakeGpu.made[0].tickets - 5  # in the second case
    FakeGpu.made.clear()
    found = tmp_path / "r.json"
    assert main(["tune", "run", str(packed), "-o", str(found)]) == ResourceError.exit_code
    err = capsys.readouterr().err
    assert "error: GPU 0 (NVIDIA H200) failed at linear_add N=64 K=64 bfloat16: the device NVIDIA H200 is lost" in err
    assert len(json.loads(found.read_text())["entries"]) == 1
    assert all(device.closed for device in FakeGpu.made) and not ContextDouble.opened


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["run", "{pack}", "-o", "nowhere/r.json"], "there is no folder nowhere"),
        (["run", "{pack}", "-o", "r.json", "--seconds", "0"], "--seconds is 0.0"),
        (["pack", "x", "-o", "p", "--target", "cuda:sm_90a", "--rows", "1,a"], "--rows is '1,a'"),
        (["pack", "x", "-o", "p", "--target", "cuda:sm_90a", "--jobs", "0"], "--jobs is 0"),
        (["merge", "{pack}"], "is a pack: need results, the JSON file that `tokenspeed tune run` writes"),
        (["show", "--target", "cuda:sm_9"], "unknown target 'cuda:sm_9'"),
    ],
)
def test_what_makes_no_sense(packed: Path, capsys: pytest.CaptureFixture[str], words: list[str], message: str) -> None:
    assert main(["tune", *(word.format(pack=packed) for word in words)]) > 0
    assert message in capsys.readouterr().err


RUNNING = "import tokenspeed.cli.tune, tokenspeed.runtime.tuning"
SHOWING = """
import tokenspeed.compile.tuning_tables
from tokenspeed.cli import main
main(["tune", "show", "--target", "cuda:sm_90a"])
"""


@pytest.mark.parametrize(
    ("code", "never"),
    [(RUNNING, ("tokenspeed.compile", "tokenspeed.kernels")), (SHOWING, ())],
    ids=["run", "show and merge"],
)
def test_only_packing_needs_more_than_the_base_install(code: str, never: tuple[str, ...]) -> None:
    heavy = ("numpy", "triton", "torch", "tqdm", "ml_dtypes", *never)
    code = f"import sys\n{code}\nprint([name for name in sys.modules if name.startswith({heavy!r})])"
    line = [sys.executable, "-c", code]
    done = subprocess.run(line, env=cli_environment(), capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"
