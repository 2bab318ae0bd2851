"""The CUDA text of a plan's kernels, and errors of the compiler. test_compile_matrix.py tests what compiles."""

from __future__ import annotations

import shutil

import pytest
from nvrtc import needs_nvrtc
from problems import problem

from cunorm.kernel import compile, source
from cunorm.kernel.device import KNOWN
from cunorm.plan.plan import plan
from cunorm.plan.spec import KernelSpec


def spec_of_forward() -> KernelSpec:
    (step,) = plan(problem("forward", 8, 1000, "float16"), KNOWN[90]).steps
    return step.spec


@needs_nvrtc
def test_a_compile_error_holds_the_log(monkeypatch):
    spec = spec_of_forward()
    monkeypatch.setattr(compile, "source", lambda *_: "this is no CUDA")
    with pytest.raises(
        compile.CompileError,
        match=r"could not compile cunorm_forward_spread of y = xhat \* weight \+ bias for sm_90:\n.*error",
    ):
        compile.compile_for(spec, 90)


def test_an_edited_header_gives_another_source(monkeypatch, tmp_path):
    """CuPy's disk cache looks only at the source, so that everything included must be in it."""
    spec = spec_of_forward()
    original = source.source(spec)
    assert "#include" not in original
    directory = tmp_path / "kernels_cu"
    shutil.copytree(source.KERNELS, directory)
    monkeypatch.setattr(source, "KERNELS", directory)

    def source_now():
        source._file_text.cache_clear()
        return source.source(spec)

    try:
        assert source_now() == original
        headers = sorted(path.relative_to(directory).as_posix() for path in directory.rglob("*.cuh"))
        used = [name for name in headers if f'"{name}"' in original]
        assert {"rows/numbers.cuh", "rows/row.cuh", "norms/statistics.cuh"} <= set(used)
        for name in used:
            text = (directory / name).read_text()
            (directory / name).write_text(text + "// edited\n")
            assert source_now() != original, name
            (directory / name).write_text(text)
    finally:
        source._file_text.cache_clear()


@pytest.mark.gpu
def test_what_a_kernel_uses_is_known_however_often_it_was_compiled():
    """NVRTC from 12.9 on keeps results where there is a driver, and then says nothing of resources."""
    (step,) = plan(problem("forward", 64, 4096, "bfloat16"), KNOWN[90]).steps
    first, again = (compile.compile_for(step.spec, 90) for _ in range(2))
    assert first == again
    assert first.registers > 0
