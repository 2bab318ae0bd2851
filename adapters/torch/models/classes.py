"""Classes of modules that are changed for others, and changed back."""

from __future__ import annotations

from torch import nn


def check_module(function: str, model: object) -> None:
    if not isinstance(model, nn.Module):
        raise TypeError(f"{function}: model must be a torch.nn.Module; got {type(model).__name__}.")


class Swaps:
    """Modules whose class was changed."""

    def __init__(self):
        self._made: list[tuple[nn.Module, type, type]] = []  # module, its class before, and since

    def swap(self, module: nn.Module, cls: type) -> None:
        before = type(module)
        module.__class__ = cls
        self._made.append((module, before, cls))

    def check(self) -> None:
        """RuntimeError if somebody else has changed a class since: it would be lost."""
        for module, before, after in self._made:
            if type(module) is not after:
                raise RuntimeError(
                    f"undo: this {before.__name__} must have the class that it was given; got "
                    f"{type(module).__qualname__} of {type(module).__module__}. Undo first what was done to it since."
                )

    def undo(self, *attributes: str) -> None:
        """Every module has its class again, and lacks the attributes; nothing is done twice."""
        self.check()
        for module, before, _ in self._made:
            module.__class__ = before
            for name in attributes:
                module.__dict__.pop(name, None)
        self._made.clear()
