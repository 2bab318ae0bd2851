"""Norm and product of few rows: every division of one launch beside the two launches and the product alone.

    python -m bench.one_launch [--layers 4096x12288 ...] [--rows 1 8 16 32] [--dtype bfloat16] [--op layer_norm]

Graphs over rotating buffers, in turns (cunorm/commands/timing.py), on CuPy arrays. A line for each case has
microseconds, and the time of each division, named by the CTAs of its clusters, over that of the two launches. Before it
is timed y of each division is held against float64. What wins becomes an entry of cunorm/linear/one_launch.TABLES.
"""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy

import cunorm
from bench.environment import environment, this_commit
from bench.results import lines_to
from cunorm.commands.timing import Times, buffers_needed, cupy_timer, in_turns, launches_of_graph
from cunorm.kernel import device, launch
from cunorm.linear import gemm, one_launch
from cunorm.linear.one_launch import Division, LinearProblem
from cunorm.plan.problem import ITEMSIZE

LAYERS = ((768, 2304), (1600, 4800), (2880, 5120), (4096, 12288), (5120, 7168), (7168, 2112), (8192, 10240))
EPS = 1e-5
ERROR = {"float16": 2e-3, "bfloat16": 1.6e-2}  # relative to the largest of y
SECONDS = 0.3  # for the turns of a case

Arrays = dict[str, Any]


def arrays_of(problem: LinearProblem) -> Arrays:
    import cupy

    def normal(*shape: int, scale: float = 1.0, shift: float = 0.0) -> Any:
        return (cupy.random.standard_normal(shape, dtype="float32") * scale + shift).astype(problem.dtype)

    rows, cols, outs = problem.rows, problem.cols, problem.outs
    arrays = {"x": normal(rows, cols, shift=0.5), "weight": normal(outs, cols, scale=cols**-0.5)}
    arrays |= {"bias": normal(outs), "ln_weight": normal(cols, scale=0.3, shift=1.0)}
    return arrays | ({"ln_bias": normal(cols)} if problem.ln_bias else {})


def two_launches(problem: LinearProblem, arrays: Arrays) -> Callable[[], Any]:
    norm = [arrays["x"], None, arrays["ln_weight"]]

    def call() -> Any:
        z = cunorm.layer_norm(*norm, arrays["ln_bias"], EPS) if problem.ln_bias else cunorm.rms_norm(*norm, EPS)
        return gemm.multiply(z, arrays["weight"].T, arrays["bias"])

    return call


def one(problem: LinearProblem, arrays: Arrays, division: Division, gpu: device.Device) -> Callable[[], Any]:
    import cupy

    plan = one_launch.plan(problem, gpu, division)

    def call() -> Any:
        y = cupy.empty((problem.rows, problem.outs), arrays["x"].dtype)
        present = {name: array.data.ptr for name, array in (arrays | {"y": y}).items()}
        pointers = [present.get(name, 0) for name in plan.problem.pointers]
        launch.run(plan, y.data.device_id, cupy.cuda.get_current_stream().ptr, (*pointers, EPS))
        return y

    return call


def error(problem: LinearProblem, arrays: Arrays, y: Any) -> float:
    """Return the largest error of y over the largest of y, both against float64."""
    wide = {name: array.astype("float64") for name, array in arrays.items()}
    x = wide["x"] - (wide["x"].mean(1, keepdims=True) if problem.norm == "layer_norm" else 0)
    z = x / numpy.sqrt((x * x).mean(1, keepdims=True) + EPS) * wide["ln_weight"] + wide.get("ln_bias", 0)
    exact = z @ wide["weight"].T + wide["bias"]
    return float(abs(y.astype("float64") - exact).max() / abs(exact).max())


def measure(problem: LinearProblem, gpu: device.Device) -> dict[str, Any]:
    moved = ITEMSIZE[problem.dtype] * (problem.cols * problem.outs + problem.rows * (problem.cols + problem.outs))
    sets = [arrays_of(problem) for _ in range(buffers_needed(moved))]
    divisions = {division.cluster: division for division in one_launch.divisions(problem, gpu)}
    errors = {
        cluster: error(problem, sets[0], one(problem, sets[0], division, gpu)())
        for cluster, division in divisions.items()
    }
    wrong = {cluster: off for cluster, off in errors.items() if not off < ERROR[problem.dtype]}
    if wrong:
        raise AssertionError(f"{problem}: errors of y by the CTAs of a cluster: {wrong}")
    calls = {
        "product": [lambda s=s: gemm.multiply(s["x"], s["weight"].T, s["bias"]) for s in sets],
        "two launches": [two_launches(problem, s) for s in sets],
    }
    calls |= {f"cluster {c}": [one(problem, s, division, gpu) for s in sets] for c, division in divisions.items()}
    rounds = -(-launches_of_graph(moved) // len(sets))
    taken = in_turns([cupy_timer(of_sets, rounds) for of_sets in calls.values()], SECONDS)
    medians = {}
    for name, times in zip(calls, taken, strict=True):
        if not isinstance(times, Times):
            raise times
        medians[name] = times.median
    ratios = {name: round(median / medians["two launches"], 4) for name, median in medians.items()}
    return {
        "op": problem.norm,
        "dtype": problem.dtype,
        "rows": problem.rows,
        "in": problem.cols,
        "out": problem.outs,
        "us": {name: round(median * 1e6, 2) for name, median in medians.items()},
        "over_two_launches": ratios,
    }


def layer(text: str) -> tuple[int, int]:
    cols, _, outs = text.partition("x")
    return int(cols), int(outs)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", nargs="+", type=layer, default=LAYERS, metavar="INxOUT")
    parser.add_argument("--rows", nargs="+", type=int, default=(1, 8, 16, 32))
    parser.add_argument("--dtype", choices=list(ERROR), default="bfloat16")
    parser.add_argument("--op", choices=("layer_norm", "rms_norm"), default="layer_norm")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    gpu = device.current(0)
    with lines_to(arguments.out) as write:
        write(
            **environment(this_commit(), {}, {}) | {"command": "python -m bench.one_launch " + shlex.join(sys.argv[1:])}
        )
        for cols, outs in arguments.layers:
            for rows in arguments.rows:
                dtype, ln_bias = arguments.dtype, arguments.dtype if arguments.op == "layer_norm" else None
                problem = LinearProblem(
                    arguments.op, rows, cols, outs, dtype, dtype, ln_bias, True, x_stride=cols, weight_stride=cols
                )
                reason = one_launch.why_not(problem, gpu)
                of_case = {"rows": rows, "in": cols, "out": outs, "left_out": reason}
                write(**of_case if reason else measure(problem, gpu))


if __name__ == "__main__":
    main()
