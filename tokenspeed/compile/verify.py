"""The verifier of Programs: run after every pass, so a wrong pass fails by name and not in a kernel.

Rules: definition before use; single assignment; the dtype and shape rules of the schemas; no use of a value
after an op has overwritten its storage; every weight used and every source known; outputs exist.
"""

from __future__ import annotations

from tokenspeed.compile.derive import SOURCES
from tokenspeed.compile.ops import DTYPES, PANEL, PROGRAM_DTYPES, SYMBOLS, TensorType, round_up
from tokenspeed.compile.program import Op, Program, Role, Value, result_values
from tokenspeed.errors import ProgramError
from tokenspeed.step import INPUTS

_INPUT_DTYPES = {tensor.name: tensor.dtype for tensor in INPUTS}


def verify(program: Program) -> None:
    """Raises ProgramError, naming the op or value and the rule, unless ``program`` keeps every rule."""
    _check_metadata(program)
    for name, value in program.values.items():
        _check_value(name, value)
    _check_ops(program)
    _check_results(program)
    _check_storage(program)
    _check_weights(program)


def _check_metadata(program: Program) -> None:
    for key in ("page_size", "max_model_len"):
        have = program.metadata.get(key)
        if type(have) is not int or have <= 0:
            raise ProgramError(f"program metadata: need {key} to be a positive number, have {have!r}")
    if program.metadata.get("dtype") not in PROGRAM_DTYPES:
        have = program.metadata.get("dtype")
        raise ProgramError(f"program metadata: need dtype {' or '.join(PROGRAM_DTYPES)}, have {have!r}")


def _check_value(name: str, value: Value) -> None:
    at = f"value {name!r}"
    if not name or value.name != name:
        raise ProgramError(f"{at}: need the name it is listed under, have {value.name!r}")
    if value.dtype not in DTYPES:
        raise ProgramError(f"{at}: need a dtype of {', '.join(DTYPES)}, have {value.dtype!r}")
    for dim in value.shape:
        known = dim in SYMBOLS if isinstance(dim, str) else type(dim) is int and dim > 0
        if not known:
            raise ProgramError(f"{at}: need dimensions that are positive or one of {', '.join(SYMBOLS)}, have {dim!r}")
    if value.role is Role.INPUT and _INPUT_DTYPES.get(name) != value.dtype:
        raise ProgramError(f"{at}: need an input of the step of that name and dtype, have {value.type}")
    if value.source is not None and value.role is not Role.WEIGHT:
        raise ProgramError(f"{at}: need a weight where there is a source, have a value of role {value.role}")
    if value.role is Role.WEIGHT and any(isinstance(dim, str) for dim in value.shape):
        raise ProgramError(f"{at}: need a weight to have a fixed shape, have {value.type}")


def _check_ops(program: Program) -> None:
    """Definition before use, single assignment, schemas; a prelude knows no step."""
    defined = {value.name for value in program.with_role(Role.INPUT, Role.STATE, Role.WEIGHT)}
    names: set[str] = set()
    for op in program.all_ops:
        at = f"op {op.name!r} ({op.kind})"
        if op in program.prelude:
            _check_prelude(program, op, at)
        if op.name in names:
            raise ProgramError(f"{at}: need a name of its own, have one that an earlier op has")
        names.add(op.name)
        for name in op.inputs:
            if name not in defined:
                raise ProgramError(f"{at}: uses {name!r} before its definition")
        for name in op.outputs:
            if name in defined:
                raise ProgramError(f"{at}: defines {name!r} a second time")
            defined.add(name)
        _check_types(program, op, at)


def _check_prelude(program: Program, op: Op, at: str) -> None:
    for name in op.inputs:
        value = program.values.get(name)
        if value is not None and any(isinstance(dim, str) for dim in value.shape):
            raise ProgramError(f"{at}: need operands of fixed shape in the prelude, have {name!r}: {value.type}")
    for name in op.outputs:
        root = program.values.get(program.root(name))
        if root is None or root.role is not Role.STATE:
            raise ProgramError(f"{at}: need a prelude that fills state, have {name!r}, which is none")


def _check_types(program: Program, op: Op, at: str) -> None:
    inferred = result_values(op, [program.values[name].type for name in op.inputs], program.dtype)
    for result in inferred:
        declared = program.values.get(result.name)
        if declared is None or declared.type != result.type:
            have = "nothing" if declared is None else declared.type
            raise ProgramError(f"{at}: need its result {result.name!r} declared as {result.type}, have {have}")


