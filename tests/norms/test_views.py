"""Views whose rows have two strides, such as the heads of a packed QKV, are read and written where they lie."""

from __future__ import annotations

from collections.abc import Callable
from itertools import cycle, product
from types import SimpleNamespace
from typing import Any

import cpu_cupy
import numpy
import pytest
from arrays import inputs, on_host, same_bits
from cpu_device import Machine, missing
from cpu_functions import MANY_WITHOUT_CLUSTERS, SMALL, WITHOUT_CLUSTERS
from functions import OPS, backward, bias_of, forward
from nvrtc import needs_nvrtc
from reference import check_backward, check_forward, narrow
from view_cases import BROADCAST, HEADS, TOKENS, VIEWS, results

import cunorm
from cunorm.commands.compilation import fault
from cunorm.kernel.compile import compile_for
from cunorm.kernel.device import KNOWN
from cunorm.plan.plain_problems import plain
from cunorm.plan.plan import plan
from cunorm.plan.problem import RowStrides

needs_machine = pytest.mark.skipif(bool(missing()), reason=missing() or "-")


# The kernels.


@pytest.fixture(params=["stand-in", "stand-in, as many rows", pytest.param("gpu", marks=pytest.mark.gpu)])
def family(request, monkeypatch):
    """asarray and broadcast_to of CuPy or the stand-in, and `play`, which makes the stand-in play a GPU."""
    if request.param == "gpu":
        import cupy

        return SimpleNamespace(asarray=cupy.asarray, broadcast_to=cupy.broadcast_to, play=lambda device: None)
    if missing():
        pytest.skip(missing())
    return stand_in(monkeypatch, Machine(), "many" in request.param)


def stand_in(monkeypatch: Any, machine: Machine, as_many: bool = False) -> Any:
    return SimpleNamespace(
        asarray=cpu_cupy.asarray,
        broadcast_to=lambda array, shape: numpy.broadcast_to(array, shape, subok=True),
        play=lambda device: cpu_cupy.play(monkeypatch, device, machine, as_many=as_many),
    )


def viewed(family: Any, name: str, array: Any, buffer_shape: tuple[int, ...]) -> Any:
    return VIEWS[name](family, family.asarray(array.reshape(buffer_shape)))


def all_same(a: Any, b: Any) -> bool:
    return all(same_bits(first, second) for first, second in zip(a, b, strict=True))


def contiguous(family: Any, view: Any) -> Any:
    copy = family.asarray(on_host(view))
    assert copy.flags.c_contiguous
    return copy


def written_alone(family: Any, name: str, dtype: str, buffer_shape: tuple[int, ...]) -> tuple[Any, Callable[[], bool]]:
    """Return (a view to write to, a function that says whether nothing beside it was written)."""
    buffer = family.asarray(narrow(numpy.full(buffer_shape, 7.0), dtype))

    def alone() -> bool:
        copy = family.asarray(on_host(buffer))
        VIEWS[name](family, copy)[...] = 7
        return bool((on_host(copy).astype("float32") == 7).all())

    return VIEWS[name](family, buffer), alone


def check(family: Any, op: str, name: str, dtype: str, width: int, lines: Callable[[], list[str]]) -> None:
    """Check that x, dy, y and dx in views, alone and together, give the bits of contiguous arrays without a copy."""
    shape = (TOKENS, 3 * HEADS, width)
    wide = inputs(numpy, TOKENS * 3 * HEADS, width, dtype)
    x, dy = (viewed(family, name, array, shape) for array in (wide.x, wide.dy))
    cols = x.shape[-1]
    weight, bias = (family.asarray(array[:cols]) for array in (wide.weight, wide.bias))
    flat_x, flat_dy = (contiguous(family, array) for array in (x, dy))
    assert x.strides != flat_x.strides
    _, mean, rstd = expected = forward(op, flat_x, weight, bias)
    rows = (flat_x.reshape(-1, cols), weight, bias_of(op, bias))
    check_forward(op, results(expected, cols), *rows)
    gradients = backward(op, flat_dy, flat_x, mean, rstd, weight)
    check_backward(op, (gradients[0].reshape(-1, cols), *gradients[1:]), flat_dy.reshape(-1, cols), *rows[:2])
    lines()
    result = forward(op, x, weight, bias)
    assert all_same(result, expected), "other bits forward of a view"
    assert result[0].flags.c_contiguous
    for given in ((dy, x), (flat_dy, x), (dy, flat_x)):
        result = backward(op, *given, mean, rstd, weight)
        assert all_same(result, gradients), "other bits backward of a view"
        assert result[0].flags.c_contiguous
    if name in BROADCAST:
        with pytest.raises(ValueError, match="every element of out must have its own memory"):
            forward(op, x, weight, bias, out=x)
    else:
        for array in (x, flat_x):
            out, alone = written_alone(family, name, dtype, shape)
            result = forward(op, array, weight, bias, out=out)
            assert result[0] is out
            assert all_same(result, expected), "other bits forward into a view"
            assert alone(), "y is written beside its rows"
        for given in ((dy, x), (flat_dy, flat_x)):
            dx_out, alone = written_alone(family, name, dtype, shape)
            result = backward(op, *given, mean, rstd, weight, dx_out=dx_out)
            assert result[0] is dx_out
            assert all_same(result, gradients), "other bits backward into a view"
            assert alone(), "dx is written beside its rows"
        assert all_same(backward(op, dy, x, mean, rstd, weight, dx_out=dy), gradients)
        assert same_bits(dy, gradients[0])
        assert all_same(backward(op, flat_dy, x, mean, rstd, weight, dx_out=x), gradients)
        assert same_bits(x, gradients[0])
    assert [line for line in lines() if "copied" in line] == []


