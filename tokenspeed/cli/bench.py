"""``tokenspeed bench``: speed of an artifact on this machine, with its ceilings in the same run."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

from tokenspeed.cli.options import (
    Subparsers,
    add_artifact,
    add_command,
    add_json,
    add_load_options,
    add_trace,
    load_options,
    print_json,
)
from tokenspeed.errors import UsageError
from tokenspeed.target import Target

if TYPE_CHECKING:
    from tokenspeed.runtime.bench import Case
    from tokenspeed.runtime.engine import Engine
    from tokenspeed.runtime.sweep import SweepReport


def add_parser(subparsers: Subparsers) -> None:
    parser = add_command(
        subparsers,
        "bench",
        help="measure decode and prefill against this machine's ceilings",
        description="Measure decode at several numbers of sequences and prefill of several lengths, each as a share\n"
        "of the read bandwidth and of the matrix rate that this machine reached in the same run. With --profile,\n"
        "time every node of one step instead. With --sweep, run randomized steps over everything that the artifact\n"
        "promises, and fail unless nothing was compiled, loaded, captured, instantiated or allocated meanwhile.",
        examples="  tokenspeed bench artifacts/smollm2\n"
        "  tokenspeed bench artifacts/smollm2 --decode 1,8,32 --prefill 512,2048 --rounds 5 --json\n"
        "  tokenspeed bench artifacts/smollm2 --profile decode:1\n"
        "  tokenspeed bench artifacts/smollm2 --sweep --seconds 60",
    )
    add_artifact(parser)
    parser.add_argument(
        "--decode", metavar="N,...", help="numbers of sequences (default: 1,8,32, on a GPU 64,128,256 too)"
    )
    parser.add_argument("--prefill", metavar="N,...", help="prompt lengths (default: 512,2048, on a GPU 8192 too)")
    parser.add_argument(
        "--rounds", type=int, default=3, metavar="N", help="rounds; medians count (default: %(default)s)"
    )
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--profile", metavar="KIND:N", help="time each node of one step, e.g. decode:8 or prefill:512")
    what.add_argument("--sweep", action="store_true", help="randomized steps over every bucket and kind of sampling")
    group = parser.add_argument_group("sweep")
    group.add_argument("--steps-per-bucket", type=int, metavar="N", help="steps of each bucket (default: 24)")
    group.add_argument("--seconds", type=float, metavar="S", help="go on for this long instead")
    group.add_argument("--seed", type=int, default=0, metavar="N", help="of the steps' sizes (default: %(default)s)")
    add_load_options(parser)
    add_trace(parser)
    add_json(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    from tokenspeed.runtime import trace

    with trace.writing(args.trace):
        return _run(args)


def _run(args: argparse.Namespace) -> int:
    from tokenspeed.runtime import bench
    from tokenspeed.runtime.engine import load

    _check(args)
    profiled = _profile_case(args.profile)
    options = replace(load_options(args), measure=True)
    with load(args.artifact, options=options) as engine:
        if profiled is not None:
            _report_profile(args, bench.profile(engine, profiled))
            return 0
        if args.sweep:
            return _sweep(args, engine)
        cases = _cases(args, bench.default_cases(engine))
        figures, ceilings = bench.measure(engine, cases, args.rounds, _progress)
        data = {
            "artifact": engine.info.artifact_digest,
            "model": engine.info.model,
            "dtype": engine.info.dtype,
            "target": engine.info.target,
            "device": engine.info.device,
            "threads": engine.info.threads,
            "ceilings": {
                "read_bytes_per_second": ceilings.read_bandwidth,
                "matmul_flops": ceilings.matmul,
                "matmul_by": _matmul_by(engine),
            },
            "load_seconds": engine.loaded.seconds,
            "peak_memory_bytes": bench.peak_memory_bytes(),
            "figures": [{**asdict(f), "case": str(f.case)} for f in figures],
            "counters": (stats := engine.stats()).device,
            "after_ready": stats.after_ready,
            "host": stats.host,
        }
    if args.json:
        print_json(data)
    else:
        _print(data)
    return 0


def _matmul_by(engine: Engine) -> str:
    if Target.parse(engine.info.target).is_gpu:
        return "the artifact's own kernel of projections, at its largest product"
    return "the machine's best matrix instruction, on registers"


def _progress(text: str) -> None:
    print(text, file=sys.stderr)


def _print(data: dict[str, Any]) -> None:
    print(f"{data['model']} {data['dtype']} on {data['target']}, {data['device']}")
    ceilings = data["ceilings"]
    if ceilings["read_bytes_per_second"] is not None:
        print(f"ceiling of reading: {ceilings['read_bytes_per_second'] / 1e9:.1f} GB/s")
    if ceilings["matmul_flops"] is not None:
        print(f"ceiling of matmul: {ceilings['matmul_flops'] / 1e9:.0f} GFLOP/s ({ceilings['matmul_by']})")
    print(f"peak memory: {data['peak_memory_bytes'] / 1e6:.0f} MB")
    print(f"\n{'case':<14}{'tokens/s':>10}{'of read':>10}{'of matmul':>11}{'ms/step':>10}{'bare ms':>10}"
          f"{'host us':>9}{'idle us':>9}")  # fmt: skip
    for f in data["figures"]:
        shares = f"{_percent(f['share_of_read_bandwidth']):>10}{_percent(f['share_of_matmul']):>11}"
        steps = f"{_scaled(f['step_seconds'], 1e3, 3):>10}{_scaled(f['bare_step_seconds'], 1e3, 3):>10}"
        host = f"{_scaled(f['host_seconds'], 1e6, 0):>9}{_scaled(f['idle_seconds'], 1e6, 1):>9}"
        print(f"{f['case']:<14}{f['tokens_per_second']:>10.0f}{shares}{steps}{host}".rstrip())
    for f in data["figures"]:
        if f["host_parts"]:
            parts = ", ".join(f"{name} {seconds * 1e6:.0f}" for name, seconds in f["host_parts"].items())
            print(f"host us of {f['case']}: {parts}")


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{share:.0%}"


def _scaled(seconds: float | None, scale: float, digits: int) -> str:
    return "" if seconds is None else f"{seconds * scale:.{digits}f}"


def _sweep(args: argparse.Namespace, engine: Engine) -> int:
    """Run a sweep and print it; 1 when the runtime did what it must not, or drew a token that does not exist."""
    from tokenspeed.runtime.sweep import STEPS_PER_BUCKET, sweep

    report = sweep(
        engine,
        steps_per_bucket=STEPS_PER_BUCKET if args.steps_per_bucket is None else args.steps_per_bucket,
        seconds=args.seconds,
        seed=args.seed,
        progress=_progress,
    )
    if args.json:
        buckets = [{**asdict(b), "name": b.bucket.name, "max_over_median": b.max_over_median} for b in report.buckets]
        info = engine.info
        head = {"artifact": info.artifact_digest, "model": info.model, "target": info.target, "device": info.device}
        print_json({**head, **asdict(report), "buckets": buckets, "closed": report.closed})
    else:
        _print_sweep(report)
    if not report.closed:
        print("error: the runtime is not closed: see the counters after ready", file=sys.stderr)
    if report.bad_tokens:
        print(f"error: {report.bad_tokens} drawn tokens lie outside the vocabulary", file=sys.stderr)
    return 0 if report.closed and not report.bad_tokens else 1


def _print_sweep(report: SweepReport) -> None:
    print(f"{'bucket':<14}{'steps':>6}{'p50 ms':>10}{'p99 ms':>10}{'max ms':>10}{'max/p50':>9}{'long ms':>10}  slowest")
    for b in report.buckets:
        times = "".join(f"{'-':>10}" if s is None else f"{s * 1e3:>10.3f}" for s in (b.p50, b.p99, b.max))
        slowest = f"{b.slowest.shape}, {b.slowest.variant}, {b.slowest.num_tokens} tokens"
        ratio = f"{b.max_over_median:>9.2f}"
        longest = f"{b.longest_context * 1e3:>10.3f}" if b.longest_context else f"{'-':>10}"
        print(f"{b.bucket.name:<14}{b.steps:>6}{times}{ratio}{longest}  {slowest}")
    print(
        f"\n{report.steps} steps of {len(report.buckets)} buckets in {report.seconds:.1f} s, "
        f"timed by the {report.clock}; the longest that the host waited for one: "
        f"{max(b.longest_wait for b in report.buckets) * 1e3:.1f} ms"
    )
    for title, counts in (
        ("sampling", report.variants),
        ("shapes", report.shapes),
        ("after ready", report.after_ready),
    ):
        print(f"{title}: {', '.join(f'{name} {number}' for name, number in counts.items())}")


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


def _check(args: argparse.Namespace) -> None:
    if args.rounds < 1:
        raise UsageError(f"--rounds is {args.rounds}; it must be at least 1")
    if args.steps_per_bucket is not None and args.steps_per_bucket < 1:
        raise UsageError(f"--steps-per-bucket is {args.steps_per_bucket}; it must be at least 1")
    if args.seconds is not None and not 0 < args.seconds < 1e6:
        raise UsageError(f"--seconds is {args.seconds}; it must be above 0")
    for kind in ("decode", "prefill"):
        if (text := getattr(args, kind)) is not None:
            _sizes(kind, text)


def _cases(args: argparse.Namespace, default: Sequence[Case]) -> list[Case]:
    """The default cases, but for a kind whose sizes were given."""
    from tokenspeed.runtime.bench import Case

    cases = []
    for kind in ("decode", "prefill"):
        text = getattr(args, kind)
        cases += [Case(kind, n) for n in _sizes(kind, text)] if text else [c for c in default if c.kind == kind]
    return cases


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
