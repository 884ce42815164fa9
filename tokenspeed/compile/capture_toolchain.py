"""What compiles launchers: nvcc, and the headers of the libraries that they launch kernels of.

Both are dependencies of a build alone (extras ``cuda`` and ``flashinfer``). They are found as files: a library's
Python package is never imported.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import importlib.util
import json
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from tokenspeed.compile.code_cache import CodeCache
from tokenspeed.errors import TargetError, UsageError
from tokenspeed.kernels.library import LibraryKernel
from tokenspeed.target import Target

MIN_NVCC = 13
"""Oldest major version of nvcc that the libraries' headers are known to compile with."""
_FLAGS = (
    "-O3", "-std=c++17", "--shared", "-DNDEBUG", "-DFLASHINFER_ENABLE_BF16", "--expt-relaxed-constexpr",
    "-Xcompiler=-fPIC,-fvisibility=hidden,-fno-lifetime-dse",
)  # fmt: skip
_MESSAGE_CHARS = 3000
_VERSION = re.compile(r"release (\d+)\.(\d+), V([\d.]+)")
_INCLUDE = re.compile(rb'^#include "([^"]+)"', re.MULTILINE)


@dataclass(frozen=True)
class Library:
    """A library of kernels: its distribution on PyPI, the versions that launchers were written for (a prefix), its
    package, and the folders of headers in it."""

    distribution: str
    version: str
    package: str
    include: tuple[str, ...]
    extra: str


LIBRARIES: Mapping[str, Library] = {
    # The second folder: FlashInfer comes with a CCCL newer than the CUDA toolkit's, and needs it.
    "flashinfer": Library(
        "flashinfer-python", "0.7.", "flashinfer", ("data/include", "data/cccl/libcudacxx/include"), "flashinfer"
    )
}


@dataclass(frozen=True)
class Headers:
    """Headers of an installed library: its version, and the folders."""

    version: str
    folders: tuple[Path, ...]


@dataclass(frozen=True)
class Nvcc:
    """An nvcc: the program, its version, and the root of its toolkit."""

    program: Path
    version: str

    @property
    def root(self) -> Path:
        return self.program.parent.parent


@dataclass(frozen=True)
class Launcher:
    """A compiled launcher: the key of all that it was made from, its shared object, and the device code in it."""

    key: str
    shared_object: bytes
    binary: bytes


def find_headers(library: str) -> Headers:
    """The headers of ``library``. Raises UsageError if it is not installed, or is another version."""
    want = LIBRARIES[library]
    hint = f"install it with `pip install 'tokenspeed[{want.extra}]'`"
    spec = importlib.util.find_spec(want.package)
    if spec is None or not spec.submodule_search_locations:
        raise UsageError(f"solution {library} needs {want.distribution}, which is not installed", hint=hint)
    try:
        version = importlib.metadata.version(want.distribution)
    except importlib.metadata.PackageNotFoundError:
        raise UsageError(f"solution {library} needs {want.distribution}, which is not installed", hint=hint) from None
    folders = tuple(Path(spec.submodule_search_locations[0]) / name for name in want.include)
    missing = next((folder for folder in folders if not folder.is_dir()), None)
    if missing is not None or not version.startswith(want.version):
        have = f"have {version}" if missing is None else f"have no {missing}"
        need = f"{want.distribution} {want.version}x with its headers"
        raise UsageError(f"solution {library} needs {need}, {have}", hint=hint)
    return Headers(version, folders)


def find_nvcc() -> Nvcc:
    """nvcc of CUDA_HOME, of PATH, or of the packages of extra ``cuda``. Raises UsageError if there is none."""
    found = ""
    for program in _nvcc_programs():
        printed = subprocess.run([program, "--version"], capture_output=True, text=True, check=False).stdout
        match = _VERSION.search(printed)
        if match and int(match[1]) >= MIN_NVCC:
            return Nvcc(program, match[3])
        found = f"{program} of release {match[1]}.{match[2]}" if match else f"{program}, which gives no version"
    raise UsageError(
        f"launchers of library kernels need nvcc {MIN_NVCC} or later, have {found or 'none'}",
        hint="install it with `pip install 'tokenspeed[cuda]'`, or put a CUDA toolkit's bin folder on PATH",
    )


