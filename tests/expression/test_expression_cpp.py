"""Expressions as C++: compiled for the CPU they compute what NumPy does, and NVRTC compiles them."""

from __future__ import annotations

import ctypes
import math
import shutil
import subprocess
import time
from pathlib import Path

import numpy
import pytest
from expressions import BY_HAND, FAR, PRIMITIVES, STABLE, gated
from nvrtc import needs_nvrtc

from cunorm import expression
from cunorm.expression import Expression, gradients, trace
from cunorm.expression.texts import cuda, evaluate
from cunorm.kernel import compile
from cunorm.kernel.source import SHARED_FACTS

ROOT = Path(__file__).parents[2]


def test_products_are_fused_with_what_they_are_added_to():
    def last(function):
        return [line.partition(" = ")[2] for line in cuda({"r": trace(function)}, indent="").splitlines()][-2]

    assert last(lambda a, b, c: a * b + c) == "cunorm::multiply_add(a, b, c);"
    assert last(lambda a, b, c: c + a * b) == "cunorm::multiply_add(a, b, c);"
    assert last(lambda a, b, c: a * b - c) == "cunorm::multiply_add(a, b, -c);"
    assert last(lambda a, b, c: c - a * b) == "cunorm::multiply_add(-a, b, c);"
    assert last(lambda a, b, c: -(a * b) + c) == "cunorm::multiply_add(-a, b, c);"
    assert last(lambda a, b, c: a * b + b * c) == "cunorm::multiply_add(b, c, t0);"
    assert last(lambda a, b, c: a * b - b * c) == "cunorm::multiply_add(-b, c, t0);"
    assert last(lambda a, b: a * 2.5 + b) == "cunorm::multiply_add(a, static_cast<Compute>(0x1.4p+1), b);"


def test_statements_compute_once_what_several_results_need():
    traced = trace(lambda x, z: x * expression.sigmoid(z))
    results = {"y": traced, "dz": gradients(traced, ["z"], seed="dy")["z"]}
    text = cuda(results, compute="double", indent="")
    assert text.count("cunorm::sigmoid(z)") == 1
    assert text.splitlines()[-2:] == ["const double y = t1;", "const double dz = t5;"]
    assert cuda({"y": traced}) == (
        "  const Compute t0 = cunorm::sigmoid(z);\n  const Compute t1 = x * t0;\n  const Compute y = t1;"
    )


def test_a_result_has_a_name_of_its_own():
    with pytest.raises(ValueError, match=r"a result must not have the name .*; got 'x'"):
        cuda({"x": trace(lambda x: -x)})
    with pytest.raises(ValueError, match="got 't1'"):
        cuda({"t1": trace(lambda x: -x)})


def without_directives(text: str) -> str:
    return "".join(line for line in text.splitlines(True) if not line.startswith(("#include", "#pragma once")))


def functions_text() -> str:
    return without_directives((ROOT / "kernels_cu" / "rows" / "functions.cuh").read_text())


IN_CPP = [
    *(function for function, _, _ in BY_HAND if function is not None),
    gated,
    *STABLE.values(),
    *(function for function, _ in PRIMITIVES.values()),
    lambda a, b, c: a * b - b * c + abs(c * a) - 1 / (1 + a * a),
    lambda a, b: -(a * b) - b,
    lambda a, b: expression.maximum(a, b) * expression.minimum(a, 0.1),
]


def with_gradients(function) -> dict[str, Expression]:
    traced = trace(function)
    by_name = gradients(traced, traced.names, seed="seed")
    return {"result": traced} | {f"gradient_{name}": derivative for name, derivative in by_name.items()}


