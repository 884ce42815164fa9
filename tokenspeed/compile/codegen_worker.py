"""One compiling process: jobs come in as lines of JSON on stdin, answers leave as lines of JSON on stdout.

codegen.py starts it with an environment of its own making, because Triton takes dozens of settings from there; a
process per worker also means that a crash of the compiler (LLVM aborts on what it cannot select) is one job's
error.

Equal jobs give equal bytes. Binaries hold no paths, times or line numbers; Python's hashes are fixed; and because
ptxas decides between equally good registers by the addresses of its own data (seen on Blackwell kernels), it is run
with address randomization off, without environment, and on files whose names never change.
"""

from __future__ import annotations

import base64
import ctypes
import hashlib
import importlib
import importlib.metadata
import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tokenspeed.compile.code_cache import CodeCache
from tokenspeed.kernels.registry import DeviceKernel
from tokenspeed.target import Target

_MAX_TENSOR_MEMORY = 512  # columns of Blackwell's tensor memory
_NO_RANDOMIZATION = 0x0040000  # ADDR_NO_RANDOMIZE of <sys/personality.h>
_ASK_ONLY = 0xFFFFFFFF


def kernel_json(kernel: DeviceKernel, target: Target) -> dict[str, Any]:
    """All that a binary depends on but for sources and compiler, as plain values."""
    return {**vars(kernel), "target": str(target)}


def content(symbol: str, threads: int, shared_bytes: int, binary: bytes) -> bytes:
    """What the cache keeps of a compiled kernel, and a worker answers with."""
    facts = {"symbol": symbol, "threads": threads, "shared_bytes": shared_bytes}
    return json.dumps(facts).encode() + b"\n" + binary


def parse_content(data: bytes) -> tuple[str, int, int, bytes]:
    """(symbol, threads of a block, dynamic shared memory, binary) of ``content``."""
    facts, _, binary = data.partition(b"\n")
    values = json.loads(facts)
    return values["symbol"], values["threads"], values["shared_bytes"], binary


def worker_digest() -> str:
    """Digest of this file: what it changes about compilation must miss the cache."""
    return hashlib.sha256(Path(__file__).read_bytes()).hexdigest()


def main() -> None:
    """Answer jobs until stdin ends."""
    _fix_addresses()
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # compilers print; only answers go to the real stdout
    for line in sys.stdin:
        try:
            answer = _answer(json.loads(line))
        except Exception as e:
            answer = {"error": f"{type(e).__name__}: {e}"}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


def _fix_addresses() -> None:
    """Start this process again with address randomization off, which children inherit. Where that is forbidden (by
    the default rules of some containers), ptxas may choose other registers from run to run."""
    if sys.platform == "linux":
        personality = ctypes.CDLL(None).personality
        have = personality(ctypes.c_ulong(_ASK_ONLY))
        fixed = have < 0 or have & _NO_RANDOMIZATION
        if not fixed and personality(ctypes.c_ulong(have | _NO_RANDOMIZATION)) >= 0:
            os.execv(sys.executable, sys.orig_argv)


def _answer(job: dict[str, Any]) -> dict[str, Any]:
    cache = job.pop("cache")
    target = Target.parse(job.pop("target"))
    signature = tuple((name, kind) for name, kind in job.pop("signature"))
    constants = tuple((name, tuple(v) if isinstance(v, list) else v) for name, v in job.pop("constants"))
    kernel = DeviceKernel(signature=signature, constants=constants, **job)
    function = getattr(importlib.import_module(kernel.module), kernel.function)
    key = _content_key(function, kernel, target)
    store = None if cache is None else CodeCache(Path(cache))
    data = None if store is None else store.read(key)
    if data is None:
        data = _compile(function, kernel, target)
        if store is not None:
            store.write(key, data)
    return {"key": key, "content": base64.b64encode(data).decode()}


