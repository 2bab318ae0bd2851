"""`layer_norm` and `rms_norm`, drop-in replacements for those of torch.nn.functional.

A call goes to torch's own norm if nothing is differentiated on a device other than a GPU, if a program must not hold
our operators, and if our kernels do not read its tensors. Any other call is checked as torch checks it, and dispatched
like any other operation (dispatch.py). torch's own operators are never differentiated here: its layer_norm is wrong
from the third derivative on, and already in the second if one of the two is forward-mode.

cunorm's own functions (arrays.py) call this module after their own checks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.fx
import torch.nn.functional
from torch import Tensor
from torch.fx.node import map_aggregate

from ...call.checks import check_sm_margin
from ...operation import NAMED
from ..private import (
    autocasts_to_float32,
    in_forward_mode,
    is_exporting,
    is_functional,
    is_traced,
    nothing_else_listens,
    under_functorch,
)
from . import calls, checks, dispatch, formulas, gpu, repeats
from .dispatch import PLAIN

HALF = (torch.float16, torch.bfloat16)
FLOATING = (*HALF, torch.float32, torch.float64)
EPS, DTYPE = (float, type(None)), (type(None), torch.dtype)  # types of eps and dtype that need no conversion


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
        float16, bfloat16, float32 or float64. It is read without a copy, and so is the gradient of y, if its rows are
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
        The dtype of y. The default is that of input; under autocast it is float32 for a 16-bit input, as in
        torch.nn.functional.layer_norm.
    sm_margin : int or dict
        Leave this many multiprocessors to other work, such as communication. A dict has any of the keys `forward` and
        `backward`, for a call that is differentiated, and `inference`, for one that is not.

    Returns
    -------
    y : Tensor, shape of input
        Contiguous, on the device of input, ordered on torch's current stream.

    Raises
    ------
    RuntimeError
        If shapes or devices do not fit, or CuPy cannot use the GPU.
    NotImplementedError
        If a tensor has another dtype, or is sparse or quantised.
    TypeError, ValueError
        If an argument is of the wrong kind, or eps, dtype, sm_margin or zero_centered_gamma is out of range.
    ImportError
        If a tensor is on a CUDA device and CuPy is missing.

    Notes
    -----
    The arithmetic is in float32 (float64 for float64 input) with one rounding at the end. The backward pass needs
    input, mean, rstd and weight, which are kept. Tensors that are not on a CUDA device go to torch's own kernels. See
    Ba, Kiros, Hinton, Layer Normalization, 2016, and kernels_cu/norms/norm_forward.cu.

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

    Parameters, results and errors are those of `layer_norm`; `eps=None` is the machine epsilon of the arithmetic, 2^-23
    (2^-52 for float64 input). Under autocast y has the dtype that this version of torch gives it in
    torch.nn.functional.rms_norm. See Zhang, Sennrich, Root Mean Square Layer Normalization, 2019, and
    kernels_cu/norms/norm_forward.cu.

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
    """Compute either function; `operation` is a name of cunorm.operation.NAMED."""
    if dispatch.compiling():
        return _slowly(operation, (x, weight, bias), normalized_shape, eps, dtype, sm_margin)
    key = None
    if type(x) in PLAIN and type(sm_margin) is int and type(eps) in EPS and type(dtype) in DTYPE:
        shape = normalized_shape
        # A module's shape is a tuple, most often of one int. (3.0,) compares equal to (3,), but is no shape.
        if type(shape) is torch.Size or (type(shape) is tuple and len(shape) == 1 and type(shape[0]) is int):
            key = (x.shape, operation, shape, eps, dtype, sm_margin, x.dtype, weight is None, bias is None)
            tensors = given(x, weight, bias) if weight is None or bias is None else (x, weight, bias)
            known = repeats.known_call(key, tensors) or dispatch.of_other_rows(key, tensors)
            if known is not None and nothing_else_listens():
                return dispatch.run_known(known, tensors)[0]
    if not isinstance(x, Tensor):
        node = symbolic(norm, operation, x, normalized_shape, weight, bias, eps, dtype, sm_margin)
        if node is not None:
            return node
    checks.tensors(NAMED[operation].norm, x, weight, bias)
    return _slowly(operation, (x, weight, bias), normalized_shape, eps, dtype, sm_margin, key)


def given(x: Tensor, weight: Tensor | None, bias: Tensor | None) -> tuple[Tensor, ...]:
    """Return those of the tensors that are not None."""
    if bias is not None:
        return (x, bias) if weight is None else (x, weight, bias)
    return (x,) if weight is None else (x, weight)


def _slowly(operation, x_weight_bias, normalized_shape, eps, dtype, sm_margin, key=None) -> Tensor:
    """Run a call of which nothing is known, by torch's own norm or after checks, and remember it by `key`."""
    function, (x, weight, bias) = NAMED[operation].norm, x_weight_bias
    shape = checks.shape(function, normalized_shape)
    margins = checks.sm_margins(function, sm_margin)
    if dtype is not None:
        checks.output_dtype(function, dtype)
    tensors = given(x, weight, bias)
    wanted = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)
    at_once = not dispatch.compiling() and dispatch.at_once(tensors)
    if not at_once and _torch_serves(x, weight, bias, wanted or under_functorch() or in_forward_mode()):
        return _by_torch(operation, x, shape, weight, bias, eps, dtype)
    ndim = checks.trailing_axes(function, x, shape)
    eps = checks.eps(function, eps, x)
    if dtype is None:
        dtype = default_dtype(operation, x) if x.is_cuda else x.dtype
    if not dispatch.compiling():
        checks.forward(operation, x, ndim, weight, bias, dtype)
        if type(x) in PLAIN and x.is_cuda:
            sms = gpu.properties_of(function, x).sms
            for margin in margins:
                check_sm_margin(function, margin, sms)
    call, rows = in_rows(operation, x, ndim, weight, bias, dtype, margins)
    if at_once and key is not None and ndim == 1:
        return dispatch.run_new(key, call, rows, (), eps)[0]
    (y,), _ = dispatch.run(call, rows, (), eps, False)
    return y if ndim == 1 else y.reshape(x.shape)


