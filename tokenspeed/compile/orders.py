"""Orders of operations that a trainer may fix: where two ways to compute one thing are equal on paper, not in bits."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Orders:
    """What a Program is built with, from the envelope's fields of the same names (tokenspeed/envelope.py).

    Attributes:
        logprob_shards: the vocabulary is folded in this many equal parts: each part's sum of exponentials is rounded to
            float32 and the parts are added in order, as Megatron's vocabulary-parallel loss does over its ranks; 1: one
            fold of the whole row, as torch.log_softmax does.
        layer_boundary_norm: ``fused``: the residual stream is float32 from layer to layer, never rounded; ``unfused``:
            it is rounded to the program dtype wherever a projection has been added, as is the projection before that,
            as a training framework does that stores both as tensors.
        rope_table_device: ``cpu``: the rope table is made at build, in float64; ``target``: by the target itself, in
            float32, when the artifact is loaded.
    """

    logprob_shards: int = 1
    layer_boundary_norm: str = "fused"
    rope_table_device: str = "cpu"


DEFAULT_ORDERS = Orders()
