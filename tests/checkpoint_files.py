"""Makes tiny checkpoints on disk for tests: Hugging Face directories, GGUF files, SentencePiece models."""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import gguf
import ml_dtypes
import numpy as np
from gguf import GGMLQuantizationType as Type
from numpy.typing import NDArray
from safetensors.numpy import save_file

from tokenspeed.compile.checkpoint import ModelConfig, tensor_shapes

Tensors = dict[str, NDArray[Any]]

TINY = ModelConfig(
    architecture="llama",
    name="tiny",
    hidden_size=64,
    intermediate_size=96,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    vocab_size=300,
    rms_norm_eps=1e-5,
    rope_theta=10000.0,
    max_position_embeddings=128,
    tie_word_embeddings=False,
    bos_token_id=1,
    eos_token_ids=(2,),
)

HF_CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 300,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 128,
    "hidden_act": "silu",
    "bos_token_id": 1,
    "eos_token_id": 2,
}

GGUF_METADATA: dict[str, Any] = {
    "llama.block_count": 2,
    "llama.context_length": 128,
    "llama.embedding_length": 64,
    "llama.feed_forward_length": 96,
    "llama.attention.head_count": 4,
    "llama.attention.head_count_kv": 2,
    "llama.attention.layer_norm_rms_epsilon": 1e-5,
}

_GGUF_PARTS = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
_GGUF_GLOBALS = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}


def random_tensors(config: ModelConfig = TINY) -> Tensors:
    rng = np.random.default_rng(7)
    return {name: rng.standard_normal(shape, dtype=np.float32) for name, shape in tensor_shapes(config).items()}


def write_hf(
    directory: Path, config: Mapping[str, Any] = HF_CONFIG, tensors: Tensors | None = None, *, num_shards: int = 1
) -> Tensors:
    """Write config.json and weights, in shards if asked; return the tensors."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config))
    tensors = random_tensors() if tensors is None else tensors
    if num_shards == 1:
        save_file(tensors, directory / "model.safetensors")
        return tensors
    weight_map = {}
    for shard in range(num_shards):
        name = f"model-{shard + 1:05}-of-{num_shards:05}.safetensors"
        part = dict(list(tensors.items())[shard::num_shards])
        save_file(part, directory / name)
        weight_map |= dict.fromkeys(part, name)
    (directory / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return tensors


def gguf_name(name: str) -> str:
    if name in _GGUF_GLOBALS:
        return _GGUF_GLOBALS[name]
    if not name.startswith("model.layers."):
        return name
    _, _, layer, *part = name.removesuffix(".weight").split(".")
    return f"blk.{layer}.{_GGUF_PARTS['.'.join(part)]}.weight"


def interleave(rows: NDArray[Any], num_heads: int) -> NDArray[Any]:
    """What converters do to q and k: row (half, pair) of each head becomes row (pair, half)."""
    return rows.reshape(num_heads, 2, -1, rows.shape[-1]).swapaxes(1, 2).reshape(rows.shape)


def write_gguf(
    path: Path,
    tensors: Tensors | None = None,
    *,
    kind: Type = Type.F32,
    metadata: Mapping[str, Any] | None = None,
    config: ModelConfig = TINY,
    architecture: str = "llama",
) -> Tensors:
    """Write a GGUF of matrices in ``kind`` and vectors in float32; return the (Hugging Face) tensors.

    ``metadata`` adds keys to GGUF_METADATA, or removes them where the value is None.
    """
    tensors = random_tensors(config) if tensors is None else tensors
    writer = gguf.GGUFWriter(path, architecture)
    add_metadata(writer, GGUF_METADATA | dict(metadata or {}))
    for name, values in tensors.items():
        if name.endswith("q_proj.weight"):
            values = interleave(values, config.num_heads)
        elif name.endswith("k_proj.weight"):
            values = interleave(values, config.num_kv_heads)
        if values.ndim > 1 and kind != Type.F32:
            writer.add_tensor(gguf_name(name), gguf.quants.quantize(values, kind), raw_dtype=kind)
        else:
            writer.add_tensor(gguf_name(name), values)
    close_gguf(writer)
    return tensors


def add_metadata(writer: gguf.GGUFWriter, metadata: Mapping[str, Any]) -> None:
    for key, value in metadata.items():
        if value is None:
            continue
        if isinstance(value, list | tuple):
            writer.add_array(key, list(value))
        elif isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        elif isinstance(value, float):
            writer.add_float32(key, value)
        else:
            writer.add_string(key, value)


def close_gguf(writer: gguf.GGUFWriter) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def as_bfloat16(tensors: Tensors) -> Tensors:
    return {name: values.astype(ml_dtypes.bfloat16) for name, values in tensors.items()}


# ---- vocabularies ---------------------------------------------------------------------------------------------


def byte_level_alphabet() -> list[str]:
    """GPT-2's visible character for each byte value, by byte value."""
    visible = [*range(33, 127), *range(161, 173), *range(174, 256)]
    hidden = iter(range(256, 512))
    return [chr(byte) if byte in visible else chr(next(hidden)) for byte in range(256)]