def _nvcc_programs() -> Iterator[Path]:
    home = os.environ.get("CUDA_HOME")
    if home and (Path(home) / "bin" / "nvcc").is_file():
        yield Path(home) / "bin" / "nvcc"
    on_path = shutil.which("nvcc")
    if on_path is not None:
        yield Path(on_path).resolve()
    spec = importlib.util.find_spec("nvidia")
    for folder in spec.submodule_search_locations or () if spec is not None else ():
        yield from sorted(Path(folder).glob("cu*/bin/nvcc"), reverse=True)


class LauncherCompiler:
    """Compiles launchers for one target."""

    def __init__(self, target: Target, cache: Path | None):
        self._target = target
        self._store = None if cache is None else CodeCache(cache)
        self._headers: dict[str, Headers] = {}
        self._nvcc: Nvcc | None = None

    def key(self, kernel: LibraryKernel) -> str:
        """Digest of all that the kernel's launcher depends on: sources, library, constants, compiler, target."""
        headers = self._headers_of(kernel.library)
        nvcc = self._nvcc = self._nvcc or find_nvcc()
        sources = sorted((name, hashlib.sha256(text).hexdigest()) for name, text in _sources(kernel.source).items())
        facts = [headers.version, nvcc.version, sources, kernel.source, kernel.constants, str(self._target), _FLAGS]
        return hashlib.sha256(json.dumps(["launcher", *facts]).encode()).hexdigest()

    def compile(self, kernel: LibraryKernel) -> Launcher:
        """The launcher of ``kernel``. Raises UsageError without tools, TargetError if it does not compile."""
        key = self.key(kernel)
        data = None if self._store is None else self._store.read(key)
        if data is None:
            data = self._run_nvcc(kernel)
            if self._store is not None:
                self._store.write(key, data)
        size = int.from_bytes(data[:8], "little")
        return Launcher(key, data[8 : 8 + size], data[8 + size :])

    def _headers_of(self, library: str) -> Headers:
        if library not in self._headers:
            self._headers[library] = find_headers(library)
        return self._headers[library]

    def _run_nvcc(self, kernel: LibraryKernel) -> bytes:
        """Shared object and cubin of one run, in which nvcc keeps the cubin that it puts into the shared object."""
        assert self._nvcc is not None
        arch = self._target.arch.removeprefix("sm_")
        include = [f"-I{folder}" for folder in self._headers_of(kernel.library).folders]
        macros = [f"-D{name}={value}" for name, value in kernel.constants]
        with tempfile.TemporaryDirectory(prefix="tokenspeed-launcher-") as name:
            folder = Path(name)
            output = folder / "launcher.so"
            command = [
                str(self._nvcc.program), *_FLAGS, f"-gencode=arch=compute_{arch},code=sm_{arch}", *include, *macros,
                f"-L{self._nvcc.root / 'lib'}", "-keep", "-keep-dir", name, "-o", str(output),
                str(source_folder() / kernel.source),
            ]  # fmt: skip
            run = subprocess.run(command, capture_output=True, text=True, check=False, cwd=folder)
            cubins = [path for path in folder.glob("*.cubin") if not path.stem.endswith("_dlink")]
            if run.returncode or len(cubins) != 1:
                printed = (run.stderr + run.stdout).strip()[-_MESSAGE_CHARS:]
                raise TargetError(
                    f"launcher {kernel} of {kernel.source} does not compile for {self._target}:\n{printed}",
                    hint="choose another solution for this op with --solution",
                )
            shared_object = output.read_bytes()
            return len(shared_object).to_bytes(8, "little") + shared_object + cubins[0].read_bytes()


def source_folder() -> Path:
    """The folder kernels/, wherever it is installed."""
    spec = importlib.util.find_spec("tokenspeed.kernels")
    assert spec is not None and spec.submodule_search_locations
    return Path(next(iter(spec.submodule_search_locations)))


def _sources(name: str) -> dict[str, bytes]:
    """A launcher's source and our own headers that it includes, by path below kernels/."""
    found: dict[str, bytes] = {}
    waiting = [name]
    while waiting:
        path = waiting.pop()
        if path not in found:
            found[path] = (source_folder() / path).read_bytes()
            waiting += [str(Path(path).parent / i.decode()) for i in _INCLUDE.findall(found[path])]
    return found
