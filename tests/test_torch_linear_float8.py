"""LayerNormLinear in FP8: recipes, contexts, casts, products, the bytes that are kept, training.

On the CPU products are emulated, of the same bytes. Every case runs on a GPU too.
"""

from __future__ import annotations

import copy
import enum
import math
import pickle
import threading
from dataclasses import dataclass
from typing import Any, NamedTuple

import ml_dtypes
import numpy
import pytest

torch = pytest.importorskip("torch")

from torch import _dynamo, nn  # noqa: E402
from torch.utils.checkpoint import checkpoint  # noqa: E402
from torch_tensors import on_devices, random, same  # noqa: E402

from bench.fp8_training import Size, last, train  # noqa: E402
from cunorm.torch import (  # noqa: E402
    Float8CurrentScaling,
    LayerNormLinear,
    MMParams,
    QParams,
    RowwiseScaling,
    autocast,
    fp8_autocast,
    is_fp8_available,
    set_recipe,
)
from cunorm.torch.linear import (  # noqa: E402
    float8_casts,
    float8_context,
    float8_functional,
    float8_operators,
    float8_passes,
    float8_products,
    float8_weights,
)
from cunorm.torch.linear.float8_casts import (  # noqa: E402
    LARGEST,
    cast_columns,
    cast_rows,
    normalised_columns,
    scale_of_tensor,
)
from cunorm.torch.linear.float8_products import product  # noqa: E402
from cunorm.torch.linear.float8_weights import quantised  # noqa: E402

RECIPES = {
    "row": RowwiseScaling(),
    "row, power of 2": RowwiseScaling(power_2_scale=True),
    "row, wide wgrad": RowwiseScaling(high_precision_wgrad=True),
    "tensor, hybrid": Float8CurrentScaling(),
    "tensor, e4m3": Float8CurrentScaling("E4M3", use_power_2_scales=True),
}
by_recipe = pytest.mark.parametrize("recipe", RECIPES.values(), ids=list(RECIPES))
ROWS, COLS, OUTS = 200, 256, 192
ERROR = {"e4m3": 0.045, "e5m2": 0.07}  # in the Frobenius norm, of a product of two rounded matrices
ELEMENT = 2.0**-3  # of Σ |a||b|: 2^-4 of each operand
E5M2_ELEMENT = 2.0**-2 * 0.75  # 2^-3 of one and 2^-4 of the other


@pytest.fixture(autouse=True)
def one_thread():
    """Products so small are slower on several, and other tests run beside."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


FORMATS = {"e4m3": ml_dtypes.float8_e4m3fn, "e5m2": ml_dtypes.float8_e5m2}


def make(device: str = "cpu", dtype: Any = torch.float32, cols: int = COLS, outs: int = OUTS, **options: Any):
    """With parameters of which none is what it begins as."""
    torch.manual_seed(0)
    module = LayerNormLinear(cols, outs, device=device, params_dtype=dtype, **options)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(torch.randn(parameter.shape).to(parameter) * 0.3)
    return module


def inputs(device: str = "cpu", dtype: Any = torch.float32, rows: int = ROWS) -> tuple[Any, Any]:
    """x with a gradient, and dy of rows and columns of unequal size."""
    x = random(rows, COLS, device=device, dtype=dtype).requires_grad_()
    dy = random(rows, OUTS) * random(rows, 1, seed=3).exp() * (random(1, OUTS, seed=4) / 2).exp()
    return x, dy.to(device, dtype)


def relative(a: Any, b: Any) -> float:
    return float((a.double() - b.double()).norm() / b.double().norm())


def bits(tensor: Any) -> Any:
    return tensor.cpu().view(torch.uint8).numpy()


# Casts: what the bytes are.


def check_scaled(found: Any, scale: Any, values: Any, dtype: str, power_2: bool) -> None:
    """Rows of `values`, float32 in NumPy: ml_dtypes' rounding of each times q, to the bit."""
    largest = numpy.float32(LARGEST[dtype])
    with numpy.errstate(all="ignore"):
        amax = abs(values).max(1, initial=0)
        q = numpy.minimum(largest / amax, numpy.float32(2.0**100))
        if power_2:
            q = numpy.where(numpy.isnan(q), q, (q.view("int32") & 0x7F800000).view("float32"))
        rounded = (values * q[:, None]).clip(-largest, largest).astype(FORMATS[dtype])
        expected = numpy.where(amax == 0, 1, 1 / q)
    nan = numpy.isnan(rounded.astype("float32"))  # of either sign
    numpy.testing.assert_array_equal(
        numpy.where(nan, found & 0x7F, found), numpy.where(nan, 0x7F, rounded.view("uint8"))
    )
    numpy.testing.assert_array_equal(numpy.isnan(scale), ~numpy.isfinite(amax))
    finite = numpy.isfinite(amax)
    numpy.testing.assert_allclose(scale[finite], expected[finite], rtol=0 if power_2 else 2.0**-23)


def special(rows: int, cols: int) -> Any:
    """Rows of every kind: plain ones, zeros, tiny, huge, one infinity, one NaN, the largest in the last column."""
    values = random(rows, cols, dtype=torch.float32)
    values[1] = 0
    values[2] *= 1e-36
    values[3] *= 1e30
    values[4, 5] = math.inf
    values[5, 6] = math.nan
    values[6, -1] = -100
    values[7] = -0.0
    return values


