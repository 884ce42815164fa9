"""The kernel that brings a step's inputs to region io, under the interpreter: what a step uses, and nothing else."""

from __future__ import annotations

from collections.abc import Mapping
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
from tokenspeed.step import COUNTED_BY, DTYPE_BYTES, INPUTS, IO, OUTPUTS, STEP_COUNTS, PlacedTensor, place
from tokenspeed.target import GPU_TARGETS, Target

H200 = Target("cuda", "sm_90a")
SEQS, PAGES, PAGE_SIZE = 9, 300, 16
PLACED, IO_BYTES = place(IO, {"T": 1500, "S": SEQS, "P": PAGES, "R": 20, "V": 300, "C": 1})
BY_NAME = {tensor.name: tensor for tensor in PLACED}
INPUT_WORDS = min(BY_NAME[tensor.name].offset for tensor in OUTPUTS) // 4
UNTOUCHED = -77


def bucket(tokens: int) -> Bucket:
    return Bucket(BucketKind.MIXED, tokens, SEQS, 20)


def words_of(tensor: PlacedTensor, items: int) -> slice:
    first = tensor.offset // 4
    return slice(first, first + items * prod(tensor.shape[1:]) * DTYPE_BYTES[tensor.dtype] // 4)


def io_set(counts: tuple[int, ...], context_lens: tuple[int, ...]) -> Any:
    """An io set in which every word is another, with these sizes and contexts."""
    words = np.arange(1000, 1000 + INPUT_WORDS, dtype=np.int32)
    words[:8] = (*counts, *[0] * (8 - len(counts)))
    at = BY_NAME["context_lens"].offset // 4
    words[at : at + len(context_lens)] = context_lens
    return words


def staged(launch: Stage, source: Any, words: int = INPUT_WORDS, seed: int | None = None) -> Any:
    """What a launch leaves of memory in which nothing was touched before."""
    target = np.full(words, UNTOUCHED, np.int32)
    arguments = {"step_sizes": source[:8].copy(), "source": source, "target": target}
    assert launch.kernel is not None
    constants = {**dict(launch.kernel.constants), "PDL": False}
    run(staging.stage_io, launch.grid, arguments, constants, outputs=["target"], seed=seed)
    return target


def expected(source: Any, counts: Mapping[str, int], context_lens: tuple[int, ...]) -> Any:
    used = np.full(INPUT_WORDS, UNTOUCHED, np.int32)
    used[:8] = source[:8]
    for tensor in INPUTS:
        placed, first = BY_NAME[tensor.name], tensor.shape[0]
        if tensor.name == "page_table":
            for i in range(counts["num_seqs"]):
                row = placed.offset // 4 + i * PAGES
                pages = slice(row, row + -(-context_lens[i] // PAGE_SIZE))
                used[pages] = source[pages]
        else:
            scalar, more = COUNTED_BY[str(first)]
            words = words_of(placed, counts[STEP_COUNTS[scalar]] + more)
            used[words] = source[words]
    return used


@pytest.mark.parametrize(
    ("counts", "context_lens"),
    [
        ((1, 1, 1, 0, 0, 0), (1,)),
        ((3, 3, 3, 2, 5, 1), (16, 17, 4800)),
        ((1400, 9, 20, 9, 9 * 1024, 9), (4800, 1, 33, 4097, 4096, 5, 600, 31, 4799)),
        ((0, 0, 0, 0, 0, 0), ()),
    ],
    ids=["one", "some", "all", "none"],
)
def test_what_a_step_uses_is_copied_and_nothing_else(
    counts: tuple[int, ...], context_lens: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(staging, "WIDE_WORDS", 4000)  # so that there are wide tensors: biases
    monkeypatch.setattr(staging, "WIDE_PROGRAMS", 3)
    launch = inputs_stage(H200, PLACED, PAGE_SIZE, bucket(1500))
    source = io_set(counts, context_lens)
    assert launch.grid == (len(INPUTS) + 2 * (3 - 1) + 3, 3, 1)  # two wide tensors, nine rows
    want = expected(source, dict(zip(STEP_COUNTS, counts, strict=True)), context_lens)
    np.testing.assert_array_equal(staged(launch, source, seed=1), want)


@pytest.mark.parametrize("size", [2**31 - 1, -(2**31), -1])
def test_sizes_that_make_no_sense_touch_nothing_outside(size: int) -> None:
    """The interpreter refuses what lies outside; what is copied lies in its tensor."""
    launch = inputs_stage(H200, PLACED, PAGE_SIZE, bucket(20))
    have = staged(launch, io_set((size,) * 6, (size,) * SEQS))
    inside = np.zeros(INPUT_WORDS, bool)
    for tensor in PLACED:
        inside[words_of(tensor, tensor.shape[0])] = True
    assert (have[~inside] == UNTOUCHED).all() and (have[:6] == size).all()


def test_buckets_share_a_kernel() -> None:
    launches = [inputs_stage(H200, PLACED, PAGE_SIZE, bucket(tokens)) for tokens in (1, 512, 513, 1 << 20)]
    assert len({launch.kernel for launch in launches}) == 1
    assert [launch.grid[1] for launch in launches] == [1, 1, 2, staging.MOST_PARTS]
    assert not any(launch.programmatic for launch in launches)  # nothing comes before them


def test_rows_are_copied_as_many_as_counted() -> None:
    source = np.arange(4000, dtype=np.int32)
    source[2] = 3
    launch = copy_stage(H200, [Extent(400, 1200, 2, 0, 5)])
    have = staged(launch, source, 4000)
    np.testing.assert_array_equal(have[100:1000], source[100:1000])
    assert (have[:100] == UNTOUCHED).all() and (have[1000:] == UNTOUCHED).all()


def test_compiles_for_every_target_without_spilling() -> None:
    jobs = []
    sizes = {"T": 8192, "S": 256, "P": 8192, "R": 1024, "V": 152064, "C": 256}
    placed, nbytes = place(IO, sizes)
    assert nbytes < 1 << 33  # word numbers have 32 bits
    for target in map(Target.parse, GPU_TARGETS):
        launch = inputs_stage(target, placed, 16, Bucket(BucketKind.MIXED, 8192, 256, 1024))
        assert launch.kernel is not None
        jobs.append((launch.kernel, target))
    compiled = compile_kernels(jobs, workers=2)
    assert len(compiled) == len(GPU_TARGETS)
    assert all(code.info.stack_bytes == 0 for code in compiled.values())
