"""The autograd function: log-probabilities (and logits) by replay, gradients by formulas over what a replay leaves.

The forward keeps nothing of a step but its inputs. The backward replays each step, which is right because weights that
have changed meanwhile are refused; a step that still lies in the arena is not computed again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tokenspeed.trainer import formulas
from tokenspeed.trainer.packing import Parameters
from tokenspeed.trainer.replay import Replayer
from tokenspeed.trainer.reverse import ChunkSizes, ParameterGradients, Reverse, saved_values
from tokenspeed.trainer.steps import Batch, Chunk

LOGITS_BYTES = 256 << 20
"""Of logits whose gradients are taken at a time."""


@dataclass(frozen=True, eq=False)
class Scored:
    """What a batch is asked for.

    Attributes:
        batch: its sequences and rows.
        chunks: the steps that they run in.
        logits: whether logits are wanted beside log-probabilities.
    """

    batch: Batch
    chunks: Sequence[Chunk]
    logits: bool


class Runner:
    """Runs batches on a Replayer and takes their gradients. ``device`` is where results go, and parameters are."""

    def __init__(self, replayer: Replayer, parameters: Parameters, device: torch.device):
        self._replayer = replayer
        self._parameters = parameters
        self.device = device
        self._resident: tuple[Scored, Chunk] | None = None
        self._vocab_size = parameters.program.metadata.integer("vocab_size")

    def forget(self) -> None:
        """The weights have changed: what lies in the arena is not theirs."""
        self._resident = None

    def forward(self, scored: Scored) -> tuple[Tensor, Tensor | None]:
        """float32 log-probabilities of the batch's targets, and logits [rows, vocabulary] if they are wanted."""
        replayer, rows = self._replayer, len(scored.batch.rows)
        logprobs = torch.empty(rows, dtype=torch.float32)
        logits = torch.empty(rows, self._vocab_size, device=self.device) if scored.logits else None
        for chunk in scored.chunks:
            self._run_head(scored, chunk)
            for group in replayer.groups(chunk.rows):
                logprobs[group] = replayer.run_tail(scored.batch, chunk, group)
                if logits is not None:
                    logits[group] = self._read_logits(group.stop - group.start)
        return logprobs.to(self.device), logits

    def backward(
        self, scored: Scored, dlogprobs: Tensor | None, dlogits: Tensor | None, grads: ParameterGradients
    ) -> None:
        """Add the gradients of the parameters to ``grads``. Their dtypes are what the formulas say, not autocast."""
        with torch.autocast(self.device.type, enabled=False):
            for chunk in scored.chunks:
                if chunk.rows.start < chunk.rows.stop:
                    self._backward(scored, chunk, dlogprobs, dlogits, grads)

    def _backward(
        self,
        scored: Scored,
        chunk: Chunk,
        dlogprobs: Tensor | None,
        dlogits: Tensor | None,
        grads: ParameterGradients,
    ) -> None:
        self._run_head(scored, chunk)
        num_tokens = chunk.num_tokens
        step = ChunkSizes(*self._places(scored, chunk), chunk.lengths)
        head_ops, tail_ops = self._replayer.ops
        begins = tail_ops[0].inputs[0]
        dhidden: Tensor | None = None
        for rows, saved in self._saved_groups(scored, chunk):
            walk = Reverse(self._parameters, saved.__getitem__, step, grads, self._replayer.rope_table())
            walk.give(self._replayer.plan.logits, self._dlogits(scored, rows, saved, dlogprobs, dlogits))
            walk.run(tail_ops)
            at = (scored.batch.rows[rows] - chunk.begin).to(self.device)
            part = formulas.rows_of(walk.upstream.pop(tail_ops[0].outputs[0]), at, num_tokens)
            dhidden = part if dhidden is None else dhidden.add_(part)
        assert dhidden is not None
        walk = Reverse(self._parameters, self._replayer.reader(num_tokens), step, grads, self._replayer.rope_table())
        walk.give(begins, dhidden)
        walk.run(head_ops)

    def _run_head(self, scored: Scored, chunk: Chunk) -> None:
        if self._resident is None or self._resident[0] is not scored or self._resident[1] is not chunk:
            self._resident = None
            self._replayer.run_head(scored.batch, chunk)
            self._resident = (scored, chunk)

    def _places(self, scored: Scored, chunk: Chunk) -> tuple[Tensor, Tensor]:
        ids = scored.batch.ids[chunk.begin : chunk.end]
        positions = torch.cat([torch.arange(piece.start, piece.end) for piece in chunk.pieces])
        return ids.to(self.device), positions.to(self.device)

    def _saved_groups(self, scored: Scored, chunk: Chunk) -> Iterator[tuple[slice, dict[str, Tensor]]]:
        """Rows of the chunk, and what the tail leaves of them: of several groups together, as few passes over the
        weights' gradients cost less."""
        replayer = self._replayer
        names = saved_values(replayer.ops[1]) - {replayer.ops[1][0].inputs[0]}
        size = max(1, LOGITS_BYTES // (4 * self._vocab_size * replayer.rows_per_group)) * replayer.rows_per_group
        for begin in range(chunk.rows.start, chunk.rows.stop, size):
            rows = slice(begin, min(begin + size, chunk.rows.stop))
            parts: dict[str, list[Tensor]] = {name: [] for name in names}
            for group in replayer.groups(rows):
                replayer.run_tail(scored.batch, chunk, group)
                for name in names:
                    parts[name].append(replayer.read(name, group.stop - group.start).clone())
            yield (
                rows,
                {name: torch.cat(tensors) for name, tensors in parts.items()},
            )

    def _read_logits(self, rows: int) -> Tensor:
        return self._replayer.read(self._replayer.plan.logits, rows)

    def _dlogits(
        self, scored: Scored, rows: slice, saved: dict[str, Tensor], dlogprobs: Tensor | None, dlogits: Tensor | None
    ) -> Tensor:
        logits = saved[self._replayer.plan.logits]
        if dlogprobs is None:
            assert dlogits is not None
            return formulas.wide(dlogits[rows]).clone()
        targets = scored.batch.targets[rows].to(self.device)
        grad = formulas.log_probability(dlogprobs[rows], logits, targets)
        return grad if dlogits is None else grad.add_(dlogits[rows])


class Replay(torch.autograd.Function):
    """``apply(runner, scored, guard, names, *parameters)`` -> (logprobs, logits or None); gradients of ``parameters``,
    which are called ``names``, that require them. ``guard`` raises where a backward comes too late."""

    @staticmethod
    def forward(
        ctx: Any, runner: Runner, scored: Scored, guard: Callable[[], None], names: Sequence[str], *parameters: Tensor
    ) -> Any:
        ctx.set_materialize_grads(False)
        ctx.runner, ctx.scored, ctx.guard, ctx.names = runner, scored, guard, names
        ctx.save_for_backward(*parameters)  # refuses weights that were changed before the backward
        return runner.forward(scored)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *upstream: Tensor | None) -> Any:
        dlogprobs, dlogits = upstream
        ctx.guard()
        parameters = ctx.saved_tensors
        grads = ParameterGradients(
            name for name, asked in zip(ctx.names, ctx.needs_input_grad[4:], strict=True) if asked
        )
        if dlogprobs is not None or dlogits is not None:
            ctx.runner.backward(ctx.scored, dlogprobs, dlogits, grads)
        return None, None, None, None, *(grads.take(n, p) for n, p in zip(ctx.names, parameters, strict=True))
