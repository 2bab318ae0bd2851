"""`logging.getLogger("cunorm")` has a line for each compile, fallback and copied layout, at INFO and no higher."""

from __future__ import annotations

import re

import numpy
import pytest
from nvrtc import needs_nvrtc
from problems import problem

from cunorm import logs
from cunorm.call.checks import Layout
from cunorm.kernel import compile
from cunorm.kernel.device import KNOWN
from cunorm.plan.plan import plan


@pytest.mark.slow
@needs_nvrtc
def test_a_compile_is_told_once_with_what_the_kernel_is(lines, monkeypatch, tmp_path):
    monkeypatch.setenv("CUNORM_CACHE_DIR", str(tmp_path))
    (step,) = plan(problem("forward", 8000, 100, "float16", bias=None), KNOWN[90]).steps
    compile.machine_code(step.spec, 90)
    (line,) = lines()
    assert re.match(r"compiled cunorm_forward for sm_90 in \d+\.\d{3} s: ", line)
    assert "100 cols" in line
    assert "y = xhat * weight" in line
    compile.machine_code(step.spec, 90)
    assert lines() == []


@needs_nvrtc
def test_text_without_a_spec_is_told_by_its_name(lines):
    compile.compile_ptx('extern "C" __global__ void probe() {}', "probe", 90)
    (line,) = lines()
    assert re.fullmatch(r"compiled probe for compute_90 in \d+\.\d{3} s", line)


def test_only_what_is_copied_is_told(lines):
    arrays = (Layout((4, 8), (1, 4), "float16", 0), None, Layout((8,), (2,), "float16", 0))
    logs.copied("layer_norm", ("x", "weight", "bias"), arrays, (True, False, True))
    assert lines() == [
        "layer_norm: x of shape (4, 8) and strides (1, 4) is copied in each call",
        "layer_norm: bias of shape (8,) and strides (2,) is copied in each call",
    ]


def test_strides_of_a_tensor(lines):
    torch = pytest.importorskip("torch")
    logs.copied("layer_norm", ("input",), (torch.empty(8, 4).t(),), (True,))
    assert lines() == ["layer_norm: input of shape (4, 8) and strides (1, 4) is copied in each call"]


def test_products_without_cublaslt_are_told(lines, monkeypatch):
    pytest.importorskip("cupy", exc_type=ImportError)
    from cunorm.linear import gemm

    def absent(name):
        raise ImportError(f"No module named {name!r}")

    monkeypatch.setattr(gemm, "import_module", absent)
    assert gemm.bindings.__wrapped__() is None
    assert lines() == [
        "layer_norm_linear: products are CuPy's gemmEx, and the bias is added beside them "
        "(No module named 'nvmath.bindings.cublasLt')"
    ]


def test_jax_from_a_callback_is_told(lines, monkeypatch):
    pytest.importorskip("jax")
    from cunorm.jax.xla import target

    monkeypatch.setattr(target.compile, "why_ptx_is_too_new", lambda: "too new")
    assert target._probed.__wrapped__().kind == "callback"
    assert lines() == ["cunorm.jax: CuPy launches the kernels from a callback in each step (too new)"]


@pytest.mark.gpu
def test_a_layout_that_is_copied_is_told_once(lines):
    import cupy

    import cunorm

    x = cupy.asarray(numpy.arange(12 * 97, dtype="float32").reshape(97, 12)).T
    lines()
    for _ in range(3):
        cunorm.layer_norm(x)
    assert [line for line in lines() if "copied" in line] == [
        "layer_norm: x of shape (12, 97) and strides (1, 12) is copied in each call"
    ]


@pytest.mark.gpu
def test_a_tensor_that_is_copied_is_told_once(lines):
    torch = pytest.importorskip("torch")
    from cunorm.torch import layer_norm

    x = torch.randn(97, 12, device="cuda").t()
    for _ in range(3):
        layer_norm(x, (97,))
    assert [line for line in lines() if "copied" in line] == [
        "layer_norm: x of shape (12, 97) and strides (1, 12) is copied in each call"
    ]
