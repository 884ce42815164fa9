"""Log-probabilities folded in shards, from the Program to native kernels: all agree, and draws do not notice."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from lowered import ByteDevice, lowered
from test_interpret_graph import mixed_steps
from test_native_graph import NUM_PAGES, TARGETS, NativeDevice
from tiny_llama import MAX_MODEL_LEN, PAGE_SIZE, tiny_config, tiny_weights

from tokenspeed.compile.interpret import Interpreter, step_inputs
from tokenspeed.compile.models import build_program
from tokenspeed.compile.orders import Orders
from tokenspeed.compile.passes import CPU_PASSES, run_passes
from tokenspeed.compile.program import Program
from tokenspeed.compile.sampler import log_sum
from tokenspeed.errors import ProgramError
from tokenspeed.graph import Int

VOCAB, SHARDS = 111, 3
"""Three shards of 37 tokens: two vectors of sixteen and five."""


def folded_program(dtype: str = "float32", shards: int = SHARDS) -> Program:
    return run_passes(
        build_program(
            tiny_config(vocab_size=VOCAB),
            dtype=dtype,
            max_model_len=MAX_MODEL_LEN,
            page_size=PAGE_SIZE,
            orders=Orders(logprob_shards=shards),
        ),
        CPU_PASSES,
    )


@pytest.mark.parametrize("target", TARGETS)
def test_program_graph_and_kernels_agree(target: str, tmp_path: Path) -> None:
    config = tiny_config(vocab_size=VOCAB)
    program, whole = folded_program(), folded_program(shards=1)
    low = lowered(program, target)
    native = NativeDevice(program, low, tiny_weights(config), tmp_path / "w.safetensors", workers=2)
    graph = ByteDevice(program, low, config, NUM_PAGES)
    interpreters = [
        Interpreter(p, tiny_weights(config).__getitem__, num_pages=NUM_PAGES, num_slots=6) for p in (program, whole)
    ]
    for chunks in mixed_steps():
        inputs = step_inputs(program, chunks)
        expected, unfolded = (interpreter.run(inputs) for interpreter in interpreters)
        for have in (graph.run(inputs), native.run(inputs, graph.table)):
            for name in ("out_token", "out_rank", "out_top_ids"):
                np.testing.assert_array_equal(have[name], expected[name], err_msg=name)
                np.testing.assert_array_equal(have[name], unfolded[name], err_msg=name)
            for name in ("out_logprob", "out_top_logprobs"):
                np.testing.assert_allclose(have[name], expected[name], rtol=0, atol=2e-5, err_msg=name)
    native.device.close()


def test_every_graph_says_how_it_folds() -> None:
    low = lowered(folded_program())
    for graph in low.graphs.values():
        (sample,) = (node for node in graph.nodes if node.name == "sample")
        assert sample.args[-2:] == (Int(VOCAB), Int(SHARDS))


@pytest.mark.parametrize("shards", [0, 2, 112])
def test_a_vocabulary_that_does_not_divide_is_no_program(shards: int) -> None:
    with pytest.raises(ProgramError, match=rf"need a vocabulary of {shards} equal shards, have float32"):
        folded_program(shards=shards)


def test_the_reference_rounds_each_shard_and_adds_in_order() -> None:
    """Against the fold written out, for values where every rounding shows."""
    shifted = -np.abs(np.random.default_rng(5).standard_normal(4096)) * 3
    shifted[100] = 0.0
    total = np.float32(0)
    for shard in range(8):
        total = np.float32(total + np.float32(np.exp(shifted[512 * shard : 512 * (shard + 1)]).sum()))
    assert log_sum(shifted, 8) == float(np.float32(np.log(np.float64(total))))
    assert log_sum(shifted, 1) == float(np.log(np.exp(shifted).sum())) != log_sum(shifted, 8)
    lost = np.array([0.0, *[-16.7] * 63])
    assert log_sum(lost, 64) == 0.0 < log_sum(lost[::-1].copy(), 64)


def test_of_parts_of_one_token_each() -> None:
    """As many shards as tokens: nothing but float32 additions, in the order of ids."""
    shifted = -np.random.default_rng(3).random(50) * 9
    total = np.float32(0)
    for value in shifted:
        total = np.float32(total + np.float32(np.exp(value)))
    assert log_sum(shifted, 50) == float(np.float32(np.log(np.float64(total))))
