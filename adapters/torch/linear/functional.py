"""`layer_norm_linear`: a norm and the product that reads it, y = norm(x) Wᵀ + b, as one step of autograd.

The kernel writes the normalised tensor, torch's own product reads it. For the backward pass x, mean and rstd are kept,
not the normalised tensor, which is computed once more. A call takes one of three ways:
- in eager mode an autograd.Function, or without a gradient the two steps one after the other; in calls like an earlier
  one the same in C++, where that was compiled (linear_nodes.py);
- under torch.compile and export one operator for each pass (operators.py): in a graph of single operators the
  compiler would compute the normalised tensor a second time in the forward pass, and keep that;
- under functorch, for forward-mode derivatives and subclasses of Tensor the two steps, each with its own rules.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from ...linear import problem as linear_problem
from ...operation import NAMED, name_of
from ..norm import checks, launching, nodes
from ..norm.functional import (
    FLOATING,
    PLAIN,
    autocast_dtype,
    given,
    norm,
    norm_with_statistics,
    nothing_else_listens,
    symbolic,
)
from ..norm.repeats import again, remember
from ..private import applied, in_forward_mode, under_functorch
from . import linear_nodes
from . import operators as linear_operators
from .passes import Options, Sink, gradients, normalise, recipe_at_once, without_autocast


def layer_norm_linear(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    ln_weight: Tensor | None = None,
    ln_bias: Tensor | None = None,
    eps: float = 1e-5,
    *,
    normalization: str = "LayerNorm",
    zero_centered_gamma: bool = False,
    keep_normalized: bool = False,
    sm_margin: int | Mapping[str, int] = 0,
) -> Tensor:
    """y = z weightᵀ + bias, z = (x - mean(x)) / sqrt(var(x) + eps) * ln_weight + ln_bias over the last axis of input x.

    Parameters
    ----------
    input : Tensor, shape (..., in)
        float16, bfloat16, float32 or float64.
    weight : Tensor, shape (out, in)
        Of the dtype of input. Under autocast weight and bias are converted to autocast's dtype, which z has then too;
        input, ln_weight and ln_bias need not be.
    bias : Tensor, shape (out,), optional
        Of the dtype of weight.
    ln_weight, ln_bias : Tensor, shape (in,), optional
        Any of the four dtypes, each independently of input. An RMSNorm has no ln_bias.
    eps : float
        Added to the variance, inside the root.
    normalization : "LayerNorm" or "RMSNorm"
        The latter is z = x / sqrt(mean(x²) + eps) * ln_weight.
    zero_centered_gamma : bool
        Multiply by 1 + ln_weight.
    keep_normalized : bool
        Keep z for the backward pass instead of computing it once more from x: as much memory as x takes, for the time
        of one forward pass of the norm.
    sm_margin : int or dict
        Multiprocessors that the norm's kernels leave to other work, as in `layer_norm`; the product's take all. What
        the backward pass computes once more belongs to the backward pass.

    Returns
    -------
    y : Tensor, shape (..., out)
        On the device of input, ordered on torch's current stream.

    Raises
    ------
    TypeError
        weight or bias of another dtype than input outside autocast, or an argument of the wrong kind.
    RuntimeError
        Shapes or devices that do not fit.
    NotImplementedError
        A dtype that no kernel reads.
    ValueError
        An unknown normalization, an RMSNorm with ln_bias, or zero_centered_gamma without ln_weight.

    Notes
    -----
    z is rounded to its dtype once, as the two operators do. The product is torch's own, cuBLASLt with the bias in its
    epilogue for CUDA tensors; in float32 it is TF32 where torch is set so (torch.backends.cuda.matmul.allow_tf32,
    torch.set_float32_matmul_precision), and not by default.

    Examples
    --------
    >>> import torch
    >>> from cunorm.torch import layer_norm_linear
    >>> layer_norm_linear(torch.tensor([[1.0, 2.0, 3.0]]), torch.tensor([[1.0, 0.0, -1.0]]), torch.tensor([1.0]))
    tensor([[-1.4495]])
    """
    name = "layer_norm_linear"
    operation = name_of(linear_problem.op(name, normalization, ln_bias), zero_centered_gamma)
    arguments = (input, weight, bias, ln_weight, ln_bias, eps, operation, keep_normalized)
    return norm_linear(name, *arguments, margins_of(name, sm_margin))[0]


NO_MARGINS = (0, 0, 0)  # forward, backward, inference


def margins_of(function: str, sm_margin: int | Mapping[str, int]) -> tuple[int, int, int]:
    return NO_MARGINS if type(sm_margin) is int and sm_margin == 0 else checks.sm_margins(function, sm_margin)


def norm_linear(
    function: str,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    ln_weight: Tensor | None,
    ln_bias: Tensor | None,
    eps: float,
    operation: str,
    keep_normalized: bool,
    sm_margins: tuple[int, int, int] = NO_MARGINS,
    sink: Sink | None = None,
) -> tuple[Tensor, Tensor]:
    """(y, z), z the normalised tensor: as `layer_norm_linear`, with errors in the name of `function`."""
    tensors = (x, weight, bias, ln_weight, ln_bias)
    if not torch.compiler.is_compiling():
        call = known((function, sm_margins), *tensors, eps, operation, keep_normalized)
        if call is not None:
            return run_known(call, *tensors, sink)
    if not isinstance(x, Tensor):
        options = (eps, operation, keep_normalized, sm_margins)
        node = symbolic(norm_linear, function, *tensors, *options)
        if node is not None:
            return node
    check(function, *tensors, operation)
    cast = autocast_dtype(x)
    if cast is None:
        _check_dtypes(function, x, weight=weight, bias=bias)
    if type(eps) is not float:
        eps = checks.eps(function, eps, x)
    differentiable = any(tensor is not None and tensor.requires_grad for tensor in tensors)
    margins = margins_of_pass(sm_margins, differentiable and torch.is_grad_enabled())
    options = Options(operation, eps, cast or x.dtype, keep_normalized, *margins)
    if cast is None and not torch.compiler.is_compiling() and sm_margins[0] == sm_margins[2]:
        _remember((function, sm_margins), *tensors, options, differentiable)
    return run(*tensors, options, cast, sink)[:2]


def margins_of_pass(sm_margins: tuple[int, int, int], differentiated: bool) -> tuple[int, int]:
    """Of a forward pass and of the backward one after it."""
    forward, backward, inference = sm_margins
    return forward if differentiated else inference, backward


class Call(NamedTuple):
    """What follows for a call from its options and the layouts of its tensors, without autocast."""

    options: Options
    recipe: launching.Forward  # of the norm
    differentiable: bool  # some tensor requires a gradient
    compiled: nodes.Call | None  # what serves such a call in C++ (linear_nodes.py)


def _remember(function, x, weight, bias, ln_weight, ln_bias, options: Options, differentiable: bool) -> None:
    tensors = (x, weight, bias, ln_weight, ln_bias)
    if not in_one_step(*tensors):
        return
    operation, eps, dtype, keep_normalized, sm_margin, _ = options
    recipe = recipe_at_once(x, ln_weight, ln_bias, operation, dtype, sm_margin)
    if recipe is not None:
        call = Call(options, recipe, differentiable, linear_nodes.of_norm_linear(options, recipe, *tensors))
        remember_known(call, function, *tensors, eps, operation, keep_normalized)


def remember_known(found, function, x, weight, bias, ln_weight, ln_bias, eps, operation, keep_normalized=False) -> None:
    """For `known`."""
    tensors = (x, weight, bias, ln_weight, ln_bias)
    there = tuple(tensor for tensor in tensors if tensor is not None)
    key = _key(function, *tensors, eps, operation, keep_normalized)
    remember(launching._calls, key, there, found, launching.RECIPES)


def _key(function, x, weight, bias, ln_weight, ln_bias, eps, operation, keep_normalized) -> tuple:
    there = (bias is None, ln_weight is None, ln_bias is None)
    return function, operation, eps, bool(keep_normalized), x.shape, there


def known(function, x, weight, bias, ln_weight, ln_bias, eps, operation, keep_normalized=False) -> Any:
    """What was remembered of an earlier call with tensors like these, as norm/repeats.py has it; None for nothing."""
    if type(x) not in PLAIN or type(eps) not in (float, int):
        return None
    key = _key(function, x, weight, bias, ln_weight, ln_bias, eps, operation, keep_normalized)
    kept = launching.earlier_calls(key)
    if not kept or not nothing_else_listens():
        return None
    tensors = [x, weight]
    for tensor in (bias, ln_weight, ln_bias):
        if tensor is not None:
            tensors.append(tensor)
    for alike, call in kept:
        if alike(*tensors):
            return call
    return again(launching._calls, key, tuple(tensors))


def run_known(call: Call, x, weight, bias, ln_weight, ln_bias, sink: Sink | None) -> tuple[Tensor, Tensor]:
    """(y, z)"""
    if call.compiled is None:
        nodes.module()  # it may have been built since this call was described
    elif sink is None:
        found = call.compiled(x, weight, bias, ln_weight, ln_bias)
        if found is not None:
            return found
    if call.differentiable and torch.is_grad_enabled():
        return _apply(x, weight, bias, ln_weight, ln_bias, call.options, call.recipe, sink)[:2]
    (z,), _ = launching.forward_by(call.recipe, given(x, ln_weight, ln_bias), (), call.options.eps, False)
    return F.linear(z, weight, bias), z


def run(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    ln_weight: Tensor | None,
    ln_bias: Tensor | None,
    options: Options,
    cast: torch.dtype | None,
    sink: Sink | None = None,
    wants_statistics: bool = False,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """(y, z, statistics) for arguments that are checked; statistics may be None unless wanted.

    `cast` is what autocast converts weight and bias to.
    """
    if cast is not None:
        weight = weight.to(cast)
        bias = None if bias is None else bias.to(cast)
    tensors = (x, weight, bias, ln_weight, ln_bias)
    compiling = torch.compiler.is_compiling()
    differentiated = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors)
    if (compiling or differentiated) and in_one_step(*tensors):
        return linear_operators.norm_linear(*tensors, *options) if compiling else _apply(*tensors, options, None, sink)
    operation, eps, dtype, _, forward_margin, backward_margin = options
    statistics = None
    if wants_statistics:
        z, statistics = norm_with_statistics(operation, x, x.shape[-1:], ln_weight, ln_bias, eps, dtype, forward_margin)
    else:
        margins = {"forward": forward_margin, "backward": backward_margin, "inference": forward_margin}
        sm_margin = forward_margin if forward_margin == backward_margin else margins
        z = norm(operation, x, x.shape[-1:], ln_weight, ln_bias, eps, dtype, sm_margin)
    return F.linear(z, weight, bias), z, statistics


def in_one_step(*tensors: Tensor | None) -> bool:
    """Whether a call that is differentiated can be one step of autograd, or one operator of a trace."""
    for tensor in tensors:
        if tensor is not None and type(tensor) not in PLAIN:
            return False
    return not under_functorch() and not in_forward_mode()


def check(function: str, x, weight, bias, ln_weight, ln_bias, operation: str) -> None:
    """Kinds, shapes and devices, which traced tensors have too."""
    named = (("input", x), ("weight", weight), ("bias", bias), ("ln_weight", ln_weight), ("ln_bias", ln_bias))
    for name, tensor in named:
        if not isinstance(tensor, Tensor) and (tensor is not None or name in ("input", "weight")):
            raise TypeError(f"{function}: {name} must be a torch.Tensor; got {type(tensor).__name__}.")
    if weight.dim() != 2 or 0 in weight.shape:
        raise RuntimeError(
            f"{function}: weight must have shape (out, in), neither of them 0; got {tuple(weight.shape)}."
        )
    outs, cols = weight.shape
    if x.dim() == 0 or x.shape[-1] != cols:
        raise RuntimeError(
            f"{function}: the last axis of input must have the length {cols} of a row of weight; got input of shape "
            f"{tuple(x.shape)}."
        )
    for name, tensor, size in (("bias", bias, outs), ("ln_weight", ln_weight, cols), ("ln_bias", ln_bias, cols)):
        if tensor is not None and tensor.shape != (size,):
            raise RuntimeError(f"{function}: {name} must have shape ({size},); got {tuple(tensor.shape)}.")
    device = x.device
    for name, tensor in named[1:]:
        if tensor is not None and tensor.device != device:
            raise RuntimeError(
                f"{function}: {name} must be on the device of input, {device}; got {tensor.device}. Move one of them."
            )
    if ln_weight is None and operation != NAMED[operation].norm:
        raise ValueError(f"{function}: zero_centered_gamma=True needs ln_weight; got ln_weight=None.")
    if x.dtype not in FLOATING:
        raise NotImplementedError(
            f"{function}: input must have dtype {', '.join(map(str, FLOATING))}; got {x.dtype}. Convert it first."
        )


def _check_dtypes(function: str, x: Tensor, **parameters: Tensor | None) -> None:
    for name, tensor in parameters.items():
        if tensor is not None and tensor.dtype is not x.dtype:
            raise TypeError(
                f"{function}: outside autocast input and {name} must have one dtype; got input of {x.dtype} and {name} "
                f"of {tensor.dtype}. Convert one of them."
            )


class _NormLinear(torch.autograd.Function):
    """(y, z, statistics) in eager mode. Differentiable twice: its backward pass is made of differentiable operators."""

    @staticmethod
    def forward(ctx, x, weight, bias, ln_weight, ln_bias, options, recipe, sink):
        if recipe is None:
            z, statistics = normalise(x, ln_weight, ln_bias, options, True, options.sm_margin)
        else:
            (z,), statistics = launching.forward_by(recipe, given(x, ln_weight, ln_bias), (), options.eps, True)
        y = F.linear(z, weight, bias)
        ctx.mark_non_differentiable(statistics)
        ctx.set_materialize_grads(False)
        kept = z if options.keep_normalized else None
        # In the order of norm/nodes_autograd.h, for checkpoints.
        ctx.save_for_backward(statistics, x, weight, ln_weight, ln_bias, kept)
        ctx.call = options, sink
        return y, z, statistics

    @staticmethod
    def backward(ctx, dy, dz, _):
        options, sink = ctx.call
        statistics, x, *others, z = ctx.saved_tensors
        with without_autocast("cuda" if x.is_cuda else x.device.type):  # a device takes 0.6 us
            return (
                *gradients(dy, dz, x, *others, statistics, z, options, ctx.needs_input_grad[:5], sink),
                None,
                None,
                None,
            )


_apply = applied(_NormLinear)
