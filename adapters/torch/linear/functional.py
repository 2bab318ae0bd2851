"""`layer_norm_linear`: a norm and the product that reads it, y = norm(x) Wᵀ + b, as one step of autograd.

The kernel writes the normalised tensor, and torch's own product reads it. For the backward pass x, mean and rstd are
kept, and the normalised tensor is computed once more. call.py and step.py run a call.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from ...linear import checks as linear_checks
from ...operation import name_of
from ..norm import checks
from ..norm.functional import symbolic
from .call import norm_linear
from .parallel import ALONE
from .step import NOTHING
from .wide import WIDE


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
        It has the dtype of input. Under autocast weight and bias are converted to autocast's dtype, which z then has
        too; input, ln_weight and ln_bias may have other dtypes.
    bias : Tensor, shape (out,), optional
        It has the dtype of weight.
    ln_weight, ln_bias : Tensor, shape (in,), optional
        Any of the four dtypes, each independently of input. An RMSNorm has no ln_bias.
    eps : float
        Added to the variance, inside the root.
    normalization : "LayerNorm" or "RMSNorm"
        The latter is z = x / sqrt(mean(x²) + eps) * ln_weight.
    zero_centered_gamma : bool
        Multiply by 1 + ln_weight.
    keep_normalized : bool
        Keep z for the backward pass instead of computing it once more from x. This takes as much memory as x, and saves
        the time of one forward pass of the norm.
    sm_margin : int or dict
        The norm's kernels leave this many multiprocessors to other work, as in `layer_norm`; the product takes all of
        them. If the backward pass computes z once more, the margin of the backward pass holds.

    Returns
    -------
    y : Tensor, shape (..., out)
        On the device of input, ordered on torch's current stream.

    Raises
    ------
    TypeError
        If weight or bias has another dtype than input outside autocast, or an argument is of the wrong kind.
    RuntimeError
        If shapes or devices do not fit.
    NotImplementedError
        If no kernel reads a dtype.
    ValueError
        If normalization is unknown, an RMSNorm has ln_bias, or zero_centered_gamma is set without ln_weight.

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
    if not isinstance(input, Tensor):
        options = {"normalization": normalization, "zero_centered_gamma": zero_centered_gamma}
        options |= {"keep_normalized": keep_normalized, "sm_margin": sm_margin}
        node = symbolic(layer_norm_linear, input, weight, bias, ln_weight, ln_bias, eps, **options)
        if node is not None:
            return node
    operation = name_of(linear_checks.op(name, normalization, ln_bias), zero_centered_gamma)
    # This is a Layer; a plain tuple takes the host less time.
    layer = (name, operation, eps, bool(keep_normalized), checks.sm_margins(name, sm_margin), NOTHING, WIDE, ALONE)
    return norm_linear(layer, (input, weight, bias, ln_weight, ln_bias))[0]
