"""The folder on disk where cunorm keeps what it makes for later processes: compiled kernels, and tables of launches."""

from __future__ import annotations

import os
from pathlib import Path
from uuid import uuid4

from .. import logs


def cache_directory() -> Path:
    """Return where compiled files are kept: CUNORM_CACHE_DIR, else `cunorm` among the caches of the user.

    FileNotFoundError for a user without a home directory, as containers have them.
    """
    chosen = os.environ.get("CUNORM_CACHE_DIR")
    if chosen:
        return Path(chosen)
    caches = os.environ.get("XDG_CACHE_HOME", "")
    if os.path.isabs(caches):  # its specification says to ignore others
        return Path(caches) / "cunorm"
    try:
        return Path.home() / ".cache" / "cunorm"
    except RuntimeError:
        raise FileNotFoundError("this user has no home directory; CUNORM_CACHE_DIR may name a folder") from None


def keep_file(name: str, content: bytes) -> str:
    """Writes a file of the cache. Where that cannot be, the log says so once, and this why; "" if it could."""
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
    """Writes a file of the cache at once, whoever reads it meanwhile, with `mode` less what the umask takes away."""
    path.parent.mkdir(0o755, parents=True, exist_ok=True)
    temporary = path.with_name(f"{path.name}.{uuid4().hex}.tmp")
    try:
        with open(temporary, "xb", opener=lambda name, flags: os.open(name, flags, mode)) as file:
            file.write(content)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
