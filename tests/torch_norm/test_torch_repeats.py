"""A call like an earlier one is recognised by torch's own comparison of tensors, without checks and keys."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402
from torch_launches import Launches, on_the_stand_in  # noqa: E402
from torch_repeats import COLS, ROWS, calls, first_then_repeated, linear_calls, linear_results, misaligned, results  # noqa: E402
from torch_tensors import random, same  # noqa: E402

from cunorm.torch import layer_norm, layer_norm_linear, rms_norm  # noqa: E402
from cunorm.torch.linear.step import Step, normalise  # noqa: E402
from cunorm.torch.norm import launching, repeats  # noqa: E402
from cunorm.torch.norm.repeats import LIKE, again, alike, remember  # noqa: E402

pytestmark = pytest.mark.usefixtures("one_thread")


class Listener(TorchDispatchMode):
    def __torch_dispatch__(self, function, types, arguments=(), options=None):
        return function(*arguments, **(options or {}))


class Subclass(torch.Tensor):
    pass


OTHERS = {
    "rows": lambda x: x[:3],
    "strides": lambda x: x.t().contiguous().t(),
    "axes": lambda x: x[None],
    "dtype": lambda x: x.half(),
    "requires_grad": lambda x: x.clone().requires_grad_(),
    "a parameter": lambda x: torch.nn.Parameter(x, False),
    "a subclass": lambda x: x.as_subclass(Subclass),
    "negated": torch._neg_view,
    "sparse": lambda x: x.to_sparse(),
    "on meta": lambda x: x.to("meta"),
    "no tensor": lambda x: x.tolist(),
}
MODES: dict[str, Any] = {
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    "inference mode": torch.inference_mode,
    "dispatch mode": Listener,
}


@pytest.mark.parametrize("other", OTHERS)
def test_another_tensor_is_not_alike(other):
    x, weight = random(ROWS, COLS), random(COLS)
    known = alike(x, weight)
    assert known(x, weight)
    assert known(random(ROWS, COLS, seed=1), weight)
    assert not known(OTHERS[other](x), weight)


@pytest.mark.parametrize("mode", MODES)
def test_another_mode_is_not_alike(mode):
    x = random(ROWS, COLS)
    known = alike(x)
    with MODES[mode]():
        assert not known(x)
        assert alike(x)(x)
    assert known(x)


def test_transforms_and_traces_are_not_alike():
    x = random(ROWS, COLS)
    known, answers = alike(x), []

    def asks(tensor: Any) -> Any:
        answers.append(known(x))
        return tensor + 1

    torch.func.vmap(asks)(x)
    torch.func.grad(lambda tensor: asks(tensor).sum())(x)
    torch.jit.trace(asks, x, check_trace=False)
    assert answers == [False] * 3


def test_few_are_asked_one_by_one_and_all_are_found_again():
    kept: dict = {}
    calls = [(random(count, COLS),) for count in range(3 * LIKE)]
    for count, tensors in enumerate(calls):
        remember(kept, "key", tensors, count)
    assert [value for _, value in kept["key"]] == [*range(3 * LIKE)][: -LIKE - 1 : -1]
    assert [again(kept, "key", tensors) for tensors in calls] == [*range(3 * LIKE)]
    for other in (random(3 * LIKE, COLS), calls[1][0].clone().requires_grad_(), calls[1][0].to_sparse(), [1.0]):
        assert again(kept, "key", (other,)) is None
    remember(kept, "twice", (x := random(ROWS, COLS), x), 0)
    assert "twice" not in kept


def test_the_oldest_is_forgotten(monkeypatch):
    monkeypatch.setattr(repeats, "RECIPES", 8)
    kept: dict = {}
    for count in range(100):
        remember(kept, count, (random(ROWS, COLS),), count)
        assert len(kept) <= 16
        remember(kept, "hot", (random(ROWS, COLS),), "hot")
    assert [key for key in kept if type(key) is int] == [*range(93, 100)]
    assert kept["hot"][0][1] == "hot"


@pytest.fixture
def on_a_gpu(monkeypatch) -> Launches:
    """Let tensors on the CPU say that they are on a GPU."""
    launches = on_the_stand_in(monkeypatch)
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    return launches


@pytest.mark.parametrize("op", ["layer_norm", "rms_norm"])
def test_repeated_calls_have_the_bits_of_first_ones(on_a_gpu, op):
    """The calls take turns, and those before a call are still known."""
    cases: dict[str, Any] = {name: (*case, name == "frozen weight") for name, case in calls().items()}
    first_then_repeated(cases, lambda *case: results(op, *case))


def test_a_repeated_call_makes_no_key(on_a_gpu, monkeypatch):
    x, weight, dy = random(ROWS, COLS).requires_grad_(), random(COLS).requires_grad_(), random(ROWS, COLS)
    layer_norm(x, (COLS,), weight).backward(dy)
    for name in ("recipe_of", "backward_recipe_of"):
        monkeypatch.setattr(launching, name, None)
    layer_norm(x, (COLS,), weight).backward(dy)
    with torch.no_grad():
        layer_norm(x, (COLS,), weight)


@pytest.mark.parametrize(
    ("option", "value"),
    [("eps", True), ("eps", "1"), ("sm_margin", False), ("sm_margin", 0.0), ("dtype", "float32"), ("dtype", [1])],
    ids=str,
)
def test_what_is_refused_is_refused_after_a_call_that_equals_it(on_a_gpu, option, value):
    x = random(ROWS, COLS)
    layer_norm(x, (COLS,), eps=1.0)
    with pytest.raises((TypeError, ValueError)):
        layer_norm(x, (COLS,), **{"eps": 1.0, option: value})
    shape: Any = (float(COLS),)
    with pytest.raises((TypeError, RuntimeError)):
        layer_norm(x, shape, eps=1.0)


def test_modes_of_functions_and_duals_are_seen(on_a_gpu):
    """torch's comparison of tensors tells nothing of modes of functions."""
    x = random(ROWS, COLS)
    layer_norm(x, (COLS,))
    launched, seen = len(on_a_gpu.plans), []

    class Mode(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, function, types, arguments=(), options=None):
            seen.append(function)
            return function(*arguments, **(options or {}))

    with Mode(), contextlib.suppress(NotImplementedError):  # there is no operator of CUDA here
        layer_norm(x, (COLS,))
    assert seen
    assert len(on_a_gpu.plans) == launched


