"""Passes over Programs: small pure functions that fuse what one kernel does better than several.

Each takes a Program and returns a Program of the same meaning; ``run_passes`` verifies after each one.
Fusions match on SSA structure and fuse a value only when its single user is the op that it is fused into.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import TypeAlias

from tokenspeed.compile.ops import PANEL, Attrs, round_up
from tokenspeed.compile.program import Op, Program, Role, Source, Value
from tokenspeed.compile.verify import verify
from tokenspeed.errors import ProgramError

Pass: TypeAlias = Callable[[Program], Program]


def run_passes(program: Program, passes: Iterable[Pass]) -> Program:
    """Verify ``program``, then apply each pass and verify its result.

    Raises ProgramError naming the pass whose result breaks a rule.
    """
    verify(program)
    for apply in passes:
        try:
            program = apply(program)
            verify(program)
        except ProgramError as error:
            name = getattr(apply, "__name__", repr(apply))
            raise ProgramError(f"pass {name}: {error.message}", hint=error.hint) from error
    return program


class _Matcher:
    """Who defines and who reads each value of one Program."""

    def __init__(self, program: Program):
        self.program = program
        self.producers = program.producers()
        self.users = program.users()

    def producer(self, name: str, kind: str) -> Op | None:
        """The op of ``kind`` that defines ``name``, or None."""
        op = self.producers.get(name)
        return op if op is not None and op.kind == kind else None

    def private(self, name: str, kind: str) -> Op | None:
        """Like ``producer``, but only when ``name`` is read by one op, once, and is not an output."""
        users = self.users.get(name, ())
        if name in self.program.outputs or len(users) != 1 or users[0].inputs.count(name) != 1:
            return None
        return self.producer(name, kind)

    def attention_of(self, kv: str) -> Op | None:
        """The paged_attention op that alone reads ``kv``, or None."""
        users = self.users.get(kv, ())
        return users[0] if len(users) == 1 and users[0].kind == "paged_attention" else None


def fuse_qkv(program: Program) -> Program:
    """The q, k and v projections of one attention become one projection on stacked weights, sliced."""
    match = _Matcher(program)
    replaced: dict[str, list[Op]] = {}
    weights: list[Value] = []
    for write in program.ops:
        if write.kind != "kv_write":
            continue
        found = _projections_of(match, write)
        if found is None:
            continue
        weight = _stacked(program, [op.operand("weight") for op in found])
        weights.append(weight)
        fused = f"{found[0].name}kv"
        replaced[found[0].name] = [Op("linear", fused, (found[0].operand("x"), weight.name), (fused,))]
        start = 0
        for op in found:
            stop = start + _width(program, op.outputs[0])
            columns = Attrs({"start": start, "stop": stop})
            replaced.setdefault(op.name, []).append(Op("slice_columns", op.name, (fused,), op.outputs, columns))
            start = stop
    return program.with_ops(_substitute(program, replaced), weights)


def _projections_of(match: _Matcher, write: Op) -> tuple[Op, Op, Op] | None:
    """The q, k and v projections (of one x, q first in the Program) around a kv_write, or None."""
    attention = match.attention_of(write.result("kv"))
    if attention is None:
        return None
    q_rope, k_rope = match.private(attention.operand("q"), "rope"), match.private(write.operand("k"), "rope")
    if q_rope is None or k_rope is None:
        return None
    q, k = match.private(q_rope.operand("x"), "linear"), match.private(k_rope.operand("x"), "linear")
    v = match.private(write.operand("v"), "linear")
    if q is None or k is None or v is None or len({op.operand("x") for op in (q, k, v)}) != 1:
        return None
    order = [op.name for op in match.program.ops if op.name in (q.name, k.name, v.name)]
    return (q, k, v) if order[0] == q.name else None


def _stacked(program: Program, names: list[str]) -> Value:
    """The weight that stacks ``names`` along rows, named beside the first."""
    parts = [program.values[name] for name in names]
    rows = sum(_rows(part) for part in parts)
    return Value(_beside(names[0], "qkv_proj"), parts[0].dtype, (rows, parts[0].shape[1]), Role.WEIGHT,
                 Source("concat", tuple(names)))  # fmt: skip


def fuse_rope_kv_write(program: Program) -> Program:
    """rope of q and of k and the kv_write become one op that reads a fused qkv projection."""
    match = _Matcher(program)
    replaced: dict[str, list[Op]] = {}
    for write in program.ops:
        if write.kind != "kv_write":
            continue
        attention = match.attention_of(write.result("kv"))
        if attention is None:
            continue
        q_rope, k_rope = match.private(attention.operand("q"), "rope"), match.private(write.operand("k"), "rope")
        if q_rope is None or k_rope is None or q_rope.inputs[1:] != k_rope.inputs[1:]:
            continue
        slices = [match.private(name, "slice_columns")
                  for name in (q_rope.operand("x"), k_rope.operand("x"), write.operand("v"))]  # fmt: skip
        qkv = _whole(program, slices)
        if qkv is None:
            continue
        heads = Attrs({key: attention.attrs[key] for key in ("num_heads", "num_kv_heads", "head_dim")})
        inputs = (qkv, *q_rope.inputs[1:], write.operand("slot_mapping"), attention.operand("cu_seqlens"),
                  write.operand("kv"))  # fmt: skip
        outputs = (q_rope.outputs[0], write.result("kv"))
        replaced[write.name] = [Op("rope_kv_write", write.name, inputs, outputs, heads)]
        for op in (q_rope, k_rope, *slices):
            assert op is not None
            replaced[op.name] = []
    return program.with_ops(_substitute(program, replaced))


def _whole(program: Program, slices: list[Op | None]) -> str | None:
    """The value that ``slices`` cut into adjacent columns from first to last, or None."""
    start, whole = 0, None
    for op in slices:
        if op is None or op.attrs.integer("start") != start or whole not in (None, op.operand("x")):
            return None
        start, whole = op.attrs.integer("stop"), op.operand("x")
    return whole if whole is not None and start == _width(program, whole) else None


def fuse_silu_mul(program: Program) -> Program:
    """mul(silu(gate), up), in either order, becomes silu_mul(gate, up)."""
    match = _Matcher(program)
    replaced: dict[str, list[Op]] = {}
    for op in program.ops:
        if op.kind != "mul":
            continue
        for gate, up in (op.inputs, op.inputs[::-1]):
            silu = match.private(gate, "silu")
            if silu is not None:
                replaced[silu.name] = []
                replaced[op.name] = [Op("silu_mul", op.name, (silu.operand("x"), up), op.outputs)]
                break
    return program.with_ops(_substitute(program, replaced))


def fuse_gate_up(program: Program) -> Program:
    """silu_mul of two projections of one x becomes linear_silu_mul on interleaved weights."""
    match = _Matcher(program)
    replaced: dict[str, list[Op]] = {}
    weights: list[Value] = []
    for op in program.ops:
        if op.kind != "silu_mul":
            continue
        gate, up = match.private(op.operand("gate"), "linear"), match.private(op.operand("up"), "linear")
        if gate is None or up is None or gate.operand("x") != up.operand("x"):
            continue
        weight = _interleaved(program, gate.operand("weight"), up.operand("weight"))
        weights.append(weight)
        features = Attrs({"features": _width(program, op.outputs[0])})
        fused = Op("linear_silu_mul", op.name, (gate.operand("x"), weight.name), op.outputs, features)
        replaced.update({gate.name: [], up.name: [], op.name: [fused]})
    return program.with_ops(_substitute(program, replaced), weights)


def _interleaved(program: Program, gate: str, up: str) -> Value:
    value = program.values[gate]
    shape = (2 * round_up(_rows(value), PANEL), value.shape[1])
    source = Source("interleave16", (gate, up))
    return Value(_beside(gate, "gate_up_proj"), value.dtype, shape, Role.WEIGHT, source)


def fuse_residual_add(program: Program) -> Program:
    """add(residual, projection), in either order, becomes linear_add; a rounded sum rounds its second operand, so there
    that is the projection."""
    match = _Matcher(program)
    replaced: dict[str, list[Op]] = {}
    for op in program.ops:
        if op.kind != "add":
            continue
        for residual, projected in (op.inputs, op.inputs[::-1])[: 1 if op.attrs.integer("rounded") else 2]:
            linear = match.private(projected, "linear")
            if linear is not None:
                replaced[linear.name] = []
                replaced[op.name] = [Op("linear_add", op.name, (*linear.inputs, residual), op.outputs, op.attrs)]
                break
    return program.with_ops(_substitute(program, replaced))


def eliminate_dead_code(program: Program) -> Program:
    """Drop ops that no output and no state needs, then weights that nothing uses."""
    live = {*program.outputs, *(name for op in program.prelude for name in op.inputs)}
    kept: list[Op] = []
    for op in reversed(program.ops):
        writes_state = any(program.values[program.root(name)].role is Role.STATE for name in op.aliases())
        if writes_state or live.intersection(op.outputs):
            kept.append(op)
            live.update(op.inputs)
    for weight in reversed(program.weights):
        if weight.source is not None and weight.name in live:
            live.update(weight.source.inputs)
    dead = {weight.name for weight in program.weights if weight.name not in live}
    pruned = {name: value for name, value in program.values.items() if name not in dead}
    return replace(program, values=pruned).with_ops(reversed(kept))


CPU_PASSES: tuple[Pass, ...] = (
    fuse_qkv, fuse_rope_kv_write, fuse_silu_mul, fuse_gate_up, fuse_residual_add, eliminate_dead_code,
)  # fmt: skip
"""What every CPU target runs: its kernels fuse exactly these."""


def _substitute(program: Program, replaced: dict[str, list[Op]]) -> list[Op]:
    """The ops of ``program`` where each named in ``replaced`` gives way to the ops listed for it."""
    return [new for op in program.ops for new in replaced.get(op.name, [op])]


def _beside(weight: str, projection: str) -> str:
    """``a.b.q_proj.weight`` -> ``a.b.<projection>.weight``."""
    return ".".join([*weight.split(".")[:-2], projection, "weight"])


def _rows(value: Value) -> int:
    rows = value.shape[0]
    assert isinstance(rows, int), value
    return rows


def _width(program: Program, name: str) -> int:
    width = program.values[name].shape[-1]
    assert isinstance(width, int), name
    return width
