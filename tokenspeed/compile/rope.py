"""Rotary position embeddings: inverse frequencies and their scaling.

Sources of the formulas:
- RoPE: Su et al., "RoFormer", arXiv:2104.09864: inverse frequency i is theta^(-2i/D).
- linear: Chen et al., "Extending context window of LLMs via positional interpolation", arXiv:2306.15595.
- yarn: Peng et al., "YaRN", arXiv:2309.00071, "NTK-by-parts" interpolation (section 3.2) and the
  attention temperature (section 3.4), which becomes a factor on cosines and sines.
- llama3: Meta's Llama 3.1 reference code: wavelengths below ``original / high_freq_factor`` are kept, those above
  ``original / low_freq_factor`` are divided by ``factor``, and the band between blends linearly in
  ``original / wavelength``.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from tokenspeed.compile.checkpoint import ModelConfig, RopeScaling
from tokenspeed.errors import CheckpointError

MAX_ANGLE = 1 << 20
"""Radians below which every device's float32 cosines and sines are good (kernels/native/rope_table.h)."""
SCALING_KINDS = ("linear", "llama3", "yarn")
"""Kinds of RopeScaling that have a formula here. Dynamic kinds change with each request's length: no fixed table."""


def inverse_frequencies(config: ModelConfig) -> NDArray[np.float64]:
    """Angle per position of each of the head_dim / 2 rotated pairs, in radians: float64[head_dim / 2]."""
    exponents = np.arange(0, config.head_dim, 2, dtype=np.float64) / config.head_dim
    frequencies: NDArray[np.float64] = np.power(config.rope_theta, -exponents)
    if config.rope_freq_factors is not None:
        frequencies = frequencies / np.asarray(config.rope_freq_factors, dtype=np.float64)
    scaling = config.rope_scaling
    if scaling is None:
        return frequencies
    if scaling.kind == "linear":
        return frequencies / scaling.factor
    if scaling.kind == "llama3":
        return _llama3(frequencies, scaling)
    if scaling.kind == "yarn":
        return _yarn(frequencies, scaling, config)
    raise CheckpointError(f"rope scaling {scaling.kind!r} is not supported: need one of {', '.join(SCALING_KINDS)}")


def attention_factor(config: ModelConfig) -> float:
    """Factor on every cosine and sine: 1.0 except for yarn."""
    scaling = config.rope_scaling
    if scaling is None or scaling.kind != "yarn":
        return 1.0
    if scaling.attention_factor is not None:
        return scaling.attention_factor
    return yarn_magnitude(scaling.factor)


def yarn_magnitude(factor: float, weight: float = 1.0) -> float:
    """YaRN's fit of the attention temperature: 0.1 * weight * ln(factor) + 1 (1.0 where nothing is stretched)."""
    return 0.1 * weight * math.log(factor) + 1.0 if factor > 1.0 else 1.0


def _llama3(frequencies: NDArray[np.float64], scaling: RopeScaling) -> NDArray[np.float64]:
    # turns = how often a pair rotates over the original context = original / wavelength.
    turns = scaling.original_max_position_embeddings * frequencies / (2 * math.pi)
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    keep = np.clip((turns - low) / (high - low), 0.0, 1.0)
    blend: NDArray[np.float64] = keep * frequencies + (1.0 - keep) * frequencies / scaling.factor
    return blend


def _yarn(frequencies: NDArray[np.float64], scaling: RopeScaling, config: ModelConfig) -> NDArray[np.float64]:
    dim = config.head_dim

    def pair_of(rotations: float) -> float:
        """The (fractional) pair that makes this many rotations over the original context."""
        context = scaling.original_max_position_embeddings
        return dim * math.log(context / (rotations * 2 * math.pi)) / (2 * math.log(config.rope_theta))

    first, last = pair_of(scaling.beta_fast), pair_of(scaling.beta_slow)
    if scaling.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, dim - 1)
    width = last - first if last != first else 0.001
    interpolated = np.clip((np.arange(dim // 2) - first) / width, 0.0, 1.0)
    blend: NDArray[np.float64] = interpolated * frequencies / scaling.factor + (1.0 - interpolated) * frequencies
    return blend
