"""Random Llamas small enough to interpret in milliseconds, for tests of the compiler."""

from __future__ import annotations

from typing import Any

import numpy as np

from tokenspeed.compile.checkpoint import ModelConfig, tensor_shapes
from tokenspeed.compile.models import build_program
from tokenspeed.compile.program import Program

PAGE_SIZE = 32
MAX_MODEL_LEN = 96


def tiny_config(**changes: Any) -> ModelConfig:
    """Two layers, grouped-query attention, tied embeddings; an inner size that is no multiple of 16."""
    config: dict[str, Any] = {
        "architecture": "llama", "name": "tiny", "hidden_size": 48, "intermediate_size": 72, "num_layers": 2,
        "num_heads": 4, "num_kv_heads": 2, "head_dim": 16, "vocab_size": 101, "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0, "max_position_embeddings": 128, "tie_word_embeddings": True,
    }  # fmt: skip
    return ModelConfig(**{**config, **changes})


def tiny_weights(config: ModelConfig, seed: int = 0) -> dict[str, Any]:
    """float32 tensors by name: projections that keep activations near 1, norm weights around 1."""
    rng = np.random.default_rng(seed)
    weights = {}
    for name, shape in tensor_shapes(config).items():
        noise = rng.standard_normal(shape)
        weights[name] = (1 + 0.2 * noise if len(shape) == 1 else noise / np.sqrt(shape[1])).astype(np.float32)
    return weights


def tiny_program(config: ModelConfig, dtype: str = "float32") -> Program:
    return build_program(config, dtype=dtype, max_model_len=MAX_MODEL_LEN, page_size=PAGE_SIZE)


def tiny_tokens(count: int, seed: int = 1) -> list[int]:
    return [int(token) for token in np.random.default_rng(seed).integers(0, 101, count)]
