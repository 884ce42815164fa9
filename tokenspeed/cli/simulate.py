"""``tokenspeed simulate``: a trace of requests through a fleet of real schedulers, in virtual time."""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from tokenspeed.cli.options import (
    Subparsers,
    add_command,
    add_json,
    print_json,
    unwinding_when_told_to_stop,
)
from tokenspeed.errors import UsageError

if TYPE_CHECKING:
    from tokenspeed.simulate.fleet import Fleet, Outcome
    from tokenspeed.simulate.report import Report
    from tokenspeed.simulate.resolve import Resolved
    from tokenspeed.simulate.trace import TraceRequest

KINDS = ("agentic", "chat", "rl-rollout", "batch")
ROUTINGS = ("round-robin", "random", "least-loaded", "prefix-aware")
MOST_REPLICAS = 4096


def add_parser(subparsers: Subparsers) -> None:
    parser = add_command(
        subparsers,
        "simulate",
        help="replay a trace of requests on a fleet that does not exist yet",
        description="Run a trace of requests through as many replicas as you like, in virtual time: the scheduler is\n"
        "the real one, a step takes what `tokenspeed bench` measured for its bucket, and a router spreads the\n"
        "requests. Prints latencies, goodput, prefix hits, preemptions and occupancy; several routings stand side by\n"
        "side. The same arguments always give the same numbers. docs/simulator.md explains all of it.",
        examples="  tokenspeed bench artifacts/llama --json > bench.json\n"
        "  tokenspeed bench artifacts/llama --sweep --json > sweep.json\n"
        "  tokenspeed simulate --generate agentic --requests 100000 --rate 100 -o trace.jsonl\n"
        "  tokenspeed simulate trace.jsonl --artifact artifacts/llama --cost bench.json --cost sweep.json \\\n"
        "      --kv-gib 100 --replicas 16 --routing prefix-aware,round-robin --ttft-slo 500 --picture fleet.svg\n"
        "  tokenspeed simulate --generate chat --kv-pages 4000 --step-cost decode:64=6ms,mixed:4096=90ms",
    )
    parser.add_argument("trace", nargs="?", metavar="TRACE", help="requests, one JSON object a line; - is stdin")
    parser.set_defaults(optional_positional="trace")
    _add_traffic(parser.add_argument_group("traffic"))
    _add_replica(parser.add_argument_group("replica", "of one; limits are the artifact's, or the largest known steps"))
    _add_fleet(parser.add_argument_group("fleet"))
    _add_report(parser.add_argument_group("report"))
    add_json(parser)
    parser.set_defaults(run=run)


def _add_traffic(group: Any) -> None:
    group.add_argument("--generate", choices=KINDS, metavar="KIND", help=f"make requests up: {', '.join(KINDS)}")
    group.add_argument("--requests", type=int, default=1000, metavar="N", help="how many (default: %(default)s)")
    group.add_argument("--rate", type=float, default=10.0, metavar="R", help="requests a second (default: %(default)g)")
    group.add_argument("--seed", type=int, default=0, metavar="N", help="of traffic and routing (default: %(default)s)")
    group.add_argument("--set", action="append", default=[], metavar="NAME=VALUE", help="a parameter of that kind")
    group.add_argument("--parameters", action="store_true", help="print the kinds of traffic and their parameters")
    group.add_argument("-o", "--output", metavar="FILE", help="only write what was generated; - is stdout")
    group.add_argument(
        "--block-tokens",
        type=int,
        default=512,
        metavar="N",
        help="tokens of a block of hash_ids (default: %(default)s)",
    )
    group.add_argument("--speed", type=float, default=1.0, metavar="X", help="replay so many times as fast")
    group.add_argument("--open", action="store_true", help="arrive by timestamp alone, delays within sessions ignored")


