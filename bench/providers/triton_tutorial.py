"""The LayerNorm of Triton's tutorial, from the user's copy of the file: Triton's wheel does not carry it.

It is `python/tutorials/05-layer-norm.py` of Triton's repository; `--triton-tutorial FILE` names the copy.
"""

from __future__ import annotations

import ast
from pathlib import Path

from bench.providers.base import Provider, autograd
from bench.providers.pytorch import load_torch

MOST_BYTES = 65536  # a row may have no more


class TritonTutorial(Provider):
    name = "Triton tutorial"

    def __init__(self, path: str | None):
        self.path = path

    def load(self) -> str:
        if self.path is None:
            raise ImportError("no copy of Triton's python/tutorials/05-layer-norm.py: name one by --triton-tutorial")
        load_torch()
        import triton

        # Only its definitions are run, because on import the file tests and measures itself.
        tree = ast.parse(Path(self.path).read_text())
        tree.body = [node for node in tree.body if not isinstance(node, ast.Expr)]
        namespace: dict[str, object] = {"__name__": "triton_tutorial"}
        exec(compile(tree, self.path, "exec"), namespace)
        self.layer_norm = namespace["LayerNorm"].apply
        return triton.__version__

    def refuses(self, case) -> str:
        if case.op != "layer_norm":
            return "has no RMSNorm"
        size = 4 if case.dtype == "float32" else 2
        return f"rows of more than {MOST_BYTES} bytes" if case.cols * size > MOST_BYTES else ""

    def prepare(self, case, b):
        shape = (case.cols,)
        if case.direction == "forward":
            return lambda: self.layer_norm(b.x, shape, b.weight, b.bias, case.eps)
        return autograd(lambda x, w, bias: self.layer_norm(x, shape, w, bias, case.eps), b)
