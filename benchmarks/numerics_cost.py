"""What the numerics switches cost: artifacts of one checkpoint that differ in them alone, measured in turns.

    python benchmarks/numerics_cost.py CHECKPOINT [--target T] [--dtype D] [--dummy-weights SEED]
        [--variants rl-bitwise,...] [--decode 1,8,32] [--prefill 512,2048] [--rounds 3] [--together] [--json]

Each variant is built beside `auto` (the builds stay in --folder and are used again), then `tokenspeed bench` runs on
each in turn, in a process of its own, --rounds times, the order reversed from round to round. A cost is the time of a
token in a variant over that of `auto` in the same round, less one; the median over the rounds counts. Needs the extra
`build` and the `tokenspeed` command (--tokenspeed). Look at the load average first.

With --together one process has all artifacts loaded and runs one case on each in turn, for about a second each: for
machines whose speed drifts from one process to the next, and artifacts that fit in memory side by side.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

TOKENSPEED = shlex.quote(str(Path(sys.executable).with_name("tokenspeed")))
BASE = "auto"
VARIANTS: dict[str, tuple[str, ...]] = {
    BASE: (),
    "rl-bitwise": ("--numerics", "rl-bitwise"),
    "kernels.deterministic": ("--kernels-deterministic", "on"),
    "collectives.deterministic": ("--collectives-deterministic", "on"),
    "sampling.deterministic": ("--sampling-deterministic", "on"),
    "invariance.batch": ("--batch-invariance", "on"),
    "alignment.trainer": ("--trainer-alignment", "on"),
    "logprob_order=megatron": ("--logprob-order", "megatron"),
    "layer_boundary_norm=unfused": ("--layer-boundary-norm", "unfused"),
    "rope_table_device=target": ("--rope-table-device", "target"),
}
"""Name -> flags of `tokenspeed build`."""


def main() -> int:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("checkpoint", metavar="CHECKPOINT")
    arguments.add_argument("--target", help="default: this machine's best")
    arguments.add_argument("--dtype", default="bfloat16", help="default: %(default)s")
    arguments.add_argument("--dummy-weights", metavar="SEED", help="for a directory with a config.json alone")
    arguments.add_argument("--max-model-len", default="4096", metavar="N", help="default: %(default)s")
    arguments.add_argument("--variants", default=",".join(VARIANTS), help="default: all (%(default)s)")
    arguments.add_argument("--decode", default="1,8,32", metavar="N,...", help="sequences (default: %(default)s)")
    arguments.add_argument("--prefill", default="512,2048", metavar="N,...", help="tokens (default: %(default)s)")
    arguments.add_argument("--rounds", type=int, default=3, help="default: %(default)s")
    arguments.add_argument("--together", action="store_true", help="all of them in one process")
    arguments.add_argument("--kv-gib", type=float, default=1.0, help="of each engine, with --together (default: 1)")
    arguments.add_argument(
        "--folder", type=Path, metavar="DIR", help="where the artifacts are (default: a temporary one)"
    )
    arguments.add_argument("--tokenspeed", default=TOKENSPEED, metavar="COMMAND", help="default: %(default)s")
    arguments.add_argument("--json", action="store_true", help="print JSON on stdout")
    args = arguments.parse_args()
    names = list(dict.fromkeys((BASE, *args.variants.split(","))))
    if unknown := [name for name in names if name not in VARIANTS]:
        arguments.error(f"unknown variant {unknown[0]!r}: have {', '.join(VARIANTS)}")
    with tempfile.TemporaryDirectory(prefix="tokenspeed-cost-") as temporary:
        folder = args.folder or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        paths = {name: build(args, name, folder) for name in names}
        runs = (measure_together if args.together else measure)(args, paths)
    report = summary(runs)
    if args.json:
        print(json.dumps({"load_average": os.getloadavg()[0], "variants": report, "runs": runs}, indent=1))
    else:
        show(report)
    return 0


def build(args: argparse.Namespace, name: str, folder: Path) -> Path:
    """The artifact of variant ``name`` in ``folder``, built if it is not there."""
    path = folder / name.replace("=", "-")
    if not path.exists():
        flags = ["--dtype", args.dtype, "--max-model-len", args.max_model_len, *VARIANTS[name]]
        flags += ["--target", args.target] if args.target else []
        flags += ["--dummy-weights", args.dummy_weights] if args.dummy_weights else []
        print(f"building {name}", file=sys.stderr)
        command = [*shlex.split(args.tokenspeed), "build", args.checkpoint, "-o", str(path), *flags]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    return path


def measure(args: argparse.Namespace, paths: dict[str, Path]) -> list[dict[str, Any]]:
    """One entry a round: variant -> what `tokenspeed bench` said."""
    runs: list[dict[str, Any]] = []
    for number in range(args.rounds):
        order = list(paths)[:: -1 if number % 2 else 1]
        found = {name: bench(args, paths[name]) for name in order}
        runs.append({name: found[name] for name in paths})
        print(f"round {number + 1} of {args.rounds}", file=sys.stderr)
    return runs


def measure_together(args: argparse.Namespace, paths: dict[str, Path]) -> list[dict[str, Any]]:
    """As ``measure``, case by case, by engines that take turns in this process."""
    from tokenspeed import load
    from tokenspeed.runtime.bench import Case, run_case
    from tokenspeed.runtime.loader import LoadOptions

    kinds = (("decode", args.decode), ("prefill", args.prefill))
    cases = [Case(kind, int(size)) for kind, sizes in kinds for size in sizes.split(",") if size]
    engines = {name: load(path, options=LoadOptions(kv_gib=args.kv_gib)) for name, path in paths.items()}
    runs: list[dict[str, Any]] = [
        {name: {"artifact": e.info.artifact_digest, "target": e.info.target, "device": e.info.device,
                "seconds_per_token": {}} for name, e in engines.items()}
        for _ in range(args.rounds)
    ]  # fmt: skip
    for case in cases:
        for engine in engines.values():
            run_case(engine, case, seed=args.rounds)  # memory is handed out on first use
        for number, run in enumerate(runs):
            for name in list(engines)[:: -1 if number % 2 else 1]:
                run[name]["seconds_per_token"][str(case)] = 1 / run_case(engines[name], case, seed=number)
        print(f"{case} done", file=sys.stderr)
    for engine in engines.values():
        engine.close()
    return runs


def bench(args: argparse.Namespace, path: Path) -> dict[str, Any]:
    command = [*shlex.split(args.tokenspeed), "bench", str(path), "--rounds", "1", "--json"]
    command += ["--decode", args.decode, "--prefill", args.prefill]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    report = json.loads(done.stdout)
    kept = ("artifact", "target", "device", "ceilings")
    seconds = {figure["case"]: 1 / figure["tokens_per_second"] for figure in report["figures"]}
    return {**{name: report[name] for name in kept}, "seconds_per_token": seconds}


def summary(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """Variant -> case -> median seconds of a token, and the cost against BASE with each round's."""
    report: dict[str, Any] = {}
    for name in runs[0]:
        report[name] = {}
        for case in runs[0][BASE]["seconds_per_token"]:
            own, base = ([run[who]["seconds_per_token"][case] for run in runs] for who in (name, BASE))
            costs = [mine / other - 1 for mine, other in zip(own, base, strict=True)]
            report[name][case] = {
                "seconds_per_token": statistics.median(own), "cost": statistics.median(costs), "costs": costs,
            }  # fmt: skip
    return report


def show(report: dict[str, Any]) -> None:
    cases = list(report[BASE])
    print(f"{'':<30}" + "".join(f"{case:>16}" for case in cases))
    print(
        f"{BASE + ', tokens/s':<30}"
        + "".join(f"{1 / report[BASE][case]['seconds_per_token']:>16.0f}" for case in cases)
    )
    for name, figures in report.items():
        if name != BASE:
            print(f"{name:<30}" + "".join(f"{100 * figures[case]['cost']:>+15.1f}%" for case in cases))


if __name__ == "__main__":
    sys.exit(main())
