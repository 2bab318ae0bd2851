"""`LayerNorm` and `RMSNorm`: torch.nn's modules, with the same parameters and state_dict, on cunorm's kernels."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.compiler import is_compiling
from torch.nn import functional as F  # noqa: N812

from ...call.store import Float8Store
from ...plan.problem import E4M3
from ..private import parameter_of
from . import arrays, checks, compiled
from .functional import autocast_dtype, norm, symbolic


class Options:
    """Options that modules with a weight have beyond torch's.

    The defaults stand on the class, as a module whose class was changed from torch.nn's has no attributes for them.
    """

    zero_centered_gamma: bool = False
    sm_margin: int | Mapping[str, int] = 0
    _shown: tuple[str, ...] = ("zero_centered_gamma",)  # extra_repr shows these if they were changed

    def _set_options(self, zero_centered_gamma: bool, sm_margin: Any) -> None:
        name = type(self).__name__
        if zero_centered_gamma and self.weight is None:
            raise ValueError(f"{name}: zero_centered_gamma=True needs a weight; got elementwise_affine=False.")
        checks.sm_margins(name, sm_margin)
        self.zero_centered_gamma = zero_centered_gamma
        self.sm_margin = dict(sm_margin) if isinstance(sm_margin, Mapping) else int(sm_margin)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Set weight = 1, or 0 with zero_centered_gamma, and bias = 0, on the device where they are, "meta" too."""
        super().reset_parameters()
        if self.zero_centered_gamma:
            nn.init.zeros_(self.weight)

    def extra_repr(self) -> str:
        changed = [f"{name}={getattr(self, name)}" for name in self._shown if getattr(self, name) not in (None, 0)]
        return ", ".join([super().extra_repr(), *changed])


