"""``tokenspeed tune``: choose tile shapes by measurement, with no compiler on the GPU machine."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

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
    from tokenspeed.runtime.tuning import Outcome

_WALK = """\
  tokenspeed tune pack ./Llama-3.1-8B --target cuda:sm_90a -o llama.tunepack     on any machine
  tokenspeed tune run llama.tunepack -o llama.h200.json                          on the GPU, base install
  tokenspeed tune merge llama.h200.json                                          in the checkout that builds
  tokenspeed tune show --target cuda:sm_90a                                      what builds now use"""


def add_parser(subparsers: Subparsers) -> None:
    parser = add_command(
        subparsers,
        "tune",
        help="choose tile shapes by measurement",
        description="Kernels come in many tile shapes that give the same bits at different speeds. Builds take theirs\n"
        "from tables, one per architecture; this makes them, in three steps: pack compiles every candidate for\n"
        "the shapes of a model, run times them on the GPU with cold caches, merge puts the fastest into the\n"
        "table. Only pack needs a compiler, only run needs a GPU.",
        examples=_WALK,
    )
    steps = parser.add_subparsers(dest="step", metavar="STEP", required=True)
    _add_pack(steps)
    _add_run(steps)
    _add_merge(steps)
    _add_show(steps)


def _add_pack(steps: Subparsers) -> None:
    parser = add_command(
        steps,
        "pack",
        help="compile the candidates for a model's shapes (any machine)",
        description="Compile every candidate for the shapes that a build of the models would run, and write them with\n"
        "their launch graphs into one file. Of a directory only config.json is read: weights do not matter.",
        examples="  tokenspeed tune pack ./Llama-3.1-8B --target cuda:sm_90a -o llama.tunepack\n"
        "  tokenspeed tune pack artifacts/recipes/shapes/llama-3.1-8b SmolLM2.gguf --target cuda:sm_100a \\\n"
        "      -o both.tunepack --rows 1,8,64,256 --op linear,linear_add",
    )
    parser.add_argument(
        "checkpoint", metavar="CHECKPOINT", nargs="+",
        help="directory with a config.json, or GGUF file; several share what they have in common",
    )  # fmt: skip
    parser.add_argument("-o", "--output", metavar="PACK", required=True, help="where the pack goes")
    parser.add_argument("--target", metavar="TARGET", required=True, help="the GPU to tune for, e.g. cuda:sm_90a")
    parser.add_argument("--rows", metavar="M,...", help="rows to tune for (default: the sizes of a build's buckets)")
    parser.add_argument("--op", metavar="OP,...", help="kinds of op to tune (default: all that have candidates)")
    parser.add_argument("--max-num-seqs", type=int, metavar="N", help="as for build, for the buckets (default: 256)")
    parser.add_argument("--max-prefill-tokens", type=int, metavar="N", help="likewise (default: 8192)")
    parser.add_argument("--jobs", type=int, metavar="N", help="processes that compile (default: one per core)")
    parser.add_argument("--no-cache", action="store_true",
                        help="compile every kernel, also those that ~/.cache/tokenspeed holds")  # fmt: skip
    parser.add_argument("--force", action="store_true", help="replace the file at PACK once the new one is whole")
    add_json(parser)
    parser.set_defaults(run=_pack)


def _add_run(steps: Subparsers) -> None:
    parser = add_command(
        steps,
        "run",
        help="time a pack on this machine's GPU (base install, no compiler)",
        description="Time every candidate of a pack. Each is one graph of many calls in a row that read other weights\n"
        "each time, more than the cache holds; candidates of a shape take turns, and those whose results\n"
        "differ by a bit from the others' are out. What was measured before an error is written too.",
        examples="  tokenspeed tune run llama.tunepack -o llama.h200.json\n"
        "  tokenspeed tune run llama.tunepack -o llama.h200.json --seconds 90 --device 1",
    )
    parser.add_argument("pack", metavar="PACK", help="a file made by `tokenspeed tune pack`")
    parser.add_argument("-o", "--output", metavar="FILE", required=True, help="where the results go, as JSON")
    parser.add_argument(
        "--seconds", type=float, metavar="N",
        help="about how long to measure; what is not reached is skipped (default: as long as it takes)",
    )  # fmt: skip
    parser.add_argument(
        "--device", type=int, metavar="N", help="which GPU, by the driver's number (default: the first)"
    )
    add_json(parser)
    parser.set_defaults(run=_run)


def _add_merge(steps: Subparsers) -> None:
    parser = add_command(
        steps,
        "merge",
        help="put results into the tables that builds use",
        description="Put the fastest candidate of every case into the table of its architecture, with the runner-up.\n"
        "Later measurements replace earlier ones of the same shape on the same kind of device.",
        examples="  tokenspeed tune merge llama.h200.json smollm2.h200.json\n"
        "  tokenspeed tune merge llama.h200.json --tables ./tables",
    )
    parser.add_argument("results", metavar="FILE", nargs="+", help="results of `tokenspeed tune run`")
    _add_tables(parser)
    add_json(parser)
    parser.set_defaults(run=_merge)


def _add_show(steps: Subparsers) -> None:
    parser = add_command(
        steps,
        "show",
        help="print the table of a target",
        description="Print what builds for a target use: the tile shape of every measured case, its time, what share\n"
        "that is of the data sheet's read bandwidth or matmul rate, the runner-up, and where it was measured.",
        examples="  tokenspeed tune show --target cuda:sm_90a\n"
        "  tokenspeed tune show --target cuda:sm_90a --op linear_add --json",
    )
    parser.add_argument("--target", metavar="TARGET", required=True, help="e.g. cuda:sm_90a")
    parser.add_argument("--op", metavar="OP,...", help="only these kinds of op")
    _add_tables(parser)
    add_json(parser)
    parser.set_defaults(run=_show)


def _add_tables(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--tables", metavar="FOLDER", help="where the tables are (default: those of this installation)")


# --- the steps ------------------------------------------------------------------------------------


def _pack(args: argparse.Namespace) -> int:
    from tokenspeed.target import Target

    target, rows = Target.parse(args.target), _numbers("--rows", args.rows)
    builder, build = require_builder("tokenspeed.compile.tuning"), require_builder("tokenspeed.compile.build")
    if args.jobs is not None and not 1 <= args.jobs <= 1024:
        raise UsageError(f"--jobs is {args.jobs}; it must lie between 1 and 1024")
    with unwinding_when_told_to_stop():
        result = builder.pack(
            args.checkpoint,
            args.output,
            target,
            rows=rows,
            ops=args.op.split(",") if args.op else None,
            force=args.force,
            workers=args.jobs,
            cache=None if args.no_cache else build.default_cache(),
            progress=build.Progress(sys.stderr),
            max_num_seqs=args.max_num_seqs,
            max_prefill_tokens=args.max_prefill_tokens,
        )
    for kernel, reason in result.failures.items():
        print(f"left out: {kernel}: {reason.splitlines()[0]}", file=sys.stderr)
    if args.json:
        print_json(result.to_json())
    else:
        print(f"{result.path}  {result.nbytes / 1e6:.1f} MB  sha256:{result.digest}")
        print(f"{result.shapes} shapes, {result.cases} cases, {result.candidates} candidates,"
              f" {result.binaries} binaries for {target}")  # fmt: skip
    return 0


def _numbers(option: str, text: str | None) -> list[int] | None:
    if text is None:
        return None
    try:
        numbers = [int(word) for word in text.split(",")]
    except ValueError:
        numbers = []
    if not numbers or not all(0 < number < 1 << 31 for number in numbers):
        raise UsageError(f"{option} is {text!r}; it must be whole numbers above 0, e.g. 1,8,64")
    return numbers


def _run(args: argparse.Namespace) -> int:
    from tokenspeed.runtime.tuning import Results, find_gpu, measure
    from tokenspeed.target import Target
    from tokenspeed.tuning_pack import TuningPack, write_whole

    if args.seconds is not None and not 0 < args.seconds < 1e6:
        raise UsageError(f"--seconds is {args.seconds}; it must lie between 0 and 1000000")
    path = Path(args.output)
    if not path.parent.is_dir():
        raise UsageError(f"there is no folder {path.parent} for the results", hint="make it, or choose another with -o")
    with TuningPack(Path(args.pack)) as pack:
        gpu = find_gpu(Target.parse(pack.manifest.target), args.device)
        pack.verify()
        results, line = Results(pack, gpu), _Line(sys.stderr)
        try:
            with unwinding_when_told_to_stop():
                measure(results, seconds=args.seconds, report=line.report)
        finally:
            line.close()
            if results.outcomes:
                write_whole(path, (json.dumps(results.to_json(), indent=1) + "\n").encode())
        if args.json:
            print_json(results.to_json())
        else:
            _print_results(results.outcomes, results.skipped)
            print(f"{path}: {len(results.outcomes)} cases on {gpu.name}")
    return 0


class _Line:
    """Progress: a bar that moves on a terminal, otherwise a line for each shape."""

    def __init__(self, stream: TextIO):
        self._stream, self._moves = stream, stream.isatty()
        self._last = ""

    def report(self, done: int, total: int, outcome: Outcome) -> None:
        if self._moves:
            filled = 24 * done // total
            best = f"{outcome.timed[0].us:.1f} us" if outcome.timed else "no candidate"
            text = f"{'#' * filled}{'.' * (24 - filled)} {done}/{total}  {outcome.shape} M={outcome.case.rows}: {best}"
            print(f"\r\x1b[K{text[:110]}", end="", file=self._stream, flush=True)
        elif str(outcome.shape) != self._last:
            self._last = str(outcome.shape)
            print(f"tune: case {done} of {total}, {self._last}", file=self._stream, flush=True)

    def close(self) -> None:
        if self._moves:
            print("\r\x1b[K", end="", file=self._stream, flush=True)


def _print_results(outcomes: list[Outcome], skipped: list[str]) -> None:
    rows: list[tuple[str, ...]] = []
    for outcome in outcomes:
        shape, case = outcome.shape, outcome.case
        sizes = " ".join(f"{name}={size}" for name, size in shape.key.items())
        if outcome.timed:
            best, second = outcome.timed[0], outcome.timed[min(1, len(outcome.timed) - 1)]
            rows.append((shape.op, sizes, str(case.rows), f"{best.us:.2f}", f"{second.us:.2f}",
                         str(len(outcome.timed)), str(len(outcome.excluded)), config_text(best.config)))  # fmt: skip
        else:
            rows.append((shape.op, sizes, str(case.rows), "-", "-", "0", str(len(outcome.excluded)), "-"))
    _print_rows(("op", "sizes", "M", "us", "runner-up", "timed", "out", "config"), rows)
    for outcome in outcomes:
        for config, reason in outcome.excluded:
            print(f"out: {outcome.shape} M={outcome.case.rows}: {config_text(config)}: {reason}", file=sys.stderr)
    if skipped:
        print(f"{len(skipped)} cases were skipped, as the time was up", file=sys.stderr)


def config_text(config: Any) -> str:
    """A configuration in a few words, of whatever family: 16x64x128 and the rest by name."""
    tile = [str(config[name]) for name in ("block_m", "block_n", "block_k") if name in config]
    short = {"num_warps": "warps", "num_stages": "stages", "group_m": "group"}
    rest = [
        (name if value else "") if isinstance(value, bool) else f"{short.get(name, name)} {value}"
        for name, value in config.items()
        if not name.startswith("block_")
    ]
    return " ".join(("x".join(tile), ", ".join(word for word in rest if word))).strip()


def _print_rows(heads: tuple[str, ...], rows: list[tuple[str, ...]]) -> None:
    """Columns; those of numbers to the right."""
    widths = [max(map(len, column)) for column in zip(heads, *rows, strict=True)]
    for row in (heads, *rows):
        cells = (
            cell.rjust(width) if name in _RIGHT else cell.ljust(width)
            for name, cell, width in zip(heads, row, widths, strict=True)
        )
        print("  ".join(cells).rstrip())


_RIGHT = {"M", "us", "runner-up", "timed", "out", "share"}


def _merge(args: argparse.Namespace) -> int:
    from tokenspeed.compile.tuning_tables import merge

    merged = merge([Path(name) for name in args.results], Path(args.tables) if args.tables else None)
    if args.json:
        print_json([table.to_json() for table in merged])
    else:
        for table in merged:
            print(f"{table.path}: {table.added} added, {table.replaced} replaced, {table.kept} kept as measured later,"
                  f" {table.total} entries for {table.target}")  # fmt: skip
    return 0


def _show(args: argparse.Namespace) -> int:
    from tokenspeed.compile.tuning_tables import read_table, table_path
    from tokenspeed.target import Target

    target, folder = Target.parse(args.target), Path(args.tables) if args.tables else None
    if not target.is_gpu:
        raise UsageError(f"--target is {target}: tables are for GPUs", hint="name one, e.g. cuda:sm_90a")
    if folder is not None and not folder.is_dir():
        raise UsageError(f"there is no folder {folder} of tables", hint="leave --tables out for those of builds")
    wanted = args.op.split(",") if args.op else None
    found = [e for entries in read_table(target, folder).values() for e in entries if not wanted or e["op"] in wanted]
    if args.json:
        print_json({"target": str(target), "path": str(table_path(target, folder)), "entries": found})
        return 0
    if not found:
        of = f"{args.op} on {target}" if args.op else target
        print(f"nothing was measured for {of}: builds choose by rule", file=sys.stderr)
        return 0
    _print_rows(
        ("op", "sizes", "M", "us", "share", "config", "runner-up", "device", "date"),
        [
            (e["op"], f"N={e['N']} K={e['K']}", str(e["M"]), f"{e['us']:.2f}",
             f"{e['share']:.0%} {e['bound']}" if "share" in e else "-", config_text(e["config"]),
             f"{e['runner_up']['us']:.2f}", e["device"], e["date"])
            for e in found
        ],
    )  # fmt: skip
    return 0
