"""The kernels compile by the NVRTC of CUDA 12 too, which users of `cunorm[cuda12]` have."""

from __future__ import annotations

import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import matrix
import pytest
from problems import refused

from cunorm.kernel.compile import AS_CUPY, MINIMAL, OPTIONS
from cunorm.kernel.device import KNOWN
from cunorm.kernel.source import source
from cunorm.linear import float8_plan
from cunorm.plan.spec import KernelSpec, NormSpec

ARCH = 90
DEVICE = KNOWN[ARCH]


def library() -> Path | None:
    spec = find_spec("nvidia.cuda_nvrtc")
    places = spec.submodule_search_locations if spec else None
    return next((path for place in places or () for path in Path(place).glob("lib/libnvrtc.so.12")), None)


def features(spec: KernelSpec) -> set[tuple]:
    """Return what kernels differ in, beside numbers, types, norms and expressions."""
    if not isinstance(spec, NormSpec):
        return {(type(spec), getattr(spec, "kernel", ""))}
    choices = {
        "stages": spec.stages > 1,
        "cluster": spec.cluster > 1,
        "aligned": spec.aligned,
        "scales": spec.scales,
        "prologue": spec.operation.prologue is not None,
    }
    return {(spec.kernel, *choice) for choice in choices.items()} | {
        (spec.kernel, operand.kind) for operand in spec.operands
    }


def kinds() -> list[KernelSpec]:
    """Return kernels that show each feature once with each kernel."""
    problems = [*matrix.covering(DEVICE), *matrix.named_fusions()]
    problems += [*matrix.numbers_of_rows(), *matrix.fused_float8()]
    problems = [problem for problem in problems if not refused(problem, DEVICE)]
    shown: set[tuple] = set()
    specs = []
    for spec in [*matrix.kernels_of(problems, DEVICE), *float8_plan.kernels_of(matrix.casts(DEVICE))]:
        if not features(spec) <= shown:
            shown |= features(spec)
            specs.append(spec)
    return specs


@pytest.mark.slow
@pytest.mark.skipif(library() is None, reason="the NVRTC of CUDA 12 is not installed")
def test_a_kernel_of_each_kind(tmp_path):
    files = []
    for number, spec in enumerate(kinds()):
        files.append(tmp_path / f"{number}.cu")
        files[-1].write_text(source(spec))
    assert len(files) > 40
    options = [*OPTIONS, *AS_CUPY, MINIMAL, f"-arch=compute_{ARCH}"]
    command = [sys.executable, Path(__file__).with_name("compile_by.py"), library(), *files, "--", *options]
    done = subprocess.run([*map(str, command)], capture_output=True, text=True)
    assert done.returncode == 0, f"status {done.returncode}, at the last of these:\n{done.stdout[-2000:]}{done.stderr}"
