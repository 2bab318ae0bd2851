"""Search for faster launches than a plan's own: `python -m bench.search --suite widths --sample 4 --out FILE`.

For each case the candidates of cunorm/plan/candidates.py are searched as `python -m cunorm tune` does it
(cunorm/commands/search.py). Each case has a line with today's time and those of the fastest, with their differences.
`--write TABLE` also merges launches that are ahead of today's into a table, such as one of cunorm/plan/tables/. Cases
that the table has are left out, so that a search goes on where it was stopped.
"""

from __future__ import annotations

import argparse
import os
import shlex
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from bench.environment import environment, this_commit
from bench.results import lines_to
from bench.suites import SUITES, Case, drawn, suite
from cunorm.commands.search import search
from cunorm.commands.tune import Task, keep, task_of
from cunorm.kernel import device
from cunorm.kernel.device import Device
from cunorm.plan import tables
from cunorm.plan.candidates import candidates
from cunorm.plan.plain_problems import whole
from cunorm.plan.plan import plan
from cunorm.plan.spec import NormSpec
from cunorm.plan.tables import Launch


def difference(spec: NormSpec, own: NormSpec) -> dict[str, Any]:
    """Return what is different about a launch, and the threads and vectors of its rows."""
    of_own = asdict(Launch.of(own))
    choices = {name: value for name, value in asdict(Launch.of(spec)).items() if value != of_own[name]}
    return {"threads": spec.shape.threads, "vectors": spec.shape.vectors} | choices


def task(case: Case, gpu: Device) -> Task | None:
    """Return what there is to search for, or None where the rows have one launch."""
    return task_of(whole(case.op, case.direction, case.rows, case.cols, case.dtype, case.weight_dtype), gpu)


def search_case(case: Case, most: int, write: Path | None = None) -> dict[str, Any]:
    gpu = device.current(0)
    searched = task(case, gpu)
    if searched is None:
        return {"case": str(case), "left_out": "its rows have one launch"}
    problem, spec = searched.problem, searched.spec
    result = search(problem, plan(problem, gpu), candidates(problem, spec, gpu, most), gpu)
    if write is not None:
        keep(write, gpu, searched, result)
    return {
        "case": str(case),
        "today_us": round(result.today.median * 1e6, 3),
        "today": str(spec),
        "tried": result.tried,
        "spilled": result.spilled,
        "wrong": [difference(wrong, spec) | {"mistake": why} for wrong, why in result.faults],
        "fastest": [{"us": round(taken * 1e6, 3)} | difference(other, spec) for taken, other in result.fastest],
        "better": difference(result.better, spec) if result.better else None,
    }


def is_measured(case: Case, path: Path) -> bool:
    """Return whether a table has the case."""
    searched, table = task(case, device.current(0)), tables.read(path) if path.exists() else None
    if searched is None or table is None:
        return False
    return table.has_point(searched.layout, searched.spec, searched.rows_of_sm)


def cases(name: str) -> list[Case]:
    """Return the cases of a suite that are matrices and are timed."""
    return [case for case in suite(name) if not case.heads and case.offset is None]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--suite", choices=[name for name in SUITES if cases(name)], required=True)
    parser.add_argument("--sample", type=int, help="how many shapes of it, drawn by --seed")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--most", type=int, default=300, help="launches for a case, those most like today's first")
    parser.add_argument("--seconds", type=float, default=1e9, help="stop after this many")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--write", type=Path, metavar="TABLE", help="a table of launches of this GPU, there or new")
    parser.add_argument("--again", action="store_true", help="measure cases that the table has, too")
    arguments = parser.parse_args()
    os.environ[tables.TUNE_VARIABLE] = "0"  # what the bench measures is what cunorm ships
    if arguments.write and arguments.write.exists():
        table = tables.read(arguments.write)
        if table is None or not table.serves(device.current(0)):
            parser.error(f"{arguments.write} is no table of launches of this GPU: name another, which may be new")
    begun = time.perf_counter()
    with lines_to(arguments.out) as write:
        write(**environment(this_commit(), {}, {}) | {"command": "python -m bench.search " + shlex.join(sys.argv[1:])})
        for case in drawn(cases(arguments.suite), arguments.sample, arguments.seed):
            if arguments.write and not arguments.again and is_measured(case, arguments.write):
                continue
            if time.perf_counter() - begun > arguments.seconds:
                write(stopped=f"after {arguments.seconds} s")
                break
            write(**search_case(case, arguments.most, arguments.write))


if __name__ == "__main__":
    main()
