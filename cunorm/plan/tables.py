"""Tables of measurements: for a class of GPUs, the fastest launch for a layout and a number of rows.

A table decides no bit of y, mean, rstd or dx, because the shape of a row, by which it is added up, is part of the key.
It may decide the number of partial sums of a backward pass, and so the last bit of dweight and dbias.

Tables are JSON files with a line for each launch and for each shape of each layout. Those that `python -m cunorm tune`
writes into the user's cache are read before those that ship with cunorm. A file that cannot be used is left out with a
line in the log; it is never an error, and it changes no bit.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import cache, lru_cache
from itertools import chain, pairwise, product
from math import inf, sqrt
from pathlib import Path
from typing import Any

from ..kernel.cache import cache_directory
from ..kernel.cache import write as write_file
from ..kernel.device import CLUSTER_SIZES, Device, is_on
from ..operation import NORMS, is_named, name_of_operation
from .problem import ITEMSIZE, Problem, ceil_div
from .resources import KERNELS, at_odd_addresses, is_legal, widest_column
from .spec import NormSpec

VERSION = 2  # of the fields of a Launch; a table of another version is not read
BANDWIDTH_TOLERANCE = 0.1  # by how much the bandwidth of an SM differs within a class
REACH = 1.25  # a launch that was measured serves so many times more rows, and so many times fewer
ZERO_CENTRED = "zero_centered_"
TO = " to "  # part of an entry's name: "256x2 to 408" serves rows of up to 408 vectors, "256x2" those of any number


@dataclass(frozen=True, slots=True)
class Launch:
    """The fields of a NormSpec that say how rows of a shape are run, and the number of CTAs that share a row."""

    kernel: str
    cluster: int = 1
    rows_per_cta: int = 1
    ctas_per_sm: int = 1
    stages: int = 0
    rows_in_registers: bool = False
    prefetch: bool = False
    weights_in_registers: bool = False
    streamed_x: bool = False
    vectors_per_thread: int = 1
    unpacked: bool = False

    @classmethod
    def of(cls, spec: NormSpec) -> Launch:
        return cls(**{name: getattr(spec, name) for name in cls.__slots__})

    def applied(self, spec: NormSpec) -> NormSpec:
        """Return the kernel of the same rows, run by this launch."""
        fields = {name: getattr(self, name) for name in self.__slots__ if name != "cluster"}
        return replace(spec, shape=spec.shape.in_clusters(self.cluster), **fields)


OVERLAPPED, SPLIT = -1, 0  # ways to run a norm with its product
Algorithm = tuple[int, ...]  # the attributes of an algorithm of cuBLASLt
Choices = tuple[tuple[float, Launch | None], ...]  # launches by the most rows per SM; None leaves it to the next table


@dataclass(frozen=True, slots=True)
class Table:
    """The launches of a class of GPUs, by layout and then by shape."""

    arch: int
    bandwidth: float  # of memory, in GB/s per SM
    layouts: Mapping[str, Mapping[str, Choices]]
    # The numbers of rows per SM that were measured, by layout and then by shape, whatever won.
    points: Mapping[str, Mapping[str, tuple[float, ...]]] = field(default_factory=dict)
    # Of norms with their products, by columns, outs and rows: what was measured to be the fastest, which is the CTAs of
    # the clusters of one launch, OVERLAPPED or SPLIT.
    products: Mapping[int, Mapping[int, Mapping[int, int]]] = field(default_factory=dict)
    # Of the products alone, by version of cuBLAS, columns, outs and rows: the configuration of the algorithm that was
    # measured to be the fastest; empty if cuBLASLt's first guess was.
    algorithms: Mapping[str, Mapping[int, Mapping[int, Mapping[int, Algorithm]]]] = field(default_factory=dict)

    def serves(self, device: Device) -> bool:
        alike = abs(device.bandwidth / device.sms - self.bandwidth) <= BANDWIDTH_TOLERANCE * self.bandwidth
        return self.arch == device.arch and alike

    def choices(self, layout: str, spec: NormSpec) -> Choices:
        """Return the launches by the number of rows.

        Full rows and a zero-centred weight have entries of their own, or share those of other rows and weights.
        """
        return self._entry(layout, spec, is_full(spec))

    def _entry(self, layout: str, spec: NormSpec, full: bool) -> Choices:
        for name in dict.fromkeys((layout, layout.removeprefix(ZERO_CENTRED))):
            entries = self.layouts.get(name, {})
            for shape in ((shape_key(spec, full=True),) if full else ()) + (self._shape(name, spec), shape_key(spec)):
                if shape in entries:
                    return entries[shape]
        return ()

    def _shape(self, layout: str, spec: NormSpec) -> str:
        """Return the key of rows that are not full: with the fewest vectors that serve them, else with any number."""
        shape = shape_key(spec)
        prefix = shape + TO
        limits = (int(key.removeprefix(prefix)) for key in self.layouts.get(layout, {}) if key.startswith(prefix))
        vectors = ceil_div(spec.cols, spec.shape.vector_cols)
        lowest = min((limit for limit in limits if vectors <= limit), default=None)
        return shape if lowest is None else f"{prefix}{lowest}"

    def _own_shape(self, layout: str, spec: NormSpec) -> str:
        return shape_key(spec, full=True) if is_full(spec) else self._shape(layout, spec)

    def has_point(self, layout: str, spec: NormSpec, rows_of_sm: float) -> bool:
        """Whether that number of rows per SM was measured."""
        return rows_of_sm in self.points.get(layout, {}).get(self._own_shape(layout, spec), ())

    def with_point(self, layout: str, spec: NormSpec, rows_of_sm: float, launch: Launch | None) -> Table:
        """Return the table with one more number of rows measured, and the launch that won; None if the present one did.

        It serves up to REACH times more rows, and fewer, but no further than half way to the next number measured.
        """
        shape = self._own_shape(layout, spec)
        points = sorted({*self.points.get(layout, {}).get(shape, ()), rows_of_sm})
        layouts = dict(self.layouts)
        if launch is not None:
            middles = [sqrt(point * rows_of_sm) for point in points if point != rows_of_sm]
            low = max([rows_of_sm / REACH, *(middle for middle in middles if middle < rows_of_sm)])
            high = min([rows_of_sm * REACH, *(middle for middle in middles if middle > rows_of_sm)])
            # Rows that share this entry get a copy of it first, which stays as it was.
            keys = product((layout, *_zero_centred(layout)), {is_full(spec), True})
            for (name, full), choices in {key: self._entry(key[0], spec, key[1]) for key in keys}.items():
                key = shape_key(spec, full=True) if full else self._shape(name, spec)
                layouts[name] = {**layouts.get(name, {}), key: choices or ((inf, None),)}
            choices = _with_run(layouts[layout][shape], low, high, launch)
            layouts[layout] = {**layouts[layout], shape: choices}
        measured_shapes = {**self.points.get(layout, {}), shape: tuple(points)}
        return replace(self, layouts=layouts, points={**self.points, layout: measured_shapes})

    def with_product(self, cols: int, outs: int, rows: int, way: int) -> Table:
        """Return the table with one more norm with its product measured."""
        by_outs = self.products.get(cols, {})
        by_rows = {**by_outs.get(outs, {}), rows: way}
        return replace(self, products={**self.products, cols: {**by_outs, outs: by_rows}})

    def algorithm(self, cublas: str, cols: int, outs: int, rows: int) -> Algorithm | None:
        """Return the algorithm of so many rows; None if they were not measured. Nearby rows have others."""
        return self.algorithms.get(cublas, {}).get(cols, {}).get(outs, {}).get(rows)

    def with_algorithm(self, cublas: str, cols: int, outs: int, rows: int, algorithm: Algorithm) -> Table:
        """Return the table with one more product measured."""
        by_cols = self.algorithms.get(cublas, {})
        by_outs = by_cols.get(cols, {})
        by_rows = {**by_outs.get(outs, {}), rows: algorithm}
        by_cols = {**by_cols, cols: {**by_outs, outs: by_rows}}
        return replace(self, algorithms={**self.algorithms, cublas: by_cols})


def _zero_centred(layout: str) -> tuple[str, ...]:
    """Return the layout that shares the entries of this one if it has none, if there is such a layout."""
    name, _, rest = layout.partition(", ")
    return (ZERO_CENTRED + layout,) if name in NORMS and rest.startswith("forward") else ()


def _with_run(choices: Choices, low: float, high: float, launch: Launch) -> Choices:
    """Return the choices with `launch` for more rows than `low` and up to `high`."""
    before = [choice for choice in choices if choice[0] < low]
    at_low = next((choice for most, choice in choices if most >= low), None)
    after = [choice for choice in choices if choice[0] > high]
    run = [*before, (low, at_low), (high, launch), *after]
    return (*(choice for choice, following in pairwise(run) if choice[1] != following[1]), run[-1])


def rows_of_sm(problem: Problem, device: Device) -> float:
    return problem.rows / (device.sms - problem.sm_margin)


@lru_cache(maxsize=4096)
def layout_of(spec: NormSpec) -> str | None:
    """Return the name of a layout in tables; None if nothing was measured for it.

    The named operations were measured forward, at aligned addresses, and plain norms backward, with x and dy as wide.
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
        if not plain or len(spec.sums) not in sums:
            return None
        odd = ", odd" if spec.cols % spec.shape.vector_cols else ""  # rows that end within a vector
        return f"{operation.norm}, backward, {of_x} {of_columns}{odd}"
    if not spec.aligned or any(matrix.itemsize > itemsize for matrix in spec.matrices):
        return None
    words = [name, "forward", of_x + (f" {len(spec.columns)}{of_columns}" if spec.columns else "")]
    words += [f"y8 {spec.scales}"] if spec.scales else []
    words += ["returns " + " ".join(result.name for result in spec.results)] if operation.prologue else []
    return ", ".join(words)


