"""`python -m cunorm info | demo | compile | cache`: reads the command line and hands it to a file of `commands`."""

from __future__ import annotations

import argparse
import io
import os
import sys

from .commands import cache, compile, demo, info


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m cunorm", description="LayerNorm and RMSNorm on NVIDIA GPUs.")
    commands = parser.add_subparsers(required=True, metavar="command")
    for module in (info, demo, compile, cache):
        module.add_parser(commands)
    parsed = parser.parse_args(arguments)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # a path that the terminal cannot spell is no reason to fail
    try:
        status = parsed.run(parsed)
        sys.stdout.flush()
    except BrokenPipeError:  # the reader, such as `head`, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    return status


if __name__ == "__main__":
    raise SystemExit(main())