def _add_replica(group: Any) -> None:
    group.add_argument("--artifact", metavar="ARTIFACT", help="whose limits, buckets and page size count")
    group.add_argument("--target", metavar="TARGET", help="which of its targets (default: the one of the costs)")
    group.add_argument(
        "--cost",
        action="append",
        default=[],
        metavar="FILE",
        help="JSON of `tokenspeed bench`, or of its --sweep, or a cost file",
    )
    group.add_argument(
        "--step-cost",
        action="append",
        default=[],
        metavar="KIND:N=TIME,...",
        help="or numbers: decode:64=6ms,mixed:4096=90ms,context=29ns,pair=1ns",
    )
    group.add_argument("--write-cost", metavar="FILE", help="write the costs as a cost file")
    group.add_argument("--kv-gib", type=float, metavar="GIB", help="memory for KV pages")
    group.add_argument("--kv-pages", type=int, metavar="N", help="or their number")
    group.add_argument("--host-kv-gib", type=float, metavar="GIB", help="host memory for KV pages (default: none)")
    group.add_argument("--max-num-seqs", type=int, metavar="N", help="sequences that run at once")
    group.add_argument("--max-step-tokens", type=int, metavar="N", help="tokens of a step")
    group.add_argument("--max-model-len", type=int, metavar="N", help="tokens of a request (default: 131072)")
    group.add_argument("--page-size", type=int, metavar="N", help="positions of a page (default: 64)")
    group.add_argument("--max-waiting", type=int, default=1024, metavar="N", help="queue (default: %(default)s)")
    group.add_argument(
        "--when-full",
        choices=("wait", "refuse"),
        default="wait",
        help="what a request does that finds the queue full (default: come again)",
    )
    group.add_argument(
        "--steps-in-flight",
        type=int,
        choices=(1, 2, 3),
        help="planned before the oldest has ended (default: what the engine does, 1 on a CPU, 2 on a GPU)",
    )
    group.add_argument("--no-prefix-cache", action="store_true", help="compute every prompt as a whole")
    group.add_argument(
        "--aging-seconds",
        type=float,
        default=10.0,
        metavar="S",
        help="who waits this long counts as of the next priority; 0: never (default: %(default)g)",
    )


def _add_fleet(group: Any) -> None:
    group.add_argument("--replicas", type=int, default=1, metavar="N", help="(default: %(default)s)")
    group.add_argument(
        "--routing",
        default="round-robin",
        metavar="NAME,...",
        help=f"each is simulated: {', '.join(ROUTINGS)}; or all (default: round-robin)",
    )
    group.add_argument(
        "--load-tokens",
        type=int,
        default=1024,
        metavar="N",
        help="prefix-aware: prompt tokens that a request on a replica weighs as much as (default: %(default)s)",
    )
    group.add_argument(
        "--interval-ms",
        type=float,
        default=20.0,
        metavar="MS",
        help="how often the router hears of ends (default: %(default)g)",
    )
    group.add_argument("--threads", type=int, metavar="N", help="they change only the speed (default: every core)")


def _add_report(group: Any) -> None:
    group.add_argument("--ttft-slo", type=float, metavar="MS", help="a good request draws its first token by then")
    group.add_argument("--tpot-slo", type=float, metavar="MS", help="and each later one in this time, on average")
    group.add_argument("--picture", metavar="FILE.svg", help="draw latencies, and occupancy over time")
    group.add_argument("--records", metavar="FILE.csv", help="write a line for each request; one routing only")
    group.add_argument("--force", action="store_true", help="replace files that exist")


# ---- the command ----------------------------------------------------------------------------------------------


def run(args: argparse.Namespace) -> int:
    if args.parameters:
        _print_parameters()
        return 0
    _check(args)
    with unwinding_when_told_to_stop():
        return _run(args)


