"""`layer_norm` and `rms_norm`, drop-in for those of torch.nn.functional.

A call takes one of four ways:
- a plain CUDA tensor in eager mode: straight to the launch, through an autograd.Function if a gradient is wanted;
- CUDA under torch.compile, export, functorch, a dispatch mode, or in a subclass (DTensor, FakeTensor), and any other
  device where a gradient is wanted: the operators;
- forward-mode derivatives, and what is compiled for another device and differentiated: formulas.py;
- what is not differentiated on another device, and programs that are to hold no operators of ours: torch's own.
torch's own operators are never differentiated here: its layer_norm is wrong from the third derivative on, and already
in the second where one of the two is forward-mode.

cunorm's own functions (arrays.py) come here with what they have checked themselves.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.fx
import torch.nn.functional
from torch import Tensor
from torch.fx.node import map_aggregate

from ...operation import NAMED
from ..private import (
    applied,
    autocasts_to_float32,
    in_forward_mode,
    is_batched,
    is_exporting,
    is_functional,
    is_traced,
    nothing_else_listens,
    nothing_listens,
    under_functorch,
)
from . import checks, formulas, launching, nodes, norm_nodes, operators
from .launching import Call

PLAIN = (Tensor, torch.nn.Parameter)
HALF = (torch.float16, torch.bfloat16)
FLOATING = (*HALF, torch.float32, torch.float64)
EPS, DTYPE = (float, type(None)), (type(None), torch.dtype)  # types of options that need no conversion


def layer_norm(
    input: Tensor,
    normalized_shape: int | Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    *,
    zero_centered_gamma: bool = False,
    dtype: torch.dtype | None = None,
    sm_margin: int | Mapping[str, int] = 0,
) -> Tensor:
    """y = (x - mean(x)) / sqrt(var(x) + eps) * weight + bias, over the last axes of x = input.

    Parameters
    ----------
    input : Tensor, shape (..., *normalized_shape)
        float16, bfloat16, float32 or float64. It is read where it lies, and so is the gradient of y, if its rows are
        contiguous and one or two strides lead from row to row, as in the heads of a packed QKV,
        qkv.view(tokens, 3 * heads, cols)[:, :heads]. Else it is copied.
    normalized_shape : int or sequence of int
        The last axes of input, over which mean and (biased) variance are taken.
    weight, bias : Tensor, shape normalized_shape, optional
        Any of the four dtypes, each independently of input.
    eps : float
        Added to the variance, inside the root.
    zero_centered_gamma : bool
        Multiply by 1 + weight instead of weight.
    dtype : torch.dtype, optional
        Of y. Default: that of input; under autocast float32 for a 16-bit input, as torch.nn.functional.layer_norm.
    sm_margin : int or dict
        Leaves this many multiprocessors to other work, such as communication. A dict has any of the keys `forward` and
        `backward`, for a call that is differentiated, and `inference`, for one that is not.

    Returns
    -------
    y : Tensor, shape of input
        Contiguous, on the device of input, ordered on torch's current stream.

    Raises
    ------
    RuntimeError
        Shapes or devices that do not fit, or a GPU that CuPy cannot use.
    NotImplementedError
        A tensor of another dtype, or one that is sparse or quantised.
    TypeError, ValueError
        An argument of the wrong kind; eps, dtype, sm_margin or zero_centered_gamma out of range.
    ImportError
        A CUDA tensor without CuPy.

    Notes
    -----
    Arithmetic in float32 (float64 for float64 input) with one rounding at the end. For the backward pass input, mean,
    rstd and weight are kept. Tensors that are not on a CUDA device go to torch's own kernels. Ba, Kiros, Hinton,
    Layer Normalization, 2016; kernels_cu/norms/norm_forward.cu.

    Examples
    --------
    >>> import torch
    >>> from cunorm.torch import layer_norm
    >>> layer_norm(torch.tensor([[1.0, 2.0, 3.0]]), (3,))
    tensor([[-1.2247,  0.0000,  1.2247]])
    """
    operation = checks.zero_centered("layer_norm", weight) if zero_centered_gamma else "layer_norm"
    return norm(operation, input, normalized_shape, weight, bias, eps, dtype, sm_margin)


def rms_norm(
    input: Tensor,
    normalized_shape: int | Sequence[int],
    weight: Tensor | None = None,
    eps: float | None = None,
    *,
    zero_centered_gamma: bool = False,
    dtype: torch.dtype | None = None,
    sm_margin: int | Mapping[str, int] = 0,
) -> Tensor:
    """y = x / sqrt(mean(x²) + eps) * weight, over the last axes of x = input.

    Parameters, results and errors as in `layer_norm`; `eps=None` is the machine epsilon of the arithmetic, 2^-23 (2^-52
    for float64 input). Under autocast as this version of torch has it for torch.nn.functional.rms_norm. Zhang,
    Sennrich, Root Mean Square Layer Normalization, 2019; kernels_cu/norms/norm_forward.cu.

    Examples
    --------
    >>> import torch
    >>> from cunorm.torch import rms_norm
    >>> rms_norm(torch.tensor([[3.0, 4.0]]), (2,), eps=0.0)
    tensor([[0.8485, 1.1314]])
    """
    operation = checks.zero_centered("rms_norm", weight) if zero_centered_gamma else "rms_norm"
    return norm(operation, input, normalized_shape, weight, None, eps, dtype, sm_margin)


def norm(operation, x, normalized_shape, weight, bias, eps, dtype, sm_margin) -> Tensor:
    """Both functions; `operation` is a name of cunorm.operation.NAMED."""
    if _compiling():
        return _through_torch(operation, x, normalized_shape, weight, bias, eps, dtype, sm_margin)
    key = None
    if type(x) in PLAIN and type(sm_margin) is int and type(eps) in EPS and type(dtype) in DTYPE:
        shape = normalized_shape
        # That of a module is a tuple, most often of one number. What compares equal to a shape need not be one.
        if type(shape) is torch.Size or (type(shape) is tuple and len(shape) == 1 and type(shape[0]) is int):
            key = (operation, shape, eps, dtype, sm_margin, x.shape, x.dtype, weight is None, bias is None)
            call = launching.known_call(key, x, weight, bias)
            if call is not None and nothing_else_listens():
                return _run(call, x, weight, bias)
    if not _at_once(x, weight, bias):
        if not isinstance(x, Tensor):
            node = symbolic(norm, operation, x, normalized_shape, weight, bias, eps, dtype, sm_margin)
            if node is not None:
                return node
        checks.tensors(NAMED[operation].norm, x, weight, bias)
        return _through_torch(operation, x, normalized_shape, weight, bias, eps, dtype, sm_margin)
    call = _call(operation, x, normalized_shape, weight, bias, eps, dtype, sm_margin)
    if key is not None and (weight is not None or bias is None):  # what is remembered
        which = norm_nodes.of_norm(call, x, weight, bias, _gradients, launchable)
        call = call._replace(compiled=nodes.call_of(which))
        launching.remember_call(key, x, weight, bias, call)
    return _run(call, x, weight, bias)


def symbolic(function: Callable[..., Any], *arguments: Any, **options: Any) -> torch.fx.Proxy | None:
    """A call of `function` in the graph of torch.fx.symbolic_trace, if one of the arguments stands for a value of it.

    So torch.nn.functional's norms do; the control flow in ours cannot be traced.
    """
    proxies: list[torch.fx.Proxy] = []
    map_aggregate((*arguments, options), lambda one: proxies.append(one) if isinstance(one, torch.fx.Proxy) else None)
    return proxies[0].tracer.create_proxy("call_function", function, arguments, options) if proxies else None


def _call(operation, x, normalized_shape, weight, bias, eps, dtype, sm_margin) -> Call:
    """Of plain CUDA tensors."""
    function = NAMED[operation].norm
    shape = checks.shape(function, normalized_shape)
    eps = checks.eps(function, eps, x)
    margin, backward_margin, inference_margin = checks.sm_margins(function, sm_margin)
    if dtype is None:
        dtype = _default_dtype(operation, x)
    differentiable = x.requires_grad
    differentiable |= (weight is not None and weight.requires_grad) or (bias is not None and bias.requires_grad)
    margin = margin if differentiable and _grad_enabled() else inference_margin
    recipe = launching.recipe_of(x, weight, bias, (operation, shape, dtype, margin))
    return Call(recipe, eps, differentiable, backward_margin, None if bias is None else bias.dtype)


def _run(call: Call, x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    if call.compiled is None:
        nodes.module()  # it may have been built since this call was described
    elif (found := call.compiled(x, weight, bias)) is not None:
        return found[0]
    if call.differentiable and _grad_enabled():
        return _apply(x, weight, bias, call)
    return launching.forward_by(call.recipe, x, weight, bias, call.eps, False)[0]


def _at_once(x, weight, bias) -> bool:
    """Plain CUDA tensors, and nothing listens that a direct launch would bypass."""
    return (
        type(x) in PLAIN
        and x.is_cuda
        and _plain_parameters(weight, bias)
        and nothing_listens()
        and not x.is_neg()
        and x.layout is torch.strided
        and x.is_floating_point()  # what dtypes of these there are kernels for is checked later
    )


def _plain_parameters(weight, bias) -> bool:
    return (weight is None or type(weight) in PLAIN) and (bias is None or type(bias) in PLAIN)


def launchable(gradient: Tensor) -> bool:
    """A plain CUDA tensor that nobody differentiates again, and nothing listens that a direct launch would bypass."""
    return (
        type(gradient) is Tensor
        and gradient.is_cuda
        and not _grad_enabled()
        and nothing_listens()
        and not gradient.is_neg()
        and not is_batched(gradient)
    )


# Looked up once: 0.1 us a call.
_compiling = torch.compiler.is_compiling
_grad_enabled = torch.is_grad_enabled


def launched_gradients(
    family: launching.Family,
    dy: Tensor,
    x: Tensor,
    statistics: Tensor,
    weight: Tensor | None,
    mask: tuple[bool, bool, bool],
    sm_margin: int,
    in_place: bool = False,
) -> tuple[Tensor | None, Tensor | None, Tensor | None] | None:
    """As `launching.backward`; None where dy cannot go straight to the launch."""
    recipe = launching.known_backward(family, dy, x, weight, mask, sm_margin)
    if recipe is not None and not _grad_enabled() and nothing_else_listens():
        return launching.backward_by(recipe, dy, x, statistics, weight, mask, in_place)
    if not launchable(dy):
        return None
    launching.remember_backward(family, dy, x, weight, mask, sm_margin)
    return launching.backward(family, dy, x, statistics, weight, mask, sm_margin, in_place)


class _Norm(torch.autograd.Function):
    """The norm of plain CUDA tensors in eager mode."""

    @staticmethod
    def forward(ctx, x, weight, bias, call):
        y, statistics = launching.forward_by(call.recipe, x, weight, bias, call.eps, True)
        ctx.save_for_backward(statistics, x, weight)  # in the order of nodes_autograd.h, for checkpoints
        ctx.call = call
        return y

    @staticmethod
    def backward(ctx, dy):
        statistics, x, weight = ctx.saved_tensors
        return *_gradients(ctx.call, dy, x, statistics, weight, ctx.needs_input_grad[:3]), None


def _gradients(
    call: Call, dy: Tensor, x: Tensor, statistics: Tensor, weight: Tensor | None, mask: tuple[bool, bool, bool]
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Those of x, weight and bias, None where `mask` says so."""
    family, margin = call.recipe.family, call.backward_margin
    gradients = launched_gradients(family, dy, x, statistics, weight, mask, margin)
    if gradients is None:
        gradients = operators.backward(dy, x, statistics, weight, family.operation, call.eps, mask, margin)
    dx, dweight, dbias = gradients
    if dbias is not None and dbias.dtype is not call.bias_dtype:
        dbias = dbias.to(call.bias_dtype)
    return dx, dweight, dbias


