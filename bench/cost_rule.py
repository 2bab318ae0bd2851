"""Compare the shipped table of this GPU's class with the cost rule, which plans for every other GPU.

    python -m bench.cost_rule --suite widths few long --sample 60 --out FILE

Both plans of a case are timed in turns, and cases whose plans are the same are left out. It prints the geometric mean
of the rule's speed, as a share of the table's, for each class: operation, direction, dtype of x, width of weights,
number of rows.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections import defaultdict
from dataclasses import replace
from pathlib import Path

from bench.results import lines_to
from bench.suites import Case, drawn, suite
from cunorm.commands import timing
from cunorm.commands.compilation import compile_all, compiler
from cunorm.commands.search import Buffers
from cunorm.kernel import device
from cunorm.kernel.device import Device
from cunorm.plan import tables
from cunorm.plan.plain_problems import whole
from cunorm.plan.plan import plan
from cunorm.plan.steps import Plan

FEW, SOME = 64, 2048  # rows up to which a class goes


def plans(case: Case, gpu: Device) -> tuple[Plan, Plan]:
    """Return the plan by the table and that by the rule, which serves a GPU whose bandwidth no table has."""
    problem = whole(case.op, case.direction, case.rows, case.cols, case.dtype, case.weight_dtype)
    return plan(problem, gpu), plan(problem, replace(gpu, bandwidth=0))


def class_of(case: Case) -> tuple[str, ...]:
    rows = f"to {FEW}" if case.rows <= FEW else f"to {SOME}" if case.rows <= SOME else "more"
    return case.op, case.direction, case.dtype, case.weight_dtype, f"{rows} rows"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--suite", nargs="+", default=["widths", "few", "long"])
    parser.add_argument("--sample", type=int, help="how many shapes of each suite, drawn by --seed")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=1e9, help="stop after this many")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    gpu = device.current(0)
    if not tables.tables_of(gpu):
        parser.error(f"no table serves {gpu.name}: the rule plans it")
    every = [case for name in arguments.suite for case in drawn(suite(name), arguments.sample, arguments.seed)]
    cases = [case for case in dict.fromkeys(every) if not case.heads and case.offset is None]
    by_case = {case: plans(case, gpu) for case in cases}
    by_case = {
        case: both
        for case, both in by_case.items()
        if [(step.spec, step.grid) for step in both[0].steps] != [(step.spec, step.grid) for step in both[1].steps]
    }
    print(f"{len(cases)} cases, {len(by_case)} of which the rule plans otherwise")
    specs = dict.fromkeys(step.spec for both in by_case.values() for solution in both for step in solution.steps)
    with compiler(keep=True) as compile_one:
        for compiled in compile_all([(spec, gpu.arch) for spec in specs], compile_one):
            if compiled.fault:
                print(f"{compiled.spec}: {compiled.fault}")
    speeds: dict[tuple[str, ...], list[tuple[float, str]]] = defaultdict(list)
    begun = time.perf_counter()
    with lines_to(arguments.out) as write:
        for case, both in by_case.items():
            if time.perf_counter() - begun > arguments.seconds:
                write(stopped=f"after {arguments.seconds} s")
                break
            buffers = Buffers(both[0].problem)
            times = timing.in_turns([buffers.timer(solution) for solution in both])
            failed = [taken for taken in times if isinstance(taken, Exception)]
            if failed:
                raise failed[0]
            table, rule = (taken.median for taken in times if isinstance(taken, timing.Times))
            speeds[class_of(case)].append((table / rule, str(case)))
            write(case=str(case), table_us=round(table * 1e6, 3), rule_us=round(rule * 1e6, 3))
    for name, of_class in sorted(speeds.items()):
        mean, worst = statistics.geometric_mean(speed for speed, _ in of_class), min(of_class)
        print(f"{', '.join(name)}: {mean:.3f} of {len(of_class)}, worst {worst[0]:.3f} {worst[1]}")
    ratios = [speed for of_class in speeds.values() for speed, _ in of_class]
    print(f"all: {statistics.geometric_mean(ratios):.4f} of {len(ratios)}" if ratios else "nothing was timed")


if __name__ == "__main__":
    main()
