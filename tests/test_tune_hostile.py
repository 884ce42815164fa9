"""Packs, results and tables that nobody's `tokenspeed tune` wrote: a typed error each, and soon."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tracemalloc
import zipfile
from pathlib import Path
from typing import Any

import pytest
from tiny_artifact import cli_environment, hf_config, tiny

from tokenspeed.cli.main import main
from tokenspeed.errors import ArtifactError
from tokenspeed.kernels.triton.linear_config import TUNING_FOLDER
from tokenspeed.pack_file import DIGEST, MANIFEST
from tokenspeed.tuning_pack import FORMAT_VERSION, RESULTS_KIND, TuningPack

MIB = 1 << 20


def bomb(path: Path, mib: int) -> Path:
    """A small pack whose manifest unpacks to ``mib`` MiB of blanks, its digest right."""
    blanks, whole = b" " * MIB, hashlib.sha256()
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        with archive.open(MANIFEST, "w", force_zip64=True) as member:
            for _ in range(mib):
                member.write(blanks)
                whole.update(blanks)
        archive.writestr(DIGEST, f"{whole.hexdigest()}\n")
    return path


def test_a_bomb_is_not_unpacked(tmp_path: Path) -> None:
    path = bomb(tmp_path / "bomb", 300)
    assert path.stat().st_size < MIB
    tracemalloc.start()
    try:
        with pytest.raises(ArtifactError, match=r"manifest\.json is damaged"):
            TuningPack(path)
        assert tracemalloc.get_traced_memory()[1] < 16 * MIB
    finally:
        tracemalloc.stop()


def test_a_bomb_that_claims_to_be_small(tmp_path: Path) -> None:
    path = bomb(tmp_path / "bomb", 300)
    data = bytearray(path.read_bytes())
    true, claimed = (300 * MIB).to_bytes(4, "little"), (100).to_bytes(4, "little")
    at = data.rindex(true)  # in the directory at the end
    data[at : at + 4] = claimed
    path.write_bytes(data)
    tracemalloc.start()
    try:
        with pytest.raises(ArtifactError, match=r"manifest\.json is damaged"):
            TuningPack(path)
        assert tracemalloc.get_traced_memory()[1] < 16 * MIB
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("kind", ["device", "pipe", "folder"])
def test_what_is_no_file_is_not_read(kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = {"device": Path("/dev/zero"), "pipe": tmp_path / "pipe", "folder": tmp_path}[kind]
    if kind == "pipe":
        os.mkfifo(path)
    assert main(["tune", "run", str(path), "-o", str(tmp_path / "results.json")]) == 7
    assert capsys.readouterr().err == f"error: {path} is no file\nhint: make a pack with `tokenspeed tune pack`\n"


@pytest.fixture
def tables(tmp_path: Path) -> Path:
    """A folder with the table of sm_90a that comes with this version."""
    (tmp_path / "tables").mkdir()
    shutil.copy(TUNING_FOLDER / "sm_90a.json", tmp_path / "tables")
    return tmp_path / "tables"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"us": "fast"}, "it.linear[1].us must be a number, not 'fast'"),
        ({"us": float("nan")}, "it.linear[1].us must be a number, not nan"),
        ({"us": None}, "it.linear[1].us must be a number, not None"),
        ({"op": 5}, "it.linear[1].op must be a text, not 5"),
        ({"N": [64]}, "it.linear[1].N must be a whole number, not [64]"),
        ({"runner_up": 7}, "it.linear[1].runner_up must be an object, not 7"),
        ({"runner_up": {"us": 1}}, "it.linear[1].runner_up lacks 'config'"),
        ({"share": "all"}, "it.share must be a number, not 'all'"),
        ({"bound": None}, "it.bound must be a text, not None"),
        ({"device": "\ud800"}, "'utf-8' codec can't encode character"),
    ],
)
def test_a_forged_table(
    changes: dict[str, Any], message: str, tables: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tables / "sm_90a.json"
    table = json.loads(path.read_text())
    table["linear"][1] |= changes
    path.write_text(json.dumps(table))
    assert main(["tune", "show", "--target", "cuda:sm_90a", "--tables", str(tables)]) == 7
    out, err = capsys.readouterr()
    assert out == "" and err.startswith(f"error: {path} is no tuning table: ") and message in err
    assert err.endswith("\nhint: restore it, or remove it to start anew\n")


def test_what_show_has_nothing_for(tables: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for args, code, message in (
        (("--target", "cpu:x86-64-v3"), 2, "--target is cpu:x86-64-v3: tables are for GPUs"),
        (
            ("--target", "cuda:sm_90a", "--tables", str(tables / "none")),
            2,
            f"there is no folder {tables}/none of tables",
        ),
        (("--target", "cuda:sm_90a", "--op", "nope"), 0, "nothing was measured for nope on cuda:sm_90a"),
        (("--target", "hip:gfx942", "--tables", str(tables)), 0, "nothing was measured for hip:gfx942: builds choose"),
    ):
        assert main(["tune", "show", *args]) == code
        out, err = capsys.readouterr()
        assert out == "" and message in err


def test_results_that_are_a_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["tune", "merge", str(tmp_path), "--tables", str(tmp_path)]) == 7
    assert capsys.readouterr().err == (
        f"error: cannot read {tmp_path}: Is a directory\nhint: give it what `-o` of `tokenspeed tune run` wrote\n"
    )


def results(**changes: Any) -> dict[str, Any]:
    (entry, *_) = json.loads((TUNING_FOLDER / "sm_90a.json").read_text())["linear"]
    config = {"us": 1.5, "config": entry["config"]}
    case = {name: entry[name] for name in ("op", "N", "K", "M", "dtype")}
    return {
        "kind": RESULTS_KIND,
        "format_version": FORMAT_VERSION,
        "target": "cuda:sm_90a",
        "device": "a GPU",
        "date": "2026-11-29",
        "peak": {"part": "the part", "bytes_per_s": 1e12, "flops_per_s": 1e15},
        "entries": [{"family": "linear", **case, "bytes": 10, "flops": 10, "timed": [config, config]}],
        **changes,
    }


@pytest.mark.parametrize(
    ("rates", "message"),
    [
        ({"flops_per_s": 0}, "flops_per_s is 0"),
        ({"bytes_per_s": -1.0}, "bytes_per_s is -1.0"),
        ({"bytes_per_s": float("nan")}, "it.peak.bytes_per_s must be a number, not nan"),
        ({"bytes_per_s": True}, "it.peak.bytes_per_s must be a number, not True"),
        ({"part": None}, "it.peak.part must be a text, not None"),
    ],
)
def test_forged_data_sheets(
    rates: dict[str, Any], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, folder = tmp_path / "results.json", tmp_path / "tables"
    source.write_text(json.dumps(results(peak={**results()["peak"], **rates})))
    assert main(["tune", "merge", str(source), "--tables", str(folder)]) == 7
    assert f"holds no results of `tokenspeed tune run`: {message}" in capsys.readouterr().err
    assert not folder.exists()


def test_what_was_merged_can_be_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = tmp_path / "results.json"
    source.write_text(json.dumps(results()))
    assert main(["tune", "merge", str(source), "--tables", str(tmp_path)]) == 0
    assert main(["tune", "show", "--target", "cuda:sm_90a", "--tables", str(tmp_path)]) == 0
    assert "a GPU" in capsys.readouterr().out


SLOW_PACK = """
import os, sys, time
from tokenspeed.cli import main
from tokenspeed.compile import codegen

