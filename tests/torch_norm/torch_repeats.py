"""Calls that follow one another, and differ so little that one might be mistaken for an earlier one."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch_tensors import random, same

from cunorm.torch import LayerNormLinear, layer_norm, rms_norm
from cunorm.torch.norm import calls as forms
from cunorm.torch.norm import repeats

ROWS, COLS = 6, 64


def misaligned(*shape: int, **options: Any) -> Any:
    size = torch.Size(shape).numel()
    return random(size + 1, **options)[1:].view(shape)


def calls() -> dict[str, Any]:
    """Return (x, weight, bias, dy, context) of calls whose keys differ in one part each."""
    x, weight, bias, dy = random(ROWS, COLS), random(COLS, seed=1), random(COLS, seed=2), random(ROWS, COLS, seed=3)
    plain, wide = contextlib.nullcontext, random(ROWS, 2 * COLS)[:, :COLS]
    return {
        "plain": (x, weight, bias, dy, plain),
        "other values": (x + 1, weight, bias, dy, plain),
        "a view": (wide, weight, bias, dy, plain),
        "misaligned": (misaligned(ROWS, COLS), weight, bias, dy, plain),
        "misaligned weight": (x, misaligned(COLS, seed=1), bias, dy, plain),
        "misaligned gradient": (x, weight, bias, misaligned(ROWS, COLS, seed=3), plain),
        "expanded gradient": (x, weight, bias, dy[:1].expand(ROWS, COLS), plain),
        "weight in 16 bits": (x, weight.half(), bias, dy, plain),
        "bias in 16 bits": (x, weight, bias.half(), dy, plain),
        "no bias": (x, weight, None, dy, plain),
        "neither": (x, None, None, dy, plain),
        "bias alone": (x, None, bias, dy, plain),
        "frozen weight": (x, weight.detach().requires_grad_(False), bias, dy, plain),
        "without gradients": (x, weight, bias, None, torch.no_grad),
        "in inference mode": (x, weight, bias, None, torch.inference_mode),
        "no rows": (x[:0], weight, bias, dy[:0], plain),
    }


def results(op: str, x: Any, weight: Any, bias: Any, dy: Any, context: Any, frozen: bool) -> list[Any]:
    leaves: list[Any] = [None if tensor is None else tensor.detach().requires_grad_() for tensor in (x, weight, bias)]
    if frozen:
        leaves[1] = weight
    parameters = leaves[1:] if op == "layer_norm" else leaves[1:2]
    with context():
        y = (layer_norm if op == "layer_norm" else rms_norm)(leaves[0], (COLS,), *parameters, eps=1e-5)
    if dy is None:
        assert y.grad_fn is None
        return [y]
    wanted = [leaf for leaf in (leaves[0], *parameters) if leaf is not None and leaf.requires_grad]
    return [y.detach(), *torch.autograd.grad(y, wanted, dy)]


def first_then_repeated(cases: dict[str, Any], run: Any) -> None:
    """Assert that calls have the bits of first ones when they follow each other and earlier ones are still known."""
    first = {}
    for name, case in cases.items():
        for kept in (repeats._calls, repeats._forms, forms._families, forms._made, forms._affine_call.results):
            kept.clear()
        first[name] = run(*case)
    for _ in range(2):
        for name, case in cases.items():
            repeated = run(*case)
            assert len(repeated) == len(first[name]), name
            assert all(same(again, expected) for again, expected in zip(repeated, first[name], strict=True)), name


def linear_calls() -> dict[str, Any]:
    """Return (x, dy, module, context) of calls that follow one another in modules of `layer_norm_linear`."""

    def module(**options: Any) -> Any:
        torch.manual_seed(0)
        return LayerNormLinear(COLS, 32, device="cpu", **options)

    single: dict[str, Any] = {"dtype": torch.float32}
    x, dy = random(ROWS, COLS, **single), random(ROWS, 32, seed=3, **single)
    plain, own, wide = contextlib.nullcontext, module(), random(ROWS, 2 * COLS, **single)[:, :COLS]
    frozen = module()
    frozen.weight.requires_grad_(False)
    return {
        "plain": (x, dy, own, plain),
        "other values": (x + 1, dy, own, plain),
        "a view": (wide, dy, own, plain),
        "misaligned": (misaligned(ROWS, COLS, **single), dy, own, plain),
        "expanded gradient": (x, dy[:1].expand(ROWS, 32), own, plain),
        "three axes": (x.view(2, 3, COLS), dy.view(2, 3, 32), own, plain),
        "z kept": (x, dy, module(keep_normalized=True), plain),
        "no bias": (x, dy, module(bias=False), plain),
        "RMSNorm": (x, dy, module(normalization="RMSNorm"), plain),
        "other eps": (x, dy, module(eps=1.0), plain),
        "centred": (x, dy, module(zero_centered_gamma=True), plain),
        "frozen weight": (x, dy, frozen, plain),
        "two parts": (x, dy, module(parameters_split=("q", "k")), plain),
        "without gradients": (x, None, own, torch.no_grad),
    }


def linear_results(x: Any, dy: Any, module: Any, context: Any) -> list[Any]:
    leaf = x.detach().requires_grad_()
    wanted = [leaf, *(parameter for parameter in module.parameters() if parameter.requires_grad)]
    with context():
        y = module(leaf)
    return [y.detach(), *(() if dy is None else torch.autograd.grad(y, wanted, dy.to(y.dtype)))]
