"""Paged attention on a GPU: exactness, bitwise agreement of all ways to compute a row, and time beside torch SDPA.

    python benchmarks/gpu/bench_attention.py --json out.json [--models 8b,1b,smol] [--quick]

Needs torch, Triton and one CUDA device; the repository root must be importable (PYTHONPATH). Kernels are compiled in
parallel first. Times are per launch, in microseconds, from CUDA graphs that walk 32 layers of a KV pool that no
cache holds. GB/s counts the KV that a step must read; TFLOP/s counts the products under the causal mask.
"""

# mypy: ignore-errors
from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import os
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from itertools import pairwise

import torch
import torch.nn.functional as F

from tokenspeed.kernels.triton import attention as kernels

MODELS = {"8b": (32, 8, 128), "1b": (32, 8, 64), "smol": (9, 3, 64)}
LAYERS, PAGES_PER_SEQ = 32, 129
POOL_BYTES = 70 << 30
TYPES = {torch.bfloat16: "bf16", torch.float32: "fp32", torch.int32: "i32"}


@dataclass(frozen=True)
class Config:
    """Tile sizes and arithmetic of one way to run. ``takers``: programs per (sequence, KV head); 0: all in one."""

    block_m: int
    warps: int
    stages: int
    split: int = 1024
    page: int = 64
    takers: int = 0
    kv_tile: int = 64

    def __str__(self) -> str:
        return f"M{self.block_m} w{self.warps} s{self.stages} split{self.split} tile{self.kv_tile} x{self.takers}"


class Launcher:
    """Launches kernels, or only notes what would have to be compiled."""

    def __init__(self, pdl: bool):
        self.dry, self.pdl, self.needed = True, pdl, {}

    def __call__(self, name, grid, args, constants, warps, stages):
        constants = {**constants, "PDL": self.pdl}
        if self.dry:
            kinds = tuple(a.dtype if isinstance(a, torch.Tensor) else float for a in args)
            self.needed[(name, kinds, tuple(sorted(constants.items())), warps, stages, self.pdl)] = None
            return
        getattr(kernels, name)[grid](*args, **constants, num_warps=warps, num_stages=stages, enable_fp_fusion=False,
                                     launch_pdl=self.pdl)  # fmt: skip


def compile_one(need):
    name, kinds, constants, warps, stages, pdl = need
    args = [1.0 if kind is float else kind for kind in kinds]
    start = time.time()
    try:
        getattr(kernels, name).warmup(*args, grid=(1,), **dict(constants), num_warps=warps, num_stages=stages,
                                      enable_fp_fusion=False, launch_pdl=pdl)  # fmt: skip
    except Exception as error:  # the run itself will say so again
        return f"{name} {constants} {warps} {stages}: {str(error)[:200]}"
    return time.time() - start


@dataclass
class Model:
    name: str
    num_heads: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype = torch.bfloat16

    @property
    def group(self):
        return self.num_heads // self.num_kv_heads


