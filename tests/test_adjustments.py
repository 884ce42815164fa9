"""Adjusted logits: the reference by hand, and the native kernels, which give its bits."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from adjust_cases import adjust_operands, old_counts

from tokenspeed import _native
from tokenspeed.compile import sampler
from tokenspeed.compile.interpret import token_mask
from tokenspeed.compile.ops import SCHEMAS
from tokenspeed.graph import Access, Int, LaunchGraph, Node, Pointer, Region
from tokenspeed.runtime import sampling
from tokenspeed.step import PROMPT_FLAG, align
from tokenspeed.target import Target

NONE = -np.inf
ISAS = ("avx2", "avx512") if Target.native().arch != "x86-64-v3" else ("avx2",)


def counts_of(prompt: list[int], drawn: list[int], vocab: int = 6) -> Any:
    counts = np.full(vocab, 99, np.int32)
    sampler.count_tokens(counts, np.array([*prompt, *drawn]), 0, len(prompt))
    return counts


def test_counting() -> None:
    assert counts_of([0, 1, 1], [1, 4, 4]).tolist() == [PROMPT_FLAG, PROMPT_FLAG + 1, 0, 0, 2, 0]
    counts = counts_of([0, 1], [])
    sampler.count_tokens(counts, np.array([1, 3]), 2, 3)  # a chunk that goes on: one more of the prompt, one drawn
    sampler.count_tokens(counts, np.array([3]), 4, 3)
    assert counts.tolist() == [PROMPT_FLAG, PROMPT_FLAG, 0, 2, 0, 0]
    sampler.count_tokens(counts, np.array([5]), 0, 1)  # another request
    assert counts.tolist() == [0, 0, 0, 0, 0, PROMPT_FLAG]


def test_penalties_by_hand() -> None:
    logits = np.array([2.0, -2.0, 0.0, 3.0, -1.0, np.nan], np.float32)
    counts = counts_of([0, 1], [1, 3, 3, 5])
    repeated = sampler.penalized(logits, counts, 2.0, 0.0, 0.0)
    np.testing.assert_array_equal(repeated, np.array([1, -4, 0, 1.5, -1, np.nan], np.float32))  # prompt or drawn
    present = sampler.penalized(logits, counts, 1.0, 0.5, 0.0)
    np.testing.assert_array_equal(present, np.array([2, -2.5, 0, 2.5, -1, np.nan], np.float32))  # drawn only
    frequent = sampler.penalized(logits, counts, 1.0, 0.0, 0.5)
    np.testing.assert_array_equal(frequent, np.array([2, -2.5, 0, 2, -1, np.nan], np.float32))
    every = sampler.penalized(logits, counts, 2.0, 0.25, 0.5)
    np.testing.assert_array_equal(every, np.array([1, -4.75, 0, 0.25, -1, np.nan], np.float32))


def test_allowed_tokens_by_hand() -> None:
    logits = np.array([2.0, NONE, np.nan, 3.0], np.float32)
    lowest = np.finfo(np.float32).min
    np.testing.assert_array_equal(sampler.masked(logits, token_mask([0, 1, 2], 4)), [2, lowest, lowest, NONE])
    broken = np.full(70, np.nan, np.float32)
    for temperature in (0.0, 1.0):
        for seed in range(20):
            drawn = sampler.draw(sampler.masked(broken, token_mask([3, 69], 70)), temperature=temperature, top_k=0,
                                 top_p=1.0, min_p=0.0, seed=seed, draw_position=1)  # fmt: skip
            assert drawn in (3, 69)


@pytest.mark.parametrize("vocab", [1, 31, 32, 33, 283])
def test_masks_of_the_runtime_are_those_of_the_builder(vocab: int) -> None:
    allowed = list(range(0, vocab, 3))
    assert sampling.token_mask(allowed, vocab) == token_mask(allowed, vocab).tolist()


class AdjustDevice:
    """A device with one node, ``adjust_logits``. Results start as 7."""

    def __init__(self, isa: str, step: dict[str, Any], counts: Any):
        numbers = [len(step["token_ids"]), len(step["cu_seqlens"]) - 1, len(step["logits"]), len(step["adjust_seq"])]
        vocab = step["logits"].shape[1]
        arrays = {
            **step, "token_counts": counts, "adjusted": np.full((len(step["adjust_seq"]) + 1, vocab), 7, np.float32),
            "step_sizes": np.array([*numbers, len(step["bias_ids"]), len(step["token_masks"]), 0, 0], np.int32),
        }  # fmt: skip
        order = (*SCHEMAS["adjust_logits"].operands, "adjusted", "step_sizes")
        ends = list(itertools.accumulate(align(max(1, arrays[name].nbytes)) for name in order))
        self.device = _native.CpuDevice(2)
        self.device.allocate("arena", ends[-1])
        args, self.arrays = [], {}
        for name, offset in zip(order, [0, *ends], strict=False):
            access = {"token_counts": Access.READ | Access.WRITE, "adjusted": Access.WRITE}.get(name, Access.READ)
            args.append(Pointer(Region.ARENA, offset, max(4, arrays[name].nbytes), access))
            source = arrays[name]
            view = np.frombuffer(self.device.view("arena"), source.dtype, source.size, offset).reshape(source.shape)
            view[...] = source
            self.arrays[name] = view
        node = Node("adjust", f"adjust_logits_{isa}", (*args, Int(vocab)))
        self.device.wait(self.device.submit(self.device.load_graph(LaunchGraph((node,)).encode(), 0), *numbers[:3]))


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize(("vocab", "num_adjustments"), [(37, 5), (1100, 5), (40000, 5), (101, 0)])
def test_native_bits_are_those_of_the_reference(vocab: int, num_adjustments: int, isa: str) -> None:
    rng = np.random.default_rng(vocab)
    for _ in range(3):
        step, counts = adjust_operands(rng, vocab, num_adjustments), old_counts(rng, vocab)
        device = AdjustDevice(isa, step, counts)
        expected = sampler.adjust_rows(step["logits"], step, counts)
        np.testing.assert_array_equal(device.arrays["token_counts"], counts)
        adjusted = device.arrays["adjusted"]
        for i, row in enumerate(step["adjust_row"]):
            np.testing.assert_array_equal(adjusted[i], expected[i] if row >= 0 else np.float32(7), err_msg=str(i))
        assert (adjusted[num_adjustments] == 7).all()
        device.device.close()
