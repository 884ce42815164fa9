"""Buckets: the padded shapes that an artifact has LaunchGraphs for, and the lookup that picks one for a step.

Builder and runtime share this file, so the bucket that the build proves to exist is the one that is used.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from itertools import pairwise

from tokenspeed.errors import ProgramError


class BucketKind(StrEnum):
    """``decode``: one token and one logit row per sequence. ``mixed``: prefill chunks and decodes together."""

    DECODE = "decode"
    MIXED = "mixed"


@dataclass(frozen=True)
class StepLimits:
    """The largest step: what the scheduler never exceeds and the builder plans for.

    ``max_prefill_tokens`` bounds the tokens of a step, chunks and decodes together. Every sequence may draw
    in one step, so max_num_seqs <= max_logit_rows <= max_prefill_tokens. Raises ProgramError otherwise.
    """

    max_prefill_tokens: int
    max_num_seqs: int
    max_logit_rows: int

    def __post_init__(self) -> None:
        if not 1 <= self.max_num_seqs <= self.max_logit_rows <= self.max_prefill_tokens:
            raise ProgramError(
                f"step limits: need 1 <= max_num_seqs <= max_logit_rows <= max_prefill_tokens, "
                f"have {self.max_num_seqs}, {self.max_logit_rows}, {self.max_prefill_tokens}"
            )


@dataclass(frozen=True, order=True)
class Bucket:
    """One padded shape: the most tokens, sequences and logit rows of a step that its LaunchGraph runs."""

    kind: BucketKind
    num_tokens: int
    num_seqs: int
    num_logit_rows: int

    @property
    def name(self) -> str:
        """The name as one path component: a bucket is known by its kind and its tokens."""
        return f"{self.kind}-{self.num_tokens}"

    def __str__(self) -> str:
        return f"{self.name} ({self.num_seqs} seqs, {self.num_logit_rows} logit rows)"

    def covers(self, num_tokens: int, num_seqs: int, num_logit_rows: int) -> bool:
        """Whether a step of these sizes fits."""
        return (
            num_tokens <= self.num_tokens and num_seqs <= self.num_seqs and num_logit_rows <= self.num_logit_rows
        )  # fmt: skip


class BucketTable:
    """The buckets of one target, for lookup. Each kind is ordered by num_tokens, its other sizes never falling."""

    def __init__(self, buckets: Iterable[Bucket]):
        self.buckets = tuple(sorted(buckets))
        self._by_kind: dict[BucketKind, tuple[Bucket, ...]] = {}
        self._tokens: dict[BucketKind, list[int]] = {}
        for kind in BucketKind:
            rung = tuple(b for b in self.buckets if b.kind is kind)
            for low, high in pairwise(rung):
                grows = low.num_tokens < high.num_tokens and high.covers(0, low.num_seqs, low.num_logit_rows)
                if not grows:
                    raise ProgramError(f"buckets: need sizes that grow together, have {low} before {high}")
            self._by_kind[kind] = rung
            self._tokens[kind] = [b.num_tokens for b in rung]

    def find(self, num_tokens: int, num_seqs: int, num_logit_rows: int, *, decode_only: bool) -> Bucket | None:
        """The smallest bucket that covers a step of these sizes, or None."""
        kind = BucketKind.DECODE if decode_only else BucketKind.MIXED
        rung = self._by_kind[kind]
        for bucket in rung[bisect_left(self._tokens[kind], num_tokens) :]:
            if bucket.covers(num_tokens, num_seqs, num_logit_rows):
                return bucket
        return None


def prove_coverage(buckets: Iterable[Bucket], limits: StepLimits) -> int:
    """Prove that every step within ``limits`` has a bucket; returns how many distinct steps that are.

    A step has 1 <= num_seqs <= max_num_seqs sequences, num_seqs <= num_tokens <= max_prefill_tokens tokens and
    num_logit_rows <= min(num_tokens, max_logit_rows) logit rows. In a decode step the three are equal.
    For each num_tokens only the step with most sequences and rows is looked up: a bucket that covers it covers
    every step of as many tokens. Raises ProgramError naming the first uncovered step, and for a bucket that
    goes beyond the limits (the arena would not hold it).
    """
    table = BucketTable(buckets)
    for bucket in table.buckets:
        largest = (limits.max_prefill_tokens, limits.max_num_seqs, limits.max_logit_rows)
        if not Bucket(bucket.kind, *largest).covers(bucket.num_tokens, bucket.num_seqs, bucket.num_logit_rows):
            raise ProgramError(f"buckets: need sizes within {largest}, have {bucket}")
    for num_seqs in range(1, limits.max_num_seqs + 1):
        if table.find(num_seqs, num_seqs, num_seqs, decode_only=True) is None:
            raise _uncovered("decode", num_seqs, num_seqs, num_seqs)
    proved = limits.max_num_seqs
    for num_tokens in range(1, limits.max_prefill_tokens + 1):
        num_seqs, rows = min(num_tokens, limits.max_num_seqs), min(num_tokens, limits.max_logit_rows)
        if table.find(num_tokens, num_seqs, rows, decode_only=False) is None:
            raise _first_uncovered(table, num_tokens, num_seqs, rows)
        proved += num_seqs * (rows + 1)
    return proved


def _first_uncovered(table: BucketTable, num_tokens: int, max_seqs: int, max_rows: int) -> ProgramError:
    def uncovered(num_seqs: int, rows: int) -> bool:
        return table.find(num_tokens, num_seqs, rows, decode_only=False) is None

    num_seqs = next(n for n in range(1, max_seqs + 1) if uncovered(n, max_rows))
    rows = next(n for n in range(max_rows + 1) if uncovered(num_seqs, n))
    return _uncovered("mixed", num_tokens, num_seqs, rows)


def _uncovered(kind: str, num_tokens: int, num_seqs: int, rows: int) -> ProgramError:
    return ProgramError(
        f"buckets: need one for every step, have none for a {kind} step of {num_tokens} tokens, "
        f"{num_seqs} sequences and {rows} logit rows"
    )
