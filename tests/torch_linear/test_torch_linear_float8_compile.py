"""LayerNormLinear in FP8 under torch.compile, and its operators."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from torch import _dynamo  # noqa: E402
from torch_linear_float8 import RECIPES, inputs, make  # noqa: E402
from torch_tensors import compiled_on_devices, on_devices, same  # noqa: E402

from cunorm.torch import RowwiseScaling, autocast, set_recipe  # noqa: E402
from cunorm.torch.linear import operators  # noqa: E402
from cunorm.torch.linear.exchange import SUM  # noqa: E402
from cunorm.torch.linear.float8 import Float8  # noqa: E402
from cunorm.torch.linear.parallel import ALONE  # noqa: E402
from cunorm.torch.linear.step import LOCAL, NOTHING, Step  # noqa: E402

pytestmark = pytest.mark.usefixtures("one_thread")


@compiled_on_devices
@pytest.mark.slow
@pytest.mark.parametrize(
    ("recipe", "options"),
    [
        (RECIPES["row"], {}),
        (RECIPES["row, wide wgrad"], {"parameters_split": ("a", "b"), "normalization": "RMSNorm"}),
        (RECIPES["tensor, hybrid"], {}),
    ],
    ids=["row", "row, wide wgrad", "tensor"],
)
def test_compiled_whole(device, recipe, options, backend):
    """The module compiles into one graph with eager mode's results, and anew for another recipe."""
    _dynamo.reset()
    module = make(device, return_bias=True, return_layernorm_output=True, **options)
    compiled = torch.compile(module, fullgraph=True, backend=backend, dynamic=True)

    def gradients(call, x, dy):
        y, bias, z = call(x)
        return [y, *torch.autograd.grad((y * dy + bias).sum() + z.sin().sum(), [x, *module.parameters()])]

    for rows in (48, 200):
        x, dy = inputs(device, rows=rows)
        with autocast(recipe=recipe):
            results, expected = gradients(compiled, x, dy), gradients(module, x, dy)
        torch.testing.assert_close(results, expected, rtol=1e-4, atol=1e-4)
    with autocast(recipe=recipe), torch.no_grad():
        torch.testing.assert_close(compiled(x), module(x))
    torch.testing.assert_close(compiled(x), module(x), rtol=1e-4, atol=1e-4)
    assert not torch.equal(expected[0], module(x)[0])
    with autocast(enabled=False):
        torch.testing.assert_close(compiled(x)[0], module(x)[0], rtol=1e-4, atol=1e-4)


@on_devices
@pytest.mark.parametrize("recipe", [RECIPES["row"], RECIPES["tensor, hybrid"]], ids=["row", "tensor"])
@pytest.mark.parametrize("wants", [False, True])
def test_opcheck(device, wants, recipe):
    module, (x, dy) = make(device), inputs(device, rows=32)

    def options(returned, wanted):
        dtypes = torch.float32, torch.float32
        step = Step("layer_norm", 1e-5, torch.float32, False, 0, 0, returned, *dtypes, Float8(recipe.scheme))
        return operators.flat(step, ALONE, wanted)

    given = [t.detach() for t in (x, module.weight, module.bias, module.layer_norm_weight, module.layer_norm_bias)]
    forward, backward = operators.norm_linear_forward, operators.norm_linear_backward
    tests = ("test_schema", "test_faketensor")
    chosen = options(LOCAL if wants else NOTHING, SUM * wants)
    torch.library.opcheck(forward, (*given, *chosen), test_utils=tests)
    _, z, statistics, kept, columns, column_scale = forward(*given, *options(LOCAL, SUM))
    kept = kept if kept.dim() == 0 else None
    saved = (statistics, given[0], columns, *given[3:], kept, column_scale)
    for dz, mask in ((z, [True] * 5), (None, [False, True, wants, False, False])):
        arguments = (dy, dz, *saved, mask, *options(LOCAL, SUM))
        torch.library.opcheck(backward, arguments, test_utils=tests[1:])  # torch compares no inputs of 8 bits


@pytest.mark.slow
@on_devices
def test_compiled_with_torch_autocast_and_a_recipe_of_its_own(device):
    _dynamo.reset()
    module = set_recipe(make(device), RowwiseScaling())
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    x, dy = inputs(device)
    with torch.autocast(device, torch.bfloat16):
        y, expected_y = compiled(x), module(x)
    assert y.dtype is torch.bfloat16
    assert same(y, expected_y)
    wanted = [x, *module.parameters()]
    gradients, expected = (torch.autograd.grad(result, wanted, dy.bfloat16()) for result in (y, expected_y))
    assert all(same(a, b) for a, b in zip(gradients, expected, strict=True))


@on_devices
@pytest.mark.parametrize("strict", [False, True])
def test_exported(device, strict):
    module = set_recipe(make(device), RowwiseScaling())
    x = inputs(device)[0].detach()
    rows = {"inp": {0: torch.export.Dim("rows")}}
    program = torch.export.export(module, (x,), dynamic_shapes=rows, strict=strict)
    assert [node.target for node in program.graph.nodes if "cunorm" in str(node.target)] == [operators.norm_linear]
    for some in (x, x[:5]):
        assert same(program.module()(some), module(some))


@on_devices
def test_compiled_with_a_break_in_the_graph(device):
    _dynamo.reset()
    module = make(device).requires_grad_(False)
    compiled = torch.compile(module, backend="aot_eager")
    x = inputs(device)[0].detach()
    with autocast():
        assert same(compiled(x, is_first_microbatch=True), module(x))
        kept = module._fp8_weights._cached
        assert same(compiled(x, is_first_microbatch=False), module(x))
        assert module._fp8_weights._cached is kept
        results, expected = compiled(x, fp8_output=True), module(x, fp8_output=True)
    assert all(same(a, b) for a, b in zip(results, expected, strict=True))
