"""LayerNormLinear: every argument of TransformerEngine's constructor, and what its users rely on."""

from __future__ import annotations

import contextlib
import copy
import inspect
import pickle
from collections.abc import Callable
from typing import Any, NamedTuple

import linear_reference
import pytest
from functions import OPS
from linear_reference import NORMALIZATION, check_backward, check_forward

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402
from torch_linear_module import (  # noqa: E402
    COLS,
    OUTS,
    expected,
    keeping,
    make,
    splits,
    twin,
    whole,
)
from torch_tensors import array, on_devices, random, same, tensor  # noqa: E402

from cunorm.torch import LayerNormLinear  # noqa: E402

# transformer_engine.pytorch.LayerNormLinear 2.20, in order.
ARGUMENTS = {
    "in_features": inspect.Parameter.empty,
    "out_features": inspect.Parameter.empty,
    "eps": 1e-5,
    "sequence_parallel": False,
    "fuse_wgrad_accumulation": False,
    "tp_group": None,
    "tp_size": 1,
    "get_rng_state_tracker": None,
    "init_method": None,
    "bias": True,
    "normalization": "LayerNorm",
    "return_bias": False,
    "params_dtype": None,
    "parallel_mode": None,
    "return_layernorm_output": False,
    "return_layernorm_output_gathered": False,
    "parameters_split": None,
    "zero_centered_gamma": False,
    "device": None,  # TransformerEngine has "cuda", which overrides a default device of torch
    "ub_overlap_ag": False,
    "ub_overlap_rs": False,
    "ub_overlap_rs_dgrad": False,
    "ub_bulk_wgrad": False,
    "ub_bulk_dgrad": False,
    "ub_name": None,
    "delay_wgrad_compute": False,
    "symmetric_ar_type": None,
    "name": None,
}


def test_the_constructor_is_transformer_engines():
    parameters = inspect.signature(LayerNormLinear).parameters
    positional = {n: p.default for n, p in parameters.items() if p.kind is not inspect.Parameter.KEYWORD_ONLY}
    assert list(positional.items()) == list(ARGUMENTS.items())
    forward = inspect.signature(LayerNormLinear.forward).parameters
    assert {n: p.default for n, p in list(forward.items())[2:]} == {
        "is_first_microbatch": None,
        "fp8_output": False,
        "fp8_grad": False,
    }


@on_devices
@keeping
@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("offset", [1.0, 1e2])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_values_and_gradients(device, keep, op, offset, dtype):
    """Results are those of float64, with an eps of 0.3 and random parameters."""
    call = linear_reference.inputs(op, 40, 96, 64, dtype, offset=offset)
    module = LayerNormLinear(
        96,
        64,
        call.eps,
        normalization=NORMALIZATION[op],
        params_dtype=getattr(torch, dtype),
        device=device,
        keep_normalized=keep,
    )
    names = ("weight", "bias", "layer_norm_weight", "layer_norm_bias")
    state = {name: tensor(a) for name, a in zip(names, call[2:6], strict=True) if a is not None}
    module.load_state_dict(state)
    x = tensor(call.x).to(device).requires_grad_()
    y = module(x)
    y.backward(tensor(call.dy).to(device))
    rounded = {"rounded_mean": device == "cpu"}
    check_forward(call, array(y), **rounded)
    parameters = [getattr(module, name) for name in names]
    gradients = [x.grad, *(None if p is None else p.grad for p in parameters)]
    check_backward(call, [array(g) for g in gradients], **rounded)


@on_devices
@splits
@pytest.mark.parametrize("normalization", ["LayerNorm", "RMSNorm"])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("zero_centered_gamma", [False, True])
@pytest.mark.parametrize("returns", ["y", "bias", "z", "bias and z"])
def test_what_is_returned(device, split, normalization, bias, zero_centered_gamma, returns):
    """All returned tensors are right, and so are the gradients through all of them."""
    module = make(
        device,
        torch.float64,
        parameters_split=split,
        normalization=normalization,
        bias=bias,
        zero_centered_gamma=zero_centered_gamma,
        return_bias="bias" in returns,
        return_layernorm_output="z" in returns,
        return_layernorm_output_gathered="z" in returns,
    )
    x = random(2, 5, COLS, device=device).requires_grad_()
    results = module(x)
    results = list(results) if isinstance(results, tuple) else [results]
    y, z = expected(module, x, apply_bias="bias" not in returns)
    wanted = [y]
    if "bias" in returns:
        wanted.append(whole(module)[1] if bias else torch.empty(0, device=device, dtype=torch.float64))
    if "z" in returns:
        wanted.append(z)
    torch.testing.assert_close(results, wanted)
    inputs = [x, *module.parameters()]

    def gradients(outputs):
        loss = sum((output.sin() * (i + 1)).sum() for i, output in enumerate(outputs))
        return torch.autograd.grad(loss, inputs)

    torch.testing.assert_close(gradients(results), gradients(wanted))