@on_devices
@pytest.mark.parametrize("dtype", ["e4m3", "e5m2"])
@pytest.mark.parametrize("power_2", [False, True])
@pytest.mark.parametrize(("rows", "cols"), [(33, 100), (16, 256)])
def test_casts(device, rows, cols, power_2, dtype):
    values = special(rows, cols).to(device)
    found, scale, sums, amax = cast_rows(values, dtype, power_2_scale=power_2, column_sums=True, column_amax=True)
    assert found.shape == (rows, cols)
    check_scaled(bits(found), scale.cpu().numpy(), values.cpu().numpy(), dtype, power_2)
    numpy.testing.assert_array_equal(amax.cpu().numpy(), abs(values.cpu().numpy()).max(0))
    finite = values.cpu()[6:].to(device)
    _, _, sums, amax = cast_rows(finite, dtype, column_sums=True, column_amax=True)
    torch.testing.assert_close(sums.double(), finite.double().sum(0), rtol=1e-5, atol=1e-4)
    # By columns: the same of the transposed matrix, and zeros to a multiple of 16.
    columns = special(cols, rows).t().contiguous().to(device)
    amax = columns.abs().amax(0)
    found, scale = cast_columns(columns, amax, dtype, power_2_scale=power_2)
    assert found.shape == (cols, -(-rows // 16) * 16)
    assert not bits(found)[:, rows:].any()
    check_scaled(bits(found)[:, :rows], scale.cpu().numpy(), columns.t().cpu().numpy(), dtype, power_2)


@on_devices
def test_casts_with_a_scale_that_is_given(device):
    values = random(20, 48, device=device, dtype=torch.float32)
    scale = scale_of_tensor(values)
    assert float(scale) == pytest.approx(float(values.abs().max()) / 448, rel=1e-6)
    found, same_scale, _, _ = cast_rows(values, scale=scale)
    assert same_scale is scale
    expected = (values.cpu().numpy() * (1 / scale.cpu().numpy())).clip(-448, 448).astype(FORMATS["e4m3"])
    numpy.testing.assert_array_equal(bits(found), expected.view("uint8"))
    columns, _ = cast_columns(values, None, scale=scale)
    assert same(columns[:, :20].contiguous(), found.t().contiguous())


@on_devices
@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([0.0, 0.0], 1.0),
        ([math.inf, 1.0], 1.0),
        ([math.nan, 1.0], 1.0),
        ([1e-44, 0.0], 2.0**-127),
        ([-3.0, 1.0], 3 / 448),
    ],
)
def test_scale_of_a_tensor_is_transformer_engines(device, values, expected):
    """1 where the largest is 0, infinite or NaN; an infinite multiplier becomes the largest of float32."""
    scale = scale_of_tensor(torch.tensor([values], device=device))
    assert float(scale) == pytest.approx(expected, rel=1e-3, abs=1e-38)
    assert float(scale_of_tensor(torch.tensor([values], device=device), least=448.0)) == 1.0
    power_2 = scale_of_tensor(torch.tensor([[3.0]], device=device), power_2_scale=True)
    assert float(power_2) == 2.0**-7


@on_devices
@pytest.mark.parametrize("operation", ["layer_norm", "rms_norm", "zero_centered_layer_norm", "zero_centered_rms_norm"])
def test_nothing_exceeds_the_static_scale(device, operation):
    """Rows with one large number, which come as near to the bound as rows can, and biases that are larger than it."""
    from cunorm.operation import NAMED
    from cunorm.torch.norm import formulas

    assert operation in NAMED
    rows, cols = 64, 64
    x = 1e-3 * random(rows, cols, device=device, dtype=torch.float32)
    x[torch.arange(rows), torch.arange(rows) % cols] += 100.0 * (1 - 2 * (torch.arange(rows, device=device) % 2))
    weight = random(cols, device=device, dtype=torch.float32) * 0.1
    bias = random(cols, device=device, dtype=torch.float32, seed=1) * 3 if "layer" in operation else None
    statistics = formulas.statistics_of(operation, x, 1, 1e-5)
    z = formulas.forward(operation, x, statistics, weight, bias)
    found, scale = normalised_columns(x, statistics, weight, bias, operation)
    assert found.shape == (cols, rows)
    gamma = weight.abs() if not operation.startswith("zero") else (1 + weight).abs()
    bound = gamma * math.sqrt(cols - ("layer" in operation)) + (0 if bias is None else bias.abs())
    torch.testing.assert_close(scale * 448, bound, rtol=1e-6, atol=0)
    assert (z.abs().amax(0) <= bound * (1 + 1e-5)).all()
    torch.testing.assert_close(found.float() * scale[:, None], z.t(), rtol=2.0**-4, atol=float(scale.max()) * 2.0**-9)


# Products.


@on_devices
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("rows", [0, 1, 16, 17, 200])
@pytest.mark.parametrize("by_row", [False, True])
@pytest.mark.parametrize("bias", [False, True])
def test_product(device, bias, by_row, rows, dtype):
    """What the bytes stand for, multiplied in float64."""
    a, b = random(rows, 64, dtype=torch.float32), random(48, 64, dtype=torch.float32)
    one = random(48, dtype=dtype) if bias else None
    scales = (None, None) if by_row else (torch.tensor(0.02), torch.tensor(0.03))
    (a8, a_scale), (b8, b_scale) = (cast_rows(m, scale=s)[:2] for m, s in zip((a, b), scales, strict=True))
    wide = [t.double() * (s.double()[:, None] if by_row else s.double()) for t, s in ((a8, a_scale), (b8, b_scale))]
    expected = wide[0] @ wide[1].t() + (0 if one is None else one.double())
    y = product(*(t.to(device) for t in (a8, a_scale, b8, b_scale)), dtype, None if one is None else one.to(device))
    assert (y.dtype, y.shape) == (dtype, (rows, 48))
    tolerance = {torch.float32: 1e-3 if device == "cuda" else 1e-5, torch.bfloat16: 2.0**-7, torch.float16: 2.0**-9}
    torch.testing.assert_close(y.cpu().double(), expected, rtol=tolerance[dtype], atol=4 * tolerance[dtype])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("rows", [16, 17])
@pytest.mark.parametrize("by_row", [False, True])
@pytest.mark.parametrize("hopper", [False, True])
@pytest.mark.parametrize("bias", [False, True])
def test_how_torch_is_asked(monkeypatch, bias, hopper, by_row, rows, dtype):
    """torch has these products on the CPU too, without biases; what a GPU would refuse is not asked for."""
    own = torch._scaled_mm

    def scaled_mm(a, b, a_scale, b_scale, *, bias=None, out_dtype, use_fast_accum):
        assert b.stride(0) == 1
        assert bias is None or bias.dtype is out_dtype is not torch.float32
        few = rows <= float8_products.FEW_ROWS
        assert a_scale.shape == ((rows, 1) if by_row and not few else ())
        assert b_scale.shape == ((1, 48) if by_row and not few else ())
        assert out_dtype is torch.bfloat16 or hopper or not by_row or few
        y = own(a, b, a_scale, b_scale, out_dtype=torch.float32, use_fast_accum=use_fast_accum)
        return (y if bias is None else y + bias).to(out_dtype)

    monkeypatch.setattr(torch, "_scaled_mm", scaled_mm)
    monkeypatch.setattr(float8_products, "_is_hopper", lambda index: hopper)
    a, b = random(rows, 64, dtype=torch.float32), random(48, 64, dtype=torch.float32)
    scales = (None, None) if by_row else (torch.tensor(0.02), torch.tensor(0.03))
    operands = [t for m, s in zip((a, b), scales, strict=True) for t in cast_rows(m, scale=s)[:2]]
    given = (*operands, dtype, random(48, dtype=torch.float32) if bias else None, True)
    found, expected = float8_products._by_torch(*given), float8_products._emulated(*given)
    assert found.dtype is dtype
    torch.testing.assert_close(found.float(), expected.float(), rtol=2.0**-7, atol=0.1 if bias else 2.0**-7)