class _NormWithStatistics(_Norm):
    """The same, with (y, statistics) for its results."""

    @staticmethod
    def forward(ctx, x, weight, bias, call):
        y = _Norm.forward(ctx, x, weight, bias, call)
        statistics, *_ = ctx.to_save
        ctx.mark_non_differentiable(statistics)
        ctx.set_materialize_grads(False)
        return y, statistics

    @staticmethod
    def backward(ctx, dy, _):
        return _Norm.backward(ctx, dy)


class _NormOnCpu(torch.autograd.Function):
    """The norm of plain tensors on the CPU in eager mode."""

    @staticmethod
    def forward(ctx, x, weight, bias, operation, ndim, eps, dtype):
        y, statistics = operators.forward_by_torch(x, weight, bias, operation, ndim, eps, dtype)
        ctx.save_for_backward(x, statistics, weight)
        ctx.options = operation, eps, None if bias is None else bias.dtype
        return y

    @staticmethod
    def backward(ctx, dy):
        x, statistics, weight = ctx.saved_tensors
        operation, eps, bias_dtype = ctx.options
        mask = ctx.needs_input_grad[:3]
        if type(dy) is Tensor and not _grad_enabled() and nothing_listens() and not is_batched(dy):
            gradients = operators.backward_by_torch(dy, x, statistics, weight, operation, eps, mask)
        else:
            gradients = operators.backward(dy, x, statistics, weight, operation, eps, mask, 0)
        dx, dweight, dbias = (gradient if wanted else None for gradient, wanted in zip(gradients, mask, strict=True))
        return dx, dweight, None if dbias is None else dbias.to(bias_dtype), None, None, None, None


