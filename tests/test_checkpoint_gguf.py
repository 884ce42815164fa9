"""GGUF files: config, dequantization, the order of q and k rows, and what every bad file is told."""

from __future__ import annotations

import struct
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import ml_dtypes
import numpy as np
import pytest
from checkpoint_files import TINY, add_metadata, byte_level_metadata, close_gguf, random_tensors, write_gguf
from gguf import GGMLQuantizationType as Type

from tokenspeed.compile.checkpoint import RopeScaling, open_checkpoint, tensor_shapes
from tokenspeed.compile.checkpoint_gguf import rotate_half_rows
from tokenspeed.compile.gguf_file import GGUFFile, can_read
from tokenspeed.errors import CheckpointError

READABLE = [kind for kind in Type if can_read(kind.name)]


def refusal(path: Path) -> str:
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(path)
    return str(caught.value)


def refused_metadata(path: Path, **metadata: Any) -> str:
    write_gguf(path, metadata={key.replace("__", "."): value for key, value in metadata.items()})
    return refusal(path)


def test_reads_config_and_tensors(tmp_path: Path) -> None:
    tensors = write_gguf(tmp_path / "tiny.gguf", metadata=byte_level_metadata("gpt-2"))
    checkpoint = open_checkpoint(tmp_path / "tiny.gguf")
    assert checkpoint.config == TINY
    assert checkpoint.names() == tuple(tensor_shapes(TINY))
    for name, values in tensors.items():
        assert checkpoint.info(name) == (np.float32, values.shape)
        # Includes q and k, which the file holds in interleaved order.
        np.testing.assert_array_equal(checkpoint.read(name), values)


def test_a_directory_with_one_file(tmp_path: Path) -> None:
    write_gguf(tmp_path / "a.gguf")
    assert open_checkpoint(tmp_path).config.name == "a"
    write_gguf(tmp_path / "b.gguf")
    assert "holds 2 .gguf files: need exactly one, have a.gguf, b.gguf" in refusal(tmp_path)


def test_interleaved_rows_become_rotate_half_rows() -> None:
    # Storage order (pair 0 low, pair 0 high, pair 1 low, ...) of two heads of four dimensions.
    assert rotate_half_rows(2, 4).tolist() == [0, 2, 1, 3, 4, 6, 5, 7]


@pytest.mark.parametrize("kind", [Type.F16, Type.BF16, Type.Q4_0, Type.Q4_1, Type.Q5_0, Type.Q5_1, Type.Q8_0])
def test_quantized_matrices(tmp_path: Path, kind: Type) -> None:
    tensors = write_gguf(tmp_path / "tiny.gguf", kind=kind)
    checkpoint = open_checkpoint(tmp_path / "tiny.gguf")
    stored = {Type.F16: np.float16, Type.BF16: ml_dtypes.bfloat16}.get(kind, np.float32)
    for name, values in tensors.items():
        got = checkpoint.read(name)
        assert got.dtype == checkpoint.info(name).dtype == (stored if values.ndim > 1 else np.float32)
        # Quantization works row by row, so it commutes with the reordering of q and k.
        expected = gguf.quants.dequantize(gguf.quants.quantize(values, kind), kind) if values.ndim > 1 else values
        np.testing.assert_array_equal(got.astype(np.float32), expected)


def test_agrees_with_the_packages_own_reader(tmp_path: Path) -> None:
    path = tmp_path / "x.gguf"
    write_gguf(path, kind=Type.Q5_1, metadata=byte_level_metadata("gpt-2", ["a b", "Ġ ab"]))
    file, reader = GGUFFile(path), gguf.GGUFReader(path)
    own_fields = {key: field for key, field in reader.fields.items() if not key.startswith("GGUF.")}
    assert file.metadata == {key: field.contents() for key, field in own_fields.items()}
    assert list(file.tensors) == [tensor.name for tensor in reader.tensors]
    for tensor in reader.tensors:
        ours = file.tensors[tensor.name]
        assert (ours.offset, ours.num_bytes) == (tensor.data_offset, tensor.n_bytes)
        assert list(ours.shape) == tensor.shape.tolist()[::-1]


