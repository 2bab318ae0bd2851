"""The tables of docs/speed.md and the pictures in docs/plots, made of bench/results."""

from __future__ import annotations

import statistics
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from bench.bars import Bar, bars
from bench.results import CLASSES, OURS, ROOF, UNKNOWN, Measured, Results, class_of, distinct, load
from bench.suites import DIRECTIONS, DTYPES, OPS, parse_sizes

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "speed.md"
PLOTS = ROOT / "docs" / "plots"
BEGIN, END = "<!-- bench:begin -->", "<!-- bench:end -->"
ELSEWHERE = {"error.svg", "peers-dark.svg", "peers-light.svg"}  # pictures that other pages or lines show


def show(paths: Sequence[Path]) -> int:
    """Print the bars and the losses of some files; nothing is changed."""
    results = load(paths)
    print(bars_text(bars(results)))
    print(f"\n{losses(results)}")
    return _one_commit(results)


def report(
    *,
    check: bool,
    commit: str | None = None,
    results: Results | None = None,
    page: Path = PAGE,
    plots: Path = PLOTS,
) -> int:
    """Print the bars and write the page and pictures, or with `check` say what differs.

    Return 1 if something differs under `check`, 2 if the results are of several commits, and else 0.
    """
    from bench import plots as drawing

    results = load(commit=commit) if results is None else results
    print(bars_text(bars(results)))
    if _one_commit(results):
        return 2
    with tempfile.TemporaryDirectory() as folder:
        drawing.write(drawing.draw(results), Path(folder))
        pictures = {path.name: path.read_bytes() for path in sorted(Path(folder).iterdir())}
    old = page.read_text()
    new = spliced(old, section(results, list(pictures)))
    present = {path.name: path.read_bytes() for path in plots.glob("*.svg")}
    changed = [page.name] if new != old else []
    changed += [name for name in sorted(pictures | present) if pictures.get(name) != present.get(name)]
    if check:
        for name in changed:
            print(f"bench: {name} is not what bench/results gives. Run `python -m bench report`.")
        return 1 if changed else 0
    page.write_text(new)
    plots.mkdir(parents=True, exist_ok=True)
    for name in present.keys() - pictures.keys():
        (plots / name).unlink()
    for name, content in pictures.items():
        (plots / name).write_bytes(content)
    print(f"bench: {', '.join(changed) or 'nothing'} changed.")
    return 0


def _one_commit(results: Results) -> int:
    """Return 2 and say why, unless all results are of one commit that is known."""
    commits = results.by_commit()
    if len(commits) <= 1 and UNKNOWN not in commits:
        return 0
    print("\nbench: REFUSED. One published table comes from one commit; these results are of:", file=sys.stderr)
    for commit, files in commits.items():
        print(f"  {commit}: {', '.join(files)}", file=sys.stderr)
    print(
        "Choose one by --commit, move the others to bench/results/earlier, and say by BENCH_COMMIT which commit a copy "
        "without git is of.",
        file=sys.stderr,
    )
    return 2


def spliced(text: str, section: str) -> str:
    """Return `text` with what is between the markers replaced."""
    if text.count(BEGIN) != 1 or text.count(END) != 1 or text.index(BEGIN) > text.index(END):
        raise ValueError(f"bench: docs/speed.md must have one line {BEGIN} and after it one line {END}. Put them back.")
    head, _, rest = text.partition(BEGIN)
    return f"{head}{BEGIN}\n\n{section}\n\n{END}{rest.partition(END)[2]}"


def section(results: Results, pictures: Sequence[str] = ()) -> str:
    """Return the generated part of docs/speed.md, without the markers."""
    shown = "\n".join(
        f"![{name.removesuffix('.svg').replace('-', ' ').capitalize()}](plots/{name})"
        for name in pictures
        if name not in ELSEWHERE
    )
    parts = [about(results), _verdicts(bars(results)), losses(results), _speeds(results), shown]
    return "\n\n".join(part for part in parts if part)


def bars_text(rows: list[Bar]) -> str:
    """Return each bar as text: whether it holds, and the time over what is allowed of its worst five cases."""
    lines = []
    for bar in rows:
        verdict = {True: "holds", False: "FAILS", None: "not measured"}[bar.holds]
        lines.append(f"{verdict}: {bar.what}" + (f": {bar.held} of {bar.cases} cases" if bar.cases else ""))
        lines += [f"    {ratio:.3f} {where}" for ratio, where in bar.worst]
    return "\n".join(lines)


def bars_table(rows: list[Bar]) -> str:
    """Return each bar as a row of Markdown: whether it holds, and its worst case."""
    lines = ["| bar | holds | cases that hold | worst: time over what is allowed |", "|---|---|---|---|"]
    for bar in rows:
        verdict = "yes" if bar.holds else "**no**"
        (ratio, where), *_ = bar.worst
        lines.append(f"| {bar.what} | {verdict} | {bar.held} of {bar.cases} | {ratio:.2f}, {where} |")
    return "\n".join(lines)