def shape_key(spec: NormSpec, full: bool = False) -> str:
    """Return the key of a shape in tables, whatever the number of CTAs that share a row; `full` if the row is full."""
    _, threads, vectors = spec.shape.order
    return f"{threads}x{vectors}" + (" full" if full else "")


def is_full(spec: NormSpec) -> bool:
    """Whether a row has as many columns as its shape."""
    return spec.cols == spec.shape.capacity


SHIPPED = Path(__file__).parent / "tables"
TUNE_VARIABLE = "CUNORM_TUNE"


def measured(problem: Problem, spec: NormSpec, device: Device) -> NormSpec | None:
    """Return the kernel of the rows of `spec` that was measured to be the fastest; None if no table has one."""
    rows = rows_of_sm(problem, device)
    for kernels in _measured_kernels(spec, device):
        kernel = next((kernel for most, kernel in kernels if rows <= most), None)
        # Kernels for pairs of rows have a CTA for each pair, which would take every SM.
        if kernel is not None and not (kernel.kernel == "forward_pairs" and problem.sm_margin):
            return kernel
    return None


def algorithm(device: Device, cublas: str, cols: int, outs: int, rows: int) -> Algorithm:
    """Return the algorithm that was measured to be the fastest for a product; empty: cuBLASLt's first guess."""
    answers = (table.algorithm(cublas, cols, outs, rows) for _, table in tables_of(device))
    return next((answer for answer in answers if answer is not None), ())


