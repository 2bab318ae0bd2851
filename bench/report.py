"""README's Speed section and the pictures in bench/plots, made of bench/results."""

from __future__ import annotations

import tempfile
from pathlib import Path

from bench.bars import Bar, bars
from bench.results import OURS, Measured, Results, load
from bench.suites import DIRECTIONS, OPS, parse_sizes

ROOT = Path(__file__).parents[1]
README = ROOT / "README.md"
PLOTS = ROOT / "bench" / "plots"
BEGIN, END = "<!-- bench:begin -->", "<!-- bench:end -->"


def report(*, check: bool, results: Results | None = None, readme: Path = README, plots: Path = PLOTS) -> int:
    """Print the bars; write README and pictures, or with `check` say what differs and return 1."""
    from bench import plots as drawing

    results = load() if results is None else results
    print(bars_table(bars(results)))
    old = readme.read_text()
    new = spliced(old, section(results))
    with tempfile.TemporaryDirectory() as folder:
        drawing.write(drawing.draw(results), Path(folder))
        pictures = {path.name: path.read_bytes() for path in sorted(Path(folder).iterdir())}
    present = {path.name: path.read_bytes() for path in plots.glob("*.svg")}
    changed = [readme.name] if new != old else []
    changed += [name for name in sorted(pictures | present) if pictures.get(name) != present.get(name)]
    if check:
        for name in changed:
            print(f"bench: {name} is not what bench/results gives. Run `python -m bench report`.")
        return 1 if changed else 0
    readme.write_text(new)
    plots.mkdir(parents=True, exist_ok=True)
    for name in present.keys() - pictures.keys():
        (plots / name).unlink()
    for name, content in pictures.items():
        (plots / name).write_bytes(content)
    print(f"bench: {', '.join(changed) or 'nothing'} changed.")
    return 0


def spliced(text: str, section: str) -> str:
    """`text` with what lies between the markers replaced."""
    if text.count(BEGIN) != 1 or text.count(END) != 1 or text.index(BEGIN) > text.index(END):
        raise ValueError(f"bench: README.md must have one line {BEGIN} and after it one line {END}. Put them back.")
    head, _, rest = text.partition(BEGIN)
    return f"{head}{BEGIN}\n\n{section}\n\n{END}{rest.partition(END)[2]}"


def section(results: Results) -> str:
    """The generated part of README, without the markers."""
    parts = [_about(results), _against_peers(results), _speeds(results), _losses(results)]
    return "\n\n".join(part for part in parts if part)


def bars_table(rows: list[Bar]) -> str:
    """Markdown: each bar, whether it holds, and by how much its worst case does or does not."""
    lines = ["| bar | at least | holds | cases | worst | where |", "|---|---|---|---|---|---|"]
    for bar in rows:
        verdict = {True: "yes", False: "**no**", None: "not measured"}[bar.holds]
        worst = "" if bar.worst is None else f"{bar.worst:.2f}"
        lines.append(
            f"| {bar.what} | {bar.at_least:.2f} | {verdict} | {bar.held}/{bar.cases} | {worst} | {bar.where} |"
        )
    return "\n".join(lines)


def _about(results: Results) -> str:
    if not results.environments:
        return "No results yet."
    machines = sorted({f"{e['gpu']}, {e['date']}" for e in results.environments.values()})
    versions: dict[str, set[str]] = {}
    for environment in results.environments.values():
        for name, version in environment["providers"].items():
            versions.setdefault(name, set()).add(version)
    measured = ", ".join(f"{name} {' and '.join(sorted(found))}" for name, found in versions.items())
    missing = sorted({name for e in results.environments.values() for name in e["missing"]} - versions.keys())
    text = f"One {'; '.join(machines)}. Measured: {measured}."
    return f"{text} Not importable there, so not measured: {', '.join(missing)}." if missing else text


