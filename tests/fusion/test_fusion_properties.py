"""Random calls of fused operations against float64: they reach every tier, with arrays of any dtypes and addresses.

The numbers of examples are those of test_properties.py on the stand-in, and a fifth of them on a GPU.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import cpu_cupy
import numpy
import pytest
from cases import DTYPES
from cpu_device import ORDERS, Machine, missing
from cpu_functions import FEW_SMS, MANY_SMS, SMALL, WITHOUT_CLUSTERS
from fusion_cases import CASES, Case, Made, check, make
from hypothesis import given, settings
from hypothesis import strategies as st
from reference import narrow, widen
from test_properties import CPU_EXAMPLES, EXAMPLES, OWN_MEMORY, STAND_IN, laid_out, several

from cunorm.kernel.device import KNOWN

ELEMENTS = 2**16
DEVICES = {device.name: device for device in (SMALL, WITHOUT_CLUSTERS, FEW_SMS, MANY_SMS, KNOWN[90], KNOWN[100])}
ROUNDED = ("poles", "both")  # s takes functions of x, so in 16 bits it may be rounded to the neighbour


class Call(NamedTuple):
    """A random call of both passes."""

    case: str
    shape: tuple[int, ...]
    dtype: str
    dtypes: dict[str, str]  # of those operands and gradients that have another dtype
    starts: list[int]  # where each array starts: so many bytes behind an aligned address, but at least one element
    layouts: list[str]  # how each array lies
    sm_margin: int
    device: str  # the GPU that the stand-in plays
    order: str  # of the stand-in's threads


def names_of(case: Case) -> tuple[str, ...]:
    return (*case.full, *case.columns, *case.samples, *case.heads, *case.odd, *case.of_rows, *case.of_samples)


@st.composite
def calls(draw: st.DrawFn) -> Call:
    name = draw(st.sampled_from(sorted(CASES)))
    case = CASES[name]
    # With fewer columns the deviation may be tiny by chance, and gradients are divided by it.
    cols = draw(
        st.integers(16, 64)
        | st.integers(2, 640).map(lambda n: 8 * n)
        | st.integers(65, 9000)
        | st.integers(16000, 36000)
    )
    most = ELEMENTS // cols
    if case.heads or case.odd:
        leading = (draw(st.integers(1, 2)), 2, 3) if most >= 12 else (1, 2, 2)
    elif set(names_of(case)) > {*case.full, *case.columns}:
        leading = (draw(st.integers(1, max(1, min(4, most)))), draw(st.integers(1, max(1, min(5, most // 4)))))
    else:
        leading = (draw(st.integers(1, max(1, min(40, most)))),)
    dtype = draw(st.sampled_from(("float32", "float64") if name in ROUNDED else DTYPES))
    formats = DTYPES if dtype == "float64" else DTYPES[:-1]  # float64 beside others makes the arithmetic float64
    of_x = () if name in ROUNDED else ("x",)
    others = st.dictionaries(
        st.sampled_from((*of_x, *names_of(case), "dy", "ds")), st.sampled_from(formats), max_size=4
    )
    return Call(
        name,
        (*leading, cols),
        dtype,
        draw(others),
        draw(st.lists(st.sampled_from((0, 1, 16)), min_size=10, max_size=10)),
        draw(st.lists(st.sampled_from(("contiguous", *OWN_MEMORY)), min_size=10, max_size=10)),
        draw(st.sampled_from((0, 0, 1, 30, 100))),
        draw(st.sampled_from(sorted(DEVICES))),
        draw(st.sampled_from(ORDERS)),
    )


def in_few_bits(made: Made) -> Made:
    """Round x and operands to multiples of 1 / 16, so that s is rounded once, whatever dtypes its operands have."""

    def few(value: Any) -> Any:
        if not hasattr(value, "dtype"):
            return value
        return narrow(numpy.round(16 * widen(value).astype(float)) / 16, value.dtype.name)

    return made._replace(x=few(made.x), operands={name: few(operand) for name, operand in made.operands.items()})


def run(xp: Any, call: Call, sms: int) -> None:
    """Check both passes with arrays of xp, on a GPU of so many multiprocessors."""
    places = zip(call.layouts, call.starts, strict=True)
    place_of: dict[int, tuple[str, int]] = {}  # an array is placed alike whenever it is passed

    def placed(array: numpy.ndarray) -> Any:
        if id(array) not in place_of:
            layout, start = next(places)
            place_of[id(array)] = layout, max(start > 0, start // array.itemsize)
        return laid_out(xp, array, *place_of[id(array)])[1]

    case = CASES[call.case]
    made = make(case, call.shape, call.dtype, call.dtypes)
    if call.dtype in ("float16", "bfloat16") or made.x.dtype.itemsize == 2:
        made = in_few_bits(made)
    # A sum over more elements may come to less than the roundings of its terms.
    alone = {*case.numbers, *case.of_rows, *case.of_samples} if math.prod(call.shape) > 2**12 else ()
    operation, sm_margin = case.op.operation, min(call.sm_margin, sms - 1)
    wanted = ("x", *(name for name in operation.operands if name not in alone))
    try:
        check(case, made, placed, wanted, sm_margin)
    except NotImplementedError:  # for streamed rows, if the prologue takes a vector or number for several rows
        refused = {*operation.before} - {"x", *case.full, *case.of_rows}
        assert refused & {*wanted}
        check(case, made, placed, tuple(name for name in wanted if name not in refused), sm_margin)


@pytest.mark.slow
@pytest.mark.skipif(bool(missing()), reason=missing() or "-")
@settings(several, max_examples=CPU_EXAMPLES)
@given(call=calls())
def test_any_fused_call_is_right_on_the_stand_in(call):
    with pytest.MonkeyPatch.context() as patch:
        cpu_cupy.play(patch, DEVICES[call.device], Machine(order=call.order))
        run(STAND_IN, call, DEVICES[call.device].sms)


@pytest.mark.gpu
@pytest.mark.slow
@settings(several, max_examples=EXAMPLES // 5)
@given(call=calls())
def test_any_fused_call_is_right_on_a_gpu(call):
    import cupy

    run(cupy, call, cupy.cuda.runtime.getDeviceProperties(0)["multiProcessorCount"])
