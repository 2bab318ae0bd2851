"""Measure the host time of a call with a known number of rows and with a new one: `python -m bench.new_rows`.

A call with a new number of rows is planned and prepared, but its kernel is loaded already, by a call with other rows. A
call returns before its kernel has run, and the time until it returns is measured, on an idle GPU, in us: medians over
numbers of rows. Memory comes out of the frameworks' pools, which are filled before.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from time import perf_counter
from typing import Any

import cupy
import torch

import cunorm
import cunorm.torch
from cunorm.kernel import compile, device
from cunorm.torch import named
from cunorm.torch.norm import calls, nodes, repeats

COLS = 4096
MOST = 8192  # rows
STEP = 128  # between the numbers of rows of a series
KNOWN = 5  # calls of a known number of rows; only the later half counts, as the first ones describe the call
POOL = 2 << 30  # bytes

Call = Callable[[], Any]
# Makes, for a number of rows, the forward pass and the backward pass of its results.
Passes = Callable[[int], tuple[Call, Callable[[Any], Any]]]


def of_cupy(function: str) -> Passes:
    x, residual, dy, ds = (cupy.zeros((MOST, COLS), "float16") for _ in range(4))
    weight, bias = (cupy.zeros(COLS, "float16") for _ in range(2))
    of_function = getattr(cunorm, function)
    if function == "add_rms_norm":
        forward, backward = of_function.forward, of_function.backward
    else:
        forward, backward = (getattr(cunorm, f"{function}_{direction}") for direction in ("forward", "backward"))

    def of_rows(rows: int) -> tuple[Call, Callable[[Any], Any]]:
        of_x, of_residual, of_dy, of_ds = (array[:rows] for array in (x, residual, dy, ds))
        if function == "layer_norm":
            return (
                lambda: forward(of_x, None, weight, bias),
                lambda results: backward(of_dy, of_x, *results[1:], weight),
            )
        if function == "rms_norm":
            return lambda: forward(of_x, None, weight), lambda results: backward(of_dy, of_x, results[1], weight)
        return lambda: forward(of_x, of_residual, weight), lambda results: backward(results[1], of_dy, of_ds)

    return of_rows


def of_torch(function: str) -> Passes:
    x, residual, dy = (torch.zeros(MOST, COLS, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    vectors = torch.zeros(2 if function == "layer_norm" else 1, COLS, device="cuda", dtype=torch.bfloat16).unbind()
    weights = [vector.clone().requires_grad_() for vector in vectors]
    norm = getattr(cunorm.torch, function)

    def of_rows(rows: int) -> tuple[Call, Callable[[Any], Any]]:
        summands = [tensor[:rows].requires_grad_() for tensor in ((x, residual) if "add" in function else (x,))]
        of_dy = dy[:rows]

        def forward() -> Any:
            results = norm(*summands, *(() if "add" in function else ((COLS,),)), *weights)
            return results if isinstance(results, torch.Tensor) else results[0]

        return forward, lambda y: torch.autograd.grad(y, [*summands, *weights], of_dy)

    return of_rows


def timed(call: Callable[..., Any], *given: Any) -> tuple[Any, float]:
    cupy.cuda.runtime.deviceSynchronize()
    start = perf_counter()
    results = call(*given)
    return results, (perf_counter() - start) * 1e6


def both(passes: tuple[Call, Callable[[Any], Any]]) -> tuple[float, float]:
    """Return the microseconds of the two passes."""
    forward, backward = passes
    results, of_forward = timed(forward)
    _, of_backward = timed(backward, results)
    return of_forward, of_backward


def series(of_rows: Passes, first: int) -> tuple[list[float], list[float], int]:
    """Return (known us, new us, how many calls loaded a kernel and do not count), where us are those of both passes.

    The numbers of rows are `first`, `first` + STEP, and so on; those that load the kernels are between them.
    """
    for rows in range(STEP // 2, MOST, STEP // 2):
        both(of_rows(rows))
    new, known, loaded = [], [], 0
    for rows in range(first, MOST, STEP):
        passes, before = of_rows(rows), len(compile._kernels)
        once = both(passes)
        if len(compile._kernels) > before:
            loaded += 1
            continue
        new.append(once)
        known += [both(passes) for _ in range(KNOWN)][KNOWN // 2 :]
    medians = ([statistics.median(times) for times in zip(*times_of, strict=True)] for times_of in (known, new))
    return *medians, loaded


@contextmanager
def nodes_in_cpp(used: bool) -> Iterator[None]:
    """Let torch's passes run in C++, or by Python."""
    if used and (why := nodes.build()):
        raise RuntimeError(f"there are no nodes in C++: {why}")
    module = nodes.module
    nodes.module = module if used else lambda: None
    for kept in (repeats._calls, calls._made, calls._affine_call.results, named._call_of.results):
        kept.clear()
    try:
        yield
    finally:
        nodes.module = module


def main() -> None:
    argparse.ArgumentParser(description=__doc__).parse_args()
    cupy.cuda.alloc(POOL)  # is freed at once, into the pool
    torch.empty(POOL, dtype=torch.uint8, device="cuda")
    small = [torch.empty(1 << 16, dtype=torch.uint8, device="cuda") for _ in range(256)]
    del small
    print(f"{device.current(0).name}, {COLS} columns of 16 bits, {MOST // STEP} numbers of rows; us")
    print(f"{'':44}{'known':>8}{'new':>8}{'more':>8}")
    first = 1  # each series has odd numbers of its own, because both kinds of torch's passes share their plans
    for function in ("layer_norm", "rms_norm", "add_rms_norm"):
        for framework, used in (("CuPy", False), ("torch, nodes in C++", True), ("torch, by Python", False)):
            with nodes_in_cpp(used):
                make = of_cupy if framework == "CuPy" else of_torch
                known, new, loaded = series(make(function), first)
            first += 2
            for direction, of_known, of_new in zip(("forward", "backward"), known, new, strict=True):
                label = f"{framework}: {function} {direction}"
                print(f"{label:44}{of_known:8.1f}{of_new:8.1f}{of_new - of_known:8.1f}")
            if loaded:
                print(f"{'':44}{loaded} numbers of rows loaded a kernel, and do not count")


if __name__ == "__main__":
    main()
