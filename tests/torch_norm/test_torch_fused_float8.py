"""Fused operations of torch tensors with FP8 output: launches, operators and compiled calls give the defined bytes."""

from __future__ import annotations

import cpu_device
import numpy
import pytest
from test_float8 import GRANULARITIES, check

torch = pytest.importorskip("torch")

from cpu_functions import FEW_SMS  # noqa: E402
from torch_launches import on_the_stand_in  # noqa: E402
from torch_tensors import array, on_devices, random, same  # noqa: E402

import cunorm  # noqa: E402
import cunorm.torch  # noqa: E402
from cunorm.torch.norm import dispatch  # noqa: E402

modulated = cunorm.fuse("layer_norm", epilogue=lambda xhat, scale, shift: xhat * (1 + scale) + shift)
wide = cunorm.fuse("layer_norm", epilogue=lambda xhat, scale, shift: xhat * (1 + scale) + shift, dtype="float32")


def check_adding(x, residual, weight, granularity, **options) -> None:
    y8, scale, y, s = cunorm.add_rms_norm.fp8_forward(x, residual, weight, granularity=granularity, **options)
    exact, s_alone = cunorm.add_rms_norm(x, residual, weight, dtype="float32")
    check(*(array(tensor.cpu()) for tensor in (exact, y8.view(torch.uint8), scale)), granularity, "e4m3")
    assert y8.dtype is torch.float8_e4m3fn
    assert same(s, s_alone)
    assert same(y, cunorm.add_rms_norm(x, residual, weight)[0])
    fewer = cunorm.add_rms_norm.fp8(x, residual, weight, granularity=granularity, **options)
    assert all(same(a.reshape(-1), b.reshape(-1)) for a, b in zip(fewer, (y8, scale, s), strict=True))


@on_devices
@pytest.mark.parametrize("granularity", GRANULARITIES)
@pytest.mark.parametrize(("rows", "cols"), [(33, 1000), (5, 4096), (3, 20000)])
def test_bytes_scales_and_the_sum(device, rows, cols, granularity):
    x, residual = (random(rows, cols, device=device, dtype=torch.bfloat16) for _ in range(2))
    check_adding(x, residual, random(cols, device=device, dtype=torch.float32), granularity)


@on_devices
@pytest.mark.parametrize("granularity", GRANULARITIES)
def test_of_an_object(device, granularity):
    x, scale = (random(*shape, device=device, dtype=torch.float16) for shape in ((2, 5, 300), (2, 1, 300)))
    y_scale = None if granularity != "tensor" else torch.tensor([0.02], device=device)
    y8, scales = modulated.fp8(x, scale=scale, shift=0.5, granularity=granularity, y_scale=y_scale)
    tensors = (wide(x, scale=scale, shift=0.5).reshape(10, 300), y8.view(torch.uint8).reshape(10, 300), scales)
    check(*(array(tensor.cpu()) for tensor in tensors), granularity, "e4m3")
    assert scales.shape == {"row": (2, 5), "tensor": (), 128: (2, 5, 3)}[granularity]


@pytest.mark.parametrize("granularity", GRANULARITIES)
def test_a_launch(monkeypatch, granularity):
    """A call is one launch, and its results are the same for rows that must be copied."""
    if cpu_device.missing():
        pytest.skip(cpu_device.missing())
    launches = on_the_stand_in(monkeypatch)
    monkeypatch.setattr(dispatch, "at_once", lambda _: True)
    x, residual = (random(7, 264, device="cpu", dtype=torch.float16) for _ in range(2))
    weight = random(264, device="cpu", dtype=torch.float32)
    expected = cunorm.add_rms_norm.fp8(x, residual, weight, granularity=granularity)
    assert len(launches.plans) == 1
    assert launches.plans[0].device == FEW_SMS
    check_adding(x, residual, weight, granularity)
    odd = residual.T.contiguous().T
    again = cunorm.add_rms_norm.fp8(x, odd, weight, granularity=granularity)
    assert all(same(a.reshape(-1), b.reshape(-1)) for a, b in zip(again, expected, strict=True))
    empty, scale = cunorm.add_rms_norm.fp8(x[:0], odd[:0], weight, granularity=granularity), expected[1]
    assert [tuple(tensor.shape) for tensor in empty] == [(0, 264), scale[:0].shape if scale.dim() else (), (0, 264)]


@on_devices
@pytest.mark.slow
@pytest.mark.parametrize("granularity", GRANULARITIES)
def test_under_compile(device, granularity):
    x, residual, weight = (random(*shape, device=device, dtype=torch.float32) for shape in ((9, 512), (9, 512), (512,)))

    @torch.compile(fullgraph=True, backend="aot_eager")
    def both(x, residual, weight):
        added = cunorm.add_rms_norm.fp8_forward(x, residual, weight, granularity=granularity)
        return *added, *modulated.fp8_forward(x, scale=weight, shift=0.5, granularity=granularity, y_scale=y_scale)

    y_scale = 0.01 if granularity == "tensor" else None
    results = both(x, residual, weight)
    assert same(results[3], x + residual)
    for y8, scale, y in (results[:3], results[4:]):
        check(*(array(tensor.cpu()) for tensor in (y, y8.view(torch.uint8), scale)), granularity, "e4m3")


@on_devices
def test_a_gradient_is_refused(device):
    x = random(3, 32, device=device, dtype=torch.float32)
    weight = random(32, device=device, dtype=torch.float32).requires_grad_()
    with pytest.raises(ValueError, match="must want no gradient"):
        cunorm.add_rms_norm.fp8(x, x, weight)
    with torch.no_grad():
        cunorm.add_rms_norm.fp8(x, x, weight)


def test_what_is_wrong_is_said():
    x = torch.ones(2, 32)
    with pytest.raises(TypeError, match="got float64"):
        cunorm.add_rms_norm.fp8(x.double(), x)
    with pytest.raises(TypeError, match="dtype must be 'e4m3' or 'e5m2'"):
        cunorm.add_rms_norm.fp8(x, x, dtype=torch.float16)
    y8, *_ = cunorm.add_rms_norm.fp8(x, x, dtype=torch.float8_e5m2)
    assert y8.dtype is torch.float8_e5m2
    with pytest.raises(TypeError, match="one float32"):
        modulated.fp8(x, scale=0.0, shift=0.0, granularity="tensor", y_scale=numpy.ones(2, "float32"))
