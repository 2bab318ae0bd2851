"""Time cunorm.jax.layer_norm_linear over all GPUs of a host, which share rows of x and columns of kernel.

    python -m bench.jax_linear_sharded [--out FILE]

XLA gathers the normalised rows before the product, once more in the backward pass, and scatters the sums of their
gradient. cunorm's program is compiled with each set of XLA's overlap flags, and Flax's norm and product without any.
All programs of a shape and direction are checked against each other and run in turns, in bfloat16, and medians count.
`collectives` are those of the compiled program: collective-permute in an all-gather's place is XLA's product in parts
("windowed einsum").
"""

from __future__ import annotations

import argparse
import os
import re
import statistics
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # CuPy needs memory too

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from bench.jax_linear import CONTENDERS, DIRECTIONS, ERROR, buffers, temporary
from bench.jax_norms import environment
from bench.results import lines_to

SHAPES = ((8192, 4096, 12288), (8192, 8192, 10240), (1024, 4096, 12288))  # rows, in, out on all devices together
LATENCY = {"xla_gpu_enable_latency_hiding_scheduler": True}
PARTS = {"xla_gpu_threshold_for_windowed_einsum_mib": 0}
FLAGS: dict[str, dict[str, Any]] = {
    "no flags": {},
    "without the latency hiding scheduler": {"xla_gpu_enable_latency_hiding_scheduler": False},
    "latency hiding scheduler": LATENCY,
    "windowed einsum": {**LATENCY, **PARTS, "xla_gpu_multi_streamed_windowed_einsum": False},
    "windowed einsum, several streams": {**LATENCY, **PARTS, "xla_gpu_multi_streamed_windowed_einsum": True},
}
CASES = [*((name, "no flags") for name in ("Flax", "cunorm, z kept")), *(("cunorm", flags) for flags in FLAGS)]
ROUNDS, SECONDS = 9, 0.02  # a turn takes about SECONDS
COLLECTIVES = "all-gather|all-reduce|reduce-scatter|collective-permute|all-to-all"

X, KERNEL, BIAS, NORM, Y = P("model"), P(None, "model"), P("model"), P(), P(None, "model")


def measure(write: Callable[..., Any], mesh: Mesh, shape: tuple[int, int, int]) -> None:
    rows, cols, outs = shape
    shardings = [NamedSharding(mesh, spec) for spec in (X, KERNEL, BIAS, NORM, NORM, Y)]
    sets = [
        [jax.device_put(array, sharding) for array, sharding in zip(buffers(seed, *shape), shardings, strict=True)]
        for seed in range(2)
    ]
    base = {"rows": rows, "in": cols, "out": outs, "dtype": "bfloat16", "devices": mesh.size}
    for direction, make in DIRECTIONS.items():
        out_shardings = shardings[-1] if direction == "forward" else (shardings[-1], *shardings[:-1])
        programs, exact = {}, None
        for name, flags in CASES:
            label = f"{name}, {flags}"
            jitted = jax.jit(make(CONTENDERS[name]), out_shardings=out_shardings, compiler_options=FLAGS[flags])
            try:
                compiled = jitted.lower(*sets[0]).compile()
                results = jax.block_until_ready(compiled(*sets[0]))
            except Exception as error:  # this XLA lacks a flag, or fails with it, and the line says so
                write("refused", **base, direction=direction, contender=label, error=str(error)[:300])
                continue
            exact = results if exact is None else exact
            off = max(map(float, _errors(jax.tree.leaves(results), jax.tree.leaves(exact))))
            kinds = dict(Counter(re.findall(rf"= [^=]*? ({COLLECTIVES})(?:-start)?\(", compiled.as_text())))
            figures = {"collectives": kinds, "off": off, "temporary": temporary(compiled)}
            write("program", **base, direction=direction, contender=label, **figures)
            if not off < 2 * ERROR:  # either may be off by ERROR; NaN is wrong
                raise AssertionError(f"{label} is wrong at {shape}: {off}")
            programs[label] = compiled
        write("time", **base, direction=direction, unit="us", **in_turns(programs, sets))


@jax.jit
def _errors(results, expected):
    norm = jnp.linalg.norm
    return [norm((a - b).astype("float32")) / norm(b.astype("float32")) for a, b in zip(results, expected, strict=True)]


def in_turns(programs: dict[str, Callable[..., Any]], sets: list[list[jax.Array]]) -> dict[str, float]:
    """Return the median microseconds of a call, where a turn is several calls in a row."""

    def seconds(program: Callable[..., Any], count: int) -> float:
        start = time.perf_counter()
        for call in range(count):
            last = program(*sets[call % len(sets)])
        jax.block_until_ready(last)
        return (time.perf_counter() - start) / count

    counts = {}
    for name, program in programs.items():
        seconds(program, 3)
        counts[name] = max(3, min(30, int(SECONDS / seconds(program, 3))))
    times: dict[str, list[float]] = {name: [] for name in programs}
    for turn in range(ROUNDS):
        for name in list(programs)[:: 1 if turn % 2 else -1]:
            times[name].append(seconds(programs[name], counts[name]))
    return {name: round(statistics.median(taken) * 1e6, 1) for name, taken in times.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("bench/results/jax/linear_sharded.jsonl"))
    arguments = parser.parse_args()
    mesh = jax.make_mesh((jax.device_count(),), ("model",), axis_types=(jax.sharding.AxisType.Auto,))
    with lines_to(arguments.out) as write:
        write("run", **environment("bench.jax_linear_sharded"))
        for shape in SHAPES:
            measure(write, mesh, shape)


if __name__ == "__main__":
    main()
