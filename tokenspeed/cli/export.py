"""``tokenspeed export``: write a checkpoint's Program in another format."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from tokenspeed.cli.options import Subparsers, add_command, add_json, print_json, require_builder
from tokenspeed.errors import UsageError


def add_parser(subparsers: Subparsers) -> None:
    parser = add_command(
        subparsers,
        "export",
        help="write the Program as ONNX, for inspection and cross-checking",
        description="Write a checkpoint's whole-model Program as an ONNX model of standard ops: token_ids and\n"
        "positions in, logits of every position out. It opens in Netron and runs in ONNX Runtime.",
        examples="  tokenspeed export --onnx smollm2.onnx SmolLM2-135M-Instruct.Q4_1.gguf",
    )
    parser.add_argument("checkpoint", metavar="CHECKPOINT", help="Hugging Face directory or GGUF file")
    parser.add_argument("--onnx", metavar="FILE", required=True, help="the ONNX file to write")
    parser.add_argument("--force", action="store_true", help="replace FILE if it exists")
    parser.add_argument("--max-model-len", type=int, metavar="N", help="longest sequence (default: the checkpoint's)")
    add_json(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    path = Path(args.onnx)
    if path.exists() and not args.force:
        raise UsageError(f"{path} exists already", hint="choose another file, or pass --force to replace it")
    if path.exists() and not path.is_file():
        raise UsageError(f"{path} is no file: --force replaces only files", hint="choose another file")
    builder = require_builder("tokenspeed.compile.build")
    builder.export_onnx(args.checkpoint, path, max_model_len=args.max_model_len, progress=builder.Progress(sys.stderr))
    if args.json:
        print_json({"path": str(path), "bytes": path.stat().st_size})
    else:
        print(path)
    return 0
