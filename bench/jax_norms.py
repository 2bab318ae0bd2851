"""Compare the JAX adapter with the same kernels under CuPy and with XLA's own, and measure what it costs to compile.

    python -m bench.jax_norms [speed|layers|all] [--out FILE]

`speed` is kernel time over rotating buffers: XLA runs a loop within one jit, each call ordered after the one before,
and CuPy a CUDA graph, over the same arrays in turns. `layers` is a model of 48 norms, forward and backward. Each
provider compiles it in two processes: the first has empty caches, the second has what the first left on disk.
"""

from __future__ import annotations

import argparse
import datetime
import itertools
import json
import math
import os
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from bench.results import lines_to

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # CuPy needs memory too

ROWS, COLUMNS = 16384, (1024, 4096, 8192, 16384, 65536)
SECONDS, REPEATS = 0.2, 5  # seconds of a loop, and loops whose median counts
TURN_BYTES = 1.6e9  # a turn of the loop moves at least these, in about 0.4 ms, so that its overhead of 3 us is small
LAYERS, LAYER_SHAPE = 48, (4096, 1024)
PROVIDERS = ("cunorm", "XLA")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", nargs="?", choices=("speed", "layers", "all"), default="all")
    parser.add_argument("--out", type=Path, default=Path("bench/results/jax/norms.jsonl"))
    parser.add_argument("--compile", choices=PROVIDERS, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.compile:
        print(json.dumps(compile_layers(arguments.compile)))
        return
    with lines_to(arguments.out) as write:
        if arguments.part != "speed":  # before this process takes the GPU's memory
            layers(write)
        write("run", **environment("bench.jax_norms"))
        if arguments.part != "layers":
            speed(write)


def environment(module: str) -> dict[str, Any]:
    import cupy
    import jax

    import cunorm
    from cunorm.jax.xla import target as choice

    return {
        "date": datetime.date.today().isoformat(),
        "gpu": cupy.cuda.runtime.getDeviceProperties(0)["name"].decode(),
        "driver": cupy.cuda.runtime.driverGetVersion(),
        "nvrtc": ".".join(map(str, cupy.cuda.nvrtc.getVersion())),
        "cupy": cupy.__version__,
        "jax": jax.__version__,
        "cunorm": cunorm.__version__,
        "xla_call": choice.call("bench")._asdict(),
        "command": shlex.join(["python", "-m", module, *sys.argv[1:]]),
    }


# Kernel time.


def speed(write: Callable[..., None]) -> None:
    import gc

    from bench import check, timing
    from bench.suites import Case
    from bench.workload import Workload, to_cupy

    for cols in COLUMNS:
        for direction in ("forward", "backward"):
            case = Case("layer_norm", direction, ROWS, cols, "bfloat16")
            workload = Workload(case)
            arrays = ("x", "weight", "bias") if direction == "forward" else ("dy", "x", "weight", "mean", "rstd")
            copies = math.ceil(TURN_BYTES / (case.bytes_moved * len(workload.sets))) - 1
            workload.sets += [_copied(buffers) for buffers in workload.sets * copies]
            cupy_sets, jax_sets = (
                [tuple(vars(buffers)[name] for name in arrays) for buffers in workload.lend(library)]
                for library in ("cupy", "jax")
            )
            functions = {"cunorm": _cunorm(case), "XLA": _xla(case)}
            measured = {"CuPy": _on_cupy(case, cupy_sets)}
            for name, function in functions.items():
                measured[name] = loop_time(function, jax_sets, case.bytes_moved / 2.5e12)
            # CuPy is measured before and after the others, in case the GPU became faster or slower meanwhile.
            measured["CuPy"] = min(measured["CuPy"], _on_cupy(case, cupy_sets))
            errors = {}
            for name, function in functions.items():
                import jax

                results = jax.block_until_ready(jax.jit(function)(*jax_sets[0]))
                results = results if isinstance(results, tuple) else (results,)
                errors[name] = max(check.errors(case, workload.sets[0], tuple(map(to_cupy, results))).values())
            write(
                "speed",
                direction=direction,
                rows=ROWS,
                cols=cols,
                dtype="bfloat16",
                gbps={name: round(case.bytes_moved / seconds * 1e-9) for name, seconds in measured.items()},
                us={name: round(seconds * 1e6, 2) for name, seconds in measured.items()},
                of_cupy=round(measured["CuPy"] / measured["cunorm"], 3),
                of_xla=round(measured["XLA"] / measured["cunorm"], 2),
                errors_in_eps=errors,
                buffers=len(jax_sets),
            )
            del workload, cupy_sets, jax_sets, results
            gc.collect()
            timing.synchronize("cupy")
            import cupy

            cupy.get_default_memory_pool().free_all_blocks()


def _copied(buffers):
    return type(buffers)(**{name: None if array is None else array.copy() for name, array in vars(buffers).items()})


def _cunorm(case):
    from cunorm.jax import layer_norm

    if case.direction == "forward":
        return lambda x, weight, bias: layer_norm(x, None, weight, bias, case.eps)
    return _backward


def _backward(dy, x, weight, mean, rstd):
    import cunorm

    return cunorm.layer_norm_backward(dy, x, mean, rstd, weight)


def _xla(case):
    from bench.providers import xla

    return xla._function(case.op, case.direction, case.eps)


def _on_cupy(case, sets) -> float:
    import cunorm
    from bench import timing

    forward = case.direction == "forward"
    function = (lambda x, w, b: cunorm.layer_norm(x, None, w, b, case.eps)) if forward else _backward
    calls = [partial(function, *arguments) for arguments in sets]
    return timing.kernel_time("cupy", calls, case.bytes_moved).median


def loop_time(function: Callable, sets: Sequence[tuple], estimate: float) -> float:
    """Return the seconds of one call, the median of several loops; `estimate` is about what it takes."""
    from bench.timing import loop

    measure = loop(function, sets, estimate, SECONDS)
    return statistics.median(measure() for _ in range(REPEATS))


# Time to compile.


def layers(write: Callable[..., None]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        for provider in PROVIDERS:
            caches = {"CUDA_CACHE_PATH": f"{folder}/{provider}/cuda", "CUNORM_CACHE_DIR": f"{folder}/{provider}/cunorm"}
            for caches_are in ("empty", "filled"):
                command = [sys.executable, "-m", "bench.jax_norms", "--compile", provider]
                finished = subprocess.run(command, env=os.environ | caches, capture_output=True, text=True)
                if finished.returncode:
                    write("layers", provider=provider, error=finished.stderr[-2000:])
                    continue
                figures = json.loads(finished.stdout.splitlines()[-1])
                write("layers", provider=provider, caches=caches_are, layers=LAYERS, shape=LAYER_SHAPE, **figures)


def compile_layers(provider: str) -> dict[str, float]:
    """Return the seconds that tracing and lowering take, compiling, the first calls, and a later one."""
    import jax
    import jax.numpy as jnp

    from bench.suites import Case

    case = Case("layer_norm", "forward", *LAYER_SHAPE, "bfloat16")
    function = {"cunorm": _cunorm, "XLA": _xla}[provider](case)

    def loss(x, weights, biases):
        for i in range(LAYERS):
            x = x + function(x, weights[i], biases[i])
        return jnp.square(x.astype(jnp.float32)).sum()

    x = jax.random.normal(jax.random.key(0), LAYER_SHAPE, jnp.bfloat16)
    weights = [jnp.ones(LAYER_SHAPE[1], jnp.bfloat16) for _ in range(LAYERS)]
    biases = [jnp.zeros(LAYER_SHAPE[1], jnp.bfloat16) for _ in range(LAYERS)]
    jax.block_until_ready(jax.jit(lambda x: x + 1)(x))  # lets XLA start before anything is timed

    seconds = [time.perf_counter()]
    lowered = jax.jit(jax.value_and_grad(loss, (0, 1, 2))).lower(x, weights, biases)
    seconds.append(time.perf_counter())
    compiled = lowered.compile()
    seconds.append(time.perf_counter())
    for _ in range(2):
        jax.block_until_ready(compiled(x, weights, biases))
        seconds.append(time.perf_counter())
    later = []
    for _ in range(10):
        start = time.perf_counter()
        jax.block_until_ready(compiled(x, weights, biases))
        later.append(time.perf_counter() - start)
    names = ("lower", "compile", "first_call", "second_call")
    figures = dict(zip(names, (b - a for a, b in itertools.pairwise(seconds)), strict=True))
    figures["later_call"] = statistics.median(later)
    return {name: round(value, 5) for name, value in figures.items()}


if __name__ == "__main__":
    main()
