"""Tables of measurements: for a class of GPUs, which launch is the fastest for a layout and a number of rows.

A table decides no bit of y, mean, rstd or dx: the shape of a row, by which it is added up, is part of the question.
A file of tables/ has the class, the launches, and for each layout and shape of a row the launches by the number of
rows for each SM, in rising order. `None` stands for the cost rule.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from functools import cache
from math import inf
from pathlib import Path
from typing import Any

from ..kernel.device import Device
from ..operation import is_named, name_of_operation
from .problem import ITEMSIZE, Problem
from .registers import widest_column, with_rows_kept
from .shapes import in_clusters
from .shared_memory import ctas_that_fit, dynamic_shared, shared_memory
from .spec import WARP, NormSpec

VERSION = 1  # of the fields of a Launch: a table of another version is not read
BANDWIDTH_TOLERANCE = 0.1  # of the bandwidth of an SM, within a class
ZERO_CENTRED = "zero_centered_"
SHIPPED = Path(__file__).parent / "tables"

log = logging.getLogger("cunorm")


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
    """The launches of a class of GPUs, by layout and then by shape."""

    arch: int
    bandwidth: float  # of memory, GB/s for each SM
    layouts: Mapping[str, Mapping[str, Choices]]

    def serves(self, device: Device) -> bool:
        alike = abs(device.bandwidth / device.sms - self.bandwidth) <= BANDWIDTH_TOLERANCE * self.bandwidth
        return self.arch == device.arch and alike

    def choices(self, layout: str, shapes: Iterable[str]) -> Choices:
        """Of the first of the shapes that the table has; a zero-centred weight has an entry of its own or none."""
        layouts = dict.fromkeys((layout, layout.removeprefix(ZERO_CENTRED)))
        of_layouts = [self.layouts[name] for name in layouts if name in self.layouts]
        return next((found[shape] for found in of_layouts for shape in shapes if shape in found), ())


def measured(problem: Problem, spec: NormSpec, device: Device) -> NormSpec | None:
    """The kernel of the rows of `spec` that was measured to be the fastest; None if the cost rule is to say."""
    table = table_of(device)
    layout = table and layout_of(problem, spec)
    if not layout:
        return None
    keys = [shape_key(spec, full=True)] if spec.cols == spec.shape.capacity else []
    choices = table.choices(layout, (*keys, shape_key(spec)))
    rows_of_sm = problem.rows / (device.sms - problem.sm_margin)
    launch = next((launch for most, launch in choices if rows_of_sm <= most), None)
    # Rows by two and two have a CTA for each pair, which would take every SM.
    if launch is None or (launch.kernel == "forward_pairs" and problem.sm_margin):
        return None
    found = launch.applied(spec)
    if problem.direction == "backward" and not spec.aligned:
        found = _at_odd_addresses(found, device)
    return found if is_legal(found, device) else None


def _at_odd_addresses(spec: NormSpec, device: Device) -> NormSpec:
    """The same with as many CTAs, which leave the same partial sums; a row that is kept frees no stage there."""
    stages = spec.stages + spec.rows_stay
    while stages > 2 and not is_legal(replace(spec, stages=stages), device):
        stages -= 1
    spec = replace(spec, stages=stages, rows_stay=False)
    return with_rows_kept(spec, device) if spec.cluster == 1 else spec


def layout_of(problem: Problem, spec: NormSpec) -> str | None:
    """The name by which tables know a layout; None where nothing was measured.

    Measured are the named operations forward, at even addresses, and backward the plain norms of x and dy of one width.
    """
    operation, itemsize = problem.operation, ITEMSIZE[problem.row_dtype]
    name = name_of_operation(operation)
    wide = any(operand.itemsize > max(4, itemsize) for operand in spec.operands if operand.kind in ("full", "column"))
    if name is None or itemsize > 4 or wide:
        return None
    of_x, of_columns = f"x{8 * itemsize}", f"w{8 * widest_column(spec)}"
    if problem.direction == "backward":
        plain = is_named(operation) and {operand.dtype for operand in spec.matrices} == {problem.row_dtype}
        sums = (1, 2) if problem.norm.subtracts_mean else (1,)
        measured = plain and len(spec.sums) in sums and problem.cols % spec.shape.pack == 0
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


def is_legal(spec: NormSpec, device: Device) -> bool:
    """Whether the device can run the launch, whatever a table says."""
    shape = spec.shape
    whole_warps = shape.cluster == 1 or shape.threads % WARP == 0
    return (
        device.runs_clusters(shape.cluster)
        and whole_warps
        and spec.threads <= 1024
        and spec.threads * spec.ctas_per_sm <= 2048
        and spec.ctas_per_sm <= ctas_that_fit(shared_memory(spec) + dynamic_shared(spec), device)
    )


@cache
def table_of(device: Device) -> Table | None:
    """The table that was made for the class of a device, if there is one."""
    return next((table for table in _shipped() if table.serves(device)), None)


@cache
def _shipped() -> tuple[Table, ...]:
    return tuple(table for path in sorted(SHIPPED.glob("*.json")) if (table := read(path)) is not None)


def read(path: Path) -> Table | None:
    """The table of a file; None, with a line in the log, if it cannot be used."""
    try:
        content = json.loads(path.read_text())
        if content["version"] != VERSION:
            raise ValueError(f"it has version {content['version']}, not {VERSION}")
        launches = [Launch(**fields) for fields in content["launches"]]
        layouts = {
            layout: {
                shape: tuple(
                    (inf if most is None else float(most), None if index is None else launches[index])
                    for most, index in choices
                )
                for shape, choices in by_shape.items()
            }
            for layout, by_shape in content["layouts"].items()
        }
        return Table(content["arch"], content["bandwidth"], layouts)
    except (OSError, ValueError, KeyError, TypeError, IndexError) as error:
        log.warning("cunorm: %s is no table of launches (%s); it is not used", path, error)
        return None


def write(path: Path, table: Table) -> None:
    """One line for each launch, and one for each shape of each layout."""
    launches: dict[Launch, int] = {}

    def line(choices: Iterable[tuple[float, Launch | None]]) -> str:
        return json.dumps(
            [
                [None if most == inf else most, None if launch is None else launches.setdefault(launch, len(launches))]
                for most, launch in choices
            ]
        )

    layouts = [
        f"  {json.dumps(layout)}: {{\n"
        + ",\n".join(f"   {json.dumps(shape)}: {line(choices)}" for shape, choices in by_shape.items())
        + "\n  }"
        for layout, by_shape in table.layouts.items()
    ]
    defaults = asdict(Launch(""))

    def fields(launch: Launch) -> dict[str, Any]:
        return {name: value for name, value in asdict(launch).items() if value != defaults[name]}

    head = {"version": VERSION, "arch": table.arch, "bandwidth": table.bandwidth}
    text = json.dumps(head)[:-1] + ',\n "launches": [\n'
    text += ",\n".join(f"  {json.dumps(fields(launch))}" for launch in launches)
    text += '\n ],\n "layouts": {\n' + ",\n".join(layouts) + "\n }}\n"
    path.write_text(text)
