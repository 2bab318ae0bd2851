"""The backend of CuPy arrays.

What follows from the options of a call is worked out once and kept as a `Call`. Its call site (site.py) then runs every
call that needs no more than a launch, and `run` here any other. `python -m bench.host` shows the time of each step.
"""

from __future__ import annotations

import math
import numbers
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, lru_cache, partial
from typing import Any

import cupy
import numpy

from ..kernel import device, launch
from ..kernel.device import Device
from ..operation import NORMS
from ..plan.problem import FLOAT8, ITEMSIZE, argument_order
from ..plan.steps import Plan
from . import broadcasting, checks, site
from .backend import Arrays, CallOptions, kind_of
from .broadcasting import AFFINE, Given
from .checks import Layout, NormOptions, NormTuple
from .numpy import numpy_dtype
from .recipe import (
    LIMIT,
    LaunchRecipe,
    Recipes,
    backward_recipe,
    forward_recipe,
    rounded,
    runs_norm_add_norm,
    scalars_of,
)
from .store import Float8Store, affine_scale, check_x, scale_of

_recipes = Recipes()
_calls = Recipes()
_current_device = cupy.cuda.runtime.getDevice
_current_stream = cupy.cuda.get_current_stream


@dataclass(frozen=True, slots=True, eq=False)
class Call:
    """What calls have in common that differ in their arrays, numbers and eps alone. Calls are compared by identity."""

    function: str
    names: tuple[str, ...]  # of the arrays, in the order in which they are given; any may be absent
    required: tuple[str, ...]  # those that may not
    results: tuple[str, ...]  # in order
    recipe: Callable[..., LaunchRecipe]  # (given, device, out=, aligned=) -> recipe
    site: Callable[..., tuple[cupy.ndarray, ...]]  # (call, eps, out, arrays) -> results in order
    out: str = ""  # what the caller calls the memory that it gives for the first result
    takes_numbers: bool = False  # for operands
    backward: bool = False


@cache
def _site(arrays: int, results: int | None, *, out: bool = False, workspace: bool = False) -> Callable[..., Any]:
    return site.made(globals(), arrays, results, out=out, workspace=workspace)


# The plain norms.


def norm(options: NormTuple, arrays: Sequence[Any], eps: float, out: Any) -> tuple[cupy.ndarray, ...]:
    """Run `Backend.norm`. The usual case of `_key` stands here once more, as a Python call is 0.1 us of 1.7."""
    shape = options[1]
    is_usual = (shape is None or type(shape) is int) and type(options[4]) is int
    try:
        call = _calls.kept(options if is_usual else _key(options))
    except (TypeError, ValueError):
        call = None
    if call is None:
        call = _kept(_norm_call, options)
    return call.site(call, eps, out, arrays)


def norm_float8(options: NormTuple, arrays: Sequence[Any], eps: float, scale: Any) -> tuple[cupy.ndarray, ...]:
    """Run `Backend.norm_float8`."""
    call = _kept(_norm_call, options)
    options = NormOptions(*options)
    if options.returns.granularity != "tensor":
        return call.site(call, eps, None, arrays)
    x, weight, bias = arrays
    if scale is None:
        # Say what is wrong before weight and bias are read for the scale.
        check_addresses(call, _recipe_of(call, eps, None, (*arrays, None)), (*arrays, None), None)
        weight_shape = None if weight is None else weight.shape
        shape = checks.shape_of(options.function, options.normalized_shape, x.shape, weight_shape)
        with cupy.cuda.Device(x.data.device_id):
            largest = FLOAT8[options.returns.format]
            scale = affine_scale(cupy, options.operation, largest, math.prod(shape), weight, bias)
    scale = cupy.asarray(scale, numpy.float32).reshape(())
    y8, *y = call.site(call, eps, None, (*arrays, scale))
    return y8, scale, *y


def norm_backward(options: NormTuple, arrays: Sequence[Any], dx_out: Any) -> tuple[cupy.ndarray | None, ...]:
    """Run `Backend.norm_backward`."""
    try:
        call = _calls.kept(options if type(options[4]) is int else _key(options))
    except (TypeError, ValueError):
        call = None
    if call is None:
        call = _kept(_norm_backward_call, options)
    if dx_out is not None and "x" not in call.results:
        output_mask = options[5]
        checks.check_output_mask(call.function, output_mask, len(output_mask), dx_out)  # says what is wrong
    results = call.site(call, 0.0, dx_out, arrays)
    if len(results) == 3:
        return results
    if call.results == ("x", "weight"):
        return *results, None
    gradients = dict(zip(call.results, results, strict=True))
    return gradients.get("x"), gradients.get("weight"), gradients.get("bias")


