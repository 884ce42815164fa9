"""The plan of FlashInfer's attention, its kernel run on the host: every position and every row once."""

from __future__ import annotations

import itertools
from pathlib import Path
from shutil import which
from subprocess import run

import pytest

from tokenspeed.compile.capture_toolchain import source_folder

PLAN_SIZES = ("num_seqs", "pages_per_seq", "page_size", "tiles", "query_rows", "group", "min_chunk")


@pytest.fixture(scope="module")
def plan_program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """kernels/flashinfer/plan.cuh as a program of the host."""
    if which("g++") is None:
        pytest.skip("needs a C++ compiler")
    source = (source_folder() / "flashinfer" / "plan.cuh").read_text()
    for old, new in (
        ("#pragma once", ""),
        ("#include <cuda_runtime.h>", ""),
        ("constexpr int kPlanThreads = 256;", "constexpr int kPlanThreads = kThreads;"),
        ("extern __shared__ int32_t first_tile[];", "static int32_t first_tile[4096];"),
        ("__shared__ int32_t scratch", "static int32_t scratch"),
    ):
        assert source.count(old) == 1, old
        source = source.replace(old, new)
    folder = tmp_path_factory.mktemp("plan")
    program = (Path(__file__).parent / "capture_plan.cpp").read_text().replace("\nPLAN\n", f"\n{source}\n")
    (folder / "plan.cpp").write_text(program)
    run(["g++", "-std=c++20", "-O1", "-pthread", "-o", folder / "plan", folder / "plan.cpp"], check=True)
    return folder / "plan"


def run_plan(program: Path, sizes: dict[str, int], lengths: list[int], contexts: list[int]) -> dict[str, list[int]]:
    numbers = [*(sizes[name] for name in PLAN_SIZES), len(lengths), *lengths, *contexts]
    printed = run([program], input=" ".join(map(str, numbers)), capture_output=True, text=True, check=True).stdout
    return {name: [int(n) for n in values] for name, *values in (line.split() for line in printed.splitlines())}


def check_lengths(plan: dict[str, list[int]], sizes: dict[str, int], contexts: list[int]) -> None:
    """FlashInfer's arithmetic in unsigned 32 bits gives each sequence its length, and its row of the page table."""
    pages, page_size = sizes["pages_per_seq"], sizes["page_size"]
    assert plan["indptr"] == [pages * i for i in range(sizes["num_seqs"] + 1)]
    got = [((pages - 1) * page_size + last) % 2**32 for last in plan["last"]]
    assert got == contexts + [1] * (sizes["num_seqs"] - len(contexts))


@pytest.mark.parametrize(
    ("contexts", "seqs", "spare", "chunk"),
    [
        ([1000], 1, 64, 128),
        ([1], 4, 8, 128),
        ([5000, 3, 128, 129, 2000, 1], 8, 4, 1024),
        ([4096] * 32, 32, 64, 1536),
        ([128] * 70 + [8192], 128, 2, 256),
        ([64, 640], 2, 0, 640),
    ],
)
def test_the_plan_of_a_decode_step_covers_every_position_once(
    plan_program: Path, contexts: list[int], seqs: int, spare: int, chunk: int
) -> None:
    sizes = {"num_seqs": seqs, "pages_per_seq": 128, "page_size": 64, "tiles": seqs + spare, "query_rows": 0,
             "group": 1, "min_chunk": 128}  # fmt: skip
    plan = run_plan(plan_program, sizes, [1] * len(contexts), contexts)
    check_lengths(plan, sizes, contexts)
    assert plan["chunk"] == [chunk]
    pieces = [(seq, piece) for seq, context in enumerate(contexts) for piece in range(-(-context // chunk))]
    assert list(zip(plan["request"], plan["kv"], strict=True))[: len(pieces)] == pieces
    assert plan["valid"] == [1] * len(pieces) + [0] * (seqs + spare - len(pieces))
    counts = [-(-context // chunk) for context in contexts] + [0] * (seqs - len(contexts))
    assert plan["out"] == [0, *itertools.accumulate(counts)]
    smaller = [c for c in range(128, chunk, 128) if sum(-(-n // c) for n in contexts) <= seqs + spare]
    assert not smaller or smaller[0] >= chunk * 0.75  # no finer cut that is a rung of the ladder


def test_a_plan_without_cuts_gives_each_sequence_a_block(plan_program: Path) -> None:
    sizes = {"num_seqs": 70, "pages_per_seq": 4, "page_size": 64, "tiles": 70, "query_rows": 0, "group": 1,
             "min_chunk": 0}  # fmt: skip
    contexts = [1 + 3 * i for i in range(66)]
    plan = run_plan(plan_program, sizes, [1] * 66, contexts)
    check_lengths(plan, sizes, contexts)
    assert plan["request"][:66] == list(range(66)) and plan["valid"] == [1] * 66 + [0] * 4 and plan["chunk"] == [0]


def test_the_plan_of_a_mixed_step_covers_every_row_once_and_the_last_first(plan_program: Path) -> None:
    lengths = [1, 1, 700, 33, 32, 31, 1, 300]
    contexts = [5, 900, 700, 40, 32, 64, 1, 301]
    sizes = {"num_seqs": 12, "pages_per_seq": 16, "page_size": 64, "tiles": 1200 * 3 // 64 + 12, "query_rows": 64,
             "group": 3, "min_chunk": 0}  # fmt: skip
    plan = run_plan(plan_program, sizes, lengths, contexts)
    check_lengths(plan, sizes, contexts)
    tiles = [(seq, tile) for seq, length in enumerate(lengths) for tile in range(-(-length * 3 // 64))]
    assert list(zip(plan["request"], plan["query"], strict=True))[: len(tiles)] == tiles[::-1]
    assert plan["valid"] == [1] * len(tiles) + [0] * (sizes["tiles"] - len(tiles))
    assert set(plan["kv"]) == {0}
