"""The Program: one whole step of a model as an SSA list of ops over symbolic sizes.

Values are single assignment. Inputs (named as in ``tokenspeed.step``), weights and states exist before the
first op; every other value is the result of exactly one op. State (KV pages, last tokens) is threaded through
results that alias an operand: ``root`` finds whose storage a value really is. A fused weight stays derived:
its ``source`` says from which checkpoint tensors it is made and how.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from types import MappingProxyType
from typing import Any

from tokenspeed.compile.ops import SCHEMAS, Attrs, AttrValue, Dim, OpSchema, TensorType, TypeRuleError
from tokenspeed.errors import ProgramError
from tokenspeed.step import INPUTS, mask_words

PROGRAM_FORMAT = 1
"""Version of the JSON form. 1: first."""


class Role(StrEnum):
    INPUT = "input"
    WEIGHT = "weight"
    STATE = "state"
    TEMP = "temp"
    OUTPUT = "output"


@dataclass(frozen=True)
class Source:
    """How a derived weight is made.

    ``concat``: ``inputs`` stacked along rows. ``interleave16``: panels of 16 rows of the first input and of the
    second in turn, each input padded with zero rows to whole panels. ``rope_table``: no inputs; attributes
    ``inverse_frequencies`` (radians per position, D/2 of them) and ``attention_factor`` give
    row p = factor * cos(p f) for each frequency f, then factor * sin(p f). ``rope_frequencies``: no inputs; the
    attribute ``inverse_frequencies``.
    """

    how: str
    inputs: tuple[str, ...] = ()
    attrs: Attrs = field(default_factory=Attrs)


@dataclass(frozen=True)
class Value:
    """One tensor. A weight without ``source`` is the checkpoint tensor of the same (Hugging Face) name."""

    name: str
    dtype: str
    shape: tuple[Dim, ...]
    role: Role
    source: Source | None = None

    @property
    def type(self) -> TensorType:
        return TensorType(self.dtype, self.shape)


@dataclass(frozen=True)
class Op:
    """One operation. ``inputs`` and ``outputs`` name values in the order of the schema's operands and results."""

    kind: str
    name: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    attrs: Attrs = field(default_factory=Attrs)

    @property
    def schema(self) -> OpSchema:
        return SCHEMAS[self.kind]

    def operand(self, name: str) -> str:
        """The value bound to the schema's operand ``name``."""
        return self.inputs[self.schema.operands.index(name)]

    def result(self, name: str) -> str:
        """The value bound to the schema's result ``name``."""
        return self.outputs[self.schema.results.index(name)]

    def aliases(self) -> Mapping[str, str]:
        """Result value -> operand value whose storage it overwrites."""
        return {self.result(result): self.operand(operand) for result, operand in self.schema.aliases.items()}


