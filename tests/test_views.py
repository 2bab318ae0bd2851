"""Views between whose rows two strides lead, such as the heads of a packed QKV, are read and written where they lie."""

from __future__ import annotations

import itertools
from collections.abc import Callable
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

import cunorm
from cunorm.commands.compilation import fault
from cunorm.compile import compile_for
from cunorm.device import KNOWN
from cunorm.norm.checks import Layout, check_out_memory, row_strides
from cunorm.norm.plan import plan
from cunorm.norm.problem import Operand, RowStrides, plain

needs_machine = pytest.mark.skipif(bool(missing()), reason=missing() or "-")

# (shape, strides, normalised axes, where rows begin)
MERGED = {
    "a row": ((8,), (1,), 1, RowStrides(8)),
    "rows": ((5, 8), (8, 1), 1, RowStrides(8)),
    "rows apart": ((5, 8), (9, 1), 1, RowStrides(9)),
    "rows backwards": ((5, 8), (-8, 1), 1, RowStrides(-8)),
    "one row many times": ((5, 8), (0, 1), 1, RowStrides(0)),
    "contiguous axes": ((4, 3, 8), (24, 8, 1), 1, RowStrides(8)),
    "heads of a packed QKV": ((4, 3, 8), (72, 8, 1), 1, RowStrides(8, 72, 3)),
    "of several sequences": ((2, 4, 3, 8), (288, 72, 8, 1), 1, RowStrides(8, 72, 3)),
    "of several sequences that lie apart": ((2, 4, 3, 8), (300, 72, 8, 1), 1, None),
    "one head": ((4, 1, 8), (72, 8, 1), 1, RowStrides(72)),
    "one token": ((1, 3, 8), (72, 8, 1), 1, RowStrides(8)),
    "axes of one element of any stride": ((1, 4, 1, 3, 1, 8), (1, 72, 2, 8, 5, 1), 1, RowStrides(8, 72, 3)),
    "axes exchanged": ((3, 4, 8), (8, 24, 1), 1, RowStrides(24, 8, 4)),
    "the same tokens again": ((2, 4, 8), (0, 8, 1), 1, RowStrides(8, 0, 4)),
    "the same head again": ((4, 3, 8), (8, 0, 1), 1, RowStrides(0, 8, 3)),
    "the same row again and again": ((4, 3, 8), (0, 0, 1), 1, RowStrides(0)),
    "heads backwards": ((4, 3, 8), (72, -8, 1), 1, RowStrides(-8, 72, 3)),
    "two normalised axes": ((4, 3, 2, 8), (72, 16, 8, 1), 2, RowStrides(16, 72, 3)),
    "normalised axes apart": ((4, 3, 2, 8), (72, 24, 9, 1), 2, None),
    "columns apart": ((4, 3, 8), (72, 16, 2), 1, None),
    "one column": ((4, 3, 1), (72, 16, 5), 1, RowStrides(16, 72, 3)),
    "no rows": ((4, 0, 8), (7, 9, 1), 1, RowStrides(8)),
    "more rows than a kernel can count": ((2**16, 2**16, 1), (0, 1, 1), 1, None),
}


@pytest.mark.parametrize("name", MERGED)
def test_two_strides_at_most_lead_from_row_to_row(name):
    shape, strides, normalized, expected = MERGED[name]
    assert row_strides(Layout(shape, strides, "float32", 0), normalized) == expected


@pytest.mark.parametrize("inner", [2, 3, 7, 12, 40, 64, 127, 10**6 + 3, 2**31 - 1])
def test_a_product_stands_for_the_division(inner):
    """Up to the last row of which row_strides says that kernels count so far."""
    last = 2**32 - 1
    random = numpy.random.default_rng(inner)
    rows = {0, 1, inner - 1, inner, 2 * inner - 1, 2 * inner, last - last % inner - 1, last - last % inner, last}
    rows |= {int(last * one) for one in random.random(200)}
    numbers = Operand("x", "full", "float32", False, 5, 5 * inner + 11, inner).row_numbers
    for row in rows:
        if 0 <= row <= last:
            high, low = divmod(numbers["reciprocal"], 2**32)
            assert row * high < 2**63
            assert row * high + (row * low >> 32) >> 31 == row // inner
            expected = row // inner * (5 * inner + 11) + row % inner * 5
            assert row * numbers["stride"] + row // inner * numbers["gap"] == expected
    assert all(-(2**63) <= number < 2**63 for number in numbers.values())


def qkv_problem(direction: str = "forward", cols: int = 64, **strides: RowStrides | int) -> Any:
    return plain("layer_norm", direction, 12, cols, "float16", "float16", strides=strides)


