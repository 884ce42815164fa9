"""Decode steps made of projections and norm-sized kernels, as one CUDA graph (bench_linear.py --step)."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any

import triton
import triton.language as tl
from linear_build import compile_source
from linear_models import MODELS, Shape
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from tokenspeed.kernels.triton import linear
from tokenspeed.kernels.triton.common import pdl_wait
from tokenspeed.kernels.triton.linear_config import Config

if TYPE_CHECKING:
    from bench_linear import Bench

SMALL_BLOCK = 1024


@triton.jit
def launch_then_wait(PDL: tl.constexpr):
    """pdl_wait with its two halves exchanged: the next kernel starts, and prefetches, one kernel earlier."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()


def let_successors_start_early() -> None:
    """Make every kernel of the chain use ``launch_then_wait``, before anything is compiled."""
    global pdl_wait
    pdl_wait = launch_then_wait
    linear.pdl_wait = launch_then_wait


@triton.jit
def small_kernel(residual, out, H: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """Two passes over a row, as a norm makes them: what stands between two projections of a step."""
    pdl_wait(PDL)
    row = tl.program_id(0)
    total = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, H, BLOCK):
        at = start + tl.arange(0, BLOCK)
        value = tl.load(residual + row * H + at, mask=at < H, other=0.0)
        total += value * value
    scale = tl.rsqrt(tl.sum(total) / H + 1e-5)
    for start in range(0, H, BLOCK):
        at = start + tl.arange(0, BLOCK)
        value = tl.load(residual + row * H + at, mask=at < H, other=0.0) * scale
        tl.store(out + row * H + at, value.to(tl.bfloat16), mask=at < H)


@triton.jit
def early_small_kernel(residual, out, H: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """small_kernel that lets its successor start before it waits."""
    gdc_launch_dependents()
    small_kernel(residual, out, H, BLOCK, PDL)


class Small:
    """A kernel of ``hidden`` columns a row that stands between projections; ``constants`` end its arguments."""

    def __init__(self, hidden: int, early: bool) -> None:
        types = {"residual": "*fp32", "out": "*bf16"}
        values = {"H": hidden, "BLOCK": SMALL_BLOCK, "PDL": True}
        self._kernel = compile_source(early_small_kernel if early else small_kernel, types, values, 4, 2)
        self.constants = (hidden, SMALL_BLOCK, True)

    def __getitem__(self, grid: tuple[int, int, int]) -> Any:
        return self._kernel[grid]


@cache
def small(hidden: int, early: bool) -> Small:
    return Small(hidden, early)


def _small(hidden: int) -> Any:
    types = {"residual": "*fp32", "out": "*bf16"}
    return compile_source(small_kernel, types, {"H": hidden, "BLOCK": SMALL_BLOCK, "PDL": True}, 4, 2)


Plan = tuple[str, int, int, Mapping[Shape, Config]]
"""model, rows, prefetch, choices."""


def run(bench: Bench, plans: Sequence[Plan], read_gb_per_s: float, end: float) -> list[dict[str, Any]]:
    """Time every plan until ``end``; prints a line per plan."""
    results = []
    print(f"{'model':>8} {'M':>5} {'prefetch':>8} {'step us':>9} {'floor us':>9} {'ratio':>6}")
    for name in dict.fromkeys(plan[0] for plan in plans):
        model = MODELS[name]
        mine = [plan for plan in plans if plan[0] == name]
        rows = max(m for _, m, _, _ in mine)
        at = {s: bench.buffers(s, rows, 1 if s is model.shapes[-1] else model.num_layers) for s in model.shapes}
        small = _small(model.shapes[0].k)
        for _, m, prefetch, configs in mine:
            if time.perf_counter() > end:
                print(f"{name:>8} {m:>5} {prefetch:>8} skipped: over budget")
                continue
            us = _time_step(bench, m, configs, at, small)
            floor = model.weight_bytes / read_gb_per_s / 1e3
            print(f"{name:>8} {m:>5} {prefetch:>8} {us:9.1f} {floor:9.1f} {us / floor:6.3f}", flush=True)
            results.append({"model": name, "M": m, "prefetch": prefetch, "us": us, "floor_us": floor})
        del at
        bench.torch.cuda.empty_cache()
    return results


def _time_step(bench: Bench, m: int, configs: Mapping[Shape, Config], at: Mapping[Shape, Any], small: Any) -> float:
    qkv, o, gate_up, down, head = configs
    hidden = qkv.k

    def norm(target: Shape) -> None:
        small[(m, 1, 1)](at[o].out, at[target].x, hidden, SMALL_BLOCK, True)

    def project(shape: Shape, layer: int) -> None:
        bench.launch(shape, configs[shape], at[shape], m, layer)

    def body() -> None:
        for layer in range(len(at[qkv].weights)):
            norm(qkv)
            project(qkv, layer)
            norm(o)
            norm(o)
            project(o, layer)
            norm(gate_up)
            project(gate_up, layer)
            project(down, layer)
        norm(head)
        project(head, 0)

    for shape in configs:
        at[shape].step_sizes.fill_(m)
    body()
    return bench.time(bench.capture(body))