@pytest.mark.parametrize("kind", READABLE, ids=lambda kind: kind.name)
def test_every_type_that_the_package_dequantizes(tmp_path: Path, kind: Type) -> None:
    block_values, block_bytes = gguf.GGML_QUANT_SIZES[kind]
    rows = np.random.default_rng(1).integers(0, 256, (3, 2 * block_bytes), dtype=np.uint8)
    writer = gguf.GGUFWriter(tmp_path / "x.gguf", "llama")
    writer.add_tensor("x", rows, raw_dtype=kind)
    close_gguf(writer)
    file = GGUFFile(tmp_path / "x.gguf")
    tensor = file.tensors["x"]
    assert (tensor.type_name, tensor.shape) == (kind.name, (3, 2 * block_values))
    with np.errstate(all="ignore"):
        expected = gguf.quants.dequantize(rows, kind)
        got = file.read(tensor, np.array([2, 0, 1]))
    np.testing.assert_array_equal(got.astype(np.float32), expected[[2, 0, 1]])


def test_common_quantizations_are_readable() -> None:
    names = {kind.name for kind in READABLE}
    assert {"F32", "F16", "BF16", "Q4_0", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_XS"} <= names


def test_tied_embeddings_when_there_is_no_output(tmp_path: Path) -> None:
    write_gguf(tmp_path / "x.gguf", random_tensors(replace(TINY, tie_word_embeddings=True)))
    config = open_checkpoint(tmp_path / "x.gguf").config
    assert config.tie_word_embeddings
    assert "lm_head.weight" not in tensor_shapes(config)


def test_optional_metadata(tmp_path: Path) -> None:
    wide = replace(TINY, head_dim=32)
    metadata = {
        "llama.attention.key_length": 32,
        "llama.attention.value_length": 32,
        "llama.rope.dimension_count": 32,
        "llama.rope.freq_base": 5e5,
        "llama.attention.sliding_window": 64,
        "llama.attention.head_count_kv": [2, 2],
        "llama.vocab_size": 299,
    }
    write_gguf(tmp_path / "x.gguf", random_tensors(wide), metadata=metadata, config=wide)
    config = open_checkpoint(tmp_path / "x.gguf").config
    assert (config.head_dim, config.rope_theta, config.sliding_window, config.num_kv_heads) == (32, 5e5, 64, 2)
    assert config.vocab_size == 300  # by the embedding table


def test_rope_factors_and_scaling(tmp_path: Path) -> None:
    factors = np.linspace(1, 8, 8, dtype=np.float32)
    write_gguf(tmp_path / "f.gguf", random_tensors() | {"rope_freqs.weight": factors})
    assert open_checkpoint(tmp_path / "f.gguf").config.rope_freq_factors == tuple(factors.tolist())

    def scaling(**keys: Any) -> RopeScaling | None:
        write_gguf(tmp_path / "s.gguf", metadata={f"llama.rope.{k.replace('__', '.')}": v for k, v in keys.items()})
        return open_checkpoint(tmp_path / "s.gguf").config.rope_scaling

    assert scaling(scaling__type="none", scaling__factor=4.0) is None
    assert scaling(scaling__type="linear", scaling__factor=4.0) == RopeScaling("linear", 4.0)
    assert scaling(scale_linear=2.0) == RopeScaling("linear", 2.0)
    yarn = scaling(scaling__type="yarn", scaling__factor=4.0, scaling__original_context_length=64)
    assert yarn == RopeScaling("yarn", 4.0, 64, attention_factor=0.1 * np.log(4.0) + 1.0)


def test_end_tokens(tmp_path: Path) -> None:
    special = ("<unk>", "<s>", "</s>", "<|eot_id|>", "<|other|>", "<|im_end|>")
    metadata = byte_level_metadata("gpt-2", special=special) | {"tokenizer.ggml.eot_token_id": 4}
    write_gguf(tmp_path / "x.gguf", metadata=metadata)
    config = open_checkpoint(tmp_path / "x.gguf").config
    assert (config.bos_token_id, config.eos_token_ids) == (1, (2, 3, 4, 5))


def test_smollm2(smollm2_gguf: Path) -> None:
    checkpoint = open_checkpoint(smollm2_gguf)
    config = checkpoint.config
    assert (config.hidden_size, config.intermediate_size, config.num_layers) == (576, 1536, 30)
    assert (config.num_heads, config.num_kv_heads, config.head_dim, config.vocab_size) == (9, 3, 64, 49152)
    assert (config.rms_norm_eps, config.rope_theta, config.max_position_embeddings) == (1e-5, 1e5, 8192)
    assert config.tie_word_embeddings and config.rope_scaling is None and config.sliding_window is None
    assert (config.bos_token_id, config.eos_token_ids) == (1, (0, 2))
    assert len(checkpoint.names()) == 272
    # Row 0 of q is stored first, row 1 third: pairs (i, i + 32) of a head are neighbours in the file.
    file = GGUFFile(smollm2_gguf)
    assert file.tensors["blk.0.attn_q.weight"].type_name == "Q4_1"
    rows = file.read(file.tensors["blk.0.attn_q.weight"])
    q = checkpoint.read("model.layers.0.self_attn.q_proj.weight")
    assert q.shape == (576, 576) and q.dtype == np.float32
    np.testing.assert_array_equal(q[[0, 1, 32, 64]], rows[[0, 2, 1, 64]])


# ---- refusals -------------------------------------------------------------------------------------------------


def test_not_a_gguf(tmp_path: Path) -> None:
    path = tmp_path / "x.gguf"
    path.write_bytes(b"PK\x03\x04 and more")
    assert "is not a GGUF file: need it to begin with b'GGUF', have b'PK\\x03\\x04'" in refusal(path)
    path.write_bytes(b"")
    assert "is empty: need a GGUF file" in refusal(path)
    for version, have in ((1, "version 1"), (0x03000000, "a big-endian file")):
        path.write_bytes(b"GGUF" + struct.pack("<IQQ", version, 0, 0))
        assert f"need a little-endian GGUF file of version 2 or 3, have {have}" in refusal(path)


def test_truncation_anywhere(tmp_path: Path) -> None:
    path = tmp_path / "x.gguf"
    write_gguf(path, metadata=byte_level_metadata("gpt-2"))
    data = path.read_bytes()
    path.write_bytes(data[:-1])
    message = refusal(path)
    assert "is truncated: tensor " in message and f"but the file has {len(data) - 1} bytes" in message
    assert "(fetch the checkpoint again)" in message
    for size in [4, 8, 20, *range(24, 9000, 331), len(data) // 2]:
        path.write_bytes(data[:size])
        assert "truncated" in refusal(path)


def test_flipped_header_bytes_never_crash(tmp_path: Path) -> None:
    path = tmp_path / "x.gguf"
    write_gguf(path, metadata=byte_level_metadata("gpt-2"))
    data = path.read_bytes()
    header_size = len(data) - sum(t.nbytes for t in random_tensors().values())
    rng = np.random.default_rng(5)
    for position in [*range(4, 200, 2), *rng.integers(200, header_size, 100)]:
        damaged = bytearray(data)
        damaged[position] ^= 1 << int(rng.integers(8))
        path.write_bytes(damaged)
        try:
            checkpoint = open_checkpoint(path)
            checkpoint.tokenizer()
        except CheckpointError:
            pass


@pytest.mark.parametrize(
    ("metadata", "expected"),
    [
        ({"llama__block_count": None}, "need one integer as metadata llama.block_count, have none"),
        ({"llama__block_count": "two"}, "need one integer as metadata llama.block_count, have 'two'"),
        ({"llama__block_count": 2**31}, "need at most 4096 layers, have 2147483648"),
        (
            {"llama__attention__head_count_kv": [2, 1]},
            "need one integer as metadata llama.attention.head_count_kv, have different values per layer, [2, 1]",
        ),
        ({"llama__expert_count": 8}, "a mixture of 8 experts is not supported: need a dense model"),
        ({"split__count": 3}, "is one of 3 parts of a split GGUF: need a single file"),
        (
            {"llama__rope__dimension_count": 8},
            "need rotary dimensions equal to the 16 key dimensions of a head, have 8",
        ),
        (
            {"llama__rope__scaling__type": "longrope"},
            "rope scaling 'longrope' is not supported: need none, linear or yarn",
        ),
        (
            {"llama__rope__scaling__type": "yarn", "llama__rope__scaling__factor": 2.0},
            "need one integer as metadata llama.rope.scaling.original_context_length, have none",
        ),
        ({"llama__embedding_length": 128}, "tensor model.embed_tokens.weight has the wrong shape"),
        ({"llama__block_count": 4}, "18 of 39 tensors are missing, first model.layers.2.input_layernorm.weight"),
        ({"tokenizer__ggml__bos_token_id": 9}, "need a token id below 0 as tokenizer.ggml.bos_token_id, have 9"),
        ({"general__alignment": 48}, "need a power of two as general.alignment, have 48"),
    ],
)
def test_metadata_refusals(tmp_path: Path, metadata: dict[str, Any], expected: str) -> None:
    assert expected in refused_metadata(tmp_path / "x.gguf", **metadata)


def test_other_architecture(tmp_path: Path) -> None:
    write_gguf(tmp_path / "x.gguf", architecture="gemma3")
    message = refusal(tmp_path / "x.gguf")
    assert "unknown architecture 'gemma3': need 'llama' (Llama, Mistral, SmolLM2)" in message


def test_biases_are_refused(tmp_path: Path) -> None:
    write_gguf(tmp_path / "x.gguf", random_tensors() | {"blk.0.attn_q.bias": np.zeros(64, np.float32)})
    message = refusal(tmp_path / "x.gguf")
    assert "tensor blk.0.attn_q.bias (one of 1) is not part of a Llama-family model without biases" in message


def test_wrong_number_of_rope_factors(tmp_path: Path) -> None:
    write_gguf(tmp_path / "x.gguf", random_tensors() | {"rope_freqs.weight": np.ones(4, np.float32)})
    assert "need 8 rope frequency factors, half the head_dim, have 4" in refusal(tmp_path / "x.gguf")


def test_types_that_cannot_be_dequantized(tmp_path: Path) -> None:
    tensors = random_tensors()
    name = "model.layers.0.mlp.up_proj.weight"
    write_gguf(tmp_path / "x.gguf", tensors | {name: np.ones((96, 64), np.int32)})
    message = refusal(tmp_path / "x.gguf")
    assert "tensor blk.0.ffn_up.weight has type I32, which the gguf package cannot dequantize" in message


def test_unknown_type_number_and_duplicate_names(tmp_path: Path) -> None:
    path = tmp_path / "x.gguf"
    entry = struct.pack("<Q1sIQIQ", 1, b"x", 1, 4, 77, 0)
    path.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 1, 0) + entry + bytes(64))
    assert "tensor x has the unknown type number 77 (upgrade the gguf package" in refusal(path)
    entry = struct.pack("<Q1sIQIQ", 1, b"x", 1, 4, 0, 0)
    path.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 2, 0) + entry * 2 + bytes(64))
    assert "tensor x is listed twice" in refusal(path)
    entry = struct.pack("<Q1sI", 1, b"x", 9)
    path.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 1, 0) + entry + bytes(64))
    assert "tensor 'x' claims 9 dimensions: need 1 to 4" in refusal(path)


def test_gguf_package_is_imported_only_for_gguf_files(tmp_path: Path) -> None:
    import subprocess
    import sys

    code = "import sys, tokenspeed.compile.checkpoint_gguf; print('gguf' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"


def test_metadata_of_every_kind(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "x.gguf", "llama")
    add_metadata(writer, {"a.text": "é\n", "a.flag": True, "a.list": ["x", "yz"], "a.numbers": [1, -2]})
    writer.add_uint8("a.u8", 255)
    writer.add_int64("a.i64", -(2**40))
    writer.add_float64("a.f64", 0.1)
    close_gguf(writer)
    metadata = GGUFFile(tmp_path / "x.gguf").metadata
    assert metadata["a.text"] == "é\n" and metadata["a.flag"] is True
    assert metadata["a.list"] == ["x", "yz"] and metadata["a.numbers"] == [1, -2]
    assert (metadata["a.u8"], metadata["a.i64"], metadata["a.f64"]) == (255, -(2**40), 0.1)
