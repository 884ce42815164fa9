"""The ops of a step in reverse: from gradients of its results to gradients of the model's parameters."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import torch
from torch import Tensor

from tokenspeed.compile.ops import SCHEMAS
from tokenspeed.errors import ProgramError
from tokenspeed.trainer import formulas
from tokenspeed.trainer.packing import Parameters
from tokenspeed.values import StepOp

SAVED: Mapping[str, tuple[str, ...]] = {
    "embedding": (),
    "rms_norm": ("x",),
    "linear": ("x",),
    "linear_add": ("x",),
    "linear_silu_mul": ("x",),
    "rope_kv_write": ("qkv",),
    "paged_attention": (),
    "gather_rows": ("x",),
    "adjust_logits": ("logits",),
    "sample": ("logits",),
}
"""Kinds of op that have a gradient here, and the operands that it reads. x of gather_rows is what the tail, which runs
repeatedly, begins with."""


def operand(op: StepOp, name: str) -> str:
    """The value bound to the operand ``name`` of the op's schema."""
    return op.inputs[SCHEMAS[op.kind].operands.index(name)]


def saved_values(ops: Iterable[StepOp]) -> frozenset[str]:
    """What the gradients of ``ops`` read. Raises ProgramError for an op that has none here."""
    saved: set[str] = set()
    for op in ops:
        if op.kind not in SAVED:
            raise ProgramError(f"op {op.name!r}: the trainer has no gradient of {op.kind}")
        saved.update(operand(op, name) for name in SAVED[op.kind])
    return frozenset(saved)


@dataclass(frozen=True)
class ChunkSizes:
    """What the gradients ask of the step that ran: ``ids`` int64[n], ``positions`` int64[n], ``lengths`` of its
    sequences."""

    ids: Tensor
    positions: Tensor
    lengths: Sequence[int]


class ParameterGradients:
    """Sums of gradients by parameter. A first one is kept as it comes; a second makes the sum float32."""

    def __init__(self, wanted: Iterable[str]):
        self.wanted = frozenset(wanted)
        self._sums: dict[str, Tensor] = {}

    def add(self, name: str, grad: Tensor) -> None:
        if name not in self.wanted:
            return
        have = self._sums.get(name)
        if have is None:
            self._sums[name] = grad
        elif have.dtype in (torch.float32, torch.float64):
            have += grad
        else:
            self._sums[name] = have.float() + grad

    def take(self, name: str, like: Tensor) -> Tensor | None:
        """The gradient of a parameter in its dtype; None where nothing has reached it."""
        grad = self._sums.pop(name, None)
        return None if grad is None else grad.to(like.dtype).view_as(like)


