"""The code in README.md, the pages of docs/, examples/ and the docstrings runs as it is printed."""

from __future__ import annotations

import doctest
import importlib
import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

from cunorm.__main__ import parser

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
NOTEBOOKS = sorted((ROOT / "examples").glob("*.ipynb"))
ON_A_GPU = "import cupy"
BY_TORCHRUN = re.compile(r"# torchrun --nproc-per-node (\d) ")
PACKAGES = {"": "numpy", "torch": "torch", "jax": "jax", "flax": "flax"}  # package: what its docstrings need
IN_DOCSTRINGS = re.compile(r"^ *>>> ", re.MULTILINE)
LIBRARIES = ("torch", "jax", "flax", "ml_dtypes", "transformers", "peft")


class Block(NamedTuple):
    page: str
    heading: str
    text: str


def blocks_of(page: Path) -> list[Block]:
    text, blocks = page.read_text(), []
    for match in re.finditer(r"```python\n(.*?)```", text, re.DOTALL):
        headings = re.findall(r"^#+ (.*)$", text[: match.start()], re.MULTILINE)
        blocks.append(Block(page.relative_to(ROOT).as_posix(), headings[-1], match[1]))
    return blocks


BLOCKS = [block for page in PAGES for block in blocks_of(page)]


def name(block: Block) -> str:
    return f"{block.page}: {block.heading}"


def run(block: Block) -> None:
    for library in LIBRARIES:
        if re.search(rf"^(from|import) {library}", block.text, re.MULTILINE):
            pytest.importorskip(library)
    exec(compile(block.text, block.page, "exec"), {"__name__": "page"})


def here(block: Block) -> bool:
    return ON_A_GPU not in block.text and not BY_TORCHRUN.match(block.text)


def run_alone(command: list[str], folder: Path) -> str:
    """Return the output of a process on the CPU, which must succeed. If an example lacks a package, skip the test."""
    environment = os.environ | {
        "CUDA_VISIBLE_DEVICES": "",
        "MPLBACKEND": "agg",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(ROOT),
    }
    command = [sys.executable, *command]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=180)
    assert done.returncode == 0, done.stdout + done.stderr
    if " is not installed" in done.stdout:
        pytest.skip(done.stdout.strip())
    return done.stdout


@pytest.mark.parametrize("block", [block for block in BLOCKS if here(block)], ids=name)
def test_a_page_runs_as_printed(block):
    run(block)


@pytest.mark.gpu
@pytest.mark.parametrize("block", [block for block in BLOCKS if ON_A_GPU in block.text], ids=name)
def test_a_page_runs_on_a_gpu_as_printed(block):
    run(block)


@pytest.mark.slow
@pytest.mark.parametrize("block", [block for block in BLOCKS if BY_TORCHRUN.match(block.text)], ids=name)
def test_a_page_runs_over_ranks(block, tmp_path):
    """The page's own command line runs it on the CPU."""
    pytest.importorskip("torch")
    (tmp_path / "train.py").write_text(block.text)
    ranks = BY_TORCHRUN.match(block.text)[1]
    run_alone(["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", ranks, "train.py"], tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_runs_on_the_cpu(path, tmp_path):
    text = path.read_text()
    assert len(text.splitlines()) < 120
    for library in LIBRARIES:
        if library != "peft" and re.search(rf"^(from|import) {library}", text, re.MULTILINE):
            pytest.importorskip(library)
    ranks = BY_TORCHRUN.search(text)
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", ranks[1]] if ranks else []
    assert run_alone([*launcher, str(path)], tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs_on_the_cpu(path, tmp_path):
    """The cells run one after the other. The notebook stores no output, and says that there is no GPU."""
    pytest.importorskip("torch")
    pytest.importorskip("matplotlib")
    cells = json.loads(path.read_text())["cells"]
    code = [cell for cell in cells if cell["cell_type"] == "code"]
    assert sum(len(cell["source"]) for cell in cells) < 120
    assert not any(cell["outputs"] or cell["execution_count"] for cell in code)
    (tmp_path / "notebook.py").write_text("\n\n".join("".join(cell["source"]) for cell in code))
    assert "No GPU" in run_alone(["notebook.py"], tmp_path)


COMMANDS = [
    pytest.param(line, id=f"{page.relative_to(ROOT).as_posix()}: {line}")
    for page in PAGES
    for block in re.findall(r"```(?:sh|console)?\n(.*?)```", page.read_text(), re.DOTALL)
    for line in block.splitlines()
    if line.startswith(("python -m cunorm", "cunorm "))
]


@pytest.mark.parametrize("line", COMMANDS)
def test_a_command_is_one_that_the_parser_knows(line):
    words = shlex.split(line, comments=True)
    parser().parse_args(words[1:] if words[0] == "cunorm" else words[3:])


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_links_of_a_page_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        path, _, anchor = target.partition("#")
        if "://" in path or path.startswith("mailto:"):
            continue
        file = page.parent / path if path else page
        assert file.exists(), target
        if anchor:
            headings = re.findall(r"^#+ (.*)$", file.read_text(), re.MULTILINE)
            assert anchor in {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}, (
                target
            )


def test_readme_is_short():
    text = (ROOT / "README.md").read_text()
    assert len(text.splitlines()) <= 150
    assert len(text.split()) <= 1000


def test_every_page_is_in_the_site_and_in_llms_txt():
    site, index = (ROOT / "mkdocs.yml").read_text(), (ROOT / "llms.txt").read_text()
    for page in sorted((ROOT / "docs").rglob("*.md")):
        relative = page.relative_to(ROOT / "docs").as_posix()
        assert relative in site, relative
        assert f"docs/{relative}" in index, relative


@pytest.mark.parametrize("page", ["command-line.md", "errors.md", pytest.param("models.md", marks=pytest.mark.slow)])
def test_a_generated_part_of_a_page_is_current(page):
    command = [sys.executable, "docs/generate.py", "--check", page]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    if "is left as it is" in done.stdout:
        pytest.skip(done.stdout.strip())


@pytest.mark.parametrize("package", PACKAGES)
def test_docstrings(package):
    pytest.importorskip(PACKAGES[package])
    folder = ROOT / "adapters" / package if package else ROOT / "cunorm"
    attempted = 0
    for path in sorted(folder.rglob("*.py")):
        if not IN_DOCSTRINGS.search(path.read_text()):
            continue
        within = path.relative_to(folder).with_suffix("").parts
        if not package and within[0] in PACKAGES:  # it links to an adapter
            continue
        results = doctest.testmod(importlib.import_module(".".join(("cunorm", *filter(None, [package]), *within))))
        assert results.failed == 0, path
        attempted += results.attempted
    assert attempted >= 10
