"""The rope table that a target makes itself: a prelude of the Program, its formula, and its way into an artifact."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from lowered import ByteDevice, lowered
from test_interpret_graph import mixed_steps
from tiny_llama import MAX_MODEL_LEN, PAGE_SIZE, tiny_config, tiny_tokens, tiny_weights

from tokenspeed.compile.checkpoint import ModelConfig, RopeScaling
from tokenspeed.compile.derive import rope_frequencies, rope_parameters, rope_table_of
from tokenspeed.compile.interpret import Interpreter, run_prompt, step_inputs
from tokenspeed.compile.models import build_program
from tokenspeed.compile.ops import Attrs
from tokenspeed.compile.orders import Orders
from tokenspeed.compile.passes import CPU_PASSES, run_passes
from tokenspeed.compile.program import Op, Program
from tokenspeed.compile.verify import verify
from tokenspeed.errors import EnvelopeError, ProgramError
from tokenspeed.graph import Access, Pointer, Region
from tokenspeed.step import align

YARN = RopeScaling("yarn", factor=4.0, original_max_position_embeddings=32)


def program(device: str = "target", config: ModelConfig | None = None, dtype: str = "float32", **more: Any) -> Program:
    """The tiny Llama, before passes."""
    options: dict[str, Any] = {"dtype": dtype, "max_model_len": MAX_MODEL_LEN, "page_size": PAGE_SIZE, **more}
    return build_program(config or tiny_config(), **options, orders=Orders(rope_table_device=device))


def by_formula(made: Program) -> Any:
    """position * frequency, its cosine and sine, and those times the factor: each rounded to float32."""
    (op,) = made.prelude
    source = made.values["rope_frequencies"].source
    assert source is not None
    frequencies = np.array(source.attrs["inverse_frequencies"], np.float64).astype(np.float32)
    factor = np.float32(op.attrs.number("attention_factor"))
    rows = []
    for position in range(MAX_MODEL_LEN):
        angles = np.float32(position) * frequencies
        assert angles.dtype == np.float32
        turns = [np.float32(f(float(angle))) for f in (np.cos, np.sin) for angle in angles]
        rows.append([factor * turn for turn in turns])
    return np.array(rows)


def test_the_prelude_comes_through_passes_and_json() -> None:
    made = program()
    assert [op.kind for op in made.prelude] == ["rope_table"] and made.root("rope_table") == "rope_table.memory"
    fused = run_passes(made, CPU_PASSES)
    assert fused.prelude == made.prelude and "rope_frequencies" in {weight.name for weight in fused.op_weights}
    assert Program.from_json(fused.to_json()) == fused
    assert "  once rope_table: float32[96, 16] = rope_table(rope_frequencies, rope_table.memory" in str(made)
    usual = program("cpu")
    assert rope_parameters(usual) == rope_parameters(made) == rope_parameters(fused)
    assert usual.prelude == () and "prelude" not in usual.to_json() and usual.values["rope_table"].role == "weight"


@pytest.mark.parametrize("scaling", [None, YARN], ids=["plain", "yarn"])
def test_the_interpreter_computes_the_formula(scaling: RopeScaling | None) -> None:
    config = tiny_config(rope_scaling=scaling)
    made = program(config=config)
    assert (made.prelude[0].attrs.number("attention_factor") != 1.0) is (scaling is not None)
    interpreter = Interpreter(made, tiny_weights(config).__getitem__, num_pages=1, num_slots=1)
    np.testing.assert_array_equal(interpreter.state["rope_table.memory"], by_formula(made))
    exact = Interpreter(made, tiny_weights(config).__getitem__, num_pages=1, num_slots=1, mode="float64")
    np.testing.assert_allclose(exact.state["rope_table.memory"], by_formula(made), rtol=0, atol=2e-5)


def test_far_positions_have_other_tables_and_near_logits() -> None:
    frequencies = rope_frequencies(program().values["rope_frequencies"].source)  # type: ignore[arg-type]
    rows = 4096
    rounded = rope_table_of(frequencies, rows, 1.0)
    angles = np.outer(np.arange(rows), program("cpu").values["rope_table"].source.attrs["inverse_frequencies"])  # type: ignore[union-attr]
    best = np.concatenate([np.cos(angles), np.sin(angles)], axis=1).astype(np.float32)
    difference = np.abs(rounded - best).max(axis=1)
    assert 0 < difference[-256:].max() < 4096 * 2.0**-23 and difference[:4].max() < 2.0**-22
    weights = tiny_weights(tiny_config())
    here, there = (run_prompt(program(device), weights.__getitem__, tiny_tokens(80)) for device in ("cpu", "target"))
    assert 0 < np.abs(here - there).max() < 1e-4


def test_lowering_gives_the_table_room_behind_the_state_and_a_graph_that_fills_it() -> None:
    fused = run_passes(program(), CPU_PASSES)
    low, usual = lowered(fused), lowered(run_passes(program("cpu"), CPU_PASSES))
    assert usual.prelude is None and usual.layout.tables == () and usual.state == low.state
    (table,) = low.layout.tables
    assert (table.name, table.shape, table.offset) == ("rope_table.memory", (96, 16), usual.state_bytes)
    assert low.state_bytes == align(table.offset + table.nbytes)
    assert low.prelude is not None
    (node,) = low.prelude.nodes
    assert node.symbol == "rope_table_avx2" and node.predecessors == ()
    filled = Pointer(Region.STATE, table.offset, table.nbytes, Access.WRITE)
    assert [p for _, p in node.pointers() if p.writes] == [filled]
    for graph in low.graphs.values():
        read = [p for node in graph.nodes for _, p in node.pointers() if p.region is Region.STATE and p.offset]
        assert replace(filled, access=Access.READ) in read and filled not in read
    where = {decision.buckets for decision in low.selection.decisions if decision.op == "rope_table"}
    assert where == {("prelude",)}
    placed = low.values.values["rope_table"]
    assert (placed.region, placed.offset, placed.shape) == ("state", table.offset, (96, 16))
    assert {weight.value for weight in low.values.weights} <= low.values.values.keys()
    assert [op.name for op in low.values.ops] == [op.name for op in fused.ops]


def test_the_graphs_agree_with_the_program(dtype: str = "bfloat16") -> None:
    config = tiny_config()
    fused = run_passes(program(config=config, dtype=dtype), CPU_PASSES)
    interpreter = Interpreter(fused, tiny_weights(config).__getitem__, num_pages=8, num_slots=6)
    device = ByteDevice(fused, lowered(fused), config, num_pages=8)
    (table,) = device.low.layout.tables
    have = device.memory.read(Region.STATE, table, MAX_MODEL_LEN)
    np.testing.assert_array_equal(have, interpreter.state["rope_table.memory"])
    for chunks in mixed_steps():
        inputs = step_inputs(fused, chunks)
        np.testing.assert_array_equal(device.run(inputs)["out_token"], interpreter.run(inputs)["out_token"])


def test_angles_that_no_device_computes_well_are_refused() -> None:
    with pytest.raises(
        EnvelopeError, match=r"needs angles below 1048576 radians, and position 1048576 has one of 104857"
    ):
        program(config=tiny_config(max_position_embeddings=1 << 21), max_model_len=(1 << 20) + 1)
    program("cpu", tiny_config(max_position_embeddings=1 << 21), max_model_len=(1 << 20) + 1)


def test_a_prelude_reads_no_step_and_fills_state() -> None:
    made = program()
    (op,) = made.prelude
    for wrong, message in (
        (replace(op, inputs=("rope_frequencies", "positions")), "need operands of fixed shape in the prelude, have"),
        (Op("silu", "s", ("lm",), ("s.out",)), "need a prelude that fills state, have 's.out', which is none"),
    ):
        values = dict(made.values)
        if wrong.kind == "silu":
            values |= {"lm": replace(made.values["rope_table.memory"], name="lm", role=made.values["rope_table"].role)}
            values |= {"s.out": replace(made.values["rope_table"], name="s.out")}
        with pytest.raises(ProgramError, match=message):
            verify(replace(made, values=values, prelude=(*made.prelude, wrong) if wrong.kind == "silu" else (wrong,)))


def test_a_table_needs_half_as_many_frequencies() -> None:
    made = program()
    few = replace(made.values["rope_frequencies"], shape=(5,))
    with pytest.raises(ProgramError, match=r"need inverse_frequencies to be float32\[8\], have float32\[5\]"):
        verify(replace(made, values={**made.values, "rope_frequencies": few}))
    source = replace(few.source, attrs=Attrs({"inverse_frequencies": (1.0, 0.5)}))  # type: ignore[type-var]
    short = replace(made.values["rope_frequencies"], source=source)
    with pytest.raises(ProgramError, match=r"need as many float32 elements as inverse frequencies, have float32\[8\]"):
        verify(replace(made, values={**made.values, "rope_frequencies": short}))
