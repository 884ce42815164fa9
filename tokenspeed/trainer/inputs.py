"""What a caller's tensors ask for: padded or packed sequences to a Batch, and places for its results."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tokenspeed.errors import UsageError
from tokenspeed.trainer.steps import Batch

IGNORED_LABEL = -100
"""Of a token that does not count in a loss, as torch's cross entropy has it."""
_HARMLESS = {"return_dict": (None, True), "output_attentions": (None, False), "output_hidden_states": (None, False)}
"""Arguments of a model of transformers, and values that ask for nothing more."""


@dataclass(frozen=True)
class Asked:
    """A batch, and where its results go.

    Attributes:
        batch: sequences without padding.
        shape: of the result, without its columns.
        index: int64[R]: place of each row's result in the flattened result.
        counted: bool[R]: rows that count in the loss; None where there is none.
        keep: the last tokens (or these) that are kept of each sequence's logits; None: all.
    """

    batch: Batch
    shape: torch.Size
    index: Tensor
    counted: Tensor | None = None
    keep: int | Tensor = 0

    def places(self, device: torch.device) -> tuple[Tensor, ...]:
        """``index`` by dimension."""
        by_dimension: tuple[Tensor, ...] = torch.unravel_index(self.index.to(device), self.shape)
        return by_dimension

    def kept(self, logits: Tensor) -> Tensor:
        """What is kept of logits [B, L, V]."""
        if isinstance(self.keep, int):
            return logits[:, -self.keep :] if self.keep else logits
        return logits[:, self.keep.to(logits.device)]


@dataclass(frozen=True)
class _Sequences:
    """int64[N] ids on the CPU, one sequence after another; for each the place of its token in the caller's tensor."""

    ids: Tensor
    lengths: tuple[int, ...]
    index: Tensor

    def not_first(self) -> Tensor:
        """bool[N]: tokens that follow another one."""
        result = torch.ones(len(self.ids), dtype=torch.bool)
        lengths = torch.tensor(self.lengths)
        result[torch.cumsum(lengths, 0) - lengths] = False
        return result


def for_logprobs(
    input_ids: Tensor, attention_mask: Tensor | None, cu_seqlens: Tensor | Sequence[int] | None, mask: Tensor | None
) -> Asked:
    """See ``Aligned.logprobs``. Raises UsageError for tensors that do not fit together."""
    if cu_seqlens is None:
        sequences = _padded(input_ids, attention_mask)
    elif attention_mask is not None:
        raise UsageError("attention_mask is of padded sequences and cu_seqlens of packed ones: give one of them")
    else:
        sequences = _packed(input_ids, cu_seqlens)
    asked = sequences.not_first()
    if mask is not None:
        if mask.shape != input_ids.shape:
            raise UsageError(f"mask is {list(mask.shape)}; it must be {list(input_ids.shape)}, as input_ids are")
        asked &= mask.cpu().bool().flatten()[sequences.index]
    (tokens,) = torch.nonzero(asked, as_tuple=True)
    batch = Batch(sequences.ids, sequences.lengths, tokens - 1, sequences.ids[tokens])
    return Asked(batch, input_ids.shape, sequences.index[tokens])


def for_logits(
    input_ids: Tensor,
    attention_mask: Tensor | None,
    position_ids: Tensor | None,
    labels: Tensor | None,
    keep: int | Tensor,
) -> Asked:
    """See ``Aligned.forward``. Raises UsageError for tensors that do not fit together."""
    sequences = _padded(input_ids, attention_mask)
    _check_positions(sequences, position_ids, input_ids.shape)
    count, not_first = len(sequences.ids), sequences.not_first()
    targets = torch.zeros(count, dtype=torch.long)
    counted = None
    if labels is not None:
        if labels.shape != input_ids.shape:
            raise UsageError(f"labels are {list(labels.shape)}; they must be {list(input_ids.shape)}, as input_ids are")
        own = labels.cpu().flatten()[sequences.index].long()
        counted = torch.zeros(count, dtype=torch.bool)
        counted[:-1] = not_first[1:] & (own[1:] != IGNORED_LABEL)
        targets[:-1][counted[:-1]] = own[1:][counted[:-1]]
    wanted = torch.ones(count, dtype=torch.bool)
    if not (isinstance(keep, int) and keep == 0):
        row = torch.arange(input_ids.shape[1])
        columns = row[-keep:] if isinstance(keep, int) else row[keep.cpu()]
        wanted = torch.isin(sequences.index % input_ids.shape[1], columns)
        if counted is not None:
            wanted |= counted
    (rows,) = torch.nonzero(wanted, as_tuple=True)
    batch = Batch(sequences.ids, sequences.lengths, rows, targets[rows])
    return Asked(batch, input_ids.shape, sequences.index[rows], None if counted is None else counted[rows], keep)


