"""Programs that misuse the control plane's types must not compile, each for the reason that it names.

Every ``tests/cpp/must_not_compile/*.cpp`` breaks one rule and holds a line ``// expected-error: REGEX``, which one
line of the compiler's errors must match. ``control.cpp`` keeps the rules and must compile.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PROGRAMS = sorted((ROOT / "tests" / "cpp" / "must_not_compile").glob("*.cpp"))
CONTROL = "control"


@pytest.fixture(scope="module")
def compiler() -> str:
    found = shutil.which(os.environ.get("CXX", "g++")) or shutil.which("c++")
    if found is None:
        pytest.fail("need a C++20 compiler to check the programs: set CXX or install g++")
    return found


def compile_errors(compiler: str, program: Path) -> tuple[bool, list[str]]:
    """Whether ``program`` compiles, and the compiler's error lines."""
    result = subprocess.run(
        [compiler, "-std=c++20", "-fsyntax-only", "-I", str(ROOT / "csrc"), str(program)],
        capture_output=True,
        text=True,
        env={**os.environ, "LC_ALL": "C"},  # the expected texts are the untranslated ones
        check=False,
    )
    return result.returncode == 0, [line for line in result.stderr.splitlines() if "error:" in line]


def test_there_are_programs() -> None:
    assert len(PROGRAMS) >= 19
    assert CONTROL in {program.stem for program in PROGRAMS}


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.stem)
def test_program(program: Path, compiler: str) -> None:
    compiles, errors = compile_errors(compiler, program)
    expected = re.findall(r"^// expected-error: (.+)$", program.read_text(), re.MULTILINE)
    if program.stem == CONTROL:
        assert compiles, errors
        return
    assert len(expected) == 1, "need one line `// expected-error: REGEX`"
    assert not compiles, "this program breaks a rule and compiles all the same"
    assert any(re.search(expected[0], line) for line in errors), errors
    others = [line for line in errors if not re.search(expected[0], line)]
    assert not others, f"errors beside the expected one: {others}"
