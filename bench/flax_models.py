"""Time training steps of models in Flax, with Flax's norms and with cunorm's.

    python -m bench.flax_models [--models gpt vit llama] [--frameworks linen nnx] [--arithmetic bfloat16 ...]
                                [--ready-within SECONDS] [--out FILE]

The models are a GPT and a ViT with LayerNorm, and a Llama with RMSNorm as MaxText has it (parameters in float32, rotary
embedding, gated product, no biases). Each model, framework and arithmetic has a process. All compile side by side and
are measured one after the other. In a process both modules take turns, from the same random parameters, over the same
random inputs. Each process writes a line of JSON: the losses of the first and last of STEPS steps, their greatest
difference, milliseconds of a step, seconds that lowering and compiling took beside the other processes, bytes of
temporaries and the number of launches in the program that XLA made. Parameters are float32. The modules compute in
bfloat16 or in float32, and matrix products of float32 as JAX has them by default, which on these GPUs is in
tensorfloat32, or in float32.
"""

from __future__ import annotations

import argparse
import datetime
import os
import re
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import product
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
from bench.side_by_side import in_turns
from cunorm.jax.xla import target as choice

STEPS = 50
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
NORMS = {"gpt": "LayerNorm", "vit": "LayerNorm", "llama": "RMSNorm"}

State = Any  # parameters and the optimizer's
Update = Callable[[State, jax.Array, jax.Array], tuple[State, jax.Array]]


@dataclass(frozen=True)
class Size:
    layers: int = 4
    width: int = 1024
    hidden: int = 4096
    heads: int = 16
    vocabulary: int = 8192  # or classes of pictures
    batch: int = 8
    sequence: int = 512  # or patches of a picture


SIZES = {
    "gpt": Size(),
    "vit": Size(width=768, hidden=3072, heads=12, vocabulary=1000, batch=32, sequence=196),
    "llama": Size(width=2048, hidden=5632),
}
PATCH = 16 * 16 * 3  # numbers


