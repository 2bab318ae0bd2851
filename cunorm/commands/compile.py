"""`compile`: the plan, the CUDA source or the resources of the kernels for a problem. Needs no GPU."""

from __future__ import annotations

import argparse
import sys
from time import perf_counter

from .. import device, kernels
from ..plan import Plan, plan
from ..problem import ITEMSIZE, Problem

ROWS = 16384  # kernels do not depend on it; grids in a plan do


def add_parser(commands) -> None:
    parser = commands.add_parser(
        "compile",
        help="show the plan, source or registers of the kernels for a problem",
        description="What would run for a problem, on an architecture that need not be that of this machine.",
    )
    parser.add_argument("--op", required=True, choices=("layer_norm", "rms_norm"))
    parser.add_argument("--direction", required=True, choices=("forward", "backward"))
    parser.add_argument("--cols", required=True, type=_cols, help="elements of a row")
    parser.add_argument("--dtype", required=True, choices=ITEMSIZE, help="of x, y and their gradients")
    parser.add_argument("--weight-dtype", choices=ITEMSIZE, help="of weight and bias; default: that of --dtype")
    parser.add_argument("--arch", type=int, default=90, choices=device.KNOWN, help="default: 90")
    parser.add_argument("--show", required=True, choices=("plan", "source", "ptxas"))
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    weight = arguments.weight_dtype or arguments.dtype
    problem = Problem.whole(arguments.op, arguments.direction, ROWS, arguments.cols, arguments.dtype, weight)
    solution = plan(problem, device.KNOWN[arguments.arch])
    if arguments.show == "plan":
        print(solution.describe())
    elif arguments.show == "source":
        print("\n".join(kernels.source(step.spec) for step in solution.steps))
    else:
        try:
            print(_resources(solution))
        except ImportError as error:
            print(
                f"compile: --show ptxas needs CuPy and NVRTC ({error}): pip install 'cunorm[cuda13]'.", file=sys.stderr
            )
            return 1
        except RuntimeError as error:  # NVRTC is not found, or rejects the kernel
            print(f"compile: {error}", file=sys.stderr)
            return 1
    return 0


def _resources(solution: Plan) -> str:
    lines = [f"{'kernel':<26}{'registers':>10}{'spills, B':>10}{'stack, B':>10}{'shared, B':>10}{'compiled in, s':>16}"]
    for step in solution.steps:
        start = perf_counter()
        _, used = kernels.compile_for(step.spec, solution.device.arch)
        seconds = perf_counter() - start
        spills = used.spill_stores + used.spill_loads
        lines.append(
            f"{step.spec.kernel:<26}{used.registers:>10}{spills:>10}{used.stack:>10}{used.shared:>10}{seconds:>16.3f}"
        )
    return "\n".join(lines)


def _cols(text: str) -> int:
    cols = int(text)
    if cols < 1:
        raise argparse.ArgumentTypeError(f"must be 1 or more; got {cols}")
    return cols
