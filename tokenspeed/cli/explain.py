"""``tokenspeed explain``: why each kernel was selected, what was rejected and why."""

from __future__ import annotations

import argparse
import json

from tokenspeed.cli.options import Subparsers, add_artifact, add_command, add_json, print_json
from tokenspeed.errors import UsageError


def add_parser(subparsers: Subparsers) -> None:
    parser = add_command(
        subparsers,
        "explain",
        help="say why each kernel was selected and what was rejected",
        description="Print the selection report that the build stored: for each op and target the kernel chosen, and\n"
        "every candidate that lost or was rejected, with the reason.",
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
    report = json.loads(artifact.read("selection.json"))
    entries = [e for e in report["selections"] if args.target in (None, e["target"]) and args.op in (None, e["op"])]
    if not entries:
        ops = sorted({e["op"] for e in report["selections"]})
        targets = sorted({e["target"] for e in report["selections"]})
        raise UsageError("nothing matches", hint=f"ops: {', '.join(ops)}; targets: {', '.join(targets)}")
    if args.json:
        print_json({**report, "selections": entries})
        return 0
    for entry in entries:
        print(f"{entry['op']} on {entry['target']}: {entry['chosen']}")
        for candidate in entry["candidates"]:
            mark = "chosen  " if candidate["kernel"] == entry["chosen"] else "rejected"
            print(f"  {mark} {candidate['kernel']:<36}{candidate['reason']}")
    return 0
