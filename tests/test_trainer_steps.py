"""Cutting batches into steps, and graphs into parts: plain data in, plain data out."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from lowered import LIMITS, fused_program, lowered

from tokenspeed.bucket import BucketKind, StepLimits
from tokenspeed.errors import ProgramError, UsageError
from tokenspeed.graph import Access, Launch, LaunchGraph, Node, Pointer, Region
from tokenspeed.trainer.graphs import part_of, split_step
from tokenspeed.trainer.reverse import saved_values
from tokenspeed.trainer.steps import Batch, cut, num_pages
from tokenspeed.values import StepOp

SMALL = StepLimits(max_prefill_tokens=20, max_num_seqs=3, max_logit_rows=4)
PAGE, PAGES_PER_SEQ = 8, 10


def batch_of(lengths: list[int], rows: list[int]) -> Batch:
    count = sum(lengths)
    return Batch(torch.arange(count), tuple(lengths), torch.tensor(rows, dtype=torch.long), torch.zeros(len(rows)))


@given(st.lists(st.integers(1, 79), min_size=1, max_size=12))
def test_steps_hold_every_token_once_and_stay_within_the_limits(lengths: list[int]) -> None:
    rows = [i for i in range(sum(lengths)) if i % 3 != 1]
    chunks = cut(batch_of(lengths, rows), SMALL, may_split=True)
    at, done = 0, 0
    pieces = [piece for chunk in chunks for piece in chunk.pieces]
    for chunk in chunks:
        assert chunk.begin == at and 0 < chunk.num_tokens <= 20 and len(chunk.pieces) <= 3
        assert all(chunk.begin <= row < chunk.end for row in rows[chunk.rows]) and chunk.rows.start == done
        at, done = chunk.end, chunk.rows.stop
        if any(piece.start for piece in chunk.pieces):
            assert len(chunk.pieces) == 1, "a sequence that goes on has its steps to itself"
    assert (at, done) == (sum(lengths), len(rows))
    whole = []
    for piece in pieces:
        if piece.start == 0:
            whole.append(0)
        assert piece.start == whole[-1]
        whole[-1] = piece.end
    assert whole == lengths


@given(st.lists(st.integers(1, 79), min_size=1, max_size=12))
def test_pages_are_a_sequences_own_and_there_are_enough(lengths: list[int]) -> None:
    batch = batch_of(lengths, [])
    most = num_pages(SMALL, PAGE, PAGES_PER_SEQ)
    for chunk in cut(batch, SMALL, may_split=True):
        inputs = chunk.inputs(batch, PAGE, PAGES_PER_SEQ)
        assert inputs.token_ids.tolist() == list(range(chunk.begin, chunk.end))
        assert len(set(inputs.slot_mapping.tolist())) == chunk.num_tokens
        assert int(inputs.slot_mapping.max()) < most * PAGE
        used: set[int] = set()
        for i, piece in enumerate(chunk.pieces):
            own = slice(int(inputs.cu_seqlens[i]), int(inputs.cu_seqlens[i + 1]))
            positions = inputs.positions[own].tolist()
            assert positions == list(range(piece.start, piece.end)) and int(inputs.context_lens[i]) == piece.end
            table = inputs.page_table[i].tolist()[: -(-piece.end // PAGE)]
            assert used.isdisjoint(table) and len(set(table)) == len(table)
            used.update(table)
            slots = [table[p // PAGE] * PAGE + p % PAGE for p in positions]
            assert inputs.slot_mapping[own].tolist() == slots


def test_whole_sequences_or_none() -> None:
    with pytest.raises(
        UsageError, match=r"sequence 1 has 21 tokens: gradients need whole sequences in a step"
    ) as error:
        cut(batch_of([3, 21], []), SMALL, may_split=False)
    assert error.value.hint is not None and "--max-prefill-tokens 21" in error.value.hint
    assert [c.lengths for c in cut(batch_of([3, 20, 9], []), SMALL, may_split=False)] == [(3,), (20,), (9,)]


def node(name: str, *before: int, writes_io: bool = False) -> Node:
    pointer = Pointer(Region.IO if writes_io else Region.ARENA, 0, 64, Access.WRITE)
    return Node(name, name, (pointer,), before, Launch("code", (1, 1, 1), (32, 1, 1), programmatic=True))


def test_a_part_of_a_graph_keeps_the_order_that_left_out_nodes_gave() -> None:
    nodes = [node("inputs", writes_io=True), node("a", 0), node("b", 1), node("c", 1), node("d", 2, 3), node("e", 4)]
    part = part_of(nodes, [0, 1, 4, 5])
    assert [(n.name, n.predecessors) for n in part.nodes] == [("inputs", ()), ("a", (0,)), ("d", (1,)), ("e", (2,))]
    tail = part_of(nodes, [0, 4, 5])
    assert [(n.name, n.predecessors) for n in tail.nodes] == [("inputs", ()), ("d", (0,)), ("e", (1,))]
    early = [n.launch is not None and n.launch.programmatic for n in tail.nodes]
    assert early == [True, False, True], "who comes right after the inputs starts when they are there"


def test_graphs_that_cannot_be_relocated_are_refused() -> None:
    low = lowered(fused_program())
    bucket = max((b for b in low.graphs if b.kind is BucketKind.MIXED), key=lambda b: b.num_tokens)
    graph, values, keep = low.graphs[bucket], low.values, saved_values(low.values.ops)
    assert bucket.num_tokens == LIMITS.max_prefill_tokens
    headless = replace(values, ops=tuple(op for op in values.ops if op.kind != "gather_rows"))
    with pytest.raises(ProgramError, match="need a graph with an op gather_rows"):
        split_step(graph, headless, bucket, low.arena_bytes, ())
    with pytest.raises(ProgramError, match=r"value 'token_ids': need rows of the step in region arena to keep"):
        split_step(graph, values, bucket, low.arena_bytes, {"token_ids"})
    index, args = next((i, n.args) for i, n in enumerate(graph.nodes) if n.name == "layers.0.qkv")
    x = args[0]
    assert isinstance(x, Pointer)
    inside = (replace(x, offset=x.offset + 64, extent=64), *args[1:])
    nodes = (*graph.nodes[:index], replace(graph.nodes[index], args=inside), *graph.nodes[index + 1 :])
    with pytest.raises(
        ProgramError, match=r"node 'layers.0.qkv': need pointers to the beginning of 'layers.0.attention"
    ):
        split_step(LaunchGraph(nodes), values, bucket, low.arena_bytes, keep)
    with pytest.raises(ProgramError, match=r"op 'odd': the trainer has no gradient of route"):
        saved_values([*values.ops, StepOp("odd", "route", (), (), {})])