def slowly(worker, job):
    os.write(1, b"%d\\n" % worker._process.pid)
    time.sleep(1)
    raise OSError("told to stop")

codegen._Worker.compile = slowly
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGHUP, 129), (signal.SIGINT, 130)])
def test_a_pack_that_is_told_to_stop_leaves_nothing(number: signal.Signals, code: int, tmp_path: Path) -> None:
    shape = write_shape(tmp_path / "shape")
    (tmp_path / "tmp").mkdir()
    process = subprocess.Popen(
        [sys.executable, "-c", SLOW_PACK, "tune", "pack", str(shape), "--target", "cuda:sm_90a", "-o",
         str(tmp_path / "out" / "pack"), "--no-cache", "--jobs", "2", "--rows", "1"],
        env=cli_environment(TMPDIR=str(tmp_path / "tmp")),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )  # fmt: skip
    assert process.stdout is not None
    workers = [int(process.stdout.readline()) for _ in range(2)]
    process.send_signal(number)
    _, err = process.communicate(timeout=20)
    assert process.returncode == code and "Traceback" not in err
    assert not any(Path(f"/proc/{pid}").exists() for pid in workers)
    assert list((tmp_path / "tmp").iterdir()) == [] and not (tmp_path / "out").exists()


def write_shape(folder: Path) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(hf_config(tiny(intermediate_size=80))))
    return folder
