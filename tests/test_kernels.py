"""The kernels compile for every architecture without a GPU, and hold their rows in registers: nothing is spilled."""

from __future__ import annotations

import itertools
import shutil
from pathlib import Path

import pytest
from cases import DTYPES
from problems import problem

from cunorm import kernels
from cunorm.device import KNOWN
from cunorm.plan import KernelSpec, plan, shared_memory

ARCHITECTURES = (75, 90)  # without and with clusters; `python -m cunorm compile --arch` has the others
COLUMNS = (1, 33, 1000, 4096, 8191, 16384, 32768, 65537, 131072, 262144, 600001)
MASKS = [mask for mask in itertools.product([True, False], repeat=3) if any(mask)]


def has_nvrtc() -> bool:
    try:
        from cupy_backends.cuda.libs import nvrtc

        nvrtc.getVersion()
    except (ImportError, RuntimeError):
        return False
    return True


needs_nvrtc = pytest.mark.skipif(not has_nvrtc(), reason="NVRTC is not installed")


def specs(*problems, arch: int) -> list[KernelSpec]:
    """Every kernel that the plans of these problems launch, once."""
    steps = (step for task in problems for step in plan(task, KNOWN[arch]).steps)
    return list(dict.fromkeys(step.spec for step in steps))


def check(spec: KernelSpec, arch: int) -> None:
    _, used = kernels.compile_for(spec, arch)
    assert (used.stack, used.spill_stores, used.spill_loads) == (0, 0, 0), f"{spec} on sm_{arch} spills: {used}"
    assert used.shared == shared_memory(spec), f"{spec} on sm_{arch}"


@needs_nvrtc
@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("cols", COLUMNS)
@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_every_tier(direction, cols, dtype, arch):
    for spec in specs(problem(direction, 8, cols, dtype), arch=arch):
        check(spec, arch)


@needs_nvrtc
@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("dtype", ["bfloat16", "float64"])
@pytest.mark.parametrize("cols", [33, 8191, 131072, 600001])
def test_rms_norm(cols, dtype, arch):
    tasks = (problem(direction, 8, cols, dtype, op="rms_norm") for direction in ("forward", "backward"))
    for spec in specs(*tasks, arch=arch):
        check(spec, arch)


@needs_nvrtc
@pytest.mark.parametrize("dtype", DTYPES)
def test_other_dtypes_beside_x(dtype):
    """weight, bias, y and dy, at a length where a CTA holds a row."""
    for other in DTYPES:
        forward = problem("forward", 8, 4096, dtype, weight=other, bias=other, y=other)
        backward = problem("backward", 8, 4096, dtype, weight=other, y=other)
        for spec in specs(forward, backward, arch=90):
            check(spec, 90)


@needs_nvrtc
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("cols", [4096, 600001])
def test_gradients_that_are_not_wanted(cols, mask):
    for spec in specs(problem("backward", 8, cols, "bfloat16", output_mask=mask), arch=90):
        check(spec, 90)


@needs_nvrtc
@pytest.mark.parametrize(
    "changes",
    [
        {"aligned": False},
        {"weight": None, "bias": None},
        {"weight": None},
        {"bias": None},
        {"zero_centered_gamma": True},
    ],
    ids=str,
)
@pytest.mark.parametrize("cols", [33, 4096, 65536])
def test_options(cols, changes):
    tasks = [problem("forward", 8, cols, "bfloat16", **changes)]
    tasks.append(problem("backward", 8, cols, "bfloat16", **{k: v for k, v in changes.items() if k != "bias"}))
    for spec in specs(*tasks, arch=90):
        check(spec, 90)


@needs_nvrtc
def test_a_compile_error_holds_the_log(monkeypatch):
    (spec,) = specs(problem("forward", 8, 1000, "float16"), arch=90)
    monkeypatch.setattr(kernels, "source", lambda spec: "this is no CUDA")
    with pytest.raises(kernels.CompileError, match=r"NVRTC could not compile cunorm_forward for sm_90:\n.*error"):
        kernels.compile_for(spec, 90)


def test_an_edited_header_gives_another_source(monkeypatch, tmp_path):
    """CuPy's disk cache looks at the source alone: what is included must be in it."""
    (spec,) = specs(problem("forward", 8, 1000, "float16"), arch=90)
    original = kernels.source(spec)
    assert "#include" not in original
    directory = tmp_path / "kernels_cu"
    shutil.copytree(Path(str(kernels.resources.files("cunorm.kernels_cu"))), directory)
    monkeypatch.setattr(kernels.resources, "files", lambda package: directory)

    def source_now():
        kernels._file_text.cache_clear()
        return kernels.source(spec)

    try:
        assert source_now() == original
        headers = sorted(path.name for path in directory.glob("*.cuh"))
        used = [name for name in headers if f'"{name}"' in original]
        assert {"platform.cuh", "row.cuh", "moments.cuh"} <= set(used)
        for name in used:
            text = (directory / name).read_text()
            (directory / name).write_text(text + "// edited\n")
            assert source_now() != original, name
            (directory / name).write_text(text)
    finally:
        kernels._file_text.cache_clear()
