"""Write the checkpoint in the forms that the peers read: a Hugging Face directory, OpenVINO IR, plain GGUFs.

    python benchmarks/peers/prepare.py CHECKPOINT.gguf FOLDER

Needs the packages of the extra `peers` beside `tokenspeed[build]`. All forms hold the same weights, dequantized.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import gguf
import ml_dtypes
import numpy as np
from safetensors.numpy import save_file

from tokenspeed.compile.checkpoint import Checkpoint, open_checkpoint


def main() -> None:
    checkpoint, folder = Path(sys.argv[1]), Path(sys.argv[2])
    folder.mkdir(parents=True, exist_ok=True)
    write_huggingface(open_checkpoint(checkpoint), folder / "huggingface")
    write_gguf(checkpoint, folder / "float32.gguf", gguf.GGMLQuantizationType.F32)
    write_gguf(checkpoint, folder / "bfloat16.gguf", gguf.GGMLQuantizationType.BF16)
    write_openvino(folder / "huggingface", folder / "openvino")


def write_huggingface(source: Checkpoint, folder: Path) -> None:
    """float32 safetensors and the config that transformers reads."""
    folder.mkdir(exist_ok=True)
    c = source.config
    tensors = {name: np.ascontiguousarray(source.read(name), np.float32) for name in source.names()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": c.hidden_size,
        "intermediate_size": c.intermediate_size,
        "num_hidden_layers": c.num_layers,
        "num_attention_heads": c.num_heads,
        "num_key_value_heads": c.num_kv_heads,
        "head_dim": c.head_dim,
        "vocab_size": c.vocab_size,
        "rms_norm_eps": c.rms_norm_eps,
        "rope_theta": c.rope_theta,
        "max_position_embeddings": c.max_position_embeddings,
        "tie_word_embeddings": c.tie_word_embeddings,
        "bos_token_id": c.bos_token_id,
        "eos_token_id": list(c.eos_token_ids),
        "dtype": "float32",
    }
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    tokenizer = source.tokenizer()
    (folder / "tokenizer.json").write_bytes(tokenizer.tokenizer_json)
    (folder / "tokenizer_config.json").write_text(
        json.dumps(
            {
                "tokenizer_class": "PreTrainedTokenizerFast",
                "bos_token": tokenizer.bos_token,
                "eos_token": tokenizer.eos_token,
                "chat_template": tokenizer.chat_template,
            }
        )
    )


def write_gguf(source: Path, path: Path, kind: gguf.GGMLQuantizationType) -> None:
    """The same GGUF with every matrix dequantized to ``kind``; vectors stay float32, as llama.cpp wants them."""
    reader = gguf.GGUFReader(source)
    writer = gguf.GGUFWriter(path, str(reader.fields["general.architecture"].contents()))
    for name, field in reader.fields.items():
        if name.startswith("GGUF.") or name == "general.architecture":
            continue
        value_type, element_type = field.types[0], field.types[-1]
        if name == "general.file_type":
            writer.add_uint32(name, int(gguf.LlamaFileType.MOSTLY_BF16 if kind.name == "BF16" else 0))
        elif value_type == gguf.GGUFValueType.ARRAY:
            writer.add_key_value(name, field.contents(), value_type, element_type)
        else:
            writer.add_key_value(name, field.contents(), value_type)
    for tensor in reader.tensors:
        data = gguf.quants.dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        if kind == gguf.GGMLQuantizationType.BF16 and data.ndim == 2:
            packed = data.astype(ml_dtypes.bfloat16).view(np.uint8)
            writer.add_tensor(tensor.name, packed, raw_dtype=kind)
        else:
            writer.add_tensor(tensor.name, data)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def write_openvino(huggingface: Path, folder: Path) -> None:
    import openvino
    from openvino_tokenizers import convert_tokenizer
    from optimum.intel import OVModelForCausalLM
    from transformers import AutoTokenizer

    model = OVModelForCausalLM.from_pretrained(huggingface, export=True, compile=False, load_in_8bit=False)
    model.save_pretrained(folder)
    converted = convert_tokenizer(AutoTokenizer.from_pretrained(huggingface), with_detokenizer=True)
    for part, name in zip(converted, ("openvino_tokenizer", "openvino_detokenizer"), strict=True):
        openvino.save_model(part, folder / f"{name}.xml")


if __name__ == "__main__":
    main()
