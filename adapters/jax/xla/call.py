"""How a kernel enters a jit: XLA launches its PTX itself.

`kernel` is a primitive that is lowered by platform: on CUDA to XLA's own call of PTX code, one for each launch of the
plan, elsewhere to the formulas in jax.numpy. XLA passes pointers alone, so rows, strides and eps stand in the kernel's
text. Nothing is compiled before a program is lowered for CUDA. Where XLA cannot do it (target.py), CuPy launches from a
callback.
"""

from __future__ import annotations

import math
from functools import partial
from typing import NamedTuple

import numpy

import jax
from jax.core import ShapedArray
from jax.experimental.buffer_callback import buffer_callback
from jax.extend.core import ClosedJaxpr, Primitive, jaxpr_as_fun
from jax.interpreters import mlir

from ... import compile, launch, source
from ...device import of_memory
from ...norm.plan import Plan, Step, plan
from ...norm.problem import ITEMSIZE, Problem, check_sm_margin
from ..norm import formulas
from ..norm.formulas import Task
from . import target as choice

Names = tuple[str, ...]


def kernel(task: Task, names: Names, wanted: Names, *arrays: jax.Array) -> tuple[jax.Array, ...]:
    """The arrays `wanted`, of those in `names`: y, mean, rstd of x, weight, bias, or dx, dweight, dbias of the rest."""
    formula = jax.make_jaxpr(partial(_formula, task, names, wanted))(*arrays)
    return tuple(kernel_p.bind(*arrays, formula=formula, task=task, names=names, wanted=wanted))


def _formula(task: Task, names: Names, wanted: Names, *arrays: jax.Array) -> tuple[jax.Array, ...]:
    function = formulas.forward if "y" in wanted else formulas.backward
    results = function(task, dict(zip(names, arrays, strict=True)))
    return tuple(results[name] for name in wanted)


def _run(*arrays: jax.Array, formula: ClosedJaxpr, task: Task, names: Names, wanted: Names):
    return jaxpr_as_fun(formula)(*arrays)


kernel_p = Primitive("cunorm_kernel")
kernel_p.multiple_results = True
kernel_p.def_impl(lambda *arrays, **parameters: jax.jit(partial(kernel_p.bind, **parameters))(*arrays))
kernel_p.def_abstract_eval(lambda *avals, formula, **_: formula.out_avals)
_lower_formula = mlir.lower_fun(_run, multiple_results=True)
mlir.register_lowering(kernel_p, _lower_formula)


def _lower_for_cuda(ctx, *operands, formula: ClosedJaxpr, task: Task, names: Names, wanted: Names):
    problem = problem_of(task, dict(zip(names, ctx.avals_in, strict=True)), wanted)
    if not problem.rows:
        return _lower_formula(ctx, *operands, formula=formula, task=task, names=names, wanted=wanted)
    device = choice.device(task.op)
    check_sm_margin(task.op, task.sm_margin, device.sms)
    if choice.call(task.op).kind == "callback":
        function = partial(_by_callback, plan(problem, device), task, names, wanted, ctx.avals_out)
        return mlir.lower_fun(function, multiple_results=True)(ctx, *operands)
    return _lower_to_ptx(ctx, operands, plan(problem, choice.for_xla(device)), task, names, wanted)


mlir.register_lowering(kernel_p, _lower_for_cuda, platform="cuda")


def problem_of(task: Task, arrays: dict[str, ShapedArray], wanted: Names) -> Problem:
    """Of arrays or their avals, which are dense: XLA places them at multiples of 16 bytes at least."""
    x = arrays["x"]
    cols = math.prod(x.shape[x.ndim - task.ndim :])
    forward = "y" in wanted
    weight, bias = (arrays[name].dtype.name if name in arrays else None for name in ("weight", "bias"))
    return Problem(
        op=task.op,
        direction="forward" if forward else "backward",
        rows=math.prod(x.shape) // cols,
        cols=cols,
        x=x.dtype.name,
        y=task.dtype if forward else arrays["dy"].dtype.name,
        weight=weight,
        bias=bias,
        zero_centered_gamma=task.zero_centered_gamma,
        x_stride=cols,
        y_stride=cols,
        sm_margin=task.sm_margin,
        aligned=True,
        output_mask=("dx" in wanted, "dweight" in wanted, "dbias" in wanted),
    )


class Launch(NamedTuple):
    """A launch of a plan: the names of the buffers that it reads and writes, and its text's arguments."""

    step: Step
    reads: Names
    writes: Names
    baked: source.Baked


