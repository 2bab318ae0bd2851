"""`cache path | count | clear`: where compiled kernels are kept, and how to be rid of them."""

from __future__ import annotations

import argparse
import os
import re
import sys
from pathlib import Path

from ..compile import cache_directory

# cunorm_....cubin are cunorm's kernels, RESULTS_FILE is what `compile --all` found. The others are CuPy's: a SHA-1 of
# the source and options; with CUPY_CACHE_SAVE_CUDA_SOURCE the source is beside it.
RESULTS_FILE = "cunorm_compiled.json"
OWN_KERNEL = re.compile(r"cunorm_[0-9a-f]{40}\.cubin")
KERNEL_FILE = re.compile(rf"{OWN_KERNEL.pattern}|[0-9a-f]{{40}}\.(cubin|ltoir)(\.cu)?|{re.escape(RESULTS_FILE)}")


def add_parser(commands) -> None:
    parser = commands.add_parser(
        "cache",
        help="show, count or empty the directory of compiled kernels",
        description="The directory in which cunorm keeps its compiled kernels, and CuPy any others. A removed kernel "
        "is compiled again when it is next needed.",
    )
    parser.add_argument("action", choices=("path", "count", "clear"))
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    if arguments.action == "path":
        print(cache_directory())
        return 0
    try:
        found = kernel_files()
        for path, _ in found if arguments.action == "clear" else ():
            path.unlink(missing_ok=True)
    except OSError as error:
        print(f"cache: {cache_directory()} could not be read or cleared: {error}", file=sys.stderr)
        return 1
    if arguments.action == "count":
        own = [size for path, size in found if OWN_KERNEL.fullmatch(path.name)]
        print(f"{len(own)} kernels of cunorm, {sum(own):,} bytes; {len(found) - len(own)} other files")
        return 0
    print(f"removed {len(found)} files, {sum(size for _, size in found):,} bytes, from {cache_directory()}")
    return 0


def kernel_files() -> list[tuple[Path, int]]:
    """The compiled kernels and their sizes in bytes; none if there is no directory."""
    try:
        with os.scandir(cache_directory()) as entries:
            return [
                (Path(entry.path), entry.stat(follow_symlinks=False).st_size)
                for entry in entries
                if KERNEL_FILE.fullmatch(entry.name)
            ]
    except FileNotFoundError:
        return []