def test_neither_strides_nor_heads_make_another_kernel():
    """Only that there are two strides does."""
    views = [RowStrides(64, 64 * 9, 3), RowStrides(64, 64 * 20, 6), RowStrides(0, 64, 2), RowStrides(64, 0, 4)]
    specs = {plan(qkv_problem(x=view), KNOWN[90]).steps[0].spec for view in views}
    assert len(specs) == 1
    assert specs.isdisjoint({plan(qkv_problem(), KNOWN[90]).steps[0].spec})
    assert plan(qkv_problem(x=128), KNOWN[90]).steps[0].spec == plan(qkv_problem(), KNOWN[90]).steps[0].spec


@pytest.mark.parametrize("name", ["x", "y"])
@pytest.mark.parametrize(
    ("strides", "aligned"),
    [
        (RowStrides(64, 64 * 9, 3), True),
        (RowStrides(72, 64 * 9, 3), True),
        (RowStrides(68, 64 * 9, 3), False),
        (RowStrides(64, 64 * 9 + 4, 3), False),
        (RowStrides(64, 64 * 9 + 1, 3), False),
    ],
)
def test_vectors_are_used_where_both_strides_allow_them(name, strides, aligned):
    assert plan(qkv_problem(**{name: strides}), KNOWN[90]).steps[0].spec.aligned == aligned


@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_what_a_view_leaves_out_is_not_counted(direction):
    views = dict.fromkeys(("x", "y", "dy", "dx"), RowStrides(64, 64 * 9, 3))
    assert qkv_problem(direction, **views).bytes_moved == qkv_problem(direction).bytes_moved


# The layouts of two arrays in one buffer; how many elements the second begins after the first where they share no
# memory, and where they do.
APART = {
    "q and k": (((4, 3, 8), (72, 8, 1)), ((4, 3, 8), (72, 8, 1)), 24, 23),
    "q and v": (((4, 3, 8), (72, 8, 1)), ((4, 3, 8), (72, 8, 1)), 48, 49),
    "v and q": (((4, 3, 8), (72, 8, 1)), ((4, 3, 8), (72, 8, 1)), -48, -49),
    "of several sequences": (((2, 4, 3, 8), (288, 72, 8, 1)), ((2, 4, 3, 8), (288, 72, 8, 1)), 24, 23),
    "columns of every head": (((4, 3, 8), (72, 24, 1)), ((4, 3, 8), (72, 24, 1)), 16, 17),
    "columns of some heads": (((4, 3, 8), (144, 24, 1)), ((4, 3, 8), (144, 24, 1)), 8, 7),
    "heads backwards": (((4, 3, 8), (72, -8, 1)), ((4, 3, 8), (72, 8, 1)), 8, 7),
    "rows of twice the stride": (((4, 8), (32, 1)), ((4, 8), (16, 1)), 8, 9),
}


def memory_error(a: tuple, b: tuple, offset: int) -> str:
    out, other = (Layout(*one, "float32", 0) for one in (a, b))
    try:
        check_out_memory("layer_norm", "out", out, 1 << 20, [("x", other, (1 << 20) + 4 * offset)], 1)
    except ValueError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("name", APART)
def test_views_of_one_buffer_may_share_no_memory(name):
    a, b, apart, shared = APART[name]
    assert memory_error(a, b, apart) == ""
    assert "share no memory with x" in memory_error(a, b, shared)


def elements(layout: tuple, offset: int = 0) -> list[int]:
    shape, strides = layout
    return [
        offset + sum(i * stride for i, stride in zip(place, strides, strict=True))
        for place in itertools.product(*map(range, shape))
    ]


def test_no_overlap_is_missed():
    """Against the elements themselves, for random strides."""
    random = numpy.random.default_rng(0)
    found = set()
    for _ in range(3000):
        layouts = []
        for _ in range(2):
            strides = tuple(int(stride) for stride in random.choice([-24, -12, -4, 0, 3, 4, 6, 8, 12, 16, 24, 48], 2))
            layouts.append(((3, 2, 3), (*strides, 1)))
        a, b = layouts
        offset = int(random.integers(-40, 40))
        error = memory_error(a, b, offset)
        of_a, of_b = elements(a), elements(b, offset)
        same = a == b and offset == 0
        if len(set(of_a)) < len(of_a):
            assert "its own memory" in error
        elif "its own memory" not in error and not same and set(of_a) & set(of_b):
            assert "share no memory" in error
        found.add(error[:30])
    assert len(found) == 3, "every answer was given"


# The kernels.


