"""What is installed, what importing it costs, and who imports whom."""

from __future__ import annotations

import ast
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

import cunorm

ROOT = Path(__file__).parent.parent
SOURCES = sorted((ROOT / "cunorm").rglob("*.py"))
ADAPTERS = sorted((ROOT / "adapters").rglob("*.py"))
GPU_LIBRARIES = {"cupy", "cupyx", "cupy_backends", "cuda"}
FRAMEWORKS = {"torch", "jax", "jaxlib", "flax"}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> zipfile.ZipFile:
    """The wheel of a copy of the checkout: setuptools leaves its work beside the sources."""
    pytest.importorskip("setuptools", minversion="77")
    copy = tmp_path_factory.mktemp("checkout")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, copy)
    for name in ("adapters", "cunorm", "kernels_cu"):
        shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
    command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", ".", "."]
    built = subprocess.run(command, cwd=copy, capture_output=True, text=True)
    assert built.returncode == 0, built.stdout + built.stderr
    (path,) = copy.glob("*.whl")
    return zipfile.ZipFile(path)


def files_below(folder: Path, prefix: str) -> dict[str, bytes]:
    return {
        f"{prefix}/{path.relative_to(folder).as_posix()}": path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }


def test_the_wheel_holds_every_file_of_the_package_and_no_other(wheel):
    folders = {"cunorm": "cunorm", "kernels_cu": "cunorm/kernels_cu"}
    folders |= {f"adapters/{name}": f"cunorm/{name}" for name in ("flax", "jax", "torch")}
    expected = {}
    for folder, package in folders.items():
        expected |= files_below(ROOT / folder, package)
    suffixes = {Path(name).suffix for name in expected}
    assert {".py", ".cu", ".cuh", ".npy"} <= suffixes
    packed = {name: wheel.read(name) for name in wheel.namelist() if ".dist-info/" not in name}
    assert packed == expected


def test_the_wheel_has_the_licence_and_depends_on_numpy_alone(wheel):
    (metadata,) = (wheel.read(name).decode() for name in wheel.namelist() if name.endswith(".dist-info/METADATA"))
    required = [line for line in metadata.splitlines() if line.startswith("Requires-Dist:") and "extra ==" not in line]
    assert required == ["Requires-Dist: numpy>=2.0"]
    assert "License-Expression: Apache-2.0\n" in metadata
    assert f"Version: {cunorm.__version__}\n" in metadata
    assert any(name.endswith(".dist-info/licenses/LICENSE") for name in wheel.namelist())


def test_python_of_the_linters_is_the_oldest_supported():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    oldest = project["project"]["requires-python"].removeprefix(">=")
    assert project["tool"]["pyright"]["pythonVersion"] == oldest
    assert project["tool"]["ruff"]["target-version"] == "py" + oldest.replace(".", "")


@pytest.mark.parametrize("end", ["-m cunorm demo", "-m pytest -n 2"])
def test_ci_runs_the_command_of_the_readme(end):
    (command,) = (
        line
        for line in (ROOT / "README.md").read_text().splitlines()
        if line.startswith("python3 ") and line.endswith(end)
    )
    called = [line.partition(" | tee")[0] for line in (ROOT / ".ci" / "run").read_text().splitlines()]
    assert command in called


def test_importing_imports_no_gpu_library_and_no_framework(tmp_path):
    program = "import cunorm, cunorm.__main__, sys; print(*{name.partition('.')[0] for name in sys.modules})"
    output = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, check=True
    ).stdout
    assert "cunorm" in output.split()
    assert not (GPU_LIBRARIES | FRAMEWORKS) & set(output.split())


def test_importing_takes_less_than_150_ms(tmp_path):
    # Time of the processor, which does not count the waiting for other tests that run beside this one.
    program = "from time import process_time as now; start = now(); import cunorm; print(now() - start)"

    def seconds() -> float:
        return float(subprocess.check_output([sys.executable, "-c", program], cwd=tmp_path))

    assert min(seconds() for _ in range(5)) < 0.15