def byte_level_metadata(
    pre: str | None, merges: Sequence[str] = (), special: Sequence[str] = ("<unk>", "<s>", "</s>"), **extra: Any
) -> dict[str, Any]:
    """A byte-level BPE vocabulary: special tokens, the 256 bytes, then what the merges make."""
    tokens = [*special, *byte_level_alphabet(), *(m.replace(" ", "", 1) for m in merges)]
    metadata = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3] * len(special) + [1] * (len(tokens) - len(special)),
        "tokenizer.ggml.merges": list(merges) or ["a b"],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
    }
    if not merges:
        metadata["tokenizer.ggml.tokens"].append("ab")
        metadata["tokenizer.ggml.token_type"].append(1)
    return metadata | {f"tokenizer.{key}": value for key, value in extra.items()}


def sentencepiece_vocabulary(words: Sequence[str]) -> tuple[list[str], list[float], list[int]]:
    """Llama 2's layout: <unk> <s> </s>, 256 bytes, ``words`` by falling score, then their characters."""
    single = sorted({c for word in words for c in word})
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{b:02X}>" for b in range(256))]
    types = [2, 3, 3] + [6] * 256
    scores = [0.0] * len(pieces)
    for rank, text in enumerate([*(w for w in words if len(w) > 1), *single]):
        pieces.append(text)
        types.append(1)
        scores.append(-float(rank))
    return pieces, scores, types


def _varint(value: int) -> bytes:
    out = bytearray()
    while value >= 0x80:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*out, value])


def _field(number: int, value: int | bytes) -> bytes:
    if isinstance(value, int):
        return _varint(number << 3) + _varint(value)
    return _varint(number << 3 | 2) + _varint(len(value)) + value


def sentencepiece_model(
    pieces: Sequence[str],
    scores: Sequence[float],
    types: Sequence[int],
    *,
    model_type: int = 2,
    normalizer: Mapping[int, int | bytes] | None = None,
    trainer: Mapping[int, int | bytes] | None = None,
) -> bytes:
    """The bytes of a tokenizer.model; ``normalizer`` and ``trainer`` are fields by number."""
    data = b""
    for piece, score, kind in zip(pieces, scores, types, strict=True):
        entry = _field(1, piece.encode()) + _varint(2 << 3 | 5) + struct.pack("<f", score) + _field(3, kind)
        data += _field(1, entry)
    spec = b"".join(
        _field(n, v) for n, v in ({3: model_type, 35: 1, 40: 0, 41: 1, 42: 2} | dict(trainer or {})).items()
    )
    rules = b"".join(_field(n, v) for n, v in ({1: b"identity", 3: 1, 4: 0} | dict(normalizer or {})).items())
    return data + _field(2, spec) + _field(3, rules)