class Trained:
    """A compiled step with its state."""

    def __init__(self, model: str, framework: str, dtype: str, who: str, size: Size):
        make = {"linen": linen_update, "nnx": nnx_update}[framework]
        self.inputs, labels = batch_of(model, size)
        update, self.state = make(getattr(MODULES[framework][who], NORMS[model]), model, jnp.dtype(dtype), size)
        self.labels = labels
        start = time.perf_counter()
        self.compiled = jax.jit(update, donate_argnums=0).lower(self.state, self.inputs, labels).compile()
        self.compile_s = time.perf_counter() - start

    def step(self) -> jax.Array:
        self.state, loss = self.compiled(self.state, self.inputs, self.labels)
        return loss

    def losses(self, steps: int) -> list[float]:
        return [float(self.step()) for _ in range(steps)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", nargs="+", choices=SIZES, default=tuple(SIZES))
    parser.add_argument("--frameworks", nargs="+", choices=MODULES, default=tuple(MODULES))
    parser.add_argument("--arithmetic", nargs="+", choices=ARITHMETIC, default=tuple(ARITHMETIC))
    parser.add_argument("--ready-within", type=float, default=600, help="seconds")
    parser.add_argument("--out", type=Path, default=Path("bench/results/flax/models.jsonl"))
    arguments = parser.parse_args()
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # the processes share the GPU's memory
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
        jobs = product(arguments.models, arguments.frameworks, arguments.arithmetic)
        for (model, framework, arithmetic), figures in in_turns(prepared, jobs, arguments.ready_within):
            write("training", model=model, framework=framework, arithmetic=arithmetic, **figures)


def prepared(model: str, framework: str, arithmetic: str) -> Callable[[], dict[str, Any]]:
    """Compile the steps and do STEPS of them, and return what measures them in turns."""
    dtype, precision = ARITHMETIC[arithmetic]
    with jax.default_matmul_precision(precision):
        runs = {who: Trained(model, framework, dtype, who, SIZES[model]) for who in MODULES[framework]}
    losses = {who: run.losses(STEPS) for who, run in runs.items()}

    def measured() -> dict[str, Any]:
        times = step_times({who: run.step for who, run in runs.items()})
        return {
            "steps": STEPS,
            "losses": {who: [curve[0], curve[-1]] for who, curve in losses.items()},
            "most_apart": {who: most_apart(losses["flax"], curve) for who, curve in losses.items() if who != "flax"},
            "step_ms": {who: round(statistics.median(taken), 3) for who, taken in times.items()},
            "of_flax": {who: median_ratio(taken, times["flax"]) for who, taken in times.items() if who != "flax"},
            "compile_s": {who: round(run.compile_s, 1) for who, run in runs.items()},
            "temporaries": {who: run.compiled.memory_analysis().temp_size_in_bytes for who, run in runs.items()},
            "launches": {who: launches(run.compiled.as_text()) for who, run in runs.items()},
        }

    return measured


def most_apart(losses: list[float], others: list[float]) -> float:
    """Return the greatest difference of two curves at a step, over the loss there."""
    return max(abs(a - b) / a for a, b in zip(losses, others, strict=True))


def step_times(steps: dict[str, Callable[[], jax.Array]], rounds: int = 24, inner: int = 5) -> dict[str, list[float]]:
    """Return the milliseconds of a step in each round but the first ones; all take turns, in either order."""
    times: dict[str, list[float]] = {who: [] for who in steps}
    for turn in range(rounds):
        for who, step in list(steps.items())[:: -1 if turn % 2 else 1]:
            start = time.perf_counter()
            for _ in range(inner):
                loss = step()
            loss.block_until_ready()
            times[who].append((time.perf_counter() - start) / inner * 1e3)
    return {who: taken[rounds // 8 :] for who, taken in times.items()}


def median_ratio(times: list[float], others: list[float]) -> float:
    """Return the median of the times over the other's times in the same rounds."""
    return round(statistics.median(a / b for a, b in zip(times, others, strict=True)), 4)


# KERNELS are the instructions of an optimized program that run kernels, and WHOLE those whose computations are parts of
# a kernel.
KERNELS = "fusion|custom-call|copy|dot|convolution|reduce|sort|scatter|gather|dynamic-slice|dynamic-update-slice"
WHOLE = "fusion|reduce|reduce-window|sort|map|scatter|select-and-scatter"


def launches(program: str) -> int:
    """Return how many kernels a program in XLA's text has, counting those of a loop once."""
    of_kernels = (line for line in program.splitlines() if re.search(rf" (?:{WHOLE})\(", line))
    parts = {name for line in of_kernels for name in re.findall(r"(?:calls|to_apply)=%?([\w.\-]+)", line)}
    computations = re.findall(r"\n(?:ENTRY )?%?([\w.\-]+) \([^\n]*\{\n(.*?)\n\}", program, re.DOTALL)
    return sum(len(re.findall(rf" (?:{KERNELS})\(", body)) for name, body in computations if name not in parts)


def batch_of(model: str, size: Size) -> tuple[jax.Array, jax.Array]:
    """Return random tokens and those that follow them, or the patches of random pictures and random classes."""
    key, shape = jax.random.key(1), (size.batch, size.sequence)
    if model == "vit":
        classes = jax.random.randint(key, shape[:1], 0, size.vocabulary)
        return jax.random.normal(key, (*shape, PATCH)), classes
    ids = jax.random.randint(key, shape, 0, size.vocabulary)
    return ids, jnp.roll(ids, -1, axis=1)


def mean_loss(logits: jax.Array, labels: jax.Array) -> jax.Array:
    return optax.softmax_cross_entropy_with_integer_labels(logits.astype(jnp.float32), labels).mean()


def mask_of(model: str, sequence: int) -> jax.Array | None:
    return None if model == "vit" else jnp.tril(jnp.ones((1, 1, sequence, sequence), bool))


def attended(projected: list[jax.Array], heads: int) -> jax.Array:
    """Return causal attention of Llama's queries, keys and values, all of shape (batch, sequence, width)."""
    q, k, v = (part.reshape(*part.shape[:2], heads, -1) for part in projected)
    return jax.nn.dot_product_attention(rotated(q), rotated(k), v, is_causal=True).reshape(projected[0].shape)


def rotated(x: jax.Array) -> jax.Array:
    """Return x with the rotary embedding of its positions."""
    half = x.shape[-1] // 2
    angles = jnp.arange(x.shape[1])[:, None] * 10000.0 ** (-jnp.arange(half) / half)
    cos, sin = (f(angles)[:, None].astype(x.dtype) for f in (jnp.cos, jnp.sin))
    first, second = x[..., :half], x[..., half:]
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)


def updating(loss_of: Callable[..., jax.Array], params: Any) -> tuple[Update, State]:
    """Return a step of AdamW and its first state."""
    optimizer = optax.adamw(1e-4)

    def update(state: State, inputs: jax.Array, labels: jax.Array) -> tuple[State, jax.Array]:
        params, moments = state
        loss, gradients = jax.value_and_grad(loss_of)(params, inputs, labels)
        updates, moments = optimizer.update(gradients, moments, params)
        return (optax.apply_updates(params, updates), moments), loss

    return update, (params, jax.jit(optimizer.init)(params))


class LinenBlock(flax.linen.Module):
    norm: Any
    model: str
    dtype: Any
    size: Size

    @flax.linen.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        nn, dtype, size = flax.linen, self.dtype, self.size
        attention = nn.MultiHeadDotProductAttention(size.heads, dtype=dtype, deterministic=True)
        x = x + attention(self.norm(dtype=dtype)(x), mask=mask_of(self.model, size.sequence))
        hidden = nn.Dense(size.hidden, dtype=dtype)(self.norm(dtype=dtype)(x))
        return x + nn.Dense(size.width, dtype=dtype)(nn.gelu(hidden))


class LinenLlamaBlock(flax.linen.Module):
    norm: Any
    model: str
    dtype: Any
    size: Size

    @flax.linen.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        def dense(columns: int, y: jax.Array) -> jax.Array:
            return flax.linen.Dense(columns, use_bias=False, dtype=self.dtype)(y)

        size = self.size
        y = self.norm(dtype=self.dtype)(x)
        x = x + dense(size.width, attended([dense(size.width, y) for _ in range(3)], size.heads))
        y = self.norm(dtype=self.dtype)(x)
        return x + dense(size.width, flax.linen.silu(dense(size.hidden, y)) * dense(size.hidden, y))


class LinenModel(flax.linen.Module):
    norm: Any
    model: str
    dtype: Any
    size: Size

    @flax.linen.compact
    def __call__(self, inputs: jax.Array) -> jax.Array:
        nn, size, same = flax.linen, self.size, {"dtype": self.dtype}
        if self.model == "vit":
            x = nn.Dense(size.width, **same)(inputs)
        else:
            x = nn.Embed(size.vocabulary, size.width, **same)(inputs)
        if self.model != "llama":
            x = x + nn.Embed(size.sequence, size.width, **same)(jnp.arange(size.sequence))
        for _ in range(size.layers):
            block = LinenLlamaBlock if self.model == "llama" else LinenBlock
            x = block(self.norm, self.model, self.dtype, size)(x)
        x = self.norm(**same)(x)
        if self.model == "vit":
            x = x.mean(1)
        return nn.Dense(size.vocabulary, use_bias=self.model != "llama", **same)(x)


def linen_update(norm: Any, model: str, dtype: Any, size: Size) -> tuple[Update, State]:
    module = LinenModel(norm, model, dtype, size)
    params = jax.jit(module.init)(jax.random.key(0), batch_of(model, size)[0])
    return updating(lambda params, inputs, labels: mean_loss(module.apply(params, inputs), labels), params)


class NnxBlock(flax.nnx.Module):
    def __init__(self, norm: Any, model: str, dtype: Any, size: Size, rngs: flax.nnx.Rngs):
        nnx, width = flax.nnx, size.width
        same = {"dtype": dtype, "rngs": rngs}
        self.model = model
        self.before_attention = norm(width, **same)
        self.attention = nnx.MultiHeadAttention(size.heads, width, deterministic=True, decode=False, **same)
        self.before_mlp = norm(width, **same)
        self.up = nnx.Linear(width, size.hidden, **same)
        self.down = nnx.Linear(size.hidden, width, **same)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = x + self.attention(self.before_attention(x), mask=mask_of(self.model, x.shape[1]))
        return x + self.down(flax.nnx.gelu(self.up(self.before_mlp(x))))


class NnxLlamaBlock(flax.nnx.Module):
    def __init__(self, norm: Any, model: str, dtype: Any, size: Size, rngs: flax.nnx.Rngs):
        nnx, width = flax.nnx, size.width
        same = {"dtype": dtype, "rngs": rngs}
        self.heads = size.heads
        self.before_attention = norm(width, **same)
        self.projections = nnx.List(nnx.Linear(width, width, use_bias=False, **same) for _ in range(3))
        self.out = nnx.Linear(width, width, use_bias=False, **same)
        self.before_mlp = norm(width, **same)
        self.gate, self.up = (nnx.Linear(width, size.hidden, use_bias=False, **same) for _ in range(2))
        self.down = nnx.Linear(size.hidden, width, use_bias=False, **same)

    def __call__(self, x: jax.Array) -> jax.Array:
        y = self.before_attention(x)
        x = x + self.out(attended([project(y) for project in self.projections], self.heads))
        y = self.before_mlp(x)
        return x + self.down(flax.nnx.silu(self.gate(y)) * self.up(y))


class NnxModel(flax.nnx.Module):
    def __init__(self, norm: Any, model: str, dtype: Any, size: Size, rngs: flax.nnx.Rngs):
        nnx = flax.nnx
        same = {"dtype": dtype, "rngs": rngs}
        self.model = model
        if model == "vit":
            self.first = nnx.Linear(PATCH, size.width, **same)
        else:
            self.first = nnx.Embed(size.vocabulary, size.width, **same)
        if model != "llama":
            self.places = nnx.Embed(size.sequence, size.width, **same)
        block = NnxLlamaBlock if model == "llama" else NnxBlock
        self.blocks = nnx.Sequential(*(block(norm, model, dtype, size, rngs) for _ in range(size.layers)))
        self.last = norm(size.width, **same)
        self.head = nnx.Linear(size.width, size.vocabulary, use_bias=model != "llama", **same)

    def __call__(self, inputs: jax.Array) -> jax.Array:
        x = self.first(inputs)
        if self.model != "llama":
            x = x + self.places(jnp.arange(x.shape[1]))
        x = self.last(self.blocks(x))
        return self.head(x.mean(1) if self.model == "vit" else x)


def nnx_update(norm: Any, model: str, dtype: Any, size: Size) -> tuple[Update, State]:
    """Make a step by nnx.split and nnx.merge, because under nnx.jit the host walks through the module in every step."""
    nnx = flax.nnx
    definition, params, rest = nnx.split(NnxModel(norm, model, dtype, size, nnx.Rngs(0)), nnx.Param, ...)

    def loss_of(params, inputs, labels):
        return mean_loss(nnx.merge(definition, params, rest)(inputs), labels)

    return updating(loss_of, params)


if __name__ == "__main__":
    main()
