"""Check a call of a norm with its product, or know it from an earlier one, and run it as one step of autograd.

A call takes one of three ways, whatever its numbers and ranks:
- In eager mode it is an autograd.Function, or the forward pass alone if no gradient is wanted. A call like an earlier
  one is not checked again. With wide numbers on one rank it runs in C++ if that was compiled (_compiled_call).
- Under torch.compile and export it is one operator for each pass (operators.py). In a graph of single operators the
  compiler would compute the normalised tensor a second time in the forward pass, and keep that.
- Under functorch, for forward-mode derivatives and for subclasses of Tensor the norm and the product run by themselves,
  each with its own rules. This way is for wide numbers on one rank alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import count
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from ...operation import NAMED
from ..norm import checks, dispatch, launching, nodes, repeats
from ..norm.functional import FLOATING, PLAIN, autocast_dtype, norm, norm_with_statistics, nothing_else_listens
from ..norm.functional import given as given_tensors
from ..private import applied, in_forward_mode, nothing_listens, under_functorch
from . import operators
from .exchange import SUM
from .float8_arithmetic import cast_rows
from .parallel import ALONE, Ranks
from .planned import Planned, of_inputs
from .step import LOCAL, NOTHING, Inputs, Saved, Sink, Step, forward, gradients, norm_gradients, without_autocast
from .wide import WIDE, has_algorithm


class Layer(NamedTuple):
    """The options of a call, which together with the layouts of its tensors decide how it runs."""

    function: str  # in whose name errors are raised
    operation: str  # a name of cunorm.operation.NAMED
    eps: float
    keep_normalized: bool = False
    sm_margins: tuple[int, int, int] = (0, 0, 0)  # forward, backward, inference
    returned: str = LOCAL  # as in Step
    numbers: Any = WIDE
    ranks: Ranks = ALONE  # as they are before they have told each other which gradients they want


class Given(NamedTuple):
    """The objects of one call that do not decide how it runs."""

    parallel: Any = ALONE  # parallel.Alone or parallel.TensorParallel
    weights: Callable[..., Any] | None = None  # (weight, scheme, ...) -> the FP8 weight that a module keeps
    fp8_output: bool = False
    sink: Sink | None = None
    wants_statistics: bool = False


class Call(NamedTuple):
    """How a call runs, which follows from its Layer and the layouts of its tensors, without autocast."""

    step: Step
    wanted: int  # what this rank wants of the backward pass: bits of exchange.py
    differentiated: bool
    recipe: Any  # of the norm; None if each call looks for it again
    compiled: nodes.Call | None = None  # serves such a call in C++ (_compiled_call)
    planned: Planned | None = None  # serves few rows without gradients


NOTHING_GIVEN = Given()


def norm_linear(layer: tuple, inputs: Inputs, given: Given = NOTHING_GIVEN) -> tuple[Any, Tensor | None, Tensor | None]:
    """Return (y, z, statistics) of a Layer, or of its fields as a plain tuple.

    y is (..., out), or with `fp8_output` the pair (bytes, a scale for each row). z is what `layer.returned` says, and
    may be there without being asked for. statistics may be None unless they are wanted.
    """
    call = known(layer, inputs)
    return run_checked(layer, inputs, given) if call is None else run(call, inputs, given)


def run_checked(layer: tuple, inputs: Inputs, given: Given) -> tuple[Any, Tensor | None, Tensor | None]:
    """Run `norm_linear` of tensors that are not known."""
    function, operation, eps, keep_normalized, sm_margins, returned, numbers, ranks = layer
    x, weight, bias, ln_weight, ln_bias = inputs
    check(function, inputs, operation)
    cast = autocast_dtype(x)
    numbers.check(function, inputs, cast is not None)
    if type(eps) is not float:
        eps = checks.eps(function, eps, x)
    given.parallel.check_rows(function, x)
    weight_dtype, bias_dtype = weight.dtype, None if bias is None else bias.dtype
    inputs = numbers.read(inputs, cast)
    wanted = given.parallel.wanted_by(inputs)
    differentiated = torch.is_grad_enabled() and any(tensor is not None and tensor.requires_grad for tensor in inputs)
    _check_output(function, given.fp8_output, differentiated)
    margin, backward_margin, inference_margin = sm_margins
    margins = (margin if differentiated else inference_margin, backward_margin)
    dtypes = (weight_dtype, bias_dtype)
    step = Step(operation, eps, cast or x.dtype, bool(keep_normalized), *margins, returned, *dtypes, numbers)
    is_plain = all(tensor is None or type(tensor) in PLAIN for tensor in inputs)
    if not is_plain or under_functorch() or in_forward_mode():
        for limits in (numbers.limits, ranks.limits):
            # torch.export traces tensors of a class of its own, which the operator takes.
            if limits is not None and not torch.compiler.is_exporting():
                raise RuntimeError(
                    f"{function}: {limits.subject} is for plain tensors, and for first derivatives by backward(); got "
                    f"a subclass of Tensor, or a call under functorch or forward-mode differentiation.{limits.remedy}"
                )
        if numbers.limits is None and ranks.limits is None:
            return _in_steps(inputs, step, given.wants_statistics)
    if torch.compiler.is_compiling():
        return operators.norm_linear(*inputs, *operators.flat(step, ranks, wanted))[:3]
    recipe = numbers.recipe(x, ln_weight, ln_bias, step)
    if recipe is None and not differentiated and numbers is WIDE and ranks.alone:
        return _in_steps(inputs, step, given.wants_statistics)
    call = Call(step, wanted, differentiated, recipe)
    if cast is None and (recipe is not None or nothing_listens()):
        if recipe is not None and numbers is WIDE and ranks.alone:
            if differentiated:
                nodes.build_in_background()
            if not differentiated and step.returned == NOTHING:
                call = call._replace(planned=of_inputs(inputs, step))
            call = call._replace(compiled=_compiled_call(step, recipe, inputs))
        tensors = tuple(tensor for tensor in inputs if tensor is not None)
        repeats.remember_call(_key((*layer[:2], eps, *layer[3:]), inputs), tensors, call)
    with without_autocast(x.device.type):
        return run(call, inputs, given)


def _key(layer: tuple, inputs: Inputs) -> tuple:
    x, _, bias, ln_weight, ln_bias = inputs
    return layer, torch.is_grad_enabled(), x.shape, bias is None, ln_weight is None, ln_bias is None


_ALL_PRESENT = (False, False, False)  # the last three entries of a key: no tensor is None


def known(layer: tuple, inputs: Inputs) -> Call | None:
    """Return the Call that an earlier call with tensors like these has left (norm/repeats.py), or None."""
    if torch.compiler.is_compiling() or type(inputs[0]) not in PLAIN or type(layer[2]) not in (float, int):
        return None
    key = _key(layer, inputs)
    tensors = inputs if key[3:] == _ALL_PRESENT else tuple(tensor for tensor in inputs if tensor is not None)
    call = repeats.known_call(key, tensors)
    return call if call is not None and nothing_else_listens() else None


def run(call: Call, inputs: Inputs, given: Given) -> tuple[Any, Tensor | None, Tensor | None]:
    """Run `norm_linear` of tensors that are checked or known."""
    step, wanted, differentiated, recipe, compiled, planned = call
    parallel, _, fp8_output, sink, wants_statistics = given
    if planned is not None and not fp8_output:
        results = planned(inputs, wants_statistics)
        if results is not None:
            y, statistics = results
            return y, None, statistics
    if compiled is not None:
        if sink is None and not wants_statistics:
            results = compiled(*inputs)
            if results is not None:
                return *results, None
    elif recipe is not None:
        nodes.module()  # it may have been built since this call was described
    ranks = parallel.agreed(wanted, inputs[0], step.dtype)
    if fp8_output:
        _check_output("LayerNormLinear", fp8_output, differentiated)
    if differentiated or ranks.sums or ranks.gathers:
        # If no tensor of this rank requires a gradient the anchor does, so that this rank runs the step for the others.
        anchor = None if differentiated else inputs[0].new_empty(0).requires_grad_()
        if not ranks.alone and not ranks.gathers and not inputs[1].requires_grad:
            given = given._replace(sink=None)  # a frozen weight has a sink only if `backward_dw` is a collective
        return _apply(*inputs, anchor, call, ranks, given)
    if torch.is_grad_enabled():  # no_grad takes 2 us, also where it changes nothing
        with torch.no_grad():
            return _run_forward(call, inputs, given, ranks)
    return _run_forward(call, inputs, given, ranks)


def _run_forward(call: Call, inputs: Inputs, given: Given, ranks: Ranks) -> tuple[Any, Tensor | None, Tensor | None]:
    """Run `norm_linear` without gradients."""
    step, recipe = call.step, call.recipe
    _, cached_weights, fp8_output, _, wants_statistics = given
    weights = step.numbers.weights(inputs[1], False, False, cached_weights)
    y, z, statistics, _ = forward(inputs, weights, step, ranks, recipe, wants_statistics)
    if fp8_output:
        y8, scale, _, _ = cast_rows(y.view(-1, y.shape[-1]))
        y = y8.view(y.shape), scale.view(y.shape[:-1])
    return y, z, statistics


def _check_output(function: str, fp8_output: bool, differentiated: bool) -> None:
    if fp8_output and differentiated:
        raise ValueError(
            f"{function}: fp8_output=True needs a call without gradients, as numbers of 8 bits have none; got input or "
            "parameters that want one. Use torch.no_grad()."
        )


def _in_steps(inputs: Inputs, step: Step, wants_statistics: bool) -> tuple[Tensor, Tensor, Tensor | None]:
    """Run the norm and the product, each with its own derivatives."""
    x, weight, bias, ln_weight, ln_bias = inputs
    operation, eps, dtype, _, margin, backward_margin, *_ = step
    statistics = None
    if wants_statistics:
        z, statistics = norm_with_statistics(operation, x, x.shape[-1:], ln_weight, ln_bias, eps, dtype, margin)
    else:
        margins = {"forward": margin, "backward": backward_margin, "inference": margin}
        sm_margin = margin if margin == backward_margin else margins
        z = norm(operation, x, x.shape[-1:], ln_weight, ln_bias, eps, dtype, sm_margin)
    return F.linear(z, weight, bias), z, statistics


def check(function: str, inputs: Inputs, operation: str) -> None:
    """Check kinds, shapes and devices, which traced tensors have too."""
    x, weight, bias, ln_weight, ln_bias = inputs
    named = (("input", x), ("weight", weight), ("bias", bias), ("ln_weight", ln_weight), ("ln_bias", ln_bias))
    for name, tensor in named:
        if not isinstance(tensor, Tensor) and (tensor is not None or name in ("input", "weight")):
            raise TypeError(f"{function}: {name} must be a torch.Tensor; got {type(tensor).__name__}.")
    if weight.dim() != 2 or 0 in weight.shape:
        raise RuntimeError(
            f"{function}: weight must have shape (out, in), neither of them 0; got {tuple(weight.shape)}."
        )
    outs, cols = weight.shape
    if x.dim() == 0 or x.shape[-1] != cols:
        raise RuntimeError(
            f"{function}: the last axis of input must have the length {cols} of a row of weight; got input of shape "
            f"{tuple(x.shape)}."
        )
    for name, tensor, size in (("bias", bias, outs), ("ln_weight", ln_weight, cols), ("ln_bias", ln_bias, cols)):
        if tensor is not None and tensor.shape != (size,):
            raise RuntimeError(f"{function}: {name} must have shape ({size},); got {tuple(tensor.shape)}.")
    device = x.device
    for name, tensor in named[1:]:
        if tensor is not None and tensor.device != device:
            raise RuntimeError(
                f"{function}: {name} must be on the device of input, {device}; got {tensor.device}. Move one of them."
            )
    if ln_weight is None and operation != NAMED[operation].norm:
        raise ValueError(f"{function}: zero_centered_gamma=True needs ln_weight; got ln_weight=None.")
    if x.dtype not in FLOATING:
        raise NotImplementedError(
            f"{function}: input must have dtype {', '.join(map(str, FLOATING))}; got {x.dtype}. Convert it first."
        )


class _NormLinear(torch.autograd.Function):
    """Computes (y, z, statistics) in eager mode; z and statistics are None unless they are returned.

    With wide numbers on one rank it can be differentiated twice, as its backward pass is made of differentiable
    operators there.
    """

    @staticmethod
    def forward(ctx, *arguments):
        inputs, (_, call, ranks, given) = arguments[:5], arguments[5:]
        x, weight, _, ln_weight, ln_bias = inputs
        step, sink = call.step, given.sink
        wants_columns = bool((call.wanted | ranks.wanted) & SUM)
        weights = step.numbers.weights(weight, wants_columns, ctx.needs_input_grad[1], given.weights)
        y, z, statistics, saved_z = forward(inputs, weights, step, ranks, call.recipe)
        ctx.set_materialize_grads(False)
        _, _, columns, column_scale = weights
        ctx.save_for_backward(statistics, x, columns, ln_weight, ln_bias, saved_z, column_scale)
        ctx.call = step, ranks, sink, None if ranks.alone else y.shape
        if not given.wants_statistics:
            return y, z, None
        ctx.mark_non_differentiable(statistics)
        return y, z, statistics

    @staticmethod
    def backward(ctx, dy, dz, _):
        step, ranks, sink, shape = ctx.call
        if torch.is_grad_enabled() and (limits := step.numbers.limits or ranks.limits):
            raise RuntimeError(
                f"LayerNormLinear: {limits.where} there are first derivatives alone; got create_graph=True."
                f"{limits.remedy}"
            )
        saved = Saved(*ctx.saved_tensors)
        if dy is None and shape is not None:  # the other ranks wait for the products of this one
            dy = saved.x.new_zeros(shape, dtype=step.dtype)
        # A dispatch mode, or what else listens, sees a backward pass in FP8 as the operator.
        compute = gradients if step.numbers.scheme is None or sink is not None or nothing_listens() else _by_operator
        with without_autocast("cuda" if saved.x.is_cuda else saved.x.device.type):  # a device takes 0.6 us
            results = compute(dy, dz, saved, step, ranks, ctx.needs_input_grad[:5], sink)
        return *results, None, None, None, None


def _by_operator(dy, dz, saved: Saved, step: Step, ranks: Ranks, mask, _) -> list[Tensor | None]:
    """Return what `gradients` does, by the operator, which a dispatch mode sees."""
    results = operators.norm_linear_backward(dy, dz, *saved, list(mask), *operators.flat(step, ranks, ranks.wanted))
    return [result if wants else None for result, wants in zip(results, mask, strict=True)]


_apply = applied(_NormLinear)


def _compiled_call(step: Step, recipe: launching.Forward, inputs: Inputs) -> nodes.Call | None:
    """Describe the passes of calls of the five tensors to the C++ nodes (nodes.py); None if Python alone serves."""
    if step.sm_margin != step.backward_sm_margin:  # z is computed again by the same launch
        return None
    if has_algorithm(inputs[0], inputs[1]):  # C++ has torch's products alone
        return None
    x, weight, bias, ln_weight, ln_bias = inputs
    ln_bias_dtype = None if ln_bias is None else ln_bias.dtype
    present = tuple(tensor is not None for tensor in inputs)

    # The description outlives the call: these functions must not hold its tensors.
    def norm_backward(family: Any, saved: Any, eps: float, dz: Tensor, _: None, mask: Any) -> list[Tensor | None]:
        names, tensors = family.call.names, dict(zip(saved.names, saved.tensors, strict=True))
        wants = dict(zip(names, mask, strict=True))
        full_mask = tuple(wants.get(name, False) for name in ("x", "weight", "bias"))
        step_saved = Saved(saved.statistics, tensors["x"], None, tensors.get("weight"), None)
        dx, dweight, dbias = norm_gradients(dz, True, step_saved, step, full_mask)
        by_name = {"x": dx, "weight": dweight, "bias": None if dbias is None else dbias.to(ln_bias_dtype)}
        return [by_name[name] for name in names]

    def backward(
        incoming: Sequence[Tensor | None], statistics: Tensor, saved: Sequence[Tensor], bits: int
    ) -> list[Tensor | None]:
        (dy, dz), tensors, places = incoming, iter(saved), count()
        x, weight = next(tensors), next(tensors)
        ln_weight, ln_bias = (next(tensors) if is_present else None for is_present in present[3:])
        z = next(tensors) if step.keep_normalized else None
        mask = tuple(is_present and bool(bits >> next(places) & 1) for is_present in present)
        results = gradients(dy, dz, Saved(statistics, x, weight, ln_weight, ln_bias, z), step, ALONE, mask)
        return [gradient for gradient, is_present in zip(results, present, strict=True) if is_present]

    given, saved = given_tensors(x, ln_weight, ln_bias), ("x",) if ln_weight is None else ("x", "weight")
    norm_pass = dispatch.compiled_pass(recipe, given, (), step.eps, norm_backward, saved=saved, in_place=True)
    if norm_pass is None:
        return None
    dy = x.new_empty(x.numel() // x.shape[-1], len(weight))
    sums = None if bias is None else launching.column_sums_recipe(dy)
    if sums is not None and sums.plan is None:
        return None
    others = [tensor for tensor in (ln_weight, ln_bias) if tensor is not None]
    work = None if sums is None else nodes.Work(sums.plan, {"dbias": sums.gradients[0]})
    return nodes.linear_call(norm_pass, x, others, dy, work, step.keep_normalized, backward)
