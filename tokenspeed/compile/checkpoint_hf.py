"""Hugging Face directories (config.json, safetensors) of the Llama family as a Checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from tokenspeed.compile import tokenizer_hf
from tokenspeed.compile.checkpoint import (
    LM_HEAD,
    ModelConfig,
    RopeScaling,
    TensorInfo,
    check_config,
    check_tensors,
    file_digest,
    tensor_shapes,
)
from tokenspeed.compile.json_file import Fields, read_json
from tokenspeed.compile.rope import SCALING_KINDS, yarn_magnitude
from tokenspeed.compile.safetensors_file import SafetensorsFile
from tokenspeed.compile.tokenizer import TokenizerFiles
from tokenspeed.errors import CheckpointError

ARCHITECTURES = ("LlamaForCausalLM", "MistralForCausalLM")
"""Class names in config.json that this reader takes."""

_MISTRAL = "MistralForCausalLM"
_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"
_EXTRA_FILES = (
    "config.json",
    "generation_config.json",
    _INDEX,
    *tokenizer_hf.FILES,
)


class HuggingFaceCheckpoint:
    """See ``checkpoint.Checkpoint``."""

    def __init__(self, directory: Path):
        self._directory = directory
        self.config = read_config(directory)
        self._shards = _open_shards(directory)
        self._home = {name: shard for shard in self._shards.values() for name in shard.tensors}
        shapes = {name: shard.tensors[name].shape for name, shard in self._home.items()}
        # Old files store the rotary frequencies; a tied model may store its head a second time.
        ignored = [name for name in shapes if name.endswith("rotary_emb.inv_freq")]
        if self.config.tie_word_embeddings:
            ignored.append(LM_HEAD)
        check_tensors(self.config, shapes, directory, ignored=ignored)

    @property
    def files(self) -> tuple[Path, ...]:
        extra = [self._directory / name for name in _EXTRA_FILES]
        return tuple(sorted([*(self._directory / name for name in self._shards), *(f for f in extra if f.is_file())]))

    def names(self) -> tuple[str, ...]:
        return tuple(tensor_shapes(self.config))

    def info(self, name: str) -> TensorInfo:
        return self._home[name].tensors[name]

    def read(self, name: str) -> NDArray[Any]:
        return self._home[name].read(name)

    def tokenizer(self) -> TokenizerFiles:
        return tokenizer_hf.read_tokenizer(self._directory, self.config)

    def digests(self) -> dict[str, str]:
        return dict(self._digests)

    @cached_property
    def _digests(self) -> dict[str, str]:
        return {path.name: file_digest(path) for path in self.files}


def _open_shards(directory: Path) -> dict[str, SafetensorsFile]:
    """The weight files by name: one, or those that the index lists."""
    if (directory / _SINGLE).is_file():
        return {_SINGLE: SafetensorsFile(directory / _SINGLE)}
    if not (directory / _INDEX).is_file():
        raise _no_weights(directory)
    weight_map = read_json(directory / _INDEX).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{directory / _INDEX}: need a weight_map of tensor names to files, have none")
    shards: dict[str, SafetensorsFile] = {}
    for file_name in sorted({str(value) for value in weight_map.values()}):
        path = directory / file_name
        if Path(file_name).name != file_name:
            raise CheckpointError(f"{directory / _INDEX}: need plain file names in weight_map, have {file_name!r}")
        if not path.is_file():
            raise CheckpointError(
                f"{directory}: the weight file {file_name} that {_INDEX} lists is missing",
                hint="the download is incomplete: fetch the checkpoint again",
            )
        shards[file_name] = SafetensorsFile(path)
    for name, file_name in weight_map.items():
        if name not in shards[str(file_name)].tensors:
            raise CheckpointError(
                f"{directory}: {_INDEX} says that tensor {name} is in {file_name}, but it is not",
                hint="index and weights do not belong together: fetch the checkpoint again",
            )
    return shards


def _no_weights(directory: Path) -> CheckpointError:
    if pickles := sorted(directory.glob("*.bin")) + sorted(directory.glob("*.pt*")):
        return CheckpointError(
            f"{directory} holds only pickled weights ({pickles[0].name}), which can run code when opened: "
            "need safetensors",
            hint="fetch the safetensors revision, or save it again with save_pretrained(safe_serialization=True)",
        )
    return CheckpointError(
        f"{directory} has no weights: need {_SINGLE} or {_INDEX} with its files",
        hint="fetch the checkpoint again, the download may be incomplete; --dummy-weights SEED measures its shape",
    )


def read_config(directory: Path) -> ModelConfig:
    """The ModelConfig of a directory's config.json and generation_config.json. Raises CheckpointError."""
    path = directory / "config.json"
    fields = Fields(read_json(path), path)
    architecture = _check_supported(fields)
    hidden, num_heads = fields.integer("hidden_size"), fields.integer("num_attention_heads")
    max_positions = fields.integer("max_position_embeddings", 2048)
    is_mistral = architecture == _MISTRAL
    theta, scaling = _rope(fields, max_positions)
    bos = fields.integers("bos_token_id")
    config = ModelConfig(
        architecture="llama",
        name=_name(directory),
        hidden_size=hidden,
        intermediate_size=fields.integer("intermediate_size"),
        num_layers=fields.integer("num_hidden_layers"),
        num_heads=num_heads,
        num_kv_heads=fields.integer("num_key_value_heads", 8 if is_mistral else num_heads),
        head_dim=fields.integer("head_dim", hidden // max(num_heads, 1)),
        vocab_size=fields.integer("vocab_size"),
        rms_norm_eps=fields.number("rms_norm_eps", 1e-6),
        rope_theta=theta,
        rope_scaling=scaling,
        max_position_embeddings=max_positions,
        tie_word_embeddings=fields.boolean("tie_word_embeddings", False),
        sliding_window=_sliding_window(fields) if is_mistral else None,
        bos_token_id=bos[0] if bos else None,
        eos_token_ids=_end_token_ids(fields, directory),
    )
    check_config(config, path)
    return config


def _name(directory: Path) -> str:
    """The directory's name; inside a Hugging Face cache (models--org--name/snapshots/hash), the model's."""
    resolved = directory.resolve()
    if resolved.parent.name == "snapshots":
        return resolved.parent.parent.name.removeprefix("models--").replace("--", "/", 1)
    return resolved.name


def _check_supported(fields: Fields) -> str:
    architectures = fields.values.get("architectures")
    architecture = architectures[0] if isinstance(architectures, list) and architectures else None
    if architecture not in ARCHITECTURES:
        raise CheckpointError(
            f"{fields.path}: unknown architecture {architecture!r}: need one of {', '.join(ARCHITECTURES)}",
            hint="SmolLM2, Llama 2 and 3 and Mistral checkpoints are supported",
        )
    if quantization := fields.values.get("quantization_config"):
        method = quantization.get("quant_method", "unnamed") if isinstance(quantization, dict) else quantization
        raise CheckpointError(
            f"{fields.path}: the checkpoint is quantized ({method}): need float32, float16 or bfloat16 weights: no"
            " kernel, batch-invariant or other, reads quantized ones",
            hint="use the unquantized checkpoint, or a GGUF file, whose weights are dequantized at build",
        )
    for key in ("attention_bias", "mlp_bias"):
        if fields.boolean(key, False):
            raise CheckpointError(f"{fields.path}: {key} is true: projections with biases are not supported")
    activation = fields.values.get("hidden_act", "silu")
    if activation not in ("silu", "swish"):
        raise CheckpointError(f"{fields.path}: need hidden_act 'silu', have {activation!r}")
    return str(architecture)


def _sliding_window(fields: Fields) -> int | None:
    # Mistral's default where the key is absent is 4096; null switches the window off.
    if "sliding_window" in fields.values and fields.values["sliding_window"] is None:
        return None
    return fields.integer("sliding_window", 4096)


def _end_token_ids(fields: Fields, directory: Path) -> tuple[int, ...]:
    ids = set(fields.integers("eos_token_id"))
    generation = directory / "generation_config.json"
    if generation.is_file():
        ids |= set(Fields(read_json(generation), generation).integers("eos_token_id"))
    return tuple(sorted(ids))


def _rope(fields: Fields, max_positions: int) -> tuple[float, RopeScaling | None]:
    """Theta and scaling, from ``rope_parameters`` (newer) or ``rope_theta`` and ``rope_scaling`` (older)."""
    theta = fields.number("rope_theta", 10000.0)
    key = "rope_parameters" if fields.values.get("rope_parameters") else "rope_scaling"
    values = fields.values.get(key)
    if values is None:
        return theta, None
    if not isinstance(values, Mapping):
        raise CheckpointError(f"{fields.path}: need an object as {key}, have {values!r}")
    rope = Fields(values, fields.path, prefix=f"{key}.")
    if rope.number("partial_rotary_factor", 1.0) != 1.0:
        raise CheckpointError(
            f"{fields.path}: need rotary embeddings on whole heads, have partial_rotary_factor "
            f"{values['partial_rotary_factor']}"
        )
    return rope.number("rope_theta", theta), _rope_scaling(rope, max_positions)


def _rope_scaling(rope: Fields, max_positions: int) -> RopeScaling | None:
    kind = rope.values.get("rope_type", rope.values.get("type", "default"))
    if kind == "default":
        return None
    if kind not in SCALING_KINDS:
        raise CheckpointError(
            f"{rope.path}: rope scaling {kind!r} is not supported: need default, {', '.join(SCALING_KINDS)}",
            hint="use a checkpoint whose rotary frequencies do not depend on the length of the request",
        )
    factor = rope.number("factor")
    if kind == "linear":
        return RopeScaling("linear", factor)
    original = rope.integer("original_max_position_embeddings", None if kind == "llama3" else max_positions)
    if kind == "llama3":
        low, high = rope.number("low_freq_factor"), rope.number("high_freq_factor")
        return RopeScaling("llama3", factor, original, low_freq_factor=low, high_freq_factor=high)
    return RopeScaling(
        "yarn",
        factor,
        original,
        beta_fast=rope.number("beta_fast", 32.0),
        beta_slow=rope.number("beta_slow", 1.0),
        attention_factor=_yarn_attention_factor(rope, factor),
        truncate=rope.boolean("truncate", True),
    )


def _yarn_attention_factor(rope: Fields, factor: float) -> float:
    """Given outright, or by the two weights that DeepSeek's variant added, or by the paper's fit."""
    if rope.values.get("attention_factor") is not None:
        return rope.number("attention_factor")
    weight, weight_all = rope.number("mscale", 0.0), rope.number("mscale_all_dim", 0.0)
    if weight and weight_all:
        return yarn_magnitude(factor, weight) / yarn_magnitude(factor, weight_all)
    return yarn_magnitude(factor)
