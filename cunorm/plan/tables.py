"""Tables of measurements: for a class of GPUs, which launch is the fastest for a layout and a number of rows.

A table decides no bit of y, mean, rstd or dx: the shape of a row, by which it is added up, is part of the question. Of
a backward pass that leaves partial sums it may decide how many, and so the last bit of dweight and dbias.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import pairwise, product
from math import inf, sqrt

from ..kernel.device import Device
from ..operation import NORMS, is_named, name_of_operation
from .problem import ITEMSIZE, Problem
from .registers import widest_column
from .shapes import ceil_div, in_clusters
from .spec import NormSpec

BANDWIDTH_TOLERANCE = 0.1  # of the bandwidth of an SM, within a class
REACH = 1.25  # a launch that was measured serves so many times more rows, and so many times fewer
ZERO_CENTRED = "zero_centered_"
TO = " to "  # in the name of an entry: "256x2 to 408" serves rows of up to 408 vectors, "256x2" those of any number


@dataclass(frozen=True, slots=True)
class Launch:
    """How rows of a shape are run: the fields of NormSpec of the same names, and the CTAs that share a row."""

    kernel: str
    cluster: int = 1
    rows_per_cta: int = 1
    ctas_per_sm: int = 1
    stages: int = 0
    rows_stay: bool = False
    ask_early: bool = False
    columns_stay: bool = False
    streamed_x: bool = False
    held: int = 1
    unpacked: bool = False

    @classmethod
    def of(cls, spec: NormSpec) -> Launch:
        return cls(**{name: getattr(spec, name) for name in cls.__slots__})

    def applied(self, spec: NormSpec) -> NormSpec:
        """The kernel of the same rows, run this way."""
        fields = {name: getattr(self, name) for name in self.__slots__ if name != "cluster"}
        return replace(spec, shape=in_clusters(spec.shape, self.cluster), **fields)


Choices = tuple[tuple[float, Launch | None], ...]  # up to so many rows for each SM


@dataclass(frozen=True, slots=True)
class Table:
    """The launches of a class of GPUs, by layout and then by shape; None stands for the next table."""

    arch: int
    bandwidth: float  # of memory, GB/s for each SM
    layouts: Mapping[str, Mapping[str, Choices]]
    # Of layouts and shapes the numbers of rows for each SM that were measured, whatever won.
    points: Mapping[str, Mapping[str, tuple[float, ...]]] = field(default_factory=dict)

    def serves(self, device: Device) -> bool:
        alike = abs(device.bandwidth / device.sms - self.bandwidth) <= BANDWIDTH_TOLERANCE * self.bandwidth
        return self.arch == device.arch and alike

    def choices(self, layout: str, spec: NormSpec) -> Choices:
        """By the number of rows. Full rows, and a zero-centred weight, have entries of their own or the others'."""
        return self._entry(layout, spec, is_full(spec))

    def _entry(self, layout: str, spec: NormSpec, full: bool) -> Choices:
        for name in dict.fromkeys((layout, layout.removeprefix(ZERO_CENTRED))):
            of_layout = self.layouts.get(name, {})
            for shape in ((shape_key(spec, full=True),) if full else ()) + (self._shape(name, spec), shape_key(spec)):
                if shape in of_layout:
                    return of_layout[shape]
        return ()

    def _shape(self, layout: str, spec: NormSpec) -> str:
        """The shape of an entry for rows that are not full: that of the shortest that serve it, else of all."""
        shape = shape_key(spec)
        most = (int(one.removeprefix(shape + TO)) for one in self.layouts.get(layout, {}) if one.startswith(shape + TO))
        shortest = min((vectors for vectors in most if vectors_of(spec) <= vectors), default=None)
        return shape if shortest is None else f"{shape}{TO}{shortest}"

    def _own_shape(self, layout: str, spec: NormSpec) -> str:
        return shape_key(spec, full=True) if is_full(spec) else self._shape(layout, spec)

    def has_point(self, layout: str, spec: NormSpec, rows_of_sm: float) -> bool:
        """Whether that number of rows for each SM was measured."""
        return rows_of_sm in self.points.get(layout, {}).get(self._own_shape(layout, spec), ())

    def with_point(self, layout: str, spec: NormSpec, rows_of_sm: float, launch: Launch | None) -> Table:
        """The same with one more number of rows measured; `launch`: what won, None where nothing beat today's.

        It serves up to REACH times more rows, and fewer, but no further than half way to the next number measured.
        """
        shape = self._own_shape(layout, spec)
        points = sorted({*self.points.get(layout, {}).get(shape, ()), rows_of_sm})
        layouts = dict(self.layouts)
        if launch is not None:
            middles = [sqrt(point * rows_of_sm) for point in points if point != rows_of_sm]
            low = max([rows_of_sm / REACH, *(middle for middle in middles if middle < rows_of_sm)])
            high = min([rows_of_sm * REACH, *(middle for middle in middles if middle > rows_of_sm)])
            # Rows that have had this entry for want of their own keep what it was.
            keys = product((layout, *_zero_centred(layout)), {is_full(spec), True})
            for (name, full), choices in {key: self._entry(key[0], spec, key[1]) for key in keys}.items():
                of_name = shape_key(spec, full=True) if full else self._shape(name, spec)
                layouts[name] = {**layouts.get(name, {}), of_name: choices or ((inf, None),)}
            of_shape = _with_run(layouts[layout][shape], low, high, launch)
            layouts[layout] = {**layouts[layout], shape: of_shape}
        of_layout = {**self.points.get(layout, {}), shape: tuple(points)}
        return replace(self, layouts=layouts, points={**self.points, layout: of_layout})