@on_devices
@by_recipe
def test_each_product_is_near(device, recipe):
    """y, dz and dweight against float64: in the norm, and every element within a part of Σ |a||b|."""
    check_products(device, recipe)


def check_products(device: str, recipe: Any) -> None:
    scheme = recipe.scheme
    module = make(device, bias=False)
    x, dy = inputs(device)
    weights = quantised(module.weight.detach(), scheme, True)
    options = float8_passes.Float8Options("layer_norm", 1e-5, torch.float32, scheme)
    ln = (module.layer_norm_weight.detach(), module.layer_norm_bias.detach())
    found = float8_passes.forward(x.detach(), weights, None, *ln, options, True, True)
    saved = float8_passes.Saved(x.detach(), *weights[2:], *ln, found.statistics, found.z_scale)
    rounded = float8_passes._Rounded(
        dy, saved, options, float8_passes.Dtypes(torch.float32, None), wants_dweight=True, sums=True
    )
    dz = product(rounded.rows, rounded.scale, weights.columns, weights.column_scale, torch.float32)
    z, w, g = (t.detach().cpu().double() for t in (found.z, module.weight, dy))
    rounded.turn()
    # What is near zero beside the largest of its tensor, or row, may be lost.
    near(found.y, z, w.t(), "e4m3")
    near(dz, g, w, scheme.gradient)
    if scheme.high_precision_wgrad:
        torch.testing.assert_close(rounded.weight().cpu().double(), g.t() @ z, rtol=1e-4, atol=1e-3)
    else:
        near(rounded.weight(), g.t(), z, scheme.gradient)
    torch.testing.assert_close(rounded.bias().cpu().double(), g.sum(0), rtol=1e-5, atol=1e-3)


def near(found: Any, a: Any, b: Any, dtype: str) -> None:
    found, expected = found.cpu().double(), a @ b
    assert relative(found, expected) <= ERROR[dtype], relative(found, expected)
    allowed = (ELEMENT if dtype == "e4m3" else E5M2_ELEMENT) * (a.abs() @ b.abs())
    # Besides, numbers below the least normal one of a format: by tensors, many.
    least = 2.0**-10 if dtype == "e4m3" else 2.0**-17
    flushed = least / LARGEST[dtype] * (a.abs().max() * b.abs().sum(0) + a.abs().sum(1)[:, None] * b.abs().max())
    assert ((found - expected).abs() <= allowed + flushed).all()


# The module: every keyword by every recipe.

KEYWORDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "RMSNorm": {"normalization": "RMSNorm"},
    "zero-centred": {"zero_centered_gamma": True},
    "zero-centred RMSNorm": {"zero_centered_gamma": True, "normalization": "RMSNorm"},
    "no bias": {"bias": False},
    "bias returned": {"return_bias": True},
    "z returned": {"return_layernorm_output": True},
    "z and bias returned": {"return_layernorm_output": True, "return_bias": True},
    "split": {"parameters_split": {"q": 96, "k_": 64, "v": 32}},
    "main_grad": {"fuse_wgrad_accumulation": True},
    "main_grad of a split": {"fuse_wgrad_accumulation": True, "parameters_split": {"a": 90, "b": 102}},
    "delayed": {"delay_wgrad_compute": True},
    "delayed main_grad": {"delay_wgrad_compute": True, "fuse_wgrad_accumulation": True},
    "z kept": {"keep_normalized": True},
}


class Results(NamedTuple):
    outputs: list[Any]
    gradients: dict[str, Any]


def step(module: Any, x: Any, dy: Any, first: bool | None = None) -> Results:
    """All that a call and its backward pass give; main_grad in place of what is added to it."""
    for name, parameter in module.named_parameters():
        parameter.grad = None
        if module.fuse_wgrad_accumulation and name.endswith("weight") and "norm" not in name:
            parameter.main_grad = torch.full_like(parameter, 2.0, dtype=torch.float32)
    x = x.detach().requires_grad_()
    results = module(x, is_first_microbatch=first)
    outputs = list(results) if isinstance(results, tuple) else [results]
    others = [random(*o.shape, device=o.device, dtype=o.dtype, seed=9) for o in outputs[1:]]
    torch.autograd.backward(
        [o for o in outputs if o.requires_grad], [dy, *others][: sum(o.requires_grad for o in outputs)]
    )
    module.backward_dw()
    gradients = {name: p.grad if p.grad is not None else p.main_grad - 2 for name, p in module.named_parameters()}
    return Results([o.detach() for o in outputs], {"x": x.grad, **gradients})


@on_devices
@by_recipe
@pytest.mark.parametrize("options", KEYWORDS.values(), ids=list(KEYWORDS))
def test_every_keyword_by_every_recipe(device, options, recipe):
    """Against the same module in float64 without FP8."""
    module = make(device, **options)
    wide = copy.deepcopy(module).double()
    x, dy = inputs(device)
    expected = step(wide, x.double(), dy.double())
    with autocast(recipe=recipe):
        found = step(module, x, dy)
    assert len(found.outputs) == len(expected.outputs)
    assert relative(found.outputs[0], expected.outputs[0]) <= ERROR["e4m3"]
    for a, b in zip(found.outputs[1:], expected.outputs[1:], strict=True):
        torch.testing.assert_close(a.double(), b, rtol=1e-4, atol=1e-4)
    assert found.gradients.keys() == expected.gradients.keys()
    gradient = recipe.scheme.gradient
    for name, b in expected.gradients.items():
        a = found.gradients[name]
        if name.endswith("bias") and "norm" not in name:
            torch.testing.assert_close(a.double(), b, rtol=1e-4, atol=1e-2)
        else:
            assert relative(a, b) <= ERROR[gradient], (name, relative(a, b))


