"""One arithmetic for log-probabilities: those of a reply, as it is drawn, are those of a prompt that holds the reply.

A trainer that scores a rollout asks the second question; its answer must be the first one's, bit for bit: alone, among
others, in chunks of any size, behind cached pages, and however the vocabulary is folded. With
TOKENSPEED_TEST_TARGET=cuda:sm_90a it is a GPU's.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tiny_artifact import tiny, write_checkpoint

from tokenspeed.compile.build import build
from tokenspeed.errors import RequestError
from tokenspeed.runtime.engine import Engine, load
from tokenspeed.runtime.loader import LoadOptions
from tokenspeed.runtime.output import RequestOutput
from tokenspeed.runtime.request import SamplingParams, TokenLogprobs

TARGET = os.environ.get("TOKENSPEED_TEST_TARGET")
VOCAB_SIZE = 296  # eight shards of 37 tokens: no multiple of 16 lanes
SIZES = {"vocab_size": VOCAB_SIZE, "hidden_size": 64, "intermediate_size": 80}  # which GPU kernels have, too
PAGE_SIZE = 32
PROMPT_LENGTHS = (1, 31, 32, 70, 101)
REPLY = 24
TOP = 3
SHAPES: dict[str, dict[str, Any]] = {
    "float32": {"dtype": "float32"},
    "bfloat16": {"dtype": "bfloat16"},
    "float32, eight shards": {"dtype": "float32", "logprob_order": "megatron", "logprob_shards": 8},
}


@dataclass
class Rollouts:
    """Prompts and their replies with the log-probabilities that were reported while generating."""

    artifact: Path
    prompts: list[list[int]]
    outputs: list[RequestOutput]

    def whole(self, i: int) -> list[int]:
        return [*self.prompts[i], *self.outputs[i].token_ids]

    def check(self, i: int, scored: RequestOutput) -> None:
        """``scored``, of the whole sequence as a prompt, says of the reply what was said when it was drawn."""
        assert scored.prompt_logprobs is not None
        assert bits(scored.prompt_logprobs[len(self.prompts[i]) :]) == bits(self.outputs[i].logprobs)


def open_engine(artifact: Path, **changes: Any) -> Engine:
    return load(artifact, options=LoadOptions(kv_gib=0.02, threads=2), **changes)


@pytest.fixture(scope="module", params=SHAPES)
def rollouts(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rollouts]:
    folder = tmp_path_factory.mktemp("one-arithmetic")
    checkpoint = write_checkpoint(folder / "m", tiny(num_layers=2, **SIZES))
    artifact = folder / "a"
    build(
        checkpoint, artifact, page_size=PAGE_SIZE, split_positions=64, max_model_len=192, max_num_seqs=6,
        max_prefill_tokens=128, max_logit_rows=48, targets=TARGET, **SHAPES[request.param],
    )  # fmt: skip
    rng = np.random.default_rng(11)
    prompts = [rng.integers(0, VOCAB_SIZE, length).tolist() for length in PROMPT_LENGTHS]
    with open_engine(artifact) as engine:
        outputs = [
            engine.generate(prompt, SamplingParams(max_tokens=REPLY, temperature=i % 2, seed=i, logprobs=TOP))[0]
            for i, prompt in enumerate(prompts)
        ]
    assert all(len(output.logprobs) == REPLY for output in outputs)
    yield Rollouts(artifact, prompts, outputs)


def forced(**changes: Any) -> SamplingParams:
    """Score the prompt; the token that comes behind it is nobody's concern."""
    return SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=TOP, **changes)


def bits(entries: tuple[TokenLogprobs | None, ...] | None) -> list[Any]:
    """Equal only where every number is, to the sign of a zero."""
    return [None if e is None else (e.token_id, e.rank, *_hex(e)) for e in entries or ()]


def _hex(entry: TokenLogprobs) -> list[Any]:
    return [entry.logprob.hex(), *((token, logprob.hex()) for token, logprob in entry.top)]


@pytest.mark.parametrize("max_step_tokens", [7, 33, None])
def test_teacher_forcing_gives_what_was_reported_while_generating(
    rollouts: Rollouts, max_step_tokens: int | None
) -> None:
    everyone = [rollouts.whole(i) for i in range(len(rollouts.prompts))]
    with open_engine(rollouts.artifact, max_step_tokens=max_step_tokens, prefix_index=False) as engine:
        alone = [engine.generate(ids, forced())[0] for ids in everyone]
        packed = engine.generate(everyone, forced())
    for i, (one, other) in enumerate(zip(alone, packed, strict=True)):
        rollouts.check(i, one)
        assert bits(one.prompt_logprobs) == bits(other.prompt_logprobs)


