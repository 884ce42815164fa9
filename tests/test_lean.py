"""Serving needs the base install only: checked in a virtual environment that has nothing else."""

from __future__ import annotations

import ast
import importlib.metadata
import json
import subprocess
import sys
import tomllib
import venv
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from tiny_artifact import command

import tokenspeed

ROOT = Path(__file__).resolve().parent.parent
HEAVY = ("numpy", "ml_dtypes", "safetensors", "gguf", "onnx", "torch", "triton", "transformers", "pydantic", "fastapi")
REPORT = """
import atexit, sys
def report():
    loaded = [m for m in sys.modules if m.split(".")[0] in {heavy!r} or m.startswith(("tokenspeed.compile", "tokenspeed.kernels"))]
    print("loaded:", sorted(loaded), file=sys.stderr)
atexit.register(report)
from tokenspeed.cli import main
sys.exit(main(sys.argv[1:]))
"""  # noqa: E501


def base_distributions() -> dict[str, importlib.metadata.Distribution]:
    """What `pip install tokenspeed` brings: the base dependencies and all that they need, by name."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    found: dict[str, importlib.metadata.Distribution] = {}
    waiting = list(project["dependencies"])
    while waiting:
        requirement = Requirement(waiting.pop())
        name = canonicalize_name(requirement.name)
        if name in found or (requirement.marker and not requirement.marker.evaluate({"extra": ""})):
            continue
        found[name] = importlib.metadata.distribution(name)
        waiting += found[name].requires or []
    return found


@pytest.fixture(scope="module")
def lean_python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The interpreter of a fresh virtual environment with links to the base install and to this package."""
    folder = tmp_path_factory.mktemp("lean") / "venv"
    venv.EnvBuilder(with_pip=False, symlinks=True).create(folder)
    (packages,) = folder.glob("lib/python*/site-packages")
    for distribution in base_distributions().values():
        for name in {file.parts[0] for file in distribution.files or ()} - {"..", "__pycache__", "bin"}:
            (packages / name).symlink_to(Path(str(distribution.locate_file(name))))
    (packages / "tokenspeed").symlink_to(Path(tokenspeed.__file__).resolve().parent)
    return folder / "bin" / "python"


def lean(python: Path, *args: str | Path, code: str | None = None) -> subprocess.CompletedProcess[str]:
    """Run the command line there, or ``code`` with these arguments."""
    line = [str(python), "-c", code, *map(str, args)] if code else command(*args, python=[str(python)])
    return subprocess.run(line, capture_output=True, text=True, timeout=60, env={"PATH": ""}, cwd=python.parent)


def test_the_base_install_is_small() -> None:
    assert set(base_distributions()).isdisjoint(HEAVY)


def test_the_environment_lacks_the_builder(lean_python: Path) -> None:
    code = "import importlib.util as u, sys; print([n for n in sys.argv[1:] if u.find_spec(n)])"
    assert lean(lean_python, *HEAVY, code=code).stdout == "[]\n"


def test_every_module_of_the_runtime_imports_there(lean_python: Path) -> None:
    code = """
import importlib, pkgutil, sys
import tokenspeed.runtime
for module in pkgutil.walk_packages(tokenspeed.runtime.__path__, "tokenspeed.runtime."):
    importlib.import_module(module.name)
for name in ("artifact", "verify_artifact", "graph", "graph_verify", "envelope", "step", "bucket", "target"):
    importlib.import_module("tokenspeed." + name)
from tokenspeed import AsyncLLM, Engine, SamplingParams, load
print(sorted(m for m in sys.modules if m.startswith(("tokenspeed.compile", "tokenspeed.kernels", "numpy"))))
"""
    ran = lean(lean_python, code=code)
    assert (ran.returncode, ran.stdout, ran.stderr) == (0, "[]\n", "")


def test_run_works_there(lean_python: Path, tiny_artifact: Path, capfd: pytest.CaptureFixture[str]) -> None:
    from tokenspeed.cli import main

    args = ["run", str(tiny_artifact), "hello", "--temperature", "0", "--max-tokens", "12", "--kv-gib", "0.1"]
    ran = lean(lean_python, *args, code=REPORT.format(heavy=HEAVY))
    assert (ran.returncode, ran.stderr) == (0, "loaded: []\n")
    assert main(args) == 0
    assert capfd.readouterr().out == ran.stdout


