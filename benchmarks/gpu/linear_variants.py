"""What bench_variants.py compares: the candidates of a shape, their compilation and launch with Triton alone."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import triton
from linear_build import HOPPER
from linear_models import Shape
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.experimental.gluon._runtime import GluonASTSource, GluonJITFunction

from tokenspeed.kernels.triton import linear, linear_wide
from tokenspeed.kernels.triton.linear_candidates import candidates
from tokenspeed.kernels.triton.linear_config import Config, choose

MAX_SHARED = 232448


@dataclass(frozen=True, order=True)
class Variant:
    """One way to launch one shape: the tile shape, and the programs of the grid."""

    config: Config
    programs: int

    def __str__(self) -> str:
        return f"{self.config} x{self.programs}"


def present(shape: Shape, m: int) -> Variant:
    """What is used today."""
    return _variant(choose(HOPPER, shape.op, m, shape.n, shape.k, "bfloat16"), shape, m)


def variants(shape: Shape, m: int) -> list[Variant]:
    """What is worth timing for ``m`` rows, the present choice first."""
    found = [_variant(config, shape, m) for config in candidates(HOPPER, shape.op, m, shape.n, shape.k)]
    return list(dict.fromkeys([present(shape, m), *found]))


def _variant(config: Config, shape: Shape, m: int) -> Variant:
    return Variant(config, config.programs(m, shape.n))


def function(shape: Shape, config: Config) -> Any:
    return getattr(linear_wide, f"{shape.op}_wide") if config.kind == "wide" else getattr(linear, shape.op)


def all_constants(shape: Shape, config: Config) -> dict[str, Any]:
    gated = {"F": shape.width} if shape.op == "linear_silu_mul" else {}
    return {"N": shape.n, "K": shape.k, "ROWS": 0, "PDL": 1, **gated, **config.constants(HOPPER)}


def compile_variant(shape: Shape, config: Config) -> Any:
    """The compiled kernel, from Triton's cache if it is there."""
    fn = function(shape, config)
    names = fn.arg_names
    out = "*bf16" if shape.op == "linear_silu_mul" else "*fp32"
    types = {"x": "*bf16", "weight": "*bf16", "residual": "*fp32", "out": out, "step_sizes": "*i32"}
    values = {(names.index(name),): value for name, value in all_constants(shape, config).items()}
    aligned = {(i,): [["tt.divisibility", 16]] for i, name in enumerate(names) if name in types}
    wide = isinstance(fn, GluonJITFunction)
    warps, stages = (4, 1) if wide else (config.num_warps, config.num_stages)
    options = {"num_warps": warps, "num_stages": stages, "enable_fp_fusion": False, "launch_pdl": True}
    if config.max_registers:
        options["maxnreg"] = config.max_registers
    compiled = triton.compile(
        (GluonASTSource if wide else ASTSource)(
            fn, {name: types.get(name, "constexpr") for name in names}, values, aligned
        ),
        target=GPUTarget("cuda", 90, 32), options=options,
    )  # fmt: skip
    if compiled.metadata.shared > MAX_SHARED:
        raise ValueError(f"needs {compiled.metadata.shared} bytes of shared memory, there are {MAX_SHARED}")
    return compiled


def check(job: tuple[Shape, Config]) -> str:
    """ "" where it compiles, or why not."""
    try:
        compile_variant(*job)
        return ""
    except BaseException as error:
        return f"{job[0].name} {job[1]}: {type(error).__name__}: {str(error)[-160:]}".replace("\n", " ")