def _against_peers(results: Results) -> str:
    """LayerNorm in bfloat16 at the shapes of the suite `anchors`, with the best peer beside."""
    entries = {
        (entry.case.rows, entry.case.cols, entry.case.direction): entry
        for entry in results.select(suite="anchors", op="layer_norm", dtype="bfloat16")
    }
    shapes = sorted({key[:2] for key in entries}, reverse=True)
    titles = ("rows x columns", *(f"{direction} | best peer | times" for direction in DIRECTIONS))
    lines = [f"| {' | '.join(titles)} |", "|" + "---|" * 7]
    for rows, cols in sorted(shapes, key=lambda shape: (-shape[0], shape[1])):
        cells = []
        for direction in DIRECTIONS:
            entry = entries.get((rows, cols, direction))
            cells += _cells(entry)
            cells.append(f"{entry.speedup:.2f}" if entry and entry.speedup else "")
        lines.append(f"| {rows} x {cols} | " + " | ".join(cells) + " |")
    if len(lines) == 2:
        return ""
    intro = (
        "LayerNorm in bfloat16 with weight and bias, GB/s of useful bytes; in brackets the fraction of what a kernel "
        "that only streams the same bytes reaches over the same buffers in the same run. Backward is dx, dweight and "
        "dbias together; the last column of each is the time of the fastest peer over ours."
    )
    return intro + "\n\n" + "\n".join(lines)


def _speeds(results: Results) -> str:
    """GB/s of 64 M elements in bfloat16."""
    columns = [(op, direction) for op in OPS for direction in DIRECTIONS]
    titles = ("columns", "LayerNorm forward", "backward", "RMSNorm forward", "backward")
    lines = [f"| {' | '.join(titles)} |", "|" + "---|" * 5]
    for cols in parse_sizes(["32:262144"]):
        cells = []
        for op, direction in columns:
            entry = next(results.select(suite="roof", op=op, direction=direction, dtype="bfloat16", cols=cols), None)
            cells.append(_cells(entry)[0])
        if any(cells):
            lines.append(f"| {cols} | " + " | ".join(cells) + " |")
    if len(lines) == 2:
        return ""
    intro = (
        "The same for 64 M elements of any row length; the longest rows are few then, and not yet in their stride "
        "(256 rows of 262144)."
    )
    return intro + "\n\n" + "\n".join(lines)


def _cells(entry: Measured | None) -> list[str]:
    if entry is None:
        return ["", ""]
    status = entry.lines.get(OURS, {}).get("status", "")
    ours, peer = "" if status == "ok" else status, ""
    if entry.of_roof:
        ours = f"{entry.lines[OURS]['gigabytes_per_second']:.0f} ({entry.of_roof:.2f})"
    if entry.peers:
        peer = f"{entry.lines[entry.peers[0]]['gigabytes_per_second']:.0f} {entry.peers[0]}"
    return [ours, peer]


def _losses(results: Results) -> str:
    """Every case where a peer is faster by more than 2%."""
    lost = [entry for entry in results.measured if entry.speedup is not None and entry.speedup < 0.98]
    compared = [entry for entry in results.measured if entry.speedup is not None]
    if not compared:
        return ""
    text = f"Of {len(compared)} cases with a peer, one is faster than cunorm by more than 2% in {len(lost)}"
    if not lost:
        return text + "."
    lines = [text + ":", "", "| case | cunorm, us | fastest peer, us | time of the peer / ours |", "|---|---|---|---|"]
    for entry in sorted(lost, key=lambda entry: entry.speedup or 0):
        case, peer = entry.case, entry.peers[0]
        ours, theirs = (entry.lines[name]["microseconds"] for name in (OURS, peer))
        lines.append(
            f"| {case.op} {case.direction} {case.dtype} {case.rows} x {case.cols} "
            f"| {ours:.2f} | {theirs:.2f} {peer} | {entry.speedup:.2f} |"
        )
    return "<details><summary>" + lines[0].rstrip(":") + "</summary>\n\n" + "\n".join(lines[2:]) + "\n\n</details>"
