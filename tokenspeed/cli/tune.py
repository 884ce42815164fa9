"""``tokenspeed tune``: choose tile shapes by measurement, with no compiler on the GPU machine."""

from __future__ import annotations

import argparse
import sys
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from tokenspeed.cli import packs
from tokenspeed.cli.options import Subparsers, add_command, print_json
from tokenspeed.errors import UsageError

if TYPE_CHECKING:
    from tokenspeed.runtime.tuning import Outcome

_WALK = """\
  tokenspeed tune pack ./Llama-3.1-8B --target cuda:sm_90a -o llama.tunepack     on any machine
  tokenspeed tune run llama.tunepack -o llama.h200.json                          on the GPU, base install
  tokenspeed tune merge llama.h200.json                                          in the checkout that builds
  tokenspeed tune show --target cuda:sm_90a                                      what builds now use"""


def add_parser(subparsers: Subparsers) -> None:
    packs.add_walk(
        subparsers,
        "tune",
        (_add_pack, _add_run, _add_merge, _add_show),
        help="choose tile shapes by measurement",
        description="Kernels come in many tile shapes that give the same bits at different speeds. Builds take theirs\n"
        "from tables, one per architecture; this makes them, in three steps: pack compiles every candidate for\n"
        "the shapes of a model, run times them on the GPU with cold caches, merge puts the fastest into the\n"
        "table. Only pack needs a compiler, only run needs a GPU.",
        examples=_WALK,
    )


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
    packs.add_place(parser, "tune")
    parser.add_argument("--rows", metavar="M,...", help="rows to tune for (default: the sizes of a build's buckets)")
    parser.add_argument("--op", metavar="OP,...", help="kinds of op to tune (default: all that have candidates)")
    parser.add_argument("--max-num-seqs", type=int, metavar="N", help="as for build, for the buckets (default: 256)")
    parser.add_argument("--max-prefill-tokens", type=int, metavar="N", help="likewise (default: 8192)")
    packs.add_compiling(parser, _pack)


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
    packs.add_packed(parser, "tune")
    parser.add_argument(
        "--seconds", type=float, metavar="N",
        help="about how long to measure; what is not reached is skipped (default: as long as it takes)",
    )  # fmt: skip
    packs.add_device(parser, _run)


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
    packs.add_results(parser, "tune")
    packs.add_tables(parser, "tables", _merge)


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
    packs.add_tables(parser, "tables", _show)


# --- the steps ------------------------------------------------------------------------------------


def _pack(args: argparse.Namespace) -> int:
    return packs.pack(
        args,
        "tokenspeed.compile.tuning",
        args.checkpoint,
        rows=_numbers("--rows", args.rows),
        max_num_seqs=args.max_num_seqs,
        max_prefill_tokens=args.max_prefill_tokens,
    )


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
    from tokenspeed.runtime.tuning import Results, measure
    from tokenspeed.tuning_pack import TuningPack

    if args.seconds is not None and not 0 < args.seconds < 1e6:
        raise UsageError(f"--seconds is {args.seconds}; it must lie between 0 and 1000000")
    with packs.opened(args, TuningPack) as (pack, gpu):
        results = Results(pack, gpu)
        with packs.kept(args, results.outcomes, results.to_json), closing(_Line(sys.stderr)) as line:
            measure(results, seconds=args.seconds, report=line.report)
        if not args.json:
            _print_results(results.outcomes, results.skipped)
            print(f"{Path(args.output)}: {len(results.outcomes)} cases on {gpu.name}")
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
    from tokenspeed.compile.tuning_tables import Merged, merge

    def line(table: Merged) -> str:
        return f"{table.kept} kept as measured later, {table.total} entries for {table.target}"

    return packs.print_merged(args, merge(list(map(Path, args.results)), packs.tables_folder(args)), line)


def _show(args: argparse.Namespace) -> int:
    from tokenspeed.compile.tuning_tables import read_table, table_path
    from tokenspeed.target import Target

    target, folder = Target.parse(args.target), packs.tables_folder(args)
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
