"""`layer_norm` and `rms_norm`, drop-in for those of torch.nn.functional.

A call takes one of three ways:
- a plain CUDA tensor in eager mode: straight to the launch, through an autograd.Function if a gradient is wanted;
- CUDA under torch.compile, export, functorch, a dispatch mode, or in a subclass (DTensor, FakeTensor): the operators;
- any other device, forward-mode derivatives, and a trace for ONNX, which knows no operators of ours: torch's own.

cunorm's own functions (arrays.py) come here with what they have checked themselves.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence

import torch
import torch.nn.functional
from torch import Tensor
from torch.autograd import forward_ad

from . import checks, formulas, launching, operators

PLAIN = (Tensor, torch.nn.Parameter)
HALF = (torch.float16, torch.bfloat16)
FLOATING = (*HALF, torch.float32, torch.float64)


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
        float16, bfloat16, float32 or float64. Rows may be strided; a tensor whose rows are not contiguous is copied.
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
    rstd and weight are kept. Tensors that are not on a CUDA device go to torch's own operators. Ba, Kiros, Hinton,
    Layer Normalization, 2016; kernels_cu/norm_forward.cu.

    Examples
    --------
    >>> import torch
    >>> from cunorm.torch import layer_norm
    >>> layer_norm(torch.tensor([[1.0, 2.0, 3.0]]), (3,))
    tensor([[-1.2247,  0.0000,  1.2247]])
    """
    return norm("layer_norm", input, normalized_shape, weight, bias, eps, zero_centered_gamma, dtype, sm_margin)


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
    Sennrich, Root Mean Square Layer Normalization, 2019; kernels_cu/norm_forward.cu.

    Examples
    --------
    >>> import torch
    >>> from cunorm.torch import rms_norm
    >>> rms_norm(torch.tensor([[3.0, 4.0]]), (2,), eps=0.0)
    tensor([[0.8485, 1.1314]])
    """
    return norm("rms_norm", input, normalized_shape, weight, None, eps, zero_centered_gamma, dtype, sm_margin)


def norm(op, x, normalized_shape, weight, bias, eps, zero_centered_gamma, dtype, sm_margin) -> Tensor:
    """Both functions; `op` is the name of one."""
    if torch.compiler.is_compiling():
        return _through_torch(op, x, normalized_shape, weight, bias, eps, zero_centered_gamma, dtype, sm_margin)
    if not _at_once(x, weight, bias):
        checks.tensors(op, x, weight, bias)
        return _through_torch(op, x, normalized_shape, weight, bias, eps, zero_centered_gamma, dtype, sm_margin)
    shape = normalized_shape if type(normalized_shape) is torch.Size else checks.shape(op, normalized_shape)
    if x.shape[-len(shape) :] != shape:
        checks.trailing_axes(op, x, shape)
    if type(eps) is not float:
        eps = checks.eps(op, eps, x)
    if type(sm_margin) is int:
        margin = backward_margin = inference_margin = sm_margin
    else:
        margin, backward_margin, inference_margin = checks.sm_margins(op, sm_margin)
    if dtype is None:
        dtype = _default_dtype(op, x)
    ndim = len(shape)
    if torch.is_grad_enabled() and (
        x.requires_grad or (weight is not None and weight.requires_grad) or (bias is not None and bias.requires_grad)
    ):
        return _apply(x, weight, bias, (op, ndim, eps, zero_centered_gamma, dtype, margin, backward_margin))
    options = (eps, zero_centered_gamma, dtype, inference_margin, False)
    return launching.forward(op, x, ndim, weight, bias, *options)[0]


def _at_once(x, weight, bias) -> bool:
    """Plain CUDA tensors, and nothing listens that a direct launch would bypass."""
    return (
        type(x) in PLAIN
        and x.is_cuda
        and (weight is None or type(weight) in PLAIN)
        and (bias is None or type(bias) in PLAIN)
        and _nothing_listens()
        and not x.is_neg()
        and x.layout is torch.strided
        and x.dtype in FLOATING
    )


def launchable(gradient: Tensor) -> bool:
    """A plain CUDA tensor that nobody differentiates again, and nothing listens that a direct launch would bypass."""
    return (
        type(gradient) is Tensor
        and gradient.is_cuda
        and not torch.is_grad_enabled()
        and _nothing_listens()
        and not gradient.is_neg()
    )


def _nothing_listens() -> bool:
    return (
        torch._C._len_torch_dispatch_stack() == 0
        and torch._C._len_torch_function_stack() == 0
        and torch._C._functorch.peek_interpreter_stack() is None
        and torch._C._get_tracing_state() is None
        and forward_ad._current_level < 0
    )


class _Norm(torch.autograd.Function):
    """The norm of plain CUDA tensors in eager mode."""

    @staticmethod
    def forward(ctx, x, weight, bias, options):
        op, ndim, eps, zero_centered_gamma, dtype, sm_margin, _ = options
        results = launching.forward(op, x, ndim, weight, bias, eps, zero_centered_gamma, dtype, sm_margin, True)
        y, statistics, family = results
        ctx.save_for_backward(x, statistics, weight)
        ctx.call = options, family, None if bias is None else bias.dtype
        return y

    @staticmethod
    def backward(ctx, dy):
        x, statistics, weight = ctx.saved_tensors
        options, family, bias_dtype = ctx.call
        op, _, eps, zero_centered_gamma, _, _, sm_margin = options
        mask = ctx.needs_input_grad[:3]
        if launchable(dy):
            dx, dweight, dbias = launching.backward(family, dy, x, statistics, weight, mask, sm_margin)
        else:
            dx, dweight, dbias = operators.backward(
                dy, x, statistics, weight, op, eps, zero_centered_gamma, mask, sm_margin
            )
        if dbias is not None and dbias.dtype is not bias_dtype:
            dbias = dbias.to(bias_dtype)
        return dx, dweight, dbias, None


# autograd.Function.apply without what it does for functorch, which `_at_once` has excluded: 3 us.
_apply = super(torch.autograd.Function, _Norm).apply


def _through_torch(op, x, normalized_shape, weight, bias, eps, zero_centered_gamma, dtype, sm_margin) -> Tensor:
    """By the operators, or for what they do not serve by torch's own; traceable."""
    shape = checks.shape(op, normalized_shape)
    margin, backward_margin, inference_margin = checks.sm_margins(op, sm_margin)
    if dtype is not None:
        checks.output_dtype(op, dtype)
    elsewhere = not x.is_cuda or x.is_nested or x.is_complex() or forward_ad._current_level >= 0
    if elsewhere or torch.onnx.is_in_onnx_export():
        return _own(op, x, shape, weight, bias, eps, zero_centered_gamma, dtype)
    ndim = checks.trailing_axes(op, x, shape)
    eps = checks.eps(op, eps, x)
    if dtype is None:
        dtype = _default_dtype(op, x)
    transformed = False
    if not torch.compiler.is_compiling():
        checks.forward(op, x, ndim, weight, bias, zero_centered_gamma, dtype)
        transformed = operators.under_functorch()
    wanting = (tensor is not None and tensor.requires_grad for tensor in (x, weight, bias))
    wants_statistics = transformed or (torch.is_grad_enabled() and any(wanting))
    margin = margin if wants_statistics else inference_margin
    options = (op, ndim, eps, zero_centered_gamma, dtype, wants_statistics, margin, backward_margin)
    return _by_operator(x, weight, bias, options)[0]


