"""SVG pictures of results. The same results give the same bytes, with one version of matplotlib."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import matplotlib

matplotlib.use("svg")

import matplotlib.pyplot as plt
from matplotlib.colors import TwoSlopeNorm
from matplotlib.figure import Figure

from bench.results import OURS, ROOF, Measured, Results
from bench.suites import DIRECTIONS, DTYPES, OPS

NAMES = {"layer_norm": "LayerNorm", "rms_norm": "RMSNorm"}
# A fixed colour each, so that a peer looks the same in every picture.
COLOURS = {
    ROOF: "black",
    OURS: "#d62728",
    "torch": "#1f77b4",
    "torch.compile": "#17becf",
    "Triton tutorial": "#9467bd",
    "Liger": "#2ca02c",
    "QuACK": "#ff7f0e",
    "apex fast": "#8c564b",
    "apex": "#c49c94",
    "TransformerEngine": "#e377c2",
    "cuDNN": "#bcbd22",
    "XLA": "#7f7f7f",
}
SETTINGS = {"svg.hashsalt": "cunorm", "svg.fonttype": "none", "font.size": 9, "path.simplify": False}


def draw(results: Results) -> dict[str, Figure]:
    """Every picture there are results for, by file name."""
    figures = {}
    with plt.rc_context(SETTINGS):
        for direction in DIRECTIONS:
            for short, dtype in DTYPES.items():
                figure = _speed(results, direction, dtype)
                if figure is not None:
                    figures[f"speed-{direction}-{short}.svg"] = figure
        figures |= {
            name: figure
            for name, figure in (("peers.svg", _heat_map(results)), ("error.svg", _error(results)))
            if figure is not None
        }
    return figures


def write(figures: dict[str, Figure], folder: Path) -> None:
    """Write the pictures, without the date that matplotlib would put in."""
    folder.mkdir(parents=True, exist_ok=True)
    with plt.rc_context(SETTINGS):
        for name, figure in figures.items():
            figure.savefig(folder / name, format="svg", metadata={"Date": None})
            plt.close(figure)


def _speed(results: Results, direction: str, dtype: str) -> Figure | None:
    """GB/s against columns for large problems, a panel for each norm."""
    panels = [_sorted(results.select(suite="roof", op=op, direction=direction, dtype=dtype)) for op in OPS]
    if not any(panels):
        return None
    figure, axes = plt.subplots(1, len(OPS), figsize=(10, 4), sharey=True, layout="constrained")
    for axis, op, entries in zip(axes, OPS, panels, strict=True):
        for name, colour in COLOURS.items():
            points = [
                (entry.case.cols, entry.lines[name]["gigabytes_per_second"])
                for entry in entries
                if entry.seconds(name) is not None
            ]
            if points:
                style = {"linestyle": "--"} if name == ROOF else {"marker": "o", "markersize": 3}
                axis.plot(
                    *zip(*points, strict=True), color=colour, label=name, linewidth=2 if name == OURS else 1, **style
                )
        axis.set(title=f"{NAMES[op]} {direction}, {dtype}", xlabel="columns (64 M elements)", ylim=(0, None))
        axis.set_xscale("log", base=2)
        axis.grid(alpha=0.3)
    axes[0].set_ylabel("GB/s of useful bytes")
    if axes[0].lines:
        axes[0].legend(fontsize=7)
    return figure


def _heat_map(results: Results) -> Figure | None:
    """Our speed / the best peer's for every shape in bfloat16: red where we lose, blue where we win."""
    panels = [(op, direction) for op in OPS for direction in DIRECTIONS]
    cells: dict[tuple[str, str], dict[tuple[int, int], float]] = {panel: {} for panel in panels}
    for entry in results.measured:
        case = entry.case
        if case.dtype == "bfloat16" and entry.speedup is not None:
            panel = cells[case.op, case.direction]
            key = (case.rows, case.cols)
            panel[key] = min(entry.speedup, panel.get(key, entry.speedup))  # measured twice: the worse
    shapes = {shape for panel in cells.values() for shape in panel}
    if not shapes:
        return None
    rows, cols = (sorted({shape[axis] for shape in shapes}) for axis in (0, 1))
    figure, axes = plt.subplots(2, 2, figsize=(15, 11), layout="constrained")
    norm = TwoSlopeNorm(1.0, 0.5, 2.0)
    for axis, panel in zip(axes.flat, panels, strict=True):
        grid = [[cells[panel].get((row, col), float("nan")) for col in cols] for row in rows]
        image = axis.imshow(grid, cmap="RdBu", norm=norm, aspect="auto")
        for (row, col), value in cells[panel].items():
            axis.text(
                cols.index(col),
                rows.index(row),
                f"{value:.2f}",
                ha="center",
                va="center",
                fontsize=7,
                color="white" if not 0.7 < value < 1.6 else "black",
            )
        axis.set(title=f"{NAMES[panel[0]]} {panel[1]}, bfloat16", xlabel="columns", ylabel="rows")
        axis.set_xticks(range(len(cols)), cols, rotation=60)
        axis.set_yticks(range(len(rows)), rows)
    figure.colorbar(image, ax=axes, extend="both", shrink=0.6, label="time of the best peer / time of cunorm; 1: equal")
    return figure


def _error(results: Results) -> Figure | None:
    """Largest error of y against |mean| / std."""
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


def _sorted(entries: Iterable[Measured]) -> list[Measured]:
    """By columns, each once."""
    by_cols = {entry.case.cols: entry for entry in entries}
    return [by_cols[cols] for cols in sorted(by_cols)]
