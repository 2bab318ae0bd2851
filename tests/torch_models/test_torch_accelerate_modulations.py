"""accelerate and modulated norms: models of diffusers, and what is read from a source of them."""

from __future__ import annotations

import ast
import copy
import importlib
import importlib.util
import pickle
import sys
import textwrap

import pytest

torch = pytest.importorskip("torch")

import cpu_device  # noqa: E402
from functorch.compile import make_boxed_func  # noqa: E402
from torch import nn  # noqa: E402
from torch._dynamo.backends.common import aot_autograd  # noqa: E402
from torch.nn.attention import SDPBackend, sdpa_kernel  # noqa: E402
from torch_diffusers import build, output_of  # noqa: E402
from torch_tensors import assert_no_farther, on_devices, random  # noqa: E402

from cunorm.torch import accelerate, replace_norms  # noqa: E402
from cunorm.torch.models import blocks, joins  # noqa: E402
from cunorm.torch.models.rewrite import GATED, MODULATED, rewritten  # noqa: E402
from cunorm.torch.models.settle import Settle  # noqa: E402
from cunorm.torch.norm import nodes  # noqa: E402

needs_machine = pytest.mark.skipif(bool(cpu_device.missing()), reason=cpu_device.missing())

# Name: how many norms are joined, of how many.
MODELS = {"dit": (4, 5), "pixart": (4, 5), "sd3": (8, 16), "sd3.5": (7, 18), "flux": (11, 23)}


@pytest.fixture(autouse=True)
def of_any_size(monkeypatch):
    """Modulations are joined whatever x is: the models here are small."""
    monkeypatch.setattr(importlib.import_module("cunorm.torch.models.accelerate"), "MODULATED_FROM", 1)


def results_of(model: nn.Module, inputs: dict) -> dict[str, torch.Tensor]:
    """Output and gradients, with torch's plain attention.

    By the one that torch 2.11 chooses on an H200 the gradients of the untouched Flux in bfloat16, whose heads have 16
    columns here, come to 1e18 and NaN, and are others in each call.
    """
    model.zero_grad()
    with sdpa_kernel(SDPBackend.MATH):
        y = output_of(model, inputs)
        y.square().mean().backward()
    return {"output": y.detach(), **{name: p.grad for name, p in model.named_parameters() if p.grad is not None}}


@on_devices
@pytest.mark.parametrize(
    ("name", "dtype"), [(name, torch.float32) for name in MODELS] + [("flux", torch.bfloat16)], ids=str
)
def test_a_model(device, name, dtype):
    """No farther from the same model in float64 than the untouched one, give or take; undone to the same bits."""
    model, inputs = build(name, device, dtype)
    reference = results_of(copy.deepcopy(model).double(), inputs)
    before, classes = results_of(model, inputs), [*map(type, model.modules())]
    report = accelerate(model)
    assert (len(report.joined), len(report.norms.swapped)) == MODELS[name]
    assert not report.left
    after = results_of(model, inputs)
    assert all(ran == (1, {}) for ran in report.ran().values())
    assert_no_farther(after, before, reference, dtype)
    report.undo()
    assert [*map(type, model.modules())] == classes
    if device == "cpu":
        found = results_of(model, inputs)
        assert all(torch.equal(found[key], value) for key, value in before.items())


def test_a_hook_copies_and_checkpoints():
    """A norm with a hook is called by itself; copies compute the same; so does a model that computes again."""
    model, inputs = build("flux")
    expected = results_of(model, inputs)
    report = accelerate(model)
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert [*map(type, twin.modules())] == [*map(type, model.modules())]
        torch.testing.assert_close(results_of(twin, inputs), expected, rtol=1e-4, atol=1e-6)
    seen = []
    norm = model.transformer_blocks[0].norm2
    handle = norm.register_forward_hook(lambda _, x, y: seen.append((x[0].shape, y.shape)))
    torch.testing.assert_close(results_of(model, inputs), expected, rtol=1e-4, atol=1e-6)
    handle.remove()
    assert seen == [((2, 16, 32), (2, 16, 32))]
    assert report.ran()["transformer_blocks.0.norm2"] == (0, {"the norm has hooks": 1})
    model.enable_gradient_checkpointing()
    torch.testing.assert_close(results_of(model.train(), inputs), expected, rtol=1e-4, atol=1e-6)


