"""``tokenspeed prove``: show on a device which kernels give equal bits, with no compiler on the GPU machine."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from tokenspeed.cli import packs
from tokenspeed.cli.options import Subparsers, add_command, print_json, require_builder
from tokenspeed.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tokenspeed.compile.class_tables import Merged
    from tokenspeed.runtime.proving import CaseResult

_WALK = """\
  tokenspeed prove pack --target cuda:sm_90a -o hopper.provepack      on any machine
  tokenspeed prove run hopper.provepack -o hopper.h200.json           on the GPU, base install
  tokenspeed prove merge hopper.h200.json                             in the checkout that builds
  tokenspeed prove show --target cuda:sm_90a                          what rl-bitwise builds may use
  tokenspeed prove cpu                                                CPUs, for builds elsewhere"""


def add_parser(subparsers: Subparsers) -> None:
    packs.add_walk(
        subparsers,
        "prove",
        (_add_pack, _add_run, _add_merge, _add_cpu, _add_show),
        help="show on a device which kernels give equal bits",
        description="A build with --numerics rl-bitwise uses kernels only that were shown to give equal bits, on data\n"
        "on which another order of a sum gives others. On CPUs a build shows it itself. For GPUs this does, in\n"
        "three steps: pack compiles the kernels, run compares them on the GPU, merge puts the classes where\n"
        "builds find them. Only pack needs a compiler, only run needs a GPU.",
        examples=_WALK,
    )


def _add_pack(steps: Subparsers) -> None:
    parser = add_command(
        steps,
        "pack",
        help="compile what is to be compared (any machine)",
        description="Compile all kernels that a build for the target may choose from, and write them with their\n"
        "launch graphs and the probes into one file.",
        examples="  tokenspeed prove pack --target cuda:sm_90a -o hopper.provepack\n"
        "  tokenspeed prove pack --target cuda:sm_90a -o norms.provepack --op rms_norm,sample",
    )
    packs.add_place(parser, "prove")
    parser.add_argument("--op", metavar="OP,...", help="kinds of op to compare (default: all that sum)")
    packs.add_compiling(parser, _pack)


def _add_run(steps: Subparsers) -> None:
    parser = add_command(
        steps,
        "run",
        help="compare the kernels of a pack on this machine's GPU (base install, no compiler)",
        description="Run every kernel of a pack on its probes: rows alone, among others, at other places, in buckets\n"
        "of other sizes. Kernels whose rows are equal to the last bit make a class. What was compared before\n"
        "an error is written too.",
        examples="  tokenspeed prove run hopper.provepack -o hopper.h200.json",
    )
    packs.add_packed(parser, "prove")
    packs.add_device(parser, _run)


def _add_merge(steps: Subparsers) -> None:
    parser = add_command(
        steps,
        "merge",
        help="put the classes into the files that builds use",
        description="Put the class of every op into the file of its architecture, kernels/tuning/ARCH.classes.json. A\n"
        "later proof replaces an earlier one of the same op, dtype and sizes.",
        examples="  tokenspeed prove merge hopper.h200.json",
    )
    packs.add_results(parser, "prove")
    packs.add_tables(parser, "files", _merge)


def _add_cpu(steps: Subparsers) -> None:
    parser = add_command(
        steps,
        "cpu",
        help="compare the CPU kernels here, for builds on machines that cannot",
        description="Compare the kernels of CPU targets on this machine, and put the classes into the files of their\n"
        "architectures. Builds need that only for targets that the machine they run on does not run.",
        examples="  tokenspeed prove cpu\n  tokenspeed prove cpu --target cpu:x86-64-v4+amx",
    )
    parser.add_argument("--target", metavar="TARGET,...", help="CPU targets (default: all that this machine runs)")
    packs.add_tables(parser, "files", _cpu)


def _add_show(steps: Subparsers) -> None:
    parser = add_command(
        steps,
        "show",
        help="print the classes of a target",
        description="Print what was proven for a target: of every op the members of its class, on which device and\n"
        "when, and whether the kernels have changed since.",
        examples="  tokenspeed prove show --target cuda:sm_90a",
    )
    parser.add_argument("--target", metavar="TARGET", required=True, help="e.g. cuda:sm_90a")
    packs.add_tables(parser, "files", _show)


# --- the steps ------------------------------------------------------------------------------------


def _pack(args: argparse.Namespace) -> int:
    return packs.pack(args, "tokenspeed.compile.proving")


def _run(args: argparse.Namespace) -> int:
    from tokenspeed.proof_pack import ProofPack
    from tokenspeed.runtime.proving import ProofResults, compare

    with packs.opened(args, ProofPack) as (pack, gpu):
        results = ProofResults(pack, gpu)
        with packs.kept(args, results.cases, results.to_json):
            compare(results, _report)
        if not args.json:
            _print_results(results.cases)
            print(f"{Path(args.output)}: {len(results.cases)} cases on {gpu.name} in {results.seconds:.0f} s")
    return 0


def _report(done: int, total: int, result: CaseResult) -> None:
    print(f"prove: case {done} of {total}, {result.case}", file=sys.stderr, flush=True)


def _print_results(cases: list[CaseResult]) -> None:
    for result in cases:
        sizes = "+".join(str(len(members)) for members in result.classes) or "0"
        print(f"{result.case}: {sizes} equal, {len(result.excluded)} out, {result.rows} rows of each")
        for member, reason in result.excluded:
            print(f"  out: {_text(member)}: {reason}")


def _text(member: object) -> str:
    return json.dumps(member).strip("{}").replace('"', "")


def _merge(args: argparse.Namespace) -> int:
    tables = require_builder("tokenspeed.compile.class_tables")
    return _print_merged(args, tables.merge(list(map(Path, args.results)), packs.tables_folder(args)))


def _print_merged(args: argparse.Namespace, merged: Sequence[Merged]) -> int:
    packs.print_merged(args, merged, lambda part: f"{part.total} classes for {part.target}")
    if not args.json:
        for problem in (problem for part in merged for problem in part.split):
            print(f"warning: {problem}", file=sys.stderr)
    return 0


def _cpu(args: argparse.Namespace) -> int:
    from tokenspeed.target import Target, missing_flags, runnable_targets

    proofs, tables = (
        require_builder("tokenspeed.compile.cpu_proofs"),
        require_builder("tokenspeed.compile.class_tables"),
    )
    targets = list(map(Target.parse, args.target.split(","))) if args.target else list(runnable_targets())
    for target in targets:
        if target.is_gpu or missing_flags(target):
            lacks = "it is a GPU" if target.is_gpu else f"this machine lacks {', '.join(missing_flags(target))}"
            raise UsageError(f"need CPU targets that this machine runs, have {target}: {lacks}")
    folder = packs.tables_folder(args)
    merged = [tables.merge_classes(target, proofs.prove_target(target), folder) for target in targets]
    return _print_merged(args, merged)


def _show(args: argparse.Namespace) -> int:
    from tokenspeed.target import Target

    target = Target.parse(args.target)
    tables = require_builder("tokenspeed.compile.class_tables")
    shown = tables.shown(target, packs.tables_folder(args))
    if args.json:
        print_json([{**proven.to_json(), "state": state} for proven, state in shown])
        return 0
    if not shown:
        print(f"nothing was proven for {target}: rl-bitwise builds for it fail", file=sys.stderr)
    for proven, state in shown:
        sizes = "".join(f" {name}={size}" for name, size in sorted(proven.key.items()))
        print(f"{proven.op} {proven.dtype}{sizes}: {len(proven.members)} members equal over {proven.rows} rows of each"
              f" ({proven.device}, {proven.date}): {state}")  # fmt: skip
        for member in proven.members:
            print(f"  {_text(member)}")
        for member, reason in proven.outside:
            print(f"  out: {_text(member)}: {reason}")
    return 0