def _kept(make: Callable[[NormOptions], Call], options: NormTuple) -> Call:
    """Return the call of such options; without a hash, as a list among them has none, it is made each time."""
    return _calls.of(_key(options), make, NormOptions(*options))


def _key(options: NormTuple) -> Hashable:
    """Return what tells options apart, also those that are equal but for a bool or float in place of an int."""
    shape, sm_margin = options[1], options[4]
    key = options if type(sm_margin) is int else (*options, type(sm_margin))
    return key if shape is None or type(shape) is int else (key, kind_of(shape))


def _norm_call(options: NormOptions) -> Call:
    names, results = ("x", "weight", "bias"), ("y",)
    store = options.returns if isinstance(options.returns, Float8Store) else None
    if store:
        names, results = _with_scale(names, store), store.written(results)
    elif options.returns:
        results += NORMS[options.norm].statistics
    if options.dtype is not None:
        options = options._replace(dtype=checks.dtype_name(options.function, options.dtype))
    recipe = partial(_norm_recipe, options, store)
    made = _site(len(names), len(results), out=not store)
    return Call(options.function, names, ("x",), results, recipe, made, out="" if store else "out")


def _norm_recipe(
    options: NormOptions,
    store: Float8Store | None,
    layouts: Mapping[str, Layout],
    gpu: Callable[[], Device],
    *,
    out: Layout | None,
    aligned: bool,
) -> LaunchRecipe:
    if store:
        check_x(options.function, layouts["x"])
    shape, y_dtype = checks.check_forward(options, layouts if out is None else {**layouts, "out": out})
    call_options = CallOptions(
        options.function,
        options.operation,
        AFFINE,
        dtype=y_dtype,
        sm_margin=options.sm_margin,
        store=store,
        ndim=len(shape),
    )
    return forward_recipe(call_options, layouts, gpu(), aligned=aligned, out=out)


def _norm_backward_call(options: NormOptions) -> Call:
    mask = checks.check_output_mask(options.function, options.returns, 3 if options.norm == "layer_norm" else 2)
    wanted = tuple(name for name, is_wanted in zip(("x", "weight", "bias"), mask, strict=True) if is_wanted)
    names = ("dy", "x", "mean", "rstd", "weight")
    recipe = partial(_norm_backward_recipe, options, wanted)
    made = _site(len(names), len(wanted), out="x" in wanted, workspace=True)
    return Call(options.function, names, options.required, wanted, recipe, made, out="dx_out", backward=True)


def _norm_backward_recipe(
    options: NormOptions,
    wanted: tuple[str, ...],
    layouts: Mapping[str, Layout],
    gpu: Callable[[], Device],
    *,
    out: Layout | None,
    aligned: bool,
) -> LaunchRecipe:
    shape = checks.check_backward(options, layouts if out is None else {**layouts, "dx_out": out})
    call_options = CallOptions(
        options.function,
        options.operation,
        AFFINE,
        sm_margin=options.sm_margin,
        ndim=len(shape),
        left_out=layouts["weight" if "weight" in layouts else "x"].dtype,
    )
    return backward_recipe(call_options, layouts, wanted, gpu(), aligned=aligned, out=out)


# Any operation over the last axis.


def forward(options: CallOptions, arrays: Arrays, eps: float, scale: Any = None) -> dict[str, cupy.ndarray]:
    """Run `Backend.forward`."""
    key = (options, tuple(arrays), type(options.sm_margin))
    call = _calls.kept(key)
    if call is None:
        call = _calls.of(key, _call, options, tuple(arrays))
    store = options.store
    if store and store.granularity == "tensor":
        x = arrays["x"]
        with cupy.cuda.Device(layout(options.function, "x", x).device):
            scale = scale_of(cupy, options.operation, store, x.shape[-1], arrays, scale)
        results = call.site(call, eps, None, (*arrays.values(), scale))
        return dict(zip(call.results, results, strict=True)) | {"y8_scale": scale}
    return dict(zip(call.results, call.site(call, eps, None, tuple(arrays.values()))))  # noqa: B905


