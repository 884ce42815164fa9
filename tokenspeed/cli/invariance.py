"""``tokenspeed invariance``: does an artifact give the same bits in every circumstance?"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tokenspeed.cli.options import (
    Subparsers,
    add_artifact,
    add_command,
    add_json,
    add_load_options,
    load_options,
    print_json,
    unwinding_when_told_to_stop,
)
from tokenspeed.errors import DivergenceError, ResourceError, UsageError

if TYPE_CHECKING:
    from tokenspeed.runtime.invariance.harness import Result
    from tokenspeed.runtime.invariance.plan import Plan

_LOADING = ("target", "device", "threads", "kv_gib", "verify")
"""Options that a fresh process is given as well."""


def add_parser(subparsers: Subparsers) -> None:
    from tokenspeed.runtime.invariance.plan import LEGS

    parser = add_command(
        subparsers,
        "invariance",
        help="prove that an artifact gives the same bits in every circumstance",
        description="Run the same prompts alone, packed with others, repeated, in chunks of random sizes, preempted,\n"
        "from cached prefixes and in a fresh process, greedy and at temperature 1, and compare token ids and\n"
        "log-probabilities to the last bit. Where one differs, name the first op that computes it. A pass of all legs\n"
        "writes the attestation that `tokenspeed serve` wants of an artifact built with --numerics rl-bitwise.\n"
        "Exit code 12: something differs.\n\n"
        "legs:\n" + "\n".join(f"  {name:<10} {text}" for name, text in LEGS.items()),
        examples="  tokenspeed invariance artifacts/smollm2\n"
        "  tokenspeed invariance artifacts/smollm2 --prompts 16 --tokens 32 --legs packed,chunks --json\n"
        "  tokenspeed invariance artifacts/smollm2 --prompt-file prompts.jsonl --seed 7",
    )
    add_artifact(parser)
    parser.add_argument("--prompts", type=int, metavar="N", help="prompts that are made (default: 64)")
    parser.add_argument("--tokens", type=int, metavar="N", help="tokens of each reply (default: 128)")
    parser.add_argument("--seed", type=int, default=0, metavar="N",
                        help="of prompts, draws, order and chunks (default: %(default)s)")  # fmt: skip
    parser.add_argument("--legs", metavar="LEG,...", help="which to run beside `alone` (default: all)")
    parser.add_argument("--prompt-file", metavar="FILE",
                        help="prompts, one a line: a text, or a JSON array of token ids")  # fmt: skip
    parser.add_argument("--worker", metavar="FOLDER", help=argparse.SUPPRESS)
    add_load_options(parser)
    add_json(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    from tokenspeed.runtime.invariance import attestation, harness

    if args.host_kv_gib:
        raise UsageError("the harness runs without a host tier", hint="leave --host-kv-gib out")
    options = load_options(args)
    if args.worker is not None:
        from tokenspeed.runtime.invariance.worker import work

        work(args.artifact, options, Path(args.worker))
        return 0
    plan = _plan(args)
    bar = _Bar()
    with unwinding_when_told_to_stop():  # what was started ends too
        result = harness.examine(args.artifact, options, plan, lambda folder: _worker(args, folder), bar.report)
    bar.end()
    path: Path | None = None
    revoked: Path | None = None
    failed: ResourceError | None = None
    attested = attestation.attest(result) if result.passed else None
    try:
        if attested is not None:
            path = attestation.write(attested, result.artifact.path)
        if not result.passed:
            revoked = attestation.revoke(result.artifact.path, result.section.target)
    except ResourceError as e:  # what was found, in minutes or hours, is told all the same
        failed = e
    lacks = attestation.lacks(result) if failed is None else (failed.message,)
    if args.json:
        print_json({**result.to_json(), "attestation": path and str(path), "not_attested": list(lacks),
                    "revoked": revoked and str(revoked)})  # fmt: skip
    else:
        _print(result, path, lacks)
        if revoked is not None:
            print(f"the attestation {revoked} was removed")
    if failed is not None:
        raise failed
    return 0 if result.passed else DivergenceError.exit_code


def _plan(args: argparse.Namespace) -> Plan:
    from tokenspeed.runtime.invariance.plan import LEGS, PROMPTS, TOKENS, Plan

    if args.prompt_file is not None and args.prompts is not None:
        raise UsageError("--prompts makes prompts, and --prompt-file brings them", hint="give one of them")
    legs = tuple(LEGS) if args.legs is None else tuple(name.strip() for name in args.legs.split(","))
    return Plan(
        prompts=PROMPTS if args.prompts is None else args.prompts,
        tokens=TOKENS if args.tokens is None else args.tokens,
        seed=args.seed,
        legs=legs,
        prompt_file=None if args.prompt_file is None else Path(args.prompt_file),
    )


def _worker(args: argparse.Namespace, folder: Path) -> list[str]:
    """The command line of a process that runs leg process."""
    command = [sys.executable, "-P", "-m", "tokenspeed", "invariance", str(args.artifact), "--worker", str(folder)]
    for name in _LOADING:
        value = getattr(args, name)
        if value is not None:
            command += [f"--{name.replace('_', '-')}", str(value)]
    return command + (["--pin"] if args.pin else [])


class _Bar:
    """Progress on stderr: a bar on a terminal, elsewhere a line as each leg begins."""

    WIDTH = 30
    SECONDS = 0.1

    def __init__(self) -> None:
        self._live = sys.stderr.isatty()
        self._name = ""
        self._last = 0.0

    def report(self, name: str, done: int, total: int) -> None:
        if not self._live:
            if name != self._name:
                print(f"{name} ...", file=sys.stderr, flush=True)
            self._name = name
            return
        now = time.perf_counter()
        if name == self._name and now - self._last < self.SECONDS and done < total:
            return
        self._name, self._last = name, now
        filled = self.WIDTH * done // max(1, total)
        bar = "#" * filled + "." * (self.WIDTH - filled)
        print(f"\r{name:<10} [{bar}] {done}/{total}\x1b[K", end="", file=sys.stderr, flush=True)

    def end(self) -> None:
        if self._live:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)


def _print(result: Result, path: Path | None, lacks: tuple[str, ...]) -> None:
    envelope = result.artifact.manifest.envelope
    print(f"{envelope.model} ({envelope.numerics}), {result.section.target} on {result.device}: {result.num_prompts}"
          f" prompts, {result.plan.tokens} tokens, greedy and temperature 1, seed {result.plan.seed}\n")  # fmt: skip
    head = ("leg", "requests", "compared", "steps", "preempted", "cached", "seconds", "verdict")
    rows = [head] + [
        (leg.name, str(leg.requests), str(leg.compared), str(leg.steps), str(leg.preemptions), str(leg.cached_tokens),
         f"{leg.seconds:.1f}", leg.verdict)
        for leg in result.legs
    ]  # fmt: skip
    widths = [max(len(row[i]) for row in rows) for i in range(len(head))]
    for row in rows:
        cells = (
            cell.rjust(w) if 0 < i < len(head) - 1 else cell.ljust(w)
            for i, (cell, w) in enumerate(zip(row, widths, strict=True))
        )
        print("  ".join(cells).rstrip())
    print()
    if result.buckets_not_run:
        print(f"of {len(result.section.buckets)} buckets no leg ran {', '.join(result.buckets_not_run)}")
    if result.divergence is not None:
        print(_divergence(result))
    elif path is not None:
        print(f"equal to the last bit; attested in {path}")
    else:
        print(f"equal to the last bit; not attested, as {'; '.join(lacks)}")


def _divergence(result: Result) -> str:
    d, c = result.divergence, result.culprit
    assert d is not None
    data = d.to_json()
    number, legs = sum(leg.num_divergent for leg in result.legs), len(result.legs) - 1
    lines = [
        f"{number} outcome{'s' * (number > 1)} of {legs} leg{'s' * (legs > 1)} differ{'s' * (number == 1)}. The first:",
        f"  leg {d.leg}, {d.name}, position {d.position} ({'prompt' if d.in_prompt else 'reply'})",
        f"  expected  {_found(data['expected'])}",
        f"  found     {_found(data['found'])}",
    ]
    if c is None:
        return "\n".join([
            *lines,
            "Run again step by step, both legs gave equal bits: the difference does not follow from the steps' inputs."
            " Suspect memory that is read before it is written, a race, or the machine.",
        ])  # fmt: skip
    more = "" if c.largest_difference is None else f", by {c.largest_difference:.3g} at most"
    lines += [
        f"first op that differs: {c.op} ({c.kind}), at position {c.position}",
        f"  alone        bucket {c.reference.bucket}, step {c.reference.step}: {', '.join(c.reference.kernels)}",
        f"  {d.leg:<12} bucket {c.leg.bucket}, step {c.leg.step}: {', '.join(c.leg.kernels)}",
        f"  of {c.value} ({c.dtype}), {c.num_different} of {c.num_elements} elements of the row differ{more}",
    ]
    return "\n".join(lines)


def _found(found: dict[str, Any] | None) -> str:
    if found is None:
        return "nothing"
    return f"token {found['token']}, log-probability {found['logprob']} ({found['bits']}), rank {found['rank']}"
