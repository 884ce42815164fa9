"""Batches of whole sequences cut into the steps of an artifact, and what a step's inputs are. No bit depends on it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from tokenspeed.bucket import StepLimits
from tokenspeed.errors import UsageError


@dataclass(frozen=True)
class Batch:
    """Sequences, one after another.

    Attributes:
        ids: int64[N], token ids, on the CPU.
        lengths: tokens of each sequence, at least 1 each; N in all.
        rows: int64[R], ascending: tokens after which the next one is asked.
        targets: int64[R]: the token whose log-probability is asked there.
    """

    ids: torch.Tensor
    lengths: tuple[int, ...]
    rows: torch.Tensor
    targets: torch.Tensor


@dataclass(frozen=True)
class Piece:
    """Tokens ``[start, start + length)`` of a sequence, in one step."""

    start: int
    length: int

    @property
    def end(self) -> int:
        return self.start + self.length


@dataclass(frozen=True)
class ChunkInputs:
    """Inputs of one step, named as in tokenspeed/step.py, for as many tokens and sequences as it has."""

    token_ids: torch.Tensor
    positions: torch.Tensor
    slot_mapping: torch.Tensor
    cu_seqlens: torch.Tensor
    context_lens: torch.Tensor
    page_table: torch.Tensor


@dataclass(frozen=True)
class Chunk:
    """One step: pieces of sequences, the first token ``begin`` of the batch's, and which of ``Batch.rows`` are its."""

    begin: int
    pieces: tuple[Piece, ...]
    rows: slice = field(default_factory=lambda: slice(0, 0))

    @property
    def num_tokens(self) -> int:
        return sum(piece.length for piece in self.pieces)

    @property
    def end(self) -> int:
        return self.begin + self.num_tokens

    @property
    def lengths(self) -> tuple[int, ...]:
        return tuple(piece.length for piece in self.pieces)

    def inputs(self, batch: Batch, page_size: int, pages_per_seq: int) -> ChunkInputs:
        """Pages are numbered from 0 on, piece after piece; one that continues a sequence, alone in its step, finds the
        pages that the steps before it filled."""
        lengths, starts = torch.tensor(self.lengths), torch.tensor([piece.start for piece in self.pieces])
        ends = starts + lengths
        pages = -(-ends // page_size)
        first_page = torch.cumsum(pages, 0) - pages
        cu_seqlens = torch.zeros(len(self.pieces) + 1, dtype=torch.int32)
        torch.cumsum(lengths, 0, out=cu_seqlens[1:])
        place = torch.arange(self.num_tokens) - cu_seqlens[:-1].repeat_interleave(lengths)
        positions = place + starts.repeat_interleave(lengths)
        table = torch.arange(pages_per_seq) + first_page[:, None]
        table[torch.arange(pages_per_seq) >= pages[:, None]] = 0  # behind the last page: never read
        return ChunkInputs(
            batch.ids[self.begin : self.end],
            positions.int(),
            positions + first_page.repeat_interleave(lengths) * page_size,
            cu_seqlens,
            ends.int(),
            table.int(),
        )


def cut(batch: Batch, limits: StepLimits, *, may_split: bool) -> list[Chunk]:
    """The steps of ``batch``, in order, as few as taking sequences in order allows.

    Args:
        limits: of the artifact.
        may_split: whether a sequence that is longer than a step may run in several; then it has these to itself.

    Raises UsageError for a sequence that does not fit in a step and must not be split.
    """
    most = limits.max_prefill_tokens
    chunks: list[Chunk] = []
    begin, room = 0, most
    pieces: list[Piece] = []
    for index, length in enumerate(batch.lengths):
        if pieces and (length > room or len(pieces) == limits.max_num_seqs):
            chunks.append(Chunk(begin, tuple(pieces)))
            begin, pieces, room = chunks[-1].end, [], most
        if length > most:
            if not may_split:
                raise UsageError(
                    f"sequence {index} has {length} tokens: gradients need whole sequences in a step, and the artifact"
                    f" has steps of up to max_prefill_tokens = {most}",
                    hint=f"rebuild the artifact with --max-prefill-tokens {length} or more; it changes no bit",
                )
            for start in range(0, length, most):
                chunks.append(Chunk(begin, (Piece(start, min(most, length - start)),)))
                begin = chunks[-1].end
            continue
        pieces.append(Piece(0, length))
        room -= length
    if pieces:
        chunks.append(Chunk(begin, tuple(pieces)))
    return _with_rows(chunks, batch.rows)


def _with_rows(chunks: Sequence[Chunk], rows: torch.Tensor) -> list[Chunk]:
    ends = torch.searchsorted(rows, torch.tensor([chunk.end for chunk in chunks])).tolist()
    begins = [0, *ends[:-1]]
    return [Chunk(c.begin, c.pieces, slice(b, e)) for c, b, e in zip(chunks, begins, ends, strict=True)]


def num_pages(limits: StepLimits, page_size: int, pages_per_seq: int) -> int:
    """KV pages that any chunk needs: each sequence may leave its last page nearly empty; one that is split fills its
    own."""
    return max(limits.max_prefill_tokens // page_size + limits.max_num_seqs, pages_per_seq)
