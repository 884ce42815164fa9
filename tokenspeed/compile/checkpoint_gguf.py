"""GGUF files of the Llama family as a Checkpoint.

Converters store the rows of q and k so that RoPE rotates neighbouring pairs (2i, 2i + 1); Hugging Face's rotate-half
pairs i with i + D/2. Reading undoes that reordering, head by head.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tokenspeed.compile import tokenizer_gguf
from tokenspeed.compile.checkpoint import (
    EMBEDDING,
    FINAL_NORM,
    LM_HEAD,
    ModelConfig,
    RopeScaling,
    TensorInfo,
    check_config,
    check_tensors,
    file_digest,
    tensor_shapes,
)
from tokenspeed.compile.gguf_file import GGUFFile, GGUFTensor, can_read
from tokenspeed.compile.rope import yarn_magnitude
from tokenspeed.compile.tokenizer import TokenizerFiles
from tokenspeed.errors import CheckpointError

_GLOBAL_NAMES = {"token_embd.weight": EMBEDDING, "output_norm.weight": FINAL_NORM, "output.weight": LM_HEAD}
_LAYER_PARTS = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_LAYER_NAME = re.compile(r"blk\.(\d+)\.(\w+)\.weight")
_ROPE_FREQS = "rope_freqs.weight"


class GGUFCheckpoint:
    """See ``checkpoint.Checkpoint``."""

    def __init__(self, path: Path):
        self._file = GGUFFile(path)
        self._tensors = {canonical_name(name): tensor for name, tensor in self._file.tensors.items()}
        self.config = read_config(self._file)
        shapes = {name: tensor.shape for name, tensor in self._tensors.items()}
        check_tensors(self.config, shapes, path, ignored=(_ROPE_FREQS,))
        for name in self.names():
            self._check_type(self._tensors[name])

    def _check_type(self, tensor: GGUFTensor) -> None:
        if not can_read(tensor.type_name):
            raise CheckpointError(
                f"{self._file.path}: tensor {tensor.name} has type {tensor.type_name}, which the gguf package "
                "cannot dequantize",
                hint="upgrade the gguf package, or use a file with a common type such as Q8_0 or Q4_K",
            )

    @property
    def files(self) -> tuple[Path, ...]:
        return (self._file.path,)

    def names(self) -> tuple[str, ...]:
        return tuple(tensor_shapes(self.config))

    def info(self, name: str) -> TensorInfo:
        return self._tensors[name].info

    def read(self, name: str) -> NDArray[Any]:
        order = None
        if name.endswith("self_attn.q_proj.weight"):
            order = rotate_half_rows(self.config.num_heads, self.config.head_dim)
        elif name.endswith("self_attn.k_proj.weight"):
            order = rotate_half_rows(self.config.num_kv_heads, self.config.head_dim)
        return self._file.read(self._tensors[name], order)

    def tokenizer(self) -> TokenizerFiles:
        return tokenizer_gguf.read_tokenizer(self._file.metadata, self._file.path, self.config.eos_token_ids)

    def digests(self) -> dict[str, str]:
        return dict(self._digests)

    @cached_property
    def _digests(self) -> dict[str, str]:
        return {path.name: file_digest(path) for path in self.files}


def canonical_name(name: str) -> str:
    """Hugging Face's name for a GGUF tensor; a tensor that has none keeps its own name."""
    if match := _LAYER_NAME.fullmatch(name):
        layer, part = match.groups()
        if part in _LAYER_PARTS:
            return f"model.layers.{layer}.{_LAYER_PARTS[part]}.weight"
    return _GLOBAL_NAMES.get(name, name)


