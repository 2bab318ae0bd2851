"""`add_layer_norm` and `add_rms_norm` against the two separate calls: `python -m bench.fusion [--out FILE]`.

The sum is torch's, whose kernel moves memory at the roof, the norm is cunorm's. Both ways work on the same buffers, in
turns, on one stream; bits of y and s are compared first. By bytes moved forward takes four fifths of the time, backward
four sixths.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cupy
import torch

import cunorm

ELEMENTS = 1 << 26
COLS = (768, 1024, 4096, 7168, 8192, 16384, 32768, 65536)
TURNS = 40
EPS = {"layer_norm": 1e-5, "rms_norm": 1e-6}


def milliseconds(calls: list[Callable[[], Any]], turns: int = TURNS) -> list[float]:
    """Median of each, in turns, after a warm-up."""
    times: list[list[float]] = [[] for _ in calls]
    for turn in range(turns + 4):
        for which in range(len(calls)) if turn % 2 else reversed(range(len(calls))):
            start, stop = cupy.cuda.Event(), cupy.cuda.Event()
            start.record()
            calls[which]()
            stop.record()
            stop.synchronize()
            if turn >= 4:
                times[which].append(cupy.cuda.get_elapsed_time(start, stop))
    return [statistics.median(values) for values in times]


def measure(write: Callable[..., None], norm: str, cols: int, elements: int) -> None:
    rows = elements // cols
    x, residual, dy, ds = (torch.randn(rows, cols, device="cuda", dtype=torch.bfloat16) for _ in range(4))
    weight, bias = (torch.randn(cols, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    # CuPy's views, as bits: bfloat16 does not pass between all versions of both.
    view = lambda tensor: cupy.from_dlpack(tensor.view(torch.int16)).view("bfloat16")  # noqa: E731
    cx, cresidual, cdy, cds, cweight, cbias = map(view, (x, residual, dy, ds, weight, bias))
    parameters = (cweight, cbias) if norm == "layer_norm" else (cweight,)
    eps = EPS[norm]
    apart = getattr(cunorm, norm)
    together = getattr(cunorm, f"add_{norm}")
    s = torch.empty_like(x)
    cs, out = view(s), torch.empty_like(x)
    cout = view(out)

    def separate():
        torch.add(x, residual, out=s)
        return apart(cs, cols, *parameters, eps, out=cout)

    separate()
    y, sums = together(cx, cresidual, *parameters, eps)
    same = bool((y.view("int16") == cout.view("int16")).all()) and bool((sums.view("int16") == cs.view("int16")).all())
    before, after = milliseconds([separate, lambda: together(cx, cresidual, *parameters, eps)])
    write("forward", norm=norm, rows=rows, cols=cols, same_bits=same, separate_us=before * 1e3, fused_us=after * 1e3)

    _, _, *saved = getattr(cunorm, f"add_{norm}_forward")(cx, cresidual, *parameters, eps)
    backward = getattr(cunorm, f"{norm}_backward")
    fused = getattr(cunorm, f"add_{norm}_backward")

    def separate_backward():
        dx, *_ = backward(cdy, cs, *saved, cweight)
        view_of_dx = torch.from_dlpack(dx.view("int16")).view(torch.bfloat16)
        return view_of_dx.add_(ds)

    before, after = milliseconds([separate_backward, lambda: fused(cdy, cds, cs, *saved, cweight)])
    write("backward", norm=norm, rows=rows, cols=cols, separate_us=before * 1e3, fused_us=after * 1e3)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--elements", type=int, default=ELEMENTS)
    arguments = parser.parse_args()
    lines: list[dict[str, Any]] = []

    def write(kind: str, **fields: Any) -> None:
        fields = {name: round(value, 2) if isinstance(value, float) else value for name, value in fields.items()}
        fields["ratio"] = round(fields["fused_us"] / fields["separate_us"], 3)
        lines.append({"kind": kind, **fields})
        print(json.dumps(lines[-1]), flush=True)

    # Everything on torch's stream.
    with cupy.cuda.ExternalStream(torch.cuda.current_stream().cuda_stream):
        for norm in EPS:
            for cols in COLS:
                measure(write, norm, cols, arguments.elements)
                cupy.get_default_memory_pool().free_all_blocks()
    if arguments.out:
        arguments.out.write_text("".join(f"{json.dumps(line)}\n" for line in lines))


if __name__ == "__main__":
    main()
