"""Imports point one way only, and the runtime never sees the builder: checked on the source text itself."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent

# Layer by longest matching prefix; a module may import its own layer and lower ones.
LAYERS: dict[str, int] = {
    "tokenspeed": 0,  # the package itself resolves its names lazily
    "tokenspeed.errors": 0,
    "tokenspeed.json_check": 0,
    "tokenspeed.target": 1,
    "tokenspeed.step": 1,
    "tokenspeed.bucket": 2,
    "tokenspeed.graph": 2,
    "tokenspeed.graph_file": 2,
    "tokenspeed.graph_verify": 3,
    "tokenspeed.device_code": 2,
    "tokenspeed.gpu_verify": 3,
    "tokenspeed.switches": 1,
    "tokenspeed.envelope": 2,
    "tokenspeed.artifact": 3,
    "tokenspeed.publish": 3,
    "tokenspeed.values": 4,
    "tokenspeed.equivalence": 4,
    "tokenspeed.verify_artifact": 5,
    "tokenspeed.pack_file": 4,
    "tokenspeed.tuning_pack": 4,
    "tokenspeed.proof_pack": 4,
    "tokenspeed._native": 3,
    "tokenspeed.kernels": 4,
    "tokenspeed.compile": 6,
    "tokenspeed.runtime": 6,
    "tokenspeed.simulate": 6,
    "tokenspeed.trainer": 7,
    "tokenspeed.cli": 8,
    "tokenspeed.__main__": 9,
}
RUNTIME_MAY_IMPORT = {
    "jinja2", "markupsafe", "msgspec", "prometheus_client", "starlette", "tokenizers", "uvicorn", "uvloop", "zmq",
}  # fmt: skip
CPP_MAY_INCLUDE = {
    "check": {"check"},
    "cache": {"check", "cache"},
    "fsm": {"check", "cache", "fsm"},
    "scheduler": {"check", "cache", "fsm", "scheduler"},
    "simulate": {"check", "cache", "fsm", "scheduler", "simulate"},
    "device": {"check", "device"},
}


def modules() -> list[tuple[str, Path]]:
    found = []
    for folder, package in ((ROOT / "tokenspeed", "tokenspeed"), (ROOT / "kernels", "tokenspeed.kernels")):
        for path in sorted(folder.rglob("*.py")):
            if folder.name == "tokenspeed" and "kernels" in path.relative_to(folder).parts:
                continue
            parts = path.relative_to(folder).with_suffix("").parts
            found.append((".".join((package, *(p for p in parts if p != "__init__"))), path))
    return found


def imports(path: Path) -> set[str]:
    """Modules that ``path`` imports anywhere, at the top or inside functions; not those for type checking only."""
    names: set[str] = set()

    def visit(node: ast.AST) -> None:
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            return
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            assert node.module is not None
            names.add(node.module)
            if node.module == "tokenspeed":
                names.update(f"tokenspeed.{alias.name}" for alias in node.names)
        for child in ast.iter_child_nodes(node):
            visit(child)

    visit(ast.parse(path.read_text()))
    return names


def layer(module: str) -> int:
    return LAYERS[max((p for p in LAYERS if module == p or module.startswith(p + ".")), key=len)]


@pytest.mark.parametrize(("module", "path"), modules(), ids=lambda v: v if isinstance(v, str) else "")
def test_imports_point_one_way(module: str, path: Path) -> None:
    for name in imports(path):
        if name == "tokenspeed" or not name.startswith("tokenspeed."):
            continue
        assert layer(name) <= layer(module), f"{module} imports {name}, which lies above it"


@pytest.mark.parametrize(("module", "path"), modules(), ids=lambda v: v if isinstance(v, str) else "")
def test_runtime_and_artifact_layers_are_lean(module: str, path: Path) -> None:
    if module.startswith(("tokenspeed.compile", "tokenspeed.kernels", "tokenspeed.trainer", "tokenspeed.cli")):
        return
    import sys

    for name in imports(path):
        assert not name.startswith(("tokenspeed.compile", "tokenspeed.kernels")), (
            f"{module} imports the builder: {name}"
        )
        top = name.partition(".")[0]
        allowed = top in RUNTIME_MAY_IMPORT and module.startswith("tokenspeed.runtime")
        assert top == "tokenspeed" or top in sys.stdlib_module_names or allowed, f"{module} imports {name}"


def test_cpp_includes_point_one_way() -> None:
    checked = 0
    for part, allowed in CPP_MAY_INCLUDE.items():
        for path in sorted(p for p in (ROOT / "csrc" / part).rglob("*") if p.is_file()):
            for included in re.findall(r'#include "([a-z]+)/', path.read_text()):
                checked += 1
                assert included in allowed, f"csrc/{part}/{path.name} includes {included}/"
    assert checked
