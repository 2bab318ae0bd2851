"""`python -m cunorm info | demo | compile | tune | cache` hands the command line to a file of `commands`."""

from __future__ import annotations

import argparse
import io
import os
import sys
from typing import NoReturn

from . import __version__
from .commands import cache, compile, demo, info, tune


class Parser(argparse.ArgumentParser):
    """Reports errors in one line, without the usage, which has seven lines for `compile`."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {message.rstrip('.')} (see {self.prog} --help)\n")


def main(arguments: list[str] | None = None) -> int:
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # a path that the terminal cannot spell is no reason to fail
    try:
        try:
            return _run(arguments)
        finally:  # --help and --version leave by SystemExit
            if sys.stdout is not None:
                sys.stdout.flush()
    except OSError as error:
        if sys.stdout is not None:  # Python would try to write the rest once more
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if isinstance(error, BrokenPipeError):  # the reader, such as `head`, has seen enough
            return 0
        print(f"python -m cunorm: {error}", file=sys.stderr)
        return 1


def parser() -> Parser:
    """Make the parser of the command line."""
    whole = Parser(prog="python -m cunorm", description="LayerNorm and RMSNorm on NVIDIA GPUs.")
    whole.add_argument("--version", action="version", version=f"cunorm {__version__}")
    commands = whole.add_subparsers(dest="command", metavar="command")
    for module in (info, demo, compile, tune, cache):
        module.add_parser(commands)
    return whole


def _run(arguments: list[str] | None) -> int:
    known = parser()
    parsed = known.parse_args(arguments)
    if parsed.command is None:
        known.print_help()
        return 0
    try:
        return parsed.run(parsed)
    except MemoryError as error:
        print(f"{parsed.command}: the memory does not suffice: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    raise SystemExit(main())
