"""SVG pictures of results. The same results give the same bytes, with one version of matplotlib."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable
from pathlib import Path
from statistics import median

import matplotlib

matplotlib.use("svg")

import matplotlib.pyplot as plt
from matplotlib.colors import TwoSlopeNorm
from matplotlib.figure import Figure

from bench.results import CLASSES, OURS, ROOF, Measured, Results, class_of, distinct
from bench.suites import DIRECTIONS, DTYPES, LARGE, MEGA, OPS

NAMES = {"layer_norm": "LayerNorm", "rms_norm": "RMSNorm"}
# Colours are fixed, so that a peer looks the same in every picture.
COLOURS = {
    ROOF: "black",
    OURS: "#d62728",
    "torch": "#1f77b4",
    "torch.compile": "#17becf",
    "torch.compile max-autotune": "#006d77",
    "Triton tutorial": "#9467bd",
    "Liger": "#2ca02c",
    "QuACK": "#ff7f0e",
    "QuACK tuned": "#b35900",
    "apex fast": "#8c564b",
    "apex": "#c49c94",
    "TransformerEngine": "#e377c2",
    "cuDNN": "#bcbd22",
    "XLA": "#7f7f7f",
    "Flax": "#c7c7c7",
}
SIZED = ("widths", "long", "odd", "roof")  # suites whose rows follow from the columns
DARK = "#0d1117"  # behind a page in dark mode
THEMES = {
    "light": {},
    "dark": {
        **dict.fromkeys(("figure.facecolor", "axes.facecolor", "savefig.facecolor", "legend.facecolor"), DARK),
        **dict.fromkeys(("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color"), "#c9d1d9"),
    },
}
SETTINGS = {"svg.hashsalt": "cunorm", "svg.fonttype": "none", "font.size": 9, "path.simplify": False}


def draw(results: Results) -> dict[str, Figure]:
    """Return every picture for which there are results, by file name."""
    figures = {}
    with plt.rc_context(SETTINGS):
        for direction in DIRECTIONS:
            for short, dtype in DTYPES.items():
                figure = _speed(results, direction, dtype)
                if figure is not None:
                    figures[f"speed-{direction}-{short}.svg"] = figure
        figures |= {
            name: figure
            for name, figure in (("map.svg", _map(results)), ("error.svg", _error(results)))
            if figure is not None
        }
    for theme, settings in THEMES.items():
        with plt.rc_context(SETTINGS | settings):
            figure = _peers(results)
            if figure is not None:
                figures[f"peers-{theme}.svg"] = figure
    return figures


def write(figures: dict[str, Figure], folder: Path) -> None:
    """Write the pictures, without the date that matplotlib would put in."""
    folder.mkdir(parents=True, exist_ok=True)
    with plt.rc_context(SETTINGS):
        for name, figure in figures.items():
            figure.savefig(folder / name, format="svg", metadata={"Date": None}, facecolor=figure.get_facecolor())
            plt.close(figure)


def _speed(results: Results, direction: str, dtype: str) -> Figure | None:
    """Draw the fraction of the roof over every width, with a row of panels for each norm and a panel for each size."""
    sizes = {"1 M": MEGA, "8 M": 8 * MEGA, "64 M": LARGE}
    panels = {
        (op, size): [
            entry
            for suite in SIZED
            for entry in results.select(suite=suite, op=op, direction=direction, dtype=dtype)
            if _of_size(entry, elements)
        ]
        for op in OPS
        for size, elements in sizes.items()
    }
    kept = [size for size in sizes if any(entry.of_roof for op in OPS for entry in panels[op, size])]
    if not kept:
        return None
    figure, axes = plt.subplots(
        len(OPS), len(kept), figsize=(6 * len(kept) + 2, 7), sharey=True, squeeze=False, layout="constrained"
    )
    for op, row in zip(OPS, axes, strict=True):
        for size, axis in zip(kept, row, strict=True):
            for name, points in of_roof(panels[op, size]).items():
                line = {"linewidth": 1.2} if name == OURS else {"linestyle": "", "marker": "o", "markersize": 3}
                axis.plot(*zip(*points, strict=True), color=COLOURS[name], label=name, **line)
            axis.axhline(1, color=COLOURS[ROOF], linestyle="--", linewidth=1, label=ROOF)
            axis.set(title=f"{NAMES[op]} {direction}, {dtype}, {size} elements", xlabel="columns", ylim=(0, 1.1))
            axis.set_xscale("log", base=2)
            axis.grid(alpha=0.3)
        row[0].set_ylabel("roof time / time")
        row[0].legend(fontsize=7)
    return figure


def _of_size(entry: Measured, elements: int) -> bool:
    """Return whether a case has about so many elements; they are not exact because rows are whole."""
    return abs(entry.case.elements / elements - 1) < 0.1


def of_roof(entries: Iterable[Measured]) -> dict[str, list[tuple[int, float]]]:
    """Return (columns, roof time / time) of every provider, a median where a width was measured more than once."""
    by_provider: dict[str, dict[int, list[float]]] = {}
    for entry in entries:
        roof = entry.seconds(ROOF)
        for name in (OURS, *entry.peers):
            seconds = entry.seconds(name)
            if roof and seconds:
                by_provider.setdefault(name, {}).setdefault(entry.case.cols, []).append(roof / seconds)
    return {name: [(cols, median(points[cols])) for cols in sorted(points)] for name, points in by_provider.items()}


def _peers(results: Results) -> Figure | None:
    """Draw the time of every peer over ours, with a dot for each case: the losses are left of 1."""
    rows = [(name, direction) for name in reversed(CLASSES) for direction in reversed(DIRECTIONS)]
    by_row = {
        (name, direction): [
            entry
            for entry in distinct(results.measured)
            if class_of(entry.case) == name and entry.case.direction == direction
        ]
        for name, direction in rows
    }
    rows = [row for row in rows if by_row[row]]
    if not rows:
        return None
    figure, axis = plt.subplots(figsize=(8, 0.42 * len(rows) + 1.3), layout="constrained")
    dots = [
        (entry, place + 0.1 * (2 * i / max(1, len(by_row[row]) - 1) - 1))
        for place, row in enumerate(rows)
        for i, entry in enumerate(by_row[row])
    ]

    def ratio(entry: Measured, name: str) -> float:
        return (entry.seconds(name) or 0.0) / (entry.seconds(OURS) or 1.0)

    for name in COLOURS:
        points = [(ratio(entry, name), height) for entry, height in dots if name in entry.peers]
        if points:
            axis.plot(*zip(*points, strict=True), "o", color=COLOURS[name], markersize=4, alpha=0.8, label=name)
    losses = [(ratio(entry, entry.peers[0]), height) for entry, height in dots if entry.behind]
    if losses:
        axis.plot(*zip(*losses, strict=True), "o", color=COLOURS[OURS], markersize=9, fillstyle="none", label="a loss")
    axis.axvline(1, color=COLOURS[OURS], linewidth=1)
    axis.set_xscale("log")
    low, high = axis.get_xlim()
    axis.set_xlim(min(low, 0.8), high)
    axis.set_xticks([tick for tick in (0.5, 1, 2, 3, 5, 8) if low <= tick <= high])
    axis.xaxis.set_major_formatter("{x:g}")
    axis.minorticks_off()
    axis.set_yticks(range(len(rows)), [f"{name}, {direction}" for name, direction in rows])
    axis.set(xlabel="time of the other library / time of cunorm; left of 1 cunorm is slower")
    axis.grid(axis="x", alpha=0.3)
    axis.legend(fontsize=8)
    return figure


def whole_grid(cells: Collection[tuple[int, int]]) -> tuple[list[int], list[int]]:
    """Return rows and columns whose combinations are all among the cells, leaving out what has most holes first."""
    rows, cols = sorted({row for row, _ in cells}), sorted({col for _, col in cells})
    while rows and cols:
        holes = [(sum((row, col) not in cells for col in cols) / len(cols), 0, row) for row in rows]
        holes += [(sum((row, col) not in cells for row in rows) / len(rows), 1, col) for col in cols]
        share, axis, value = max(holes)
        if not share:
            break
        (cols if axis else rows).remove(value)
    return rows, cols


def _map(results: Results) -> Figure | None:
    """Draw our speed / the best peer's over rows and columns in bfloat16: red where we lose, blue where we win."""
    panels = [(op, direction) for op in OPS for direction in DIRECTIONS]
    cells: dict[tuple[str, str], dict[tuple[int, int], float]] = {panel: {} for panel in panels}
    for entry in distinct(results.measured):
        case, speedup = entry.case, entry.speedup or 0.0
        if case.dtype == "bfloat16" and not case.heads:
            panel, key = cells[case.op, case.direction], (case.rows, case.cols)
            panel[key] = min(speedup, panel.get(key, speedup))  # the worse of both dtypes of weight
    rows, cols = whole_grid(set.intersection(*(set(panel) for panel in cells.values())))
    if len(rows) < 2 or len(cols) < 2:
        return None
    figure, axes = plt.subplots(2, 2, figsize=(12, 9), layout="constrained")
    norm = TwoSlopeNorm(1.0, 0.5, 2.0)
    for axis, panel in zip(axes.flat, panels, strict=True):
        grid = [[cells[panel][row, col] for col in cols] for row in rows]
        image = axis.pcolormesh(_edges(cols), _edges(rows), grid, cmap="RdBu", norm=norm)
        for row, col in itertools.product(rows, cols):
            value = cells[panel][row, col]
            colour = "black" if 0.7 < value < 1.6 else "white"
            axis.text(col, row, f"{value:.2f}", ha="center", va="center", fontsize=8, color=colour)
        axis.set(title=f"{NAMES[panel[0]]} {panel[1]}, bfloat16", xlabel="columns", ylabel="rows")
        axis.set_xscale("log")
        axis.set_yscale("log")
        axis.set_xticks(cols, [str(col) for col in cols], minor=False)
        axis.set_yticks(rows, [str(row) for row in rows], minor=False)
        axis.minorticks_off()
    figure.colorbar(image, ax=axes, extend="both", shrink=0.6, label="time of the best peer / time of cunorm; 1: equal")
    return figure


def _edges(centres: list[int]) -> list[float]:
    """Return the edges of cells around the centres, on an axis of logarithms."""
    between = [(a * b) ** 0.5 for a, b in itertools.pairwise(centres)]
    return [centres[0] ** 2 / between[0], *between, centres[-1] ** 2 / between[-1]]


def _error(results: Results) -> Figure | None:
    """Draw the largest error of y over |mean| / std."""
    entries = [entry for entry in results.measured if entry.case.offset is not None]
    if not entries:
        return None
    figure, axis = plt.subplots(figsize=(6, 4), layout="constrained")
    for name, colour in COLOURS.items():
        points = [
            (entry.case.offset, entry.lines[name]["errors"]["y"])
            for entry in sorted(entries, key=lambda entry: entry.case.offset or 0)
            if "errors" in entry.lines.get(name, {})
        ]
        if points:
            axis.loglog(*zip(*points, strict=True), color=colour, label=name, marker="o", markersize=3)
    axis.set(title="LayerNorm forward, float32", xlabel="|mean| / std of a row")
    axis.set_ylabel("largest error of y, in eps of the row's largest |y|")
    axis.grid(alpha=0.3)
    axis.legend(fontsize=7)
    return figure
