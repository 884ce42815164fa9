"""``tokenspeed verify``: is this artifact whole, and does every graph keep its promises?"""

from __future__ import annotations

import argparse
import time

from tokenspeed.cli.options import Subparsers, add_artifact, add_command, add_json, print_json


def add_parser(subparsers: Subparsers) -> None:
    parser = add_command(
        subparsers,
        "verify",
        help="check an artifact: every byte, every graph",
        description="Hash every file against the manifest, decode every LaunchGraph and prove that each access lies\n"
        "inside its region and that no node reads what an unordered node writes. Runs on any machine.",
        examples="  tokenspeed verify artifacts/smollm2\n  tokenspeed verify artifacts/smollm2 --level quick --json",
    )
    add_artifact(parser)
    parser.add_argument("--level", choices=("structure", "quick", "full"), default="full",
                        help="quick skips the weights; structure, all but the manifest (default: full)")  # fmt: skip
    add_json(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    from tokenspeed.artifact import Artifact
    from tokenspeed.verify_artifact import verify_graphs

    started = time.perf_counter()
    artifact = Artifact.open(args.artifact)
    hashed = artifact.verify(args.level)
    graphs, nodes = verify_graphs(artifact)
    seconds = time.perf_counter() - started
    if args.json:
        print_json({"ok": True, "digest": artifact.digest, "level": args.level, "files": len(artifact.manifest.files),
                    "bytes_hashed": hashed, "graphs": graphs, "nodes": nodes, "seconds": seconds})  # fmt: skip
    else:
        print(f"{args.artifact}: ok ({len(artifact.manifest.files)} files, {hashed / 1e6:.0f} MB hashed,"
              f" {graphs} graphs with {nodes} nodes verified in {seconds:.2f} s)")  # fmt: skip
        print(f"sha256:{artifact.digest}")
    return 0
