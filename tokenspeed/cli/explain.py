"""``tokenspeed explain``: why each kernel was selected, what was rejected and why."""

from __future__ import annotations

import argparse
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
                    "candidates": [{"kernel": str, "reasons": [str]}],
                }
            ],
        }
    ]
}
"""What of selection.json is shown."""


def add_parser(subparsers: Subparsers) -> None:
    parser = add_command(
        subparsers,
        "explain",
        help="say why each kernel was selected and what was rejected",
        description="Print the selection report that the build stored: for each op and target the kernel chosen, and\n"
        "every candidate that lost or was rejected, with the reason. A choice that holds in some buckets only names\n"
        "them. Tile shapes of GPU kernels are another matter: `tokenspeed tune show`.",
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
    if args.json:
        print_json({"targets": found})
        return 0
    for target in found:
        required = ", ".join(target["required_features"]) or "none"
        print(f"target {target['target']} (features required: {required})")
        buckets = {bucket for decision in target["decisions"] for bucket in decision["buckets"]}
        for decision in target["decisions"]:
            _print(decision, everywhere=buckets <= set(decision["buckets"]))
    return 0


def _print(decision: dict[str, Any], *, everywhere: bool) -> None:
    sizes = " ".join(f"{name}={size}" for name, size in decision["sizes"].items())
    number = len(decision["ops"])
    print(f"\n{decision['op']} {decision['dtype']} ({number} {'op' if number == 1 else 'ops'}; {sizes})")
    if not everywhere:
        print(f"  in        {', '.join(decision['buckets'])}")
    for candidate in decision["candidates"]:
        if candidate["kernel"] == decision["chosen"]:
            print(f"  chosen    {candidate['kernel']}")
        else:
            print(f"  rejected  {candidate['kernel']}: {'; '.join(candidate['reasons'])}")
