"""Recipes of FP8: what is rounded to which format, which numbers share a scale, and how products add up.

TransformerEngine's recipes are recognised by the names of their classes and fields, so that its own objects work. A
LayerNormLinear follows the recipe of the `autocast` around its call, or that of `set_recipe`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..private import scaled_mm

E4M3, E5M2 = "e4m3", "e5m2"
FORMATS = ("E4M3", "HYBRID")
INSTEAD = "Use RowwiseScaling() or Float8CurrentScaling()."


class Scheme(NamedTuple):
    """A recipe as passes read it. Triples are for the normalised tensor, weight and dy, or for y, dz and dweight."""

    by_row: bool
    gradient: str  # the format of dy
    power_2: tuple[bool, bool, bool]
    least: tuple[float, float, float]  # amax_epsilon
    fast: tuple[bool, bool, bool]
    high_precision_wgrad: bool

    @property
    def of_weight(self) -> tuple:
        """The fields that the bytes of weight depend on."""
        return self.by_row, self.power_2[1], self.least[1]


@dataclass(frozen=True)
class RowwiseScaling:
    """Round everything to e4m3, every operand of a product with a scale for each row along what is summed.

    A scale comes from the row itself: there is no history, nothing to reduce over ranks and nothing in a checkpoint.
    In the product of weight's gradient the normalised tensor has a static scale for each feature, large enough for
    every x.

    Parameters
    ----------
    power_2_scale : bool
        Round multipliers down to powers of two.
    fast_accumulation : bool
        Keep sums of the forward product in the tensor cores' own registers for longer. The backward pass never does so.
    high_precision_wgrad : bool
        Compute the gradient of weight by a product in the dtype of y. With 16 bits and up to 128 rows this is always
        done, as it is faster.
    """

    power_2_scale: bool = False
    fast_accumulation: bool = True
    high_precision_wgrad: bool = False
    scheme: Scheme = field(init=False, repr=False, compare=False)

    def __post_init__(self):
        power_2, least = (self.power_2_scale,) * 3, (0.0,) * 3
        fast = (self.fast_accumulation, False, False)
        object.__setattr__(self, "scheme", Scheme(True, E4M3, power_2, least, fast, self.high_precision_wgrad))


@dataclass(frozen=True)
class QParams:
    """Say how one of the tensors is scaled, as TransformerEngine's class of that name does.

    Parameters
    ----------
    power_2_scale : bool
    amax_epsilon : float
        If the largest magnitude is below this, this is used in its place.
    """

    power_2_scale: bool = False
    amax_epsilon: float = 0.0


@dataclass(frozen=True)
class MMParams:
    """Say how a product adds up, as TransformerEngine's class of that name does."""

    use_split_accumulator: bool = True


@dataclass(frozen=True)
class Float8CurrentScaling:
    """Give each tensor one scale, from the tensor itself: F / max|tensor|, as TransformerEngine's recipe of that name.

    As there, a tensor of zeros or with an infinite number has the scale 1, which hides that number: it becomes F.

    Parameters
    ----------
    fp8_format : "HYBRID" or "E4M3"
        HYBRID is e4m3 with gradients in e5m2. A member of an Enum with such a name is accepted too.
    use_power_2_scales : bool
        Set power_2_scale for all three tensors.
    fp8_quant_fwd_inp, fp8_quant_fwd_weight, fp8_quant_bwd_grad : QParams
        How the normalised tensor, weight and the gradient of y are scaled.
    fp8_gemm_fprop, fp8_gemm_dgrad, fp8_gemm_wgrad : MMParams
        How the products of y, dz and dweight add up.
    """

    fp8_format: Any = "HYBRID"
    use_power_2_scales: bool = False
    fp8_quant_fwd_inp: QParams = QParams()
    fp8_quant_fwd_weight: QParams = QParams()
    fp8_quant_bwd_grad: QParams = QParams()
    fp8_gemm_fprop: MMParams = MMParams(False)
    fp8_gemm_dgrad: MMParams = MMParams()
    fp8_gemm_wgrad: MMParams = MMParams()
    scheme: Scheme = field(init=False, repr=False, compare=False)

    def __post_init__(self):
        name = getattr(self.fp8_format, "name", self.fp8_format)
        if name not in FORMATS:
            raise ValueError(f"Float8CurrentScaling: fp8_format must be 'HYBRID' or 'E4M3'; got {name!r}.")
        scaled = (self.fp8_quant_fwd_inp, self.fp8_quant_fwd_weight, self.fp8_quant_bwd_grad)
        products = (self.fp8_gemm_fprop, self.fp8_gemm_dgrad, self.fp8_gemm_wgrad)
        power_2 = tuple(parameters.power_2_scale or self.use_power_2_scales for parameters in scaled)
        least = tuple(float(parameters.amax_epsilon) for parameters in scaled)
        fast = tuple(not product.use_split_accumulator for product in products)
        gradient = E4M3 if name == "E4M3" else E5M2
        object.__setattr__(self, "fp8_format", name)
        object.__setattr__(self, "scheme", Scheme(False, gradient, power_2, least, fast, False))


