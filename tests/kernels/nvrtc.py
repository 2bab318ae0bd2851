"""A mark for tests that compile without a GPU."""

from __future__ import annotations

import pytest


def _is_installed() -> bool:
    try:
        from cupy_backends.cuda.libs import nvrtc

        nvrtc.getVersion()
    except (ImportError, RuntimeError):
        return False
    return True


needs_nvrtc = pytest.mark.skipif(not _is_installed(), reason="NVRTC is not installed")