@lru_cache(maxsize=4096)
def _measured_kernels(spec: NormSpec, device: Device) -> tuple[tuple[tuple[float, NormSpec | None], ...], ...]:
    """Return the kernels by the most rows per SM, of each table that serves a device and has the layout."""
    layout = layout_of(spec)
    if layout is None:
        return ()
    of_tables = (table.choices(layout, spec) for _, table in tables_of(device))
    return tuple(
        tuple((most, launch and run_by(launch, spec, device)) for most, launch in choices)
        for choices in of_tables
        if choices
    )


def run_by(launch: Launch, spec: NormSpec, device: Device) -> NormSpec | None:
    """Return the kernel of the rows of `spec`, run by that launch; None if it cannot be."""
    if launch.kernel not in KERNELS[spec.kernel]:
        return None
    kernel = launch.applied(spec)
    if spec.kernel == "backward" and not spec.aligned:
        kernel = at_odd_addresses(kernel, device)
    return kernel if is_legal(kernel, device) else None


@cache
def tables_of(device: Device) -> tuple[tuple[Path, Table], ...]:
    """Return the tables that serve a device, and their files, the user's first."""
    users = user_folder() if reads_the_users() else None
    tables = (*(_in_folder(users) if users else ()), *_in_folder(SHIPPED))
    return tuple((path, table) for path, table in tables if table.serves(device))


@cache
def _in_folder(folder: Path) -> tuple[tuple[Path, Table], ...]:
    try:
        paths = sorted(folder.glob("*.json"))
    except OSError as error:
        log.warning("cunorm: the tables of launches in %s are not read: %s", folder, error)
        return ()
    return tuple((path, table) for path in paths if (table := read(path)) is not None)


def forget() -> None:
    """Forget the tables, so that the next plans read the files again."""
    for cached in (_in_folder, tables_of, _measured_kernels):
        cached.cache_clear()


@cache
def reads_the_users() -> bool:
    """Return whether the user's tables are read: unless the environment, which is read once, has CUNORM_TUNE=0."""
    return is_on(TUNE_VARIABLE, "tables of your own")


def user_folder() -> Path | None:
    """Return the folder of the tables of `python -m cunorm tune`; None for a user without a home directory."""
    try:
        return cache_directory() / "tables"
    except FileNotFoundError:
        return None


log = logging.getLogger("cunorm")


