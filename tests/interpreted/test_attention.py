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

from tokenspeed.compile.codegen import compile_kernels
from tokenspeed.compile.interpret_triton import KernelLaunch, Window, run_launch
from tokenspeed.kernels.registry import KernelSpec, Request
from tokenspeed.kernels.triton.attention import (
    paged_attention_chunk,
    paged_attention_combine,
    paged_attention_split,
    paged_attention_token,
    specs,
)
from tokenspeed.target import GPU_TARGETS, Target

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


def check(
    cache: Cache, runs: Sequence[tuple[int, int, int]], tolerance: float | None = None, **options: Any
) -> list[NDArray[Any]]:
    """Run and compare with float64."""
    tolerance = tolerance or (2e-6 if cache.dtype == "float32" else 2e-2)
    outputs = attend(cache, runs, **options)
    for (seq, start, stop), got in zip(runs, outputs, strict=True):
        want = cache.reference(seq, start, stop, cache.heads.head_dim**-0.5)
        error = np.abs(got.astype(np.float64) - want).max() / np.abs(want).max()
        assert error < tolerance, (seq, start, stop, error)
    return outputs


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("heads", [Heads(2, 2, 16), Heads(9, 3, 64), Heads(8, 2, 128), Heads(7, 1, 80)], ids=str)
def test_a_ragged_step_matches_float64(heads: Heads, dtype: str) -> None:
    """Decodes beside chunks; contexts that end at, before and behind edges of tiles, pages and splits."""
    cache = Cache(heads, [200, 1, 65, 129, 300], dtype)
    runs = [(0, 190, 200), (1, 0, 1), (2, 0, 65), (3, 128, 129), (4, 299, 300)]
    split = check(cache, runs, way="split", seed=1)
    token = check(cache, runs, way="token", seed=2)
    assert all(np.array_equal(a, b) for a, b in zip(split, token, strict=True))


@pytest.mark.parametrize("context", [1, 2, 31, 32, 63, 64, 65, 127, 128, 129, 191, 192, 193, 255, 256, 257])
def test_contexts_at_edges(context: int) -> None:
    """The last token alone, in both ways, and as the end of a chunk: equal bits."""
    cache = Cache(Heads(3, 1, 16), [context], seed=context)
    want = check(cache, [(0, context - 1, context)], way="split")[0]
    assert np.array_equal(want, attend(cache, [(0, context - 1, context)], way="token")[0])
    if context > 1:
        start = max(0, context - 40)
        assert np.array_equal(want[0], check(cache, [(0, start, context)])[0][-1])


@pytest.mark.parametrize(
    ("dtype", "page_size"), [("float32", 64), ("bfloat16", 64), ("bfloat16", 32), ("float32", 128)]
)
def test_no_chunking_changes_a_bit(dtype: str, page_size: int) -> None:
    """A prompt at once, in chunks with other query tiles, beside others, and token by token."""
    cache = Cache(Heads(6, 2, 16), [290, 70], dtype, page_size)
    whole = check(cache, [(0, 0, 290)])[0]
    for cuts, block_m in (([64, 128], 16), ([1, 3, 100, 257], 64), ([37, 74, 111, 289], 128)):
        parts = []
        for start, stop in itertools.pairwise([0, *cuts, 290]):
            parts.append(attend(cache, [(1, 3, 30), (0, start, stop), (1, 69, 70)], block_m=block_m)[1])
        assert np.array_equal(np.concatenate(parts), whole), (cuts, block_m)
    rows = [0, 1, 63, 64, 65, 127, 128, 129, 200, 256, 289]
    for way, takers in (("token", 1), ("split", 1), ("split", 3)):
        alone = attend(cache, [(0, row, row + 1) for row in rows], way=way, takers=takers, seed=takers)
        assert np.array_equal(np.concatenate(alone), whole[rows]), (way, takers)


def test_records_are_merged_over_several_rounds() -> None:
    """More splits than the combine kernel loads at a time, and fewer programs than splits."""
    cache = Cache(Heads(2, 1, 16), [64 * 11 + 5, 64, 65], seed=5)
    runs = [(0, 64 * 11 + 4, 64 * 11 + 5), (1, 63, 64), (2, 64, 65)]
    got = check(cache, runs, split=64, takers=4)
    assert all(np.array_equal(a, b) for a, b in zip(got, attend(cache, runs, split=64, way="token"), strict=True))