@on_devices
@by_recipe
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("rows", [0, 1, 13, 200])
def test_dtypes_and_numbers_of_rows(device, rows, dtype, recipe):
    module = make(device, dtype, return_layernorm_output=True)
    x, dy = inputs(device, dtype, rows)
    dy = dy / 64
    with autocast(recipe=recipe):
        found = step(module, x, dy)
    assert [o.dtype for o in found.outputs] == [dtype] * 2
    assert all(g.dtype is dtype for g in found.gradients.values())
    expected = step(copy.deepcopy(module).double(), x.double(), dy.double())
    if not rows:
        assert not any(g.any() for g in found.gradients.values())
        return
    assert relative(found.outputs[0], expected.outputs[0]) <= ERROR["e4m3"]
    assert relative(found.gradients["weight"], expected.gradients["weight"]) <= ERROR["e5m2"]
    assert relative(found.gradients["x"], expected.gradients["x"]) <= ERROR["e5m2"] + 0.01


@on_devices
def test_torch_autocast(device):
    """y and z in autocast's dtype; weight goes to 8 bits from its own."""
    module = make(device, return_layernorm_output=True, return_bias=True)
    x, dy = inputs(device)
    with autocast(), torch.autocast(device, torch.bfloat16):
        y, bias, z = module(x)
    assert y.dtype is bias.dtype is z.dtype is torch.bfloat16
    y.backward(dy.bfloat16())
    assert x.grad.dtype is torch.float32
    assert all(p.grad is None or p.grad.dtype is torch.float32 for p in module.parameters())
    with autocast():
        exact = module(x)[0]
    torch.testing.assert_close(y.float(), exact, rtol=2.0**-8, atol=1e-6 if device == "cpu" else 2.0**-8)


@on_devices
@pytest.mark.parametrize("frozen", [["weight"], ["bias"], ["layer_norm_weight", "layer_norm_bias"], ["weight", "bias"]])
@by_recipe
def test_frozen_parameters(device, recipe, frozen):
    module = make(device)
    x, dy = inputs(device)
    with autocast(recipe=recipe):
        expected = step(module, x, dy).gradients
        for name in frozen:
            getattr(module, name).requires_grad_(False)
        module.zero_grad()
        x.grad = None
        module(x).backward(dy)
    found = {"x": x.grad, **{name: p.grad for name, p in module.named_parameters()}}
    assert [name for name, g in found.items() if g is None] == [n for n in expected if n in frozen]
    for name, gradient in found.items():
        if gradient is not None and name == "bias":  # a kernel that finds no largest values may add up in another order
            torch.testing.assert_close(gradient, expected[name], rtol=1e-6, atol=1e-4)
        elif gradient is not None:
            assert same(gradient, expected[name])


@on_devices
def test_a_row_does_not_depend_on_others(device):
    """Its bytes and scales; the product itself may add up in another order where there are other numbers of rows."""
    module = make(device)
    x, dy = inputs(device)
    with autocast():
        y = module(x)
        y.backward(dy)
        whole = x.grad
        part = x[100:150].detach().requires_grad_()
        y_part = module(part)
        y_part.backward(dy[100:150])
    # A GPU's tensor cores keep about 13 bits of a sum that is added up fast.
    tolerance = 1e-5 if device == "cpu" else 2.0**-10
    torch.testing.assert_close(y_part, y[100:150], rtol=tolerance, atol=4 * tolerance)
    torch.testing.assert_close(part.grad, whole[100:150], rtol=10 * tolerance, atol=4 * tolerance)


@on_devices
@pytest.mark.parametrize("bad", [math.inf, math.nan])
def test_an_overflow_is_seen(device, bad):
    """By a gradient scaler: in dx of that row and in dweight."""
    check_overflow(device, bad)


def check_overflow(device: str, bad: float) -> None:
    module = make(device)
    x, dy = inputs(device)
    dy[7, 3] = bad
    with autocast():
        module(x).backward(dy)
    assert x.grad[7].isnan().all()
    assert x.grad[[6, 8]].isfinite().all()
    assert not module.weight.grad[3].isfinite().any()
    assert module.weight.grad[4].isfinite().all()


# Contexts and recipes.


def fp8_of(module: Any, x: Any) -> str:
    """Which recipe a call followed, by its bits."""
    found = module(x)
    for name, recipe in RECIPES.items():
        if name == "row, wide wgrad":
            continue
        own, module.fp8_recipe = module.fp8_recipe, None
        with autocast(recipe=recipe):
            if same(found, module(x)):
                return name
        module.fp8_recipe = own
    return "none"


def test_contexts_nest_and_the_inner_wins():
    module, (x, _) = make().requires_grad_(False), inputs()
    x = x.detach()
    tensor = RECIPES["tensor, hybrid"]
    assert fp8_of(module, x) == "none"
    with autocast():
        assert fp8_of(module, x) == "row"
        with fp8_autocast(fp8_recipe=tensor):
            assert fp8_of(module, x) == "tensor, hybrid"
            with autocast(enabled=False):
                assert fp8_of(module, x) == "none"
            with pytest.raises(ZeroDivisionError), autocast(enabled=False, recipe="of no meaning then"):
                1 / 0  # noqa: B018
            assert fp8_of(module, x) == "tensor, hybrid"
        assert fp8_of(module, x) == "row"
        with pytest.raises(ValueError, match="recipe must be one that is known"), autocast(recipe=3):
            pass
        assert fp8_of(module, x) == "row"
    assert fp8_of(module, x) == "none"


def test_a_context_is_of_the_process():
    """Autograd's threads are others than the user's."""
    module, (x, _) = make().requires_grad_(False), inputs()
    found = []
    with autocast():
        thread = threading.Thread(target=lambda: found.append(module(x.detach())))
        thread.start()
        thread.join()
        assert same(found[0], module(x.detach()))