def rotate_half_rows(num_heads: int, head_dim: int) -> NDArray[np.intp]:
    """For each rotate-half row, the row of the interleaved storage: intp[num_heads * head_dim]."""
    rows = np.arange(num_heads * head_dim, dtype=np.intp)
    return rows.reshape(num_heads, head_dim // 2, 2).swapaxes(1, 2).reshape(-1)


class _Metadata:
    """Typed look-up of a GGUF's metadata under the architecture's prefix."""

    def __init__(self, values: Mapping[str, Any], path: Path):
        self._values = values
        self._path = path

    def _get(self, key: str, kind: type | tuple[type, ...], what: str, default: Any) -> Any:
        value = self._values.get(f"llama.{key}", default)
        if isinstance(value, list) and value and all(v == value[0] for v in value):
            value = value[0]  # one value per layer, all alike
        if isinstance(value, bool) or not isinstance(value, kind):
            raise CheckpointError(f"{self._path}: need {what} as metadata llama.{key}, have {_describe(value)}")
        return value

    def integer(self, key: str, default: int | None = None) -> int:
        value: int = self._get(key, int, "one integer", default)
        return value

    def number(self, key: str, default: float | None = None) -> float:
        value = float(self._get(key, (int, float), "one number", default))
        # A float32 in the file: the shortest decimal that rounds to it (1e-05) is what its writer meant.
        return float(str(np.float32(value))) if value == np.float32(value) else value

    def text(self, key: str, default: str) -> str:
        value: str = self._get(key, str, "a string", default)
        return value


def _describe(value: object) -> str:
    if value is None:
        return "none"
    return f"different values per layer, {value}" if isinstance(value, list) else repr(value)


def read_config(file: GGUFFile) -> ModelConfig:
    """The ModelConfig of a GGUF's metadata (and rope_freqs.weight). Raises CheckpointError."""
    path, metadata = file.path, file.metadata
    _check_supported(metadata, path)
    get = _Metadata(metadata, path)
    num_heads = get.integer("attention.head_count")
    hidden = get.integer("embedding_length")
    head_dim = get.integer("attention.key_length", hidden // max(num_heads, 1))
    _check_head(get, head_dim, path)
    embedding = file.tensors.get("token_embd.weight")
    config = ModelConfig(
        architecture="llama",
        name=path.name.removesuffix(".gguf"),
        hidden_size=hidden,
        intermediate_size=get.integer("feed_forward_length"),
        num_layers=get.integer("block_count"),
        num_heads=num_heads,
        num_kv_heads=get.integer("attention.head_count_kv", num_heads),
        head_dim=head_dim,
        # The table is what counts: writers have left stale vocab_size values behind.
        vocab_size=embedding.shape[0] if embedding else get.integer("vocab_size"),
        rms_norm_eps=get.number("attention.layer_norm_rms_epsilon"),
        rope_theta=get.number("rope.freq_base", 10000.0),
        rope_scaling=_rope_scaling(get, path),
        rope_freq_factors=_rope_freq_factors(file),
        max_position_embeddings=get.integer("context_length"),
        tie_word_embeddings="output.weight" not in file.tensors,
        sliding_window=get.integer("attention.sliding_window", 0) or None,
        bos_token_id=tokenizer_gguf.token_id(metadata, "bos", path),
        eos_token_ids=tokenizer_gguf.end_token_ids(metadata, path),
    )
    check_config(config, path)
    return config


def _check_supported(metadata: Mapping[str, Any], path: Path) -> None:
    architecture = metadata.get("general.architecture")
    if architecture != "llama":
        raise CheckpointError(
            f"{path}: unknown architecture {architecture!r}: need 'llama' (Llama, Mistral, SmolLM2)",
            hint="use a GGUF file of a Llama-family model",
        )
    if metadata.get("split.count", 1) > 1:
        raise CheckpointError(
            f"{path} is one of {metadata['split.count']} parts of a split GGUF: need a single file",
            hint="join the parts first (llama-gguf-split --merge)",
        )
    if metadata.get("llama.expert_count", 0):
        raise CheckpointError(
            f"{path}: a mixture of {metadata['llama.expert_count']} experts is not supported: need a dense model"
        )


def _check_head(get: _Metadata, head_dim: int, path: Path) -> None:
    for key, what in (("attention.value_length", "value"), ("rope.dimension_count", "rotary")):
        have = get.integer(key, head_dim)
        if have != head_dim:
            raise CheckpointError(
                f"{path}: need {what} dimensions equal to the {head_dim} key dimensions of a head, have {have}"
            )


def _rope_scaling(get: _Metadata, path: Path) -> RopeScaling | None:
    factor = get.number("rope.scaling.factor", 0.0) or get.number("rope.scale_linear", 0.0)
    kind = get.text("rope.scaling.type", "linear" if factor else "none")
    if kind == "none" or (kind == "linear" and factor in (0.0, 1.0)):
        return None
    if kind == "linear":
        return RopeScaling("linear", factor)
    if kind == "yarn":
        return RopeScaling(
            "yarn",
            factor,
            original_max_position_embeddings=get.integer("rope.scaling.original_context_length"),
            beta_fast=get.number("rope.scaling.yarn_beta_fast", 32.0),
            beta_slow=get.number("rope.scaling.yarn_beta_slow", 1.0),
            attention_factor=get.number("rope.scaling.attn_factor", 1.0) * yarn_magnitude(factor),
        )
    raise CheckpointError(
        f"{path}: rope scaling {kind!r} is not supported: need none, linear or yarn",
        hint="use a checkpoint whose rotary frequencies do not depend on the length of the request",
    )


def _rope_freq_factors(file: GGUFFile) -> tuple[float, ...] | None:
    tensor = file.tensors.get(_ROPE_FREQS)
    if tensor is None:
        return None
    if not can_read(tensor.type_name):
        raise CheckpointError(f"{file.path}: tensor {_ROPE_FREQS} has the unreadable type {tensor.type_name}")
    return tuple(file.read(tensor).astype(np.float64).reshape(-1).tolist())
