"""Rotary frequencies: each scaling against its published rule, written out pair by pair."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from checkpoint_files import TINY

from tokenspeed.compile.checkpoint import RopeScaling
from tokenspeed.compile.rope import attention_factor, inverse_frequencies
from tokenspeed.errors import CheckpointError

# Llama 3.1: theta 500000, head_dim 128, context stretched 8 times from 8192.
LLAMA31 = replace(
    TINY,
    head_dim=128,
    rope_theta=5e5,
    rope_scaling=RopeScaling("llama3", 8.0, 8192, low_freq_factor=1.0, high_freq_factor=4.0),
)


def plain(pair: int, theta: float, dim: int) -> float:
    return theta ** (-2 * pair / dim)


def test_unscaled() -> None:
    frequencies = inverse_frequencies(TINY)
    assert frequencies.dtype == np.float64
    np.testing.assert_allclose(frequencies, [plain(i, 1e4, 16) for i in range(8)], rtol=1e-15)


def test_linear_divides_every_frequency() -> None:
    config = replace(TINY, rope_scaling=RopeScaling("linear", 4.0))
    np.testing.assert_allclose(inverse_frequencies(config), inverse_frequencies(TINY) / 4.0, rtol=1e-15)
    assert attention_factor(config) == 1.0


def test_frequency_factors_divide_pair_by_pair() -> None:
    factors = tuple(float(i) for i in range(1, 9))
    config = replace(TINY, rope_freq_factors=factors)
    np.testing.assert_allclose(inverse_frequencies(config), inverse_frequencies(TINY) / factors, rtol=1e-15)


def llama3_rule(frequency: float) -> float:
    """The rule as Meta's Llama 3.1 code states it, in wavelengths."""
    wavelength = 2 * math.pi / frequency
    if wavelength < 8192 / 4.0:
        return frequency
    if wavelength > 8192 / 1.0:
        return frequency / 8.0
    smooth = (8192 / wavelength - 1.0) / (4.0 - 1.0)
    return (1 - smooth) * frequency / 8.0 + smooth * frequency


def test_llama3() -> None:
    frequencies = inverse_frequencies(LLAMA31)
    unscaled = [plain(i, 5e5, 128) for i in range(64)]
    np.testing.assert_allclose(frequencies, [llama3_rule(f) for f in unscaled], rtol=1e-14)
    # The divisors that a converted Llama 3.1 carries as rope_freqs.weight: 1 for the first 29 pairs, 8 for the last 29.
    divisors = np.array(unscaled) / frequencies
    assert (np.abs(divisors - 1.0) < 1e-12).sum() == 29
    assert (np.abs(divisors - 8.0) < 1e-12).sum() == 29
    assert np.all(np.diff(divisors[28:36]) > 0)


def test_llama3_equals_its_frequency_factors() -> None:
    unscaled = replace(LLAMA31, rope_scaling=None)
    divisors = tuple((inverse_frequencies(unscaled) / inverse_frequencies(LLAMA31)).tolist())
    np.testing.assert_allclose(
        inverse_frequencies(replace(unscaled, rope_freq_factors=divisors)), inverse_frequencies(LLAMA31), rtol=1e-14
    )


@pytest.mark.parametrize("truncate", [True, False])
def test_yarn(truncate: bool) -> None:
    config = replace(TINY, head_dim=128, rope_scaling=RopeScaling("yarn", 4.0, 4096, truncate=truncate))
    # Pairs that turn 32 times over 4096 positions, and once: theta^(2i/128) = 4096 / (2 pi rotations).
    first = 64 * math.log(4096 / (2 * math.pi * 32), 1e4)
    last = 64 * math.log(4096 / (2 * math.pi), 1e4)
    if truncate:
        first, last = 20, 46
    assert first == pytest.approx(20.9, abs=1) and last == pytest.approx(45.03, abs=1)
    for pair, frequency in enumerate(inverse_frequencies(config)):
        ramp = min(max((pair - first) / (last - first), 0.0), 1.0)
        whole = plain(pair, 1e4, 128)
        assert frequency == pytest.approx(whole / 4.0 * ramp + whole * (1 - ramp), rel=1e-12)
    assert attention_factor(config) == pytest.approx(0.1 * math.log(4.0) + 1.0)
    given = replace(config, rope_scaling=RopeScaling("yarn", 4.0, 4096, attention_factor=1.25))
    assert attention_factor(given) == 1.25


def test_unknown_kind() -> None:
    config = replace(TINY, rope_scaling=RopeScaling("dynamic", 2.0))
    with pytest.raises(
        CheckpointError, match="rope scaling 'dynamic' is not supported: need one of linear, llama3, yarn"
    ):
        inverse_frequencies(config)
