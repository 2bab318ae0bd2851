"""`demo --ranks N`: LayerNormLinear over N processes, one for each GPU, or on the CPU where there are not so many."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from importlib.util import find_spec
from pathlib import Path

import numpy

SECONDS = 300  # after which the processes are ended


def why_not(x: numpy.ndarray, ranks: int) -> str:
    if ranks < 2:
        return f"must be 2 or more; got {ranks}"
    if find_spec("torch") is None:
        return "needs PyTorch: pip install torch"
    rows = x.size // x.shape[-1]
    return f"needs a row for each rank; the array has {rows}" if rows < ranks else ""


def run(x: numpy.ndarray, ranks: int) -> int:
    # Read when torch is imported: no multicast between GPUs. The ranks share the cores.
    environment = os.environ | {"TORCH_SYMM_MEM_DISABLE_MULTICAST": "1"}
    environment.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // ranks)))
    with tempfile.TemporaryDirectory() as folder:
        numpy.save(Path(folder) / "x.npy", x.reshape(-1, x.shape[-1]))
        command = [sys.executable, "-m", "cunorm.torch.linear.ranks_demo", folder, str(ranks)]
        processes = [subprocess.Popen([*command, str(rank)], env=environment) for rank in range(ranks)]
        try:
            return _status(processes)
        finally:
            for process in processes:
                process.kill()
                process.wait()


def _status(processes: list[subprocess.Popen]) -> int:
    """Return 0 once all have ended well, 1 as soon as one has not: the others would wait for it."""
    end = time.monotonic() + SECONDS
    while time.monotonic() < end:
        statuses = [process.poll() for process in processes]
        if any(statuses):
            return 1
        if None not in statuses:
            return 0
        time.sleep(0.05)
    print(f"demo: --ranks: the processes took longer than {SECONDS} s and were ended.", file=sys.stderr)
    return 1
