"""Penalties, logit bias and allowed tokens from request to reply, against the reference sampler on the interpreter's
logits; and that neither chunks, company, preemption nor another step in flight change a bit."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gpu_double import gpu_artifact, plug_in
from test_smollm2 import Outcome, run

from tokenspeed.compile import sampler
from tokenspeed.compile.build import build
from tokenspeed.compile.checkpoint import open_checkpoint
from tokenspeed.compile.interpret import run_prompt, token_mask
from tokenspeed.compile.models import build_program
from tokenspeed.errors import RequestError
from tokenspeed.runtime import loader
from tokenspeed.runtime.engine import Engine, load
from tokenspeed.runtime.loader import LoadOptions
from tokenspeed.runtime.request import SamplingParams

VOCAB = 283
SMALL = LoadOptions(kv_gib=0.05, threads=2)
PLAIN = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True, logprobs=2)
COUNTED: dict[str, Any] = {"repetition_penalty": 1.4, "presence_penalty": 0.6, "frequency_penalty": 0.3}
FEW = tuple(range(5, VOCAB, 11))
ASKED = [
    replace(PLAIN, repetition_penalty=1.5),
    replace(PLAIN, presence_penalty=2.0, prompt_logprobs=1),
    PLAIN,
    replace(PLAIN, frequency_penalty=-0.4, logit_bias={3: 4.0, 280: -100.0, 100: 2.5}),
    replace(PLAIN, allowed_token_ids=FEW),
    replace(PLAIN, **COUNTED, temperature=0.9, top_p=0.95, seed=4),
    replace(PLAIN, **COUNTED, temperature=0.9, top_k=20, seed=5, allowed_token_ids=FEW, logit_bias={16: 3.0}),
    replace(PLAIN, temperature=1.0, seed=6),
]
PROMPTS = [[(7 * i * i + 3 * j) % VOCAB for j in range(1 + 13 * i)] for i in range(len(ASKED))]


@pytest.fixture(scope="module")
def packed(tiny_artifact: Path) -> list[Outcome]:
    with load(tiny_artifact, options=SMALL) as engine:
        return run(engine, PROMPTS, ASKED)


def expected_logits(logits: Any, params: SamplingParams, prompt: list[int], drawn: list[int]) -> Any:
    """What the next token is drawn from, by the reference."""
    counts = np.zeros(VOCAB, np.int32)
    sampler.count_tokens(counts, np.array([*prompt, *drawn]), 0, len(prompt))
    for token, bias in (params.logit_bias or {}).items():
        logits[token] += bias
    logits = sampler.penalized(
        logits, counts, params.repetition_penalty, params.presence_penalty, params.frequency_penalty
    )
    if params.allowed_token_ids is None:
        return logits
    return sampler.masked(logits, token_mask(params.allowed_token_ids, VOCAB))


@pytest.mark.parametrize("number", range(len(ASKED)))
def test_replies_are_those_of_the_reference(number: int, packed: list[Outcome], tiny_checkpoint: Path) -> None:
    source = open_checkpoint(tiny_checkpoint)
    program = build_program(source.config, dtype="float32", max_model_len=256, page_size=64)
    prompt, params, outcome = PROMPTS[number], ASKED[number], packed[number]
    logits = run_prompt(program, source.read, [*prompt, *outcome.tokens], mode="float64")[len(prompt) - 1 :]
    assert len(outcome.tokens) == len(outcome.logprobs) == PLAIN.max_tokens
    for i, (token, scored) in enumerate(zip(outcome.tokens, outcome.logprobs, strict=True)):
        raw = logits[i].astype(np.float64)
        drawn_from = expected_logits(raw.copy(), params, prompt, outcome.tokens[:i])
        if params.temperature == 0:
            assert drawn_from.max() - drawn_from[token] < 1e-4, i
        else:
            asked = {name: getattr(params, name) for name in ("temperature", "top_k", "top_p", "min_p", "seed")}
            assert token == sampler.draw(drawn_from.astype(np.float32), **asked, draw_position=len(prompt) + i), i
        score = sampler.score(raw, token, 2)  # of the logits as they came from the model
        assert abs(scored.logprob - score.logprob) < 1e-4 and abs(scored.rank - score.rank) <= 1
        np.testing.assert_allclose([p for _, p in scored.top], score.top_logprobs, atol=1e-4)


def test_what_was_asked_shows(packed: list[Outcome], tiny_artifact: Path) -> None:
    assert len(set(packed[1].tokens)) > len(set(packed[2].tokens))
    assert set(packed[4].tokens) | set(packed[6].tokens) <= set(FEW)
    with load(tiny_artifact, options=SMALL) as engine:
        plain = run(engine, PROMPTS, [replace(p, seed=6) for p in [PLAIN] * len(PROMPTS)])
    assert all(a.tokens != b.tokens for a, b in zip(packed, plain, strict=True) if a is not packed[2])
    assert packed[2] == plain[2]


def test_alone_and_in_chunks_the_same_bits(packed: list[Outcome], tiny_artifact: Path) -> None:
    with load(tiny_artifact, options=SMALL, max_step_tokens=9) as engine:
        assert run(engine, PROMPTS, ASKED) == packed
    with load(tiny_artifact, options=SMALL) as engine:
        assert [run(engine, [p], [a])[0] for p, a in zip(PROMPTS, ASKED, strict=True)] == packed
        assert engine.info.penalties


def test_preempted_and_computed_again_the_same_bits(tiny_artifact: Path) -> None:
    params = [replace(asked, max_tokens=130) for asked in ASKED]
    with load(tiny_artifact, options=SMALL) as engine:
        expected = run(engine, PROMPTS, params)
        assert engine.stats().preemptions == 0
    loaded = loader.load(tiny_artifact, SMALL)
    loaded.num_pages = 9  # of 64 positions: eight sequences grow to two to four each
    with Engine(loaded) as engine:
        assert run(engine, PROMPTS, params) == expected
        assert engine.stats().preemptions > 0


def test_two_steps_in_flight_the_same_bits(
    packed: list[Outcome], tiny_artifact: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plug_in(monkeypatch)
    with load(gpu_artifact(tiny_artifact, tmp_path / "gpu"), options=LoadOptions(kv_gib=0.05)) as engine:
        assert engine.info.target == "cuda:sm_90a"
        assert run(engine, PROMPTS, ASKED) == packed


def test_an_artifact_built_without_penalties(tiny_checkpoint: Path, tmp_path: Path, packed: list[Outcome]) -> None:
    build(tiny_checkpoint, tmp_path / "a", dtype="float32", max_num_seqs=8, penalties="off")
    with load(tmp_path / "a", options=SMALL) as engine:
        section = engine.loaded.section
        assert {t.name: t.shape for t in section.state}["token_counts"] == (1, VOCAB)
        assert section.state_bytes < 4 * 8 * VOCAB
        for name, value in (("repetition_penalty", 1.1), ("presence_penalty", 0.5), ("frequency_penalty", -1)):
            with pytest.raises(RequestError, match=f"{name} needs an artifact that counts tokens; this one was") as e:
                engine.submit([1], replace(PLAIN, **{name: value}), lambda event: None)
            assert e.value.hint == "leave it out, or rebuild with `tokenspeed build --penalties on`"
        counted = {i for i, params in enumerate(ASKED) if params.has_penalties}
        others = [i for i in range(len(ASKED)) if i not in counted]
        assert run(engine, [PROMPTS[i] for i in others], [ASKED[i] for i in others]) == [packed[i] for i in others]
