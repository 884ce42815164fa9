"""Compiles the kernels that the benchmarks time, in parallel, before the device is touched."""

from __future__ import annotations

import time
from collections.abc import Iterable
from multiprocessing.pool import Pool
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from tokenspeed.kernels.triton import linear
from tokenspeed.kernels.triton.linear_config import Config
from tokenspeed.target import Target

HOPPER = Target("cuda", "sm_90a")

Key = tuple[str, int, int, Config]
"""op, N, K, tile shape: one compiled kernel."""


def compile_kernel(key: Key) -> Any:
    """The compiled kernel of ``key``, from Triton's cache if it is there."""
    op, n, k, config = key
    fn = getattr(linear, op)
    constants: dict[str, Any] = {"N": n, "K": k, "ROWS": 0, "PDL": True, **config.constants(HOPPER)}
    if op == "linear_silu_mul":
        constants["F"] = n // 2
    out = "*bf16" if op == "linear_silu_mul" else "*fp32"
    types = {"x": "*bf16", "weight": "*bf16", "residual": "*fp32", "out": out, "step_sizes": "*i32"}
    return compile_source(fn, types, constants, config.num_warps, config.num_stages)


def compile_source(fn: Any, types: dict[str, str], constants: dict[str, Any], warps: int, stages: int) -> Any:
    names = fn.arg_names
    signature = {name: types.get(name, "constexpr") for name in names}
    values = {(names.index(name),): value for name, value in constants.items()}
    aligned = {(i,): [["tt.divisibility", 16]] for i, name in enumerate(names) if name in types}
    options = {"num_warps": warps, "num_stages": stages, "enable_fp_fusion": False, "launch_pdl": True}
    compiled = triton.compile(
        ASTSource(fn, signature, values, aligned), target=GPUTarget("cuda", 90, 32), options=options
    )
    return compiled


def _try_compile(key: Key) -> str:
    try:
        compile_kernel(key)
        return ""
    except Exception as error:
        return f"{key[0]} {key[1]}x{key[2]} {key[3]}: {type(error).__name__}: {str(error)[:200]}"


def compile_all(pool: Pool, keys: Iterable[Key]) -> set[Key]:
    """Fill Triton's cache; returns the keys that compile and prints why the others do not."""
    unique = sorted(set(keys))
    start = time.perf_counter()
    problems = pool.map(_try_compile, unique, chunksize=4)
    for problem in filter(None, problems):
        print("cannot compile:", problem)
    print(f"compiled {len(unique)} kernels in {time.perf_counter() - start:.0f} s", flush=True)
    return {key for key, problem in zip(unique, problems, strict=True) if not problem}
