"""Bad input raises a clear error before anything is launched, and leaves the arrays unchanged."""

from __future__ import annotations

import importlib
import re
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy
import pytest
from arrays import on_host

import cunorm
from cunorm.kernel.device import INSTALL

ROWS, COLS = 4, 8


class Bad(NamedTuple):
    what: str
    change: Callable[[Any, dict], dict]  # (numpy or cupy, the good arguments) -> the arguments that differ
    error: type[Exception]
    phrase: str


FORWARD = [
    Bad("x is a list", lambda xp, a: {"x": [[1.0, 2.0]]}, TypeError, "x must be a NumPy, CuPy or JAX array"),
    Bad("x is a string", lambda xp, a: {"x": "array"}, TypeError, "x must be a NumPy, CuPy or JAX array"),
    Bad("x is None", lambda xp, a: {"x": None}, TypeError, "x must be a NumPy, CuPy or JAX array"),
    Bad("x is a number", lambda xp, a: {"x": 1.5}, TypeError, "x must be a NumPy, CuPy or JAX array"),
    Bad("x is an integer array", lambda xp, a: {"x": a["x"].astype("int32")}, TypeError, "x must have dtype float16"),
    Bad("x is complex", lambda xp, a: {"x": a["x"].astype("complex64")}, TypeError, "got complex64"),
    Bad("x is bool", lambda xp, a: {"x": a["x"] > 0}, TypeError, "got bool"),
    Bad(
        "x has no axis", lambda xp, a: {"x": a["x"][0, :1].reshape(()), "weight": None}, ValueError, "at least one axis"
    ),
    Bad("x is empty along the row", lambda xp, a: {"x": a["x"][:, :0], "weight": None}, ValueError, "not be empty"),
    Bad(
        "weight is a list",
        lambda xp, a: {"weight": [1.0] * COLS},
        TypeError,
        "weight must be a (NumPy array|CuPy array|torch.Tensor)",
    ),
    Bad(
        "weight is a number",
        lambda xp, a: {"weight": 2.0},
        TypeError,
        "weight must be a (NumPy array|CuPy array|torch.Tensor)",
    ),
    Bad("weight is an integer array", lambda xp, a: {"weight": xp.ones(COLS, "int64")}, TypeError, "weight must have"),
    Bad(
        "weight is too short",
        lambda xp, a: {"weight": a["weight"][1:], "normalized_shape": COLS},
        ValueError,
        r"weight must have shape \(8,\) to match the last axis of x; got \(7,\)",
    ),
    Bad(
        "weight, the only shape given, is too short",
        lambda xp, a: {"weight": a["weight"][1:]},
        ValueError,
        r"the shape of weight must be the last axes of x; got \(7,\) for x of shape \(4, 8\)",
    ),
    Bad("weight has no axis", lambda xp, a: {"weight": a["weight"][:1].reshape(())}, ValueError, "at least one axis"),
    Bad("normalized_shape is another", lambda xp, a: {"normalized_shape": 7}, ValueError, "normalized_shape must be"),
    Bad("normalized_shape is too long", lambda xp, a: {"normalized_shape": (2, 4, 8)}, ValueError, "normalized_shape"),
    Bad("normalized_shape is ()", lambda xp, a: {"normalized_shape": ()}, ValueError, "at least one axis"),
    Bad("normalized_shape is a string", lambda xp, a: {"normalized_shape": "8"}, TypeError, "normalized_shape"),
    Bad("weight comes second", lambda xp, a: {"normalized_shape": a["weight"]}, TypeError, "weight is the third arg"),
    Bad("normalized_shape is a float", lambda xp, a: {"normalized_shape": 8.0}, TypeError, "normalized_shape"),
    Bad("normalized_shape holds a float", lambda xp, a: {"normalized_shape": [8.0]}, TypeError, "must hold ints"),
    Bad("normalized_shape is negative", lambda xp, a: {"normalized_shape": -1}, ValueError, "normalized_shape"),
    Bad("eps is negative", lambda xp, a: {"eps": -1e-5}, ValueError, "eps must be finite and not negative; got -1e-05"),
    Bad("eps is NaN", lambda xp, a: {"eps": float("nan")}, ValueError, "eps must be finite"),
    Bad("eps is infinite", lambda xp, a: {"eps": float("inf")}, ValueError, "eps must be finite"),
    Bad("eps is None", lambda xp, a: {"eps": None}, TypeError, "eps must be a real number; got NoneType"),
    Bad("eps is bool", lambda xp, a: {"eps": True}, TypeError, "eps must be a real number; got bool"),
    Bad("eps is huge", lambda xp, a: {"eps": 10**400}, ValueError, "eps must be finite; got a number beyond 1.8e308"),
    Bad("eps is an array", lambda xp, a: {"eps": xp.ones(())}, TypeError, "an array, whose value is not known before"),
    Bad("eps is a string", lambda xp, a: {"eps": "1e-5"}, TypeError, "eps must be a real number"),
    Bad("eps is complex", lambda xp, a: {"eps": 1e-5j}, TypeError, "eps must be a real number"),
    Bad("dtype is an integer's", lambda xp, a: {"dtype": "int8"}, TypeError, "dtype must be one of float16"),
    Bad("dtype is complex", lambda xp, a: {"dtype": numpy.complex64}, TypeError, "dtype must be one of"),
    Bad("dtype is short", lambda xp, a: {"dtype": "fp16"}, TypeError, "got 'fp16': did you mean float16[?]"),
    Bad("dtype is unknown", lambda xp, a: {"dtype": "float99"}, TypeError, "got 'float99'"),
    Bad(
        "out is a list", lambda xp, a: {"out": [0.0]}, TypeError, "out must be a (NumPy array|CuPy array|torch.Tensor)"
    ),
    Bad("out has another shape", lambda xp, a: {"out": xp.empty((COLS, ROWS), "float32")}, ValueError, "out must have"),
    Bad("out broadcasts x", lambda xp, a: {"out": xp.empty((2, ROWS, COLS), "float32")}, ValueError, "out must have"),
    Bad("out is an integer array", lambda xp, a: {"out": xp.empty((ROWS, COLS), "int32")}, TypeError, "dtype"),
    Bad(
        "out contradicts dtype",
        lambda xp, a: {"out": xp.empty((ROWS, COLS), "float32"), "dtype": "float16"},
        TypeError,
        "out must have dtype float16; got float32",
    ),
    Bad(
        "out is a broadcast array",
        lambda xp, a: {"out": xp.lib.stride_tricks.as_strided(xp.zeros(COLS, "float32"), (ROWS, COLS), (0, 4))},
        ValueError,
        "every element of out must have its own memory",
    ),
    Bad(
        "rows of out overlap",
        lambda xp, a: {"out": xp.lib.stride_tricks.as_strided(xp.zeros(64, "float32"), (ROWS, COLS), (16, 4))},
        ValueError,
        "every element of out must have its own memory",
    ),
    Bad(
        "columns of out overlap",
        lambda xp, a: {"out": xp.lib.stride_tricks.as_strided(xp.zeros(64, "float32"), (ROWS, COLS), (8, 8))},
        ValueError,
        "every element of out must have its own memory",
    ),
    Bad(
        "columns of out overlap the next row's",
        lambda xp, a: {"out": xp.lib.stride_tricks.as_strided(xp.zeros(64, "float32"), (ROWS, COLS), (24, 8))},
        ValueError,
        "every element of out must have its own memory",
    ),
    Bad(
        "x has strides of half an element",
        lambda xp, a: {"x": xp.lib.stride_tricks.as_strided(xp.zeros(64, "float64"), (ROWS, COLS), (68, 8))},
        ValueError,
        "x must have strides that are multiples of its 8 bytes an element; got strides of .68, 8. bytes",
    ),
    Bad(
        "out has strides of half an element",
        lambda xp, a: {"out": xp.lib.stride_tricks.as_strided(xp.zeros(64, "float64"), (ROWS, COLS), (68, 8))},
        ValueError,
        "out must have strides that are multiples of its 8 bytes an element; got strides of .68, 8. bytes",
    ),
    Bad(
        "out overlaps x by rows",
        lambda xp, a: {"x": a["buffer"][:ROWS], "out": a["buffer"][1 : ROWS + 1]},
        ValueError,
        "out must be x itself or share no memory with x",
    ),
    Bad(
        "out overlaps x by an element",
        lambda xp, a: {
            "x": a["buffer"].reshape(-1)[: ROWS * COLS].reshape(ROWS, COLS),
            "out": a["buffer"].reshape(-1)[1 : ROWS * COLS + 1].reshape(ROWS, COLS),
        },
        ValueError,
        "share no memory with x",
    ),
    Bad("out is x backwards", lambda xp, a: {"out": a["x"][::-1]}, ValueError, "share no memory with x"),
    Bad(
        "out is x in another dtype",
        lambda xp, a: {"x": a["buffer"][:ROWS].view("float16")[:, :COLS], "out": a["buffer"][:ROWS]},
        ValueError,
        "share no memory with x",
    ),
    Bad(
        "out overlaps weight",
        lambda xp, a: {"weight": a["buffer"][0], "out": a["buffer"][:ROWS]},
        ValueError,
        "share no memory with weight",
    ),
    Bad("sm_margin is negative", lambda xp, a: {"sm_margin": -1}, ValueError, "sm_margin must be 0 or more"),
    Bad("sm_margin is a float", lambda xp, a: {"sm_margin": 1.0}, TypeError, "sm_margin must be an integer"),
    Bad("sm_margin is a string", lambda xp, a: {"sm_margin": "2"}, TypeError, "sm_margin must be an integer"),
    Bad("sm_margin is a bool", lambda xp, a: {"sm_margin": True}, TypeError, "sm_margin must be an integer"),
    Bad(
        "zero_centered_gamma without weight",
        lambda xp, a: {"weight": None, "zero_centered_gamma": True},
        ValueError,
        "zero_centered_gamma=True needs a weight",
    ),
]

