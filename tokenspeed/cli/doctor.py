"""``tokenspeed doctor``: what this machine can build for and run."""

from __future__ import annotations

import argparse
import importlib.util
import os
import platform
from typing import TYPE_CHECKING, Any

from tokenspeed import __version__
from tokenspeed.cli.options import Subparsers, add_command, add_json, print_json
from tokenspeed.target import CPU_ARCHS, GPU_TARGETS, Target, missing_flags

if TYPE_CHECKING:
    from tokenspeed.runtime.places import Found, Gpu

# What each extra brings, by the module that shows it is there.
_EXTRAS = {
    "build": ("numpy", "ml_dtypes", "safetensors", "gguf", "tqdm", "triton"),
    "trainer": ("torch", "transformers"),
    "onnx": ("onnx",),
    "kv-events": ("zmq", "msgspec"),
}
_CPU_BUILDER = tuple(name for name in _EXTRAS["build"] if name != "triton")
"""What building for a CPU takes: no compiler."""
_CPU_PROVEN = "tested on machines of this kind"


def add_parser(subparsers: Subparsers) -> None:
    parser = add_command(
        subparsers,
        "doctor",
        help="show which targets this machine can build for and run",
        description="Show this machine's GPUs and drivers, the targets, whether this machine builds for and runs\n"
        "each, how far this project has tried it on hardware, what is installed, and what is missing.",
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


def examine() -> dict[str, Any]:
    """The report as plain data."""
    found = _look_for_gpus()
    return {
        "tokenspeed": __version__,
        "python": platform.python_version(),
        "cores": len(os.sched_getaffinity(0)),
        "native_module": _native_state(),
        "extras": {
            name: {"installed": not _missing(modules), "missing": _missing(modules)}
            for name, modules in _EXTRAS.items()
        },
        "gpus": [_gpu(gpu) for gpu in found.gpus] if found else [],
        "no_gpus": found.reasons if found else {},
        "targets": [_cpu_target(arch) for arch in CPU_ARCHS] + [_gpu_target(name, found) for name in GPU_TARGETS],
    }


def _cpu_target(arch: str) -> dict[str, Any]:
    target = Target("cpu", arch)
    missing = missing_flags(target)
    return {
        "target": str(target),
        "builds": not _missing(_CPU_BUILDER),
        "runs": not missing,
        "missing_flags": list(missing),
        "why_not": f"this CPU lacks {', '.join(missing)}" if missing else "",
        "proven": _CPU_PROVEN,
    }


def _gpu_target(name: str, found: Found | None) -> dict[str, Any]:
    target = Target.parse(name)
    own = [gpu for gpu in found.gpus if gpu.target == target] if found else []
    runs = any(gpu.driver_version >= target.gpu.min_driver for gpu in own)
    why = ""
    if not runs:
        why = f"the driver is too old: {own[0].driver}" if own else "no such GPU here"
    return {
        "target": name,
        "builds": not _missing(_EXTRAS["build"]),
        "runs": runs,
        "missing_flags": [],
        "why_not": why,
        "proven": target.gpu.proven,
    }


def _gpu(gpu: Gpu) -> dict[str, Any]:
    return {
        "device": gpu.ordinal,
        "backend": gpu.backend,
        "name": gpu.name,
        "arch": gpu.arch,
        "target": None if gpu.target is None else str(gpu.target),
        "memory_bytes": gpu.total_bytes,
        "driver": gpu.driver,
    }


def _look_for_gpus() -> Found | None:
    try:
        from tokenspeed.runtime.places import look_for_gpus
    except ImportError:  # said in the line about the native module
        return None
    return look_for_gpus()


def _missing(modules: tuple[str, ...]) -> list[str]:
    return [name for name in modules if importlib.util.find_spec(name) is None]


def _native_state() -> str:
    try:
        from tokenspeed import _native
    except ImportError as e:
        return f"cannot be imported: {e}"
    return f"kernel ABI {_native.KERNEL_ABI}, {len(_native.kernel_table())} kernels"


def _print(report: dict[str, Any]) -> None:
    print(f"tokenspeed {report['tokenspeed']} on Python {report['python']}, {report['cores']} cores")
    print(f"native module: {report['native_module']}")
    for name, extra in report["extras"].items():
        state = "installed" if extra["installed"] else f"missing {', '.join(extra['missing'])}"
        print(f"extra {name}: {state}" + ("" if extra["installed"] else f"  (pip install 'tokenspeed[{name}]')"))
    for gpu in report["gpus"]:
        print(f"GPU {gpu['device']}: {gpu['name']}, {gpu['memory_bytes'] / (1 << 30):.0f} GiB, {gpu['arch']},"
              f" driver {gpu['driver']}, runs {gpu['target'] or 'no target'}")  # fmt: skip
    for backend, reason in report["no_gpus"].items():
        print(f"no {backend} GPU: {reason}")
    width = max(len(t["proven"]) for t in report["targets"]) + 2
    print(f"\n{'target':<22}{'build':<8}{'run':<6}{'tried on hardware':<{width}}why it does not run here")
    for t in report["targets"]:
        line = f"{t['target']:<22}{_yes(t['builds']):<8}{_yes(t['runs']):<6}{t['proven']:<{width}}{t['why_not']}"
        print(line.rstrip())


def _yes(flag: bool) -> str:
    return "yes" if flag else "no"
