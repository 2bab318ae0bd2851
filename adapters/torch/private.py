"""The names of torch that it does not promise to keep. Each is looked up here, once, when cunorm.torch is imported.

A name that this version of torch does not have is replaced by something safe: a public name, an answer that sends calls
to the operators or to torch's own norms, or a `Missing` that raises when it is used.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad

from ..private import ABSENT, Missing, check_version, has, look_up, miss

# What torch dispatches by. A call asks whether something is in force that a direct launch would bypass.

BY_OPERATORS = "eager calls on a GPU go through cunorm's operators, tens of microseconds slower"

check_version("torch")
_dispatch_modes = look_up("torch:_C._len_torch_dispatch_stack", BY_OPERATORS, lambda: 1)
_function_modes = look_up("torch:_C._len_torch_function_stack", BY_OPERATORS, lambda: 2)
_function_mode = look_up(
    "torch:_C._get_function_stack_at", f"under a default device {BY_OPERATORS}", lambda index: None
)
_DefaultDevice = look_up("torch.utils._device:DeviceContext", f"under a default device {BY_OPERATORS}", Exception)
_transforms = look_up(
    "torch:_C._functorch.peek_interpreter_stack", f"{BY_OPERATORS}, and LayerNormLinear has no FP8", lambda: "unknown"
)
_Transform = look_up(
    "torch:_C._functorch.CInterpreter", f"under functorch {BY_OPERATORS}, and LayerNormLinear has no FP8", object
)
_tracing = look_up("torch:_C._get_tracing_state", BY_OPERATORS, lambda: "unknown")
# Whether a tensor is one of autograd.grad(is_grads_batched=True).
is_batched = look_up(
    "torch:_C._functorch.is_legacy_batchedtensor", f"in backward passes {BY_OPERATORS}", lambda _: True
)

_FORWARD_MODE = "calls run torch's own norms, as with forward-mode derivatives, and LayerNormLinear has no FP8"
if not has("torch.autograd.forward_ad:_current_level", _FORWARD_MODE):
    forward_ad: Any = SimpleNamespace(_current_level=0)


def nothing_listens() -> bool:
    """Whether no mode, transform, trace or forward-mode derivative is in force that a direct launch would bypass."""
    return (
        _dispatch_modes() == 0
        and (_function_modes() == 0 or _is_default_device())
        and _transforms() is None
        and _tracing() is None
        and forward_ad._current_level < 0
    )


def nothing_else_listens() -> bool:
    """Return whether nothing of that is in force that `Guards` do not see."""
    return (_function_modes() == 0 or _is_default_device()) and forward_ad._current_level < 0


def _is_default_device() -> bool:
    """Return whether the only mode of functions is torch.set_default_device's, which decides where new tensors go."""
    return _function_modes() == 1 and type(_function_mode(0)) is _DefaultDevice


def default_device() -> torch.device | None:
    """Return the device of `with torch.device(...)` or torch.set_default_device; None if neither is in force."""
    device, modes = torch.get_default_device(), map(_function_mode, range(_function_modes()))
    return device if device.type != "cpu" or any(type(mode) is _DefaultDevice for mode in modes) else None


def under_functorch() -> bool:
    """Return whether a transform of functorch is in force."""
    # Not `is not None`: dynamo, which traces this, has an object of its own for None.
    return isinstance(_transforms(), (_Transform, str))


# Whether a tensor is one of torch.func.functionalize, which knows no autograd.Function.
is_functional = look_up("torch:_is_functional_tensor", "torch.func.functionalize raises on the CPU", lambda _: False)


def is_traced() -> bool:
    return _tracing() is not None


def in_forward_mode() -> bool:
    return forward_ad._current_level >= 0


def applied(function: type[torch.autograd.Function]) -> Callable[..., Any]:
    """Return the `apply` of a function without what torch does for functorch, which `nothing_listens` has excluded.

    Autograd then also calls `backward` without asking first whether it is named vjp. This saves 3 us and 1.3 us.
    """
    if not _HAS_BACKWARD_CLASS:
        return function.apply
    function._backward_cls.apply = function.backward
    return super(torch.autograd.Function, function).apply


_HAS_BACKWARD_CLASS = has("torch.autograd:Function._backward_cls", "each differentiated call takes 4 us more")


# Whether a call is like an earlier one.


def _guards() -> Any:
    """Return torch.compile's guards of tensors; None if they do not behave as expected."""
    path, costs = "torch:_C._dynamo.guards.TensorGuards", "no call is known again: each takes some microseconds more"
    guards = look_up(path, costs, ABSENT)
    if guards is ABSENT:
        return None
    x = torch.empty((2, 3), device="cpu")
    try:
        known = guards(x, dynamic_dims_sizes=[[2, 3]], dynamic_dims_strides=[[3, 1]]).check
        if known(x) is True and known(x.clone().t()) is False:
            return guards
    except Exception:  # whatever another signature raises
        pass
    miss(path, costs)
    return None


Guards = _guards()


# Memory and streams of a GPU. A torch without CUDA has none of these names, and nothing is missed there.


def _of_gpu(path: str, public: str, instead: Any) -> Any:
    return look_up(path, f"calls take longer by {public}", instead) if torch.version.cuda else instead


def _stream(index: int) -> int:
    return torch.cuda.current_stream(index).cuda_stream


