"""Which views two strides describe, which views overlap, and what is planned for them."""

from __future__ import annotations

import itertools
from typing import Any

import numpy
import pytest

from cunorm.call.checks import Layout, check_out_memory, row_strides
from cunorm.kernel.device import KNOWN
from cunorm.plan.plain_problems import plain
from cunorm.plan.plan import plan
from cunorm.plan.problem import Operand, RowStrides

# (shape, strides, number of normalised axes, strides of the rows or None)
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
    """It does so for every row number that row_strides lets a kernel have."""
    last = 2**32 - 1
    random = numpy.random.default_rng(inner)
    rows = {0, 1, inner - 1, inner, 2 * inner - 1, 2 * inner, last - last % inner - 1, last - last % inner, last}
    rows |= {int(last * fraction) for fraction in random.random(200)}
    numbers = Operand("x", "full", "float32", False, 5, 5 * inner + 11, inner).row_arguments
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
    """A kernel depends only on there being two strides."""
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


# The layouts of two arrays in one buffer, an offset of the second in elements at which they share no memory, and one at
# which they do.
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
    out, other = (Layout(*layout, "float32", 0) for layout in (a, b))
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
    """The answers for random strides agree with the sets of elements."""
    random = numpy.random.default_rng(0)
    answers = set()
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
        answers.add(error[:30])
    assert len(answers) == 3, "every answer was given"