# Who imports whom: (a file, what it may import of cunorm). A file that is not here may import anything.

ALLOWED = {
    "device": set(),
    "problem": set(),
    "tiers": {"device", "problem"},
    "plan": {"device", "problem", "tiers"},
    "kernels": {"device", "tiers"},
    "launch": {"kernels", "plan"},
    "linear_problem": {"problem"},
    "gemm": set(),
    "host": {"linear_problem", "problem"},
    "dlpack": {"gpu"},
}


def imports(tree: ast.AST, *, module_level: bool = False) -> set[str]:
    """The modules imported, those of cunorm as `.name`; at module level only, or anywhere."""
    found = set()
    pending = list(ast.iter_child_nodes(tree))
    while pending:
        node = pending.pop()
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            dots = "." * node.level
            named = [node.module] if node.module else [alias.name for alias in node.names]
            found |= {dots + name for name in named}
        elif not (module_level and isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)):
            pending += ast.iter_child_nodes(node)
    return found


def top(modules: set[str]) -> set[str]:
    return {name.partition(".")[0] for name in modules}


def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text(), str(path))


def test_the_walk_over_imports_sees_each_kind():
    tree = ast.parse(
        "import a.b, c\nfrom .d import e\nfrom . import f\nif 1:\n  from g.h import i\ndef j():\n  import k\n"
        "class L:\n  import m\n"
    )
    assert imports(tree) == {"a.b", "c", ".d", ".f", "g.h", "k", "m"}
    assert imports(tree, module_level=True) == {"a.b", "c", ".d", ".f", "g.h", "m"}


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_no_file_imports_a_framework_and_those_of_cupy_arrays_alone_import_cupy_at_once(path):
    assert not top(imports(parsed(path))) & FRAMEWORKS
    at_once = top(imports(parsed(path), module_level=True)) & GPU_LIBRARIES
    assert at_once == ({"cupy"} if path.name in ("gpu.py", "gpu_linear.py", "gemm.py") else set())


@pytest.mark.parametrize("path", ADAPTERS, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_an_adapter_imports_its_framework_alone_and_of_the_core_what_it_launches_by(path):
    found = imports(parsed(path))
    assert top(found) & FRAMEWORKS <= {path.parent.name} | ({"jax"} if path.parent.name == "flax" else set())
    assert not top(found) & GPU_LIBRARIES
    core = {name[2:] for name in found if name.startswith("..")}
    assert (
        core
        <= {
            "torch": {"", "device", "launch", "linear_problem", "plan", "problem"},
            "jax": {"", "device", "kernels", "launch", "linear_problem", "plan", "problem"},
            "flax": {"jax"},
        }[path.parent.name]
    )
    assert not {name for name in found if name.startswith("cunorm")}


@pytest.mark.parametrize("name", ALLOWED)
def test_imports_go_in_one_direction(name):
    found = imports(parsed(ROOT / "cunorm" / f"{name}.py"))
    assert {module[1:] for module in found if module.startswith(".")} <= ALLOWED[name]


@pytest.mark.parametrize("name", ["plan", "problem", "tiers"])
def test_planning_imports_no_gpu_library_at_all(name):
    assert not top(imports(parsed(ROOT / "cunorm" / f"{name}.py"))) & GPU_LIBRARIES


def test_launch_alone_fetches_a_kernel():
    """And `compile --all`, which launches none of those that it fetches."""

    def fetches(tree: ast.Module) -> bool:
        for node in ast.walk(tree):
            if (
                isinstance(node, ast.ImportFrom)
                and node.module == "kernels"
                and "kernel" in {a.name for a in node.names}
            ):
                return True
            if isinstance(node, ast.Attribute) and node.attr == "kernel" and ast.unparse(node.value) == "kernels":
                return True
        return False

    assert sorted(path.name for path in SOURCES if fetches(parsed(path))) == ["compilation.py", "launch.py"]
