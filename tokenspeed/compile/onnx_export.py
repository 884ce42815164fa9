"""Writes a model-level Program as ONNX: standard ops only, so that any viewer opens it and any runtime runs it.

The exported graph takes one whole sequence, ``token_ids`` and ``positions`` int64[num_tokens], and gives ``logits``
float32[num_tokens, vocab_size] of every position, with causal attention and no KV pages: an oracle that shares
no code with the interpreter. Arithmetic is float32 whatever the program dtype; weights hold the values that the
program dtype stores. Sampling and row gathering are left out.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from math import prod
from pathlib import Path
from typing import Any, BinaryIO, TypeAlias

import numpy as np

from tokenspeed.compile.derive import derive
from tokenspeed.compile.interpret import Array, Fetch, round_bfloat16
from tokenspeed.compile.program import Op, Program, Value
from tokenspeed.compile.verify import verify
from tokenspeed.errors import ProgramError, ResourceError, UsageError

OPSET = 18
IR_VERSION = 9
EXTERNAL_DATA_BYTES = 1_500_000_000
"""Weights beyond this go to ``<file>.data`` beside the model: a protobuf file ends at 2 GiB."""

_ALIGNMENT = 4096


def export_onnx(
    program: Program, weights: Fetch, path: Path, *, external_data_bytes: int = EXTERNAL_DATA_BYTES
) -> None:
    """Write ``program`` (before passes) with its weights to ``path``, replacing it only when all is written.

    Raises ProgramError for an op without a translation, UsageError without the ``onnx`` package,
    ResourceError when the file cannot be written.
    """
    try:
        import onnx
    except ImportError:
        raise UsageError(
            "exporting needs the Python package onnx, which is not installed", hint="pip install 'tokenspeed[onnx]'"
        ) from None
    verify(program)
    graph = _Graph(onnx, program)
    for op in program.ops:
        translate = TRANSLATORS.get(op.kind)
        if translate is None:
            raise ProgramError(
                f"op {op.name!r} ({op.kind}): need a kind that ONNX export translates, which are "
                f"{', '.join(sorted(TRANSLATORS))}",
                hint="export the model-level Program, before any pass",
            )
        translate(graph, op)
    try:
        _write(onnx, graph, weights, path, external_data_bytes)
    except OSError as error:
        raise ResourceError(
            f"cannot write {path}: {error.strerror}", hint="check the path and the free space"
        ) from error


class _Graph:
    """ONNX nodes under construction. ``values`` maps Program values to ONNX names; a KV value to its (K, V)."""

    def __init__(self, onnx: Any, program: Program):
        self._onnx = onnx
        self.program = program
        self.nodes: list[Any] = []
        self.constants: list[Any] = []
        self.renamed: dict[str, str] = {}
        self.kv: dict[str, tuple[str, str]] = {}
        self._known: dict[str, str] = {}

    def name(self, value: str) -> str:
        return self.renamed.get(value, value)

    def operand(self, op: Op, name: str) -> str:
        return self.name(op.operand(name))

    def node(self, kind: str, output: str, *inputs: str, **attrs: Any) -> str:
        """Append a node with one output; returns the output's name."""
        self.nodes.append(self._onnx.helper.make_node(kind, list(inputs), [output], name=output, **attrs))
        return output

    def split(self, name: str, whole: str, axis: int) -> tuple[str, str]:
        """The two halves of ``whole`` along ``axis``."""
        halves = (f"{name}.first", f"{name}.second")
        self.nodes.append(self._onnx.helper.make_node("Split", [whole], halves, name=name, axis=axis, num_outputs=2))
        return halves

    def ints(self, *numbers: int) -> str:
        """A constant int64 vector, made once."""
        return self._constant(f"int64.{'.'.join(map(str, numbers))}", np.array(numbers, np.int64))

    def scalar(self, number: float) -> str:
        """A constant float32 scalar, made once."""
        return self._constant(f"float32.{number!r}", np.array(number, np.float32))

    def once(self, name: str, make: Callable[[str], str]) -> str:
        """The value ``name``, made by the first who asks for it."""
        if name not in self._known:
            self._known[name] = make(name)
        return self._known[name]

    def _constant(self, name: str, array: Array) -> str:
        def make(name: str) -> str:
            self.constants.append(self._onnx.numpy_helper.from_array(array, name))
            return name

        return self.once(name, make)

    @property
    def logits(self) -> str:
        return next(op.operand("logits") for op in self.program.ops if op.kind == "sample")


