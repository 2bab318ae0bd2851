"""`cache path | count | clear`: where compiled kernels are kept, and how to be rid of them."""

from __future__ import annotations

import argparse
import os
import re
import sys
from pathlib import Path

from ..kernel.cache import cache_directory

RESULTS_FILE = "cunorm_compiled.json"  # what `compile --all` found
KERNEL = re.compile(r"cunorm_[0-9a-f]{40}\.cubin")
NODES = r"cunorm_nodes_[0-9a-f]{40}\.(so|lock)"  # of PyTorch's adapter, and what its processes wait by
# The last part has what is yet to be written, and stays where a process was killed meanwhile.
FILE = re.compile(rf"({KERNEL.pattern}|{NODES}|{re.escape(RESULTS_FILE)})(\.[0-9a-f]{{32}}\.tmp)?")


def add_parser(commands) -> None:
    parser = commands.add_parser(
        "cache",
        help="show, count or empty the directory of compiled kernels",
        description="The directory in which cunorm keeps what it compiles: CUNORM_CACHE_DIR, or cunorm in "
        "XDG_CACHE_HOME or ~/.cache. What is removed is compiled again when it is next needed.",
    )
    parser.add_argument("action", choices=("path", "count", "clear"))
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    try:
        folder = cache_directory()
    except FileNotFoundError as error:
        print(f"cache: {error}", file=sys.stderr)
        return 1
    if arguments.action == "path":
        print(folder)
        return 0
    try:
        files = kernel_files()
        for path, _ in files if arguments.action == "clear" else ():
            path.unlink(missing_ok=True)
    except OSError as error:
        print(f"cache: {folder} could not be read or cleared: {error}", file=sys.stderr)
        return 1
    if arguments.action == "count":
        kernels = [size for path, size in files if KERNEL.fullmatch(path.name)]
        print(f"{len(kernels)} kernels, {sum(kernels):,} bytes; {len(files) - len(kernels)} other files")
        return 0
    print(f"removed {len(files)} files, {sum(size for _, size in files):,} bytes, from {folder}")
    return 0


def kernel_files() -> list[tuple[Path, int]]:
    """Return the files that cunorm keeps and how many bytes each has; none if there is no directory."""
    folder = cache_directory()
    try:
        with os.scandir(folder) as entries:
            return [
                (Path(entry.path), entry.stat(follow_symlinks=False).st_size)
                for entry in entries
                if FILE.fullmatch(entry.name)
            ]
    except FileNotFoundError:
        return []
