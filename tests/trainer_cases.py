"""Tiny models of transformers beside artifacts of the same checkpoints, and what an engine says of their tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from tiny_artifact import VOCAB_SIZE, tiny, write_checkpoint
from torch import Tensor

from tokenspeed.compile.build import build
from tokenspeed.runtime.engine import Engine, load
from tokenspeed.runtime.loader import LoadOptions
from tokenspeed.runtime.request import SamplingParams

LIMITS: dict[str, Any] = {"max_prefill_tokens": 64, "max_num_seqs": 5, "max_model_len": 160}
"""So small that a batch takes several steps, and a step several groups of rows."""


MISTRAL: dict[str, Any] = {
    "architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": None
}  # fmt: skip
"""Of a config.json."""


def write(folder: Path, config: Mapping[str, Any] | None = None, **changes: Any) -> Path:
    """A checkpoint of two layers, with tied embeddings unless ``changes`` say otherwise; ``config`` goes to its
    config.json."""
    return write_checkpoint(folder, tiny(num_layers=2, max_position_embeddings=512, **changes), **(config or {}))


def artifact_of(checkpoint: Path, folder: Path, dtype: str, **changes: Any) -> Path:
    build(checkpoint, folder, **{"dtype": dtype, "numerics": "rl-bitwise", **LIMITS, **changes})
    return folder


def hf_model(checkpoint: Path, dtype: torch.dtype = torch.float32) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(checkpoint, dtype=dtype)


def random_ids(*lengths: int, seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(VOCAB_SIZE, (length,), generator=generator) for length in lengths]


def bounds(sequences: Sequence[Tensor]) -> list[int]:
    """cu_seqlens."""
    return [0, *torch.cumsum(torch.tensor([len(ids) for ids in sequences]), 0).tolist()]


def padded(sequences: Sequence[Tensor], side: str) -> tuple[Tensor, Tensor]:
    """(input_ids, attention_mask); padding holds tokens that mean something elsewhere."""
    length = max(map(len, sequences))
    ids, mask = torch.full((len(sequences), length), 7), torch.zeros(len(sequences), length, dtype=torch.long)
    for row, tokens in enumerate(sequences):
        at = slice(0, len(tokens)) if side == "right" else slice(length - len(tokens), length)
        ids[row, at], mask[row, at] = tokens, 1
    return ids, mask


def open_engine(artifact: Path) -> Engine:
    return load(artifact, options=LoadOptions(kv_gib=0.05, threads=2))


def prompt_logprobs(engine: Engine, sequences: Sequence[Tensor]) -> list[Tensor]:
    """What the engine says of the tokens of ``sequences``, given as prompts at once: float32, 0 for each first one."""
    params = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0)
    outputs = engine.generate([ids.tolist() for ids in sequences], params)
    found = []
    for output in outputs:
        assert output.prompt_logprobs is not None
        rest = [entry.logprob for entry in output.prompt_logprobs if entry is not None]
        found.append(torch.tensor([0.0, *rest], dtype=torch.float64).float())
    return found


def rollouts(engine: Engine, prompts: Sequence[Tensor], max_tokens: int) -> list[tuple[Tensor, Tensor]]:
    """(tokens with the prompt's, float32 log-probabilities of those that were drawn) at temperature 1."""
    params = SamplingParams(temperature=1.0, seed=5, max_tokens=max_tokens, ignore_eos=True, logprobs=0)
    found = []
    for ids, output in zip(prompts, engine.generate([ids.tolist() for ids in prompts], params), strict=True):
        drawn = torch.tensor([entry.logprob for entry in output.logprobs], dtype=torch.float64).float()
        found.append((torch.cat([ids, torch.tensor(output.token_ids)]), drawn))
    return found