Translator: TypeAlias = Callable[[_Graph, Op], None]


def _embedding(g: _Graph, op: Op) -> None:
    g.node("Gather", op.outputs[0], g.operand(op, "table"), "token_ids", axis=0)


def _rms_norm(g: _Graph, op: Op) -> None:
    out, x = op.outputs[0], g.operand(op, "x")
    square = g.node("Mul", f"{out}.square", x, x)
    mean = g.node("ReduceMean", f"{out}.mean", square, g.ints(-1), keepdims=1)
    scale = g.node("Sqrt", f"{out}.scale", g.node("Add", f"{out}.eps", mean, g.scalar(op.attrs.number("eps"))))
    g.node("Mul", out, g.node("Div", f"{out}.normal", x, scale), g.operand(op, "weight"))


def _linear(g: _Graph, op: Op) -> None:
    g.node("Gemm", op.outputs[0], g.operand(op, "x"), g.operand(op, "weight"), transB=1)


def _rope(g: _Graph, op: Op) -> None:
    out, table, head_dim = op.outputs[0], op.operand("rope_table"), op.attrs.integer("head_dim")
    rows = g.once(f"{table}.rows", lambda name: g.node("Gather", name, table, "positions", axis=0))
    turns = g.once(f"{table}.turns", lambda name: g.node("Unsqueeze", name, rows, g.ints(1)))
    g.once(f"{table}.cos_sin", lambda name: g.split(name, turns, axis=2)[0])
    cos, sin = f"{table}.cos_sin.first", f"{table}.cos_sin.second"
    heads = g.node("Reshape", f"{out}.heads", g.operand(op, "x"), g.ints(0, -1, head_dim))
    a, b = g.split(f"{out}.halves", heads, axis=2)
    first = g.node("Sub", f"{out}.a", g.node("Mul", f"{out}.a_cos", a, cos), g.node("Mul", f"{out}.b_sin", b, sin))
    second = g.node("Add", f"{out}.b", g.node("Mul", f"{out}.b_cos", b, cos), g.node("Mul", f"{out}.a_sin", a, sin))
    turned = g.node("Concat", f"{out}.turned", first, second, axis=2)
    width = g.program.values[op.outputs[0]].shape[1]
    assert isinstance(width, int)
    g.node("Reshape", out, turned, g.ints(0, width))


def _kv_write(g: _Graph, op: Op) -> None:
    """A whole sequence attends to nothing but itself: its K and V are the pages."""
    g.kv[op.result("kv")] = g.operand(op, "k"), g.operand(op, "v")