@dataclass(frozen=True)
class Program:
    """A model as data: ``values`` by name, ``ops`` in execution order, ``outputs`` that a step reports.

    ``prelude`` are ops that run once, before the first step: they know no step, and fill state that steps read.

    ``metadata`` describes the model and the envelope it was built under: dtype, page_size, max_model_len,
    architecture, vocab_size, hidden_size, intermediate_size, num_layers, num_heads, num_kv_heads, head_dim.
    """

    name: str
    values: Mapping[str, Value]
    ops: tuple[Op, ...]
    outputs: tuple[str, ...]
    metadata: Attrs
    prelude: tuple[Op, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "values", MappingProxyType(dict(self.values)))

    @property
    def dtype(self) -> str:
        """The program dtype: float32 or bfloat16."""
        return str(self.metadata["dtype"])

    @property
    def page_size(self) -> int:
        return self.metadata.integer("page_size")

    @property
    def max_model_len(self) -> int:
        return self.metadata.integer("max_model_len")

    def with_role(self, *roles: Role) -> tuple[Value, ...]:
        """The values that have one of ``roles``, in order of definition."""
        return tuple(value for value in self.values.values() if value.role in roles)

    @property
    def inputs(self) -> tuple[Value, ...]:
        return self.with_role(Role.INPUT)

    @property
    def weights(self) -> tuple[Value, ...]:
        """Checkpoint tensors and derived weights alike; ``op_weights`` are those that an op reads."""
        return self.with_role(Role.WEIGHT)

    @property
    def states(self) -> tuple[Value, ...]:
        return self.with_role(Role.STATE)

    @property
    def all_ops(self) -> tuple[Op, ...]:
        """Those of the prelude, then those of a step."""
        return self.prelude + self.ops

    @property
    def op_weights(self) -> tuple[Value, ...]:
        """The weights that ops read: exactly what has to be packed into an artifact."""
        read = {name for op in self.all_ops for name in op.inputs}
        return tuple(value for value in self.weights if value.name in read)

    def root(self, name: str) -> str:
        """The value whose storage ``name`` is: itself, unless it aliases an operand of its op."""
        aliases = {result: operand for op in self.all_ops for result, operand in op.aliases().items()}
        while name in aliases:
            name = aliases[name]
        return name

    def producers(self) -> dict[str, Op]:
        """Value name -> the op that defines it."""
        return {name: op for op in self.all_ops for name in op.outputs}

    def users(self) -> dict[str, tuple[Op, ...]]:
        """Value name -> the ops that read it, in order."""
        users: dict[str, tuple[Op, ...]] = {}
        for op in self.all_ops:
            for name in dict.fromkeys(op.inputs):
                users[name] = (*users.get(name, ()), op)
        return users

    def with_ops(self, ops: Iterable[Op], weights: Iterable[Value] = ()) -> Program:
        """The Program with ``ops`` instead and ``weights`` added; results are typed anew by the schemas.

        Raises ProgramError when an op does not fit its schema, or a name is defined twice or not at all.
        """
        builder = ProgramBuilder(self.name, self.metadata)
        for value in (*self.with_role(Role.INPUT, Role.STATE, Role.WEIGHT), *weights):
            builder.define(value)
        for op in self.prelude:
            builder.append_prelude(op)
        for op in ops:
            builder.append(op)
        return builder.finish(self.outputs)

    def to_json(self) -> str:
        """The canonical JSON form: equal Programs give equal bytes."""
        return json.dumps(_to_data(self), sort_keys=True, separators=(",", ":"), allow_nan=False)

    @staticmethod
    def from_json(text: str) -> Program:
        """Read what ``to_json`` wrote. Raises ProgramError; the result is not verified (see ``verify.py``)."""
        return _from_data(text)

    def __str__(self) -> str:
        return "\n".join(_lines(self))


