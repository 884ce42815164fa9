"""Packed weights: layouts, fused sources, rounding, and a file that the safetensors package reads."""

from __future__ import annotations

import io
import time
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import safetensors
from hypothesis import given
from hypothesis import strategies as st
from lowered import DictSource, fused_program, lowered
from tiny_llama import tiny_config, tiny_weights

from tokenspeed.compile.derive import derive
from tokenspeed.compile.program import Role, Value
from tokenspeed.compile.weights import (
    pack_panel16,
    packed_shape,
    plan_weights,
    unpack_panel16,
    write_weights,
)
from tokenspeed.errors import CheckpointError, ProgramError

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)


@given(st.integers(1, 70), st.integers(1, 40), st.booleans())
def test_panels_hold_every_element_and_zeros(rows: int, columns: int, pairs: bool) -> None:
    matrix = np.arange(1, rows * columns + 1, dtype=np.float32).reshape(rows, columns)
    matrix = (matrix % 251).astype(BFLOAT16 if pairs else np.float32)
    panels = pack_panel16(matrix)
    value = Value("w", "bfloat16" if pairs else "float32", (rows, columns), Role.WEIGHT)
    assert panels.shape == packed_shape(value, "panel16") and panels.dtype == matrix.dtype
    for n in range(rows):
        for k in range(columns):
            at = (n // 16, k // 2, n % 16, k % 2) if pairs else (n // 16, k, n % 16)
            assert panels[at] == matrix[n, k]
    assert (panels.astype(np.float32) != 0).sum() == (matrix.astype(np.float32) != 0).sum()
    np.testing.assert_array_equal(unpack_panel16(panels, rows, columns), matrix)


def load(data: bytes) -> dict[str, Any]:
    """Every tensor of a safetensors file, as the package itself reads it."""
    read: Any = safetensors.deserialize
    kinds = {"F32": np.dtype(np.float32), "BF16": BFLOAT16, "U8": np.dtype(np.uint8)}
    return {name: np.frombuffer(bytes(t["data"]), kinds[t["dtype"]]).reshape(t["shape"]) for name, t in read(data)}


def packed_file(program: Any, config: Any, tensors: dict[str, Any] | None = None) -> tuple[Any, bytes]:
    plan = lowered(program).weights
    file = io.BytesIO()
    write_weights(plan, program, DictSource(tensors or tiny_weights(config)), file)
    return plan, file.getvalue()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("changes", [{}, {"hidden_size": 36, "tie_word_embeddings": False, "num_kv_heads": 1}])
def test_the_file_holds_every_weight_in_its_layout(dtype: str, changes: dict[str, Any], tmp_path: Path) -> None:
    config = tiny_config(**changes)
    program = fused_program(config, dtype)
    plan, data = packed_file(program, config)
    assert len(data) == plan.file_bytes and plan.data_offset % 64 == 0 and plan.nbytes % 64 == 0
    stored = load(data)
    tensors = tiny_weights(config)
    assert {w.value for w in plan.weights} == {value.name for value in program.op_weights}
    for weight in plan.weights:
        value, tensor = program.values[weight.value], weight.tensor
        expected = derive(program, weight.value, tensors.__getitem__)
        expected = expected.astype(np.float32 if value.dtype == "float32" else BFLOAT16)
        have = stored[tensor.name]
        assert tensor.offset % 64 == 0 and have.shape == tensor.shape
        if weight.layout == "panel16":
            have = unpack_panel16(have, *expected.shape)
        np.testing.assert_array_equal(have.astype(np.float32), expected.astype(np.float32))
        start = plan.data_offset + tensor.offset
        assert data[start : start + tensor.nbytes] == stored[tensor.name].tobytes()
    path = tmp_path / "weights.safetensors"
    path.write_bytes(data)
    with safetensors.safe_open(path, "numpy") as file:
        padding = [name for name in file.keys() if name.startswith("padding.")]  # noqa: SIM118 (not a dict)
        assert file.metadata() == {"format": "tokenspeed"}
    assert bool(padding) == (config.hidden_size % 16 != 0)


def test_a_tied_table_is_stored_once_and_norms_stay_float32() -> None:
    plan = lowered(fused_program(dtype="bfloat16")).weights
    layouts = {(w.value, w.layout): w.tensor.dtype for w in plan.weights}
    assert layouts["model.embed_tokens.weight", "panel16"] == "bfloat16" and len(layouts) == len(plan.weights)
    assert layouts["model.norm.weight", "rows"] == layouts["rope_table", "rows"] == "float32"
    assert plan.name == "panel16-rows-bfloat16"
    program = fused_program()
    both = plan_weights(program, [("model.embed_tokens.weight", layout) for layout in ("rows", "panel16")])
    assert [w.tensor.name for w in both.weights] == [f"model.embed_tokens.weight.{n}" for n in ("panel16", "rows")]


@pytest.mark.parametrize("kind", [np.float16, np.float32, BFLOAT16])
def test_bfloat16_rounds_to_nearest_even_from_any_checkpoint_dtype(kind: Any) -> None:
    config = tiny_config()
    program = fused_program(config, "bfloat16")
    tensors = {name: tensor.astype(kind) for name, tensor in tiny_weights(config).items()}
    _, data = packed_file(program, config, tensors)
    name = "model.layers.0.mlp.down_proj.weight"
    bits = tensors[name].astype(np.float32).view(np.uint32).astype(np.uint64)
    rounded = ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)
    stored = unpack_panel16(load(data)[name], *tensors[name].shape)
    np.testing.assert_array_equal(np.ascontiguousarray(stored).view(np.uint16), rounded)