_apply = applied(_Norm)
_apply_with_statistics = applied(_NormWithStatistics)
_apply_on_cpu = applied(_NormOnCpu)


def _through_torch(operation, x, normalized_shape, weight, bias, eps, dtype, sm_margin) -> Tensor:
    """By the operators, or for what they do not serve by torch's own; traceable."""
    function = NAMED[operation].norm
    shape = checks.shape(function, normalized_shape)
    margin, backward_margin, inference_margin = checks.sm_margins(function, sm_margin)
    if dtype is not None:
        checks.output_dtype(function, dtype)
    compiling = torch.compiler.is_compiling()
    forward_mode = in_forward_mode()
    transformed = under_functorch()
    wanting = (tensor is not None and tensor.requires_grad for tensor in (x, weight, bias))
    differentiated = transformed or (torch.is_grad_enabled() and any(wanting))
    if _torch_serves(x, weight, bias, differentiated or forward_mode):
        return _own(operation, x, shape, weight, bias, eps, dtype)
    ndim = checks.trailing_axes(function, x, shape)
    eps = checks.eps(function, eps, x)
    if dtype is None:
        dtype = _default_dtype(operation, x) if x.is_cuda else x.dtype
    if not compiling:
        checks.forward(operation, x, ndim, weight, bias, dtype)
    # In a graph that is compiled functorch's transforms cannot see through an operator.
    if forward_mode or (compiling and (transformed or not x.is_cuda)) or x.device.type not in ("cpu", "cuda"):
        return formulas.norm(operation, x, ndim, weight, bias, eps).to(dtype)
    if not x.is_cuda and type(x) in PLAIN and _plain_parameters(weight, bias) and nothing_listens():
        return _apply_on_cpu(x, weight, bias, operation, ndim, eps, dtype)
    margin = margin if differentiated else inference_margin
    return _by_operator(x, weight, bias, operation, ndim, eps, dtype, differentiated, margin, backward_margin)[0]


