"""The folder on disk where cunorm keeps compiled kernels and tables of launches for later processes."""

from __future__ import annotations

import os
from pathlib import Path
from uuid import uuid4

from .. import logs


def cache_directory() -> Path:
    """Return the folder: CUNORM_CACHE_DIR, else `cunorm` among the caches of the user.

    Raise FileNotFoundError for a user without a home directory, as in some containers.
    """
    folder = os.environ.get("CUNORM_CACHE_DIR")
    if folder:
        return Path(folder)
    caches = os.environ.get("XDG_CACHE_HOME", "")
    if os.path.isabs(caches):  # its specification says to ignore relative paths
        return Path(caches) / "cunorm"
    try:
        return Path.home() / ".cache" / "cunorm"
    except RuntimeError:
        raise FileNotFoundError("this user has no home directory; CUNORM_CACHE_DIR may name a folder") from None


def keep_file(name: str, content: bytes) -> str:
    """Write a file of the cache. Return the reason if that fails, which is also logged once, else ""."""
    try:
        folder = cache_directory()
    except FileNotFoundError as error:
        reason = str(error)
    else:
        try:
            write(folder / name, content)
            return ""
        except OSError as error:
            reason = f"{folder} cannot be written ({error.strerror}); CUNORM_CACHE_DIR may name another folder"
    logs.not_kept(reason)
    return reason


def write(path: Path, content: bytes, mode: int = 0o666) -> None:
    """Write a file atomically, so that no reader sees a part of it. The umask applies to `mode`."""
    path.parent.mkdir(0o755, parents=True, exist_ok=True)
    temporary = path.with_name(f"{path.name}.{uuid4().hex}.tmp")
    try:
        with open(temporary, "xb", opener=lambda name, flags: os.open(name, flags, mode)) as file:
            file.write(content)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
