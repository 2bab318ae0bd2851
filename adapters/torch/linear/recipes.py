"""Recipes of FP8: what is rounded to which 8 bits, which numbers share a scale, how products add up.

TransformerEngine's recipes are recognised by the names of their classes and fields, so that its own objects work.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any, NamedTuple

E4M3, E5M2 = "e4m3", "e5m2"
FORMATS = ("E4M3", "HYBRID")
INSTEAD = "Use RowwiseScaling() or Float8CurrentScaling()."


class Scheme(NamedTuple):
    """A recipe as the passes read it. Triples are of the normalised tensor, weight and dy, or of y, dz and dweight."""

    by_row: bool
    gradient: str  # the format of dy
    power_2: tuple[bool, bool, bool]
    least: tuple[float, float, float]  # amax_epsilon
    fast: tuple[bool, bool, bool]
    high_precision_wgrad: bool

    @property
    def of_weight(self) -> tuple:
        """What the bytes of weight depend on."""
        return self.by_row, self.power_2[1], self.least[1]


@dataclass(frozen=True)
class RowwiseScaling:
    """Everything in e4m3, every operand of a product with a scale for each row along what is summed.

    A scale comes from the row itself: there is no history, nothing to reduce over ranks and nothing in a checkpoint.
    The normalised tensor of the weight's gradient has one scale for each feature, which nothing exceeds whatever x is.

    Parameters
    ----------
    power_2_scale : bool
        Multipliers rounded down to powers of two.
    fast_accumulation : bool
        Of the forward product: sums are kept in the tensor cores' own registers for longer. The backward pass never.
    high_precision_wgrad : bool
        The gradient of weight by a product in the dtype of y. Over up to 128 rows of 16 bits it is so anyway: that is
        faster.
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
    """How one of the tensors is scaled: TransformerEngine's class of that name.

    Parameters
    ----------
    power_2_scale : bool
    amax_epsilon : float
        A largest value below this counts as this.
    """

    power_2_scale: bool = False
    amax_epsilon: float = 0.0


@dataclass(frozen=True)
class MMParams:
    """How a product adds up: TransformerEngine's class of that name."""

    use_split_accumulator: bool = True


@dataclass(frozen=True)
class Float8CurrentScaling:
    """One scale for each tensor, from the tensor itself: F / max|tensor|, as TransformerEngine's recipe of that name.

    As there, a tensor of zeros or with an infinite number has the scale 1, which hides that number: it becomes F.

    Parameters
    ----------
    fp8_format : "HYBRID" or "E4M3"
        HYBRID: e4m3, but gradients in e5m2. A member of an Enum with that name serves as well.
    use_power_2_scales : bool
        power_2_scale for all three tensors.
    fp8_quant_fwd_inp, fp8_quant_fwd_weight, fp8_quant_bwd_grad : QParams
        Of the normalised tensor, of weight and of the gradient of y.
    fp8_gemm_fprop, fp8_gemm_dgrad, fp8_gemm_wgrad : MMParams
        Of the three products.
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
        power_2 = tuple(one.power_2_scale or self.use_power_2_scales for one in scaled)
        least = tuple(float(one.amax_epsilon) for one in scaled)
        fast = tuple(not one.use_split_accumulator for one in products)
        gradient = E4M3 if name == "E4M3" else E5M2
        object.__setattr__(self, "fp8_format", name)
        object.__setattr__(self, "scheme", Scheme(False, gradient, power_2, least, fast, False))


Recipe = RowwiseScaling | Float8CurrentScaling
KNOWN = {one.__name__: one for one in (RowwiseScaling, Float8CurrentScaling)}
REFUSED = ("DelayedScaling", "MXFP8BlockScaling", "NVFP4BlockScaling", "Float8BlockScaling", "CustomRecipe")
# Fields of others, and the values with which they ask for nothing.
OF_OTHERS = {
    "fp8_dpa": (False,),
    "fp8_mha": (False,),
    "backward_override": (None,),
    "random_hadamard_transform": (False,),
    "stochastic_rounding": (False,),
    "fp4_2d_quantization": (False,),
}


def recognised(function: str, recipe: Any) -> Recipe:
    """The recipe that an object stands for; None for the default.

    Raises
    ------
    NotImplementedError
        A recipe of TransformerEngine's that is not here.
    ValueError
        What is no recipe, or a field that no recipe here has.
    """
    if recipe is None:
        return RowwiseScaling()
    if type(recipe) in KNOWN.values():
        return recipe
    names = [one.__name__ for one in type(recipe).__mro__]
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


def _of_fields(function: str, given: Any, kind: type) -> Any:
    """`kind` with what `given` has of its fields. Some of TransformerEngine's are attributes of the class."""
    wanted = {one.name for one in dataclasses.fields(kind) if one.init}
    own = {one.name for one in dataclasses.fields(given)} if dataclasses.is_dataclass(given) else set()
    own |= {name for name in getattr(given, "__dict__", {}) if not name.startswith("_")}
    for name in sorted(own - wanted):
        if name not in OF_OTHERS or getattr(given, name) not in OF_OTHERS[name]:
            raise ValueError(
                f"{function}: {type(given).__name__}.{name} must be left out; got {getattr(given, name)!r}, which is "
                "not known here."
            )
    found = {name: getattr(given, name) for name in wanted if hasattr(given, name)}
    for part, names in PARTS.items():
        for name in names:
            if name in found and type(found[name]) is not part:
                found[name] = _of_fields(function, found[name], part)
    return kind(**found)