@dataclass
class Reverse:
    """Walks ops backwards.

    Attributes:
        parameters: of the model.
        read: the rows of a saved value by its name.
        step: what ran.
        grads: where gradients of parameters go.
        rope_table: float32 [positions, d], cosines then sines.
        upstream: gradients of the values that are not done with.
    """

    parameters: Parameters
    read: Callable[[str], Tensor]
    step: ChunkSizes
    grads: ParameterGradients
    rope_table: Tensor
    upstream: dict[str, Tensor] = field(default_factory=dict)
    _rotated: dict[str, tuple[Tensor, Tensor, Tensor]] = field(default_factory=dict)

    def run(self, ops: Sequence[StepOp]) -> None:
        """Take ``upstream`` through ``ops``, the last first."""
        self._writers = {name: op for op in ops if op.kind == "rope_kv_write" for name in op.outputs}
        for op in reversed(ops):
            if op.kind in _STEPS and any(name in self.upstream for name in op.outputs):
                _STEPS[op.kind](self, op)

    def give(self, name: str, grad: Tensor) -> None:
        """Add to the gradient of a value. The tensor is the walk's from here on."""
        have = self.upstream.get(name)
        self.upstream[name] = grad if have is None else have.add_(grad)

    def _wants(self, weight: str) -> bool:
        return not self.grads.wanted.isdisjoint(self.parameters.parts(weight))

    def _weight_gradient(self, weight: str, grad: Tensor) -> None:
        """Hand the rows of a stacked weight's gradient to the parameters that it is made of."""
        at = 0
        for name in self.parameters.parts(weight):
            rows = len(self.parameters.tensors[name])
            self.grads.add(name, grad[at : at + rows])
            at += rows
        assert at == len(grad), (weight, at, grad.shape)

    def _embedding(self, op: StepOp) -> None:
        dy, table = self.upstream.pop(op.outputs[0]), operand(op, "table")
        if self._wants(table):
            vocab_size = len(self.parameters.tensors[table])
            self.grads.add(table, formulas.embedding(dy, self.step.ids, vocab_size))

    def _rms_norm(self, op: StepOp) -> None:
        x, weight = op.inputs
        dy = self.upstream.pop(op.outputs[0])
        dx, dweight = formulas.rms_norm(dy, self.read(x), self.parameters.matrix(weight), op.attrs["eps"])
        self.give(x, dx)
        self.grads.add(weight, dweight)

    def _linear(self, op: StepOp) -> None:
        self._projection(op, self.upstream.pop(op.outputs[0]))

    def _linear_add(self, op: StepOp) -> None:
        dy = self.upstream.pop(op.outputs[0])
        self._projection(op, dy)
        self.give(operand(op, "residual"), dy)

    def _projection(self, op: StepOp, dy: Tensor) -> None:
        x, weight = op.inputs[:2]
        if self._wants(weight):
            self._weight_gradient(weight, formulas.linear_weight(dy, self.read(x)))
        self.give(x, formulas.linear_input(dy, self.parameters.matrix(weight)))

    def _linear_silu_mul(self, op: StepOp) -> None:
        x_name, weight = op.inputs
        x, dy = self.read(x_name), self.upstream.pop(op.outputs[0])
        names = self.parameters.parts(weight)
        gate, up = (self.parameters.matrix(name) for name in names)
        dgate, dup = formulas.silu_mul(dy, x @ gate.T, x @ up.T)
        for name, part, grad in zip(names, (gate, up), (dgate, dup), strict=True):
            if self._wants(name):
                self.grads.add(name, formulas.linear_weight(grad, x))
            self.give(x_name, formulas.linear_input(grad, part))

    def _paged_attention(self, op: StepOp) -> None:
        q_name, kv_name = operand(op, "q"), operand(op, "kv")
        q, k, v = self._rotate(self._writers[kv_name])
        dy = self.upstream.pop(op.outputs[0]).view(q.shape)
        dq, dk, dv = formulas.attention(dy, q, k, v, self.step.lengths, op.attrs["scale"])
        self.give(q_name, dq)
        self.give(kv_name, torch.cat([dk, dv], dim=1))

    def _rope_kv_write(self, op: StepOp) -> None:
        dq, dkv = (self.upstream.pop(name) for name in op.outputs)
        cos, sin = self._angles()
        groups = op.attrs["num_kv_heads"]
        dk, dv = dkv.split([groups, groups], dim=1)
        parts = [formulas.rotate(dq, cos, -sin), formulas.rotate(dk, cos, -sin), formulas.wide(dv)]
        self.give(operand(op, "qkv"), torch.cat(parts, dim=1).flatten(1))

    def _rotate(self, op: StepOp) -> tuple[Tensor, Tensor, Tensor]:
        """q, k and v of an op rope_kv_write, as attention reads them: [n, heads, d] of the program dtype."""
        heads, groups, dims = (op.attrs[name] for name in ("num_heads", "num_kv_heads", "head_dim"))
        qkv = self.read(operand(op, "qkv")).view(-1, heads + 2 * groups, dims)
        q, k, v = qkv.split([heads, groups, groups], dim=1)
        cos, sin = self._angles()
        dtype = self.parameters.dtype
        return formulas.rotate(q, cos, sin).to(dtype), formulas.rotate(k, cos, sin).to(dtype), v.to(dtype)

    def _angles(self) -> tuple[Tensor, Tensor]:
        cos, sin = self.rope_table[self.step.positions].chunk(2, dim=1)
        return cos, sin


_Step: TypeAlias = Callable[[Reverse, StepOp], None]
_STEPS: Mapping[str, _Step] = {
    "embedding": Reverse._embedding,
    "rms_norm": Reverse._rms_norm,
    "linear": Reverse._linear,
    "linear_add": Reverse._linear_add,
    "linear_silu_mul": Reverse._linear_silu_mul,
    "rope_kv_write": Reverse._rope_kv_write,
    "paged_attention": Reverse._paged_attention,
}
"""gather_rows, adjust_logits and sample are where a walk begins or ends."""
