"""Checks of LayerNormLinear over ranks besides values in float64: FP8, attributes, copies, groups, every refusal."""

from __future__ import annotations

import contextlib
import copy
import io
import itertools
import os
import pickle
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from parallel_cases import (
    ALL_Z,
    CASES,
    COLS,
    EPS,
    GROUPS,
    NOTHING,
    OUTS,
    OVERLAPS,
    SPLIT,
    Case,
    Whole,
    Z,
    make,
    raises,
    run,
)
from parallel_overlaps import symmetric_memory
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import parallelize_module
from torch.testing import assert_close

from cunorm.torch import Float8CurrentScaling, LayerNormColwiseParallel, LayerNormLinear, RowwiseScaling, autocast
from cunorm.torch.linear import call as calls
from cunorm.torch.linear import operators as linear_operators
from cunorm.torch.linear.parallel import Group
from cunorm.torch.linear.step import Step
from cunorm.torch.linear.wide import WIDE
from cunorm.torch.norm import repeats


def float8(group: Any, device: str) -> None:
    """In FP8 each rank has its part of one process's results, with numbers that decide scales on every rank.

    A rank has 12 rows: they are padded to 16 when they are cast by columns, and gathered without the padding.
    """
    rank, ranks, cols, outs, rows = dist.get_rank(group), dist.get_world_size(group), 32, 64, 24
    recipes = [RowwiseScaling(), RowwiseScaling(high_precision_wgrad=True), Float8CurrentScaling()]
    random = torch.Generator().manual_seed(0)
    x, dy, dz = (torch.randn(rows, size, generator=random).to(device) for size in (cols, outs, cols))
    x[1] *= 50  # decides the scale of a tensor, but not those of the other rows
    dy[:, :: outs // ranks] = 6.0
    overlaps = dict.fromkeys(OVERLAPS[:3], True)
    kinds = [{}, Z, ALL_Z, {"delay_wgrad_compute": True}, {"fuse_wgrad_accumulation": True}, ALL_Z | overlaps]
    own_outs = slice(rank * outs // ranks, (rank + 1) * outs // ranks)
    with symmetric_memory(device):
        for recipe, options, sequence in itertools.product(recipes, kinds, (True, False)):
            own = slice(rank * rows // ranks, (rank + 1) * rows // ranks) if sequence else slice(None)
            gathered = sequence and "return_layernorm_output_gathered" in options
            alone = LayerNormLinear(cols, outs, EPS, device=device, return_layernorm_output=True)
            torch.nn.init.normal_(alone.bias, generator=random if device == "cpu" else None)
            alone.weight.data[:: outs // ranks] = 1.0
            for parameter in alone.parameters():
                dist.broadcast(parameter.data, dist.get_global_rank(group, 0), group=group)
            given = {"parallel_mode": "column", "tp_group": group, "sequence_parallel": sequence, **options}
            module = LayerNormLinear(cols, outs, EPS, device=device, **given)
            with torch.no_grad():
                for name, parameter in module.named_parameters():
                    whole = getattr(alone, name)
                    parameter.copy_(whole if name.startswith("layer_norm") else whole[own_outs])
                    parameter.main_grad = torch.zeros_like(parameter)
            leaf, own_leaf = x.clone().requires_grad_(), x[own].clone().requires_grad_()
            with autocast(recipe=recipe):
                y, z = alone(leaf)
                results = module(own_leaf)
            returned = module.return_layernorm_output
            results = results if returned else (results,)
            # Where each rank returns z of all rows, the gradients of z are summed over the ranks.
            torch.autograd.backward([y, z], [dy, dz * returned * (ranks if gathered else 1)])
            torch.autograd.backward(results, [dy[:, own_outs], dz if gathered else dz[own]][: len(results)])
            module.backward_dw()
            note = str((recipe, options, sequence))
            # A GPU's tensor cores add up less exactly, and in another order where there are fewer columns.
            off = 1e-4 if device == "cpu" else 4e-3

            def near(result: Tensor, expected: Tensor, note: str = note, off: float = off) -> None:
                bounds = {"rtol": off, "atol": off * max(1.0, float(expected.abs().max()))}
                assert_close(result, expected, **bounds, msg=lambda text: f"{note}: {text}")

            near(results[0], y[:, own_outs])
            if returned:
                near(results[1], z if gathered else z[own])
            dweight = module.weight.main_grad if module.fuse_wgrad_accumulation else module.weight.grad
            near(dweight, alone.weight.grad[own_outs])
            near(module.bias.grad, alone.bias.grad[own_outs])
            near(own_leaf.grad, leaf.grad[own])
            for name in ("layer_norm_weight", "layer_norm_bias"):
                gradient = getattr(module, name).grad
                if sequence:
                    dist.all_reduce(gradient, group=group)
                near(gradient, getattr(alone, name).grad)


def fewer_gradients_wanted_by_one(group: Any, device: str) -> None:
    check_fewer_gradients(group, device, [None])


def fewer_gradients_wanted_by_one_in_float8(group: Any, device: str) -> None:
    check_fewer_gradients(
        group, device, [RowwiseScaling(), RowwiseScaling(high_precision_wgrad=True), Float8CurrentScaling()]
    )


def check_fewer_gradients(group: Any, device: str, recipes: list[Any]) -> None:
    """When the first of two ranks wants fewer gradients, those that are still wanted keep their bits.

    That rank wants fewer from its first call on, or only in a later call.
    """
    rank, rows, cols, outs = dist.get_rank(group), 24, 32, 64
    kinds = (
        {},
        ALL_Z,
        {"keep_normalized": True},
        {"delay_wgrad_compute": True},
        {"fuse_wgrad_accumulation": True},
        {"fuse_wgrad_accumulation": True, "delay_wgrad_compute": True},
        dict.fromkeys(OVERLAPS[:3], True),
        {"ub_overlap_rs_dgrad": True},
    )
    random = torch.Generator().manual_seed(rank)
    given = torch.randn(rows, cols + outs, generator=random).to(device)

    def step(module: LayerNormLinear, frozen: tuple[str, ...]) -> dict[str, Tensor | None]:
        for name, parameter in module.named_parameters():
            kind = "norm" if name.startswith("layer_norm") else name
            parameter.requires_grad_(kind not in frozen)
            parameter.grad, parameter.main_grad = None, torch.zeros_like(parameter)
        shard = given if not module.sequence_parallel else given.chunk(2)[rank]
        x = shard[:, :cols].clone().requires_grad_("x" not in frozen)
        results = module(x)
        results = results if isinstance(results, tuple) else (results,)
        upstream = [given[:, : outs // 2], given[:, :cols]]
        torch.autograd.backward(results, [dy[: len(y)] for y, dy in zip(results, upstream, strict=False)])
        if module.sequence_parallel or module.weight.requires_grad:
            module.backward_dw()
        gradients = {"x": x.grad} | {name: parameter.grad for name, parameter in module.named_parameters()}
        if module.fuse_wgrad_accumulation and module.weight.requires_grad:
            gradients["weight"] = module.weight.main_grad
        return {name: gradient for name, gradient in gradients.items() if gradient is not None}

    chosen = (("weight",), ("x",), ("norm",), ("x", "norm"), ("weight", "x", "norm"), NOTHING)
    with symmetric_memory(device):
        for recipe, options, sequence in itertools.product(recipes, kinds, (True, False)):
            case = {"parallel_mode": "column", "tp_group": group, "sequence_parallel": sequence, **options}
            torch.manual_seed(0)
            module = LayerNormLinear(cols, outs, EPS, device=device, **case)
            with autocast(recipe is not None, recipe=recipe):
                expected = step(module, ())
                for first, frozen in itertools.product((False, True), chosen):
                    own = frozen if rank == 0 else ()
                    if first:  # forgets what ranks wanted before
                        module.set_tensor_parallel_group(group)
                    gradients = step(module, own)
                    gone = {"layer_norm_weight", "layer_norm_bias"} if "norm" in own else set()
                    note = (recipe, options, sequence, first, own)
                    assert gradients.keys() == expected.keys() - gone - set(own), note
                    for name, gradient in gradients.items():
                        # On a GPU, a kernel that computes fewer gradients adds up in another order.
                        off = 1e-4 if own and device == "cuda" else 0
                        bounds = {"rtol": off, "atol": 10 * off}
                        assert_close(
                            gradient, expected[name], **bounds, msg=lambda text, where=(*note, name): f"{where}: {text}"
                        )


def gradients_that_differ(group: Any, device: str) -> None:
    """Ranks that want other gradients are refused under no_grad on one, in compiled code and with DTensors."""
    rank, x = dist.get_rank(group), torch.ones(2, COLS, dtype=torch.float64, device=device)
    phrase = "gradients must be enabled on every rank of the group or on none, as the backward pass of one rank waits"
    for sequence in (True, False):
        module = make(Case(sequence=sequence), group, device)
        with torch.set_grad_enabled(rank == 0):
            raises(ValueError, f"{phrase} for that of the others; got none on rank 1.", lambda: module(x))  # noqa: B023
        with torch.no_grad():
            expected = module(x)
        assert torch.equal(module(x), expected)
        with torch.set_grad_enabled(rank == 1), mock.patch.dict(os.environ, TORCH_DISTRIBUTED_DEBUG="DETAIL"):
            raises(ValueError, f"{phrase} for that of the others; got none on rank 0.", lambda: module(x))  # noqa: B023
    torch._dynamo.reset()
    linear_operators._compared.clear()
    alike = "must require gradients on every rank of the group alike; got others on rank 1 than on rank 0"
    module = make(Case(), group, device).requires_grad_(rank == 0)
    raises(ValueError, alike, lambda: torch.compile(module, backend="aot_eager", fullgraph=True)(x))
    module = LayerNormLinear(COLS, OUTS, device=device, params_dtype=torch.float64)
    parallelize_module(module, DeviceMesh.from_group(group, device), LayerNormColwiseParallel(input_layouts=Shard(0)))
    module.layer_norm_bias.requires_grad_(rank == 0)
    raises(ValueError, alike, lambda: module(x))


def attributes(group: Any, device: str) -> None:
    """Parameters keep the attributes that Megatron reads, through everything that makes new parameters."""

    def check(module: LayerNormLinear) -> None:
        assert (module.out_features, module.tp_size) == (OUTS // 2, 2)
        for name, parameter in module.named_parameters():
            if name.startswith("layer_norm"):
                assert parameter.sequence_parallel is True, name
            else:
                marks = (parameter.tensor_model_parallel, parameter.partition_dim, parameter.partition_stride)
                assert marks == (True, 0, 1), name

    module = make(Case(SPLIT), group, "meta")
    check(module)
    check(module.to_empty(device=device))
    module.reset_parameters()
    check(module)
    check(module.float())
    twin = copy.deepcopy(module)
    check(twin)
    assert twin.tp_group is group
    loaded = pickle.loads(pickle.dumps(module))
    check(loaded)
    assert loaded.tp_group is None
    stream = io.BytesIO()
    torch.save(module, stream)
    x = torch.ones(2, COLS, device=device)
    raises(RuntimeError, "Call set_tensor_parallel_group() before forward pass", lambda: loaded(x))
    loaded.set_tensor_parallel_group(group)
    assert_close(loaded(x), module(x))


def group_given_later(group: Any, device: str) -> None:
    case = CASES["as it is"]
    module = make(case, None, device, tp_size=2)
    x = torch.ones(2, COLS, dtype=torch.float64, device=device)
    raises(RuntimeError, "Tensor parallel group not initialized. Call set_tensor_parallel_group()", lambda: module(x))
    whole = Whole(case, 2)
    module.set_tensor_parallel_group(group)
    rank = dist.get_rank(group)
    y = run(module, case, whole.part(rank), False, device).results[0]
    assert_close(y.cpu(), whole.expected()[0][rank][0])


def no_communication(group: Any, device: str) -> None:
    """With parallel_mode=None each rank computes by itself, and only the norm's parameters are marked."""
    module = make(Case(options={"parallel_mode": None}), group, device)
    assert module.weight.shape == (OUTS, COLS)
    assert module.layer_norm_weight.sequence_parallel is True
    alone = LayerNormLinear(COLS, OUTS, EPS, device=device, params_dtype=torch.float64)
    alone.load_state_dict(module.state_dict())
    x = torch.randn(3 + dist.get_rank(group), COLS, dtype=torch.float64, device=device)  # a gather would fail
    assert torch.equal(module(x), alone(x))


def initialised_inside_the_tracker(group: Any, device: str) -> None:
    inside: list[tuple[bool, torch.Size]] = []
    forked = [False]

    class Tracker:
        @contextlib.contextmanager
        def fork(self):
            forked[0] = True
            yield
            forked[0] = False

    def init(weight: Tensor) -> None:
        inside.append((forked[0], weight.shape))

    make(Case(SPLIT), group, device, get_rng_state_tracker=Tracker, init_method=init)
    assert inside == [(True, (4, COLS)), (True, (8, COLS))]


def refused(group: Any, device: str) -> None:
    """Errors come before any communication, which no other rank would answer."""
    alone, case, rank = GROUPS[1], Case(), dist.get_rank(group)
    for given in (1, 2):
        assert make(case, group, device, tp_size=given).tp_size == 2
    raises(ValueError, "24 is not divisible by 16", lambda: make(case, None, device, tp_size=16))
    raises(
        RuntimeError,
        "must be a multiple of the number of ranks, 2; got 'a' of 3 rows",
        lambda: make(case, group, device, parameters_split={"a": 3, "b": 21}),
    )
    raises(
        ValueError,
        "delay_wgrad_compute=True",
        lambda: make(case, group, device, delay_wgrad_compute=True, ub_bulk_wgrad=True),
    )
    raises(
        ValueError,
        "must have tp_size=3 ranks; got one of 2",
        lambda: make(case, None, device, tp_size=3).set_tensor_parallel_group(group),
    )
    if rank == 0:
        raises(
            ValueError,
            "tp_size must be the number of ranks of tp_group, 2; got tp_size=4",
            lambda: make(case, group, device, tp_size=4),
        )
        raises(
            ValueError,
            "must have tp_size=2 ranks; got one of 1",
            lambda: make(case, None, device, tp_size=2).set_tensor_parallel_group(alone),
        )
    else:
        raises(ValueError, "must be a rank of the tensor-parallel group", lambda: make(case, alone, device))
    module = make(case, group, device)
    x = torch.ones(COLS, dtype=torch.float64, device=device)
    raises(RuntimeError, "must have an axis of rows", lambda: module(x))
    raises(RuntimeError, "first derivatives", lambda: torch.func.vmap(module)(x.expand(2, 2, COLS)))
    x = x.expand(2, COLS).clone().requires_grad_()
    raises(
        RuntimeError,
        "first derivatives alone; got create_graph=True",
        lambda: torch.autograd.grad(module(x).sum(), x, create_graph=True),
    )


def kept(group: Any, device: str) -> None:
    """The forward pass keeps this rank's x and statistics and the parameters, and z of all rows only if asked to."""
    for keep in (False, True):
        module = make(Case(), group, device, keep_normalized=keep)
        x = torch.ones(6, COLS, dtype=torch.float64, device=device, requires_grad=True)
        shapes = []
        with torch.autograd.graph.saved_tensors_hooks(lambda t, s=shapes: s.append(tuple(t.shape)), lambda t: t):
            module(x)
        expected = [(6, COLS), (OUTS // 2, COLS), (COLS,), (COLS,), (2, 6), *([(12, COLS)] if keep else [])]
        assert sorted(shapes) == sorted(expected), shapes


def calls_like_an_earlier_one(group: Any, device: str) -> None:
    """Calls like an earlier one have its results without its checks, of several modules in turn; others are checked."""
    options = ({}, Z, ALL_Z, SPLIT, {"keep_normalized": True}, {"zero_centered_gamma": True}, {"eps": 1e-3})
    cases = [Case(chosen, sequence=sequence) for chosen in options for sequence in (True, False)]
    modules = [make(case, group, device) for case in cases]

    def steps() -> list[Any]:
        passes = []
        for module, case in zip(modules, cases, strict=True):
            module.zero_grad()
            part = Whole(case, 2).part(dist.get_rank(group))
            with torch.no_grad():
                module(part.x.to(device).requires_grad_())
            passes.append(run(module, case, part, False, device))
        return passes

    repeats._calls.clear()  # forgets the calls of other cases
    expected = steps()
    unlike = [(3, torch.float64, True), (6, torch.float64, False), (6, torch.float32, True)]
    refusal = ValueError("LayerNormLinear: checked")
    with mock.patch.object(calls, "check", side_effect=refusal):
        assert_close(steps(), expected, rtol=0, atol=0)
        for rows, dtype, differentiated in unlike:
            module = copy.deepcopy(modules[0]).to(dtype).requires_grad_(differentiated)
            raises(ValueError, "checked", lambda: module(torch.ones(rows, COLS, dtype=dtype, device=device)))  # noqa: B023


def beside_a_dead_rank(group: Any, device: str) -> None:
    """The first rank, asked alone, raises torch.distributed's error: it neither waits for ever nor has a result."""
    module = LayerNormLinear(
        COLS, OUTS, tp_group=GROUPS[2], parallel_mode="column", sequence_parallel=True, device=device
    )
    try:
        module(torch.ones(2, COLS, device=device))
    except RuntimeError:
        return
    raise AssertionError("a rank is dead, and nothing was raised")


def operators(group: Any, device: str) -> None:
    """Schemas and fake results of the operators pass torch's own checks."""
    x, weight, bias, gamma, beta = (
        torch.randn(*shape, device=device) for shape in ((2, 3, 8), (4, 8), (4,), (8,), (8,))
    )
    for returned, keep, sequence in itertools.product(("nothing", "local", "gathered"), (False, True), (True, False)):
        if returned == "gathered" and not sequence:  # each rank has all of z anyway
            continue
        step = Step("layer_norm", 1e-5, torch.float32, keep, returned=returned, numbers=WIDE)
        ranks = Group(group.group_name, 2, sequence, False, *[False] * 4)
        options = linear_operators.flat(step, ranks, 0)
        forward = linear_operators.norm_linear_forward
        checked = ("test_schema", "test_faketensor")
        torch.library.opcheck(forward, (x, weight, bias, gamma, beta, *options), test_utils=checked)
        y, z, statistics, kept, _, _ = forward(x, weight, bias, gamma, beta, *options)
        dz = None if returned == "nothing" else torch.ones_like(z)
        for mask in ([True] * 5, [False, True, True, False, False], [True, False, False, True, False]):
            saved = (statistics, x, weight, gamma, beta, kept if keep else None, None)
            given = (torch.ones_like(y), dz, *saved, mask, *options)
            torch.library.opcheck(linear_operators.norm_linear_backward, given, test_utils=checked)


def rows_that_differ(group: Any, device: str) -> None:
    """Every rank raises ValueError at a module's first call, and with TORCH_DISTRIBUTED_DEBUG=DETAIL at each."""
    rank = dist.get_rank(group)
    for sequence in (True, False):
        module = make(Case(sequence=sequence), group, device)
        x = torch.ones(2 + rank, COLS, dtype=torch.float64, device=device)
        raises(ValueError, "rank 0: 2 x 8, torch.float64, rank 1: 3 x 8, torch.float64", lambda: module(x))  # noqa: B023
        module(x[:2])
    with mock.patch.dict(os.environ, TORCH_DISTRIBUTED_DEBUG="DETAIL"):
        raises(ValueError, "rank 0: 2 x 8, torch.float64, rank 1: 3 x 8", lambda: module(x))
    module = make(Case(), group, device)
    dtype = torch.float32 if rank else torch.float64
    module.to(dtype)
    raises(ValueError, "rank 1: 2 x 8, torch.float32", lambda: module(x[:2].to(dtype)))
    torch._dynamo.reset()
    compiled = torch.compile(make(Case(), group, device), backend="aot_eager", fullgraph=True)
    linear_operators._compared.clear()
    raises(ValueError, "rank 0: 2 x 8, torch.float64, rank 1: 3 x 8", lambda: compiled(x))


CHECKS = {
    check.__name__: check
    for check in (
        float8,
        fewer_gradients_wanted_by_one,
        fewer_gradients_wanted_by_one_in_float8,
        gradients_that_differ,
        attributes,
        group_given_later,
        no_communication,
        initialised_inside_the_tracker,
        refused,
        kept,
        calls_like_an_earlier_one,
        operators,
        rows_that_differ,
    )
}
