"""Hugging Face directories: config, tensors, and what every kind of bad directory is told."""

from __future__ import annotations

import hashlib
import json
import struct
from dataclasses import replace
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from checkpoint_files import HF_CONFIG, TINY, as_bfloat16, random_tensors, write_hf
from safetensors.numpy import save_file

from tokenspeed.compile.checkpoint import RopeScaling, open_checkpoint, tensor_shapes
from tokenspeed.errors import CheckpointError

LLAMA3_ROPE = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def refusal(path: Path) -> str:
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(path)
    return str(caught.value)


def config_of(directory: Path, **changes: Any) -> Any:
    write_hf(directory, HF_CONFIG | changes)
    return open_checkpoint(directory).config


def test_reads_config_and_tensors_of_one_file(tmp_path: Path) -> None:
    tensors = write_hf(tmp_path / "tiny")
    checkpoint = open_checkpoint(tmp_path / "tiny")
    assert checkpoint.config == TINY
    assert checkpoint.names() == tuple(tensor_shapes(TINY))
    for name in checkpoint.names():
        assert checkpoint.info(name) == (np.float32, tensors[name].shape)
        np.testing.assert_array_equal(checkpoint.read(name), tensors[name])


def test_reads_shards(tmp_path: Path) -> None:
    tensors = write_hf(tmp_path, num_shards=3)
    checkpoint = open_checkpoint(tmp_path)
    for name, values in tensors.items():
        np.testing.assert_array_equal(checkpoint.read(name), values)
    assert [f.name for f in checkpoint.files] == [
        "config.json",
        "model-00001-of-00003.safetensors",
        "model-00002-of-00003.safetensors",
        "model-00003-of-00003.safetensors",
        "model.safetensors.index.json",
    ]


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
def test_keeps_the_stored_dtype(tmp_path: Path, dtype: Any) -> None:
    tensors = {name: values.astype(dtype) for name, values in random_tensors().items()}
    write_hf(tmp_path, tensors=tensors)
    checkpoint = open_checkpoint(tmp_path)
    name = "model.layers.1.self_attn.k_proj.weight"
    assert checkpoint.info(name).dtype == dtype
    assert checkpoint.read(name).tobytes() == tensors[name].tobytes()


def test_tied_head_has_no_tensor_even_when_stored(tmp_path: Path) -> None:
    config = HF_CONFIG | {"tie_word_embeddings": True}
    write_hf(tmp_path / "stored", config)
    tensors = random_tensors(replace(TINY, tie_word_embeddings=True))
    write_hf(tmp_path / "absent", config, as_bfloat16(tensors))
    for name in ("stored", "absent"):
        checkpoint = open_checkpoint(tmp_path / name)
        assert checkpoint.config.tie_word_embeddings
        assert "lm_head.weight" not in checkpoint.names()


def test_stored_rotary_frequencies_are_ignored(tmp_path: Path) -> None:
    extra = {"model.layers.0.self_attn.rotary_emb.inv_freq": np.ones(8, np.float32)}
    write_hf(tmp_path, tensors=random_tensors() | extra)
    assert open_checkpoint(tmp_path).names() == tuple(tensor_shapes(TINY))


def test_head_dim_is_derived_or_taken(tmp_path: Path) -> None:
    assert config_of(tmp_path / "derived").head_dim == 16
    assert config_of(tmp_path / "null", head_dim=None).head_dim == 16
    wide = replace(TINY, head_dim=32)
    write_hf(tmp_path / "given", HF_CONFIG | {"head_dim": 32}, random_tensors(wide))
    assert open_checkpoint(tmp_path / "given").config.head_dim == 32


def test_mistral_sliding_window(tmp_path: Path) -> None:
    mistral = {"architectures": ["MistralForCausalLM"]}
    assert config_of(tmp_path / "v1", **mistral, sliding_window=64).sliding_window == 64
    assert config_of(tmp_path / "v2", **mistral, sliding_window=None).sliding_window is None
    assert config_of(tmp_path / "silent", **mistral).sliding_window == 4096
    assert config_of(tmp_path / "llama", sliding_window=64).sliding_window is None


def test_end_tokens_of_both_configs(tmp_path: Path) -> None:
    (tmp_path / "tiny").mkdir()
    (tmp_path / "tiny" / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 2]}))
    assert config_of(tmp_path / "tiny").eos_token_ids == (2, 7)
    assert config_of(tmp_path / "none", eos_token_id=None).eos_token_ids == ()


