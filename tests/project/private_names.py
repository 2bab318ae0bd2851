"""Take each name of a private.py away in turn, in a process of its own, and say what is logged and what still works.

`python tests/project/private_names.py torch` prints a line of JSON for each name, and first one with all names there.
"""

from __future__ import annotations

import ast
import json
import logging
import os
import re
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
FILES = {
    "cupy": ROOT / "cunorm/private.py",
    "torch": ROOT / "adapters/torch/private.py",
    "jax": ROOT / "adapters/jax/private.py",
}
OF_GPU = ("_cuda_getCurrentRawStream", "_cuda_getDevice", "_empty_strided_cuda")  # a torch without CUDA lacks them


def paths(framework: str) -> list[str]:
    """Return all names that the file looks up, as "module:name"."""
    tree = ast.parse(FILES[framework].read_text())
    texts = (node.value for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str))
    return sorted({text for text in texts if re.fullmatch(r"[a-z_][\w.]*:[\w.]*\w", text)})


def take_away(path: str) -> list[str]:
    """Let nothing be found at `path` from now on. Return a list that receives what is logged."""
    private, lines = import_module("cunorm.private"), []
    resolve = private.resolve

    def without(wanted: str) -> Any:
        if wanted == path:
            raise AttributeError(wanted)
        return resolve(wanted)

    private.resolve = without
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: lines.append(record.getMessage())
    private.logs.logger.addHandler(handler)
    private.logs.logger.propagate = False
    return lines


def of_torch(path: str) -> dict[str, Any]:
    import torch

    if path.endswith(OF_GPU):
        torch.version.cuda = "13.0"
    lines = take_away(path)
    cunorm = import_module("cunorm.torch")
    private = import_module("cunorm.torch.private")
    torch.manual_seed(0)
    x, weight, bias = (torch.randn(*shape, requires_grad=True) for shape in ((3, 8), (8,), (8,)))
    ours, theirs = (norm(x, (8,), weight, bias) for norm in (cunorm.layer_norm, torch.nn.functional.layer_norm))
    gradients = [torch.autograd.grad(y.square().sum(), (x, weight, bias)) for y in (ours, theirs)]
    for actual, expected in zip((ours, *gradients[0]), (theirs, *gradients[1]), strict=True):
        torch.testing.assert_close(actual, expected)
    _, s = cunorm.add_rms_norm(x, x, weight)
    torch.testing.assert_close(s, 2 * x)
    model = torch.nn.Sequential(torch.nn.LayerNorm(8), torch.nn.Linear(8, 8))
    cunorm.accelerate(model)
    model(x).sum().backward()
    linear = cunorm.LayerNormLinear(16, 16, device="cpu")
    linear(torch.randn(16, 16)).sum().backward()
    float8 = ""
    try:
        with cunorm.autocast():
            linear(torch.randn(16, 16)).sum().backward()
    except RuntimeError as error:
        float8 = str(error)
    private.symmetric_memory()
    return {"lines": lines, "direct": private.nothing_listens(), "float8": float8}


def of_jax(path: str) -> dict[str, Any]:
    import jax
    import jax.numpy as jnp

    lines = take_away(path)
    cunorm = import_module("cunorm.jax")
    private = import_module("cunorm.jax.private")
    x, weight = jnp.linspace(-1.0, 2.0, 24).reshape(3, 8) ** 2, jnp.linspace(0.5, 1.5, 8)

    def plain(x, weight):
        mean, variance = x.mean(-1, keepdims=True), x.var(-1, keepdims=True)
        return (x - mean) / jnp.sqrt(variance + 1e-5) * weight

    def loss(norm):
        return lambda x, weight: (norm(x, weight) ** 2 * jnp.arange(8.0)).sum()

    ours = loss(lambda x, weight: cunorm.layer_norm(x, 8, weight))
    for actual, expected in zip(
        jax.tree.leaves(jax.jit(jax.value_and_grad(ours, (0, 1)))(x, weight)),
        jax.tree.leaves(jax.value_and_grad(loss(plain), (0, 1))(x, weight)),
        strict=True,
    ):
        assert jnp.allclose(actual, expected, rtol=1e-4, atol=1e-4)
    y8, _ = cunorm.layer_norm_fp8(x, 8, weight)
    assert y8.dtype == jnp.float8_e4m3fn
    return {"lines": lines, "primitives": private.has_primitives}


def main(framework: str) -> None:
    # What all processes need is imported before they are made. None of it looks up a name of the framework.
    for module in (framework, "cunorm", *(["torch.distributed.tensor"] if framework == "torch" else [])):
        import_module(module)
    for path in ("", *paths(framework)):
        sys.stdout.flush()
        if not os.fork():
            try:
                said = {"torch": of_torch, "jax": of_jax}[framework](path)
            except BaseException as error:
                said = {"error": f"{type(error).__name__}: {error}"}
            print(json.dumps({"path": path, **said}), flush=True)
            os._exit(0)
        os.wait()


if __name__ == "__main__":
    main(sys.argv[1])