def launches(plan: Plan, eps: float, names: Names, wanted: Names) -> list[Launch]:
    """Every launch of a plan. Partial rows of dweight and dbias are in a buffer `workspace`."""
    problem = plan.problem
    rows = {"rows": str(problem.rows), "x_stride": str(problem.x_stride)}
    parameter_gradients = tuple(name for name in ("dweight", "dbias") if name in wanted)
    found = []
    for step in plan.steps:
        kind = step.spec.kernel
        reads = tuple(name for name in ("x", "dy", "weight", "bias", "mean", "rstd") if name in names)
        if kind in ("forward", "forward_streamed"):
            writes = wanted
            values = rows | {"y_stride": str(problem.y_stride), "eps": _literal(eps, problem.statistics)}
        elif kind == "sum_partials":
            reads, writes = ("workspace",), parameter_gradients
            values = {"groups": str(plan.groups), "cols": str(problem.cols)}
        elif step.spec.final:
            writes = wanted if kind == "backward" else parameter_gradients
            values = rows | {"dy_stride": str(problem.y_stride)}
        else:
            dx = ("dx",) if "dx" in wanted and kind != "weight_gradient_partials" else ()
            partials = ("workspace",) if parameter_gradients and kind != "backward_streamed" else ()
            writes = dx + partials
            values = rows | {"dy_stride": str(problem.y_stride)}
            if partials and len(parameter_gradients) == 2:
                half = plan.workspace // 2 // ITEMSIZE[problem.statistics]
                values["dbias"] = f"dweight + {half}"
        parameters = {"workspace": parameter_gradients[0]} if parameter_gradients else {}
        if kind == "sum_partials":
            parameters = {"workspace": "partials"} | dict(zip(writes, ("first", "second"), strict=False))
        pointers = tuple(parameters.get(name, name) for name in reads + writes)
        found.append(Launch(step, reads, writes, source.Baked(pointers, tuple(values.items()))))
    return found


def _literal(eps: float, dtype: str) -> str:
    """eps in C++, to the bit."""
    return float(eps).hex() if dtype == "float64" else f"{float(numpy.float32(eps)).hex()}f"


def _lower_to_ptx(ctx, operands, plan: Plan, task: Task, names: Names, wanted: Names):
    buffers = dict(zip(names, operands, strict=True))
    avals = dict(zip(names, ctx.avals_in, strict=True)) | dict(zip(wanted, ctx.avals_out, strict=True))
    itemsize = ITEMSIZE[plan.problem.statistics]
    avals["workspace"] = ShapedArray((plan.workspace // itemsize,), numpy.dtype(plan.problem.statistics))
    call = jax.ffi.ffi_lowering(choice.TARGET)
    for step, reads, writes, baked in launches(plan, task.eps, names, wanted):
        x, y, z = step.grid
        results = call(
            ctx.replace(avals_in=[avals[name] for name in reads], avals_out=[avals[name] for name in writes]),
            *(buffers[name] for name in reads),
            name=source.entry_name(step.spec),
            kernel_type="ptx",
            kernel_data=compile.ptx(step.spec, baked, plan.device.arch),
            grid_x=numpy.int32(x),
            grid_y=numpy.int32(y),
            grid_z=numpy.int32(z),
            block_x=numpy.int32(step.spec.threads),
            block_y=numpy.int32(1),
            block_z=numpy.int32(1),
            shared_mem_bytes=numpy.int32(step.dynamic_shared),
        )
        buffers |= zip(writes, results, strict=True)
    return [buffers[name] for name in wanted]


def _by_callback(plan: Plan, task: Task, names: Names, wanted: Names, avals, *arrays: jax.Array):
    """The launches from Python, once for each run of the program, or for each capture of it in a CUDA graph."""
    forward = plan.problem.direction == "forward"
    pointers = ("x", "y", "weight", "bias", "mean", "rstd") if forward else BACKWARD_POINTERS

    def run(context, results, *arguments) -> None:
        given = zip((*names, *wanted, "workspace"), (*arguments, *results), strict=False)
        found = {name: buffer.__cuda_array_interface__["data"][0] for name, buffer in given}
        found = {name: found.get(name, 0) for name in pointers}
        with of_memory(found["x"]) as device_id:
            if forward:
                launch.run_forward(plan, device_id, context.stream, eps=task.eps, **found)
            else:
                launch.run_backward(plan, device_id, context.stream, **found)

    shapes = [jax.ShapeDtypeStruct(aval.shape, _as_bits(aval.dtype)) for aval in avals]
    if plan.workspace:
        shapes.append(jax.ShapeDtypeStruct((plan.workspace,), numpy.uint8))
    call = buffer_callback(run, shapes, command_buffer_compatible=True)
    results = call(*(jax.lax.bitcast_convert_type(array, _as_bits(array.dtype)) for array in arrays))
    return [jax.lax.bitcast_convert_type(result, aval.dtype) for result, aval in zip(results, avals, strict=False)]


BACKWARD_POINTERS = ("x", "dy", "weight", "mean", "rstd", "dx", "dweight", "dbias", "workspace")


def _as_bits(dtype: numpy.dtype) -> numpy.dtype:
    """The interface of arrays on CUDA has no bfloat16."""
    return numpy.dtype("uint16") if dtype.name == "bfloat16" else dtype
