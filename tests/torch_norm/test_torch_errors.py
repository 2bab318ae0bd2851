"""Bad input raises torch's own type of error where torch has one, with a message that says what to do."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest

torch = pytest.importorskip("torch")

import test_errors  # noqa: E402
import test_linear  # noqa: E402
from torch._subclasses.fake_tensor import FakeTensorMode  # noqa: E402
from torch.nn import functional as F  # noqa: E402, N812
from torch_tensors import on_devices, tensor  # noqa: E402

import cunorm  # noqa: E402
from cunorm.kernel.device import INSTALL  # noqa: E402
from cunorm.torch import LayerNorm, RMSNorm, layer_norm, rms_norm  # noqa: E402

ROWS, COLS = 4, 8


class Bad(NamedTuple):
    what: str
    change: Callable[[dict], dict]  # the good arguments -> those that differ
    error: type[Exception]
    phrase: str = ""  # a part of the message on a GPU; on the CPU the message is torch's own


def sparse(a: dict) -> dict:
    return {"input": a["input"].to_sparse()}


def quantised(a: dict) -> dict:
    return {"input": torch.quantize_per_tensor(a["input"], 0.1, 0, torch.qint8)}


# Arguments that torch's function refuses too.
REFUSED = [
    Bad("input is a list", lambda a: {"input": [[1.0]]}, TypeError, "input must be a torch.Tensor; got list"),
    Bad("weight is a list", lambda a: {"weight": [1.0] * COLS}, TypeError, "weight must be a torch.Tensor; got list"),
    Bad("bias is a number", lambda a: {"bias": 1.0}, TypeError, "bias must be a torch.Tensor; got float"),
    Bad("a string for a shape", lambda a: {"normalized_shape": "8"}, TypeError, "a sequence of ints; got '8'"),
    Bad("weight second", lambda a: {"normalized_shape": a["weight"]}, TypeError, "weight is the third argument"),
    Bad("a float in the shape", lambda a: {"normalized_shape": (8.0,)}, TypeError, "sequence of ints; got (8.0,)"),
    Bad("no shape", lambda a: {"normalized_shape": ()}, RuntimeError, "at least one; got ()"),
    Bad("wrong shape", lambda a: {"normalized_shape": (7,)}, RuntimeError, "got (7,) for input of shape (4, 8)"),
    Bad("too many axes", lambda a: {"normalized_shape": (2, 4, 8)}, RuntimeError, "must be the last axes of input"),
    Bad("short weight", lambda a: {"weight": a["weight"][1:]}, RuntimeError, "weight must have shape (8,)"),
    Bad("short bias", lambda a: {"bias": a["bias"][1:]}, RuntimeError, "bias must have shape (8,)"),
    Bad("integers", lambda a: {"input": a["input"].long()}, RuntimeError, "x must have dtype float16, bfloat16"),
    Bad("sparse", sparse, (RuntimeError, NotImplementedError), "must be a strided tensor"),
    Bad("quantised", quantised, NotImplementedError, "must be a strided tensor"),
    Bad("eps is a string", lambda a: {"eps": "1e-5"}, TypeError, "eps must be a real number; got str"),
]
# Wrong values of the options that torch's function has not.
OURS = [
    Bad("margin is negative", lambda a: {"sm_margin": -1}, ValueError, "sm_margin must be 0 or more"),
    Bad("margin is a float", lambda a: {"sm_margin": 1.0}, TypeError, "sm_margin must be an integer; got float"),
    Bad("unknown margin", lambda a: {"sm_margin": {"fwd": 1}}, ValueError, "forward, backward, inference; got the key"),
    Bad("margin is too large", lambda a: {"sm_margin": 10_000}, ValueError, "below the device's"),
    Bad("dtype is no float", lambda a: {"dtype": torch.int32}, TypeError, "dtype must be one of torch.float16"),
    Bad("dtype is a string", lambda a: {"dtype": "float32"}, TypeError, "dtype must be one of torch.float16"),
]
CENTRED = Bad(
    "nothing to centre", lambda a: {"weight": None, "zero_centered_gamma": True}, ValueError, "needs a weight"
)


def good(device: str) -> dict[str, Any]:
    return {
        "input": torch.ones(ROWS, COLS, device=device),
        "normalized_shape": (COLS,),
        "weight": torch.ones(COLS, device=device),
        "bias": torch.zeros(COLS, device=device),
    }


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:torch.quantize")
@pytest.mark.parametrize("warm", [False, True])
@pytest.mark.parametrize("bad", [*REFUSED, *OURS, CENTRED], ids=lambda bad: bad.what)
def test_on_a_gpu(bad, warm):
    arguments = good("cuda")
    if warm:  # an earlier good call must not hide the error
        layer_norm(**arguments)
    arguments |= bad.change(arguments)
    with pytest.raises(bad.error) as caught:
        layer_norm(**arguments)
    assert bad.phrase in str(caught.value)
    assert str(caught.value).startswith("layer_norm: ")


@on_devices
@pytest.mark.filterwarnings("ignore:torch.quantize")
@pytest.mark.parametrize("bad", REFUSED, ids=lambda bad: bad.what)
def test_the_type_of_the_error_is_torchs(device, bad):
    arguments = good(device)
    arguments |= bad.change(arguments)
    for function in (F.layer_norm, layer_norm):
        with pytest.raises(bad.error):
            function(**arguments)


@pytest.mark.parametrize("bad", [CENTRED], ids=lambda bad: bad.what)
def test_on_the_cpu(bad):
    arguments = good("cpu")
    arguments |= bad.change(arguments)
    with pytest.raises(bad.error, match=bad.phrase):
        layer_norm(**arguments)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["weight", "bias"])
@pytest.mark.parametrize("function", [F.layer_norm, layer_norm])
def test_a_parameter_on_another_device(name, function):
    arguments = good("cuda") | {name: torch.ones(COLS)}
    with pytest.raises(RuntimeError, match="device"):
        function(**arguments)


@pytest.mark.gpu
def test_a_float_that_equals_an_int_is_no_int():
    arguments = good("cuda")
    layer_norm(**arguments, sm_margin=8)
    with pytest.raises(TypeError, match="sm_margin must be an integer; got float"):
        layer_norm(**arguments, sm_margin=8.0)
    with pytest.raises(TypeError, match="sequence of ints"):
        layer_norm(**arguments | {"normalized_shape": [8.0]})


@pytest.mark.gpu
def test_complex_numbers_go_to_torch():
    x = torch.randn(3, COLS, device="cuda", dtype=torch.complex64)
    torch.testing.assert_close(rms_norm(x, (COLS,)), F.rms_norm(x, (COLS,)))


@pytest.mark.gpu
def test_without_cupy():
    program = (
        "import sys, torch; sys.modules['cupy'] = None; from cunorm.torch import layer_norm;"
        "x = torch.ones(2, 8); layer_norm(x, (8,)); layer_norm(x.cuda(), (8,))"
    )
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert run.returncode == 1
    assert "ImportError: layer_norm: tensors on a GPU need CuPy" in run.stderr
    assert INSTALL in run.stderr


MODULES = [
    ("no size", {}, RuntimeError, "normalized_shape must be given; got none"),
    ("two sizes", {"normalized_shape": 8, "hidden_size": 8}, RuntimeError, "Drop hidden_size"),
    (
        "two dtypes",
        {"normalized_shape": 8, "dtype": torch.half, "params_dtype": torch.half},
        RuntimeError,
        "Drop params",
    ),
    ("bad margin", {"normalized_shape": 8, "sm_margin": 1.5}, TypeError, "sm_margin must be an integer"),
    ("bad key", {"normalized_shape": 8, "sm_margin": {"fwd": 1}}, ValueError, "got the key 'fwd'"),
    (
        "nothing to centre",
        {"normalized_shape": 8, "elementwise_affine": False, "zero_centered_gamma": True},
        ValueError,
        "got elementwise_affine=False",
    ),
]


@pytest.mark.parametrize("cls", [LayerNorm, RMSNorm])
@pytest.mark.parametrize(("what", "arguments", "error", "phrase"), MODULES, ids=lambda value: str(value)[:20])
def test_arguments_of_modules(cls, what, arguments, error, phrase):
    with pytest.raises(error, match=phrase) as caught:
        cls(**arguments)
    assert str(caught.value).startswith(cls.__name__)


# The functions of cunorm itself: the types of error that they raise for every kind of array.


def as_tensors(arguments: dict[str, Any]) -> dict[str, Any]:
    """Return tensors over the memory of the arrays, so that those that overlap still do."""
    return {name: tensor(value) if hasattr(value, "__dlpack__") else value for name, value in arguments.items()}


# Torch has no negative strides, and counts strides in elements.
TABLE = [
    (function, bad)
    for function, bad in test_errors.CASES
    if bad.what != "out is x backwards" and not bad.what.endswith("strides of half an element")
]


@pytest.mark.filterwarnings("ignore:The given NumPy array is not writable")
@pytest.mark.parametrize(("function", "bad"), TABLE, ids=lambda value: getattr(value, "what", value))
def test_functions_of_cunorm_refuse_tensors_as_other_arrays(xp, function, bad):
    """The table of test_errors.py: the same types of error, the name of the function, the tensors unchanged."""
    good = test_errors.good_arguments(xp)
    arguments = as_tensors(test_errors.changed(xp, function, good, bad))
    tensors = [value for value in arguments.values() if isinstance(value, torch.Tensor)]
    before = [value.clone() for value in tensors]
    with pytest.raises(bad.error, match=f"^{function}: .*{bad.phrase}") as caught:
        getattr(cunorm, function)(**arguments)
    assert caught.type is bad.error, "a subclass would say something else"
    torch.testing.assert_close(tensors, before, rtol=0, atol=0, equal_nan=True)


LINEAR = [
    *(("layer_norm_linear", bad) for bad in test_linear.FORWARD),
    *(("layer_norm_linear_forward", bad) for bad in test_linear.FORWARD),
    *(("layer_norm_linear_backward", bad) for bad in test_linear.BACKWARD),
]


@pytest.mark.parametrize(("function", "bad"), LINEAR, ids=lambda value: getattr(value, "what", value))
def test_the_norm_with_its_product_refuses_tensors_as_other_arrays(xp, function, bad):
    good = test_linear.good(xp)
    if function.endswith("backward"):
        del good["bias"]
        shapes = {"dy": (4, 6), "mean": (4,), "rstd": (4,)}
        good |= {name: xp.ones(shape, "float32") for name, shape in shapes.items()} | {"eps": 1e-5}
    arguments = as_tensors(good | bad.change(xp, good))
    with pytest.raises(bad.error) as caught:
        getattr(cunorm, function)(**arguments)
    assert caught.type is bad.error
    assert bad.phrase in str(caught.value)
    assert str(caught.value).startswith(f"{function}: ")


# Wrong arguments that only tensors can be.
TENSORS = [
    Bad("x is sparse", lambda a: {"x": a["x"].to_sparse()}, TypeError, "x must be a strided tensor; got layout"),
    Bad("x is quantised", lambda a: {"x": quantised({"input": a["x"]})["input"]}, TypeError, "got a quantised tensor"),
    Bad(
        "x is nested",
        lambda a: {"x": torch.nested.nested_tensor([a["x"]], layout=torch.jagged), "weight": None},
        TypeError,
        "x must be a strided tensor",
    ),
    Bad("weight is sparse", lambda a: {"weight": a["weight"].to_sparse()}, TypeError, "weight must be a strided"),
    Bad("weight is NumPy's", lambda a: {"weight": a["weight"].cpu().numpy()}, TypeError, "as x is; got ndarray"),
    Bad(
        "weight is elsewhere",
        lambda a: {"weight": a["weight"].to("meta")},
        ValueError,
        "weight must be on the device of x",
    ),
    Bad("out is elsewhere", lambda a: {"out": a["x"].to("meta")}, ValueError, "out must be on the device of x"),
    Bad("dtype is torch's of integers", lambda a: {"dtype": torch.int32}, TypeError, "dtype must be one of float16"),
    Bad("margins are many", lambda a: {"sm_margin": {"forward": 1}}, TypeError, "sm_margin must be an integer"),
    Bad(
        "a gradient is wanted through out",
        lambda a: {"x": a["x"].clone().requires_grad_(), "out": a["x"]},
        ValueError,
        "out must be None where a gradient is wanted; got a tensor. Use torch.no_grad()",
    ),
    Bad(
        "out wants a gradient",
        lambda a: {"out": a["x"].clone().requires_grad_()},
        ValueError,
        "out must be None where a gradient is wanted",
    ),
]


@on_devices
@pytest.mark.filterwarnings("ignore:torch.quantize", "ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("function", ["layer_norm", "layer_norm_forward", "rms_norm", "rms_norm_forward"])
@pytest.mark.parametrize("bad", TENSORS, ids=lambda bad: bad.what)
def test_functions_of_cunorm_refuse_what_only_tensors_can_be(device, function, bad):
    arguments = {"x": torch.ones(ROWS, COLS, device=device), "weight": torch.ones(COLS, device=device)}
    arguments |= bad.change(arguments)
    with pytest.raises(bad.error) as caught:
        getattr(cunorm, function)(**arguments)
    assert caught.type is bad.error
    assert str(caught.value).startswith(f"{function}: ")
    assert bad.phrase in str(caught.value)


@pytest.mark.parametrize(
    ("change", "error", "phrase"),
    [
        (lambda x: {"weight": torch.ones(COLS, dtype=torch.int64, device="cuda")}, TypeError, "weight must have dtype"),
        (lambda x: {"weight": torch.ones(COLS + 1, device="cuda")}, ValueError, "the shape of weight must be the last"),
        (lambda x: {"weight": torch.ones(COLS)}, ValueError, "weight must be on the device of x, cuda:0; got device"),
        (lambda x: {"eps": -1.0}, ValueError, "eps must be finite and not negative"),
    ],
    ids=["integers", "too long", "on the host", "negative eps"],
)
def test_tensors_of_a_gpu_are_refused_before_anything_asks_for_one(change, error, phrase):
    with FakeTensorMode():
        x = torch.ones(ROWS, COLS, device="cuda")
        with pytest.raises(error) as caught:
            cunorm.layer_norm(x, **change(x))
    assert caught.type is error
    assert str(caught.value).startswith("layer_norm: ")
    assert phrase in str(caught.value)


@pytest.mark.gpu
def test_a_margin_of_the_whole_gpu():
    x = torch.ones(ROWS, COLS, device="cuda")
    with pytest.raises(ValueError, match=r"^layer_norm_forward: sm_margin must be 0 or more and below the device's"):
        cunorm.layer_norm_forward(x, sm_margin=10_000)


# On the CPU cunorm.torch's functions refuse our own options too, and never drop one.
NOT_DROPPED = [
    *(bad for bad in OURS if bad.what != "margin is too large"),
    Bad("integers for weight", lambda a: {"weight": a["weight"].long()}, RuntimeError),
    Bad(
        "integers to centre",
        lambda a: {"weight": a["weight"].long(), "bias": None, "zero_centered_gamma": True},
        NotImplementedError,
        "weight must have dtype float16",
    ),
]


@pytest.mark.parametrize("bad", NOT_DROPPED, ids=lambda bad: bad.what)
def test_options_on_the_cpu(bad):
    arguments = good("cpu")
    arguments |= bad.change(arguments)
    with pytest.raises(bad.error) as caught:
        layer_norm(**arguments)
    assert bad.phrase in str(caught.value)


def test_complex_numbers_are_not_centred_in_silence():
    x, weight = torch.ones(3, COLS, dtype=torch.complex64), torch.ones(COLS, dtype=torch.complex64)
    with pytest.raises(NotImplementedError, match="rms_norm: x must have dtype"):
        rms_norm(x, (COLS,), weight, zero_centered_gamma=True)
