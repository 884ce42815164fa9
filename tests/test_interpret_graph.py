"""The LaunchGraph interpreter agrees with the Program interpreter: layouts, lowering and memory plan are right."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from lowered import REGISTRY, ByteDevice, counted_slots, fused_program, lowered
from tiny_llama import PAGE_SIZE, tiny_config, tiny_tokens, tiny_weights

from tokenspeed.compile.interpret import Chunk, Interpreter, step_inputs
from tokenspeed.compile.interpret_graph import GraphInterpreter, page_index
from tokenspeed.errors import ProgramError
from tokenspeed.graph import Int, LaunchGraph, Region

FIRST, SECOND, THIRD = tiny_tokens(90, seed=2), tiny_tokens(40, seed=3), tiny_tokens(33, seed=4)
PAGES = ([6, 1, 3], [4, 2], [7, 5])


def mixed_steps() -> list[list[Chunk]]:
    """Chunks, decodes beside chunks, scored prompts, and decodes alone; pages are scattered and then reused."""
    sampled: dict[str, Any] = {"temperature": 0.8, "top_p": 0.9, "top_k": 20, "seed": 7, "num_logprobs": 2}
    return [
        [Chunk(FIRST[:50], 0, PAGES[0], draws=False)],
        [
            Chunk(FIRST[50:70], 50, PAGES[0], slot=0, num_logprobs=3),
            Chunk(SECOND[:39], 0, PAGES[1], scored=True, slot=1),
        ],
        [Chunk([-1], 70, PAGES[0], slot=0, num_logprobs=0), Chunk(THIRD[:31], 0, PAGES[2], slot=2, **sampled)],
        [Chunk([-2], 39, PAGES[1], slot=1, num_logprobs=1), Chunk([-3], 31, PAGES[2], slot=2, **sampled)],
        [Chunk([-1], 71, PAGES[0], slot=0, **sampled)],
        [Chunk(THIRD, 0, PAGES[1], num_logprobs=5), Chunk(SECOND[:5], 0, PAGES[2], draws=False)],
    ]


def adjusted_steps() -> list[list[Chunk]]:
    """Penalties over a prompt in chunks and over what was drawn, biases, allowed tokens, beside rows without."""
    sampled: dict[str, Any] = {"temperature": 0.8, "top_p": 0.95, "seed": 11, "num_logprobs": 2}
    counted: dict[str, Any] = {
        "slot": 3, "prompt_len": 60, "repetition_penalty": 1.3, "presence_penalty": 0.4, "frequency_penalty": 0.25,
    }  # fmt: skip
    biased: dict[str, Any] = {"slot": 1, "logit_bias": {3: 2.5, 60: -100.0, 99: 1.0}, "num_logprobs": 1}
    few = range(1, 101, 7)
    return [
        [Chunk(FIRST[:40], 0, PAGES[0], draws=False, **counted), Chunk(THIRD[:9], 0, PAGES[2], slot=2, num_logprobs=1)],
        [
            Chunk(FIRST[40:66], 40, PAGES[0], **counted, num_logprobs=2),
            Chunk(SECOND[:30], 0, PAGES[1], scored=True, **biased),
            Chunk([-3], 9, PAGES[2], slot=2, allowed_token_ids=few, **sampled),
        ],
        [
            Chunk([-4], 66, PAGES[0], allowed_token_ids=few, **counted, **sampled),
            Chunk([-2], 30, PAGES[1], **biased),
            Chunk([-3], 10, PAGES[2], slot=2, num_logprobs=1),
        ],
        [Chunk([-4], 67, PAGES[0], logit_bias={5: 1.5}, **counted, **sampled)],
        [Chunk(THIRD, 0, PAGES[0], **{**counted, "prompt_len": 5}, **sampled)],  # another request in the same slot
    ]


@pytest.mark.parametrize(
    ("dtype", "changes"),
    [("float32", {}), ("float32", {"tie_word_embeddings": False, "num_kv_heads": 4}), ("bfloat16", {})],
    ids=["float32", "float32-untied", "bfloat16"],
)
def test_mixed_steps_agree_with_the_program_interpreter(dtype: str, changes: dict[str, Any]) -> None:
    config = tiny_config(**changes)
    program = fused_program(config, dtype)
    interpreter = Interpreter(program, tiny_weights(config).__getitem__, num_pages=8, num_slots=6)
    device = ByteDevice(program, lowered(program), config, num_pages=8)
    tolerance = 2e-5 if dtype == "float32" else 2e-2
    for chunks in (*mixed_steps(), *adjusted_steps()):
        inputs = step_inputs(program, chunks)
        expected, have = interpreter.run(inputs), device.run(inputs)
        np.testing.assert_array_equal(device.counts(inputs), interpreter.state["token_counts"][counted_slots(inputs)])
        np.testing.assert_array_equal(have["out_token"], expected["out_token"])
        np.testing.assert_allclose(have["out_logprob"], expected["out_logprob"], rtol=0, atol=tolerance)
        np.testing.assert_allclose(have["out_top_logprobs"], expected["out_top_logprobs"], rtol=0, atol=tolerance)
        if dtype == "float32":
            np.testing.assert_array_equal(have["out_rank"], expected["out_rank"])
            np.testing.assert_array_equal(have["out_top_ids"], expected["out_top_ids"])


@settings(max_examples=5, deadline=None)
@given(seed=st.integers(0, 2**32 - 1))
def test_any_order_that_respects_the_edges_gives_the_same_bits(seed: int) -> None:
    config = tiny_config()
    program = fused_program(config)
    low = lowered(program)
    one, other = (ByteDevice(program, low, config, num_pages=8) for _ in range(2))
    for chunks in mixed_steps()[:3]:
        inputs = step_inputs(program, chunks)
        expected, have = one.run(inputs), other.run(inputs, seed)
        for name in expected:
            np.testing.assert_array_equal(have[name], expected[name])


def test_every_element_of_a_page_belongs_to_one_position() -> None:
    for pairs in (False, True):
        k, v = page_index(2, PAGE_SIZE, 48, pairs)
        assert sorted([*k.ravel(), *v.ravel()]) == list(range(2 * 2 * PAGE_SIZE * 48))
    # bfloat16 K of one head: dims 2i and 2i+1 of a position are neighbours, positions 0..15 share a row of 32.
    k, v = page_index(1, PAGE_SIZE, 16, True)
    assert k[0, 0, :4].tolist() == [0, 1, 32, 33] and k[0, 1, :2].tolist() == [2, 3]
    assert v[0, :4, 0].tolist() == [512, 513, 544, 545] and v[0, 0, :2].tolist() == [512, 514]


def broken(change: Any) -> tuple[LaunchGraph, GraphInterpreter, dict[str, Any], Any]:
    config = tiny_config(num_layers=1)
    program = fused_program(config)
    low = lowered(program)
    device = ByteDevice(program, low, config, num_pages=2)
    inputs = step_inputs(program, [Chunk(FIRST[:9], 0, [0])])
    graph = low.graphs[device.table.find(9, 1, 1, decode_only=False)]  # type: ignore[index]
    nodes = list(graph.nodes)
    change(nodes)
    return LaunchGraph(tuple(nodes)), GraphInterpreter(REGISTRY, device.memory), inputs, device


def test_an_access_beyond_its_extent_is_refused() -> None:
    def shrink(nodes: list[Any]) -> None:
        args = list(nodes[1].args)
        args[0] = replace(args[0], extent=64)
        nodes[1] = replace(nodes[1], args=tuple(args))

    graph, interpreter, inputs, device = broken(shrink)
    device.memory.write(Region.IO, device.placed["token_ids"], inputs["token_ids"])
    with pytest.raises(ProgramError, match=r"'layers\.0\.attention_norm' argument x: need to READ 1728 bytes, have ar"):
        interpreter.run(graph, 9, 1, 1)


def test_an_order_that_breaks_an_edge_and_an_unknown_symbol_are_refused() -> None:
    graph, interpreter, _, _ = broken(lambda nodes: None)
    with pytest.raises(ProgramError, match=r"node 'layers\.0\.attention_norm' .*: need its predecessors to have run"):
        interpreter.run(graph, 9, 1, 1, order=[1])
    strange = replace(graph.nodes[0], symbol="embedding_f32_vax")
    with pytest.raises(ProgramError, match=r"'embedding' \(embedding_f32_vax\): need a known symbol"):
        interpreter.run(LaunchGraph((strange,)), 9, 1, 1)
    short = replace(graph.nodes[0], args=(Int(1),))
    with pytest.raises(ProgramError, match="need 6 arguments for embedding_f32_avx512, have 1"):
        interpreter.run(LaunchGraph((short,)), 9, 1, 1)
