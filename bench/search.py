"""What other kernels would take than a plan's own: `python -m bench.search --suite widths --sample 4 --out FILE`.

For each case the kernels of other_plans.py are compiled, those that spill left out, and timed in CUDA graphs over
rotating buffers (cold L2): all of them once, then the fastest, which are checked, in turns with today's plan. A line a
case: today's time, and those of the fastest with what makes them different. A rule of cunorm/norm is made of what wins
over many widths and numbers of rows, not of one line.
"""

from __future__ import annotations

import argparse
import shlex
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import cupy

from bench import check, timing
from bench.environment import environment, this_commit
from bench.other_plans import CHOICES, other_kernels, plan_by
from bench.results import lines_to
from bench.suites import SUITES, Case, drawn, suite
from bench.workload import Workload
from cunorm.commands.compilation import compile_all, compiler
from cunorm.kernel import device, launch
from cunorm.numpy_arrays import numpy_dtype
from cunorm.plan.plain_problems import whole
from cunorm.plan.plan import plan
from cunorm.plan.spec import KernelSpec, NormSpec
from cunorm.plan.steps import Plan

FINALISTS = 10  # timed in turns with today's
SCREENING = 3  # replays of a graph, the fastest of which counts


class Calls:
    """Calls of plans over the buffers of a case; all write to the same results."""

    def __init__(self, case: Case):
        self.case, self.workload = case, Workload(case)
        first = self.workload.sets[0]
        written = ("y",) if case.direction == "forward" else ("dx", "dweight", "dbias")
        like = {"y": first.x, "dx": first.x, "dweight": first.weight, "dbias": first.bias}
        self.written = [name for name in written if like[name] is not None]
        results = {name: numpy_dtype("bench", str(like[name].dtype)) for name in self.written}
        self.sets = [
            SimpleNamespace(
                **vars(one), **{name: cupy.empty(like[name].shape, dtype) for name, dtype in results.items()}
            )
            for one in self.workload.sets
        ]

    def of(self, found: Plan) -> list[Any]:
        """A call for each set of buffers."""
        workspace = cupy.empty(max(1, found.workspace), "uint8")
        numbers = [self.case.eps for _ in found.problem.scalars]

        def call(buffers: SimpleNamespace) -> Any:
            arrays = (vars(buffers).get(name) for name in found.problem.pointers)
            arguments = (*(0 if array is None else array.data.ptr for array in arrays), *numbers)
            return lambda: launch.run(found, 0, cupy.cuda.get_current_stream().ptr, arguments, workspace.data.ptr)

        return [call(buffers) for buffers in self.sets]

    def mistake(self, found: Plan) -> str:
        """What is wrong with its results; empty if nothing is."""
        first = self.sets[0]
        for name in self.written:
            vars(first)[name].view("uint8").fill(255)  # NaN
        self.of(found)[0]()
        results = tuple(vars(first)[name] for name in self.written)
        return check.wrong(self.case, check.errors(self.case, self.workload.sets[0], results))


def without_faults(plans: Iterable[Plan], arch: int) -> list[Plan]:
    """Those whose kernels compile and spill nothing."""
    plans = list(plans)
    specs = list(dict.fromkeys(step.spec for found in plans for step in found.steps))
    with compiler(keep=True) as compile_one:
        faults = {one.spec for one in compile_all([(spec, arch) for spec in specs], compile_one) if one.fault}
    return [found for found in plans if not any(step.spec in faults for step in found.steps)]


def difference(spec: NormSpec, own: KernelSpec) -> dict[str, Any]:
    """What is different about a kernel, and the threads and packs of its rows."""
    shape = spec.shape
    names = (name for name in CHOICES if name != "order" and getattr(spec, name) != getattr(own, name, None))
    return {"threads": shape.threads, "packs": shape.packs} | {name: getattr(spec, name) for name in names}


def search(case: Case, most: int, same_bits: bool) -> dict[str, Any]:
    gpu = device.current(0)
    problem = whole(case.op, case.direction, case.rows, case.cols, case.dtype, case.weight_dtype)
    today = plan(problem, gpu)
    others = {plan_by(problem, spec, gpu): spec for spec in other_kernels(problem, gpu, most, same_bits=same_bits)}
    plans, calls = without_faults(others, gpu.arch), Calls(case)
    timers = {found: timing.timer("cupy", calls.of(found), case.bytes_moved) for found in plans}
    screened = sorted(plans, key=lambda found: min(timers[found]() for _ in range(SCREENING)))[:FINALISTS]
    mistakes = {found: calls.mistake(found) for found in screened}
    finalists = [found for found in screened if not mistakes[found]]
    own = timing.timer("cupy", calls.of(today), case.bytes_moved)
    times = timing.in_turns([own, *(timers[found] for found in finalists)])
    us = [round(one.median * 1e6, 3) if isinstance(one, timing.Times) else None for one in times]
    in_order = sorted(zip(us[1:], finalists, strict=True), key=lambda one: one[0] or float("inf"))
    kernel = today.steps[0].spec
    return {
        "case": str(case),
        "today_us": us[0],
        "today": str(kernel),
        "tried": len(plans),
        "spilled": len(others) - len(plans),
        "wrong": [difference(others[one], kernel) | {"mistake": text} for one, text in mistakes.items() if text],
        "fastest": [{"us": taken} | difference(others[found], kernel) for taken, found in in_order],
    }


def cases(name: str) -> list[Case]:
    """Those of a suite that are matrices and are timed."""
    return [case for case in suite(name) if not case.heads and case.offset is None]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--suite", choices=[name for name in SUITES if cases(name)], required=True)
    parser.add_argument("--sample", type=int, help="so many shapes of it, drawn by --seed")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--most", type=int, default=300, help="kernels for a case, the likest to today's first")
    parser.add_argument("--same-bits", action="store_true", help="those alone that add rows up in today's order")
    parser.add_argument("--seconds", type=float, default=1e9, help="stop after this many")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    begun = time.perf_counter()
    with lines_to(arguments.out) as write:
        write(**environment(this_commit(), {}, {}) | {"command": "python -m bench.search " + shlex.join(sys.argv[1:])})
        for case in drawn(cases(arguments.suite), arguments.sample, arguments.seed):
            if time.perf_counter() - begun > arguments.seconds:
                write(stopped=f"after {arguments.seconds} s")
                break
            write(**search(case, arguments.most, arguments.same_bits))
            cupy.get_default_memory_pool().free_all_blocks()


if __name__ == "__main__":
    main()
