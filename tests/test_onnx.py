"""ONNX export: ONNX Runtime, which shares no code with the interpreter, gives the same logits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from tiny_llama import tiny_config, tiny_program, tiny_tokens, tiny_weights

from tokenspeed.compile.checkpoint import open_checkpoint
from tokenspeed.compile.interpret import round_bfloat16, run_prompt
from tokenspeed.compile.models import build_program
from tokenspeed.compile.onnx_export import export_onnx
from tokenspeed.compile.passes import CPU_PASSES, run_passes
from tokenspeed.errors import ProgramError, ResourceError


def onnx_logits(path: Path, tokens: list[int]) -> Any:
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    feeds = {"token_ids": np.array(tokens, np.int64), "positions": np.arange(len(tokens), dtype=np.int64)}
    return session.run(["logits"], feeds)[0]


@pytest.mark.parametrize("changes", [{}, {"tie_word_embeddings": False, "num_kv_heads": 4}, {"num_kv_heads": 1}])
@pytest.mark.parametrize("external_data_bytes", [0, 10**9])
def test_onnx_runtime_agrees_with_the_interpreter(
    tmp_path: Path, changes: dict[str, Any], external_data_bytes: int
) -> None:
    config = tiny_config(**changes)
    weights, program = tiny_weights(config), tiny_program(config)
    path = tmp_path / "tiny.onnx"
    export_onnx(program, weights.__getitem__, path, external_data_bytes=external_data_bytes)
    onnx.checker.check_model(str(path), full_check=True)
    files = {file.name for file in tmp_path.iterdir()}
    assert files == ({"tiny.onnx"} if external_data_bytes else {"tiny.onnx", "tiny.onnx.data"})
    for length in (1, 2, 37):  # one graph serves every length
        tokens = tiny_tokens(length)
        expected = run_prompt(program, weights.__getitem__, tokens)
        np.testing.assert_allclose(onnx_logits(path, tokens), expected, rtol=0, atol=2e-5)


def test_a_bfloat16_program_exports_the_weights_it_stores(tmp_path: Path) -> None:
    config = tiny_config()
    weights, path = tiny_weights(config), tmp_path / "tiny.onnx"
    export_onnx(tiny_program(config, "bfloat16"), weights.__getitem__, path)
    rounded = {name: round_bfloat16(w) if w.ndim == 2 else w for name, w in weights.items()}
    expected = run_prompt(tiny_program(config), rounded.__getitem__, [5, 6, 7])
    np.testing.assert_allclose(onnx_logits(path, [5, 6, 7]), expected, rtol=0, atol=2e-5)


def test_the_graph_is_standard_and_describes_itself(tmp_path: Path) -> None:
    config = tiny_config()
    path = tmp_path / "tiny.onnx"
    export_onnx(tiny_program(config), tiny_weights(config).__getitem__, path)
    model = onnx.load(path)
    assert {node.domain for node in model.graph.node} == {""}
    assert [(entry.domain, entry.version) for entry in model.opset_import] == [("", 18)]
    assert "model.layers.1.mlp.up_proj.weight" in {tensor.name for tensor in model.graph.initializer}
    assert {prop.key: prop.value for prop in model.metadata_props}["architecture"] == "llama"


def test_a_fused_program_is_refused(tmp_path: Path) -> None:
    config = tiny_config()
    program = run_passes(tiny_program(config), CPU_PASSES)
    with pytest.raises(ProgramError, match=r"op 'kv.0.next' \(rope_kv_write\): need a kind .*model-level Program"):
        export_onnx(program, tiny_weights(config).__getitem__, tmp_path / "tiny.onnx")
    assert not list(tmp_path.iterdir())


def test_a_path_that_cannot_be_written_leaves_nothing_behind(tmp_path: Path) -> None:
    config = tiny_config()
    target = tmp_path / "taken.onnx"
    target.mkdir()
    with pytest.raises(ResourceError, match=r"cannot write .*taken.onnx: Is a directory"):
        export_onnx(tiny_program(config), tiny_weights(config).__getitem__, target)
    assert [file.name for file in tmp_path.iterdir()] == ["taken.onnx"]


def test_smollm2_agrees_with_the_interpreter(smollm2_gguf: Path, tmp_path: Path) -> None:
    checkpoint = open_checkpoint(smollm2_gguf)
    weights = {name: checkpoint.read(name) for name in checkpoint.names()}
    program = build_program(checkpoint.config, dtype="float32", max_model_len=2048, page_size=64)
    path = tmp_path / "smollm2.onnx"
    export_onnx(program, weights.__getitem__, path, external_data_bytes=0)
    tokens = [1, 9690, 198, 2683, 359, 253, 5356, 5646, 11173, 3365, 3511, 308, 34519, 28, 7018, 411]
    expected = run_prompt(program, weights.__getitem__, tokens)
    logits = onnx_logits(path, tokens)
    np.testing.assert_allclose(logits, expected, rtol=0, atol=2e-3)
    np.testing.assert_array_equal(logits.argmax(-1), expected.argmax(-1))
