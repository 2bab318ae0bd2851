"""Choose how an operation of tensors is run.

- Plain CUDA tensors in eager mode are launched directly, through an autograd.Function if a gradient is wanted, or
  through the same in C++ (nodes.py).
- CUDA tensors under torch.compile, export, a dispatch mode or in a subclass such as FakeTensor go to the operators; so
  do plain norms of them under functorch, and whatever is compiled.
- Other devices, forward-mode derivatives and functorch use formulas.py. A plain norm on the CPU that is differentiated
  uses torch's own kernels in both passes.

The rows of a DTensor are dispatched in this way on each device.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...call import broadcasting
from ...call.recipe import scalars_of
from ...plan.steps import Plan
from ..private import applied, in_forward_mode, is_batched, nothing_else_listens, nothing_listens, under_functorch
from . import calls, checks, formulas, launching, nodes, operators, repeats
from .calls import Call, Family
from .launching import Saved

PLAIN = (Tensor, torch.nn.Parameter)

# Looked up once, as an attribute of a module takes time in every call.
compiling = torch.compiler.is_compiling
grad_enabled = torch.is_grad_enabled


class Known(NamedTuple):
    """What follows for a call from its form, the layouts of its tensors and which of them require a gradient."""

    recipe: launching.Forward
    numbers: Sequence[float]
    eps: float
    differentiable: bool  # some tensor requires a gradient
    saved: tuple[str, ...]  # the names of what the backward pass reads
    places: tuple[int, ...]  # the places of `saved` among the tensors and then the results
    wants_statistics: bool = False  # they are returned after the results
    compiled: Callable[..., tuple[Tensor, ...] | None] | None = None  # serves such a call in C++


def run(
    call: Call, tensors: Sequence[Tensor], numbers: Sequence[float], eps: float, wants_statistics: bool
) -> tuple[Sequence[Tensor], Tensor | None]:
    """Return (results in the order of `returns`, statistics as formulas.py has them, None unless wanted).

    `tensors` are those of Call.names, and checked to be of the type Tensor; `numbers` are those of Call.numbers.
    """
    if compiling():
        # ONNX does not know our operators, and in a graph functorch's transforms cannot differentiate one.
        affine = call.affine and (not tensors[0].is_cuda or under_functorch() or in_forward_mode())
        if affine or torch.onnx.is_in_onnx_export():
            return by_formulas(call, tensors, numbers, eps, wants_statistics)
        return by_operator(call, tensors, numbers, eps, wants_statistics)
    if not wants_statistics:
        key, tensors = (tensors[0].shape, call, eps, *numbers), tuple(tensors)
        known = repeats.known_call(key, tensors) or of_other_rows(key, tensors)
        if known is not None and nothing_else_listens():
            return run_known(known, tensors), None
    if at_once(tensors):
        if not wants_statistics:
            return run_new((tensors[0].shape, call, eps, *numbers), call, tensors, numbers, eps), None
        known = _described(call, tensors, numbers, eps)._replace(wants_statistics=True)
        if not (known.differentiable and grad_enabled()):
            return launching.forward_by(known.recipe, tensors, numbers, eps, True)
        *results, statistics = _apply(known, *tensors)
        return results, statistics
    if "torch.distributed.tensor" in sys.modules:  # else no tensor can be a DTensor
        from . import sharding

        if isinstance(tensors[0], sharding.DTensor):
            return sharding.run(run, call, tensors, numbers, eps, wants_statistics)
    if not call.affine:  # functional.py has checked plain norms
        layouts = launching.layouts_of(call, tensors)
        broadcasting.check_operands(call.function, layouts.pop("x"), layouts, demanded=call.demanded)
    first, device = tensors[0], tensors[0].device.type
    if in_forward_mode() or (first.is_cuda and torch.onnx.is_in_onnx_export()):
        return by_formulas(call, tensors, numbers, eps, wants_statistics)
    if call.affine and device == "cpu":
        plain = all(type(tensor) in PLAIN for tensor in tensors) and nothing_listens()
        if plain and operators.has_own_kernel(call, first, tensors[1:]):
            *results, statistics = _apply_on_cpu(call, eps, *tensors)
            return results, statistics if wants_statistics else None
    elif not first.is_cuda or (under_functorch() and not call.affine):
        return by_formulas(call, tensors, numbers, eps, wants_statistics)
    return by_operator(call, tensors, numbers, eps, wants_statistics)


def run_new(
    key: tuple[Hashable, ...], call: Call, tensors: Sequence[Tensor], numbers: Sequence[float], eps: float
) -> Sequence[Tensor]:
    """Run a call of plain CUDA tensors, and remember what follows for calls like it by `key`, the shape of x first."""
    known = _described(call, tensors, numbers, eps)
    forward, _, inference = call.sm_margins
    if forward == inference:  # C++ has one margin for both, and repeats.py does not ask whether autograd is on
        known = _remembered(key, tensors, known)
        if launching.serves_any_rows(known.recipe):
            repeats.remember_form(key[1:], tuple(tensors), known)
    return run_known(known, tensors)


def _remembered(key: tuple[Hashable, ...], tensors: Sequence[Tensor], known: Known) -> Known:
    """Let `repeats.known_call` find what is known of a call, in C++ too."""
    described = compiled_pass(known.recipe, tensors, known.numbers, known.eps, gradients_of)
    known = known._replace(compiled=nodes.call_of(described))
    repeats.remember_call(key, tensors, known)
    return known


def of_other_rows(key: tuple[Hashable, ...], tensors: tuple[Tensor, ...]) -> Known | None:
    """Return what is known of a call if an earlier one differs from it in its number of rows alone; else None.

    A second call with as many rows is remembered like any other. The first one is not, as there may be no second.
    """
    like = repeats.known_form(key[1:], tensors)
    if like is None:
        return None
    first = _first_calls.pop(key, None)
    if first is not None and first[0] is like:
        return _remembered(key, tensors, first[1])
    known = like._replace(recipe=launching.forward_of_rows(like.recipe, key[0]), compiled=None)
    return repeats.keep(_first_calls, key, (like, known))[1]


_first_calls: dict[Hashable, tuple[Known, Known]] = {}  # a call of other rows, and what follows for it


def _described(call: Call, tensors: Sequence[Tensor], numbers: Sequence[float], eps: float) -> Known:
    """Return what follows for calls like this one of plain CUDA tensors, without C++."""
    mask = tuple(tensor.requires_grad for tensor in tensors)
    forward, _, inference = call.sm_margins
    recipe = launching.recipe_of(call, tensors, forward if any(mask) and grad_enabled() else inference)
    names, saved = (*call.names, *call.operation.returns), call.saved(call.wanted(mask))
    return Known(recipe, numbers, eps, any(mask), saved, tuple(map(names.index, saved)))


def compiled_pass(
    recipe: launching.Forward,
    tensors: Sequence[Tensor],
    numbers: Sequence[float],
    eps: float,
    gradients: Callable[..., Sequence[Tensor | None]],
    *,
    saved: tuple[str, ...] | None = None,
    in_place: bool = False,
) -> Any:
    """Describe a pass for tensors like these to nodes.py; return None if Python alone serves them.

    `gradients` is `gradients_of`, or what does the same. `saved` are the names of what is saved, by default of what a
    backward pass reads. With `in_place` dx may take the memory of dy.
    """
    if recipe.plan is None or recipe.copies or any(tensor.data_ptr() % 16 for tensor in tensors):
        return None
    family = recipe.family
    call = family.call
    returns = call.operation.returns
    names = call.saved(call.wanted(tuple(tensor.requires_grad for tensor in tensors))) if saved is None else saved
    by_name = dict(zip(call.numbers, numbers, strict=True))

    # The description outlives the call: these functions must not hold its tensors.
    def backward(
        norm_pass: Any, incoming: Sequence[Any], statistics: Tensor, tensors: Sequence[Tensor], bits: int
    ) -> Any:
        incoming_by_name = dict(zip(returns, incoming, strict=True))
        dy, ds = incoming_by_name.get("y"), incoming_by_name.get("s")
        mask = tuple(bool(bits >> place & 1) for place in range(len(call.names)))
        saved_tensors = Saved(names, tensors, numbers, statistics)
        are_launchable = all(gradient is None or launchable(gradient) for gradient in incoming)
        if are_launchable and add(norm_pass, dy, ds, saved_tensors, bits, mask):
            return None
        return gradients(family, saved_tensors, eps, dy, ds, mask)

    def add(norm_pass: Any, dy: Any, ds: Any, saved_tensors: Saved, bits: int, mask: tuple[bool, ...]) -> bool:
        wanted = call.wanted(mask)
        through = calls.given_through(family, wanted, dy)
        computed = tuple(name for name in wanted if name not in through)
        if not computed:
            return False
        recipe = launching.backward_recipe_of(family, saved_tensors, dy, ds, computed)
        if recipe.plan is None or recipe.copies or recipe.sums or recipe.zeros is not None:
            return False
        into_dy = in_place and launching.takes_dx(dy, recipe)
        results = dict(zip(recipe.written, recipe.gradients, strict=True))
        if into_dy:
            del results["dx"]
        written, is_dy = tuple(results), -2 - returns.index("y")
        places = dict.fromkeys(call.names, -1) | dict.fromkeys(through, is_dy)
        for name, place in zip(computed, recipe.places, strict=True):
            into = recipe.written[place]
            places[name] = written.index(into) if into in results else is_dy
        incoming = {f"d{name}": {"y": dy, "s": ds}[name] for name in returns}
        tensors = dict(zip(names, saved_tensors.tensors, strict=True))
        work = nodes.Work(recipe.plan, results, recipe.rstd_offset, scalars(recipe.plan, by_name))
        statistics = saved_tensors.statistics
        return nodes.add_backward(norm_pass, work, incoming, statistics, tensors, bits, (*places.values(),), into_dy)

    def scalars(plan: Plan, numbers_by_name: dict[str, float]) -> dict[str, float]:
        return dict(zip(plan.problem.scalars, scalars_of(plan, numbers_by_name), strict=True))

    results = dict(zip(returns, recipe.results, strict=True))
    work = nodes.Work(recipe.plan, results, recipe.rstd_offset, scalars(recipe.plan, by_name | {"eps": eps}))
    named_tensors = dict(zip(call.names, tensors, strict=True))
    return nodes.forward_pass(work, named_tensors, recipe.statistics, names, backward)


def run_known(known: Known, tensors: Sequence[Tensor]) -> Sequence[Tensor]:
    """Run a call of which everything is known and return the results."""
    recipe, numbers, eps, differentiable, _, _, _, compiled = known
    if compiled is None:
        nodes.module()  # it may have been built since this call was described
    elif (results := compiled(*tensors)) is not None:
        return results
    if differentiable and grad_enabled():
        nodes.build_in_background()
        results = _apply(known, *tensors)
        return (results,) if type(results) is Tensor else results
    return launching.forward_by(recipe, tensors, numbers, eps, False)[0]


def at_once(tensors: Sequence[Tensor]) -> bool:
    """Say whether these are plain CUDA tensors, and no mode or hook is active that a direct launch would bypass."""
    for tensor in tensors:
        if type(tensor) not in PLAIN or not tensor.is_cuda or tensor.is_neg():
            return False
        # A seed is int64; the launch refuses any other tensor of that dtype.
        if tensor.layout is not torch.strided or not (tensor.is_floating_point() or tensor.dtype is torch.int64):
            return False
    return nothing_listens()


def launchable(gradient: Tensor) -> bool:
    """Say whether a backward pass for this gradient can be launched directly; it is not differentiated again then."""
    return (
        type(gradient) is Tensor
        and gradient.is_cuda
        and not grad_enabled()
        and nothing_listens()
        and not gradient.is_neg()
        and not is_batched(gradient)
    )


class _Norm(torch.autograd.Function):
    """The autograd.Function of operations on plain CUDA tensors in eager mode."""

    @staticmethod
    def forward(ctx, known, *tensors):
        recipe, numbers, eps, _, _, places, wants_statistics, _ = known
        results, statistics = launching.forward_by(recipe, tensors, numbers, eps, True)
        candidates, saved = (*tensors, *results), [statistics]
        for place in places:
            saved.append(candidates[place])
        ctx.save_for_backward(*saved)  # in the order of nodes_autograd.h, which a checkpoint may use to recompute
        ctx.known = known
        if len(results) == 1 and not wants_statistics:
            return results[0]  # a tuple takes longer
        ctx.set_materialize_grads(False)
        if not wants_statistics:
            return tuple(results)
        ctx.mark_non_differentiable(statistics)
        return *results, statistics

    @staticmethod
    def backward(ctx, *gradients):
        recipe, numbers, eps, _, names, *_ = ctx.known
        statistics, *tensors = ctx.saved_tensors
        family, dy, ds = recipe.family, gradients[0], None
        if recipe.written != ("y",):
            # With statistics there is one more gradient, which is None.
            by_name = dict(zip(recipe.written, gradients, strict=False))
            dy, ds = by_name["y"], by_name["s"]
        saved = Saved(names, tensors, numbers, statistics)
        return None, *gradients_of(family, saved, eps, dy, ds, ctx.needs_input_grad[1:])


def gradients_of(
    family: Family, saved: Saved, eps: float, dy: Tensor | None, ds: Tensor | None, mask: tuple[bool, ...]
) -> Sequence[Tensor | None]:
    """Return the gradients of the tensors of a call, None where `mask` is False."""
    call = family.call
    if dy is None and ds is None:
        return [None] * len(call.names)
    wanted = computed = call.masks.get(mask) or call.wanted(mask)
    by_name: dict[str, Tensor] = {}
    if family.through:
        by_name = calls.given_through(family, wanted, dy)
        computed = tuple(name for name in wanted if name not in by_name)
    results: Sequence[Tensor] = ()
    if computed:
        recipe = launching.known_backward(family, saved, dy, ds, computed)
        if recipe is None or grad_enabled() or not nothing_else_listens():
            if not all(gradient is None or launchable(gradient) for gradient in (dy, ds)):
                return _through_torch(family, saved, eps, dy, ds, mask)
            recipe = launching.new_backward(family, saved, dy, ds, computed)
        results = launching.backward_by(recipe, saved, dy, ds)
    elif not launchable(dy):
        return _through_torch(family, saved, eps, dy, ds, mask)
    if computed == call.names:
        return results
    by_name.update(zip(computed, results, strict=True))
    return [by_name.get(name) for name in call.names]


def _through_torch(family: Family, saved: Saved, eps: float, dy, ds, mask: tuple[bool, ...]):
    """Run the backward pass by the operators, or for second derivatives by torch's own."""
    call, layouts, *_ = family
    by_name = dict(zip(saved.names, saved.tensors, strict=True))
    dtypes = [layouts[name].dtype for name in call.names]
    # A tensor that was not saved is not read: only its shape counts.
    tensors = [
        by_name[name] if name in by_name else saved.statistics.new_empty(()).expand(layouts[name].shape)
        for name in call.names
    ]
    options = operators.backward_options(call, saved.numbers, eps, dtypes, mask)
    return operators.gradients(call, options, dy, ds, tensors, by_name.get("s"), saved.statistics)