def _content_key(function: Any, kernel: DeviceKernel, target: Target) -> str:
    """Digest of what the binary depends on. Triton's own key covers the source of the function and of all that it
    calls; the values of global constants are added because that key misses those that are merely annotated."""
    source = function.cache_key
    constants = sorted((name, repr(value)) for (name, _), (value, _) in function.used_global_vals.items())
    compiler = (importlib.metadata.version("triton"), worker_digest())
    parts = ["content", source, constants, kernel_json(kernel, target), compiler]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


def _compile(function: Any, kernel: DeviceKernel, target: Target) -> bytes:
    from triton import compiler, knobs
    from triton.backends.compiler import GPUTarget
    from triton.experimental.gluon._runtime import GluonASTSource

    gpu = target.gpu
    types, constants = dict(kernel.signature), dict(kernel.constants)
    names = function.arg_names
    if types.keys() & constants.keys() or types.keys() | constants.keys() != set(names):
        raise ValueError(f"need types or constants for {', '.join(names)}, have {[*types, *constants]}")
    source = (GluonASTSource if function.is_gluon() else compiler.ASTSource)(
        function,
        signature={name: types.get(name, "constexpr") for name in names},
        constexprs={(names.index(name),): value for name, value in constants.items()},
        attrs={(names.index(n),): [["tt.divisibility", 16]] for n, kind in types.items() if kind.startswith("*")},
    )
    options: dict[str, int | bool] = {
        "num_warps": kernel.num_warps, "num_stages": kernel.num_stages, "enable_fp_fusion": False,
    }  # fmt: skip
    if kernel.max_registers:
        options["maxnreg"] = kernel.max_registers
    if target.backend == "cuda":
        options["launch_pdl"] = bool(constants.get("PDL", False))
        knobs.runtime.add_stages_inspection_hook = _replace_assembler
    arch = GPUTarget(target.backend, gpu.compiler_arch, gpu.warp_size)
    compiled = compiler.compile(source, target=arch, options=options)
    facts: Mapping[str, Any] = compiled.metadata._asdict()
    for scratch, need in (("global_scratch_size", kernel.scratch_bytes), ("profile_scratch_size", 0)):
        if (facts.get(scratch) or 0) != need:
            raise ValueError(f"need a kernel with {need} bytes of scratch memory, have {facts[scratch]} ({scratch})")
    if (facts.get("tmem_size") or 0) > _MAX_TENSOR_MEMORY:
        raise ValueError(f"need at most {_MAX_TENSOR_MEMORY} columns of tensor memory, have {facts['tmem_size']}")
    threads = facts["num_warps"] * gpu.warp_size
    return content(facts["name"], threads, facts["shared"], compiled.asm[gpu.binary_suffix])


def _replace_assembler(backend: Any, stages: dict[str, Any], *_: object) -> None:
    """A hook of Triton's: the last stage of compilation for CUDA is done here."""
    if "cubin" in stages:
        stages["cubin"] = lambda ptx, _: _assemble(ptx, backend.target.arch)


def _assemble(ptx: str, capability: int) -> bytes:
    """The cubin of ``ptx``. Multiplications and additions are fused only where the kernel says so."""
    from triton.backends.nvidia.compiler import get_ptxas, sm_arch_from_capability

    folder = Path(os.environ["TMPDIR"])
    (folder / "kernel.ptx").write_text(ptx)
    arch = sm_arch_from_capability(capability)
    line = ["ptxas", "--fmad=false", f"--gpu-name={arch}", "kernel.ptx", "-o", "kernel.cubin"]
    ran = subprocess.run(line, executable=get_ptxas(capability).path, cwd=folder, env={}, capture_output=True)
    if ran.returncode != 0:
        raise ValueError(
            f"ptxas ended with status {ran.returncode}: {(ran.stdout + ran.stderr).decode(errors='replace')}"
        )
    return (folder / "kernel.cubin").read_bytes()


if __name__ == "__main__":
    main()
