"""The reference sampler: what every backend's ``sample`` must agree with, in NumPy and float64.

A draw is keyed by (seed, draw_position) and nothing else. Gumbel-max: over the kept tokens, the largest
logit / temperature + g wins, where g = -log(-log(u)) and u comes from Philox4x32-10 (Salmon et al., "Parallel
random numbers: as easy as 1, 2, 3", SC'11): key = seed, counter = (draw_position, token_id / 4, 0, 0),
lane token_id % 4. Since each token has its own u, a token that cannot win may be skipped without changing the draw.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from tokenspeed.step import MAX_TOP_LOGPROBS

Array: TypeAlias = npt.NDArray[Any]

_MULTIPLIERS = (np.uint64(0xD2511F53), np.uint64(0xCD9E8D57))
_WEYL = (0x9E3779B9, 0xBB67AE85)
_MASK = 0xFFFFFFFF


def philox4x32_10(counters: Array, key: tuple[int, int]) -> Array:
    """Ten rounds of Philox4x32: ``counters`` uint32[n][4] and two words of ``key`` give uint32[n][4]."""
    low, shift = np.uint64(_MASK), np.uint64(32)
    c0, c1, c2, c3 = (counters[:, lane].astype(np.uint64) for lane in range(4))
    for turn in range(10):
        k0, k1 = (np.uint64((key[lane] + turn * _WEYL[lane]) & _MASK) for lane in range(2))
        first, second = _MULTIPLIERS[0] * c0, _MULTIPLIERS[1] * c2
        c0, c1, c2, c3 = (second >> shift) ^ c1 ^ k0, second & low, (first >> shift) ^ c3 ^ k1, first & low
    return np.stack([c0, c1, c2, c3], axis=1).astype(np.uint32)


def uniforms(seed: int, draw_position: int, count: int) -> Array:
    """float64[count] in (0, 1): the u of token ids 0 .. count - 1."""
    blocks = -(-count // 4)
    counters = np.zeros((blocks, 4), dtype=np.uint32)
    counters[:, 0] = draw_position
    counters[:, 1] = np.arange(blocks)
    words = philox4x32_10(counters, (seed & _MASK, seed >> 32)).reshape(-1)[:count]
    return (words.astype(np.float64) + 0.5) / 2.0**32


def by_likelihood(logits: Array) -> Array:
    """Token ids, likeliest first, lower id first on ties."""
    return np.argsort(-logits, kind="stable")


def kept_tokens(scaled: Array, top_k: int, top_p: float, min_p: float) -> Array:
    """Token ids that may be drawn, likeliest first, of logits already divided by the temperature.

    top_k likeliest; of them the fewest whose renormalised probability reaches top_p; of them those with at
    least min_p of the likeliest one's probability. 0 (or 1 for top_p) switches each off; one token always stays.
    """
    order = by_likelihood(scaled)
    if top_k > 0:
        order = order[:top_k]
    weights = np.exp(scaled[order].astype(np.float64) - float(scaled[order[0]]))
    if top_p < 1.0:
        reached = np.cumsum(weights) >= top_p * weights.sum()
        count = int(np.argmax(reached)) + 1 if reached.any() else len(order)
        order, weights = order[:count], weights[:count]
    return order[weights >= min_p * weights[0]] if min_p > 0.0 else order


def draw(
    logits: Array, *, temperature: float, top_k: int, top_p: float, min_p: float, seed: int, draw_position: int
) -> int:
    """The token drawn from one row of logits. Temperature 0 is argmax, lowest id on ties."""
    if temperature == 0.0:
        return int(np.argmax(logits))
    scaled = logits.astype(np.float64) / temperature
    kept = np.sort(kept_tokens(scaled, top_k, top_p, min_p))
    gumbel = -np.log(-np.log(uniforms(seed, draw_position, len(logits))[kept]))
    return int(kept[np.argmax(scaled[kept] + gumbel)])


@dataclass(frozen=True)
class Scores:
    """Log-probabilities of one row under its unscaled logits, natural log."""

    logprob: float
    rank: int
    top_ids: Array
    top_logprobs: Array


def score(logits: Array, token: int, num_top: int) -> Scores:
    """The log-probability and rank (from 1, lower id first on ties) of ``token``, and the ``num_top`` likeliest."""
    exact = logits.astype(np.float64)
    peak = exact.max()
    normalizer = peak + np.log(np.exp(exact - peak).sum())
    ahead = (exact > exact[token]) | ((exact == exact[token]) & (np.arange(len(exact)) < token))
    top = by_likelihood(exact)[:num_top]
    return Scores(float(exact[token] - normalizer), 1 + int(ahead.sum()), top, exact[top] - normalizer)


def sample_rows(logits: Array, rows: Mapping[str, Array], last_tokens: Array) -> tuple[Array, ...]:
    """The ``sample`` op: ``rows`` holds its per-row operands by name; writes ``last_tokens`` in place.

    Returns out_token, out_logprob, out_rank, out_top_ids, out_top_logprobs, last_tokens. What a row did not ask
    for (num_logprobs) is zero.
    """
    count = len(logits)
    out_token, out_rank = np.zeros(count, np.int32), np.zeros(count, np.int32)
    out_logprob = np.zeros(count, np.float32)
    out_top_ids = np.zeros((count, MAX_TOP_LOGPROBS), np.int32)
    out_top_logprobs = np.zeros((count, MAX_TOP_LOGPROBS), np.float32)
    for row in range(count):
        token = int(rows["logit_target"][row])
        if token < 0:
            token = draw(
                logits[row], temperature=float(rows["temperature"][row]), top_k=int(rows["top_k"][row]),
                top_p=float(rows["top_p"][row]), min_p=float(rows["min_p"][row]), seed=int(rows["seed"][row]),
                draw_position=int(rows["draw_position"][row]),
            )  # fmt: skip
        out_token[row] = token
        num_top = int(rows["num_logprobs"][row])
        if num_top >= 0:
            scores = score(logits[row], token, num_top)
            out_logprob[row], out_rank[row] = scores.logprob, scores.rank
            out_top_ids[row, :num_top], out_top_logprobs[row, :num_top] = scores.top_ids, scores.top_logprobs
        if rows["state_slot"][row] >= 0:
            last_tokens[rows["state_slot"][row]] = token
    return out_token, out_logprob, out_rank, out_top_ids, out_top_logprobs, last_tokens