def _verdicts(rows: list[Bar]) -> str:
    measured = [bar for bar in rows if bar.cases]
    if not measured:
        return ""
    failed, missing = sum(not bar.holds for bar in measured), len(rows) - len(measured)
    text = f"Of the {len(rows)} bars that this project sets itself {len(measured) - failed} hold and {failed} fail"
    text += f"; {missing} {'was' if missing == 1 else 'were'} not measured." if missing else "."
    return f"{text}\n\n{bars_table(measured)}"


def about(results: Results) -> str:
    if not results.environments:
        return "No results yet."
    named = {name: e for name, e in results.environments.items() if name.partition("-")[0] != "error"}
    machines = sorted({f"{e['gpu']}, {e['date']}" for e in named.values()})
    timed = {name for entry in results.measured for name in (OURS, *entry.peers) if entry.seconds(name) is not None}
    versions: dict[str, set[str]] = {}
    for environment in named.values():
        for name, version in environment["providers"].items():
            if name in timed:
                versions.setdefault(name, set()).add(version)
    measured = ", ".join(f"{name} {' and '.join(sorted(numbers))}" for name, numbers in versions.items())
    text = f"One {'; '.join(machines)}; commit {', '.join(results.by_commit())}. Measured: {measured}."
    missing = sorted({name for e in named.values() for name in e["missing"]} - timed)
    text += f" Not importable there, so not measured: {', '.join(missing)}." if missing else ""
    roofs = [entry.lines[ROOF] for entry in results.measured if entry.seconds(ROOF) is not None]
    if any("kernel" not in line for line in roofs):
        text += (
            " The roof of these results is one streaming kernel, not the best of a search: 4 to 5% too low where as "
            "much is read as written, so that fractions above 1 and bars that hold by little say nothing. "
            "Providers were timed one after the other then, not in turns."
        )
    return text


def _speeds(results: Results) -> str:
    """Return the table of GB/s of 64 M elements in bfloat16."""
    columns = [(op, direction) for op in OPS for direction in DIRECTIONS]
    titles = ("columns", "LayerNorm forward", "backward", "RMSNorm forward", "backward")
    lines = [f"| {' | '.join(titles)} |", "|" + "---|" * 5]
    for cols in parse_sizes(["32:262144"]):
        cells = []
        for op, direction in columns:
            wanted = {"op": op, "direction": direction, "dtype": DTYPES["bf16"], "cols": cols}
            cells.append(_cell(next(results.select(suite="roof", **wanted), None)))
        if any(cells):
            lines.append(f"| {cols} | " + " | ".join(cells) + " |")
    if len(lines) == 2:
        return ""
    intro = (
        "64 M elements of any row length in bfloat16, GB/s of useful bytes; in brackets the fraction of the roof. The "
        "longest rows are few then, and not yet in their stride (256 rows of 262144)."
    )
    return intro + "\n\n" + "\n".join(lines)


def _cell(entry: Measured | None) -> str:
    if entry is None:
        return ""
    if entry.of_roof:
        return f"{entry.lines[OURS]['gigabytes_per_second']:.0f} ({entry.of_roof:.2f})"
    status = entry.lines.get(OURS, {}).get("status", "")
    return "" if status == "ok" else status


def losses(results: Results) -> str:
    """Return how many distinct cases with peers are behind, by class, and each of those by name."""
    compared = distinct(results.measured)
    if not compared:
        return ""
    behind = sorted((entry for entry in compared if entry.behind), key=lambda entry: entry.speedup or 0)
    lines = [
        f"Of {len(compared)} distinct cases with a peer cunorm is behind the fastest by more than the larger of 2% and "
        f"0.1 us in {len(behind)}:",
        "",
        "| class | cases | behind | time of the fastest peer over ours: least, median |",
        "|---|---|---|---|",
    ]
    for name in CLASSES:
        of_class = [entry for entry in compared if class_of(entry.case) == name]
        if of_class:
            speedups = [entry.speedup or 0.0 for entry in of_class]
            figures = f"{min(speedups):.2f}, {statistics.median(speedups):.2f}"
            lines.append(f"| {name} | {len(of_class)} | {sum(entry.behind for entry in of_class)} | {figures} |")
    if not behind:
        return "\n".join(lines)
    lines += ["", "<details><summary>The cases behind</summary>", ""]
    lines += ["| case | class | cunorm, us | fastest peer, us | time of the peer / ours |", "|---|---|---|---|---|"]
    for entry in behind:
        peer, ours = entry.peers[0], entry.lines[OURS]
        time = f"{ours['microseconds']:.2f}" if "microseconds" in ours else ours["status"]
        theirs = f"{entry.lines[peer]['microseconds']:.2f} {peer}"
        lines.append(f"| {entry.case} | {class_of(entry.case)} | {time} | {theirs} | {entry.speedup:.2f} |")
    return "\n".join([*lines, "", "</details>"])
