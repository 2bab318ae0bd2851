"""Time the named functions over fused operations, in bfloat16: `python -m bench.fusion [--out FILE] [--only NAME ...]`.

`add_layer_norm` and `add_rms_norm` are compared with the two separate calls: the sum is torch's, whose kernel moves
memory at the roof, and the norm is cunorm's. Both ways work on the same buffers, in turns, after the bits of y and s
were compared. By bytes moved, the forward pass takes four fifths of the time, and the backward pass four sixths.

Every other function is compared with the roof: the fastest kernel of roof.py that reads one array or two for one
written, whichever is nearer, at as many bytes as the function moves.

Expressions of one's own are compared with LayerNorm with weight and bias, which moves as many bytes, in turns.

Times are those of CUDA graphs (timing.py). What is read is larger than L2, and calls write in turns to two buffers.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import cupy
import torch

import cunorm
from bench import timing
from bench.results import lines_to
from bench.roofs import Roofs
from cunorm.expression import silu

ELEMENTS = 1 << 26
COLS = (768, 1024, 4096, 7168, 8192, 16384, 32768, 65536)
SECONDS = 0.1  # for the turns of what is compared
EPS = {"layer_norm": 1e-5, "rms_norm": 1e-6}


def milliseconds(calls: Sequence[Callable[[], Any]]) -> list[float]:
    """Return the median milliseconds of each call, in turns."""
    for call in calls:
        kept = [call() for _ in range(4)]  # gives the pool what a graph will need, which may allocate nothing
        del kept
    times = timing.in_turns([timing.timer("torch", [call, call], 6 * ELEMENTS) for call in calls], SECONDS)
    failed = [taken for taken in times if isinstance(taken, Exception)]
    if failed:
        raise failed[0]
    return [taken.median * 1e3 for taken in times if isinstance(taken, timing.Times)]


def as_cupy(tensor: torch.Tensor) -> cupy.ndarray:
    """Return CuPy's view of a tensor, made as bits because not all versions exchange bfloat16."""
    return cupy.from_dlpack(tensor.view(torch.int16)).view("bfloat16")


