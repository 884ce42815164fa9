"""Passes keep the meaning of a Program and fuse what they say; a pass that breaks a rule is named."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest
from tiny_llama import tiny_config, tiny_program, tiny_tokens, tiny_weights

from tokenspeed.compile import passes
from tokenspeed.compile.derive import deinterleave, derive, interleave
from tokenspeed.compile.interpret import run_prompt
from tokenspeed.compile.ops import Attrs
from tokenspeed.compile.passes import CPU_PASSES, Pass, run_passes
from tokenspeed.compile.program import Op, Program, Role, Source, Value
from tokenspeed.errors import ProgramError


def kinds(program: Program) -> Counter[str]:
    return Counter(op.kind for op in program.ops)


@pytest.mark.parametrize("count", range(1, len(CPU_PASSES) + 1))
@pytest.mark.parametrize("changes", [{}, {"tie_word_embeddings": False, "num_kv_heads": 4}])
def test_each_pass_keeps_the_logits(count: int, changes: dict[str, Any]) -> None:
    config = tiny_config(**changes)
    weights, tokens = tiny_weights(config), tiny_tokens(40)
    program = tiny_program(config)
    before = run_prompt(program, weights.__getitem__, tokens, mode="float64")
    fused = run_passes(program, CPU_PASSES[:count])
    after = run_prompt(fused, weights.__getitem__, tokens, mode="float64", chunk_size=17)
    np.testing.assert_allclose(after, before, rtol=0, atol=1e-12)


@pytest.mark.parametrize("apply", CPU_PASSES)
def test_a_pass_changes_nothing_when_run_again(apply: Pass) -> None:
    program = run_passes(tiny_program(tiny_config()), CPU_PASSES)
    assert apply(program) == program


def test_fused_bfloat16_rounds_where_the_unfused_does() -> None:
    config = tiny_config()
    weights, tokens = tiny_weights(config), tiny_tokens(40)
    program = tiny_program(config, "bfloat16")
    before = run_prompt(program, weights.__getitem__, tokens)
    after = run_prompt(run_passes(program, CPU_PASSES), weights.__getitem__, tokens)
    # The same roundings of sums that may differ in their last float32 bit: a value on an edge can fall either way.
    assert np.mean(np.abs(after - before)) < 1e-3


def test_a_layer_becomes_seven_ops() -> None:
    program = run_passes(tiny_program(tiny_config()), CPU_PASSES)
    assert kinds(program) == {
        "embedding": 1, "rms_norm": 5, "linear": 3, "rope_kv_write": 2, "paged_attention": 2, "linear_add": 4,
        "linear_silu_mul": 2, "gather_rows": 1, "adjust_logits": 1, "sample": 1,
    }  # fmt: skip
    layer = [op.kind for op in program.ops if "0" in op.name]
    assert layer == [
        "rms_norm", "linear", "rope_kv_write", "paged_attention", "linear_add", "rms_norm", "linear_silu_mul",
        "linear_add",
    ]  # fmt: skip


def test_fused_weights_say_how_they_are_made() -> None:
    config = tiny_config()
    program = run_passes(tiny_program(config), CPU_PASSES)
    attention, mlp = "model.layers.1.self_attn", "model.layers.1.mlp"
    qkv, gate_up = program.values[f"{attention}.qkv_proj.weight"], program.values[f"{mlp}.gate_up_proj.weight"]
    assert qkv.source == Source("concat", tuple(f"{attention}.{p}_proj.weight" for p in "qkv"))
    assert gate_up.source == Source("interleave16", (f"{mlp}.gate_proj.weight", f"{mlp}.up_proj.weight"))
    assert (qkv.shape, gate_up.shape) == ((128, 48), (160, 48))  # 72 features pad to 80, twice
    packed = {value.name for value in program.op_weights}
    assert {qkv.name, gate_up.name, "rope_table"} <= packed
    assert not any(name in packed for name in (*qkv.source.inputs, *gate_up.source.inputs))
    weights = tiny_weights(config)
    made = derive(program, qkv.name, weights.__getitem__)
    np.testing.assert_array_equal(made[64:96], weights[f"{attention}.k_proj.weight"])


def test_interleaving_alternates_panels_of_sixteen_rows() -> None:
    rng = np.random.default_rng(0)
    gate, up, x = rng.standard_normal((40, 8)), rng.standard_normal((40, 8)), rng.standard_normal((3, 8))
    weight = interleave(gate, up)
    assert weight.shape == (96, 8)
    np.testing.assert_array_equal(weight[:16], gate[:16])
    np.testing.assert_array_equal(weight[16:32], up[:16])
    np.testing.assert_array_equal(weight[64:72], gate[32:])
    np.testing.assert_array_equal(weight[72:80], 0)
    for half, part in zip(deinterleave(x @ weight.T, 40), (gate, up), strict=True):
        np.testing.assert_allclose(half, x @ part.T)


def test_the_rope_table_is_cosines_then_sines() -> None:
    program = tiny_program(tiny_config())
    table = derive(program, "rope_table", {}.__getitem__)
    assert table.shape == (96, 16) and table.dtype == np.float32
    angles = np.arange(96)[:, None] * 10000.0 ** -(np.arange(8) / 8)
    np.testing.assert_array_equal(table, np.hstack([np.cos(angles), np.sin(angles)]).astype(np.float32))


def rewire(program: Program, op_name: str, **changes: Any) -> Program:
    """``program`` with fields of one op changed, unverified."""
    ops = [Op(**{**vars(op), **changes}) if op.name == op_name else op for op in program.ops]
    return Program(program.name, program.values, tuple(ops), program.outputs, program.metadata)


def test_a_value_that_something_else_reads_is_not_fused_away() -> None:
    program = tiny_program(tiny_config(num_layers=1))
    # The gate projection now feeds a second silu, whose result is an output.
    spare = Op("silu", "spare", ("layers.0.gate",), ("spare",))
    ops = [*program.ops[:-1], spare, program.ops[-1]]
    shared = Program(program.name, program.values, program.ops, ("spare", *program.outputs), program.metadata)
    shared = shared.with_ops(ops)
    fused = run_passes(shared, CPU_PASSES)
    assert kinds(fused)["linear_silu_mul"] == 0 and kinds(fused)["silu_mul"] == 1


def test_dead_code_goes_with_its_weights_but_state_writes_stay() -> None:
    program = tiny_program(tiny_config(num_layers=1))
    extra = Value("spare.weight", "float32", (7, 48), Role.WEIGHT)
    dead = Op("linear", "spare", ("final_norm", "spare.weight"), ("spare",))
    grown = program.with_ops([*program.ops, dead], [extra])
    assert passes.eliminate_dead_code(grown) == program
    assert "kv.0.next" in {name for op in passes.eliminate_dead_code(grown).ops for name in op.outputs}


def test_add_is_fused_from_either_side() -> None:
    program = tiny_program(tiny_config(num_layers=1))
    swapped = rewire(program, "layers.0.attention_residual", inputs=("layers.0.o", "embedding"))
    assert passes.fuse_residual_add(swapped) == passes.fuse_residual_add(program)


def test_a_pass_that_breaks_a_rule_is_named() -> None:
    def drop_the_norm(program: Program) -> Program:
        ops = tuple(op for op in program.ops if op.name != "final_norm")
        return Program(program.name, program.values, ops, program.outputs, program.metadata)

    with pytest.raises(ProgramError, match=r"pass drop_the_norm: op 'logits' \(linear\): uses 'final_norm' before"):
        run_passes(tiny_program(tiny_config()), [passes.fuse_qkv, drop_the_norm])


def test_slices_that_do_not_cover_the_projection_are_not_fused() -> None:
    program = passes.fuse_qkv(tiny_program(tiny_config(num_layers=1, num_kv_heads=4)))
    same_width = Attrs({"start": 64, "stop": 128})
    twisted = rewire(program, "layers.0.v", attrs=same_width)  # v now reads k's columns
    assert kinds(run_passes(twisted, [passes.fuse_rope_kv_write]))["rope_kv_write"] == 0
