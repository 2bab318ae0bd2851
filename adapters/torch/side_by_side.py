"""Two halves of a backward pass side by side: what a CUDA graph of a small problem wins by a second stream.

The gradients of weight and bias and those of the norm need nothing of each other. Where a product alone does not fill
the GPU the small kernels of one half fit beside the product of the other. Only in a graph: outside one the host is what
takes the time then, and events would add to it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

MOST = 8 << 20  # bytes of the normalised tensor, of which both halves hold one

_streams: dict[tuple[int, int], Any] = {}


def run(x: Tensor, first: Callable[[], Any], second: Callable[[], Any]) -> tuple[Any, Any]:
    """(first(), second()), one after the other or side by side."""
    if not (x.is_cuda and x.numel() * x.element_size() <= MOST and torch.cuda.is_current_stream_capturing()):
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
