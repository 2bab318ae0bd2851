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
    parts = [_about(results), bars_table(bars(results)), _speeds(results), _losses(results)]
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


def _speeds(results: Results) -> str:
    """GB/s of large problems in bfloat16, with the best peer beside."""
    columns = [(op, direction) for op in OPS for direction in DIRECTIONS]
    norms = ("LayerNorm forward", "backward", "RMSNorm forward", "backward")
    titles = ("columns", *(f"{title} | best peer" for title in norms))
    lines = [f"| {' | '.join(titles)} |", "|" + "---|" * 9]
    for cols in parse_sizes(["32:262144"]):
        cells = []
        for op, direction in columns:
            entry = next(results.select(suite="roof", op=op, direction=direction, dtype="bfloat16", cols=cols), None)
            cells += _cells(entry)
        if any(cells):
            lines.append(f"| {cols} | " + " | ".join(cells) + " |")
    if len(lines) == 2:
        return ""
    intro = (
        "GB/s of useful bytes in bfloat16, 64 M elements, and in brackets the fraction of what the streaming kernel "
        "reaches over the same buffers. Backward is dx, dweight and dbias together."
    )
    return intro + "\n\n" + "\n".join(lines)


def _cells(entry: Measured | None) -> list[str]:
    if entry is None:
        return ["", ""]
    ours, peer = "", ""
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