def measure(write: Callable[..., None], norm: str, cols: int, elements: int) -> None:
    rows = elements // cols
    x, residual, dy, ds = (torch.randn(rows, cols, device="cuda", dtype=torch.bfloat16) for _ in range(4))
    weight, bias = (torch.randn(cols, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    cx, cresidual, cdy, cds, cweight, cbias = map(as_cupy, (x, residual, dy, ds, weight, bias))
    parameters = (cweight, cbias) if norm == "layer_norm" else (cweight,)
    eps = EPS[norm]
    apart = getattr(cunorm, norm)
    together = getattr(cunorm, f"add_{norm}")
    s = torch.empty_like(x)
    cs, out = as_cupy(s), torch.empty_like(x)
    cout = as_cupy(out)

    def separate():
        torch.add(x, residual, out=s)
        return apart(cs, cols, *parameters, eps, out=cout)

    separate()
    y, sums = together(cx, cresidual, *parameters, eps)
    same = bool((y.view("int16") == cout.view("int16")).all()) and bool((sums.view("int16") == cs.view("int16")).all())
    before, after = milliseconds([separate, lambda: together(cx, cresidual, *parameters, eps)])
    write("forward", norm=norm, rows=rows, cols=cols, same_bits=same, separate_us=before * 1e3, fused_us=after * 1e3)

    _, saved = together.forward(cx, cresidual, *parameters, eps)
    statistics = [statistic for statistic in saved.statistics.values() if statistic is not None]
    backward = getattr(cunorm, f"{norm}_backward")

    def separate_backward():
        dx, *_ = backward(cdy, cs, *statistics, cweight)
        view_of_dx = torch.from_dlpack(dx.view("int16")).view(torch.bfloat16)
        return view_of_dx.add_(ds)

    before, after = milliseconds([separate_backward, lambda: together.backward(saved, cdy, cds)])
    write("backward", norm=norm, rows=rows, cols=cols, separate_us=before * 1e3, fused_us=after * 1e3)


class Named(NamedTuple):
    """The operands of a function, and how many tensors of the size of x each pass reads and writes."""

    operands: str  # f"{name}:{kind}" of each
    forward: tuple[int, int]
    backward: tuple[int, int]
    options: dict[str, Any] = {}  # noqa: RUF012


SAMPLES = 16
MODULATE, GATE = "scale:sample shift:sample", "z:full weight:column"
GATE_ADD = f"residual:full gate:sample {MODULATE}"
NAMED = {
    "add_rms_norm": Named("residual:full weight:column", (2, 2), (3, 1)),
    "layer_norm_add": Named("residual:full weight:column bias:column", (2, 1), (2, 1)),
    "rms_norm_add": Named("residual:full weight:column", (2, 1), (2, 1)),
    "layer_norm_modulate": Named(MODULATE, (1, 1), (2, 1)),
    "rms_norm_modulate": Named(MODULATE, (1, 1), (2, 1)),
    "gate_add_layer_norm_modulate": Named(GATE_ADD, (2, 2), (4, 2)),
    "add_rms_norm, dropout": Named("residual:full weight:column", (2, 2), (3, 2), {"dropout_p": 0.1}),
    # These are the tensors that one kernel for both norms would move; the two launches of the backward pass move 7.
    "rms_norm_add_rms_norm": Named(
        "residual:full weight:column second_weight:column",
        (2, 2),
        (4, 2),
    ),
    "rms_norm_gated": Named(GATE, (2, 1), (3, 2)),
    "rms_norm_gated, gate first": Named(GATE, (2, 1), (3, 2), {"norm_before_gate": False}),
    "rms_norm_gated, groups of 128": Named(GATE, (2, 1), (3, 2), {"group_size": 128}),
}


def measure_named(write: Callable[..., None], name: str, cols: int, elements: int, roofs: dict[int, float]) -> None:
    case, function = NAMED[name], name.partition(",")[0]
    shape = (SAMPLES, elements // cols // SAMPLES, cols)
    shapes = {"full": shape, "sample": (SAMPLES, cols), "column": (cols,)}

    def made(shape: tuple[int, ...]) -> cupy.ndarray:
        return as_cupy(torch.randn(shape, device="cuda", dtype=torch.bfloat16))

    operands = {operand: made(shapes[kind]) for operand, kind in (pair.split(":") for pair in case.operands.split())}
    arrays = {"x": made(shape), **operands, "dy": made(shape), "ds": made(shape)}
    passed = [arrays[operand] for operand in ("x", *operands)]
    options = case.options | ({"seed": cupy.array([7])} if "dropout_p" in case.options else {})
    op = getattr(cunorm, function)
    results, saved = op.forward(*passed, **options)
    of_results = [arrays["dy"], arrays["ds"]] if isinstance(results, tuple) else [arrays["dy"]]
    calls = [lambda: op(*passed, **options), lambda: op.backward(saved, *of_results)]
    for kind, (reads, writes), time in zip(
        ("forward", "backward"), (case.forward, case.backward), milliseconds(calls), strict=True
    ):
        moved = (reads + writes) * arrays["x"].nbytes
        roof_us = moved / roofs[1 if reads <= writes else 2] * 1e6
        write(
            kind, name=name, cols=cols, moved=f"{reads} in, {writes} out", us=time * 1e3, of_roof=roof_us / time / 1e3
        )


def ten_multiply_adds(xhat, weight, bias):
    y = xhat * weight + bias
    for _ in range(9):
        y = 0.75 * y + bias
    return silu(y)


EXPRESSIONS = {
    "ten multiply-adds and a silu": cunorm.fuse("layer_norm", epilogue=ten_multiply_adds),
    "a number for each row": cunorm.fuse(
        "layer_norm", epilogue=lambda xhat, weight, bias, factor: (xhat * weight + bias) * factor
    ),
}


def measure_expression(write: Callable[..., None], name: str, cols: int, elements: int) -> None:
    op, rows = EXPRESSIONS[name], elements // cols
    x, dy = (as_cupy(torch.randn(rows, cols, device="cuda", dtype=torch.bfloat16)) for _ in range(2))
    shapes = {"weight": (cols,), "bias": (cols,), "factor": (rows, 1)}
    operands = {
        operand: as_cupy(torch.randn(shapes[operand], device="cuda", dtype=torch.bfloat16))
        for operand in op.operation.operands
    }
    weight, bias, eps = operands["weight"], operands["bias"], EPS["layer_norm"]
    _, saved = op.forward(x, eps=eps, **operands)
    _, mean, rstd = cunorm.layer_norm_forward(x, cols, weight, bias, eps)
    calls = {
        "forward": (lambda: cunorm.layer_norm(x, cols, weight, bias, eps), lambda: op(x, eps=eps, **operands)),
        "backward": (
            lambda: cunorm.layer_norm_backward(dy, x, mean, rstd, weight),
            lambda: op.backward(saved, dy),
        ),
    }
    for kind, pair in calls.items():
        named, own = milliseconds(list(pair))
        write(kind, name=name, cols=cols, us=own * 1e3, layer_norm_us=named * 1e3, of_layer_norm=own / named)


def roofs_of(elements: int) -> dict[int, float]:
    """Return the bytes a second of the fastest streaming kernel, by the arrays that it reads for one written."""
    a, b, out = (cupy.ones(elements, "float16") for _ in range(3))
    roofs, rates = Roofs(None), {}
    for reads, second in ((1, None), (2, b)):
        calls = [call for _, (call,) in roofs.calls([(a, second, out)])]
        rates[reads] = (reads + 1) * a.nbytes / min(milliseconds(calls)) * 1e3
    return rates


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--elements", type=int, default=ELEMENTS)
    parser.add_argument("--cols", type=int, nargs="+", default=COLS)
    every = (*EPS, *NAMED, *EXPRESSIONS)
    parser.add_argument("--only", nargs="+", choices=every, default=every, metavar="NAME", help=", ".join(every))
    arguments = parser.parse_args()

    # Everything runs on one stream of torch's, because the default stream cannot be captured.
    of_torch = torch.cuda.Stream()
    with (
        lines_to(arguments.out) as write_line,
        torch.cuda.stream(of_torch),
        cupy.cuda.ExternalStream(of_torch.cuda_stream),
    ):

        def write(kind: str, **fields: Any) -> None:
            fields = {name: round(value, 3) if isinstance(value, float) else value for name, value in fields.items()}
            if "separate_us" in fields:
                fields["ratio"] = round(fields["fused_us"] / fields["separate_us"], 3)
            write_line(kind, **fields)

        of_named = [name for name in arguments.only if name in NAMED]
        roofs = roofs_of(arguments.elements) if of_named else {}
        for name, cols in product(arguments.only, arguments.cols):
            if name in EPS:
                measure(write, name, cols, arguments.elements)
            elif name in EXPRESSIONS:
                measure_expression(write, name, cols, arguments.elements)
            else:
                measure_named(write, name, cols, arguments.elements, roofs)
            cupy.get_default_memory_pool().free_all_blocks()


if __name__ == "__main__":
    main()
