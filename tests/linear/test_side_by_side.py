"""bench/side_by_side.py measures one process at a time; one that fails, ends or is late costs no other its turn."""

from __future__ import annotations

import os
import time
from collections.abc import Callable

import pytest

from bench.side_by_side import Figures, in_turns

pytestmark = pytest.mark.slow


def worker(name: str, preparation: float) -> Callable[[], Figures]:
    began = time.monotonic()
    time.sleep(preparation)
    if name == "fails":
        raise ValueError("no model of this name")
    if name == "ends":
        os._exit(1)
    ready = time.monotonic()

    def measure() -> Figures:
        start = time.monotonic()
        if name == "fails later":
            raise RuntimeError("out of memory")
        time.sleep(0.2)
        return {"began": began, "ready": ready, "start": start, "end": time.monotonic()}

    return measure


def test_all_prepare_side_by_side_and_are_measured_alone():
    jobs = [("slow", 1.0), ("fails", 0.0), ("quick", 0.0), ("ends", 0.0), ("fails later", 0.0), ("late", 600.0)]
    answers = list(in_turns(worker, jobs, 15.0))
    assert [job for job, _ in answers] == jobs
    by_name = {job[0]: figures for job, figures in answers}
    slow, quick = by_name["slow"], by_name["quick"]
    assert max(slow["ready"], quick["ready"]) <= slow["start"] < slow["end"] <= quick["start"]
    assert {name: answer["error"] for name, answer in by_name.items() if "error" in answer} == {
        "fails": "ValueError: no model of this name",
        "ends": "its process ended",
        "fails later": "RuntimeError: out of memory",
        "late": "not ready after 15 s",
    }
