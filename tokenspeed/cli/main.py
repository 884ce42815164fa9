"""Parse the command line, run one command, turn typed errors into ``error:`` and ``hint:`` lines.

Data goes to stdout, everything else to stderr. Exit codes are those of ``tokenspeed.errors``; 130 is Ctrl-C.
"""

from __future__ import annotations

import argparse
import os
import sys
from importlib import import_module

from tokenspeed import __version__
from tokenspeed.errors import TokenSpeedError

COMMANDS = ("build", "run", "serve", "inspect", "explain", "verify", "bench", "doctor", "export")

_EPILOG = """\
the usual walk:
  tokenspeed doctor                                   which targets this machine can build for and run
  tokenspeed build CHECKPOINT -o artifacts/mymodel    compile a checkpoint into an artifact
  tokenspeed run artifacts/mymodel "Hello"            complete one prompt, or chat when none is given
  tokenspeed serve artifacts/mymodel                  answer OpenAI clients over HTTP
  tokenspeed bench artifacts/mymodel                  measure it against this machine's ceilings

`tokenspeed COMMAND --help` explains each command with examples.
"""


def build_parser() -> argparse.ArgumentParser:
    """The whole command line."""
    parser = argparse.ArgumentParser(
        prog="tokenspeed",
        description="An LLM inference engine shaped like a compiler: build an artifact once, serve it anywhere.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"tokenspeed {__version__}")
    subparsers = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name in COMMANDS:
        import_module(f"tokenspeed.cli.{name}").add_parser(subparsers)
    return parser


def main(argv: list[str] | None = None) -> int:
    """Run one command; returns the exit code."""
    args = build_parser().parse_args(argv)
    try:
        return int(args.run(args) or 0)
    except TokenSpeedError as e:
        print(f"error: {e.message}", file=sys.stderr)
        if e.hint:
            print(f"hint: {e.hint}", file=sys.stderr)
        return e.exit_code
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:
        # The reader of our output has gone (as `| head` does); the interpreter's own flush must not complain.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
