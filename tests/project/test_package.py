"""What is installed, what importing it costs, and which modules import which."""

from __future__ import annotations

import ast
import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

import cunorm

ROOT = Path(__file__).parents[2]
SOURCES = sorted((ROOT / "cunorm").rglob("*.py"))
ADAPTERS = sorted((ROOT / "adapters").rglob("*.py"))
GPU_LIBRARIES = {"cupy", "cupyx", "cupy_backends", "cuda"}
FRAMEWORKS = {"torch", "jax", "jaxlib", "flax"}


@pytest.fixture(scope="module")
def clone(tmp_path_factory) -> Path:
    """A copy of the checkout in a folder named cunorm, as git clone names it."""
    copy = tmp_path_factory.mktemp("work") / "cunorm"
    copy.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, copy)
    for name in ("adapters", "cunorm", "kernels_cu"):
        shutil.copytree(ROOT / name, copy / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
    return copy


def built(clone: Path, hook: str) -> zipfile.ZipFile:
    """Return the wheel that a hook of pyproject's build backend makes: `build_wheel` or `build_editable`."""
    pytest.importorskip("hatchling")
    folder = clone.parent / hook
    program = f"import hatchling.build; hatchling.build.{hook}({str(folder)!r})"
    folder.mkdir(exist_ok=True)
    done = subprocess.run([sys.executable, "-c", program], cwd=clone, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    (path,) = folder.glob("*.whl")
    return zipfile.ZipFile(path)


@pytest.fixture(scope="module")
def wheel(clone) -> zipfile.ZipFile:
    return built(clone, "build_wheel")


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


@pytest.mark.parametrize("hook", ["build_wheel", "build_editable"])
@pytest.mark.parametrize("place", ["in the checkout", "beside the checkout", "elsewhere"])
def test_the_package_is_whole_however_it_is_installed_and_wherever_python_starts(clone, tmp_path, hook, place):
    site = tmp_path / "site"
    built(clone, hook).extractall(site)
    paths = [str(site), *(line for file in site.glob("*.pth") for line in file.read_text().split())]
    program = (
        "from importlib.util import find_spec\n"
        "import cunorm, cunorm.kernel.source\n"
        "print(*(find_spec('cunorm.' + name) is not None for name in ('torch', 'jax', 'flax')), cunorm.__file__)\n"
        "cunorm.kernel.source._file_text('norms/norm_forward.cu')\n"
    )
    folder = {"in the checkout": clone, "beside the checkout": clone.parent, "elsewhere": tmp_path}[place]
    output = subprocess.run(
        [sys.executable, "-c", program],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(paths)},  # before the site-packages of this interpreter
        capture_output=True,
        text=True,
        check=True,
    ).stdout.split()
    found_in = clone if place == "in the checkout" or hook == "build_editable" else site
    assert output == ["True", "True", "True", str(found_in / "cunorm" / "__init__.py")]


def test_the_wheel_has_the_licence_and_depends_on_numpy_alone(wheel):
    (metadata,) = (wheel.read(name).decode() for name in wheel.namelist() if name.endswith(".dist-info/METADATA"))
    required = [line for line in metadata.splitlines() if line.startswith("Requires-Dist:") and "extra ==" not in line]
    assert required == ["Requires-Dist: numpy>=2.0"]
    assert "License-Expression: Apache-2.0\n" in metadata
    assert f"Version: {cunorm.__version__}\n" in metadata
    assert any(name.endswith(".dist-info/licenses/LICENSE") for name in wheel.namelist())


def test_no_extra_installs_libraries_of_two_versions_of_cuda():
    """An extra installs libraries of the one CUDA that its name says."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    versions = {
        extra: {
            version
            for requirement in requirements
            if requirement.startswith(("cupy-", "nvidia-c"))
            for version in ("12", "13")
            if re.search(rf"(cu|cuda){version}|>={version},", requirement)
        }
        for extra, requirements in project["optional-dependencies"].items()
        if extra != "bench"
        and not extra.startswith("test")  # NVRTC of 12 compiles beside that of 13 there; no CUDA library
    }
    of_cuda = {extra: cudas for extra, cudas in versions.items() if cudas}
    assert of_cuda == {extra: {extra[-2:]} for extra in ("cuda12", "cuda13", "linear-cu12", "linear-cu13")}


def test_the_version_of_kernels_stands_in_one_place():
    """Only the tests fix a version of `kernels`. Users take the one that their transformers takes."""
    files = [ROOT / "README.md", *(ROOT / "adapters").rglob("*.py"), *(ROOT / "cunorm").rglob("*.py")]
    assert not [path.name for path in files if re.search(r"\bkernels[<>=]=?", path.read_text())]
    assert (ROOT / "pyproject.toml").read_text().count('"kernels==') == 1


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


@pytest.mark.slow
def test_importing_takes_less_than_150_ms(tmp_path):
    # The time of the processor does not count waiting for other tests that run beside this one.
    program = "from time import process_time as now; start = now(); import cunorm; print(now() - start)"
    # The first import writes bytecode, as it does for a user.
    environment = os.environ | {"PYTHONDONTWRITEBYTECODE": "", "PYTHONPYCACHEPREFIX": str(tmp_path / "bytecode")}

    def seconds() -> float:
        return float(subprocess.check_output([sys.executable, "-c", program], cwd=tmp_path, env=environment))

    assert min(seconds() for _ in range(5)) < 0.15


# A layer may import the layers before it, and itself. A file that is not listed may import anything of the core.

LAYERS = (
    {"logs", "kernel.driver", "expression.philox"},
    {"private", "kernel.cache"},
    {"kernel.device", "expression.value", "call.site"},
    {"expression.grammar"},
    {"expression.tracing"},
    {"expression.functions"},
    {"expression.gradients"},
    {"expression", "expression.texts"},
    {"operation"},
    {"plan.problem"},
    {"plan.plain_problems"},
    {"call.checks", "plan.spec"},
    {"plan.resources", "call.broadcasting", "call.store", "linear.checks", "linear.problem"},
    {"plan.shapes", "plan.tables", "plan.steps", "call.backend"},
    {"plan.candidates", "plan.forward"},
    {"plan.backward"},
    {"plan.choose", "plan.launches"},
    {"plan.plan", "linear.gemm"},
    {"call.recipe"},
    {"kernel.text"},
    {"linear.float8_spec", "linear.one_launch", "linear.overlapped", "kernel.call"},
    {"kernel.source", "linear.float8_plan", "linear.plan"},
    {"kernel.compile"},
    {"kernel.launch"},
    {"call.numpy", "call.cupy", "call.dlpack"},
    {"linear.planned_cupy"},
    {"linear.numpy_arrays", "linear.cupy_arrays", "linear.dlpack"},
    {"functions", "norm_add_norm", "linear.api"},
    {"fusion"},
    {"named"},
)
PURE = set().union(*LAYERS[:18]) - {"linear.gemm"}
# These modules import CuPy when they are imported.
AT_ONCE = {"call.cupy", "linear.cupy_arrays", "linear.gemm", "linear.planned_cupy"}
FOR_ADAPTERS = {
    "",  # the functions that users call
    "logs",
    "kernel.device",
    "kernel.launch",
    "operation",
    "expression",
    "expression.functions",
    "expression.gradients",
    "expression.grammar",
    "expression.texts",
    "expression.tracing",
    "expression.value",
    "call.backend",
    "fusion",
    "functions",
    "named",
    "private",
    "call.broadcasting",
    "call.recipe",
    "plan.plain_problems",
    "plan.problem",
    "call.checks",
    "call.store",
    "expression.philox",
    "plan.plan",
    "plan.steps",
    "linear.gemm",
    "linear.plan",
    "linear.checks",
    "linear.problem",
    "linear.float8_spec",
    "linear.float8_plan",
    "kernel.source",
    "kernel.cache",
    "kernel.compile",
}


def module_name(path: Path) -> str:
    """Return a file's module without the prefix cunorm: `plan.plan`, `torch.norm.checks`; cunorm itself is ""."""
    parts = path.relative_to(ROOT).with_suffix("").parts[1:]
    return ".".join(part for part in parts if part != "__init__")


NAMES = {module_name(path): path for path in (*SOURCES, *ADAPTERS)}


def imports(path: Path, *, module_level: bool = False) -> set[str]:
    """Return the modules that a file imports, those of cunorm as `.name`: anywhere, or only at module level."""
    package = module_name(path).split(".") if path.name == "__init__.py" else module_name(path).split(".")[:-1]
    modules = set()
    pending = list(ast.iter_child_nodes(parsed(path)))
    while pending:
        node = pending.pop()
        if isinstance(node, ast.Import):
            modules |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            if not node.level:
                modules.add(node.module or "")
                continue
            start = [part for part in package if part][: len([part for part in package if part]) - node.level + 1]
            base = ".".join([*start, *filter(None, [node.module])])
            named = {".".join(filter(None, [base, alias.name])) for alias in node.names}
            modules |= {f".{name}" if name in NAMES else f".{base}" for name in named}
        elif not (module_level and isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)):
            pending += ast.iter_child_nodes(node)
    return modules


