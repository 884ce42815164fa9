"""Rotary embedding of q and k, and the write of k and v into their KV pages: one pass over the qkv projection.

Each element is computed alone, so every grid gives the same bits. Rotation pairs the halves of a head: (a, b) ->
(a cos - b sin, b cos + a sin), in float32, rounded once to the artifact dtype.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import triton
import triton.language as tl

from tokenspeed.kernels.registry import (
    DTYPES_TRITON,
    AtMost,
    KernelSpec,
    MultipleOf,
    Request,
    Stage,
    device_stage,
)
from tokenspeed.kernels.triton.common import pdl_wait, starts_next_early, vector_spec


@triton.jit
def rope_kv_write(qkv, rope_table, positions, slot_mapping, kv, q, step_sizes, NQ: tl.constexpr, NKV: tl.constexpr,
                  D: tl.constexpr, PAGE_SIZE: tl.constexpr, PAGE_STRIDE: tl.constexpr, BLOCK_T: tl.constexpr,
                  BLOCK_HEADS: tl.constexpr, BLOCK_HALF: tl.constexpr, PDL: tl.constexpr):  # fmt: skip
    """BLOCK_T tokens times BLOCK_HEADS heads. Grid (token tiles, head tiles of NQ + 2 NKV).

    qkv float32 [T][(NQ + 2 NKV) D]: q heads, k heads, v heads; rope_table float32 [max_model_len][D]: D / 2 cosines,
    then D / 2 sines; positions int32 [T]; slot_mapping int64 [T]; q [T][NQ D]. A page holds K [NKV][PAGE_SIZE][D],
    then V; ``kv`` is page 0 of this layer, and pages are PAGE_STRIDE bytes apart. Loads come before stores, so that
    no load waits for one.
    """
    num_tokens = tl.load(step_sizes)
    token = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    head = tl.program_id(1) * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)[None, :, None]
    i = tl.arange(0, BLOCK_HALF)[None, None, :]
    known = token < num_tokens
    position = tl.load(positions + token, mask=known, other=0).to(tl.int64)[:, None, None]
    slot = tl.load(slot_mapping + token, mask=known, other=0)[:, None, None]
    half: tl.constexpr = D // 2
    row = known[:, None, None] & (i < half)
    cos = tl.load(rope_table + position * D + i, mask=row, other=0.0)
    sin = tl.load(rope_table + position * D + half + i, mask=row, other=0.0)
    pdl_wait(PDL)

    mask = row & (head < NQ + 2 * NKV)
    token = token.to(tl.int64)[:, None, None]
    source = qkv + token * ((NQ + 2 * NKV) * D) + head * D + i
    a = tl.load(source, mask=mask, other=0.0)
    b = tl.load(source + half, mask=mask, other=0.0)
    is_q, is_v = head < NQ, head >= NQ + NKV
    first = tl.where(is_v, a, a * cos - b * sin).to(q.dtype.element_ty)
    second = tl.where(is_v, b, b * cos + a * sin).to(q.dtype.element_ty)

    target = q + token * (NQ * D) + head * D + i
    tl.store(target, first, mask=mask & is_q)
    tl.store(target + half, second, mask=mask & is_q)
    elements: tl.constexpr = PAGE_STRIDE // (kv.dtype.element_ty.primitive_bitwidth // 8)
    # K heads, then V heads: head - NQ counts the page's runs of [PAGE_SIZE][D].
    target = kv + slot // PAGE_SIZE * elements + (slot % PAGE_SIZE + (head - NQ).to(tl.int64) * PAGE_SIZE) * D + i
    tl.store(target, first, mask=mask & (head >= NQ))
    tl.store(target + half, second, mask=mask & (head >= NQ))


def tile(sizes: Mapping[str, int]) -> tuple[int, int, int]:
    """(tokens, heads, warps) of a program: small steps spread over many programs, large ones share the table's rows.

    Sizes: M tokens of the bucket, head_dim. About eight pairs per thread once there is work for every processor.
    """
    if sizes["M"] <= 16:
        return 1, 1, 1
    heads = 512 // sizes["head_dim"]
    return (4 if sizes["M"] <= 1024 else 8), min(1 << (heads.bit_length() - 1), 8), 4


def stages(request: Request) -> tuple[Stage, ...]:
    """One launch."""
    sizes, dtype = request.sizes, DTYPES_TRITON[request.dtype]
    block_t, block_heads, warps = tile(sizes)
    heads = sizes["num_heads"] + 2 * sizes["num_kv_heads"]
    return (
        device_stage(
            module=__name__,
            function=rope_kv_write,
            arguments="read qkv, read rope_table, read positions, read slot_mapping, write kv, write q, "
            "sizes step_sizes",
            types=f"*fp32, *fp32, *i32, *i64, *{dtype}, *{dtype}, *i32",
            constants={
                "NQ": sizes["num_heads"], "NKV": sizes["num_kv_heads"], "D": sizes["head_dim"],
                "PAGE_SIZE": sizes["page_size"], "PAGE_STRIDE": sizes["page_stride"], "BLOCK_T": block_t,
                "BLOCK_HEADS": block_heads, "BLOCK_HALF": 1 << (sizes["head_dim"] // 2 - 1).bit_length(),
            },
            num_warps=warps,
            num_stages=1,
            grid=(-(-sizes["M"] // block_t), -(-heads // block_heads), 1),
            target=request.target,
            early=starts_next_early(sizes),
        ),
    )  # fmt: skip


def specs() -> Iterator[KernelSpec]:
    """rope_kv_write for every GPU."""
    yield vector_spec(
        "rope_kv_write",
        "triton_rope_kv_write",
        stages,
        constraints=(MultipleOf("head_dim", 16), AtMost("head_dim", 256), MultipleOf("page_size", 32)),
        weight_layout="rows",
    )