@pytest.mark.parametrize(
    ("changes", "theta", "scaling"),
    [
        ({}, 10000.0, None),
        ({"rope_theta": 5e5}, 5e5, None),
        ({"rope_theta": 5e5, "rope_scaling": None}, 5e5, None),
        ({"rope_parameters": {"rope_theta": 1e6, "rope_type": "default"}}, 1e6, None),
        ({"rope_theta": 7.0, "rope_scaling": {"type": "linear", "factor": 2}}, 7.0, RopeScaling("linear", 2.0)),
        (
            {"rope_theta": 5e5, "rope_scaling": LLAMA3_ROPE},
            5e5,
            RopeScaling("llama3", 8.0, 8192, low_freq_factor=1.0, high_freq_factor=4.0),
        ),
        (
            {"rope_parameters": LLAMA3_ROPE | {"rope_theta": 5e5}},
            5e5,
            RopeScaling("llama3", 8.0, 8192, low_freq_factor=1.0, high_freq_factor=4.0),
        ),
        (
            {"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "attention_factor": 1.5, "truncate": False}},
            10000.0,
            RopeScaling("yarn", 4.0, 128, attention_factor=1.5, truncate=False),
        ),
    ],
)
def test_rope_in_old_and_new_style(tmp_path: Path, changes: Any, theta: float, scaling: Any) -> None:
    config = config_of(tmp_path, **changes)
    assert (config.rope_theta, config.rope_scaling) == (theta, scaling)


def test_name_of_a_cache_snapshot(tmp_path: Path) -> None:
    assert config_of(tmp_path / "models--org--model-1b" / "snapshots" / "0123abcd").name == "org/model-1b"


def test_digests_cover_every_source_file(tmp_path: Path) -> None:
    write_hf(tmp_path)
    (tmp_path / "README.md").write_text("not part of it")
    digests = open_checkpoint(tmp_path).digests()
    assert set(digests) == {"config.json", "model.safetensors"}
    weights = (tmp_path / "model.safetensors").read_bytes()
    assert digests["model.safetensors"] == f"sha256:{hashlib.sha256(weights).hexdigest()}"


# ---- refusals -------------------------------------------------------------------------------------------------


def test_path_without_a_checkpoint(tmp_path: Path) -> None:
    message = refusal(tmp_path / "nowhere")
    assert f"no checkpoint at {tmp_path / 'nowhere'}: need a Hugging Face directory or a .gguf file" in message
    message = refusal(tmp_path)
    assert "is not a checkpoint: need config.json or a .gguf file in it, have neither" in message
    write_hf(tmp_path / "tiny")
    message = refusal(tmp_path / "tiny" / "model.safetensors")
    assert "is one file of a Hugging Face checkpoint: need the whole directory" in message
    assert f"(give {tmp_path / 'tiny'})" in message


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        (
            {"architectures": ["GPT2LMHeadModel"]},
            "unknown architecture 'GPT2LMHeadModel': need one of LlamaForCausalLM, MistralForCausalLM",
        ),
        ({"architectures": None}, "unknown architecture None: need one of LlamaForCausalLM, MistralForCausalLM"),
        ({"attention_bias": True}, "attention_bias is true: projections with biases are not supported"),
        ({"mlp_bias": True}, "mlp_bias is true: projections with biases are not supported"),
        (
            {"quantization_config": {"quant_method": "gptq"}},
            "the checkpoint is quantized (gptq): need float32, float16 or bfloat16 weights: no kernel, "
            "batch-invariant or other, reads quantized ones (use the unquantized checkpoint, or a GGUF file, whose "
            "weights are dequantized at build)",
        ),
        ({"hidden_act": "gelu"}, "need hidden_act 'silu', have 'gelu'"),
        ({"hidden_size": None}, "need an integer as hidden_size, have None"),
        ({"hidden_size": "64"}, "need an integer as hidden_size, have '64'"),
        ({"num_attention_heads": True}, "need an integer as num_attention_heads, have True"),
        ({"num_attention_heads": 0}, "need a positive num_heads, have 0"),
        ({"num_key_value_heads": 3}, "need a number of key/value heads that divides the 4 query heads, have 3"),
        ({"num_hidden_layers": 10**9}, "need at most 4096 layers, have 1000000000"),
        ({"head_dim": 15}, "need an even head_dim for rotary embeddings, have 15"),
        ({"rms_norm_eps": 0}, "need a positive rms_norm_eps, have 0.0"),
        ({"rms_norm_eps": float("nan")}, "need a positive rms_norm_eps, have nan"),
        ({"eos_token_id": [2, "x"]}, "need token ids as eos_token_id, have [2, 'x']"),
        ({"tie_word_embeddings": 1}, "need true or false as tie_word_embeddings, have 1"),
        (
            {"rope_scaling": {"type": "dynamic", "factor": 2.0}},
            "rope scaling 'dynamic' is not supported: need default, linear, llama3, yarn",
        ),
        ({"rope_scaling": "linear"}, "need an object as rope_scaling, have 'linear'"),
        ({"rope_scaling": {"type": "linear"}}, "need a number as rope_scaling.factor, have None"),
        ({"rope_scaling": {"type": "linear", "factor": 0}}, "need a positive rope scaling's factor, have 0.0"),
        (
            {"rope_scaling": {"type": "llama3", "factor": 8, "low_freq_factor": 1, "high_freq_factor": 4}},
            "need an integer as rope_scaling.original_max_position_embeddings, have None",
        ),
        (
            {"rope_parameters": LLAMA3_ROPE | {"high_freq_factor": 1.0}},
            "need 0 < low_freq_factor < high_freq_factor, have 1.0 and 1.0",
        ),
        (
            {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}},
            "need rotary embeddings on whole heads, have partial_rotary_factor 0.5",
        ),
        (
            {"vocab_size": 301},
            "tensor model.embed_tokens.weight has the wrong shape: need [301, 64] by the config, have [300, 64]",
        ),
        ({"num_hidden_layers": 3}, "9 of 30 tensors are missing, first model.layers.2.input_layernorm.weight"),
    ],
)
def test_config_refusals(tmp_path: Path, changes: Any, expected: str) -> None:
    write_hf(tmp_path, HF_CONFIG | changes)
    assert expected in refusal(tmp_path)


