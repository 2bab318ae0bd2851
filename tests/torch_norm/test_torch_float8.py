"""FP8 output of torch tensors: kernels, torch's operators and torch.compile give the defined bytes."""

from __future__ import annotations

import pytest
from arrays import inputs
from functions import OPS
from test_float8 import GRANULARITIES, TYPES, check, float8

torch = pytest.importorskip("torch")

from torch_tensors import array, on_devices, random, same, tensor  # noqa: E402

import cunorm  # noqa: E402
from cunorm.torch import LayerNorm, RMSNorm  # noqa: E402

FORMATS = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("granularity", GRANULARITIES)
@pytest.mark.parametrize(("rows", "cols"), [(1, 1), (33, 1000), (8, 4096), (5, 20000)])
@pytest.mark.parametrize("op", OPS)
def test_bytes_and_scales(xp, op, rows, cols, granularity, dtype):
    """x is float32, so that y holds the exact numbers that were rounded to FP8."""
    x, _, weight, bias = map(tensor, inputs(xp, rows, cols, "float32", weight="bfloat16"))
    y8, scale, y = float8(op, x, weight, bias, granularity=granularity, dtype=dtype)
    assert (y8.dtype, y8.device, y.dtype) == (FORMATS[dtype], x.device, x.dtype)
    parameters = (weight, bias)[: 2 if op == "layer_norm" else 1]
    assert same(y, getattr(cunorm, op)(x, None, *parameters))
    on_host = [result.cpu() for result in (y, y8.view(torch.uint8), scale)]
    check(*map(array, on_host), granularity, dtype)
    again = getattr(cunorm, f"{op}_fp8")(x, None, *parameters, granularity=granularity, dtype=FORMATS[dtype])
    assert all(same(a.reshape(-1), b.reshape(-1)) for a, b in zip(again, (y8, scale), strict=True))


@on_devices
@pytest.mark.parametrize("granularity", GRANULARITIES)
def test_of_16_bits_as_numpy_has_it(device, granularity):
    """Bytes may be one rounding of float32 apart, because y is torch's on the CPU."""
    x = random(40, 1000, device=device, dtype=torch.bfloat16)
    y8, scale = cunorm.layer_norm_fp8(x, granularity=granularity)
    expected, expected_scale = cunorm.layer_norm_fp8(array(x.cpu()), granularity=granularity)
    torch.testing.assert_close(scale.cpu(), torch.from_numpy(expected_scale).reshape(scale.shape), rtol=2**-20, atol=0)
    differing = (y8.cpu().view(torch.uint8) != torch.from_numpy(expected)).double().mean()
    assert differing < 1e-3


@on_devices
@pytest.mark.slow
@pytest.mark.parametrize("granularity", GRANULARITIES)
def test_under_compile(device, granularity):
    x, weight = random(9, 512, device=device, dtype=torch.float32), random(512, device=device, dtype=torch.float32)

    @torch.compile(fullgraph=True, backend="aot_eager")
    def bytes_and_y(x, weight):
        return cunorm.rms_norm_fp8_forward(x, None, weight, granularity=granularity)

    y8, scale, y = bytes_and_y(x, weight)
    check(*(array(tensor.cpu()) for tensor in (y, y8.view(torch.uint8), scale)), granularity, "e4m3")


@on_devices
def test_a_gradient_is_refused(device):
    x = random(3, 32, device=device, dtype=torch.float32).requires_grad_()
    with pytest.raises(ValueError, match="must want no gradient"):
        cunorm.rms_norm_fp8(x)
    with torch.no_grad():
        cunorm.rms_norm_fp8(x)
    cunorm.rms_norm_fp8(x.detach())


@on_devices
@pytest.mark.parametrize("zero_centered_gamma", [False, True])
@pytest.mark.parametrize("module", [LayerNorm, RMSNorm])
def test_modules(device, module, zero_centered_gamma):
    x = random(6, 5, 64, device=device, dtype=torch.bfloat16)
    norm = module(64, device=device, dtype=torch.float32, zero_centered_gamma=zero_centered_gamma)
    with torch.no_grad():
        norm.weight += 0.3
        y8, scale = norm(x, fp8_output=True)
        function = cunorm.layer_norm_fp8 if module is LayerNorm else cunorm.rms_norm_fp8
        rest = (norm.bias, norm.eps) if module is LayerNorm else (2**-23,)
        expected = function(x, 64, norm.weight, *rest, zero_centered_gamma=zero_centered_gamma)
    assert (y8.dtype, scale.shape) == (torch.float8_e4m3fn, (6, 5))
    assert all(same(a, b) for a, b in zip((y8, scale), expected, strict=True))
    with pytest.raises(ValueError, match="must want no gradient"):
        norm(x, fp8_output=True)


@on_devices
@pytest.mark.parametrize("scale", [0.02, torch.tensor([0.02])])
def test_a_scale_that_is_given(device, scale):
    x = random(9, 64, device=device, dtype=torch.float32)
    scale = scale.to(device) if isinstance(scale, torch.Tensor) else scale
    y8, used = cunorm.layer_norm_fp8(x, granularity="tensor", scale=scale)
    y = cunorm.layer_norm(x)
    check(*(array(tensor.cpu()) for tensor in (y, y8.view(torch.uint8), used)), "tensor", "e4m3")


WRONG = [
    ({"dtype": torch.float16}, TypeError, "dtype must be 'e4m3' or 'e5m2'"),
    ({"granularity": 64}, ValueError, "granularity must be"),
    ({"granularity": "tensor", "scale": torch.ones(2)}, TypeError, "one float32"),
    ({"granularity": "tensor", "scale": torch.ones(1, dtype=torch.float64)}, TypeError, "one float32"),
]


@pytest.mark.parametrize(("options", "error", "message"), WRONG)
def test_what_is_wrong_is_said(options, error, message):
    with pytest.raises(error, match=message):
        cunorm.layer_norm_fp8(torch.ones(2, 32), **options)
    with pytest.raises(TypeError, match="got float64"):
        cunorm.layer_norm_fp8(torch.ones(2, 32, dtype=torch.float64))
