"""The kernel that reads memory, under the interpreter, and the launches that measure a GPU."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import numpy as np
from harness import run

from tokenspeed.bucket import StepLimits
from tokenspeed.compile.ceilings import MOST_READ_BYTES, REPEATS, plan_ceilings
from tokenspeed.compile.codegen import compile_kernels
from tokenspeed.compile.layout import Layout
from tokenspeed.graph import Access, Pointer, Region
from tokenspeed.kernels.triton import ceiling
from tokenspeed.kernels.triton_specs import triton_registry
from tokenspeed.target import GPU_TARGETS, Target

H200 = Target("cuda", "sm_90a")


def layout(weights_bytes: int, arena_bytes: int, tokens: int) -> Layout:
    """What plan_ceilings asks of a Layout."""
    sizes = Pointer(Region.IO, 0, 16, Access.READ)
    stand_in = SimpleNamespace(
        weights_bytes=weights_bytes,
        arena=SimpleNamespace(nbytes=arena_bytes),
        limits=StepLimits(tokens, 256, 256),
        step_sizes=lambda: sizes,
    )
    return cast("Layout", cast("Any", stand_in))


def test_every_item_of_a_chunk_counts_once() -> None:
    x = np.random.default_rng(0).integers(-(2**31), 2**31, 3 * 512, dtype=np.int64).astype(np.int32)
    sums = np.zeros(3, np.int32)
    run(ceiling.read_chunks, (3,), {"x": x, "sums": sums}, {"CHUNK": 512, "BLOCK": 128}, outputs=["sums"])
    np.testing.assert_array_equal(sums, x.reshape(3, 512).sum(1, dtype=np.int32))


def test_a_large_model_has_both() -> None:
    read, matmul = plan_ceilings(H200, "bfloat16", layout(15 << 30, 1 << 30, 8192), triton_registry())
    assert (read.kind, read.work, read.num_tokens) == ("read", MOST_READ_BYTES, 1)
    assert read.arguments[0] == Pointer(Region.WEIGHTS, 0, MOST_READ_BYTES, Access.READ)
    assert read.stage.grid == (MOST_READ_BYTES // (4 * ceiling.CHUNK), 1, 1)
    assert (matmul.kind, matmul.work, matmul.num_tokens) == ("matmul", 2 * 8192**3, 8192)
    assert matmul.arguments[2] == Pointer(Region.ARENA, 0, 8192 * 8192 * 4, Access.WRITE)
    need = matmul.stage.scratch_bytes  # the kernel of so many rows builds tensor maps: each launch has its own
    assert need and len(matmul.scratch) == REPEATS
    starts = [8192 * 8192 * 4, *(pointer.offset + need for pointer in matmul.scratch)]
    assert all(pointer.offset >= start for pointer, start in zip(matmul.scratch, starts, strict=False))
    assert starts[-1] <= 1 << 30


def test_regions_limit_what_is_measured() -> None:
    registry = triton_registry()
    (matmul,) = plan_ceilings(H200, "bfloat16", layout(127 << 20, 96 << 20, 2048), registry)  # weights lie in caches
    assert matmul.work == 2 * 2048 * 4096**2  # 8192 x 8192 of bfloat16 would be 128 MiB
    read, matmul = plan_ceilings(H200, "bfloat16", layout(257 << 20, 100 << 20, 8192), registry)
    assert 0 <= (257 << 20) - read.work < 4 * ceiling.CHUNK
    assert matmul.num_tokens == 3072 and matmul.arguments[2].extent <= 100 << 20  # type: ignore[union-attr]
    assert [c.kind for c in plan_ceilings(H200, "float32", layout(1 << 30, 1 << 30, 8192), registry)] == ["read"]
    assert plan_ceilings(H200, "bfloat16", layout(1 << 20, 1 << 20, 256), registry) == ()
    assert plan_ceilings(Target.parse("cpu:x86-64-v3"), "bfloat16", layout(15 << 30, 1 << 30, 8192), registry) == ()


def test_compiles_for_every_target_without_spilling() -> None:
    jobs = []
    for target in map(Target.parse, GPU_TARGETS):
        stage, nbytes = ceiling.read_stage(target, 1 << 28)
        assert nbytes == 1 << 28 and stage.kernel is not None
        jobs.append((stage.kernel, target))
    compiled = compile_kernels(jobs, workers=2)
    assert len(compiled) == len(GPU_TARGETS)
    assert all(code.info.stack_bytes == 0 for code in compiled.values())