def test_progress_rises_to_the_end_and_writing_only_moves_forwards() -> None:
    class Pipe:
        """Takes bytes and cannot seek."""

        def __init__(self) -> None:
            self.nbytes = 0

        def write(self, data: Any) -> int:
            self.nbytes += memoryview(data).nbytes
            return memoryview(data).nbytes

    config = tiny_config()
    program = fused_program(config)
    plan, pipe, seen = lowered(program).weights, Pipe(), []
    write_weights(plan, program, DictSource(tiny_weights(config)), pipe, lambda *at: seen.append(at))  # type: ignore[arg-type]
    assert pipe.nbytes == plan.file_bytes
    assert seen == sorted(seen) and seen[-1] == (plan.nbytes, plan.nbytes) and len(seen) > len(plan.weights)


def test_reading_holds_at_most_the_tensors_of_one_weight() -> None:
    class Counting(DictSource):
        def __init__(self, tensors: dict[str, Any]):
            super().__init__(tensors)
            self.order: list[str] = []

        def read(self, name: str) -> Any:
            self.order.append(name)
            return super().read(name)

    config = tiny_config()
    program = fused_program(config)
    source = Counting(tiny_weights(config))
    write_weights(lowered(program).weights, program, source, io.BytesIO())
    assert sorted(source.order) == sorted(source.tensors), "every tensor is read exactly once"


def test_a_tensor_of_another_shape_is_refused() -> None:
    config = tiny_config()
    tensors = tiny_weights(config)
    tensors["model.norm.weight"] = tensors["model.norm.weight"][:-1]
    with pytest.raises(CheckpointError, match=r"tensor 'model\.norm\.weight': need shape \(48,\), have \(47,\)"):
        packed_file(fused_program(config), config, tensors)


def test_layouts_that_a_value_cannot_have_are_refused() -> None:
    with pytest.raises(ProgramError, match=r"need layout panel16 or rows of a matrix, have 'panel16' of float32\["):
        packed_shape(Value("w", "float32", (4,), Role.WEIGHT), "panel16")
    with pytest.raises(ProgramError, match=r"'w': need layout panel16 or rows of a matrix, have 'tiles' of"):
        packed_shape(Value("w", "float32", (4, 4), Role.WEIGHT), "tiles")
    with pytest.raises(ProgramError, match=r"'w': need a fixed shape of float32 or bfloat16, have int32\[4\]"):
        packed_shape(Value("w", "int32", (4,), Role.WEIGHT), "rows")


def test_packing_is_fast() -> None:
    """135 million parameters pack in well under two seconds: this rate leaves room for a busy machine."""
    matrix = np.random.default_rng(0).standard_normal((4096, 576), dtype=np.float32)
    best = float("inf")
    for _ in range(5):
        start = time.perf_counter()
        pack_panel16(matrix.astype(BFLOAT16))
        best = min(best, time.perf_counter() - start)
    assert matrix.size / best > 70e6, f"{matrix.size / best / 1e6:.0f} million parameters per second"