class ProgramBuilder:
    """Grows a Program op by op; result types come from the schemas, so a model file never states them."""

    def __init__(self, name: str, metadata: Mapping[str, AttrValue]):
        self._name = name
        self._metadata = Attrs(metadata)
        self._values: dict[str, Value] = {}
        self._ops: list[Op] = []
        self._prelude: list[Op] = []
        self.dtype = str(metadata["dtype"])

    def define(self, value: Value) -> str:
        if value.name in self._values:
            raise ProgramError(f"value {value.name!r} is defined twice: every value is assigned once")
        self._values[value.name] = value
        return value.name

    def step_inputs(self, pages_per_seq: int, vocab_size: int) -> None:
        """Define every input of a step, by the names of ``tokenspeed.step.INPUTS``."""
        symbol: dict[str, Dim] = {
            "T": "num_tokens", "S": "num_seqs", "S+1": "num_seqs+1", "R": "num_logit_rows", "P": pages_per_seq,
            "A": "num_adjustments", "A+1": "num_adjustments+1", "B": "num_biases", "M": "num_masks",
            "W": mask_words(vocab_size),
        }  # fmt: skip
        for tensor in INPUTS:
            shape = tuple(symbol[dim] if isinstance(dim, str) else dim for dim in tensor.shape)
            self.define(Value(tensor.name, tensor.dtype, shape, Role.INPUT))

    def weight(self, name: str, shape: tuple[int, ...], dtype: str | None = None, source: Source | None = None) -> str:
        """Define a weight of the program dtype, or of ``dtype``; returns its name."""
        return self.define(Value(name, dtype or self.dtype, shape, Role.WEIGHT, source))

    def state(self, name: str, dtype: str, shape: tuple[Dim, ...]) -> str:
        return self.define(Value(name, dtype, shape, Role.STATE))

    def op(self, kind: str, name: str, *inputs: str, results: Sequence[str] = (), **attrs: AttrValue) -> str:
        """Append an op; returns its first result. Results are named after the op unless ``results`` says."""
        return self.append(Op(kind, name, inputs, tuple(results) or (name,), Attrs(attrs)))

    def append(self, op: Op) -> str:
        """Append ``op`` and define its results; returns the first of them."""
        self._define_results(op)
        self._ops.append(op)
        return op.outputs[0]

    def append_prelude(self, op: Op) -> str:
        """Likewise an op that runs once, before the first step. Comes before the ops that use its results."""
        self._define_results(op)
        self._prelude.append(op)
        return op.outputs[0]

    def _define_results(self, op: Op) -> None:
        for value in result_values(op, [self._lookup(op, name).type for name in op.inputs], self.dtype):
            self.define(value)

    def _lookup(self, op: Op, name: str) -> Value:
        if name not in self._values:
            raise ProgramError(f"op {op.name!r} ({op.kind}) uses {name!r}, which is not defined before it")
        return self._values[name]

    def finish(self, outputs: Sequence[str]) -> Program:
        """The Program that reports ``outputs``, whose role becomes ``output``.

        Values are ordered: inputs, states, weights, then results in the order of execution.
        """
        for name in outputs:
            if name not in self._values:
                raise ProgramError(f"output {name!r} is not defined by any op")
            self._values[name] = replace(self._values[name], role=Role.OUTPUT)
        order = {Role.INPUT: 0, Role.STATE: 1, Role.WEIGHT: 2, Role.TEMP: 3, Role.OUTPUT: 3}
        values = {value.name: value for value in sorted(self._values.values(), key=lambda value: order[value.role])}
        return Program(self._name, values, tuple(self._ops), tuple(outputs), self._metadata, tuple(self._prelude))


def result_values(op: Op, operand_types: Sequence[TensorType], dtype: str) -> tuple[Value, ...]:
    """The values that ``op`` defines (role temp), typed by its schema.

    Raises ProgramError naming the op and the rule when kind, arity, attributes or types do not fit.
    """
    at = f"op {op.name!r} ({op.kind})"
    schema = SCHEMAS.get(op.kind)
    if schema is None:
        raise ProgramError(f"{at}: need a kind of op that has a schema, have {op.kind!r}")
    if len(op.inputs) != len(schema.operands) or len(op.outputs) != len(schema.results):
        raise ProgramError(
            f"{at}: need {len(schema.operands)} operands and {len(schema.results)} results, "
            f"have {len(op.inputs)} and {len(op.outputs)}"
        )
    _check_attrs(at, schema, op.attrs)
    try:
        types = schema.infer(operand_types, op.attrs, dtype)
    except TypeRuleError as error:
        raise ProgramError(f"{at}: {error.message}") from None
    return tuple(Value(name, t.dtype, t.shape, Role.TEMP) for name, t in zip(op.outputs, types, strict=True))


def _check_attrs(at: str, schema: OpSchema, attrs: Attrs) -> None:
    if set(attrs) != set(schema.attrs):
        raise ProgramError(f"{at}: need attributes {sorted(schema.attrs)}, have {sorted(attrs)}")
    for key, wanted in schema.attrs.items():
        have = attrs[key]
        if type(have) is not wanted:
            raise ProgramError(f"{at}: need attribute {key} to be {wanted.__name__}, have {have!r}")
        if isinstance(have, int) and have < 0:
            raise ProgramError(f"{at}: need attribute {key} not to be negative, have {have}")


