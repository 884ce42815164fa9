"""Adjustments at random, for tests of the kernels that compute them: every kind, over odd shapes, side by side."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from tokenspeed.compile.interpret import token_mask
from tokenspeed.compile.ops import ADJUST_OPERANDS
from tokenspeed.step import PROMPT_FLAG

Array = NDArray[Any]
LENGTHS = (1, 1, 1300, 40, 1, 6)
"""Tokens of each sequence in the step. Those of one token read it from the last-token table."""


def adjust_operands(rng: np.random.Generator, vocab: int, num_adjustments: int) -> dict[str, Array]:
    """All operands of ``adjust_logits`` but token_counts, for sequences of LENGTHS; the last one asks nothing."""
    seqs = rng.permutation(len(LENGTHS) - 1)[:num_adjustments]
    starts = rng.choice([0, 3, 700], len(LENGTHS))
    starts[0] = 5  # a decode
    drawing = [i for i in range(num_adjustments) if i != 1]  # the second one draws nothing
    rows = np.full(num_adjustments, -1, np.int32)
    rows[drawing] = rng.permutation(num_adjustments + 2)[: len(drawing)]
    biases = [_bias_ids(rng, vocab, i) for i in range(num_adjustments)]
    masks = np.stack([token_mask(rng.permutation(vocab)[: max(1, vocab // k)].tolist(), vocab) for k in (2, 9)])
    values: dict[str, Any] = {
        "adjust_seq": seqs, "adjust_row": rows, "count_slot": [2, 4, -1, 0, 1][:num_adjustments],
        "prompt_lens": [starts[seq] + rng.integers(0, LENGTHS[seq] + 2) for seq in seqs],
        "repetition_penalty": rng.choice([1.0, 0.6, 1.3], num_adjustments),
        "presence_penalty": rng.choice([0.0, -0.7, 1.9], num_adjustments),
        "frequency_penalty": rng.choice([0.0, 0.3, -1.1], num_adjustments),
        "cu_biases": np.cumsum([0, *map(len, biases)]), "mask_row": [-1, 0, 1, -1, 0][:num_adjustments],
        "bias_ids": np.concatenate([*biases, []]),
        "bias_values": rng.uniform(-100, 100, sum(map(len, biases))),
    }  # fmt: skip
    made = {name: np.asarray(values[name]).astype(dtype) for name, (dtype, _) in ADJUST_OPERANDS.items()}
    token_ids = rng.integers(0, vocab, sum(LENGTHS))
    ends = np.cumsum([0, *LENGTHS])
    token_ids[ends[:-1][np.array(LENGTHS) == 1]] = [-1 - slot for slot in (3, 0, 5)]
    logits = (rng.standard_normal((num_adjustments + 2, vocab)) * 4).astype(np.float32)
    logits[:, :: max(7, vocab // 5)] = np.nan
    logits[:, 1 :: max(7, vocab // 5)] = -np.inf
    return {
        "logits": logits, "token_ids": token_ids.astype(np.int32),
        "last_tokens": rng.integers(0, vocab, 6).astype(np.int32),
        "positions": np.concatenate(
            [start + np.arange(n) for start, n in zip(starts, LENGTHS, strict=True)]
        ).astype(np.int32),
        "cu_seqlens": ends.astype(np.int32), **made, "token_masks": masks,
    }  # fmt: skip


def _bias_ids(rng: np.random.Generator, vocab: int, index: int) -> Array:
    count = (0, 1, 5, 1024, 300)[index]
    return np.sort(rng.permutation(vocab)[:count])


def old_counts(rng: np.random.Generator, vocab: int) -> Array:
    """int32[6][vocab]: what earlier steps, of this request or another, left in token_counts."""
    counts = rng.choice([0, 0, 0, 1, 7], (6, vocab)) + rng.choice([0, 0, PROMPT_FLAG], (6, vocab))
    return counts.astype(np.int32)