def read(path: Path) -> Table | None:
    """Return the table of a file; None, with a line in the log, if it cannot be used."""
    try:
        content = json.loads(path.read_text())
        if content["version"] != VERSION:
            raise ValueError(f"it has version {content['version']}, not {VERSION}")
        launches = [_launch_of(fields) for fields in content["launches"]]
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
        for shape in chain.from_iterable(layouts.values()):
            _check_shape(shape)
        points = {
            layout: {shape: tuple(map(float, numbers)) for shape, numbers in by_shape.items()}
            for layout, by_shape in content.get("measured", {}).items()
        }
        arch, bandwidth = content["arch"], content["bandwidth"]
        if type(arch) is not int or type(bandwidth) not in (int, float) or bandwidth <= 0:
            raise ValueError(f"no GPU has architecture {arch!r}, bandwidth of an SM {bandwidth!r}")
        products = _by_shape(content.get("products", {}), int)
        algorithms = {
            cublas: _by_shape(by_cols, lambda numbers: tuple(map(int, numbers)))
            for cublas, by_cols in content.get("algorithms", {}).items()
        }
        return Table(arch, bandwidth, layouts, points, products, algorithms)
    except (OSError, ValueError, ArithmeticError, LookupError, TypeError, AttributeError, RecursionError) as error:
        reason = f"{type(error).__name__}: {error}"
        log.warning("cunorm: %s is no table of launches (%s); it is not used", path, reason)
        return None


def _by_shape(content: Any, value_of: Callable[[Any], Any]) -> dict[int, dict[int, dict[int, Any]]]:
    """Return what a file says by columns, outs and rows."""
    return {
        int(cols): {
            int(outs): {int(rows): value_of(value) for rows, value in by_rows.items()}
            for outs, by_rows in by_outs.items()
        }
        for cols, by_outs in content.items()
    }


def _check_shape(shape: str) -> None:
    """Raise ValueError if "to" is not followed by a number of vectors."""
    _, to, vectors = shape.partition(TO)
    if to:
        int(vectors)


def _launch_of(fields: dict[str, Any]) -> Launch:
    """Return a Launch of a file. Raise ValueError for a field that no launch can have."""
    launch, default = Launch(**fields), Launch("")
    wrong = [name for name, value in fields.items() if type(value) is not type(getattr(default, name))]
    wrong = wrong or [
        name for name in ("rows_per_cta", "ctas_per_sm", "vectors_per_thread") if getattr(launch, name) < 1
    ]
    wrong += ["stages"] if not wrong and launch.stages < 0 else []
    wrong += ["cluster"] if launch.cluster not in (1, *CLUSTER_SIZES) else []
    wrong += ["kernel"] if launch.kernel not in (*KERNELS["forward"], *KERNELS["backward"]) else []
    if wrong:
        raise ValueError(f"no launch has {', '.join(f'{name}={fields[name]!r}' for name in wrong)}")
    return launch


def write(path: Path, table: Table) -> None:
    """Write a file with a line for each launch, and one for each shape of each layout."""
    launches: dict[Launch, int] = {}
    layouts = {
        layout: {
            shape: [
                [None if most == inf else most, None if launch is None else launches.setdefault(launch, len(launches))]
                for most, launch in choices
            ]
            for shape, choices in by_shape.items()
        }
        for layout, by_shape in table.layouts.items()
    }
    defaults = asdict(Launch(""))
    fields = [{name: value for name, value in asdict(launch).items() if value != defaults[name]} for launch in launches]
    parts = {
        "launches": _lines(fields, 1),
        "layouts": _lines(layouts, 2),
        "measured": _lines(table.points, 1),
        "products": _lines(table.products, 1),
        "algorithms": _lines(table.algorithms, 2),
    }
    head = json.dumps({"version": VERSION, "arch": table.arch, "bandwidth": table.bandwidth})[:-1]
    write_file(path, ",\n".join([head, *(f' "{name}": {text}' for name, text in parts.items())]).encode() + b"}\n")


def _lines(content: Any, depth: int, margin: str = " ") -> str:
    """Return JSON in which what lies `depth` levels below has a line of its own."""
    if depth == 0 or not content:
        return json.dumps(content)
    inner = margin + " "
    if isinstance(content, list):
        (first, last), items = "[]", [_lines(item, depth - 1, inner) for item in content]
    else:
        (first, last), names = "{}", (json.dumps(str(name)) for name in content)
        items = [
            f"{name}: {_lines(item, depth - 1, inner)}" for name, item in zip(names, content.values(), strict=True)
        ]
    return f"{first}\n" + ",\n".join(inner + item for item in items) + f"\n{margin}{last}"
