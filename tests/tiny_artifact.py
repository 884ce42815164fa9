"""Tiny random checkpoints on disk, with a tokenizer and a chat template, and artifacts built from them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from checkpoint_files import HF_CONFIG, write_hf
from tiny_llama import tiny_config, tiny_weights
from tiny_tokenizers import CHATML, byte_level_json

import tokenspeed
from tokenspeed.compile.checkpoint import ModelConfig

HOME = Path(tokenspeed.__file__).resolve().parent.parent
"""Where this process found the package, and where its children shall: the checkout or site-packages."""
VOCAB_SIZE = 283
"""Odd, and more than the tokenizer's 267 tokens, as in many a published model."""


def tiny(**changes: Any) -> ModelConfig:
    """A Llama whose replies can be long: 1 layer, 65536 positions."""
    defaults: dict[str, Any] = {"vocab_size": VOCAB_SIZE, "num_layers": 1, "max_position_embeddings": 65536}
    return tiny_config(**{**defaults, **changes})


def hf_config(config: ModelConfig, **changes: Any) -> dict[str, Any]:
    """The config.json of a ModelConfig, rope scaling aside."""
    return {
        **HF_CONFIG,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "vocab_size": config.vocab_size,
        "rms_norm_eps": config.rms_norm_eps,
        "rope_theta": config.rope_theta,
        "max_position_embeddings": config.max_position_embeddings,
        "tie_word_embeddings": config.tie_word_embeddings,
        "bos_token_id": 0,
        "eos_token_id": None,
        **changes,
    }


def write_checkpoint(
    directory: Path, config: ModelConfig | None = None, *, num_shards: int = 1, seed: int = 0, **changes: Any
) -> Path:
    """A Hugging Face directory; ``changes`` go to its config.json. Returns ``directory``.

    There is no end token: a reply is as long as it is asked to be.
    """
    config = config or tiny()
    write_hf(directory, hf_config(config, **changes), tiny_weights(config, seed), num_shards=num_shards)
    (directory / "tokenizer.json").write_bytes(byte_level_json())
    settings = {"chat_template": CHATML, "bos_token": "<|endoftext|>", "eos_token": None}
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))
    return directory


def cli_environment(**changes: str) -> dict[str, str]:
    """The environment of a child process that runs the same package as this one."""
    return {**os.environ, "PYTHONPATH": str(HOME), "TOKENSPEED_API_KEY": "", **changes}


def command(*args: str | Path, python: Sequence[str] = (sys.executable,)) -> list[str]:
    return [*python, "-m", "tokenspeed", *map(str, args)]


def cli(*args: str | Path, stdin: str | None = None, **options: Any) -> subprocess.CompletedProcess[str]:
    """Run ``tokenspeed ARGS`` in a process of its own."""
    return subprocess.run(
        command(*args),
        input="" if stdin is None else stdin,
        capture_output=True,
        text=True,
        timeout=60,
        env=cli_environment(),
        **options,
    )


def is_empty(folder: Path) -> bool:
    """Whether a build has left nothing behind in ``folder``."""
    return not any(folder.iterdir())