def test_under_torch_compile_the_operators_of_the_original_are_traced():
    """The same ones, views of conditions perhaps sooner."""
    graphs: list[list[str]] = []
    model, inputs = build("sd3")
    expected = output_of(model, inputs)
    for place in (0, 1):
        if place:
            accelerate(model)
        torch._dynamo.reset()

        def keep(graph, _):
            graphs.append(sorted(str(node.target) for node in graph.graph.nodes if node.op.startswith("call")))
            return make_boxed_func(graph.forward)

        compiled = torch.compile(model, backend=aot_autograd(fw_compiler=keep), fullgraph=True)
        torch.testing.assert_close(output_of(compiled, inputs), expected, rtol=1e-4, atol=1e-6)
    assert graphs[1] == graphs[0]


# What is read from a source.

FORWARDS = {  # what is looked for, and whether it is found
    "in one statement": ("return_ = self.norm(x) * (1 + scale[:, None]) + shift[:, None]", MODULATED, True),
    "of a sum that is taken apart": (
        """
        y = self.norm(x) * (1 + scale)[:, None, :] + shift[:, None, :]
        return_ = y * 2 + x
        """,
        MODULATED,
        True,
    ),
    "in two statements": (
        """
        y = self.norm(x)
        y = y * (1 + scale.unsqueeze(1)) + shift[:, None]
        return_ = y + x
        """,
        MODULATED,
        True,
    ),
    "a gated sum before it": (
        """
        y = x.cos()
        y = gate[:, None] * y
        x = y + x
        z = self.norm(x)
        z = z * (1 + scale[:, None]) + shift[:, None]
        return_ = z + x
        """,
        GATED,
        True,
    ),
    "branches before the norm, whose tests need not wait for the sum": (
        """
        y = x.cos()
        y = gate[:, None] * y
        s = y + x
        if s.ndim == 4:
            s = s.squeeze(1)
        if self.between is not None:
            s = self.between(s)
        z = self.norm(s)
        z = z * (1 + scale[:, None]) + shift[:, None]
        return_ = z + s
        """,
        GATED,
        True,
    ),
    "a branch that tests the sum": (
        """
        y = x.cos()
        y = gate[:, None] * y
        s = y + x
        if s is not None:
            s = s.sin()
        z = self.norm(s) * (1 + scale[:, None]) + shift[:, None]
        return_ = z + s
        """,
        GATED,
        False,
    ),
    "within a branch": (
        """
        y = x.cos()
        if gate is not None:
            y = gate.unsqueeze(1) * y
            x = x + y
            x = self.norm(x) * (1 + scale[:, None]) + shift[:, None]
        return_ = x
        """,
        GATED,
        False,  # s and y are one name
    ),
    "what was gated is read again": (
        """
        y = x.cos()
        y = gate[:, None] * y
        s = y + x
        z = self.norm(s) * (1 + scale[:, None]) + shift[:, None]
        return_ = z + y
        """,
        GATED,
        False,
    ),
    "what was gated is read after the branch": (
        """
        y = x.cos()
        if gate is not None:
            y = gate[:, None] * y
            s = y + x
            z = self.norm(s) * (1 + scale[:, None]) + shift[:, None]
        return_ = z + y
        """,
        GATED,
        False,
    ),
    "the scale comes of what is normalised": (
        """
        y = self.norm(x)
        y = y * (1 + y) + shift[:, None]
        return_ = y
        """,
        MODULATED,
        False,
    ),
    "a scale without 1": ("return_ = self.norm(x) * (2 + scale[:, None]) + shift[:, None]", MODULATED, False),
    "a shift that is computed": ("return_ = self.norm(x) * (1 + scale[:, None]) + self.linear(x)", MODULATED, False),
    "the norm is scaled alone": ("return_ = self.norm(x) * (1 + scale[:, None])", MODULATED, False),
    "another one is modulated": (
        """
        y = self.norm(x)
        y = x * (1 + scale[:, None]) + shift[:, None]
        return_ = y
        """,
        MODULATED,
        False,
    ),
}


