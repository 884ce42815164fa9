"""Times the tile shapes of kernels/triton/linear.py on this GPU, checks them, and writes tuning tables.

    python benchmarks/gpu/bench_linear.py --json out.json [--budget 240] [--models 8b,smollm2,1b] [--rows 1,8,64]
    python benchmarks/gpu/bench_linear.py --step out.json --json step.json     # decode steps made of the best ones
    python benchmarks/gpu/bench_linear.py --table kernels/tuning/sm_90a.json --from out.json step.json

Needs torch (the baseline: its matmul is cuBLAS) and Triton; imports no built part of TokenSpeed. Every launch takes
its weights from another copy, so that L2 never holds them; launches are one CUDA graph with programmatic dependent
launch between them, as in a step. Every tile shape must agree bit for bit with the first of its shape, and with
float32 arithmetic to rounding. Compilation runs in parallel before anything is timed.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import date
from multiprocessing import get_context
from multiprocessing.pool import Pool
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent))

import step_chain
from linear_build import HOPPER, Key, compile_all, compile_kernel
from linear_models import MODELS, Shape

from tokenspeed.kernels.triton.linear_candidates import candidates
from tokenspeed.kernels.triton.linear_config import FORMAT_VERSION, Config, to_json

ROWS = (1, 8, 16, 32, 64, 128, 256, 512, 2048, 8192)
COLD_BYTES = 160 << 20
"""Weights that a graph goes through before it meets a copy again: more than twice the L2 of an H200."""
LARGEST_HEAD_ROWS = 256


@dataclass
class Buffers:
    """Operands of one shape: ``weights`` [copies, N, K]; x, residual and out for up to the largest M."""

    weights: Any
    x: Any
    residual: Any
    out: Any
    step_sizes: Any


class Bench:
    """Measures on the current device. Torch is imported here and below only."""

    def __init__(self) -> None:
        import torch

        self.torch = torch
        torch.backends.cuda.matmul.allow_tf32 = False
        torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
        torch.manual_seed(20)
        self._kernels: dict[Key, Any] = {}

    def kernel(self, key: Key) -> Any:
        if key not in self._kernels:
            self._kernels[key] = compile_kernel(key)
        return self._kernels[key]

    def buffers(self, shape: Shape, rows: int, copies: int) -> Buffers:
        torch, dtype = self.torch, self.torch.bfloat16
        weights = torch.randn(copies, shape.n, shape.k, device="cuda", dtype=dtype).mul_(shape.k**-0.5)
        x = torch.randn(rows, shape.k, device="cuda", dtype=dtype)
        gated = shape.op == "linear_silu_mul"
        out = torch.empty(rows, shape.width, device="cuda", dtype=dtype if gated else torch.float32)
        residual = torch.randn(rows, shape.width, device="cuda") if shape.op == "linear_add" else out
        return Buffers(weights, x, residual, out, torch.zeros(4, device="cuda", dtype=torch.int32))

    def launch(self, shape: Shape, config: Config, at: Buffers, m: int, copy: int) -> None:
        """One launch over a bucket of ``m`` rows; ``at.step_sizes`` says how many are real."""
        constants = [shape.n, shape.k, 0, *config.constants(HOPPER).values(), True]
        weight = at.weights[copy % len(at.weights)]
        operands = {
            "linear": [at.x, weight, at.out, at.step_sizes],
            "linear_add": [at.x, weight, at.residual, at.out, at.step_sizes],
            "linear_silu_mul": [at.x, weight, at.out, at.step_sizes, shape.width],
        }[shape.op]
        self.kernel((shape.op, shape.n, shape.k, config))[(config.programs(m, shape.n), 1, 1)](*operands, *constants)

    def capture(self, body: Any) -> Any:
        """The CUDA graph of what ``body`` launches."""
        graph = self.torch.cuda.CUDAGraph()
        with self.torch.cuda.graph(graph):
            body()
        return graph

    def time(self, graph: Any, repeats: int = 5) -> float:
        """Microseconds of one replay: the median, after one to warm up."""
        torch = self.torch
        graph.replay()
        events = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(repeats)]
        for begin, end in events:
            begin.record()
            graph.replay()
            end.record()
        torch.cuda.synchronize()
        return statistics.median(begin.elapsed_time(end) * 1e3 for begin, end in events)

    def reference(self, shape: Shape, at: Buffers, m: int) -> Any:
        """The result for weight copy 0 in float32 arithmetic."""
        torch = self.torch
        product = at.x[:m].float() @ at.weights[0].float().T
        if shape.op == "linear_add":
            return at.residual[:m] + product
        if shape.op == "linear_silu_mul":
            gate, up = product.view(m, -1, 2, 16).unbind(2)
            return (torch.nn.functional.silu(gate) * up).reshape(m, -1)
        return product

    def checked(self, shape: Shape, config: Config, at: Buffers, m: int, first: Any) -> tuple[str, Any]:
        """Run once with poisoned output: ("" or what is wrong, the result)."""
        at.out.fill_(float("nan"))
        at.step_sizes.fill_(m)
        self.launch(shape, config, at, m, 0)
        self.torch.cuda.synchronize()
        result = at.out[:m].clone()
        if first is None:
            expected = self.reference(shape, at, m)
            error = ((result.float() - expected).norm() / expected.norm()).item()
            limit = 4e-3 if shape.op == "linear_silu_mul" else 1e-4
            return ("" if error < limit else f"error {error:.2e} over {limit}"), result
        if not self.torch.equal(result, first):
            return f"{(result != first).float().mean().item():.2%} of the elements differ", result
        return "", result

    def padding_untouched(self, shape: Shape, config: Config, at: Buffers, m: int) -> bool:
        """Whether a step smaller than its bucket leaves the other rows alone."""
        at.out.fill_(float("nan"))
        at.step_sizes.fill_(m // 2)
        self.launch(shape, config, at, m, 0)
        ok = self.torch.isnan(at.out[m // 2 : m].float()).all() and not self.torch.isnan(at.out[: m // 2].float()).any()
        at.step_sizes.fill_(m)
        return bool(ok)

    def ceilings(self) -> dict[str, float]:
        """Read bandwidth (GB/s; a dot product with a vector reads its matrix once) and bf16 matmul (TFLOP/s)."""
        torch = self.torch
        a = torch.randn(1 << 18, 8192, device="cuda", dtype=torch.bfloat16)
        v = torch.randn(8192, device="cuda", dtype=torch.bfloat16)
        torch.mv(a, v)
        read = a.numel() * 2 / self.time(self.capture(lambda: torch.mv(a, v))) / 1e3
        b = a[:8192]
        torch.mm(b, b)
        rate = 2 * 8192**3 / self.time(self.capture(lambda: [torch.mm(b, b.T) for _ in range(4)])) * 4 / 1e6
        return {"read_gb_per_s": round(read, 1), "matmul_tflop_per_s": round(rate, 1)}


def measure(bench: Bench, shape: Shape, m: int, configs: Sequence[Config], at: Buffers) -> dict[str, Any]:
    """All ``configs`` of one shape and M: an entry of the result file."""
    launches = max(len(at.weights), 4 if m >= 2048 else 12)
    timed: list[tuple[float, Config]] = []
    wrong: list[str] = []
    first = None
    for config in configs:
        problem, result = bench.checked(shape, config, at, m, first)
        first = result if first is None and not problem else first
        if not problem and m > 1 and not timed and not bench.padding_untouched(shape, config, at, m):
            problem = "rows beyond the step's size are written"
        if problem:
            wrong.append(f"{config}: {problem}")
            continue

        def body(config: Config = config) -> None:
            for copy in range(launches):
                bench.launch(shape, config, at, m, copy)

        timed.append((bench.time(bench.capture(body), 3) / launches, config))
    timed.sort()
    x, weights = at.x[:m], at.weights

    def cublas() -> None:
        for copy in range(launches):
            bench.torch.mm(x, weights[copy % len(weights)].T)

    cublas()
    torch_us = bench.time(bench.capture(cublas), 3) / launches
    return {
        **shape.key, "M": m, "dtype": "bfloat16", "wrong": wrong, "torch_us": round(torch_us, 2),
        "all": [{"us": round(us, 2), "config": to_json(config)} for us, config in timed],
    }  # fmt: skip


def sweep(args: argparse.Namespace, pool: Pool) -> dict[str, Any]:
    """Every shape and M of the models asked for, until the time is up."""
    end = time.perf_counter() + args.budget
    work = [(shape, m) for model in args.models for shape in MODELS[model].shapes for m in args.rows]
    work = [(shape, m) for shape, m in work if m <= LARGEST_HEAD_ROWS or "head" not in shape.name]
    plan = {
        (shape, m): tuple(c for c in candidates(HOPPER, shape.op, m, shape.n, shape.k) if c.kind == "tile")
        for shape, m in work
    }
    good = compile_all(pool, ((s.op, s.n, s.k, c) for (s, _), configs in plan.items() for c in configs))
    bench = Bench()
    ceilings = bench.ceilings()
    print("ceilings:", ceilings)
    entries = []
    print(f"{'shape':>16} {'M':>5} {'best us':>9} {'GB/s W':>7} {'TFLOP/s':>8} {'cuBLAS':>8}  best (runner-up us)")
    for shape in dict.fromkeys(shape for shape, _ in work):
        rows = [m for s, m in work if s == shape]
        copies = min(160, max(2, -(-COLD_BYTES // (shape.n * shape.k * 2))))
        at = bench.buffers(shape, max(rows), copies)
        for m in rows:
            if time.perf_counter() > end:
                print(f"{shape.name:>16} {m:>5}  skipped: over budget")
                continue
            configs = [c for c in plan[shape, m] if (shape.op, shape.n, shape.k, c) in good]
            entry = measure(bench, shape, m, configs, at)
            entries.append(entry)
            _print_entry(shape, m, entry)
        del at
        bench.torch.cuda.empty_cache()
    return {"device": bench.torch.cuda.get_device_name(), "date": str(date.today()), **ceilings, "entries": entries}


def _print_entry(shape: Shape, m: int, entry: dict[str, Any]) -> None:
    for problem in entry["wrong"]:
        print(f"{shape.name:>16} {m:>5}  WRONG {problem}")
    if entry["all"]:
        best, second = entry["all"][0], entry["all"][min(1, len(entry["all"]) - 1)]
        us = best["us"]
        print(
            f"{shape.name:>16} {m:>5} {us:9.1f} {shape.n * shape.k * 2 / us / 1e3:7.0f} "
            f"{2 * m * shape.n * shape.k / us / 1e6:8.1f} {entry['torch_us']:8.1f}  {Config(**best['config'])} "
            f"({second['us']:.1f})",
            flush=True,
        )


def step(args: argparse.Namespace, pool: Pool) -> dict[str, Any]:
    """Decode steps: all projections of all layers with the norm-sized kernels between them, from measured choices.

    What is timed is what a step is made of but for attention: per layer norm, qkv, two small kernels (in the place
    of rope and attention), o, norm, gate_up, down; then norm and head. Sweeps how much is prefetched.
    """
    known = json.loads(Path(args.step).read_text())
    best = {(e["op"], e["N"], e["K"], e["M"]): Config(**e["all"][0]["config"]) for e in known["entries"] if e["all"]}
    plans = []
    for model in args.models:
        for m in args.rows:
            chosen = [best.get((*shape.key.values(), m)) for shape in MODELS[model].shapes]
            if m <= LARGEST_HEAD_ROWS and all(chosen):
                for prefetch in args.prefetch:
                    configs = [replace(c, prefetch=prefetch) for c in chosen if c is not None]
                    plans.append((model, m, prefetch, dict(zip(MODELS[model].shapes, configs, strict=True))))
    compile_all(pool, ((s.op, s.n, s.k, c) for *_, configs in plans for s, c in configs.items()))
    bench = Bench()
    ceilings = bench.ceilings()
    print("ceilings:", ceilings)
    results = step_chain.run(bench, plans, ceilings["read_gb_per_s"], time.perf_counter() + args.budget)
    origin = {"device": bench.torch.cuda.get_device_name(), "date": str(date.today())}
    return {**origin, **ceilings, "early": args.early, "steps": results}


def write_table(path: Path, sources: Sequence[Path]) -> None:
    """Make the tuning table of one architecture from result files; later files replace entries of earlier ones."""
    entries: dict[tuple[Any, ...], dict[str, Any]] = {}
    prefetch: dict[tuple[str, int], tuple[float, int]] = {}
    for source in (json.loads(p.read_text()) for p in sources):
        for found in source.get("entries", ()):
            if found["all"]:
                best, second = found["all"][0], found["all"][min(1, len(found["all"]) - 1)]
                key = {name: found[name] for name in ("op", "N", "K", "M", "dtype")}
                entries[tuple(key.values())] = {
                    **key, **best, "runner_up": second, "torch_us": found["torch_us"],
                    "device": source["device"], "date": source["date"],
                }  # fmt: skip
        for found in source.get("steps", ()):
            at = (found["model"], found["M"])
            prefetch[at] = min(prefetch.get(at, (float("inf"), 0)), (found["us"], found["prefetch"]))
    for (model, m), (_, size) in prefetch.items():
        for shape in MODELS[model].shapes:
            entry = entries.get((*shape.key.values(), m, "bfloat16"))
            if entry is not None:
                entry["config"]["prefetch"] = size
    lines = ",\n".join(f"  {json.dumps(entry)}" for _, entry in sorted(entries.items()))
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f'{{"format_version": {FORMAT_VERSION}, "linear": [\n{lines}\n]}}\n')
    print(f"{path}: {len(entries)} entries")


def main() -> None:
    numbers = lambda text: tuple(int(word) for word in text.split(","))  # noqa: E731
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="where the results go")
    parser.add_argument("--budget", type=float, default=200, help="seconds of measuring, without compilation")
    parser.add_argument("--models", type=lambda text: text.split(","), default=list(MODELS))
    parser.add_argument("--rows", type=numbers, default=ROWS)
    parser.add_argument("--prefetch", type=numbers, default=(0, 1024, 4096, 8192), help="bytes a row, for --step")
    parser.add_argument("--jobs", type=int, default=16, help="processes that compile")
    parser.add_argument("--step", type=Path, help="results whose best choices make up decode steps")
    parser.add_argument("--table", type=Path, help="table to write, from the results of --from")
    parser.add_argument("--from", dest="sources", type=Path, nargs="+", default=[])
    parser.add_argument("--early", action="store_true", help="with --step: kernels let the next start before they wait")
    args = parser.parse_args()
    if args.table is not None:
        write_table(args.table, args.sources)
        return
    if args.early:
        step_chain.let_successors_start_early()
    # The workers never touch the device: they are forked before this process does.
    with get_context("fork").Pool(args.jobs) as pool:
        results = step(args, pool) if args.step is not None else sweep(args, pool)
    if args.json is not None:
        args.json.write_text(json.dumps(results))


if __name__ == "__main__":
    main()