def test_teacher_forcing_behind_cached_pages(rollouts: Rollouts) -> None:
    """A trainer's request: only the reply is scored, and the prompt need not be computed twice."""
    with open_engine(rollouts.artifact) as engine:
        for i, prompt in enumerate(rollouts.prompts):
            first = engine.generate(rollouts.whole(i), forced())[0]
            assert first.cached_tokens == 0  # and its pages are published
            rollouts.check(i, first)
            for start in {len(prompt), len(prompt) + 9, 1, min(PAGE_SIZE + 1, len(prompt) + REPLY)}:
                again = engine.generate(rollouts.whole(i), forced(logprob_start_len=start))[0]
                assert again.cached_tokens == min(start - 1, len(rollouts.whole(i)) - 1) // PAGE_SIZE * PAGE_SIZE
                assert first.prompt_logprobs is not None
                expected = [None] * start + list(first.prompt_logprobs[start:])
                assert bits(again.prompt_logprobs) == bits(tuple(expected))


def test_a_prompt_that_generation_has_cached(rollouts: Rollouts) -> None:
    """The pages of a reply were written by its decodes; what stands behind them reads them as if by a prefill."""
    i, behind = 2, 2 * PAGE_SIZE  # the prompt fills one page, the reply another
    params = SamplingParams(max_tokens=REPLY + PAGE_SIZE, temperature=i % 2, seed=i, logprobs=TOP)
    with open_engine(rollouts.artifact) as engine:
        drawn = engine.generate(rollouts.prompts[i], params)[0]
        assert bits(drawn.logprobs[:REPLY]) == bits(rollouts.outputs[i].logprobs)
        whole = [*rollouts.prompts[i], *drawn.token_ids]
        scored = engine.generate(whole, forced(logprob_start_len=behind + 1))[0]
        fresh = engine.generate(whole, forced())[0]
        assert (scored.cached_tokens, fresh.cached_tokens) == (behind, 0)
        assert scored.prompt_logprobs is not None and fresh.prompt_logprobs is not None
        assert bits(scored.prompt_logprobs[behind + 1 :]) == bits(drawn.logprobs[PAGE_SIZE + 1 :])
        assert bits(fresh.prompt_logprobs[PAGE_SIZE:]) == bits(drawn.logprobs)


def test_a_start_of_the_prompts_length_asks_for_none(rollouts: Rollouts) -> None:
    prompt = rollouts.prompts[3]
    with open_engine(rollouts.artifact) as engine:
        engine.generate(prompt, SamplingParams(max_tokens=1))
        scored = engine.generate(prompt, forced(logprob_start_len=len(prompt)))[0]
        assert scored.prompt_logprobs == (None,) * len(prompt)
        assert scored.cached_tokens == (len(prompt) - 1) // PAGE_SIZE * PAGE_SIZE
        for start, params in ((len(prompt) + 1, forced), (2, lambda **more: SamplingParams(max_tokens=1, **more))):
            with pytest.raises(RequestError) as refused:
                engine.generate(prompt, params(logprob_start_len=start))
            assert refused.value.param == "logprob_start_len"


def test_shards_change_log_probabilities_in_the_last_bits_alone(tmp_path: Path) -> None:
    """Another fold: the same tokens and ranks, logarithms within a few units in the last place."""
    checkpoint = write_checkpoint(tmp_path / "m", tiny(**SIZES))
    params = SamplingParams(max_tokens=64, temperature=1, seed=7, logprobs=TOP)
    replies = []
    orders: tuple[dict[str, Any], ...] = (
        {"logprob_order": "megatron", "logprob_shards": 8},
        {"logprob_order": "torch"},
    )
    for order in orders:
        build(checkpoint, tmp_path / "a", max_model_len=128, max_num_seqs=2, targets=TARGET, force=True, **order)
        with open_engine(tmp_path / "a") as engine:
            replies += engine.generate([3, 1, 4], params)
    folded, whole = replies
    assert folded.token_ids == whole.token_ids
    assert [e.rank for e in folded.logprobs] == [e.rank for e in whole.logprobs]
    numbers = [np.array([e.logprob for e in reply.logprobs]) for reply in replies]
    assert (numbers[0] != numbers[1]).any()
    np.testing.assert_allclose(*numbers, rtol=1e-6, atol=1e-6)
