"""sanitize.py distinguishes findings from a tool that fails, and from calls that were not all made."""

from __future__ import annotations

import pytest
from sanitize import kernels, together, verdict

from cunorm.kernel.device import KNOWN

CLEAN = "calls: 8\n========= ERROR SUMMARY: 0 errors\n"
CASES = [
    ("memcheck", CLEAN, 0, (8, 0, "ok")),
    (
        "racecheck",
        "calls: 8\n========= RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)\n",
        0,
        (8, 0, "ok"),
    ),
    ("none", "calls: 8\n", 0, (8, None, "ok")),
    ("memcheck", "calls: 8\n========= ERROR SUMMARY: 1 error\n", 99, (8, 1, "findings")),
    ("racecheck", "calls: 8\n========= RACECHECK SUMMARY: 2 hazards displayed (2 errors)\n", 0, (8, 2, "findings")),
    ("memcheck", "========= ERROR SUMMARY: 0 errors\n", 0, (None, 0, "the run itself failed, exit status 0")),
    (
        "synccheck",
        "calls: 8\nTarget application returned an error\n",
        1,
        (8, None, "the run itself failed, exit status 1"),
    ),
    ("synccheck", "calls: 8\n", 0, (8, None, "the run itself failed, exit status 0")),
    ("initcheck", "", None, (None, None, "stopped after 1500 s")),
]


@pytest.mark.parametrize(("tool", "log", "code", "expected"), CASES)
def test_what_a_log_says(tool, log, code, expected):
    assert tuple(verdict(tool, log, code).values()) == expected


def test_parts_of_a_dtype_are_put_together():
    clean, faulty = (
        {**verdict("memcheck", log, code), "log": log.splitlines()} for _, log, code, _ in (CASES[0], CASES[3])
    )
    assert together("memcheck", "float16", [clean, clean])["calls"] == 16
    assert together("memcheck", "float16", [clean, faulty]) == {
        "tool": "memcheck",
        "dtype": "float16",
        "calls": 16,
        "findings": 1,
        "status": "findings",
        "log": faulty["log"],
    }
    lost = {**verdict("memcheck", "", None), "log": ["nothing"]}
    both = together("memcheck", "float16", [lost, clean, faulty])
    assert (both["findings"], both["status"]) == (1, "stopped after 1500 s, findings")
    assert both["log"] == ["nothing", *faulty["log"]]
    assert together("memcheck", "float16", [lost])["calls"] is None


@pytest.mark.slow
def test_what_is_launched_is_known_without_a_gpu():
    pytest.importorskip("cupy", exc_type=ImportError)
    launched = kernels("float64", 0, KNOWN[90])
    assert {spec.kernel for spec in launched} >= {"forward", "forward_spread", "backward", "backward_few"}
    assert not [spec for spec in kernels("float64", 0, KNOWN[75]) if spec.cluster > 1]
