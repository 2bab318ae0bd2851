"""The table that a run ends with."""

from __future__ import annotations

from typing import Any

from rich.table import Table

from bench.results import ROOF, group


def summary(lines: list[dict[str, Any]]) -> Table:
    """Return the microseconds by case and provider, with the fraction of the roof in brackets."""
    measured = group(lines, "run")
    names = list(dict.fromkeys(name for entry in measured for name in entry.lines if name != ROOF))
    table = Table("case", ROOF, *names)
    for entry in measured:
        case, roof = entry.case, entry.seconds(ROOF)
        cells = [f"{roof * 1e6:.2f}" if roof else ""]
        for name in names:
            line, seconds = entry.lines.get(name), entry.seconds(name)
            if line is None:
                cells.append("")
            elif seconds:
                cells.append(f"{seconds * 1e6:.2f}" + (f" ({roof / seconds:.2f})" if roof else ""))
            elif line["status"] == "ok":
                cells.append(f"{max(line['errors'].values()):.3g} eps")
            else:
                cells.append(line["status"])
        offset = "" if case.offset is None else f", |mean| / std {case.offset:g}"
        table.add_row(f"{case}{offset}", *cells)
    return table
