"""The reference sampler: what every backend's ``adjust_logits`` and ``sample`` must agree with, in NumPy.

One order rules ranks, likeliest tokens, greedy choice and keep sets: greater logit first, lower id on ties.
A NaN logit counts as -infinity; a row without a finite maximum gives its first token and log-probability NaN.

A draw is keyed by (seed, draw_position) and nothing else. Gumbel-max: over the kept tokens, the largest z + g
wins, where z = (logit - max) / temperature, g = -log(-log(u)) and u = (x + 0.5) / 2^32 with x from Philox4x32-10
(Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC'11): key = seed, counter = (draw_position,
token_id / 4, 0, 0), lane token_id % 4. Since each token has its own u, a token that cannot win may be skipped
without changing the draw.

A row with an adjustment draws from adjusted logits, in float32 and in this order: its biases are added; a token of the
prompt or drawn before has a positive logit divided and any other multiplied by repetition_penalty; a token drawn n > 0
times loses n * frequency_penalty, then presence_penalty; a token that is not allowed gets -infinity, and one that is,
at least the lowest finite float, so that one of them is drawn whatever the model says. Log-probabilities and ranks are
those of the logits as they came from the model.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from tokenspeed.step import MASK_BITS, MAX_TOP_LOGPROBS, PROMPT_FLAG

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


def clean(logits: Array) -> Array:
    """``logits`` with NaN as -infinity."""
    return np.where(np.isnan(logits), logits.dtype.type(-np.inf), logits)


def by_likelihood(logits: Array) -> Array:
    """Token ids, likeliest first, lower id first on ties."""
    return np.argsort(-logits, kind="stable")


def kept_tokens(logits: Array, z: Array, top_k: int, top_p: float, min_p: float) -> Array:
    """Token ids that may be drawn, likeliest first, where ``z`` is (logit - max) / temperature.

    The top_k likeliest; of them the fewest whose share of their whole probability reaches top_p; of them those
    with at least min_p of the likeliest one's probability. 0 (for top_p: 1) switches each off; one always stays.
    """
    order = by_likelihood(logits)
    if top_k > 0:
        order = order[:top_k]
    weights = np.exp(z[order].astype(np.float64))
    if top_p < 1.0:
        reached = np.cumsum(weights) >= top_p * weights.sum()
        count = int(np.argmax(reached)) + 1 if reached.any() else len(order)
        order, weights = order[:count], weights[:count]
    if min_p > 0.0:
        order = order[(weights >= min_p) | (order == order[0])]
    return order


def draw(
    logits: Array, *, temperature: float, top_k: int, top_p: float, min_p: float, seed: int, draw_position: int
) -> int:
    """The token drawn from one row of logits. Temperature 0 is the first token of the order."""
    logits = clean(logits)
    best = logits.max()
    if temperature <= 0.0 or not np.isfinite(best):
        return int(np.argmax(logits))
    z = (logits - best) / logits.dtype.type(temperature)
    kept = np.sort(kept_tokens(logits, z, top_k, top_p, min_p))
    gumbel = -np.log(-np.log(uniforms(seed, draw_position, len(logits))[kept]))
    return int(kept[np.argmax(z[kept] + gumbel)])


def count_tokens(counts: Array, tokens: Array, first_position: int, prompt_len: int) -> None:
    """Enter ``tokens``, at positions from ``first_position`` on, into int32[V] ``counts``, in place.

    A sequence that starts from position 0 starts its counts anew: whatever ran in this slot before leaves nothing, and
    a preempted request, which is computed again, counts what it has drawn again.
    """
    if first_position == 0:
        counts[:] = 0
    split = max(0, prompt_len - first_position)
    counts[tokens[:split]] |= PROMPT_FLAG
    np.add.at(counts, tokens[split:], 1)


def penalized(logits: Array, counts: Array, repetition: float, presence: float, frequency: float) -> Array:
    """``logits`` after the three penalties, by the ``counts`` of ``count_tokens``."""
    number = logits.dtype.type
    with np.errstate(invalid="ignore"):
        scaled = np.where(logits > 0, logits / number(repetition), logits * number(repetition))
        drawn = counts & ~np.int32(PROMPT_FLAG)
        rarer = np.where(counts != 0, scaled, logits) - number(frequency) * drawn.astype(logits.dtype)
        adjusted: Array = np.where(drawn > 0, rarer - number(presence), rarer)
    return adjusted


def masked(logits: Array, words: Array) -> Array:
    """``logits`` with only the tokens allowed whose bits are set in int32[W] ``words``."""
    tokens = np.arange(len(logits))
    allowed = words[tokens // MASK_BITS] >> (tokens % MASK_BITS) & 1 == 1
    lowest = np.finfo(np.float32).min.astype(logits.dtype)
    left: Array = np.where(allowed, np.maximum(clean(logits), lowest), logits.dtype.type(-np.inf))
    return left


def adjust_rows(logits: Array, step: Mapping[str, Array], counts: Array) -> Array:
    """The ``adjust_logits`` op: ``step`` holds its other operands by name; writes ``counts`` [slots][V] in place.

    Returns the adjusted logits [num_adjustments, V]; rows of adjustments that draw nothing are 0.
    """
    adjusted = np.zeros((len(step["adjust_seq"]), logits.shape[1]), logits.dtype)
    for i, (seq, row, slot) in enumerate(zip(step["adjust_seq"], step["adjust_row"], step["count_slot"], strict=True)):
        first, last = step["cu_seqlens"][seq], step["cu_seqlens"][seq + 1]
        if slot >= 0:
            tokens = step["token_ids"][first:last].copy()
            tokens[tokens < 0] = step["last_tokens"][-1 - tokens[tokens < 0]]
            count_tokens(counts[slot], tokens, int(step["positions"][first]), int(step["prompt_lens"][i]))
        if row < 0:
            continue
        biases = slice(step["cu_biases"][i], step["cu_biases"][i + 1])
        z = logits[row].copy()
        z[step["bias_ids"][biases]] += step["bias_values"][biases].astype(z.dtype)
        if slot >= 0:
            penalties = (float(step[f"{kind}_penalty"][i]) for kind in ("repetition", "presence", "frequency"))
            z = penalized(z, counts[slot], *penalties)
        mask = step["mask_row"][i]
        adjusted[i] = z if mask < 0 else masked(z, step["token_masks"][mask])
    return adjusted


@dataclass(frozen=True)
class Scores:
    """Log-probabilities of one row under its unscaled logits, natural log."""

    logprob: float
    rank: int
    top_ids: Array
    top_logprobs: Array


def log_sum(shifted: Array, shards: int) -> float:
    """log(sum(exp(shifted))) of float64 ``shifted`` = logits - their maximum, folded in ``shards`` equal parts.

    One part is float64 throughout. Of several, each part's sum is rounded to float32 and they are added in float32, in
    order: log(((s_0 + s_1) + s_2) + ...). So Megatron-LM's vocab_parallel_cross_entropy folds its ranks' sums, where
    the all-reduce adds them in the order of ranks; logits and maximum are float32 there too.
    """
    weights = np.exp(shifted)
    if shards == 1:
        return float(np.log(weights.sum()))
    total = np.float32(0)
    for part in weights.reshape(shards, -1).sum(axis=1).astype(np.float32):
        total += part
    return float(np.float32(np.log(np.float64(total))))


def score(logits: Array, token: int, num_top: int, shards: int = 1) -> Scores:
    """The log-probability and rank (from 1) of ``token``, and the ``num_top`` likeliest tokens with theirs; the
    vocabulary is folded in ``shards`` equal parts."""
    exact = clean(logits).astype(np.float64)
    peak = exact.max()
    with np.errstate(invalid="ignore"):  # no finite peak: inf - inf, and the log-probabilities are NaN
        logprobs = (exact - peak) - log_sum(exact - peak, shards)
    ahead = (exact > exact[token]) | ((exact == exact[token]) & (np.arange(len(exact)) < token))
    top = by_likelihood(exact)[:num_top]
    return Scores(float(logprobs[token]), 1 + int(ahead.sum()), top, logprobs[top])


def sample_rows(
    logits: Array, adjusted: Array, rows: Mapping[str, Array], last_tokens: Array, shards: int = 1
) -> tuple[Array, ...]:  # fmt: skip
    """The ``sample`` op: ``rows`` holds its per-row operands by name, ``shards`` is its logprob_shards; writes
    ``last_tokens`` in place.

    Returns out_token, out_logprob, out_rank, out_top_ids, out_top_logprobs, last_tokens. Likeliest tokens that a
    row did not ask for (num_logprobs) are -1 with log-probability -infinity.
    """
    count = len(logits)
    out_token, out_rank = np.zeros(count, np.int32), np.zeros(count, np.int32)
    out_logprob = np.zeros(count, np.float32)
    out_top_ids = np.full((count, MAX_TOP_LOGPROBS), -1, np.int32)
    out_top_logprobs = np.full((count, MAX_TOP_LOGPROBS), -np.inf, np.float32)
    for row in range(count):
        token, slot = int(rows["logit_target"][row]), int(rows["state_slot"][row])
        if token < 0:
            adjustment = int(rows["adjustment"][row])
            token = draw(
                logits[row] if adjustment < 0 else adjusted[adjustment],
                temperature=float(rows["temperature"][row]), top_k=int(rows["top_k"][row]),
                top_p=float(rows["top_p"][row]), min_p=float(rows["min_p"][row]), seed=int(rows["seed"][row]),
                draw_position=int(rows["draw_position"][row]),
            )  # fmt: skip
            if slot >= 0:
                last_tokens[slot] = token
        scores = score(logits[row], token, max(0, int(rows["num_logprobs"][row])), shards)
        num_top = min(len(scores.top_ids), MAX_TOP_LOGPROBS)
        out_token[row], out_logprob[row], out_rank[row] = token, scores.logprob, scores.rank
        out_top_ids[row, :num_top] = scores.top_ids[:num_top]
        out_top_logprobs[row, :num_top] = scores.top_logprobs[:num_top]
    return out_token, out_logprob, out_rank, out_top_ids, out_top_logprobs, last_tokens
