"""Compare fused operations of tensors with whoever else has them: `python -m bench.fusion_peers [--out FILE]`.

The contenders are, in bfloat16:
- cunorm's function, and its own norms with torch's sums, gates and modulations between them ("apart");
- torch.compile of the formula, by default and by max-autotune-no-cudagraphs;
- where they are installed, the adding norms of Liger, QuACK and TransformerEngine, whose forward pass adds by torch,
  Liger's modulated norm and the gated one of flash-linear-attention;
- those of FlashInfer and vLLM, which have only a forward pass and write over their arguments.

Results and gradients of each are compared with cunorm's. Then all are timed in turns, in CUDA graphs over rotating
buffers (timing.py): the forward pass without autograd, and the backward pass that autograd makes of one forward pass.
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
from torch.nn.functional import layer_norm, rms_norm, silu

import cunorm.torch
from bench import timing
from bench.results import lines_to

EPS = 1e-6
ELEMENTS = 1 << 26
ROWS, COLS = (0, 1, 32, 512), (4096, 1024, 16384)  # 0: as many as 64 M elements have
SAMPLES = 16
MODES = {"torch.compile": "default", "torch.compile, tuned": "max-autotune-no-cudagraphs"}
Function = Callable[..., tuple[Tensor, ...]]


class Fusion(NamedTuple):
    """An operation by cunorm, by separate calls and by its formula, each a function of x and the operands."""

    operands: str  # a letter for each: f is like x, c is a vector, s is a vector for each sample
    moved: tuple[int, int]  # how many tensors like x the forward and the backward pass move
    fused: Function
    apart: Function
    formula: Function


def add_apart(norm: Callable, x: Tensor, residual: Tensor, *of_norm: Tensor) -> tuple[Tensor, ...]:
    s = x + residual
    return norm(s, s.shape[-1:], *of_norm, EPS), s


def added_apart(norm: Callable, x: Tensor, residual: Tensor, *of_norm: Tensor) -> tuple[Tensor, ...]:
    return (residual + norm(x, x.shape[-1:], *of_norm, EPS),)


def sandwich_apart(norm: Callable, x: Tensor, residual: Tensor, weight: Tensor, second: Tensor) -> tuple[Tensor, ...]:
    s = residual + norm(x, x.shape[-1:], weight, EPS)
    return norm(s, s.shape[-1:], second, EPS), s


def gated_apart(norm: Callable, x: Tensor, z: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
    return (norm(x, x.shape[-1:], weight, EPS) * silu(z),)


def modulated_apart(norm: Callable, x: Tensor, scale: Tensor, shift: Tensor) -> tuple[Tensor, ...]:
    return (norm(x, x.shape[-1:], eps=EPS) * (1 + scale[:, None]) + shift[:, None],)


def gate_apart(
    norm: Callable, x: Tensor, residual: Tensor, gate: Tensor, scale: Tensor, shift: Tensor
) -> tuple[Tensor, ...]:
    s = residual + gate[:, None] * x
    return (*modulated_apart(norm, s, scale, shift), s)


def both(function: Callable, norm: str = "rms_norm") -> tuple[Function, Function]:
    return partial(function, getattr(cunorm.torch, norm)), partial(
        function, {"rms_norm": rms_norm}.get(norm, layer_norm)
    )


FUSIONS = {
    "add_rms_norm": Fusion("fc", (4, 4), lambda x, r, w: cunorm.torch.add_rms_norm(x, r, w, EPS), *both(add_apart)),
    "add_layer_norm": Fusion(
        "fcc",
        (4, 4),
        lambda x, r, w, b: cunorm.torch.add_layer_norm(x, r, w, b, EPS),
        *both(add_apart, "layer_norm"),
    ),
    "rms_norm_add": Fusion(
        "fc", (3, 3), lambda x, r, w: (cunorm.torch.rms_norm_add(x, r, w, EPS),), *both(added_apart)
    ),
    "rms_norm_add_rms_norm": Fusion(
        "fcc",
        (4, 6),
        lambda x, r, w, v: cunorm.torch.rms_norm_add_rms_norm(x, r, w, v, EPS),
        *both(sandwich_apart),
    ),
    "rms_norm_gated": Fusion(
        "fc", (3, 5), lambda x, z, w: (cunorm.torch.rms_norm_gated(x, z, w, EPS),), *both(gated_apart)
    ),
    "rms_norm_modulate": Fusion(
        "ss", (2, 3), lambda x, a, b: (cunorm.torch.rms_norm_modulate(x, a, b, EPS),), *both(modulated_apart)
    ),
    "layer_norm_modulate": Fusion(
        "ss",
        (2, 3),
        lambda x, a, b: (cunorm.torch.layer_norm_modulate(x, a, b, EPS),),
        *both(modulated_apart, "layer_norm"),
    ),
    "gate_add_layer_norm_modulate": Fusion(
        "fsss",
        (4, 6),
        lambda x, r, g, a, b: cunorm.torch.gate_add_layer_norm_modulate(x, r, g, a, b, EPS),
        *both(gate_apart, "layer_norm"),
    ),
}


def liger() -> Function:
    from liger_kernel.ops.fused_add_rms_norm import LigerFusedAddRMSNormFunction

    return lambda x, r, w: LigerFusedAddRMSNormFunction.apply(x, r, w, EPS, 0.0, "llama", False)


def liger_modulated() -> Function:
    from liger_kernel.ops.modulated_rms_norm import LigerModulatedRMSNormFunction

    return lambda x, a, b: (LigerModulatedRMSNormFunction.apply(x, None, a, b, EPS, 0.0, "llama", False),)


def quack() -> Function:
    rmsnorm = import_module("quack.rmsnorm").rmsnorm  # quack.rmsnorm as an attribute is a function
    return lambda x, r, w: rmsnorm(x, w, residual=r, eps=EPS, prenorm=True)


def transformer_engine() -> Function:
    import transformer_engine.pytorch  # noqa: F401  loads the library that the next one needs
    import transformer_engine_torch as tex

    class AddRMSNorm(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, residual, weight):
            s = x + residual
            y, _, rstd = tex.rmsnorm_fwd(s, weight, EPS, None, None, tex.DType.kBFloat16, 0, False)
            ctx.save_for_backward(s, rstd, weight)
            return y, s

        @staticmethod
        def backward(ctx, dy, ds):
            s, rstd, weight = ctx.saved_tensors
            dx, dweight = tex.rmsnorm_bwd_add(dy, s, ds, rstd, weight, 0, False)
            return dx, dx, dweight

    return AddRMSNorm.apply


def fla() -> Function:
    from fla.modules.norm.fused_norm_gate import rms_norm_gated

    return lambda x, z, w: (rms_norm_gated(x, z, w, None, eps=EPS),)


def flashinfer() -> Function:
    from flashinfer.norm import fused_add_rmsnorm

    def add_rms_norm(x, r, w):
        fused_add_rmsnorm(x, r, w, EPS)
        return x, r

    return add_rms_norm


def vllm() -> Function:
    from vllm._custom_ops import fused_add_rms_norm

    def add_rms_norm(x, r, w):
        fused_add_rms_norm(x, r, w, EPS)
        return x, r

    return add_rms_norm


PEERS = {
    "add_rms_norm": {"Liger": liger, "QuACK": quack, "TransformerEngine": transformer_engine},
    "rms_norm_gated": {"flash-linear-attention": fla},
    "rms_norm_modulate": {"Liger": liger_modulated},
}
# These write over x and the residual, and only their forward pass is timed.
IN_PLACE = {"add_rms_norm": {"FlashInfer": flashinfer, "vLLM": vllm}}


def providers(name: str, modes: Sequence[str]) -> dict[str, Function]:
    fusion = FUSIONS[name]
    functions = {"cunorm": fusion.fused, "cunorm, apart": fusion.apart}
    for mode in modes:
        functions[mode] = torch.compile(fusion.formula, mode=MODES[mode], dynamic=False)
    for who, load in (PEERS.get(name, {}) | IN_PLACE.get(name, {})).items():
        with suppress(ImportError):
            functions[who] = load()
    return functions


def arguments(fusion: Fusion, rows: int, cols: int) -> list[Tensor]:
    samples = SAMPLES if rows % SAMPLES == 0 else 1
    rows_of_x = (samples, rows // samples) if "s" in fusion.operands else (rows,)
    shapes = {"f": (*rows_of_x, cols), "c": (cols,), "s": (samples, cols)}
    return [
        torch.randn(shapes[kind], device="cuda", dtype=torch.bfloat16).requires_grad_()
        for kind in "f" + fusion.operands
    ]


def gradients(results: Sequence[Tensor], tensors: Sequence[Tensor], given: Sequence[Tensor]) -> tuple[Tensor, ...]:
    return torch.autograd.grad(results, tensors, given, retain_graph=True)


def refusal(peer: Function, cunorms: Function, tensors: Sequence[Tensor], in_place: bool) -> str:
    """Say why a provider is not timed: it fails, or is further from cunorm's results than rounding explains."""
    pair = []
    for function in (peer, cunorms):
        try:
            if in_place:
                pair.append(function(*(tensor.detach().clone() for tensor in tensors)))
                continue
            results = tuple(function(*tensors))
        except Exception as error:  # somebody else's compiler raises what it likes
            return f"{type(error).__name__}: {error}"[:200]
        pair.append((*results, *gradients(results, tensors, [torch.ones_like(result) for result in results])))
    for result, expected in zip(*pair, strict=True):
        apart = float((result.float() - expected.float()).abs().max() / expected.float().abs().max())
        if not apart < 0.03:
            return f"a result is {apart:.3g} of its largest away"
    return ""


