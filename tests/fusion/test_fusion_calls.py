"""What a call of a fused operation takes and returns, and what is refused before anything is compiled."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import cpu_cupy
import cpu_device
import numpy
import pytest
from arrays import in_wider_rows, misplaced, on_host, same_bits
from fusion_cases import CASES, make

import cunorm
from cunorm.fusion import Fused

needs_machine = pytest.mark.skipif(bool(cpu_device.missing()), reason=cpu_device.missing())

# What a call takes and returns.


def small(xp: Any, name: str = "add_layer_norm") -> tuple[Fused, Any, dict[str, Any], tuple[Any, ...]]:
    made = make(CASES[name], (3, 7), "float32")
    operands = {key: xp.asarray(value) if hasattr(value, "dtype") else value for key, value in made.operands.items()}
    return CASES[name].op, xp.asarray(made.x), operands, tuple(map(xp.asarray, made.gradients))


def test_one_gradient_serves_x_and_residual(xp):
    op, x, operands, gradients = small(xp)
    _, saved = op.forward(x, **operands)
    by_name = op.backward(saved, *gradients)
    assert by_name["x"] is by_name["residual"]
    assert by_name["weight"] is not by_name["bias"]
    operands["residual"] = operands["residual"].astype("float16")
    _, saved = op.forward(x, **operands)
    assert op.backward(saved, *gradients)["residual"].dtype == "float16"


def test_gradients_that_are_wanted_are_those_of_all(xp):
    op, x, operands, gradients = small(xp, "gate")
    _, saved = op.forward(x, **operands)
    every = op.backward(saved, *gradients)
    for name, gradient in every.items():
        (alone,) = op.backward(saved, *gradients, wanted=[name]).values()
        assert abs(on_host(alone - gradient)).max() <= 1e-5 * abs(on_host(gradient)).max(), name


@pytest.mark.parametrize("name", CASES)
def test_results_and_gradients_are_contiguous_however_the_operands_lie(xp, name):
    """So are statistics: what a framework sees does not depend on where a call ran."""
    made = make(CASES[name], (3, 5, 7), "float32")

    def moved(array: Any) -> Any:
        """Return the array with its last axis first in memory."""
        if not hasattr(array, "ndim") or array.ndim < 2:
            return array if not hasattr(array, "ndim") else xp.asarray(array)
        return xp.ascontiguousarray(xp.moveaxis(xp.asarray(array), -1, 0)).transpose(*range(1, array.ndim), 0)

    op, operands = CASES[name].op, {key: moved(operand) for key, operand in made.operands.items()}
    returned, saved = op.forward(moved(made.x), **operands)
    results = returned if isinstance(returned, tuple) else (returned,)
    gradients = op.backward(saved, *map(moved, made.gradients)).values()
    statistics = [statistic for statistic in saved.statistics.values() if statistic is not None]
    assert all(array.flags.c_contiguous for array in (*results, *statistics, *gradients))


@pytest.mark.parametrize("left_out", [0, 1])
def test_a_result_on_which_nothing_depends_has_no_gradient(xp, left_out):
    op, x, operands, gradients = small(xp, "both")
    _, saved = op.forward(x, **operands)
    given = [None if place == left_out else gradient for place, gradient in enumerate(gradients)]
    zeros = [xp.zeros_like(x) if gradient is None else gradient for gradient in given]
    with_none, with_zeros = op.backward(saved, *given), op.backward(saved, *zeros)
    for name in with_none:
        assert abs(on_host(with_none[name] - with_zeros[name])).max() < 1e-6, name


def test_numbers_may_change_from_call_to_call(xp):
    op, x, operands, _ = small(xp, "modulated")
    first, second = op(x, **operands), op(x, **operands | {"shift": operands["shift"] + 1})
    assert abs(on_host(second - first) - 1).max() < 1e-6
    assert same_bits(
        on_host(op(x, **operands | {"shift": 2})), on_host(op(x, **operands | {"shift": numpy.float32(2)}))
    )


def test_vectors_may_have_ones_before_their_columns(xp):
    op, x, operands, gradients = small(xp)
    y, _ = op(x, **operands)
    operands["weight"] = operands["weight"][None]
    results, saved = op.forward(x, **operands)
    assert same_bits(on_host(results[0]), on_host(y))
    assert op.backward(saved, *gradients)["weight"].shape == (1, 7)


def test_a_row_alone_needs_no_second_axis(xp):
    op, x, operands, gradients = small(xp)
    results, saved = op.forward(x[0], **operands | {"residual": operands["residual"][0]})
    assert same_bits(on_host(results[0]), on_host(op(x, **operands)[0][0]))
    assert op.backward(saved, *(gradient[0] for gradient in gradients))["bias"].shape == (7,)


def test_arrays_may_lie_anyhow(xp):
    op, x, operands, gradients = small(xp)
    expected_y, expected_s = op(x, **operands)
    strided = {
        "a misplaced x": (misplaced(x, 3), operands),
        "rows in wider rows": (in_wider_rows(x, 5), operands | {"residual": in_wider_rows(operands["residual"], 2)}),
        "transposed": (xp.asarray(x.T.copy()).T, operands),
        "every second column": (x, operands | {"weight": xp.repeat(operands["weight"], 2)[::2]}),
    }
    for name, (x, operands) in strided.items():
        (y, s), saved = op.forward(x, **operands)
        assert same_bits(on_host(y), on_host(expected_y)), name
        assert same_bits(on_host(s), on_host(expected_s)), name
        turned = [xp.asarray(gradient.T.copy()).T for gradient in gradients]
        from_turned, from_contiguous = op.backward(saved, *turned), op.backward(saved, *gradients)
        assert all(same_bits(on_host(from_turned[key]), on_host(from_contiguous[key])) for key in from_turned), name


@needs_machine
def test_arrays_may_lie_anyhow_on_the_stand_in(monkeypatch):
    cpu_cupy.play(monkeypatch)
    op, x, operands, gradients = small(numpy)
    expected_y, _ = op(x, **operands)
    wide = cpu_cupy.asarray(numpy.pad(x, ((0, 0), (0, 4))))[:, :7]
    turned = cpu_cupy.asarray(operands["residual"].T).T
    operands = {name: cpu_cupy.asarray(operand) for name, operand in operands.items()} | {"residual": turned}
    operands["weight"] = cpu_cupy.asarray(numpy.repeat(operands["weight"].get(), 2))[::2]
    (y, _), saved = op.forward(wide, **operands)
    assert abs(y.get() - expected_y).max() < 1e-5
    op.backward(saved, *map(cpu_cupy.asarray, gradients))


def test_no_rows_give_empty_results_and_gradients_of_zero(xp):
    op, x, operands, gradients = small(xp, "gate")
    operands |= {name: operands[name][:0] for name in ("residual", "z")}
    y, saved = op.forward(x[:0], **operands)
    assert y.shape == (0, 7)
    empty_gradients = op.backward(saved, gradients[0][:0])
    assert empty_gradients["x"].shape == (0, 7)
    assert not on_host(empty_gradients["weight"]).any()
    assert empty_gradients["factor"].shape == ()
    assert float(empty_gradients["factor"]) == 0


# What is refused, before anything is compiled.


REFUSED_BY_FUSE = [
    ({"norm": "batch_norm"}, ValueError, "norm must be one of layer_norm, rms_norm; got 'batch_norm'"),
    ({"epilogue": lambda xhat, w: xhat if w else w}, TypeError, "has no truth"),
    ({"epilogue": 3}, TypeError, "epilogue"),
    ({"epilogue": lambda: 1.0}, ValueError, "first parameter is xhat"),
    ({"epilogue": lambda w, xhat: xhat * w}, ValueError, "xhat must be the epilogue's first parameter"),
    ({"epilogue": lambda xhat, x: xhat * x}, ValueError, "got 'x': rename"),
    ({"epilogue": lambda xhat, dy: xhat * dy}, ValueError, "got 'dy': rename"),
    ({"epilogue": lambda xhat, a, da: xhat * a * da}, ValueError, "'da' is the gradient of 'a'"),
    ({"returns": "y"}, TypeError, "returns must be a tuple"),
    ({"returns": ()}, ValueError, "returns must have 'y'"),
    ({"returns": ("s",), "prologue": lambda x, residual: x + residual}, ValueError, "returns must have 'y'"),
    ({"returns": ("y", "y")}, ValueError, "each name once"),
    ({"returns": ("y", "mean")}, ValueError, "names out of y, s; got 'mean'"),
    ({"returns": ("y", "s")}, ValueError, "needs a prologue"),
    ({"s_dtype": "float32"}, ValueError, "needs a prologue"),
    ({"dtype": "int8"}, TypeError, "dtype must be one of"),
]


@pytest.mark.parametrize(
    ("arguments", "error", "message"), REFUSED_BY_FUSE, ids=[message for _, _, message in REFUSED_BY_FUSE]
)
def test_fuse_refuses(arguments, error, message):
    arguments = {"norm": "layer_norm"} | arguments
    with pytest.raises(error, match=re.escape(message)):
        cunorm.fuse(arguments.pop("norm"), **arguments)


REFUSED_BY_A_CALL = [
    ({"residual": None}, TypeError, "residual must be a"),
    ({"weight": ...}, TypeError, "'weight' is missing"),
    ({"scale": 1.0}, TypeError, "got 'scale' too"),
    ({"residual": numpy.ones((2, 7), "float32")}, ValueError, "against x, whose shape is (3, 7), or be a number"),
    ({"residual": numpy.ones((1, 3, 7), "float32")}, ValueError, "pass broadcast_to(residual, x.shape)"),
    ({"weight": numpy.ones(7, "int64")}, TypeError, "weight must have dtype"),
    ({"weight": True}, TypeError, "got bool"),
    ({"weight": 1j}, TypeError, "got complex"),
    ({"x": numpy.ones((3, 7), "int64")}, TypeError, "x must have dtype"),
    ({"x": numpy.ones((3, 0), "float32")}, ValueError, "not an empty one"),
    ({"x": numpy.float32(1)}, TypeError, "x must be"),
    ({"x": [1.0]}, TypeError, "x must be"),
    ({"eps": -1.0}, ValueError, "eps must be finite"),
]


@pytest.mark.parametrize(
    ("arguments", "error", "message"), REFUSED_BY_A_CALL, ids=[message for _, _, message in REFUSED_BY_A_CALL]
)
def test_a_call_refuses(xp, arguments, error, message):
    op, x, operands, _ = small(xp)
    changed = {k: xp.asarray(v) if isinstance(v, numpy.ndarray) else v for k, v in arguments.items()}
    given = {name: argument for name, argument in ({"x": x} | operands | changed).items() if argument is not ...}
    for call in (op, op.forward):
        with pytest.raises(error, match=re.escape(message)):
            call(given["x"], **{name: argument for name, argument in given.items() if name != "x"})


@pytest.mark.parametrize("way", ["__call__", "forward", "fp8", "fp8_forward"])
def test_operands_without_their_names_are_refused(xp, way):
    op, x, operands, _ = small(xp)
    named = "residual=..., weight=..., bias=...; got 2 after x without a name"
    for call, message in ((op, named), (cunorm.fuse("rms_norm"), "of which it has none; got 2 after x")):
        with pytest.raises(TypeError, match=rf"^fused \w+: the operands must be given by their names, {message}"):
            getattr(call, way)(x, operands["residual"], operands["weight"])


def test_a_number_beyond_float64_is_refused_in_every_call(xp):
    """It is refused also in a call that differs from an earlier one only in the number."""
    op, x, operands, _ = small(xp)
    op(x, **operands | {"weight": 10**4})
    with pytest.raises(ValueError, match=r"must be finite; got a number beyond 1\.8e308"):
        op(x, **operands | {"weight": 10**400})


def test_backward_refuses(xp):
    op, x, operands, (dy, ds) = small(xp)
    _, saved = op.forward(x, **operands)
    other = cunorm.fuse("layer_norm")
    for error, message, call in (
        (ValueError, "a gradient of each of y, s; got 1", lambda: op.backward(saved, dy)),
        (ValueError, "got None for each", lambda: op.backward(saved, None, None)),
        (ValueError, "got that of 'xhat * weight + bias' for 'xhat'", lambda: other.backward(saved, dy)),
        (TypeError, "saved must be what forward returned", lambda: op.backward(x, dy, ds)),
        (ValueError, "got 'gain'", lambda: op.backward(saved, dy, ds, wanted=["gain"])),
        (ValueError, "each name once", lambda: op.backward(saved, dy, ds, wanted=["x", "x"])),
        (TypeError, "wanted must be a tuple", lambda: op.backward(saved, dy, ds, wanted="x")),
        (ValueError, "dy must have the shape of x", lambda: op.backward(saved, dy[:2], ds)),
        (TypeError, "dy must be an array; got a number", lambda: op.backward(saved, 1.0, ds)),
        (TypeError, "ds must have dtype", lambda: op.backward(saved, dy, ds.astype("int32"))),
    ):
        with pytest.raises(error, match=re.escape(message)):
            call()


def test_named_operations_refuse(xp):
    _, x, operands, (dy, ds) = small(xp)
    residual, weight = operands["residual"], operands["weight"]
    _, saved = cunorm.add_layer_norm.forward(x, residual, weight)

    def backward(dy: Any = dy, ds: Any = ds, **changed: Any) -> Any:
        """Call backward with what was saved, changed in the parts named in `changed`."""
        s, statistics = changed.pop("s", saved.s), saved.statistics | changed
        return cunorm.add_layer_norm.backward(replace(saved, s=s, statistics=statistics), dy, ds)

    for error, message, call in (
        (TypeError, "residual must be a", lambda: cunorm.add_layer_norm(x, None)),
        (TypeError, "residual must be an array; got a number", lambda: cunorm.add_rms_norm(x, 1.0)),
        (ValueError, "residual must have the shape of x", lambda: cunorm.add_layer_norm(x, residual[0])),
        (ValueError, "weight must have the shape of the last axis", lambda: cunorm.add_rms_norm(x, residual, x)),
        (TypeError, "dtype must be one of", lambda: cunorm.add_rms_norm(x, residual, s_dtype="int8")),
        (ValueError, "needs a weight", lambda: cunorm.add_rms_norm(x, residual, zero_centered_gamma=True)),
        (ValueError, "one gradient at least must be an array", lambda: backward(None, None)),
        (ValueError, "takes a gradient of each of y, s; got 1", lambda: cunorm.add_layer_norm.backward(saved, dy)),
        (ValueError, "rstd must have the shape", lambda: backward(rstd=saved.statistics["rstd"][:2])),
        (TypeError, "mean must be a", lambda: backward(mean=None)),
        (TypeError, "rstd must be a", lambda: backward(rstd=None)),
        (TypeError, "s must be a", lambda: backward(s=1.0)),
    ):
        with pytest.raises(error, match=re.escape(message)):
            call()


@pytest.mark.gpu
def test_arrays_of_two_kinds_are_refused():
    import cupy

    op, x, operands, _ = small(cupy)
    with pytest.raises(TypeError, match="weight must be a CuPy array"):
        op(x, **operands | {"weight": numpy.ones(7, "float32")})
    with pytest.raises(ValueError, match=re.escape("Pass float(weight)")):
        op(x, **operands | {"weight": cupy.float32(2) * cupy.ones((), "float32")})