def _check_results(program: Program) -> None:
    """Outputs exist, and every result belongs to an op."""
    produced = program.producers()
    if not program.outputs or len(set(program.outputs)) != len(program.outputs):
        raise ProgramError(f"program outputs: need one or more different values, have {list(program.outputs)}")
    for name in program.outputs:
        if name not in produced:
            raise ProgramError(f"output {name!r}: need a result of an op, have none of that name")
    for value in program.with_role(Role.TEMP, Role.OUTPUT):
        if value.name not in produced:
            raise ProgramError(f"value {value.name!r}: need an op that defines it (role {value.role}), have none")
        if (value.role is Role.OUTPUT) != (value.name in program.outputs):
            raise ProgramError(f"value {value.name!r}: need role output exactly for outputs, have {value.role}")


def _check_storage(program: Program) -> None:
    """No read, and no second write, of a value whose storage an op has overwritten."""
    overwritten: dict[str, Op] = {}
    for op in program.all_ops:
        at = f"op {op.name!r} ({op.kind})"
        for name in op.inputs:
            if name in overwritten:
                raise ProgramError(f"{at}: uses {name!r} after op {overwritten[name].name!r} overwrote its storage")
        for operand in op.aliases().values():
            if program.values[operand].role in (Role.INPUT, Role.WEIGHT):
                raise ProgramError(f"{at}: overwrites {operand!r}, which is read-only ({program.values[operand].role})")
            if op.inputs.count(operand) > 1:
                raise ProgramError(f"{at}: reads {operand!r} a second time while it overwrites its storage")
            overwritten[operand] = op
    for name in program.outputs:
        if name in overwritten:
            raise ProgramError(f"output {name!r}: op {overwritten[name].name!r} overwrote its storage")


def _check_weights(program: Program) -> None:
    used = {name for op in program.all_ops for name in op.inputs}
    known: set[str] = set()
    for value in program.weights:
        if value.source is not None:
            _check_source(program, value, known)
            used.update(value.source.inputs)
        known.add(value.name)
    for value in program.weights:
        if value.name not in used:
            raise ProgramError(f"weight {value.name!r}: no op uses it")


def _check_source(program: Program, value: Value, known: set[str]) -> None:
    source, at = value.source, f"weight {value.name!r}"
    assert source is not None
    if source.how not in SOURCES:
        raise ProgramError(f"{at}: need a source of {', '.join(SOURCES)}, have {source.how!r}")
    for name in source.inputs:
        if name not in known:
            raise ProgramError(f"{at}: is made from {name!r}, which is not a weight listed before it")
    if source.how == "rope_frequencies":
        return _check_frequencies(value)
    parts = [program.values[name] for name in source.inputs]
    if any(len(part.shape) != 2 or part.dtype != value.dtype or part.shape[1] != value.shape[1] for part in parts):
        have = ", ".join(str(part.type) for part in parts)
        raise ProgramError(f"{at}: need sources of {value.dtype} with {value.shape[1]} columns, have {have}")
    if value.shape[0] != _source_rows(value, parts):
        raise ProgramError(f"{at}: need {_source_rows(value, parts)} rows by its source, have {value.shape[0]}")


def _check_frequencies(value: Value) -> None:
    assert value.source is not None
    frequencies = value.source.attrs.get("inverse_frequencies")
    if value.source.inputs or not isinstance(frequencies, tuple) or value.type != TensorType(
        "float32", (len(frequencies),)
    ):  # fmt: skip
        have = value.type
        raise ProgramError(f"weight {value.name!r}: need as many float32 elements as inverse frequencies, have {have}")


def _source_rows(value: Value, parts: list[Value]) -> int:
    """Rows that the source of ``value`` makes. Raises ProgramError when its operands do not fit it."""
    assert value.source is not None
    rows = [part.shape[0] for part in parts if isinstance(part.shape[0], int)]
    if value.source.how == "concat" and rows:
        return sum(rows)
    if value.source.how == "interleave16" and len(rows) == 2 and rows[0] == rows[1]:
        return 2 * round_up(rows[0], PANEL)
    frequencies = value.source.attrs.get("inverse_frequencies")
    if value.source.how == "rope_table" and not rows and isinstance(frequencies, tuple):
        table_rows, width = value.shape
        if isinstance(table_rows, int) and 2 * len(frequencies) == width and value.dtype == "float32":
            return table_rows
    raise ProgramError(f"weight {value.name!r}: its shape and operands do not fit a source of {value.source.how!r}")