BIAS = [
    Bad("bias is too long", lambda xp, a: {"bias": xp.ones(9, "float32")}, ValueError, r"bias must have shape \(8,\)"),
    Bad("bias has two axes", lambda xp, a: {"bias": xp.ones((1, 8), "float32")}, ValueError, "bias must have shape"),
    Bad(
        "bias is a string",
        lambda xp, a: {"bias": "b"},
        TypeError,
        "bias must be a (NumPy array|CuPy array|torch.Tensor)",
    ),
    Bad("bias is complex", lambda xp, a: {"bias": xp.ones(8, "complex128")}, TypeError, "bias must have dtype"),
    Bad(
        "out overlaps bias",
        lambda xp, a: {"bias": a["buffer"][2], "out": a["buffer"][:ROWS]},
        ValueError,
        "share no memory with bias",
    ),
]

BACKWARD = [
    Bad("x is a list", lambda xp, a: {"x": [[1.0]]}, TypeError, "x must be a NumPy, CuPy or JAX array"),
    Bad("x is an integer array", lambda xp, a: {"x": a["x"].astype("int32")}, TypeError, "x must have dtype"),
    Bad("dy is None", lambda xp, a: {"dy": None}, TypeError, "dy must be a (NumPy array|CuPy array|torch.Tensor)"),
    Bad("dy is a list", lambda xp, a: {"dy": [[1.0]]}, TypeError, "dy must be a (NumPy array|CuPy array|torch.Tensor)"),
    Bad("dy is an integer array", lambda xp, a: {"dy": a["dy"].astype("int32")}, TypeError, "dy must have dtype"),
    Bad("dy has another shape", lambda xp, a: {"dy": a["dy"][:3]}, ValueError, "dy must have the shape of x"),
    Bad("dy would broadcast", lambda xp, a: {"dy": a["dy"][:1]}, ValueError, "dy must have the shape of x"),
    Bad(
        "rstd is None", lambda xp, a: {"rstd": None}, TypeError, "rstd must be a (NumPy array|CuPy array|torch.Tensor)"
    ),
    Bad("rstd is too short", lambda xp, a: {"rstd": a["rstd"][1:]}, ValueError, "rstd must have the shape of x"),
    Bad(
        "rstd is x", lambda xp, a: {"rstd": a["x"]}, ValueError, "must have the shape of x without its normalised axes"
    ),
    Bad("rstd is float64", lambda xp, a: {"rstd": a["rstd"].astype("float64")}, TypeError, "rstd must have dtype"),
    Bad("weight is too short", lambda xp, a: {"weight": a["weight"][1:]}, ValueError, r"weight must have shape \(8,\)"),
    Bad("weight is a list", lambda xp, a: {"weight": [1.0] * COLS}, TypeError, "weight must be a"),
    Bad("sm_margin is negative", lambda xp, a: {"sm_margin": -1}, ValueError, "sm_margin must be 0 or more"),
    Bad("output_mask is None", lambda xp, a: {"output_mask": None}, TypeError, "output_mask must be a tuple"),
    Bad("output_mask is a string", lambda xp, a: {"output_mask": "yes"}, TypeError, "output_mask must be a tuple"),
    Bad("output_mask is too long", lambda xp, a: {"output_mask": (True,) * 4}, ValueError, "output_mask must have"),
    Bad(
        "dx_out is a list",
        lambda xp, a: {"dx_out": [[0.0]]},
        TypeError,
        "dx_out must be a (NumPy array|CuPy array|torch.Tensor)",
    ),
    Bad(
        "dx_out has another shape",
        lambda xp, a: {"dx_out": a["buffer"]},
        ValueError,
        r"dx_out must have the shape of x, \(4, 8\); got \(6, 8\)",
    ),
    Bad(
        "dx_out has another dtype",
        lambda xp, a: {"dx_out": a["x"].astype("float64")},
        TypeError,
        "dx_out must have the dtype of x, float32; got float64",
    ),
    Bad(
        "dx_out without dx",
        lambda xp, a: {"dx_out": a["buffer"][:ROWS], "output_mask": (False, True, True)},
        ValueError,
        "dx_out must be None where output_mask leaves dx out",
    ),
    Bad(
        "dx_out overlaps x by rows",
        lambda xp, a: {"x": a["buffer"][:ROWS], "dx_out": a["buffer"][1 : ROWS + 1]},
        ValueError,
        "dx_out must be dy or x itself or share no memory with x",
    ),
    Bad(
        "dx_out overlaps dy by an element",
        lambda xp, a: {
            "dy": a["buffer"][:ROWS],
            "dx_out": a["buffer"].reshape(-1)[1 : ROWS * COLS + 1].reshape(ROWS, COLS),
        },
        ValueError,
        "dx_out must be dy or x itself or share no memory with dy",
    ),
    Bad(
        "dx_out overlaps weight",
        lambda xp, a: {"weight": a["buffer"][0], "dx_out": a["buffer"][:ROWS]},
        ValueError,
        "share no memory with weight",
    ),
    Bad(
        "dx_out overlaps rstd",
        lambda xp, a: {"rstd": a["buffer"][1, :ROWS], "dx_out": a["buffer"][:ROWS]},
        ValueError,
        "share no memory with rstd",
    ),
    Bad(
        "rows of dx_out overlap",
        lambda xp, a: {"dx_out": xp.lib.stride_tricks.as_strided(xp.zeros(64, "float32"), (ROWS, COLS), (16, 4))},
        ValueError,
        "every element of dx_out must have its own memory",
    ),
    Bad(
        "columns of dx_out overlap",
        lambda xp, a: {"dx_out": xp.lib.stride_tricks.as_strided(xp.zeros(64, "float32"), (ROWS, COLS), (8, 8))},
        ValueError,
        "every element of dx_out must have its own memory",
    ),
    Bad(
        "columns of dx_out overlap the next row's",
        lambda xp, a: {"dx_out": xp.lib.stride_tricks.as_strided(xp.zeros(64, "float32"), (ROWS, COLS), (24, 8))},
        ValueError,
        "every element of dx_out must have its own memory",
    ),
    Bad(
        "dy has strides of half an element",
        lambda xp, a: {"dy": xp.lib.stride_tricks.as_strided(xp.zeros(64, "float64"), (ROWS, COLS), (68, 8))},
        ValueError,
        "dy must have strides that are multiples of its 8 bytes an element; got strides of .68, 8. bytes",
    ),
    Bad(
        "x has strides of half an element",
        lambda xp, a: {"x": xp.lib.stride_tricks.as_strided(xp.zeros(64, "float64"), (ROWS, COLS), (68, 8))},
        ValueError,
        "x must have strides that are multiples of its 8 bytes an element; got strides of .68, 8. bytes",
    ),
    Bad("rows are empty", lambda xp, a: {"x": a["x"][:, :0], "dy": a["dy"][:, :0]}, ValueError, "must not be empty"),
    Bad(
        "zero_centered_gamma without weight",
        lambda xp, a: {"weight": None, "zero_centered_gamma": True},
        ValueError,
        "zero_centered_gamma=True needs a weight",
    ),
]

