"""`cache path | clear`: where CuPy keeps compiled kernels, and how to be rid of them."""

from __future__ import annotations

import argparse
import os
import re
import sys
from pathlib import Path

# As CuPy names them: a SHA-1 of the source and options; with CUPY_CACHE_SAVE_CUDA_SOURCE the source is beside it.
# RESULTS_FILE is cunorm's own: what `compile --all` found.
RESULTS_FILE = "cunorm_compiled.json"
KERNEL_FILE = re.compile(rf"[0-9a-f]{{40}}\.(cubin|ltoir)(\.cu)?|{re.escape(RESULTS_FILE)}")


def add_parser(commands) -> None:
    parser = commands.add_parser(
        "cache",
        help="show or empty the directory of compiled kernels",
        description="The directory in which CuPy keeps the kernels that it compiled, those of cunorm and any others. "
        "A removed kernel is compiled again when it is next needed.",
    )
    parser.add_argument("action", choices=("path", "clear"))
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    if arguments.action == "path":
        print(directory())
        return 0
    try:
        found = kernel_files()
        for path, _ in found:
            path.unlink(missing_ok=True)
    except OSError as error:
        print(f"cache: {directory()} could not be cleared: {error}", file=sys.stderr)
        return 1
    print(f"removed {len(found)} files, {sum(size for _, size in found):,} bytes, from {directory()}")
    return 0


def directory() -> Path:
    """What CuPy uses; it is not imported, so that this works where CuPy does not."""
    return Path(os.environ.get("CUPY_CACHE_DIR") or Path.home() / ".cupy" / "kernel_cache")


def kernel_files() -> list[tuple[Path, int]]:
    """The compiled kernels and their sizes in bytes; none if there is no directory."""
    try:
        with os.scandir(directory()) as entries:
            return [
                (Path(entry.path), entry.stat(follow_symlinks=False).st_size)
                for entry in entries
                if KERNEL_FILE.fullmatch(entry.name)
            ]
    except FileNotFoundError:
        return []
