"""Lowering: arguments in the kernels' order, exact edges, one layout for all buckets, the same bytes every time."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from lowered import LIMITS, REGISTRY, fused_program, lowered
from tiny_llama import tiny_config, tiny_program

from tokenspeed.bucket import Bucket, BucketKind
from tokenspeed.compile.buckets import ladder
from tokenspeed.compile.lower import LoweredTarget, dependencies
from tokenspeed.errors import ProgramError, SelectionError
from tokenspeed.graph import Access, Float, Int, LaunchGraph, Node, Pointer, Region, StepScalar
from tokenspeed.graph_verify import ancestor_sets
from tokenspeed.target import CPU_ARCHS

TOKENS, SEQS, ROWS = StepScalar(0), StepScalar(1), StepScalar(2)


def nodes_of(low: LoweredTarget, bucket: Bucket) -> dict[str, Node]:
    return {node.name: node for node in low.graphs[bucket].nodes}


@pytest.mark.parametrize("arch", CPU_ARCHS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_two_builds_give_equal_bytes(arch: str, dtype: str) -> None:
    one, other = (lowered(fused_program(dtype=dtype), f"cpu:{arch}") for _ in range(2))
    assert list(one.graphs) == list(ladder(LIMITS))
    for bucket, graph in one.graphs.items():
        data = graph.encode()
        assert data == other.graphs[bucket].encode()
        assert LaunchGraph.decode(data) == graph
        for node in graph.nodes:
            letters = {Pointer: "p", Int: "i", StepScalar: "i", Float: "f"}
            assert "".join(letters[type(arg)] for arg in node.args) == REGISTRY.by_name[node.symbol].signature
    assert one.weights == other.weights and one.selection.to_json() == other.selection.to_json()


def test_targets_of_one_dtype_share_layout_and_weights() -> None:
    lows = [lowered(fused_program(dtype="bfloat16"), f"cpu:{arch}") for arch in CPU_ARCHS]
    assert len({low.weights for low in lows}) == 1 and len({low.io for low in lows}) == 1


def test_arguments_of_each_kernel() -> None:
    low = lowered(fused_program())
    bucket = Bucket(BucketKind.MIXED, 16, 6, 16)
    nodes = nodes_of(low, bucket)
    io = {tensor.name: tensor.offset for tensor in low.io}
    weights = {name: tensor for (name, _), tensor in low.weights.tensors().items()}

    def input_(name: str, nbytes: int) -> Pointer:
        return Pointer(Region.IO, io[name], nbytes, Access.READ)

    def weight(name: str) -> Pointer:
        return Pointer(Region.WEIGHTS, weights[name].offset, weights[name].nbytes, Access.READ)

    def arena(name: str, extent: int, access: Access) -> Pointer:
        return Pointer(Region.ARENA, low.layout.places[name][1], extent, access)

    last = Pointer(Region.STATE, 0, 4 * LIMITS.max_num_seqs, Access.READ)
    table = weight("model.embed_tokens.weight")
    stream = arena("embedding", 16 * 48 * 4, Access.WRITE)
    assert nodes["embedding"].args == (input_("token_ids", 64), last, table, stream, TOKENS, Int(48))
    norm = arena("layers.0.attention_norm", 16 * 48 * 4, Access.WRITE)
    padded = arena("embedding", 32 * 48 * 4, Access.READ)
    norm_weight = weight("model.layers.0.input_layernorm.weight")
    assert nodes["layers.0.attention_norm"].args == (padded, norm_weight, norm, TOKENS, Int(48), Float(1e-5))
    qkv = nodes["layers.0.qkv"].args
    assert qkv[1] == weight("model.layers.0.self_attn.qkv_proj.weight") and qkv[3:] == (TOKENS, Int(128), Int(48))
    rope = nodes["kv.0.next"].args
    stride = low.kv_page_bytes
    assert rope[1:5] == (weight("rope_table"), input_("positions", 64), input_("slot_mapping", 128),
                         input_("cu_seqlens", 28))  # fmt: skip
    assert rope[5] == Pointer(Region.KV, 0, stride // 2, Access.WRITE)
    assert rope[7:] == (TOKENS, SEQS, Int(4), Int(2), Int(16), Int(32), Int(stride))
    attention = nodes["layers.1.attention"].args
    assert attention[1] == Pointer(Region.KV, stride // 2, stride // 2, Access.READ)
    assert attention[2:5] == (input_("cu_seqlens", 28), input_("context_lens", 24), input_("page_table", 72))
    assert isinstance(attention[6], Pointer) and attention[6].extent == 6 * 4 * 2 * (16 + 16) * 4
    assert attention[7:] == (TOKENS, SEQS, Int(4), Int(2), Int(16), Int(32), Int(stride), Int(3), Int(64), Float(0.25))
    residual = nodes["layers.0.mlp_residual"].args
    assert residual[2:4] == (padded, stream) and residual[4:] == (TOKENS, Int(48), Int(72), Int(0))
    assert nodes["layers.0.gated"].args[3:] == (TOKENS, Int(72), Int(48))
    assert nodes["logit_rows_hidden"].args[3:] == (ROWS, Int(48))
    assert nodes["logits"].args[1] == table and nodes["logits"].args[3:] == (ROWS, Int(101), Int(48))
    sample = nodes["sample"].args
    operands = ("logit_target", "temperature", "top_p", "min_p", "top_k", "seed", "draw_position", "num_logprobs",
                "state_slot", "adjustment")  # fmt: skip
    assert sample[2:12] == tuple(input_(name, 128 if name == "seed" else 64) for name in operands)
    assert sample[1] == arena("adjusted_logits", 32 * 101 * 4, Access.READ)
    assert sample[12] == Pointer(Region.STATE, 0, 4 * LIMITS.max_num_seqs, Access.WRITE)
    outputs = {"out_token": 64, "out_logprob": 64, "out_rank": 64, "out_top_ids": 1280, "out_top_logprobs": 1280}
    assert sample[13:18] == tuple(Pointer(Region.IO, io[name], n, Access.WRITE) for name, n in outputs.items())
    assert sample[18:] == (ROWS, Int(101), Int(1))


def test_a_bucket_touches_the_front_of_what_the_largest_touches() -> None:
    low = lowered(fused_program())
    largest = nodes_of(low, Bucket(BucketKind.MIXED, 80, 6, 44))
    for graph in low.graphs.values():
        for node in graph.nodes:
            for small, big in zip(node.args, largest[node.name].args, strict=True):
                if isinstance(small, Pointer):
                    assert isinstance(big, Pointer)
                    assert (small.region, small.offset) == (big.region, big.offset) and small.extent <= big.extent
                else:
                    assert small == big


pointers = st.builds(
    Pointer,
    st.just(Region.ARENA),
    st.integers(0, 9).map(lambda n: 4 * n),
    st.integers(1, 16),
    st.sampled_from([Access.READ, Access.WRITE]),
)


@given(st.lists(st.lists(pointers, max_size=3), max_size=9))
def test_edges_are_exactly_the_conflicts_transitively_reduced(arguments: list[list[Pointer]]) -> None:
    edges = dependencies(arguments)
    conflicts = [
        [
            i
            for i in range(j)
            if any(
                (p.writes or q.writes) and p.offset < q.end and q.offset < p.end
                for p in arguments[i]
                for q in arguments[j]
            )
        ]
        for j in range(len(arguments))
    ]
    assert ancestor_sets(edges) == ancestor_sets(conflicts)
    ancestors = ancestor_sets(edges)
    for before in edges:
        assert not any(ancestors[other] >> edge & 1 for edge in before for other in before)


def test_what_cannot_be_lowered_is_named() -> None:
    with pytest.raises(SelectionError, match="no kernel for op 'rope' on"):
        lowered(tiny_program(tiny_config()))
    with pytest.raises(SelectionError, match="need split_positions to be a multiple of 32, have 48"):
        lowered(fused_program(), split_positions=48)
    buckets: Any = ladder(LIMITS)[:-1]
    with pytest.raises(ProgramError, match="have none for a mixed step of 65 tokens, 1 sequences and 0 logit rows"):
        lowered(fused_program(), buckets=buckets)
    with pytest.raises(SelectionError, match="need K to be a multiple of 2, have 73"):
        lowered(fused_program(tiny_config(intermediate_size=73), "bfloat16"))