def _paged_attention(g: _Graph, op: Op) -> None:
    out, (k, v) = op.outputs[0], g.kv[op.operand("kv")]
    heads, kv_heads, head_dim = (op.attrs.integer(key) for key in ("num_heads", "num_kv_heads", "head_dim"))
    grouped = g.ints(0, kv_heads, heads // kv_heads, head_dim)
    by_head = g.ints(0, kv_heads, 1, head_dim)
    q = g.node("Transpose", f"{out}.q", g.node("Reshape", f"{out}.q_heads", g.operand(op, "q"), grouped),
               perm=[1, 2, 0, 3])  # fmt: skip
    k = g.node("Transpose", f"{out}.k", g.node("Reshape", f"{out}.k_heads", k, by_head), perm=[1, 2, 3, 0])
    v = g.node("Transpose", f"{out}.v", g.node("Reshape", f"{out}.v_heads", v, by_head), perm=[1, 2, 0, 3])
    scale = g.scalar(op.attrs.number("scale"))
    scores = g.node("Mul", f"{out}.scores", g.node("MatMul", f"{out}.qk", q, k), scale)
    visible = g.node("Where", f"{out}.visible", _causal(g), scores, g.scalar(float("-inf")))
    attended = g.node("MatMul", f"{out}.pv", g.node("Softmax", f"{out}.probabilities", visible, axis=-1), v)
    rows = g.node("Transpose", f"{out}.rows", attended, perm=[2, 0, 1, 3])
    g.node("Reshape", out, rows, g.ints(0, heads * head_dim))


def _causal(g: _Graph) -> str:
    """bool[num_tokens, num_tokens]: whether the row's token sees the column's."""
    row = g.once("causal.row", lambda name: g.node("Unsqueeze", name, "positions", g.ints(1)))
    column = g.once("causal.column", lambda name: g.node("Unsqueeze", name, "positions", g.ints(0)))
    return g.once("causal", lambda name: g.node("LessOrEqual", name, column, row))


def _silu(g: _Graph, op: Op) -> None:
    x = g.operand(op, "x")
    g.node("Mul", op.outputs[0], x, g.node("Sigmoid", f"{op.outputs[0]}.sigmoid", x))


def _mul(g: _Graph, op: Op) -> None:
    g.node("Mul", op.outputs[0], g.operand(op, "a"), g.operand(op, "b"))


def _add(g: _Graph, op: Op) -> None:
    if op.attrs.integer("rounded"):
        raise ProgramError(
            f"op {op.name!r} (add): need a sum in float32, which is what is exported, have one that is rounded",
            hint="export the Program of --layer-boundary-norm fused",
        )
    g.node("Add", op.outputs[0], g.operand(op, "a"), g.operand(op, "b"))


def _gather_rows(g: _Graph, op: Op) -> None:
    """Every position's logits are wanted: all rows."""
    g.renamed[op.outputs[0]] = g.operand(op, "x")


def _draw(g: _Graph, op: Op) -> None:
    """Left out: the graph ends at the logits."""


TRANSLATORS: Mapping[str, Translator] = {
    "embedding": _embedding, "rms_norm": _rms_norm, "linear": _linear, "rope": _rope, "kv_write": _kv_write,
    "paged_attention": _paged_attention, "silu": _silu, "mul": _mul, "add": _add, "gather_rows": _gather_rows,
    "adjust_logits": _draw, "sample": _draw,
}  # fmt: skip
"""One translator for every kind of op that a model file uses."""


def _write(onnx: Any, graph: _Graph, weights: Fetch, path: Path, external_data_bytes: int) -> None:
    """Write model and, for large ones, the data file; both appear under their names only when complete."""
    values = graph.program.op_weights
    external = sum(4 * _elements(value) for value in values) > external_data_bytes
    model_part, data_path = path.with_name(f"{path.name}.partial"), path.with_name(f"{path.name}.data")
    data_part = data_path.with_name(f"{data_path.name}.partial")
    try:
        if external:
            with data_part.open("wb") as data:
                tensors = [_external(onnx, graph.program, v.name, weights, data, data_path.name) for v in values]
        else:
            tensors = [onnx.numpy_helper.from_array(_stored(graph.program, v.name, weights), v.name) for v in values]
        model_part.write_bytes(_model(onnx, graph, tensors).SerializeToString())
        if external:
            os.replace(data_part, data_path)
        os.replace(model_part, path)
    finally:
        model_part.unlink(missing_ok=True)
        data_part.unlink(missing_ok=True)


def _elements(value: Value) -> int:
    return prod(dim for dim in value.shape if isinstance(dim, int))


def _stored(program: Program, name: str, weights: Fetch) -> Array:
    """A weight in float32, with the values that its dtype can hold."""
    made = derive(program, name, weights)
    return round_bfloat16(made) if program.values[name].dtype == "bfloat16" else made.astype(np.float32)


def _external(onnx: Any, program: Program, name: str, weights: Fetch, data: BinaryIO, location: str) -> Any:
    """Append a weight to ``data``, page-aligned so that runtimes can map it; returns a tensor that refers to it."""
    array = np.ascontiguousarray(_stored(program, name, weights))
    data.write(bytes(-data.tell() % _ALIGNMENT))
    tensor = onnx.TensorProto(name=name, data_type=onnx.TensorProto.FLOAT, dims=array.shape)
    tensor.data_location = onnx.TensorProto.EXTERNAL
    for key, value in (("location", location), ("offset", data.tell()), ("length", array.nbytes)):
        tensor.external_data.add(key=key, value=str(value))
    data.write(array.data)
    return tensor


def _model(onnx: Any, graph: _Graph, tensors: list[Any]) -> Any:
    helper, program = onnx.helper, graph.program
    sequence = [
        helper.make_tensor_value_info(name, onnx.TensorProto.INT64, ["num_tokens"])
        for name in ("token_ids", "positions")
    ]
    width = program.values[graph.logits].shape[1]
    logits = helper.make_tensor_value_info(graph.logits, onnx.TensorProto.FLOAT, ["num_tokens", width])
    body = helper.make_graph(graph.nodes, program.name, sequence, [logits], [*graph.constants, *tensors])
    model = helper.make_model(
        body, opset_imports=[helper.make_opsetid("", OPSET)], ir_version=IR_VERSION, producer_name="tokenspeed"
    )
    for key, value in program.metadata.items():
        model.metadata_props.add(key=key, value=str(value))
    return model
