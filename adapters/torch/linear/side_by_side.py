"""Two halves of a backward pass side by side: what a CUDA graph wins by a second stream.

The gradients of weight and bias and those of the norm need nothing of each other: the small kernels of one half fit
beside the product of the other, and two products that do not fill the GPU beside each other. Only in a graph: outside
one the host is what takes the time of small problems, and events would add to it.

On an H200, microseconds one after the other and side by side: 16 rows, 4096 -> 12288 84 and 73, 128 rows 95 and 84;
2048 rows, 1024 -> 3072 67 and 61, 8192 rows 200 and 195; with z kept 82 and 70, 92 and 82, 63 and 54, 189 and 183, and
8192 rows, 4096 -> 12288 2560 and 2488. There z computed again took 2580 one after the other and 2527 side by side, in
runs of their own, where torch.compile took 2572 and 2621.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

MOST = 128 << 20  # bytes that may be held at once beyond what one half after the other holds

_streams: dict[tuple[int, int], Any] = {}


def applies(x: Tensor, size: int) -> bool:
    """Whether `run` has the two side by side."""
    return x.is_cuda and size <= MOST and torch.cuda.is_current_stream_capturing()


def run(x: Tensor, size: int, first: Callable[[], Any], second: Callable[[], Any]) -> tuple[Any, Any]:
    """(first(), second()) on the device of x; side by side they hold `size` bytes more at once."""
    if not applies(x, size):
        return first(), second()
    # Whatever the second stream allocates it reuses only behind another wait for the present stream: there is one for
    # each, and all that was freed meanwhile was used in its order.
    present = torch.cuda.current_stream(x.device)
    key = (x.get_device(), present.cuda_stream)
    beside = _streams.get(key)
    if beside is None:
        beside = _streams[key] = torch.cuda.Stream(x.device)
    beside.wait_stream(present)
    with torch.cuda.stream(beside):
        results = first()
    others = second()
    present.wait_stream(beside)
    return results, others