MEAN = [
    Bad(
        "mean is None", lambda xp, a: {"mean": None}, TypeError, "mean must be a (NumPy array|CuPy array|torch.Tensor)"
    ),
    Bad("mean is too short", lambda xp, a: {"mean": a["mean"][1:]}, ValueError, "mean must have the shape of x"),
    Bad("mean is float16", lambda xp, a: {"mean": a["mean"].astype("float16")}, TypeError, "mean must have dtype"),
]

CASES = [
    *(("layer_norm", bad) for bad in FORWARD + BIAS),
    *(("layer_norm_forward", bad) for bad in FORWARD + BIAS),
    *(("rms_norm", bad) for bad in FORWARD),
    *(("rms_norm_forward", bad) for bad in FORWARD),
    *(("layer_norm_backward", bad) for bad in BACKWARD + MEAN),
    *(("rms_norm_backward", bad) for bad in BACKWARD),
]


def good_arguments(xp: Any) -> dict[str, Any]:
    random = numpy.random.default_rng(0)
    shapes = {"x": (ROWS, COLS), "dy": (ROWS, COLS), "weight": COLS, "bias": COLS, "mean": ROWS, "rstd": ROWS}
    shapes["buffer"] = (ROWS + 2, COLS)
    return {name: xp.asarray(random.standard_normal(shape).astype("float32")) for name, shape in shapes.items()}


