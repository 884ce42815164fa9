"""The ladder of buckets for a deployment, and the proof that it covers every step of the scheduler.

A step has 1 <= num_seqs <= max_num_seqs sequences, num_seqs <= num_tokens <= max_prefill_tokens tokens and
num_logit_rows <= min(num_tokens, max_logit_rows) logit rows. In a decode step the three are equal.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from tokenspeed.bucket import Bucket, BucketKind, BucketTable, StepLimits
from tokenspeed.errors import ProgramError

SMALLEST_MIXED = 16
"""Tokens of the smallest mixed bucket: a chunk below this costs as much as one of this size."""
FINE_DECODE, FINE_MIXED = 64, 512
"""Sizes from which the ladder is finer: about where the work of a step outweighs reading the weights."""


def ladder(limits: StepLimits) -> tuple[Bucket, ...]:
    """Decode buckets over num_seqs and mixed buckets over num_tokens, up to exactly the limits.

    Small ones double: such steps wait for weights, whatever their size. Large ones grow by half and by a third in turn,
    so that what a step costs is never far from what its bucket's other steps do.
    """
    decode = (Bucket(BucketKind.DECODE, n, n, n) for n in _rungs(1, FINE_DECODE, limits.max_num_seqs))
    mixed = (
        Bucket(BucketKind.MIXED, n, min(n, limits.max_num_seqs), min(n, limits.max_logit_rows))
        for n in _rungs(SMALLEST_MIXED, FINE_MIXED, limits.max_prefill_tokens)
    )
    return (*decode, *mixed)


def _rungs(first: int, fine: int, last: int) -> Iterator[int]:
    """first, 2 * first, ... and from ``fine`` on also the sizes in the middle; then ``last``."""
    size = first
    while size < last:
        yield size
        if size >= fine and size * 3 // 2 < last:
            yield size * 3 // 2
        size *= 2
    yield last


def prove_coverage(buckets: Iterable[Bucket], limits: StepLimits) -> int:
    """Prove that every step within ``limits`` has a bucket; returns how many distinct steps that are.

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
