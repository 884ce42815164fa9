"""Checkpoints: a model's shape, tensors and tokenizer, whatever files they came in.

``open_checkpoint`` reads a Hugging Face directory (safetensors) or a GGUF file; both yield the same
``Checkpoint``: Hugging Face's tensor names, projections as ``[out_features, in_features]``, q and k rows in
the order that rotate-half RoPE expects. Opening reads headers only; tensor data is read by ``read``.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from tokenspeed.compile.tokenizer import TokenizerFiles
from tokenspeed.errors import CheckpointError

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
"""bfloat16 as a NumPy dtype."""

EMBEDDING = "model.embed_tokens.weight"
FINAL_NORM = "model.norm.weight"
LM_HEAD = "lm_head.weight"

# More than any model has: a damaged count must not fill memory with names of tensors.
_MAX_LAYERS = 4096


@dataclass(frozen=True)
class RopeScaling:
    """How rotary frequencies are stretched beyond the trained context; ``compile.rope`` has the formulas.

    Attributes:
        kind: ``linear``, ``llama3`` or ``yarn``.
        factor: how many times longer the context becomes.
        original_max_position_embeddings: positions of the original training (llama3, yarn).
        low_freq_factor, high_freq_factor: llama3's band of blended wavelengths.
        beta_fast, beta_slow: yarn's band, in rotations over the original context.
        attention_factor: yarn's factor on cosines and sines; None: 0.1 ln(factor) + 1.
        truncate: yarn: whether the band's ends are rounded outwards to whole dimensions.
    """

    kind: str
    factor: float
    original_max_position_embeddings: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    truncate: bool = True


@dataclass(frozen=True)
class ModelConfig:
    """The shape and constants of a Llama-family decoder. Counts are per layer where that makes sense.

    Attributes:
        architecture: always ``llama`` (Mistral and SmolLM2 are the same network).
        name: what the checkpoint is called: the directory's name or the file's stem.
        num_kv_heads: key/value heads; divides ``num_heads``.
        head_dim: dimensions of a head; even. ``num_heads * head_dim`` need not be ``hidden_size``.
        rope_freq_factors: divisors of the ``head_dim / 2`` inverse frequencies (GGUF's rope_freqs.weight).
        max_position_embeddings: positions the model was made for.
        sliding_window: positions a query sees, itself included; None: all of them.
        bos_token_id: None where the checkpoint names none.
        eos_token_ids: tokens that end a generation; may be empty.
    """

    architecture: str
    name: str
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    rms_norm_eps: float
    rope_theta: float
    max_position_embeddings: int
    tie_word_embeddings: bool
    rope_scaling: RopeScaling | None = None
    rope_freq_factors: tuple[float, ...] | None = None
    sliding_window: int | None = None
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()


class TensorInfo(NamedTuple):
    """What ``Checkpoint.read`` will return: element type and shape."""

    dtype: np.dtype[Any]
    shape: tuple[int, ...]


class Checkpoint(Protocol):
    """An opened checkpoint. Every method may raise CheckpointError."""

    @property
    def config(self) -> ModelConfig:
        """The model's shape and constants."""
        ...

    @property
    def files(self) -> tuple[Path, ...]:
        """Every source file that the checkpoint consists of, sorted."""
        ...

    def names(self) -> tuple[str, ...]:
        """Names of the tensors, exactly the keys of ``tensor_shapes(config)`` and in that order."""
        ...

    def info(self, name: str) -> TensorInfo:
        """Element type and shape of a tensor, from headers alone. KeyError for an unknown name."""
        ...

    def read(self, name: str) -> NDArray[Any]:
        """A tensor, in float32, float16 or bfloat16 (quantized ones dequantized to float32). May be read-only."""
        ...

    def tokenizer(self) -> TokenizerFiles:
        """The tokenizer as a tokenizer.json with its chat template and special tokens."""
        ...

    def digests(self) -> dict[str, str]:
        """``sha256:<hex>`` of each source file by file name. Reads every file once, then remembers."""
        ...


def open_checkpoint(path: str | Path) -> Checkpoint:
    """Open a Hugging Face directory, a .gguf file, or a directory that holds exactly one .gguf file."""
    source = Path(path)
    if not source.exists():
        raise CheckpointError(
            f"no checkpoint at {source}: need a Hugging Face directory or a .gguf file",
            hint="check the path; `make checkpoint` fetches a small one",
        )
    if source.is_dir():
        return _open_directory(source)
    if source.suffix in (".safetensors", ".bin", ".json"):
        raise CheckpointError(
            f"{source} is one file of a Hugging Face checkpoint: need the whole directory",
            hint=f"give {source.parent}",
        )
    return _open_gguf(source)


def _open_directory(directory: Path) -> Checkpoint:
    if (directory / "config.json").is_file():
        # Imported here: the readers import this module.
        from tokenspeed.compile.checkpoint_hf import HuggingFaceCheckpoint

        return HuggingFaceCheckpoint(directory)
    gguf_files = sorted(directory.glob("*.gguf"))
    if len(gguf_files) == 1:
        return _open_gguf(gguf_files[0])
    if gguf_files:
        listing = ", ".join(f.name for f in gguf_files)
        raise CheckpointError(
            f"{directory} holds {len(gguf_files)} .gguf files: need exactly one, have {listing}",
            hint="give the path of the file that you mean",
        )
    raise CheckpointError(
        f"{directory} is not a checkpoint: need config.json or a .gguf file in it, have neither",
        hint="give the directory that holds config.json",
    )


def _open_gguf(path: Path) -> Checkpoint:
    from tokenspeed.compile.checkpoint_gguf import GGUFCheckpoint

    return GGUFCheckpoint(path)


def tensor_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor of a Llama-family model, in the order of the forward pass.

    A tied language-model head has no entry of its own.
    """
    hidden, inner = config.hidden_size, config.intermediate_size
    q_rows, kv_rows = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    shapes: dict[str, tuple[int, ...]] = {EMBEDDING: (config.vocab_size, hidden)}
    for layer in range(config.num_layers):
        shapes |= {
            f"model.layers.{layer}.{part}.weight": shape
            for part, shape in (
                ("input_layernorm", (hidden,)),
                ("self_attn.q_proj", (q_rows, hidden)),
                ("self_attn.k_proj", (kv_rows, hidden)),
                ("self_attn.v_proj", (kv_rows, hidden)),
                ("self_attn.o_proj", (hidden, q_rows)),
                ("post_attention_layernorm", (hidden,)),
                ("mlp.gate_proj", (inner, hidden)),
                ("mlp.up_proj", (inner, hidden)),
                ("mlp.down_proj", (hidden, inner)),
            )
        }
    shapes[FINAL_NORM] = (hidden,)
    if not config.tie_word_embeddings:
        shapes[LM_HEAD] = (config.vocab_size, hidden)
    return shapes


def check_config(config: ModelConfig, source: Path) -> None:
    """Raise CheckpointError where the numbers of a config contradict one another."""
    for field in (
        "hidden_size",
        "intermediate_size",
        "num_layers",
        "num_heads",
        "num_kv_heads",
        "head_dim",
        "vocab_size",
        "max_position_embeddings",
    ):
        _check_positive(source, **{field: getattr(config, field)})
    if config.num_layers > _MAX_LAYERS:
        raise CheckpointError(f"{source}: need at most {_MAX_LAYERS} layers, have {config.num_layers}")
    if config.num_heads % config.num_kv_heads:
        raise CheckpointError(
            f"{source}: need a number of key/value heads that divides the {config.num_heads} query heads, "
            f"have {config.num_kv_heads}"
        )
    if config.head_dim % 2:
        raise CheckpointError(f"{source}: need an even head_dim for rotary embeddings, have {config.head_dim}")
    if config.sliding_window is not None and config.sliding_window <= 0:
        raise CheckpointError(f"{source}: need a positive sliding_window or none, have {config.sliding_window}")
    _check_positive(source, rms_norm_eps=config.rms_norm_eps)
    if not 1 < config.rope_theta < math.inf:
        raise CheckpointError(f"{source}: need a rope_theta above 1, have {config.rope_theta}")
    for token_id in config.eos_token_ids:
        if not 0 <= token_id < config.vocab_size:
            raise CheckpointError(
                f"{source}: need end tokens below the vocab_size {config.vocab_size}, have {token_id}",
                hint="config and weights belong to different models: fetch the checkpoint again",
            )
    factors = config.rope_freq_factors
    if factors is not None and len(factors) != config.head_dim // 2:
        raise CheckpointError(
            f"{source}: need {config.head_dim // 2} rope frequency factors, half the head_dim, have {len(factors)}"
        )
    _check_positive(source, **{f"rope_freq_factors[{i}]": f for i, f in enumerate(factors or ())})
    if config.rope_scaling is not None:
        _check_rope_scaling(config.rope_scaling, source)


def _check_rope_scaling(scaling: RopeScaling, source: Path) -> None:
    _check_positive(source, **{"rope scaling's factor": scaling.factor})
    if scaling.kind == "linear":
        return
    _check_positive(source, original_max_position_embeddings=scaling.original_max_position_embeddings)
    bands = {
        "llama3": ("low_freq_factor", scaling.low_freq_factor, "high_freq_factor", scaling.high_freq_factor),
        "yarn": ("beta_slow", scaling.beta_slow, "beta_fast", scaling.beta_fast),
    }
    low_name, low, high_name, high = bands[scaling.kind]
    if not 0 < low < high < math.inf:
        raise CheckpointError(f"{source}: need 0 < {low_name} < {high_name}, have {low} and {high}")


def _check_positive(source: Path, **values: float) -> None:
    for name, value in values.items():
        if not 0 < value < math.inf:  # also refuses NaN
            raise CheckpointError(f"{source}: need a positive {name}, have {value}")


def check_tensors(
    config: ModelConfig,
    shapes: Mapping[str, tuple[int, ...]],
    source: Path,
    *,
    ignored: Iterable[str] = (),
) -> None:
    """Raise CheckpointError unless ``shapes`` is exactly what ``config`` needs (``ignored`` names aside)."""
    expected = tensor_shapes(config)
    missing = [name for name in expected if name not in shapes]
    if missing:
        raise CheckpointError(
            f"{source}: {len(missing)} of {len(expected)} tensors are missing, first {missing[0]}",
            hint="the download may be incomplete: fetch the checkpoint again",
        )
    for name, shape in expected.items():
        if shapes[name] != shape:
            raise CheckpointError(
                f"{source}: tensor {name} has the wrong shape: need {list(shape)} by the config, "
                f"have {list(shapes[name])}",
                hint="config and weights belong to different models: fetch the checkpoint again",
            )
    unknown = sorted(set(shapes) - set(expected) - set(ignored))
    if unknown:
        raise CheckpointError(
            f"{source}: tensor {unknown[0]} (one of {len(unknown)}) is not part of a Llama-family model "
            "without biases, experts or adapters",
            hint="use a plain Llama, Mistral or SmolLM2 checkpoint; merge adapters into the weights first",
        )


def file_digest(path: Path) -> str:
    """``sha256:<hex>`` of a file's bytes."""
    try:
        with path.open("rb") as file:
            return f"sha256:{hashlib.file_digest(file, 'sha256').hexdigest()}"
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror}") from error