def norm_with_statistics(
    op: str,
    x: Tensor,
    ndim: int,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    zero_centered_gamma: bool,
    dtype: torch.dtype,
    sm_margin: int,
) -> tuple[Tensor, Tensor]:
    """(y, statistics) for arguments that are checked; y is differentiable, statistics are as formulas.py has them."""
    if forward_ad._current_level >= 0:
        statistics = formulas.statistics_of(op, x, ndim, eps)
        return formulas.forward(op, x, statistics, weight, bias, zero_centered_gamma).to(dtype), statistics.detach()
    options = (op, ndim, eps, zero_centered_gamma, dtype, True, sm_margin, sm_margin)
    return _by_operator(x, weight, bias, options)


def _by_operator(x: Tensor, weight: Tensor | None, bias: Tensor | None, options: tuple) -> tuple[Tensor, Tensor]:
    if torch.compiler.is_compiling():
        return operators.norm_forward(x, weight, bias, *options)
    _register_shardings()
    forward = operators.TransformedForward.apply if operators.under_functorch() else operators.norm_forward
    return forward(x, weight, bias, *options)


def _default_dtype(op: str, x: Tensor) -> torch.dtype:
    """Of y: that of x, under autocast what torch's own norm returns. 16-bit tensors need not be converted for that."""
    if x.dtype in HALF and torch.is_autocast_enabled("cuda") and AUTOCAST_TO_FLOAT32[op]:
        return torch.float32
    return x.dtype


def autocast_dtype(x: Tensor) -> torch.dtype | None:
    """What autocast would convert x to before a product; None where it leaves it."""
    kind = x.device.type
    return torch.get_autocast_dtype(kind) if x.dtype is not torch.float64 and autocasts(kind) else None


def autocasts(kind: str) -> bool:
    """Whether autocast is on for a type of device; torch refuses to say it of "meta"."""
    return kind != "meta" and torch.is_autocast_enabled(kind)


# layer_norm is on autocast's list of operators in float32; rms_norm is in some versions of torch.
AUTOCAST_TO_FLOAT32 = {
    op: torch._C._dispatch_has_kernel_for_dispatch_key(f"aten::{op}", "AutocastCUDA")
    for op in ("layer_norm", "rms_norm")
}


def _own(op, x, shape, weight, bias, eps, zero_centered_gamma, dtype) -> Tensor:
    """torch's own operators, in wider arithmetic where they would refuse the mixture or round twice."""
    if zero_centered_gamma and weight is None:
        raise ValueError(f"{op}: zero_centered_gamma=True needs a weight; got weight=None.")
    dtypes = {tensor.dtype for tensor in (x, weight, bias) if tensor is not None}
    ours = zero_centered_gamma or dtype not in (None, x.dtype)
    if ours:
        checks.floating(op, x=x, weight=weight, bias=bias)
    elif len(dtypes) == 1 or not dtypes <= {*FLOATING}:  # what else there is torch computes, or refuses
        y = _torch_norm(op, x, shape, weight, bias, eps)
        return y if dtype is None else y.to(dtype)
    compute = formulas.compute_dtype(x)
    eps = checks.eps(op, eps, x)
    weight = None if weight is None else formulas.gamma(weight, zero_centered_gamma, x)
    bias = None if bias is None else bias.to(compute)
    return _torch_norm(op, x.to(compute), shape, weight, bias, eps).to(x.dtype if dtype is None else dtype)


def _torch_norm(op, x, shape, weight, bias, eps) -> Tensor:
    if op == "layer_norm":
        return torch.nn.functional.layer_norm(x, shape, weight, bias, eps)
    return torch.nn.functional.rms_norm(x, shape, weight, eps)


def _register_shardings() -> None:
    """DTensor is told how the operators are sharded once somebody has imported it."""
    if "torch.distributed.tensor" in sys.modules:
        from . import sharding  # noqa: F401