def test_the_returned_bias_has_the_dtype_of_y():
    module = make(return_bias=True)
    with torch.autocast("cpu", torch.bfloat16):
        y, bias = module(random(3, COLS, dtype=torch.float32))
    assert y.dtype is bias.dtype is torch.bfloat16
    (bias.float() * 2).sum().backward()
    assert torch.equal(module.bias.grad, torch.full((OUTS,), 2.0))


# Parameters.


@pytest.mark.parametrize("zero_centered_gamma", [False, True])
def test_initial_values(zero_centered_gamma):
    torch.manual_seed(0)
    module = LayerNormLinear(256, 512, zero_centered_gamma=zero_centered_gamma, device="cpu")
    assert torch.equal(module.layer_norm_weight, torch.full((256,), 1.0 - zero_centered_gamma))
    assert torch.equal(module.layer_norm_bias, torch.zeros(256))
    assert torch.equal(module.bias, torch.zeros(512))
    weight = module.weight.detach()
    assert abs(float(weight.std()) / 0.023 - 1) < 0.01
    assert abs(float(weight.mean())) < 1e-3


@splits
def test_init_method_and_rng_state_tracker(split):
    events = []

    class Tracker:
        @contextlib.contextmanager
        def fork(self):
            events.append("fork")
            yield
            events.append("join")

    def init(weight):
        events.append(tuple(weight.shape))
        nn.init.constant_(weight, 2.0)

    module = LayerNormLinear(
        COLS, OUTS, init_method=init, get_rng_state_tracker=Tracker, parameters_split=split, device="cpu"
    )
    parts = {type(None): [24], tuple: [8, 8, 8], dict: [8, 16]}[type(split)]
    assert events == ["fork", *((rows, COLS) for rows in parts), "join"]
    assert all((p == 2.0).all() for n, p in module.named_parameters() if n.endswith("weight") and "norm" not in n)


@pytest.mark.parametrize(
    ("options", "names"),
    [
        ({}, ["layer_norm_weight", "layer_norm_bias", "weight", "bias"]),
        ({"bias": False}, ["layer_norm_weight", "layer_norm_bias", "weight"]),
        ({"normalization": "RMSNorm"}, ["layer_norm_weight", "weight", "bias"]),
        (
            {"parameters_split": ("q_", "k")},
            ["layer_norm_weight", "layer_norm_bias", "q_weight", "k_weight", "q_bias", "k_bias"],
        ),
        (
            {"parameters_split": {"q": 4, "kv_": 20}, "bias": False},
            ["layer_norm_weight", "layer_norm_bias", "q_weight", "kv_weight"],
        ),
    ],
    ids=str,
)
def test_names(options, names):
    module = LayerNormLinear(COLS, OUTS, device="cpu", **options)
    assert list(module.state_dict()) == names
    assert [name for name, _ in module.named_parameters()] == names
    if options.get("bias") is False:
        biases = [getattr(module, name.replace("weight", "bias")) for name in names[2:]]
        assert all(b.numel() == 0 and not isinstance(b, nn.Parameter) for b in biases)
    if options.get("normalization") == "RMSNorm":
        assert module.layer_norm_bias is None


@pytest.mark.parametrize("extra", [None, torch.empty(0, dtype=torch.uint8), torch.zeros(3, dtype=torch.uint8)])
@pytest.mark.parametrize("nested", [False, True])
def test_a_checkpoint_of_transformer_engine_loads(extra, nested):
    source, module = make(), LayerNormLinear(COLS, OUTS, device="cpu")
    state = source.state_dict()
    if extra is not None:
        state["_extra_state"] = extra
    target = module
    if nested:
        target = nn.Sequential(nn.Identity(), module)
        state = {f"1.{name}": value for name, value in state.items()}
    before = dict(state)
    assert not any(target.load_state_dict(state, strict=True))
    assert list(state) == list(before)
    assert all(torch.equal(a, b) for a, b in zip(module.parameters(), source.parameters(), strict=True))
    state["1.odd" if nested else "odd"] = torch.zeros(1)
    with pytest.raises(RuntimeError, match="odd"):
        target.load_state_dict(state)


