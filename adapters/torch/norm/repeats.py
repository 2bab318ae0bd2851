"""Recognise a call that is like an earlier one, by one question to torch instead of one for each tensor in Python.

The question is the one by which torch.compile decides whether compiled code serves a call. It takes about a tenth of
the time of asking each tensor for its properties and looking them up in a dictionary.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from contextlib import suppress
from typing import Any

from torch import Tensor

from ..private import Guards

RECIPES = 4096  # how many of each kind are kept at most
LIKE = 4  # how many earlier calls of a key are compared one by one, such as those of two layouts of x in turns

Alike = Callable[..., bool]  # says whether other tensors are like those that it was made for


def alike(*tensors: Tensor, of_any_rows: bool = False) -> Alike:
    """Return a function that says whether its arguments are like these tensors.

    They are if they are as many tensors with the same types, dtypes, devices, shapes, strides and requires_grad, no
    tensor is given twice, and torch dispatches by the same state as now: autocast, inference mode, functorch, dispatch
    modes, a trace. The function does not compare addresses, the modes of torch functions, forward-mode derivatives and
    whether autograd is on. With `of_any_rows` only the last axis of a matrix is compared, in length and in stride.
    """
    if Guards is None:
        return lambda *_: False
    sizes, strides = ([list(method(tensor)) for tensor in tensors] for method in (Tensor.size, Tensor.stride))
    if of_any_rows:
        for axes in (*sizes, *strides):
            axes[:-1] = [None] * (len(axes) - 1)
    return Guards(*tensors, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides).check


def remember(cache: dict[Hashable, tuple], key: Hashable, tensors: tuple[Tensor, ...], value: Any) -> None:
    """Put (alike(*tensors), value) in front of the entries of a key, and where `again` finds it.

    The oldest entries are dropped if the cache is full. Nothing is remembered if one tensor is given twice.
    """
    if len({*map(id, tensors)}) < len(tensors):
        return
    matches = alike(*tensors)
    if matches(*tensors):  # it does not if torch has no guards
        for entry in (key, _with_layouts(key, tensors)):
            cache[entry] = ((matches, value), *cache.pop(entry, ())[: LIKE - 1])
        with suppress(RuntimeError, StopIteration):  # another thread changes the cache: it is trimmed next time
            while len(cache) > 2 * RECIPES:
                cache.pop(next(iter(cache)), None)


def again(cache: dict[Hashable, tuple], key: Hashable, tensors: tuple[Tensor, ...]) -> Any:
    """Return what was remembered for tensors of these layouts if it is not among the LIKE last entries of its key.

    So each of any number of layouts that take turns is recognised. None stands for nothing.
    """
    if len(cache.get(key, ())) < LIKE:
        return None
    try:
        layouts = _with_layouts(key, tensors)
    except (AttributeError, RuntimeError):  # one of them is no tensor, or has no strides
        return None
    return next((value for matches, value in cache.get(layouts, ()) if matches(*tensors)), None)


def _with_layouts(key: Hashable, tensors: tuple[Tensor, ...]) -> Hashable:
    layouts = [
        (tensor.shape, tensor.stride(), tensor.dtype, tensor.get_device(), tensor.requires_grad) for tensor in tensors
    ]
    return key, *layouts


_calls: dict[Hashable, tuple[tuple[Alike, Any], ...]] = {}  # by a key of all that `alike` does not compare


def known_call(key: Hashable, tensors: Sequence[Tensor]) -> Any:
    """Return what was remembered of a call with tensors like these; None for nothing."""
    earlier = _entries(_calls, key)
    for matches, value in earlier:
        if matches(*tensors):
            return value
    return again(_calls, key, tuple(tensors)) if earlier else None


def _entries(cache: dict[Hashable, tuple], key: Hashable) -> tuple:
    """Return what a cache has of a key, none if it has nothing."""
    try:
        return cache.get(key, ())
    except TypeError:  # a size that a trace holds open has no hash
        return ()


def remember_call(key: Hashable, tensors: Sequence[Tensor], value: Any) -> None:
    """Remember a value for calls like this one, for `known_call` to find."""
    remember(_calls, key, tuple(tensors), value)


_forms: dict[Hashable, tuple[tuple[Alike, Any], ...]] = {}  # the same without the shape of x


def known_form(key: Hashable, tensors: Sequence[Tensor]) -> Any:
    """Return what was remembered of a call that differs from this one in its number of rows alone; None for nothing."""
    for matches, value in _entries(_forms, key):
        if matches(*tensors) and _are_rows_and_vectors(tensors):
            return value
    return None


def remember_form(key: Hashable, tensors: Sequence[Tensor], value: Any) -> None:
    """Remember a value for calls that differ from this one in their number of rows, for `known_form` to find."""
    if _are_rows_and_vectors(tensors) and len({*map(id, tensors)}) == len(tensors):
        if len(_forms) >= RECIPES:
            _forms.clear()
        _forms[key] = ((alike(*tensors, of_any_rows=True), value), *_forms.get(key, ())[: LIKE - 1])


def _are_rows_and_vectors(tensors: Sequence[Tensor]) -> bool:
    """Say whether the tensors are contiguous matrices of the shape of the first, and vectors for their columns.

    It is not known of a single row, where a matrix may be a vector too, and of as many rows as columns, where a vector
    has as many numbers as x has rows.
    """
    shape = tensors[0].shape
    if len(shape) < 2 or shape.numel() < 2 * shape[-1] or shape[:-1] == shape[-1:]:
        return False
    for tensor in tensors:
        if len(tensor.shape) == 1:
            if tensor.shape != shape[-1:]:
                return False
        elif tensor.shape != shape or not tensor.is_contiguous():
            return False
    return True


def keep(cache: dict[Hashable, Any], key: Hashable, value: Any) -> Any:
    """Put a value into a cache, which is emptied first if it is full, and return the value."""
    if len(cache) >= RECIPES:
        cache.clear()
    cache[key] = value
    return value
