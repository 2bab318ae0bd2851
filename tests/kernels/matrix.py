"""The problems that together make the plan choose every kind of kernel that it has.

`python tests/kernels/matrix.py [ARCH...]` compiles all of their kernels, for every architecture if none is named. A
kernel that spills registers is a failure.

The problems are made from the tables of shapes.py, so a new tier is covered without a change here. All combinations
would be millions; for each tier an orthogonal array holds every pair of values of any two factors in 49 problems. Two
neighbours among the forward tiers, which follow from a rule, share one.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import replace
from itertools import compress, product
from typing import Any

from cunorm.commands.compile import OPS, ROWS, kernels_of, report
from cunorm.expression import trace
from cunorm.kernel.device import KNOWN, Device, known
from cunorm.linear import float8_plan
from cunorm.linear.float8_plan import ColumnsProblem, ProductProblem, RowsProblem
from cunorm.operation import FUSIONS, NAMED, SEED, Operation, norm_add_norm, norm_add_norm_steps
from cunorm.plan.choose import tier_of
from cunorm.plan.forward import fits_norm_add_norm
from cunorm.plan.plain_problems import float8_problem, plain, whole
from cunorm.plan.plan import plan
from cunorm.plan.problem import (
    FLOAT8,
    ITEMSIZE,
    SCALES,
    Groups,
    Problem,
    RowStrides,
    backward_problem,
    forward_problem,
)
from cunorm.plan.resources import RESIDENT
from cunorm.plan.shapes import TABLES, Tier
from cunorm.plan.spec import KernelSpec
from cunorm.plan.steps import OtherPlan

KINDS_OF_FUSIONS = {"residual": "full", "z": "full", "gate": "group", "scale": "group", "shift": "group"}
KINDS_OF_FUSIONS |= {SEED: "seed", "dropped": "scalar", "factor": "scalar"}
GROUPED_ROWS = ((2**16, Groups(2**12, 2**4)), (64, Groups(16, 4)))
FEW_ROWS = (16384, 2000, 60, 30, 2, 1)  # may have kernels of their own; a row alone is aligned whatever its length
MIDDLING_ROWS = 300  # backward by CTAs of 256 threads (plan/backward.py)
LEVELS = 7  # a prime, and no factor has more values

DTYPES = tuple(ITEMSIZE)
PARAMETERS = (*DTYPES, None)
# In the order of the columns of the orthogonal array; cols is an index into the lengths of the tier.
FACTORS: dict[str, dict[str, tuple]] = {
    "forward": {
        "x": DTYPES,
        "cols": tuple(range(LEVELS)),
        "y": DTYPES,
        "weight": PARAMETERS,
        "bias": PARAMETERS,
        "op": OPS,
        "aligned": (True, False),
        "zero_centered_gamma": (False, True),
    },
    "backward": {
        "x": DTYPES,
        "cols": tuple(range(LEVELS)),
        "y": DTYPES,
        "weight": PARAMETERS,
        "wanted": tuple(
            tuple(compress(("x", "weight", "bias"), mask)) for mask in product((True, False), repeat=3) if any(mask)
        ),
        "op": OPS,
        "aligned": (True, False),
        "zero_centered_gamma": (False, True),
    },
}


def once_each(problems: Iterable[Problem], device: Device) -> list[KernelSpec]:
    """Return one of their kernels for each kernel family, tier, CTA or cluster, and size of x: 16, 32 and 64 bits.

    For those with scales, the kind of scales takes the place of the tier.
    """
    kernels = {}
    for problem in problems:
        choice = tier_of(problem, device)
        for step in plan(problem, device).steps:
            scales = problem.by_name["y8_scale"].kind if "y8_scale" in problem.by_name else None
            part = (scales if scales else choice and choice[0], step.spec.cluster > 1)
            kernels.setdefault((step.spec.kernel, problem.direction, part, ITEMSIZE[problem.row_dtype]), step.spec)
    return list(dict.fromkeys(kernels.values()))


def covering(device: Device) -> list[Problem]:
    """Return problems that cover every tier and every pair of values of two factors.

    Each tier has whole problems of each dtype at its longest row, with many rows and with few.
    """
    problems = []
    for direction in TABLES:
        lengths = {dtype: lengths_of_tiers(direction, dtype, device) for dtype in DTYPES}
        for place, tier in enumerate(dict.fromkeys(tier for of_tiers in lengths.values() for tier in of_tiers)):
            for op, x in product(OPS, (x for x in DTYPES if tier in lengths[x])):
                longest = whole(op, direction, ROWS, lengths[x][tier][-1], x)
                problems += [replace(longest, rows=rows) for rows in (ROWS, *FEW_ROWS, MIDDLING_ROWS)]
            for levels in orthogonal_array()[place % 2 :: 2] if direction == "forward" else orthogonal_array():
                factors = FACTORS[direction].items()
                picked = {
                    name: values[level % len(values)] for (name, values), level in zip(factors, levels, strict=True)
                }
                of_tier = lengths[picked["x"]].get(tier)
                if of_tier:
                    rows = (ROWS, *FEW_ROWS)[sum(levels) % LEVELS]
                    mixed = _mixed(direction, rows, of_tier[picked.pop("cols") % len(of_tier)], **picked)
                    # Few rows have another kernel backward, which does not take the place of that of many.
                    problems += [mixed, replace(mixed, rows=ROWS)] if direction == "backward" else [mixed]
        if direction == "forward":
            problems += _float8(lengths) + _all_at_once(device) + _zero_centred(lengths)
    return problems


def _zero_centred(lengths: Mapping[str, Mapping[Tier | None, list[int]]]) -> list[Problem]:
    """Return LayerNorm with a zero-centred weight, of rows that fill all places: few enough for a ring, and many."""
    return [
        plain("layer_norm", "forward", rows, of_tier[-1], "bfloat16", dtype, dtype, zero_centered_gamma=True)
        for of_tier in lengths["bfloat16"].values()
        for rows in (2**23 // of_tier[-1], ROWS)
        for dtype in ("bfloat16", "float32")
    ]


def _all_at_once(device: Device) -> list[Problem]:
    """Return LayerNorm of three vectors a thread, of as many rows as run at once."""
    return [
        whole("layer_norm", "forward", device.sms * (RESIDENT // threads), 3 * 8 * threads, dtype)
        for threads, dtype in product((128, 192, 256, 512), ("float16", "bfloat16"))
    ]


def _float8(lengths: Mapping[str, Mapping[Tier | None, list[int]]]) -> list[Problem]:
    """Return the forward pass with FP8 output, for every tier and granularity: its shortest and longest row."""
    problems = []
    for x, granularity in product(("float16", "bfloat16", "float32"), SCALES):
        e4m3, e5m2 = FLOAT8
        for shortest, *_, longest in ((of_tier[0], *of_tier) for of_tier in lengths[x].values()):
            problems += [
                float8_problem("layer_norm", ROWS, longest, x, x, x, y8=e4m3, granularity=granularity),
                float8_problem("rms_norm", 100, longest, x, "float32", y8=e5m2, granularity=granularity),
                float8_problem("layer_norm", 100, shortest, x, "float32", x, y8=e5m2, granularity=granularity, y=x),
            ]
    return problems


# Rows of every number of vectors to a thread, several to a CTA or in clusters of each size, odd ones, and streamed.
CAST_COLS = (16, 520, 1024, 1001, 3072, 4096, 8192, 12288, 12289, 28672, 100000, 200001, 600000)


def casts(device: Device) -> list[OtherPlan]:
    """Return the plans that make operands of products in 8 bits."""
    plans = []
    for dtype, e4m3 in product(("bfloat16", "float16", "float32"), (True, False)):
        name = tuple(FLOAT8)[not e4m3]
        for cols in CAST_COLS:
            layout = (8192, cols, dtype, name, cols, True)
            totals = product((True, False), repeat=2) if e4m3 else [(True, True)]
            options = {"power_of_2": not e4m3, "sum_dtype": "float32" if e4m3 else dtype}
            plans += [
                float8_plan.plan_rows(RowsProblem(*layout, **options, sums=sums, maxima=maxima), device)
                for sums, maxima in totals
            ]
            if e4m3:
                plans.append(float8_plan.plan_rows(RowsProblem(*layout, given=True, sums=True), device))
        for aligned in (True, False):
            layout = (8192, 4096, dtype, name, 4096, aligned)
            options = {"power_of_2": not e4m3, "affine_aligned": aligned}
            plans.append(float8_plan.plan_columns(ColumnsProblem(*layout, given=e4m3), device))
            plans.append(float8_plan.plan_columns(ColumnsProblem(*layout, power_of_2=not e4m3), device))
            for operation, parameter in product(NAMED.values(), ("bfloat16", "float32", None)):
                names = ("weight", "bias")[: 2 if operation.norm == "layer_norm" else 1] if parameter else ()
                affine = tuple((name, parameter) for name in names if parameter)
                of = operation.given(("x", *names))
                plans.append(
                    float8_plan.plan_columns(ColumnsProblem(*layout, operation=of, affine=affine, **options), device)
                )
            for y, bias in product(("bfloat16", "float32"), (None, "bfloat16")):
                task = ProductProblem(16, 4096, dtype, y, bias, aligned)
                plans.append(float8_plan.plan_product(task, device))
    return plans


def named_fusions() -> list[Problem]:
    """Return of every named function over fused operations the passes of many rows and of few, in short and long rows.

    Gradients that are the same, as those of x and residual in their sum, are one.
    """
    problems = []
    _, of_sum, back_from_it = norm_add_norm_steps()  # the first of its operations is rms_norm_add's
    operations = [of() for of in FUSIONS.values()]
    operations += [FUSIONS["rms_norm_gated"](norm_before_gate=False), of_sum, back_from_it, norm_add_norm()]
    operations += [FUSIONS[f"add_{norm}"](dropout=True) for norm in OPS]
    for operation in operations:
        kinds = {name: KINDS_OF_FUSIONS.get(name, "column") for name in operation.operands}
        wanted = [name for name, kind in {"x": "full", **kinds}.items() if kind not in ("seed", "scalar")]
        if "gate" not in kinds and SEED not in kinds:
            wanted = [name for name in wanted if name != "residual"]
        sizes = (*product((128, 4096, 16384), GROUPED_ROWS), (4096, (500, Groups(125, 4))))
        for dtype, (cols, (rows, groups)) in product(("bfloat16", "float32"), sizes):
            dtypes = dict.fromkeys(("x", "y", "dy", *operation.operands), dtype)
            dtypes |= {name: "float32" for name, kind in kinds.items() if kind == "scalar"}
            dtypes |= {
                name: dtype
                for name in ("s", "ds")
                if (operation.prologue or operation.second) and (name == "s" or "s" in operation.returns)
            }
            if operation.second and not fits_norm_add_norm(dtype, cols):
                continue
            shared = {"kinds": kinds, "groups": groups if "group" in kinds.values() else None}
            if operation is not back_from_it:
                problems.append(forward_problem(operation, rows, cols, dtypes, **shared))
            if not operation.second:
                problems.append(backward_problem(operation, rows, cols, dtypes, wanted, **shared))
    return problems


def numbers_of_rows() -> list[Problem]:
    """Return the passes of expressions that take a number for each row before the norm and after it."""
    epilogue = trace(lambda xhat, weight, route: route * xhat * weight)
    problems = []
    for norm in OPS:
        prologue = trace(lambda x, residual, factor, share: factor * x + share * residual, role="prologue")
        operation = Operation(norm, epilogue, prologue, ("y", "s"))
        kinds = {"residual": "full", "factor": "per_row", "share": "per_row", "route": "per_row"}
        for dtype, cols, rows in product(("bfloat16", "float32"), (128, 1001, 4096, 16384, 49152), (2**16, 64)):
            dtypes = dict.fromkeys(("x", "s", "y", "dy", "ds", *operation.operands), dtype)
            shared = {"kinds": kinds, "strides": {"share": RowStrides(0, 1, 16)}}
            problems.append(forward_problem(operation, rows, cols, dtypes, **shared))
            problems.append(backward_problem(operation, rows, cols, dtypes, ("x", *operation.operands), **shared))
    return problems


def fused_float8() -> list[Problem]:
    """Return fused operations with FP8 output: of a sum, of vectors for groups, and of a matrix beside xhat."""
    problems = []
    for function in ("add_layer_norm", "add_rms_norm", "layer_norm_modulate", "rms_norm_gated"):
        operation = FUSIONS[function]()
        kinds = {name: KINDS_OF_FUSIONS.get(name, "column") for name in operation.operands}
        for dtype, granularity, (rows, groups) in product(("bfloat16", "float32"), SCALES, GROUPED_ROWS):
            dtypes = dict.fromkeys(("x", *operation.operands), dtype) | {"y8": next(iter(FLOAT8))}
            dtypes |= {"s": dtype} if operation.prologue else {}
            for cols, wide in ((128, True), (4096, False), (16384, True), (16393, False), (65536, False)):
                problems.append(
                    forward_problem(
                        operation,
                        rows,
                        cols,
                        dtypes | ({"y": dtype} if wide else {}),
                        kinds=kinds | {"y8_scale": SCALES[granularity]},
                        groups=groups if "group" in kinds.values() else None,
                    )
                )
    return problems


def lengths_of_tiers(direction: str, dtype: str, device: Device) -> dict[Tier | None, list[int]]:
    """Return up to seven lengths of rows that each tier takes on a device: shortest, longest, odd ones, whole vectors.

    None stands for rows that are streamed.
    """
    vector_cols = 16 // ITEMSIZE[dtype]
    table = TABLES[direction]
    most = max(tier.most for tier in table)
    vectors = {2**power * quarters // 4 for power in range((4 * most).bit_length()) for quarters in (4, 5, 6, 7)}
    vectors = vectors.union(*((tier.most, tier.most + 1) for tier in table))
    lengths = {
        length
        for n in vectors
        for length in ((n - 1) * vector_cols + 1, n * vector_cols - 1, n * vector_cols)
        if length > 0
    }
    # Where shared memory is scarce a tier may take rows beside a narrower weight and dy alone.
    beside = {other: defaultdict(list) for other in (dtype, "float16")}
    for other, taken in beside.items():
        for length in sorted(lengths):
            choice = tier_of(whole("layer_norm", direction, ROWS, length, dtype, other, other), device)
            taken[choice and choice[0]].append(length)
    return {tier: _spread(taken) for tier, taken in (beside["float16"] | beside[dtype]).items()}


def orthogonal_array() -> list[tuple[int, ...]]:
    """Return 49 rows of eight levels, 0 to 6: any two columns hold every pair of levels once (Bose, 1938)."""
    return [(j, *((i + factor * j) % LEVELS for factor in range(LEVELS))) for i, j in product(range(LEVELS), repeat=2)]


def _spread(lengths: list[int]) -> list[int]:
    """Return the first, the last and those between at equal steps."""
    last = len(lengths) - 1
    return [lengths[index] for index in sorted({last * level // (LEVELS - 1) for level in range(LEVELS)})]


def _mixed(
    direction: str,
    rows: int,
    cols: int,
    *,
    op: str,
    x: str,
    weight: str | None,
    zero_centered_gamma: bool,
    **factors: Any,
) -> Problem:
    """Return a problem of such factors, without a bias in rms_norm and zero-centring without a weight."""
    if op == "rms_norm" and direction == "forward":
        factors["bias"] = None
    elif op == "rms_norm":
        factors["wanted"] = tuple(name for name in factors["wanted"] if name != "bias") or ("x",)
    zero_centered_gamma = zero_centered_gamma and weight is not None
    return plain(op, direction, rows, cols, x, weight, zero_centered_gamma=zero_centered_gamma, **factors)


def main() -> int:
    architectures = [int(arch) for arch in sys.argv[1:]] or list(KNOWN)
    planned = [
        (spec, target.arch)
        for arch in architectures
        for target in known(arch)
        for spec in (*kernels_of(covering(target), target), *float8_plan.kernels_of(casts(target)))
    ]
    return report(planned, keep=False)


if __name__ == "__main__":
    sys.exit(main())
