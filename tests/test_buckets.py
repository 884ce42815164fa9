"""The ladder covers every step of the scheduler, and a gap is found and named."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tokenspeed.bucket import Bucket, BucketKind, BucketTable, StepLimits, prove_coverage
from tokenspeed.compile.buckets import ladder
from tokenspeed.errors import ProgramError

DECODE, MIXED = BucketKind.DECODE, BucketKind.MIXED


@st.composite
def limits(draw: st.DrawFn, most: int = 200) -> StepLimits:
    seqs, rows, tokens = sorted(draw(st.tuples(*[st.integers(1, most)] * 3)))
    return StepLimits(max_prefill_tokens=tokens, max_num_seqs=seqs, max_logit_rows=rows)


@settings(max_examples=50, deadline=None)
@given(limits(most=25))
def test_the_ladder_covers_every_step(largest: StepLimits) -> None:
    buckets = ladder(largest)
    table = BucketTable(buckets)
    count = largest.max_num_seqs
    for tokens in range(1, largest.max_prefill_tokens + 1):
        for seqs in range(1, min(tokens, largest.max_num_seqs) + 1):
            for rows in range(min(tokens, largest.max_logit_rows) + 1):
                found = table.find(tokens, seqs, rows, decode_only=False)
                assert found is not None and found.covers(tokens, seqs, rows)
                count += 1
    assert prove_coverage(buckets, largest) == count


@settings(deadline=None)
@given(limits())
def test_the_ladder_ends_exactly_at_the_limits(largest: StepLimits) -> None:
    buckets = ladder(largest)
    assert prove_coverage(buckets, largest) > 0
    decode = [b for b in buckets if b.kind is DECODE]
    mixed = [b for b in buckets if b.kind is MIXED]
    n = largest.max_num_seqs
    assert decode[-1] == Bucket(DECODE, n, n, n)
    assert mixed[-1] == Bucket(MIXED, largest.max_prefill_tokens, n, largest.max_logit_rows)
    assert len({b.name for b in buckets}) == len(buckets)


def test_a_usual_ladder() -> None:
    names = [b.name for b in ladder(StepLimits(2048, 24, 64))]
    assert names[:6] == ["decode-1", "decode-2", "decode-4", "decode-8", "decode-16", "decode-24"]
    assert names[6:] == [f"mixed-{n}" for n in (16, 32, 64, 128, 256, 512, 768, 1024, 1536, 2048)]
    wide = [b.num_seqs for b in ladder(StepLimits(8192, 256, 256)) if b.kind is DECODE]
    assert wide == [1, 2, 4, 8, 16, 32, 64, 96, 128, 192, 256]


def test_the_smallest_bucket_is_found() -> None:
    table = BucketTable(ladder(StepLimits(256, 8, 16)))
    assert table.find(3, 3, 3, decode_only=True) == Bucket(DECODE, 4, 4, 4)
    assert table.find(17, 2, 1, decode_only=False) == Bucket(MIXED, 32, 8, 16)
    assert table.find(256, 8, 16, decode_only=False) == Bucket(MIXED, 256, 8, 16)
    assert table.find(257, 1, 0, decode_only=False) is None
    assert table.find(9, 9, 9, decode_only=True) is None
    assert str(table.buckets[0]) == "decode-1 (1 seqs, 1 logit rows)"


@pytest.mark.parametrize(
    ("buckets", "text"),
    [
        ([Bucket(DECODE, 1, 1, 1), Bucket(MIXED, 32, 3, 8)], "a decode step of 2 tokens, 2 sequences and 2 logit rows"),
        ([Bucket(DECODE, 3, 3, 3), Bucket(MIXED, 16, 3, 8)], "a mixed step of 17 tokens, 1 sequences and 0 logit rows"),
        ([Bucket(DECODE, 3, 3, 3), Bucket(MIXED, 32, 2, 8)], "a mixed step of 3 tokens, 3 sequences and 0 logit rows"),
        ([Bucket(DECODE, 3, 3, 3), Bucket(MIXED, 32, 3, 7)], "a mixed step of 8 tokens, 1 sequences and 8 logit rows"),
        ([Bucket(DECODE, 4, 4, 4), Bucket(MIXED, 32, 3, 8)], r"need sizes within \(32, 3, 8\), have decode-4 "),
        ([Bucket(MIXED, 16, 3, 8), Bucket(MIXED, 32, 2, 8)], "need sizes that grow together, have mixed-16"),
    ],
)
def test_the_first_uncovered_step_is_named(buckets: list[Bucket], text: str) -> None:
    with pytest.raises(ProgramError, match=f"buckets: .*{text}"):
        prove_coverage(buckets, StepLimits(32, 3, 8))


@pytest.mark.parametrize("sizes", [(8, 9, 9), (8, 4, 3), (8, 0, 4), (8, 2, 9)])
def test_limits_that_no_scheduler_can_keep_are_refused(sizes: tuple[int, int, int]) -> None:
    with pytest.raises(ProgramError, match="need 1 <= max_num_seqs <= max_logit_rows <= max_prefill_tokens, have"):
        StepLimits(*sizes)
