"""Fused operations on tensors: which way a call takes, and the named functions of cunorm.torch.

The ways are those of functional.py: a plain CUDA tensor in eager mode goes straight to the launch; a CUDA tensor under
torch.compile, a dispatch mode or in a subclass to the operators, as whatever torch.compile and export trace does; any
other device, forward-mode derivatives and functorch to torch's own operators.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from ...named_fusions import KINDS, OPERATIONS
from ...norm import fused
from . import checks, functional, fused_formulas, fused_launching, fused_operators, operators
from .fused_launching import Call, call_of


def add_layer_norm(
    input: Tensor,
    residual: Tensor,
    normalized_shape: int | Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    *,
    zero_centered_gamma: bool = False,
    dtype: torch.dtype | None = None,
    s_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    """s = x + residual, y = (s - mean(s)) / sqrt(var(s) + eps) * weight + bias, over the last axes of x = input.

    Parameters
    ----------
    input : Tensor, shape (..., *normalized_shape)
        float16, bfloat16, float32 or float64. Read where it lies as `layer_norm` reads its input.
    residual : Tensor, shape of input
        Any of the four dtypes, as of weight and bias.
    normalized_shape : int or sequence of int
    weight, bias : Tensor, shape normalized_shape, optional
    eps : float
        Added to the variance, inside the root.
    zero_centered_gamma : bool
        Multiply by 1 + weight instead of weight.
    dtype : torch.dtype, optional
        Of y. Default: that of input; under autocast as in `layer_norm`.
    s_dtype : torch.dtype, optional
        Of s, such as float32 for a residual stream beside 16-bit layers. Default: that of input.

    Returns
    -------
    y, s : Tensor, shape of input
        The same bits as of the sum and `layer_norm` of it, one after the other. Both are differentiable.

    Raises
    ------
    RuntimeError, NotImplementedError, TypeError, ValueError
        As `layer_norm`.

    Notes
    -----
    s is rounded before its statistics are taken. For the backward pass s, mean, rstd and weight are kept, input and
    residual are not; their gradients are one tensor, written once, unless their dtypes differ.

    Examples
    --------
    >>> import torch
    >>> from cunorm.torch import add_layer_norm
    >>> add_layer_norm(torch.tensor([[1.0, 2.0, 4.0]]), torch.tensor([[0.0, 0.0, -1.0]]), 3)
    (tensor([[-1.2247,  0.0000,  1.2247]]), tensor([[1., 2., 3.]]))
    """
    operands = {"residual": residual, "weight": weight, "bias": bias}
    return _named("add_layer_norm", input, normalized_shape, operands, eps, zero_centered_gamma, dtype, s_dtype)


def add_rms_norm(
    input: Tensor,
    residual: Tensor,
    normalized_shape: int | Sequence[int],
    weight: Tensor | None = None,
    eps: float | None = None,
    *,
    zero_centered_gamma: bool = False,
    dtype: torch.dtype | None = None,
    s_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    """s = x + residual, y = s / sqrt(mean(s²) + eps) * weight, over the last axes of x = input.

    Parameters, results and errors as in `add_layer_norm`; `eps=None` as in `rms_norm`.

    Examples
    --------
    >>> import torch
    >>> from cunorm.torch import add_rms_norm
    >>> add_rms_norm(torch.tensor([[1.0, 2.0]]), torch.tensor([[2.0, 2.0]]), 2, eps=0.0)
    (tensor([[0.8485, 1.1314]]), tensor([[3., 4.]]))
    """
    operands = {"residual": residual, "weight": weight}
    return _named("add_rms_norm", input, normalized_shape, operands, eps, zero_centered_gamma, dtype, s_dtype)


def layer_norm_add(
    input: Tensor,
    residual: Tensor,
    normalized_shape: int | Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    *,
    zero_centered_gamma: bool = False,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """y = residual + (x - mean(x)) / sqrt(var(x) + eps) * weight + bias, over the last axes of x = input.

    Parameters and errors as in `add_layer_norm`. y is rounded once, after the addition.

    Examples
    --------
    >>> import torch
    >>> from cunorm.torch import layer_norm_add
    >>> layer_norm_add(torch.tensor([[1.0, 2.0, 3.0]]), torch.tensor([[1.0, 1.0, 1.0]]), 3)
    tensor([[-0.2247,  1.0000,  2.2247]])
    """
    operands = {"residual": residual, "weight": weight, "bias": bias}
    (y,) = _named("layer_norm_add", input, normalized_shape, operands, eps, zero_centered_gamma, dtype)
    return y


def rms_norm_add(
    input: Tensor,
    residual: Tensor,
    normalized_shape: int | Sequence[int],
    weight: Tensor | None = None,
    eps: float | None = None,
    *,
    zero_centered_gamma: bool = False,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """y = residual + x / sqrt(mean(x²) + eps) * weight, over the last axes of x = input.

    Parameters and errors as in `add_layer_norm`; y as in `layer_norm_add`, `eps=None` as in `rms_norm`.

    Examples
    --------
    >>> import torch
    >>> from cunorm.torch import rms_norm_add
    >>> rms_norm_add(torch.tensor([[3.0, 4.0]]), torch.tensor([[1.0, 1.0]]), 2, eps=0.0)
    tensor([[1.8485, 2.1314]])
    """
    operands = {"residual": residual, "weight": weight}
    (y,) = _named("rms_norm_add", input, normalized_shape, operands, eps, zero_centered_gamma, dtype)
    return y


def _named(
    function: str,
    x: Tensor,
    normalized_shape: Any,
    operands: dict[str, Any],
    eps: Any,
    zero_centered_gamma: bool = False,
    dtype: torch.dtype | None = None,
    s_dtype: torch.dtype | None = None,
) -> tuple[Tensor, ...]:
    """The results of a named function, in order. Operands that may be left out are None then."""
    tensors = {"x": x} | {name: one for name, one in operands.items() if one is not None or name not in OPTIONAL}
    for name, tensor in tensors.items():
        if not isinstance(tensor, Tensor):
            name = "input" if name == "x" else name
            raise TypeError(f"{function}: {name} must be a torch.Tensor; got {type(tensor).__name__}.")
    if zero_centered_gamma:
        checks.zero_centered(function, operands["weight"])
    norm = "layer_norm" if "layer_norm" in function else "rms_norm"
    if type(eps) is not float:
        eps = checks.eps(norm, eps, x)
    for one in (dtype, s_dtype):
        if one is not None:
            checks.output_dtype(function, one)
    if dtype is None and x.is_cuda:
        dtype = functional._default_dtype(norm, x)
    names = tuple(tensors)[1:]
    call = _call(function, bool(zero_centered_gamma), names, _name(dtype), _name(s_dtype))
    given = tuple(tensors.values())
    ndim = checks.trailing_axes(function, x, checks.shape(function, normalized_shape))
    if ndim > 1:
        given = tuple(_rows(tensor, ndim) for tensor in given)
    if torch.compiler.is_compiling():  # the operators raise as torch does
        results, _ = run(call, given, (), eps, False)
    else:
        results, _ = checks.raising_as_torch(run, call, given, (), eps, False)
    return tuple(one.reshape(x.shape) for one in results) if ndim > 1 else tuple(results)


OPTIONAL = ("weight", "bias")


@torch.compiler.assume_constant_result
def _call(function: str, zero_centered_gamma: bool, names: tuple[str, ...], dtype: str | None, s_dtype: str | None):
    key = (function, zero_centered_gamma, names, dtype, s_dtype)
    found = _calls.get(key)
    if found is None:
        found = call_of(function, OPERATIONS[function](zero_centered_gamma), names, (), KINDS, dtype, s_dtype)
        _calls[key] = found
    return found


_calls: dict[tuple, Call] = {}


def _name(dtype: torch.dtype | None) -> str | None:
    return None if dtype is None else checks.dtype_name(dtype)


def _rows(tensor: Tensor, ndim: int) -> Tensor:
    """The last axes as one."""
    return tensor.reshape(*tensor.shape[:-ndim], math.prod(tensor.shape[-ndim:]))


# Which way a call takes.


def run(
    call: Call, tensors: Sequence[Tensor], numbers: Sequence[float], eps: float, wants_statistics: bool
) -> tuple[Sequence[Tensor], Tensor | None]:
    """(results in the order of `returns`, statistics as formulas.py has them, None unless wanted)

    `tensors` are Call.names, of the type Tensor at least; `numbers` are Call.numbers.
    """
    if torch.compiler.is_compiling():
        return _by_operator(call, tensors, numbers, eps, wants_statistics)
    if at_once(tensors):
        if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors):
            results = _apply(call, numbers, eps, wants_statistics, *tensors)
            return (results[:-1], results[-1]) if wants_statistics else (results, None)
        results, statistics, _ = fused_launching.forward(call, tensors, numbers, eps, wants_statistics)
        return results, statistics
    if "torch.distributed.tensor" in sys.modules:  # somebody may hand us a DTensor
        from . import fused_sharding

        if fused_sharding.is_sharded(tensors):
            return fused_sharding.run(run, call, tensors, numbers, eps, wants_statistics)
    x, *operands = [
        fused_launching.layout(call.function, name, one) for name, one in zip(call.names, tensors, strict=True)
    ]
    fused.check_operands(call.function, x, dict(zip(call.names[1:], operands, strict=True)), demanded=call.demanded)
    if not tensors[0].is_cuda or forward_ad._current_level >= 0 or operators.under_functorch():
        return _own(call, tensors, numbers, eps, wants_statistics)
    return _by_operator(call, tensors, numbers, eps, wants_statistics)


def at_once(tensors: Sequence[Tensor]) -> bool:
    """As functional.py has it."""
    for tensor in tensors:
        if type(tensor) not in functional.PLAIN or not tensor.is_cuda or tensor.is_neg():
            return False
        if tensor.layout is not torch.strided or not tensor.is_floating_point():
            return False
    return functional._nothing_listens()


class _Fused(torch.autograd.Function):
    """A fused operation on plain CUDA tensors in eager mode."""

    @staticmethod
    def forward(ctx, call, numbers, eps, wants_statistics, *tensors):
        results, statistics, family = fused_launching.forward(call, tensors, numbers, eps, True)
        names = call.saved(call.wanted(ctx.needs_input_grad[4:]))
        places, returns = call.names, call.operation.returns
        saved = [results[returns.index("s")] if name == "s" else tensors[places.index(name)] for name in names]
        ctx.save_for_backward(statistics, *saved)
        ctx.set_materialize_grads(False)
        ctx.call = family, names, numbers, eps
        if not wants_statistics:
            return tuple(results)
        ctx.mark_non_differentiable(statistics)
        return *results, statistics

    @staticmethod
    def backward(ctx, *gradients):
        family, names, numbers, eps = ctx.call
        statistics, *saved = ctx.saved_tensors
        mask = ctx.needs_input_grad[4:]
        # With statistics there is one more of these, None.
        given = dict(zip(family.call.operation.returns, gradients, strict=False))
        dy, ds = given.get("y"), given.get("s")
        if (dy is None or functional.launchable(dy)) and (ds is None or functional.launchable(ds)):
            wanted = family.call.wanted(mask)
            of_wanted = iter(fused_launching.backward(family, names, saved, numbers, dy, ds, statistics, wanted))
            found = [next(of_wanted) if one else None for one in mask]
        else:
            found = _through_torch(family, names, saved, numbers, eps, dy, ds, statistics, mask)
        return None, None, None, None, *found


# As in functional.py, without what torch does for functorch.
_apply = super(torch.autograd.Function, _Fused).apply


def _through_torch(family, names, saved, numbers, eps, dy, ds, statistics, mask):
    """The backward pass by the operators, or for second derivatives by torch's own."""
    call, layouts, _ = family
    given = dict(zip(names, saved, strict=True))
    dtypes = [layouts[name].dtype for name in call.names]
    # Of what was not read, and not saved, the shape alone counts.
    tensors = [
        given[name] if name in given else statistics.new_empty(()).expand(layouts[name].shape) for name in call.names
    ]
    options = _options(call, numbers, eps, dtypes[0])
    *operation, eps, _, s_dtype = options
    return fused_operators.gradients(
        call, (*operation, eps, s_dtype), dy, ds, tensors, given.get("s"), statistics, mask, dtypes
    )


