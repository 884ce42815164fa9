"""Arithmetic of the sampling kernels: the order of tokens, random bits, and the noise of a draw."""

from __future__ import annotations

import triton
import triton.language as tl

NOBODY = tl.constexpr(-(2**63))
"""An order value below those of all tokens."""
NO_TOKEN = tl.constexpr(2**31 - 1)
"""A token id above all ids; all bits of an int32 but the sign."""

_PHILOX_MULTIPLIER_0 = tl.constexpr(0xD2511F53)
_PHILOX_MULTIPLIER_1 = tl.constexpr(0xCD9E8D57)
_PHILOX_WEYL_0 = tl.constexpr(0x9E3779B9)
_PHILOX_WEYL_1 = tl.constexpr(0xBB67AE85)


@triton.jit
def key_of(logits):
    """The bits of a float as an int32 in the order of the floats, -0 as +0. Not for NaN."""
    bits = logits.to(tl.int32, bitcast=True)
    return tl.where(bits >= 0, bits, (bits ^ NO_TOKEN) + 1)


@triton.jit
def logit_of_key(key):
    """The float of ``key_of``."""
    return tl.where(key >= 0, key, (key ^ NO_TOKEN) + 1).to(tl.float32, bitcast=True)


@triton.jit
def order_of(logits, tokens):
    """int64 that is greater for a token that comes earlier: by the logit, and by the lower id on ties.

    High half: the logit's key; low half: the id, complemented.
    """
    return (key_of(logits).to(tl.int64) << 32) | (tokens ^ NO_TOKEN).to(tl.int64)


@triton.jit
def logit_of(order):
    """The logit in an order value."""
    return logit_of_key((order >> 32).to(tl.int32))


@triton.jit
def token_of(order):
    """The token id in an order value."""
    return (order & NO_TOKEN).to(tl.int32) ^ NO_TOKEN


@triton.jit
def load_logits(logits, tokens, V: tl.constexpr):
    """Logits of ``tokens``, NaN and ids from V on as -infinity."""
    values = tl.load(logits + tokens, mask=tokens < V, other=float("-inf"))
    return tl.where(values == values, values, float("-inf"))


@triton.jit
def is_ahead(values, tokens, logit, token):
    """Which tokens come before ``token`` in the order, given their logits and its."""
    return (values > logit) | ((values == logit) & (tokens < token))


@triton.jit
def inverse(temperature):
    """1 / temperature, finite also for a temperature so small that 1 / temperature is not."""
    return tl.minimum(tl.div_rn(1.0, temperature), 3.0e38)


@triton.jit
def _philox4x32_10(c0, c1, key0, key1):
    """Philox4x32-10 (Salmon et al., SC'11) of the counters (c0, c1, 0, 0): four uint32 blocks."""
    c2 = tl.zeros_like(c1)
    c3 = tl.zeros_like(c1)
    for _ in tl.static_range(10):
        high0 = tl.umulhi(c0, _PHILOX_MULTIPLIER_0)
        high1 = tl.umulhi(c2, _PHILOX_MULTIPLIER_1)
        low0 = c0 * _PHILOX_MULTIPLIER_0
        low1 = c2 * _PHILOX_MULTIPLIER_1
        c0 = high1 ^ c1 ^ key0
        c1 = low1
        c2 = high0 ^ c3 ^ key1
        c3 = low0
        key0 = key0 + _PHILOX_WEYL_0
        key1 = key1 + _PHILOX_WEYL_1
    return c0, c1, c2, c3


@triton.jit
def exponentials(seed, position, first, SIZE: tl.constexpr):
    """float32[SIZE]: -log(u) of tokens first .. first + SIZE - 1 (``first`` a multiple of 4).

    u = (x + 0.5) / 2^32, and x is lane token % 4 of Philox under the counter (position, token / 4, 0, 0), key ``seed``.

    Relative error below 4e-7 everywhere. Near u = 1, where float32 holds u too coarsely, it is a polynomial in
    1 - u, which float32 holds well: -log(1 - c) / c on [0, 1/4] by Chebyshev interpolation, error 2.4e-9.
    """
    quads = (first // 4 + tl.arange(0, SIZE // 4)).to(tl.uint32)
    positions = tl.zeros_like(quads) + position.to(tl.uint32)
    x0, x1, x2, x3 = _philox4x32_10(positions, quads, seed.to(tl.uint32), (seed >> 32).to(tl.uint32))
    x = tl.join(tl.join(x0, x2), tl.join(x1, x3)).reshape(SIZE)
    u = (x.to(tl.float32) + 0.5) * 2.3283064365386963e-10
    c = ((x ^ 0xFFFFFFFF).to(tl.float32) + 0.5) * 2.3283064365386963e-10
    series = tl.fma(c, tl.full(c.shape, 0.33390907, tl.float32), 0.08952039)
    series = tl.fma(series, c, 0.21425246)
    series = tl.fma(series, c, 0.24869019)
    series = tl.fma(series, c, 0.33338975)
    series = tl.fma(series, c, 0.4999991)
    series = tl.fma(series, c, 1.0)
    return tl.where(c < 0.25, c * series, -tl.log(u))


@triton.jit
def race(z, exponential, tokens):
    """Gumbel-max over a block: (score, token) of the largest z - log(exponential), the lower id on ties.

    It is the smallest exponential * exp(-z): one logarithm for the block instead of one for each token.
    """
    times = exponential * tl.exp(-z)
    first = tl.min(times, axis=0)
    return -tl.log(first), tl.min(tl.where(times == first, tokens, NO_TOKEN), axis=0)