@pytest.mark.parametrize("parallel_mode", [None, "column"])
@pytest.mark.parametrize("bias", [False, True])
def test_attributes_of_parameters(parallel_mode, bias):
    module = LayerNormLinear(
        COLS,
        OUTS,
        parallel_mode=parallel_mode,
        sequence_parallel=True,
        bias=bias,
        delay_wgrad_compute=True,
        device="cpu",
    )

    def check(module):
        assert module.layer_norm_weight.sequence_parallel is False  # there is one rank
        assert module.layer_norm_bias.sequence_parallel is False
        sharded = [module.weight] + ([module.bias] if bias and parallel_mode else [])
        for parameter in sharded:
            assert (parameter.tensor_model_parallel, parameter.partition_dim, parameter.partition_stride) == (
                True,
                0,
                1,
            )
        if bias and not parallel_mode:
            assert not hasattr(module.bias, "tensor_model_parallel")
        assert module.weight.skip_backward_post_hook is True

    check(module)
    check(copy.deepcopy(module))
    check(pickle.loads(pickle.dumps(module)))
    check(module.half())
    check(module.to_empty(device="cpu"))


@splits
def test_copies(split):
    module = make(parameters_split=split)
    x = random(3, COLS, dtype=torch.float32)
    for other in (copy.deepcopy(module), pickle.loads(pickle.dumps(module)), twin(module, parameters_split=split)):
        assert torch.equal(other(x), module(x))
    half = copy.deepcopy(module).bfloat16()
    torch.testing.assert_close(half(x.bfloat16()).float(), module(x), rtol=0.05, atol=0.05)