@contextlib.contextmanager
def default_device(name):
    torch.set_default_device(name)
    try:
        yield
    finally:
        torch.set_default_device(None)


@pytest.mark.parametrize("on", [default_device, torch.device], ids=["set_default_device", "with"])
def test_a_default_device_changes_no_call(on_a_gpu, on):
    """A default device is a mode of functions too, but results are where x is, so calls are still launched."""
    x, weight, dy = random(ROWS, COLS).requires_grad_(), random(COLS), random(ROWS, COLS)
    for _ in ("first", "repeated"):
        launched = len(on_a_gpu.plans)
        with on("meta"):
            y = layer_norm(x, (COLS,), weight)
            y.backward(dy)
        assert len(on_a_gpu.plans) == launched + 2
        assert y.device == x.grad.device == x.device


def test_a_mode_above_a_default_device_is_seen(on_a_gpu):
    x = random(ROWS, COLS)
    layer_norm(x, (COLS,))
    launched = len(on_a_gpu.plans)
    mode = torch.overrides.BaseTorchFunctionMode()
    with default_device("meta"), mode, contextlib.suppress(NotImplementedError):
        layer_norm(x, (COLS,))
    assert len(on_a_gpu.plans) == launched


@pytest.mark.slow
def test_repeated_calls_with_a_product(on_a_gpu, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    first_then_repeated(linear_calls(), linear_results)


def test_a_dtype_is_refused_after_a_call_that_had_it_right(on_a_gpu, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    x, _, module, _ = linear_calls()["plain"]
    for _ in range(2):
        module(x)
    with pytest.raises(TypeError, match="one dtype"):
        module(x.half())
    with pytest.raises(RuntimeError, match="last axis"):
        module(x[:, :8])
    with pytest.raises(TypeError, match=r"torch\.Tensor"):
        module(x.tolist())


@pytest.mark.parametrize("begins", ["aligned", "misaligned"])
@pytest.mark.parametrize("shape", [(ROWS, COLS), (2, 3, COLS), (0, COLS)], ids=str)
def test_z_is_written_to_rows_of_a_larger_matrix(on_a_gpu, shape, begins):
    """LayerNormLinear over ranks needs that from the first call on, in whatever shape x has."""
    x, weight, bias = random(*shape), random(COLS, seed=1), random(COLS, seed=2)
    step, rows = Step("layer_norm", 1e-5, x.dtype), x.numel() // COLS
    whole = misaligned(2 * ROWS, COLS) if begins == "misaligned" else random(2 * ROWS, COLS)
    before, own = whole.clone(), whole[ROWS : ROWS + rows]
    with torch.no_grad():
        expected, statistics = normalise(x, weight, bias, step, True, 0)
        for _ in range(2):
            own.fill_(0.0)
            z, statistics_again = normalise(x, weight, bias, step, True, 0, own)
            assert z is own
            assert same(z, expected.view(own.shape))
            assert same(statistics_again, statistics)
        assert normalise(x, weight, bias, step, False, 0, own)[1] is None
    before[ROWS : ROWS + rows] = own
    assert same(whole, before)


@pytest.mark.gpu
def test_autocast_follows_calls_without_it():
    """The dtype of autocast may change from call to call, which torch's comparison of tensors does not see."""
    from cunorm.torch import LayerNormLinear

    module, x = LayerNormLinear(COLS, 32, normalization="RMSNorm"), random(ROWS, COLS, dtype=torch.float32).cuda()
    expected = module(x)
    for _ in range(2):
        for dtype in (torch.bfloat16, torch.float16):
            with torch.autocast("cuda", dtype):
                y = module(x)
                norm_y = layer_norm(x.to(dtype), (COLS,))
            assert y.dtype is dtype
            assert norm_y.dtype is torch.float32
            torch.testing.assert_close(y.float(), expected, rtol=2e-2, atol=2e-2)
        assert same(module(x), expected)
        assert layer_norm(x.half(), (COLS,)).dtype is torch.float16


def test_sizes_that_a_trace_holds_open():
    from torch.fx.experimental.proxy_tensor import make_fx

    x, weight = random(ROWS, COLS), random(32, COLS)
    for function in (lambda x, _: rms_norm(x, x.shape[-1:], eps=1e-5), lambda x, weight: layer_norm_linear(x, weight)):
        graph = make_fx(torch.func.functionalize(function), tracing_mode="symbolic")(x, weight)
        torch.testing.assert_close(graph(x, weight), function(x, weight))