def in_rows(operation, x, ndim, weight, bias, dtype, sm_margins) -> tuple[calls.Call, Sequence[Tensor]]:
    """Return what calls of this form have in common, and the tensors with the normalised axes flattened into one."""
    call = calls.affine_call(operation, weight, bias, dtype, sm_margins)
    tensors = given(x, weight, bias)
    return call, tensors if ndim == 1 else [as_rows(tensor, ndim) for tensor in tensors]


def as_rows(tensor: Tensor, ndim: int) -> Tensor:
    """Flatten the last `ndim` axes into one."""
    return tensor.flatten(-ndim) if ndim > 1 else tensor


def symbolic(function: Callable[..., Any], *arguments: Any, **options: Any) -> torch.fx.Proxy | None:
    """Add a call of `function` to the graph of torch.fx.symbolic_trace, if an argument is a value of that graph.

    torch.nn.functional's norms do so too. It is needed because the control flow in ours cannot be traced.
    """
    proxies: list[torch.fx.Proxy] = []
    map_aggregate(
        (*arguments, options), lambda leaf: proxies.append(leaf) if isinstance(leaf, torch.fx.Proxy) else None
    )
    return proxies[0].tracer.create_proxy("call_function", function, arguments, options) if proxies else None


def _torch_serves(x: Tensor, weight: Tensor | None, bias: Tensor | None, differentiated: bool) -> bool:
    """Say whether a call goes to torch's own norm: ours does not serve it, or nothing is differentiated off the GPU.

    A program that is exported or traced for another device than CUDA holds torch's norm, as it must run without cunorm.
    """
    if not x.is_cuda and not differentiated:
        return True
    if x.is_nested or x.is_complex():
        return True
    if x.is_cuda:
        return torch.onnx.is_in_onnx_export()
    tensors = (tensor for tensor in (x, weight, bias) if tensor is not None)
    if any(tensor.dtype not in FLOATING or tensor.layout is not torch.strided for tensor in tensors):
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
    """Return (y, statistics) for checked arguments; y is differentiable, statistics are as formulas.py has them."""
    call, rows = in_rows(operation, x, len(shape), weight, bias, dtype, (sm_margin,) * 3)
    (y,), statistics = dispatch.run(call, rows, (), eps, True)
    return y if len(shape) == 1 else y.reshape(x.shape), statistics


def default_dtype(operation: str, x: Tensor) -> torch.dtype:
    """Return the dtype of y: that of x, or under autocast that of torch's own norm. x itself is not converted."""
    if torch.is_autocast_enabled("cuda") and x.dtype in HALF and AUTOCAST_TO_FLOAT32[operation]:
        return torch.float32
    return x.dtype


def autocast_dtype(x: Tensor) -> torch.dtype | None:
    """Return the dtype that autocast would convert x to before a matrix product; None if it would not convert x."""
    kind = "cuda" if x.is_cuda else x.device.type  # making a device takes the host longer
    return torch.get_autocast_dtype(kind) if x.dtype is not torch.float64 and autocasts(kind) else None


def autocasts(kind: str) -> bool:
    """Say whether autocast is on for a type of device; torch itself refuses to say so for "meta"."""
    return kind != "meta" and torch.is_autocast_enabled(kind)


# autocast computes layer_norm in float32; whether it does so with rms_norm depends on the version of torch.
AUTOCAST_TO_FLOAT32 = {name: autocasts_to_float32(operation.norm) for name, operation in NAMED.items()}


def _by_torch(operation, x, shape, weight, bias, eps, dtype) -> Tensor:
    """Run torch's own operators, in wider arithmetic if they would refuse a mixture of dtypes or round twice."""
    function = NAMED[operation].norm
    dtypes = {tensor.dtype for tensor in (x, weight, bias) if tensor is not None}
    if operation != function or dtype not in (None, x.dtype):
        checks.floating(function, x=x, weight=weight, bias=bias)
    elif len(dtypes) == 1 or not dtypes <= {*FLOATING}:  # torch computes, or refuses, dtypes that are not ours
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
    if torch.onnx.is_in_onnx_export():  # torch 2.11 cannot export aten._fused_rms_norm, the kernel for CUDA
        ndim = checks.trailing_axes(function, x, shape)
        checks.forward(function, x, ndim, weight, None, x.dtype)
        call, rows = in_rows(function, x, ndim, weight, None, x.dtype, (0, 0, 0))
        (y,), _ = dispatch.by_formulas(call, rows, (), checks.eps(function, eps, x), False)
        return y.reshape(x.shape)
    return torch.nn.functional.rms_norm(x, shape, weight, eps)
