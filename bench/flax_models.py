"""A small transformer in Flax, with Flax's norms and with cunorm's: the losses of STEPS steps and the time of one.

    python -m bench.flax_models [--norms LayerNorm RMSNorm] [--arithmetic bfloat16 tensorfloat32 float32] [--out FILE]

Both modules take turns within one run on one machine, from the same random parameters, over the same random tokens.
Parameters are float32. The modules compute in bfloat16 or in float32, and matrix products of float32 as JAX has them by
default, which on these GPUs is in tensorfloat32, or in float32.
"""

from __future__ import annotations

import argparse
import datetime
import functools
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import flax
import flax.linen
import flax.nnx
import jax
import jax.numpy as jnp
import optax

import cunorm.flax.linen
import cunorm.flax.nnx
from bench.results import lines_to
from cunorm.jax.xla import target as choice

STEPS = 50
NORMS = ("LayerNorm", "RMSNorm")
# The dtype of the modules, and the precision of matrix products.
ARITHMETIC = {
    "bfloat16": ("bfloat16", "default"),
    "tensorfloat32": ("float32", "default"),
    "float32": ("float32", "float32"),
}
MODULES = {
    "linen": {"flax": flax.linen, "cunorm": cunorm.flax.linen},
    "nnx": {"flax": flax.nnx, "cunorm": cunorm.flax.nnx},
}

Step = Callable[[], jax.Array]


@dataclass(frozen=True)
class Size:
    layers: int = 4
    width: int = 1024
    heads: int = 16
    vocabulary: int = 8192
    batch: int = 8
    sequence: int = 512


@dataclass(frozen=True)
class Run:
    step: Step
    losses: list[float]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--norms", nargs="+", choices=NORMS, default=NORMS)
    parser.add_argument("--arithmetic", nargs="+", choices=ARITHMETIC, default=ARITHMETIC)
    parser.add_argument("--out", type=Path, default=Path("bench/results/flax/models.jsonl"))
    arguments = parser.parse_args()
    with lines_to(arguments.out) as write:
        write(
            "run",
            gpu=jax.devices()[0].device_kind,
            jax=jax.__version__,
            flax=flax.__version__,
            cunorm=cunorm.__version__,
            xla_call=choice.call("bench")._asdict(),
            date=datetime.date.today().isoformat(),
            command=" ".join(["python -m bench.flax_models", *sys.argv[1:]]),
        )
        for norm in arguments.norms:
            for framework in MODULES:
                for arithmetic in arguments.arithmetic:
                    figures = compare(norm, framework, arithmetic)
                    write("training", norm=norm, framework=framework, arithmetic=arithmetic, **figures)


def compare(norm: str, framework: str, arithmetic: str) -> dict[str, Any]:
    """Losses with both norms, and milliseconds of a step."""
    dtype, precision = ARITHMETIC[arithmetic]
    with jax.default_matmul_precision(precision):
        runs = {who: train(norm, framework, dtype, who, Size(), STEPS) for who in MODULES[framework]}
        times = step_times({who: run.step for who, run in runs.items()})
    return {
        "steps": STEPS,
        "first_loss": runs["flax"].losses[0],
        **{f"last_loss_{who}": run.losses[-1] for who, run in runs.items()},
        "most_apart": most_apart(runs["flax"].losses, runs["cunorm"].losses),
        **{f"step_ms_{who}": times[who] for who in runs},
    }


def train(norm: str, framework: str, dtype: str, who: str, size: Size, steps: int) -> Run:
    make = {"linen": linen_step, "nnx": nnx_step}[framework]
    step = make(getattr(MODULES[framework][who], norm), jnp.dtype(dtype), size)
    return Run(step, [float(step()) for _ in range(steps)])


def most_apart(losses: list[float], others: list[float]) -> float:
    """The greatest difference of two curves at one step, over the loss there."""
    return max(abs(a - b) / a for a, b in zip(losses, others, strict=True))