def measure(name: str, rows: int, cols: int, modes: Sequence[str]) -> list[dict[str, Any]]:
    fusion, in_place = FUSIONS[name], IN_PLACE.get(name, {})
    rows = rows or ELEMENTS // cols
    lines = []
    candidates = providers(name, modes)
    tensors = arguments(fusion, rows, cols)
    refused = {
        who: refusal(function, candidates["cunorm"], tensors, who in in_place) for who, function in candidates.items()
    }
    del tensors
    for direction, moved in zip(("forward", "backward"), fusion.moved, strict=True):
        size = moved * rows * cols * 2
        sets = [arguments(fusion, rows, cols) for _ in range(timing.buffers_needed(size))]
        timers = {}
        for who, function in candidates.items():
            if refused[who] or (direction == "backward" and who in in_place):
                continue
            if direction == "forward":
                calls = [partial(torch.no_grad()(function), *of_call(tensors, who in in_place)) for tensors in sets]
            else:
                calls = []
                for tensors in sets:
                    results = tuple(function(*tensors))
                    given = [torch.randn_like(result) for result in results]
                    calls.append(partial(gradients, results, tensors, given))
            timers[who] = timing.timer("torch", calls, size)
        times = {
            who: str(taken) if isinstance(taken, Exception) else round(taken.median * 1e6, 3)
            for who, taken in zip(timers, timing.in_turns(list(timers.values())), strict=True)
        }
        times |= {who: why for who, why in refused.items() if why}
        lines.append({"name": name, "direction": direction, "rows": rows, "cols": cols, "us": times})
        del timers, sets
        torch.cuda.empty_cache()
    return lines


def of_call(tensors: Sequence[Tensor], in_place: bool) -> list[Tensor]:
    """Return the tensors, or copies of them for a function that writes over its arguments."""
    return [tensor.detach().clone() for tensor in tensors] if in_place else list(tensors)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--only", nargs="+", choices=FUSIONS, default=list(FUSIONS))
    parser.add_argument("--rows", type=int, nargs="+", default=ROWS)
    parser.add_argument("--cols", type=int, nargs="+", default=COLS)
    parser.add_argument("--modes", nargs="*", choices=MODES, default=list(MODES), help="of torch.compile; default: all")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="end after the case that passes this many")
    options = parser.parse_args()
    # A backward pass runs many times over what one forward pass kept.
    torch._functorch.config.donated_buffer = False
    torch._dynamo.config.recompile_limit = 64
    start = time.perf_counter()
    # The default stream cannot be captured.
    with lines_to(options.out) as write, torch.cuda.stream(torch.cuda.Stream()):
        for rows, cols, name in product(options.rows, options.cols, options.only):
            if time.perf_counter() - start > options.seconds:
                break
            for line in measure(name, rows, cols, options.modes):
                write(**line)


if __name__ == "__main__":
    main()
