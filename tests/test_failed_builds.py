"""Builds that cannot finish: a full disk, no permission, a signal. Nothing half-written is left behind."""

from __future__ import annotations

import errno
import os
import resource
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from tiny_artifact import cli, cli_environment, command, is_empty

from tokenspeed.artifact import Artifact
from tokenspeed.compile.build import Progress, build
from tokenspeed.errors import ArtifactError, ResourceError

IN_A_SMALL_DISK = """
mount -t tmpfs -o size=1m tmpfs "$disk" || exit 77
"$@"
code=$?
ls -A "$disk"
exit $code
"""


@pytest.mark.skipif(shutil.which("unshare") is None, reason="this system has no unshare")
@pytest.mark.parametrize("name", ["a", "a.tar"])
def test_a_full_disk(tiny_checkpoint: Path, out: Path, name: str) -> None:
    """A file system of one megabyte, in a mount namespace that ends with the build."""
    build_there = command("build", tiny_checkpoint, "-o", out / name)
    ran = subprocess.run(
        ["unshare", "-rm", "sh", "-c", IN_A_SMALL_DISK, "sh", *build_there],
        capture_output=True,
        text=True,
        timeout=60,
        env=cli_environment(disk=str(out)),
    )
    if "unshare:" in ran.stderr or ran.returncode == 77:
        pytest.skip("mounting a small file system is not allowed here")
    assert (ran.returncode, ran.stdout) == (9, "")  # and `ls` found nothing
    lines = ran.stderr.splitlines()
    assert lines[-2] == f"error: the disk is full while writing {out / name}: nothing was published"
    assert lines[-1] == "hint: free some space, or write the artifact elsewhere with -o"


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EROFS])
@pytest.mark.parametrize("call", [1, 3, 20])
def test_a_disk_that_fails_at_any_moment(
    code: int, call: int, tiny_checkpoint: Path, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """fsync is the last to hear of a full disk; call 20 is among its files and folders."""
    real, calls = os.fsync, 0

    def fsync(descriptor: int) -> None:
        nonlocal calls
        calls += 1
        if calls == call:
            raise OSError(code, os.strerror(code))
        real(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    full = code in (errno.ENOSPC, errno.EDQUOT)
    with pytest.raises(
        ResourceError, match="the disk is full while writing" if full else "cannot write .*: nothing was"
    ):
        build(tiny_checkpoint, out / "a", max_model_len=128)
    assert is_empty(out)


def test_a_file_size_limit(tiny_checkpoint: Path, out: Path) -> None:
    ran = cli(
        "build", tiny_checkpoint, "-o", out / "a",
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20)),
    )  # fmt: skip
    assert ran.returncode == 9 and f"error: cannot write {out / 'a'}: File too large" in ran.stderr
    assert is_empty(out)


def test_a_folder_that_cannot_be_made(tiny_checkpoint: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    (tmp_path / "loop").symlink_to("loop")
    for path in (
        tmp_path / "file" / "a",
        Path("/proc/a"),
        tmp_path / ("x" * 300),
        tmp_path / "loop",
        tmp_path / "a\0b",
    ):
        with pytest.raises(ResourceError, match="cannot write") as caught:
            build(tiny_checkpoint, path, max_model_len=128)
        assert caught.value.hint == "choose another path with -o"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["file", "loop"]


SLOW_BUILD = """
import sys, time
from tokenspeed.cli import main
from tokenspeed.compile import build

def write_half(plan, program, source, out, progress=None):
    out.write(bytes(plan.nbytes // 2))
    out.flush()
    print("half written", flush=True)
    time.sleep(30)

build.write_weights = write_half
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGHUP, 129), (signal.SIGINT, 130)])
def test_a_build_that_is_told_to_stop_leaves_nothing(
    number: signal.Signals, code: int, tiny_checkpoint: Path, out: Path
) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", SLOW_BUILD, "build", str(tiny_checkpoint), "-o", str(out / "a")],
        env=cli_environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None and process.stdout.readline() == "half written\n"
    assert [p.name.split("-")[0] for p in out.iterdir()] == [".a.building"]
    process.send_signal(number)
    _, err = process.communicate(timeout=20)
    assert process.returncode == code and "Traceback" not in err
    assert is_empty(out)


def test_what_was_there_survives_a_failed_replacement(
    tiny_checkpoint: Path, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    build(tiny_checkpoint, out / "a", max_model_len=128)
    digest = Artifact.open(out / "a").digest
    real = Path.rename

    def rename(self: Path, target: Path) -> Path:
        if ".building-" in self.name:
            raise KeyboardInterrupt
        return real(self, target)

    monkeypatch.setattr(Path, "rename", rename)
    with pytest.raises(KeyboardInterrupt):
        build(tiny_checkpoint, out / "a", max_model_len=256, force=True)
    assert Artifact.open(out / "a").digest == digest and [p.name for p in out.iterdir()] == ["a"]


def test_a_taken_destination_is_refused_before_the_work(tiny_checkpoint: Path, tiny_artifact: Path) -> None:
    progress = Progress()
    with pytest.raises(ArtifactError, match="exists already"):
        build(tiny_checkpoint, tiny_artifact, progress=progress)
    assert list(progress.seconds) == ["checkpoint"]
