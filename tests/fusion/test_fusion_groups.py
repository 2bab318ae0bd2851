"""Fused operations with vectors for groups of rows, such as samples and heads."""

from __future__ import annotations

import cpu_cupy
import cpu_device
import numpy
import pytest
from cpu_functions import SMALL
from fusion_cases import CASES, EPS, close, expected, make

from cunorm.call import broadcasting
from cunorm.call.checks import Layout
from cunorm.kernel.device import KNOWN
from cunorm.plan.plan import plan
from cunorm.plan.problem import MOST_GROUPS, Groups, backward_problem

needs_machine = pytest.mark.skipif(bool(cpu_device.missing()), reason=cpu_device.missing())

# Groups of rows.

LAYOUTS = [
    # the shapes of x and of an operand, its kind, and Groups(rows that share a vector, vectors)
    ((4, 6, 8), (4, 1, 8), "group", Groups(6, 4)),
    ((4, 6, 8), (6, 8), "group", Groups(1, 6)),
    ((4, 6, 8), (1, 6, 8), "group", Groups(1, 6)),
    ((2, 3, 5, 8), (3, 1, 8), "group", Groups(5, 3)),
    ((2, 3, 5, 8), (2, 3, 1, 8), "group", Groups(5, 6)),
    ((2, 1, 5, 8), (2, 1, 1, 8), "group", Groups(5, 2)),
    ((4, 1, 8), (4, 1, 8), "full", None),
    ((1, 6, 8), (6, 8), "group", Groups(1, 6)),
    ((1, 6, 8), (1, 1, 8), "column", None),
    ((2, 3, 5, 8), (2, 1, 5, 8), "expanded", None),
    ((4, 6, 8), (4, 6, 1), "per_row", None),
    ((4, 6, 8), (4, 1, 1), "per_row", None),
    ((4, 6, 8), (1,), "per_row", None),
    ((4, 6, 1), (4, 6, 1), "full", None),
    ((MOST_GROUPS + 1, 2, 8), (MOST_GROUPS + 1, 1, 8), "expanded", None),
    ((2**31, 2, 8), (2, 8), "expanded", None),
]


@pytest.mark.parametrize(("x", "shape", "kind", "groups"), LAYOUTS, ids=str)
def test_shapes_have_their_kinds(x, shape, kind, groups):
    def layout(shape):
        return Layout(shape, (), "float32", "0")

    operands = {"w": layout(shape)}
    kinds = broadcasting.check_operands("test", layout(x), operands, demanded=())
    assert kinds == {"w": kind}
    assert broadcasting.groups_of(layout(x), operands, kinds) == groups


@pytest.mark.parametrize(
    ("groups", "rows", "ctas"),
    [
        (Groups(4096, 16), 65536, 8),  # 16 samples: all 128 CTAs at once
        (Groups(1, 32), 65536, 4),
        (Groups(2, 300), 600, 1),  # the one CTA of a group writes the gradients themselves
        (Groups(65536, 2), 131072, 66),
    ],
    ids=str,
)
def test_the_backward_pass_has_ctas_for_each_group(groups, rows, ctas):
    operation = CASES["modulate"].op.operation
    dtypes = dict.fromkeys(("x", "dy", "scale", "shift"), "bfloat16")
    kinds = dict.fromkeys(("scale", "shift"), "group")
    wanted = ("x", "scale", "shift")
    solution = plan(backward_problem(operation, rows, 4096, dtypes, wanted, kinds=kinds, groups=groups), KNOWN[90])
    assert solution.steps[0].grid == (ctas, 1, groups.count)
    assert solution.groups == (0 if ctas == 1 else ctas * groups.count)
    assert [step.grid[2] for step in solution.steps[1:]] == ([] if ctas == 1 else [groups.count])


@needs_machine
def test_vectors_of_groups_may_lie_anyhow(monkeypatch):
    """Models pass chunks of one projection; other vectors do not lie as kernels read them."""
    cpu_cupy.play(monkeypatch, SMALL)
    op = CASES["modulate"].op
    made = make(CASES["modulate"], (3, 5, 24), "float32")
    wide = cpu_cupy.asarray(numpy.concatenate([made.operands["scale"], made.operands["shift"]], -1))
    turned = cpu_cupy.asarray(made.operands["shift"].T).T
    x, dy = cpu_cupy.asarray(made.x), cpu_cupy.asarray(made.gradients[0])
    exact, gradients = expected(op, made)
    for scale, shift in ((wide[..., :24], wide[..., 24:]), (wide[..., :24], turned)):
        y, saved = op.forward(x, scale=scale, shift=shift, eps=EPS)
        close("y", y, exact["y"], "float32")
        for name, gradient in op.backward(saved, dy).items():
            close(f"d{name}", gradient, gradients[name], "float32")


@needs_machine
def test_numbers_of_rows_may_lie_anyhow(monkeypatch, caplog):
    """Numbers that are columns of a matrix are not copied, and kernels still read the rows by whole vectors."""
    runs = cpu_cupy.play(monkeypatch, SMALL)
    case = CASES["numbers of rows"]
    made = make(case, (3, 5, 24), "float16")
    gates = cpu_cupy.asarray(numpy.concatenate([made.operands["shift"], made.operands["factor"]], -1))
    operands = {name: cpu_cupy.asarray(operand) for name, operand in made.operands.items()}
    operands |= {"shift": gates[..., :1], "factor": gates[..., 1:]}
    exact, gradients = expected(case.op, made)
    with caplog.at_level("INFO", "cunorm"):
        (y, s), saved = case.op.forward(cpu_cupy.asarray(made.x), **operands, eps=EPS)
        actual_gradients = case.op.backward(saved, *map(cpu_cupy.asarray, made.gradients))
    assert "copied" not in caplog.text
    assert "expanded" not in caplog.text
    assert all(getattr(step.spec, "rows", step.spec).aligned for plan in runs.plans for step in plan.steps)
    close("y", y, exact["y"], "float32")
    close("s", s, exact["s"], "float32")
    for name, gradient in actual_gradients.items():
        close(f"d{name}", gradient, gradients[name], "float32")


@needs_machine
def test_what_is_of_no_kind_is_expanded_and_logged(monkeypatch, caplog):
    cpu_cupy.play(monkeypatch, SMALL)
    made = make(CASES["heads and samples"], (2, 3, 2, 8), "float32")
    operands = {name: cpu_cupy.asarray(operand) for name, operand in made.operands.items()}
    with caplog.at_level("INFO", "cunorm"):
        CASES["heads and samples"].op(cpu_cupy.asarray(made.x), **operands)
    assert "w of shape (2, 1, 2, 8) is expanded to that of x, (2, 3, 2, 8)" in caplog.text