def test_recipes_of_modules():
    model = nn.ModuleDict({"a": make(), "b": make(), "c": nn.Linear(4, 4)})
    x = inputs()[0].detach()
    assert set_recipe(model, RECIPES["tensor, hybrid"], filter=lambda name, _: name == "b") is model
    assert not hasattr(model["c"], "fp8_recipe")
    assert model["a"].fp8_recipe is None
    for some in (model, copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        with torch.no_grad():
            assert fp8_of(copy.deepcopy(some["b"]), x) == "tensor, hybrid"
            with autocast():
                assert fp8_of(copy.deepcopy(some["a"]), x) == "row"
                assert fp8_of(copy.deepcopy(some["b"]), x) == "tensor, hybrid"
            with autocast(enabled=False):
                plain = some["b"](x)
    set_recipe(model, None)
    with torch.no_grad():
        assert same(model["b"](x), plain)


def look_alike(name: str, **fields: Any) -> Any:
    """A dataclass of that name, as TransformerEngine's are, some with attributes that are no fields."""
    kind = type(name, (), {"__annotations__": dict.fromkeys(fields, Any), **fields})
    return dataclass(unsafe_hash=True)(kind)()


class Format(enum.Enum):
    E4M3 = (448, 448)
    HYBRID = (448, 57344)
    E5M2 = (57344, 57344)


class TheirQParams(NamedTuple):
    power_2_scale: bool = False
    amax_epsilon: float = 0.0


def current_scaling(**fields: Any) -> Any:
    common = {"use_power_2_scales": False, "fp8_format": Format.HYBRID, "fp8_dpa": False, "fp8_mha": False}
    common |= {"backward_override": None, "fp8_gemm_fprop": look_alike("MMParams", use_split_accumulator=False)}
    return look_alike("Float8CurrentScaling", **common | fields)


def test_recipes_of_transformer_engine():
    from cunorm.torch.linear.recipes import recognised

    assert recognised("f", None) == RowwiseScaling()
    assert recognised("f", current_scaling()) == Float8CurrentScaling()
    theirs = current_scaling(fp8_format=Format.E4M3)
    theirs.fp8_quant_bwd_grad = TheirQParams(True, 0.5)
    theirs.fp8_gemm_wgrad = look_alike("MMParams", use_split_accumulator=False)
    ours = Float8CurrentScaling("E4M3", fp8_quant_bwd_grad=QParams(True, 0.5), fp8_gemm_wgrad=MMParams(False))
    assert recognised("f", theirs) == ours
    assert len({ours, recognised("f", theirs), RowwiseScaling()}) == 2
    scheme = ours.scheme
    assert (scheme.power_2, scheme.least, scheme.fast) == ((False, False, True), (0, 0, 0.5), (True, False, True))


REFUSED = [
    *[
        (look_alike(name, margin=0), NotImplementedError, f"got {name}, which is not. Use RowwiseScaling")
        for name in ("DelayedScaling", "MXFP8BlockScaling", "NVFP4BlockScaling", "Float8BlockScaling")
    ],
    (look_alike("SomeScaling"), ValueError, "got SomeScaling"),
    ("RowwiseScaling", ValueError, "got str"),
    (look_alike("RowwiseScaling", margin=1), ValueError, "RowwiseScaling.margin must be left out; got 1"),
    (current_scaling(amax_history_len=3), ValueError, "Float8CurrentScaling.amax_history_len must be left out"),
    (current_scaling(backward_override="high_precision"), ValueError, "backward_override must be left out"),
    (current_scaling(fp8_mha=True), ValueError, "fp8_mha must be left out; got True"),
    (current_scaling(fp8_format=Format.E5M2), ValueError, "must be 'HYBRID' or 'E4M3'; got 'E5M2'"),
    (
        current_scaling(fp8_quant_fwd_inp=look_alike("QParams", stochastic_rounding=True)),
        ValueError,
        "QParams.stochastic_rounding must be left out",
    ),
]


@pytest.mark.parametrize(("recipe", "error", "phrase"), REFUSED, ids=[phrase for _, _, phrase in REFUSED])
def test_recipes_that_are_refused(recipe, error, phrase):
    with pytest.raises(error) as caught, autocast(recipe=recipe):
        pass
    assert phrase in str(caught.value)
    assert str(caught.value).startswith("autocast: ") or "fp8_format" in str(caught.value)
    model = make()
    with pytest.raises(error):
        set_recipe(model, recipe)
    assert model.fp8_recipe is None
    with autocast(enabled=False, recipe=recipe):
        pass


def test_is_fp8_available(monkeypatch):
    available, reason = is_fp8_available(return_reason=True)
    assert available is is_fp8_available() is (not reason)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 77)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: (8, 0))
    assert is_fp8_available(return_reason=True) == (False, "FP8 needs compute capability 8.9 or more; this GPU has 8.0")
    float8_context.why_not.cache_clear()


# Backward passes follow their forward pass.


def check_recorded(device: str) -> None:
    """Outside of any context, and inside another: the bits of a backward pass inside its own."""
    module = make(device)
    x, dy = inputs(device)

    def gradients(context):
        with autocast(recipe=RECIPES["row"]):
            y = module(x)
        with context:
            return torch.autograd.grad(y, [x, *module.parameters()], dy)

    expected = gradients(autocast(recipe=RECIPES["row"]))
    for other in (autocast(enabled=False), autocast(recipe=RECIPES["row, power of 2"])):
        assert all(same(a, b) for a, b in zip(gradients(other), expected, strict=True))


@on_devices
def test_a_backward_pass_follows_its_forward_pass(device):
    check_recorded(device)


@on_devices
@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("where", ["outside", "another recipe", "switched off"])
def test_checkpoints_compute_again_by_the_recipe_of_before(device, use_reentrant, where):
    module = make(device)
    x, dy = inputs(device)
    contexts = {
        "outside": lambda: autocast(enabled=False),
        "another recipe": lambda: autocast(recipe=RECIPES["tensor, hybrid"]),
    }

    def gradients(call):
        module.zero_grad()
        x.grad = None
        with autocast():
            y = call(x)
        if where == "switched off":
            y.backward(dy)
        else:
            with contexts[where]():
                y.backward(dy)
        return [x.grad, *(p.grad for p in module.parameters())]

    direct = gradients(module)
    again = gradients(lambda x: checkpoint(module, x, use_reentrant=use_reentrant))
    assert all(same(a, b) for a, b in zip(direct, again, strict=True))


# The bytes of weight that are kept.


def made(monkeypatch) -> list[int]:
    """Grows with every time that weight goes to 8 bits."""
    calls = []

    def counted(*arguments):
        calls.append(1)
        return quantised(*arguments)

    monkeypatch.setattr(float8_weights, "quantised", counted)
    return calls