@pytest.fixture(params=["stand-in", "stand-in, as many rows", pytest.param("gpu", marks=pytest.mark.gpu)])
def family(request, monkeypatch):
    """CuPy's asarray and broadcast_to, and `play`, which lets the stand-in be a GPU."""
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


HEADS = 3
TOKENS = 4

# Of a buffer of shape (tokens, 3 * heads, width).
VIEWS: dict[str, Callable[[Any, Any], Any]] = {
    "heads of a packed QKV": lambda family, a: a[:, HEADS : 2 * HEADS],
    "of two sequences": lambda family, a: a.reshape(2, -1, *a.shape[1:])[:, :, HEADS : 2 * HEADS],
    "columns of heads": lambda family, a: a[:, :HEADS, 8:],
    "an odd gap": lambda family, a: odd_rows(a)[:, : HEADS * a.shape[2]].reshape(len(a), HEADS, -1),
    "axes exchanged": lambda family, a: a.swapaxes(0, 1),
    "tokens backwards": lambda family, a: a[::-1, HEADS : 2 * HEADS],
    "heads backwards": lambda family, a: a[:, 2 * HEADS - 1 : HEADS - 1 : -1],
    "every second token": lambda family, a: a[::2, HEADS : 2 * HEADS],
    "the same tokens again": lambda family, a: family.broadcast_to(a[:, 0], (2, len(a), a.shape[2])),
    "the same head again": lambda family, a: family.broadcast_to(a[:, :1], (len(a), HEADS, a.shape[2])),
}
BROADCAST = ("the same tokens again", "the same head again")


def odd_rows(a: Any) -> Any:
    """(tokens, one element less)"""
    rows = a.reshape(len(a), -1)
    return rows.reshape(-1)[: -len(a)].reshape(len(a), -1)


def viewed(family: Any, name: str, array: Any, buffer_shape: tuple[int, ...]) -> Any:
    return VIEWS[name](family, family.asarray(array.reshape(buffer_shape)))


def all_same(a: Any, b: Any) -> bool:
    return all(same_bits(one, other) for one, other in zip(a, b, strict=True))


def contiguous(family: Any, view: Any) -> Any:
    copy = family.asarray(on_host(view))
    assert copy.flags.c_contiguous
    return copy


def written_alone(family: Any, name: str, dtype: str, buffer_shape: tuple[int, ...]) -> tuple[Any, Callable[[], bool]]:
    """(a view to write to, whether nothing beside it was written)"""
    buffer = family.asarray(narrow(numpy.full(buffer_shape, 7.0), dtype))

    def alone() -> bool:
        copy = family.asarray(on_host(buffer))
        VIEWS[name](family, copy)[...] = 7
        return bool((on_host(copy).astype("float32") == 7).all())

    return VIEWS[name](family, buffer), alone


def check(family: Any, op: str, name: str, dtype: str, width: int, lines: Callable[[], list[str]]) -> None:
    """x, dy, y and dx in views, each alone and all at once: the bits of contiguous arrays, and nothing is copied."""
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
        for of in (x, flat_x):
            out, alone = written_alone(family, name, dtype, shape)
            result = forward(op, of, weight, bias, out=out)
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


def results(of: tuple[Any, Any, Any], cols: int) -> tuple[Any, Any, Any]:
    """With rows in one axis."""
    y, *statistics = of
    return y.reshape(-1, cols), *(None if one is None else one.reshape(-1) for one in statistics)


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("name", VIEWS)
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
    """As test_compile_matrix.py has it of contiguous arrays. On sm_75, 80, 100 and 120 they were compiled once."""
    views = dict.fromkeys(("x", "y", "dy", "dx"), RowStrides(cols, 9 * cols, 3))
    task = plain("layer_norm", direction, 30_000, cols, "bfloat16", "bfloat16", strides=views)
    for step in plan(task, KNOWN[90]).steps:
        assert fault(step.spec, compile_for(step.spec, 90)) == ""


