"""Compare two commits of cunorm in turns: `python -m bench.before_after --before DIR [--changed] [--out FILE]`.

DIR is a checkout of the earlier commit. Its package is loaded under another name, so that both work on the same buffers
in one process. The problems are those of bench.freeze: the bench's suites, the compile matrix, and named and drawn
operations, fused and in FP8. Each problem has a line with the median of a call before and after in us, by CUDA graphs
over rotating buffers (cold L2) that are replayed in turns.
"""

from __future__ import annotations

import argparse
import importlib
import random
import shutil
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import cupy

from bench import freeze
from bench.results import lines_to
from cunorm.commands import timing
from cunorm.commands.search import SCALARS, Buffers
from cunorm.plan.steps import Plan

NAME = "cunorm_before"
GROUPS = ("suites", "operations", "matrix", "drawn")
SECONDS = 0.12  # for the replays of a problem
MOST_BYTES = 6e9  # problems whose calls move more are left out

Key = tuple[str, str]  # group and name, as bench.freeze gives them


def load(checkout: Path) -> None:
    """Make the package of a checkout importable as `cunorm_before`, with its kernels and its bench.freeze."""
    folder = Path(tempfile.mkdtemp())
    package = folder / NAME
    shutil.copytree(checkout / "cunorm", package)
    shutil.copytree(checkout / "kernels_cu", package / "kernels_cu", dirs_exist_ok=True)
    for path in package.rglob("*.py"):
        path.write_text(path.read_text().replace('"cunorm.', f'"{NAME}.'))
    for name, path in (("freeze", "bench/freeze.py"), ("matrix", "tests/kernels/matrix.py")):
        if (checkout / path).exists():  # the matrix of earlier checkouts is in their package
            text = (checkout / path).read_text().replace("from cunorm", f"from {NAME}")
            (folder / f"{NAME}_{name}.py").write_text(
                text.replace("    import matrix", f"    import {NAME}_matrix as matrix")
            )
    sys.path.insert(0, str(folder))


def problems(package: str, names: ModuleType, groups: tuple[str, ...]) -> dict[Key, Any]:
    """Return the problems for this GPU that a package's own bench.freeze names."""
    gpu = importlib.import_module(f"{package}.kernel.device").current(0)
    planning = importlib.import_module(f"{package}.plan.plan")
    real = planning.plan
    planning.plan = lambda problem, device: problem
    sys.modules["problems"] = SimpleNamespace(DEVICES={gpu.name: gpu})  # type: ignore[assignment]
    try:
        named = (((group.partition(", ")[2], key), problem) for group, key, problem in names.solutions())
        return {key: problem for key, problem in named if key[0] in groups}
    finally:
        planning.plan = real


def plan_of(package: str, problem: Any) -> Any:
    gpu = importlib.import_module(f"{package}.kernel.device").current(0)
    try:
        return importlib.import_module(f"{package}.plan.plan").plan(problem, gpu)
    except NotImplementedError:
        return None


def launches(plan: Any) -> list[tuple]:
    """Return what decides the speed of a plan's launches besides the machine code, without any names."""
    return [freeze.launch_of(step, plan) for step in plan.steps]


def times(before: Any, after: Plan) -> tuple[float, float]:
    """Return the median seconds of a call of each, with the earlier one at the first and the last place."""
    buffers = Buffers(after.problem)
    run = importlib.import_module(f"{NAME}.kernel.launch").run
    workspace = cupy.empty(max(1, before.workspace), "uint8")
    scalars = [SCALARS.get(name, 0.5) for name in after.problem.scalars]

    def call(arrays: dict[str, Any]) -> timing.Call:
        arguments = (*(arrays[name].data.ptr for name in after.problem.pointers), *scalars)
        return lambda: run(before, 0, cupy.cuda.get_current_stream().ptr, arguments, workspace.data.ptr)

    rounds = -(-timing.launches_of_graph(after.problem.bytes_moved) // len(buffers.sets))
    earlier = timing.cupy_timer([call(arrays) for arrays in buffers.sets], rounds)
    medians = []
    for taken in timing.in_turns([earlier, buffers.timer(after), earlier], SECONDS):
        if isinstance(taken, Exception):
            raise taken
        medians.append(taken.median)
    return (medians[0] + medians[2]) / 2, medians[1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--before", type=Path, required=True)
    parser.add_argument("--groups", nargs="+", choices=GROUPS, default=GROUPS)
    parser.add_argument("--changed", action="store_true", help="only problems whose launches have changed")
    parser.add_argument("--sample", type=int, help="so many problems of each group, drawn by --seed")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--seconds", type=float, default=1e9, help="stop after this many")
    arguments = parser.parse_args()
    load(arguments.before)
    sys.path[:0] = [str(freeze.TESTS), *map(str, freeze.TESTS.iterdir())]
    groups = tuple(arguments.groups)
    after = problems("cunorm", freeze, groups)
    before = problems(NAME, importlib.import_module(f"{NAME}_freeze"), groups)
    common = [key for key in after if key in before and after[key].bytes_moved <= MOST_BYTES]
    random.Random(arguments.seed).shuffle(common)
    counts, ratios, begun = defaultdict(int), defaultdict(list), time.perf_counter()
    with lines_to(arguments.out) as write:
        for key in common:
            if time.perf_counter() - begun > arguments.seconds:
                write(stopped=f"after {arguments.seconds} s")
                break
            plans = plan_of(NAME, before[key]), plan_of("cunorm", after[key])
            if None in plans or (arguments.changed and launches(plans[0]) == launches(plans[1])):
                continue
            counts[key[0]] += 1
            if arguments.sample and counts[key[0]] > arguments.sample:
                continue
            earlier, later = times(*plans)
            ratios[key[0]].append((later / earlier, key[1]))
            write(group=key[0], problem=key[1], before_us=round(earlier * 1e6, 3), after_us=round(later * 1e6, 3))
            cupy.get_default_memory_pool().free_all_blocks()
    for group, of_group in ratios.items():
        mean, worst = statistics.geometric_mean(ratio for ratio, _ in of_group), max(of_group)
        print(f"{group}: time {mean:.4f} of before, {len(of_group)} problems, worst {worst[0]:.3f} {worst[1]}")


if __name__ == "__main__":
    main()
