"""``tokenspeed build``: compile a checkpoint into an artifact."""

from __future__ import annotations

import argparse
import sys

from tokenspeed import switches
from tokenspeed.cli.options import (
    Subparsers,
    add_command,
    add_json,
    print_json,
    require_builder,
    unwinding_when_told_to_stop,
)
from tokenspeed.errors import UsageError

_FLAGS = ("model", "dtype", "numerics", "max_model_len", "max_num_seqs", "max_prefill_tokens", "max_logit_rows",
          "page_size", "split_positions", "penalties", *switches.BY_NAME)  # fmt: skip


def add_parser(subparsers: Subparsers) -> None:
    parser = add_command(
        subparsers,
        "build",
        help="compile a checkpoint into an artifact",
        description="Resolve the envelope (what the deployment promises), select a kernel for every op of every shape\n"
        "bucket, lay out memory, write the launch graphs, and pack the weights for the kernels chosen.\n"
        "CHECKPOINT is a Hugging Face directory (safetensors) or a GGUF file. No compiler runs when it is served.",
        examples="  tokenspeed build SmolLM2-135M-Instruct.Q4_1.gguf -o artifacts/smollm2\n"
        "  tokenspeed build ./Llama-3.2-1B -o artifacts/llama --dtype bf16 --max-model-len 8192 \\\n"
        "      --target cpu:x86-64-v4+amx,cpu:x86-64-v3\n"
        "  tokenspeed build ./Llama-3.2-1B -o rl.tar --numerics rl-bitwise --print-envelope\n"
        "  tokenspeed build ./Llama-3.2-1B -o artifacts/llama --recipe my-recipe.toml\n"
        "  tokenspeed build ./Llama-3.1-8B -o artifacts/llama --target cuda:sm_90a,cuda:sm_100a,hip:gfx950\n"
        "  tokenspeed build artifacts/recipes/shapes/llama-3.1-8b -o artifacts/shape --dummy-weights 0",
    )
    parser.add_argument("checkpoint", metavar="CHECKPOINT", help="Hugging Face directory or GGUF file")
    parser.add_argument("-o", "--output", metavar="PATH", help="where the artifact goes; .tar makes it one file"
                        " (default: artifacts/NAME)")  # fmt: skip
    parser.add_argument("--force", action="store_true", help="replace what is at PATH once the new artifact is whole")
    parser.add_argument("--recipe", metavar="FILE", help="a TOML file with an [envelope] table; flags win over it")
    parser.add_argument("--print-envelope", action="store_true",
                        help="print the resolved envelope, who set each field, and stop")  # fmt: skip
    parser.add_argument("--solution", action="append", default=[], metavar="OP=SOLUTION",
                        help="pin the solution of an op, e.g. linear=native; fails if it has no kernel")  # fmt: skip
    parser.add_argument("--dummy-weights", type=int, metavar="SEED",
                        help="random weights for a directory with a config.json alone: to measure a shape")  # fmt: skip
    add_json(parser)
    group = parser.add_argument_group("compiling for GPUs (no GPU is needed)")
    group.add_argument("--jobs", type=int, metavar="N", help="processes that compile (default: one per core)")
    group.add_argument("--no-cache", action="store_true",
                       help="compile every kernel, also those that ~/.cache/tokenspeed holds")  # fmt: skip
    group = parser.add_argument_group("envelope")
    group.add_argument("--target", dest="targets", metavar="TARGETS", help="comma-separated, e.g. cpu:x86-64-v4+bf16,"
                       "cpu:x86-64-v3 or cuda:sm_90a,hip:gfx950 (default: cpu:native, the best here)")  # fmt: skip
    group.add_argument("--dtype", help="float32 or bfloat16 (default: bfloat16)")
    group.add_argument("--numerics", help="auto, or rl-bitwise: only kernels whose rows never depend on the batch")
    group.add_argument("--model-name", dest="model", metavar="NAME", help="name that the server answers to")
    for name, doc in (
        ("max-model-len", "longest context in tokens (default: the checkpoint's)"),
        ("max-num-seqs", "most sequences that run at once (default: 64; 256 with a GPU target)"),
        ("max-prefill-tokens", "most tokens in one step (default: 2048; 8192 with a GPU target)"),
        ("max-logit-rows", "most rows of logits in one step (default: max-num-seqs)"),
        ("page-size", "positions in a KV page (default: 64)"),
        ("split-positions", "attention restarts its sums at multiples of this (default: 1024; 256 with a GPU)"),
    ):
        group.add_argument(f"--{name}", type=int, metavar="N", help=doc)
    group.add_argument("--penalties", choices=("on", "off"), help="off saves the memory that counts tokens: 4 bytes"
                       " times max-num-seqs times the vocabulary (default: on)")  # fmt: skip
    group = parser.add_argument_group(
        "numerics switches",
        "rl-bitwise sets all of them and only tightens; each may be set alone (docs/numerics.md says what each costs)",
    )
    for switch in switches.SWITCHES:
        flag, doc = f"--{switch.name.replace('_', '-')}", f"{switch.doc} [{switch.changes}]"
        if switch.choices == (False, True):
            group.add_argument(flag, choices=("on", "off"), help=doc)
        elif switch.choices:
            group.add_argument(flag, choices=switch.choices, help=doc)
        else:
            group.add_argument(flag, type=int, metavar="N", help=doc)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    with unwinding_when_told_to_stop():
        return _run(args)


def _run(args: argparse.Namespace) -> int:
    builder = require_builder("tokenspeed.compile.build")
    if args.jobs is not None and not 1 <= args.jobs <= 1024:
        raise UsageError(f"--jobs is {args.jobs}; it must lie between 1 and 1024")
    flags = {name: getattr(args, name) for name in (*_FLAGS, "targets")}
    promise = require_builder("tokenspeed.compile.promise")
    solutions = promise.parse_solutions(args.solution)
    if args.print_envelope:
        envelope = builder.resolve_envelope(
            args.checkpoint, flags=flags, recipe=args.recipe, dummy_weights=args.dummy_weights
        )
        promise.pinned_solutions(envelope, solutions)  # refuses pins that the envelope contradicts
        if args.json:
            print_json(switches.annotated(envelope.to_json()))
        else:
            print(envelope.describe())
        return 0
    result = builder.build(
        args.checkpoint,
        args.output,
        recipe=args.recipe,
        solutions=solutions,
        force=args.force,
        dummy_weights=args.dummy_weights,
        workers=args.jobs,
        cache=None if args.no_cache else "default",
        progress=builder.Progress(sys.stderr),
        **flags,
    )
    if args.json:
        print_json(result.to_json())
    else:
        print(f"{result.path}  {size_of(result.bytes)}  sha256:{result.digest}")
    return 0


def size_of(nbytes: int) -> str:
    return f"{nbytes / 1e6:.0f} MB" if nbytes < 10**9 else f"{nbytes / 1e9:.1f} GB"
