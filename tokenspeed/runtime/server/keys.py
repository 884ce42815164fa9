"""API keys and their names. A key's name is whose share of the server its requests count for."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path

from tokenspeed.errors import UsageError

UNNAMED = ""
"""Name of the only key of a server whose clients are one party; their requests may name a ``user`` each."""
_NAMED = re.compile(r"([A-Za-z0-9][A-Za-z0-9_.-]{0,63})=(?!=*$)(.+)")  # a key may end in '=', as base64 does
_HINT = "write KEY, or NAME=KEY with a NAME of letters, digits, '.', '_' and '-'"


def parse_keys(texts: Iterable[str], file: str | Path | None = None) -> dict[str, str]:
    """Keys by name from ``KEY`` or ``NAME=KEY`` each, and from the lines of ``file``, where '#' begins a comment.

    A key alone has no name; of several keys those without one are named key-1, key-2, ... by their place. No key is
    ever part of an error.

    Raises:
        UsageError: a key is malformed, a name or a key is there twice, or the file cannot be read.
    """
    found = [*texts, *(() if file is None else _lines(file))]
    keys: dict[str, str] = {}
    for number, text in enumerate(found, 1):
        named = _NAMED.fullmatch(text)
        name, key = (named[1], named[2]) if named else (f"key-{number}" if len(found) > 1 else UNNAMED, text)
        if not (key.isascii() and key.isprintable()) or not key or " " in key:
            raise UsageError(f"API key {number} is empty or holds more than printable ASCII", hint=_HINT)
        if name in keys:
            raise UsageError(f"API key {number}: the name {name!r} is there twice", hint="give each key its own name")
        if key in keys.values():
            raise UsageError(f"API key {number} ({name}) is that of another name", hint="give each client its own key")
        keys[name] = key
    return keys


def names_tenants(keys: Mapping[str, str]) -> bool:
    """Whether a request's key says whose share it counts for: there are named keys."""
    return bool(keys) and UNNAMED not in keys


def _lines(file: str | Path) -> list[str]:
    try:
        text = Path(file).read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as e:
        reason = e.strerror if isinstance(e, OSError) else "it is not UTF-8 text"
        raise UsageError(f"cannot read the API keys in {file}: {reason}") from None
    lines = [line.strip() for line in text.splitlines()]
    found = [line for line in lines if line and not line.startswith("#")]
    if not found:
        raise UsageError(f"there are no API keys in {file}", hint=f"{_HINT}, one a line")
    return found