Recipe = RowwiseScaling | Float8CurrentScaling
KNOWN = {recipe.__name__: recipe for recipe in (RowwiseScaling, Float8CurrentScaling)}
REFUSED = ("DelayedScaling", "MXFP8BlockScaling", "NVFP4BlockScaling", "Float8BlockScaling", "CustomRecipe")
# Fields that recipes here do not have, and the values with which they have no effect.
WITHOUT_EFFECT = {
    "fp8_dpa": (False,),
    "fp8_mha": (False,),
    "backward_override": (None,),
    "random_hadamard_transform": (False,),
    "stochastic_rounding": (False,),
    "fp4_2d_quantization": (False,),
}


def recognised(function: str, recipe: Any) -> Recipe:
    """Return the recipe that an object stands for; None stands for the default.

    Raises
    ------
    NotImplementedError
        If it is a recipe of TransformerEngine's that is not supported.
    ValueError
        If it is no recipe, or has a field that no recipe here has.
    """
    if recipe is None:
        return RowwiseScaling()
    if type(recipe) in KNOWN.values():
        return recipe
    names = [kind.__name__ for kind in type(recipe).__mro__]
    refused = next((name for name in names if name in REFUSED), None)
    if refused is not None:
        raise NotImplementedError(
            f"{function}: recipe must be one that is here; got {refused}, which is not. {INSTEAD}"
        )
    known = KNOWN.get(names[0])
    if known is None:
        raise ValueError(f"{function}: recipe must be one that is known; got {names[0]}. {INSTEAD}")
    return _of_fields(function, recipe, known)


PARTS = {QParams: ("fp8_quant_fwd_inp", "fp8_quant_fwd_weight", "fp8_quant_bwd_grad")}
PARTS[MMParams] = ("fp8_gemm_fprop", "fp8_gemm_dgrad", "fp8_gemm_wgrad")


def _of_fields(function: str, recipe: Any, kind: type) -> Any:
    """Make a `kind` of the fields that `recipe` has of it. Some of TransformerEngine's are attributes of the class."""
    wanted = {dataclass_field.name for dataclass_field in dataclasses.fields(kind) if dataclass_field.init}
    names = {name for name in getattr(recipe, "__dict__", {}) if not name.startswith("_")}
    if dataclasses.is_dataclass(recipe):
        names |= {dataclass_field.name for dataclass_field in dataclasses.fields(recipe)}
    for name in sorted(names - wanted):
        if name not in WITHOUT_EFFECT or getattr(recipe, name) not in WITHOUT_EFFECT[name]:
            raise ValueError(
                f"{function}: {type(recipe).__name__}.{name} must be left out; got {getattr(recipe, name)!r}, which is "
                "not known here."
            )
    fields = {name: getattr(recipe, name) for name in wanted if hasattr(recipe, name)}
    for part, names in PARTS.items():
        for name in names:
            if name in fields and type(fields[name]) is not part:
                fields[name] = _of_fields(function, fields[name], part)
    return kind(**fields)


# Which recipe is followed.


# What the innermost context says: whether FP8 is allowed, and the recipe of a module that has none of its own. It holds
# for the whole process: autograd runs in its own threads what checkpoints compute again.
_innermost: tuple[bool, Recipe | None] = True, None