def runs_both_norms(options: CallOptions, x: cupy.ndarray) -> bool:
    """Return whether `forward` takes an operation with a second norm of such x."""
    return runs_norm_add_norm(layout(options.function, "x", x), options.s_dtype)


def _call(options: CallOptions, names: tuple[str, ...]) -> Call:
    operation, results = options.operation, options.operation.returns
    arguments = names
    if options.store:
        arguments, results = _with_scale(names, options.store), options.store.written(results)
    if options.statistics:
        results += operation.given(names).statistics

    def recipe(given: Mapping[str, Given], gpu: Callable[[], Device], **placed: Any) -> LaunchRecipe:
        return forward_recipe(options, given, gpu(), **placed)

    made = _site(len(arguments), len(results))
    return Call(options.function, arguments, arguments, results, recipe, made, takes_numbers=True)


def _with_scale(names: tuple[str, ...], store: Float8Store) -> tuple[str, ...]:
    """Return the names of the arguments, and y8_scale if one scale for all of y is read."""
    return (*names, "y8_scale") if store.granularity == "tensor" else names


def backward(options: CallOptions, arrays: Arrays, wanted: Sequence[str]) -> dict[str, cupy.ndarray]:
    """Run `Backend.backward`."""
    wanted = tuple(wanted)
    needed = ("x", *NORMS[options.operation.norm].statistics)
    names = tuple([name for name, array in arrays.items() if array is not None or name in needed])
    key = (options, names, wanted, type(options.sm_margin))
    call = _calls.kept(key)
    if call is None:
        call = _calls.of(key, _backward_call, options, names, wanted)
    results = call.site(call, 0.0, None, [arrays[name] for name in names])
    return dict(zip(wanted, results))  # noqa: B905


def _backward_call(options: CallOptions, names: tuple[str, ...], wanted: tuple[str, ...]) -> Call:
    def recipe(given: Mapping[str, Given], gpu: Callable[[], Device], **placed: Any) -> LaunchRecipe:
        return backward_recipe(options, given, wanted, gpu(), **placed)

    made = _site(len(names), None, workspace=True)
    return Call(options.function, names, names, wanted, recipe, made, takes_numbers=True, backward=True)


# What call sites leave to functions.


def run(
    call: Call, eps: float, out: cupy.ndarray | None, arrays: Sequence[Any], key: tuple | None
) -> tuple[cupy.ndarray, ...]:
    """Do what a site does, for any recipe. `key` is the recipe's, None where the site could not make it."""
    recipe = _recipe_of(call, eps, out, arrays, key)
    if key is not None and recipe.everyday_on == _current_device():
        return call.site(call, eps, out, arrays)  # which finds the recipe now, and checks addresses
    check_addresses(call, recipe, arrays, out)
    given = {name: array for name, array in zip(call.names, arrays, strict=True) if array is not None}
    if out is not None:
        pointers = [0 if array is None else array.data.ptr for array in (*arrays, out)]
        check_out(call, recipe, tuple(pointers))
    with cupy.cuda.Device(recipe.device_id):
        # Sums over no rows are zero.
        empty = cupy.zeros if call.backward and recipe.plan is None else cupy.ndarray
        results = [
            empty(*memory) for memory in recipe.allocated[1 if out is not None and not recipe.temporary else 0 :]
        ]
        if out is not None and not recipe.temporary:
            results.insert(0, out)
        if recipe.plan is not None:
            _launch(recipe, recipe.plan, given | {"eps": recipe.eps}, results)
        if out is not None and recipe.temporary:
            out[...] = results[0]
            results[0] = out
        if not call.backward:
            return tuple(results)
        for place, (name, *_) in enumerate(recipe.written):
            if name in recipe.totals:
                results[place] = results[place].sum()
        gradients = [results[place] for place in recipe.places]
        for axes, (name, shape, kind) in recipe.reduced:
            place = call.results.index(name)
            gradients[place] = gradients[place].sum(axes).reshape(shape).astype(kind)
    return tuple(gradients)