def _whole(numbers: Tensor) -> bool:
    return not (numbers.is_floating_point() or numbers.is_complex() or numbers.dtype is torch.bool)


def _padded(input_ids: Tensor, attention_mask: Tensor | None) -> _Sequences:
    if input_ids.dim() != 2 or not _whole(input_ids) or not input_ids.numel():
        raise UsageError(f"input_ids are {input_ids.dtype}{list(input_ids.shape)}; they must be whole numbers [B, L]")
    if attention_mask is None:
        present = torch.ones(input_ids.shape, dtype=torch.bool)
    elif attention_mask.shape != input_ids.shape:
        raise UsageError(
            f"attention_mask is {list(attention_mask.shape)}; it must be {list(input_ids.shape)}, as input_ids are"
        )
    else:
        present = attention_mask.cpu().bool()
    lengths = present.sum(1)
    starts = (present[:, 1:] & ~present[:, :-1]).sum(1) + present[:, 0]
    for row, (length, runs) in enumerate(zip(lengths.tolist(), starts.tolist(), strict=True)):
        if length == 0 or runs != 1:
            raise UsageError(
                f"row {row} of attention_mask has {length} tokens in {runs} runs: need one run of at least one token,"
                " with padding on its left or right"
            )
    (index,) = torch.nonzero(present.flatten(), as_tuple=True)
    return _Sequences(input_ids.cpu().flatten()[index].long(), tuple(lengths.tolist()), index)


def _packed(input_ids: Tensor, cu_seqlens: Tensor | Sequence[int]) -> _Sequences:
    if input_ids.dim() != 1 or not _whole(input_ids):
        raise UsageError(
            f"input_ids are {input_ids.dtype}{list(input_ids.shape)}; with cu_seqlens they must be whole numbers [N]"
        )
    bounds = torch.as_tensor(cu_seqlens).cpu()
    lengths = bounds.long().diff()
    if (
        not _whole(bounds)
        or bounds.dim() != 1
        or len(bounds) < 2
        or bounds[0] != 0
        or bounds[-1] != len(input_ids)
        or (lengths < 1).any()
    ):
        raise UsageError(
            f"cu_seqlens must rise from 0 to the {len(input_ids)} tokens of input_ids, by at least one token a sequence"
        )
    return _Sequences(input_ids.cpu().long(), tuple(lengths.tolist()), torch.arange(len(input_ids)))


def _check_positions(sequences: _Sequences, position_ids: Tensor | None, shape: torch.Size) -> None:
    """An artifact's positions count a sequence's tokens from 0 on; other ones are refused."""
    if position_ids is None:
        return
    lengths = torch.tensor(sequences.lengths)
    need = torch.arange(len(sequences.ids)) - (torch.cumsum(lengths, 0) - lengths).repeat_interleave(lengths)
    have = position_ids.cpu().expand(shape).flatten()[sequences.index]
    if not torch.equal(have.long(), need):
        raise UsageError(
            "position_ids must count the tokens of each row from 0 on, without its padding",
            hint="leave position_ids out; for packed sequences use Aligned.logprobs with cu_seqlens",
        )


def check_batch(batch: Batch, vocab_size: int, max_model_len: int) -> None:
    """Refuse ids that the embedding has no row for, and sequences beyond the rope table."""
    for what, ids in (("input_ids", batch.ids), ("labels", batch.targets)):
        if len(ids) and not 0 <= int(ids.min()) <= int(ids.max()) < vocab_size:
            raise UsageError(
                f"{what} go from {int(ids.min())} to {int(ids.max())}; they must be tokens below {vocab_size}"
            )
    longest = max(batch.lengths, default=0)
    if longest > max_model_len:
        raise UsageError(
            f"a sequence has {longest} tokens; the artifact's max_model_len is {max_model_len}",
            hint=f"rebuild it with --max-model-len {longest} or more",
        )


def refuse_others(others: Mapping[str, Any], use_cache: bool | None) -> None:
    """Refuse what the aligned forward does not do."""
    if use_cache:
        raise UsageError(
            "the aligned model keeps no cache: use_cache must not be true",
            hint="generate with the engine that serves the artifact, or inside own_forward()",
        )
    for name, value in others.items():
        if value is not None and value not in _HARMLESS.get(name, (None,)):
            raise UsageError(f"the aligned model has no {name}", hint="call it inside own_forward()")