def _by_operator(call, tensors, numbers, eps, wants_statistics):
    x, *operands = tensors
    statistics = wants_statistics or operators.wants_gradient(*tensors)
    options = (*_options(call, numbers, eps, checks.dtype_name(x.dtype)), statistics)
    if torch.compiler.is_compiling():
        y, s, found = fused_operators.fused_norm(x, operands, *options)
    else:
        y, s, found = fused_operators.FusedNorm.apply(x, options, *operands)
    by_name = {"y": y, "s": s}
    return [by_name[name] for name in call.operation.returns], found if wants_statistics else None


def _options(call: Call, numbers: Sequence[float], eps: float, x_dtype: str) -> tuple:
    """As the operators take them, but for wants_statistics."""
    norm, prologue, epilogue, names = fused_operators.texts_of(call)
    dtype, s_dtype = (getattr(torch, one or x_dtype) for one in (call.dtype, call.s_dtype))
    return norm, prologue, epilogue, names, [*numbers], [*call.operation.returns], eps, dtype, s_dtype


def _own(call, tensors, numbers, eps, wants_statistics):
    """torch's own operators, with autograd's derivatives."""
    values = fused_operators.values_of(call, tensors, numbers)
    *_, dtype, s_dtype = _options(call, numbers, eps, checks.dtype_name(tensors[0].dtype))
    results, statistics = fused_formulas.forward(call.operation, values, eps, dtype, s_dtype)
    return [results[name] for name in call.operation.returns], statistics.detach() if wants_statistics else None