# (width, dtype, GPU of the stand-in): a row is held by part of a warp, by warps, by a cluster, by nobody.
KERNELS = {
    "part of a warp": (40, "float32", SMALL),
    "warps": (1000, "bfloat16", SMALL),
    "cluster": (16392, "float32", SMALL),
    "streamed": (8208, "float64", WITHOUT_CLUSTERS),
    "streamed, several partial rows": (8208, "float64", MANY_WITHOUT_CLUSTERS),
}


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("name", ["heads of a packed QKV", "an odd gap"])
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
    assert [one.problem.by_name["x"].strides for one in runs.plans] == [RowStrides(64, 64 * 9, HEADS)] * 2


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
    """x, the residual and the gradients of y and of s, each a view of its own."""
    family.play(SMALL)
    shape = (TOKENS, 3 * HEADS, 72)
    arrays = [inputs(numpy, TOKENS * 3 * HEADS, 72, "float32", seed=i).x for i in range(4)]
    names = ("heads of a packed QKV", "heads backwards", "an odd gap", "heads of a packed QKV")
    views = [viewed(family, name, array, shape) for name, array in zip(names, arrays, strict=True)]
    flat = [contiguous(family, view) for view in views]
    lines()
    results = []
    for x, residual, dy, ds in (views, flat):
        y, s, mean, rstd = cunorm.add_layer_norm_forward(x, residual)
        dx, *_ = cunorm.add_layer_norm_backward(dy, ds, s, mean, rstd)
        results.append((y, s, mean, rstd, dx))
    assert all_same(*results)
    assert [line for line in lines() if "copied" in line] == []
    for _ in range(2):
        cunorm.add_layer_norm(flat[0].swapaxes(1, 2), family.asarray(on_host(flat[1]).swapaxes(1, 2).copy()))
    assert [line for line in lines() if "copied" in line] == [
        "add_layer_norm: x of shape (4, 72, 3) and strides (216, 1, 72) is copied in each call"
    ]


@pytest.mark.gpu
@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("cols", [64, 128, 4096, 20000, 600001])
def test_views_take_no_memory_beside_the_results(op, cols):
    """The memory taken by a call, from a pool of its own, is far below that of x."""
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


# torch. Its tensors on the CPU play those of a GPU: what is launched is run on the stand-in.


@pytest.fixture
def torch_on_the_stand_in(monkeypatch):
    """What runs plans, until the end of the test."""
    torch = pytest.importorskip("torch")
    from cunorm.torch.norm import functional, launching

    if missing():
        pytest.skip(missing())

    def empty(shape, stride, dtype):
        runs.allocated += 1
        tensor = torch.empty_strided(shape, stride, dtype=dtype)
        return tensor.fill_(float("nan")) if dtype.is_floating_point else tensor

    runs = cpu_cupy.Runs(Machine())
    runs.allocated = 0
    parts = {"_current_device": lambda: -1, "_stream": lambda _: 0, "_empty": empty, "launch": runs}
    parts |= {"properties_of": lambda *_: SMALL, "_recipes": {}, "_families": {}, "_calls": {}}
    for name, part in parts.items():
        monkeypatch.setattr(launching, name, part)
    monkeypatch.setattr(functional, "_at_once", lambda *_: True)
    monkeypatch.setattr(functional, "launchable", lambda _: True)
    return runs


TORCH_VIEWS = {name: view for name, view in VIEWS.items() if not name.endswith("backwards") and name not in BROADCAST}


def tensors(name: str, *arrays: Any) -> list[Any]:
    """Such views of tensors with the values of arrays."""
    import torch

    return [TORCH_VIEWS[name](None, torch.tensor(a.reshape(TOKENS, 3 * HEADS, -1))) for a in arrays]


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("name", TORCH_VIEWS)
def test_autograd_reads_views(torch_on_the_stand_in, lines, name, op):
    """x, and the gradient that comes back; y and dx are contiguous."""
    from cunorm import torch as adapter

    wide = inputs(numpy, TOKENS * 3 * HEADS, 72, "float32")
    x, dy = tensors(name, wide.x, wide.dy)
    weight = x.new_tensor(wide.weight[: x.shape[-1]]).requires_grad_()
    lines()
    results = []
    for x_, dy_ in ((x, dy), (x.contiguous(), dy.contiguous())):
        leaf = x_.detach().requires_grad_()
        assert leaf.stride() == x_.stride()
        y = getattr(adapter, op)(leaf, x.shape[-1:], weight, eps=1e-5)
        dx, dweight = y.grad_fn.apply(dy_)[:2]
        assert y.is_contiguous()
        assert dx.is_contiguous()
        results.append((y.detach(), dx, dweight))
    assert all((one == other).all() for one, other in zip(*results, strict=True))
    assert lines() == []
    assert torch_on_the_stand_in.plans


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("name", TORCH_VIEWS)
def test_out_and_dx_out_of_torch(torch_on_the_stand_in, lines, name, op):
    """Written by the kernels; autograd is told."""
    runs = torch_on_the_stand_in
    wide = inputs(numpy, TOKENS * 3 * HEADS, 72, "float32")
    x, dy, out = tensors(name, wide.x, wide.dy, wide.x)
    flat_x, flat_dy = x.contiguous(), dy.contiguous()
    lines()
    y, mean, rstd = forward(op, flat_x)
    dx, *_ = gradients = backward(op, flat_dy, flat_x, mean, rstd, dx_out=flat_x.clone())
    version, before = out._version, runs.allocated
    result = forward(op, x, out=out)
    assert result[0] is out
    assert runs.allocated == before + 1, "mean and rstd"
    assert out._version == version + 1
    assert (out == y).all()
    result = backward(op, dy, x, mean, rstd, dx_out=out)
    assert result[0] is out
    assert all((a == b).all() for a, b in zip(result, gradients, strict=True) if a is not None)
    backward(op, dy, x, mean, rstd, dx_out=dy)
    assert (dy == dx).all()
    assert getattr(cunorm, op)(x, out=x) is x
    assert (x == y).all()
    assert lines() == []
    empty = x[:0]
    assert cunorm.layer_norm(empty, out=empty) is empty


