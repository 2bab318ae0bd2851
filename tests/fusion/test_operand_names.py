"""A user's names of operands never clash with the library's: each works, or is refused before anything runs."""

from __future__ import annotations

import inspect
import keyword
import re
from collections.abc import Iterable, Sequence
from functools import cache
from types import SimpleNamespace
from typing import Any

import cpu_cupy
import numpy
import pytest
from cpu_device import missing
from cpu_functions import MANY_SMS, SMALL
from fusion_cases import CASES

import cunorm
from cunorm.fusion import OF_THE_CALL, Fused
from cunorm.kernel import launch
from cunorm.kernel.source import KERNELS, PACKAGE, source
from cunorm.operation import SEED
from cunorm.plan.plan import plan
from cunorm.plan.problem import Groups, RowStrides, backward_problem, forward_problem

needs_machine = pytest.mark.skipif(bool(missing()), reason=missing() or "-")

EPS = 1e-5
MANY = 80  # operands of a kernel
# Names like those of pointers, of a kernel's parameters and of JAX's tangents, and those that generated texts have.
LIKE_INTERNAL = ("workspace", "x_gap", "z_gap", "z_reciprocal", "rows", "x_dot", "y_dot", "scale", "scale_dot")
LIKE_INTERNAL += ("the_workspace", "operand_0", "operand_1", "operand_1_stride", "doperand_0", "sum_doperand_0")
LIKE_INTERNAL += ("cunorm_backward",)


