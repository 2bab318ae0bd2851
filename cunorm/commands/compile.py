"""`compile`: the plan, source or resources of the kernels for a problem, or all kernels of rows. Needs no GPU."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import product
from time import perf_counter
from typing import Any

from ..call.checks import must_be_a_dtype
from ..kernel import compile, device, source
from ..linear import plan as linear_plan
from ..linear.problem import LinearProblem
from ..operation import NORMS
from ..plan.plain_problems import whole
from ..plan.plan import plan
from ..plan.problem import ITEMSIZE, Problem
from ..plan.spec import KernelSpec
from ..plan.steps import Step
from .compilation import Compiled, compile_all, compiler
from .info import why_no_compiler, why_no_gpu

OPS = tuple(NORMS)
ROWS = 2**24  # of more rows kernels do not depend on how many
# Every number up to a few for each SM, then by steps: who meets a call of any size has all its kernels.
NUMBERS_OF_ROWS = sorted({*range(1, 600), *(int(2 ** (eighths / 8)) for eighths in range(72, 200))})
DIRECTIONS = ("forward", "backward")
NEEDED = ("op", "direction", "cols", "dtype")
LINEAR = {f"{op}_linear": op for op in OPS}  # norms with the product after them, and their norms


def add_parser(commands) -> None:
    parser = commands.add_parser(
        "compile",
        help="show the plan, source or registers of the kernels for a problem, or compile all kernels of rows",
        description="With --show: print what would run for a problem, on an architecture that need not be that of "
        "this machine. With --all: compile both norms in both directions for rows of --cols, for --arch, or for this "
        "machine's GPU, or for every architecture. The kernels go into the kernel cache, where calls find them. A "
        "kernel that spills registers is a failure.",
    )
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--show", choices=("plan", "source", "ptxas"))
    what.add_argument(
        "--all", action="store_true", help="compile and check; several --cols, --dtype, --arch may follow"
    )
    add_options_of_problems(parser, (*OPS, *LINEAR))
    parser.add_argument("--rows", type=at_least_one, help="of x; for a norm with its product, where it decides")
    parser.add_argument("--out-features", type=at_least_one, help="columns of y of a norm with its product")
    parser.add_argument("--arch", nargs="+", type=int, choices=device.KNOWN, help="default with --show: 90")
    parser.set_defaults(run=lambda arguments: run(parser, arguments))


def add_options_of_problems(parser: argparse.ArgumentParser, ops: Sequence[str] = OPS) -> None:
    """Add the options that say for which calls of the norms kernels are compiled."""
    parser.add_argument("--op", choices=ops)
    parser.add_argument("--direction", choices=DIRECTIONS)
    parser.add_argument("--cols", nargs="+", type=at_least_one, help="elements of a row")
    one_of = {"type": _dtype, "metavar": f"{{{','.join(ITEMSIZE)}}}"}
    parser.add_argument("--dtype", nargs="+", **one_of, help="of x, y and their gradients")
    parser.add_argument("--weight-dtype", **one_of, help="of weight and bias; default: that of --dtype")


def run(parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> int:
    _check(parser, arguments)
    if arguments.all or arguments.show == "ptxas":  # before kernels are planned, which may take minutes
        reason = why_no_compiler()
        if reason:
            print(f"compile: needs CuPy and NVRTC ({reason}): {device.INSTALL}.", file=sys.stderr)
            return 1
    try:
        return _compile_all(arguments) if arguments.all else _show(arguments)
    except RuntimeError as error:  # NVRTC rejects a kernel
        print(f"compile: {error}", file=sys.stderr)
        return 1


def _check(parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> None:
    """Exit with an error that names all that is missing, or what does not go together."""
    if arguments.all:
        if arguments.op or arguments.direction or arguments.rows or arguments.out_features:
            parser.error(
                "--all compiles both norms in both directions: leave --op, --direction, --rows and --out-features out"
            )
        if not arguments.cols:
            parser.error("--all needs --cols, the lengths of rows to compile for")
        return
    is_linear = arguments.op in LINEAR
    for name in ("direction",) if is_linear else ("rows", "out_features"):
        if arguments.op and getattr(arguments, name):
            option = f"--{name.replace('_', '-')}"
            parser.error(f"--show of {arguments.op} does not depend on {option}: leave {option} out")
    needed = ("op", "rows", "cols", "out_features", "dtype") if is_linear else NEEDED
    missing = [f"--{name.replace('_', '-')}" for name in needed if not getattr(arguments, name)]
    if not arguments.show:
        parser.error(f"it needs {', '.join(['--show (plan, source or ptxas)', *missing])}; or --all")
    if missing:
        parser.error(f"--show needs {', '.join(missing)}")
    for name in ("cols", "dtype", "arch"):
        if len(getattr(arguments, name) or ()) > 1:
            parser.error(f"--show takes one --{name}")


def _show(arguments: argparse.Namespace) -> int:
    (cols,), (dtype,), (arch,) = arguments.cols, arguments.dtype, arguments.arch or (90,)
    if arguments.op in LINEAR:
        return _show_linear(arguments, cols, dtype, arch)
    problem = whole(arguments.op, arguments.direction, ROWS, cols, dtype, arguments.weight_dtype)
    solution = plan(problem, device.KNOWN[arch])
    if arguments.show == "plan":
        print(solution.describe())
        print(f"{ROWS} rows are assumed; of many rows the kernel does not depend on how many.")
    elif arguments.show == "source":
        print(_source(solution.steps))
    else:
        print(_resources(solution.steps, arch))
    return 0


def _show_linear(arguments: argparse.Namespace, cols: int, dtype: str, arch: int) -> int:
    """Show what a norm with its product runs on each known GPU of an architecture."""
    problem = linear_problem(arguments, arguments.rows, cols, dtype)
    for target in device.known(arch):
        solution = linear_plan.chosen(problem, target)
        if arguments.show == "plan" or solution is None:
            print(f"{target.name}: {linear_plan.describe(problem, target)}")
        elif arguments.show == "source":
            print(_source(solution.steps))
        else:
            print(_resources(solution.steps, arch))
    return 0


def linear_problem(arguments: argparse.Namespace, rows: int, cols: int, dtype: str) -> LinearProblem:
    """Return a norm with its product, every parameter given, of contiguous arrays."""
    norm, of_norm = LINEAR[arguments.op], arguments.weight_dtype or dtype
    return LinearProblem(
        norm,
        rows,
        cols,
        arguments.out_features,
        dtype,
        ln_weight=of_norm,
        ln_bias=of_norm if norm == "layer_norm" else None,
        bias=True,
        x_stride=cols,
        weight_stride=cols,
    )


def _source(steps: Sequence[Step]) -> str:
    return "\n".join(source.source(step.spec) for step in steps)


def _resources(steps: Sequence[Step], arch: int) -> str:
    lines = [f"{'kernel':<26}{'registers':>10}{'spills, B':>10}{'stack, B':>10}{'shared, B':>10}{'compiled in, s':>16}"]
    for step in steps:
        start = perf_counter()
        used = compile.compile_for(step.spec, arch)
        seconds = perf_counter() - start
        spills = used.spill_stores + used.spill_loads
        lines.append(
            f"{step.spec.kernel:<26}{used.registers:>10}{spills:>10}{used.stack:>10}{used.shared:>10}{seconds:>16.3f}"
        )
    return "\n".join(lines)


def _compile_all(arguments: argparse.Namespace) -> int:
    if arguments.arch or why_no_gpu():
        targets = [gpu for arch in arguments.arch or device.KNOWN for gpu in device.known(arch)]
    else:
        import cupy

        targets = [device.current(cupy.cuda.Device().id)]
    planned = []
    with progress(len(targets), " GPUs planned") as bar:
        for target in targets:
            planned += [(spec, target.arch) for spec in kernels_of(_problems(arguments), target)]
            bar.update()
    return report(planned, keep=True)


def report(planned: Iterable[tuple[KernelSpec, int]], keep: bool) -> int:
    """Compile kernels, each for an architecture, print what came of it, and return the exit status."""
    start = perf_counter()
    work = list(dict.fromkeys(planned))  # GPUs of an architecture share most of them
    with compiler(keep=keep) as compile_one, progress(len(work)) as bar:
        kernels = []
        for compiled in compile_all(work, compile_one):
            kernels.append(compiled)
            bar.update()
    failures = [kernel for kernel in kernels if kernel.fault]
    if failures:
        print(_table(failures))
    most = max((kernel.used.registers for kernel in kernels if kernel.used), default=0)
    print(
        f"{len(kernels)} kernels compiled for {', '.join(dict.fromkeys(f'sm_{arch}' for _, arch in work))}: "
        f"{len(failures)} failures, at most {most} registers, {perf_counter() - start:.1f} s"
    )
    return 1 if failures else 0


def kernels_of(problems: Iterable[Problem], target: device.Device) -> list[KernelSpec]:
    """Return every kernel that the plans of these problems launch, once."""
    return list(dict.fromkeys(step.spec for problem in problems for step in plan(problem, target).steps))


def _problems(arguments: argparse.Namespace) -> list[Problem]:
    """Return the problems of the rows that are asked for, with as many rows as kernels may depend on."""
    problems = [
        whole(op, direction, ROWS, cols, dtype, arguments.weight_dtype)
        for op, direction in product(OPS, DIRECTIONS)
        for cols, dtype in product(arguments.cols, arguments.dtype or ITEMSIZE)
    ]
    return [replace(problem, rows=rows) for problem in problems for rows in NUMBERS_OF_ROWS]


class _NoBar:
    """What a progress bar does where tqdm is not installed."""

    n = 0

    def update(self, count: int = 1) -> None:
        pass

    def write(self, line: str) -> None:
        print(line, flush=True)


@contextmanager
def progress(total: int, unit: str = " kernels") -> Iterator[Any]:
    """Yield a progress bar, on a terminal where tqdm is installed."""
    try:
        from tqdm import tqdm
    except ImportError:
        yield _NoBar()
        return
    with tqdm(total=total, unit=unit, leave=False, disable=None) as bar:
        yield bar


def _table(failures: list[Compiled]) -> str:
    lines = [f"{'arch':<8}{'kernel':<26}{'cols':>8}  {'registers':>9}  fault"]
    for spec, arch, used, fault in failures:
        registers = used.registers if used else "-"
        lines.append(
            f"{f'sm_{arch}':<8}{spec.kernel:<26}{getattr(spec, 'cols', '-'):>8}  {registers:>9}  {fault}\n{'':<8}{spec}"
        )
    return "\n".join(lines)


def _dtype(text: str) -> str:
    if text not in ITEMSIZE:
        raise argparse.ArgumentTypeError(must_be_a_dtype(text))
    return text


def at_least_one(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"must be 1 or more; got {number}")
    return number
