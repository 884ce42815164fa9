"""``tokenspeed inspect``: what is in an artifact."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from tokenspeed.cli.options import Subparsers, add_artifact, add_command, add_json, print_json
from tokenspeed.equivalence import read_equivalence
from tokenspeed.errors import ArtifactError, ProgramError, UsageError

if TYPE_CHECKING:
    from tokenspeed.artifact import Artifact, Manifest, TargetSection

_OPS = [{"name": str, "kind": str, "inputs": [str], "outputs": [str]}]
_PROGRAM = {"ops": _OPS, "prelude?": _OPS}
"""What of program.json is shown."""


def add_parser(subparsers: Subparsers) -> None:
    parser = add_command(
        subparsers,
        "inspect",
        help="show what is in an artifact",
        description="Show the model, the envelope, and in a few lines for each target its buckets, binaries, weights\n"
        "and memory; with --full every bucket and every file. With --graph, print one LaunchGraph node by node;\n"
        "with --program, the ops of the whole-model IR. --json is always all of the manifest.",
        examples="  tokenspeed inspect artifacts/smollm2\n"
        "  tokenspeed inspect artifacts/smollm2 --full\n"
        "  tokenspeed inspect artifacts/smollm2 --graph graphs/cpu-x86-64-v4/decode-1.tslg\n"
        "  tokenspeed inspect artifacts/smollm2 --json | jq .targets[0].buckets",
    )
    add_artifact(parser)
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--full", action="store_true", help="list every bucket and every file")
    what.add_argument("--graph", metavar="FILE", help="print this LaunchGraph of the artifact")
    what.add_argument("--program", action="store_true", help="print the Program's ops")
    add_json(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    from tokenspeed.artifact import Artifact
    from tokenspeed.graph import LaunchGraph

    artifact = Artifact.open(args.artifact)
    if args.graph:
        known = [graph for section in artifact.manifest.targets for graph in section.graphs]
        if args.graph not in known:
            raise UsageError(f"the artifact has no graph {args.graph!r}", hint=f"it has {', '.join(known)}")
        try:
            graph = LaunchGraph.decode(artifact.read(args.graph))
        except ProgramError as e:
            raise ArtifactError(f"{artifact.path}: {args.graph}: {e.message}", hint="rebuild the artifact") from None
        if args.json:
            print_json(graph.to_json())
        else:
            print(graph)
    elif args.program:
        program = artifact.read_json("program.json", _PROGRAM)
        if args.json:
            print_json(program)
        else:
            for op in (*program.get("prelude", ()), *program["ops"]):
                print(f"{op['name']:<32}{op['kind']:<20}{', '.join(op['inputs'])} -> {', '.join(op['outputs'])}")
    elif args.json:
        print_json({"digest": artifact.digest, **json.loads(artifact.read("manifest.json"))})
    else:
        _print(artifact, full=args.full)
    return 0


def _print(artifact: Artifact, *, full: bool) -> None:
    manifest, model, proofs = artifact.manifest, artifact.manifest.model, read_equivalence(artifact)
    print(f"{artifact.path}\n  sha256:{artifact.digest}\n  format {manifest.format_version}, built by tokenspeed"
          f" {manifest.tokenspeed_version}")  # fmt: skip
    print(f"\nmodel {model.name}: {model.architecture}, {model.num_parameters / 1e6:.1f} M parameters,"
          f" {model.num_layers} layers, hidden {model.hidden_size}, {model.num_heads} heads ({model.num_kv_heads} KV)"
          f" of {model.head_dim}, vocabulary {model.vocab_size}")  # fmt: skip
    print(f"  from {model.checkpoint_kind} sha256:{model.checkpoint_sha256}")
    print("\nenvelope")
    print("\n".join("  " + line for line in manifest.envelope.describe(tree=full).splitlines()))
    for section in manifest.targets:
        print(f"\ntarget {section.target}: kernels {section.kernel_library} ABI {section.kernel_abi}")
        if section.target in proofs:
            _print_proofs(proofs[section.target])
        (_print_buckets if full else _print_summary)(manifest, section)
    if full:
        print("\nfiles")
        for name, entry in sorted(manifest.files.items()):
            print(f"  {entry.bytes:>12}  {entry.sha256[:16]}  {name}")
    else:
        print(f"\n{len(manifest.files)} files of {_megabytes(sum(f.bytes for f in manifest.files.values()))};"
              " every bucket and file: --full")  # fmt: skip


def _print_proofs(classes: Sequence[Mapping[str, Any]]) -> None:
    by = sorted({f"by {c['proven_by']} on {', '.join(filter(None, (c['device'], c['date'])))}" for c in classes})
    print(f"  proofs    {len(classes)} bitwise classes, proven {'; '.join(by)} (`tokenspeed explain`)")


def _print_buckets(_: Manifest, section: TargetSection) -> None:
    sizes = {"weights": section.weights_bytes, "arena": section.arena_bytes, "io": section.io_bytes,
             "state": section.state_bytes, "kv page": section.kv_page_bytes}  # fmt: skip
    for region, nbytes in sizes.items():
        print(f"  {region:<8}{nbytes / 1e6:>10.2f} MB")
    if section.prelude is not None:
        print(f"  prelude{' ' * 46}{section.prelude.graph}")
    for entry in section.buckets:
        bucket = entry.bucket
        print(f"  bucket {bucket.kind:<7} {bucket.num_tokens:>6} tokens {bucket.num_seqs:>5} sequences"
              f" {bucket.num_logit_rows:>5} logit rows  {entry.graph}")  # fmt: skip


def _print_summary(manifest: Manifest, section: TargetSection) -> None:
    def of(names: Iterable[str]) -> str:
        """The size of files; those that a damaged artifact lacks count nothing."""
        return _megabytes(sum(manifest.files[name].bytes for name in set(names) if name in manifest.files))

    kinds: dict[str, list[int]] = {}
    for entry in section.buckets:
        kinds.setdefault(entry.bucket.kind.value, []).append(entry.bucket.num_tokens)
    buckets = ", ".join(
        f"{len(tokens)} {kind} (tokens: {min(tokens)}{f' to {max(tokens)}' if len(tokens) > 1 else ''})"
        for kind, tokens in kinds.items()
    )
    print(f"  buckets   {buckets or 'none'}; graphs of {of(section.graphs)}")
    if section.binaries:
        print(f"  binaries  {len(section.binaries)} of {of(binary.file for binary in section.binaries)}")
    print(f"  weights   {_megabytes(section.weights_bytes)} in {section.weights}")
    print(f"  memory    arena {_megabytes(section.arena_bytes)}, io {_megabytes(section.io_bytes)},"
          f" state {_megabytes(section.state_bytes)}, KV page {_megabytes(section.kv_page_bytes)}")  # fmt: skip


def _megabytes(nbytes: int) -> str:
    return f"{nbytes / 1e6:.2f} MB"
