"""Gradients of single ops against torch's autograd, in float64."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor

from tokenspeed.trainer import formulas

TIGHT = 1e-12
"""Relative to the largest element."""


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def autograd(forward: Callable[..., Tensor], dy: Tensor, *inputs: Tensor) -> tuple[Tensor, ...]:
    leaves = [x.detach().clone().requires_grad_() for x in inputs]
    return torch.autograd.grad(forward(*leaves), leaves, dy)


def agree(have: Sequence[Tensor], expected: Sequence[Tensor]) -> None:
    for one, other in zip(have, expected, strict=True):
        assert one.shape == other.shape and one.dtype == torch.float64
        assert (one - other).abs().max() <= TIGHT * other.abs().max()


def test_rms_norm() -> None:
    x, weight, dy = 3 * random(7, 12), 1 + random(12, seed=1), random(7, 12, seed=2)

    def forward(x: Tensor, weight: Tensor) -> Tensor:
        return x * torch.rsqrt(x.square().mean(1, keepdim=True) + 1e-5) * weight

    agree(formulas.rms_norm(dy, x, weight, 1e-5), autograd(forward, dy, x, weight))


def test_projections() -> None:
    x, weight, dy = random(5, 8), random(6, 8, seed=1), random(5, 6, seed=2)
    have = formulas.linear_input(dy, weight), formulas.linear_weight(dy, x)
    agree(have, autograd(lambda x, w: x @ w.T, dy, x, weight))


def test_silu_mul() -> None:
    gate, up, dy = 3 * random(5, 6), random(5, 6, seed=1), random(5, 6, seed=2)
    expected = autograd(lambda gate, up: torch.nn.functional.silu(gate) * up, dy, gate, up)
    agree(formulas.silu_mul(dy, gate, up), expected)


def test_rotation() -> None:
    x, dy, angles = random(5, 3, 8), random(5, 3, 8, seed=1), random(5, 4, seed=2)
    cos, sin = angles.cos(), angles.sin()
    by_hand = torch.cat([x[..., :4] * cos[:, None] - x[..., 4:] * sin[:, None],
                         x[..., 4:] * cos[:, None] + x[..., :4] * sin[:, None]], dim=2)  # fmt: skip
    agree([formulas.rotate(x, cos, sin)], [by_hand])
    (expected,) = autograd(lambda x: formulas.rotate(x, cos, sin), dy, x)
    agree([formulas.rotate(dy, cos, -sin)], [expected])


def plain_attention(q: Tensor, k: Tensor, v: Tensor, lengths: Sequence[int], scale: float) -> Tensor:
    """Token by token, from the definition."""
    rows, begin, group = [], 0, q.shape[1] // k.shape[1]
    for length in lengths:
        for at in range(begin, begin + length):
            heads = []
            for head in range(q.shape[1]):
                keys, values = k[begin : at + 1, head // group], v[begin : at + 1, head // group]
                heads.append(torch.softmax(scale * (keys @ q[at, head]), 0) @ values)
            rows.append(torch.stack(heads))
        begin += length
    return torch.stack(rows)


@pytest.mark.parametrize("lengths", [(6,), (1, 9, 8, 2), (3, 3, 3), (1, 1)])
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_attention(lengths: tuple[int, ...], kv_heads: int) -> None:
    n = sum(lengths)
    q, k, v = random(n, 4, 8), random(n, kv_heads, 8, seed=1), random(n, kv_heads, 8, seed=2)
    dy = random(n, 4, 8, seed=3)
    expected = autograd(lambda q, k, v: plain_attention(q, k, v, lengths, 0.3), dy, q, k, v)
    agree(formulas.attention(dy, q, k, v, lengths, 0.3), expected)


def test_what_lies_behind_a_short_sequence_reaches_no_gradient() -> None:
    """Sequences of about one length are computed together: padding must not leak, whatever its gradients are."""
    q, k, v, dy = random(9, 2, 8), random(9, 2, 8, seed=1), random(9, 2, 8, seed=2), random(9, 2, 8, seed=3)
    together = formulas.attention(dy, q, k, v, (4, 5), 0.3)
    alone = [formulas.attention(*(x[part] for x in (dy, q, k, v)), (len(dy[part]),), 0.3)
             for part in (slice(0, 4), slice(4, 9))]  # fmt: skip
    agree(together, [torch.cat(parts) for parts in zip(*alone, strict=True)])


def test_log_probability() -> None:
    logits, dy, targets = 4 * random(5, 11), random(5, seed=1), torch.tensor([0, 10, 3, 3, 7])

    def forward(logits: Tensor) -> Tensor:
        return torch.log_softmax(logits, 1).gather(1, targets[:, None]).squeeze(1)

    agree([formulas.log_probability(dy, logits, targets)], autograd(forward, dy, logits))


def test_rows_and_embeddings() -> None:
    dy, rows, ids = random(3, 4), torch.tensor([1, 2, 5]), torch.tensor([6, 0, 6])
    agree([formulas.rows_of(dy, rows, 7)], autograd(lambda x: x[rows], dy, random(7, 4)))
    agree([formulas.embedding(dy, ids, 9)], autograd(lambda table: table[ids], dy, random(9, 4)))


def test_sums_are_float32_where_values_are_bfloat16() -> None:
    x, dy = random(3, 16).bfloat16(), random(3, 16, seed=1).bfloat16()
    dx, dweight = formulas.rms_norm(dy, x, torch.ones(16), 1e-5)
    assert dx.dtype == dweight.dtype == torch.float32
    assert formulas.linear_input(dy.float(), torch.ones(16, 4).bfloat16()).dtype == torch.float32
    assert formulas.linear_weight(dy.float(), x).dtype == torch.bfloat16
