"""The first line of a file of results: the machine, the versions, and the commit that was measured."""

from __future__ import annotations

import datetime
import hashlib
import os
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

from bench.results import UNKNOWN

ROOT = Path(__file__).parents[1]


def environment(commit: str, versions: dict[str, str], missing: dict[str, str]) -> dict[str, Any]:
    """Return the first line, with the providers' `versions` and why each of those `missing` is not measured."""
    import cupy

    return {
        "commit": commit,
        "sources": sources(),
        "gpu": cupy.cuda.runtime.getDeviceProperties(0)["name"].decode(),
        "driver": cupy.cuda.runtime.driverGetVersion(),
        "runtime": cupy.cuda.runtime.runtimeGetVersion(),
        "nvrtc": ".".join(map(str, cupy.cuda.nvrtc.getVersion())),
        "date": datetime.date.today().isoformat(),
        "command": "python -m bench " + shlex.join(sys.argv[1:]),
        "providers": versions,
        "missing": missing,
    }


def this_commit() -> str:
    """Return BENCH_COMMIT, which a copy without git has, or git's commit, with -dirty if cunorm was changed since."""
    if os.environ.get("BENCH_COMMIT"):
        return os.environ["BENCH_COMMIT"]
    try:
        commit = _git("rev-parse", "--short=12", "HEAD")
        return commit + ("-dirty" if _git("status", "--porcelain", "--", "cunorm", "kernels_cu") else "")
    except (OSError, subprocess.CalledProcessError):
        return UNKNOWN


def _git(*arguments: str) -> str:
    return subprocess.run(["git", *arguments], cwd=ROOT, check=True, capture_output=True, text=True).stdout.strip()


def sources() -> str:
    """Return a digest of the files that make the kernels and their plans, whatever git says of them."""
    digest = hashlib.sha256()
    for folder in ("cunorm", "kernels_cu"):
        for path in sorted((ROOT / folder).rglob("*")):
            if path.suffix in (".py", ".cu", ".cuh") and not any(p.is_symlink() for p in path.parents):
                digest.update(f"{path.relative_to(ROOT)}\n".encode() + path.read_bytes())
    return digest.hexdigest()[:16]
