"""The projections for ``tokenspeed tune``: see kernels/tunable.py."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from tokenspeed.kernels.registry import Request, Stage
from tokenspeed.kernels.triton.linear import stages, weight_rows
from tokenspeed.kernels.triton.linear_candidates import candidates
from tokenspeed.kernels.triton.linear_config import Config, choose, to_json, usable
from tokenspeed.kernels.triton.norm import MAX_WIDTH
from tokenspeed.kernels.tunable import Operand, Predecessor, Variant, Work

FEW_ROWS = 256
"""Up to here a step waits for weights, and what comes before a projection decides what its prefetch gains."""
PREFETCH = (0, 1024, 4096)
_BYTES = {"bfloat16": 2, "float32": 4}


class LinearFamily:
    """linear, linear_add and linear_silu_mul."""

    name = "linear"
    ops: tuple[str, ...] = ("linear", "linear_add", "linear_silu_mul")
    dtypes: tuple[str, ...] = ("bfloat16",)

    def key(self, request: Request) -> dict[str, int]:
        return {"N": weight_rows(request), "K": request.sizes["K"]}

    def variants(self, request: Request) -> tuple[Variant, ...]:
        """The tuning space, and around the present choice how much it prefetches."""
        op, m, n, k = request.op, request.sizes["M"], weight_rows(request), request.sizes["K"]
        now = choose(request.target, op, m, n, k, request.dtype)
        tiled = m <= FEW_ROWS and now.kind == "tile"
        around = [replace(now, prefetch=size) for size in PREFETCH] if tiled else []
        found = (now, *candidates(request.target, op, m, n, k), *around)
        different: dict[tuple[Stage, ...], Config] = {}
        for config in found:
            if usable(config, request.target, op):  # to prefetch more than a row has is to prefetch the row
                clipped = replace(config, prefetch=min(config.prefetch, k * _BYTES[request.dtype]))
                different.setdefault(stages(request, clipped), config)
        return tuple(Variant(to_json(config), stages(request, config)) for config in different.values())

    def operands(self, request: Request) -> Mapping[str, Operand]:
        element, m, k = _BYTES[request.dtype], request.sizes["M"], request.sizes["K"]
        found = {"x": Operand(m * k * element), "weight": Operand(weight_rows(request) * k * element, cold=True)}
        if request.op == "linear_add":
            found["residual"] = Operand(m * request.sizes["N"] * 4)
        return found

    def result(self, request: Request) -> tuple[str, int]:
        if request.op == "linear_silu_mul":
            return "out", request.sizes["F"] * _BYTES[request.dtype]
        return "out", request.sizes["N"] * 4

    def work(self, request: Request) -> Work:
        m, (_, row_bytes) = request.sizes["M"], self.result(request)
        nbytes = sum(operand.nbytes for operand in self.operands(request).values()) + m * row_bytes
        return Work(nbytes, 2 * m * weight_rows(request) * request.sizes["K"])

    def predecessor(self, request: Request) -> Predecessor | None:
        """A norm writes x: a short kernel that leaves the memory idle, as all do that come before a projection of few
        rows in a step."""
        m, k = request.sizes["M"], request.sizes["K"]
        if m > FEW_ROWS or k > MAX_WIDTH:
            return None
        norm = replace(request, op="rms_norm", sizes={"H": k, "M": m, "rows": request.sizes["rows"]})
        return Predecessor(norm, "x", {"x": m * k * 4, "weight": k * 4}, {"eps": 1e-5})