def accepted(function: str, arguments: dict[str, Any]) -> dict[str, Any]:
    names = ["x", "weight", "bias"] if function.startswith("layer") else ["x", "weight"]
    if function.endswith("backward"):
        names = ["dy", "x", "mean", "rstd", "weight"] if function.startswith("layer") else ["dy", "x", "rstd", "weight"]
    return {name: arguments[name] for name in names}


def changed(xp: Any, function: str, good: dict[str, Any], bad: Bad) -> dict[str, Any]:
    """Return the arguments of a bad call. An output_mask for rms_norm has no entry for dbias."""
    arguments = accepted(function, good) | bad.change(xp, good)
    if function == "rms_norm_backward" and len(arguments.get("output_mask") or ()) == 3:
        arguments["output_mask"] = arguments["output_mask"][:2]
    return arguments


@pytest.mark.parametrize(("function", "bad"), CASES, ids=lambda value: getattr(value, "what", value))
def test_bad_arguments(xp, function, bad):
    good = good_arguments(xp)
    arguments = changed(xp, function, good, bad)
    arrays = [array for array in (*good.values(), *arguments.values()) if isinstance(array, xp.ndarray)]
    # A GPU cannot read arrays with such strides.
    arrays = [array for array in arrays if not any(stride % array.itemsize for stride in array.strides)]
    before = [array.copy() for array in arrays]
    with pytest.raises(bad.error, match=f"^{function}: .*{bad.phrase}") as caught:
        getattr(cunorm, function)(**arguments)
    assert caught.type is bad.error, "a subclass would say something else"
    for array, copy in zip(arrays, before, strict=True):
        numpy.testing.assert_array_equal(on_host(array), on_host(copy))


