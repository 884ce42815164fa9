"""Paged causal attention: one kernel for prefill chunks, and two ways to compute sequences of a single token.

Arithmetic of one row (a token and a q head), the same wherever it is computed, so that its bits are too:

- Positions are taken in tiles of KV_TILE, from 0. Scores are ``q . k`` accumulated in float32 by the matrix unit.
- Softmax is online, in base 2: ``m`` is the greatest ``score * scale * log2(e)`` so far, ``p = 2^(score * scale *
  log2(e) - m)`` with one fused multiply-add, rounded to the artifact dtype; ``O = O * 2^(m_old - m) + p V``.
- The row sum is a matrix product too: ``l = l * 2^(m_old - m) + p 1``. A sum over lanes would follow the register
  layout, hence the tile shape and the number of warps; on Hopper a matrix product does not (benchmarks/gpu/
  bench_attention.py measures it). A maximum has no order.
- (m, l, O) starts afresh at every multiple of SPLIT, and splits are merged in ascending order (``_merge``), so a
  split may be computed by anyone. Merging into the empty state is exact, and so is a tile that a row does not see.
- The result is ``O / l``, rounded once.

Operands: q [T][NQ D], K and V pages as rope.py writes them, cu_seqlens int32 [S+1], context_lens int32 [S],
page_table int32 [S][PAGES_PER_SEQ], out [T][NQ D], step_sizes int32 [4]. They are read before pdl_wait where no
kernel writes them. A page holds K [NKV][PAGE_SIZE][D], then V, and pages are PAGE_STRIDE bytes apart; positions at
and beyond context_lens may hold NaN.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import triton
import triton.language as tl

from tokenspeed.kernels.registry import (
    DTYPES_TRITON,
    AtMost,
    Band,
    KernelSpec,
    MultipleOf,
    Request,
    Stage,
    device_stage,
)
from tokenspeed.kernels.triton.common import FEATURES, dot, pdl_wait, starts_next_early
from tokenspeed.target import GPU_TARGETS, Target

LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def _merge(m, sums, acc, m_next, l_next, acc_next):
    """The state of two runs of positions: (m, sums, acc) and the run after it. [rows], [rows], [rows, D]."""
    top = tl.maximum(m, m_next)
    shift = tl.where(top == float("-inf"), 0.0, top)
    old, new = tl.exp2(m - shift), tl.exp2(m_next - shift)
    acc = tl.fma(acc, tl.broadcast_to(old[:, None], acc.shape), acc_next * new[:, None])
    return top, tl.fma(sums, old, l_next * new), acc


@triton.jit
def _start(BLOCK_M: tl.constexpr, WIDTH: tl.constexpr):
    """The state of no positions: greatest score, row sum (in each of WIDTH columns)."""
    return tl.full((BLOCK_M,), float("-inf"), tl.float32), tl.zeros((BLOCK_M, WIDTH), tl.float32)


@triton.jit
def _load_heads(q, tokens, heads, mask, NQ: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr):
    """[rows, BLOCK_D] of q (or pointers like it): row i is head ``heads[i]`` of token ``tokens[i]``."""
    d = tl.arange(0, BLOCK_D)
    pointers = q + (tokens.to(tl.int64) * (NQ * D) + heads * D)[:, None] + d[None, :]
    return tl.load(pointers, mask=mask[:, None] & (d < D)[None, :], other=0.0)


@triton.jit
def _store_heads(out, value, tokens, heads, mask, NQ: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr):
    d = tl.arange(0, BLOCK_D)
    pointers = out + (tokens.to(tl.int64) * (NQ * D) + heads * D)[:, None] + d[None, :]
    tl.store(pointers, value.to(out.dtype.element_ty), mask=mask[:, None] & (d < D)[None, :])


@triton.jit
def _attend(q, kv_head, page, start, limit, positions, scale, m, sums, acc, MASKED: tl.constexpr, NKV: tl.constexpr,
            D: tl.constexpr, PAGE_SIZE: tl.constexpr, PAGE_STRIDE: tl.constexpr, KV_TILE: tl.constexpr,
            BLOCK_D: tl.constexpr):  # fmt: skip
    """Add the positions [start, start + KV_TILE), which lie in one page, to the state of the rows of q.

    MASKED: row i sees positions up to ``positions[i]``, and only those below ``limit`` hold data; otherwise every
    row sees the whole tile. ``kv_head`` points to the K of this head in page 0; ``scale`` is in units of log2.
    """
    n, d = tl.arange(0, KV_TILE), tl.arange(0, BLOCK_D)
    elements: tl.constexpr = PAGE_STRIDE // (kv_head.dtype.element_ty.primitive_bitwidth // 8)
    k_tile = kv_head + page.to(tl.int64) * elements + (start % PAGE_SIZE) * D + n[:, None] * D + d[None, :]
    v_tile = k_tile + NKV * PAGE_SIZE * D
    inside = (d < D)[None, :]
    k = tl.load(k_tile) if BLOCK_D == D else tl.load(k_tile, mask=inside, other=0.0)
    scores = dot(q, tl.trans(k), tl.zeros((q.shape[0], KV_TILE), tl.float32))
    if MASKED:
        scores = tl.where((start + n)[None, :] <= positions[:, None], scores, float("-inf"))
        v = tl.load(v_tile, mask=(start + n < limit)[:, None] & inside, other=0.0)
    elif BLOCK_D == D:
        v = tl.load(v_tile)
    else:
        v = tl.load(v_tile, mask=inside, other=0.0)
    top = tl.maximum(m, tl.max(scores, 1) * scale)
    shift = tl.where(top == float("-inf"), 0.0, top) if MASKED else top
    scales, shifts = tl.full(scores.shape, scale, tl.float32), tl.broadcast_to(-shift[:, None], scores.shape)
    p = tl.exp2(tl.fma(scores, scales, shifts)).to(v.dtype)
    decay = tl.exp2(m - shift)[:, None]
    ones = tl.full((KV_TILE, sums.shape[1]), 1.0, tl.float32).to(v.dtype)
    sums = dot(p, ones, sums * decay)
    return top, sums, dot(p, v, acc * decay)


@triton.jit
def _page(pages, position, stop, PAGE_SIZE: tl.constexpr):
    """The page of ``position``, or any number if that is not below ``stop``. Loops ask one tile ahead: a load that
    waits for another load in the same turn would hold up the pipeline."""
    return tl.load(pages + position // PAGE_SIZE, mask=position < stop, other=0)


@triton.jit
def _walk(q, kv_head, pages, start, stop, limit, positions, scale, m, sums, acc, m_all, l_all, acc_all,
          MASKED: tl.constexpr, NKV: tl.constexpr, D: tl.constexpr, PAGE_SIZE: tl.constexpr,
          PAGE_STRIDE: tl.constexpr, SPLIT: tl.constexpr, KV_TILE: tl.constexpr, BLOCK_D: tl.constexpr):  # fmt: skip
    """Add the tiles of [start, stop). (m, sums, acc) is the state of the split at hand, ``_all`` that of all before."""
    page = _page(pages, start, stop, PAGE_SIZE)
    for tile in tl.range(start, stop, KV_TILE):
        page_ahead = _page(pages, tile + KV_TILE, stop, PAGE_SIZE)
        if tile % SPLIT == 0:
            m_all, l_all, acc_all = _merge(m_all, l_all, acc_all, m, tl.max(sums, 1), acc)
            m, sums = _start(m.shape[0], sums.shape[1])
            acc = tl.zeros(acc.shape, tl.float32)
        m, sums, acc = _attend(q, kv_head, page, tile, limit, positions, scale, m, sums, acc, MASKED, NKV, D, PAGE_SIZE,
                            PAGE_STRIDE, KV_TILE, BLOCK_D)  # fmt: skip
        page = page_ahead
    return m, sums, acc, m_all, l_all, acc_all


@triton.jit
def _find_tile(cu_seqlens, tile, num_seqs, TOKENS: tl.constexpr, SEQS: tl.constexpr):
    """The sequence of a query tile, and the tile's number in it: one beyond the sequence's end, or below 0 where
    there is no such tile.

    Sequence i starts at tile ``cu_seqlens[i] // TOKENS + i``: later by at least the tiles of sequence i - 1, since
    floor(b) - floor(a) + 1 >= ceil(b - a). So a count of starts finds it, with no running sum.
    """
    i = tl.arange(0, SEQS)
    starts = tl.load(cu_seqlens + i, mask=i < num_seqs, other=0) // TOKENS + i
    seq = tl.maximum(tl.sum(((i < num_seqs) & (starts <= tile)).to(tl.int32)) - 1, 0)
    return seq, tile - tl.load(cu_seqlens + seq) // TOKENS - seq


@triton.jit
def paged_attention_chunk(q, kv, cu_seqlens, context_lens, page_table, out, step_sizes, scale, NQ: tl.constexpr,
                          NKV: tl.constexpr, D: tl.constexpr, PAGE_SIZE: tl.constexpr, PAGE_STRIDE: tl.constexpr,
                          PAGES_PER_SEQ: tl.constexpr, SPLIT: tl.constexpr, KV_TILE: tl.constexpr,
                          BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr, WIDTH: tl.constexpr, SEQS: tl.constexpr,
                          PDL: tl.constexpr):  # fmt: skip
    """Rows of the sequences that have more than one token in the step. Grid (query tiles, NKV).

    A tile is TOKENS tokens times the q heads of one KV head, so K and V are loaded once for all of them. The last
    tiles see the most positions and start first.
    """
    group: tl.constexpr = NQ // NKV
    tokens: tl.constexpr = BLOCK_M // group
    num_tokens, num_seqs = tl.load(step_sizes), tl.load(step_sizes + 1)
    tile = num_tokens // tokens + num_seqs - 1 - tl.program_id(0)
    seq, number = _find_tile(cu_seqlens, tile, num_seqs, tokens, SEQS)
    first = tl.load(cu_seqlens + seq)
    length = tl.load(cu_seqlens + seq + 1) - first
    base = tl.load(context_lens + seq) - length
    pdl_wait(PDL)
    if (number >= 0) & (number * tokens < length) & (length > 1):
        row, head = tl.arange(0, BLOCK_M), tl.program_id(1)
        token = number * tokens + row // group
        heads = head * group + row % group
        mask = (row < tokens * group) & (token < length)
        queries = _load_heads(q, first + token, heads, mask, NQ, D, BLOCK_D)
        limit = base + tl.minimum((number + 1) * tokens, length)
        whole = (base + number * tokens + 1) // KV_TILE * KV_TILE
        kv_head, pages = kv + head * (PAGE_SIZE * D), page_table + seq * PAGES_PER_SEQ
        m, sums = _start(BLOCK_M, WIDTH)
        acc = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
        m_all, l_all, acc_all = m, tl.max(sums, 1), acc
        scale *= LOG2_E
        m, sums, acc, m_all, l_all, acc_all = _walk(
            queries, kv_head, pages, 0, whole, limit, base + token, scale, m, sums, acc, m_all, l_all, acc_all,
            False, NKV, D, PAGE_SIZE, PAGE_STRIDE, SPLIT, KV_TILE, BLOCK_D)  # fmt: skip
        m, sums, acc, m_all, l_all, acc_all = _walk(
            queries, kv_head, pages, whole, limit, limit, base + token, scale, m, sums, acc, m_all, l_all, acc_all,
            True, NKV, D, PAGE_SIZE, PAGE_STRIDE, SPLIT, KV_TILE, BLOCK_D)  # fmt: skip
        m_all, l_all, acc_all = _merge(m_all, l_all, acc_all, m, tl.max(sums, 1), acc)
        _store_heads(out, acc_all / l_all[:, None], first + token, heads, mask, NQ, D, BLOCK_D)


@triton.jit
def paged_attention_token(q, kv, cu_seqlens, context_lens, page_table, out, step_sizes, scale, NQ: tl.constexpr,
                          NKV: tl.constexpr, D: tl.constexpr, PAGE_SIZE: tl.constexpr, PAGE_STRIDE: tl.constexpr,
                          PAGES_PER_SEQ: tl.constexpr, SPLIT: tl.constexpr, KV_TILE: tl.constexpr,
                          BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr, WIDTH: tl.constexpr,
                          PDL: tl.constexpr):  # fmt: skip
    """Rows of the sequences that have one token in the step; one program takes all positions. Grid (S, NKV)."""
    group: tl.constexpr = NQ // NKV
    seq, head = tl.program_id(0), tl.program_id(1)
    active = seq < tl.load(step_sizes + 1)
    first = tl.load(cu_seqlens + seq, mask=active, other=0)
    active = active & (tl.load(cu_seqlens + seq + 1, mask=active, other=0) == first + 1)
    limit = tl.load(context_lens + seq, mask=active, other=0)
    pdl_wait(PDL)
    if active:
        row = tl.arange(0, BLOCK_M)
        tokens, heads = first + row * 0, head * group + row
        queries = _load_heads(q, tokens, heads, row < group, NQ, D, BLOCK_D)
        m, sums = _start(BLOCK_M, WIDTH)
        acc = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
        m, sums, acc, m_all, l_all, acc_all = _walk(
            queries, kv + head * (PAGE_SIZE * D), page_table + seq * PAGES_PER_SEQ, 0, limit, limit,
            limit - 1 + row * 0, scale * LOG2_E, m, sums, acc, m, tl.max(sums, 1), acc,
            True, NKV, D, PAGE_SIZE, PAGE_STRIDE, SPLIT, KV_TILE, BLOCK_D)  # fmt: skip
        m_all, l_all, acc_all = _merge(m_all, l_all, acc_all, m, tl.max(sums, 1), acc)
        _store_heads(out, acc_all / l_all[:, None], tokens, heads, row < group, NQ, D, BLOCK_D)


@triton.jit
def paged_attention_split(q, kv, cu_seqlens, context_lens, page_table, out, workspace, step_sizes, scale,
                          NQ: tl.constexpr, NKV: tl.constexpr, D: tl.constexpr, PAGE_SIZE: tl.constexpr,
                          PAGE_STRIDE: tl.constexpr, PAGES_PER_SEQ: tl.constexpr, SPLIT: tl.constexpr,
                          SPLITS: tl.constexpr, KV_TILE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr,
                          WIDTH: tl.constexpr, PDL: tl.constexpr):  # fmt: skip
    """The same rows, their splits computed side by side. Grid (S, NKV, programs that take turns at the splits).

    A record of the workspace is the state of one (sequence, q head, split): acc [D], m, sums, and two unused floats.
    A sequence of one split needs no record: its rows are done here.
    """
    group: tl.constexpr = NQ // NKV
    seq, head = tl.program_id(0), tl.program_id(1)
    active = seq < tl.load(step_sizes + 1)
    first = tl.load(cu_seqlens + seq, mask=active, other=0)
    active = active & (tl.load(cu_seqlens + seq + 1, mask=active, other=0) == first + 1)
    limit = tl.load(context_lens + seq, mask=active, other=0)
    pdl_wait(PDL)
    if active & (tl.program_id(2) * SPLIT < limit):
        row = tl.arange(0, BLOCK_M)
        tokens, heads = first + row * 0, head * group + row
        queries = _load_heads(q, tokens, heads, row < group, NQ, D, BLOCK_D)
        for split in range(tl.program_id(2), (limit + SPLIT - 1) // SPLIT, tl.num_programs(2)):
            m, sums = _start(BLOCK_M, WIDTH)
            acc = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
            stop = tl.minimum(split * SPLIT + SPLIT, limit)
            pages = page_table + seq * PAGES_PER_SEQ
            page = _page(pages, split * SPLIT, stop, PAGE_SIZE)
            for tile in tl.range(split * SPLIT, stop, KV_TILE):
                page_ahead = _page(pages, tile + KV_TILE, stop, PAGE_SIZE)
                m, sums, acc = _attend(
                    queries, kv + head * (PAGE_SIZE * D), page, tile, limit, limit - 1 + row * 0, scale * LOG2_E,
                    m, sums, acc, True, NKV, D, PAGE_SIZE, PAGE_STRIDE, KV_TILE, BLOCK_D)  # fmt: skip
                page = page_ahead
            total = tl.max(sums, 1)
            if limit <= SPLIT:
                _store_heads(out, acc / total[:, None], tokens, heads, row < group, NQ, D, BLOCK_D)
            else:
                records = (seq * NQ + heads).to(tl.int64) * SPLITS + split
                d = tl.arange(0, BLOCK_D)
                tl.store(workspace + records[:, None] * (D + 4) + d[None, :], acc,
                         mask=(row < group)[:, None] & (d < D)[None, :])  # fmt: skip
                tl.store(workspace + records * (D + 4) + D, m, mask=row < group)
                tl.store(workspace + records * (D + 4) + D + 1, total, mask=row < group)


@triton.jit
def paged_attention_combine(cu_seqlens, context_lens, out, workspace, step_sizes, NQ: tl.constexpr, D: tl.constexpr,
                            SPLIT: tl.constexpr, SPLITS: tl.constexpr, BLOCK_D: tl.constexpr, AHEAD: tl.constexpr,
                            PDL: tl.constexpr):  # fmt: skip
    """Merge the records of paged_attention_split in order, AHEAD loads at a time. Grid (S, NQ)."""
    seq, head = tl.program_id(0), tl.program_id(1)
    active = seq < tl.load(step_sizes + 1)
    first = tl.load(cu_seqlens + seq, mask=active, other=0)
    active = active & (tl.load(cu_seqlens + seq + 1, mask=active, other=0) == first + 1)
    limit = tl.load(context_lens + seq, mask=active, other=0)
    pdl_wait(PDL)
    if active & (limit > SPLIT):
        row, d = tl.arange(0, 1), tl.arange(0, BLOCK_D)
        records = workspace + (seq * NQ + head).to(tl.int64) * (SPLITS * (D + 4))
        count = (limit + SPLIT - 1) // SPLIT
        m_all, l_all = tl.full((1,), float("-inf"), tl.float32), tl.zeros((1,), tl.float32)
        acc_all = tl.zeros((1, BLOCK_D), tl.float32)
        for start in range(0, count, AHEAD):
            for i in tl.static_range(AHEAD):
                there = row + start + i < count
                record = records + (start + i + row) * (D + 4)
                m = tl.load(record + D, mask=there, other=float("-inf"))
                sums = tl.load(record + D + 1, mask=there, other=0.0)
                acc = tl.load(record[:, None] + d[None, :], mask=there[:, None] & (d < D)[None, :], other=0.0)
                m_all, l_all, acc_all = _merge(m_all, l_all, acc_all, m, sums, acc)
        _store_heads(out, acc_all / l_all[:, None], first + row, head + row, row == 0, NQ, D, BLOCK_D)


# --- which tiles, which grids ---------------------------------------------------------------------

PROGRAMS = 264
"""Programs that keep a GPU busy: two on each of the 132 processors of an H200."""
AHEAD = 8
"""Records that paged_attention_combine loads before it merges them."""


@dataclass(frozen=True)
class Tile:
    """Query rows of a program, its warps, and the depth of its load pipeline. Free to choose: no bit depends on it."""

    rows: int
    warps: int
    stages: int


def kv_tile(dtype: str, sizes: Mapping[str, int]) -> int:
    """Positions of a KV tile. Bits depend on it, so it follows from what all kernels of a deployment share."""
    wide = dtype == "bfloat16" and sizes["head_dim"] <= 128 and sizes["page_size"] % 64 == 0
    return 64 if wide else 32


def chunk_tile(target: Target, dtype: str, sizes: Mapping[str, int]) -> Tile:
    """Of paged_attention_chunk: what fits the registers (two accumulators of rows x head_dim) and shared memory."""
    group, head_dim = sizes["num_heads"] // sizes["num_kv_heads"], sizes["head_dim"]
    if dtype == "float32":
        tile = Tile(16, 4 if head_dim <= 64 else 8, 1)
    elif target.backend == "cuda" and target.arch != "sm_120a":
        tile = Tile(64, 4, 3) if head_dim <= 128 else Tile(64, 8, 3)
    else:
        rows = 64 if head_dim <= 128 else 32
        tile = Tile(rows, 8, 2) if target.backend == "cuda" else Tile(rows, 4, 1)
    return Tile(max(tile.rows, _power_of_two(group)), tile.warps, tile.stages)


def token_tile(target: Target, dtype: str, sizes: Mapping[str, int]) -> Tile:
    """Of paged_attention_token and paged_attention_split: the least rows that the matrix unit takes. Few programs need
    deep pipelines to keep memory busy; many do that together, and better with room for more of them."""
    group = sizes["num_heads"] // sizes["num_kv_heads"]
    crowded = sizes["num_seqs"] * sizes["num_kv_heads"] >= PROGRAMS
    stages = (2 if crowded else 3) if target.backend == "cuda" and dtype == "bfloat16" else 1
    warps = 8 if dtype == "float32" and sizes["head_dim"] > 128 else 4
    return Tile(max(16, _power_of_two(group)), warps, stages)


def takers(sizes: Mapping[str, int]) -> int:
    """Programs that take turns at the splits of one (sequence, KV head); 0: one program takes all positions, which
    needs no workspace. Bounded, so that a short context does not pay for the places of a long one."""
    pairs = sizes["num_seqs"] * sizes["num_kv_heads"]
    return 0 if pairs >= PROGRAMS or _splits(sizes) == 1 else min(_splits(sizes), -(-2 * PROGRAMS // pairs))


def workspace(sizes: Mapping[str, int]) -> int:
    """A record of head_dim + 4 floats per sequence, q head and split."""
    if takers(sizes) == 0:
        return 0
    return sizes["num_seqs"] * sizes["num_heads"] * _splits(sizes) * (sizes["head_dim"] + 4) * 4


def _splits(sizes: Mapping[str, int]) -> int:
    return -(-sizes["pages_per_seq"] * sizes["page_size"] // sizes["split_positions"])


def _power_of_two(least: int) -> int:
    return 1 << (least - 1).bit_length()


# --- launches -------------------------------------------------------------------------------------

_OPERANDS = "read q, read kv, read cu_seqlens, read context_lens, read page_table, write out"


def _heads(sizes: Mapping[str, int]) -> dict[str, int]:
    """Constants of every kernel of this file."""
    return {"NQ": sizes["num_heads"], "D": sizes["head_dim"], "SPLIT": sizes["split_positions"],
            "BLOCK_D": _power_of_two(sizes["head_dim"])}  # fmt: skip


def _attending(request: Request, tile: Tile) -> dict[str, int]:
    """Constants of the kernels that read KV."""
    sizes = request.sizes
    return {
        **_heads(sizes), "NKV": sizes["num_kv_heads"], "PAGE_SIZE": sizes["page_size"],
        "PAGE_STRIDE": sizes["page_stride"], "PAGES_PER_SEQ": sizes["pages_per_seq"],
        "KV_TILE": kv_tile(request.dtype, sizes), "BLOCK_M": tile.rows,
        "WIDTH": 8 if request.target.backend == "cuda" else 16,
    }  # fmt: skip


def _types(request: Request, between: str = "") -> str:
    dtype = DTYPES_TRITON[request.dtype]
    return f"*{dtype}, *{dtype}, *i32, *i32, *i32, *{dtype}, {between}*i32, fp32"


def chunk_stage(request: Request, tile: Tile) -> Stage:
    """Rows of the sequences with several tokens."""
    sizes = request.sizes
    tokens = tile.rows // (sizes["num_heads"] // sizes["num_kv_heads"])
    return device_stage(
        module=__name__, function=paged_attention_chunk, name="chunk",
        arguments=f"{_OPERANDS}, sizes step_sizes, float scale", types=_types(request),
        constants={**_attending(request, tile), "SEQS": max(16, _power_of_two(sizes["num_seqs"]))},
        num_warps=tile.warps, num_stages=tile.stages, target=request.target, early=starts_next_early(sizes),
        grid=(sizes["num_tokens"] // tokens + sizes["num_seqs"], sizes["num_kv_heads"], 1),
    )  # fmt: skip


def token_stages(request: Request, tile: Tile, count: int) -> tuple[Stage, ...]:
    """Sequences of one token: one launch, or with ``count`` takers split and combine."""
    sizes = request.sizes
    constants = _attending(request, tile)
    if count == 0:
        stage = device_stage(
            module=__name__, function=paged_attention_token, name="token",
            arguments=f"{_OPERANDS}, sizes step_sizes, float scale", types=_types(request), constants=constants,
            num_warps=tile.warps, num_stages=tile.stages, target=request.target, early=starts_next_early(sizes),
            grid=(sizes["num_seqs"], sizes["num_kv_heads"], 1),
        )  # fmt: skip
        return (stage,)
    split = device_stage(
        module=__name__, function=paged_attention_split, name="split",
        arguments=f"{_OPERANDS}, workspace attention, sizes step_sizes, float scale",
        types=_types(request, "*fp32, "), constants={**constants, "SPLITS": _splits(sizes)},
        num_warps=tile.warps, num_stages=tile.stages, target=request.target, early=starts_next_early(sizes),
        grid=(sizes["num_seqs"], sizes["num_kv_heads"], count),
    )  # fmt: skip
    combine = device_stage(
        module=__name__, function=paged_attention_combine, name="combine",
        arguments="read cu_seqlens, read context_lens, write out, workspace attention, sizes step_sizes",
        types=f"*i32, *i32, *{DTYPES_TRITON[request.dtype]}, *fp32, *i32",
        constants={**_heads(sizes), "SPLITS": _splits(sizes), "AHEAD": AHEAD},
        num_warps=1, num_stages=1, target=request.target, early=starts_next_early(sizes),
        grid=(sizes["num_seqs"], sizes["num_heads"], 1),
    )  # fmt: skip
    return split, combine


def _token(request: Request) -> tuple[Stage, ...]:
    return token_stages(request, token_tile(request.target, request.dtype, request.sizes), takers(request.sizes))


def _mixed(request: Request) -> tuple[Stage, ...]:
    """Rows of sequences with several tokens, then those of sequences with one: together, all rows of the step."""
    return chunk_stage(request, chunk_tile(request.target, request.dtype, request.sizes)), *_token(request)


def specs() -> Iterator[KernelSpec]:
    """paged_attention for every GPU, one kernel per phase; within a dtype they give equal bits."""
    for phase, launches in (("decode", _token), ("mixed", _mixed)):
        for dtype in ("bfloat16", "float32"):
            yield KernelSpec(
                op="paged_attention",
                solution="triton",
                symbol=f"triton_paged_attention_{phase}_{dtype}",
                targets=GPU_TARGETS,
                dtypes=(dtype,),
                arguments=(),
                band=Band.MATRIX,
                traits={"phase": frozenset({phase})},
                features=FEATURES,
                constraints=(
                    MultipleOf("head_dim", 16), AtMost("head_dim", 256), MultipleOf("page_size", 32),
                    MultipleOf("split_positions", "page_size"), MultipleOf("num_heads", "num_kv_heads"),
                ),
                workspace=workspace,
                bitwise_class=f"triton_paged_attention/{dtype}",
                launches=launches,
            )  # fmt: skip