def _empty(shape: tuple[int, ...], stride: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    return torch.empty_strided(shape, stride, dtype=dtype, device="cuda")


stream = _of_gpu("torch:_C._cuda_getCurrentRawStream", "torch.cuda.current_stream", _stream)
current_device = _of_gpu("torch:_C._cuda_getDevice", "torch.cuda.current_device", torch.cuda.current_device)
# Inductor's code allocates with this: a call takes 1.2 us on an H200's host, torch.empty takes 3.5 us.
empty = _of_gpu("torch:_C._dynamo.guards._empty_strided_cuda", "torch.empty_strided", _empty)


def current_stream() -> Any:
    """Return the function of torch's library that tells C++ the current stream; None if there is none."""
    library, name = Path(torch.__file__).parent / "lib/libtorch_cuda.so", "aoti_torch_get_current_cuda_stream"
    try:
        return getattr(ctypes.CDLL(str(library)), name)
    except (OSError, AttributeError):
        miss(f"torch:lib.{library.name}.{name}", "passes through autograd run in Python, not in C++")
        return None


# Compilers.


def is_graphed_by_inductor() -> bool:
    """Return whether inductor, if it compiles, will record a CUDA graph; False if its options have another form."""
    config = sys.modules.get("torch._inductor.config")
    return bool(getattr(getattr(config, "triton", None), "cudagraphs", False))


_HAS_EXPORT_FLAG = has("torch.compiler:_is_exporting_flag", "compiled norms may keep torch's backward pass")


def is_exporting() -> bool:
    """Return whether an export is under way: torch 2.11's own is_exporting() is true wherever dynamo traces."""
    return torch.compiler._is_exporting_flag if _HAS_EXPORT_FLAG else torch.compiler.is_exporting()


MOST_RESULTS = 4096  # of a function that are remembered


def constant(function: Callable[..., Any]) -> Callable[..., Any]:
    """Remember the results of a function in its attribute `results`, and let dynamo take its calls for constants.

    What is remembered is forgotten when it is too much. torch.compiler.assume_constant_result makes constants too, but
    imports torch._dynamo, which takes 1.2 s.
    """

    def remembered(*arguments: Any) -> Any:
        result = remembered.results.get(arguments)
        if result is None:
            if len(remembered.results) >= MOST_RESULTS:
                remembered.results.clear()
            result = remembered.results[arguments] = function(*arguments)
        return result

    remembered.results = {}
    remembered.__name__, remembered._dynamo_marked_constant = function.__name__, True
    return remembered


# torch.compiler.disable, which imports torch._dynamo when it is first called.
uncompiled = look_up("torch:_disable_dynamo", "cunorm.torch takes a second longer to import", torch.compiler.disable)

below_autograd = look_up(
    "torch:_C._AutoDispatchBelowAutograd", "torch.ops.cunorm cannot be called in a graph that is compiled"
)
dispatch_key = look_up(
    "torch:_C.DispatchKey", "torch.ops.cunorm.fused_norm_forward has no derivative in a graph that is compiled"
)


def autocasts_to_float32(norm: str) -> bool:
    """Whether autocast has torch's own norm in float32: layer_norm always, rms_norm in some versions of torch."""
    return _has_kernel(f"aten::{norm}", "AutocastCUDA")


_has_kernel = look_up(
    "torch:_C._dispatch_has_kernel_for_dispatch_key",
    "under autocast rms_norm returns float32, whatever torch's own does",
    lambda *_: True,
)


# Modules.


def parameters_of(module: nn.Module) -> Any:
    """Return a module's own parameters by name; in some versions without those that are registered as None."""
    return module._parameters if _HAS_PARAMETERS else dict(module.named_parameters(recurse=False))


def parameter_of(module: nn.Module, name: str) -> Any:
    """Do what `getattr` does, which takes 1 us more because it goes through Module.__getattr__."""
    parameter = module._parameters.get(name)
    return getattr(module, name) if parameter is None else parameter  # it may be parametrised


_HAS_PARAMETERS = "_parameters" in vars(nn.Module())
if not _HAS_PARAMETERS:
    miss("torch.nn:Module()._parameters", "calls of modules take 1 us more")
    parameter_of = getattr


# FP8.

scaled_mm = look_up("torch:_scaled_mm", "FP8 has no products")
_HAS_VERSION = has("torch:Tensor._version", "frozen weights are converted to FP8 in every call")


def version_of(tensor: Tensor) -> int | None:
    """Return how often a tensor was written to; None if that cannot be known."""
    return tensor._version if _HAS_VERSION and not tensor.is_inference() else None


_graph_task = look_up(
    "torch:_C._current_graph_task_id",
    "a checkpoint of LayerNormLinear may follow another FP8 recipe when it is run again",
    lambda: -1,
)


def in_backward_pass() -> bool:
    return _graph_task() != -1


# Groups of processes.


# group_of(name) returns the process group of that name; it raises RuntimeError if there is none, or none any more.
if torch.distributed.is_available():
    group_of = look_up("torch:_C._distributed_c10d._resolve_process_group", "LayerNormLinear cannot run over ranks")
else:
    group_of = Missing("cunorm: LayerNormLinear over ranks needs torch.distributed, which this torch is built without.")


def symmetric_memory() -> tuple[Callable[..., Any], Callable[..., Any]] | None:
    """Return `empty` and `rendezvous` of torch's symmetric memory; None if there is none."""
    costs = "ranks exchange rows by torch.distributed, and ub_* change nothing"
    empty = look_up("torch.distributed._symmetric_memory:empty", costs, ABSENT)
    rendezvous = look_up("torch.distributed._symmetric_memory:rendezvous", costs, ABSENT)
    return None if ABSENT in (empty, rendezvous) else (empty, rendezvous)


def timeout_of(group: Any, device: torch.device) -> int:
    """Return the timeout of a group in milliseconds; torch's default, ten minutes, if it cannot be read."""
    try:
        return int(group._get_backend(device).options._timeout.total_seconds() * 1000)
    except AttributeError:
        return 600_000
