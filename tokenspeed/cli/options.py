"""Options that several commands share, and their help."""

from __future__ import annotations

import argparse
import importlib
import json
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from tokenspeed.errors import UsageError

if TYPE_CHECKING:
    from tokenspeed.runtime.loader import LoadOptions

Subparsers = Any  # argparse does not name the type that add_subparsers returns


def add_command(subparsers: Subparsers, name: str, *, help: str, description: str, examples: str) -> Any:
    """One subcommand with a description and an examples section."""
    return subparsers.add_parser(
        name,
        help=help,
        description=description,
        epilog=f"examples:\n{examples}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )


def add_json(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print JSON on stdout, for machines")


def add_artifact(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("artifact", metavar="ARTIFACT", help="an artifact directory or .tar made by `tokenspeed build`")


def add_load_options(parser: argparse.ArgumentParser) -> None:
    """Options of every command that loads an artifact."""
    group = parser.add_argument_group("loading")
    group.add_argument("--target", metavar="TARGET", help="which of the artifact's targets to run (default: the best)")
    group.add_argument("--device", type=int, metavar="N", help="which GPU, by the driver's number (default: the first)")
    group.add_argument("--threads", type=int, metavar="N", help="worker threads (default: every core allowed)")
    group.add_argument("--pin", action="store_true", help="pin worker threads to cores")
    group.add_argument(
        "--kv-gib", type=float, metavar="GIB",
        help="memory for KV pages (default: what is free on a GPU, a quarter of it on a CPU)",
    )  # fmt: skip
    group.add_argument(
        "--host-kv-gib", type=float, default=0.0, metavar="GIB",
        help="host memory for cached pages that find no room on the device (default: none)",
    )  # fmt: skip
    group.add_argument(
        "--verify",
        choices=("structure", "quick", "full"),
        default="quick",
        help="how much of the artifact to hash first (default: quick, everything but weights)",
    )


def add_trace(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--trace", metavar="FILE", help="write where the time went since exec, for https://ui.perfetto.dev"
    )


def load_options(args: argparse.Namespace, *, settle: bool = True) -> LoadOptions:
    """LoadOptions of the parsed arguments; ``settle`` false for a command that should answer at once."""
    from tokenspeed.runtime.loader import LoadOptions
    from tokenspeed.target import Target

    if args.threads is not None and not 1 <= args.threads <= 1024:
        raise UsageError(f"--threads is {args.threads}; it must lie between 1 and 1024")
    if args.device is not None and args.device < 0:
        raise UsageError(f"--device is {args.device}; GPUs are numbered from 0")
    return LoadOptions(
        target=Target.parse(args.target) if args.target else None,
        device=args.device,
        threads=args.threads,
        kv_gib=args.kv_gib,
        host_kv_gib=args.host_kv_gib,
        verify=args.verify,
        pin=args.pin,
        settle=settle,
    )


def print_json(data: Any) -> None:
    """Indented JSON on stdout; with escapes where stdout's encoding cannot hold the text itself."""
    text = json.dumps(data, indent=2, ensure_ascii=False)
    try:
        text.encode(sys.stdout.encoding if sys.stdout is not None else "utf-8")
    except UnicodeEncodeError:
        text = json.dumps(data, indent=2)
    print(text)


@contextmanager
def unwinding_when_told_to_stop() -> Iterator[None]:
    """SIGTERM and SIGHUP end a command as an error does, so that what it had half written goes."""

    def stop(number: int, frame: object) -> None:
        raise SystemExit(128 + number)

    before = {number: signal.signal(number, stop) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def require_builder(module: str) -> Any:
    """Import a module of the builder, or say how to install what it needs."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as e:
        if e.name and e.name.startswith("tokenspeed"):
            raise
        raise UsageError(
            f"this command needs the builder, and its package {e.name!r} is not installed",
            hint="install it with `pip install 'tokenspeed[build]'`",
        ) from None
