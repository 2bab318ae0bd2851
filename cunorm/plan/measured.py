"""What the tables that serve a device say of rows: first those of `python -m cunorm tune`, which are in the user's
cache, then those that ship with cunorm.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from functools import cache, lru_cache
from pathlib import Path

from ..kernel.cache import cache_directory
from ..kernel.device import Device, is_on
from .legal import KERNELS, is_legal
from .problem import Problem
from .registers import with_rows_kept
from .spec import NormSpec
from .table_files import read
from .tables import Choices, Launch, Table, layout_of, rows_of_sm

SHIPPED = Path(__file__).parent / "tables"
TUNE_VARIABLE = "CUNORM_TUNE"

log = logging.getLogger("cunorm")


def measured(problem: Problem, spec: NormSpec, device: Device) -> NormSpec | None:
    """The kernel of the rows of `spec` that was measured to be the fastest; None if the cost rule is to say."""
    rows = rows_of_sm(problem, device)
    for choices in _choices(spec, device):
        launch = next((launch for most, launch in choices if rows <= most), None)
        # Rows by two and two have a CTA for each pair, which would take every SM.
        if launch is None or (launch.kernel == "forward_pairs" and problem.sm_margin):
            continue
        if (kernel := run_by(launch, spec, device)) is not None:
            return kernel
    return None


@lru_cache(maxsize=4096)
def _choices(spec: NormSpec, device: Device) -> tuple[Choices, ...]:
    """For each table that serves a device and knows the layout, what it says by the number of rows."""
    layout = layout_of(spec)
    if layout is None:
        return ()
    return tuple(choices for _, table in tables_of(device) if (choices := table.choices(layout, spec)))


@lru_cache(maxsize=4096)
def run_by(launch: Launch, spec: NormSpec, device: Device) -> NormSpec | None:
    """The kernel of the rows of `spec`, run by that launch; None where it cannot be."""
    if launch.kernel not in KERNELS[spec.kernel]:
        return None
    kernel = launch.applied(spec)
    if spec.kernel == "backward" and not spec.aligned:
        kernel = at_odd_addresses(kernel, device)
    return kernel if is_legal(kernel, device) else None


def at_odd_addresses(spec: NormSpec, device: Device) -> NormSpec:
    """The same with as many CTAs, which leave the same partial sums; a row that is kept frees no stage there."""
    stages = spec.stages + spec.rows_stay
    while stages > 2 and not is_legal(replace(spec, stages=stages), device):
        stages -= 1
    spec = replace(spec, stages=stages, rows_stay=False)
    return with_rows_kept(spec, device) if spec.cluster == 1 else spec


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
    for kept in (_in_folder, tables_of, _choices):
        kept.cache_clear()


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