def check_cache(device: str, calls: list[int] | None = None, split: Any = None) -> None:
    module = make(device, parameters_split=split)
    part = getattr(module, "weight" if split is None else "b_weight")
    x, _ = inputs(device)

    def fresh() -> Any:
        with torch.enable_grad():
            return module(x.detach().requires_grad_()).detach()

    def kept(count: int) -> None:
        before = 0 if calls is None else len(calls)
        y = module(x)
        assert calls is None or len(calls) == before + count
        assert same(y, fresh())

    with autocast(), torch.no_grad():
        kept(1)
        kept(0)
        part.mul_(2)
        kept(1)
        kept(0)
        part.data = part.data * 0.5
        kept(1)
        part.data.copy_(part.data * 3)
        module.drop_fp8_weights()
        kept(1)
        module.eval()
        kept(1)
        module.load_state_dict({name: value * 1.5 for name, value in module.state_dict().items()})
        kept(1)
        setattr(module, "weight" if split is None else "b_weight", nn.Parameter(part.detach() * 2))
        kept(1)
        with autocast(recipe=RECIPES["tensor, hybrid"]):
            kept(1)
        kept(1)
        expected = fresh()
        with torch.inference_mode():
            assert same(module(x), expected)


@on_devices
@pytest.mark.parametrize("split", [None, {"a": 96, "b": 96}], ids=["whole", "split"])
def test_without_gradients_weight_is_converted_once(device, split, monkeypatch):
    check_cache(device, made(monkeypatch), split)


@on_devices
def test_a_frozen_weight_is_converted_once(device, monkeypatch):
    calls = made(monkeypatch)
    module = make(device)
    x, dy = inputs(device)
    module.weight.requires_grad_(False)
    with autocast():
        first = torch.autograd.grad(module(x), x, dy)[0]
        assert same(torch.autograd.grad(module(x), x, dy)[0], first)
        assert len(calls) == 1
        module.weight.mul_(2)
        assert not same(torch.autograd.grad(module(x), x, dy)[0], first)
        module.weight.requires_grad_(True)
        module(x)
    assert len(calls) == 3


@on_devices
@by_recipe
def test_first_microbatch(device, recipe, monkeypatch):
    """None finds the bytes and keeps none; True keeps them; False takes them, and is equal in every bit."""
    calls = made(monkeypatch)
    module = make(device)
    x, dy = inputs(device)
    with autocast(recipe=recipe):
        uncached = step(module, x, dy)
        step(module, x, dy)
        assert len(calls) == 2
        first = step(module, x, dy, True)
        later = [step(module, x, dy, False) for _ in range(3)]
        assert len(calls) == 3
        for found in (first, *later):
            assert same(found.outputs[0], uncached.outputs[0])
            assert all(same(g, uncached.gradients[name]) for name, g in found.gradients.items())
        with torch.no_grad():
            module.weight.mul_(2)
        assert same(step(module, x, dy, False).outputs[0], uncached.outputs[0])
        again = step(module, x, dy, True)
        assert len(calls) == 4
        assert same(again.outputs[0], step(module, x, dy).outputs[0])
        assert not same(again.outputs[0], uncached.outputs[0])
        module.drop_fp8_weights()
        assert same(step(module, x, dy, False).outputs[0], again.outputs[0])


@on_devices
def test_inference_tensors_are_kept_where_it_is_asked(device, monkeypatch):
    calls = made(monkeypatch)
    with torch.inference_mode():
        module = make(device)
        x = inputs(device)[0].detach()
        with autocast():
            expected = [module(x), module(x)][1]
            assert len(calls) == 2
            assert same(module(x, is_first_microbatch=True), expected)
            assert same(module(x, is_first_microbatch=False), expected)
            assert len(calls) == 3


def test_what_was_kept_in_inference_mode_is_no_use_to_training():
    module, (x, dy) = make(), inputs()
    with autocast():
        expected = step(module, x, dy)
        with torch.inference_mode():
            module(x, is_first_microbatch=True)
        found = step(module, x, dy, False)
    assert all(same(g, expected.gradients[name]) for name, g in found.gradients.items())


def test_nothing_is_kept_in_copies_or_checkpoints():
    module, x = make(), inputs()[0].detach()
    names = list(module.state_dict())
    with autocast(), torch.no_grad():
        y = module(x)
        assert module._fp8_weights._kept is not None
        assert list(module.state_dict()) == names
        for other in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
            assert other._fp8_weights._kept is None
            assert same(other(x), y)


def test_transformer_engines_state_is_not_read():
    """It may be a pickle that does anything."""
    source, module = make(), make()

    class Never:
        def __reduce__(self):
            return pytest.fail, ("unpickled",)

    state = source.state_dict()
    state["_extra_state"] = torch.frombuffer(bytearray(pickle.dumps(Never())), dtype=torch.uint8)
    assert not any(module.load_state_dict(state))


# Results in 8 bits, and what is refused.


@on_devices
@by_recipe
def test_y_in_8_bits(device, recipe):
    module = make(device, return_bias=True)
    x = inputs(device)[0].detach().view(2, 100, COLS)
    with autocast(recipe=recipe), torch.no_grad():
        (found, scale), bias = module(x, fp8_output=True)
        y, _ = module(x)
        expected, expected_scale, _, _ = cast_rows(y.view(ROWS, OUTS))
    assert (found.shape, scale.shape) == ((2, 100, OUTS), (2, 100))
    assert same(found, expected.view(2, 100, OUTS))
    assert same(scale, expected_scale.view(2, 100))
    assert same(bias, module.bias)


class Bad(NamedTuple):
    what: str
    module: dict[str, Any]
    call: dict[str, Any]
    error: type[Exception]
    phrase: str


BAD = [
    Bad("in_features", {"cols": 40}, {}, ValueError, "in FP8 in_features must be a multiple of 16; got 40"),
    Bad("out_features", {"outs": 24}, {}, ValueError, "in FP8 out_features must be a multiple of 16; got 24"),
    Bad("fp8_grad", {}, {"fp8_grad": True}, ValueError, "fp8_grad must be False"),
    Bad("fp8_output", {}, {"fp8_output": True}, ValueError, "fp8_output=True needs a call without gradients"),
    Bad("float64", {"dtype": torch.float64}, {}, TypeError, "in FP8 input must have dtype"),
]