def _launch(recipe: LaunchRecipe, solution: Plan, given: dict[str, Any], results: list[cupy.ndarray]) -> None:
    given |= {name: cupy.broadcast_to(given[name], shape) for name, shape in recipe.expanded}
    given |= {name: cupy.ascontiguousarray(given[name]) for name in recipe.copies}
    if recipe.dy is not None:
        given["dy"] = cupy.zeros(*recipe.dy[1:])
    given |= zip((name for name, *_ in (*recipe.written, *recipe.statistics)), results, strict=False)
    arguments = [given[name].data.ptr if name in given else 0 for name in solution.problem.pointers]
    arguments += scalars_of(solution, given)
    workspace = cupy.cuda.alloc(solution.workspace)
    stream = cupy.cuda.get_current_stream(recipe.device_id).ptr
    launch.run(solution, recipe.device_id, stream, arguments, workspace.ptr)


def _recipe_of(
    call: Call, eps: float, out: cupy.ndarray | None, arrays: Sequence[Any], key: tuple | None = None
) -> LaunchRecipe:
    """Return the recipe for such arrays; raise TypeError or ValueError for arrays that no kernel takes."""
    if key is None:
        described: Sequence[Any] = (*arrays, out) if call.out else arrays
        pointers = [array.data.ptr for array in _by_name(call, arrays, out).values()]
        is_aligned = not any(pointer % 16 for pointer in pointers) or aligned(call, arrays, out)
        key = (call, eps, type(eps), is_aligned, *map(_described, described))
    return _recipes.of(key, _made, call, eps, out, arrays, key[3])


def _described(array: Any) -> Any:
    """Return what a key has of an array, and the type alone of a number, whose value may change with every call."""
    if isinstance(array, cupy.ndarray):
        return array.shape, array.strides, array.dtype, array.data.device_id
    return None if array is None else type(array)


def _made(call: Call, eps: float, out: cupy.ndarray | None, arrays: Sequence[Any], aligned: bool) -> LaunchRecipe:
    """Make a recipe, from that of another number of rows if there is one."""
    form = _form(call, eps, arrays, aligned) if out is None else None
    like = None if form is None else _recipes.kept(form)
    if like is not None:
        return like.of_rows(arrays[call.names.index("x")].shape)
    named = zip(call.names, arrays, strict=True)
    given = {name: array for name, array in named if array is not None or name in call.required}
    layouts = {name: _given(call, name, array) for name, array in given.items() if name != "y8_scale"}
    of_out = None if out is None else layout(call.function, call.out, out)
    x = given["x"]
    assert x is not None  # that it is an array was checked
    gpu = partial(device.current, x.data.device_id)
    recipe = call.recipe(layouts, gpu, out=of_out, aligned=aligned).with_dtypes(partial(_dtype, call.function))
    recipe = _ready(call, recipe, checks.check_eps(call.function, eps), layouts, of_out)
    if form is not None and recipe.has_others:
        _recipes.of(form, lambda: recipe)
    return recipe


def _form(call: Call, eps: float, arrays: Sequence[Any], aligned: bool) -> Hashable:
    """Return what recipe.form_of does, without describing or checking the arrays, which takes longer."""
    x = arrays[call.names.index("x")]
    shape: tuple[int, ...] = getattr(x, "shape", ())
    if not isinstance(eps, float) or math.prod(shape[:-1]) < 2 or shape[:-1] == shape[-1:]:
        return None
    parts: list[Hashable] = [call, eps, aligned, shape[-1:]]
    for array in arrays:
        if not isinstance(array, cupy.ndarray):
            parts.append(type(array))
        elif array.shape in (shape, shape[:-1]) and array.flags.c_contiguous:
            parts += (x.ndim - array.ndim, array.dtype, array.data.device_id)
        elif array.ndim == 1:
            parts.append(_described(array))
        else:
            return None
    return tuple(parts)


