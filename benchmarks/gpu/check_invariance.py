"""The invariance harness on a GPU: an honest artifact must pass, one that splits attention by occupancy must be named.

    python benchmarks/gpu/check_invariance.py CHECKPOINT [--dummy-weights SEED] [--target cuda:sm_90a] [--json FILE]
        [--folder FOLDER] [--only honest|faulty] [--prompts N] [--tokens N] [NAME=VALUE ...]

NAME=VALUE are fields of the envelope. Builds both into FOLDER (default: a temporary one), runs ``tokenspeed
invariance`` on each in a process of its own, and prints what they found. Exit code 1 when the honest one differs, or
when the fault is missed or another op is named.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent))
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from occupancy_split import envelope_fields, split_by_occupancy

from tokenspeed.compile.build import build

DIFFERS = 12
"""Exit code of the harness when something differs."""


def build_both(args: argparse.Namespace, folder: Path) -> dict[str, Path]:
    fields = {"targets": args.target, "dtype": "bfloat16", "max_model_len": 4096, **envelope_fields(args.fields)}
    made = {name: folder / name for name in ("honest", "faulty") if args.only in (None, name)}
    for name, path in made.items():
        began = time.perf_counter()
        common = {"force": True, "dummy_weights": args.dummy_weights, **fields}
        if name == "honest":
            build(args.checkpoint, path, numerics="rl-bitwise", **common)
        else:
            with split_by_occupancy(args.few):
                build(args.checkpoint, path, **common)
        print(f"built {path} in {time.perf_counter() - began:.1f} s", file=sys.stderr, flush=True)
    return made


def examine(path: Path, args: argparse.Namespace) -> tuple[int, dict[str, Any] | None, float]:
    """Exit code of the harness, its report, and its seconds."""
    command = [sys.executable, "-m", "tokenspeed", "invariance", str(path), "--json", "--target", args.target]
    for name in ("prompts", "tokens", "seed"):
        command += [f"--{name}", str(getattr(args, name))]
    began = time.perf_counter()
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True)
    seconds = time.perf_counter() - began
    return done.returncode, json.loads(done.stdout) if done.stdout else None, seconds


def problem(name: str, code: int, result: dict[str, Any] | None) -> str | None:
    """What is wrong with the harness's answer."""
    if result is None:
        return f"the harness failed with exit code {code}"
    if name == "honest":
        return (
            None if code == 0 and not result["not_attested"] else f"it did not pass: {result['not_attested'] or code}"
        )
    culprit = result["culprit"] or {}
    named = code == DIFFERS and culprit.get("kind") == "paged_attention"
    return None if named else f"the fault was not named: exit code {code}, culprit {culprit}"


def leg_line(leg: dict[str, Any]) -> str:
    counts = f"{leg['compared']:>7} positions, {leg['steps']:>6} steps, {leg['preemptions']} preempted"
    return f"  {leg['name']:<10} {leg['verdict']:<14} {counts}, {leg['cached_tokens']} cached, {leg['seconds']:.1f} s"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("--dummy-weights", type=int, metavar="SEED")
    parser.add_argument("--target", default="cuda:sm_90a")
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--only", choices=("honest", "faulty"))
    parser.add_argument(
        "--few", type=int, default=4, help="sequences of a bucket below the fault (default: %(default)s)"
    )
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("fields", nargs="*", metavar="NAME=VALUE")
    args = parser.parse_intermixed_args()
    results: dict[str, Any] = {}
    failed = False
    with tempfile.TemporaryDirectory() as temporary:
        for name, path in build_both(args, args.folder or Path(temporary)).items():
            code, result, seconds = examine(path, args)
            wrong = problem(name, code, result)
            failed |= wrong is not None
            results[name] = {"exit_code": code, "seconds": round(seconds, 1), "problem": wrong, "result": result}
            print(f"{name}: {wrong or 'as it should be'} ({seconds:.1f} s)")
            for leg in (result or {}).get("legs", ()):
                print(leg_line(leg))
            if culprit := (result or {}).get("culprit"):
                print(f"  {json.dumps(culprit)}")
    if args.json is not None:
        args.json.write_text(json.dumps(results, indent=1) + "\n")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
