"""Tables of measurements: for a class of GPUs, which launch is the fastest for a layout and a number of rows.

A table decides no bit of y, mean, rstd or dx: the shape of a row, by which it is added up, is part of the question.
A file of tables/ has the class, the launches, and for each layout and shape of a row the launches by the number of
rows for each SM, in rising order. `None` stands for the next table, and after the last for the cost rule: the tables of
`python -m cunorm tune`, in the user's cache, are asked before those that ship with cunorm.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import cache
from itertools import pairwise
from math import inf, sqrt
from pathlib import Path
from typing import Any

from ..kernel.cache import cache_directory
from ..kernel.cache import write as write_file
from ..kernel.device import CLUSTER_SIZES, Device, is_on
from ..operation import NORMS, is_named, name_of_operation
from .problem import ITEMSIZE, Problem
from .registers import widest_column, with_rows_kept
from .shapes import MOST_SHORT, ceil_div, in_clusters
from .shared_memory import SHARED_LIMIT, ctas_that_fit, dynamic_shared, shared_memory
from .spec import WARP, NormSpec

VERSION = 1  # of the fields of a Launch: a table of another version is not read
BANDWIDTH_TOLERANCE = 0.1  # of the bandwidth of an SM, within a class
REACH = 1.25  # a launch that was measured serves so many times more rows, and so many times fewer
SHIPPED = Path(__file__).parent / "tables"
TUNE_VARIABLE = "CUNORM_TUNE"
KERNELS = {"forward": ("forward", "forward_pairs", "forward_spread"), "backward": ("backward",)}
BARRIERS = 16  # of a CTA; __syncthreads has one of them

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
    sms: int
    bandwidth: int
    layouts: Mapping[str, Mapping[str, Choices]]
    # Of layouts and shapes the numbers of rows for each SM that were measured, whatever won.
    points: Mapping[str, Mapping[str, tuple[float, ...]]] = field(default_factory=dict)

    def serves(self, device: Device) -> bool:
        of_sm, wanted = self.bandwidth / self.sms, device.bandwidth / device.sms
        alike = abs(of_sm - wanted) <= BANDWIDTH_TOLERANCE * of_sm
        return (self.arch, self.sms) == (device.arch, device.sms) and alike

    def launch(self, layout: str, spec: NormSpec, rows_of_sm: float) -> Launch | None:
        by_shape = self.layouts.get(layout, {})
        choices = by_shape.get(shape_key(spec, is_full(spec))) or by_shape.get(shape_key(spec), ())
        return next((launch for most, launch in choices if rows_of_sm <= most), None)

    def has_point(self, layout: str, spec: NormSpec, rows_of_sm: float) -> bool:
        """Whether that number of rows for each SM was measured."""
        return rows_of_sm in self.points.get(layout, {}).get(shape_key(spec, is_full(spec)), ())

    def with_point(self, layout: str, spec: NormSpec, rows_of_sm: float, launch: Launch | None) -> Table:
        """The same with one more number of rows measured; `launch`: what won, None where nothing beat today's.

        It serves up to REACH times more rows, and fewer, but no further than half way to the next number measured.
        """
        shape = shape_key(spec, is_full(spec))
        by_shape = dict(self.layouts.get(layout, {}))
        points = sorted({*self.points.get(layout, {}).get(shape, ()), rows_of_sm})
        if launch is not None:
            others = [point for point in points if point != rows_of_sm]
            middles = [sqrt(point * rows_of_sm) for point in others]
            low = max([rows_of_sm / REACH, *(middle for middle in middles if middle < rows_of_sm)])
            high = min([rows_of_sm * REACH, *(middle for middle in middles if middle > rows_of_sm)])
            # Full rows without a line of their own have had that of the others, and keep what it was.
            before = by_shape.get(shape_key(spec), ((inf, None),))
            by_shape.setdefault(shape_key(spec, full=True), before)
            by_shape[shape] = _with_run(by_shape.get(shape, before), low, high, launch)
        return replace(
            self,
            layouts={**self.layouts, layout: by_shape},
            points={**self.points, layout: {**self.points.get(layout, {}), shape: tuple(points)}},
        )


def _with_run(choices: Choices, low: float, high: float, launch: Launch) -> Choices:
    """The same choices but for one of more rows than `low` and up to `high`."""
    before = [(most, one) for most, one in choices if most < low]
    cut = next((one for most, one in choices if most >= low), None)
    after = [(most, one) for most, one in choices if most > high]
    run = [*before, (low, cut), (high, launch), *after]
    return (*(entry for entry, following in pairwise(run) if entry[1] != following[1]), run[-1])


def measured(problem: Problem, spec: NormSpec, device: Device) -> NormSpec | None:
    """The kernel of the rows of `spec` that was measured to be the fastest; None if the cost rule is to say."""
    found = tables_of(device)
    layout = layout_of(problem, spec) if found else None
    if layout is None:
        return None
    launches = (table.launch(layout, spec, rows_of_sm(problem, device)) for _, table in found)
    kernels = (_applied(launch, problem, spec, device) for launch in launches if launch is not None)
    return next((kernel for kernel in kernels if kernel is not None), None)


def _applied(launch: Launch, problem: Problem, spec: NormSpec, device: Device) -> NormSpec | None:
    """The kernel of the rows of `spec`, run that way; None where it cannot be."""
    # Rows by two and two have a CTA for each pair, which would take every SM.
    if launch.kernel not in KERNELS[problem.direction] or (launch.kernel == "forward_pairs" and problem.sm_margin):
        return None
    kernel = launch.applied(spec)
    if problem.direction == "backward" and not spec.aligned:
        kernel = at_odd_addresses(kernel, device)
    return kernel if is_legal(kernel, device) else None


def rows_of_sm(problem: Problem, device: Device) -> float:
    return problem.rows / (device.sms - problem.sm_margin)


def at_odd_addresses(spec: NormSpec, device: Device) -> NormSpec:
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
    name, itemsize = name_of_operation(problem.operation), ITEMSIZE[problem.row_dtype]
    wide = any(operand.itemsize > max(4, itemsize) for operand in spec.operands if operand.kind in ("full", "column"))
    if name is None or itemsize > 4 or wide:
        return None
    words = [name, problem.direction, f"x{8 * itemsize}"]
    words += [f"{len(spec.columns)}w{8 * widest_column(spec)}"] if spec.columns else []
    if problem.direction == "forward":
        if not (spec.aligned and spec.columns_aligned) or any(one.itemsize > itemsize for one in spec.matrices):
            return None
        words += [f"y8 {spec.scales}"] if spec.scales else []
        words += ["returns " + " ".join(one.name for one in spec.results)] if problem.operation.prologue else []
        return ", ".join(words)
    plain = is_named(problem.operation) and {operand.dtype for operand in spec.matrices} == {problem.row_dtype}
    return ", ".join([*words, f"{len(spec.sums)} sums"]) if plain and problem.cols % spec.shape.pack == 0 else None


def shape_key(spec: NormSpec, full: bool = False) -> str:
    """The shape of a row, whatever the number of CTAs that share it; `full` where no place for a vector is empty."""
    _, threads, vectors = spec.shape.order
    return f"{threads}x{vectors}" + (" full" if full else "")


def is_full(spec: NormSpec) -> bool:
    """Whether no place for a vector is empty."""
    return spec.cols == spec.shape.capacity


def is_legal(spec: NormSpec, device: Device) -> bool:
    """Whether the device can run the launch, and the kernel is one that there is, whatever a table says."""
    shape = spec.shape
    return (
        device.runs_clusters(shape.cluster)
        and (shape.cluster == 1 or shape.threads % WARP == 0)
        and _is_a_kernel(spec)
        and spec.threads <= 1024
        and spec.threads * spec.ctas_per_sm <= 2048
        and shared_memory(spec) <= SHARED_LIMIT
        and spec.ctas_per_sm <= ctas_that_fit(shared_memory(spec) + dynamic_shared(spec), device)
    )


def _is_a_kernel(spec: NormSpec) -> bool:
    """Whether the texts of kernels_cu/norms are for such choices: what they assert, and what they take for granted."""
    shape = spec.shape
    stores_s = any(one.name == "s" for one in spec.results)
    if spec.kernel == "forward_spread":
        parts = ceil_div(shape.packs, spec.held)
        evenly = spec.held == ceil_div(shape.packs, parts) and (parts > 1 or shape.threads % WARP == 0)
        return evenly and spec.rows_per_cta == 1 and not spec.stages and not spec.finds_scales
    if spec.kernel == "forward_pairs":
        alone = len(spec.matrices) == 1 and not spec.grouped and not stores_s
        shared = shape.cluster == 1 and WARP < shape.threads <= 16 * WARP and not spec.stages
        return NORMS[spec.operation.norm].subtracts_mean and alone and shared and spec.rows_per_cta == 2
    # Several rows share a CTA only if it has whole rows, forward only if a warp has.
    if spec.rows_per_cta > 1 and (shape.cluster > 1 or (spec.kernel == "forward" and shape.threads > WARP)):
        return False
    if shape.threads > WARP and spec.rows_per_cta >= BARRIERS:
        return False
    if shape.threads < WARP and shape.threads * spec.rows_per_cta % WARP:
        return False
    if spec.stages == 1 and not (spec.rows_stay and spec.aligned):  # filled again in place
        return spec.kernel == "backward" and not spec.rows_stay and not spec.ask_early
    if spec.kernel == "backward":
        return spec.stages > 0
    late = spec.stages > 0 and not spec.ask_early and shape.threads * shape.cluster <= WARP
    # The next row of a CTA may be of another group; short rows are asked about that in launches.py.
    stale = spec.grouped and spec.columns_stay and ceil_div(spec.cols, shape.pack) > MOST_SHORT
    return not late and not stale and not (spec.unpacked and stores_s)


@cache
def tables_of(device: Device) -> tuple[tuple[Path, Table], ...]:
    """Those that serve a device, in the order in which they are asked, and their files."""
    users = user_folder() if reads_the_users() else None
    found = (*(_in_folder(users) if users else ()), *_in_folder(SHIPPED))
    return tuple((path, table) for path, table in found if table.serves(device))


@cache
def _in_folder(folder: Path) -> tuple[tuple[Path, Table], ...]:
    try:
        paths = sorted(folder.glob("*.json"))
    except OSError as error:
        log.warning("cunorm: the tables of launches in %s are not read: %s", folder, error)
        return ()
    return tuple((path, table) for path in paths if (table := read(path)) is not None)


def forget() -> None:
    """The next plans read the files again."""
    _in_folder.cache_clear()
    tables_of.cache_clear()


@cache
def reads_the_users() -> bool:
    """False where the environment has CUNORM_TUNE=0; read once."""
    return is_on(TUNE_VARIABLE, "tables of your own")


def user_folder() -> Path | None:
    """Where `python -m cunorm tune` keeps its tables; None for a user without a home directory."""
    try:
        return cache_directory() / "tables"
    except FileNotFoundError:
        return None


def read(path: Path) -> Table | None:
    """The table of a file; None, with a line in the log, if it cannot be used."""
    try:
        content = json.loads(path.read_text())
        if content["version"] != VERSION:
            raise ValueError(f"it has version {content['version']}, not {VERSION}")
        launches = [_launch(fields) for fields in content["launches"]]
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
        points = {
            layout: {shape: tuple(map(float, numbers)) for shape, numbers in by_shape.items()}
            for layout, by_shape in content.get("measured", {}).items()
        }
        arch, sms, bandwidth = (content[name] for name in ("arch", "sms", "bandwidth"))
        if not all(type(number) is int for number in (arch, sms, bandwidth)) or sms < 1:
            raise ValueError(f"no GPU has {sms!r} SMs, architecture {arch!r}, bandwidth {bandwidth!r}")
        return Table(arch, sms, bandwidth, layouts, points)
    except (OSError, ValueError, ArithmeticError, LookupError, TypeError, AttributeError, RecursionError) as error:
        reason = f"{type(error).__name__}: {error}"
        log.warning("cunorm: %s is no table of launches (%s); it is not used", path, reason)
        return None


def _launch(fields: dict[str, Any]) -> Launch:
    """A Launch of a file; ValueError where it has what no launch has."""
    launch, usual = Launch(**fields), Launch("")
    wrong = [name for name, value in fields.items() if type(value) is not type(getattr(usual, name))]
    wrong = wrong or [name for name in ("rows_per_cta", "ctas_per_sm", "held") if getattr(launch, name) < 1]
    wrong += ["stages"] if not wrong and launch.stages < 0 else []
    wrong += ["cluster"] if launch.cluster not in (1, *CLUSTER_SIZES) else []
    wrong += ["kernel"] if launch.kernel not in (*KERNELS["forward"], *KERNELS["backward"]) else []
    if wrong:
        raise ValueError(f"no launch has {', '.join(f'{name}={fields[name]!r}' for name in wrong)}")
    return launch


def write(path: Path, table: Table) -> None:
    """One line for each launch, and one for each shape of each layout. OSError where it cannot be written."""
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

    head = {"version": VERSION, "arch": table.arch, "sms": table.sms, "bandwidth": table.bandwidth}
    text = json.dumps(head)[:-1] + ',\n "launches": [\n'
    text += ",\n".join(f"  {json.dumps(fields(launch))}" for launch in launches)
    text += '\n ],\n "layouts": {\n' + ",\n".join(layouts) + "\n }"
    measured_lines = [
        f"  {json.dumps(layout)}: {json.dumps({shape: list(numbers) for shape, numbers in by_shape.items()})}"
        for layout, by_shape in table.points.items()
    ]
    text += ',\n "measured": {\n' + ",\n".join(measured_lines) + "\n }" if measured_lines else ""
    write_file(path, (text + "}\n").encode())
