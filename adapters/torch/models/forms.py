"""Find out what a norm computes by trying a copy of the module: for norms of transformers, diffusers and one's own.

The copy has the attributes of the module and random parameters. It is called on the CPU, in training and in evaluation
mode, on rows of very different magnitude, and its results are compared with the formulas that our kernels compute.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
import itertools
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from ...expression import sigmoid, silu
from ...fusion import Fused, fuse
from ...operation import name_of
from ..norm.functional import AUTOCAST_TO_FLOAT32, FLOATING, HALF
from ..private import parameters_of

PROBE_COLUMNS = 64  # the columns on which a norm without a weight is tried, which takes any number of them
PROBE_EPS = 0.25
FLOAT32 = (torch.float32, torch.float32)
ACTIVATIONS = {"silu": silu, "sigmoid": sigmoid}
Pair = tuple[torch.dtype, torch.dtype | None]  # the dtypes of x and weight
Dtypes = tuple[tuple[Pair, torch.dtype], ...]  # the dtype of y for each pair that the module does not refuse

OTHER = "computes something else than a LayerNorm or an RMSNorm over the last axis, gated or not"


class Form(NamedTuple):
    """The form of a norm: (x - mean(x)) / sqrt(var(x) + eps), or x / sqrt(mean(x²) + eps). It is
    multiplied by weight or 1 + weight, and bias is added.
    """

    operation: str  # a name of cunorm.operation.NAMED
    eps: str | float  # the name of the attribute that holds it, or its value where it stands in the method
    weight: bool
    bias: bool
    dtypes: Dtypes
    autocast: Dtypes  # where autocast on a GPU changes the dtype of y
    of_torch: bool  # it calls torch's own operator, instead of several


class GatedForm(NamedTuple):
    """The form of a gated norm: x / sqrt(mean(x²) + eps) * weight * activation(gate), or with `gate_first`
    the same norm of x * activation(gate) without the last factor.
    """

    activation: str
    gate_first: bool
    eps: str
    dtypes: Dtypes


def form_of(module: nn.Module) -> Form | GatedForm | str:
    """Return what a module computes, or say why it is none of these, in a clause whose subject is its class."""
    if any(True for _ in module.children()) or any(True for _ in module.buffers(recurse=False)):
        return "has submodules or buffers"
    try:
        # The trial changes no random state and does not depend on the default device and autocast of the caller.
        with (
            torch.no_grad(),
            torch.random.fork_rng(devices=[]),
            torch.device("cpu"),
            torch.autocast("cpu", enabled=False),
        ):
            return _obstacle(module) or _Trial(module).form() or OTHER
    except _OtherResultError:
        return OTHER
    except Exception as error:
        return f"raised {type(error).__name__} when a copy was tried on the CPU: {str(error).partition(chr(10))[0]}"


def _obstacle(module: nn.Module) -> str:
    """Say why a module cannot be tried; "" if it can."""
    parameters = dict(module.named_parameters(recurse=False))
    unknown = sorted(parameters.keys() - {"weight", "bias"})
    if unknown:
        return f"has the parameters {', '.join(unknown)}: only weight and bias are known"
    if any(parameter.dim() != 1 for parameter in parameters.values()):
        return "has a weight or bias of several axes"
    if _arguments(module) not in (1, 2):
        return f"has a forward of {_arguments(module)} arguments: only x, and a gate beside it, are known"
    return ""


def _arguments(module: nn.Module) -> int:
    return len(inspect.signature(type(module).forward).parameters) - 1  # without self


class _OtherResultError(Exception):
    """Raised if a module returns something else than a tensor of the shape of x, or changes its arguments in place."""


class _Formula(NamedTuple):
    """A formula that a module may compute."""

    centred: bool = False
    plus: bool = False  # times 1 + weight
    activation: str = ""
    gate_first: bool = False

    def __call__(self, x: Tensor, gate: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
        y = x.double()
        gated = getattr(nn.functional, self.activation)(gate.double()) if self.activation else 1.0
        if self.gate_first:
            y = y * gated
        if self.centred:
            y = y - y.mean(-1, keepdim=True)
        y = y / (y.square().mean(-1, keepdim=True) + eps).sqrt()
        if weight is not None:
            y = y * (weight.double() + self.plus)
        if not self.gate_first:
            y = y * gated
        return y if bias is None else y + bias.double()


class _Trial:
    """A copy of a module, without its parameters and hooks, and the tensors that it is tried on."""

    def __init__(self, module: nn.Module):
        self.forward, self.gated = type(module).forward, _arguments(module) == 2
        self.probe = type(module).__new__(type(module))
        nn.Module.__init__(self.probe)
        attributes = {name: value for name, value in vars(module).items() if name not in vars(self.probe)}
        vars(self.probe).update(copy.deepcopy(attributes))
        for name in parameters_of(module):
            self.probe.register_parameter(name, None)
        self.floats = [name for name, value in attributes.items() if type(value) is float]
        lengths = {name: len(parameter) for name, parameter in module.named_parameters(recurse=False)}
        shape = attributes.get("normalized_shape") or PROBE_COLUMNS
        # Without a weight, or if this rank has an empty part of it, an attribute says how many columns there are.
        columns = max(lengths.values(), default=0) or (shape if isinstance(shape, int) else shape[-1])
        generator = torch.Generator().manual_seed(0)
        self.x, self.gate = torch.randn(2, 2, 3, columns, generator=generator)
        self.x = (self.x + 0.5) * torch.tensor([[0.01, 16, 1], [0.1, 0, 4]])[..., None]
        weight, bias = 0.5 + torch.rand(columns, generator=generator), torch.randn(columns, generator=generator)
        self.weight = weight if "weight" in lengths else None
        self.bias = bias if "bias" in lengths else None
        self.of_torch = False  # as in Form

    def form(self) -> Form | GatedForm | str | None:
        """Return the form of the module, a reason why it is left, or None for something else.

        Each float among the attributes is tried as eps, by a value that changes the results. If none is, eps stands in
        the method and is measured.
        """
        formulas = self._formulas()
        for name in self.floats:
            own, vars(self.probe)[name] = vars(self.probe)[name], PROBE_EPS
            form = self._form(formulas, PROBE_EPS, name)
            if form is not None:
                return form
            vars(self.probe)[name] = own
        return None if self.gated else self._form(formulas, self._measured_eps(), "")

    def _formulas(self) -> list[_Formula]:
        if self.gated:
            gated = itertools.product(ACTIVATIONS, (False, True))
            known = self.weight is not None and self.bias is None
            return [_Formula(False, False, *options) for options in gated] if known else []
        centred = (False, True) if self.bias is None else (True,)
        plus = (False,) if self.weight is None else (False, True)
        return [_Formula(*options) for options in itertools.product(centred, plus)]

    def _form(self, formulas: list[_Formula], eps: float, name: str) -> Form | GatedForm | str | None:
        formula = next((candidate for candidate in formulas if self._computes(candidate, eps)), None)
        if formula is None:
            return None
        dtypes, changed = {}, {}
        weight_dtypes = FLOATING if self.weight is not None or self.bias is not None else (None,)
        for pair in itertools.product(FLOATING, weight_dtypes):
            try:
                y = self._called(self.x, self.gate, pair)
            except RuntimeError:  # the module refuses such dtypes
                continue
            if y.dtype not in FLOATING or not self._agrees(y, formula, eps, self.x, self.gate, pair):
                return None
            dtypes[pair] = y.dtype
            autocast = {self._under_autocast(dtype, pair) for dtype in HALF}
            if len(autocast) > 1:
                return "has a result of autocast's dtype, where autocast is on"
            if autocast != {y.dtype}:
                changed[pair] = autocast.pop()
        if self.gated:
            return None if changed else GatedForm(formula.activation, formula.gate_first, name, (*dtypes.items(),))
        operation = name_of("layer_norm" if formula.centred else "rms_norm", formula.plus)
        has = self.weight is not None, self.bias is not None
        return Form(operation, name or eps, *has, (*dtypes.items(),), (*changed.items(),), self.of_torch)

    def _computes(self, formula: _Formula, eps: float) -> bool:
        """Say whether the module computes a formula, in training and in evaluation mode.

        Tensors of two and of four axes, and with twice the columns, must give the same unless the module refuses them.
        """
        pair = torch.stack([self.x, self.gate])
        variants = [pair[:, 0], torch.stack([pair, -2 * pair], 3)]
        if self.weight is None and self.bias is None:
            variants.append(torch.cat([pair, -2 * pair], -1))
        for x, gate in variants:
            with contextlib.suppress(RuntimeError, ValueError, IndexError, TypeError):
                if not self._agrees(self._called(x, gate), formula, eps, x, gate):
                    return False
        for self.probe.training in (True, False):
            if not self._agrees(self._called(self.x, self.gate), formula, eps, self.x, self.gate):
                return False
        return True

    def _called(self, x: Tensor, gate: Tensor, pair: Pair = FLOAT32) -> Tensor:
        """Call the module on tensors of these dtypes and return y."""
        for name, value in (("weight", self.weight), ("bias", self.bias)):
            if value is not None:
                self.probe.register_parameter(name, nn.Parameter(value.to(pair[1]), requires_grad=False))
        inputs = [tensor.to(pair[0], copy=True) for tensor in (x, gate)[: 1 + self.gated]]
        y = self.forward(self.probe, *inputs)
        changed = not all(map(torch.equal, inputs, (x.to(pair[0]), gate.to(pair[0]))))
        if changed or not isinstance(y, Tensor) or y.shape != x.shape:
            raise _OtherResultError
        return y

    def _agrees(self, y: Tensor, formula: _Formula, eps: float, x: Tensor, gate: Tensor, pair: Pair = FLOAT32) -> bool:
        """Say whether y equals the formula to a few roundings of the dtypes, relative to the largest entry of a row."""
        parameters = (None if vector is None else vector.to(pair[1]) for vector in (self.weight, self.bias))
        expected = formula(x.to(pair[0]), gate.to(pair[0]), *parameters, eps)
        rounding = max(torch.finfo(dtype).eps for dtype in (*pair, y.dtype) if dtype is not None)
        tolerance = max(8 * rounding, 1e-5) * expected.abs().amax(-1, keepdim=True)
        return bool(((y.double() - expected).abs() <= tolerance).all())

    def _under_autocast(self, dtype: torch.dtype, pair: Pair) -> torch.dtype:
        """Return the dtype of y under autocast on a GPU."""
        with AutocastOfCuda(dtype) as mode:
            y = self._called(self.x, self.gate, pair)
        self.of_torch |= mode.of_torch
        return y.dtype

    def _measured_eps(self) -> float:
        """Measure eps on a row v with mean 0.

        y of s * v, divided by y of a much larger row, is 1 / sqrt(1 + eps / mean((s * v)²)).
        """
        v = self.x[1, 2] - self.x[1, 2].mean()
        bias, self.bias = self.bias, None if self.bias is None else torch.zeros_like(self.bias)
        small, large = self._called(torch.stack([v * 1e-6, v * 1e3])[None], self.gate)[0]
        self.bias = bias
        eps = float(((large / small).square() - 1).median() * (v * 1e-6).square().mean())
        return float(f"{eps:.5g}") if eps > 1e-16 else 0.0


class AutocastOfCuda(TorchFunctionMode):
    """Apply the autocast of a GPU to tensors on the CPU: the functions of FLOAT32 are computed in float32.

    Matrix products, which autocast computes in 16 bits, do not occur in a norm.
    """

    KINDS = ("cpu", "cuda")  # a module may look at either, or turn it off
    FLOAT32 = frozenset(
        [
            *("linalg_vector_norm", "norm", "pow", "prod", "reciprocal", "rsqrt", "sum"),
            *("square", "normalize"),  # they call functions of this list
            *(name for name, to_float32 in AUTOCAST_TO_FLOAT32.items() if to_float32),
        ]
    )

    def __init__(self, dtype: torch.dtype):
        super().__init__()
        self.dtype = dtype
        self.of_torch = False

    def __enter__(self):
        self.before = [(kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in self.KINDS]
        self._set([(kind, True, self.dtype) for kind in self.KINDS])
        return super().__enter__()

    def __exit__(self, *error):
        self._set(self.before)
        return super().__exit__(*error)

    def _set(self, states: list[tuple[str, bool, torch.dtype]]) -> None:
        for kind, enabled, dtype in states:
            torch.set_autocast_enabled(kind, enabled)
            torch.set_autocast_dtype(kind, dtype)

    def __torch_function__(self, func, types, args=(), kwargs=None):
        def float32(value: Any) -> Any:
            return value.float() if isinstance(value, Tensor) and value.dtype in HALF else value

        name = getattr(func, "__name__", "").strip("_")
        self.of_torch |= name in AUTOCAST_TO_FLOAT32
        if name in self.FLOAT32 and all(map(torch.is_autocast_enabled, self.KINDS)):
            args = [float32(value) for value in args]
            kwargs = {name: float32(value) for name, value in (kwargs or {}).items()}
        return func(*args, **(kwargs or {}))


@functools.cache
def gated_norm(
    activation: str, gate_first: bool = False, x: torch.dtype = torch.float32, dtype: torch.dtype | None = None
) -> Fused:
    """Return a gated norm of hidden_states, gate and weight, for an input of the dtype `x`.

    y has `dtype`, by default that of the input. With `gate_first` the product of input and gate is not rounded.
    """
    function = ACTIVATIONS[activation]
    name = None if dtype is None else str(dtype).removeprefix("torch.")
    if not gate_first:
        return fuse("rms_norm", epilogue=lambda xhat, gate, weight: xhat * weight * function(gate), dtype=name)
    return fuse(
        "rms_norm",
        prologue=lambda x, gate: x * function(gate),
        epilogue=lambda xhat, weight: xhat * weight,
        dtype=name,
        s_dtype="float64" if x is torch.float64 else "float32",
    )
