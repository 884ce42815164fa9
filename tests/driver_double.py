"""The C++ driver double (tests/cpp/gpu_double) for Python: built once, in place of the system's."""

from __future__ import annotations

import ctypes
import os
import re
import shutil
import subprocess
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tokenspeed import _native
from tokenspeed.artifact import Artifact, TargetSection
from tokenspeed.device_code import read_device_code

ROOT = Path(__file__).resolve().parent.parent
KERNEL = ctypes.CFUNCTYPE(None, ctypes.POINTER(ctypes.c_void_p))


@KERNEL
def _nothing(parameters: Any) -> None:
    """What every kernel of the double does."""


def build_double(folder: Path) -> Path:
    """Compile CUDA's double into ``folder``; returns the library."""
    compiler = shutil.which(os.environ.get("CXX", "g++")) or shutil.which("c++")
    if compiler is None:
        pytest.fail("need a C++20 compiler to build the driver for tests: set CXX or install g++")
    library = folder / "libgpu_double_cuda.so"
    sources = [ROOT / "tests" / "cpp" / "gpu_double" / f"{name}.cpp" for name in ("gpu_double", "cuda_double")]
    command = [compiler, "-std=c++20", "-O0", "-shared", "-fPIC", "-I", ROOT / "csrc", *sources, "-o", library]
    subprocess.run([*command, "-lpthread"], check=True)
    return library


class DriverDouble:
    """One GPU of the double, in place of this machine's, until the test is over."""

    def __init__(self, library: Path, monkeypatch: pytest.MonkeyPatch):
        self._double = ctypes.CDLL(str(library))
        self._double.double_log.restype = ctypes.c_char_p
        self._double.double_reset()
        self.device()
        for name in ("GpuDevice", "GpuContext", "gpu_devices"):
            monkeypatch.setattr(_native, name, partial(getattr(_native, name), library=str(library)))

    def device(self, *, driver_version: int = 13000, memory_bytes: int = 8 << 30) -> None:
        self._double.double_device(b"9.0", driver_version, ctypes.c_uint64(memory_bytes))

    def fail(self, entry: str, nth: int, code: int) -> None:
        """Let call number ``nth`` from here on of ``entry`` fail."""
        self._double.double_fail(entry.encode(), nth, code)

    def know(self, artifact: Artifact, section: TargetSection) -> None:
        """Tell the driver the parameters of the artifact's kernels, as a real one reads them from the binaries."""
        for entry in section.binaries:
            for symbol, info in read_device_code(artifact.read(entry.file)).kernels.items():
                sizes = [size for _, size in info.params]
                array = (ctypes.c_size_t * len(sizes))(*sizes)
                self._double.double_kernel(symbol.encode(), _nothing, array, ctypes.c_size_t(len(sizes)))

    def calls(self, pattern: str = ".") -> list[str]:
        """The calls so far that begin with a match of ``pattern``."""
        return [line for line in self._double.double_log().decode().splitlines() if re.match(pattern, line)]
