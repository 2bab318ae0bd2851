"""Tables of launches as files: JSON, with a line for each launch and for each shape of each layout.

A file that cannot be used is left out with a line in the log: it is never an error, and never another bit.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable
from dataclasses import asdict
from itertools import chain
from math import inf
from pathlib import Path
from typing import Any

from ..kernel.cache import write as write_file
from ..kernel.device import CLUSTER_SIZES
from .legal import KERNELS
from .tables import TO, Launch, Table

VERSION = 1  # of the fields of a Launch: a table of another version is not read

log = logging.getLogger("cunorm")


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
        for shape in chain.from_iterable(layouts.values()):
            _check_shape(shape)
        points = {
            layout: {shape: tuple(map(float, numbers)) for shape, numbers in by_shape.items()}
            for layout, by_shape in content.get("measured", {}).items()
        }
        arch, bandwidth = content["arch"], content["bandwidth"]
        if type(arch) is not int or type(bandwidth) not in (int, float) or bandwidth <= 0:
            raise ValueError(f"no GPU has architecture {arch!r}, bandwidth of an SM {bandwidth!r}")
        return Table(arch, bandwidth, layouts, points)
    except (OSError, ValueError, ArithmeticError, LookupError, TypeError, AttributeError, RecursionError) as error:
        reason = f"{type(error).__name__}: {error}"
        log.warning("cunorm: %s is no table of launches (%s); it is not used", path, reason)
        return None


def _check_shape(shape: str) -> None:
    """ValueError where "to" is not followed by a number of vectors."""
    _, to, vectors = shape.partition(TO)
    if to:
        int(vectors)


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

    head = {"version": VERSION, "arch": table.arch, "bandwidth": table.bandwidth}
    text = json.dumps(head)[:-1] + ',\n "launches": [\n'
    text += ",\n".join(f"  {json.dumps(fields(launch))}" for launch in launches)
    text += '\n ],\n "layouts": {\n' + ",\n".join(layouts) + "\n }"
    measured_lines = [
        f"  {json.dumps(layout)}: {json.dumps({shape: list(numbers) for shape, numbers in by_shape.items()})}"
        for layout, by_shape in table.points.items()
    ]
    text += ',\n "measured": {\n' + ",\n".join(measured_lines) + "\n }" if measured_lines else ""
    write_file(path, (text + "}\n").encode())
