"""The generated parts of the pages: `python docs/generate.py` writes them, `--check` says what is not current.

The command line is read from the parser, the index of errors from the source.
"""

from __future__ import annotations

import argparse
import ast
import sys
from pathlib import Path

DOCS = Path(__file__).resolve().parent
ROOT = DOCS.parent
sys.path.insert(0, str(ROOT))

from cunorm.__main__ import parser  # noqa: E402

# Where what a package raises is written.
SOURCES = {
    "cunorm": ROOT / "cunorm",
    "cunorm.torch": ROOT / "adapters" / "torch",
    "cunorm.jax": ROOT / "adapters" / "jax",
    "cunorm.flax": ROOT / "adapters" / "flax",
}
LEAST_LETTERS = 16  # of a message that are not put in; fewer say nothing


def commands() -> str:
    """A section for each command, with a table of its options."""
    (choices,) = (action for action in parser()._actions if isinstance(action, argparse._SubParsersAction))
    sections = []
    for name, command in choices.choices.items():
        (help_,) = (one.help for one in choices._choices_actions if one.dest == name)
        text = command.description or f"{(help_ or '').capitalize()}."
        rows = ["| option | values | meaning |", "|---|---|---|"]
        for action in command._actions:
            if isinstance(action, argparse._HelpAction):
                continue
            options = ", ".join(f"`{one}`" for one in action.option_strings) or f"`{action.dest}`"
            values = ", ".join(map(str, action.choices)) if action.choices else ""
            if not values and action.nargs != 0:
                values = str(action.metavar or action.dest.upper())
            rows.append(f"| {options} | {values} | {action.help or ''} |")
        sections.append(f"## {name}\n\n{text}\n\n" + "\n".join(rows))
    return "\n\n".join(sections)


def shown(node: ast.expr) -> str:
    """A message as it is written, with … for what is put in."""
    if isinstance(node, ast.Constant):
        return str(node.value)
    if isinstance(node, ast.JoinedStr):
        return "".join(shown(value) if isinstance(value, ast.Constant) else "…" for value in node.values)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return shown(node.left) + shown(node.right)
    return "…"


def errors() -> str:
    """Every message that the source raises, by package and kind."""
    sections = []
    for package, folder in SOURCES.items():
        found: set[tuple[str, str]] = set()
        for path in folder.rglob("*.py"):
            if any(path.is_relative_to(ROOT / "cunorm" / name) for name in ("torch", "jax", "flax")):
                continue  # a link to an adapter
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call) and node.exc.args:
                    message = " ".join(shown(node.exc.args[0]).split())
                    kind = ast.unparse(node.exc.func)
                    if sum(letter.isalpha() for letter in message) >= LEAST_LETTERS and not kind.startswith("_"):
                        found.add((message.strip("… ").removeprefix(": "), kind))
        rows = [f"| {text.replace('|', chr(92) + '|').replace('<', '&lt;')} | {kind} |" for text, kind in sorted(found)]
        sections.append("\n".join([f"## {package}", "", "| message | kind |", "|---|---|", *rows]))
    return "\n\n".join(sections)


PARTS = {"command-line.md": commands, "errors.md": errors}
BEGIN, END = "<!-- generated: begin -->", "<!-- generated: end -->"


def main() -> int:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--check", action="store_true", help="write nothing; exit with 1 if something is not current")
    check, stale = options.parse_args().check, []
    for name, part in PARTS.items():
        page = DOCS / name
        old = page.read_text()
        head, _, rest = old.partition(BEGIN)
        new = f"{head}{BEGIN}\n\n{part()}\n\n{END}{rest.partition(END)[2]}"
        if new != old:
            stale.append(name)
            if not check:
                page.write_text(new)
    for name in stale:
        print(f"docs/{name} is not current. Run: python docs/generate.py" if check else f"docs/{name} is written")
    return 1 if check and stale else 0


if __name__ == "__main__":
    raise SystemExit(main())
