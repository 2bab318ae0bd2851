"""Processes that are the ranks of a torch.distributed group, started once and asked many times.

The program they run, `python PROGRAM RANK SIZE FILE DEVICE`, reads a line of JSON for each question and answers with
a line of JSON (see `serve`). A rank that does not answer in time ends the pool, so that nothing waits for ever.
"""

from __future__ import annotations

import json
import os
import queue
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

SECONDS = 90  # a rank must answer within these, which are more than the 60 after which a collective gives up


class Pool:
    def __init__(self, program: Path, size: int, folder: Path, device: str):
        # torch reads both when it is imported: use no multicast between GPUs, and one core for each rank.
        environment = os.environ | {"TORCH_SYMM_MEM_DISABLE_MULTICAST": "1", "OMP_NUM_THREADS": "1"}
        environment |= {"PYTHONPATH": os.pathsep.join(sys.path)}  # has the helpers of other subjects
        self.size = size
        self._processes, self._answers = [], []
        for rank in range(size):
            process = subprocess.Popen(
                [sys.executable, program, str(rank), str(size), folder / "store", device],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                env=environment,
            )
            answers: queue.Queue[str] = queue.Queue()
            threading.Thread(target=_read, args=(process, answers), daemon=True).start()
            self._processes.append(process)
            self._answers.append(answers)

    def ask(self, ranks: int, *question: Any) -> list[str]:
        """Return what each of the first `ranks` ranks answers: a traceback, or nothing."""
        for process in self._processes[:ranks]:
            process.stdin.write(json.dumps([ranks, *question]) + "\n")
            process.stdin.flush()
        end = time.monotonic() + SECONDS
        replies = []
        for answers in self._answers[:ranks]:
            try:
                replies.append(json.loads(answers.get(timeout=max(0.0, end - time.monotonic()))))
            except queue.Empty:
                replies.append(f"no answer to {question} within {SECONDS} s")
        if any(reply.startswith("no answer") for reply in replies):
            self.close()
        return replies

    def end(self, rank: int) -> None:
        self._processes[rank].kill()
        self._processes[rank].wait()

    def close(self) -> None:
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.wait()


def _read(process: subprocess.Popen, answers: queue.Queue[str]) -> None:
    for line in process.stdout:
        if line.startswith('"'):
            answers.put(line)
    answers.put(json.dumps("the process has ended"))


def serve(answer: Callable[..., None]) -> None:
    """Call answer(*question) for each question that this rank is asked, and reply with what it raised."""
    for line in sys.stdin:
        try:
            answer(*json.loads(line))
            reply = ""
        except Exception:
            reply = traceback.format_exc()
        print(json.dumps(reply), flush=True)