@pytest.mark.parametrize("function", sorted({function for function, _ in CASES}))
def test_the_good_arguments_are_good(xp, function):
    getattr(cunorm, function)(**accepted(function, good_arguments(xp)))


@pytest.mark.parametrize(("good", "bad"), [(COLS, 8.0), ((COLS,), (8.0,)), ((1, COLS), (True, COLS))], ids=repr)
def test_what_equals_an_accepted_shape_is_not_accepted(xp, good, bad):
    """A good call goes before, because the path of CuPy arrays remembers what it has accepted."""
    x = xp.ones((1, COLS), "float32")
    cunorm.layer_norm(x, good)
    with pytest.raises(TypeError, match=r"^layer_norm: normalized_shape must"):
        cunorm.layer_norm(x, bad)


def test_an_eps_beyond_float32(xp):
    x = xp.asarray([[1.0, 2.0, 4.0]], "float32")
    y, _, rstd = cunorm.layer_norm_forward(x, eps=1e39)
    assert (abs(on_host(y)).max(), on_host(rstd)[0]) == pytest.approx((0, 0), abs=1e-18)


def test_a_read_only_out():
    x = numpy.ones((ROWS, COLS), "float32")
    out = numpy.zeros_like(x)
    out.flags.writeable = False
    with pytest.raises(ValueError, match="layer_norm: out must be writeable"):
        cunorm.layer_norm(x, out=out)
    with pytest.raises(ValueError, match="rms_norm_backward: dx_out must be writeable"):
        cunorm.rms_norm_backward(x, x, x[:, 0], dx_out=out)


