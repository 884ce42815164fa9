"""Arena plans: buffers that live together never share a byte."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from lowered import LIMITS, fused_program, lowered

from tokenspeed.bucket import Bucket, BucketKind
from tokenspeed.compile.memory import ArenaPlan, Buffer, check_arena, plan_arena
from tokenspeed.errors import ProgramError
from tokenspeed.graph import Access, Region
from tokenspeed.step import align

lives = st.tuples(st.integers(0, 5000), st.integers(0, 20), st.integers(0, 6))
buffer_lists = st.lists(lives, max_size=25).map(
    lambda items: [Buffer(f"b{i}", n, first, first + length) for i, (n, first, length) in enumerate(items)]
)


@given(buffer_lists, st.randoms(use_true_random=False))
def test_plans_are_sound_and_do_not_depend_on_order(buffers: list[Buffer], random: object) -> None:
    plan = plan_arena(buffers)
    shuffled = list(buffers)
    random.shuffle(shuffled)  # type: ignore[attr-defined]
    assert plan_arena(shuffled) == plan
    for i, a in enumerate(buffers):
        at = plan.offsets[a.name]
        assert at % 64 == 0 and at + a.nbytes <= plan.nbytes
        for b in buffers[:i]:
            other = plan.offsets[b.name]
            together = a.first <= b.last and b.first <= a.last
            apart = at + a.nbytes <= other or other + b.nbytes <= at
            assert apart or not together
    most = max(
        (sum(align(b.nbytes) for b in buffers if b.first <= op <= b.last) for op in range(30)), default=0
    )  # fmt: skip
    assert most <= plan.nbytes <= sum(align(b.nbytes) for b in buffers)


def test_the_tightest_gap_is_taken() -> None:
    fixed = [Buffer("low", 640, 0, 9), Buffer("gap 256", 256, 0, 4), Buffer("high", 192, 0, 9)]
    plan = plan_arena([*fixed, Buffer("late", 128, 5, 9)])
    assert plan == ArenaPlan({"gap 256": 640, "high": 896, "low": 0, "late": 640}, 1088)


@pytest.mark.parametrize(
    ("offsets", "nbytes", "text"),
    [
        ({"a": 0, "b": 32}, 256, "buffer 'b': need 100 bytes at a multiple of 64 inside the arena of 256 bytes, have"),
        ({"a": 0, "b": 192}, 256, "buffer 'b': need 100 bytes .* inside the arena of 256 bytes, have offset 192"),
        ({"a": 0, "b": 64}, 256, r"buffers 'a' and 'b': need bytes of their own, as both are alive at op 2, have \[0"),
    ],
)
def test_unsound_plans_are_named(offsets: dict[str, int], nbytes: int, text: str) -> None:
    with pytest.raises(ProgramError, match=text):
        check_arena([Buffer("a", 100, 0, 2), Buffer("b", 100, 2, 3)], ArenaPlan(offsets, nbytes))


def test_the_residual_stream_stays_in_one_buffer_and_rows_are_padded() -> None:
    layout = lowered(fused_program()).layout
    stream = [name for name in layout.places if name.endswith("residual") or name == "embedding"]
    last = stream.pop()  # of the gathered rows alone
    assert len(stream) == 4 and len({layout.places[name] for name in stream}) == 1
    assert layout.places[last] == layout.places["logit_rows_hidden"] != layout.places["embedding"]
    bucket = Bucket(BucketKind.MIXED, 33, 3, 5)
    read, written = (layout.pointer("embedding", bucket, access) for access in (Access.READ, Access.WRITE))
    assert (read.extent, written.extent) == (64 * 48 * 4, 33 * 48 * 4)
    table = layout.pointer("page_table", bucket, Access.READ)
    assert (table.region, table.extent) == (Region.IO, 3 * 3 * 4)
    assert layout.pointer("cu_seqlens", bucket, Access.READ).extent == 16
    assert layout.pointer("last_tokens", bucket, Access.READ).extent == 4 * LIMITS.max_num_seqs
    assert layout.region_sizes[Region.KV] == layout.kv_page_bytes == 2 * 2 * 2 * 32 * 16 * 4
