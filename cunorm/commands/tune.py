"""`tune`: looks on this machine's GPU for faster launches of some calls, and keeps what is faster for later processes.

What is kept are tables of launches (plan/tables.py) in the user's cache, which every framework and `compile --all`
read. Bits of y, mean, rstd and dx never depend on them; the last one of dweight and dbias may.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
import traceback
from collections.abc import Iterable, Iterator
from itertools import product
from math import prod
from pathlib import Path
from time import perf_counter
from typing import Any, NamedTuple

from ..kernel import device
from ..kernel.cache import cache_directory
from ..plan import tables
from ..plan.candidates import candidates
from ..plan.choose import choose
from ..plan.plain_problems import whole
from ..plan.plan import plan, recorded
from ..plan.problem import Problem
from ..plan.spec import NormSpec
from . import matrix
from .compile import DIRECTIONS, add_options_of_problems, at_least_one, progress
from .info import why_no_compiler, why_no_gpu
from .search import Found, search

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


class _TimeIsUpError(Exception):
    """--seconds have passed."""


def add_parser(commands) -> None:
    parser = commands.add_parser(
        "tune",
        help="look for faster launches of some calls on this GPU",
        description="Compile other launches of the same kernels and time them beside today's: for calls of --cols, "
        "--rows and --dtype, or for the calls that one call of --model makes. Without --op and "
        "--direction both norms and both directions are tuned. What is faster by more than the spread "
        "of the measurement is kept in the folder of the kernel cache, where later processes find it. "
        "The bits of y and dx stay the same.",
    )
    add_options_of_problems(parser)
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
    try:
        problems = list(_of_model(arguments.model) if arguments.model else _of_options(arguments))
    except _ModelError as error:
        return _fails(f"{error}.", 2)
    except KeyboardInterrupt:
        return _fails("interrupted before anything was measured.", INTERRUPTED)
    tasks = _tasks(problems, gpu)
    if len(tasks) < len(problems):
        print(f"{len(problems)} problems, of which {len(tasks)} have launches to choose from, once each.")
    return _tune(tasks, gpu, begun + arguments.seconds)


def _check(parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> None:
    names = ("op", "direction", "cols", "rows", "dtype", "weight_dtype")
    given = [f"--{name.replace('_', '-')}" for name in names if getattr(arguments, name)]
    if arguments.model:
        if given:
            parser.error(f"--model says itself which calls there are: leave {', '.join(given)} out")
        if not all(part.strip() for part in arguments.model.partition(":")[::2]):
            parser.error(f"--model must be PACKAGE:FUNCTION; got {arguments.model!r}")
    else:
        missing = [f"--{name}" for name in ("cols", "rows", "dtype") if not getattr(arguments, name)]
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
    """Why tables cannot be kept; empty if they can."""
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


def _of_options(arguments: argparse.Namespace) -> Iterator[Problem]:
    ops = [arguments.op] if arguments.op else matrix.OPS
    directions = [arguments.direction] if arguments.direction else DIRECTIONS
    for op, direction, cols, rows, dtype in product(ops, directions, arguments.cols, arguments.rows, arguments.dtype):
        yield whole(op, direction, rows, cols, dtype, arguments.weight_dtype)


class _ModelError(Exception):
    """The function of --model cannot be had, or fails."""


def _of_model(name: str) -> list[Problem]:
    """The problems of the calls that a function makes, each once."""
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
    """What there is to search for; None where no table may answer the problem, or its rows have one launch."""
    spec = choose(problem, gpu)
    # Rows at odd addresses take what was measured of others, and those on fewer SMs what was measured on all.
    if not isinstance(spec, NormSpec) or not spec.aligned or problem.sm_margin:
        return None
    layout = tables.layout_of(spec)
    if layout is None or not candidates(problem, spec, gpu, 1):
        return None
    return Task(problem, layout, spec, tables.rows_of_sm(problem, gpu))


def _tasks(problems: Iterable[Problem], gpu: device.Device) -> list[Task]:
    """Of all problems, of equal keys one."""
    tasks = [task for problem in problems if (task := task_of(problem, gpu)) is not None]
    return list({task.key: task for task in tasks}.values())


def _tune(tasks: list[Task], gpu: device.Device, end: float) -> int:
    """Search for each, and keep what was found after each."""
    path = _path(gpu)
    gains: list[float] = []
    done, left_out, ended, status = 0, 0, "", 0
    with progress(2 * MOST * len(tasks)) as bar:

        def step() -> None:
            bar.update()
            if perf_counter() > end:
                raise _TimeIsUpError

        try:
            for place, task in enumerate(tasks):
                try:
                    found = search(
                        task.problem,
                        plan(task.problem, gpu),
                        candidates(task.problem, choose(task.problem, gpu), gpu, MOST),
                        gpu,
                        step,
                    )
                except MemoryError:
                    left_out += 1
                    bar.write(f"{_name(task.problem)}: left out, the GPU's memory does not suffice")
                    continue
                keep(path, gpu, task, found)
                gains.append(found.today.median / found.best.median)
                done += 1
                bar.write(_line(task.problem, found))
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


def keep(path: Path, gpu: device.Device, task: Task, found: Found) -> None:
    """Write what a search found into a table, and let the next plans of this process see it."""
    table = tables.read(path) if path.exists() else None
    if table is None or not table.serves(gpu):
        table = tables.Table(gpu.arch, gpu.bandwidth / gpu.sms, {})
    better = None if found.better is None else tables.Launch.of(found.better)
    tables.write(path, table.with_point(task.layout, task.spec, task.rows_of_sm, better))
    tables.forget()
    plan.cache_clear()


def _path(gpu: device.Device) -> Path:
    """The user's table of such GPUs, there or to be made."""
    folder = cache_directory() / "tables"
    existing = (path for path, _ in tables.tables_of(gpu) if path.parent == folder)
    return next(existing, folder / f"sm_{gpu.arch}_{gpu.bandwidth / gpu.sms:.1f}_gbs.json")


def _name(problem: Problem) -> str:
    norm = problem.operation.norm
    return f"{norm} {problem.direction} {problem.row_dtype} {problem.rows} x {problem.cols}"


def _line(problem: Problem, found: Found) -> str:
    today, best = found.today.median * 1e6, found.best.median * 1e6
    now = f", now {best:.2f} us" if found.better else ""
    return f"{_name(problem)}: {today:.2f} us{now} ({found.tried} launches tried, {found.spilled} spill)"
