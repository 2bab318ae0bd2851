"""Uniform random numbers from a seed, a row and a column: the same bits as kernels_cu/rows/philox.cuh makes.

The generator is Philox4x32-10 (Salmon, Moraes, Dror, Shaw, Parallel random numbers: as easy as 1, 2, 3, 2011). One draw
serves eight neighbouring columns with 16 bits each, so numbers are multiples of 2^-16, from 0 up to 1.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
INCREMENTS = (0x9E3779B9, 0xBB67AE85)
MASK = 0xFFFFFFFF
COLUMNS = 8  # of a draw
STEP = 2.0**-16


def draw(
    counter: Sequence[Any],
    key: Sequence[Any],
    product: Callable[[Any, int], tuple[Any, Any]],
    sum: Callable[[Any, int], Any],
) -> tuple[Any, Any, Any, Any]:
    """Return four words of 32 bits for each counter of four words and key of two, which are arrays that broadcast.

    `product` returns the upper and the lower word of an array of words times a number; `sum` returns the lower word of
    an array of words plus a number.
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        (high0, low0), (high1, low1) = product(c0, MULTIPLIERS[0]), product(c2, MULTIPLIERS[1])
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = sum(k0, INCREMENTS[0]), sum(k1, INCREMENTS[1])
    return c0, c1, c2, c3


def _product(words: Any, number: int) -> tuple[Any, Any]:
    """Return the upper and lower word of a product in 64 bits. A product that is larger as a signed number wraps round,
    which leaves the words right.
    """
    product = words * number
    return (product >> 32) & MASK, product & MASK


def _sum(words: Any, number: int) -> Any:
    return (words + number) & MASK


def uniform(seed: Any, shape: tuple[int, ...], module: Any, **options: Any) -> Any:
    """Return a random number for each element of an array of this shape, whose last axis has the columns.

    `seed` is an int64 array without axes, of NumPy or torch. `module` and `options` make new arrays like it.
    """
    rows = module.arange(math.prod(shape[:-1]), **options)[:, None]
    octets = module.arange(-(-shape[-1] // COLUMNS), **options)
    zeros = rows * 0 + octets * 0
    counter = octets + zeros, zeros, (rows & MASK) + zeros, (rows >> 32) + zeros
    words = draw(counter, ((seed & MASK) + zeros, ((seed >> 32) & MASK) + zeros), _product, _sum)
    halves = module.stack([half for word in words for half in (word & 0xFFFF, word >> 16)], -1)
    return (halves.reshape(len(rows), -1)[:, : shape[-1]] * STEP).reshape(shape)
