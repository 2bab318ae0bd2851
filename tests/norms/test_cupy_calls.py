"""What a call with CuPy arrays does beside its launches: devices, recipes and options, on the stand-in."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace
from typing import Any

import cpu_cupy
import cpu_device
import numpy
import pytest
from arrays import inputs, same_bits

import cunorm
from cunorm.call import cupy as backend
from cunorm.call import site

pytestmark = pytest.mark.skipif(bool(cpu_device.missing()), reason=cpu_device.missing() or "-")

OPTIONS = {"zero_centered_gamma": True}


@pytest.fixture
def arrays(monkeypatch):
    """The arrays x, dy, weight and bias."""
    cpu_cupy.play(monkeypatch)
    return [cpu_cupy.asarray(array) for array in inputs(numpy, 5, 40, "float16")]


def both_passes(x, dy, weight, bias, shape=None, **outs) -> list[Any]:
    """Return all results of a forward pass and of its backward pass."""
    out = {"out": outs["out"]} if outs else {"dtype": "float32"}
    y, mean, rstd = cunorm.layer_norm_forward(x, shape, weight, bias, 1e-3, **out, **OPTIONS)
    dx_out = {"dx_out": outs["dx_out"]} if outs else {}
    mask = (True, False, True)
    return [
        y,
        mean,
        rstd,
        *cunorm.layer_norm_backward(dy, x, mean, rstd, weight, output_mask=mask, **dx_out, **OPTIONS),
    ]


def all_same(results, expected) -> bool:
    return all((a is b is None) or same_bits(a, b) for a, b in zip(results, expected, strict=True))


@pytest.mark.parametrize("given", [False, True], ids=["allocated", "given"])
def test_the_device_of_x_is_current_for_the_launch_alone(monkeypatch, arrays, given):
    """The call has every option; `given` says whether it brings memory for y and dx."""
    outs = [{name: backend.cupy.ndarray((5, 40), "float16") for name in ("out", "dx_out")} for _ in range(2)]
    expected = both_passes(*arrays, **(outs[0] if given else {}))
    current, launched = [7], []

    @contextlib.contextmanager
    def device(index):
        current.append(index)
        yield
        current.pop()

    launch = backend.launch.run

    def run(*arguments):
        launched.append(current[-1])
        launch(*arguments)

    monkeypatch.setattr(backend, "_current_device", lambda: current[-1])
    monkeypatch.setattr(backend.cupy.cuda, "Device", device)
    monkeypatch.setattr(backend, "launch", SimpleNamespace(run=run))
    results = both_passes(*arrays, **(outs[1] if given else {}))
    assert all_same(results, expected)
    assert not given or (results[0] is outs[1]["out"] and results[3] is outs[1]["dx_out"])
    assert (launched, current) == ([0, 0], [7])


def test_a_shape_without_a_hash_is_as_good_as_one_with(arrays):
    expected = both_passes(*arrays, shape=(40,))
    assert all_same(both_passes(*arrays, shape=[40]), expected)


def test_a_call_like_an_earlier_one_makes_no_recipe(monkeypatch, arrays):
    expected = both_passes(*arrays)
    for name in ("forward_recipe", "backward_recipe", "run"):
        monkeypatch.setattr(backend, name, None)
    assert all_same(both_passes(*arrays), expected)


def test_an_option_that_is_equal_to_an_allowed_one_is_still_refused(arrays):
    """True is refused as eps after a call with 1, though both are equal and have the same hash."""
    x, _, weight, bias = arrays
    cunorm.layer_norm(x, None, weight, bias, 1)
    with pytest.raises(TypeError, match="eps"):
        cunorm.layer_norm(x, None, weight, bias, True)


def test_dx_out_is_refused_where_dx_is_left_out_by_a_kept_call_too(arrays):
    x, dy, weight, _ = arrays
    _, rstd = cunorm.rms_norm_forward(x, None, weight)
    cunorm.rms_norm_backward(dy, x, rstd, weight, output_mask=(False, True))
    with pytest.raises(ValueError, match="dx_out must be None where output_mask leaves dx out"):
        cunorm.rms_norm_backward(dy, x, rstd, weight, output_mask=(False, True), dx_out=x)


def test_the_text_of_a_call_site_has_a_line_for_each_array():
    """One site has two arrays and one result that may be passed; the other has as many results as its recipe."""
    of_two = site.text(2, 1, out=True, workspace=False)
    assert [of_two.count(f"{name}.strides") for name in ("array0", "array1", "array2", "out")] == [1, 1, 0, 1]
    assert "cuda.alloc" not in of_two
    assert "recipe.places" in site.text(1, None, out=False, workspace=True)
