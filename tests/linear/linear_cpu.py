"""Norms with their products on the CPU: texts of kernels are compiled with other platform.cuh and hopper.cuh."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import ml_dtypes
import numpy
import pytest
from cpu_device import Machine, SanitizerError

from cunorm.kernel import driver, source
from cunorm.kernel.device import H100, Device
from cunorm.linear import one_launch, overlapped
from cunorm.linear import plan as linear_plan
from cunorm.linear.one_launch import Division
from cunorm.linear.problem import LinearProblem
from cunorm.plan.plain_problems import plain
from cunorm.plan.plan import plan
from cunorm.plan.spec import KernelSpec
from cunorm.plan.steps import WORKSPACE, Matrix, OtherPlan, Step
from cunorm.plan.tables import Table

HOPPER = (Path(__file__).parent / "cpu" / "hopper.cuh").read_text().replace("#pragma once\n", "")
DTYPES = {"bfloat16": ml_dtypes.bfloat16, "float16": numpy.float16, "float32": numpy.float32}
EPS = 1e-5


@dataclass(frozen=True)
class HopperMachine(Machine):
    """A stand-in whose launches may fetch boxes of `matrices`, those of the step that is prepared."""

    matrices: tuple[Matrix, ...] = ()

    def run(self, plan: OtherPlan, scalars: Mapping[str, float], /, **arrays: numpy.ndarray | None) -> None:
        with mock.patch.object(driver, "tensor_map", lambda address, *_: address):
            super().run(plan, scalars, **arrays)

    def prepare(self, step: Step, baked: Any = None) -> tuple[Callable, Callable]:
        matrices = tuple(pointer for pointer in step.pointers if isinstance(pointer, Matrix))
        if self.matrices != matrices:
            return replace(self, matrices=matrices).prepare(step, baked)
        return super().prepare(step, baked)

    def text(self, spec: KernelSpec, baked: Any = None) -> str:
        text = super().text(spec, baked)
        if '"linear/hopper.cuh"' not in text:
            return text  # a norm's own kernel
        text, count = re.subn(
            r'^#line 1 "linear/hopper\.cuh"\n.*?(?=^#line)', lambda _: HOPPER, text, flags=re.DOTALL | re.MULTILINE
        )
        assert count == 1
        for matrix in self.matrices:
            late = "true" if matrix.name == WORKSPACE else "false"
            kind = f"TensorMapOf<{matrix.rows}, {matrix.cols}, {matrix.stride}, {matrix.box_rows}, {late}>"
            text = text.replace("const __grid_constant__ TensorMap", kind, 1)
        return re.sub(
            r"namespace cunorm \{\nDEVICE void multiply_group.*?\n\}\n\}  // namespace cunorm\n",
            "",
            text,
            flags=re.DOTALL,
        )


def gpu(sms: int) -> Device:
    """Return an H100 with this number of SMs, so few that each has several tiles."""
    return replace(H100, sms=sms, clusters=(sms // 2, max(1, sms // 4), max(1, sms // 8), 0))


def know(monkeypatch: Any, sms: int, products: dict[int, dict[int, dict[int, int]]]) -> None:
    """Give H100s with this number of SMs a table with these products, and all other GPUs no table."""
    table = Table(H100.arch, H100.bandwidth / sms, {}, products=products)
    monkeypatch.setattr(linear_plan, "tables_of", lambda device: [(Path("-"), table)] if table.serves(device) else [])
    linear_plan.chosen.cache_clear()


class Case(NamedTuple):
    problem: LinearProblem
    cluster: int  # of one launch; 0: overlapped
    sms: int
    stages: int = 3
    offset: float = 1.0  # the mean of a row of x, in standard deviations

    @property
    def division(self) -> Division:
        """The division with that cluster, and with few stages, so that the ring is filled again and again."""
        divisions = one_launch.divisions(self.problem, gpu(self.sms))
        return next(division for division in divisions if division.cluster == self.cluster)._replace(stages=self.stages)


def case(rows: int, cols: int, outs: int, cluster: int, sms: int, **options: Any) -> Case:
    """Return a LayerNorm in bfloat16 with all parameters, unless `options` say otherwise."""
    fields: dict[str, Any] = dict.fromkeys(("dtype", "ln_weight", "ln_bias"), "bfloat16") | {
        "norm": "layer_norm",
        "bias": True,
    }
    fields |= {"x_stride": cols, "weight_stride": cols}
    of_case = {name: options.pop(name) for name in ("stages", "offset") if name in options}
    return Case(LinearProblem(rows=rows, cols=cols, outs=outs, **fields | options), cluster, sms, **of_case)


class Arrays(NamedTuple):
    x: Any
    weight: Any
    bias: Any
    ln_weight: Any
    ln_bias: Any


class Results(NamedTuple):
    y: Any
    z: Any
    mean: Any
    rstd: Any


def arrays(run_case: Case) -> Arrays:
    problem, random = run_case.problem, numpy.random.default_rng(0)

    def normal(*shape: int, dtype: str | None, scale: float = 1.0, shift: Any = 0.0) -> Any:
        return None if dtype is None else (shift + scale * random.standard_normal(shape)).astype(DTYPES[dtype])

    sign = 1 - 2 * (numpy.arange(problem.rows) % 2)[:, None]
    return Arrays(
        normal(problem.rows, problem.x_stride, dtype=problem.dtype, shift=run_case.offset * sign),
        normal(problem.outs, problem.weight_stride, dtype=problem.dtype, scale=problem.cols**-0.5),
        normal(problem.outs, dtype=problem.dtype if problem.bias else None),
        normal(problem.cols, dtype=problem.ln_weight, scale=0.3, shift=1.0),
        normal(problem.cols, dtype=problem.ln_bias, scale=0.3),
    )


def run(machine: Machine, run_case: Case, given: Arrays) -> Results:
    problem, device = run_case.problem, gpu(run_case.sms)
    if run_case.cluster:
        solution = one_launch.plan(problem, device, run_case.division)
    else:
        solution = overlapped.plan(problem, device)
    results = _unknown(problem, (problem.rows, problem.outs))
    machine.run(solution, {"eps": EPS}, **given._asdict(), **results._asdict())
    return results


def norm(run_case: Case, given: Arrays) -> Results:
    """Run the norm's own kernel, and return its z, mean and rstd. y is empty."""
    problem = run_case.problem
    task = plain(
        problem.norm,
        "forward",
        problem.rows,
        problem.cols,
        problem.dtype,
        problem.ln_weight,
        problem.ln_bias,
        zero_centered_gamma=problem.zero_centered_gamma,
        strides={"x": problem.x_stride},
    )
    results = _unknown(problem, (0, 0))
    named = {"x": given.x, "weight": given.ln_weight, "bias": given.ln_bias, "y": results.z}
    Machine().run(plan(task, H100), {"eps": EPS}, **named, mean=results.mean, rstd=results.rstd)
    return results


