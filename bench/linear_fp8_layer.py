"""Parts of `python -m bench.linear_fp8` that time LayerNormLinear in FP8, in bfloat16, and the bare products."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

from . import timing
from .linear_fp8_peers import peers
from .linear_fp8_times import bytes_of_product, measured, shares

HOST_TURNS, HOST_CALLS = 9, 16  # turns, and calls of a turn, which are so few that the host waits for none
PROFILED = 10  # calls


class Layer:
    """LayerNormLinear with and without FP8, on `count` sets of buffers, each with weights of its own."""

    def __init__(self, rows: int, cols: int, outs: int, count: int):
        import torch

        import cunorm.torch as adapter

        options: dict[str, Any] = {"device": "cuda", "dtype": torch.bfloat16}
        self.adapter, self.recipe = adapter, adapter.RowwiseScaling()
        self.modules = [
            adapter.LayerNormLinear(cols, outs, params_dtype=torch.bfloat16, device="cuda") for _ in range(count)
        ]
        self.xs = [torch.randn(rows, cols, **options, requires_grad=True) for _ in range(count)]
        self.dys = [torch.randn(rows, outs, **options) for _ in range(count)]
        for index in range(count):
            self.both(index, self.recipe, True)  # keeps the bytes of weight

    def forward(self, index: int, recipe: Any) -> Any:
        """Run a forward pass in bfloat16, or by a recipe with the bytes of weight that are kept."""
        import torch

        with torch.no_grad(), self.adapter.autocast(recipe is not None, recipe=recipe):
            return self.modules[index](self.xs[index], is_first_microbatch=None if recipe is None else False)

    def both(self, index: int, recipe: Any, first: bool | None = None) -> Any:
        import torch

        module, x = self.modules[index], self.xs[index]
        with self.adapter.autocast(recipe is not None, recipe=recipe):
            y = module(x, is_first_microbatch=first)
        return torch.autograd.grad(y, (x, *module.parameters()), self.dys[index])

    def weights(self, index: int) -> Any:
        """Return both layouts of weight, as a call makes them."""
        from cunorm.torch.linear.float8 import quantised

        return quantised(self.modules[index].weight.detach(), self.recipe.scheme, True)

    def each(self, function: Callable[..., Any], *more: Any) -> list[Callable[[], Any]]:
        return [lambda index=index: function(index, *more) for index in range(len(self.xs))]


def bare_products(layer: Layer) -> Callable[[int, str], Any]:
    """Return a function that computes y, dz or dweight by torch's product of bytes that are there already.

    Each product accumulates as RowwiseScaling does it.
    """
    import torch

    from cunorm.torch.linear.float8_arithmetic import as_right, cast_columns, cast_rows

    def rows(a: Any) -> Any:
        return cast_rows(a.detach())[:2]

    def columns(a: Any) -> Any:
        return cast_columns(a.detach(), a.detach().abs().amax(0).float())

    sets = [
        (layer.weights(index), rows(x), rows(dy), as_right(*columns(x)), columns(dy))
        for index, (x, dy) in enumerate(zip(layer.xs, layer.dys, strict=True))
    ]

    def multiplied(a: Any, b: Any, fast: bool, bias: Any = None) -> Any:
        options = {"out_dtype": torch.bfloat16, "use_fast_accum": fast}
        return torch._scaled_mm(a[0], b[0], scale_a=a[1].unsqueeze(1), scale_b=b[1], **options, bias=bias)

    def run(index: int, which: str) -> Any:
        weights, z, dy, z_columns, dy_columns = sets[index]
        if which == "y":
            return multiplied(z, weights[:2], True, layer.modules[index].bias.detach())
        return multiplied(dy, weights[2:], False) if which == "dz" else multiplied(dy_columns, z_columns, False)

    return run


def layers(rows: int, cols: int, outs: int) -> dict[str, Any]:
    moved = bytes_of_product(rows, cols, outs)
    layer = Layer(rows, cols, outs, timing.buffers_needed(moved))
    recipe, bare = layer.recipe, bare_products(layer)
    wide = layer.adapter.RowwiseScaling(high_precision_wgrad=True)
    names = ("y", "dz", "dweight")
    others, missing = peers(layer)
    times = measured(
        {
            "forward, bfloat16": layer.each(layer.forward, None),
            "forward, weight kept": layer.each(layer.forward, recipe),
            "forward and backward, bfloat16": layer.each(layer.both, None),
            "forward and backward": layer.each(layer.both, recipe),
            "forward and backward, weight kept": layer.each(layer.both, recipe, False),
            "the same, high_precision_wgrad": layer.each(layer.both, wide, False),
            "weight": layer.each(layer.weights),
            "product of y": layer.each(bare, "y"),
            "three products": layer.each(lambda index: [bare(index, name) for name in names]),
            **{name: layer.each(run) for name, run in others.items()},
        },
        moved,
    )

    def ratio(a: str, b: str) -> float | None:
        fine = isinstance(times[a], float) and isinstance(times[b], float)
        return round(times[a] / times[b], 3) if fine else None

    ratios = {
        "forward / product": ratio("forward, weight kept", "product of y"),
        "forward / bfloat16": ratio("forward, weight kept", "forward, bfloat16"),
        "both / three products": ratio("forward and backward, weight kept", "three products"),
        "both / bfloat16": ratio("forward and backward, weight kept", "forward and backward, bfloat16"),
    }
    every, kept, weight = (
        times[name] for name in ("forward and backward", "forward and backward, weight kept", "weight")
    )
    if all(isinstance(taken, float) for taken in (every, kept, weight)):
        ratios["saved / weight"] = round((every - kept) / weight, 3)
    return {"us": times, "ratios": ratios, "missing": missing}


def forwards(rows: int, cols: int, outs: int) -> dict[str, Any]:
    moved = bytes_of_product(rows, cols, outs)
    layer = Layer(rows, cols, outs, timing.buffers_needed(moved))
    others, missing = peers(layer, both=False)
    times = measured(
        {
            "bfloat16": layer.each(layer.forward, None),
            "RowwiseScaling": layer.each(layer.forward, layer.recipe),
            **{name.removeprefix("forward, "): layer.each(run) for name, run in others.items()},
        },
        moved,
    )
    return {"us": times, "of RowwiseScaling's": shares(times, "RowwiseScaling"), "missing": missing}


def host(rows: int, cols: int, outs: int) -> dict[str, Any]:
    """Return the median microseconds until a call returns, in turns, while the queue of kernels is short."""
    import torch
    from torch.nn import functional as F  # noqa: N812

    from cunorm.torch.linear.float8_arithmetic import cast_rows
    from cunorm.torch.linear.step import recipe_at_once
    from cunorm.torch.norm import functional, launching

    layer = Layer(rows, cols, outs, 1)
    module, x, bare, weights = layer.modules[0], layer.xs[0].detach(), bare_products(layer), layer.weights(0)
    weight, bias, gamma, beta = (
        parameter.detach()
        for parameter in (module.weight, module.bias, module.layer_norm_weight, module.layer_norm_bias)
    )
    bytes_, unit, shape = cast_rows(x)[0], torch.ones((), device="cuda"), x.shape[-1:]

    def context() -> None:
        with torch.no_grad(), layer.adapter.autocast(recipe=layer.recipe):
            pass

    def of_ones() -> Any:
        options = {"out_dtype": torch.float32, "use_fast_accum": True}
        return torch._scaled_mm(bytes_, weights.rows, scale_a=unit, scale_b=unit, **options)

    calls = {
        "forward, bfloat16": lambda: layer.forward(0, None),
        "forward": lambda: layer.forward(0, layer.recipe),
        "forward and backward, bfloat16": lambda: layer.both(0, None),
        "forward and backward": lambda: layer.both(0, layer.recipe),
        "forward and backward, weight kept": lambda: layer.both(0, layer.recipe, False),
        "contexts": context,
        "torch's linear": lambda: F.linear(x, weight, bias),
        "norm": lambda: functional.norm("layer_norm", x, shape, gamma, beta, 1e-5, torch.bfloat16, 0),
        "norm in 8 bits": lambda: launching.forward_by(
            recipe_at_once(x, gamma, beta, "layer_norm", None, 0, float8=True), (x, gamma, beta), (), 1e-5, False
        ),
        "torch's product, scales of rows, bias": lambda: bare(0, "y"),
        "torch's product, scales of rows": lambda: bare(0, "dz"),
        "torch's product, scales of one": of_ones,
        "rows cast": lambda: cast_rows(x),
        "a view": lambda: x.t(),
        "torch.empty": lambda: torch.empty((rows, cols), dtype=torch.bfloat16, device="cuda"),
    }
    times: dict[str, list[float]] = {name: [] for name in calls}
    for turn in range(HOST_TURNS):
        for name, call in calls.items():
            torch.cuda.synchronize()
            for _ in range(HOST_CALLS):
                start = time.perf_counter()
                call()
                if turn:  # the first turn is a warm-up
                    times[name].append(time.perf_counter() - start)
    medians = {name: round(statistics.median(taken) * 1e6, 1) for name, taken in times.items()}
    ratios = {
        name: round(medians[name] / medians[f"{name}, bfloat16"], 2) for name in ("forward", "forward and backward")
    }
    kept = medians["forward and backward, weight kept"] / medians["forward and backward, bfloat16"]
    return {"us": medians, "times bfloat16": ratios | {"forward and backward, weight kept": round(kept, 2)}}


def kernels(rows: int, cols: int, outs: int) -> dict[str, Any]:
    """Return [name, launches a call, microseconds a call] of each kernel, in order."""
    import torch
    from torch.autograd import DeviceType
    from torch.profiler import ProfilerActivity, profile

    layer = Layer(rows, cols, outs, 2)
    by_kind = {}
    kinds = (("bfloat16", None, None), ("FP8, weight kept", layer.recipe, False), ("FP8", layer.recipe, None))
    for name, recipe, first in kinds:
        for index in (0, 1):
            layer.both(index, recipe, first)
        torch.cuda.synchronize()
        with profile(activities=[ProfilerActivity.CUDA], acc_events=True) as taken:
            for turn in range(PROFILED):
                layer.both(turn % 2, recipe, first)
            torch.cuda.synchronize()
        times: dict[str, list[float]] = {}
        for event in taken.events() or ():
            if event.device_type == DeviceType.CUDA:  # the two are equal, but never the same object
                times.setdefault(event.name, []).append(event.time_range.elapsed_us())
        by_kind[name] = [
            [kernel[:100], len(each) / PROFILED, round(sum(each) / PROFILED, 2)] for kernel, each in times.items()
        ]
    return {"kernels": by_kind}
