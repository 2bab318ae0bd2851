"""Compare cunorm.jax.layer_norm_linear with the bare product and with Flax's own norm and product, which are XLA's.

    python -m bench.jax_linear [--shapes 8192x4096x12288 ...] [--out FILE]

Contenders are loops within one jit over rotating buffers of random data in bfloat16. For each shape and direction all
are compiled first and then run in turns, so that a GPU that slows down under load slows all of them, and medians count.
Every result is checked against float64 before it is timed. Forward and backward are timed together, in one program:
apart, XLA would have to write what its formulas keep for the backward pass, and in a program of both it computes some
of it again. "cunorm, fp8" has XLA's product in 8 bits with XLA_FLAGS=--xla_gpu_enable_triton_gemm=false.
"""

from __future__ import annotations

import argparse
import os
import statistics
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import repeat
from pathlib import Path
from typing import Any

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # CuPy needs memory too

import flax.linen as nn
import jax
import jax.numpy as jnp

from bench.jax_norms import environment
from bench.linear_fp8 import shape_of
from bench.results import lines_to
from bench.timing import buffers_needed, loop
from cunorm.jax import layer_norm_linear

SHAPES = (  # rows, in, out
    (16, 4096, 12288),
    (128, 4096, 12288),
    (8192, 1024, 3072),
    (8192, 4096, 12288),
    (8192, 8192, 10240),
)
EPS = 1e-5
SECONDS, ROUNDS = 0.03, 8  # a loop takes about SECONDS, and each round begins with another contender
LAYERS = 4  # in the program whose memory is measured
ERROR = 8e-3  # the largest relative error that bfloat16 explains
ERRORS_OF_Y = {"cunorm, fp8": 0.045}  # the largest ones of y where they are not ERROR

Function = Callable[..., Any]


def product(x, kernel, bias, *_):
    return x @ kernel + bias


def flax(x, kernel, bias, ln_weight, ln_bias):
    norm, dense = nn.LayerNorm(EPS, x.dtype), nn.Dense(bias.size, dtype=x.dtype)
    z = norm.apply({"params": {"scale": ln_weight, "bias": ln_bias}}, x)
    return dense.apply({"params": {"kernel": kernel, "bias": bias}}, z)


CONTENDERS: dict[str, Function] = {
    "product": product,
    "Flax": flax,
    "cunorm": lambda *inputs: layer_norm_linear(*inputs, EPS),
    "cunorm, z kept": lambda *inputs: layer_norm_linear(*inputs, EPS, keep_normalized=True),
    "cunorm, fp8": lambda *inputs: layer_norm_linear(*inputs, EPS, fp8="tensor"),
}


def forward(function: Function) -> Function:
    return lambda *arrays: function(*arrays[:-1])


def both(function: Function) -> Function:
    """Make a function that returns y and the five gradients."""

    def run(*arrays):
        y, pull = jax.vjp(function, *arrays[:-1])
        return y, *pull(arrays[-1])

    return run


DIRECTIONS = {"forward": forward, "forward and backward": both}


def buffers(seed: int, rows: int, cols: int, outs: int) -> tuple[jax.Array, ...]:
    """Return x, kernel, bias, ln_weight, ln_bias and dy."""
    keys = iter(jax.random.split(jax.random.key(seed), 6))

    def normal(*shape: int, scale: float = 1.0, shift: float = 0.0) -> jax.Array:
        return (jax.random.normal(next(keys), shape) * scale + shift).astype("bfloat16")

    return (
        normal(rows, cols, shift=0.5),
        normal(cols, outs, scale=cols**-0.5),
        normal(outs),
        normal(cols, scale=0.3, shift=1.0),
        normal(cols),
        normal(rows, outs),
    )


def errors(results: tuple[jax.Array, ...], arrays: tuple[jax.Array, ...]) -> list[float]:
    """Return the errors of y and the five gradients relative to float64, as ‖a - b‖ / ‖b‖."""
    with jax.enable_x64(True):
        return [float(error) for error in _errors(results, arrays)]