def _unknown(problem: LinearProblem, shape_of_y: tuple[int, int]) -> Results:
    def nan(shape: Any, dtype: Any) -> Any:
        return numpy.full(shape, numpy.nan, dtype)

    dtype, rows = DTYPES[problem.dtype], problem.rows
    return Results(nan(shape_of_y, dtype), nan((rows, problem.cols), dtype), nan(rows, "float32"), nan(rows, "float32"))


def check(run_case: Case, given: Arrays, results: Results) -> None:
    """Check the bits of z, mean and rstd, and y.

    Overlapped z is in the workspace.
    """
    problem, expected = run_case.problem, norm(run_case, given)
    for name in ("z", "mean", "rstd") if run_case.cluster else ("mean", "rstd"):
        actual, expected_array = getattr(results, name), getattr(expected, name)
        numpy.testing.assert_array_equal(actual.view("uint8"), expected_array.view("uint8"), err_msg=name)
    check_product(problem, given, expected.z, results.y)


class Mistake(NamedTuple):
    """A mistake that is made on purpose in a kernel's file."""

    reason: str
    old: str
    new: str
    build: str = "results"
    case: str = ""  # where the tests of a file have several


def check_is_found(mistake: Mistake, file: str, run_case: Case, order: str = "ascending") -> None:
    """Check that the machine stops a kernel with the mistake, or that its results are wrong."""
    assert mistake.old in (source.KERNELS / file).read_text()

    def edit(text: str) -> str:
        return text.replace(mistake.old, mistake.new) if f'"{file}"' in text else text

    given = arrays(run_case)
    try:
        results = run(HopperMachine(mistake.build, order, edit), run_case, given)
    except SanitizerError:
        return
    with pytest.raises(AssertionError):
        check(run_case, given, results)


def check_product(problem: LinearProblem, given: Arrays, z: Any, y: Any) -> None:
    """Check y, which may be off by its own rounding and by what sums of float32 lose."""
    z = z.astype("float64")
    weight = given.weight[:, : problem.cols].astype("float64")
    expected = z @ weight.T + (0 if given.bias is None else given.bias.astype("float64"))
    rounding = 2.0 ** (-8 if problem.dtype == "bfloat16" else -11)
    bound = abs(expected) * rounding + 2.0**-20 * (abs(z) @ abs(weight).T) + 1e-7
    assert (abs(y.astype("float64") - expected) <= 1.02 * bound).all()