def test_scores_far_apart_do_not_overflow() -> None:
    """Scores of several hundreds: p of the greatest is 1, of most exactly 0, and splits differ in scale."""
    cache = Cache(Heads(2, 1, 16), [200], seed=6)
    cache.queries[0] = cache.queries[0] * 100
    outputs = check(cache, [(0, 100, 200)], 2e-5) + check(cache, [(0, 199, 200)], 2e-5)
    assert all(np.isfinite(output).all() for output in outputs)


def test_many_sequences_find_their_tiles() -> None:
    """Lengths around the tokens of a query tile (block_m / group = 8), single tokens between them."""
    lengths = [8, 1, 9, 16, 2, 1, 1, 7, 17, 3]
    cache = Cache(Heads(4, 2, 16), [length + 5 * (i % 3) for i, length in enumerate(lengths)], seed=8)
    runs = [(i, 5 * (i % 3), 5 * (i % 3) + length) for i, length in enumerate(lengths)]
    check(cache, runs, block_m=16, spare=(0, 0))
    check(cache, runs, block_m=16, spare=(40, 20), seed=3)


def test_addresses_beyond_two_gibibytes() -> None:
    """Pages 48 MiB apart: page 60 lies beyond 2^31 bytes, and its byte offset times anything does not fit 32 bits."""
    heads, stride = Heads(1, 1, 16), 48 << 20
    kv = np.empty(stride // 4 * 61, np.float32)  # untouched memory takes no space
    rng = np.random.default_rng(9)
    keys, values = rng.standard_normal((2, 32, 16)).astype(np.float32)
    kv[stride // 4 * 60 :][: 2 * 32 * 16] = np.concatenate([keys, values]).reshape(-1)
    cache = Cache(heads, [32], page_size=32)
    cache.keys, cache.values = [keys[:, None]], [values[:, None]]
    out = np.full((1, 16), POISON, np.float32)
    run_in_place(kv, {"q": cache.queries[0][31].copy(), "out": out, "page_table": np.array([60, 0], np.int32),
                      "cu_seqlens": np.array([0, 1], np.int32), "context_lens": np.array([32], np.int32),
                      "step_sizes": np.array([1, 1, 1, 0], np.int32)}, stride)  # fmt: skip
    want = cache.reference(0, 31, 32, 0.25)
    assert np.abs(out - want[0]).max() < 2e-6


def run_in_place(kv: NDArray[Any], arrays: dict[str, NDArray[Any]], stride: int) -> None:
    """paged_attention_token where ``kv`` is too large to be copied."""
    windows = [Window(name, a.ctypes.data, a.nbytes, True, name == "out") for name, a in arrays.items()]
    pointers = {name: ("*i32" if a.dtype == np.int32 else "*fp32", a.ctypes.data) for name, a in arrays.items()}
    constants = {"NQ": 1, "NKV": 1, "D": 16, "PAGE_SIZE": 32, "PAGE_STRIDE": stride, "PAGES_PER_SEQ": 2, "SPLIT": 32,
                 "KV_TILE": 32, "BLOCK_M": 16, "BLOCK_D": 16, "WIDTH": 8, "PDL": False}  # fmt: skip
    arguments = {**pointers, "kv": ("*fp32", kv.ctypes.data), "scale": ("fp32", 0.25)}
    windows.append(Window("kv", kv.ctypes.data, kv.nbytes, True, False))
    run_launch(KernelLaunch(paged_attention_token, (1, 1, 1), arguments, constants, windows, None))


# --- specs ----------------------------------------------------------------------------------------


def sizes(heads: Heads, seqs: int, tokens: int, dtype: str = "bfloat16", **changes: int) -> dict[str, int]:
    page = 2 * heads.num_kv_heads * 64 * heads.head_dim * DTYPES[dtype].itemsize
    step = {"num_tokens": tokens, "num_seqs": seqs, "num_logit_rows": seqs, "rows": 0, "M": tokens}
    return {"num_heads": heads.num_heads, "num_kv_heads": heads.num_kv_heads, "head_dim": heads.head_dim,
            "page_size": 64, "page_stride": 4 * page, "pages_per_seq": 128, "split_positions": 1024,
            **step, **changes}  # fmt: skip


def spec_of(phase: str, dtype: str) -> KernelSpec:
    (spec,) = [s for s in specs() if dtype in s.dtypes and phase in s.traits["phase"]]
    return spec


HOPPER = Target.parse("cuda:sm_90a")


def test_stages_follow_the_work() -> None:
    def launched(phase: str, heads: Heads, seqs: int, tokens: int, **changes: int) -> list[tuple[str, tuple[int, ...]]]:
        request = Request("paged_attention", HOPPER, "bfloat16", sizes(heads, seqs, tokens, **changes))
        return [(stage.name, stage.grid) for stage in spec_of(phase, "bfloat16").stages(request)]

    llama = Heads(32, 8, 128)
    assert launched("decode", llama, 1, 1) == [("split", (1, 8, 8)), ("combine", (1, 32, 1))]
    assert launched("decode", llama, 32, 32) == [("split", (32, 8, 3)), ("combine", (32, 32, 1))]
    assert launched("decode", llama, 33, 33) == [("token", (33, 8, 1))]
    assert launched("decode", llama, 1, 1, pages_per_seq=16) == [("token", (1, 8, 1))]
    assert launched("mixed", llama, 256, 8192) == [("chunk", (8192 // 16 + 256, 8, 1)), ("token", (256, 8, 1))]


def test_workspace_holds_every_record() -> None:
    spec = spec_of("decode", "bfloat16")
    llama = Heads(32, 8, 128)
    assert spec.workspace_bytes(sizes(llama, 8, 8)) == 8 * 32 * 8 * (128 + 4) * 4
    assert spec.workspace_bytes(sizes(llama, 64, 64)) == 0


def test_one_bitwise_class_per_dtype() -> None:
    classes = {dtype: {s.bitwise_class for s in specs() if dtype in s.dtypes} for dtype in DTYPES}
    assert all(len(names) == 1 for names in classes.values())
    assert classes["float32"] != classes["bfloat16"]


def test_kv_tiles_agree_in_all_buckets() -> None:
    """Bits depend on KV_TILE: it is the same in every kernel of a deployment, and divides pages."""
    for heads, page_size in itertools.product((Heads(32, 8, 128), Heads(8, 2, 256)), (32, 64, 96, 256)):
        tiles = set()
        for seqs, phase, dtype in itertools.product((1, 300), ("decode", "mixed"), ("bfloat16",)):
            asked = sizes(heads, seqs, 512, page_size=page_size, split_positions=page_size * 4)
            stages = spec_of(phase, dtype).stages(Request("paged_attention", HOPPER, dtype, asked))
            kernels = [dict(stage.kernel.constants) for stage in stages if stage.kernel is not None]
            tiles |= {constants["KV_TILE"] for constants in kernels if "KV_TILE" in constants}
        assert len(tiles) == 1 and page_size % tiles.pop() == 0


@pytest.mark.parametrize("dtype", DTYPES)
def test_compiles_for_every_target(dtype: str) -> None:
    """On Hopper none keeps registers in memory (bfloat16)."""
    smol, llama = (Heads(9, 3, 64), 300), (Heads(32, 8, 128), 8)
    chosen = [(target, *(llama if dtype == "bfloat16" else smol)) for target in GPU_TARGETS]
    jobs = []
    for target, heads, seqs in [*chosen, (str(HOPPER), *smol)]:
        request = Request("paged_attention", Target.parse(target), dtype, sizes(heads, seqs, 2048, dtype))
        for stage in spec_of("mixed", dtype).stages(request):
            assert stage.kernel is not None
            jobs.append((stage.kernel, request.target))
    compiled = compile_kernels(jobs, workers=2)
    for (kernel, target), code in compiled.items():
        assert code.threads == kernel.num_warps * target.gpu.warp_size
        if target == HOPPER and dtype == "bfloat16":
            # Eight registers of a thread: the tile that spills them is the fastest measured all the same.
            assert code.info.stack_bytes <= 32, kernel
