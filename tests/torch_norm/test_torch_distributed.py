"""DTensor with sharded rows, and FSDP2, in two processes on the CPU or in as many as there are GPUs, at most two."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from torch_tensors import on_devices  # noqa: E402

PROGRAM = Path(__file__).parent / "torch_distributed.py"


@on_devices
@pytest.mark.slow
def test_sharded_rows_and_fully_shard(device, tmp_path):
    if not torch.distributed.is_available():
        pytest.skip("this torch is without torch.distributed")
    ranks = 2 if device == "cpu" else min(2, torch.cuda.device_count())
    commands = [[sys.executable, PROGRAM, str(rank), str(ranks), tmp_path / "store", device] for rank in range(ranks)]
    options = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    processes = [subprocess.Popen(command, **options) for command in commands]
    try:
        outputs = [process.communicate(timeout=240)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert [process.returncode for process in processes] == [0] * ranks, "\n".join(outputs)
    assert all(output.count(" holds") == 5 for output in outputs)