def autocast(
    enabled: bool = True, calibrating: bool = False, recipe: Any = None, amax_reduction_group: Any = None
) -> AbstractContextManager[None]:
    """Make `LayerNormLinear` multiply in FP8 inside, as `recipe` says: transformer_engine.pytorch.autocast.

    If contexts are nested the innermost counts; with `enabled=False` nothing inside is in FP8. The context holds for
    the whole process, as TransformerEngine's does. A backward pass follows the recipe of its forward pass wherever it
    runs, and so does a forward pass that a checkpoint runs again in it.

    Parameters
    ----------
    enabled : bool
    calibrating, amax_reduction_group
        These have no effect, as no recipe here keeps anything from call to call.
    recipe : RowwiseScaling or Float8CurrentScaling, optional
        TransformerEngine's object of such a name is accepted too. The default is RowwiseScaling().

    Raises
    ------
    NotImplementedError
        If recipe is TransformerEngine's DelayedScaling, Float8BlockScaling, MXFP8BlockScaling or NVFP4BlockScaling.
    ValueError
        If the recipe or a field of it is unknown.

    Examples
    --------
    >>> import torch
    >>> from cunorm.torch import LayerNormLinear, autocast
    >>> with autocast(), torch.no_grad():
    ...     LayerNormLinear(16, 32, device="cpu")(torch.ones(2, 16)).shape
    torch.Size([2, 32])
    """
    return _following(recognised("autocast", recipe) if enabled else None)


def fp8_autocast(
    enabled: bool = True, calibrating: bool = False, fp8_recipe: Any = None, fp8_group: Any = None
) -> AbstractContextManager[None]:
    """Do what `autocast` does, with the names that TransformerEngine gave it before."""
    return _following(recognised("fp8_autocast", fp8_recipe) if enabled else None)


@contextmanager
def _following(recipe: Recipe | None) -> Iterator[None]:
    global _innermost
    outer, _innermost = _innermost, (recipe is not None, recipe)
    try:
        yield
    finally:
        _innermost = outer


def recipe_of(own: Recipe | None) -> Recipe | None:
    """Return the recipe that a module with this recipe of its own follows now; None for no FP8."""
    is_allowed, recipe = _innermost
    return own or recipe if is_allowed else None


def set_recipe(model: nn.Module, recipe: Any, filter: Callable[[str, nn.Module], bool] | None = None) -> nn.Module:
    """Make every `LayerNormLinear` of `model` for which `filter(name, module)` holds follow `recipe`, with no context.

    It takes precedence over the recipe of a context, but a context with `enabled=False` switches it off. `recipe=None`
    removes it. Copies of the modules keep it.

    Parameters
    ----------
    model : Module
    recipe : RowwiseScaling, Float8CurrentScaling or None
    filter : callable, optional
        It gets the qualified name and the module. By default all modules follow.

    Returns
    -------
    model

    Raises
    ------
    NotImplementedError, ValueError
        As in `autocast`.

    Examples
    --------
    >>> from cunorm.torch import LayerNormLinear, RowwiseScaling, set_recipe
    >>> set_recipe(LayerNormLinear(16, 32, device="cpu"), RowwiseScaling()).fp8_recipe.fast_accumulation
    True
    """
    recognised_recipe = None if recipe is None else recognised("set_recipe", recipe)
    chosen = [
        module
        for name, module in model.named_modules()
        if hasattr(type(module), "fp8_recipe") and (filter is None or filter(name, module))
    ]
    for module in chosen:
        module.fp8_recipe = recognised_recipe
    return model


def is_fp8_available(return_reason: bool = False) -> Any:
    """Return whether the current GPU and this torch have FP8 products; with `return_reason` also why not, or "".

    Tensors that are not on a GPU do not need them: their products are emulated, with the same bytes.
    """
    reason = why_not(torch.cuda.current_device()) if torch.cuda.is_available() else "there is no CUDA device"
    return (not reason, reason) if return_reason else not reason


def check_available(function: str, x: Tensor) -> None:
    reason = why_not(x.get_device()) if x.is_cuda else ""
    if reason:
        raise RuntimeError(f"{function}: FP8 must be available; {reason}. Leave the context, or set enabled=False.")


@lru_cache
def why_not(index: int) -> str:
    """Return why a GPU or this torch has no FP8 products; "" if they have."""
    if torch.version.hip is not None:
        return "cunorm's kernels are for NVIDIA's GPUs"
    capability = torch.cuda.get_device_capability(index)
    version = tuple(int(part) for part in torch.__version__.split(".")[:2])
    if capability < (8, 9):
        return f"FP8 needs compute capability 8.9 or more; this GPU has {capability[0]}.{capability[1]}"
    if not scaled_mm:
        return f"FP8 products need torch._scaled_mm, which torch {torch.__version__} has not"
    if capability < (9, 0) and version < (2, 12):
        # pytorch #177651
        return f"torch {torch.__version__} runs this product beside the current stream on GPUs before Hopper; use 2.12"
    return ""
