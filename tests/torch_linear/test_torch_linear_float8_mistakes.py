"""Mistakes put into LayerNormLinear in FP8, each of which a check of the other files must find."""

from __future__ import annotations

import copy
import math

import pytest

torch = pytest.importorskip("torch")

import test_torch_linear_float8 as layer  # noqa: E402
import test_torch_linear_float8_products as products  # noqa: E402
import test_torch_linear_float8_recipes as recipes  # noqa: E402
import test_torch_linear_float8_weights as kept  # noqa: E402
from torch_linear_float8 import ERROR, RECIPES, make, relative, step  # noqa: E402
from torch_tensors import random  # noqa: E402

from cunorm.torch import autocast  # noqa: E402
from cunorm.torch.linear import (  # noqa: E402
    call,
    float8,
    float8_arithmetic,
)
from cunorm.torch.linear import recipes as followed  # noqa: E402
from cunorm.torch.linear.float8 import quantised  # noqa: E402
from cunorm.torch.linear.float8_arithmetic import cast_columns, cast_rows  # noqa: E402
from cunorm.torch.linear.step import gradients  # noqa: E402

pytestmark = pytest.mark.usefixtures("one_thread")


def square(device: str) -> None:
    """weight has as many rows as columns, so that scales of one could be mistaken for those of the other."""
    module = make(device, cols=64, outs=64)
    with torch.no_grad():
        module.weight.mul_((random(64, 1, seed=5) * 2).exp().to(module.weight))
    x = random(40, 64, dtype=torch.float32).requires_grad_()
    dy = random(40, 64, dtype=torch.float32, seed=1)
    expected = step(copy.deepcopy(module).double(), x.double(), dy.double())
    with autocast():
        results = step(module, x, dy)
    assert relative(results.gradients["x"], expected.gradients["x"]) <= ERROR["e4m3"]


def wrong_columns(weight, scheme, wants_columns):
    weights = quantised(weight, scheme, wants_columns)
    return weights._replace(column_scale=weights.row_scale) if wants_columns else weights


def wrong_backward(dy, dz, saved, step, *others):
    _, recipe = followed._innermost
    if recipe:
        step = step._replace(numbers=float8.Float8(recipe.scheme))
    return gradients(dy, dz, saved, step, *others)


def bound_without_beta(operation, x, ln_weight, ln_bias):
    return BOUND(operation, x, ln_weight, None)


BOUND, PADDED, LARGEST_OF = float8_arithmetic.bound, float8_arithmetic._padded, float8_arithmetic._largest


def padded_with_ones(values):
    padded = PADDED(values)
    padded[:, len(values) :] = 1
    return padded


def static_scales() -> None:
    for operation in ("layer_norm", "zero_centered_layer_norm", "zero_centered_rms_norm"):
        products.test_nothing_exceeds_the_static_scale("cpu", operation)


def casts() -> None:
    products.test_casts("cpu", 33, 100, False, "e4m3")


def cast_rows_of_bytes(a, dtype="e4m3", **options):
    a8, scale, sums, amax = cast_rows(a, dtype, **options)
    return a8, scale, None if sums is None else (a8.float() * scale[:, None]).sum(0), amax


MISTAKES = {
    "weight by columns with the scales of rows": (float8, "quantised", wrong_columns, lambda: square("cpu")),
    "stale bytes": (float8, "_holds", lambda stamp, parts: True, lambda: kept.check_cache("cpu")),
    "the context's recipe in a backward pass": (
        call,
        "gradients",
        wrong_backward,
        lambda: recipes.check_recorded("cpu"),
    ),
    "e5m2 where e4m3": (
        float8,
        "cast_columns",
        lambda a, amax, dtype="e4m3", **options: cast_columns(a, amax, "e5m2", **options),
        lambda: products.check_products("cpu", RECIPES["row"]),
    ),
    "a static scale without beta": (float8_arithmetic, "bound", bound_without_beta, static_scales),
    "rows of padding that are not zero": (float8_arithmetic, "_padded", padded_with_ones, casts),
    "dbias of rounded dy": (
        float8,
        "cast_rows",
        cast_rows_of_bytes,
        lambda: products.check_products("cpu", RECIPES["row"]),
    ),
    "NaN lost in a maximum": (
        float8_arithmetic,
        "_largest",
        lambda wide, axis: LARGEST_OF(wide.nan_to_num(posinf=math.inf), axis),
        casts,
    ),
    "an infinite number lost in a maximum": (
        float8_arithmetic,
        "_largest",
        lambda wide, axis: LARGEST_OF(wide.nan_to_num(posinf=0.0), axis),
        lambda: layer.check_overflow("cpu", math.inf),
    ),
    "a scale applied twice": (
        float8_arithmetic,
        "_numbers",
        lambda bytes, scale: bytes.float() * (scale[:, None] if scale.dim() else scale) ** 2,
        lambda: products.check_products("cpu", RECIPES["row"]),
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes_are_found(mistake, monkeypatch):
    module, name, wrong, check = MISTAKES[mistake]
    check()
    monkeypatch.setattr(module, name, wrong)
    with pytest.raises(AssertionError):
        check()