# A view looks the same to both norms, which take turns but for the first two: rows of whole vectors, and odd ones.
@pytest.mark.parametrize(
    ("name", "op"),
    [*product(("heads of a packed QKV", "an odd gap"), OPS), *zip([*VIEWS][1:3] + [*VIEWS][4:], cycle(OPS))],
)
def test_views(family, name, op, lines):
    family.play(SMALL)
    check(family, op, name, "float16", 72, lines)


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("name", VIEWS)
def test_views_on_the_host(name, op, lines):
    family = SimpleNamespace(asarray=lambda array: numpy.array(array, order="C"), broadcast_to=numpy.broadcast_to)
    check(family, op, name, "float16", 72, lines)


@needs_nvrtc
@pytest.mark.parametrize("cols", [64, 128, 1000, 1024, 4096, 8192, 16384, 32768, 65536, 131072, 600_000])
@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_views_cost_no_kernel_its_registers(direction, cols):
    """A kernel for views spills no register. test_compile_matrix.py says the same of contiguous arrays."""
    views = dict.fromkeys(("x", "y", "dy", "dx"), RowStrides(cols, 9 * cols, 3))
    task = plain("layer_norm", direction, 30_000, cols, "bfloat16", "bfloat16", strides=views)
    for step in plan(task, KNOWN[90]).steps:
        assert fault(step.spec, compile_for(step.spec, 90)) == ""


# what holds a row: (width, dtype, GPU of the stand-in)
KERNELS = {
    "part of a warp": (40, "float32", SMALL),
    "warps": (1000, "bfloat16", SMALL),
    "cluster": (16392, "float32", SMALL),
    "streamed": (8208, "float64", WITHOUT_CLUSTERS),
    "streamed, several partial rows": (8208, "float64", MANY_WITHOUT_CLUSTERS),
}
# Few rows and many take turns on the stand-in: every kernel meets both, and both views. test_views has all pairs.
ON_EVERY_KERNEL = [
    pytest.param(family, name, kernel, marks=pytest.mark.gpu if family == "gpu" else ())
    for place, kernel in enumerate(KERNELS)
    for i, name in enumerate(("heads of a packed QKV", "an odd gap"))
    for family in (("stand-in", "stand-in, as many rows")[(place + i) % 2], "gpu")
]


@pytest.mark.slow
@pytest.mark.parametrize(("family", "name", "kernel"), ON_EVERY_KERNEL, indirect=["family"])
def test_every_kernel_takes_views(family, name, kernel, lines):
    width, dtype, device = KERNELS[kernel]
    family.play(device)
    check(family, "layer_norm", name, dtype, width, lines)


@needs_machine
def test_nothing_is_allocated_for_a_view(monkeypatch):
    runs = cpu_cupy.play(monkeypatch)
    qkv = inputs(numpy, TOKENS * 3 * HEADS, 64, "float32").x.reshape(TOKENS, -1, 64)
    q, k, v = (cpu_cupy.asarray(qkv)[:, i * HEADS : (i + 1) * HEADS] for i in range(3))
    before = cpu_cupy.Array.allocated
    _, mean, rstd = cunorm.layer_norm_forward(q, out=k)
    assert cpu_cupy.Array.allocated == before + 2, "mean and rstd"
    cunorm.layer_norm_backward(v, q, mean, rstd, output_mask=(True, False, False), dx_out=k)
    assert cpu_cupy.Array.allocated == before + 2
    assert [ran.problem.by_name["x"].strides for ran in runs.plans] == [RowStrides(64, 64 * 9, HEADS)] * 2


def test_what_lies_on_three_strides_is_copied_and_told(family, lines):
    family.play(SMALL)
    wide = inputs(numpy, TOKENS * 3 * HEADS, 64, "float32")
    x, dy = (family.asarray(a.reshape(2, 2, 3, -1, 64))[:, :, :2, :2] for a in (wide.x, wide.dy))
    out = family.asarray(wide.x.reshape(2, 2, 3, -1, 64))[:, :, :2, :2]
    y, mean, rstd = cunorm.layer_norm_forward(contiguous(family, x))
    dx, *_ = cunorm.layer_norm_backward(contiguous(family, dy), contiguous(family, x), mean, rstd)
    lines()
    for _ in range(2):
        assert same_bits(cunorm.layer_norm_forward(x, out=out)[0], y)
        assert cunorm.layer_norm_backward(dy, x, mean, rstd, dx_out=out)[0] is out
        assert same_bits(out, dx)
    layout = "of shape (2, 2, 2, 2, 64) and strides (1152, 576, 192, 64, 1) is copied in each call"
    assert [line for line in lines() if "copied" in line] == [
        *(f"layer_norm_forward: {name} {layout}" for name in ("x", "out")),
        *(f"layer_norm_backward: {name} {layout}" for name in ("dy", "x", "dx_out")),
    ]