def _zero_centred(layout: str) -> tuple[str, ...]:
    """The layout that has the entries of this one where it has none."""
    name, _, which = layout.partition(", ")
    return (ZERO_CENTRED + layout,) if name in NORMS and which.startswith("forward") else ()


def _with_run(choices: Choices, low: float, high: float, launch: Launch) -> Choices:
    """The same choices but for one of more rows than `low` and up to `high`."""
    before = [(most, one) for most, one in choices if most < low]
    cut = next((one for most, one in choices if most >= low), None)
    after = [(most, one) for most, one in choices if most > high]
    run = [*before, (low, cut), (high, launch), *after]
    return (*(entry for entry, following in pairwise(run) if entry[1] != following[1]), run[-1])


def rows_of_sm(problem: Problem, device: Device) -> float:
    return problem.rows / (device.sms - problem.sm_margin)


@lru_cache(maxsize=4096)
def layout_of(spec: NormSpec) -> str | None:
    """The name by which tables know a layout; None where nothing was measured.

    Measured are the named operations forward, at even addresses, and backward the plain norms of x and dy of one width.
    """
    operation, itemsize = spec.operation, ITEMSIZE[spec.row_dtype]
    name = name_of_operation(operation)
    wide = any(operand.itemsize > max(4, itemsize) for operand in spec.operands if operand.kind in ("full", "column"))
    if name is None or itemsize > 4 or wide:
        return None
    of_x, of_columns = f"x{8 * itemsize}", f"w{8 * widest_column(spec)}"
    if spec.kernel == "backward":
        plain = is_named(operation) and {operand.dtype for operand in spec.matrices} == {spec.row_dtype}
        sums = (1, 2) if NORMS[operation.norm].subtracts_mean else (1,)
        measured = plain and len(spec.sums) in sums and spec.cols % spec.shape.pack == 0
        return f"{operation.norm}, backward, {of_x} {of_columns}" if measured else None
    if not (spec.aligned and spec.columns_aligned) or any(one.itemsize > itemsize for one in spec.matrices):
        return None
    words = [name, "forward", of_x + (f" {len(spec.columns)}{of_columns}" if spec.columns else "")]
    words += [f"y8 {spec.scales}"] if spec.scales else []
    words += ["returns " + " ".join(one.name for one in spec.results)] if operation.prologue else []
    return ", ".join(words)


def shape_key(spec: NormSpec, full: bool = False) -> str:
    """The shape of a row, whatever the number of CTAs that share it; `full` where no place for a vector is empty."""
    _, threads, vectors = spec.shape.order
    return f"{threads}x{vectors}" + (" full" if full else "")


def vectors_of(spec: NormSpec) -> int:
    """Vectors of a row."""
    return ceil_div(spec.cols, spec.shape.pack)


def is_full(spec: NormSpec) -> bool:
    """Whether no place for a vector is empty."""
    return spec.cols == spec.shape.capacity
