"""Add gradients of LayerNormLinear's weight and bias to main_grad, or delay them, in autograd's place."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn

from ..norm.modules import parameter_of
from .step import Products, Sink, without_autocast


class WeightGradients(nn.Module):
    """The part of LayerNormLinear that serves `fuse_wgrad_accumulation` and `delay_wgrad_compute`."""

    def __init__(self, fuse_wgrad_accumulation: bool, delay_wgrad_compute: bool):
        super().__init__()
        self.fuse_wgrad_accumulation = fuse_wgrad_accumulation
        self.delay_wgrad_compute = delay_wgrad_compute
        self._delayed: deque[Callable[[], None]] = deque()
        self._delayed_hooks: list[Callable[[], None]] = []

    @property
    def _weights(self) -> list[nn.Parameter]:
        return [parameter_of(self, part.weight) for part in self._parts]

    @property
    def _biases(self) -> list[nn.Parameter]:
        return [parameter_of(self, part.bias) for part in self._parts] if self.use_bias else []

    @property
    def _applied_biases(self) -> list[nn.Parameter]:
        return [] if self.return_bias else self._biases

    def _sink(self, is_first_microbatch: bool | None) -> Sink | None:
        if not (self.fuse_wgrad_accumulation or self.delay_wgrad_compute) or not torch.is_grad_enabled():
            return None
        # Other ranks may wait in `backward_dw` for the z of this one, even if weight is frozen.
        serves_ranks = self._over_ranks and self.delay_wgrad_compute and self.sequence_parallel
        if not serves_ranks and not any(weight.requires_grad for weight in self._weights):
            return None
        if self.fuse_wgrad_accumulation:
            for part, weight in zip(self._parts, self._weights, strict=True):
                if weight.requires_grad and not hasattr(weight, "main_grad") and not hasattr(weight, "__fsdp_param__"):
                    raise AttributeError(
                        f"LayerNormLinear: fuse_wgrad_accumulation=True needs {part.weight}.main_grad, a tensor of the "
                        f"shape of {part.weight}, before the forward pass; there is none. Set it."
                    )
        return partial(self._take, is_first_microbatch is True)

    def _take(self, overwrite: bool, gradients: Products) -> tuple[Tensor | None, Tensor | None]:
        """Take gradients as a Sink does. Autograd gets none of them, or a tensor that stands for weight's gradient."""
        if self.delay_wgrad_compute:
            self._delayed.append(partial(self._weight_gradients, overwrite, gradients))
            return None, None
        if self.fuse_wgrad_accumulation:
            self._accumulate(overwrite, gradients)
        return self._stand_in(gradients.dtype), gradients.bias() if self._applied_biases else None

    def _weight_gradients(self, overwrite: bool, gradients: Products) -> None:
        """Compute the gradients that a backward pass has left to `backward_dw`."""
        rows = [part.rows for part in self._parts]
        if not any(weight.requires_grad for weight in self._weights):
            gradients.weight()  # it gathers z, which other ranks wait for
        elif self.fuse_wgrad_accumulation:
            self._accumulate(overwrite, gradients)
        else:
            for weight, gradient in zip(self._weights, gradients.weight().split(rows), strict=True):
                _add_gradient(weight, gradient)
        if self._applied_biases:
            for bias, gradient in zip(self._applied_biases, gradients.bias().split(rows), strict=True):
                _add_gradient(bias, gradient)

    def _accumulate(self, overwrite: bool, gradients: Products) -> None:
        start = 0
        for part, weight in zip(self._parts, self._weights, strict=True):
            if weight.requires_grad:
                total = weight.get_main_grad() if hasattr(weight, "__fsdp_param__") else weight.main_grad
                rows = slice(start, start + part.rows)
                gradients.add_to(total, rows, overwrite or getattr(weight, "overwrite_main_grad", False))
            start += part.rows

    def _stand_in(self, dtype: torch.dtype) -> Tensor | None:
        """Return the gradient that a hook of Megatron's data parallelism waits for; zeros with `zero_out_wgrad`."""
        marked = [weight for weight in self._weights if hasattr(weight, "grad_added_to_main_grad")]
        if not marked:
            return None
        for weight in marked:
            weight.grad_added_to_main_grad = True
        zero = any(getattr(weight, "zero_out_wgrad", False) for weight in marked)
        make = torch.zeros if zero else torch.empty
        return make(self.out_features, self.in_features, device=marked[0].device, dtype=dtype)

    def backward_dw(self) -> None:
        """Compute the delayed gradients of the earliest backward pass whose gradients are not yet computed.

        Raises
        ------
        RuntimeError
            If there is no such backward pass.
        """
        if not self.delay_wgrad_compute:
            return
        if not self._delayed:
            raise RuntimeError(
                "LayerNormLinear: backward_dw() needs a backward pass before it whose weight gradient was delayed; "
                "there is none. Call it once for every backward pass."
            )
        with torch.no_grad(), without_autocast(self.layer_norm_weight.device.type):
            self._delayed.popleft()()
        for hook in self._delayed_hooks:
            hook()

    def need_backward_dw(self) -> bool:
        return self.delay_wgrad_compute

    def register_wgrad_accumulation_and_reduce_hooks(self, hook: Callable[[], None]) -> None:
        """Call `hook()` after every `backward_dw()`."""
        self._delayed_hooks.append(hook)


def _add_gradient(parameter: Tensor, gradient: Tensor) -> None:
    """Add a gradient to that of a parameter, as autograd does."""
    if parameter.requires_grad:
        gradient = gradient.to(parameter.dtype)
        parameter.grad = gradient if parameter.grad is None else parameter.grad.add_(gradient)
