"""Fused operations of tensors against whoever else has them: `python -m bench.fusion_peers [--out FILE]`.

cunorm's function; its own norms with torch's sums and gates between them ("apart"); torch.compile of the formula, by
default and by max-autotune-no-cudagraphs; where installed, the adding norms of Liger and QuACK and the gated one of
flash-linear-attention. bfloat16. Results and gradients of each are compared with cunorm's, then all are timed in
turns, in CUDA graphs over rotating buffers (timing.py): forward without autograd, and the backward pass that autograd
makes of one forward pass. `seconds` ends the run after the case that it passes.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from importlib import import_module
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import rms_norm, silu

import cunorm.torch
from bench import timing
from bench.results import lines_to

EPS = 1e-6
ELEMENTS = 1 << 26
ROWS, COLS = (0, 1, 32, 512), (4096, 1024, 16384)  # 0: as many as 64 M elements have
MODES = {"torch.compile": "default", "torch.compile, tuned": "max-autotune-no-cudagraphs"}
Function = Callable[..., tuple[Tensor, ...]]


class Fusion(NamedTuple):
    """`formula` and `apart` are of x and the operands, as `fused`."""

    operands: str  # a letter for each: f, like x; c, a vector
    moved: tuple[int, int]  # tensors like x, forward and backward
    fused: Function
    apart: Function
    formula: Function


def add_apart(norm: Callable, x: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
    s = x + residual
    return norm(s, s.shape[-1:], weight, EPS), s


def sandwich_apart(norm: Callable, x: Tensor, residual: Tensor, weight: Tensor, second: Tensor) -> tuple[Tensor, ...]:
    s = residual + norm(x, x.shape[-1:], weight, EPS)
    return norm(s, s.shape[-1:], second, EPS), s


def gated_apart(norm: Callable, x: Tensor, z: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
    return (norm(x, x.shape[-1:], weight, EPS) * silu(z),)


def both(function: Callable) -> tuple[Function, Function]:
    return partial(function, cunorm.torch.rms_norm), partial(function, rms_norm)


FUSIONS = {
    "add_rms_norm": Fusion(
        "fc", (4, 4), lambda x, r, w: cunorm.torch.add_rms_norm(x, r, x.shape[-1:], w, EPS), *both(add_apart)
    ),
    "rms_norm_add_rms_norm": Fusion(
        "fcc",
        (4, 6),
        lambda x, r, w, v: cunorm.torch.rms_norm_add_rms_norm(x, r, x.shape[-1:], w, v, EPS),
        *both(sandwich_apart),
    ),
    "rms_norm_gated": Fusion(
        "fc", (3, 5), lambda x, z, w: (cunorm.torch.rms_norm_gated(x, z, w, EPS),), *both(gated_apart)
    ),
}


def liger() -> Function:
    from liger_kernel.ops.fused_add_rms_norm import LigerFusedAddRMSNormFunction

    return lambda x, r, w: LigerFusedAddRMSNormFunction.apply(x, r, w, EPS, 0.0, "llama", False)


def quack() -> Function:
    rmsnorm = import_module("quack.rmsnorm").rmsnorm  # quack.rmsnorm as an attribute is a function
    return lambda x, r, w: rmsnorm(x, w, residual=r, eps=EPS, prenorm=True)


def fla() -> Function:
    from fla.modules.norm.fused_norm_gate import rms_norm_gated

    return lambda x, z, w: (rms_norm_gated(x, z, w, None, eps=EPS),)


PEERS = {"add_rms_norm": {"Liger": liger, "QuACK": quack}, "rms_norm_gated": {"flash-linear-attention": fla}}


def providers(name: str) -> dict[str, Function]:
    fusion = FUSIONS[name]
    found = {"cunorm": fusion.fused, "cunorm, apart": fusion.apart}
    for mode, of in MODES.items():
        found[mode] = torch.compile(fusion.formula, mode=of, dynamic=False)
    for who, load in PEERS.get(name, {}).items():
        with suppress(ImportError):
            found[who] = load()
    return found


def arguments(fusion: Fusion, rows: int, cols: int) -> list[Tensor]:
    shapes = {"f": (rows, cols), "c": (cols,)}
    return [
        torch.randn(shapes[kind], device="cuda", dtype=torch.bfloat16).requires_grad_()
        for kind in "f" + fusion.operands
    ]


def gradients(results: Sequence[Tensor], tensors: Sequence[Tensor], given: Sequence[Tensor]) -> tuple[Tensor, ...]:
    return torch.autograd.grad(results, tensors, given, retain_graph=True)


def refusal(one: Function, cunorms: Function, tensors: Sequence[Tensor]) -> str:
    """Why a provider is not timed: what is further from cunorm's results than rounding in between explains."""
    pair = []
    for function in (one, cunorms):
        try:
            results = tuple(function(*tensors))
        except Exception as error:  # of somebody else's compiler, say
            return f"{type(error).__name__}: {error}"[:200]
        pair.append((*results, *gradients(results, tensors, [torch.ones_like(result) for result in results])))
    for found, expected in zip(*pair, strict=True):
        apart = float((found.float() - expected.float()).abs().max() / expected.float().abs().max())
        if not apart < 0.03:
            return f"a result is {apart:.3g} of its largest away"
    return ""


def measure(name: str, rows: int, cols: int, seconds: float) -> list[dict[str, Any]]:
    fusion = FUSIONS[name]
    rows = rows or ELEMENTS // cols
    lines = []
    candidates = providers(name)
    tensors = arguments(fusion, rows, cols)
    refused = {who: refusal(one, candidates["cunorm"], tensors) for who, one in candidates.items()}
    del tensors
    for direction, moved in zip(("forward", "backward"), fusion.moved, strict=True):
        size = moved * rows * cols * 2
        sets = [arguments(fusion, rows, cols) for _ in range(timing.buffers_needed(size))]
        timers = {}
        for who, one in candidates.items():
            if refused[who]:
                continue
            if direction == "forward":
                calls = [partial(torch.no_grad()(one), *tensors) for tensors in sets]
            else:
                calls = []
                for tensors in sets:
                    results = tuple(one(*tensors))
                    given = [torch.randn_like(result) for result in results]
                    calls.append(partial(gradients, results, tensors, given))
            timers[who] = timing.timer("torch", calls, size)
        found = timing.in_turns(list(timers.values()), seconds)
        times = {
            who: str(one) if isinstance(one, Exception) else round(one.median * 1e6, 3)
            for who, one in zip(timers, found, strict=True)
        }
        times |= {who: why for who, why in refused.items() if why}
        lines.append({"name": name, "direction": direction, "rows": rows, "cols": cols, "us": times})
        del timers, sets
        torch.cuda.empty_cache()
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--only", nargs="+", choices=FUSIONS, default=list(FUSIONS))
    parser.add_argument("--rows", type=int, nargs="+", default=ROWS)
    parser.add_argument("--cols", type=int, nargs="+", default=COLS)
    parser.add_argument("--seconds", type=float, default=float("inf"))
    options = parser.parse_args()
    # A backward pass is run many times over what one forward pass kept.
    torch._functorch.config.donated_buffer = False
    torch._dynamo.config.recompile_limit = 64
    start = time.perf_counter()
    # Graphs are captured on a stream of their own.
    with lines_to(options.out) as write, torch.cuda.stream(torch.cuda.Stream()):
        for rows, cols, name in product(options.rows, options.cols, options.only):
            if time.perf_counter() - start > options.seconds:
                break
            for line in measure(name, rows, cols, timing.SECONDS):
                write(**line)


if __name__ == "__main__":
    main()
