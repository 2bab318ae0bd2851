"""`LayerNormColwiseParallel`, which runs LayerNormLinear over a DeviceMesh with DTensors, as torch's own styles do."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_module, distribute_tensor
from torch.distributed.tensor.parallel import ParallelStyle

from .exchange import OF_TENSORS
from .module import LayerNormLinear
from .parallel import TensorParallel

NAME = "LayerNormColwiseParallel"


class LayerNormColwiseParallel(ParallelStyle):
    """Make `torch.distributed.tensor.parallel.parallelize_module` split a `LayerNormLinear` by output features.

    It does what SequenceParallel does to a norm and ColwiseParallel to a Linear. Parameters are DTensors afterwards:
    those of the norm are Replicate, weight and bias (every part of them) are Shard(0).

    Parameters
    ----------
    input_layouts : Shard(0), Shard(1) or Replicate()
        The layout of x. Shard(1), the default, splits the sequence of (batch, sequence, in_features), Shard(0) the
        first axis. A DTensor with another layout is redistributed.
    output_layouts : Placement
        The layout of y. The default is Shard(-1).
    use_local_output : bool
        Return this rank's Tensor instead of a DTensor.

    Raises
    ------
    TypeError
        If it is applied to another module.
    ValueError
        If the input has another layout, if the number of ranks does not divide the features, or if the module has
        tp_size, fuse_wgrad_accumulation, delay_wgrad_compute or return_layernorm_output_gathered, which work on its
        parameters or ranks themselves.

    Notes
    -----
    As with `LayerNormLinear(parallel_mode="column")` rows are gathered after the norm, x, mean and rstd are kept, and
    `ub_*` and FP8 have their effect. If the input is split, gradients of the norm's parameters are summed over the
    ranks in the backward pass. With Shard(1) y is laid out with the sequence before the batch, and its gradient is
    copied to that layout.

    Examples
    --------
    >>> from torch.distributed.tensor.parallel import parallelize_module  # doctest: +SKIP
    >>> parallelize_module(model, mesh, {"qkv": LayerNormColwiseParallel()})  # doctest: +SKIP
    """

    def __init__(
        self,
        *,
        input_layouts: Placement | None = None,
        output_layouts: Placement | None = None,
        use_local_output: bool = True,
    ):
        super().__init__()
        self.input_layouts = Shard(1) if input_layouts is None else input_layouts
        self.output_layouts = Shard(-1) if output_layouts is None else output_layouts
        self.use_local_output = use_local_output
        if self.input_layouts not in (Shard(0), Shard(1), Replicate()):
            raise ValueError(
                f"{NAME}: input_layouts must be Shard(0), Shard(1) or Replicate(); got {self.input_layouts}."
            )
        if not isinstance(self.output_layouts, Placement):
            raise TypeError(
                f"{NAME}: output_layouts must be a Placement, such as Shard(-1); got "
                f"{type(self.output_layouts).__name__}."
            )

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        if not isinstance(module, LayerNormLinear):
            raise TypeError(f"{NAME}: it is for LayerNormLinear; got {type(module).__name__}.")
        _check(module, device_mesh.size())
        distribute_module(module, device_mesh, self._partition, self._enter, self._leave)
        split = self.input_layouts != Replicate()
        module._parallel = OfDTensors(module._parallel, device_mesh.get_group(), split)
        module._over_ranks = module._parallel.exchanges
        return module

    def _partition(self, name: str, module: nn.Module, mesh: DeviceMesh) -> None:
        for key, parameter in list(module.named_parameters(recurse=False)):
            placement = Replicate() if key.startswith("layer_norm") else Shard(0)
            distributed = distribute_tensor(parameter, mesh, [placement], src_data_rank=self.src_data_rank)
            module.register_parameter(key, nn.Parameter(distributed, requires_grad=parameter.requires_grad))

    def _enter(self, module: nn.Module, inputs: tuple, mesh: DeviceMesh) -> tuple:
        """Return the inputs with this rank's x, rows first."""
        x, *others = inputs
        if isinstance(x, DTensor):
            x = x.redistribute(mesh, [self.input_layouts]).to_local()
        if self.input_layouts == Shard(1):
            if x.dim() < 3:
                raise ValueError(
                    f"{NAME}: with input_layouts=Shard(1) x must have shape (batch, sequence, in_features); got "
                    f"{tuple(x.shape)}. Use Shard(0)."
                )
            x = x.transpose(0, 1)
        return x, *others

    def _leave(self, module: nn.Module, outputs: Any, mesh: DeviceMesh) -> Any:
        """Return the outputs in their layouts: y as `output_layouts` says, bias as Shard(0), z as x."""
        y, *others = outputs if isinstance(outputs, tuple) else (outputs,)
        if self.input_layouts == Shard(1):
            y = y.transpose(0, 1)
            others = [output.transpose(0, 1) if output.dim() > 1 else output for output in others]
        results = [self._laid_out(y, mesh, Shard(y.dim() - 1), self.output_layouts)]
        for output in others:
            placement = Shard(0) if output.dim() == 1 else self.input_layouts
            results.append(self._laid_out(output, mesh, placement, placement))
        return tuple(results) if others else results[0]

    def _laid_out(self, local: Tensor, mesh: DeviceMesh, placement: Placement, wanted: Placement) -> Tensor:
        if isinstance(wanted, Shard) and wanted.dim < 0:
            wanted = Shard(wanted.dim + local.dim())
        if self.use_local_output and placement == wanted:
            return local
        laid_out = DTensor.from_local(local, mesh, [placement], run_check=False).redistribute(mesh, [wanted])
        return laid_out.to_local() if self.use_local_output else laid_out

    def __repr__(self) -> str:
        return (
            f"{NAME}(input_layouts={self.input_layouts}, output_layouts={self.output_layouts}, "
            f"use_local_output={self.use_local_output})"
        )


