"""The ladder of buckets for a deployment; ``tokenspeed.bucket.prove_coverage`` proves that it covers every step."""

from __future__ import annotations

from collections.abc import Iterator

from tokenspeed.bucket import Bucket, BucketKind, StepLimits

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
