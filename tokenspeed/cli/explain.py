"""``tokenspeed explain``: why each kernel was selected, what was rejected and why."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import Any

from tokenspeed.cli.options import Subparsers, add_artifact, add_command, add_json, print_json
from tokenspeed.errors import UsageError

_REPORT = {
    "targets": [
        {
            "target": str,
            "required_features": [str],
            "decisions": [
                {
                    "op": str,
                    "dtype": str,
                    "sizes": {...: int},
                    "ops": [str],
                    "buckets": [str],
                    "chosen": str,
                    "launches?": [
                        {
                            "buckets": [str],
                            "kernels": [{"function": str, "constants": dict, "num_warps?": int, "num_stages?": int}],
                        }
                    ],
                    "candidates": [{"kernel": str, "reasons": [str]}],
                }
            ],
        }
    ]
}
"""What of selection.json is shown. Older builds wrote no ``launches``."""
_PRELUDE = "prelude"
"""Stands for a bucket where an op runs once, before the first step."""
_ROWS = ("token", "sequence", "logit row")
"""What there is a row for, by the size ``rows``: a place in STEP_SCALARS."""


def add_parser(subparsers: Subparsers) -> None:
    parser = add_command(
        subparsers,
        "explain",
        help="say why each kernel was selected and what was rejected",
        description="Print the selection report that the build stored: for each op and target the kernel chosen, and\n"
        "every candidate that lost or was rejected, with the reason. Of a GPU target also what is launched: the\n"
        "function with its constants (tile shape, sizes), warps and pipeline stages; where they were measured, see\n"
        "`tokenspeed tune show`. What holds in some buckets only names them. Of an rl-bitwise artifact also the\n"
        "classes of kernels that were proven to give equal bits.",
        examples="  tokenspeed explain artifacts/smollm2\n"
        "  tokenspeed explain artifacts/smollm2 --op linear --target cpu:x86-64-v3\n"
        "  tokenspeed explain artifacts/smollm2 --json",
    )
    add_artifact(parser)
    parser.add_argument("--target", metavar="TARGET", help="only this target")
    parser.add_argument("--op", metavar="OP", help="only this kind of op, e.g. paged_attention")
    add_json(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    from tokenspeed.artifact import Artifact
    from tokenspeed.equivalence import read_equivalence

    artifact = Artifact.open(args.artifact)
    report = artifact.read_json("selection.json", _REPORT)["targets"]
    found = [
        {**target, "decisions": decisions}
        for target in report
        if args.target in (None, target["target"])
        and (decisions := [d for d in target["decisions"] if args.op in (None, d["op"])])
    ]
    if not found:
        ops = sorted({d["op"] for target in report for d in target["decisions"]})
        targets = ", ".join(target["target"] for target in report)
        raise UsageError("nothing matches", hint=f"the targets are {targets}; the ops are {', '.join(ops)}")
    proofs = {
        target: [proven for proven in classes if args.op in (None, proven["op"])]
        for target, classes in read_equivalence(artifact).items()
    }
    if args.json:
        print_json({"targets": [{**t, "equivalence": proofs.get(t["target"], [])} for t in found]})
        return 0
    for number, target in enumerate(found):
        required = ", ".join(target["required_features"]) or "none"
        separator = "\n" if number else ""
        print(f"{separator}target {target['target']} (features required: {required})")
        buckets = {bucket for decision in target["decisions"] for bucket in decision["buckets"]} - {_PRELUDE}
        for decision in target["decisions"]:
            _print(decision, everywhere=bool(buckets) and buckets <= set(decision["buckets"]))
        for proven in proofs.get(target["target"], []):
            _print_class(proven)
    return 0


def _print(decision: dict[str, Any], *, everywhere: bool) -> None:
    number = len(decision["ops"])
    print(f"\n{decision['op']} {decision['dtype']} ({number} {'op' if number == 1 else 'ops'}; {_sizes(decision)})")
    if not everywhere:
        print(f"  in        {', '.join(decision['buckets'])}")
    for candidate in decision["candidates"]:
        if candidate["kernel"] == decision["chosen"]:
            print(f"  chosen    {candidate['kernel']}")
            _print_launches(decision)
        else:
            print(f"  rejected  {candidate['kernel']}: {'; '.join(candidate['reasons'])}")


def _print_class(proven: Mapping[str, Any]) -> None:
    """A bitwise equivalence class: its members, those in use, those that are not in it."""
    print(f"\nbitwise class of {proven['op']} {proven['dtype']} ({'; '.join(proven['shapes'])})")
    where = f"by {proven['proven_by']} on {', '.join(filter(None, (proven['device'], proven['date'])))}"
    print(f"  proven    {where}: {proven['rows']} rows of each")
    for member in proven["members"]:
        print(f"  {'used' if member in proven['used'] else 'equal':<10}{_member(member)}")
    for member in proven["instead_of"]:
        print(f"  replaced  {_member(member)}: it is not in the class")
    for entry in proven["outside"]:
        print(f"  outside   {_member(entry['member'])}: {entry['reason']}")


def _member(member: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {value}" for name, value in member.items())


def _sizes(decision: dict[str, Any]) -> str:
    """The sizes of the op, with how many rows it has in words."""
    sizes = dict(decision["sizes"])
    rows = sizes.pop("rows", None)
    words = [" ".join(f"{name}={size}" for name, size in sizes.items())] if sizes else []
    if rows is not None:
        words.append(f"a row for each {_ROWS[rows]}" if 0 <= rows < len(_ROWS) else f"rows={rows}")
    return "; ".join(words)


def _print_launches(decision: dict[str, Any]) -> None:
    for launch in decision.get("launches", []):
        where = "" if launch["buckets"] == decision["buckets"] else f"  in {', '.join(launch['buckets'])}"
        for kernel in launch["kernels"]:
            print(f"  launches  {_kernel(kernel)}{where}")


def _kernel(kernel: dict[str, Any]) -> str:
    words = [", ".join(f"{name}={value}" for name, value in kernel["constants"].items())]
    if "num_warps" in kernel and "num_stages" in kernel:
        words.append(f"{kernel['num_warps']} warps, {kernel['num_stages']} stages")
    return f"{kernel['function']}[{'; '.join(words)}]"