class Step:
    """One step over a KV pool: sequence i has ``lengths[i]`` new tokens that end at ``contexts[i]`` positions."""

    def __init__(self, model, pool, launch, lengths, contexts, page=64, layers=LAYERS, tables=None, spare=0):
        self.model, self.launch, self.page, self.layers = model, launch, page, layers
        self.elements = 2 * model.num_kv_heads * page * model.head_dim
        pages = pool.numel() // (layers * self.elements)
        self.kv = pool[: pages * layers * self.elements].view(pages, layers, self.elements)
        self.pages_per_seq = PAGES_PER_SEQ * 64 // page
        seqs = len(lengths)
        self.lengths, self.contexts = lengths, contexts
        self.num_seqs, self.num_tokens = seqs + spare, sum(lengths) + spare
        if tables is None:
            generator = torch.Generator().manual_seed(7)
            order = torch.randperm(pages, generator=generator)
            each = -(-max(contexts) // page)
            index = torch.arange(seqs * each).view(seqs, each) % pages
            tables = torch.zeros(seqs, self.pages_per_seq, dtype=torch.int32)
            tables[:, :each] = order[index].to(torch.int32)
        self.table = tables.cuda()
        cu = torch.zeros(seqs + spare + 1, dtype=torch.int32)
        cu[1 : seqs + 1] = torch.tensor(lengths).cumsum(0)
        self.cu = cu.cuda()
        self.context_lens = torch.tensor(contexts + [0] * spare, dtype=torch.int32).cuda()
        self.sizes = torch.tensor([sum(lengths), seqs, seqs, 0], dtype=torch.int32).cuda()
        width = model.num_heads * model.head_dim
        torch.manual_seed(3)
        self.q = torch.randn(self.num_tokens, width, device="cuda", dtype=model.dtype)
        self.out = torch.full_like(self.q, 77.0)
        self.workspace = torch.empty(0, device="cuda")

    def _shared(self, config):
        m = self.model
        block_d = 1 << (m.head_dim - 1).bit_length()
        return {"NQ": m.num_heads, "D": m.head_dim, "SPLIT": config.split, "BLOCK_D": block_d}

    def _both(self, config):
        m = self.model
        return {**self._shared(config), "NKV": m.num_kv_heads, "PAGE_SIZE": self.page, "KV_TILE": config.kv_tile,
                "PAGE_STRIDE": self.layers * self.elements * self.kv.element_size(), "WIDTH": 8,
                "PAGES_PER_SEQ": self.pages_per_seq, "BLOCK_M": config.block_m}  # fmt: skip

    def _args(self, layer):
        scale = self.model.head_dim**-0.5
        return [self.q, self.kv[:, layer], self.cu, self.context_lens, self.table, self.out, self.sizes, scale]

    def chunk(self, config, layer=0):
        m = self.model
        grid = (self.num_tokens // (config.block_m // m.group) + self.num_seqs, m.num_kv_heads)
        constants = {**self._both(config), "SEQS": max(16, 1 << (self.num_seqs - 1).bit_length())}
        self.launch("paged_attention_chunk", grid, self._args(layer), constants, config.warps, config.stages)

    def tokens(self, config, layer=0):
        m = self.model
        if config.takers == 0:
            self.launch("paged_attention_token", (self.num_seqs, m.num_kv_heads), self._args(layer),
                        self._both(config), config.warps, config.stages)  # fmt: skip
            return
        splits = -(-self.pages_per_seq * self.page // config.split)
        need = self.num_seqs * m.num_heads * splits * (m.head_dim + 4)
        if self.workspace.numel() < need:
            self.workspace = torch.empty(need, device="cuda")
        *args, sizes, scale = self._args(layer)
        self.launch("paged_attention_split", (self.num_seqs, m.num_kv_heads, min(config.takers, splits)),
                    [*args, self.workspace, sizes, scale], {**self._both(config), "SPLITS": splits},
                    config.warps, config.stages)  # fmt: skip
        self.launch("paged_attention_combine", (self.num_seqs, m.num_heads),
                    [self.cu, self.context_lens, self.out, self.workspace, sizes],
                    {**self._shared(config), "SPLITS": splits, "AHEAD": 8}, 1, 1)  # fmt: skip

    def dense(self, seq, layer=0):
        """K and V of a sequence, [num_kv_heads, context, head_dim] each."""
        n, m = self.contexts[seq], self.model
        pages = self.kv[self.table[seq, : -(-n // self.page)].long(), layer]
        both = pages.view(-1, 2, m.num_kv_heads, self.page, m.head_dim).permute(1, 2, 0, 3, 4)
        return both.reshape(2, m.num_kv_heads, -1, m.head_dim)[:, :, :n]


def time_graph(bench, launches, budget_ms=25.0):
    """Microseconds per launch of a CUDA graph of ``launches``; None while only noting what to compile."""
    if bench.launch.dry:
        launches[0]()
        return None
    for run in launches[:2]:
        run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for run in launches:
            run()
    graph.replay()
    torch.cuda.synchronize()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    times, spent = [], 0.0
    while spent < budget_ms or len(times) < 3:
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end))
        spent += times[-1]
    return 1000 * sorted(times)[len(times) // 2] / len(launches)


def takers(model, seqs, split):
    splits = -(-PAGES_PER_SEQ * 64 // split)
    return 0 if seqs * model.num_kv_heads >= 264 else min(splits, -(-528 // (seqs * model.num_kv_heads)))


class Bench:
    def __init__(self, launch, pool, quick):
        self.launch, self.pool, self.quick, self.rows = launch, pool, quick, []

    def note(self, **row):
        if not self.launch.dry:
            self.rows.append(row)
            print("  ".join(f"{v:9.2f}" if isinstance(v, float) else f"{v!s:>9}" for v in row.values()), flush=True)

    # --- exactness ---

    def exactness(self, model, page=64):
        """Chunks of several sizes and tiles, split and single-program decode: equal bits, and right ones."""
        # Pairs of bfloat16 numbers read as float32 are as good: the second fills the low bits.
        pool = self.pool if model.dtype == torch.bfloat16 else self.pool[: 1 << 30].view(torch.float32)
        n, half = 3077, model.dtype == torch.bfloat16
        layers = 2
        for split in (1024, 256):
            whole = Step(model, pool, self.launch, [n], [n], page, layers)
            base = Config(128, 8, 3, split, page) if half else Config(32, 4, 1, split, page, 0, 32)
            whole.chunk(base)
            want = whole.out.clone()
            variants = [(128, 8, 2), (64, 4, 3), (64, 8, 2), (32, 4, 2), (32, 2, 3), (16, 4, 3), (16, 1, 2)]
            variants = variants if half else [(16, 4, 1), (64, 8, 1)]
            for m, w, s in [v for v in variants if v[0] >= model.group]:
                whole.out.fill_(77)
                config = replace(base, block_m=m, warps=w, stages=s)
                whole.chunk(config)
                self.compare(model, f"chunk {config}", want, whole.out)
            for cuts in ([1024], [1, 2, 65, 1000, 2048], [64 * i for i in range(1, 48)]):
                got = torch.full_like(want, 77)
                edges = [0, *cuts, n]
                for a, b in pairwise(edges):
                    if b - a < 2:
                        got[a:b] = want[a:b]
                        continue
                    step = Step(model, pool, self.launch, [b - a], [b], page, layers, whole.table.cpu(), spare=3)
                    step.q[: b - a] = whole.q[a:b]
                    step.chunk(base)
                    got[a:b] = step.out[: b - a]
                self.compare(model, f"cut at {str(cuts)[:24]} {base}", want, got)
            rows = sorted({*range(0, n, 13), 0, 63, 64, split - 1, split, n - 1})
            tables = whole.table.cpu().expand(len(rows), -1).contiguous()
            step = Step(model, pool, self.launch, [1] * len(rows), [r + 1 for r in rows], page, layers, tables, spare=2)
            step.q[: len(rows)] = whole.q[rows]
            ways = [(16, 4, 3, 0), (16, 4, 3, 3), (16, 2, 2, 64), (16, 8, 2, 0), (16, 1, 2, 2), (64, 4, 3, 2)]
            ways = [*ways, (32, 4, 2, 0)] if half else [(16, 4, 1, 0), (16, 4, 1, 3), (32, 8, 1, 2)]
            for m, w, s, t in [v for v in ways if v[0] >= model.group]:
                step.out.fill_(77)
                config = replace(base, block_m=m, warps=w, stages=s, takers=t)
                step.tokens(config)
                self.compare(model, f"decode {config}", want[rows], step.out[: len(rows)])
            if not self.launch.dry:
                self.compare_float64(model, whole, want)

    def compare(self, model, what, want, got):
        if self.launch.dry:
            return
        as_int = torch.int16 if want.dtype == torch.bfloat16 else torch.int32
        differ = (want.view(as_int) != got.view(as_int)).float().mean().item()
        verdict = "EQUAL" if differ == 0 else "DIFFERENT"
        self.note(kind="bits", model=model.name, differ=differ, verdict=verdict, what=what)

    def compare_float64(self, model, step, got):
        n = step.contexts[0]
        k, v = step.dense(0).double()
        rows = torch.tensor([0, 1, 63, 64, 1000, 1024, n - 1], device="cuda")
        q = step.q[rows].view(len(rows), model.num_kv_heads, model.group, -1).double()
        scores = torch.einsum("rhgd,hkd->rhgk", q, k) * model.head_dim**-0.5
        hidden = torch.arange(n, device="cuda")[None] > rows[:, None]
        scores.masked_fill_(hidden[:, None, None], -math.inf)
        want = torch.einsum("rhgk,hkd->rhgd", scores.softmax(-1), v).flatten(1)
        error = ((got[rows].double() - want).norm() / want.norm()).item()
        self.note(kind="float64", model=model.name, relative_error=f"{error:.2e}")

    # --- time ---

    def decode(self, model, batch, context, configs, sdpa=True):
        step, bytes_read = None, batch * context * model.num_kv_heads * model.head_dim * 4
        for config in configs:
            if step is None or step.page != config.page:
                step = Step(model, self.pool, self.launch, [1] * batch, [context] * batch, config.page)
            us = time_graph(self, [lambda i=i, c=config, s=step: s.tokens(c, i) for i in range(LAYERS)])
            self.note(kind="decode", model=model.name, batch=batch, context=context, us=us,
                      gb_s=us and bytes_read / us / 1e3, config=str(config))  # fmt: skip
        if sdpa and not self.launch.dry and batch * context <= 64 * 8192:
            layers = max(2, min(8, (400 << 20) // bytes_read))
            shape = (layers, batch, model.num_kv_heads, context, model.head_dim)
            k, v = (self.pool[i * (1 << 31) :][: math.prod(shape)].view(shape) for i in range(2))
            q = step.q[:batch].view(batch, model.num_heads, 1, model.head_dim)
            us = self.sdpa([lambda i=i: F.scaled_dot_product_attention(q, k[i], v[i], enable_gqa=True)
                            for i in range(layers)])  # fmt: skip
            self.note(kind="decode", model=model.name, batch=batch, context=context, us=us,
                      gb_s=bytes_read / us / 1e3, config="torch SDPA, contiguous KV")  # fmt: skip

    def sdpa(self, launches):
        with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.FLASH_ATTENTION):
            return time_graph(self, launches)

    def prefill(self, model, tokens, context, configs):
        step = None
        flops = 4 * model.num_heads * model.head_dim * (tokens * context - tokens * (tokens - 1) / 2)
        for config in configs:
            if step is None or step.page != config.page:
                step = Step(model, self.pool, self.launch, [tokens], [context], config.page)
            us = time_graph(self, [lambda i=i, c=config, s=step: s.chunk(c, i) for i in range(4)])
            self.note(kind="prefill", model=model.name, tokens=tokens, context=context, us=us,
                      tflop_s=us and flops / us / 1e6, config=str(config))  # fmt: skip
        if not self.launch.dry and tokens == context:
            q = step.q.view(1, tokens, model.num_heads, -1).transpose(1, 2)
            k, v = step.dense(0).unsqueeze(1)
            us = self.sdpa([lambda: F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)] * 4)
            self.note(kind="prefill", model=model.name, tokens=tokens, context=context, us=us,
                      tflop_s=flops / us / 1e6, config="torch SDPA")  # fmt: skip

    def empty_mixed(self, model, config):
        """A chunk beside 256 places for sequences of which none decodes: what the token kernel costs there."""
        step = Step(model, self.pool, self.launch, [512], [512], spare=255)
        us = time_graph(self, [lambda i=i: step.tokens(config, i) for i in range(LAYERS)])
        self.note(kind="idle", model=model.name, seqs=256, us=us, config=str(config))

    def run(self, models):
        for model in models:
            self.exactness(model)
            if not self.quick:
                self.exactness(replace(model, dtype=torch.float32, name=model.name + "-f32"))
        scan = [(16, 4, 3), (16, 4, 2), (16, 4, 4), (16, 2, 3), (16, 8, 3), (64, 4, 2)]
        for model in models:
            first = model is models[0]
            for batch, context in [(b, c) for c in (1024, 8192) for b in (1, 8, 32, 64, 128, 256)]:
                if batch * context > 128 * 8192:
                    continue
                configs = [Config(16, 4, 3, split, 64, takers(model, batch, split)) for split in (1024, 512, 256)]
                if batch * model.num_kv_heads >= 264:
                    configs = [configs[0], configs[2], replace(configs[0], takers=1)]
                if (batch, context) in ((1, 1024), (8, 8192), (64, 1024), (256, 1024)) and (first or not self.quick):
                    split = 256 if context * batch <= 1024 else 1024
                    t = takers(model, batch, split)
                    configs += [Config(m, w, s, split, 64, t) for m, w, s in scan[1:]]
                    configs += [Config(16, w, s, split, 128, t, 128) for w, s in ((4, 2), (4, 3), (8, 2))]
                self.decode(model, batch, context, configs)
            tiles = [(128, 8, 3), (128, 8, 2), (64, 4, 2), (64, 4, 3), (128, 4, 2)]
            for tokens, context in ((512, 512), (2048, 2048), (8192, 8192), (2048, 8192)):
                configs = [Config(m, w, s) for m, w, s in (tiles if tokens == 8192 or first else tiles[:3])]
                if tokens == 8192:
                    configs += [Config(128, 8, 3, split) for split in (256, 512, 8192)]
                    configs += [Config(128, 8, s, split, 128, 0, 128) for s in (2, 3) for split in (1024, 8192)]
                self.prefill(model, tokens, context, configs)
            self.empty_mixed(model, Config(16, 4, 3))
            self.empty_mixed(model, Config(16, 4, 3, takers=1))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--json")
    parser.add_argument("--models", default="8b,smol,1b")
    parser.add_argument("--quick", action="store_true", help="bfloat16 only, one scan of configurations")
    parser.add_argument("--no-pdl", action="store_true")
    args = parser.parse_args()
    begin = time.time()
    launch = Launcher(not args.no_pdl)
    free = torch.cuda.mem_get_info()[0]
    pool = torch.empty(min(POOL_BYTES, free - (8 << 30)) // 2, dtype=torch.bfloat16, device="cuda")
    for part in pool.split(1 << 30):
        part.normal_()
    bench = Bench(launch, pool, args.quick)
    models = [Model(name, *MODELS[name]) for name in args.models.split(",")]
    bench.run(models)
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(min(16, os.cpu_count()), context) as workers:
        for need, answer in zip(launch.needed, workers.map(compile_one, launch.needed), strict=True):
            if isinstance(answer, str):
                print("COMPILE", need[0], answer)
    print(f"compiled {len(launch.needed)} kernels, {time.time() - begin:.0f} s", flush=True)
    launch.dry = False
    bench.run(models)
    differ = sum(row.get("verdict") == "DIFFERENT" for row in bench.rows)
    print(f"{differ} comparisons differ; {time.time() - begin:.0f} s")
    if args.json:
        with open(args.json, "w") as file:
            json.dump({"device": torch.cuda.get_device_name(), "rows": bench.rows}, file, indent=1)


if __name__ == "__main__":
    main()
