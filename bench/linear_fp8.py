"""Time LayerNormLinear in 8 bits, part by part: `python -m bench.linear_fp8 [--parts ...] [--shapes ...] [--out FILE]`.

    casts      the casts of operands, and the roof for their bytes, 3 for an element of 16 bits
    products   products with scales of rows, with scales of tensors, and with scales applied afterwards, by both kinds
               of accumulation, and with scales of blocks, 1 x 128 by 128 x 128, by the split one
    layers     cunorm.torch.LayerNormLinear with RowwiseScaling and in bfloat16, and the bare products of the same kind;
               TransformerEngine's with its current scaling and torchao's scales of rows, where they are installed
    forwards   only the forward passes of these, with weight kept, for shapes from few rows to many
    host       the microseconds until a call returns, and those of its parts
    kernels    each kernel of a forward and backward pass, by torch's profiler

All contenders of a shape are replayed in turns after a warm-up, but the last two parts run in eager mode. Each shape
has a line of JSON with medians in microseconds. Shapes are rows x in x out, as 128x4096x12288.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from . import timing
from .linear_fp8_layer import forwards, host, kernels, layers
from .linear_fp8_times import SECONDS, bytes_of_cast, bytes_of_product, measured, shares
from .results import lines_to

PARTS = ("casts", "products", "layers", "forwards", "host", "kernels")
CASTS = ((65536, 1024), (16384, 4096), (8192, 8192), (8192, 12288), (2340, 28672))
# (rows, in, out), as in bench/linear.py
SHAPES = (
    (16, 4096, 12288),
    (128, 4096, 12288),
    (2048, 1024, 3072),
    (8192, 1024, 3072),
    (8192, 4096, 12288),
    (8192, 8192, 10240),
)
FORWARDS = tuple(
    (rows, *sizes) for sizes in ((1024, 4096), (8192, 10240), (4096, 12288)) for rows in (128, 512, 2048, 8192)
)
BLOCK = 128  # columns that share a scale; in weight as many outputs share it too


def casts(rows: int, cols: int, roofs: Any) -> dict[str, Any]:
    import cupy
    import torch

    from cunorm.torch.linear import float8_arithmetic as casting

    moved = bytes_of_cast(rows, cols)
    count = timing.buffers_needed(moved)
    xs = [torch.randn(rows, cols, device="cuda", dtype=torch.bfloat16) for _ in range(count)]
    outs = [torch.empty(rows * cols, device="cuda", dtype=torch.uint8) for _ in range(count)]
    amax, weight = torch.full((cols,), 5.0, device="cuda"), torch.ones(cols, device="cuda", dtype=torch.bfloat16)
    statistics = torch.stack((torch.zeros(rows, device="cuda"), torch.ones(rows, device="cuda")))

    def each(call: Callable[[Any], Any]) -> list[Callable[[], Any]]:
        return [lambda x=x: call(x) for x in xs]

    def weights(x: Any) -> Any:
        """Return both layouts of a weight, which take two reads of it."""
        by_rows = casting.cast_rows(x, column_amax=True)
        return by_rows, casting.cast_columns(x, by_rows[3])

    halves = [cupy.asarray(x.view(torch.uint8)).reshape(2, -1) for x in xs]
    sets = [(a, b, cupy.asarray(out)) for (a, b), out in zip(halves, outs, strict=True)]
    streams = [timing.timer("cupy", calls, moved) for _, calls in roofs.calls(sets)]
    roof = min(taken.median for taken in timing.in_turns(streams, SECONDS) if not isinstance(taken, Exception))
    times = measured(
        {
            "rows": each(casting.cast_rows),
            "rows, maxima": each(lambda x: casting.cast_rows(x, column_amax=True)),
            "rows, sums and maxima": each(lambda x: casting.cast_rows(x, column_sums=True, column_amax=True)),
            "columns": each(lambda x: casting.cast_columns(x, amax)),
            "normalised columns": each(
                lambda x: casting.normalised_columns(x, statistics, weight, weight, "layer_norm")
            ),
            "weights both ways": each(weights),
        },
        moved,
    )
    microseconds = {"roof": round(roof * 1e6, 2)} | times
    both = times["weights both ways"]
    of_roof = shares(microseconds, "roof")
    if isinstance(both, float):
        of_roof["weights both ways"] = round(2 * microseconds["roof"] / both, 3)
    return {"us": microseconds, "of roof": of_roof}


def products(rows: int, cols: int, outs: int) -> dict[str, Any]:
    import torch

    from cunorm.torch.linear import float8_arithmetic as casting

    moved = bytes_of_product(rows, cols, outs)
    count = timing.buffers_needed(moved)
    wide = [
        [torch.randn(size, cols, device="cuda", dtype=torch.bfloat16) for size in (rows, outs)] for _ in range(count)
    ]
    bytes_ = [[casting.cast_rows(matrix)[:2] for matrix in pair] for pair in wide]
    bias = torch.randn(outs, device="cuda", dtype=torch.bfloat16)
    unit = torch.ones((), device="cuda")
    call = torch._scaled_mm

    def by_rows(pair: Any, fast: bool) -> Any:
        (a, a_scale), (b, b_scale) = pair
        scales = {"scale_a": a_scale[:, None], "scale_b": b_scale[None]}
        return call(a, b.t(), **scales, bias=bias, out_dtype=torch.bfloat16, use_fast_accum=fast)

    def by_tensor(pair: Any, fast: bool) -> Any:
        (a, _), (b, _) = pair
        return call(a, b.t(), scale_a=unit, scale_b=unit, bias=bias, out_dtype=torch.bfloat16, use_fast_accum=fast)

    # torch takes scales of blocks as (rows, cols / 128) and (cols / 128, outs / 128), contiguous down a column.
    of_blocks = [
        torch.ones(cols // BLOCK, rows, device="cuda").t(),
        torch.ones(outs // BLOCK, cols // BLOCK, device="cuda").t(),
    ]

    def by_blocks(pair: Any) -> Any:
        (a, _), (b, _) = pair
        return call(a, b.t(), *of_blocks, out_dtype=torch.bfloat16, use_fast_accum=False)

    def scaled_after(pair: Any, dtype: Any) -> Any:
        (a, a_scale), (b, b_scale) = pair
        product = call(a, b.t(), scale_a=unit, scale_b=unit, out_dtype=dtype, use_fast_accum=True)
        return casting.scaled(product, a_scale, b_scale, bias, torch.bfloat16)

    def each(function: Callable[..., Any], *more: Any) -> list[Callable[[], Any]]:
        return [lambda pair=pair: function(pair, *more) for pair in bytes_]

    times = measured(
        {
            "bfloat16": [lambda pair=pair: torch.addmm(bias, pair[0], pair[1].t()) for pair in wide],
            "rows, fast": each(by_rows, True),
            "rows, split": each(by_rows, False),
            "tensor, fast": each(by_tensor, True),
            "tensor, split": each(by_tensor, False),
            "blocks, split": each(by_blocks),
            "ones, then scales, float32": each(scaled_after, torch.float32),
            "ones, then scales, bfloat16": each(scaled_after, torch.bfloat16),
        },
        moved,
    )
    return {"us": times, "times bfloat16": shares(times, "bfloat16")}


def shape_of(text: str) -> tuple[int, int, int]:
    rows, cols, outs = map(int, text.split("x"))
    return rows, cols, outs


def lines(parts: Sequence[str], shapes: Sequence[tuple[int, int, int]] | None) -> Iterator[dict[str, Any]]:
    if "casts" in parts:
        from .roofs import Roofs

        roofs = Roofs(None)
        for rows, cols in CASTS:
            yield {"part": "casts", "shape": [rows, cols]} | casts(rows, cols, roofs)
    functions = {"products": products, "host": host, "kernels": kernels, "layers": layers, "forwards": forwards}
    for name, function in functions.items():
        if name in parts:
            for shape in shapes or (FORWARDS if name == "forwards" else SHAPES):
                yield {"part": name, "shape": list(shape)} | function(*shape)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--shapes", nargs="+", type=shape_of, help="default: those of each part")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args(arguments)
    import torch

    # The default stream cannot be captured.
    with lines_to(options.out) as write, torch.cuda.stream(torch.cuda.Stream()):
        for line in lines(options.parts, options.shapes):
            write(**line)


if __name__ == "__main__":
    main()
