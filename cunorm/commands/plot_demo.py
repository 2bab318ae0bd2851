"""`demo --plot`: a picture of the first row: x with its mean and standard deviation, and y."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import numpy

from .. import layer_norm_forward

ENDS = (".pdf", ".png", ".svg")


def why_not(file: str) -> str:
    if find_spec("matplotlib") is None:
        return "needs matplotlib: pip install matplotlib"
    if Path(file).suffix not in ENDS:
        return f"must name a file that ends in {', '.join(ENDS)}; got {file}"
    return ""


def draw(x: numpy.ndarray, name: str, file: str) -> None:
    """Draw the picture; raise OSError if its file cannot be written."""
    from matplotlib.figure import Figure

    row = x.reshape(-1, x.shape[-1])[:1]
    y, mean, rstd = (array[0] for array in layer_norm_forward(row))
    columns, spread = numpy.arange(row.size), 1 / rstd
    figure = Figure(figsize=(8, 5), layout="constrained")
    above, below = figure.subplots(2, sharex=True)
    above.set(title=f"The first row of {name}: mean {mean:.4g}, rstd {rstd:.4g}", ylabel="x, mean, mean ± 1 / rstd")
    for axes, values, centre, reach in ((above, row[0], mean, spread), (below, y, 0, 1)):
        axes.axhspan(centre - reach, centre + reach, color="tab:red", alpha=0.15)
        axes.axhline(centre, color="tab:red")
        axes.step(columns, values, where="mid", color="tab:blue")
    below.set(xlabel="column", ylabel="y = (x - mean) · rstd")
    figure.savefig(file)
