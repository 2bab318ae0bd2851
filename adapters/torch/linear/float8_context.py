"""Which recipe a LayerNormLinear follows: `autocast` around calls, `set_recipe` of modules, and where FP8 can run."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..private import scaled_mm
from .recipes import Recipe, recognised


class _Region(NamedTuple):
    enabled: bool
    recipe: Recipe | None


# Of the process, not of a thread: autograd runs what checkpoints compute again in threads of its own.
_region: _Region | None = None


def autocast(
    enabled: bool = True, calibrating: bool = False, recipe: Any = None, amax_reduction_group: Any = None
) -> AbstractContextManager[None]:
    """Inside, `LayerNormLinear` multiplies in FP8 as `recipe` says: transformer_engine.pytorch.autocast.

    Of nested ones the innermost counts; with `enabled=False` nothing inside is in FP8. One for the whole process, as
    TransformerEngine's. A backward pass follows the recipe of its forward pass wherever it runs, and so does a forward
    pass that a checkpoint runs again in it.

    Parameters
    ----------
    enabled : bool
    calibrating, amax_reduction_group
        Accepted without effect: no recipe here keeps anything from call to call.
    recipe : RowwiseScaling or Float8CurrentScaling, optional
        Or TransformerEngine's object of such a name. Default: RowwiseScaling().

    Raises
    ------
    NotImplementedError
        TransformerEngine's DelayedScaling, Float8BlockScaling, MXFP8BlockScaling, NVFP4BlockScaling.
    ValueError
        An unknown recipe, or an unknown field of one.

    Examples
    --------
    >>> import torch
    >>> from cunorm.torch import LayerNormLinear, autocast
    >>> with autocast(), torch.no_grad():
    ...     LayerNormLinear(16, 32, device="cpu")(torch.ones(2, 16)).shape
    torch.Size([2, 32])
    """
    return _inside(_Region(bool(enabled), recognised("autocast", recipe) if enabled else None))


def fp8_autocast(
    enabled: bool = True, calibrating: bool = False, fp8_recipe: Any = None, fp8_group: Any = None
) -> AbstractContextManager[None]:
    """`autocast` by the names that TransformerEngine had for it before."""
    return _inside(_Region(bool(enabled), recognised("fp8_autocast", fp8_recipe) if enabled else None))


@contextmanager
def _inside(region: _Region) -> Iterator[None]:
    global _region
    outer, _region = _region, region
    try:
        yield
    finally:
        _region = outer


def recipe_of(own: Recipe | None) -> Recipe | None:
    """What a module with this recipe of its own follows now, None for no FP8."""
    if _region is None:
        return own
    return (own or _region.recipe) if _region.enabled else None


def set_recipe(model: nn.Module, recipe: Any, filter: Callable[[str, nn.Module], bool] | None = None) -> nn.Module:
    """Every `LayerNormLinear` of `model` for which `filter(name, module)` holds follows `recipe`, with no context.

    It goes before the recipe of a context, but a context with `enabled=False` switches it off. `recipe=None` takes it
    away again. Copies of the modules keep it.

    Parameters
    ----------
    model : Module
    recipe : RowwiseScaling, Float8CurrentScaling or None
    filter : callable, optional
        Of the qualified name and the module. Default: all.

    Returns
    -------
    model

    Raises
    ------
    NotImplementedError, ValueError
        As `autocast`.

    Examples
    --------
    >>> from cunorm.torch import LayerNormLinear, RowwiseScaling, set_recipe
    >>> set_recipe(LayerNormLinear(16, 32, device="cpu"), RowwiseScaling()).fp8_recipe.fast_accumulation
    True
    """
    found = None if recipe is None else recognised("set_recipe", recipe)
    chosen = [
        module
        for name, module in model.named_modules()
        if hasattr(type(module), "fp8_recipe") and (filter is None or filter(name, module))
    ]
    for module in chosen:
        module.fp8_recipe = found
    return model


def is_fp8_available(return_reason: bool = False) -> Any:
    """Whether the current GPU and this torch have FP8 products; with `return_reason` also why not, "" if they have.

    Tensors that are not on a GPU need none: their products are emulated, with the same bytes.
    """
    reason = why_not(torch.cuda.current_device()) if torch.cuda.is_available() else "there is no CUDA device"
    return (not reason, reason) if return_reason else not reason


def check_available(function: str, x: Tensor) -> None:
    """RuntimeError for a tensor on a GPU that has no FP8 products."""
    reason = why_not(x.get_device()) if x.is_cuda else ""
    if reason:
        raise RuntimeError(f"{function}: FP8 must be available; {reason}. Leave the context, or set enabled=False.")


@lru_cache
def why_not(index: int) -> str:
    """What a GPU or this torch lacks of FP8 products, "" if nothing."""
    if torch.version.hip is not None:
        return "cunorm's kernels are for NVIDIA's GPUs"
    capability = torch.cuda.get_device_capability(index)
    version = tuple(int(part) for part in torch.__version__.split(".")[:2])
    if capability < (8, 9):
        return f"FP8 needs compute capability 8.9 or more; this GPU has {capability[0]}.{capability[1]}"
    if not scaled_mm or version < (2, 5):
        return f"FP8 with a scale for each row needs torch 2.5 or later; this is {torch.__version__}"
    if capability < (9, 0) and version < (2, 12):
        # pytorch #177651
        return f"torch {torch.__version__} runs this product beside the current stream on GPUs before Hopper; use 2.12"
    return ""