def test_serve_works_there(lean_python: Path, tiny_artifact: Path) -> None:
    process = subprocess.Popen(
        [str(lean_python), "-c", REPORT.format(heavy=HEAVY), "serve", str(tiny_artifact), "--port", "0"],
        stderr=subprocess.PIPE,
        text=True,
        env={"PATH": ""},
        cwd=lean_python.parent,
    )
    try:
        assert process.stderr is not None
        line = process.stderr.readline()
        assert line.startswith("ready: "), line + process.stderr.read()
        body = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 5, "seed": 1, "logprobs": True}
        url = line.split(" at ")[1].split()[0]
        r = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=30)
        assert r.json()["usage"]["completion_tokens"] == 5
        assert httpx.get(f"{url}/metrics").status_code == httpx.get(f"{url}/get_server_info").status_code == 200
        process.terminate()
        _, err = process.communicate(timeout=30)
        assert process.returncode == 0 and err == "loaded: []\n", err
    finally:
        process.kill()


def test_artifacts_can_be_looked_into_there(lean_python: Path, tiny_artifact: Path) -> None:
    for args in (("verify",), ("inspect", "--json"), ("explain", "--op", "linear")):
        ran = lean(lean_python, args[0], tiny_artifact, *args[1:])
        assert (ran.returncode, ran.stderr) == (0, "")


def test_the_builder_says_how_to_install_it(lean_python: Path, tiny_checkpoint: Path, tmp_path: Path) -> None:
    ran = lean(lean_python, "build", tiny_checkpoint, "-o", tmp_path / "a")
    assert (ran.returncode, ran.stdout) == (2, "")
    lines = ran.stderr.splitlines()
    assert lines[0].startswith("error: this command needs the builder, and its package '")
    assert lines[1:] == ["hint: install it with `pip install 'tokenspeed[build]'`"]
    ran = lean(lean_python, "export", tiny_checkpoint, "--onnx", tmp_path / "m.onnx")
    assert ran.returncode == 2 and "hint: install it with `pip install 'tokenspeed[build]'`" in ran.stderr
    report = json.loads(lean(lean_python, "doctor", "--json").stdout)
    assert report["extras"]["build"]["installed"] is False and "numpy" in report["extras"]["build"]["missing"]
    assert any(t["runs"] for t in report["targets"]) and not any(t["builds"] for t in report["targets"])


# ---- no code comes with data ----------------------------------------------------------------------------------

RUNS_CODE_FROM_DATA = {"pickle", "dill", "cloudpickle", "joblib", "shelve", "marshal", "torch", "runpy", "code"}


TRAINER = ROOT / "tokenspeed" / "trainer"
"""Works on a PyTorch model, so it imports torch."""
OWN_SOURCE = {"tokenspeed/compile/triton_language.py": {"compile", "exec"}}
"""The interpreter of Triton kernels rewrites this package's own functions, as Triton does; builders and tests only."""


def sources() -> Iterator[Path]:
    for folder in ("tokenspeed", "kernels"):
        yield from sorted((ROOT / folder).rglob("*.py"))


@pytest.mark.parametrize("path", list(sources()), ids=lambda p: p.relative_to(ROOT).as_posix())
def test_no_pickle_and_no_code_from_data(path: Path) -> None:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names = {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names = {(node.module or "").partition(".")[0]}
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            names = {node.func.id} & {"eval", "exec", "compile", "__import__"}
            names -= OWN_SOURCE.get(path.relative_to(ROOT).as_posix(), set())
            assert not names, f"{path}:{node.lineno} calls {names.pop()}"
            continue
        elif isinstance(node, ast.keyword):
            assert node.arg not in ("allow_pickle", "trust_remote_code"), f"{path}: {node.arg}"
            continue
        else:
            continue
        if TRAINER in path.parents:
            names -= {"torch"}
        assert names.isdisjoint(RUNS_CODE_FROM_DATA), f"{path}:{node.lineno} imports {names & RUNS_CODE_FROM_DATA}"


@pytest.mark.parametrize("path", sorted(TRAINER.rglob("*.py")), ids=lambda p: p.name)
def test_the_trainer_computes_with_torch_and_reads_no_file_with_it(path: Path) -> None:
    uses = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "torch":
            uses.add(node.attr)
    assert uses.isdisjoint({"load", "jit", "hub", "package", "export", "compile"}), uses


def test_chat_templates_run_in_the_immutable_sandbox() -> None:
    """No other kind of environment is imported anywhere; test_chat.py shows what this one forbids."""
    imported = {
        (node.module, alias.name)
        for path in sources()
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "jinja2"
        for alias in node.names
    }
    assert ("jinja2.sandbox", "ImmutableSandboxedEnvironment") in imported
    assert {name for _, name in imported if name.endswith("Environment")} == {"ImmutableSandboxedEnvironment"}


def test_this_test_sees_the_whole_package() -> None:
    assert len(list(sources())) > 50 and sys.version_info >= (3, 11)
