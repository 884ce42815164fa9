"""Kernels beside linear.py that bench_variants.py compares with it: their shapes, compilation and launch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import triton
from linear_build import HOPPER
from linear_models import Shape
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.experimental.gluon._runtime import GluonASTSource, GluonJITFunction

from tokenspeed.kernels.triton import linear, linear_stream, linear_wide
from tokenspeed.kernels.triton.linear_config import Config, choose

UNITS = 132
MAX_SHARED = 232448


@dataclass(frozen=True, order=True)
class Variant:
    """One way to launch one shape.

    Attributes:
        kind: "tile" (linear.py), "stream" (linear_stream.py) or "wide" (linear_wide.py).
        programs: of the grid.
        constants: of the kernel, sorted by name, without N, K, F, ROWS and PDL.
    """

    kind: str
    programs: int
    warps: int
    stages: int
    maxnreg: int
    constants: tuple[tuple[str, int | bool], ...]

    def __str__(self) -> str:
        c = dict(self.constants)
        shape = f"{c['BLOCK_M']}x{c['BLOCK_N']}x{c['BLOCK_K']}"
        swapped = " swapped" if c.get("SWAPPED") else ""
        consumers = f" c{c['CONSUMERS']}" if "CONSUMERS" in c else f" w{self.warps}"
        stages = c.get("STAGES", self.stages)
        group = f" g{c['GROUP_M']}" if "GROUP_M" in c else ""
        return f"{self.kind} {shape}{consumers} s{stages}{swapped}{group} x{self.programs}"


def present(shape: Shape, m: int) -> Variant:
    """What is used today."""
    return tile(choose(HOPPER, shape.op, m, shape.n, shape.k, "bfloat16"), shape, m)


def tile(config: Config, shape: Shape, m: int) -> Variant:
    return Variant("tile", config.programs(m, shape.n), config.num_warps, config.num_stages, 0,
                   tuple(sorted(config.constants(HOPPER).items())))  # fmt: skip


def stream(shape: Shape, m: int, block_n: int, block_k: int, warps: int, stages: int, per_unit: int) -> Variant | None:
    block_m = max(8, 1 << (m - 1).bit_length())
    used = (stages - 1) * block_n * block_k * 2 + block_m * block_k * 2 + 1024
    if block_k > shape.k or per_unit * used > MAX_SHARED or (shape.op == "linear_silu_mul" and block_n < 32):
        return None
    programs = min(-(-shape.n // block_n), UNITS * per_unit)
    constants = {"BLOCK_M": block_m, "BLOCK_N": block_n, "BLOCK_K": block_k}
    return Variant("stream", programs, warps, stages, 0, tuple(sorted(constants.items())))


def wide(shape: Shape, m: int, block_m: int, block_n: int, block_k: int, stages: int, consumers: int,
         swapped: bool, group: int = 8, per_unit: int = 1) -> Variant | None:  # fmt: skip
    steps_deep = min(stages, MAX_SHARED // per_unit // 1024 * 1024 // ((block_m + block_n) * block_k * 2))
    reserve = 8192 if not swapped else (block_m * block_n // consumers) * 4 + 4096
    while steps_deep > 1 and steps_deep * (block_m + block_n) * block_k * 2 + reserve > MAX_SHARED // per_unit:
        steps_deep -= 1
    if steps_deep < 2:
        return None
    programs = min(-(-shape.n // block_n) * -(-m // block_m), UNITS * per_unit)
    constants = {
        "BLOCK_M": block_m, "BLOCK_N": block_n, "BLOCK_K": block_k, "GROUP_M": group, "STAGES": steps_deep,
        "SWAPPED": swapped, "CONSUMERS": consumers,
    }  # fmt: skip
    maxnreg = 0 if consumers == 2 else {1: 168, 2: 128, 3: 80}[per_unit]
    return Variant("wide", programs, 4, 1, maxnreg, tuple(sorted(constants.items())))


STREAMS_FEW = (
    (16, 512, 2, 6, 2), (16, 512, 4, 6, 2), (16, 512, 2, 4, 3), (16, 256, 2, 8, 3), (16, 512, 4, 12, 1),
    (32, 256, 4, 6, 2), (32, 512, 4, 6, 1), (32, 512, 4, 4, 2), (32, 256, 4, 11, 1), (32, 256, 2, 6, 2),
    (64, 256, 4, 6, 1), (64, 128, 4, 12, 1), (64, 256, 4, 4, 2), (64, 128, 4, 6, 2), (128, 128, 8, 6, 1),
)  # fmt: skip
STREAMS_MORE = (
    (16, 256, 2, 8, 2), (32, 256, 4, 6, 2), (32, 256, 4, 6, 1), (64, 128, 4, 6, 2), (64, 128, 4, 9, 1),
    (64, 128, 8, 6, 2), (64, 64, 4, 10, 2), (128, 128, 8, 6, 1), (128, 64, 8, 8, 1),
)  # fmt: skip
# block_n, block_k, stages, consumers, per_unit; W is the first operand
WIDE_SWAPPED = (
    (64, 64, 24, 1, 1), (64, 128, 12, 1, 1), (64, 256, 6, 1, 1), (64, 128, 6, 1, 2), (128, 64, 12, 2, 1),
    (128, 128, 6, 2, 1), (128, 64, 12, 1, 1),
)  # fmt: skip
# block_m, block_n, stages, consumers, group, per_unit; x is the first operand
WIDE_SOME = (
    (64, 64, 12, 1, 8, 1), (64, 64, 6, 1, 8, 2), (64, 128, 8, 1, 8, 1), (64, 128, 4, 1, 8, 2), (64, 256, 5, 1, 8, 1),
    (128, 64, 8, 2, 8, 1), (128, 128, 6, 2, 8, 1), (128, 256, 4, 2, 8, 1), (64, 32, 12, 1, 8, 2),
)  # fmt: skip
WIDE_MANY = (
    (128, 256, 4, 2, 8, 1), (128, 256, 4, 2, 16, 1), (128, 256, 3, 2, 8, 1), (256, 128, 4, 2, 8, 1),
    (256, 128, 4, 2, 4, 1), (128, 128, 6, 2, 8, 1), (64, 256, 5, 1, 8, 1),
)  # fmt: skip


def variants(shape: Shape, m: int) -> list[Variant]:
    """What is worth timing for ``m`` rows, the present choice first."""
    found = [present(shape, m), *_variants(shape, m)]
    small = shape.k * shape.n < 1 << 22
    return [v for v in dict.fromkeys(found) if v is not None and not (small and v.kind == "wide" and m > 256)]


def _variants(shape: Shape, m: int) -> Iterator[Variant | None]:
    if m <= 64:
        for sizes in STREAMS_FEW if m <= 16 else STREAMS_MORE:
            yield stream(shape, m, *sizes)
    if m <= 128:
        for block_n, block_k, stages, consumers, per_unit in WIDE_SWAPPED:
            block_m = max(8, 1 << (m - 1).bit_length())
            yield wide(shape, m, block_m, block_n, block_k, stages, consumers, True, 8, per_unit)
    if 64 <= m <= 512:
        for block_m, block_n, stages, consumers, group, per_unit in WIDE_SOME:
            yield _straight(shape, m, block_m, block_n, stages, consumers, group, per_unit)
    if m > 512:
        for block_m, block_n, stages, consumers, group, per_unit in WIDE_MANY:
            yield _straight(shape, m, block_m, block_n, stages, consumers, group, per_unit)


def _straight(shape: Shape, m: int, block_m: int, block_n: int, stages: int, consumers: int, group: int,
              per_unit: int) -> Variant | None:  # fmt: skip
    if shape.op == "linear_silu_mul" and block_n & (block_n - 1):
        return None
    return wide(shape, m, block_m, block_n, 64, stages, consumers, False, group, per_unit)


def function(shape: Shape, kind: str) -> Any:
    module, suffix = {"tile": (linear, ""), "stream": (linear_stream, "_stream"), "wide": (linear_wide, "_wide")}[kind]
    return getattr(module, shape.op + suffix)


def all_constants(shape: Shape, variant: Variant) -> dict[str, Any]:
    gated = {"F": shape.width} if shape.op == "linear_silu_mul" else {}
    return {"N": shape.n, "K": shape.k, "ROWS": 0, "PDL": True, **gated, **dict(variant.constants)}


def compile_variant(shape: Shape, variant: Variant) -> Any:
    """The compiled kernel, from Triton's cache if it is there."""
    fn = function(shape, variant.kind)
    names = fn.arg_names
    out = "*bf16" if shape.op == "linear_silu_mul" else "*fp32"
    types = {"x": "*bf16", "weight": "*bf16", "residual": "*fp32", "out": out, "step_sizes": "*i32"}
    values = {(names.index(name),): value for name, value in all_constants(shape, variant).items()}
    aligned = {(i,): [["tt.divisibility", 16]] for i, name in enumerate(names) if name in types}
    source = GluonASTSource if isinstance(fn, GluonJITFunction) else ASTSource
    options = {"num_warps": variant.warps, "num_stages": variant.stages, "enable_fp_fusion": False, "launch_pdl": True}
    if variant.maxnreg:
        options["maxnreg"] = variant.maxnreg
    compiled = triton.compile(
        source(fn, {name: types.get(name, "constexpr") for name in names}, values, aligned),
        target=GPUTarget("cuda", 90, 32), options=options,
    )  # fmt: skip
    if compiled.metadata.shared > MAX_SHARED:
        raise ValueError(f"needs {compiled.metadata.shared} bytes of shared memory, there are {MAX_SHARED}")
    return compiled


def check(job: tuple[Shape, Variant]) -> str:
    """ "" where it compiles, or why not."""
    try:
        compile_variant(*job)
        return ""
    except BaseException as error:
        return f"{job[0].name} {job[1]}: {type(error).__name__}: {str(error)[-160:]}".replace("\n", " ")