def _torch_serves(x: Tensor, weight: Tensor | None, bias: Tensor | None, differentiated: bool) -> bool:
    """True if a call goes to torch's own norm: ours does not serve it, or it is not differentiated on another device.

    A program that is exported or traced for another device than CUDA holds torch's norm: it must run without cunorm.
    """
    if not x.is_cuda and not differentiated:
        return True
    if x.is_nested or x.is_complex():
        return True
    if x.is_cuda:
        return torch.onnx.is_in_onnx_export()
    given = (tensor for tensor in (x, weight, bias) if tensor is not None)
    if any(tensor.dtype not in FLOATING or tensor.layout is not torch.strided for tensor in given):
        return True
    if torch.compiler.is_compiling():
        return x.is_meta or is_exporting()
    return x.is_meta or is_traced() or is_functional(x)


def norm_with_statistics(
    operation: str,
    x: Tensor,
    shape: torch.Size,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    dtype: torch.dtype,
    sm_margin: int,
) -> tuple[Tensor, Tensor]:
    """(y, statistics) for arguments that are checked; y is differentiable, statistics are as formulas.py has them."""
    ndim = len(shape)
    if not torch.compiler.is_compiling() and _at_once(x, weight, bias):
        call = _call(operation, x, shape, weight, bias, eps, dtype, sm_margin)
        if call.differentiable and _grad_enabled():
            return _apply_with_statistics(x, weight, bias, call)
        return launching.forward_by(call.recipe, x, weight, bias, eps, True)
    if in_forward_mode() or (torch.compiler.is_compiling() and under_functorch()):
        statistics = formulas.statistics_of(operation, x, ndim, eps)
        return formulas.forward(operation, x, statistics, weight, bias).to(dtype), statistics.detach()
    return _by_operator(x, weight, bias, operation, ndim, eps, dtype, True, sm_margin, sm_margin)


