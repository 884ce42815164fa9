"""Kernels to code objects: Triton functions, compiled for every GPU target on a machine that has no GPU.

Kernels are compiled by several processes at a time (codegen_worker.py). Two keys find what was compiled before:
the *source key* is the digest of the files that a kernel's module is made of, known without running anything; the
*content key* is Triton's own digest of the functions reached, which a worker computes when the files have changed
(usually to find that this kernel has not).
"""

from __future__ import annotations

import ast
import base64
import errno
import hashlib
import importlib.metadata
import importlib.util
import json
import os
import queue
import subprocess
import sys
import tempfile
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO, TypeAlias

from tokenspeed.compile.code_cache import CodeCache
from tokenspeed.compile.codegen_worker import kernel_json, parse_content, worker_digest
from tokenspeed.device_code import KernelInfo, read_device_code
from tokenspeed.errors import ArtifactError, ResourceError, TargetError, UsageError
from tokenspeed.kernels.registry import DeviceKernel
from tokenspeed.target import Target

TRITON_VERSION = "3.6"
"""The release of Triton whose binaries this version knows how to launch."""
SCRATCH_POINTERS = 2
"""Pointers that a launch passes after the parameters of ``DeviceKernel.signature``: Triton's scratch memory, null but
for the first of a kernel with ``scratch_bytes``, and that of its profiler, null."""
_MESSAGE_CHARS = 2000
_NO_SPACE = tuple(f"OSError: [Errno {number}]" for number in (errno.ENOSPC, errno.EDQUOT))
_INHERITED = ("PATH", "LD_LIBRARY_PATH", "LANG", "LC_ALL", "PYTHONDONTWRITEBYTECODE")

Job: TypeAlias = tuple[DeviceKernel, Target]


@dataclass(frozen=True)
class CompiledKernel:
    """A kernel for one target.

    Attributes:
        name: stem of its file, made from what it contains: equal kernels have equal names.
        target: what it runs on.
        symbol: its name in the binary.
        binary: the code object (cubin or hsaco).
        threads: threads of a block.
        shared_bytes: dynamic shared memory of a block.
        info: what the binary says of itself. Its parameters are those of the signature, then SCRATCH_POINTERS.
    """

    name: str
    target: Target
    symbol: str
    binary: bytes
    threads: int
    shared_bytes: int
    info: KernelInfo

    @property
    def file_name(self) -> str:
        return f"{self.name}.{self.target.gpu.binary_suffix}"


def compile_kernels(
    jobs: Iterable[Job],
    *,
    workers: int | None = None,
    cache: Path | None = None,
    progress: TextIO | None = None,
    failures: dict[Job, TargetError] | None = None,
) -> dict[Job, CompiledKernel]:
    """Compile every kernel for its target; the order of the result is that of the jobs, each once.

    The bytes depend on the kernels, the targets and Triton's version, and on nothing else.

    Args:
        workers: processes that compile at a time; by default, one per CPU that this process may use.
        cache: folder of what was compiled before (``code_cache.default_cache()``), or None for none.
        progress: where a bar moves, if it is a terminal.
        failures: takes the error of every kernel that cannot be had, which the result then lacks; None to raise it.

    Raises:
        UsageError: Triton is not installed, or is another release.
        TargetError: a kernel does not compile for its target, or needs more than the target has.
        ResourceError: the disk is full.
    """
    wanted = tuple(dict.fromkeys(jobs))
    if not wanted:
        return {}
    keys = _SourceKeys(triton_version())
    store = None if cache is None else CodeCache(cache)
    done: dict[Job, CompiledKernel] = {}
    for job in wanted:
        with _noting(job, failures):
            compiled = None if store is None else _recall(store, keys.key(job), job)
            if compiled is not None:
                done[job] = compiled
    missing = [job for job in wanted if job not in done and not (failures and job in failures)]
    content_keys: dict[Job, str] = {}
    with (
        _bar(progress, len(wanted) - len(missing), len(wanted)) as bar,
        closing(_compile(missing, workers or _num_cpus(), cache, failures)) as made,
    ):
        for job, content_key, data in made:
            content_keys[job] = content_key
            with _noting(job, failures):
                done[job] = _compiled(job, data)
            bar.update()
    if missing and store is not None:
        _remember(store, keys, content_keys)
        store.prune()
    return {job: done[job] for job in wanted if job in done}