def _run(args: argparse.Namespace) -> int:
    for path in (args.output, args.write_cost, args.picture, args.records):
        if path is not None and path != "-":
            _check_new(path, args.force)  # now, and not when hours of virtual time have passed
    if args.output is not None:
        return _write_trace(args)
    if args.trace is None and args.generate is None:
        if args.write_cost is None:
            raise UsageError(
                "need a TRACE, or --generate KIND", hint="`tokenspeed simulate --help` shows how traces are made"
            )
        return _write_cost(args)
    from tokenspeed.simulate.picture import draw
    from tokenspeed.simulate.report import Slo, report

    resolved, routings = _resolve(args), _routings(args)
    if args.write_cost is not None:
        _write_cost(args)
    for note in resolved.notes:
        print(f"note: {note}", file=sys.stderr)
    slo = Slo(_seconds(args.ttft_slo, "--ttft-slo"), _seconds(args.tpot_slo, "--tpot-slo"))
    reports = []
    for routing in routings:
        outcome = _simulate(args, resolved, replace(_fleet(args), routing=routing))
        reports.append(report(outcome, slo))
        if args.records is not None:
            _write_records(args, outcome)
    if args.picture is not None:
        with _new_file(args.picture) as file:
            file.write(draw(_title(args), reports))
    if args.json:
        print_json(_json(args, resolved, reports))
    else:
        _print(args, resolved, reports)
    return 0


def _check(args: argparse.Namespace) -> None:
    if args.trace is not None and args.generate is not None:
        raise UsageError("need a TRACE or --generate KIND, have both")
    if args.generate is None and (args.set or args.output is not None):
        raise UsageError("--set and -o belong to --generate KIND, which is missing")
    for name, low, high in (
        ("replicas", 1, MOST_REPLICAS), ("threads", 1, 1024), ("load_tokens", 0, 1 << 24), ("block_tokens", 1, 1 << 24),
        ("max_waiting", 1, 1 << 20), ("kv_pages", 1, 1 << 24), ("page_size", 1, 1 << 16), ("max_num_seqs", 1, 1 << 16),
        ("max_step_tokens", 1, 1 << 20), ("max_model_len", 2, 1 << 24), ("seed", 0, (1 << 63) - 1),
    ):  # fmt: skip
        value = getattr(args, name)
        if value is not None and not low <= value <= high:
            raise UsageError(f"--{name.replace('_', '-')} is {value}; it must lie between {low} and {high}")
    for name, least, most in (
        ("speed", 1e-6, 1e9), ("interval_ms", 0.001, 1e7), ("aging_seconds", 0.0, 1e6),
        ("kv_gib", 1e-6, 1e6), ("host_kv_gib", 1e-6, 1e6),
    ):  # fmt: skip
        value = getattr(args, name)
        if value is not None and not least <= value <= most:
            raise UsageError(f"--{name.replace('_', '-')} is {value:g}; it must lie between {least:g} and {most:g}")


def _seconds(ms: float | None, option: str) -> float | None:
    if ms is not None and not 0 < ms <= 1e9:
        raise UsageError(f"{option} is {ms:g}; it must be above 0 ms")
    return None if ms is None else ms / 1e3


def _routings(args: argparse.Namespace) -> list[str]:
    names = list(dict.fromkeys(ROUTINGS if args.routing == "all" else args.routing.split(",")))
    for name in names:
        if name not in ROUTINGS:
            raise UsageError(f"--routing knows no {name!r}", hint=f"it knows {', '.join(ROUTINGS)}, and all")
    if len(names) > 1 and args.trace == "-":
        raise UsageError("several routings read the trace as often, and stdin can be read once", hint="use a file")
    if len(names) > 1 and args.records is not None:
        raise UsageError("--records is of one routing, and there are several")
    return names


def _resolve(args: argparse.Namespace) -> Resolved:
    from tokenspeed.simulate import resolve

    return resolve.resolve(
        resolve.Wanted(
            costs=_costs(args),
            artifact=args.artifact,
            target=args.target,
            max_num_seqs=args.max_num_seqs,
            max_prefill_tokens=args.max_step_tokens,
            max_model_len=args.max_model_len,
            page_size=args.page_size,
            kv_gib=args.kv_gib,
            kv_pages=args.kv_pages,
            host_kv_gib=args.host_kv_gib,
            max_waiting=args.max_waiting,
            steps_in_flight=args.steps_in_flight,
            prefix_index=not args.no_prefix_cache,
            aging_seconds=args.aging_seconds,
        )
    )