@on_devices
@pytest.mark.parametrize("bad", BAD, ids=lambda bad: bad.what)
def test_what_is_refused(device, bad):
    module = make(device, **bad.module)
    x = random(3, bad.module.get("cols", COLS), device=device, dtype=module.weight.dtype)
    before = copy.deepcopy(module.state_dict())
    with pytest.raises(bad.error) as caught, autocast():
        module(x, **{"is_first_microbatch": True, **bad.call})
    assert bad.phrase in str(caught.value)
    assert module._fp8_weights._kept is None
    assert module._fp8_outside is False
    assert all(same(a, b) for a, b in zip(before.values(), module.state_dict().values(), strict=True))
    module(x)


def test_a_gpu_without_it_is_never_served_in_silence(monkeypatch):
    """The check that a call on a GPU goes through."""
    monkeypatch.setattr(float8_context, "why_not", lambda index: "this GPU has 8.0")

    class OnGpu(NamedTuple):
        dtype: Any = torch.float32
        shape: tuple = (64, 64)
        is_cuda: bool = True

        def get_device(self):
            return 0

    monkeypatch.setattr(float8_functional, "in_one_step", lambda *tensors: True)
    with pytest.raises(RuntimeError, match=r"FP8 must be available; this GPU has 8\.0"):
        float8_functional._check_float8("LayerNormLinear", OnGpu(), OnGpu())


def test_functorch_and_subclasses_are_refused():
    module, x = make(), inputs()[0].detach()
    with autocast(), pytest.raises(RuntimeError, match="FP8 is for plain tensors"):
        torch.func.grad(lambda x: module(x).sum())(x)


def test_no_second_derivative():
    module, (x, dy) = make(), inputs()
    with autocast():
        y = module(x)
    with pytest.raises(RuntimeError, match="in FP8 there are first derivatives alone"):
        torch.autograd.grad(y, x, dy, create_graph=True)


# Under torch.compile.


@on_devices
@pytest.mark.slow
@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.gpu)])
@pytest.mark.parametrize(
    ("recipe", "options"),
    [
        (RECIPES["row"], {}),
        (RECIPES["row, wide wgrad"], {"parameters_split": ("a", "b"), "normalization": "RMSNorm"}),
        (RECIPES["tensor, hybrid"], {}),
    ],
    ids=["row", "row, wide wgrad", "tensor"],
)
def test_compiled_whole(device, recipe, options, backend):
    """One graph, the bits of eager mode; another recipe is compiled anew."""
    _dynamo.reset()
    module = make(device, return_bias=True, return_layernorm_output=True, **options)
    compiled = torch.compile(module, fullgraph=True, backend=backend, dynamic=True)

    def gradients(call, x, dy):
        y, bias, z = call(x)
        return [y, *torch.autograd.grad((y * dy + bias).sum() + z.sin().sum(), [x, *module.parameters()])]

    for rows in (48, 200):
        x, dy = inputs(device, rows=rows)
        with autocast(recipe=recipe):
            found, expected = gradients(compiled, x, dy), gradients(module, x, dy)
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    with autocast(recipe=recipe), torch.no_grad():
        torch.testing.assert_close(compiled(x), module(x))
    torch.testing.assert_close(compiled(x), module(x), rtol=1e-4, atol=1e-4)
    assert not torch.equal(expected[0], module(x)[0])
    with autocast(enabled=False):
        torch.testing.assert_close(compiled(x)[0], module(x)[0], rtol=1e-4, atol=1e-4)


@on_devices
@pytest.mark.parametrize("recipe", [RECIPES["row"], RECIPES["tensor, hybrid"]], ids=["row", "tensor"])
@pytest.mark.parametrize("wants", [False, True])
def test_opcheck(device, wants, recipe):
    module, (x, dy) = make(device), inputs(device, rows=32)
    options = float8_operators.flat(float8_passes.Float8Options("layer_norm", 1e-5, torch.float32, recipe.scheme))
    given = [t.detach() for t in (x, module.weight, module.bias, module.layer_norm_weight, module.layer_norm_bias)]
    forward, backward = float8_operators.norm_linear_forward, float8_operators.norm_linear_backward
    tests = ("test_schema", "test_faketensor")
    torch.library.opcheck(forward, (*given, *options, wants, wants), test_utils=tests)
    _, z, statistics, z_scale, columns, column_scale = forward(*given, *options, True, True)
    saved = (given[0], columns, column_scale, *given[3:], statistics, z_scale)
    for dz, mask in ((z, [True] * 5), (None, [False, True, wants, False, False])):
        arguments = (dy, dz, *saved, *options, torch.float32, torch.float32, mask)
        torch.library.opcheck(backward, arguments, test_utils=tests[1:])  # torch compares no inputs of 8 bits


@on_devices
def test_compiled_with_torch_autocast_and_a_recipe_of_its_own(device):
    _dynamo.reset()
    module = set_recipe(make(device), RowwiseScaling())
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    x, dy = inputs(device)
    with torch.autocast(device, torch.bfloat16):
        found, expected = compiled(x), module(x)
    assert found.dtype is torch.bfloat16
    assert same(found, expected)
    a, b = (torch.autograd.grad(y, [x, *module.parameters()], dy.bfloat16()) for y in (found, expected))
    assert all(same(one, other) for one, other in zip(a, b, strict=True))


@on_devices
def test_compiled_with_a_break_in_the_graph(device):
    _dynamo.reset()
    module = make(device).requires_grad_(False)
    compiled = torch.compile(module, backend="aot_eager")
    x = inputs(device)[0].detach()
    with autocast():
        assert same(compiled(x, is_first_microbatch=True), module(x))
        kept = module._fp8_weights._kept
        assert same(compiled(x, is_first_microbatch=False), module(x))
        assert module._fp8_weights._kept is kept
        found, expected = compiled(x, fp8_output=True), module(x, fp8_output=True)
    assert all(same(a, b) for a, b in zip(found, expected, strict=True))


# Training.


