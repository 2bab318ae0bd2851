"""The generated parts of the pages: `python docs/generate.py` writes them, `--check` says what is not current.

The command line is read from the parser, the index of errors from the source; models are tried.
"""

from __future__ import annotations

import argparse
import ast
import re
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

LEAST_LETTERS = 14  # of a message that are not put in; fewer say nothing
CAME = "(got|there is|it could not|…)"  # how the part of a message begins that says what came

DOCS = Path(__file__).resolve().parent
ROOT = DOCS.parent
sys.path.insert(0, str(ROOT))

from cunorm.__main__ import parser  # noqa: E402
from cunorm.expression.tracing import POINTER  # noqa: E402

# Where what a package raises is written.
SOURCES = {
    "cunorm": ROOT / "cunorm",
    "cunorm.torch": ROOT / "adapters" / "torch",
    "cunorm.jax": ROOT / "adapters" / "jax",
    "cunorm.flax": ROOT / "adapters" / "flax",
}
# What is raised there does not reach who calls a public function as its own mistake.
INTERNAL = {
    "cunorm/commands/": "the command line says it in its own words",
    "cunorm/plan/tables.py": "the table is not used, and the log says so",
    "cunorm/kernel/cache.py": "the cache is not used, and the log says so",
    "cunorm/kernel/compile.py": "a fault of cunorm: its own text does not compile",
    "cunorm/kernel/driver.py": "a fault of cunorm: CUDA refuses its launch",
    "cunorm/kernel/launch.py": "a fault of cunorm: its launch does not fit its kernel",
    "adapters/torch/norm/nodes.py": "the nodes in C++ are not used, and the log says so",
}
OF_PYTHON = ("AssertionError", "")


def commands() -> str:
    """A section for each command, with a table of its options."""
    (choices,) = (action for action in parser()._actions if isinstance(action, argparse._SubParsersAction))
    sections = []
    for name, command in choices.choices.items():
        (help_,) = (one.help for one in choices._choices_actions if one.dest == name)
        text = command.description or f"{help_[0].upper()}{help_[1:]}."
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


class Entry(NamedTuple):
    """A message in its three parts, with … for what is put in."""

    package: str
    must_hold: str
    came: str
    remedy: str
    kind: str


class Source:
    """A file's messages. A text that has a name, or that a function returns, is put in where it stands."""

    def __init__(self, path: Path, texts: Mapping[str, ast.expr] = MappingProxyType({})):
        self.tree = ast.parse(path.read_text())
        own: dict[str, list[ast.expr]] = {}
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
                own.setdefault(node.targets[0].id, []).append(node.value)
        once = {name: values[0] for name, values in own.items() if len(values) == 1}
        formatted = {name: value for name, value in once.items() if isinstance(value, ast.JoinedStr | ast.IfExp)}
        self.texts = {**texts, **formatted}

    @staticmethod
    def is_text(node: ast.expr | None) -> bool:
        return isinstance(node, ast.JoinedStr) or (isinstance(node, ast.Constant) and isinstance(node.value, str))

    def shared(self) -> dict[str, ast.expr]:
        """The texts that other files import: of constants, and of functions that only return one."""
        found = {}
        for node in self.tree.body:
            if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name) and self.is_text(node.value):
                found[node.targets[0].id] = node.value
            if isinstance(node, ast.FunctionDef):
                ends = [one.value for one in ast.walk(node) if isinstance(one, ast.Return)]
                if len(ends) == 1 and self.is_text(ends[0]):
                    found[node.name] = ends[0]
        return found

    def shown(self, node: ast.expr) -> str:
        if isinstance(node, ast.Constant):
            return str(node.value)
        if isinstance(node, ast.JoinedStr):
            return "".join(map(self.shown, node.values))
        if isinstance(node, ast.FormattedValue):
            return self.shown(node.value)
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
            return self.shown(node.left) + self.shown(node.right)
        if isinstance(node, ast.IfExp):
            texts = [self.shown(one) if self.is_text(one) else "" for one in (node.body, node.orelse)]
            return " or ".join(texts) if all(" " in text for text in texts) else "…"
        name = node.func if isinstance(node, ast.Call) else node
        key = name.id if isinstance(name, ast.Name) else name.attr if isinstance(name, ast.Attribute) else ""
        return self.shown(self.texts[key]) if key in self.texts else "…"

    def raised(self) -> Iterator[tuple[ast.Raise, str, str]]:
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call) and node.exc.args:
                kinds = re.findall(r"\w*Error", ast.unparse(node.exc.func).replace("ShapeError", "ValueError"))
                yield (
                    node,
                    " or ".join(sorted(kinds)),
                    re.sub("…+", "…", " ".join(self.shown(node.exc.args[0]).split())),
                )