def _costs(args: argparse.Namespace) -> Any:
    from tokenspeed.simulate.cost import parse_step_cost
    from tokenspeed.simulate.measured import load_costs

    if not args.cost and not args.step_cost:
        raise UsageError(
            "need what steps cost: --cost FILE or --step-cost NUMBERS",
            hint="measure it with `tokenspeed bench ARTIFACT --json` and `tokenspeed bench ARTIFACT --sweep --json`",
        )
    if not args.cost:
        return parse_step_cost(args.step_cost)
    costs = load_costs(args.cost)
    return parse_step_cost(args.step_cost).over(costs) if args.step_cost else costs


def _fleet(args: argparse.Namespace) -> Fleet:
    from tokenspeed.simulate.fleet import Fleet

    threads = args.threads or len(os.sched_getaffinity(0))
    return Fleet(
        num_replicas=args.replicas,
        seed=args.seed,
        load_tokens=args.load_tokens,
        waits_when_full=args.when_full == "wait",
        keeps_delays=not args.open,
        speed=args.speed,
        block_tokens=args.block_tokens,
        interval_ms=args.interval_ms,
        num_threads=min(threads, args.replicas),
    )


def _simulate(args: argparse.Namespace, resolved: Resolved, fleet: Fleet) -> Outcome:
    from tokenspeed.simulate.fleet import simulate
    from tokenspeed.simulate.trace import read_trace

    if args.generate is not None:
        trace, total = _generated(args), args.requests
    else:
        trace, total = read_trace(args.trace, args.block_tokens), _lines_of(args.trace)
    line = _Line(sys.stderr, total)

    def progress(ended: int, read: int, seconds: float) -> None:
        of = f" of {total}" if total else ""
        line.show(ended, f"{fleet.routing}: {ended}{of} requests ended, {seconds:.0f} s of virtual time")

    try:
        return simulate(trace, resolved.deployment, resolved.model, fleet, progress)
    finally:
        line.close()


def _generated(args: argparse.Namespace) -> Iterator[TraceRequest]:
    from tokenspeed.simulate.generate import KINDS as traffics
    from tokenspeed.simulate.generate import generate, with_parameters

    given = {}
    for text in args.set:
        name, equals, value = text.partition("=")
        if not equals:
            raise UsageError(f"--set needs NAME=VALUE, have {text!r}", hint="--parameters lists the names")
        given[name] = value
    traffic = with_parameters(traffics[args.generate], given)
    return generate(traffic, num_requests=args.requests, seed=args.seed, rate=args.rate, block_tokens=args.block_tokens)


def _lines_of(path: str) -> int | None:
    """Lines of a file, for the bar; None where they cannot be counted."""
    if not os.path.isfile(path):
        return None
    with open(path, "rb") as file:
        return sum(chunk.count(b"\n") for chunk in iter(lambda: file.read(1 << 20), b""))


class _Line:
    """Progress: a bar that moves on a terminal, otherwise a line every ten seconds."""

    def __init__(self, stream: IO[str], total: int | None):
        self._stream, self._moves, self._total = stream, stream.isatty(), total
        self._next = time.monotonic() + (0.2 if self._moves else 10.0)

    def show(self, done: int, text: str) -> None:
        if (now := time.monotonic()) < self._next:
            return
        self._next = now + (0.2 if self._moves else 10.0)
        if self._moves:
            filled = 24 * min(done, self._total) // self._total if self._total else 0
            print(f"\r\x1b[K{'#' * filled}{'.' * (24 - filled)} {text}", end="", file=self._stream, flush=True)
        else:
            print(f"simulate: {text}", file=self._stream, flush=True)

    def close(self) -> None:
        if self._moves:
            print("\r\x1b[K", end="", file=self._stream, flush=True)


# ---- files ----------------------------------------------------------------------------------------------------