def test_config_that_is_not_json(tmp_path: Path) -> None:
    write_hf(tmp_path)
    (tmp_path / "config.json").write_text("{")
    assert "config.json is not valid JSON" in refusal(tmp_path)
    (tmp_path / "config.json").write_text("[" * 100_000)
    assert "config.json is not valid JSON" in refusal(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    assert "config.json: need a JSON object, have list" in refusal(tmp_path)


def test_pickled_weights(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(HF_CONFIG))
    message = refusal(tmp_path)
    assert "has no weights: need model.safetensors or model.safetensors.index.json with its files" in message
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    message = refusal(tmp_path)
    assert "holds only pickled weights (pytorch_model.bin), which can run code when opened: need safetensors" in message
    assert "save_pretrained(safe_serialization=True)" in message


def test_unknown_tensor(tmp_path: Path) -> None:
    name = "model.layers.0.self_attn.q_proj.lora_A.weight"
    write_hf(tmp_path, tensors=random_tensors() | {name: np.ones((4, 64), np.float32)})
    message = refusal(tmp_path)
    assert (
        f"tensor {name} (one of 1) is not part of a Llama-family model without biases, experts or adapters" in message
    )


def test_tensor_of_another_dtype(tmp_path: Path) -> None:
    tensors = random_tensors()
    tensors["model.norm.weight"] = tensors["model.norm.weight"].astype(np.float64)
    write_hf(tmp_path, tensors=tensors)
    assert "tensor model.norm.weight has type F64: need one of F32, F16, BF16" in refusal(tmp_path)


def test_shard_problems(tmp_path: Path) -> None:
    write_hf(tmp_path, num_shards=2)
    index = tmp_path / "model.safetensors.index.json"
    second = tmp_path / "model-00002-of-00002.safetensors"
    good, good_index = second.read_bytes(), json.loads(index.read_text())

    second.unlink()
    message = refusal(tmp_path)
    assert (
        "the weight file model-00002-of-00002.safetensors that model.safetensors.index.json lists is missing" in message
    )

    save_file({"other": np.ones(1, np.float32)}, second)
    assert "is in model-00002-of-00002.safetensors, but it is not" in refusal(tmp_path)

    second.write_bytes(good)
    index.write_text(json.dumps({"weight_map": good_index["weight_map"] | {"x": "../x.safetensors"}}))
    assert "need plain file names in weight_map, have '../x.safetensors'" in refusal(tmp_path)
    index.write_text("{}")
    assert "need a weight_map of tensor names to files, have none" in refusal(tmp_path)


def test_truncated_weights(tmp_path: Path) -> None:
    write_hf(tmp_path)
    path = tmp_path / "model.safetensors"
    data = path.read_bytes()
    for size, expected in (
        (0, "is empty: need a safetensors file"),
        (5, "is truncated or not a safetensors file: its header claims 0 bytes, but the file has 5"),
        (100, "but the file has 100"),
        (len(data) - 1, "is truncated: tensor "),
    ):
        path.write_bytes(data[:size])
        message = refusal(tmp_path)
        assert expected in message and "model.safetensors" in message and "(fetch the checkpoint again)" in message


def test_damaged_weight_header(tmp_path: Path) -> None:
    write_hf(tmp_path)
    path = tmp_path / "model.safetensors"

    def refused_header(header: bytes) -> str:
        path.write_bytes(struct.pack("<Q", len(header)) + header + bytes(64))
        return refusal(tmp_path)

    assert "is damaged: its header is not JSON" in refused_header(b"\xff\xfe")
    assert "is damaged: its header is not a JSON object" in refused_header(b"[]")
    entry = '{"x": {"dtype": "F32", "shape": [-1], "data_offsets": [0, 4]}}'
    assert "the header's entry for x needs dtype, shape and data_offsets, has" in refused_header(entry.encode())
    entry = '{"x": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}}'
    assert "tensor x needs 8 bytes for F32 [2], its entry spans 4" in refused_header(entry.encode())


def test_flipped_bytes_in_the_weight_header_never_crash(tmp_path: Path) -> None:
    write_hf(tmp_path)
    path = tmp_path / "model.safetensors"
    data = path.read_bytes()
    rng = np.random.default_rng(3)
    header_size = 8 + struct.unpack_from("<Q", data)[0]
    for position in [*range(8), *rng.integers(8, header_size, 80)]:
        damaged = bytearray(data)
        damaged[position] ^= 1 << int(rng.integers(8))
        path.write_bytes(damaged)
        try:
            checkpoint = open_checkpoint(tmp_path)
            for name in checkpoint.names():
                checkpoint.read(name)
        except CheckpointError:
            pass
