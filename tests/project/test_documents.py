"""What README.md and the docstrings show runs as it stands there."""

from __future__ import annotations

import doctest
import importlib
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
BLOCKS = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
ON_A_GPU = "import cupy"
BY_TORCHRUN = re.compile(r"# torchrun --nproc-per-node (\d) ")
HERE = [block for block in BLOCKS if ON_A_GPU not in block and not BY_TORCHRUN.match(block)]
PACKAGES = {"": "numpy", "torch": "torch", "jax": "jax", "flax": "flax"}  # and what their docstrings need
EXAMPLES = re.compile(r"^ *>>> ", re.MULTILINE)


def heading(block: str) -> str:
    text = (ROOT / "README.md").read_text()
    return re.findall(r"^#+ (.*)$", text[: text.index(block)], re.MULTILINE)[-1]


def run(block: str) -> None:
    for library in ("torch", "jax", "flax", "ml_dtypes"):
        if re.search(rf"^(from|import) {library}", block, re.MULTILINE):
            pytest.importorskip(library)
    exec(compile(block, "README.md", "exec"), {"__name__": "README"})


@pytest.mark.parametrize("block", HERE, ids=heading)
def test_readme(block):
    run(block)


@pytest.mark.gpu
@pytest.mark.parametrize("block", [block for block in BLOCKS if ON_A_GPU in block], ids=heading)
def test_readme_on_a_gpu(block):
    run(block)


@pytest.mark.slow
@pytest.mark.parametrize("block", [block for block in BLOCKS if BY_TORCHRUN.match(block)], ids=heading)
def test_readme_over_ranks(block, tmp_path):
    """By its own command line, on the CPU."""
    pytest.importorskip("torch")
    path = tmp_path / "train.py"
    path.write_text(block)
    ranks = BY_TORCHRUN.match(block)[1]
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", ranks, str(path)]
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("package", PACKAGES)
def test_docstrings(package):
    pytest.importorskip(PACKAGES[package])
    folder = ROOT / "adapters" / package if package else ROOT / "cunorm"
    attempted = 0
    for path in sorted(folder.rglob("*.py")):
        if not EXAMPLES.search(path.read_text()):
            continue
        within = path.relative_to(folder).with_suffix("").parts
        if not package and within[0] in PACKAGES:  # a link to an adapter
            continue
        found = doctest.testmod(importlib.import_module(".".join(("cunorm", *filter(None, [package]), *within))))
        assert found.failed == 0, path
        attempted += found.attempted
    assert attempted >= 10