def test_an_out_that_no_kernel_writes_is_told(torch_on_the_stand_in, lines):
    import torch

    wide = inputs(numpy, 12, 96, "float32")
    x = torch.tensor(wide.x)
    out = torch.empty(96, 12).t()
    lines()
    y, mean, rstd = cunorm.layer_norm_forward(x)
    dx, *_ = cunorm.layer_norm_backward(x, x, mean, rstd, dx_out=torch.empty(12, 96))
    for _ in range(2):
        assert cunorm.layer_norm(x, out=out) is out
        assert (out == y).all()
        assert cunorm.layer_norm_backward(x, x, mean, rstd, dx_out=out)[0] is out
        assert (out == dx).all()
    layout = "of shape (12, 96) and strides (1, 12) is copied in each call"
    assert lines() == [f"layer_norm: out {layout}", f"backward of layer_norm: dx_out {layout}"]


@pytest.mark.gpu
@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("cols", [64, 128, 4096])
def test_torch_takes_no_more_memory_for_views(op, cols):
    """Nor gives other bits: module, autograd and all."""
    import gc

    import torch

    from cunorm import torch as adapter

    tokens = 2**24 // (9 * cols)
    qkv, dqkv = (torch.randn(tokens, 3 * HEADS, cols, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    x, dy = qkv[:, :HEADS], dqkv[:, HEADS : 2 * HEADS]
    module = {"layer_norm": adapter.LayerNorm, "rms_norm": adapter.RMSNorm}[op](cols, device="cuda")

    def taken(call: Callable[[], Any]) -> tuple[Any, int]:
        gc.collect()  # a tensor of an earlier test that is freed meanwhile would count
        torch.cuda.empty_cache()  # so would the whole of a kept block that is a little larger than what is asked for
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        result = call()
        return result, torch.cuda.max_memory_allocated() - before

    results, memory = [], []
    for x_, dy_ in ((x.clone(memory_format=torch.contiguous_format), dy.contiguous()), (x, dy)):
        leaf = x_.detach().requires_grad_()
        parameters = (leaf, *module.parameters())
        torch.autograd.grad(module(leaf), parameters, dy_)  # what is allocated once
        y, forward_bytes = taken(lambda leaf=leaf: module(leaf))
        gradients, backward_bytes = taken(
            lambda y=y, parameters=parameters, dy_=dy_: torch.autograd.grad(y, parameters, dy_)
        )
        assert y.is_contiguous()
        assert gradients[0].is_contiguous()
        results.append((y, *gradients))
        memory.append((forward_bytes, backward_bytes))
    assert memory[0] == memory[1]
    assert all(map(torch.equal, *results))


@pytest.mark.gpu
@pytest.mark.parametrize("op", OPS)
def test_torch_writes_views(op):
    """As test_out_and_dx_out_of_torch, on a GPU."""
    import torch

    qkv, dqkv = (torch.randn(64, 3 * HEADS, 128, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    x, out, dy = qkv[:, :HEADS], qkv[:, HEADS : 2 * HEADS], dqkv[:, :HEADS]
    rest = qkv[:, 2 * HEADS :].clone()
    y, mean, rstd = forward(op, x.contiguous())
    gradients = backward(op, dy.contiguous(), x.contiguous(), mean, rstd)
    assert forward(op, x, out=out)[0] is out
    assert torch.equal(out, y)
    result = backward(op, dy, x, mean, rstd, dx_out=out)
    assert result[0] is out
    assert all(torch.equal(a, b) for a, b in zip(result, gradients, strict=True) if a is not None)
    assert backward(op, dy, x, mean, rstd, dx_out=dy)[0] is dy
    assert torch.equal(dy, gradients[0])
    assert torch.equal(qkv[:, 2 * HEADS :], rest)