def top(modules: set[str]) -> set[str]:
    return {name.partition(".")[0] for name in modules}


@cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text(), str(path))


def of_cunorm(path: Path) -> set[str]:
    return {name[1:] for name in imports(path) if name.startswith(".")}


@pytest.mark.slow
def test_no_imports_go_in_a_circle():
    graph = {name: of_cunorm(path) - {name} for name, path in NAMES.items()}
    assert {"plan.plan", "torch.norm.functional", "jax.xla.call"} <= set(graph)
    assert "plan.choose" in graph["plan.plan"]
    assert "torch.norm.launching" in graph["torch.norm.dispatch"]
    TopologicalSorter(graph).prepare()  # raises CycleError, which names the circle


@pytest.mark.slow
def test_every_layer_imports_those_before_it_alone():
    below: set[str] = set()
    for layer in LAYERS:
        below |= layer
        for name in layer:
            assert of_cunorm(NAMES[name]) <= below, name


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_no_file_imports_a_framework_and_those_of_cupy_alone_import_it_at_once(path):
    assert not top(imports(path)) & FRAMEWORKS
    at_once = top(imports(path, module_level=True)) & GPU_LIBRARIES
    assert at_once == ({"cupy"} if module_name(path) in AT_ONCE else set())


@pytest.mark.parametrize("path", ADAPTERS, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_an_adapter_imports_its_framework_alone_and_of_the_core_what_it_launches_by(path):
    own = path.relative_to(ROOT).parts[1]
    others = {"jax"} if own == "flax" else set()
    assert top(imports(path)) & FRAMEWORKS <= {own} | others
    assert not top(imports(path)) & (GPU_LIBRARIES | {"cunorm"})
    core = {name for name in of_cunorm(path) if name.partition(".")[0] not in {own} | others}
    assert core <= FOR_ADAPTERS


@pytest.mark.parametrize("name", sorted(PURE))
def test_planning_imports_no_gpu_library_at_all(name):
    assert not top(imports(NAMES[name])) & GPU_LIBRARIES - ({"cupy"} if name == "kernel.device" else set())


def test_launch_alone_fetches_a_kernel():
    def fetches(tree: ast.Module) -> bool:
        for node in ast.walk(tree):
            if (
                isinstance(node, ast.ImportFrom)
                and node.module == "compile"
                and "kernel" in {a.name for a in node.names}
            ):
                return True
            if isinstance(node, ast.Attribute) and node.attr == "kernel" and ast.unparse(node.value) == "compile":
                return True
        return False

    assert sorted(path.name for path in SOURCES if fetches(parsed(path))) == ["launch.py"]


LATE = {
    "cupy",
    "sympy",
    "torch._dynamo",
    "torch._inductor",
    "torch.distributed.tensor",
    "torch.fx.experimental.symbolic_shapes",
    "torch.onnx",
    "transformers",
}
IMPORT = """
import sys, time, torch
before, start = set(sys.modules), time.process_time()
import cunorm.torch
taken = time.process_time() - start
x, weight = torch.ones(3, 8, requires_grad=True), torch.ones(8)
cunorm.torch.layer_norm(x, (8,), weight).sum().backward()
cunorm.torch.add_rms_norm(x, x, weight)[0].sum().backward()
cunorm.torch.LayerNormLinear(8, 8, device="cpu")(x).sum().backward()
print(taken, *set(sys.modules) - before)
"""


@pytest.mark.slow
def test_importing_cunorm_torch_takes_no_time_and_no_compiler():
    """Calls in eager mode do not import such modules either, and need none that another package has imported."""
    pytest.importorskip("torch")
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    seconds = []
    for _ in range(3):  # the first one writes the bytecode
        taken, *modules = subprocess.check_output([sys.executable, "-c", IMPORT], env=environment, text=True).split()
        assert not LATE & set(modules)
        seconds.append(float(taken))
    assert min(seconds) < 0.3
