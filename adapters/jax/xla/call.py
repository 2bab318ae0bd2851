"""A kernel enters a jit as a call of its PTX, which XLA launches itself.

`kernel` is a primitive that is lowered by platform: on CUDA to XLA's own call of PTX code, one for each launch of the
plan, elsewhere to the formulas in jax.numpy. XLA passes pointers alone, so rows, strides and eps stand in the kernel's
text. Nothing is compiled before a program is lowered for CUDA. Where XLA cannot do it (target.py), CuPy launches from a
callback.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy

import jax

from ...call.checks import check_sm_margin
from ...kernel import compile, launch, source
from ...kernel.device import of_memory
from ...plan.plan import plan
from ...plan.steps import WORKSPACE, Plan, Step
from ..norm.formulas import Names, Task
from ..private import PTX_TARGET, Primitive, ShapedArray, buffer_callback, jaxpr_as_fun, mlir
from . import target as choice


def kernel(task: Task, names: Names, wanted: Names, *arrays: jax.Array) -> tuple[jax.Array, ...]:
    """Return the arrays `wanted`, computed from those in `names`."""
    call = jax.make_jaxpr(partial(formula, task, names, wanted))(*arrays)
    return tuple(kernel_p.bind(*arrays, call=call, task=task, names=names, wanted=wanted))


def formula(task: Task, names: Names, wanted: Names, *arrays: jax.Array) -> tuple[jax.Array, ...]:
    """Compute a forward or backward pass by its formulas."""
    results = task.results(dict(zip(names, arrays, strict=True)), wanted)
    return tuple(results[name] for name in wanted)


def primitive(name: str) -> Any:
    """Make a primitive that stands for its `call`."""
    made = Primitive(name)
    made.multiple_results = True
    made.def_impl(_run)
    made.def_abstract_eval(lambda *avals, call, **_: call.out_avals)
    mlir.register_lowering(made, _lower_call)
    return made


def _run(*arrays: jax.Array, call: Any, task: Task, names: Names, wanted: Names) -> Sequence[jax.Array]:
    return jaxpr_as_fun(call)(*arrays)


_lower_call = mlir.lower_fun(_run, multiple_results=True)
kernel_p = primitive("cunorm_kernel")
kernel_p.def_impl(lambda *arrays, **parameters: jax.jit(partial(kernel_p.bind, **parameters))(*arrays))


def _lower_for_cuda(ctx, *operands, call: Any, task: Task, names: Names, wanted: Names):
    problem = task.problem(dict(zip((*names, *wanted), (*ctx.avals_in, *ctx.avals_out), strict=True)), wanted)
    if not problem.rows:
        return _lower_call(ctx, *operands, call=call, task=task, names=names, wanted=wanted)
    function = task.operation.norm
    device = choice.device(function)
    check_sm_margin(function, task.sm_margin, device.sms)
    if choice.call(function).kind == "callback":
        from_python = partial(_by_callback, plan(problem, device), task, names, wanted, ctx.avals_out)
        return mlir.lower_fun(from_python, multiple_results=True)(ctx, *operands)
    return _lower_to_ptx(ctx, operands, plan(problem, choice.for_xla(device)), task, names, wanted)


mlir.register_lowering(kernel_p, _lower_for_cuda, platform="cuda")


class Launch(NamedTuple):
    """One launch of a plan, with the names of the buffers that it reads and writes, and its text's arguments."""

    step: Step
    reads: Names
    writes: Names
    baked: source.Baked


def launches(plan: Plan, numbers: Mapping[str, float], wanted: Names) -> list[Launch]:
    """Return every launch of a plan with the scalars `numbers` by name.

    XLA allocates a buffer for all that a call writes, so a launch declares no more than is `wanted`, and the pointers
    of other results are null.
    """
    return [_launch(step, numbers, (*wanted, WORKSPACE)) for step in plan.steps]


def _launch(step: Step, numbers: Mapping[str, float], results: Names) -> Launch:
    types = source.parameters(step.spec)
    by_value = list(types.items())[len(step.pointers) :]
    literals = [_literal(numbers[name], kind) for name, (_, kind) in zip(step.scalars, by_value, strict=False)]
    literals += map(str, step.integers)
    values = {name: literal for (name, _), literal in zip(by_value, literals, strict=True)}
    reads: dict[str, str] = {}  # by the name of each buffer the entry's parameter
    writes: dict[str, str] = {}
    for (name, kind), pointer in zip(types.items(), step.pointers, strict=False):
        buffer, offset = pointer.name, pointer.offset
        read = kind.startswith("const ")
        if not read and buffer not in results:
            continue
        if buffer == WORKSPACE:
            values[name] = f"reinterpret_cast<{kind}>(workspace + {offset})"
            name = "workspace"
        (reads if read else writes)[buffer] = name
    pointers = (*reads.values(), *writes.values())
    return Launch(step, tuple(reads), tuple(writes), source.Baked(pointers, tuple(values.items())))


def _literal(number: float, kind: str) -> str:
    """Write a number in C++, exact to the bit."""
    return float(number).hex() if kind == "double" else f"{float(numpy.float32(number)).hex()}f"


def _lower_to_ptx(ctx, operands, plan: Plan, task: Task, names: Names, wanted: Names):
    buffers = dict(zip(names, operands, strict=True))
    avals = dict(zip((*names, *wanted), (*ctx.avals_in, *ctx.avals_out), strict=True))
    avals[WORKSPACE] = ShapedArray((plan.workspace,), numpy.dtype("uint8"))
    call = jax.ffi.ffi_lowering(PTX_TARGET)
    for step, reads, writes, baked in launches(plan, _numbers(task), wanted):
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
    """Launch from Python, once for each run of the program, or for each capture of it in a CUDA graph."""
    problem, numbers = plan.problem, _numbers(task)
    scalars = [numbers[name] for name in problem.scalars]

    def run(context, results, *arguments) -> None:
        given = zip((*names, *wanted, WORKSPACE), (*arguments, *results), strict=False)
        addresses = {name: buffer.__cuda_array_interface__["data"][0] for name, buffer in given}
        pointers = [addresses.get(name, 0) for name in problem.pointers]
        with of_memory(addresses[names[0]]) as device_id:
            launch.run(plan, device_id, context.stream, (*pointers, *scalars), addresses.get(WORKSPACE, 0))

    shapes = [jax.ShapeDtypeStruct(aval.shape, _as_bits(aval.dtype)) for aval in avals]
    if plan.workspace:
        shapes.append(jax.ShapeDtypeStruct((plan.workspace,), numpy.uint8))
    call = buffer_callback(run, shapes, command_buffer_compatible=True)
    results = call(*(jax.lax.bitcast_convert_type(array, _as_bits(array.dtype)) for array in arrays))
    return [jax.lax.bitcast_convert_type(result, aval.dtype) for result, aval in zip(results, avals, strict=False)]


def _numbers(task: Task) -> dict[str, float]:
    """Return the scalars of a plan, by name."""
    return {"eps": task.eps, **dict(task.numbers)}


def _as_bits(dtype: numpy.dtype) -> numpy.dtype:
    """Return an integer dtype for bfloat16 and FP8, which the interface of arrays on CUDA does not have."""
    known = dtype.name in ("float16", "float32", "float64")
    return dtype if known else numpy.dtype(f"uint{8 * dtype.itemsize}")