class Exporter:
    """An array of another library, on a device of this DLPack type, which exports nothing."""

    def __init__(self, device_type: int):
        self.device_type = device_type

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.device_type, 0

    def __dlpack__(self, **options: Any) -> Any:
        raise BufferError("nothing to export")


def test_numbers_and_masked_arrays_of_numpy():
    for x, name in ((numpy.float32(1), "float32"), (numpy.ma.ones((2, 8)), "MaskedArray")):
        with pytest.raises(TypeError, match=f"layer_norm: x must be a NumPy array; got {name}"):
            cunorm.layer_norm(x)


@pytest.mark.parametrize("x", [Exporter(1), memoryview(b"1234"), bytearray(8)], ids=["DLPack", "memoryview", "bytes"])
def test_host_arrays_of_other_libraries(x):
    with pytest.raises(TypeError, match=r"^layer_norm: x must be"):
        cunorm.layer_norm(x)


def test_a_cuda_array_without_cupy(monkeypatch):
    monkeypatch.setitem(sys.modules, "cupy", None)
    monkeypatch.delitem(sys.modules, "cunorm.call.cupy", raising=False)

    with pytest.raises(ImportError, match=f"^layer_norm: arrays on a GPU need CuPy.*{re.escape(INSTALL)}"):
        cunorm.layer_norm(Exporter(2))


@pytest.mark.gpu
def test_a_cuda_array_that_cannot_be_read():
    with pytest.raises(TypeError, match=r"^layer_norm: x cannot be read through DLPack: nothing to export"):
        cunorm.layer_norm(Exporter(2))


def test_a_cuda_array_without_a_gpu_or_driver():
    """The driver may be missing or too old for CuPy."""
    cupy = pytest.importorskip("cupy", reason="CuPy is not installed")
    try:
        cupy.cuda.runtime.getDeviceCount()
        pytest.skip("this machine has a GPU and its driver")
    except cupy.cuda.runtime.CUDARuntimeError:
        pass
    with pytest.raises(RuntimeError, match=r"^layer_norm: CuPy cannot use the GPU that x is on: .*nvidia-smi"):
        cunorm.layer_norm(Exporter(2))


@pytest.mark.parametrize(("package", "names"), cunorm._CLASSES.items())
def test_a_class_that_cunorm_has_not_is_said_to_be_where_it_is(package, names):
    pytest.importorskip(package.partition(".")[0])
    module = importlib.import_module(f"cunorm.{package}")
    for name in names.split():
        assert getattr(module, name).__name__ == name
        with pytest.raises(AttributeError, match=f"module 'cunorm' has no attribute '{name}': take .*{package}.{name}"):
            getattr(cunorm, name)


def test_what_is_nowhere_is_said_to_be_nowhere():
    with pytest.raises(AttributeError, match=r"module 'cunorm' has no attribute 'BatchNorm'$"):
        cunorm.BatchNorm  # noqa: B018


@pytest.mark.gpu
@pytest.mark.parametrize("function", ["layer_norm", "rms_norm"])
def test_arrays_on_different_devices(function):
    import cupy

    host, device = good_arguments(numpy), good_arguments(cupy)
    call = getattr(cunorm, function)
    with pytest.raises(TypeError, match="weight must be a CuPy array, as x is; got ndarray"):
        call(device["x"], None, host["weight"])
    with pytest.raises(TypeError, match="weight must be a NumPy array, as x is"):
        call(host["x"], None, device["weight"])
    with pytest.raises(TypeError, match="out must be a CuPy array"):
        call(device["x"], out=host["buffer"][:ROWS])
    with pytest.raises(TypeError, match="dy must be a CuPy array"):
        cunorm.rms_norm_backward(host["dy"], device["x"], device["rstd"])


@pytest.mark.gpu
def test_more_free_multiprocessors_than_there_are():
    import cupy

    sms = cupy.cuda.runtime.getDeviceProperties(0)["multiProcessorCount"]
    with pytest.raises(ValueError, match=f"sm_margin must be 0 or more and below the device's {sms} multiprocessors"):
        cunorm.layer_norm(cupy.ones((ROWS, COLS), "float32"), sm_margin=sms)
