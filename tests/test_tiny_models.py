"""The whole walk on tiny random models of every shape that the family has, against the interpreter.

Checkpoint on disk -> build -> load -> engine, on every CPU target that this machine runs. Pages and attention splits
are small, so that prompts cross both. The oracle is the unfused Program, interpreted on the same checkpoint and fed
the engine's own tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from test_smollm2 import Outcome, run
from tiny_artifact import VOCAB_SIZE, tiny, write_checkpoint
from tiny_tokenizers import byte_level_json

from tokenspeed.compile.build import build
from tokenspeed.compile.checkpoint import Checkpoint, open_checkpoint
from tokenspeed.compile.interpret import run_prompt
from tokenspeed.compile.models import build_program
from tokenspeed.errors import SelectionError
from tokenspeed.runtime.engine import load
from tokenspeed.runtime.loader import LoadOptions
from tokenspeed.runtime.request import SamplingParams
from tokenspeed.target import runnable_targets

PAGE_SIZE, SPLIT = 32, 64
MAX_MODEL_LEN = 176
PROMPT_LENGTHS = (1, 33, 140)  # one token; a page and one; two splits, three chunks
GREEDY = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True, logprobs=3, prompt_logprobs=0)
TOLERANCE = {"float32": 1e-4, "bfloat16": 0.05}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


@dataclass(frozen=True)
class Case:
    """A model by what it changes of ``tiny_artifact.tiny``; ``config`` goes to its config.json."""

    name: str
    shape: dict[str, Any]
    config: dict[str, Any] = field(default_factory=dict)
    num_shards: int = 1

    def __str__(self) -> str:
        return self.name


CASES = [
    Case("no grouping, head 16, tied", {"num_kv_heads": 4}),
    Case("groups of 2, head 48, untied", {"head_dim": 48, "tie_word_embeddings": False, "hidden_size": 40}),
    Case("groups of 3, head 64", {"num_heads": 6, "num_kv_heads": 2, "head_dim": 64, "hidden_size": 52}),
    Case("groups of 4, head 80, untied", {"num_kv_heads": 1, "head_dim": 80, "tie_word_embeddings": False}),
    Case("head 128, llama3 scaling", {"num_heads": 2, "num_kv_heads": 1, "head_dim": 128}, {"rope_scaling": LLAMA3}),
    Case("vocabulary 17, inner 34", {"vocab_size": 17, "intermediate_size": 34, "num_heads": 1, "num_kv_heads": 1}),
    Case(
        "mistral in shards",
        {"hidden_size": 66},
        {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": None},
        num_shards=3,
    ),
]


class Oracle:
    """Log-probabilities [tokens, vocabulary] of every position, by the interpreter."""

    def __init__(self, source: Checkpoint, dtype: str):
        self._source, self._mode = source, "float64" if dtype == "float32" else "bfloat16"
        self._program = build_program(source.config, dtype=dtype, max_model_len=MAX_MODEL_LEN, page_size=PAGE_SIZE)
        self._known: dict[tuple[int, ...], NDArray[np.float64]] = {}

    def logprobs(self, token_ids: Sequence[int]) -> NDArray[np.float64]:
        key = tuple(token_ids)
        if key not in self._known:
            logits = run_prompt(self._program, self._source.read, token_ids, mode=self._mode).astype(np.float64)
            logits -= logits.max(axis=-1, keepdims=True)
            self._known[key] = logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))
        return self._known[key]


def check(prompt: list[int], outcome: Outcome, oracle: Oracle, tolerance: float) -> None:
    """Each token is the oracle's best (by more than the tolerance, or else one as good); each logprob is its."""
    expected = oracle.logprobs([*prompt, *outcome.tokens])
    for position in range(1, len(prompt)):
        scored = outcome.prompt[position]
        assert scored is not None and scored.token_id == prompt[position]
        assert abs(scored.logprob - expected[position - 1, prompt[position]]) < tolerance
    assert len(outcome.tokens) == len(outcome.logprobs) == GREEDY.max_tokens
    for step, (token, scored) in enumerate(zip(outcome.tokens, outcome.logprobs, strict=True)):
        row = expected[len(prompt) - 1 + step]
        assert row.max() - row[token] < tolerance
        assert abs(scored.logprob - row[token]) < tolerance
        for top_id, top_logprob in scored.top:
            assert abs(top_logprob - row[top_id]) < tolerance


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_engine_agrees_with_the_interpreter(case: Case, dtype: str, tmp_path: Path) -> None:
    config = tiny(num_layers=2, max_position_embeddings=512, **case.shape)
    checkpoint = write_checkpoint(tmp_path / "m", config, num_shards=case.num_shards, **case.config)
    if config.vocab_size < VOCAB_SIZE:
        (checkpoint / "tokenizer.json").write_bytes(byte_level_json(config.vocab_size))
    targets = runnable_targets()
    build(
        checkpoint, tmp_path / "a", dtype=dtype, targets=[str(t) for t in targets], page_size=PAGE_SIZE,
        split_positions=SPLIT, max_model_len=MAX_MODEL_LEN, max_num_seqs=4, max_prefill_tokens=64,
    )  # fmt: skip
    rng = np.random.default_rng(3)
    prompts = [rng.integers(0, config.vocab_size, length).tolist() for length in PROMPT_LENGTHS]
    oracle = Oracle(open_checkpoint(checkpoint), dtype)
    tokens = []
    for target in targets:
        with load(tmp_path / "a", options=LoadOptions(target=target, kv_gib=0.05, threads=2)) as engine:
            outcomes = run(engine, prompts, [GREEDY] * len(prompts))
            assert [run(engine, [p], [GREEDY])[0] for p in prompts] == outcomes  # alone: the same bits
        for prompt, outcome in zip(prompts, outcomes, strict=True):
            check(prompt, outcome, oracle, TOLERANCE[dtype])
        tokens.append([outcome.tokens for outcome in outcomes])
    assert dtype == "bfloat16" or all(t == tokens[0] for t in tokens)


@pytest.mark.parametrize(
    ("shape", "dtype", "text"),
    [
        ({"head_dim": 24}, "float32", "no kernel for op 'rope_kv_write'"),
        ({"intermediate_size": 71}, "bfloat16", "sizes: need K to be a multiple of 2, have 71"),
        ({"hidden_size": 45}, "bfloat16", "sizes: need H to be a multiple of 2, have 45"),
    ],
)
def test_shapes_that_no_kernel_serves_are_refused(shape: dict[str, Any], dtype: str, text: str, tmp_path: Path) -> None:
    checkpoint = write_checkpoint(tmp_path / "m", tiny(**shape))
    with pytest.raises(SelectionError, match=text):
        build(checkpoint, tmp_path / "a", dtype=dtype)
    assert [p.name for p in tmp_path.iterdir()] == ["m"]