def test_several_normalised_axes(family):
    family.play(SMALL)
    wide = inputs(numpy, TOKENS * 3 * HEADS, 64, "float16")
    x, dy = (family.asarray(array.reshape(TOKENS, -1, 4, 16))[:, :HEADS] for array in (wide.x, wide.dy))
    weight = family.asarray(wide.weight.reshape(4, 16))
    flat = [contiguous(family, array) for array in (dy, x)]
    result = cunorm.layer_norm_forward(x, None, weight)
    assert all_same(result, cunorm.layer_norm_forward(flat[1], None, weight))
    gradients = cunorm.layer_norm_backward(dy, x, *result[1:], weight)
    assert all_same(gradients, cunorm.layer_norm_backward(*flat, *result[1:], weight))


def test_operands_of_fused_operations(family, lines):
    """x, the residual and the gradients of y and s may each be another view."""
    family.play(SMALL)
    shape = (TOKENS, 3 * HEADS, 72)
    arrays = [inputs(numpy, TOKENS * 3 * HEADS, 72, "float32", seed=i).x for i in range(4)]
    names = ("heads of a packed QKV", "heads backwards", "an odd gap", "heads of a packed QKV")
    views = [viewed(family, name, array, shape) for name, array in zip(names, arrays, strict=True)]
    flat = [contiguous(family, view) for view in views]
    lines()
    results = []
    for x, residual, dy, ds in (views, flat):
        (y, s), saved = cunorm.add_layer_norm.forward(x, residual)
        gradients = cunorm.add_layer_norm.backward(saved, dy, ds)
        results.append((y, s, *saved.statistics.values(), gradients["x"]))
    assert all_same(*results)
    assert [line for line in lines() if "copied" in line] == []
    for _ in range(2):
        cunorm.add_layer_norm(flat[0].swapaxes(1, 2), family.asarray(on_host(flat[1]).swapaxes(1, 2).copy()))
    assert [line for line in lines() if "copied" in line] == [
        "add_layer_norm: x of shape (4, 72, 3) and strides (216, 1, 72) is copied in each call"
    ]


def test_elements_at_addresses_that_a_gpu_cannot_read_are_refused(family):
    """Every array of a call is refused, also after a call whose recipe serves such layouts."""
    family.play(SMALL)

    def at(start: int) -> Any:
        """Return 4 x 8 float64 that begin `start` bytes behind an aligned address."""
        return family.asarray(numpy.zeros(68, "float32"))[start // 4 :][:64].view("float64").reshape(4, 8)

    good, odd, even = at(0), at(4), at(8)
    _, mean, rstd = cunorm.layer_norm_forward(even, out=even)
    cunorm.layer_norm_backward(even, good, mean, rstd, even[0])
    for name, call in {
        "x": lambda: cunorm.layer_norm(odd),
        "weight": lambda: cunorm.rms_norm(good, None, odd[0]),
        "out": lambda: cunorm.layer_norm(good, out=odd),
        "dy": lambda: cunorm.layer_norm_backward(odd, good, mean, rstd),
        "rstd": lambda: cunorm.layer_norm_backward(good, good, mean, odd.reshape(-1)[:4]),
        "dx_out": lambda: cunorm.layer_norm_backward(good, good, mean, rstd, dx_out=odd),
        "residual": lambda: cunorm.add_rms_norm(good, odd),
        "z": lambda: cunorm.rms_norm_gated(even, odd),
    }.items():
        with pytest.raises(ValueError, match=f"{name} must begin at a multiple of its 8 bytes an element"):
            call()
    float32 = family.asarray(numpy.zeros(33, "float32"))[1:].reshape(4, 8)
    assert cunorm.layer_norm(good, out=even) is even
    cunorm.add_rms_norm(float32, float32)


@pytest.mark.gpu
@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("cols", [64, 128, 4096, 20000, 600001])
def test_views_take_no_memory_beside_the_results(op, cols):
    """A call takes far less memory than x has, from a pool of its own."""
    import cupy

    tokens = max(2, 2**24 // (9 * cols))
    shape = (tokens, 3 * HEADS, cols)
    qkv, dqkv = (array.reshape(shape) for array in inputs(cupy, tokens * 3 * HEADS, cols, "bfloat16")[:2])
    x, dy = qkv[:, :HEADS], dqkv[:, HEADS : 2 * HEADS]
    out = cupy.empty_like(qkv)[:, :HEADS]
    _, mean, rstd = forward(op, x, out=out)
    pool = cupy.cuda.MemoryPool()
    with cupy.cuda.using_allocator(pool.malloc):
        forward(op, x, out=out)
        assert pool.total_bytes() < x.nbytes / 4
        pool.free_all_blocks()
        backward(op, dy, x, mean, rstd, output_mask=(True, False, False), dx_out=out)
        assert pool.total_bytes() < x.nbytes / 4