def affine_gradients(
    name: str,
    dy: Tensor,
    x: Tensor,
    statistics: Tensor,
    weight: Tensor | None,
    eps: float,
    mask: tuple[bool, bool, bool],
    sm_margin: int,
    *,
    in_place: bool = False,
    dx_out: Tensor | None = None,
    bias_dtype: torch.dtype | None = None,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Return the gradients of x, weight and bias of a plain norm, by its name in NAMED; None where `mask` is False.

    They are differentiable if autograd is on. dbias has `bias_dtype`; None: the dtype of weight, else of x. With
    `in_place` dx may take the memory of dy. With `dx_out` dx is written there, and the tensors must be launchable.
    """
    family = calls.affine_family(name, x, weight, sm_margin, bias_dtype)
    saved = Saved(*((("x",), (x,)) if weight is None else (("x", "weight"), (x, weight))), (), statistics)
    wanted = tuple(operand for operand, wants in zip(("x", "weight", "bias"), mask, strict=True) if wants)
    if dx_out is not None:
        recipe = launching.backward_recipe_of(family, saved, dy, None, wanted, dx_out)
    else:
        recipe = launching.known_backward(family, saved, dy, None, wanted)
        if recipe is None or grad_enabled() or not nothing_else_listens():
            if not (launchable(dy) and at_once(saved.tensors)):
                call = calls.affine_call(name, x, x, x.dtype, (sm_margin,) * 3)
                of_weight = x.dtype if weight is None else weight.dtype
                dtypes = (x.dtype, of_weight, bias_dtype or of_weight)
                return tuple(_affine_through_torch(call, eps, dy, x, weight, statistics, dtypes, mask))
            recipe = launching.new_backward(family, saved, dy, None, wanted)
    remaining = iter(launching.backward_by(recipe, saved, dy, None, in_place, dx_out))
    dx, dweight, dbias = (next(remaining) if wants else None for wants in mask)
    return dx, dweight, dbias


def _affine_through_torch(call: Call, eps: float, dy, x, weight, statistics, dtypes, mask) -> list[Tensor | None]:
    """Run the backward pass of a plain norm by the operators, or for second derivatives by torch's own.

    `dtypes` are those of the tensors of the call, of which the bias is not given, as only its shape counts.
    """
    row = x.new_ones(()).expand(x.shape[-1:])
    by_name = {"x": x, "weight": row if weight is None else weight, "bias": row}
    options = operators.backward_options(call, (), eps, [checks.dtype_name(dtype) for dtype in dtypes], mask)
    tensors = [by_name[name] for name in call.names]
    return operators.gradients(call, options, dy, None, tensors, None, statistics)


class _NormOnCpu(torch.autograd.Function):
    """The autograd.Function of plain norms of plain tensors on the CPU in eager mode."""

    @staticmethod
    def forward(ctx, call, eps, x, *operands):
        weight, bias = operators.weight_and_bias(call.names[1:], operands)
        dtype = x.dtype if call.dtype is None else getattr(torch, call.dtype)
        y, statistics = operators.forward_by_torch(call.affine, x, weight, bias, eps, dtype)
        ctx.save_for_backward(x, statistics, weight)
        ctx.mark_non_differentiable(statistics)
        ctx.set_materialize_grads(False)
        ctx.call = call, eps, [tensor.dtype for tensor in (x, *operands)]
        return y, statistics

    @staticmethod
    def backward(ctx, dy, _):
        x, statistics, weight = ctx.saved_tensors
        (call, eps, dtypes), mask = ctx.call, ctx.needs_input_grad[2:]
        if dy is None:
            return None, None, *[None] * len(mask)
        if type(dy) is Tensor and not grad_enabled() and nothing_listens() and not is_batched(dy):
            by_name = operators.backward_by_torch(call.affine, dy, x, statistics, weight, call.wanted(mask))
            gradients = [
                by_name[name].to(dtype) if name in by_name else None
                for name, dtype in zip(call.names, dtypes, strict=True)
            ]
        else:
            gradients = _affine_through_torch(call, eps, dy, x, weight, statistics, dtypes, mask)
        return None, None, *gradients


_apply = applied(_Norm)
_apply_on_cpu = applied(_NormOnCpu)


def by_operator(
    call: Call, tensors: Sequence[Tensor], numbers: Sequence[float], eps: float, wants_statistics: bool
) -> tuple[list[Tensor], Tensor | None]:
    """Do what `run` does, by the operators."""
    x, *operands = tensors
    differentiated = under_functorch() or operators.wants_gradient(*tensors)
    dtype = checks.dtype_name(x.dtype)
    options = operators.forward_options(call, numbers, eps, dtype, wants_statistics, differentiated)
    if compiling():
        y, s, statistics = operators.fused_norm(x, operands, *options)
    else:
        y, s, statistics = operators.Norm.apply(x, options, *operands)
    by_name = {"y": y, "s": s}
    return [by_name[name] for name in call.operation.returns], statistics if wants_statistics else None


def by_formulas(
    call: Call, tensors: Sequence[Tensor], numbers: Sequence[float], eps: float, wants_statistics: bool
) -> tuple[list[Tensor], Tensor | None]:
    """Do what `run` does, by torch's own operators, with autograd's derivatives."""
    x, *operands = tensors
    if call.affine:
        y = formulas.norm(call.affine, x, *operators.weight_and_bias(call.names[1:], operands), eps)
        y = y.to(x.dtype if call.dtype is None else getattr(torch, call.dtype))
        if not wants_statistics:
            return [y], None
        rows = x.detach().to(formulas.compute_dtype(x))
        return [y], formulas.statistics_of(call.operation.norm, rows, eps)
    values = operators.values_of(call, tensors, numbers)
    dtype, s_dtype = (x.dtype if name is None else getattr(torch, name) for name in (call.dtype, call.s_dtype))
    results, statistics = formulas.forward(call.operation, values, eps, dtype, s_dtype)
    return [results[name] for name in call.operation.returns], statistics.detach() if wants_statistics else None
