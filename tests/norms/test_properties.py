"""Random calls are right by the float64 reference, and random mistakes raise TypeError or ValueError.

Without CUNORM_EXAMPLES they are the same in every run. `CUNORM_EXAMPLES=5000 pytest -m gpu
tests/norms/test_properties.py` tries 5000 others in each test.
"""

from __future__ import annotations

import itertools
import math
import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any, NamedTuple

import cpu_cupy
import numpy
import pytest
from arrays import GUARD, bits, on_host, same_bits
from cases import DTYPES
from cpu_device import ORDERS, Machine, missing
from cpu_functions import MANY_SMS, SMALL
from functions import OPS, backward
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from matrix import TABLES, lengths_of_tiers
from reference import check_backward, check_forward, narrow

import cunorm
from cunorm.kernel import device

EXAMPLES = int(os.environ.get("CUNORM_EXAMPLES", "150"))
ELEMENTS = 2**17  # the largest array has so many, unless it is one row
# The stand-in compiles two kernels for most examples, so it tries fewer.
CPU_EXAMPLES = EXAMPLES // 15
CPU_ROWS, CPU_COLUMNS = 5, 5120
# Each length compiles kernels on a GPU, so these are some lengths of every tier, and a few of models.
LENGTHS = sorted(
    {1, 2, 3, 7, 31, 33, 768, 1000, 4096, 5120}.union(
        *(
            (lengths[0], lengths[len(lengths) // 2], lengths[-1])
            for direction in TABLES
            for tier, lengths in lengths_of_tiers(direction, "float16", device.KNOWN[90]).items()
            if tier is not None
        )
    )
)

# The fixture xp is a module, which need not be made anew for each example.
several = settings(
    max_examples=EXAMPLES,
    derandomize="CUNORM_EXAMPLES" not in os.environ,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow, HealthCheck.data_too_large],
)


class Call(NamedTuple):
    """The arguments of a pass over an array of shape (*leading, *normalised)."""

    op: str
    leading: tuple[int, ...]
    normalised: tuple[int, ...]
    x: str
    y: str
    dy: str
    weight: str | None
    bias: str | None
    eps: float
    zero_centered_gamma: bool
    offset: float  # |mean| / std
    layouts: tuple[str, str, str, str]  # of x, dy, out and dx_out, and weight and bias
    misplaced: tuple[int, int, int]  # elements from an aligned address to x, dy and out
    output_mask: tuple[bool, bool, bool]
    seed: int
    out: str = "apart"  # where y goes: "none" for memory of its own, "apart", "x"
    dx_out: str = "none"  # where dx goes: one of these, or "dy"
    sm_margin: int = 0


# The layouts of `out`. Other arrays may also be broadcast.
OWN_MEMORY = (
    "contiguous",
    "padded",
    "backwards",
    "transposed",
    "every second",
    "every second column",
    "columns backwards",
)
LAYOUTS = (*OWN_MEMORY, "broadcast")


@st.composite
def calls(draw: st.DrawFn) -> Call:
    cols = draw(st.sampled_from(LENGTHS))
    rows = draw(st.integers(0, max(1, min(300, ELEMENTS // cols))))
    divisors = [n for n in (2, 3, 5) if cols % n == 0]
    split = draw(st.sampled_from([None, *divisors]))
    leading = draw(st.sampled_from(((rows,), (rows, 1), (2, rows), (1, rows, 1)))) if rows != 1 else ()
    weight = draw(st.sampled_from((*DTYPES, None)))
    return Call(
        op=draw(st.sampled_from(OPS)),
        leading=leading,
        normalised=(cols,) if split is None else (split, cols // split),
        x=draw(st.sampled_from(DTYPES)),
        y=draw(st.sampled_from(DTYPES)),
        dy=draw(st.sampled_from(DTYPES)),
        weight=weight,
        bias=draw(st.sampled_from((*DTYPES, None))),
        eps=draw(st.sampled_from((1e-5, 1e-6, 1e-3, 1.0))),
        zero_centered_gamma=weight is not None and draw(st.booleans()),
        offset=draw(st.sampled_from((0.0, 1.0, 30.0))),
        layouts=(
            draw(st.sampled_from(LAYOUTS)),
            draw(st.sampled_from(LAYOUTS)),
            draw(st.sampled_from(OWN_MEMORY)),
            draw(st.sampled_from(("contiguous", "backwards", "every second"))),
        ),
        misplaced=tuple(draw(st.integers(0, 8)) for _ in range(3)),
        output_mask=draw(st.tuples(*[st.booleans()] * 3)),
        seed=draw(st.integers(0, 2**16)),
        out=draw(st.sampled_from(("none", "apart", "x"))),
        dx_out=draw(st.sampled_from(("none", "apart", "x", "dy"))),
        sm_margin=draw(st.sampled_from((0, 0, 1, 30, 100))),
    )


def laid_out(xp: Any, values: numpy.ndarray, layout: str, start: int) -> tuple[Any, Any]:
    """Return (memory, an array of these values in it). The memory has elements before and behind the array."""
    shape = values.shape
    if layout == "transposed" and values.ndim > 1:
        memory, inner = _memory(xp, (shape[1], shape[0], *shape[2:]), values.dtype, start)
        array = inner.swapaxes(0, 1)
    elif layout == "padded":
        memory, inner = _memory(xp, (*shape[:-1], shape[-1] + 3), values.dtype, start)
        array = inner[..., : shape[-1]]
    elif layout == "every second":
        memory, inner = _memory(xp, (2 * shape[0], *shape[1:]), values.dtype, start)
        array = inner[::2]
    elif layout == "every second column":
        memory, inner = _memory(xp, (*shape[:-1], 2 * shape[-1]), values.dtype, start)
        array = inner[..., ::2]
    elif layout == "columns backwards":
        memory, inner = _memory(xp, shape, values.dtype, start)
        array = inner[..., ::-1]
    elif layout == "broadcast" and values.ndim > 1:
        memory, inner = _memory(xp, shape[1:], values.dtype, start)
        inner[...] = xp.asarray(values[0]) if shape[0] else 0
        return memory, xp.broadcast_to(inner, shape)
    else:
        memory, inner = _memory(xp, shape, values.dtype, start)
        array = inner[::-1] if layout == "backwards" else inner
    array[...] = xp.asarray(values)
    return memory, array


def _memory(xp: Any, shape: tuple[int, ...], dtype: numpy.dtype, start: int) -> tuple[Any, Any]:
    size = int(numpy.prod(shape))
    memory = xp.zeros(start + size + GUARD, dtype)
    return memory, memory[start : start + size].reshape(shape)


def matrix_of(array: Any, cols: int) -> numpy.ndarray:
    return numpy.ascontiguousarray(on_host(array)).reshape(-1, cols)


def numbers(call: Call) -> tuple[numpy.ndarray, ...]:
    """Return x, dy, weight and bias at random. weight and bias have the dtype of x if the call has none for them."""
    random = numpy.random.default_rng(call.seed)
    shape = call.leading + call.normalised
    sign = random.choice((-1.0, 1.0))
    return (
        narrow(random.standard_normal(shape) + sign * call.offset, call.x),
        narrow(random.standard_normal(shape) + 0.5, call.dy),
        narrow(1 + 0.25 * random.standard_normal(call.normalised), call.weight or call.x),
        narrow(random.standard_normal(call.normalised), call.bias or call.x),
    )


def run(xp: Any, call: Call) -> None:
    """Check both passes of a call against the reference, and that only `out` and `dx_out` change."""
    cols = int(numpy.prod(call.normalised))
    values = numbers(call)
    layouts = (call.layouts[0], call.layouts[1], call.layouts[3], call.layouts[3])
    placed = [
        laid_out(xp, array, layout, start)
        for array, layout, start in zip(values, layouts, (*call.misplaced[:2], 0, call.misplaced[2]), strict=True)
    ]
    memories = [memory for memory, _ in placed]
    x, dy, weight, bias = (array for _, array in placed)
    weight, bias = (None if call.weight is None else weight), (None if call.bias is None else bias)
    before = [on_host(memory).copy() for memory in memories]
    flat = (matrix_of(x, cols), None if weight is None else on_host(weight).reshape(cols))
    flat_dy = matrix_of(dy, cols)
    options = {"zero_centered_gamma": call.zero_centered_gamma}

    def written(where: str, name: str, dtype: str, pass_over: Callable[[Any], tuple]) -> tuple:
        """Return the results of a pass, on the host. They go to new memory, an array apart, or one that it reads."""
        own = {"x": (0, x, call.layouts[0]), "dy": (1, dy, call.layouts[1])}
        if where in own:
            place, array, layout = own[where]
            if array.dtype.name != dtype or layout == "broadcast":
                return written("apart", name, dtype, pass_over)
            results = pass_over(array)
            assert results[0] is array
            results = tuple(None if array is None else on_host(array).copy() for array in results)
            array[...] = xp.asarray(values[place])  # restored, so that the last check sees what else was written
            return results
        if where == "none":
            return tuple(None if array is None else on_host(array) for array in pass_over(None))
        sevens = narrow(numpy.full(values[0].shape, 7.0), dtype)
        memory, out = laid_out(xp, sevens, call.layouts[2], call.misplaced[2])
        outside = on_host(memory) == 0
        results = pass_over(out)
        assert results[0] is out
        assert (on_host(memory)[outside] == 0).all(), f"memory around {name} was written to"
        return tuple(None if array is None else on_host(array) for array in results)

    function = cunorm.layer_norm_forward if call.op == "layer_norm" else cunorm.rms_norm_forward
    parameters = (weight, bias) if call.op == "layer_norm" else (weight,)
    kept: list[Any] = []

    def forward_to(out: Any) -> tuple:
        dtype = call.y if out is None else None
        given = (x, call.normalised, *parameters, call.eps)
        results = function(*given, out=out, dtype=dtype, sm_margin=call.sm_margin, **options)
        kept[:] = results[1:]
        return results

    y, *statistics = written(call.out, "out", call.y, forward_to)
    mean, rstd = kept if call.op == "layer_norm" else (None, *kept)
    flat_bias = None if bias is None or call.op == "rms_norm" else on_host(bias).reshape(cols)
    statistics = [None, *statistics] if call.op == "rms_norm" else statistics
    of_rows = [None if numbers is None else numbers.reshape(-1) for numbers in statistics]
    check_forward(call.op, (matrix_of(y, cols), *of_rows), *flat, flat_bias, eps=call.eps, **options)

    def backward_to(dx_out: Any) -> tuple:
        changes = {"output_mask": call.output_mask, "dx_out": dx_out, "sm_margin": call.sm_margin}
        return backward(call.op, dy, x, mean, rstd, weight, **changes, **options)

    where = call.dx_out if call.output_mask[0] else "none"
    dx, dweight, dbias = gradients = written(where, "dx_out", call.x, backward_to)
    wanted = call.output_mask if call.op == "layer_norm" else (*call.output_mask[:2], False)
    assert tuple(gradient is not None for gradient in gradients) == wanted
    shaped = (
        None if dx is None else matrix_of(dx, cols),
        *(None if gradient is None else gradient.reshape(cols) for gradient in (dweight, dbias)),
    )
    check_backward(call.op, shaped, flat_dy, *flat, eps=call.eps, **options)
    for memory, copy in zip(memories, before, strict=True):
        assert (bits(on_host(memory)) == bits(copy)).all(), "an input was changed"


# In a transposed matrix NumPy adds up a row element by element, with an error that grows with its length.
TRANSPOSED = Call(
    op="layer_norm",
    leading=(2,),
    normalised=(768,),
    x="float64",
    y="float16",
    dy="float16",
    weight=None,
    bias=None,
    eps=1e-5,
    zero_centered_gamma=False,
    offset=0.0,
    layouts=("transposed", "contiguous", "contiguous", "contiguous"),
    misplaced=(0, 0, 0),
    output_mask=(False, False, False),
    seed=4,
)


@pytest.mark.slow
@several
@given(call=calls())
@example(call=TRANSPOSED)
def test_any_call_is_right(xp, call):
    run(xp, call)


def on_the_stand_in(call: Call) -> Call:
    """Change a call to as many rows as the stand-in has time for, and leave it at least one multiprocessor."""
    rows = min(math.prod(call.leading), CPU_ROWS)
    return call._replace(leading=(rows,), sm_margin=min(call.sm_margin, MANY_SMS.sms - 1))


STAND_IN = SimpleNamespace(
    zeros=lambda shape, dtype: cpu_cupy.asarray(numpy.zeros(shape, dtype)),
    asarray=cpu_cupy.asarray,
    broadcast_to=lambda array, shape: numpy.broadcast_to(array, shape, subok=True),
)
short_calls = calls().filter(lambda call: math.prod(call.normalised) <= CPU_COLUMNS).map(on_the_stand_in)


@pytest.mark.slow
@pytest.mark.skipif(bool(missing()), reason=missing() or "-")
@settings(several, max_examples=CPU_EXAMPLES)
@given(call=short_calls, order=st.sampled_from(ORDERS))
def test_any_call_is_right_on_the_stand_in(call, order):
    """The kernels are compiled for the CPU, and the call goes all the way of CuPy arrays before."""
    device = MANY_SMS if call.sm_margin else SMALL
    with pytest.MonkeyPatch.context() as patch:
        cpu_cupy.play(patch, device, Machine(order=order))
        run(STAND_IN, call)


THREADS = 4


def run_at_once(several_calls: Sequence[Call], run_one: Callable[[Call], None]) -> None:
    """Let every thread make all calls, each beginning with another one."""
    begin = threading.Barrier(THREADS)

    def by_thread(first: int) -> None:
        begin.wait()
        for place in range(len(several_calls)):
            run_one(several_calls[(first + place) % len(several_calls)])

    with ThreadPoolExecutor(THREADS) as pool:
        for done in [pool.submit(by_thread, first) for first in range(THREADS)]:
            done.result()


@pytest.mark.slow
@settings(several, max_examples=EXAMPLES // 10)
@given(several_calls=st.lists(calls(), min_size=2, max_size=4))
def test_calls_of_several_threads_at_once_are_right(xp, several_calls):
    run_at_once(several_calls, lambda call: run(xp, call))


@pytest.mark.slow
@pytest.mark.skipif(bool(missing()), reason=missing() or "-")
@settings(several, max_examples=max(1, CPU_EXAMPLES // 10))
@given(several_calls=st.lists(short_calls, min_size=2, max_size=3))
def test_calls_of_several_threads_at_once_are_right_on_the_stand_in(several_calls):
    """The threads share recipes. The kernels of the stand-in run one by one."""
    with pytest.MonkeyPatch.context() as patch:
        runs = cpu_cupy.play(patch, MANY_SMS)
        launch, one_by_one = runs.run, threading.Lock()

        def in_turn(*arguments: Any) -> None:
            with one_by_one:
                launch(*arguments)

        patch.setattr(runs, "run", in_turn)
        run_at_once(several_calls, lambda call: run(STAND_IN, call))


STEPS = st.sampled_from((-32, -16, -8, -4, 0, 4, 6, 8, 12, 16, 20, 24, 32, 48))  # bytes


class View(NamedTuple):
    """A matrix of float32 in a buffer."""

    start: int  # in bytes, from the middle of the buffer
    strides: tuple[int, int]

    def elements(self, shape: tuple[int, int]) -> list[int]:
        """Return where each element begins, in bytes."""
        places = itertools.product(*map(range, shape))
        return [self.start + sum(i * step for i, step in zip(place, self.strides, strict=True)) for place in places]


views = st.builds(View, st.integers(-8, 8).map(lambda n: 4 * n), st.tuples(STEPS, STEPS | st.just(4)))


@pytest.mark.slow
@several
@given(x_view=views, out_view=views, shape=st.tuples(st.integers(1, 4), st.integers(1, 4)), backward_too=st.booleans())
def test_memory_that_overlaps_is_refused_or_harmless(xp, x_view, out_view, shape, backward_too):
    """Views of one buffer that share an element are refused, as are strides of parts of elements. Others are right."""
    buffer = xp.asarray(numpy.random.default_rng(0).standard_normal(256).astype("float32"))
    x, out = (
        xp.lib.stride_tricks.as_strided(buffer[128 + view.start // 4 :], shape, view.strides)
        for view in (x_view, out_view)
    )
    steps = [step for view in (x_view, out_view) for size, step in zip(shape, view.strides, strict=True) if size > 1]
    of_x, of_out = x_view.elements(shape), out_view.elements(shape)
    alike = x_view.start == out_view.start and (x_view.strides == out_view.strides or of_x == of_out)
    must_be_refused = (
        any(step % 4 for step in steps) or len(set(of_out)) < len(of_out) or (set(of_x) & set(of_out) and not alike)
    )
    if must_be_refused:
        with pytest.raises(ValueError, match=r"^layer_norm"):
            cunorm.layer_norm(x, out=out)
        return
    values = numpy.array(on_host(x))
    alone = cunorm.layer_norm_forward(xp.asarray(values))
    refused = ""
    try:
        if backward_too:
            dy = xp.asarray(values[::-1].copy())
            expected = cunorm.layer_norm_backward(dy, xp.asarray(values), *alone[1:])[0]
            assert cunorm.layer_norm_backward(dy, x, *alone[1:], dx_out=out)[0] is out
        else:
            expected = alone[0]
            assert cunorm.layer_norm(x, out=out) is out
    except ValueError as error:
        refused = str(error)
    if refused:  # for strides that no slicing gives, or rows too far apart, the check may refuse what is harmless
        assert "share no memory" in refused or "its own memory" in refused
    else:
        assert same_bits(numpy.array(on_host(out)), on_host(expected))


ROWS, COLS = 4, 8
DTYPES_OF_NO_USE = ("int32", "uint8", "bool", "complex64", "longdouble", "object", "datetime64[s]", "U3")
WRONG_KINDS = (1.5, 3, "array", b"bytes", [1.0] * COLS, {}, object(), numpy.float32(1), len)


def wrong_arrays(*shapes: tuple[int, ...]) -> st.SearchStrategy:
    """Draw what is no array of one of these shapes."""
    sizes = st.lists(st.integers(0, 9), max_size=3).map(tuple).filter(lambda shape: shape not in shapes)
    return st.one_of(
        st.sampled_from(WRONG_KINDS),
        st.sampled_from(DTYPES_OF_NO_USE).map(lambda dtype: numpy.zeros(shapes[0], dtype)),
        sizes.map(lambda shape: numpy.ones(shape, "float32")),
    )


WRONG = {
    "x": st.none()
    | wrong_arrays((ROWS, COLS), *((rows, COLS) for rows in range(10)), (COLS,)).filter(
        lambda x: getattr(x, "shape", ())[-1:] != (COLS,) or x.dtype.name not in DTYPES
    ),
    "dy": st.none() | wrong_arrays((ROWS, COLS)),
    "weight": wrong_arrays((COLS,)),
    "bias": wrong_arrays((COLS,)),
    "mean": st.none() | wrong_arrays((ROWS,)),
    "rstd": st.none() | wrong_arrays((ROWS,)),
    "out": wrong_arrays((ROWS, COLS)),
    "normalized_shape": st.sampled_from((7, -1, 0, (), (7,), (2, 4, 8), "8", 8.0, (8.0,), (True,), {8}, object())),
    "eps": st.sampled_from((None, "1e-5", 1j, True, [1e-5], object(), float("nan"), float("inf"), -1e-9)),
    "dtype": st.sampled_from(("int8", "float99", "", numpy.int32, numpy.dtype("complex64"), 5, b"float32", object())),
    "sm_margin": st.sampled_from((-1, 0.0, 1.0, "2", None, False, True, object())),
    "output_mask": st.sampled_from((None, True, "yes", 5, (), (True,) * 4, {True, False}, object())),
}
ARGUMENTS = {
    "layer_norm_forward": "x normalized_shape weight bias eps out dtype sm_margin",
    "rms_norm_forward": "x normalized_shape weight eps out dtype sm_margin",
    "layer_norm_backward": "dy x mean rstd weight output_mask sm_margin",
    "rms_norm_backward": "dy x rstd weight output_mask sm_margin",
}


def good_arguments(function: str) -> dict[str, Any]:
    random = numpy.random.default_rng(0)
    shapes = {"x": (ROWS, COLS), "dy": (ROWS, COLS), "out": (ROWS, COLS), "mean": ROWS, "rstd": ROWS}
    arrays = {
        name: random.standard_normal(shapes.get(name, COLS)).astype("float32")
        for name in ("x", "dy", "weight", "bias", "mean", "rstd", "out")
    }
    others = {"normalized_shape": COLS, "eps": 1e-5, "dtype": "float32", "sm_margin": 0}
    others["output_mask"] = (True,) * (3 if function.startswith("layer") else 2)
    return {name: (arrays | others)[name] for name in ARGUMENTS[function].split()}


def on_device(xp: Any, value: Any) -> Any:
    """Move an array of numbers to xp. CuPy has no arrays of other kinds."""
    movable = isinstance(value, numpy.ndarray) and value.dtype.kind in "biufc" and value.dtype.name != "longdouble"
    return xp.asarray(value) if movable and value.dtype.itemsize <= 8 else value


@pytest.mark.slow
@several
@given(function=st.sampled_from(sorted(ARGUMENTS)), data=st.data())
def test_a_mistake_is_a_type_error_or_a_value_error(xp, function, data):
    """A mistake is refused also after a good call, which CuPy's path remembers: 8.0 equals 8, and False equals 0."""
    good = good_arguments(function)
    getattr(cunorm, function)(**{name: on_device(xp, value) for name, value in good.items()})
    names = data.draw(st.sets(st.sampled_from(sorted(good)), min_size=1, max_size=2), label="names")
    spoiled = {name: data.draw(WRONG[name], label=name) for name in sorted(names)}
    arguments = {name: on_device(xp, value) for name, value in (good | spoiled).items()}
    arrays = [array for array in arguments.values() if isinstance(array, xp.ndarray)]
    before = [array.copy() for array in arrays]
    with pytest.raises((TypeError, ValueError), match=f"^{function}: ") as caught:
        getattr(cunorm, function)(**arguments)
    assert caught.type in (TypeError, ValueError), "a subclass would say something else"
    for array, copy in zip(arrays, before, strict=True):
        numpy.testing.assert_array_equal(on_host(array), on_host(copy))
