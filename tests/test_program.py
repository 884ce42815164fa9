"""Programs: text and JSON forms, builder errors, and each rule of the verifier."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_llama import tiny_config, tiny_program

from tokenspeed.compile.checkpoint import tensor_shapes
from tokenspeed.compile.models import build_program
from tokenspeed.compile.ops import Attrs
from tokenspeed.compile.passes import CPU_PASSES, run_passes
from tokenspeed.compile.program import Op, Program, ProgramBuilder, Role, Source, Value
from tokenspeed.compile.verify import verify
from tokenspeed.errors import CheckpointError, ProgramError
from tokenspeed.step import INPUTS, OUTPUTS

MODEL = tiny_program(tiny_config())
FUSED = run_passes(MODEL, CPU_PASSES)


def test_a_llama_reads_the_step_and_exactly_the_checkpoint() -> None:
    for tied in (True, False):
        config = tiny_config(tie_word_embeddings=tied)
        program = tiny_program(config)
        named = {value.name: value.shape for value in program.weights if value.source is None}
        assert named == tensor_shapes(config)
        assert [value.name for value in program.inputs] == [tensor.name for tensor in INPUTS]
        assert program.outputs == tuple(tensor.name for tensor in OUTPUTS)


def test_values_resolve_to_the_storage_they_alias() -> None:
    assert FUSED.root("kv.1.next") == "kv.1" and FUSED.root("last_tokens.next") == "last_tokens"
    assert FUSED.root("logits") == "logits"


def test_operands_and_results_have_names() -> None:
    op = next(op for op in FUSED.ops if op.kind == "rope_kv_write")
    assert (op.operand("qkv"), op.operand("kv"), op.result("q")) == ("layers.0.qkv", "kv.0", "layers.0.q_rotated")


def test_the_text_reads_like_the_model() -> None:
    lines = str(FUSED).splitlines()
    assert lines[0].startswith("program llama (architecture=llama, dtype=float32, head_dim=16, hidden_size=48,")
    assert "  weight rope_table: float32[96, 16] = rope_table()" in lines
    assert (
        "  layers.0.gated: float32[num_tokens, 72] = "
        "linear_silu_mul(layers.0.mlp_norm, model.layers.0.mlp.gate_up_proj.weight, features=72)"
    ) in lines
    assert lines[-1] == "  return out_token, out_logprob, out_rank, out_top_ids, out_top_logprobs"


@pytest.mark.parametrize("program", [MODEL, FUSED, tiny_program(tiny_config(), "bfloat16")])
def test_json_round_trips_to_the_same_bytes(program: Program) -> None:
    text = program.to_json()
    again = Program.from_json(text)
    assert again == program and again.to_json() == text and str(again) == str(program)
    verify(again)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"format":1}', "null", '{"format":1,"values":3}'])
def test_text_that_is_no_program_is_refused(text: str) -> None:
    with pytest.raises(ProgramError, match="the text is not a Program in JSON"):
        Program.from_json(text)


def test_another_format_is_refused() -> None:
    data = {**json.loads(MODEL.to_json()), "format": 9}
    with pytest.raises(ProgramError, match="need a Program in format 1, have format 9"):
        Program.from_json(json.dumps(data))


def test_an_unknown_family_is_refused() -> None:
    with pytest.raises(CheckpointError, match="no model family for architecture 'rnn': need one of llama"):
        build_program(tiny_config(architecture="rnn"), dtype="float32", max_model_len=64, page_size=32)


def builder() -> ProgramBuilder:
    b = ProgramBuilder("small", {"dtype": "float32", "page_size": 32, "max_model_len": 64})
    b.step_inputs(pages_per_seq=2, vocab_size=64)
    b.weight("w", (8, 4))
    return b


@pytest.mark.parametrize(
    ("kind", "inputs", "attrs", "message"),
    [
        ("conv", ("w",), {}, r"op 'x' \(conv\): need a kind of op that has a schema"),
        ("linear", ("w",), {}, r"op 'x' \(linear\): need 2 operands and 1 results, have 1 and 1"),
        ("linear", ("w", "nothing"), {}, r"op 'x' \(linear\) uses 'nothing', which is not defined before it"),
        ("linear", ("w", "wide"), {}, r"need weight to have 4 columns, like x, have float32\[8, 6\]"),
        ("linear", ("token_ids", "w"), {}, r"need x to be a matrix of float32, have int32\[num_tokens\]"),
        ("silu", ("w",), {"slope": 1.0}, r"need attributes \[\], have \['slope'\]"),
        ("rms_norm", ("w", "w"), {"eps": 1}, r"need attribute eps to be float, have 1"),
        ("slice_columns", ("w",), {"start": -1, "stop": 2}, r"need attribute start not to be negative, have -1"),
        ("slice_columns", ("w",), {"start": 2, "stop": 5}, r"need columns 2:5 inside x, have float32\[8, 4\]"),
        ("add", ("w", "w"), {"rounded": 2}, "need attribute rounded to be 0 or 1, have 2"),
        ("add", ("w", "wide"), {"rounded": 0}, r"need both operands to be float32\[8, 4\], have float32\[8, 6\]"),
        ("linear_silu_mul", ("w", "w"), {"features": 4}, r"need 32 interleaved rows of weight for 4 features"),
    ],
)
def test_the_builder_names_the_op_and_the_rule(
    kind: str, inputs: tuple[str, ...], attrs: dict[str, Any], message: str
) -> None:
    b = builder()
    b.weight("wide", (8, 6))
    with pytest.raises(ProgramError, match=message):
        b.op(kind, "x", *inputs, **attrs)


def test_the_builder_refuses_a_second_definition_and_a_missing_output() -> None:
    b = builder()
    with pytest.raises(ProgramError, match="value 'w' is defined twice"):
        b.weight("w", (8, 4))
    with pytest.raises(ProgramError, match="output 'y' is not defined by any op"):
        b.finish(["y"])


def edit(program: Program, **changes: Any) -> Program:
    return replace(program, **changes)


def with_op(program: Program, name: str, **changes: Any) -> Program:
    ops = tuple(replace(op, **changes) if op.name == name else op for op in program.ops)
    return replace(program, ops=ops)


def with_value(program: Program, value: Value) -> Program:
    return replace(program, values={**program.values, value.name: value})


def weight(name: str, shape: tuple[int, ...], source: Source | None = None) -> Value:
    return Value(name, "float32", shape, Role.WEIGHT, source)


DAMAGE: list[tuple[Callable[[Program], Program], str]] = [
    (lambda p: edit(p, metadata=Attrs({**p.metadata, "dtype": "int8"})), "need dtype float32 or bfloat16, have 'int8'"),
    (
        lambda p: edit(p, metadata=Attrs({**p.metadata, "page_size": 0})),
        "need page_size to be a positive number, have 0",
    ),
    (lambda p: edit(p, values={**p.values, "a": p.values["logits"]}), "value 'a': need the name it is listed under"),
    (
        lambda p: with_value(p, replace(p.values["logits"], dtype="int8")),
        "value 'logits': need a dtype of .*have 'int8'",
    ),
    (
        lambda p: with_value(p, replace(p.values["logits"], shape=("rows", 101))),
        "value 'logits': need dimensions .*'rows'",
    ),
    (lambda p: with_value(p, replace(p.values["logits"], shape=(0, 101))), "value 'logits': need dimensions .*have 0"),
    (
        lambda p: with_value(p, replace(p.values["logits"], shape=(4, 101))),
        "op 'logits' .*declared as float32.*have float32.4",
    ),
    (lambda p: with_value(p, replace(p.values["top_k"], dtype="int64")), "value 'top_k': need an input of the step"),
    (
        lambda p: with_value(p, Value("mask", "int32", ("num_tokens",), Role.INPUT)),
        "value 'mask': need an input of the step",
    ),
    (
        lambda p: with_value(p, replace(p.values["logits"], source=Source("concat"))),
        "value 'logits': need a weight where",
    ),
    (
        lambda p: with_value(p, Value("w", "float32", ("num_tokens", 4), Role.WEIGHT)),
        "value 'w': need a weight to have a fixed",
    ),
    (
        lambda p: with_value(p, Value("t", "float32", (4,), Role.TEMP)),
        r"value 't': need an op that defines it \(role temp\)",
    ),
    (
        lambda p: with_value(p, replace(p.values["logits"], role=Role.OUTPUT)),
        "value 'logits': need role output exactly",
    ),
    (lambda p: edit(p, outputs=()), "program outputs: need one or more different values"),
    (lambda p: edit(p, outputs=("out_token", "out_token")), "program outputs: need one or more different values"),
    (lambda p: edit(p, outputs=("positions",)), "output 'positions': need a result of an op"),
    (lambda p: edit(p, ops=p.ops[::-1]), r"op 'sample' \(sample\): uses 'logits' before its definition"),
    (lambda p: edit(p, ops=p.ops[1:]), "uses 'embedding' before its definition"),
    (lambda p: edit(p, ops=(*p.ops, p.ops[-1])), "op 'sample' .*need a name of its own"),
    (lambda p: edit(p, ops=(*p.ops, replace(p.ops[-3], name="b"))), "op 'b' .*defines 'logits' a second time"),
    (lambda p: with_op(p, "logits", outputs=("embedding",)), "op 'logits' .*defines 'embedding' a second time"),
    (
        lambda p: with_op(p, "logits", inputs=("final_norm", "model.norm.weight")),
        "op 'logits' .*need weight to be a matrix",
    ),
    (lambda p: with_value(p, weight("spare", (3, 4))), "weight 'spare': no op uses it"),
    (lambda p: with_value(p, weight("spare", (3, 4), Source("sum", ()))), "weight 'spare': need a source of concat"),
    (
        lambda p: with_value(p, weight("spare", (3, 4), Source("concat", ("later",)))),
        "'spare': is made from 'later', which",
    ),
    (
        lambda p: with_value(p, weight("spare", (3, 4), Source("concat", ()))),
        "'spare': its shape and operands do not fit",
    ),
    (
        lambda p: with_value(p, weight("spare", (9, 48), Source("concat", ("model.embed_tokens.weight",)))),
        "weight 'spare': need 101 rows by its source, have 9",
    ),
    (
        lambda p: with_value(p, weight("spare", (101, 4), Source("concat", ("model.embed_tokens.weight",)))),
        r"weight 'spare': need sources of float32 with 4 columns, have float32\[101, 48\]",
    ),
    (
        lambda p: with_op(p, "layers.0.attention", inputs=("layers.0.q_rotated", "kv.0", *p.ops[8].inputs[2:])),
        "op 'layers.0.attention' .*uses 'kv.0' after op 'kv.0.next' overwrote its storage",
    ),
    (
        lambda p: with_op(p, "kv.1.next", inputs=("kv.0", *p.producers()["kv.1.next"].inputs[1:])),
        "op 'kv.1.next' .*uses 'kv.0' after op 'kv.0.next' overwrote its storage",
    ),
    (
        lambda p: with_value(p, replace(p.values["kv.0"], role=Role.WEIGHT, shape=(4, 2, 2, 32, 16))),
        "op 'kv.0.next' .*need its result",
    ),
]


@pytest.mark.parametrize(("damage", "message"), DAMAGE, ids=[message for _, message in DAMAGE])
def test_the_verifier_names_what_is_wrong(damage: Callable[[Program], Program], message: str) -> None:
    verify(MODEL)
    with pytest.raises(ProgramError, match=message):
        verify(damage(MODEL))


def test_an_output_may_not_be_overwritten() -> None:
    outputs = ("kv.0.next", *MODEL.outputs)
    program = edit(with_value(MODEL, replace(MODEL.values["kv.0.next"], role=Role.OUTPUT)), outputs=outputs)
    verify(program)
    again = Op("kv_write", "again", ("kv.0.next", *MODEL.producers()["kv.0.next"].inputs[1:]), ("again",),
               MODEL.producers()["kv.0.next"].attrs)  # fmt: skip
    kv = replace(MODEL.values["kv.0.next"], name="again", role=Role.TEMP)
    with pytest.raises(ProgramError, match=r"output 'kv.0.next': op 'again' overwrote its storage"):
        verify(edit(with_value(program, kv), ops=(*program.ops, again)))


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_dropping_or_moving_up_any_op_that_is_needed_is_noticed(data: st.DataObject) -> None:
    """In a fused Llama every op depends on the one before it or on a state: no order but this one, nothing spare."""
    index = data.draw(st.integers(0, len(FUSED.ops) - 1))
    ops = list(FUSED.ops)
    op = ops.pop(index)
    if data.draw(st.booleans()) and index > 0:
        ops.insert(data.draw(st.integers(0, index - 1)), op)
    with pytest.raises(ProgramError):
        verify(replace(FUSED, ops=tuple(ops)))


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_any_operand_of_another_type_is_noticed(data: st.DataObject) -> None:
    op = data.draw(st.sampled_from(FUSED.ops))
    slot = data.draw(st.integers(0, len(op.inputs) - 1))
    have = FUSED.values[op.inputs[slot]]
    other = data.draw(st.sampled_from([v for v in FUSED.values.values() if v.dtype != have.dtype]))
    inputs = (*op.inputs[:slot], other.name, *op.inputs[slot + 1 :])
    with pytest.raises(ProgramError):
        verify(with_op(FUSED, op.name, inputs=inputs))


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_truncated_or_altered_json_never_fails_otherwise(data: st.DataObject) -> None:
    """Hostile text gives a ProgramError or a Program, which the verifier then judges: no other exception."""
    text = MODEL.to_json()
    cut = data.draw(st.integers(0, len(text) - 1))
    patch = data.draw(st.text('0123456789"{}[]:,xe-', max_size=3))
    with contextlib.suppress(ProgramError):
        verify(Program.from_json(text[:cut] + patch + text[cut + len(patch) :]))
    with pytest.raises(ProgramError):
        Program.from_json(text[:cut])


@pytest.mark.parametrize(
    "change",
    [
        lambda data: data["ops"][0].update(kind=["linear"]),
        lambda data: data["ops"][0].update(inputs=["token_ids", ["x"]]),
        lambda data: data["ops"][0].update(attrs={"eps": [[1]]}),
        lambda data: data["ops"][0].update(attrs={"eps": None}),
        lambda data: data["values"][0].update(name=7),
        lambda data: data["values"][0].update(shape=[["num_tokens"]]),
        lambda data: data["values"][0].update(role="tensor"),
        lambda data: data.update(outputs="out_token"),
    ],
)
def test_json_of_the_wrong_types_is_refused(change: Callable[[dict[str, Any]], None]) -> None:
    data = json.loads(MODEL.to_json())
    change(data)
    with pytest.raises(ProgramError, match="the text is not a Program in JSON"):
        Program.from_json(json.dumps(data))
