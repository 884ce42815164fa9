"""``tokenspeed doctor``: what this machine can build for and run."""

from __future__ import annotations

import argparse
import importlib.util
import os
import platform

from tokenspeed import __version__
from tokenspeed.cli.options import Subparsers, add_command, add_json, print_json
from tokenspeed.target import CPU_ARCHS, Target, missing_flags

# What each extra brings, by the module that shows it is there.
_EXTRAS = {"build": ("numpy", "ml_dtypes", "safetensors", "gguf", "tqdm"), "onnx": ("onnx",)}


def add_parser(subparsers: Subparsers) -> None:
    parser = add_command(
        subparsers,
        "doctor",
        help="show which targets this machine can build for and run",
        description="Show the targets, whether this machine runs them, what is installed, and what is missing.",
        examples="  tokenspeed doctor\n  tokenspeed doctor --json",
    )
    add_json(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    report = examine()
    if args.json:
        print_json(report)
    else:
        _print(report)
    return 0 if any(t["runs"] for t in report["targets"]) else 1


def examine() -> dict:  # type: ignore[type-arg]
    """The report as plain data."""
    can_build = not _missing("build")
    targets = []
    for arch in CPU_ARCHS:
        target = Target("cpu", arch)
        missing = missing_flags(target)
        targets.append(
            {"target": str(target), "builds": can_build, "runs": not missing, "missing_flags": list(missing)}
        )
    return {
        "tokenspeed": __version__,
        "python": platform.python_version(),
        "cores": len(os.sched_getaffinity(0)),
        "native_module": _native_state(),
        "extras": {name: {"installed": not _missing(name), "missing": _missing(name)} for name in _EXTRAS},
        "targets": targets,
    }


def _missing(extra: str) -> list[str]:
    return [name for name in _EXTRAS[extra] if importlib.util.find_spec(name) is None]


def _native_state() -> str:
    try:
        from tokenspeed import _native
    except ImportError as e:
        return f"cannot be imported: {e}"
    return f"kernel ABI {_native.KERNEL_ABI}, {len(_native.kernel_table())} kernels"


def _print(report: dict) -> None:  # type: ignore[type-arg]
    print(f"tokenspeed {report['tokenspeed']} on Python {report['python']}, {report['cores']} cores")
    print(f"native module: {report['native_module']}")
    for name, extra in report["extras"].items():
        state = "installed" if extra["installed"] else f"missing {', '.join(extra['missing'])}"
        print(f"extra {name}: {state}" + ("" if extra["installed"] else f"  (pip install 'tokenspeed[{name}]')"))
    print(f"\n{'target':<22}{'build':<8}{'run':<6}why not")
    for t in report["targets"]:
        why = f"this CPU lacks {', '.join(t['missing_flags'])}" if t["missing_flags"] else ""
        print(f"{t['target']:<22}{_yes(t['builds']):<8}{_yes(t['runs']):<6}{why}".rstrip())


def _yes(flag: bool) -> str:
    return "yes" if flag else "no"