def fused(names: Iterable[str]) -> Fused:
    """Return an operation in which every operand is used after the norm, and an eighth of them before it too.

    Each operand has another factor, so that swapped operands change the result.
    """
    names = tuple(names)

    def shares(first: str, operands: Sequence[str]) -> Any:
        def function(value, *values):
            return sum((operand * (value + place + 1) for place, operand in enumerate(values)), start=value)

        kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
        function.__signature__ = inspect.Signature([inspect.Parameter(name, kind) for name in (first, *operands)])
        return function

    return cunorm.fuse("layer_norm", prologue=shares("x", names[: len(names) // 8]), epilogue=shares("xhat", names))


@cache
def library_names() -> tuple[str, ...]:
    """Return every identifier of the CUDA texts, and every key, parameter and variable of the library's Python."""
    texts = [file.read_text() for file in KERNELS.rglob("*.cu*")] + generated_texts()
    files = [file for folder in (PACKAGE, KERNELS.parent / "adapters") for file in folder.rglob("*.py")]
    in_python = re.compile(r'(?<=")[A-Za-z_]\w*(?=")|\b[A-Za-z_]\w*(?=\s?[:=])', re.ASCII)
    names = {name for text in texts for name in re.findall(r"[A-Za-z_]\w*", text, re.ASCII)}
    names |= {name for file in files for name in in_python.findall(file.read_text())}
    return tuple(sorted(name for name in names | {*LIKE_INTERNAL} if not keyword.iskeyword(name)))


def generated_texts() -> list[str]:
    """Return the generated lines of each kind of kernel, with operands of each kind."""
    operation, texts = CASES["gate"].op.operation, []
    dtypes = dict.fromkeys(("x", "y", "s", "dy", *operation.operands), "float32")
    kinds = {"residual": "full", "z": "full", "shift": "column", "factor": "scalar", "sharp": "scalar"}
    shared = {"groups": Groups(3, 50), "strides": dict.fromkeys(("x", "dy", "z"), RowStrides(2**20, 2**23, 3))}
    for cols, of_weight in ((1000, "column"), (2**20, "column"), (1000, "group"), (2**20, "group"), (1000, "per_row")):
        kinds["weight"] = of_weight
        for problem in (
            forward_problem(operation, 150, cols, dtypes, kinds=kinds, **shared),
            backward_problem(operation, 300, cols, dtypes, ("x", "residual", "z", "weight"), kinds=kinds, **shared),
        ):
            texts += [source(step.spec).rpartition("using namespace")[2] for step in plan(problem, SMALL).steps]
    return texts


def is_refused(name: str) -> bool:
    try:
        fused([name])
    except ValueError as error:
        return repr(name) in str(error)
    return False


@pytest.mark.slow
def test_no_name_is_refused_but_those_of_the_call_and_of_texts_of_expressions():
    names = {*library_names(), *OF_THE_CALL}
    assert len(names) > 3000
    assert {"kVectorSize", "of_norm", "half", "reciprocal", "matrices", "float"} <= names
    refused = {name for name in names if is_refused(name)}
    assert refused == {name for name in names if name in OF_THE_CALL or re.fullmatch(r"t\d+", name)}


def test_the_text_knows_operands_by_their_places():
    """Operations that differ in names alone share a kernel, whatever stands in kernels_cu."""
    written = " ".join(file.read_text() for file in KERNELS.rglob("*.cu*"))
    assert not re.search(r"\bd?operand_", written)
    texts = []
    for names in (("a", "b", "c"), ("c", "workspace", "half")):
        dtypes = dict.fromkeys(("x", "y", "s", "dy", *names), "float32")
        kinds = dict(zip(names, ("full", "column", "scalar"), strict=True))
        operation = fused(names).operation
        problems = [forward_problem(operation, 300, 1000, dtypes, kinds=kinds)]
        problems.append(backward_problem(operation, 300, 1000, dtypes, ("x", *names), kinds=kinds))
        texts.append([source(step.spec) for problem in problems for step in plan(problem, SMALL).steps])
    assert texts[0] == texts[1]
    assert not any(re.search(rf"\b{name}\b", texts[1][0].rpartition("using namespace")[2]) for name in ("c", "half"))


def chunks() -> list[tuple[str, ...]]:
    """Return the names that are not refused, in tuples of MANY, none in a tuple with the name of its gradient."""
    names = [name for name in library_names() if name != SEED and not is_refused(name)]
    apart = [[name for name in names if (len(name) - len(name.lstrip("d"))) % 2 == odd] for odd in (0, 1)]
    starts = [(part, min(start, len(part) - MANY)) for part in apart for start in range(0, len(part), MANY)]
    return [tuple(part[start : start + MANY]) for part, start in starts]


def arrays(names: Iterable[str], shape: tuple[int, int, int]) -> dict[str, Any]:
    """Return x, dy, and operands of every kind in turn; the rows of full ones lie with two strides."""
    random = numpy.random.default_rng(0)
    samples, tokens, cols = shape
    of_kind = (
        lambda: random.standard_normal((samples, 2 * tokens, cols), "float32")[:, :tokens],
        lambda: random.standard_normal(cols, "float32"),
        lambda: float(random.standard_normal()),
        lambda: random.standard_normal((samples, 1, cols), "float32"),
        lambda: random.standard_normal((samples, tokens, 1), "float32"),
    )
    return {name: of_kind[place % 5]() for place, name in enumerate(("x", *names))} | {"dy": of_kind[0]()}


def placed(array: Any) -> Any:
    """Place an array on the stand-in, with its strides. A number stays."""
    if isinstance(array, float):
        return array
    return cpu_cupy.asarray(array.base if array.base is not None else array)[tuple(map(slice, array.shape))]


@needs_machine
@pytest.mark.slow
def test_every_name_of_the_library_works_as_one_of_an_operand(monkeypatch):
    runs = cpu_cupy.play(monkeypatch, MANY_SMS, as_many=True)
    for names in chunks():
        op, given = fused(names), arrays(names, (3, 20, 9))
        dy = given.pop("dy")
        expected, saved = op.forward(**given, eps=EPS)
        gradients = op.backward(saved, dy)
        on_gpu = {name: placed(argument) for name, argument in given.items()}
        before = {name: argument.tobytes() for name, argument in on_gpu.items() if not isinstance(argument, float)}
        y, saved = op.forward(**on_gpu, eps=EPS)
        actual_gradients = op.backward(saved, placed(dy))
        numpy.testing.assert_allclose(y.get(), expected, rtol=1e-3, atol=1e-3)
        for name, gradient in gradients.items():
            numpy.testing.assert_allclose(
                numpy.asarray(actual_gradients[name]), gradient, rtol=1e-3, atol=1e-2, err_msg=name
            )
        assert {name: argument.tobytes() for name, argument in on_gpu.items() if name in before} == before
    assert all(solution.workspace for solution in runs.plans[1::2])


def test_a_launch_that_passes_more_than_its_kernel_takes_is_none(monkeypatch):
    """Such a launch is refused, whatever its reason; here a step has one number too many."""
    problem = forward_problem(fused(["z"]).operation, 3, 33, dict.fromkeys(("x", "y", "s", "z"), "float32"))
    right = plan(problem, SMALL)
    step = right.steps[0]._replace(integers=(*right.steps[0].integers, 1))
    monkeypatch.setattr(launch, "kernel", lambda *_: SimpleNamespace(ptr=1))
    with pytest.raises(RuntimeError, match=r"must pass as many arguments as its kernel has parameters, 9; got 10"):
        launch.address(step, -1)  # -1 is no GPU


@pytest.mark.gpu
def test_an_operand_called_workspace_is_not_written():
    """Partial sums of so many rows need a workspace. The kernel must not take the user's array of that name for it."""
    import cupy

    x, dy = cupy.random.default_rng(0).standard_normal((2, 100000, 1024), "float32")
    memory = cupy.arange(2**20, dtype="float32")
    workspace, before = memory[2**19 :][:1024], memory.get()
    op = cunorm.fuse("layer_norm", epilogue=lambda xhat, workspace, shift: xhat * workspace + shift)
    _, saved = op.forward(x, workspace=workspace, shift=x[0])
    gradients = op.backward(saved, dy, wanted=("workspace", "shift"))
    assert (memory.get() == before).all()
    numpy.testing.assert_allclose(gradients["shift"].get(), dy.sum(0, dtype="float64").get(), rtol=1e-4, atol=1e-2)


@pytest.mark.gpu
@pytest.mark.parametrize("number", ["z_gap", "x_gap", "z_reciprocal", "z_stride", "rows"])
def test_a_number_called_as_a_stride_is_beside_two_strides(number):
    import cupy

    packed = cupy.random.default_rng(0).standard_normal((50, 3, 4, 128), "float32")
    x, z, _ = packed.transpose(1, 0, 2, 3)
    op = fused([number, "z"])
    expected, saved = op.forward(x.get(), z=z.get(), **{number: 0.5})
    gradients = op.backward(saved, z.get())
    y, saved = op.forward(x, z=z, **{number: 0.5})
    cupy.testing.assert_allclose(y, expected, rtol=1e-4, atol=1e-4)
    for name, gradient in op.backward(saved, z).items():
        cupy.testing.assert_allclose(gradient, gradients[name], rtol=1e-3, atol=1e-2, err_msg=name)
