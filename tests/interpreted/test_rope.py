"""Rotary embedding and KV write in the Triton interpreter."""

# mypy: allow-untyped-calls
from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
from harness import run
from numpy.typing import NDArray

from tokenspeed.compile.codegen import compile_kernels
from tokenspeed.kernels.registry import Request
from tokenspeed.kernels.triton.rope import rope_kv_write, specs
from tokenspeed.target import GPU_TARGETS, Target

POISON = 77.0
SHAPES = [(3, 1, 16), (9, 3, 64), (4, 4, 80), (2, 2, 256)]


def sizes(heads: int, kv_heads: int, head_dim: int, tokens: int, page_size: int, stride: int) -> dict[str, int]:
    return {"num_heads": heads, "num_kv_heads": kv_heads, "head_dim": head_dim, "page_size": page_size,
            "page_stride": stride, "pages_per_seq": 4, "split_positions": 1024, "num_tokens": tokens,
            "num_seqs": 1, "num_logit_rows": 1, "rows": 0, "M": tokens}  # fmt: skip


def rotated(x: NDArray[np.float32], table: NDArray[np.float32]) -> NDArray[np.float32]:
    """float32 [tokens, heads, head_dim] by the rule of the op ``rope``."""
    half = x.shape[-1] // 2
    cos, sin, a, b = table[:, None, :half], table[:, None, half:], x[..., :half], x[..., half:]
    return np.concatenate([a * cos - b * sin, b * cos + a * sin], -1)


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim", "bucket", "tokens"),
    [(*shape, *step) for shape in SHAPES for step in ((1, 1), (16, 11), (40, 33))] + [(4, 4, 80, 1032, 5)],
)
def test_rotates_and_writes_pages(
    dtype: Any, heads: int, kv_heads: int, head_dim: int, bucket: int, tokens: int
) -> None:
    """Against NumPy, to the last bit, with the tiles of the bucket's spec; nothing else is written."""
    rng = np.random.default_rng(bucket)
    page_size, pages, max_len = 32, 4, 300
    kv = np.full((pages, 2, 2, kv_heads, page_size, head_dim), POISON, dtype)
    qkv = np.full((bucket, heads + 2 * kv_heads, head_dim), np.nan, np.float32)
    qkv[:tokens] = rng.standard_normal(qkv[:tokens].shape)
    table = rng.standard_normal((max_len, head_dim)).astype(np.float32)
    positions, slots = np.full(bucket, 1 << 30, np.int32), np.full(bucket, 1 << 60, np.int64)
    positions[:tokens] = rng.integers(0, max_len, tokens)
    slots[:tokens] = rng.permutation(pages * page_size)[:tokens]
    q = np.full((bucket, heads, head_dim), POISON, dtype)
    (spec,) = specs()
    name = "float32" if dtype is np.float32 else "bfloat16"
    request = Request(spec.op, Target.parse("hip:gfx942"), name,
                      sizes(heads, kv_heads, head_dim, bucket, page_size, kv[0].nbytes))  # fmt: skip
    (stage,) = spec.stages(request)
    assert stage.kernel is not None
    layer = kv[0, 0].size
    given = {"qkv": qkv, "rope_table": table, "positions": positions, "slot_mapping": slots,
             "kv": kv.reshape(-1)[layer:], "q": q, "step_sizes": np.array([tokens, 1, 1, 0], np.int32)}  # fmt: skip
    run(rope_kv_write, stage.grid, given, dict(stage.kernel.constants), outputs={"kv", "q"}, seed=bucket)

    keys = rotated(qkv[:tokens, : heads + kv_heads], table[positions[:tokens]]).astype(dtype)
    assert np.array_equal(q[:tokens], keys[:, :heads])
    assert (q[tokens:] == POISON).all()
    want = np.full(kv.shape, POISON, dtype)
    page, at = np.divmod(slots[:tokens], page_size)
    want[page, 1, 0, :, at] = keys[:, heads:]
    want[page, 1, 1, :, at] = qkv[:tokens, heads + kv_heads :].astype(dtype)
    assert np.array_equal(kv, want)


def test_compiles_for_every_target_without_spilling() -> None:
    (spec,) = specs()
    jobs = []
    for target in map(Target.parse, GPU_TARGETS):
        for tokens, dtype in ((1, "float32"), (256, "bfloat16"), (8192, "bfloat16")):
            request = Request(spec.op, target, dtype, sizes(32, 8, 128, tokens, 64, 1 << 22))
            (stage,) = spec.stages(request)
            assert stage.kernel is not None
            jobs.append((stage.kernel, target))
    compiled = compile_kernels(jobs, workers=2)
    assert len(compiled) == len(jobs)
    assert all(code.info.stack_bytes == 0 for code in compiled.values())
