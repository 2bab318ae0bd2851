"""Uniform random numbers of a seed, a row and a column, as kernels make them (kernels_cu/rows/philox.cuh): to the bit.

Philox4x32-10 (Salmon, Moraes, Dror, Shaw, Parallel random numbers: as easy as 1, 2, 3, 2011). A draw is of eight
neighbouring columns, 16 bits for each: numbers are multiples of 2^-16, from 0 up to 1.
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
    """Four words of 32 bits for each counter of four and key of two, arrays that broadcast.

    `product` has the upper and the lower word of an array of words times a number, `sum` the lower of one and a number.
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        (high0, low0), (high1, low1) = product(c0, MULTIPLIERS[0]), product(c2, MULTIPLIERS[1])
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = sum(k0, INCREMENTS[0]), sum(k1, INCREMENTS[1])
    return c0, c1, c2, c3


def _product(words: Any, number: int) -> tuple[Any, Any]:
    """Return the words of a product, computed in 64 bits; beyond them it wraps round."""
    whole = words * number
    return (whole >> 32) & MASK, whole & MASK


def _sum(words: Any, number: int) -> Any:
    return (words + number) & MASK


def uniform(seed: Any, shape: tuple[int, ...], module: Any, **options: Any) -> Any:
    """The numbers for each element of an array of this shape, the last axis its columns.

    `seed`: an array without axes of int64, of NumPy or torch, whose `module` and options of new arrays are given.
    """
    rows = module.arange(math.prod(shape[:-1]), **options)[:, None]
    octets = module.arange(-(-shape[-1] // COLUMNS), **options)
    zeros = rows * 0 + octets * 0
    counter = octets + zeros, zeros, (rows & MASK) + zeros, (rows >> 32) + zeros
    words = draw(counter, ((seed & MASK) + zeros, ((seed >> 32) & MASK) + zeros), _product, _sum)
    halves = module.stack([half for one in words for half in (one & 0xFFFF, one >> 16)], -1)
    return (halves.reshape(len(rows), -1)[:, : shape[-1]] * STEP).reshape(shape)
