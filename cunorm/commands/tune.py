"""`tune`: looks on this machine's GPU for faster launches of some calls, and keeps what is faster for later processes.

What is kept are tables of launches (plan/tables.py) in the user's cache, which every framework and `compile --all`
read. Bits of y, mean, rstd and dx of a norm never depend on them; the last one of dweight and dbias may, and that of y
of a norm with its product, which is one launch or two.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import product
from math import prod
from pathlib import Path
from time import perf_counter
from typing import Any, NamedTuple

from ..kernel import device
from ..kernel.cache import cache_directory
from ..linear import plan as linear_plan
from ..linear.problem import LinearProblem
from ..plan import tables
from ..plan.candidates import candidates
from ..plan.choose import choose
from ..plan.plain_problems import whole
from ..plan.plan import plan, recorded
from ..plan.problem import Problem
from ..plan.spec import NormSpec
from .compile import DIRECTIONS, LINEAR, OPS, add_options_of_problems, at_least_one, linear_problem, progress
from .info import why_no_compiler, why_no_gpu
from .search import Found, search
from .search_linear import FoundLinear, search_linear, why_not

MOST = 64  # candidates of a problem, those with the fewest differences from today's
INTERRUPTED = 130  # the exit status of a process that Ctrl-C ends


class Task(NamedTuple):
    """A problem that a table may answer, and by which key; `spec` is the kernel of its rows today."""

    problem: Problem
    layout: str
    spec: NormSpec
    rows_of_sm: float

    @property
    def key(self) -> tuple[object, ...]:
        return self.layout, tables.shape_key(self.spec, tables.is_full(self.spec)), self.rows_of_sm

    @property
    def name(self) -> str:
        problem = self.problem
        return f"{problem.operation.norm} {problem.direction} {problem.row_dtype} {problem.rows} x {problem.cols}"

    def search(self, gpu: device.Device, step: Callable[[], None]) -> Found:
        """Time other launches beside today's."""
        others = candidates(self.problem, choose(self.problem, gpu), gpu, MOST)
        return search(self.problem, plan(self.problem, gpu), others, gpu, step)

    def merged(self, table: tables.Table, found: Found) -> tables.Table:
        """Return the table with what a search found."""
        better = None if found.better is None else tables.Launch.of(found.better)
        return table.with_point(self.layout, self.spec, self.rows_of_sm, better)


class LinearTask(NamedTuple):
    """A norm with its product: one launch, or two by one of cuBLASLt's algorithms."""

    problem: LinearProblem

    @property
    def key(self) -> tuple[object, ...]:
        return self.problem.rows, self.problem.cols, self.problem.outs

    @property
    def name(self) -> str:
        problem = self.problem
        return f"{problem.norm}_linear {problem.dtype} {problem.rows} x {problem.cols} -> {problem.outs}"

    def search(self, gpu: device.Device, step: Callable[[], None]) -> FoundLinear:
        """Time other ways beside today's."""
        return search_linear(self.problem, gpu, step)

    def merged(self, table: tables.Table, found: FoundLinear) -> tables.Table:
        """Return the table with what a search found."""
        if found.better is None:
            return table
        shape = self.problem.cols, self.problem.outs, self.problem.rows
        if linear_plan.rows_of(self.problem):
            table = table.with_product(*shape, found.better.way)
        return table.with_algorithm(found.cublas, *shape, found.better.algorithm) if found.better.algorithm else table


class _TimeIsUpError(Exception):
    """--seconds have passed."""


def add_parser(commands) -> None:
    parser = commands.add_parser(
        "tune",
        help="look for faster launches of some calls on this GPU",
        description="Compile other launches of the same kernels and time them beside today's: for calls of --cols, "
        "--rows and --dtype, or for the calls that one call of --model makes. Without --op and "
        "--direction both norms and both directions are tuned. With --op layer_norm_linear or "
        "rms_norm_linear the norm and its product in one launch and overlapped, and the product by other algorithms of "
        "cuBLASLt, are timed beside what runs today. What is faster by more than the spread of the measurement is kept "
        "in the folder of the kernel cache, where later processes find it. The bits of y and dx of a norm stay the "
        "same; the last one of y of a product may change.",
    )
    add_options_of_problems(parser, (*OPS, *LINEAR))
    parser.add_argument("--out-features", type=at_least_one, help="columns of y of a norm with its product")
    parser.add_argument("--rows", nargs="+", type=at_least_one, help="rows of a call")
    parser.add_argument(
        "--model",
        metavar="PACKAGE:FUNCTION",
        help="a function without arguments that runs a step, in any framework: the calls that it makes are tuned",
    )
    parser.add_argument("--seconds", type=float, default=float("inf"), help="stop after so many")
    parser.set_defaults(run=lambda arguments: run(parser, arguments))