def _check(module: LayerNormLinear, ranks: int) -> None:
    for name in ("fuse_wgrad_accumulation", "delay_wgrad_compute", "return_layernorm_output_gathered"):
        if getattr(module, name):
            raise ValueError(f"{NAME}: it cannot split a module with {name}=True. Leave it out.")
    if module.tp_size > 1:
        raise ValueError(f"{NAME}: it must split a whole module; got one of tp_size={module.tp_size}.")
    for part in module._parts:
        if part.rows % ranks:
            raise ValueError(
                f"{NAME}: rows of {part.weight} must be a multiple of the number of ranks, {ranks}; got {part.rows}."
            )


class OfDTensors(TensorParallel):
    """The ranks of a mesh, which read a module's DTensors as this rank's tensors."""

    exact = True  # DTensor's own collectives follow from what requires a gradient

    def __init__(self, parallel: TensorParallel, group: Any, sequence: bool):
        super().__init__("column", group.size(), sequence, *parallel.options)
        self.set_group(group)

    def wanted_by(self, tensors: Sequence[Tensor | None]) -> int:
        bits = super().wanted_by(tensors)
        for index, tensor in enumerate(tensors):
            if bits and tensor is not None and tensor.requires_grad:
                bits |= OF_TENSORS << index
        return bits

    def local(
        self, weights: Sequence[Any], biases: Sequence[Any], norm_parameters: tuple[Any, ...]
    ) -> tuple[Any, Any, Any]:
        weights, biases = ([parameter.to_local() for parameter in parameters] for parameters in (weights, biases))
        return weights, biases, tuple(map(self._local_of_norm, norm_parameters))

    def _local_of_norm(self, parameter: Any) -> Tensor | None:
        if parameter is None:
            return None
        if not self.sequence:
            return parameter.to_local(grad_placements=[Replicate()])
        # The gradient is summed here, as that of any Replicate parameter: if it stayed Partial, a clipped step of an
        # optimizer was wrong on two GPUs with torch 2.11.
        replicated = parameter.redistribute(parameter.device_mesh, parameter.placements)
        return replicated.to_local(grad_placements=[Partial()])
