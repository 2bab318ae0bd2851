"""The bench of compile times counts what NVRTC does for both commits, and leaves NVRTC as it was."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from nvrtc import needs_nvrtc

ROOT = Path(__file__).parents[1]


@needs_nvrtc
def test_a_commit_beside_itself(capsys, monkeypatch):
    from cupy_backends.cuda.libs import nvrtc

    from bench import compile_time

    compile_program = nvrtc.compileProgram
    counted = []
    monkeypatch.setattr(nvrtc, "compileProgram", lambda *arguments: (counted.append(1), compile_program(*arguments)))
    monkeypatch.setattr(sys, "argv", ["compile_time", "--before", str(ROOT), "--cols", "64", "--turns", "1"])
    ours = nvrtc.compileProgram
    compile_time.main()
    assert nvrtc.compileProgram is ours
    *lines, last = capsys.readouterr().out.splitlines()
    lines = [json.loads(line) for line in lines]
    assert [(line["op"], line["direction"]) for line in lines] == [
        (op, direction) for op in ("layer_norm", "rms_norm") for direction in ("forward", "backward")
    ]
    assert all(line["before_ms"] > 0 and line["after_ms"] > 0 for line in lines)
    assert last.startswith("4 plans: ")
    assert len(counted) == 2 * (1 + 2 + 1 + 2)  # forward one kernel, backward two


@needs_nvrtc
def test_a_plan_without_kernels_is_an_error(monkeypatch):
    from bench import compile_time

    with pytest.raises(RuntimeError, match="compiled nothing"):
        compile_time.of_plan("cunorm", "layer_norm", "forward", 0, 90)