def run(parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> int:
    _check(parser, arguments)
    begun = perf_counter()
    reason = why_no_gpu() or why_no_compiler()
    if reason:
        return _fails(f"needs a GPU and NVRTC ({reason}): {device.INSTALL}.")
    if reason := _why_not_written():
        return _fails(f"{reason}.")
    gpu = _gpu()
    problems: Sequence[Problem | LinearProblem]
    try:
        problems = _of_model(arguments.model) if arguments.model else list(_of_options(arguments))
    except _ModelError as error:
        return _fails(f"{error}.", 2)
    except KeyboardInterrupt:
        return _fails("interrupted before anything was measured.", INTERRUPTED)
    tasks = _tasks(problems, gpu)
    if len(tasks) < len(problems):
        print(f"{len(problems)} problems, of which {len(tasks)} have launches to choose from, once each.")
    return _tune(tasks, gpu, begun + arguments.seconds)


def _check(parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> None:
    names = ("op", "direction", "cols", "rows", "dtype", "weight_dtype", "out_features")
    given = [f"--{name.replace('_', '-')}" for name in names if getattr(arguments, name)]
    if arguments.model:
        if given:
            parser.error(f"--model says itself which calls there are: leave {', '.join(given)} out")
        if not all(part.strip() for part in arguments.model.partition(":")[::2]):
            parser.error(f"--model must be PACKAGE:FUNCTION; got {arguments.model!r}")
    else:
        is_linear = arguments.op in LINEAR
        if is_linear and arguments.direction:
            parser.error(f"--op {arguments.op} is tuned forward alone: leave --direction out")
        if arguments.out_features and not is_linear:
            parser.error(f"--out-features goes with --op {' or '.join(LINEAR)}: leave it out")
        needed = ("cols", "rows", "dtype", *(["out_features"] if is_linear else []))
        missing = [f"--{name.replace('_', '-')}" for name in needed if not getattr(arguments, name)]
        if missing:
            parser.error(f"it needs {', '.join(missing)}; or --model")
    if not arguments.seconds > 0:
        parser.error(f"--seconds must be more than 0; got {arguments.seconds}")
    try:
        read = tables.reads_the_users()
    except ValueError as error:
        parser.error(str(error))
    if not read:
        parser.error(f"{tables.TUNE_VARIABLE}=0 leaves the tables that it makes unread: unset it")


def _gpu() -> device.Device:
    import cupy

    return device.current(cupy.cuda.Device().id)


def _fails(text: str, status: int = 1) -> int:
    print(f"tune: {text}", file=sys.stderr)
    return status


def _why_not_written() -> str:
    """Return why tables cannot be kept; empty if they can."""
    try:
        folder = cache_directory() / "tables"
    except FileNotFoundError as error:
        return str(error)
    try:
        tables.write_file(folder / "probe", b"")
        (folder / "probe").unlink()
    except OSError as error:
        return f"{folder} cannot be written ({error.strerror}); CUNORM_CACHE_DIR may name another folder"
    return ""


def _of_options(arguments: argparse.Namespace) -> Iterator[Problem | LinearProblem]:
    if arguments.op in LINEAR:
        for rows, cols, dtype in product(arguments.rows, arguments.cols, arguments.dtype):
            yield linear_problem(arguments, rows, cols, dtype)
        return
    ops = [arguments.op] if arguments.op else OPS
    directions = [arguments.direction] if arguments.direction else DIRECTIONS
    for op, direction, cols, rows, dtype in product(ops, directions, arguments.cols, arguments.rows, arguments.dtype):
        yield whole(op, direction, rows, cols, dtype, arguments.weight_dtype)


class _ModelError(Exception):
    """The function of --model cannot be had, or fails."""


def _of_model(name: str) -> list[Problem]:
    """Return the problems of the calls that a function makes, each once."""
    package, _, function = name.partition(":")
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # JAX leaves memory to the search
    with recorded() as problems:
        try:
            step: Any = importlib.import_module(package)
            for part in function.split("."):
                step = getattr(step, part)
        except Exception as error:
            raise _ModelError(f"--model {name} cannot be had: {type(error).__name__}: {error}") from error
        try:
            step()
        except Exception as error:
            place = traceback.extract_tb(error.__traceback__)[-1]
            reason = f"{type(error).__name__}: {error} ({place.filename}:{place.lineno})"
            raise _ModelError(f"{name}() failed: {reason}") from error
    if not problems:
        raise _ModelError(f"{name}() made no call of cunorm that runs on a GPU")
    torch = sys.modules.get("torch")
    if torch is not None:
        torch.cuda.empty_cache()  # what the step has used goes back to the GPU
    return list(dict.fromkeys(problems))


def task_of(problem: Problem, gpu: device.Device) -> Task | None:
    """Return what there is to search for; None where no table may answer the problem, or its rows have one launch."""
    spec = choose(problem, gpu)
    # Rows at odd addresses take what was measured of others, and those on fewer SMs what was measured on all.
    if not isinstance(spec, NormSpec) or not spec.aligned or problem.sm_margin:
        return None
    layout = tables.layout_of(spec)
    if layout is None or not candidates(problem, spec, gpu, 1):
        return None
    return Task(problem, layout, spec, tables.rows_of_sm(problem, gpu))


def _tasks(problems: Iterable[Problem | LinearProblem], gpu: device.Device) -> list[Task | LinearTask]:
    """Return the tasks of all problems, one of those with equal keys."""
    tasks: list[Task | LinearTask] = []
    for problem in problems:
        if not isinstance(problem, LinearProblem):
            task = task_of(problem, gpu)
            tasks += [task] if task else []
        elif reason := why_not(problem, gpu):
            print(f"{LinearTask(problem).name}: left out, {reason}")
        else:
            tasks.append(LinearTask(problem))
    return list({task.key: task for task in tasks}.values())


def _tune(tasks: Sequence[Task | LinearTask], gpu: device.Device, end: float) -> int:
    """Search for each, and keep what was found after each."""
    path = _path(gpu)
    gains: list[float] = []
    done, ended, status = 0, "", 0
    with progress(2 * MOST * len(tasks)) as bar:

        def step() -> None:
            bar.update()
            if perf_counter() > end:
                raise _TimeIsUpError

        try:
            for place, task in enumerate(tasks):
                try:
                    found = task.search(gpu, step)
                except MemoryError:
                    bar.write(f"{task.name}: left out, the GPU's memory does not suffice")
                    continue
                keep(path, gpu, task, found)
                gains.append(found.today.median / found.best.median)
                done += 1
                bar.write(_line(task.name, found))
                bar.update(max(0, 2 * MOST * (place + 1) - bar.n))
        except _TimeIsUpError:
            ended = "the time is up"
        except KeyboardInterrupt:
            ended, status = "interrupted", INTERRUPTED
        except RuntimeError as error:  # the kernels cannot be kept, or the GPU fails
            return _fails(f"{str(error).rstrip('.')}; what was measured before, {done} of {len(tasks)}, is kept.")
        except OSError as error:
            return _fails(f"{path} cannot be written: {error}.")
    faster = [gain for gain in gains if gain > 1]
    mean = f", by {100 * (prod(faster) ** (1 / len(faster)) - 1):.1f}% on average" if faster else ""
    if ended:
        print(f"tune: {ended} after {done} of {len(tasks)}; what was measured is kept.")
    print(f"{len(faster)} of {done} launches are faster than before{mean}" + (f"; {path}" if done else ""))
    return status


def keep(path: Path, gpu: device.Device, task: Task | LinearTask, found: Any) -> None:
    """Write what a search found into a table, and let the next plans of this process see it."""
    table = tables.read(path) if path.exists() else None
    if table is None or not table.serves(gpu):
        table = tables.Table(gpu.arch, gpu.bandwidth / gpu.sms, {})
    tables.write(path, task.merged(table, found))
    tables.forget()
    plan.cache_clear()
    linear_plan.chosen.cache_clear()


def _path(gpu: device.Device) -> Path:
    """Return the path of the user's table of such GPUs, whether it is there or is to be made."""
    folder = cache_directory() / "tables"
    existing = (path for path, _ in tables.tables_of(gpu) if path.parent == folder)
    return next(existing, folder / f"sm_{gpu.arch}_{gpu.bandwidth / gpu.sms:.1f}_gbs.json")


def _line(name: str, found: Found | FoundLinear) -> str:
    today, best = found.today.median * 1e6, found.best.median * 1e6
    now = f", now {best:.2f} us" if found.better else ""
    return f"{name}: {today:.2f} us{now} ({found.tried} launches tried, {found.spilled} spill)"