class _Norm(Options):
    """What LayerNorm and RMSNorm have beyond `Options`."""

    sequence_parallel: bool | None = None
    autocast_output: bool = False
    _shown = ("zero_centered_gamma", "sequence_parallel", "sm_margin", "autocast_output")
    # Only `accelerate` sets these. Fewer elements than _own_below go to torch's own operators. Compiled code uses them
    # too, except for a backward pass of at least _compiled_from elements or in a CUDA graph. A compiled forward pass
    # reads few attributes, as each one is a guard of dynamo for each module, which is checked in every step.
    _own_below = 0
    _compiled_from = 0

    def _norm(self, op: str, x: Tensor, bias: Tensor | None) -> Tensor:
        weight = parameter_of(self, "weight")
        dtype = None
        if self.autocast_output:
            dtype = autocast_dtype(x) if isinstance(x, Tensor) else symbolic(autocast_dtype, x)
        operation = checks.zero_centered(op, weight) if self.zero_centered_gamma else op
        return norm(operation, x, self.normalized_shape, weight, bias, self.eps, dtype, self.sm_margin)

    def _float8(self, op: str, x: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
        name = type(self).__name__
        _, _, sm_margin = checks.sm_margins(name, self.sm_margin)
        store = Float8Store(E4M3, "row", wide=False)
        options = (f"{op}_fp8", self.normalized_shape, self.zero_centered_gamma, None, sm_margin, store)
        y, scale = arrays.norm_float8(options, (x, self.weight, bias), checks.eps(op, self.eps, x), None)
        return y, scale

    def reset_parameters(self) -> None:
        super().reset_parameters()
        self._mark_parameters()

    def _mark_parameters(self) -> None:
        if self.sequence_parallel is not None:
            for parameter in self.parameters(recurse=False):
                parameter.sequence_parallel = self.sequence_parallel

    def _apply(self, fn, recurse=True):
        super()._apply(fn, recurse)
        self._mark_parameters()  # `to_empty` makes new parameters
        return self

    def __setstate__(self, state):
        super().__setstate__(state)
        self._mark_parameters()  # so does deepcopy


class LayerNorm(_Norm, nn.LayerNorm):
    """y = (x - mean(x)) / sqrt(var(x) + eps) * weight + bias, over the last axes of x.

    Parameters
    ----------
    normalized_shape, eps, elementwise_affine, bias, device, dtype
        These are those of torch.nn.LayerNorm. TransformerEngine's names of normalized_shape and dtype are accepted:
        `hidden_size` (deprecated) and `params_dtype`.
    zero_centered_gamma : bool
        Multiply by 1 + weight; weight begins as 0.
    sequence_parallel : bool, optional
        If not None, it is set as the attribute of that name on weight and bias, for a trainer that sums their gradients
        over the ranks that share a sequence. Nothing is communicated here.
    sm_margin : int or dict
        Leave this many multiprocessors to other work; a dict has any of the keys `forward`, `backward` and `inference`.
    autocast_output : bool
        Give y the dtype of autocast where autocast is on. TransformerEngine's module does so and rounds x to it as
        well; here x is read as it is. By default y has the dtype that torch's own module returns there, which is
        float32 for LayerNorm on a GPU. A float64 input is not affected.

    Attributes
    ----------
    weight, bias : Parameter, shape normalized_shape, or None
        They have `dtype`, by default torch's default dtype.

    Raises
    ------
    RuntimeError
        If neither or both of two names for the same option are given.
    TypeError, ValueError
        If an option is of the wrong kind or value.

    Notes
    -----
    Input and output are those of `cunorm.torch.layer_norm`. With device="meta" the parameters have no memory, even
    after `reset_parameters`, as those of torch.nn: `to_empty(device=...)` gives them memory, and `reset_parameters`
    then sets their values. (TransformerEngine's module, and LayerNormLinear with it, gives them memory on the GPU in
    `reset_parameters`.)

    Examples
    --------
    >>> import torch
    >>> from cunorm.torch import LayerNorm
    >>> LayerNorm(3)(torch.tensor([[1.0, 2.0, 3.0]])).detach()
    tensor([[-1.2247,  0.0000,  1.2247]])
    """

    def __init__(
        self,
        normalized_shape: int | Sequence[int] | None = None,
        eps: float = 1e-5,
        elementwise_affine: bool = True,
        bias: bool = True,
        device: Any = None,
        dtype: torch.dtype | None = None,
        *,
        zero_centered_gamma: bool = False,
        sequence_parallel: bool | None = None,
        sm_margin: int | Mapping[str, int] = 0,
        autocast_output: bool = False,
        params_dtype: torch.dtype | None = None,
        hidden_size: int | Sequence[int] | None = None,
    ):
        shape, dtype = _spellings("LayerNorm", normalized_shape, hidden_size, dtype, params_dtype)
        super().__init__(shape, eps, elementwise_affine, bias, device, dtype)
        self.sequence_parallel, self.autocast_output = sequence_parallel, autocast_output
        self._set_options(zero_centered_gamma, sm_margin)

    def forward(self, input: Tensor, fp8_output: bool = False) -> Any:
        """Return y, or with `fp8_output` and without gradients (y in float8_e4m3fn, a float32 scale for each row)."""
        if not fp8_output:
            if is_compiling() and self._compiled_from:
                own = F.layer_norm(input, self.normalized_shape, self.weight, self.bias, self.eps)
                return _chosen(own, "layer_norm", self, input, self.bias)
            if self._own_below and is_left_to_torch(self, input):
                weight, bias = parameter_of(self, "weight"), parameter_of(self, "bias")
                return F.layer_norm(input, self.normalized_shape, weight, bias, self.eps)
        return (self._float8 if fp8_output else self._norm)("layer_norm", input, parameter_of(self, "bias"))


class RMSNorm(_Norm, nn.RMSNorm):
    """y = x / sqrt(mean(x²) + eps) * weight, over the last axes of x.

    Parameters, attributes, errors and notes are those of `LayerNorm`, without bias; `eps=None` means what it means in
    `cunorm.torch.rms_norm`.

    Examples
    --------
    >>> import torch
    >>> from cunorm.torch import RMSNorm
    >>> RMSNorm(2, eps=0.0)(torch.tensor([[3.0, 4.0]])).detach()
    tensor([[0.8485, 1.1314]])
    """

    def __init__(
        self,
        normalized_shape: int | Sequence[int] | None = None,
        eps: float | None = None,
        elementwise_affine: bool = True,
        device: Any = None,
        dtype: torch.dtype | None = None,
        *,
        zero_centered_gamma: bool = False,
        sequence_parallel: bool | None = None,
        sm_margin: int | Mapping[str, int] = 0,
        autocast_output: bool = False,
        params_dtype: torch.dtype | None = None,
        hidden_size: int | Sequence[int] | None = None,
    ):
        shape, dtype = _spellings("RMSNorm", normalized_shape, hidden_size, dtype, params_dtype)
        super().__init__(shape, eps, elementwise_affine, device, dtype)
        self.sequence_parallel, self.autocast_output = sequence_parallel, autocast_output
        self._set_options(zero_centered_gamma, sm_margin)

    def forward(self, x: Tensor, fp8_output: bool = False) -> Any:
        """Return y, or with `fp8_output` and without gradients (y in float8_e4m3fn, a float32 scale for each row)."""
        if not fp8_output:
            if is_compiling() and self._compiled_from:
                own = F.rms_norm(x, self.normalized_shape, self.weight, self.eps)
                return _chosen(own, "rms_norm", self, x, None)
            if self._own_below and is_left_to_torch(self, x):
                return F.rms_norm(x, self.normalized_shape, parameter_of(self, "weight"), self.eps)
        return (self._float8 if fp8_output else self._norm)("rms_norm", x, None)


def is_left_to_torch(norm: Any, x: Tensor) -> bool:
    """Say whether x has too few elements for our kernel to gain, and count it for the report of `accelerate`."""
    # A Proxy of torch.fx.symbolic_trace has no size to compare.
    is_left = not isinstance(x, Tensor) or x.numel() < norm._own_below
    attributes, count = norm.__dict__, "_by_torch" if is_left else "_by_cunorm"
    attributes[count] = attributes.get(count, 0) + 1
    return is_left


def _chosen(own: Tensor, op: str, norm: LayerNorm | RMSNorm, x: Tensor, bias: Tensor | None) -> Tensor:
    """Return y of a module that torch's class made, which has no options beyond torch's, in compiled code."""
    return compiled.norm(own, op, x, norm.normalized_shape, norm.weight, bias, norm.eps, norm._compiled_from)


def _spellings(name: str, normalized_shape: Any, hidden_size: Any, dtype: Any, params_dtype: Any) -> tuple[Any, Any]:
    """Return (normalized_shape, dtype), each given by one of its two names."""
    if hidden_size is not None:
        if normalized_shape is not None:
            raise RuntimeError(f"{name}: normalized_shape must be given once; got hidden_size too. Drop hidden_size.")
        warnings.warn(f"{name}: hidden_size is deprecated; use normalized_shape.", DeprecationWarning, stacklevel=3)
        normalized_shape = hidden_size
    if normalized_shape is None:
        raise RuntimeError(f"{name}: normalized_shape must be given; got none. Pass the length of a row.")
    if params_dtype is not None:
        if dtype is not None:
            raise RuntimeError(f"{name}: dtype must be given once; got params_dtype too. Drop params_dtype.")
        dtype = params_dtype
    return normalized_shape, dtype
