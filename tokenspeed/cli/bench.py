"""``tokenspeed bench``: speed of an artifact on this machine, with its ceilings in the same run."""

from __future__ import annotations

import argparse
import re
import sys
from typing import Any

from tokenspeed.cli.options import (
    Subparsers,
    add_artifact,
    add_command,
    add_json,
    add_load_options,
    load_options,
    print_json,
)
from tokenspeed.errors import UsageError


def add_parser(subparsers: Subparsers) -> None:
    parser = add_command(
        subparsers,
        "bench",
        help="measure decode and prefill against this machine's ceilings",
        description="Measure decode at several numbers of sequences and prefill of several lengths, each as a share\n"
        "of the read bandwidth and of the matrix rate that this machine reached in the same run. With --profile,\n"
        "time every node of one step instead.",
        examples="  tokenspeed bench artifacts/smollm2\n"
        "  tokenspeed bench artifacts/smollm2 --decode 1,8,32 --prefill 512,2048 --rounds 5 --json\n"
        "  tokenspeed bench artifacts/smollm2 --profile decode:1",
    )
    add_artifact(parser)
    parser.add_argument(
        "--decode", default="1,8,32", metavar="N,...", help="numbers of sequences (default: %(default)s)"
    )
    parser.add_argument("--prefill", default="512,2048", metavar="N,...", help="prompt lengths (default: %(default)s)")
    parser.add_argument(
        "--rounds", type=int, default=3, metavar="N", help="rounds; medians count (default: %(default)s)"
    )
    parser.add_argument("--profile", metavar="KIND:N", help="time each node of one step, e.g. decode:8 or prefill:512")
    add_load_options(parser)
    add_json(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    from tokenspeed.runtime import bench
    from tokenspeed.runtime.engine import load

    if args.rounds < 1:
        raise UsageError(f"--rounds is {args.rounds}; it must be at least 1")
    cases = [bench.Case(kind, n) for kind in ("decode", "prefill") for n in _sizes(kind, getattr(args, kind))]
    profiled = _profile_case(args.profile)
    with load(args.artifact, options=load_options(args)) as engine:
        if profiled is not None:
            _report_profile(args, bench.profile(engine, profiled))
            return 0
        figures, ceilings = bench.measure(engine, cases, args.rounds, lambda text: print(text, file=sys.stderr))
        data = {
            "artifact": engine.info.artifact_digest,
            "model": engine.info.model,
            "dtype": engine.info.dtype,
            "target": engine.info.target,
            "threads": engine.info.threads,
            "ceilings": {"read_bytes_per_second": ceilings.read_bandwidth, "matmul_flops": ceilings.matmul},
            "load_seconds": engine.loaded.seconds,
            "peak_memory_bytes": bench.peak_memory_bytes(),
            "figures": [
                {
                    "case": str(f.case),
                    "tokens_per_second": f.tokens_per_second,
                    "rounds": list(f.rounds),
                    "share_of_read_bandwidth": f.share_of_read_bandwidth,
                    "share_of_matmul": f.share_of_matmul,
                }
                for f in figures
            ],
            "counters": engine.stats().device,
        }
    if args.json:
        print_json(data)
    else:
        _print(data)
    return 0


def _print(data: dict[str, Any]) -> None:
    ceilings = data["ceilings"]
    print(f"{data['model']} {data['dtype']} on {data['target']}, {data['threads']} threads")
    print(f"ceilings: read {ceilings['read_bytes_per_second'] / 1e9:.1f} GB/s,"
          f" matmul {ceilings['matmul_flops'] / 1e9:.0f} GFLOP/s")  # fmt: skip
    print(f"peak memory: {data['peak_memory_bytes'] / 1e6:.0f} MB")
    print(f"\n{'case':<14}{'tokens/s':>10}{'of read':>10}{'of matmul':>11}")
    for f in data["figures"]:
        print(f"{f['case']:<14}{f['tokens_per_second']:>10.0f}{f['share_of_read_bandwidth']:>9.0%}"
              f"{f['share_of_matmul']:>11.0%}")  # fmt: skip


def _report_profile(args: argparse.Namespace, rows: list[tuple[str, float]]) -> None:
    if args.json:
        print_json([{"node": name, "seconds": seconds} for name, seconds in rows])
        return
    kinds: dict[str, list[float]] = {}  # nodes of all layers together: layers.7.gated counts as layers.*.gated
    for name, seconds in rows:
        kinds.setdefault(re.sub(r"\d+", "*", name), []).append(seconds)
    total = sum(seconds for _, seconds in rows)
    print(f"{'node':<32}{'times':>6}{'us':>10}{'share':>8}")
    for kind, times in kinds.items():
        print(f"{kind:<32}{len(times):>6}{sum(times) * 1e6:>10.0f}{sum(times) / total:>8.1%}")
    print(f"{'total':<32}{len(rows):>6}{total * 1e6:>10.0f}")


def _sizes(option: str, text: str) -> list[int]:
    try:
        sizes = [int(part) for part in text.split(",") if part.strip()]
    except ValueError:
        sizes = [0]
    if any(size < 1 for size in sizes):
        raise UsageError(f"--{option} is {text!r}; it must be whole numbers above 0 with commas between")
    return sizes


def _profile_case(text: str | None) -> Any:
    if text is None:
        return None
    from tokenspeed.runtime.bench import Case

    kind, _, size = text.partition(":")
    if kind not in ("decode", "prefill") or not size.isdigit() or int(size) < 1:
        raise UsageError(f"--profile is {text!r}; it must look like decode:8 or prefill:512")
    return Case(kind, int(size))
