"""The table that a run ends with."""

from __future__ import annotations

from typing import Any

from rich.table import Table

from bench.results import ROOF, group


def summary(lines: list[dict[str, Any]]) -> Table:
    """GB/s by case and provider; brackets are the fraction of the roof. `lines` begin with the environment."""
    measured = group(lines[1:], "run")
    names = [name for name in dict.fromkeys(line["provider"] for line in lines[1:]) if name != ROOF]
    table = Table("case", ROOF, *names)
    for entry in measured:
        case, roof = entry.case, entry.seconds(ROOF)
        cells = [f"{entry.lines[ROOF]['gigabytes_per_second']:.0f}" if roof else ""]
        for name in names:
            line, seconds = entry.lines.get(name), entry.seconds(name)
            if line is None:
                cells.append("")
            elif seconds and roof:
                cells.append(f"{line['gigabytes_per_second']:.0f} ({roof / seconds:.2f})")
            elif line["status"] == "ok":
                cells.append(f"{max(line['errors'].values()):.3g} eps")
            else:
                cells.append(line["status"])
        offset = "" if case.offset is None else f", |mean| / std {case.offset:g}"
        table.add_row(f"{case.op} {case.direction} {case.dtype} {case.rows} x {case.cols}{offset}", *cells)
    return table
