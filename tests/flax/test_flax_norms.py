"""Values and gradients of the Flax modules, against float64 and against Flax's own modules with the same variables."""

from __future__ import annotations

import functools

import numpy
import pytest

jax = pytest.importorskip("jax", reason="JAX is not installed")
pytest.importorskip("flax", reason="Flax is not installed")

import jax.numpy as jnp  # noqa: E402
from flax.nnx.nn.dtypes import promote_dtype  # noqa: E402
from flax_norms import CASES, cases, compiled, function, kernel_calls, kinds, with_gradients  # noqa: E402
from jax_arrays import on_devices  # noqa: E402
from reference import check_backward, check_forward  # noqa: E402

table = pytest.mark.parametrize(("kind", "case"), cases())


@functools.cache
def results(who, device, kind, name):
    """Return ((y, gradients of the parameters, dx), number of calls of cunorm.jax's function)."""
    case = CASES[name]
    parameters, x, dy = case.arrays(kind)
    with case.context(), jax.default_device(jax.devices(device)[0]), kernel_calls(kind) as calls:
        f = function(kind, who, case.options_of(kind))
        return compiled(with_gradients(f, dy))(parameters, jnp.asarray(x)), calls.call_count


def name_of(case):
    return next(name for name, other in CASES.items() if other is case)


def as_read(kind, case):
    """Return (x, scale, bias) as the module computes with them: an nnx module first rounds all of them to one dtype."""
    parameters, x, _ = case.arrays(kind)
    given = [x, parameters.get("scale"), parameters.get("bias")]
    options = case.options_of(kind)
    with case.context():
        if kind.framework == "nnx":
            promote = options.get("promote_dtype", promote_dtype)
            promoted = promote(tuple(None if a is None else jnp.asarray(a) for a in given), dtype=case.dtype)
        elif not options.get("force_float32_reductions", True):
            promoted = [x, *(None if a is None else a.astype(options["param_dtype"]) for a in given[1:])]
        else:
            promoted = given
        return [
            a if a is None or jnp.finfo(b.dtype).bits > jnp.finfo(a.dtype).bits else numpy.asarray(b)
            for a, b in zip(given, promoted, strict=True)
        ]


@on_devices
@table
def test_y_and_gradients_against_float64(device, kind, case):
    (y, gradients, dx), calls = results("cunorm", device, kind, name_of(case))
    assert calls == 1
    _, _, dy = case.arrays(kind)
    x, scale, bias = (None if a is None else a.reshape(-1, dy.shape[1]) for a in as_read(kind, case))
    scale, bias = (None if a is None else a[0] for a in (scale, bias))
    y, dx = (numpy.asarray(a).reshape(dy.shape) for a in (y, dx))
    dscale, dbias = (None if a is None else numpy.asarray(a).ravel() for a in map(gradients.get, ("scale", "bias")))
    epsilon = case.options.get("epsilon", 1e-6)
    # The module computes in float64 if y is float64.
    check_forward(kind.op, (y, None, None), x.astype(y.dtype) if y.dtype == "float64" else x, scale, bias, eps=epsilon)
    check_backward(kind.op, (dx, dscale, dbias), dy.astype(y.dtype), x, scale, eps=epsilon)


@on_devices
@table
def test_the_same_results_as_flax(device, kind, case):
    """Shapes and dtypes are the same. Values differ by some roundings of the largest, in the coarsest format used."""
    ours, flaxs = (jax.tree.leaves(results(who, device, kind, name_of(case))[0]) for who in ("cunorm", "flax"))
    formats = [flaxs[0].dtype, *(a.dtype for a in as_read(kind, case) if a is not None)]
    eps = max(float(jnp.finfo(dtype).eps) for dtype in formats)
    room = (64 if eps < 1e-6 else 8) * eps * case.offset
    for a, b in zip(ours, flaxs, strict=True):
        assert (a.shape, a.dtype, a.weak_type) == (b.shape, b.dtype, b.weak_type)
        if case is not CASES["offset"] or kind.norm == "RMSNorm":  # Flax is wrong there, as the next test shows
            a, b = (numpy.asarray(array).astype(numpy.float64) for array in (a, b))
            numpy.testing.assert_allclose(a, b, rtol=0, atol=room * abs(b).max(initial=1.0))


@on_devices
@pytest.mark.parametrize("kind", [kind for kind in kinds.args[1] if kind.norm == "LayerNorm"], ids="-".join)
def test_flax_is_wrong_where_x_is_far_from_zero(device, kind):
    """Flax's variance is E[x²] - E[x]². This shows that the case `offset` can fail."""
    case = CASES["offset"]
    (y, _, _), _ = results("flax", device, kind, "offset")
    with pytest.raises(AssertionError, match="elements are wrong"):
        check_forward(kind.op, (numpy.asarray(y), None, None), *as_read(kind, case), eps=1e-6)
