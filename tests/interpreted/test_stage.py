"""The kernel that brings a step's inputs to region io, under the interpreter: what a step uses is there, and what else
is copied stays in its tensor."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from typing import Any

import numpy as np
import pytest
from harness import run

from tokenspeed.bucket import Bucket, BucketKind
from tokenspeed.compile.codegen import compile_kernels
from tokenspeed.kernels.registry import Stage
from tokenspeed.kernels.triton import stage as staging
from tokenspeed.kernels.triton.stage import Extent, copy_stage, inputs_stage
from tokenspeed.step import COUNTED_BY, DTYPE_BYTES, INPUTS, IO, OUTPUTS, STEP_COUNTS, STEP_SCALARS, PlacedTensor, place
from tokenspeed.target import GPU_TARGETS, Target

H200 = Target("cuda", "sm_90a")
TOKENS, SEQS, ROWS, PAGE_SIZE = 1500, 19, 40, 16
ALL = (1400, SEQS, ROWS, SEQS, SEQS * 1024, SEQS)
"""Counts of a step that uses nearly everything."""
UNTOUCHED = -77


class Set:
    """An io set whose sequences have up to ``pages`` pages."""

    def __init__(self, pages: int):
        self.pages = pages
        self.placed, _ = place(IO, {"T": TOKENS, "S": SEQS, "P": pages, "R": ROWS, "V": 300, "C": 1})
        self.by_name = {tensor.name: tensor for tensor in self.placed}
        self.words = min(self.by_name[tensor.name].offset for tensor in OUTPUTS) // 4

    def words_of(self, tensor: PlacedTensor, items: int) -> slice:
        first = tensor.offset // 4
        return slice(first, first + items * prod(tensor.shape[1:]) * DTYPE_BYTES[tensor.dtype] // 4)

    def filled(self, counts: Sequence[int], context_lens: Sequence[int]) -> Any:
        """Every word is another, with these sizes and contexts."""
        words = np.arange(1000, 1000 + self.words, dtype=np.int32)
        words[:8] = (*counts, *[0] * (8 - len(counts)))
        at = self.by_name["context_lens"].offset // 4
        words[at : at + len(context_lens)] = context_lens
        return words

    def used(self, counts: Mapping[str, int], context_lens: Sequence[int]) -> Any:
        """Which words a step reads."""
        used = np.zeros(self.words, bool)
        used[:8] = True
        for tensor in INPUTS:
            placed, first = self.by_name[tensor.name], tensor.shape[0]
            if tensor.name == "page_table":
                for i in range(counts["num_seqs"]):
                    row = placed.offset // 4 + i * self.pages
                    used[row : row - (-context_lens[i] // PAGE_SIZE)] = True
            else:
                scalar, more = COUNTED_BY[str(first)]
                count = counts[STEP_COUNTS[scalar]]
                used[self.words_of(placed, count + more if count else 0)] = True
        return used

    def stage(self, bucket: Bucket) -> Stage:
        return inputs_stage(H200, self.placed, PAGE_SIZE, bucket)

    def inside(self, names: Sequence[str]) -> Any:
        """Which words belong to these tensors."""
        inside = np.zeros(self.words, bool)
        for name in names:
            inside[self.words_of(self.by_name[name], self.by_name[name].shape[0])] = True
        return inside


MIXED = Bucket(BucketKind.MIXED, TOKENS, SEQS, ROWS)
SHORT, LONG = Set(300), Set(4500)


def staged(
    launch: Stage, source: Any, most: Sequence[int] = (0, 0, 0), words: int | None = None, seed: int | None = None
) -> Any:
    """What a launch leaves of memory in which nothing was touched before; ``most`` are the sizes of its bucket."""
    target = np.full(words or len(source), UNTOUCHED, np.int32)
    arguments = {"step_sizes": source[:8].copy(), "source": source, "target": target}
    assert launch.kernel is not None
    constants = {**dict(launch.kernel.constants), "PDL": False}
    numbers = dict(zip(STEP_SCALARS, most, strict=True))
    run(staging.stage_io, launch.grid, {**arguments, **numbers}, constants, outputs=["target"], seed=seed)
    return target


def sizes_of(bucket: Bucket) -> tuple[int, int, int]:
    return bucket.num_tokens, bucket.num_seqs, bucket.num_logit_rows


def contexts(*lengths: int) -> tuple[int, ...]:
    """As many contexts as there are sequences: these, over and over."""
    return tuple(lengths[i % len(lengths)] for i in range(SEQS))


@pytest.mark.parametrize(
    ("io", "bucket", "counts", "context_lens"),
    [
        (SHORT, Bucket(BucketKind.DECODE, 1, 1, 1), (1, 1, 1, 0, 0, 0), (1,)),
        (SHORT, Bucket(BucketKind.DECODE, 3, 3, 3), (3, 3, 3, 2, 5, 1), (16, 17, 4800)),
        (SHORT, MIXED, ALL, contexts(4800, 1, 33, 4097, 4096, 5, 600, 31, 4799, 1024, 1025)),
        (SHORT, MIXED, (0, 0, 0, 0, 0, 0), ()),
        (LONG, Bucket(BucketKind.DECODE, 2, 2, 2), (2, 2, 2, 1, 1, 0), (72000, 1030)),
        (LONG, MIXED, (1400, SEQS, ROWS, 1, 0, 1), contexts(71999, 65600, 30000, 64000)),
        (Set(299), MIXED, ALL, contexts(4784, 1, 1041, 4783)),
        (Set(5), MIXED, ALL, contexts(80, 1, 16, 65)),
    ],
    ids=["one", "some", "all", "none", "long", "long rows", "odd rows", "short rows"],
)
def test_what_a_step_uses_is_copied(
    io: Set, bucket: Bucket, counts: tuple[int, ...], context_lens: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(staging, "WIDE_WORDS", 4000)  # so that there are wide tensors: biases
    launch, source = io.stage(bucket), io.filled(counts, context_lens)
    have = staged(launch, source, sizes_of(bucket), seed=1)
    used = io.used(dict(zip(STEP_COUNTS, counts, strict=True)), context_lens)
    np.testing.assert_array_equal(have[used], source[used])
    copied = have != UNTOUCHED
    np.testing.assert_array_equal(have[copied], source[copied])
    if not counts[3]:
        adjustments = [tensor.name for tensor in INPUTS if COUNTED_BY[str(tensor.shape[0])][0] >= len(STEP_SCALARS)]
        assert len(adjustments) == 12 and not copied[io.inside(adjustments)].any()


def test_little_is_copied_beyond_what_a_bucket_uses() -> None:
    """Of each row of the page table a few pages, of other tensors less than a vector."""
    bucket = Bucket(BucketKind.DECODE, 3, 3, 3)
    have = staged(SHORT.stage(bucket), SHORT.filled((2, 2, 2, 1, 1, 1), (4800, 1)), sizes_of(bucket))
    used = SHORT.used(dict(zip(STEP_COUNTS, (3, 3, 3, 1, 1, 1), strict=True)), (4800, 1, 0))
    table = SHORT.inside(["page_table"])
    assert ((have != UNTOUCHED) & ~used)[table].sum() == 2 * staging.HEAD_PAGES - 1
    beyond = np.flatnonzero((have != UNTOUCHED) & ~used & ~table)
    assert len(beyond) > 0 and all(used[at - staging.VECTOR + 1 : at].any() for at in beyond)


@pytest.mark.parametrize("size", [2**31 - 1, -(2**31), -1])
@pytest.mark.parametrize("absurd_bucket", [False, True])
def test_sizes_that_make_no_sense_touch_nothing_outside(size: int, absurd_bucket: bool) -> None:
    """The interpreter refuses what lies outside; what is copied lies in its tensor."""
    bucket = Bucket(BucketKind.MIXED, 20, SEQS, 20)
    most = (size,) * 3 if absurd_bucket else sizes_of(bucket)
    source = SHORT.filled((size,) * 6, (size,) * SEQS)
    have = staged(SHORT.stage(bucket), source, most)
    inside = np.zeros(SHORT.words, bool)
    for tensor in SHORT.placed:
        words = SHORT.words_of(tensor, tensor.shape[0])
        inside[words.start : -(-words.stop // staging.VECTOR) * staging.VECTOR] = True
    copied = have != UNTOUCHED
    assert not copied[~inside].any() and (have[:6] == size).all()
    np.testing.assert_array_equal(have[copied], source[copied])


def test_buckets_share_a_kernel() -> None:
    launches = [SHORT.stage(Bucket(BucketKind.MIXED, tokens, SEQS, ROWS)) for tokens in (1, 512, 513, 1 << 20)]
    assert len({launch.kernel for launch in launches}) == 1
    assert [launch.grid[1] for launch in launches] == [1, 1, 2, staging.MOST_PARTS]
    assert not any(launch.programmatic for launch in launches)  # nothing comes before them


def test_few_programs_read_for_a_decode() -> None:
    """Each that does costs time, whatever it finds."""
    grids = [SHORT.stage(Bucket(BucketKind.DECODE, n, n, n)).grid for n in (1, 64, 256)]
    assert grids == [(12, 1, 1), (15, 1, 1), (27, 1, 1)]


@pytest.mark.parametrize("item_bytes", [1200, 1204])
def test_rows_are_copied_as_many_as_counted(item_bytes: int) -> None:
    source = np.arange(4000, dtype=np.int32)
    source[2] = 3
    launch = copy_stage(H200, [Extent(400, item_bytes, 2, 0, 5, 5 * item_bytes)])
    have, end = staged(launch, source), 100 + 3 * item_bytes // 4
    np.testing.assert_array_equal(have[100:end], source[100:end])
    assert (have[:100] == UNTOUCHED).all() and (have[end:] == UNTOUCHED).all()


@pytest.mark.parametrize(("pages", "targets"), [(8192, GPU_TARGETS), (8191, ("cuda:sm_90a", "hip:gfx942"))])
def test_compiles_for_every_target_without_spilling(pages: int, targets: Sequence[str]) -> None:
    jobs = []
    sizes = {"T": 8192, "S": 256, "P": pages, "R": 1024, "V": 152064, "C": 256}
    placed, nbytes = place(IO, sizes)
    assert nbytes < 1 << 33  # word numbers have 32 bits
    for target in map(Target.parse, targets):
        launch = inputs_stage(target, placed, 16, Bucket(BucketKind.MIXED, 8192, 256, 1024))
        assert launch.kernel is not None
        jobs.append((launch.kernel, target))
    compiled = compile_kernels(jobs, workers=2)
    assert len(compiled) == len(targets)
    assert all(code.info.stack_bytes == 0 for code in compiled.values())