def test_parts_that_lie_together_are_not_copied():
    from cunorm.torch.linear.parameters import joined

    module = make(parameters_split=("q", "k", "v"))

    def parts_of(module, kind="weight"):
        return [getattr(module, f"{name}_{kind}") for name in "qkv"]

    moved = copy.deepcopy(module)
    optimised = parts_of(moved)
    moved.double()
    assert all(a is b for a, b in zip(parts_of(moved), optimised, strict=True))
    for some in (module, moved, copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        for kind in ("weight", "bias"):
            parts = parts_of(some, kind)
            assert joined(parts).data_ptr() == parts[0].data_ptr()
            assert torch.equal(joined(parts), torch.cat(parts))
    parts = parts_of(module)
    apart = [nn.Parameter(part.detach().clone()) for part in parts]
    assert joined(apart).data_ptr() not in [part.data_ptr() for part in apart]
    assert torch.equal(joined(apart), joined(parts))
    dy = random(OUTS, COLS, dtype=torch.float32)
    for some in (parts, apart):
        gradients = torch.autograd.grad(joined(some), some, dy)
        assert all(torch.equal(a, b) for a, b in zip(gradients, dy.split(8), strict=True))


@splits
def test_meta_device(split):
    module = LayerNormLinear(COLS, OUTS, device="meta", parameters_split=split, params_dtype=torch.float64)
    assert all(p.is_meta for p in module.parameters())
    assert module(torch.empty(3, COLS, device="meta", dtype=torch.float64)).shape == (3, OUTS)
    torch.manual_seed(3)
    module.reset_parameters()
    assert not any(p.is_meta for p in module.parameters())
    torch.manual_seed(3)
    device = module.layer_norm_weight.device.type
    other = LayerNormLinear(COLS, OUTS, device=device, parameters_split=split, params_dtype=torch.float64)
    assert all(torch.equal(a, b) for a, b in zip(module.parameters(), other.parameters(), strict=True))
    emptied = LayerNormLinear(COLS, OUTS, device="meta").to_empty(device="cpu")
    emptied.reset_parameters()
    assert torch.equal(emptied.layer_norm_weight, torch.ones(COLS))


@on_devices
def test_labels_change_nothing(device):
    module = make(device)
    x = random(3, COLS, device=device, dtype=torch.float32)
    other = twin(module, ub_name="qkv", name="first", tp_size=1, sequence_parallel=True, parallel_mode="column")
    assert (other.ub_name, other.name) == ("qkv", "first")
    assert same(other(x).detach(), module(x).detach())


def test_what_acts_over_several_ranks_changes_nothing_on_one():
    module = make()
    x = random(3, COLS, dtype=torch.float32)
    flags = ("ub_overlap_ag", "ub_overlap_rs", "ub_overlap_rs_dgrad", "ub_bulk_wgrad", "ub_bulk_dgrad")
    for option in (*({flag: True} for flag in flags), {"symmetric_ar_type": "two_shot"}, {"symmetric_ar_type": None}):
        assert same(twin(module, **option)(x).detach(), module(x).detach())


# Bad input.


class Bad(NamedTuple):
    what: str
    options: dict[str, Any]
    error: type[Exception]
    phrase: str


CONSTRUCTOR = [
    Bad("no rows", {"out_features": 0}, ValueError, "out_features must be 1 or more; got 0"),
    Bad("negative columns", {"in_features": -4}, ValueError, "in_features must be 1 or more; got -4"),
    Bad("columns are a float", {"in_features": 8.0}, TypeError, "in_features must be an int; got float"),
    Bad("negative eps", {"eps": -1.0}, ValueError, "eps must be finite and not negative"),
    Bad("unknown norm", {"normalization": "BatchNorm"}, ValueError, "'LayerNorm' or 'RMSNorm'; got 'BatchNorm'"),
    Bad("row parallel", {"parallel_mode": "row"}, NotImplementedError, "A norm cannot be split along its row"),
    Bad("unknown mode", {"parallel_mode": "diagonal"}, ValueError, "None or 'column'; got 'diagonal'"),
    Bad("a group of nothing", {"tp_group": object()}, RuntimeError, "a tensor-parallel group needs torch.distributed"),
    Bad("ranks", {"tp_size": 5, "parallel_mode": "column"}, ValueError, "tp_size=5: 24 is not divisible by 5"),
    Bad(
        "ranks of a part",
        {"tp_size": 4, "parallel_mode": "column", "parameters_split": {"a": 6, "b": 18}},
        RuntimeError,
        "a multiple of the number of ranks, 4; got 'a' of 6 rows",
    ),
    Bad("no ranks", {"tp_size": 0}, ValueError, "tp_size must be 1 or more"),
    Bad("empty split", {"parameters_split": ()}, ValueError, "at least one part"),
    Bad("empty sizes", {"parameters_split": {}}, ValueError, "at least one part"),
    Bad("uneven split", {"parameters_split": ("a",) * 5}, ValueError, "every part once"),
    Bad("uneven parts", {"parameters_split": tuple("abcde")}, ValueError, "add up to out_features=24; got [4, 4"),
    Bad("wrong sum", {"parameters_split": {"a": 8, "b": 8}}, ValueError, "add up to out_features=24; got [8, 8]"),
    Bad("an empty part", {"parameters_split": {"a": 0, "b": 24}}, ValueError, "must be positive"),
    Bad("names are numbers", {"parameters_split": (1, 2)}, TypeError, "name its parts by str; got [1, 2]"),
    Bad("a number of parts", {"parameters_split": 3}, TypeError, "a sequence of names or a dict of sizes; got int"),
    Bad("sizes are floats", {"parameters_split": {"a": 8.0, "b": 16.0}}, TypeError, "must have int sizes"),
    Bad("symmetric", {"symmetric_ar_type": "three_shot"}, ValueError, "'two_shot', 'one_shot'; got 'three_shot'"),
    Bad(
        "nothing to hide under",
        {"ub_bulk_wgrad": True, "delay_wgrad_compute": True},
        ValueError,
        "got delay_wgrad_compute=True. Set one of them",
    ),
]


@pytest.mark.parametrize("bad", CONSTRUCTOR, ids=lambda bad: bad.what)
def test_bad_arguments(bad):
    with pytest.raises(bad.error) as caught:
        LayerNormLinear(**{"in_features": COLS, "out_features": OUTS, "device": "cpu", **bad.options})
    assert bad.phrase in str(caught.value)
    assert str(caught.value).startswith("LayerNormLinear: ")


CALLS: list[tuple[str, Callable[[Any], tuple], dict, type[Exception], str]] = [
    ("a list", lambda x: ([[1.0]],), {}, TypeError, "inp must be a torch.Tensor; got list"),
    ("wrong last axis", lambda x: (x[:, 1:],), {}, RuntimeError, "the length 16 of a row of weight"),
    ("dtype", lambda x: (x.double(),), {}, TypeError, "inp of torch.float64 and layer_norm_weight of torch.float32"),
    ("fp8_output", lambda x: (x,), {"fp8_output": True}, ValueError, "fp8_output=True needs FP8; got a call without"),
    ("fp8_grad", lambda x: (x,), {"fp8_grad": True}, ValueError, "fp8_grad must be False"),
]


@on_devices
@pytest.mark.parametrize(("what", "change", "options", "error", "phrase"), CALLS, ids=[call[0] for call in CALLS])
def test_bad_calls(device, what, change, options, error, phrase):
    module = make(device, delay_wgrad_compute=True)
    before = copy.deepcopy(module.state_dict())
    with pytest.raises(error) as caught:
        module(*change(random(3, COLS, device=device, dtype=torch.float32)), **options)
    assert phrase in str(caught.value)
    assert str(caught.value).startswith("LayerNormLinear: ")
    assert all(torch.equal(a, b) for a, b in zip(before.values(), module.state_dict().values(), strict=True))
    with pytest.raises(RuntimeError, match="backward_dw"):
        module.backward_dw()


def test_accumulation_without_main_grad():
    module = make(fuse_wgrad_accumulation=True)
    with pytest.raises(AttributeError, match=r"needs weight\.main_grad"):
        module(random(3, COLS, dtype=torch.float32))