@contextmanager
def _noting(job: Job, failures: dict[Job, TargetError] | None) -> Iterator[None]:
    """A TargetError inside goes to ``failures``, if there is such a place."""
    try:
        yield
    except TargetError as error:
        if failures is None:
            raise
        failures[job] = error


def triton_version() -> str:
    """The version of Triton that is installed. Raises UsageError if it is none that this version works with."""
    hint = f"install it with `pip install 'triton=={TRITON_VERSION}.*'`, or `pip install 'tokenspeed[build]'`"
    try:
        version = importlib.metadata.version("triton")
    except importlib.metadata.PackageNotFoundError:
        raise UsageError(
            f"GPU targets need the compiler Triton {TRITON_VERSION}, and it is not installed", hint=hint
        ) from None
    if not version.startswith(f"{TRITON_VERSION}."):
        raise UsageError(f"GPU targets need the compiler Triton {TRITON_VERSION}, have {version}", hint=hint)
    return version


def _bar(stream: TextIO | None, done: int, total: int) -> Any:
    from tqdm import tqdm

    hidden = stream is None or not stream.isatty()
    return tqdm(initial=done, total=total, desc="compile", unit="kernel", file=stream, leave=False, disable=hidden)


def _num_cpus() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


# --- what was compiled before -------------------------------------------------------------------


class _SourceKeys:
    """Cache keys of jobs, from the text of the source files alone."""

    def __init__(self, version: str):
        self._version = version
        self._compiler = (version, worker_digest())
        self._digests: dict[str, str] = {}
        self._imports: dict[str, tuple[str, frozenset[str]]] = {}

    def reread(self) -> _SourceKeys:
        """Keys from the files as they are now."""
        return _SourceKeys(self._version)

    def key(self, job: Job) -> str:
        kernel, target = job
        if kernel.module not in self._digests:
            self._digests[kernel.module] = self._digest(kernel.module)
        parts = ["source", self._digests[kernel.module], kernel_json(kernel, target), self._compiler]
        return hashlib.sha256(json.dumps(parts).encode()).hexdigest()

    def _digest(self, module: str) -> str:
        """Digest of ``module`` and all that it imports, directly or not, from its own top-level package."""
        digests: dict[str, str] = {}
        waiting = [module]
        while waiting:
            name = waiting.pop()
            if name not in digests:
                if name not in self._imports:
                    self._imports[name] = _read_module(name)
                digests[name], imported = self._imports[name]
                waiting += imported
        return hashlib.sha256(json.dumps(sorted(digests.items())).encode()).hexdigest()


def _read_module(name: str) -> tuple[str, frozenset[str]]:
    """(digest of its source, modules of its top-level package that it imports); nothing for what has no source."""
    spec = importlib.util.find_spec(name)
    if spec is None or spec.origin is None or not spec.origin.endswith(".py"):
        return "", frozenset()
    source = Path(spec.origin).read_bytes()
    top = name.partition(".")[0]
    return hashlib.sha256(source).hexdigest(), frozenset(_imported(source, spec.parent, top))


