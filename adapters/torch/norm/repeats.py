"""Whether a call is like an earlier one, asked of torch in one question instead of tensor by tensor in Python.

The question is torch.compile's own, whether compiled code serves a call. Of three tensors it takes 0.4 us; what is
asked of them one by one, and the key of a dictionary that is made of the answers, 3.7.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from contextlib import suppress
from typing import Any

from torch import Tensor

from ..private import Guards

RECIPES = 4096  # kept at most, of each kind
LIKE = 4  # earlier calls that are asked one by one, such as those with two layouts of x that follow one another

Alike = Callable[..., bool]


def alike(*tensors: Tensor) -> Alike:
    """`found(*others)`: as many tensors of the same types, dtypes, devices, shapes, strides and requires_grad, none of
    them twice, and nothing in force that torch dispatches by and that was not then: autocast, inference mode,
    functorch, dispatch modes, a trace.

    It does not ask for addresses, the modes of torch functions, forward-mode derivatives and whether autograd is on.
    """
    if Guards is None:
        return lambda *_: False
    sizes, strides = ([list(of(tensor)) for tensor in tensors] for of in (Tensor.size, Tensor.stride))
    return Guards(*tensors, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides).check


def remember(kept: dict[Hashable, tuple], key: Hashable, tensors: tuple[Tensor, ...], one: Any) -> None:
    """Puts (alike(*tensors), one) in front of what is kept under a key, and where `again` finds it.

    The oldest goes where there are more than RECIPES.
    """
    known = alike(*tensors)
    if known(*tensors):  # not of one tensor given twice
        for of in (key, _with_layouts(key, tensors)):
            kept[of] = ((known, one), *kept.pop(of, ())[: LIKE - 1])
        with suppress(RuntimeError, StopIteration):  # another thread adds one: it goes next time
            while len(kept) > 2 * RECIPES:
                kept.pop(next(iter(kept)), None)


def again(kept: dict[Hashable, tuple], key: Hashable, tensors: tuple[Tensor, ...]) -> Any:
    """What was remembered of tensors of these layouts, None for nothing, where it is no longer among the LIKE last ones
    of its key: however many layouts take turns, each is known.
    """
    if len(kept.get(key, ())) < LIKE:
        return None
    try:
        layouts = _with_layouts(key, tensors)
    except (AttributeError, RuntimeError):  # one of them is no tensor, or has no strides
        return None
    return next((one for known, one in kept.get(layouts, ()) if known(*tensors)), None)


def _with_layouts(key: Hashable, tensors: tuple[Tensor, ...]) -> Hashable:
    return key, *[(one.shape, one.stride(), one.dtype, one.get_device(), one.requires_grad) for one in tensors]


_calls: dict[Hashable, tuple[tuple[Alike, Any], ...]] = {}  # by what tensors do not tell


def earlier_calls(key: Hashable) -> tuple[tuple[Alike, Any], ...]:
    try:
        return _calls.get(key, ())
    except TypeError:  # a size that a trace holds open has no hash
        return ()


def known_call(key: Hashable, tensors: Sequence[Tensor]) -> Any:
    """What was remembered of a call with tensors like these, as repeats.py has it; None for nothing."""
    earlier = earlier_calls(key)
    for known, found in earlier:
        if known(*tensors):
            return found
    return again(_calls, key, tuple(tensors)) if earlier else None


def remember_call(key: Hashable, tensors: Sequence[Tensor], found: Any) -> None:
    """For `known_call`."""
    remember(_calls, key, tuple(tensors), found)


def keep(kept: dict[Hashable, Any], key: Hashable, value: Any) -> Any:
    if len(kept) >= RECIPES:
        kept.clear()
    kept[key] = value
    return value
