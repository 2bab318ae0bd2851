"""Sharded functions, on four devices of the CPU in a process of their own, and on two GPUs or more."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

jax = pytest.importorskip("jax")

SCRIPTS = {"jax_sharded.py": 1, "jax_linear_sharded.py": 2}  # with what the number of GPUs must be a multiple of


def run(script: str, platform: str) -> str:
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}  # helpers of other subjects
    environment |= {"JAX_PLATFORMS": "cpu"} if platform == "cpu" else {}
    path = Path(__file__).parent / script
    finished = subprocess.run([sys.executable, path, platform], capture_output=True, text=True, env=environment)
    assert finished.returncode == 0, finished.stdout + finished.stderr
    return finished.stdout


@pytest.mark.slow
@pytest.mark.parametrize("script", SCRIPTS)
def test_four_devices_of_the_cpu(script):
    assert "over 4 devices" in run(script, "cpu")


@pytest.mark.gpu
@pytest.mark.parametrize(("script", "multiple"), SCRIPTS.items())
def test_all_gpus(script, multiple):
    import cupy

    count = cupy.cuda.runtime.getDeviceCount()
    if count < 2 or count % multiple:
        pytest.skip(f"needs two GPUs or more, a multiple of {multiple}")
    assert f"over {count} devices" in run(script, "cuda")