def _to_data(program: Program) -> dict[str, Any]:
    return {
        "format": PROGRAM_FORMAT,
        "name": program.name,
        "metadata": dict(program.metadata),
        "outputs": list(program.outputs),
        "values": [_value_data(value) for value in program.values.values()],
        "ops": [_op_data(op) for op in program.ops],
        **({"prelude": [_op_data(op) for op in program.prelude]} if program.prelude else {}),
    }


def _op_data(op: Op) -> dict[str, Any]:
    return {"kind": op.kind, "name": op.name, "inputs": op.inputs, "outputs": op.outputs, "attrs": dict(op.attrs)}


def _value_data(value: Value) -> dict[str, Any]:
    data: dict[str, Any] = {"name": value.name, "dtype": value.dtype, "shape": value.shape, "role": str(value.role)}
    if value.source is not None:
        source = value.source
        data["source"] = {"how": source.how, "inputs": source.inputs, "attrs": dict(source.attrs)}
    return data


def _from_data(text: str) -> Program:
    try:
        data = json.loads(text)
        if data["format"] != PROGRAM_FORMAT:
            raise ProgramError(f"need a Program in format {PROGRAM_FORMAT}, have format {data['format']!r}")
        values = [_read_value(item) for item in data["values"]]
        ops, prelude = (tuple(_read_op(item) for item in items) for items in (data["ops"], data.get("prelude", [])))
        named = {value.name: value for value in values}
        return Program(_text(data["name"]), named, ops, _names(data["outputs"]), _attrs(data["metadata"]), prelude)
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        raise ProgramError(f"the text is not a Program in JSON: {error!r}") from None


def _read_op(item: Mapping[str, Any]) -> Op:
    return Op(_text(item["kind"]), _text(item["name"]), _names(item["inputs"]), _names(item["outputs"]),
              _attrs(item["attrs"]))  # fmt: skip


def _read_value(item: Mapping[str, Any]) -> Value:
    source = None
    if "source" in item:
        made = item["source"]
        source = Source(_text(made["how"]), _names(made["inputs"]), _attrs(made["attrs"]))
    if not all(isinstance(dim, int | str) for dim in item["shape"]):
        raise TypeError(f"shape {item['shape']!r}")
    return Value(_text(item["name"]), _text(item["dtype"]), tuple(item["shape"]), Role(item["role"]), source)


def _text(item: object) -> str:
    if not isinstance(item, str):
        raise TypeError(f"need a string, have {item!r}")
    return item


def _names(items: object) -> tuple[str, ...]:
    if not isinstance(items, list):
        raise TypeError(f"need a list, have {items!r}")
    return tuple(_text(item) for item in items)


def _attrs(data: Mapping[str, object]) -> Attrs:
    return Attrs({_text(key): _attr(value) for key, value in data.items()})


def _attr(value: object) -> AttrValue:
    if isinstance(value, list):
        return tuple(float(_number(item)) for item in value)
    return value if isinstance(value, str) else _number(value)


def _number(value: object) -> int | float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"need a number, have {value!r}")
    return value


def _lines(program: Program) -> Iterable[str]:
    values = program.values
    yield f"program {program.name} ({', '.join(f'{key}={value}' for key, value in program.metadata.items())})"
    for value in program.with_role(Role.INPUT, Role.STATE, Role.WEIGHT):
        yield f"  {value.role:<6} {value.name}: {value.type}{_made(value.source)}"
    for op in program.all_ops:
        once = "once " if op in program.prelude else ""
        results = ", ".join(f"{name}: {values[name].type}" if name in values else name for name in op.outputs)
        attrs = "".join(f", {key}={value:g}" for key, value in op.attrs.items() if isinstance(value, int | float))
        yield f"  {once}{results} = {op.kind}({', '.join(op.inputs)}{attrs})"
    yield f"  return {', '.join(program.outputs)}"


def _made(source: Source | None) -> str:
    return "" if source is None else f" = {source.how}({', '.join(source.inputs)})"
