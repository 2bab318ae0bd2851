"""`fuse` makes one operation of a norm and of what stands before and after it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from . import norm_add_norm
from .call import checks
from .call.backend import CallOptions, backend_of
from .call.broadcasting import Kinds
from .call.store import Float8Store, store_of
from .expression import substitute, trace
from .expression.grammar import parse
from .expression.value import Expression
from .operation import NORMS, SEED, Operation, added_after

EPS = {"layer_norm": 1e-5, "rms_norm": 1e-6}

# Names that an operand cannot have: those of a call's arguments, and of the arrays that its passes make themselves. All
# other names inside are no identifiers, and texts of kernels know operands by their place.
OF_THE_CALL = ("x", "xhat", "y", "s", "dx", "dxhat", "dy", "ds", "mean", "rstd", "eps", "out", "sm_margin")
OF_THE_CALL += ("dtype", "granularity", "y_scale", "y8", "y8_scale")


@dataclass(frozen=True, eq=False, repr=False)
class Saved:
    """The arrays that `forward` of an operation saves for its `backward` alone."""

    fused: Fused
    x: Any
    operands: dict[str, Any]
    s: Any
    statistics: dict[str, Any]
    shapes: dict[str, tuple[int, ...]]  # as the caller has x and the operands that a named operation reshaped


@dataclass(frozen=True)
class Fused:
    """An operation that `fuse` made, or that a call of a named operation means. `fuse` says how it is called."""

    operation: Operation
    dtype: str | None
    s_dtype: str | None
    function: str  # what errors call it
    demanded: Kinds = ()  # the kinds that operands must have, by their names
    made: tuple[str, ...] = (SEED,)  # operands without a gradient
    bounded: bool = False  # whether y is a norm times weight plus bias, for which a scale is known beforehand
    returns_dy: bool = False  # whether the gradient of what is added to the norm is the array dy, not another one
    options: CallOptions = field(init=False, repr=False, compare=False)  # of a call that asks for nothing more

    def __post_init__(self) -> None:
        options = CallOptions(self.function, self.operation, self.demanded, self.dtype, self.s_dtype)
        object.__setattr__(self, "options", options)

    def __repr__(self) -> str:
        operation = self.operation
        prologue = f", prologue={operation.prologue.text!r}" if operation.prologue else ""
        return (
            f"<cunorm.fuse({operation.norm!r}{prologue}, epilogue={operation.epilogue.text!r}) -> {operation.returns}>"
        )

    def __call__(self, /, x: Any, *unnamed: Any, eps: float | None = None, sm_margin: int = 0, **operands: Any) -> Any:
        """Return the results, in the order of `returns`; a single one comes without a tuple."""
        return self.called(x, self._checked(unnamed, operands), self._eps(eps), sm_margin)

    def forward(
        self, /, x: Any, *unnamed: Any, eps: float | None = None, sm_margin: int = 0, **operands: Any
    ) -> tuple[Any, Saved]:
        """Return (results as of a call, what `backward` needs). The arrays themselves are saved, not copies of them."""
        return self.called_forward(x, self._checked(unnamed, operands), self._eps(eps), sm_margin)

    def fp8(
        self,
        /,
        x: Any,
        *unnamed: Any,
        eps: float | None = None,
        granularity: str | int = "row",
        y_scale: Any = None,
        dtype: Any = "e4m3",
        sm_margin: int = 0,
        **operands: Any,
    ) -> tuple[Any, ...]:
        """Return the results with (bytes, scale) in place of y, as `layer_norm_fp8` returns them: y ~ bytes * scale.

        Parameters
        ----------
        x, eps, sm_margin, **operands
            As in a call, but no x of float64 and no tensor that wants a gradient.
        granularity, dtype
            As in `layer_norm_fp8`: "row", "tensor" or 128, and "e4m3" or "e5m2".
        y_scale : float or array of one float32, optional
            For "tensor", and needed there: the scale.

        Returns
        -------
        tuple of arrays
            In the order of `returns`; s keeps its dtype. Bytes and scale as of `layer_norm_fp8`, over the last axis.
        """
        store = self.store(dtype, granularity, y_scale, wide=False)
        return self.called_fp8(x, self._checked(unnamed, operands), self._eps(eps), sm_margin, store, y_scale)

    def fp8_forward(
        self,
        /,
        x: Any,
        *unnamed: Any,
        eps: float | None = None,
        granularity: str | int = "row",
        y_scale: Any = None,
        dtype: Any = "e4m3",
        sm_margin: int = 0,
        **operands: Any,
    ) -> tuple[Any, ...]:
        """Return the results with (bytes, scale, y) in place of y, all of one kernel."""
        store = self.store(dtype, granularity, y_scale, wide=True)
        return self.called_fp8(x, self._checked(unnamed, operands), self._eps(eps), sm_margin, store, y_scale)

    def backward(
        self, /, saved: Saved, *gradients: Any, wanted: Sequence[str] = (), sm_margin: int = 0
    ) -> dict[str, Any]:
        """Return the gradients of x and of operands, by name.

        Parameters
        ----------
        saved
            What `forward` returned.
        *gradients : array, shape of x
            Of each result, in the order of `returns`; None for one on which nothing depends.
        wanted : sequence of str
            Names of operands, or "x"; all by default. The others are not computed.
        sm_margin : int
            As in a call.

        Returns
        -------
        dict of str to array
            A gradient has the shape and dtype of the operand, that of a number shape () and the dtype of the
            arithmetic. Where two are the same by their formulas, as those of x and of residual in x + residual, it is
            one array for both: copy one before you write to the other.
        """
        operation = self.operation
        if not isinstance(saved, Saved):
            raise TypeError(f"{self.function}: saved must be what forward returned; got {type(saved).__name__}.")
        if saved.fused != self:
            raise ValueError(
                f"{self.function}: saved must be what forward of this operation returned; got that of "
                f"{saved.fused.operation.epilogue.text!r} for {operation.epilogue.text!r}."
            )
        if len(gradients) != len(operation.returns):
            raise ValueError(
                f"{self.function}: backward takes a gradient of each of {', '.join(operation.returns)}; got "
                f"{len(gradients)}. Pass None for a result on which nothing depends."
            )
        given = {f"d{name}": gradient for name, gradient in zip(operation.returns, gradients, strict=True)}
        if all(gradient is None for gradient in gradients):
            raise ValueError(f"{self.function}: one gradient at least must be an array; got None for each.")
        known = ("x", *(name for name in operation.operands if name in saved.operands and name not in self.made))
        if isinstance(wanted, str) or not isinstance(wanted, Sequence):
            raise TypeError(f"{self.function}: wanted must be a tuple of names; got {wanted!r}.")
        _check_names(self.function, "wanted", wanted, known)
        if "x" in saved.shapes:
            given = {name: self._as_x(name, gradient, saved) for name, gradient in given.items()}
        arrays = {"x": saved.x, **saved.operands, **given, "s": saved.s, **saved.statistics}
        options, names = self._options(sm_margin), tuple(wanted) or known
        if operation.second:
            results = norm_add_norm.backward(options, arrays, names)
        else:
            # If dy is all that is wanted the call is checked all the same.
            added = added_after(operation, tuple(saved.operands)) if self.returns_dy else ()
            copies = [name for name in names if name in added and _alike(arrays[name], given["dy"])]
            computed = tuple(name for name in names if name not in copies) or names
            results = backend_of(self.function, saved.x).backward(options, arrays, computed)
            results = {name: given["dy"] if name in copies else results[name] for name in names}
        return {
            name: gradient.reshape(saved.shapes[name]) if name in saved.shapes else gradient
            for name, gradient in results.items()
        }

    def called(self, x: Any, operands: dict[str, Any], eps: float, sm_margin: int) -> Any:
        """Return the results of a call with exactly these operands."""
        return self._in_order(self._run(self._options(sm_margin), x, operands, eps))

    def called_forward(
        self,
        x: Any,
        operands: dict[str, Any],
        eps: float,
        sm_margin: int,
        shapes: dict[str, tuple[int, ...]] | None = None,
    ) -> tuple[Any, Saved]:
        """Return the results of such a call, and what is saved for the backward pass."""
        results = self._run(self._options(sm_margin, True), x, operands, eps)
        returned, s = self._in_order(results), results.get("s")
        for name in self.operation.returns:
            del results[name]  # what is left are the statistics
        return returned, Saved(self, x, operands, s, results, shapes or {})

    def called_fp8(
        self, x: Any, operands: dict[str, Any], eps: float, sm_margin: int, store: Float8Store, scale: Any
    ) -> tuple[Any, ...]:
        """Return the results of such a call with y written by `store`."""
        results = self._run(self._options(sm_margin, store=store), x, operands, eps, scale)
        return tuple([results[name] for name in store.results(self.operation.returns)])

    def store(self, dtype: Any, granularity: str | int, y_scale: Any, *, wide: bool) -> Float8Store:
        """Return the store that such arguments of a call ask for."""
        if granularity == "tensor" and y_scale is None and not self.bounded:
            raise ValueError(f"{self.function}: granularity='tensor' needs a y_scale; got y_scale=None.")
        return store_of(self.function, dtype, granularity, y_scale, wide=wide)

    def _options(self, sm_margin: int, statistics: bool = False, store: Float8Store | None = None) -> CallOptions:
        if type(sm_margin) is int and not sm_margin and not statistics and store is None:
            return self.options
        return CallOptions(*self.options[:5], sm_margin, statistics, store)

    def _run(
        self, options: CallOptions, x: Any, operands: dict[str, Any], eps: float, scale: Any = None
    ) -> dict[str, Any]:
        """Return the results, and the statistics if they are asked for, by name."""
        forward = norm_add_norm.forward if self.operation.second else backend_of(self.function, x).forward
        return forward(options, {"x": x, **operands}, eps, scale)

    def _checked(self, unnamed: tuple[Any, ...], operands: dict[str, Any]) -> dict[str, Any]:
        """Return the operands of a call in the order of the operation."""
        names = self.operation.operands
        if unnamed:
            by_name = ", ".join(f"{name}=..." for name in names)
            raise TypeError(
                f"{self.function}: the operands must be given by their names, {by_name or 'of which it has none'}; got "
                f"{len(unnamed)} after x without a name."
            )
        if operands.keys() != set(names):
            unknown = [name for name in operands if name not in names]
            missing = [name for name in names if name not in operands]
            got = f"got {unknown[0]!r} too" if unknown else f"{missing[0]!r} is missing"
            raise TypeError(
                f"{self.function}: the operands must be {', '.join(names) or 'none'}, each by its name; {got}."
            )
        return {name: operands[name] for name in names}

    def _eps(self, eps: float | None) -> float:
        return EPS[self.operation.norm] if eps is None else eps

    def _as_x(self, name: str, gradient: Any, saved: Saved) -> Any:
        """Return a gradient of a result in the shape that x was given to the kernels in."""
        if gradient is None:
            return None
        shape = getattr(gradient, "shape", None)
        if shape is not None and tuple(shape) != saved.shapes["x"]:
            raise ValueError(
                f"{self.function}: {name} must have the shape of x, {saved.shapes['x']}; got {tuple(shape)}."
            )
        return gradient if shape is None else gradient.reshape(saved.x.shape)

    def _in_order(self, results: dict[str, Any]) -> Any:
        returns = self.operation.returns
        return tuple([results[name] for name in returns]) if len(returns) > 1 else results["y"]


def fuse(
    norm: str,
    *,
    prologue: Callable[..., Any] | None = None,
    epilogue: Callable[..., Any] | None = None,
    returns: Sequence[str] = ("y",),
    dtype: Any = None,
    s_dtype: Any = None,
) -> Fused:
    """s = prologue(x, ...), xhat = norm(s) over the last axis, y = epilogue(xhat, ...): one kernel, and its derivative.

    Parameters
    ----------
    norm : "layer_norm" or "rms_norm"
        xhat = (s - mean(s)) / sqrt(var(s) + eps), or s / sqrt(mean(s²) + eps), over the last axis.
    prologue : callable, optional
        Of x and of operands, element by element; s is rounded to its dtype before its statistics are taken, as if it
        had been computed apart. Default: x.
    epilogue : callable, optional
        Of xhat and of operands, element by element. Default: xhat.
    returns : sequence of str
        What a call returns, in order: "y", and "s" if there is a prologue. What is not returned is not stored; for the
        backward pass s is then made again.
    dtype, s_dtype : dtype or str, optional
        Of y and of s: float16, bfloat16, float32 or float64. Default: those of x.

    Returns
    -------
    op : callable
        - ``op(x, *, eps, sm_margin=0, **operands)`` returns the results, in the order of `returns`. eps: 1e-5, of an
          RMSNorm 1e-6. sm_margin: so many multiprocessors are left to others.
        - ``op.forward(x, *, eps, **operands)`` returns (results, saved).
        - ``op.backward(saved, *gradients, wanted=())`` returns the gradients of x and of the operands, by name, from
          those of the results.
        - ``op.fp8(x, *, eps, granularity="row", y_scale=None, dtype="e4m3", **operands)`` returns (bytes, scale) in
          place of y, as `layer_norm_fp8`; ``op.fp8_forward`` (bytes, scale, y).

        x is a NumPy, CuPy or JAX array, or a tensor. An operand is a number, which may differ from call to call, or an
        array that broadcasts against x: of the shape of x; a vector for all rows, of shape (columns,); vectors for
        groups of rows, such as (batch, 1, columns) beside (batch, tokens, columns), or (heads, columns) beside (...,
        heads, columns); or numbers for rows, such as (tokens, 1). Other shapes are expanded to that of x. Any of the
        four dtypes, each independently of x.

        An operand called seed is an array of one int64 or two uint32, and in the functions a uniform random number for
        each element, a multiple of 2^-16 from 0 up to 1, that follows from the seed, the row and the column alone.

    Raises
    ------
    TypeError
        A function that cannot be traced, such as one with ``if``; an operand that is missing or unknown, or of the
        wrong kind or dtype.
    ValueError
        A name, shape, value or device that does not fit.

    Notes
    -----
    The functions are called once, here, with stand-ins for numbers: arithmetic, ``numpy.exp`` and its like, and the
    functions of `cunorm.expression` are traced; a number that they capture is a constant of the kernel.

    Arithmetic in float32 (float64 where s is float64), with one rounding of y and one of s.

    Examples
    --------
    >>> import numpy, cunorm
    >>> modulated = cunorm.fuse("layer_norm", epilogue=lambda xhat, scale, shift: xhat * (1 + scale) + shift)
    >>> x = numpy.array([[1.0, 2.0, 3.0]])
    >>> modulated(x, scale=numpy.array([0.0, 1.0, 2.0]), shift=0.5).round(3)
    array([[-0.725,  0.5  ,  4.174]])
    >>> y, saved = modulated.forward(x, scale=numpy.array([0.0, 1.0, 2.0]), shift=0.5)
    >>> modulated.backward(saved, numpy.ones_like(x), wanted=["scale"])["scale"].round(3)
    array([-1.225,  0.   ,  1.225])
    """
    before = None if prologue is None else _traced("prologue", prologue, "x")
    after = parse("xhat", ("xhat",)) if epilogue is None else _traced("epilogue", epilogue, "xhat")
    operation = composed(norm, before, after, returns)
    if before is None and s_dtype is not None:
        raise ValueError("fuse: s_dtype needs a prologue; got none, so that s is x. Leave s_dtype out.")
    y_dtype, s_dtype = (None if of is None else checks.dtype_name("fuse", of) for of in (dtype, s_dtype))
    return Fused(operation, y_dtype, s_dtype, f"fused {norm}")


def composed(norm: str, before: Expression | None, after: Expression, returns: Sequence[str]) -> Operation:
    """Return the operation of a norm and of expressions from anywhere, whose names are checked."""
    if norm not in tuple(NORMS):
        raise ValueError(f"fuse: norm must be one of {', '.join(NORMS)}; got {norm!r}.")
    names = dict.fromkeys((*(before.names[1:] if before else ()), *after.names[1:]))
    for name in names:
        if name in OF_THE_CALL:
            raise ValueError(
                f"fuse: an operand's name must not be one that the call has itself, {', '.join(OF_THE_CALL)}; got "
                f"{name!r}: rename it."
            )
        if f"d{name}" in names:
            raise ValueError(
                f"fuse: 'd{name}' is the gradient of {name!r} and cannot be an operand too: rename one of them."
            )
    if isinstance(returns, str) or not isinstance(returns, Sequence):
        raise TypeError(f"fuse: returns must be a tuple of names, such as ('y',); got {returns!r}.")
    _check_names("fuse", "returns", returns, ("y", "s"))
    if "y" not in returns:
        raise ValueError(f"fuse: returns must have 'y'; got {tuple(returns)}.")
    if before is None and "s" in returns:
        raise ValueError("fuse: 's' among returns needs a prologue; got none, so that s is x. Leave 's' out.")
    return Operation(norm, after, before, tuple(returns))


def _alike(array: Any, other: Any) -> bool:
    """Return whether two arrays have one kind, shape and dtype."""
    if type(array) is not type(other) or not hasattr(array, "shape"):
        return False
    return array.shape == other.shape and array.dtype == other.dtype


def _traced(role: str, function: Callable[..., Any], first: str) -> Expression:
    """Return the expression of a prologue or epilogue, with its first parameter renamed to `first`."""
    expression = trace(function, role=role)
    if not expression.names:
        raise ValueError(f"fuse: the {role} needs parameters, and its first parameter is {first}; got none.")
    if first in expression.names[1:]:
        raise ValueError(f"fuse: {first} must be the {role}'s first parameter; got {', '.join(expression.names)}.")
    return substitute(expression, {expression.names[0]: parse(first, (first,))})


def _check_names(function: str, argument: str, names: Iterable[str], known: Sequence[str]) -> None:
    """Check that all names are known, and each is there at most once."""
    names = tuple(names)
    for name in names:
        if name not in known:
            raise ValueError(f"{function}: {argument} must be names out of {', '.join(known)}; got {name!r}.")
    if len(set(names)) < len(names):
        raise ValueError(f"{function}: {argument} must have each name once; got {', '.join(names)}.")
