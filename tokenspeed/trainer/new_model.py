"""An ordinary model of transformers that has an artifact's shape and weights: where a policy begins."""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Mapping
from typing import Any

import torch

from tokenspeed.artifact import Artifact
from tokenspeed.compile.derive import rope_parameters
from tokenspeed.compile.program import Program
from tokenspeed.errors import UsageError
from tokenspeed.trainer.compatible import LM_HEAD, checkpoint_weights
from tokenspeed.trainer.packing import Parameters, unpack
from tokenspeed.trainer.weights_file import read_weights_region
from tokenspeed.values import read_values

_log = logging.getLogger("tokenspeed.trainer")
_EXACT = 1e-9
"""Relative error up to which frequencies are powers of one base."""


def new_model(
    artifact: str | os.PathLike[str] | Artifact,
    *,
    dtype: torch.dtype = torch.float32,
    device: str | torch.device = "cpu",
) -> Any:
    """A LlamaForCausalLM of transformers with the shape and the weights of ``artifact``, rounded to ``dtype``.

    No checkpoint is read. Its config names no scaling of rotary frequencies: where the artifact's are scaled, the
    model's are set, and a model that is loaded again from what ``save_pretrained`` wrote has others, which ``align``
    refuses.

    Raises:
        ArtifactError: the artifact is damaged.
        UsageError: transformers is not installed.
    """
    opened = artifact if isinstance(artifact, Artifact) else Artifact.open(artifact)
    program = Program.from_json(opened.read("program.json").decode())
    model = _empty_model(program, dtype, torch.device(device))
    load_weights(opened, program, dict(model.named_parameters()))
    return model


def load_weights(artifact: Artifact, program: Program, tensors: Mapping[str, torch.Tensor]) -> None:
    """Give ``tensors``, by the checkpoint's names, the artifact's weights, rounded to their dtypes."""
    section = artifact.manifest.targets[0]
    unpack(Parameters(program, tensors), read_values(artifact, section).weights, read_weights_region(artifact, section))


def model_config(program: Program) -> dict[str, Any]:
    """The config that transformers calls its own, of what ``program`` computes."""
    metadata = program.metadata
    frequencies, _ = rope_parameters(program)
    return {
        "vocab_size": metadata["vocab_size"],
        "hidden_size": metadata["hidden_size"],
        "intermediate_size": metadata["intermediate_size"],
        "num_hidden_layers": metadata["num_layers"],
        "num_attention_heads": metadata["num_heads"],
        "num_key_value_heads": metadata["num_kv_heads"],
        "head_dim": metadata["head_dim"],
        "rms_norm_eps": next(op.attrs["eps"] for op in program.ops if op.kind == "rms_norm"),
        "max_position_embeddings": program.max_model_len,
        "tie_word_embeddings": LM_HEAD not in checkpoint_weights(program),
        "hidden_act": "silu",
        "rope_parameters": {"rope_type": "default", "rope_theta": _base(frequencies)},
    }


def _base(frequencies: tuple[float, ...]) -> float:
    """The theta of frequencies theta^(-2i/D); of scaled ones, of which the second is as good as unscaled."""
    return frequencies[1] ** -len(frequencies) if len(frequencies) > 1 else 10000.0


def _empty_model(program: Program, dtype: torch.dtype, device: torch.device) -> Any:
    try:
        from transformers import LlamaConfig, LlamaForCausalLM
    except ModuleNotFoundError as e:
        if e.name != "transformers":
            raise
        raise UsageError(
            "a new model needs transformers, and it is not installed",
            hint="install it with `pip install 'tokenspeed[trainer]'`",
        ) from None
    with torch.device("meta"):  # no time for random weights
        model = LlamaForCausalLM(LlamaConfig(**model_config(program), dtype=dtype))
    model = model.to_empty(device=device).to(dtype)
    model.tie_weights()
    frequencies, factor = rope_parameters(program)
    embedding = model.model.rotary_emb
    embedding.inv_freq = torch.tensor(frequencies, dtype=torch.float32, device=device)
    embedding.original_inv_freq = embedding.inv_freq.clone()
    embedding.attention_scaling = factor
    base, half = _base(frequencies), len(frequencies)
    plain = all(math.isclose(f, base ** (-i / half), rel_tol=_EXACT) for i, f in enumerate(frequencies))
    if not plain or factor != 1.0:
        _log.warning("the artifact's rotary frequencies are scaled: the new model has them, its config does not say so")
    return model.eval()