@pytest.fixture
def module_of(tmp_path):
    """Source as the method `forward` of a module in a file."""
    names = []

    def make(body: str):
        name = f"modulated_{len(names)}_{tmp_path.name}"
        names.append(name)
        body = textwrap.indent(textwrap.dedent(body).strip() + "\nreturn return_", " " * 8)
        head = "import torch\n\n\nclass Block(torch.nn.Module):\n    def forward(self, x, gate, scale, shift):\n"
        (tmp_path / f"{name}.py").write_text(head + body + "\n")
        spec = importlib.util.spec_from_file_location(name, tmp_path / f"{name}.py")
        sys.modules[name] = module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module.Block

    yield make
    for name in names:
        del sys.modules[name]


@pytest.mark.parametrize("case", FORWARDS)
def test_what_is_joined_in_a_source(module_of, case):
    body, join, is_found = FORWARDS[case]
    original = module_of(body)
    forward = rewritten(original.forward, {"norm": join})
    assert (forward is not None) == is_found
    if forward is None:
        return
    block = original()
    block.linear, block.norm = nn.Linear(8, 8), nn.LayerNorm(8, elementwise_affine=False)
    block.between = None
    x, (gate, scale, shift) = random(3, 5, 8, dtype=torch.float32), random(3, 3, 8, dtype=torch.float32, seed=1)
    expected = block(x, gate, scale, shift)
    replace_norms(block)
    block.__class__ = type("Block", (blocks.Block, original), {"forward": forward})
    block._ran = blocks.Counter()
    torch.testing.assert_close(block(x, gate, scale, shift), expected)
    assert block._ran == {("norm", ""): 1}


@pytest.mark.parametrize("between", [None, torch.sin], ids=["no branch", "the second"])
@pytest.mark.parametrize("axes", [3, 4], ids=["three axes", "four, the first branch"])
def test_branches_before_a_norm(module_of, between, axes):
    """If one is taken, all is computed as in the original."""
    original = module_of(FORWARDS["branches before the norm, whose tests need not wait for the sum"][0])
    block = original()
    block.between, block.norm = between, nn.LayerNorm(8, elementwise_affine=False)
    x, (gate, scale, shift) = random(3, 5, 8, dtype=torch.float32), random(3, 3, 8, dtype=torch.float32, seed=1)
    x = x if axes == 3 else x[:, None]
    gate = gate if axes == 3 else gate[:, None]
    expected = block(x, gate, scale, shift)
    forward = rewritten(original.forward, {"norm": GATED})
    replace_norms(block)
    block.__class__ = type("Block", (blocks.Block, original), {"forward": forward})
    block._ran = blocks.Counter()
    torch.testing.assert_close(block(x, gate, scale, shift), expected)
    assert block._ran == ({("norm", ""): 1} if between is None and axes == 3 else {})


# What keeps a norm apart: the norm, and a condition's shape and dtype.
APART = {
    "a weight": (nn.LayerNorm(8), (3, 1, 8), torch.float32, "the norm has a weight or a bias beside the modulation"),
    "a larger scale": (
        nn.LayerNorm(8, elementwise_affine=False),
        (2, 3, 5, 8),
        torch.float32,
        "the modulation is larger than what is modulated",
    ),
    "whole numbers": (
        nn.LayerNorm(8, elementwise_affine=False),
        (3, 1, 8),
        torch.int64,
        "the modulation has a dtype that no kernel reads",
    ),
}


