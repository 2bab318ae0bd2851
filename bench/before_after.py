"""Two commits of cunorm in one run, in turns: `python -m bench.before_after --before DIR [--suite small] [--out FILE]`.

DIR is a checkout of the earlier commit. Its package is loaded under another name, so that both work on the same buffers
in one process. A line is a case: the median of a call before and after, in CUDA graphs over rotating buffers (cold L2),
replayed in turns.
"""

from __future__ import annotations

import argparse
import importlib
import re
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from itertools import chain
from pathlib import Path
from types import ModuleType
from typing import Any

import cupy

import cunorm
from bench import timing
from bench.providers.cunorm import Cunorm
from bench.results import lines_to
from bench.suites import OPS, Case, drawn, grid, suite
from bench.workload import Workload

NAME = "cunorm_before"
SECONDS = 0.12  # for the replays of a case
HOST_CALLS = 400


def load(checkout: Path) -> ModuleType:
    """The package of a checkout, as `cunorm_before`."""
    folder = Path(tempfile.mkdtemp())
    shutil.copytree(checkout / "cunorm", folder / NAME)
    shutil.copytree(checkout / "kernels_cu", folder / NAME / "kernels_cu", dirs_exist_ok=True)
    for path in (folder / NAME).rglob("*.py"):
        path.write_text(path.read_text().replace('"cunorm.', f'"{NAME}.'))
    sys.path.insert(0, str(folder))
    return importlib.import_module(NAME)


def in_turns(case: Case, before: Sequence[Callable], after: Sequence[Callable]) -> tuple[float, float]:
    """Median seconds of a call of each."""
    timers = [timing.timer("cupy", calls, case.bytes_moved) for calls in (before, after)]
    times = []
    for found in timing.in_turns(timers, SECONDS):
        if isinstance(found, Exception):
            raise found
        times.append(found.median)
    return times[0], times[1]


def provider(module: ModuleType) -> Cunorm:
    found = Cunorm()
    found.cunorm = module
    return found


def has_changed(case: Case) -> bool:
    """Say whether the launches of a case differ in the kernels' texts, grids or shared memory."""

    def launches(package: str) -> list[tuple[object, ...]]:
        names = ("kernel.device", "kernel.source", "plan.plan", "plan.plain_problems")
        device, source, plan, problems = (importlib.import_module(f"{package}.{name}") for name in names)
        problem = problems.whole(case.op, case.direction, case.rows, case.cols, case.dtype, case.weight_dtype)
        steps = plan.plan(problem, device.current(0)).steps
        return [(step.grid, step.dynamic_shared, text_of(source.source(step.spec))) for step in steps]

    return launches(NAME) != launches("cunorm")


def text_of(source: str) -> list[str]:
    """The lines of a kernel's text without comments and numbers of lines."""
    lines = re.sub(r"^#line .*\n|//.*$", "", source, flags=re.MULTILINE).splitlines()
    return [line.strip() for line in lines if line.strip()]


def host(before: Callable[[], Any], after: Callable[[], Any]) -> tuple[float, float]:
    """Median seconds until a call returns, in turns."""
    times: list[list[float]] = [[], []]
    for turn in range(40):
        for which in (0, 1) if turn % 2 else (1, 0):
            call = (before, after)[which]
            cupy.cuda.Device().synchronize()
            start = time.perf_counter()
            for _ in range(HOST_CALLS // 40):
                call()
            times[which].append((time.perf_counter() - start) / (HOST_CALLS // 40))
    cupy.cuda.Device().synchronize()
    return statistics.median(times[0]), statistics.median(times[1])


def cases(names: Sequence[str]) -> list[Case]:
    """Those of suites; `models` are real models' widths and 8192 rows, and `dtypes` a few of the other dtypes."""
    found: list[Case] = []
    for name in names:
        if name == "models":
            found += grid(
                OPS, ("forward", "backward"), ["bfloat16"], (768, 1152, 1600, 2880, 5120, 7168, 33333), [8192]
            )
        elif name == "dtypes":
            found += grid(OPS, ("forward", "backward"), ["float16", "float32"], (128, 1024, 8192, 65536))
        else:
            found += suite(name)
    return list(dict.fromkeys(found))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--before", type=Path, required=True)
    parser.add_argument("--suite", nargs="*", default=["small", "anchors", "models", "dtypes"])
    parser.add_argument("--changed", action="store_true", help="those alone of which a plan has changed")
    parser.add_argument("--sample", type=int, help="so many shapes of each suite, drawn by --seed")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--seconds", type=float, default=1e9, help="stop after this many")
    arguments = parser.parse_args()
    providers = [provider(load(arguments.before)), provider(cunorm)]
    measured, begun = [], time.perf_counter()
    with lines_to(arguments.out) as write:
        drawn_cases = [drawn(cases([name]), arguments.sample, arguments.seed) for name in arguments.suite]
        every_case = dict.fromkeys(chain.from_iterable(drawn_cases))
        if arguments.changed:
            every_case = [case for case in every_case if case.offset is None and has_changed(case)]
            print(f"{len(every_case)} plans have changed")
        for case in every_case:
            if time.perf_counter() - begun > arguments.seconds:
                write(stopped=f"after {arguments.seconds} s")
                break
            sets = Workload(case).lend("cupy")
            before, after = in_turns(case, *([one.prepare(case, b) for b in sets] for one in providers))
            line = {
                "case": str(case),
                "before_us": round(before * 1e6, 3),
                "after_us": round(after * 1e6, 3),
                "ratio": round(after / before, 4),
            }
            if case.rows <= 512 and case.cols == 1024:
                both = host(*(one.prepare(case, sets[0]) for one in providers))
                line |= {"host_before_us": round(both[0] * 1e6, 2), "host_after_us": round(both[1] * 1e6, 2)}
            measured.append(line)
            write(**line)
            del sets
            cupy.get_default_memory_pool().free_all_blocks()
    slower = [line for line in measured if line["after_us"] - line["before_us"] > max(0.1, 0.01 * line["before_us"])]
    median = statistics.median(line["ratio"] for line in measured)
    mean = statistics.geometric_mean(line["ratio"] for line in measured)
    print(f"{len(measured)} cases, median ratio {median:.4f}, geometric mean {mean:.4f}")
    print(f"slower by more than the larger of 1% and 0.1 us: {len(slower)}")
    for line in slower:
        print(f"  {line['case']}: {line['before_us']} -> {line['after_us']} us ({line['ratio']})")


if __name__ == "__main__":
    main()
