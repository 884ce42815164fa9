"""The steps of commands that walk by packs, ``tune`` and ``prove``: pack on any machine, run on a GPU, merge."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from tokenspeed.cli.options import (
    Subparsers,
    add_command,
    add_json,
    print_json,
    require_builder,
    unwinding_when_told_to_stop,
)
from tokenspeed.errors import UsageError

if TYPE_CHECKING:
    from tokenspeed.pack_file import PackFile
    from tokenspeed.runtime.places import Gpu

    _Pack = TypeVar("_Pack", bound=PackFile[Any])

_Run = Callable[[argparse.Namespace], int]


def add_walk(
    subparsers: Subparsers,
    name: str,
    steps: Sequence[Callable[[Subparsers], None]],
    *,
    help: str,
    description: str,
    examples: str,
) -> None:
    """The command ``name``, whose ``steps`` add its subcommands."""
    parser = add_command(subparsers, name, help=help, description=description, examples=examples)
    subcommands = parser.add_subparsers(dest="step", metavar="STEP", required=True)
    for add_step in steps:
        add_step(subcommands)


def add_place(parser: argparse.ArgumentParser, to: str) -> None:
    """Where a pack goes, and which GPU it is made to ``to``."""
    parser.add_argument("-o", "--output", metavar="PACK", required=True, help="where the pack goes")
    parser.add_argument("--target", metavar="TARGET", required=True, help=f"the GPU to {to} for, e.g. cuda:sm_90a")


def add_compiling(parser: argparse.ArgumentParser, run: _Run) -> None:
    """How a pack is compiled; ends the step's options."""
    parser.add_argument("--jobs", type=int, metavar="N", help="processes that compile (default: one per core)")
    parser.add_argument("--no-cache", action="store_true",
                        help="compile every kernel, also those that ~/.cache/tokenspeed holds")  # fmt: skip
    parser.add_argument("--force", action="store_true", help="replace the file at PACK once the new one is whole")
    _end(parser, run)


def add_packed(parser: argparse.ArgumentParser, command: str) -> None:
    """Which pack of ``command`` is run, and where the results go."""
    parser.add_argument("pack", metavar="PACK", help=f"a file made by `tokenspeed {command} pack`")
    parser.add_argument("-o", "--output", metavar="FILE", required=True, help="where the results go, as JSON")


def add_device(parser: argparse.ArgumentParser, run: _Run) -> None:
    """Which GPU runs a pack; ends the step's options."""
    parser.add_argument(
        "--device", type=int, metavar="N", help="which GPU, by the driver's number (default: the first)"
    )
    _end(parser, run)


def add_results(parser: argparse.ArgumentParser, command: str) -> None:
    """Which results of ``command`` are merged."""
    parser.add_argument("results", metavar="FILE", nargs="+", help=f"results of `tokenspeed {command} run`")


def add_tables(parser: argparse.ArgumentParser, what: str, run: _Run) -> None:
    """Where the files that builds read are, called ``what``; ends the step's options."""
    parser.add_argument(
        "--tables", metavar="FOLDER", help=f"where the {what} are (default: those of this installation)"
    )
    _end(parser, run)


def _end(parser: argparse.ArgumentParser, run: _Run) -> None:
    add_json(parser)
    parser.set_defaults(run=run)


def tables_folder(args: argparse.Namespace) -> Path | None:
    """The folder named by --tables; None for that of this installation."""
    return Path(args.tables) if args.tables else None


# --- the steps ------------------------------------------------------------------------------------


def pack(args: argparse.Namespace, module: str, *sources: Any, **options: Any) -> int:
    """Make a pack by ``module.pack(*sources, ...)``, and say what is in it."""
    from tokenspeed.target import Target

    target = Target.parse(args.target)
    builder, build = require_builder(module), require_builder("tokenspeed.compile.build")
    if args.jobs is not None and not 1 <= args.jobs <= 1024:
        raise UsageError(f"--jobs is {args.jobs}; it must lie between 1 and 1024")
    with unwinding_when_told_to_stop():
        result = builder.pack(
            *sources,
            args.output,
            target,
            ops=args.op.split(",") if args.op else None,
            force=args.force,
            workers=args.jobs,
            cache=None if args.no_cache else build.default_cache(),
            progress=build.Progress(sys.stderr),
            **options,
        )
    for kernel, reason in result.failures.items():
        print(f"left out: {kernel}: {reason.splitlines()[0]}", file=sys.stderr)
    if args.json:
        print_json(result.to_json())
    else:
        print(f"{result.path}  {result.nbytes / 1e6:.1f} MB  sha256:{result.digest}")
        print(f"{', '.join(f'{count} {name}' for name, count in result.counts.items())} for {target}")
    return 0


@contextmanager
def opened(args: argparse.Namespace, kind: Callable[[Path], _Pack]) -> Iterator[tuple[_Pack, Gpu]]:
    """The pack of a run, whole, and the GPU that runs it, while it is open; there is a folder for the results."""
    from tokenspeed.runtime.pack_device import find_gpu
    from tokenspeed.target import Target

    folder = Path(args.output).parent
    if not folder.is_dir():
        raise UsageError(f"there is no folder {folder} for the results", hint="make it, or choose another with -o")
    with kind(Path(args.pack)) as found:
        gpu = find_gpu(Target.parse(found.manifest.target), args.device, found.made_by)
        found.verify()
        yield found, gpu


@contextmanager
def kept(args: argparse.Namespace, cases: Sequence[object], to_json: Callable[[], dict[str, Any]]) -> Iterator[None]:
    """Write the results of a run however it ends, if it has come to any ``cases``; print them if that is asked as JSON
    and it ended well."""
    from tokenspeed.pack_file import write_whole

    try:
        with unwinding_when_told_to_stop():
            yield
    finally:
        if cases:
            write_whole(Path(args.output), (json.dumps(to_json(), indent=1) + "\n").encode())
    if args.json:
        print_json(to_json())


def print_merged(args: argparse.Namespace, merged: Sequence[Any], line: Callable[[Any], str]) -> int:
    """Say what became of each file, in a line or as JSON."""
    if args.json:
        print_json([part.to_json() for part in merged])
    else:
        for part in merged:
            print(f"{part.path}: {part.added} added, {part.replaced} replaced, {line(part)}")
    return 0
