"""Classes of modules that are changed for others, and changed back."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from torch import nn


def check_module(function: str, model: object) -> None:
    if not isinstance(model, nn.Module):
        raise TypeError(f"{function}: model must be a torch.nn.Module; got {type(model).__name__}.")


def check_classes(function: str, norms: object) -> None:
    classes = norms if isinstance(norms, Sequence) and not isinstance(norms, str) else [norms]
    for cls in classes:
        if classes is not norms or not (isinstance(cls, type) and issubclass(cls, nn.Module)):
            raise TypeError(
                f"{function}: norms must be a sequence of classes of modules, such as [MyNorm]; got {norms!r}."
            )


HOOKED = "hooks of device_map have replaced the forward"
REMEDY = (
    "hooks of device_map: call remove_hook_from_submodules(model) of Hugging Face's accelerate.hooks first, and "
    "accelerate.dispatch_model(model, model.hf_device_map) afterwards"
)


def forward_replaced(module: nn.Module) -> str:
    """Why a module keeps its class whose forward was replaced on the instance; "" if it was not."""
    if "forward" not in vars(module) or _has_its_own(module):
        return ""
    name = type(module).__name__
    if "_hf_hook" in vars(module):
        return f"{HOOKED} of this {name}"
    return f"the forward of this {name} was replaced on the instance"


def _has_its_own(module: nn.Module) -> bool:
    """Whether the forward that an instance has is that of its class, as a hook that is removed leaves it there."""
    forward = vars(module)["forward"]
    return getattr(forward, "__self__", None) is module and getattr(forward, "__func__", None) is type(module).forward


def remedies(left: dict[str, str]) -> list[str]:
    """What a report of modules that were left says once."""
    return [REMEDY] if any(reason.startswith(HOOKED) for reason in left.values()) else []


def on_the_cpu(model: nn.Module | None) -> list[str]:
    """The first line of a report of a model that runs none of the kernels."""
    tensors = () if model is None else itertools.chain(model.parameters(), model.buffers())
    on_cpu = {tensor.device.type for tensor in tensors} == {"cpu"}
    return ["this model is on the CPU: torch's operators run"] if on_cpu else []


class Swaps:
    """Modules whose class was changed."""

    def __init__(self):
        self._made: list[tuple[nn.Module, type, type]] = []  # module, its class before, and since

    def swap(self, module: nn.Module, cls: type) -> None:
        before = type(module)
        vars(module).pop("forward", None)  # that of its class
        module.__class__ = cls
        self._made.append((module, before, cls))

    def undo(self, *attributes: str) -> None:
        """Every module has its class again, and lacks the attributes; nothing is done twice.

        RuntimeError, and nothing is done, if somebody else has changed a class since: it would be lost.
        """
        for module, before, after in self._made:
            if type(module) is not after:
                raise RuntimeError(
                    f"undo: this {before.__name__} must have the class that it was given; got "
                    f"{type(module).__qualname__} of {type(module).__module__}. Undo first what was done to it since."
                )
        for module, before, _ in self._made:
            module.__class__ = before
            for name in attributes:
                module.__dict__.pop(name, None)
        self._made.clear()