def step_times(steps: dict[str, Step], rounds: int = 12, inner: int = 5) -> dict[str, float]:
    """Milliseconds a step: medians over rounds in which all take turns."""
    times: dict[str, list[float]] = {who: [] for who in steps}
    for _ in range(rounds):
        for who, step in steps.items():
            start = time.perf_counter()
            for _ in range(inner):
                loss = step()
            loss.block_until_ready()
            times[who].append((time.perf_counter() - start) / inner * 1e3)
    return {who: round(statistics.median(values[rounds // 4 :]), 3) for who, values in times.items()}


def tokens(size: Size) -> tuple[jax.Array, jax.Array]:
    """Random tokens, and those that follow them."""
    ids = jax.random.randint(jax.random.key(1), (size.batch, size.sequence), 0, size.vocabulary)
    return ids, jnp.roll(ids, -1, axis=1)


def mean_loss(logits: jax.Array, labels: jax.Array) -> jax.Array:
    return optax.softmax_cross_entropy_with_integer_labels(logits.astype(jnp.float32), labels).mean()


def causal(sequence: int) -> jax.Array:
    return jnp.tril(jnp.ones((1, 1, sequence, sequence), bool))


class LinenBlock(flax.linen.Module):
    norm: Any
    dtype: Any
    size: Size

    @flax.linen.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        nn, dtype, width = flax.linen, self.dtype, self.size.width
        attention = nn.MultiHeadDotProductAttention(self.size.heads, dtype=dtype, deterministic=True)
        x = x + attention(self.norm(dtype=dtype)(x), mask=causal(x.shape[1]))
        hidden = nn.Dense(4 * width, dtype=dtype)(self.norm(dtype=dtype)(x))
        return x + nn.Dense(width, dtype=dtype)(nn.gelu(hidden))


class LinenTransformer(flax.linen.Module):
    norm: Any
    dtype: Any
    size: Size

    @flax.linen.compact
    def __call__(self, ids: jax.Array) -> jax.Array:
        nn, size = flax.linen, self.size
        places = nn.Embed(size.sequence, size.width, dtype=self.dtype)(jnp.arange(ids.shape[1]))
        x = nn.Embed(size.vocabulary, size.width, dtype=self.dtype)(ids) + places
        for _ in range(size.layers):
            x = LinenBlock(self.norm, self.dtype, size)(x)
        return nn.Dense(size.vocabulary, dtype=self.dtype)(self.norm(dtype=self.dtype)(x))


def linen_step(norm: Any, dtype: Any, size: Size) -> Step:
    model, optimizer = LinenTransformer(norm, dtype, size), optax.adamw(1e-4)
    ids, labels = tokens(size)
    params = jax.jit(model.init)(jax.random.key(0), ids)

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def update(params, state):
        loss, gradients = jax.value_and_grad(lambda params: mean_loss(model.apply(params, ids), labels))(params)
        updates, state = optimizer.update(gradients, state, params)
        return optax.apply_updates(params, updates), state, loss

    held = [params, optimizer.init(params)]

    def step() -> jax.Array:
        *held[:], loss = update(*held)
        return loss

    return step


class NnxBlock(flax.nnx.Module):
    def __init__(self, norm: Any, dtype: Any, size: Size, rngs: flax.nnx.Rngs):
        nnx, width = flax.nnx, size.width
        same = {"dtype": dtype, "rngs": rngs}
        self.before_attention = norm(width, **same)
        self.attention = nnx.MultiHeadAttention(size.heads, width, deterministic=True, decode=False, **same)
        self.before_mlp = norm(width, **same)
        self.up = nnx.Linear(width, 4 * width, **same)
        self.down = nnx.Linear(4 * width, width, **same)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = x + self.attention(self.before_attention(x), mask=causal(x.shape[1]))
        return x + self.down(flax.nnx.gelu(self.up(self.before_mlp(x))))


class NnxTransformer(flax.nnx.Module):
    def __init__(self, norm: Any, dtype: Any, size: Size, rngs: flax.nnx.Rngs):
        nnx = flax.nnx
        same = {"dtype": dtype, "rngs": rngs}
        self.tokens = nnx.Embed(size.vocabulary, size.width, **same)
        self.places = nnx.Embed(size.sequence, size.width, **same)
        self.blocks = nnx.Sequential(*(NnxBlock(norm, dtype, size, rngs) for _ in range(size.layers)))
        self.last = norm(size.width, **same)
        self.head = nnx.Linear(size.width, size.vocabulary, **same)

    def __call__(self, ids: jax.Array) -> jax.Array:
        x = self.tokens(ids) + self.places(jnp.arange(ids.shape[1]))
        return self.head(self.last(self.blocks(x)))


def nnx_step(norm: Any, dtype: Any, size: Size) -> Step:
    nnx = flax.nnx
    model = NnxTransformer(norm, dtype, size, nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.adamw(1e-4), wrt=nnx.Param)
    ids, labels = tokens(size)

    @nnx.jit
    def update(model, optimizer):
        loss, gradients = nnx.value_and_grad(lambda model: mean_loss(model(ids), labels))(model)
        optimizer.update(model, gradients)
        return loss

    return lambda: update(model, optimizer)


if __name__ == "__main__":
    main()
