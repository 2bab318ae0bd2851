"""Call `python -m cunorm ...` as a user does, in a process of its own, away from the checkout, and without a GPU."""

from __future__ import annotations

import os
import pwd
import subprocess
import sys
from pathlib import Path

import pytest

STUBS = {
    "absent": "raise ImportError('hidden by a test')",
    "broken": "raise RuntimeError('\\n=====\\nfailed to load a library\\nand much more')",
    "unreadable": "raise OSError(13, 'Permission denied', '/somewhere')",
}


def command(
    folder: Path, *arguments: str, cupy: str | None = None, environment: dict[str, str] | None = None
) -> subprocess.CompletedProcess:
    """Call a command in an empty folder below `folder`. `cupy` names the stub that stands before CuPy."""
    variables = os.environ | {"CUDA_VISIBLE_DEVICES": ""} | (environment or {})
    if cupy:
        stubs = folder / f"cupy is {cupy}"
        for package in ("cupy", "cupy_backends"):
            (stubs / package).mkdir(parents=True, exist_ok=True)
            (stubs / package / "__init__.py").write_text(STUBS[cupy])
        variables["PYTHONPATH"] = os.pathsep.join(filter(None, [str(stubs), variables.get("PYTHONPATH")]))
    away = folder / "away"
    away.mkdir(exist_ok=True)
    program = [sys.executable, "-m", "cunorm", *arguments]
    return subprocess.run(program, cwd=away, env=variables, capture_output=True, text=True)


def without_a_home(patch: pytest.MonkeyPatch) -> None:
    """Take the home directory away, as in a container: HOME is not set, and the user's number is unknown."""

    def unknown(uid: int) -> None:
        raise KeyError(f"getpwuid(): uid not found: {uid}")

    for name in ("HOME", "CUNORM_CACHE_DIR", "XDG_CACHE_HOME"):
        patch.delenv(name, raising=False)
    patch.setattr(pwd, "getpwuid", unknown)


def output_of(result: subprocess.CompletedProcess) -> str:
    """Check that a command succeeded, and return what it wrote."""
    assert (result.returncode, result.stderr) == (0, "")
    return result.stdout


def assert_fails_in_one_line(result: subprocess.CompletedProcess, status: int, *fragments: str) -> None:
    assert result.returncode == status
    assert result.stdout == ""
    assert result.stderr.count("\n") == 1
    for fragment in fragments:
        assert fragment in result.stderr