def parts(message: str) -> tuple[str, str, str]:
    """What must hold, what came and what to do, of a message such as "x must be ...; got .... Convert it."."""
    message = re.sub(r"^(…|[a-zA-Z_]+): |\.$", "", message)
    found = re.fullmatch(rf"(.+?); ({CAME}.*?)(?:(?:\.|:|;|\?) (.+))?", message)
    found = found or re.fullmatch(
        r"(.+? (?:cannot use|cannot be read|is wrong|must not).+?): (…[^.;]*)()(?:[.;] (.+))?", message
    )
    if found:
        return found[1], found[2], found[4] or implied(found[1])
    colon = any(words in message for words in ("cannot be traced: ", "has no truth")) or ". " not in message
    statement, _, remedy = message.partition(": " if colon else ". ")
    return statement, "", remedy


def implied(must_hold: str) -> str:
    """What to do, where a message ends with what came."""
    if " needs " in must_hold:
        return "Pass it, or leave out what needs it"
    return "Leave it out" if " is for " in must_hold else "Pass such a value"


def entries() -> dict[tuple[str, int], Entry]:
    """By the file and the line that raises it: every message that a public function raises."""
    files = [(package, path) for package, folder in SOURCES.items() for path in sorted(folder.rglob("*.py"))]
    texts = {name: text for _, path in files for name, text in Source(path).shared().items()}
    found = {}
    for package, path in files:
        relative = path.relative_to(ROOT).as_posix()
        if relative.startswith((*INTERNAL, "cunorm/torch/", "cunorm/jax/", "cunorm/flax/")):
            continue
        for node, kind, message in Source(path, texts).raised():
            if relative == "cunorm/expression/tracing.py" and kind == "TypeError":
                message = f"{message}. {POINTER}"  # trace adds it
            letters = sum(letter.isalpha() for letter in message)
            if letters >= LEAST_LETTERS and kind not in OF_PYTHON and not message.startswith("module "):
                found[relative, node.lineno] = Entry(package, *parts(message), kind)
    return found


def errors() -> str:
    """A table for each package, a row for each message."""
    rows: dict[str, set[str]] = {package: set() for package in SOURCES}
    for entry in entries().values():
        first = entry.remedy[0] if entry.remedy.startswith(("pip ", "help(")) else entry.remedy[0].upper()
        cells = (entry.must_hold, entry.came or "as it says", f"{first}{entry.remedy[1:]}.", entry.kind)
        rows[entry.package].add(
            "| " + " | ".join(cell.replace("|", r"\|").replace("<", "&lt;") for cell in cells) + " |"
        )
    head = "| what must hold | what came | what to do | kind |\n|---|---|---|---|\n"
    return "\n\n".join(f"## {package}\n\n{head}" + "\n".join(sorted(lines)) for package, lines in rows.items())


def models() -> str:
    """What `accelerate` does to models of transformers, by trying them; a minute."""
    try:
        import transformers
    except ImportError as error:
        raise SkippedError("transformers is not installed") from error
    page = re.search(r"transformers (\d[\d.]*),", (DOCS / "models.md").read_text())
    if CHECKS and page and page[1] != transformers.__version__:
        raise SkippedError(f"it is of transformers {page[1]}, and {transformers.__version__} is installed")
    import tried_models

    return tried_models.models()


class SkippedError(Exception):
    """A part cannot be made here."""


PARTS = {"command-line.md": commands, "errors.md": errors, "models.md": models}
BEGIN, END = "<!-- generated: begin -->", "<!-- generated: end -->"
CHECKS = "--check" in sys.argv


def main() -> int:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--check", action="store_true", help="write nothing; exit with 1 if something is not current")
    options.add_argument("pages", nargs="*", help=f"of {', '.join(PARTS)}; default: all")
    arguments, stale = options.parse_args(), []
    for name in arguments.pages or PARTS:
        page = DOCS / name
        old = page.read_text()
        head, _, rest = old.partition(BEGIN)
        try:
            new = f"{head}{BEGIN}\n\n{PARTS[name]()}\n\n{END}{rest.partition(END)[2]}"
        except SkippedError as reason:
            print(f"docs/{name} is left as it is: {reason}")
            continue
        if new != old:
            stale.append(name)
            if not arguments.check:
                page.write_text(new)
    for name in stale:
        print(f"docs/{name} is {'not current. Run: python docs/generate.py' if arguments.check else 'written'}")
    return 1 if arguments.check and stale else 0


if __name__ == "__main__":
    raise SystemExit(main())