def _ready(
    call: Call, recipe: LaunchRecipe, eps: float, given: Mapping[str, Given], out: Layout | None
) -> LaunchRecipe:
    """Return the recipe with what a site needs of it."""
    written = (*recipe.written, *recipe.statistics)[: None if call.backward else len(call.results)]
    names = [name for name, *_ in written]
    solution, order = recipe.plan, None
    other = recipe.copies or recipe.expanded or recipe.reduced or recipe.totals or recipe.dy or recipe.temporary
    everyday = solution is not None and not other
    if solution is not None:
        (eps,) = rounded(solution, eps)
        everyday &= set(solution.problem.scalars) <= {"eps"} and (call.backward or not solution.workspace)
        given_names = (*call.names, *names, "eps")
        unasked = [name for name in solution.problem.pointers if name not in given_names]
        order = argument_order(solution.problem, (*given_names, *unasked)) if everyday else None
    layouts = [(name, layout) for name, layout in given.items() if isinstance(layout, Layout)]
    index = int(dict(layouts)["x"].device)
    return replace(
        recipe,
        device_id=index,
        everyday_on=index if everyday else -1,
        widest=max(ITEMSIZE.get(layout.dtype, 8) for _, layout in layouts),  # a seed is 8 bytes
        allocated=tuple((shape, kind) for _, shape, kind in written),
        order=order,
        eps=eps,
        places=tuple(names.index(of) for _, of in recipe.gradients),
        layouts=(*layouts, *([] if out is None else [(call.out, out)])),
    )


def _dtype(function: str, name: str) -> numpy.dtype:
    """Return a dtype that CuPy has; FP8 numbers are bytes."""
    return numpy.dtype(numpy.uint8) if name in FLOAT8 else numpy_dtype(function, name)


def _given(call: Call, name: str, array: Any) -> Given:
    """Return what the checks know of an array or a number."""
    if call.takes_numbers and isinstance(array, numbers.Real) and name != "x":
        return broadcasting.number(call.function, name, array)
    return layout(call.function, name, array)


def aligned(call: Call, arrays: Sequence[Any], out: cupy.ndarray | None) -> bool:
    """Return whether all arrays read by vectors begin at multiples of 16 bytes, as memory that CuPy allocates does."""
    given = dict(zip(call.names, arrays, strict=True))
    of_x = getattr(given["x"], "shape", ())
    return (out is None or out.data.ptr % 16 == 0) and all(
        array.data.ptr % 16 == 0
        for name, array in given.items()
        if isinstance(array, cupy.ndarray)
        and name != "y8_scale"
        and broadcasting.read_by_vectors(name, array.shape, of_x)
    )


def check_addresses(call: Call, recipe: LaunchRecipe, arrays: Sequence[Any], out: cupy.ndarray | None) -> None:
    """Check that each array begins where a GPU can read an element, which no recipe knows."""
    for name, array in _by_name(call, arrays, out).items():
        if array.data.ptr % recipe.widest:
            layout(call.function, name, array)


def _by_name(call: Call, arrays: Sequence[Any], out: cupy.ndarray | None) -> dict[str, Any]:
    """Return the CuPy arrays of a call by name."""
    named = zip((*call.names, call.out), (*arrays, out), strict=True)
    return {name: array for name, array in named if isinstance(array, cupy.ndarray)}


@lru_cache(maxsize=LIMIT)
def check_out(call: Call, recipe: LaunchRecipe, pointers: tuple[int, ...]) -> None:
    """Check the memory for the first result. The answer is kept, as the same memory comes again and again."""
    at = dict(zip((*call.names, call.out), pointers, strict=True))
    *inputs, out = [(name, layout, at[name]) for name, layout in recipe.layouts]
    checks.check_out_memory(call.function, *out, inputs, recipe.ndim)


def layout(function: str, name: str, array: Any) -> Layout:
    """Return the layout of an array; raise TypeError unless it is CuPy's, ValueError if no kernel can read it."""
    if not isinstance(array, cupy.ndarray):
        raise TypeError(
            f"{function}: {name} must be a CuPy array, as x is; got {type(array).__name__}. Convert one of them."
        )
    itemsize = array.dtype.itemsize
    if array.data.ptr % itemsize and array.size:
        raise ValueError(
            f"{function}: {name} must begin at a multiple of its {itemsize} bytes an element, as a GPU reads it; got "
            f"the address {array.data.ptr:#x}. Copy the array that it is a view of, from there on."
        )
    strides = checks.strides_in_elements(function, name, array.shape, array.strides, itemsize)
    return Layout(array.shape, strides, _name(array.dtype), array.data.device_id)


@cache
def _name(dtype: numpy.dtype) -> str:
    """Return the name of a dtype, which NumPy makes anew in 5 us each time."""
    return dtype.name
