"""JSON from an artifact or a pack is held against what its readers expect before anything of it is used or shown."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import fields
from typing import Any, TypeVar

_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")
_SHOWN = 60
_MOST = 1 << 50  # more than any size or count
_Record = TypeVar("_Record")


def parse(data: bytes) -> Any:
    """The JSON value in ``data``. Raises ValueError (of which json's error is one) or RecursionError.

    Half of a surrogate pair, which JSON can spell and UTF-8 cannot, is refused: no text with one can be printed.
    """
    value = json.loads(data)
    if _SURROGATE.search(data):
        json.dumps(value, ensure_ascii=False).encode()  # raises UnicodeEncodeError, a ValueError
    return value


def check(value: Any, shape: Any, where: str = "it") -> None:
    """Raise ValueError naming the first part of ``value`` that is not of ``shape``.

    A shape is a type (``float`` for any finite number); a list of one shape, for any number of such; a dict of shapes
    by name, for an object that has these fields at least (``"name?"`` if there); or a dict whose one name is ``...``,
    for an object of any names.
    """
    if isinstance(shape, type):
        _is(value, shape, where)
    elif isinstance(shape, list):
        _is(value, list, where)
        for position, item in enumerate(value):
            check(item, shape[0], f"{where}[{position}]")
    else:
        _is(value, dict, where)
        inner = dict.fromkeys(value, shape[...]) if ... in shape else shape
        for name, kind in inner.items():
            optional = ... not in shape and name.endswith("?")
            name = name[:-1] if optional else name
            if name in value:
                check(value[name], kind, f"{where}.{name}")
            elif not optional:
                raise ValueError(f"{where} lacks {name!r}")


def record(cls: type[_Record], raw: Mapping[str, Any], /, **parsed: Any) -> _Record:
    """A dataclass from a JSON object, whose texts are texts and whose whole numbers count something.

    Raises TypeError or ValueError. ``parsed`` replaces what needs more than that.
    """
    made = cls(**{**raw, **parsed})
    for f in fields(cls):  # type: ignore[arg-type]
        value = getattr(made, f.name)
        if (f.type == "int" and not (type(value) is int and 0 <= value < _MOST)) or (
            f.type == "str" and not isinstance(value, str)
        ):
            raise ValueError(f"{f.name} is {value!r}")
    return made


def _is(value: Any, kind: type, where: str) -> None:
    if kind is float:
        good = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    else:
        good = isinstance(value, kind) and not (kind is int and isinstance(value, bool))
    if not good:
        shown = repr(value)
        shown = shown if len(shown) <= _SHOWN else f"{shown[:_SHOWN]}..."
        names = {str: "a text", int: "a whole number", float: "a number", list: "a list", dict: "an object"}
        names[bool] = "true or false"
        raise ValueError(f"{where} must be {names[kind]}, not {shown}")
