"""Parse the command line, run one command, turn typed errors into ``error:`` and ``hint:`` lines.

Data goes to stdout, everything else to stderr. Exit codes are those of ``tokenspeed.errors``; 130 is Ctrl-C.
"""

from __future__ import annotations

import argparse
import io
import os
import sys
from collections.abc import Sequence
from importlib import import_module

from tokenspeed import __version__
from tokenspeed.errors import ResourceError, TokenSpeedError

COMMANDS = (
    "build", "run", "serve", "inspect", "explain", "explain-step", "verify", "bench", "doctor", "export", "tune",
    "prove", "simulate", "invariance", "align",
)  # fmt: skip
LOADING = ("run", "serve", "bench", "invariance", "align")
"""Those that load an artifact: a GPU's driver starts before their command line is parsed."""

_EPILOG = """\
the usual walk:
  tokenspeed doctor                                   which targets this machine can build for and run
  tokenspeed build CHECKPOINT -o artifacts/mymodel    compile a checkpoint into an artifact
  tokenspeed run artifacts/mymodel "Hello"            complete one prompt, or chat when none is given
  tokenspeed serve artifacts/mymodel                  answer OpenAI clients over HTTP
  tokenspeed bench artifacts/mymodel                  measure it against this machine's ceilings
  tokenspeed invariance artifacts/mymodel             show that its bits never depend on the batch, and attest it

`tokenspeed COMMAND --help` explains each command with examples.
"""


def build_parser(commands: Sequence[str] = COMMANDS) -> argparse.ArgumentParser:
    """The command line with ``commands``; by default the whole."""
    parser = argparse.ArgumentParser(
        prog="tokenspeed",
        description="An LLM inference engine shaped like a compiler: build an artifact once, serve it anywhere.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"tokenspeed {__version__}")
    subparsers = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name in commands:
        import_module(f"tokenspeed.cli.{name.replace('-', '_')}").add_parser(subparsers)
    return parser


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse a command line; exits with 2 if it is malformed."""
    argv = sys.argv[1:] if argv is None else argv
    # A command imports its own options only: a server that starts should not wait for those of all the others.
    parser = build_parser(argv[:1] if argv[:1] and argv[0] in COMMANDS else COMMANDS)
    args, rest = parser.parse_known_args(argv)
    # argparse takes an optional positional for absent once an option follows the one before it, and then does not
    # know the real one: `run ARTIFACT --raw PROMPT`.
    late = getattr(args, "optional_positional", None)
    if rest and late is not None and getattr(args, late) is None:
        values = rest[1:] if rest[0] == "--" else rest
        if len(values) == 1 and (values is not rest or not values[0].startswith("-")):
            setattr(args, late, values[0])
            rest = []
    if rest:
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    return args


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code."""
    _tolerate_narrow_terminals()
    argv = sys.argv[1:] if argv is None else argv
    if argv[:1] and argv[0] in LOADING:
        from tokenspeed.runtime.drivers import start_for

        start_for(argv)
    args = parse(argv)
    try:
        code = int(args.run(args) or 0)
        if sys.stdout is not None:
            sys.stdout.flush()  # here, where a full disk can still be reported
        return code
    except TokenSpeedError as e:
        print(f"error: {e.message}", file=sys.stderr)
        if e.hint:
            print(f"hint: {e.hint}", file=sys.stderr)
        return e.exit_code
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:
        _discard_stdout()  # its reader has gone, as `| head` does
        return 0
    except OSError as e:
        _discard_stdout()
        print(f"error: {f'{e.filename}: ' if e.filename else ''}{e.strerror or e}", file=sys.stderr)
        return ResourceError.exit_code


def _tolerate_narrow_terminals() -> None:
    """Text that stdout's encoding lacks becomes '?'; a path with undecodable bytes is printed as it is."""
    if sys.stderr is None:  # closed with `2>&-`: its owner misses messages, nothing else
        sys.stderr = os.fdopen(os.open(os.devnull, os.O_WRONLY), "w")
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="surrogateescape" if sys.stdout.encoding.lower() == "utf-8" else "replace")


def _discard_stdout() -> None:
    """What is still buffered goes nowhere, so that the interpreter's own flush at exit cannot fail again."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