@pytest.mark.parametrize("case", APART)
def test_what_is_computed_apart(module_of, case):
    norm, shape, dtype, reason = APART[case]
    original = module_of("return_ = self.norm(x) * (1 + scale) + shift")
    block = original()
    block.norm = norm
    x, scale = random(3, 5, 8, dtype=torch.float32), torch.ones(shape, dtype=dtype)
    replace_norms(block)
    expected = block(x, None, scale, scale)
    forward = rewritten(original.forward, {"norm": MODULATED})
    block.__class__ = type("Block", (blocks.Block, original), {"forward": forward})
    block._ran = blocks.Counter()
    assert torch.equal(block(x, None, scale, scale), expected)
    assert block._ran == {("norm", reason): 1}


@pytest.mark.parametrize("condition", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("norm", [nn.LayerNorm, nn.RMSNorm])
def test_dtypes(module_of, norm, dtype, condition):
    """Those of the operators, of y and of s, whatever x and the conditions have."""
    original = module_of(FORWARDS["a gated sum before it"][0].replace("return_ = z + x", "return_ = z, x"))
    block = original()
    block.norm = norm(8, elementwise_affine=False)
    x, conditions = random(3, 5, 8, dtype=dtype), random(3, 3, 8, dtype=condition, seed=1)
    expected = block(x, *conditions)
    replace_norms(block)
    forward = rewritten(original.forward, {"norm": GATED})
    block.__class__ = type("Block", (blocks.Block, original), {"forward": forward})
    block._ran = blocks.Counter()
    room = 1e-5 if {dtype, condition} == {torch.float32} else 5e-2
    torch.testing.assert_close(block(x, *conditions), expected, rtol=room, atol=room)
    assert block._ran == {("norm", ""): 1}


def test_what_known_attributes_decide():
    source = """
    def forward(self, x):
        if self.kind == "a":
            x = x + 1
        elif self.kind in ["b", "c"]:
            x = x + 2
        else:
            raise ValueError
        if not self.twice:
            pass
        else:
            if self.kind == "b" and x:
                x = x * 2
        if x:
            if self.kind == "a":
                x = 0
        return x
    """
    expected = """
    def forward(self, x):
        x = x + 2
        if self.kind == "b" and x:
            x = x * 2
        if x:
            pass
        return x
    """
    source, expected = (ast.parse(textwrap.dedent(one)) for one in (source, expected))
    assert ast.unparse(Settle("self", {"kind": "b", "twice": True}).visit(source)) == ast.unparse(expected)


def test_a_block_of_another_kind_is_no_known_one():
    attention = pytest.importorskip("diffusers.models.attention")
    block = attention.BasicTransformerBlock(32, 2, 16)
    assert blocks.known(block) is None
    assert not accelerate(block).joined


def test_a_vit_of_timm(module_of, monkeypatch):
    """A copy of the shape of timm's Block, and of its LayerNorm: timm itself needs torchvision."""

    class LayerNorm(nn.LayerNorm):
        def __init__(self, fast: bool = False) -> None:
            super().__init__(8)
            self._fast_norm = fast

        def forward(self, x):
            if not (self._fast_norm and torch.is_autocast_enabled(x.device.type)):
                return super().forward(x)
            dtype = torch.get_autocast_dtype(x.device.type)
            x, weight, bias = (one.to(dtype) for one in (x, self.weight, self.bias))
            with torch.autocast(x.device.type, enabled=False):
                return nn.functional.layer_norm(x, self.normalized_shape, weight, bias, self.eps)

    LayerNorm.__module__ = "timm.layers.norm"
    original = module_of(
        """
        x = x + self.drop(self.linear(self.norm1(x)))
        x = x + self.drop(self.linear(self.norm2(x)))
        return_ = x
        """
    )
    monkeypatch.setattr(original, "__module__", "timm.models.vision_transformer")
    block = original()
    block.linear, block.drop, block.norm1, block.norm2 = nn.Linear(8, 8), nn.Identity(), LayerNorm(), LayerNorm()
    block.fast = LayerNorm(fast=True)
    x = random(3, 8, dtype=torch.float32)
    expected = block(x, None, None, None)
    report = accelerate(block)
    assert (report.norms.swapped, list(report.joined)) == ({"norm1": "LayerNorm", "norm2": "LayerNorm"}, ["norm2"])
    assert report.norms.left == {
        "fast": "LayerNorm of timm.layers.norm has a result of autocast's dtype, where autocast is on"
    }
    monkeypatch.setitem(block.__dict__, "_joined_from", 1)
    torch.testing.assert_close(block(x, None, None, None), expected)
    assert report.ran() == {"norm2": (1, {})}


# What a GPU launches.


@needs_machine
@pytest.mark.parametrize("join", [MODULATED, GATED])
@pytest.mark.parametrize("norm", [nn.LayerNorm, nn.RMSNorm])
def test_launches_of_a_join(stand_in, lines, norm, join):
    """Conditions are read where they lie, in the parts of one product; each pass is one plan."""
    ours = norm(64, 1e-5, elementwise_affine=False)
    replace_norms(ours)
    x, residual = (random(2, 5, 64, dtype=torch.float32, seed=seed).requires_grad_() for seed in range(2))
    product = random(2, 6 * 64, dtype=torch.float32, seed=2).requires_grad_()
    results = []
    for dtype in (torch.float64, torch.float32):
        gate, scale, shift = (one[:, None] for one in product.to(dtype).chunk(6, dim=1)[2:5])
        given = [one.to(dtype) for one in (x, residual)]
        if dtype is torch.float32 and join == MODULATED:
            found = [joins.norm_then_modulation(ours, given[0], scale, shift)]
        elif dtype is torch.float32:
            found = [*joins.gated_sum_then_modulation(ours, given[0], gate, given[1], scale, shift)]
        else:
            s = given[1] + gate * given[0] if join == GATED else given[0]
            y = torch.nn.functional.layer_norm if norm is nn.LayerNorm else torch.nn.functional.rms_norm
            y = y(s, (64,), eps=1e-5) * (1 + scale) + shift
            found = [y, s] if join == GATED else [y]
        leaves = [x, product] if join == MODULATED else [x, residual, product]
        found += torch.autograd.grad(sum(one.square().sum() for one in found), leaves)
        results.append(found)
    for expected, one in zip(*results, strict=True):
        torch.testing.assert_close(one, expected.to(one.dtype), rtol=1e-4, atol=1e-4)
    assert [plan.problem.direction for plan in stand_in.plans] == ["forward", "backward"]
    assert not [line for line in lines() if "copied" in line or "expanded" in line]


def test_a_few_elements_stay_apart(monkeypatch):
    """As the host has more to do for ours than for the model's own operators."""
    monkeypatch.setattr(importlib.import_module("cunorm.torch.models.accelerate"), "MODULATED_FROM", 8 << 20)
    model, inputs = build("dit")
    expected = output_of(model, inputs)
    report = accelerate(model)
    torch.testing.assert_close(output_of(model, inputs), expected, rtol=0, atol=0)
    together = [ran.together for ran in report.ran().values()]
    assert together == [0] * len(together) != []


def test_few_elements_are_joined_by_nodes_in_cpp(monkeypatch):
    """They cost the host less than the model's own operators."""
    monkeypatch.setattr(importlib.import_module("cunorm.torch.models.accelerate"), "MODULATED_FROM", 8 << 20)
    monkeypatch.setattr(nodes, "module", object)
    model, inputs = build("dit")
    expected = output_of(model, inputs)
    report = accelerate(model)
    torch.testing.assert_close(output_of(model, inputs), expected)
    assert all(ran.together and not ran.apart for ran in report.ran().values())