def _imported(source: bytes, package: str | None, top: str) -> Iterator[str]:
    """Modules of package ``top`` that the text of a module imports; some names may be none."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name.partition(".")[0] == top)
        elif isinstance(node, ast.ImportFrom):
            module = importlib.util.resolve_name("." * node.level + (node.module or ""), package)
            if module.partition(".")[0] == top:
                yield module
                spec = importlib.util.find_spec(module)
                if spec is not None and spec.submodule_search_locations is not None:  # the names may be modules
                    yield from (f"{module}.{alias.name}" for alias in node.names)


def _recall(store: CodeCache, source_key: str, job: Job) -> CompiledKernel | None:
    """The kernel as compiled before from the same sources, or None if there is none, or none that is whole."""
    try:
        content_key = store.read(source_key)
        data = None if content_key is None else store.read(content_key.decode())
        return None if data is None else _compiled(job, data)
    except (ArtifactError, ValueError):
        return None


def _remember(store: CodeCache, keys: _SourceKeys, content_keys: Mapping[Job, str]) -> None:
    """Note which contents came of which sources, unless these were edited while the compiler ran."""
    now = keys.reread()
    for job, content_key in content_keys.items():
        if now.key(job) == keys.key(job):
            store.write(keys.key(job), content_key.encode())


def _compiled(job: Job, data: bytes) -> CompiledKernel:
    """The kernel in ``data``, checked against the job and the limits of the target.

    Raises TargetError for a kernel that needs more than the target has, ArtifactError for what is no such kernel.
    """
    kernel, target = job
    try:
        symbol, threads, shared_bytes, binary = parse_content(data)
        code = read_device_code(binary)
        if code.arch != target:
            raise ValueError(f"it is for {code.arch}")
        info = code.kernels[symbol]
    except (ArtifactError, ValueError, KeyError, TypeError) as e:
        reason = e.message if isinstance(e, ArtifactError) else e
        raise ArtifactError(
            f"kernel {kernel} for {target}: what is cached for it is no such kernel: {reason}",
            hint="build with --no-cache, or remove the folder tokenspeed/kernels of your cache",
        ) from None
    _check(kernel, target, info, threads, shared_bytes)
    return CompiledKernel(f"{symbol}-{hashlib.sha256(data).hexdigest()[:16]}", target, symbol, binary, threads,
                          shared_bytes, info)  # fmt: skip


def _check(kernel: DeviceKernel, target: Target, info: KernelInfo, threads: int, shared_bytes: int) -> None:
    limit, need = target.gpu.max_shared_bytes, info.static_shared_bytes + shared_bytes
    if need > limit:
        raise TargetError(
            f"kernel {kernel} for {target}: need {need} bytes of shared memory a block, have {limit}",
            hint=f"use smaller tiles or fewer stages in {kernel.module} for {target}",
        )
    if threads > min(info.max_threads, target.gpu.max_threads):
        raise TargetError(
            f"kernel {kernel} for {target}: need {threads} threads a block, have {info.max_threads}",
            hint=f"use fewer warps in {kernel.module} for {target}",
        )
    sizes = (*(_size(kind) for _, kind in kernel.signature), *(8,) * SCRATCH_POINTERS)
    if sizes != tuple(size for _, size in info.params):
        raise TargetError(
            f"kernel {kernel} for {target}: need parameters of {sizes} bytes, have {[s for _, s in info.params]}",
            hint=f"install the compiler that this version was made for: `pip install 'triton=={TRITON_VERSION}.*'`",
        )


def _size(kind: str) -> int:
    """Bytes of a parameter of a Triton type such as ``*bf16``, ``i32`` or ``fp32``."""
    return 8 if kind.startswith("*") else max(1, int(kind.lstrip("abcdefghijklmnopqrstuvwxyz")) // 8)


# --- processes that compile ---------------------------------------------------------------------


def _compile(
    jobs: Sequence[Job], workers: int, cache: Path | None, failures: dict[Job, TargetError] | None
) -> Generator[tuple[Job, str, bytes], None, None]:
    """(job, content key, content) of every job, in the order in which they are done.

    Without a place for failures no further job is started after one; of several, the error of the first is raised.
    """
    if not jobs:
        return
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="tokenspeed-codegen-")))
        count = min(workers, len(jobs))
        pool = stack.enter_context(ThreadPoolExecutor(count))
        idle: queue.SimpleQueue[_Worker] = queue.SimpleQueue()
        for number in range(count):
            idle.put(stack.enter_context(_Worker(folder / str(number), cache)))

        def run(job: Job) -> tuple[str, bytes]:
            worker = idle.get()
            try:
                return worker.compile(job)
            finally:
                idle.put(worker)

        futures = {pool.submit(run, job): job for job in jobs}
        stack.callback(pool.shutdown, wait=False, cancel_futures=True)
        for future in as_completed(futures):
            error = future.exception()
            if failures is not None and isinstance(error, TargetError):
                failures[futures[future]] = error
                continue
            if error is not None:
                pool.shutdown(wait=True, cancel_futures=True)
                raise _first_error(futures)
            yield futures[future], *future.result()


def _first_error(futures: Iterable[Future[Any]]) -> BaseException:
    return next(e for f in futures if not f.cancelled() and (e := f.exception()) is not None)


class _Worker:
    """One compiling process, with a folder of its own for whatever the compilers leave."""

    def __init__(self, folder: Path, cache: Path | None):
        folder.mkdir()
        self._folder = folder
        self._cache = None if cache is None else str(cache.absolute())
        self._log = folder / "stderr"
        self._process = self._start()

    def _start(self) -> subprocess.Popen[bytes]:
        with self._log.open("wb") as log:
            return subprocess.Popen(
                [sys.executable, "-P", "-m", "tokenspeed.compile.codegen_worker"],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, env=_environment(self._folder),
            )  # fmt: skip

    def __enter__(self) -> _Worker:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.communicate()

    def compile(self, job: Job) -> tuple[str, bytes]:
        """(content key, content) of one job. Raises TargetError if it does not compile."""
        if self._process.poll() is not None:  # an earlier job was its end
            self._process.communicate()
            self._process = self._start()
        assert self._process.stdin is not None and self._process.stdout is not None
        start = self._log.stat().st_size
        line = b""
        try:
            self._process.stdin.write(json.dumps({**kernel_json(*job), "cache": self._cache}).encode() + b"\n")
            self._process.stdin.flush()
            line = self._process.stdout.readline()
        except BrokenPipeError:
            pass  # it is dead, like one that answers nothing
        if not line.endswith(b"\n"):
            printed = self._log.read_bytes()[start:].decode(errors="replace")
            raise _failure(job, f"{printed}\nthe compiler ended with status {self._process.wait()}")
        answer = json.loads(line)
        if "error" in answer:
            raise _full_disk() if answer["error"].startswith(_NO_SPACE) else _failure(job, answer["error"])
        return answer["key"], base64.b64decode(answer["content"])


def _environment(folder: Path) -> dict[str, str]:
    """Only what finds programs and libraries is inherited: Triton takes options of compilation from the rest."""
    return {
        **{name: os.environ[name] for name in _INHERITED if name in os.environ},
        "PYTHONPATH": os.pathsep.join(os.path.abspath(entry) for entry in sys.path),
        "PYTHONHASHSEED": "0",
        "HOME": str(folder),
        "TMPDIR": str(folder),
        "TRITON_HOME": str(folder),
        "TRITON_CACHE_DIR": str(folder / "triton"),
        "TRITON_ALWAYS_COMPILE": "1",
        "TRITON_STORE_BINARY_ONLY": "1",
        "TRITON_DISABLE_LINE_INFO": "1",
    }


def _full_disk() -> ResourceError:
    return ResourceError(
        f"the disk is full in {tempfile.gettempdir()}, where kernels are compiled",
        hint="free some space there, or set TMPDIR to another folder",
    )


def _failure(job: Job, message: str) -> TargetError:
    kernel, target = job
    tail = message.strip()[-_MESSAGE_CHARS:]
    return TargetError(
        f"kernel {kernel} of {kernel.module} does not compile for {target}:\n{tail}",
        hint=f"build without {target}, or choose another solution for this op with --solution",
    )