@pytest.fixture(scope="module")
def compiled(tmp_path_factory):
    """Compile all of IN_CPP once, with the stand-in's platform.cuh."""
    if shutil.which("g++") is None:
        pytest.skip("g++ is not installed")
    stand_in = ROOT / "tests" / "kernels" / "cpu"
    parts = [SHARED_FACTS, '#include "platform.cuh"\n', functions_text()]
    for number, function in enumerate(IN_CPP):
        results = with_gradients(function)
        names = [*results["result"].names, "seed"]
        loads = "".join(f"    [[maybe_unused]] const Compute {name} = *values++;\n" for name in names)
        stores = "".join(f"    *results++ = {name};\n" for name in results)
        parts.append(
            f"template <class Compute>\nvoid compute_{number}(const Compute* values, Compute* results, int count) {{\n"
            f"  while (count--) {{\n{loads}{cuda(results, indent='    ')}\n{stores}  }}\n}}\n"
        )
        parts += [
            f'extern "C" void {kind}_{number}(const {kind}* values, {kind}* results, int count) '
            f"{{ compute_{number}(values, results, count); }}\n"
            for kind in ("float", "double")
        ]
    folder = tmp_path_factory.mktemp("expressions")
    (folder / "all.cpp").write_text("".join(parts))
    options = ["-std=c++20", "-O1", "-ffp-contract=off", "-Wall", "-Werror", "-shared", "-fPIC", f"-I{stand_in}"]
    built = subprocess.run(
        ["g++", *options, "all.cpp", "-o", "all.so"], cwd=folder, capture_output=True, text=True, check=False
    )
    assert built.returncode == 0, built.stderr
    return ctypes.CDLL(str(folder / "all.so"))


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("number", range(len(IN_CPP)))
def test_cpp_computes_what_numpy_does(compiled, number, dtype):
    """The results differ by the roundings of the operations; a fused multiply-add has fewer of them."""
    results = with_gradients(IN_CPP[number])
    names = [*results["result"].names, "seed"]
    points = numpy.random.default_rng(0).uniform(-3, 3, (64, len(names)))
    points[:13, 0] = FAR if IN_CPP[number] in STABLE.values() else points[:13, 0]
    points[13:16] = points[13:16, :1]  # ties
    points = points.astype(dtype)
    computed = numpy.empty((64, len(results)), dtype)
    call = getattr(compiled, f"{'float' if dtype == 'float32' else 'double'}_{number}")
    call(points.ctypes.data_as(ctypes.c_void_p), computed.ctypes.data_as(ctypes.c_void_p), 64)
    wide = {name: points[:, column].astype("float64") for column, name in enumerate(names)}
    for column, result in enumerate(results.values()):
        expected = numpy.broadcast_to(evaluate(result, wide, numpy), 64)
        precision = numpy.finfo(dtype).eps
        scale = numpy.maximum(abs(expected), 1 + abs(expected[13:]).max())
        assert (abs(computed[:, column] - expected) <= 32 * precision * scale).all(), result.text


def test_nan_goes_through_minimum_and_maximum_in_cpp(compiled):
    number = len(IN_CPP) - 1
    for a, b in ((math.nan, 1.0), (1.0, math.nan)):
        values, results = (ctypes.c_double * 3)(a, b, 1.0), (ctypes.c_double * 3)()
        compiled[f"double_{number}"](values, results, 1)
        assert math.isnan(results[0])


@needs_nvrtc
@pytest.mark.parametrize("compute", ["float", "double"])
def test_nvrtc_compiles_the_statements(compute):
    numbers = ROOT / "kernels_cu" / "rows" / "numbers.cuh"
    text = SHARED_FACTS + without_directives(numbers.read_text()) + functions_text()
    for number, function in enumerate(IN_CPP):
        results = with_gradients(function)
        names = [*results["result"].names, "seed"]
        loads = "".join(f"  const Compute {name} = *values++;\n" for name in names)
        stores = "".join(f"  *results++ = {name};\n" for name in results)
        text += (
            f'extern "C" __global__ void compute_{number}(const {compute}* values, {compute}* results) {{\n'
            f"  using Compute = {compute};\n{loads}{cuda(results)}\n{stores}}}\n"
        )
    ptx = compile.compile_ptx(text, "expressions", 90)
    assert ptx.count(".entry") == len(IN_CPP)


@pytest.mark.parametrize("function", [lambda xhat, scale, shift: xhat * (1 + scale) + shift, gated])
def test_tracing_with_derivative_and_text_takes_less_than_a_millisecond(function):
    def seconds() -> float:
        start = time.thread_time()  # not the wall clock, because other tests run beside this one
        traced = trace(function)
        results = {"y": traced} | {
            f"d_{name}": derivative for name, derivative in gradients(traced, traced.names, seed="dy").items()
        }
        cuda(results)
        assert all(result.text for result in results.values())
        return time.thread_time() - start

    assert any(seconds() < 1e-3 for _ in range(500))