def _check_new(path: str, force: bool) -> None:
    """Raise UsageError when there is such a file already and ``force`` is not set, or no folder to put it in."""
    if not force and os.path.lexists(path):
        raise UsageError(f"{path} exists already", hint="give --force to replace it")
    if os.path.isdir(path):
        raise UsageError(f"{path} is no file: --force replaces only files")
    if not os.path.isdir(os.path.dirname(path) or "."):
        raise UsageError(f"{path}: there is no folder {os.path.dirname(path)}", hint="make it first")


@contextmanager
def _new_file(path: str) -> Iterator[IO[str]]:
    """A text file that is there once it is whole."""
    part = f"{path}.part"
    try:
        with open(part, "w", encoding="utf-8", newline="") as file:
            yield file
        os.replace(part, path)
    finally:
        Path(part).unlink(missing_ok=True)


def _write_trace(args: argparse.Namespace) -> int:
    from tokenspeed.simulate.trace import write_trace

    requests = _generated(args)
    if args.output == "-":
        write_trace(sys.stdout, requests)
        return 0
    line = _Line(sys.stderr, args.requests)
    with _new_file(args.output) as file:
        number = write_trace(file, requests, lambda made: line.show(made, f"{made} of {args.requests} requests made"))
    line.close()
    if args.json:
        print_json({"path": args.output, "requests": number, "bytes": os.path.getsize(args.output)})
    else:
        print(f"{args.output}: {number} requests")
    return 0


def _write_cost(args: argparse.Namespace) -> int:
    from tokenspeed.simulate.cost import dumps

    with _new_file(args.write_cost) as file:
        file.write(dumps(_costs(args)))
    print(f"costs: {args.write_cost}", file=sys.stderr)
    return 0


def _write_records(args: argparse.Namespace, outcome: Outcome) -> None:
    from tokenspeed.simulate.report import write_records

    with _new_file(args.records) as file:
        write_records(file, outcome)


# ---- what is printed ------------------------------------------------------------------------------------------


def _print_parameters() -> None:
    from tokenspeed.simulate.generate import KINDS as traffics

    for name, traffic in traffics.items():
        print(f"{name}: {traffic.summary}")
        for f in fields(traffic):
            print(f"  {f.name.replace('_', '-'):<22}{getattr(traffic, f.name):<10g}{f.metadata['doc']}")


def _title(args: argparse.Namespace) -> str:
    what = args.trace if args.trace is not None else f"{args.generate}, {args.requests} requests, {args.rate:g}/s"
    return f"{what}: {args.replicas} {'replica' if args.replicas == 1 else 'replicas'}"


def _json(args: argparse.Namespace, resolved: Resolved, reports: list[Report]) -> dict[str, Any]:
    priced = resolved.model
    return {
        "trace": args.trace,
        "generated": None if args.generate is None else {
            "kind": args.generate, "requests": args.requests, "rate": args.rate, "seed": args.seed, "set": args.set
        },
        "deployment": asdict(resolved.deployment),
        "fleet": asdict(_fleet(args)) | {"routing": [report.routing for report in reports]},
        "costs": {
            "provenance": asdict(priced.provenance),
            "per_context_token": priced.per_context_token,
            "per_pair": priced.per_pair,
            "buckets": [asdict(b) | {"seconds": s} for b, s in zip(priced.buckets, priced.seconds, strict=True)],
        },
        "notes": resolved.notes,
        "runs": [report.to_json() for report in reports],
    }  # fmt: skip


def _print(args: argparse.Namespace, resolved: Resolved, reports: list[Report]) -> None:
    from tokenspeed.simulate.text import table

    d = resolved.deployment
    print(_title(args))
    print(
        f"each: {d.num_pages} KV pages of {d.page_size}, {d.limits.max_num_seqs} sequences,"
        f" {d.limits.max_prefill_tokens} tokens a step, {d.max_model_len} a request"
    )
    print(f"step costs: {resolved.model.provenance}\n")
    for line in table(reports):
        print(line)
    if any(report.all.too_long for report in reports):
        text = "note: requests that are too long have more tokens than --max-model-len or than all KV pages"
        print(text, file=sys.stderr)
