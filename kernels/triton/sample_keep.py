"""Sampling among the tokens that top_k, top_p and min_p keep, when the first draw is not among them.

A keep set is a prefix of the order (greater logit first, lower id on ties). The draw over all tokens is the draw
over the kept ones if its winner is kept. If it is not, then neither is anything that comes after it, so the race is
run again among the tokens ahead of it, until a winner is kept. Each draw lands at a random share of the mass that
is left, so the races needed are 1 + log(mass of all / mass of the kept) on average: 1.1 for top_p 0.9. Where top_k
keeps few tokens of many alike, that is many: there the second race is among the first top_k at once. Nothing is
sorted, and the number of tokens ahead, which tells whether a token is kept, is also the rank that is reported.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tokenspeed.kernels.triton.sample_math import (
    NOBODY,
    exponentials,
    is_ahead,
    key_of,
    load_logits,
    logit_of,
    logit_of_key,
    order_of,
    race,
    token_of,
)

FEW = tl.constexpr(64)
"""Up to here the first tokens are visited one by one."""
_THRESHOLDS = tl.constexpr(8)
"""Parts into which one pass of the search for a threshold splits what is left."""


@triton.jit
def next_leaders(leaders, order, logits, V: tl.constexpr, CHUNK: tl.constexpr, LANES: tl.constexpr):
    """``leaders`` (the first token of each chunk, as order values) without ``order``, which is one of them: its chunk's
    next token takes its place."""
    chunk = token_of(order) // CHUNK
    tokens = chunk * CHUNK + tl.arange(0, CHUNK)
    orders = order_of(load_logits(logits, tokens, V), tokens)
    following = tl.max(tl.where((orders < order) & (tokens < V), orders, NOBODY), axis=0)
    return tl.where(tl.arange(0, LANES) == chunk, following, leaders)


@triton.jit
def token_behind(partials, k, logits, V: tl.constexpr, CHUNK: tl.constexpr, CHUNKS: tl.constexpr,
                 LANES: tl.constexpr):  # fmt: skip
    """The logit and the id of the token that comes right behind the first ``k``, which are fewer than V."""
    lanes = tl.arange(0, LANES)
    leaders = tl.load(partials + lanes, mask=lanes < CHUNKS, other=NOBODY)
    order = tl.max(leaders, axis=0)
    for _ in range(k):
        leaders = next_leaders(leaders, order, logits, V, CHUNK, LANES)
        order = tl.max(leaders, axis=0)
    return logit_of(order), token_of(order)


@triton.jit
def ahead(logits, partials, logit, token, best, temperature,
          V: tl.constexpr, CHUNK: tl.constexpr, CHUNKS: tl.constexpr):  # fmt: skip
    """Number and mass (sum of e^z) of the tokens ahead of ``token``; chunks whose first token is not are skipped."""
    order = order_of(logit, token)
    count = tl.zeros((), tl.int32)
    mass = tl.zeros((), tl.float32)
    for chunk in range(CHUNKS):
        if tl.load(partials + chunk) > order:
            tokens = chunk * CHUNK + tl.arange(0, CHUNK)
            values = load_logits(logits, tokens, V)
            inside = is_ahead(values, tokens, logit, token)
            count += tl.sum(inside.to(tl.int32), axis=0)
            mass += tl.sum(tl.where(inside, tl.exp(tl.div_rn(values - best, temperature)), 0.0), axis=0)
    return count, mass


@triton.jit
def race_ahead(logits, partials, logit, token, best_token, best, temperature, lowest_z, seed, position,
               V: tl.constexpr, CHUNK: tl.constexpr, CHUNKS: tl.constexpr):  # fmt: skip
    """The winner among the tokens ahead of ``token`` with z of at least ``lowest_z``, and the first one always."""
    order = order_of(logit, token)
    score = tl.full((), float("-inf"), tl.float32)
    winner = best_token
    for chunk in range(CHUNKS):
        leader = tl.load(partials + chunk)
        reached = tl.div_rn(logit_of(leader) - best, temperature) >= lowest_z
        if (leader > order) & (reached | (token_of(leader) == best_token)):
            tokens = chunk * CHUNK + tl.arange(0, CHUNK)
            values = load_logits(logits, tokens, V)
            z = tl.div_rn(values - best, temperature)
            inside = is_ahead(values, tokens, logit, token) & ((z >= lowest_z) | (tokens == best_token))
            noise = exponentials(seed, position, chunk * CHUNK, CHUNK)
            chunk_score, chunk_winner = race(tl.where(inside, z, float("-inf")), noise, tokens)
            if chunk_score > score:
                score = chunk_score
                winner = chunk_winner
    return winner


@triton.jit
def top_k_mass(logits, partials, k, best, temperature,
               V: tl.constexpr, CHUNK: tl.constexpr, CHUNKS: tl.constexpr, LANES: tl.constexpr):  # fmt: skip
    """Mass (sum of e^z) of the first ``k`` tokens, 1 <= k <= V."""
    if k <= FEW:
        mass = _mass_of_few(logits, partials, k, best, temperature, V, CHUNK, CHUNKS, LANES)
    else:
        mass = _mass_of_many(logits, k, best, temperature, V, CHUNK, CHUNKS)
    return mass


@triton.jit
def _mass_of_few(logits, partials, k, best, temperature,
                 V: tl.constexpr, CHUNK: tl.constexpr, CHUNKS: tl.constexpr, LANES: tl.constexpr):  # fmt: skip
    lanes = tl.arange(0, LANES)
    leaders = tl.load(partials + lanes, mask=lanes < CHUNKS, other=NOBODY)
    mass = tl.zeros((), tl.float32)
    for _ in range(k):
        order = tl.max(leaders, axis=0)
        mass += tl.exp(tl.div_rn(logit_of(order) - best, temperature))
        leaders = next_leaders(leaders, order, logits, V, CHUNK, LANES)
    return mass


@triton.jit
def _mass_of_many(logits, k, best, temperature, V: tl.constexpr, CHUNK: tl.constexpr, CHUNKS: tl.constexpr):
    """The k-th logit is the greatest float that at least k logits reach. The floats in their order are consecutive
    integers: each pass counts what reaches each of seven thresholds, and leaves an eighth of them."""
    low = key_of(tl.full((), float("-inf"), tl.float32)).to(tl.int64)  # reached by all
    high = key_of(best).to(tl.int64) + 1  # reached by none
    while high - low > 1:
        step = tl.maximum((high - low) // _THRESHOLDS, 1)
        parts = tl.arange(0, _THRESHOLDS)
        thresholds = tl.minimum(low + parts * step, high - 1)
        counts = _count_reaching(logits, logit_of_key(thresholds.to(tl.int32)), V, CHUNK, CHUNKS)
        enough = counts >= k
        below = tl.min(tl.where(enough, high, thresholds), axis=0)
        low = tl.max(tl.where(enough, thresholds, low), axis=0)
        high = tl.minimum(below, high)
    threshold = logit_of_key(low.to(tl.int32))
    count = tl.zeros((), tl.int32)
    mass = tl.zeros((), tl.float32)
    for chunk in range(CHUNKS):
        tokens = chunk * CHUNK + tl.arange(0, CHUNK)
        values = load_logits(logits, tokens, V)
        inside = values > threshold
        count += tl.sum(inside.to(tl.int32), axis=0)
        mass += tl.sum(tl.where(inside, tl.exp(tl.div_rn(values - best, temperature)), 0.0), axis=0)
    return mass + (k - count).to(tl.float32) * tl.exp(tl.div_rn(threshold - best, temperature))


@triton.jit
def _count_reaching(logits, thresholds, V: tl.constexpr, CHUNK: tl.constexpr, CHUNKS: tl.constexpr):
    """int32[_THRESHOLDS]: how many logits are at least each threshold."""
    counts = tl.zeros((_THRESHOLDS,), tl.int32)
    for chunk in range(CHUNKS):
        tokens = chunk * CHUNK + tl.arange(0, CHUNK)
        reached = (load_logits(logits, tokens, V)[None, :] >= thresholds[:, None]) & (tokens < V)[None, :]
        counts += tl.sum(reached.to(tl.int32), axis=1)
    return counts
