"""The captured calls of a build: launchers compiled, run under capture on a GPU of the target, and relocated."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from tokenspeed.compile.capture import (
    CapturedCall,
    CapturedLaunch,
    CaptureJob,
    Captures,
    RawLaunch,
    check_binary,
    job_key,
    launches_from_bytes,
    launches_to_bytes,
    relocate,
)
from tokenspeed.compile.capture_toolchain import Launcher, LauncherCompiler, find_headers, find_nvcc
from tokenspeed.compile.code_cache import CodeCache
from tokenspeed.errors import TargetError, UsageError
from tokenspeed.target import Target

_WORKER_SECONDS = 300
_MESSAGE_CHARS = 2000


def capture_problem(library: str, target: Target, cache: Path | None = None) -> str | None:
    """Why kernels of ``library`` cannot be captured for ``target`` here, nor taken from the cache, or None."""
    if target.backend != "cuda":
        return f"need a CUDA target to capture for, have {target}"
    try:
        marker = _marker(library, target)
        if cache is None or CodeCache(cache).read(marker) is None:
            _device_of(target)
    except (UsageError, TargetError) as e:
        return e.message
    return None


def _marker(library: str, target: Target) -> str:
    """Key under which a cache says that it has captures made with this library and this compiler."""
    facts = ["captured", library, find_headers(library).version, find_nvcc().version, str(target)]
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()


def capture_calls(jobs: Iterable[CaptureJob], target: Target, *, cache: Path | None = None) -> Captures:
    """Capture every job for ``target``; what the cache holds needs no GPU.

    Raises:
        UsageError: nvcc or a library is not installed.
        TargetError: a launcher does not compile, there is no GPU of the target here, or what was launched cannot be
            made independent of addresses.
    """
    wanted = tuple(dict.fromkeys(jobs))
    compiler = LauncherCompiler(target, cache)
    store = None if cache is None else CodeCache(cache)
    launchers = _compile(wanted, compiler)
    found: dict[CaptureJob, tuple[CapturedLaunch, ...]] = {}
    for job in wanted:
        data = None if store is None else store.read(job_key(job, launchers[job].key))
        if data is not None:
            found[job] = launches_from_bytes(data)
    missing = [job for job in wanted if job not in found]
    if missing:
        found |= _capture(missing, launchers, target)
    for job in wanted:
        check_binary(found[job], launchers[job].binary, target, str(job.kernel))
        if store is not None and job in missing:
            store.write(job_key(job, launchers[job].key), launches_to_bytes(found[job]))
            store.write(_marker(job.kernel.library, target), b"")
    names = {launcher.key: _binary_name(job, launcher) for job, launcher in launchers.items()}
    return Captures(
        calls={job: CapturedCall(names[launchers[job].key], found[job]) for job in wanted},
        binaries={names[launcher.key]: launcher.binary for launcher in launchers.values()},
    )


def _compile(jobs: Sequence[CaptureJob], compiler: LauncherCompiler) -> dict[CaptureJob, Launcher]:
    """The launcher of each job; those that differ are compiled side by side."""
    kernels = {compiler.key(job.kernel): job.kernel for job in jobs}
    with ThreadPoolExecutor(max(1, min(len(kernels), len(os.sched_getaffinity(0))))) as pool:
        compiled = dict(zip(kernels, pool.map(compiler.compile, kernels.values()), strict=True))
    return {job: compiled[compiler.key(job.kernel)] for job in jobs}


def _binary_name(job: CaptureJob, launcher: Launcher) -> str:
    """Made from what it contains, as for other kernels: equal code has equal names."""
    stem = job.kernel.source.removesuffix(".cu").replace("/", "-")
    return f"{stem}-{hashlib.sha256(launcher.binary).hexdigest()[:16]}"


def _capture(
    jobs: Sequence[CaptureJob], launchers: Mapping[CaptureJob, Launcher], target: Target
) -> dict[CaptureJob, tuple[CapturedLaunch, ...]]:
    device = _device_of(target)
    with tempfile.TemporaryDirectory(prefix="tokenspeed-capture-") as folder:
        paths = {}
        for launcher in dict.fromkeys(launchers[job] for job in jobs):
            path = Path(folder) / f"{launcher.key[:32]}.so"
            path.write_bytes(launcher.shared_object)
            paths[launcher.key] = str(path)
        request = {
            "device": device,
            "jobs": [
                {
                    "launcher": paths[launchers[job].key],
                    "function": job.kernel.function,
                    "num_pointers": job.num_pointers,
                    "integers": [value for _, value in job.kernel.integers],
                    "floats": list(job.floats),
                }
                for job in jobs
            ],
        }
        answers = _run_worker(request)["launches"]
    found = {}
    for job, (first, second) in zip(jobs, answers, strict=True):
        raw = [[RawLaunch.from_json(launch) for launch in launches] for launches in (first, second)]
        found[job] = relocate(raw[0], raw[1], job.num_pointers, str(job.kernel))
    return found


def _device_of(target: Target) -> int:
    """The first GPU here that runs code of ``target``. Raises TargetError if there is none."""
    capability = int(target.arch.removeprefix("sm_").rstrip("abcdefghijklmnopqrstuvwxyz"))
    devices = _run_worker(None)["devices"]
    for ordinal, (_, (major, minor)) in enumerate(devices):
        if major * 10 + minor == capability:
            return ordinal
    have = ", ".join(f"{name} (sm_{major}{minor})" for name, (major, minor) in devices) or "none"
    raise TargetError(
        f"capture: need a GPU of {target} on this machine, have {have}",
        hint="build on a machine with such a GPU, or with the cache of a build that was made on one",
    )


def _run_worker(request: dict[str, Any] | None) -> dict[str, Any]:
    """The worker's answer. Raises TargetError if it fails."""
    path = os.pathsep.join(os.path.abspath(entry) for entry in sys.path)
    environment = {**os.environ, "PYTHONPATH": path, "CUDA_MODULE_LOADING": "EAGER"}  # nothing loads during a capture
    try:
        run = subprocess.run(
            [sys.executable, "-P", "-m", "tokenspeed.compile.capture_worker"], input=json.dumps(request),
            capture_output=True, text=True, check=False, env=environment, timeout=_WORKER_SECONDS,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        raise TargetError(f"capture: need an answer within {_WORKER_SECONDS} s, have none") from None
    try:
        answer: dict[str, Any] = json.loads(run.stdout)
    except ValueError:
        printed = (run.stderr or run.stdout).strip()[-_MESSAGE_CHARS:]
        raise TargetError(
            f"capture: the capturing process ended with status {run.returncode}:\n{printed}",
            hint="choose another solution for this op with --solution",
        ) from None
    if "error" in answer:
        raise TargetError(answer["error"], hint=answer["hint"])
    return answer
