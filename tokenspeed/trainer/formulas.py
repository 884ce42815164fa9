"""Gradients of the ops of a step, each from what the op has read: torch formulas without autograd.

Shapes: n rows (tokens), K features in, N features out, h query heads, g key/value heads, d dimensions of a head.
Sums and element-wise arithmetic are float32, or float64 where the values are; matrix products are in the dtype of their
operands, as in a model of torch's in that dtype. A rounding that the forward does has the gradient of the identity.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

PADDING_SHARE = 0.25
"""Sequences whose attention is computed together: the shortest is at most this much shorter than the longest."""


def wide(x: Tensor) -> Tensor:
    """``x`` in the dtype of sums."""
    return x if x.dtype == torch.float64 else x.float()


def rms_norm(dy: Tensor, x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """y = x r w, r = 1 / sqrt(mean(x^2) + eps). dx = r (g - x^ mean(g x^)), g = dy w, x^ = x r; dw = sum dy x^.

    Args:
        dy, x: [n, K].
        weight: [K].

    Returns:
        dx [n, K], dw [K].
    """
    x = wide(x)
    scale = torch.rsqrt(x.square().mean(1, keepdim=True) + eps)
    normal = x * scale
    inner = wide(dy) * wide(weight)
    dx = (inner - normal * (inner * normal).mean(1, keepdim=True)) * scale
    return dx, (wide(dy) * normal).sum(0)


def linear_input(dy: Tensor, weight: Tensor) -> Tensor:
    """y = x W^T: dx = dy W. ``dy`` [n, N], ``weight`` [N, K]; returns [n, K] in the dtype of sums."""
    return wide(dy.to(weight.dtype) @ weight)


def linear_weight(dy: Tensor, x: Tensor) -> Tensor:
    """y = x W^T: dW = dy^T x. ``dy`` [n, N], ``x`` [n, K]; returns [N, K] in the dtype of ``x``."""
    return dy.to(x.dtype).T @ x


def silu_mul(dy: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    """y = gate s up, s = sigmoid(gate): dgate = dy up s (1 + gate (1 - s)), dup = dy gate s. All [n, N]."""
    dy, gate, up = wide(dy), wide(gate), wide(up)
    s = torch.sigmoid(gate)
    return dy * up * s * (1 + gate * (1 - s)), dy * gate * s


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """(a, b) -> (a cos - b sin, b cos + a sin) on the halves a, b of each head. ``x`` [n, heads, d], the others
    [n, d / 2]; the gradient is the same with -sin."""
    a, b = wide(x).chunk(2, dim=2)
    cos, sin = cos[:, None], sin[:, None]
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=2)


def attention(
    dy: Tensor, q: Tensor, k: Tensor, v: Tensor, lengths: Sequence[int], scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Causal softmax(scale q k^T) v within each sequence; its gradients are those of torch's
    scaled_dot_product_attention on the same q, k and v.

    Args:
        dy, q: [n, h, d].
        k, v: [n, g, d], where g divides h.
        lengths: tokens of each sequence; n in all.

    Returns:
        dq, dk, dv in the shapes of q, k, v and their dtype.
    """
    dq, dk, dv = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
    for tokens, present in _groups(lengths, q.device):
        inputs = [x[tokens].transpose(1, 2).requires_grad_() for x in (q, k, v)]
        upstream = dy.to(q.dtype)[tokens].masked_fill(~present[:, :, None, None], 0).transpose(1, 2)
        with torch.enable_grad():
            heads = [_repeated(x, q.shape[1]) for x in inputs]
            out = torch.nn.functional.scaled_dot_product_attention(*heads, is_causal=True, scale=scale)
        for whole, part in zip((dq, dk, dv), torch.autograd.grad(out, inputs, upstream), strict=True):
            whole[tokens[present]] = part.transpose(1, 2)[present]
    return dq, dk, dv


def _repeated(x: Tensor, heads: int) -> Tensor:
    """[b, g, l, d] -> [b, heads, l, d]: each head as often as query heads read it."""
    repeats = heads // x.shape[1]
    return x if repeats == 1 else x[:, :, None].expand(-1, -1, repeats, -1, -1).flatten(1, 2)


def _groups(lengths: Sequence[int], device: torch.device) -> Iterator[tuple[Tensor, Tensor]]:
    """Sequences of about one length together: (their tokens [b, l], which of these there are). Behind a sequence's end
    its last token stands in, which no earlier one sees."""
    begins = [0]
    for length in lengths:
        begins.append(begins[-1] + length)
    order = sorted(range(len(lengths)), key=lambda i: lengths[i], reverse=True)
    while order:
        longest = lengths[order[0]]
        group = [i for i in order if lengths[i] >= longest * (1 - PADDING_SHARE)]
        order = order[len(group) :]
        begin = torch.tensor([begins[i] for i in group], device=device)[:, None]
        length = torch.tensor([lengths[i] for i in group], device=device)[:, None]
        place = torch.arange(longest, device=device)
        yield begin + torch.minimum(place, length - 1), place < length


def log_probability(dlogprob: Tensor, logits: Tensor, targets: Tensor) -> Tensor:
    """log softmax(logits)[target]: dlogits = dlogprob (onehot(target) - softmax(logits)). ``logits`` [n, V], the others
    [n]; returns [n, V]."""
    dlogprob = wide(dlogprob)
    dlogits = torch.softmax(wide(logits), 1).mul_(-dlogprob[:, None])
    dlogits[torch.arange(len(targets), device=targets.device), targets] += dlogprob
    return dlogits


def rows_of(dy: Tensor, rows: Tensor, num_rows: int) -> Tensor:
    """y = x[rows], each at most once: dx [num_rows, K] of ``dy`` [n, K]."""
    dx = torch.zeros(num_rows, dy.shape[1], dtype=dy.dtype, device=dy.device)
    dx[rows] = dy
    return dx


def embedding(dy: Tensor, ids: Tensor, vocab_size: int) -> Tensor:
    """y = table[ids]: the gradient of the table, [vocab_size, K], of ``dy`` [n, K]; torch chooses the order in which
    the rows of a token that occurs repeatedly are added."""
    grad: Tensor = torch.ops.aten.embedding_dense_backward(dy, ids, vocab_size, -1, False)
    return grad
