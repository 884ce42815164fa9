"""The projections of the models that the kernel benchmarks speak of."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Shape:
    """One projection: ``n`` rows of W (linear_silu_mul: gate and up together), ``k`` columns."""

    name: str
    op: str
    n: int
    k: int

    @property
    def width(self) -> int:
        """Columns of the result."""
        return self.n // 2 if self.op == "linear_silu_mul" else self.n

    @property
    def key(self) -> dict[str, str | int]:
        return {"op": self.op, "N": self.n, "K": self.k}


@dataclass(frozen=True)
class Model:
    """``shapes``: qkv, o, gate_up, down, head."""

    num_layers: int
    shapes: tuple[Shape, ...]

    @property
    def weight_bytes(self) -> int:
        """Bytes of bfloat16 weights that one decode step reads."""
        *layer, head = (shape.n * shape.k * 2 for shape in self.shapes)
        return self.num_layers * sum(layer) + head


def _model(name: str, num_layers: int, hidden: int, qkv: int, features: int, vocabulary: int) -> Model:
    return Model(
        num_layers,
        (
            Shape(f"{name}.qkv", "linear", qkv, hidden),
            Shape(f"{name}.o", "linear_add", hidden, hidden),
            Shape(f"{name}.gate_up", "linear_silu_mul", 2 * features, hidden),
            Shape(f"{name}.down", "linear_add", hidden, features),
            Shape(f"{name}.head", "linear", vocabulary, hidden),
        ),
    )


MODELS = {
    "8b": _model("8b", 32, 4096, 6144, 14336, 128256),  # Llama-3.1-8B
    "smollm2": _model("smollm2", 30, 576, 960, 1536, 49152),  # SmolLM2-135M
    "1b": _model("1b", 16, 2048, 3072, 8192, 128256),  # Llama-3.2-1B
}