@jax.jit
def _errors(results, arrays):
    exact = both(flax)(*(array.astype("float64") for array in arrays))
    norm = jnp.linalg.norm
    return [norm(a - e) / norm(e) for a, e in zip(results, exact, strict=True)]


def measure(write: Function, shape: tuple[int, int, int]) -> None:
    rows, cols, outs = shape
    base = {"rows": rows, "in": cols, "out": outs, "dtype": "bfloat16"}
    moved = 2 * (rows * cols + outs * cols + rows * outs)
    sets = [buffers(seed, *shape) for seed in range(min(buffers_needed(moved), 16))]
    memory = {}
    for name, function in CONTENDERS.items():  # one after the other: XLA times its products while it compiles
        compiled = jax.jit(both(function)).lower(*sets[0]).compile()
        memory[name] = temporary(compiled)
        if name != "product":
            of_y, *of_gradients = errors(compiled(*sets[0]), sets[0])
            write("error", **base, contender=name, relative=[of_y, *of_gradients])
            # NaN is wrong too.
            if not (of_y < ERRORS_OF_Y.get(name, ERROR) and all(error < ERROR for error in of_gradients)):
                raise AssertionError(f"{name} is wrong at {shape}: {[of_y, *of_gradients]}")
    write("memory", **base, layers=1, unit="bytes", z=2 * rows * cols, **memory)
    for direction, make in DIRECTIONS.items():
        products = 1 if direction == "forward" else 3
        estimate = products * 2 * rows * cols * outs / 700e12 + 15e-6
        functions = [make(function) for function in CONTENDERS.values()]
        with ThreadPoolExecutor() as pool:  # the products' algorithms are known by now
            loops = list(pool.map(loop, functions, repeat(sets), repeat(estimate), repeat(SECONDS)))
        times = in_turns(dict(zip(CONTENDERS, loops, strict=True)))
        figures = {}
        for name, seconds in times.items():
            p20, _, _, p80 = statistics.quantiles(seconds, n=5)
            quantiles = {"median": statistics.median(seconds), "p20": p20, "p80": p80}
            figures[name] = {key: round(value * 1e6, 2) for key, value in quantiles.items()}
        write("time", **base, direction=direction, unit="us", sets=len(sets), **figures)


def memory_of_layers(write: Function, shape: tuple[int, int, int]) -> None:
    """Write the memory of a program of several layers, which all keep something for the backward pass at once."""
    rows, cols, outs = shape
    x, *parameters, _ = jax.eval_shape(lambda: buffers(0, *shape))

    def program(function: Function) -> Function:
        def net(x, layers):
            for parameters in layers:
                x = x + function(x, *parameters)[:, :cols]
            return x

        return lambda x, layers, dy: jax.vjp(net, x, layers)[1](dy)

    memory = {}
    for name, function in CONTENDERS.items():
        memory[name] = temporary(jax.jit(program(function)).lower(x, [parameters] * LAYERS, x).compile())
    base = {"rows": rows, "in": cols, "out": outs, "dtype": "bfloat16"}
    write("memory", **base, layers=LAYERS, unit="bytes", z=2 * rows * cols, **memory)


def temporary(compiled: Any) -> int:
    """Return the bytes that a program needs beyond its arguments and results."""
    return compiled.memory_analysis().temp_size_in_bytes


def in_turns(loops: dict[str, Callable[[], float]]) -> dict[str, list[float]]:
    times: dict[str, list[float]] = {name: [] for name in loops}
    names = list(loops)
    for turn in range(ROUNDS):
        first = turn % len(names)
        for name in names[first:] + names[:first]:
            times[name].append(loops[name]())
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("bench/results/jax/linear.jsonl"))
    parser.add_argument("--shapes", nargs="+", type=shape_of, default=SHAPES, help="rows x in x out")
    arguments = parser.parse_args()
    with lines_to(arguments.out) as write:
        write("run", **environment("bench.jax_linear"))
        for shape in arguments.shapes:
            measure(write, shape)
        if SHAPES[3] in arguments.shapes:
            memory_of_layers(write, SHAPES[3])


if __name__ == "__main__":
    main()