def _by_operator(x: Tensor, weight: Tensor | None, bias: Tensor | None, *options) -> tuple[Tensor, Tensor]:
    if torch.compiler.is_compiling():
        return operators.norm(x, weight, bias, *options)
    if "torch.distributed.tensor" in sys.modules:  # somebody may hand us a DTensor
        from . import sharding  # noqa: F401
    return operators.Norm.apply(x, weight, bias, *options)


def _default_dtype(operation: str, x: Tensor) -> torch.dtype:
    """Of y: that of x, under autocast what torch's own norm returns. 16-bit tensors need not be converted for that."""
    if torch.is_autocast_enabled("cuda") and x.dtype in HALF and AUTOCAST_TO_FLOAT32[operation]:
        return torch.float32
    return x.dtype


def autocast_dtype(x: Tensor) -> torch.dtype | None:
    """What autocast would convert x to before a product; None where it leaves it."""
    kind = "cuda" if x.is_cuda else x.device.type  # a device takes 0.6 us
    return torch.get_autocast_dtype(kind) if x.dtype is not torch.float64 and autocasts(kind) else None


def autocasts(kind: str) -> bool:
    """Whether autocast is on for a type of device; torch refuses to say it of "meta"."""
    return kind != "meta" and torch.is_autocast_enabled(kind)


# layer_norm is on autocast's list of operators in float32; rms_norm is in some versions of torch.
AUTOCAST_TO_FLOAT32 = {name: autocasts_to_float32(operation.norm) for name, operation in NAMED.items()}


def _own(operation, x, shape, weight, bias, eps, dtype) -> Tensor:
    """torch's own operators, in wider arithmetic where they would refuse the mixture or round twice."""
    function = NAMED[operation].norm
    dtypes = {tensor.dtype for tensor in (x, weight, bias) if tensor is not None}
    ours = operation != function or dtype not in (None, x.dtype)
    if ours:
        checks.floating(function, x=x, weight=weight, bias=bias)
    elif len(dtypes) == 1 or not dtypes <= {*FLOATING}:  # what else there is torch computes, or refuses
        y = _torch_norm(function, x, shape, weight, bias, eps)
        return y if dtype is None else y.to(dtype)
    compute = formulas.compute_dtype(x)
    eps = checks.eps(function, eps, x)
    weight = None if weight is None else formulas.gamma(operation, weight, x)
    bias = None if bias is None else bias.to(compute)
    return _torch_norm(function, x.to(compute), shape, weight, bias, eps).to(x.dtype if dtype is None else dtype)


def _torch_norm(function, x, shape, weight, bias, eps) -> Tensor:
    if function == "layer_norm":
        return torch.nn.functional.layer_norm(x, shape, weight, bias, eps)
    if torch.onnx.is_in_onnx_export():  # which in torch 2.11 knows no aten._fused_rms_norm, the kernel for CUDA
        ndim = checks.trailing_axes(function, x, shape)
        checks.forward(function, x, ndim, weight, None, x.dtype)
        return formulas.norm(function, x, ndim, weight, None, checks.eps(function, eps, x)).to(x.dtype)
    return torch.nn.functional.rms_norm(x, shape, weight, eps)
