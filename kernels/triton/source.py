"""A digest of what a Triton kernel computes: of its source, without comments, formatting and docstrings.

Triton's own keys are of source text, so a comment changes them. Here the syntax tree is what counts: of a function, of
all functions of this project that it calls, and the values of the module constants that they read. Triton's own
functions count by name; its version is recorded beside the digest. The digest is the same on every Python from 3.11 on.
"""

from __future__ import annotations

import ast
import hashlib
import importlib
import inspect
import textwrap
from collections.abc import Iterable
from functools import cache
from types import ModuleType
from typing import Any

_PROJECT = "tokenspeed."
_KERNELS = "tokenspeed.kernels."


@cache
def source_digest(functions: tuple[str, ...]) -> str:
    """SHA-256 of the kernels named ``module.function``, in any order. Raises ImportError for what is none of the
    project's modules: names come from files, and nothing else is imported for them."""
    parts: dict[str, str] = {}
    for name in functions:
        module, _, function = name.rpartition(".")
        if not module.startswith(_KERNELS):
            raise ImportError(f"{name!r} names no kernel of {_KERNELS}*")
        _collect(getattr(importlib.import_module(module), function), parts)
    text = "\n".join(f"{name} {body}" for name, body in sorted(parts.items()))
    return hashlib.sha256(text.encode()).hexdigest()


def _collect(function: Any, parts: dict[str, str]) -> None:
    """Add the tree of ``function`` and of all that it reaches."""
    plain = getattr(function, "fn", function)
    name = f"{plain.__module__}.{plain.__qualname__}"
    if name in parts:
        return
    (tree,) = ast.parse(textwrap.dedent(inspect.getsource(plain))).body
    parts[name] = _shape(tree)
    names = [node for node in ast.walk(tree) if isinstance(node, ast.Name)]
    own = {arg.arg for arg in ast.walk(tree) if isinstance(arg, ast.arg)}
    own |= {node.id for node in names if not isinstance(node.ctx, ast.Load)}
    for used in sorted({node.id for node in names} - own):
        if used in plain.__globals__:
            _collect_value(f"{plain.__module__}.{used}", plain.__globals__[used], parts)


def _collect_value(name: str, value: Any, parts: dict[str, str]) -> None:
    if isinstance(value, ModuleType):
        return
    if inspect.isfunction(getattr(value, "fn", None)):
        if value.fn.__module__.startswith(_PROJECT):
            _collect(value, parts)
        return
    constant = getattr(value, "value", value)  # of a constexpr
    if isinstance(constant, int | float | str | bool | tuple):
        parts[name] = repr(constant)


def _shape(node: Any) -> str:
    """The tree as text: fields that are empty count for nothing, as new Pythons add such; so do docstrings."""
    if isinstance(node, list):
        return f"[{','.join(_shape(item) for item in node)}]"
    if not isinstance(node, ast.AST):
        return repr(node)
    fields = [(name, value) for name, value in ast.iter_fields(node) if value is not None and value != []]
    shaped = []
    for name, value in fields:
        if name == "body" and isinstance(value, list) and _is_text(value[0]):
            value = value[1:]
        shaped.append(f"{name}={_shape(value)}")
    return f"{type(node).__name__}({','.join(shaped)})"


def _is_text(node: ast.AST) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)


def functions_of(kernels: Iterable[Any]) -> tuple[str, ...]:
    """The entry points of DeviceKernels as ``source_digest`` takes them."""
    return tuple(sorted({f"{kernel.module}.{kernel.function}" for kernel in kernels}))
