"""accelerate reads the source of a block: which sums and norms it joins, and which forwards it does not know."""

from __future__ import annotations

import importlib.util
import sys
import textwrap
import tomllib
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402
from torch_models import build  # noqa: E402
from torch_tensors import random  # noqa: E402

from cunorm.torch import accelerate, replace_norms  # noqa: E402
from cunorm.torch.models import accelerate as accelerate_module  # noqa: E402
from cunorm.torch.models import blocks, rewrite  # noqa: E402
from cunorm.torch.models.rewrite import SUM_AFTER, SUM_FIRST, rewritten  # noqa: E402

ROOT = Path(__file__).parents[2]

FORWARDS = {
    "a sum and the norm of it": (
        """
        s = x + self.linear(x)
        r = s
        s = self.norm(s)
        return r + s * 2
        """,
        {"norm": SUM_FIRST},
    ),
    "one line each": (
        """
        x = x + self.linear(x)
        x = x + self.linear(self.norm(x))
        return x
        """,
        {"norm": SUM_FIRST},
    ),
    "the norm of a sum": ("return self.norm(self.linear(x) + x)", {"norm": SUM_FIRST}),
    "a norm and the sum after it": (
        """
        y = self.linear(x)
        y = self.norm(y)
        y = x + y
        return y
        """,
        {"norm": SUM_AFTER},
    ),
    "a branch between": (
        """
        s = x + self.linear(x)
        if again is not None:
            s = s + again
        r = s
        s = self.norm(s)
        return r + s * 2
        """,
        {"norm": SUM_FIRST},
    ),
    "within a branch": (
        """
        if again is None:
            y = self.norm(x + x)
        else:
            again = again + x
            y = self.norm(again)
        return y
        """,
        {"norm": SUM_FIRST},
    ),
    "the sum is changed before the norm": (
        """
        s = x + self.linear(x)
        s = s * 2
        return self.norm(s)
        """,
        None,
    ),
    "another name is normalised": (
        """
        s = x + self.linear(x)
        return self.norm(x) + s
        """,
        None,
    ),
    "the norm may not be called": (
        """
        s = x + self.linear(x)
        return self.norm(s) if again is not None else s
        """,
        None,
    ),
    "the norm is called twice": (
        """
        s = x + self.linear(x)
        return self.norm(s) + self.norm(s)
        """,
        None,
    ),
    "the sum is read after the norm": (
        """
        y = self.norm(x)
        z = x + y
        return y * z
        """,
        None,
    ),
    "a norm that doubles": (
        """
        y = self.norm(x)
        y = y + y
        return y
        """,
        None,
    ),
    "a difference": ("return self.norm(self.linear(x) - x)", None),
    "more arguments": ("return self.norm(self.linear(x) + x, *again or ())", None),
    "the branch tests the sum": (
        """
        s = x + self.linear(x)
        if s is not None:
            s = s * 2
        return self.norm(s)
        """,
        None,
    ),
}


@pytest.fixture
def module_of(tmp_path, request):
    """Source as the method `forward` of a module in a file."""
    names = []

    def make(body: str, head: str = "") -> Any:
        name = f"block_{len(names)}_{tmp_path.name}"
        names.append(name)
        path = tmp_path / f"{name}.py"
        path.write_text(
            f"import torch\n\n\nclass Block(torch.nn.Module):\n    norms = 1\n\n{head}"
            + textwrap.indent(
                "def forward(self, x, again=None):\n" + textwrap.indent(textwrap.dedent(body).strip(), " " * 4), " " * 4
            )
            + "\n"
        )
        spec = importlib.util.spec_from_file_location(name, path)
        sys.modules[name] = module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module

    yield make
    for name in names:
        del sys.modules[name]


@pytest.mark.parametrize("case", FORWARDS)
def test_what_is_joined_in_a_source(module_of, case):
    """And a joined forward computes the same, whether again is given or not."""
    body, joins = FORWARDS[case]
    original = module_of(body).Block
    forward = rewritten(original.forward, joins or {"norm": SUM_FIRST})
    if joins is None:
        assert forward is None
        assert rewritten(original.forward, {"norm": SUM_AFTER}) is None
        return
    block = original()
    block.linear, block.norm = nn.Linear(8, 8), nn.LayerNorm(8, eps=0.1)
    x = random(3, 8, dtype=torch.float32)
    calls = [(x,), (x, x.cos())]
    expected = [block(*call) for call in calls]
    replace_norms(block)
    block.__class__ = type("Block", (blocks.Block, original), {"forward": forward})
    block._ran = blocks.Counter()
    torch.testing.assert_close([block(*call) for call in calls], expected)
    assert block._ran == {("norm", ""): 2}
    assert forward.__code__.co_filename == original.forward.__code__.co_filename


def test_a_forward_that_is_not_the_one_known(module_of, tmp_path):
    body, joins = FORWARDS["the norm of a sum"]
    module = module_of(body)
    original = module.Block.forward
    assert rewritten(original, joins)
    assert rewritten(original, {**joins, "norm2": SUM_FIRST}) is None
    assert rewritten(module_of(body, "    @torch.no_grad()\n").Block.forward, joins) is None
    assert rewritten(eval("lambda self, x: self.norm(x + x)"), joins) is None
    outside = 1
    assert rewritten(lambda self, x: self.norm(x + outside), joins) is None
    path = tmp_path / f"{module.__name__}.py"
    path.write_text(path.read_text().replace("self.linear(x) + x", "self.linear(x) + 2 * x"))
    rewrite.inspect.linecache.checkcache()
    assert rewritten(original, joins) is None  # the file has changed since it was imported


@pytest.mark.parametrize(("version", "said"), [("5.24.0", 1), (blocks.JOINED_VERSIONS["transformers"], 0)])
def test_the_report_names_the_version_that_is_known_and_the_one_that_is_there(monkeypatch, version, said):
    """Once, however many layers there are, and not where only somebody has replaced a forward."""
    modeling = pytest.importorskip("transformers.models.llama.modeling_llama")
    model, _ = build("llama")
    monkeypatch.setattr(accelerate_module.metadata, "version", lambda package: version)
    with monkeypatch.context() as patch:
        patch.setattr(modeling.LlamaDecoderLayer, "forward", lambda self, x, **_: x)
        blocks.joined_class.cache_clear()
        report = accelerate(model)
    blocks.joined_class.cache_clear()
    known = blocks.JOINED_VERSIONS["transformers"]
    assert str(report).count(f"joins are known of transformers {known}, and this is {version}") == said
    assert len(report.norms.swapped) == 5


def test_the_versions_that_are_known_are_those_that_are_tested():
    pins = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]["test"]
    tested = dict(pin.split("==") for pin in pins if "==" in pin)
    assert {
        name: tested.get(name, version) for name, version in blocks.JOINED_VERSIONS.items()
    } == blocks.JOINED_VERSIONS


def test_a_block_whose_forward_was_replaced_is_left(monkeypatch):
    modeling = pytest.importorskip("transformers.models.llama.modeling_llama")
    model, _ = build("llama")
    model.model.layers[1].forward = lambda x, **_: x
    with monkeypatch.context() as patch:
        patch.setattr(modeling.LlamaDecoderLayer, "forward", lambda self, x, **_: x)
        blocks.joined_class.cache_clear()
        report = accelerate(model)
    blocks.joined_class.cache_clear()
    assert report.left == {
        "model.layers.0": "the forward of LlamaDecoderLayer is not the one that is known",
        "model.layers.1": "the forward of this LlamaDecoderLayer was replaced on the instance",
    }
    report.undo()
