"""Paged attention in the Triton interpreter: against float64, and every way to compute a row against the others."""

# mypy: allow-untyped-calls
from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from harness import run
from numpy.typing import NDArray

from tokenspeed.kernels.triton.attention import (
    paged_attention_chunk,
    paged_attention_combine,
    paged_attention_split,
    paged_attention_token,
)

PAGE, SPLIT, TILE = 64, 128, 64
DTYPES = {"float32": np.dtype(np.float32), "bfloat16": np.dtype(ml_dtypes.bfloat16)}
POISON = 77.0


@dataclass
class Heads:
    num_heads: int
    num_kv_heads: int
    head_dim: int

    @property
    def group(self) -> int:
        return self.num_heads // self.num_kv_heads


@dataclass
class Cache:
    """KV pages of random sequences, in shuffled pages of layer 1 of 2; everything else is NaN."""

    heads: Heads
    lengths: Sequence[int]
    dtype: str = "float32"
    page_size: int = PAGE
    seed: int = 0
    keys: list[NDArray[Any]] = field(init=False)
    values: list[NDArray[Any]] = field(init=False)
    queries: list[NDArray[Any]] = field(init=False)

    def __post_init__(self) -> None:
        rng = np.random.default_rng(self.seed)
        h, d, dtype = self.heads.num_kv_heads, self.heads.head_dim, DTYPES[self.dtype]
        self.pages_per_seq = max(-(-n // self.page_size) for n in self.lengths) + 1
        counts = [-(-n // self.page_size) for n in self.lengths]
        order = iter(rng.permutation(sum(counts)) + 1)
        self.kv = np.full((sum(counts) + 2, 2, 2, h, self.page_size, d), np.nan, dtype)
        self.page_table = np.full((len(self.lengths), self.pages_per_seq), 1 << 20, np.int32)
        self.keys, self.values, self.queries = [], [], []
        for i, length in enumerate(self.lengths):
            k, v = (rng.standard_normal((length, h, d)).astype(dtype) for _ in range(2))
            self.queries.append((rng.standard_normal((length, self.heads.num_heads, d)) * 2).astype(dtype))
            for n in range(counts[i]):
                page = self.page_table[i, n] = next(order)
                part = slice(n * self.page_size, min((n + 1) * self.page_size, length))
                rows = part.stop - part.start
                self.kv[page, 1, 0, :, :rows] = k[part].swapaxes(0, 1)
                self.kv[page, 1, 1, :, :rows] = v[part].swapaxes(0, 1)
            self.keys.append(k)
            self.values.append(v)

    def reference(self, seq: int, start: int, stop: int, scale: float) -> NDArray[np.float64]:
        """float64 [stop - start, num_heads, head_dim]."""
        q = self.queries[seq][start:stop].astype(np.float64)
        k, v = (np.repeat(x[seq].astype(np.float64), self.heads.group, 1) for x in (self.keys, self.values))
        scores = np.einsum("qhd,khd->hqk", q, k) * scale
        hidden = np.arange(len(k))[None, :] > np.arange(start, stop)[:, None]
        scores[:, hidden] = -np.inf
        p = np.exp(scores - scores.max(-1, keepdims=True))
        result: NDArray[np.float64] = np.einsum("hqk,khd->qhd", p / p.sum(-1, keepdims=True), v)
        return result


def attend(
    cache: Cache, runs: Sequence[tuple[int, int, int]], *, way: str = "split", block_m: int = 32, takers: int = 2,
    spare: tuple[int, int] = (3, 2), split: int = SPLIT, seed: int | None = None,
) -> list[NDArray[Any]]:  # fmt: skip
    """Outputs of the step whose sequence i is positions [start, stop) of sequence ``seq`` of the cache, for each
    (seq, start, stop) of ``runs``. ``way`` computes sequences of one token: split or token. The bucket has ``spare``
    more tokens and sequences than the step. Asserts that nothing else was written."""
    heads, dtype = cache.heads, DTYPES[cache.dtype]
    d, width = heads.head_dim, heads.num_heads * heads.head_dim
    tokens, seqs = sum(stop - start for _, start, stop in runs), len(runs)
    bucket_tokens, bucket_seqs = tokens + spare[0], seqs + spare[1]
    q = np.full((bucket_tokens, width), np.nan, dtype)
    q[:tokens] = np.concatenate([cache.queries[s][a:b].reshape(-1, width) for s, a, b in runs])
    cu_seqlens = np.full(bucket_seqs + 1, 1 << 20, np.int32)
    cu_seqlens[: seqs + 1] = [0, *itertools.accumulate(b - a for _, a, b in runs)]
    context_lens = np.full(bucket_seqs, 1 << 20, np.int32)
    context_lens[:seqs] = [b for _, _, b in runs]
    table = np.full((bucket_seqs, cache.pages_per_seq), 1 << 20, np.int32)
    table[:seqs] = cache.page_table[[s for s, _, _ in runs]]
    out = np.full((bucket_tokens, width), POISON, dtype)
    layer = cache.kv[:, 1].size // len(cache.kv)
    splits = -(-cache.pages_per_seq * cache.page_size // split)
    io = {"cu_seqlens": cu_seqlens, "context_lens": context_lens}
    given = {"q": q, "kv": cache.kv.reshape(-1)[layer:], **io, "page_table": table, "out": out,
             "step_sizes": np.array([tokens, seqs, seqs, 0], np.int32), "scale": np.float32(d**-0.5)}  # fmt: skip
    block_d = 1 << (d - 1).bit_length()
    shared = {"NQ": heads.num_heads, "D": d, "SPLIT": split, "BLOCK_D": block_d}
    both = {**shared, "NKV": heads.num_kv_heads, "PAGE_SIZE": cache.page_size, "PAGES_PER_SEQ": cache.pages_per_seq,
            "PAGE_STRIDE": cache.kv[0].nbytes, "KV_TILE": min(TILE, cache.page_size), "WIDTH": 8}  # fmt: skip
    small = max(16, 1 << (heads.group - 1).bit_length())

    def launch(kernel: Any, grid: tuple[int, ...], arguments: dict[str, Any], constants: dict[str, Any]) -> None:
        run(kernel, grid, arguments, constants, outputs={"out", "workspace"} & arguments.keys(), seed=seed)

    if any(b - a > 1 for _, a, b in runs):
        bound = bucket_tokens // (block_m // heads.group) + bucket_seqs
        constants = {**both, "BLOCK_M": block_m, "SEQS": 1 << (bucket_seqs - 1).bit_length()}
        launch(paged_attention_chunk, (bound, heads.num_kv_heads), given, constants)
    if way == "token":
        launch(paged_attention_token, (bucket_seqs, heads.num_kv_heads), given, {**both, "BLOCK_M": small})
    else:
        workspace = np.full(bucket_seqs * heads.num_heads * splits * (d + 4), np.nan, np.float32)
        launch(paged_attention_split, (bucket_seqs, heads.num_kv_heads, takers), {**given, "workspace": workspace},
               {**both, "BLOCK_M": small, "SPLITS": splits})  # fmt: skip
        some = {k: given[k] for k in (*io, "out", "step_sizes")}
        launch(paged_attention_combine, (bucket_seqs, heads.num_heads), {**some, "workspace": workspace},
               {**shared, "SPLITS": splits, "AHEAD": 4})  # fmt: skip
    assert (out[tokens:] == POISON).all(), "rows beyond the step were written"
    shaped = out[:tokens].reshape(tokens, heads.num_heads, d)
    return np.split(shaped, cu_seqlens[1:seqs])


def check(cache: Cache, runs: Sequence[tuple[int, int, int]], **options: Any) -> list[NDArray[Any]]:
    """Run and compare with float64."""
    tolerance = 2e-6 if cache.dtype == "float32" else 2e-2
    outputs = attend(cache, runs, **options)
    for (seq, start, stop), got in zip(runs, outputs, strict=True):
        want = cache.reference(seq, start, stop, cache.heads.head_dim**-0.5)
        error = np.abs(got.astype(np.float64) - want).max() / np.abs(want).max()
        assert error < tolerance, (seq, start, stop, error)
    return outputs


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("heads", [Heads(2, 2, 16), Heads(9, 3, 64), Heads(8, 2, 128), Heads(7, 1, 80)], ids=str)
def test_a_ragged_step_matches_float64(heads: Heads, dtype: str) -> None:
    cache = Cache(heads, [200, 1, 65, 129, 300], dtype)
    runs = [(0, 190, 200), (1, 0, 1), (2, 0, 65), (3, 128, 129), (4, 299, 300)]
    check(cache, runs, way="split", seed=1)
    check(cache, runs, way="token", seed=2)
