"""Sharded functions, on four devices of the CPU in a process of their own, and on two GPUs or more."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

jax = pytest.importorskip("jax")

SCRIPT = Path(__file__).parent / "jax_sharded.py"


def run(platform: str) -> str:
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}  # helpers of other subjects
    environment |= {"JAX_PLATFORMS": "cpu"} if platform == "cpu" else {}
    finished = subprocess.run([sys.executable, SCRIPT, platform], capture_output=True, text=True, env=environment)
    assert finished.returncode == 0, finished.stdout + finished.stderr
    return finished.stdout


@pytest.mark.slow
def test_four_devices_of_the_cpu():
    assert "over 4 devices" in run("cpu")


@pytest.mark.gpu
def test_all_gpus():
    import cupy

    count = cupy.cuda.runtime.getDeviceCount()
    if count < 2:
        pytest.skip("needs two GPUs or more")
    assert f"over {count} devices" in run("cuda")
