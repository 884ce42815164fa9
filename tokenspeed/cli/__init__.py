"""The command line: ``tokenspeed COMMAND``. Each command is one module; none imports what it does not need."""

from tokenspeed.cli.main import main

__all__ = ["main"]
