"""Views of one buffer that kernels read or write where they lie."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

HEADS = 3
TOKENS = 4
# Each view takes a buffer of shape (tokens, 3 * heads, width).
VIEWS: dict[str, Callable[[Any, Any], Any]] = {
    "heads of a packed QKV": lambda family, a: a[:, HEADS : 2 * HEADS],
    "of two sequences": lambda family, a: a.reshape(2, -1, *a.shape[1:])[:, :, HEADS : 2 * HEADS],
    "columns of heads": lambda family, a: a[:, :HEADS, 8:],
    "an odd gap": lambda family, a: odd_rows(a)[:, : HEADS * a.shape[2]].reshape(len(a), HEADS, -1),
    "axes exchanged": lambda family, a: a.swapaxes(0, 1),
    "tokens backwards": lambda family, a: a[::-1, HEADS : 2 * HEADS],
    "heads backwards": lambda family, a: a[:, 2 * HEADS - 1 : HEADS - 1 : -1],
    "every second token": lambda family, a: a[::2, HEADS : 2 * HEADS],
    "the same tokens again": lambda family, a: family.broadcast_to(a[:, 0], (2, len(a), a.shape[2])),
    "the same head again": lambda family, a: family.broadcast_to(a[:, :1], (len(a), HEADS, a.shape[2])),
}
BROADCAST = ("the same tokens again", "the same head again")


def odd_rows(a: Any) -> Any:
    """Return a matrix of tokens whose rows are one element shorter than those of a token in `a`."""
    rows = a.reshape(len(a), -1)
    return rows.reshape(-1)[: -len(a)].reshape(len(a), -1)


def results(forward_results: tuple[Any, Any, Any], cols: int) -> tuple[Any, Any, Any]:
    """Return y and the statistics with all rows in one axis."""
    y, *statistics = forward_results
    return y.reshape(-1, cols), *(None if numbers is None else numbers.reshape(-1) for numbers in statistics)
