"""The residual stream, rounded at every layer boundary or never: what each gives, on the interpreter and on kernels."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from lowered import ByteDevice, lowered
from test_interpret_graph import mixed_steps
from tiny_llama import MAX_MODEL_LEN, PAGE_SIZE, tiny_config, tiny_tokens, tiny_weights

from tokenspeed.bucket import BucketTable
from tokenspeed.compile.interpret import Chunk, Interpreter, round_bfloat16, run_prompt, step_inputs
from tokenspeed.compile.models import build_program
from tokenspeed.compile.ops import Attrs
from tokenspeed.compile.orders import Orders
from tokenspeed.compile.passes import CPU_PASSES, fuse_residual_add, run_passes
from tokenspeed.compile.program import Program
from tokenspeed.graph import LaunchGraph
from tokenspeed.target import runnable_targets

CONFIG = tiny_config()
WEIGHTS = tiny_weights(CONFIG)
SCORED = Chunk(tiny_tokens(20), 0, [0], scored=True)
TARGETS = [str(target) for target in runnable_targets()]


def program(dtype: str, norm: str = "unfused") -> Program:
    """The tiny Llama, before passes."""
    return build_program(CONFIG, dtype=dtype, max_model_len=MAX_MODEL_LEN, page_size=PAGE_SIZE,
                         orders=Orders(layer_boundary_norm=norm))  # fmt: skip


def rounded(made: Program) -> list[int]:
    return [op.attrs.integer("rounded") for op in made.ops if op.kind in ("add", "linear_add")]


def test_the_order_is_an_attribute_of_every_residual_sum_that_fusion_keeps() -> None:
    for norm, flag in (("fused", 0), ("unfused", 1)):
        made = program("bfloat16", norm)
        assert rounded(made) == rounded(run_passes(made, CPU_PASSES)) == [flag] * 2 * CONFIG.num_layers
    assert program("float32") == program("float32", "fused")  # to round a float32 to float32 changes nothing


def test_a_rounded_sum_is_fused_with_its_second_operand_alone() -> None:
    """The first is the residual, which the op does not round: to exchange them would."""
    made = program("bfloat16")
    swapped = [replace(op, inputs=op.inputs[::-1]) if op.kind == "add" else op for op in made.ops]
    assert not any(op.kind == "linear_add" for op in fuse_residual_add(made.with_ops(swapped)).ops)
    plain = [replace(op, attrs=Attrs({"rounded": 0})) if op.kind == "add" else op for op in swapped]
    assert any(op.kind == "linear_add" for op in fuse_residual_add(made.with_ops(plain)).ops)


def test_the_stream_holds_bfloat16_at_every_boundary() -> None:
    """Each sum is round(residual + round(projection)), of values that are bfloat16 themselves."""
    made = program("bfloat16")
    interpreter = Interpreter(made, WEIGHTS.__getitem__, num_pages=8, num_slots=6)
    sums = [op for op in made.ops if op.kind == "add"]
    keep = [name for op in sums for name in (*op.inputs, *op.outputs)]
    got = interpreter.run(step_inputs(made, [SCORED]), keep=keep)
    for op in sums:
        residual, projected, total = (got[name] for name in (*op.inputs, *op.outputs))
        np.testing.assert_array_equal(total, round_bfloat16(residual + round_bfloat16(projected)))
        np.testing.assert_array_equal(residual, round_bfloat16(residual))
        assert (projected != round_bfloat16(projected)).any()


def test_the_orders_differ_in_bfloat16_and_fusion_keeps_each() -> None:
    tokens = tiny_tokens(40)
    logits = {}
    for norm in ("fused", "unfused"):
        made = program("bfloat16", norm)
        logits[norm] = run_prompt(made, WEIGHTS.__getitem__, tokens)
        fused = run_prompt(run_passes(made, CPU_PASSES), WEIGHTS.__getitem__, tokens)
        np.testing.assert_array_equal(fused, logits[norm])
    difference = np.abs(logits["fused"] - logits["unfused"])
    assert 0 < difference.max() < 0.2


def run_steps(device: Any, made: Program, table: BucketTable | None = None) -> list[dict[str, Any]]:
    more = () if table is None else (table,)
    return [device.run(step_inputs(made, chunks), *more) for chunks in mixed_steps()]


@pytest.mark.parametrize("target", TARGETS)
def test_kernels_agree_with_the_interpreter(target: str, tmp_path: Path) -> None:
    from test_native_graph import NativeDevice

    outputs = {}
    for norm in ("fused", "unfused"):
        made = run_passes(program("bfloat16", norm), CPU_PASSES)
        low = lowered(made, target)
        native = NativeDevice(made, low, WEIGHTS, tmp_path / "w.safetensors", workers=2)
        expected = ByteDevice(made, low, CONFIG, num_pages=8)
        outputs[norm] = run_steps(native, made, expected.table)
        for have, want in zip(outputs[norm], run_steps(expected, made), strict=True):
            np.testing.assert_array_equal(have["out_token"], want["out_token"])
            np.testing.assert_allclose(have["out_logprob"], want["out_logprob"], rtol=0, atol=4e-2)
        native.device.close()
    pairs = zip(outputs["fused"], outputs["unfused"], strict=True)
    assert any((a["out_logprob"] != b["out_logprob"]).any() for a, b in pairs)


def up_to(graph: LaunchGraph, op: str) -> LaunchGraph:
    """The nodes of ``graph`` up to that of ``op``, whose result nothing overwrites then."""
    return LaunchGraph(graph.nodes[: [node.name for node in graph.nodes].index(op) + 1])


def test_kernels_leave_a_rounded_stream(tmp_path: Path) -> None:
    from test_native_graph import NativeDevice

    made = run_passes(program("bfloat16"), CPU_PASSES)
    last = [op for op in made.ops if op.kind == "linear_add"][-1]
    for target in TARGETS:
        low = lowered(made, target)
        low = replace(low, graphs={bucket: up_to(graph, last.name) for bucket, graph in low.graphs.items()})
        native = NativeDevice(made, low, WEIGHTS, tmp_path / "w.safetensors", workers=1)
        inputs = step_inputs(made, [SCORED])
        native.run(inputs, BucketTable(low.graphs))
        region, offset = low.layout.places[last.outputs[0]]
        rows, width = len(inputs["logit_rows"]), CONFIG.hidden_size
        stream = native.bytes(region)[offset:][: rows * width * 4].view(np.float32)
        assert np.isfinite(stream).all() and stream.any()
        np.testing.assert_array_equal(stream, round_bfloat16(stream.copy()))
        native.device.close()