@pytest.mark.slow
def test_training():
    """100 steps of a small GPT: the loss within 0.5% of that in float32, and the gradients of the first step."""
    size = Size(layers=2, width=64, heads=2, context=32, batch=8)
    plain = train(None, 100, size, "cpu", False)
    assert plain.losses[0] > 5
    assert last(plain) < 3.2
    for name in ("row", "tensor, hybrid"):
        run = train(RECIPES[name], 100, size, "cpu", False, compared=(1,))
        assert run.losses != plain.losses
        assert abs(last(run) / last(plain) - 1) < 0.005
        assert run.cosines[1] >= 0.998


# Mistakes: what stands above must find each.


def square(device: str) -> None:
    """As many rows as columns of weight, so that scales of one can be taken for those of the other."""
    module = make(device, cols=64, outs=64)
    with torch.no_grad():
        module.weight.mul_((random(64, 1, seed=5) * 2).exp().to(module.weight))
    x = random(40, 64, dtype=torch.float32).requires_grad_()
    dy = random(40, 64, dtype=torch.float32, seed=1)
    expected = step(copy.deepcopy(module).double(), x.double(), dy.double())
    with autocast():
        found = step(module, x, dy)
    assert relative(found.gradients["x"], expected.gradients["x"]) <= ERROR["e4m3"]


def wrong_columns(weight, scheme, wants_columns):
    found = quantised(weight, scheme, wants_columns)
    return found._replace(column_scale=found.row_scale) if wants_columns else found


def wrong_backward(dy, dz, saved, options, *others):
    region = float8_context._region
    if region is not None and region.enabled:
        options = options._replace(scheme=region.recipe.scheme)
    return float8_passes.gradients(dy, dz, saved, options, *others)


def bound_without_beta(x, ln_weight, ln_bias, operation):
    return BOUND(x, ln_weight, None, operation)


BOUND, PADDED, LARGEST_OF = float8_casts.bound, float8_casts._padded, float8_casts._largest


def padded_with_ones(values):
    found = PADDED(values)
    found[:, len(values) :] = 1
    return found


def static_scales() -> None:
    for operation in ("layer_norm", "zero_centered_layer_norm", "zero_centered_rms_norm"):
        test_nothing_exceeds_the_static_scale("cpu", operation)


def casts() -> None:
    test_casts("cpu", 33, 100, False, "e4m3")


def cast_rows_of_bytes(a, dtype="e4m3", **options):
    found, scale, sums, amax = cast_rows(a, dtype, **options)
    return found, scale, None if sums is None else (found.float() * scale[:, None]).sum(0), amax


MISTAKES = {
    "weight by columns with the scales of rows": (float8_weights, "quantised", wrong_columns, lambda: square("cpu")),
    "stale bytes": (float8_weights, "_holds", lambda stamp, parts: True, lambda: check_cache("cpu")),
    "the context's recipe in a backward pass": (
        float8_functional,
        "gradients",
        wrong_backward,
        lambda: check_recorded("cpu"),
    ),
    "e5m2 where e4m3": (
        float8_passes,
        "cast_columns",
        lambda a, amax, dtype="e4m3", **options: cast_columns(a, amax, "e5m2", **options),
        lambda: check_products("cpu", RECIPES["row"]),
    ),
    "a static scale without beta": (float8_casts, "bound", bound_without_beta, static_scales),
    "rows of padding that are not zero": (float8_casts, "_padded", padded_with_ones, casts),
    "dbias of rounded dy": (
        float8_passes,
        "cast_rows",
        cast_rows_of_bytes,
        lambda: check_products("cpu", RECIPES["row"]),
    ),
    "NaN lost in a maximum": (
        float8_casts,
        "_largest",
        lambda wide, axis: LARGEST_OF(wide.nan_to_num(posinf=math.inf), axis),
        casts,
    ),
    "an infinite number lost in a maximum": (
        float8_casts,
        "_largest",
        lambda wide, axis: LARGEST_OF(wide.nan_to_num(posinf=0.0), axis),
        lambda: check_overflow("cpu", math.inf),
    ),
    "a scale applied twice": (
        float8_products,
        "_numbers",
        lambda bytes, scale: bytes.float() * (scale[:, None] if scale.dim() else scale) ** 2,
        lambda: check_products("cpu", RECIPES["row"]),
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes_are_found(mistake, monkeypatch):
    module, name, wrong, check = MISTAKES[mistake]
    check()
    monkeypatch.setattr(module, name, wrong)
    with pytest.raises(AssertionError):
        check()


# On a GPU alone.


@pytest.mark.gpu
@pytest.mark.parametrize("recipe", [RECIPES["row"], RECIPES["tensor, hybrid"]], ids=["row", "tensor"])
@pytest.mark.parametrize("rows", [16, 128, 1000])
@pytest.mark.parametrize("first", [None, False])
def test_a_captured_step(recipe, rows, first):
    module = make("cuda", torch.bfloat16)
    x, dy = inputs("cuda", torch.bfloat16, rows)

    def whole():
        module.zero_grad(set_to_none=False)
        x.grad.zero_()
        with autocast(recipe=recipe):
            y = module(x, is_first_microbatch=first)
        y.backward(dy)
        return y

    x.grad = torch.zeros_like(x)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            expected = whole().detach().clone()
        gradients = [x.grad.clone(), *(p.grad.clone() for p in module.parameters())]
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = whole()
    graph.replay()
    torch.testing.assert_close(y, expected)
    torch.testing.assert_close([x.grad, *(p.grad for p in module.parameters())], gradients)


@pytest.mark.gpu
@by_recipe
def test_the_host_waits_for_nothing(recipe):
    module = make("cuda", torch.bfloat16)
    x, dy = inputs("cuda", torch.bfloat16)

    def whole():
        with autocast(recipe=recipe):
            module(x).backward(dy)

    whole()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        whole()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.gpu
@by_recipe
@pytest.mark.parametrize("options", [{}, {"normalization": "RMSNorm", "zero_centered_gamma": True}], ids=str)
def test_a_gpu_does_as_the_emulation(options, recipe):
    """One rounding of a statistic apart."""
    module = make("cuda", torch.bfloat16, return_layernorm_output=True, **options)
    x, dy = inputs("cuda", torch.bfloat16)
    host = copy.deepcopy(module).cpu()
    with autocast(recipe=recipe):
        found, expected = step(module, x, dy), step(host, x.cpu(), dy.cpu())
    assert relative(found.outputs[0].cpu(), expected.outputs[0]) < 5e-3
    for name, gradient in expected.gradients.items():
        assert relative(found.gradients[name].cpu(), gradient) < 5e-3
