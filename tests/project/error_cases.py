"""The table of test_index_of_errors.py: a call for every message of docs/errors.md.

All calls run on the CPU. Where a message needs a GPU, other ranks or a missing package, its check is called directly.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy

import cunorm
from cunorm import expression
from cunorm.call import broadcasting, checks, recipe
from cunorm.expression import texts
from cunorm.kernel import device
from cunorm.linear import checks as linear_checks
from cunorm.plan import plan, problem

Rows = dict[str, Callable[[], Any]]

X, ROW, ONE = numpy.ones((4, 8), "float32"), numpy.ones(8, "float32"), numpy.ones(1, "float32")
WEIGHT = numpy.ones((6, 8), "float32")
SEED = numpy.array([1], "int64")
_, MEAN, RSTD = cunorm.layer_norm_forward(X)


def backward(**changed: Any) -> Any:
    return cunorm.layer_norm_backward(**{"dy": X, "x": X, "mean": MEAN, "rstd": RSTD} | changed)


def linear(**changed: Any) -> Any:
    return cunorm.layer_norm_linear(**{"x": X, "weight": WEIGHT} | changed)


def linear_backward(**changed: Any) -> Any:
    given = {"dy": X[:, :6], "x": X, "mean": MEAN, "rstd": RSTD, "weight": WEIGHT, "eps": 1e-5}
    return cunorm.layer_norm_linear_backward(**given | changed)


def fp8(**changed: Any) -> Any:
    return cunorm.layer_norm_fp8(**{"x": X} | changed)


def trace(function: Callable[..., Any]) -> Any:
    return cunorm.fuse("layer_norm", epilogue=function)


FUSED = cunorm.fuse("layer_norm", epilogue=lambda xhat, w: xhat * w)
WITH_S = cunorm.fuse("rms_norm", prologue=lambda x, r: x + r, returns=("y", "s"))
_, SAVED = FUSED.forward(X, w=ROW)
_, SAVED_BY_NAME = cunorm.add_rms_norm.forward(X, X)
_, SAVED_BY_GROUP = cunorm.rms_norm_gated.forward(X, X, group_size=4)


def of_backward_kinds(**arrays: Any) -> None:
    """Check the arrays of a backward pass beside x."""
    given = {name: checks.Layout(shape, (1,) * len(shape), dtype, "cpu") for name, (shape, dtype) in arrays.items()}
    layout = checks.Layout((4, 8), (8, 1), "float32", "cpu")
    broadcasting.check_backward("backward", FUSED.operation, {"x": layout, **given}, "float32")


class Exporter:
    """An array of another library, which exports nothing."""

    def __init__(self, device_type: int, error: Exception | None = None):
        self.device_type, self.error = device_type, error

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.device_type, 0

    def __dlpack__(self, **_: Any) -> Any:
        raise self.error or BufferError("nothing to export")


def without(package: str, call: Callable[[], Any], *reload: str) -> Any:
    """Call as if a package was not installed. `reload` names the modules that import it."""
    kept = {name: module for name, module in sys.modules.items() if name in reload}
    with mock.patch.dict(sys.modules, {package: None}):
        for name in reload:
            sys.modules.pop(name, None)
        try:
            return call()
        finally:
            sys.modules.update(kept)


def of_cuda(cupy: Any) -> Exception:
    return cupy.cuda.runtime.CUDARuntimeError(35)


def view_by_cupy(array: Any, error: Exception | None = None) -> Any:
    """View an array through CuPy, which raises `error`."""
    import cupy

    from cunorm.call import dlpack

    with mock.patch.object(cupy, "from_dlpack", side_effect=error):
        return dlpack._view("layer_norm", "x", array)


def layout_by_cupy(array: Any) -> Any:
    return importlib.import_module("cunorm.call.cupy").layout("layer_norm", "x", array)


def misaligned() -> Any:
    import cupy

    memory = SimpleNamespace(ptr=1, device_id=0)
    array = mock.Mock(spec=cupy.ndarray, dtype=numpy.dtype("float32"), data=memory, size=8, shape=(8,), strides=(4,))
    return layout_by_cupy(array)


def gemm(call: Callable[[Any], Any], **replaced: Any) -> Any:
    """Call with the module linear/gemm.py, in which some names are replaced."""
    module = importlib.import_module("cunorm.linear.gemm")
    with mock.patch.multiple(module, **replaced):
        return call(module)


def scaled_rows(bindings: Any) -> Any:
    array = SimpleNamespace(data=SimpleNamespace(ptr=0, device_id=0), shape=(16, 16), dtype=numpy.dtype("float32"))
    never = SimpleNamespace(prepared=lambda kind: SimpleNamespace(run=lambda *_: False))
    replaced = {"bindings": lambda: bindings, "of_thread": never}
    return gemm(lambda module: module._scaled_rows(array, array, array, (array, array), None), **replaced)


def old_gpu() -> Any:
    module = importlib.import_module("cunorm.linear.cupy_arrays")
    layout = checks.Layout((16, 16), (16, 1), "float32", 0)
    array = SimpleNamespace(data=SimpleNamespace(device_id=0))
    known = SimpleNamespace(current=lambda _: SimpleNamespace(arch=80))
    with mock.patch.multiple(module, layout=lambda *_: layout, device=known):
        options = linear_checks.LinearOptions("layer_norm_linear", "layer_norm", 1e-5, zero_centered_gamma=False)
        return module.forward_float8(options, {"x": array, "weight": array})


def streamed_rows() -> Any:
    """Plan streamed rows with the gradient of a vector of the prologue."""
    operation = cunorm.fuse("layer_norm", prologue=lambda x, v: x * v).operation
    dtypes = dict.fromkeys(("dy", "x", "v"), "float32")
    task = problem.backward_problem(operation, 8, 100_000, dtypes, ("v",), kinds={"v": "column"})
    return plan.plan(task, device.Device("without clusters", 80, 1, 163 << 10))


def without_nvrtc() -> Any:
    from cunorm import private

    absent = ModuleNotFoundError("cupy_backends.cuda.libs.nvrtc", name="cupy_backends.cuda.libs.nvrtc")
    modules = {"cupy": SimpleNamespace(__version__="99.0")}
    with mock.patch.object(private, "import_module", side_effect=lambda name: modules.get(name) or throw(absent)):
        return private._required("cupy_backends.cuda.libs.nvrtc", "no kernel can be compiled")


def throw(error: Exception) -> Any:
    raise error


def with_environment(name: str, value: str, call: Callable[[], Any]) -> Any:
    with mock.patch.dict("os.environ", {name: value}):
        return call()


OVERLAPPING = numpy.ones((8, 8), "float32")
READ_ONLY = numpy.ones((4, 8), "float32")
READ_ONLY.setflags(write=False)
REPEATED = numpy.lib.stride_tricks.as_strided(numpy.ones(8, "float32"), (4, 8), (0, 4))
ODD_STRIDES = numpy.lib.stride_tricks.as_strided(numpy.ones(64, "int8").view("float32"), (2, 2), (9, 4))

ROWS: Rows = {
    # Kinds of arrays.
    "a list": lambda: cunorm.layer_norm([[1.0]]),
    "an array of a library without products in 8 bits": lambda: cunorm.layer_norm_linear(
        Exporter(2), WEIGHT, fp8="row"
    ),
    "a scalar of NumPy": lambda: cunorm.layer_norm(numpy.float32(1)),
    "host memory by DLPack": lambda: cunorm.layer_norm(Exporter(1)),
    "no CuPy": lambda: without("cupy", lambda: cunorm.layer_norm(Exporter(2)), "cunorm.call.cupy"),
    "CuPy without a driver": lambda: view_by_cupy(Exporter(2), of_cuda(importlib.import_module("cupy"))),
    "an exporter that exports nothing": lambda: view_by_cupy(Exporter(2), BufferError("nothing to export")),
    "no exporter": lambda: view_by_cupy([1.0]),
    "an exporter on the host": lambda: view_by_cupy(Exporter(1)),
    "NumPy beside CuPy": lambda: layout_by_cupy(X),
    "an address between elements": misaligned,
    "strides between elements": lambda: cunorm.layer_norm(ODD_STRIDES),
    "no ml_dtypes": lambda: without("ml_dtypes", lambda: cunorm.layer_norm(X, dtype="bfloat16")),
    # The plain norms.
    "integers": lambda: cunorm.layer_norm(X.astype("int32")),
    "no axis": lambda: cunorm.layer_norm(numpy.ones((), "float32"), ()),
    "normalized_shape () of a scalar": lambda: cunorm.layer_norm(numpy.ones((), "float32")),
    "normalized_shape of another length": lambda: cunorm.layer_norm(X, 7),
    "empty rows": lambda: cunorm.layer_norm(X[:, :0]),
    "zero_centered_gamma without a weight": lambda: cunorm.layer_norm(X, zero_centered_gamma=True),
    "a short name of a dtype": lambda: cunorm.layer_norm(X, dtype="fp16"),
    "out of integers": lambda: cunorm.layer_norm(X, out=X.astype("int32")),
    "out of another shape": lambda: cunorm.layer_norm(X, out=X[:2]),
    "out of another dtype": lambda: cunorm.layer_norm(X, out=X.astype("float64"), dtype="float16"),
    "weight as normalized_shape": lambda: cunorm.layer_norm(X, ROW),
    "normalized_shape of floats": lambda: cunorm.layer_norm(X, (8.0,)),
    "weight of another shape": lambda: cunorm.layer_norm(X, 8, ROW[1:]),
    "eps of text": lambda: cunorm.layer_norm(X, eps="1"),
    "eps below 0": lambda: cunorm.layer_norm(X, eps=-1.0),
    "eps beyond floats": lambda: cunorm.layer_norm(X, eps=10**400),
    "sm_margin of floats": lambda: cunorm.layer_norm(X, sm_margin=1.5),
    "sm_margin below 0": lambda: cunorm.layer_norm(X, sm_margin=-1),
    "out that overlaps itself": lambda: cunorm.layer_norm(X, out=REPEATED),
    "out that overlaps x": lambda: cunorm.layer_norm(OVERLAPPING[:4], out=OVERLAPPING[1:5]),
    "out that is read-only": lambda: cunorm.layer_norm(X, out=READ_ONLY),
    # Their backward passes.
    "dy of another shape": lambda: backward(dy=X[:2]),
    "rstd of another shape": lambda: backward(rstd=RSTD[:2]),
    "rstd of another dtype": lambda: backward(rstd=RSTD.astype("float64")),
    "a backward pass of empty rows": lambda: backward(dy=X[:, :0], x=X[:, :0]),
    "a backward pass with zero_centered_gamma alone": lambda: backward(zero_centered_gamma=True),
    "dx_out of another shape": lambda: backward(dx_out=X[:2]),
    "dx_out of another dtype": lambda: backward(dx_out=X.astype("float16")),
    "output_mask of a number": lambda: backward(output_mask=1),
    "output_mask of one": lambda: backward(output_mask=(True,)),
    "dx_out without dx": lambda: backward(output_mask=(False, True, True), dx_out=numpy.empty_like(X)),
    # FP8 output.
    "float64 to 8 bits": lambda: fp8(x=X.astype("float64")),
    "float64 s to 8 bits": lambda: cunorm.add_rms_norm.fp8(X, X, s_dtype="float64"),
    "an unknown format": lambda: fp8(dtype="e3m4"),
    "an unknown granularity": lambda: fp8(granularity="column"),
    "a scale for rows": lambda: fp8(scale=1.0),
    "a scale of 0": lambda: fp8(scale=0.0, granularity="tensor"),
    "a scale of two": lambda: fp8(scale=numpy.ones(2, "float32"), granularity="tensor"),
    "no bound of y": lambda: WITH_S.fp8(X, r=X, granularity="tensor"),
    # Operands.
    "a seed of Python": lambda: cunorm.add_rms_norm(X, X, dropout_p=0.5, seed=1),
    "a seed of floats": lambda: cunorm.add_rms_norm(X, X, dropout_p=0.5, seed=ONE),
    "two seeds": lambda: cunorm.add_rms_norm(X, X, dropout_p=0.5, seed=numpy.ones(2, "int64")),
    "an operand that is a bool": lambda: FUSED(X, w=True),
    "an operand beyond float32": lambda: recipe.rounded(SimpleNamespace(problem=SimpleNamespace(compute="")), 10**400),
    "rows without columns": lambda: FUSED(X[:, :0], w=1.0),
    "a number for an array": lambda: cunorm.add_rms_norm(X, 1.0),
    "residual of another shape": lambda: cunorm.add_rms_norm(X, X[:2]),
    "an operand that does not broadcast": lambda: FUSED(X, w=ROW[1:]),
    "a number for dy": lambda: FUSED.backward(SAVED, 1.0),
    "dy of another shape than x": lambda: FUSED.backward(SAVED, X[:2]),
    "rstd of another dtype than forward's": lambda: of_backward_kinds(rstd=((4,), "float64")),
    # fuse.
    "s_dtype without a prologue": lambda: cunorm.fuse("layer_norm", s_dtype="float32"),
    "an unknown norm": lambda: cunorm.fuse("batch_norm"),
    "returns of text": lambda: cunorm.fuse("layer_norm", returns="y"),
    "returns without y": lambda: cunorm.fuse("layer_norm", prologue=lambda x, r: x + r, returns=("s",)),
    "s without a prologue": lambda: cunorm.fuse("layer_norm", returns=("y", "s")),
    "no parameters": lambda: trace(lambda: 1.0),
    "xhat second": lambda: trace(lambda w, xhat: w * xhat),
    "returns twice": lambda: cunorm.fuse("layer_norm", returns=("y", "y")),
    "an unknown result": lambda: cunorm.fuse("layer_norm", returns=("y", "z")),
    "an operand of the name of an option": lambda: trace(lambda xhat, eps: xhat * eps),
    "an operand and its gradient": lambda: trace(lambda xhat, a, da: xhat * a * da),
    "saved of something": lambda: FUSED.backward(None, X),
    "saved of another operation": lambda: WITH_S.backward(SAVED, X, X),
    "saved of no named operation": lambda: cunorm.add_rms_norm.backward(SAVED, X, X),
    "a gradient too few": lambda: cunorm.add_rms_norm.backward(SAVED_BY_NAME, X),
    "no gradient": lambda: FUSED.backward(SAVED, None),
    "wanted of text": lambda: FUSED.backward(SAVED, X, wanted="x"),
    "dy of another shape with groups": lambda: cunorm.rms_norm_gated.backward(SAVED_BY_GROUP, X[:2]),
    "an operand without its name": lambda: FUSED(X, ROW),
    "an operand is missing": lambda: FUSED(X),
    # Expressions.
    "an operator": lambda: trace(lambda xhat: xhat // 2),
    "a captured array": lambda: trace(lambda xhat: xhat * ROW.tolist()),
    "a parameter as a power": lambda: trace(lambda xhat: 2**xhat),
    "a large power": lambda: trace(lambda xhat: xhat**9),
    "a function of NumPy": lambda: trace(lambda xhat: numpy.sin(xhat)),
    "a function of arrays": lambda: trace(lambda xhat: numpy.mean(xhat)),
    "a condition": lambda: trace(lambda xhat: xhat if xhat else 1.0),
    "a number of a parameter": lambda: trace(lambda xhat: float(xhat)),
    "an index": lambda: trace(lambda xhat: xhat[0]),
    "a method": lambda: trace(lambda xhat: xhat.mean()),
    "nothing returned": lambda: trace(lambda xhat: None),
    "another function's parameter": lambda: trace(lambda xhat: expression.trace(lambda a: a * xhat) and xhat),
    "a default": lambda: trace(lambda xhat, w=1.0: xhat * w),
    "an infinite constant": lambda: trace(lambda xhat: xhat * float("inf")),
    "a name in Greek": lambda: trace(lambda xhat, γ: xhat * γ),
    "a name of a temporary": lambda: trace(lambda xhat, t0: xhat * t0),
    "a name twice": lambda: expression.parse("a", ("a", "a")),
    "a wrong text": lambda: expression.parse("a +", ("a",)),
    "no text": lambda: expression.parse(1, ("a",)),
    "a name that is not replaced": lambda: expression.substitute(
        expression.parse("a", ("a",)), {"b": expression.parse("a", ("a",))}
    ),
    "gelu of another kind": lambda: expression.gelu(1.0, approximate="erf"),
    "a gradient by another name": lambda: expression.gradients(expression.parse("a", ("a",)), ("b",)),
    "an expression by another module": lambda: texts.evaluate(expression.parse("a", ("a",)), {"a": 1.0}, sys),
    "a value is missing": lambda: texts.evaluate(expression.parse("a", ("a",)), {}, numpy),
    "values of integers": lambda: texts.evaluate(expression.parse("a", ("a",)), {"a": SEED}, numpy),
    "a result of the name of an operand": lambda: texts.cuda({"a": expression.parse("a", ("a",))}),
    # Named operations.
    "dropout_p of text": lambda: cunorm.add_rms_norm(X, X, dropout_p="0.5", seed=SEED),
    "dropout_p of 1": lambda: cunorm.add_rms_norm(X, X, dropout_p=1.0, seed=SEED),
    "dropout without a seed": lambda: cunorm.add_rms_norm(X, X, dropout_p=0.5),
    "weight of a gated norm": lambda: cunorm.rms_norm_gated(X, X, ROW[1:]),
    "group_size of floats": lambda: cunorm.rms_norm_gated(X, X, group_size=2.0),
    "group_size that does not divide": lambda: cunorm.rms_norm_gated(X, X, group_size=3),
    "z of another shape": lambda: cunorm.rms_norm_gated(X, X[:2], group_size=4),
    "a named operation without a weight": lambda: cunorm.add_rms_norm(X, X, zero_centered_gamma=True),
    # Norms with a product.
    "fp8 of another kind": lambda: linear(fp8="tensor"),
    "fp8 on an old GPU": old_gpu,
    "fp8 without cuBLASLt": lambda: scaled_rows(None),
    "fp8 that cuBLASLt has not": lambda: scaled_rows(SimpleNamespace(MatmulMatrixScale=None)),
    "no cuBLAS": lambda: gemm(
        lambda module: module._cublas.__wrapped__(),
        private=SimpleNamespace(cublas=mock.Mock(side_effect=ImportError("libcublas.so"))),
    ),
    "an unknown normalization": lambda: linear(normalization="BatchNorm"),
    "ln_bias of an RMSNorm": lambda: linear(normalization="RMSNorm", ln_bias=ROW),
    "weight of one axis": lambda: linear(weight=ROW),
    "x of another length": lambda: linear(x=X[:, 1:]),
    "ln_weight is missing": lambda: linear(zero_centered_gamma=True),
    "dy of another shape than y": lambda: linear_backward(dy=X),
    "output_mask of no tuple": lambda: linear_backward(output_mask=1),
    "output_mask of two": lambda: linear_backward(output_mask=(True, True)),
    "weight of another dtype": lambda: linear(weight=WEIGHT.astype("float64")),
    "float64 with fp8": lambda: linear(x=X.astype("float64"), weight=WEIGHT.astype("float64"), fp8="row"),
    "sizes that are no multiples of 16": lambda: linear(fp8="row"),
    "integers with a product": lambda: linear(x=X.astype("int32")),
    "bias of another length": lambda: linear(bias=ROW),
    "mean of another dtype": lambda: linear_backward(mean=MEAN.astype("float64")),
    "weight on another device": lambda: linear_checks.check_forward("layer_norm_linear", named(weight=1), False),
    "dy on another device": lambda: linear_checks.check_backward("layer_norm_linear_backward", named(dy=1), False),
    # The rest.
    "a vector of the prologue over streamed rows": streamed_rows,
    "an environment variable": lambda: with_environment(
        device.EARLY_VARIABLE, "yes", lambda: device.is_on(device.EARLY_VARIABLE, "early launch")
    ),
    "a CuPy without NVRTC": without_nvrtc,
    "another device": lambda: checks.check_same_device("layer_norm", "weight", *two_devices()),
}


def two_devices() -> tuple[checks.Layout, checks.Layout]:
    return checks.Layout((8,), (1,), "float32", 1), checks.Layout((4, 8), (8, 1), "float32", 0)


def named(**devices: int) -> tuple[tuple[str, checks.Layout], ...]:
    """Return layouts for a product. They are on device 0, unless `devices` names another."""
    shapes = {"x": (4, 8), "weight": (6, 8), "dy": (4, 6)}
    return tuple(
        (name, checks.Layout(shape, (shape[1], 1), "float32", devices.get(name, 0))) for name, shape in shapes.items()
    )
