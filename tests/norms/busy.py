"""A kernel that keeps a stream busy, so that later work on the stream has to wait."""

from __future__ import annotations

import numpy

SPIN = r"""
extern "C" __global__ void spin(unsigned long long nanoseconds) {
  unsigned long long start, now;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(start));
  do {
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
  } while (now - start < nanoseconds);
}
"""


def spin(milliseconds: int) -> None:
    """Keep CuPy's current stream busy."""
    import cupy

    kernel = cupy.RawKernel(SPIN, "spin")
    kernel((1,), (1,), (numpy.uint64(milliseconds * 1_000_000),))
