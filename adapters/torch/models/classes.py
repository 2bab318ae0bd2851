"""Change the classes of modules, and change them back."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from torch import nn


def check_arguments(function: str, model: object, norms: object) -> None:
    if not isinstance(model, nn.Module):
        raise TypeError(f"{function}: model must be a torch.nn.Module; got {type(model).__name__}.")
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
    """Say why a module keeps its class, if its forward was replaced on the instance; else ""."""
    forward = vars(module).get("forward")
    # A removed hook leaves the forward of the class on the instance.
    is_its_own = (
        getattr(forward, "__self__", None) is module and getattr(forward, "__func__", None) is type(module).forward
    )
    if "forward" not in vars(module) or is_its_own:
        return ""
    name = type(module).__name__
    if "_hf_hook" in vars(module):
        return f"{HOOKED} of this {name}"
    return f"the forward of this {name} was replaced on the instance"


def lines_of_left(left: dict[str, str]) -> list[str]:
    """Return the lines of a report on the modules that were left, with one remedy for all of them."""
    lines = [f"  {name}: left, {reason}" for name, reason in left.items()]
    return [*lines, f"  {REMEDY}"] if any(reason.startswith(HOOKED) for reason in left.values()) else lines


def on_the_cpu(model: nn.Module | None) -> list[str]:
    """Return the first line of a report if the model is on the CPU, where none of the kernels runs; else nothing."""
    tensors = () if model is None else itertools.chain(model.parameters(), model.buffers())
    on_cpu = {tensor.device.type for tensor in tensors} == {"cpu"}
    return ["this model is on the CPU: torch's operators run"] if on_cpu else []


class Swaps:
    """Change the classes of modules, and keep what is needed to change them back."""

    def __init__(self):
        self._made: list[tuple[nn.Module, type, type]] = []  # module, its original class, its new class

    def swap(self, module: nn.Module, cls: type) -> None:
        """Change the class of a module."""
        original = type(module)
        vars(module).pop("forward", None)  # it can only be the forward of the class, which a removed hook has left
        module.__class__ = cls
        self._made.append((module, original, cls))

    def undo(self, *attributes: str) -> None:
        """Give every module its class back and remove the attributes; raise if a class was changed since."""
        for module, original, replacement in self._made:
            if type(module) is not replacement:
                raise RuntimeError(
                    f"undo: this {original.__name__} must have the class that it was given; got "
                    f"{type(module).__qualname__} of {type(module).__module__}. Undo first what was done to it since."
                )
        for module, original, _ in self._made:
            module.__class__ = original
            for name in attributes:
                module.__dict__.pop(name, None)
        self._made.clear()
