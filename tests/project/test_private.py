"""Names that no framework promises to keep: which files have them, and what happens if one is gone."""

from __future__ import annotations

import ast
import functools
import json
import logging
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from types import SimpleNamespace

import private_names
import pytest
from private_names import FILES, OF_GPU, ROOT

from cunorm import private

SOURCES = sorted(path for folder in ("cunorm", "adapters") for path in (ROOT / folder).rglob("*.py"))
FRAMEWORKS = "torch|jax|jaxlib|flax|cupy|cupyx|cupy_backends|transformers|diffusers|nvmath|kernels"
UNSTABLE = (
    "jax.experimental",
    "jax.interpreters",
    "jax.extend",
    "jax.core",
    "cupy_backends",
    "torch.distributed.tensor.experimental",
)
OF_PYTHON = {"_replace", "_fields", "_fields_", "_asdict", "_make", "_exit"}  # in named tuples, ctypes and os


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


@functools.cache
def own_attributes() -> set[str]:
    """Return the names that cunorm itself gives to attributes and methods."""
    names = set()
    for path in SOURCES:
        if path in FILES.values():
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef):
                for part in ast.walk(node):
                    if isinstance(part, ast.FunctionDef):
                        names.add(part.name)
                    elif isinstance(part, ast.Name) and isinstance(part.ctx, ast.Store):
                        names.add(part.id)
            elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                names.add(node.attr)
    return names


def of_others(text: str) -> Iterator[str]:
    """Yield the names in a file that belong to another package, which does not promise to keep them."""
    tree = ast.parse(text)
    modules = set()  # cunorm's own modules
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.level:
            modules |= {alias.asname or alias.name for alias in node.names}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if unstable(alias.name))
        elif isinstance(node, ast.ImportFrom) and not node.level and node.module != "__future__":
            names = (f"{node.module}.{alias.name}" for alias in node.names)
            yield from (name for name in names if unstable(name))
        elif isinstance(node, ast.Attribute):
            whole, base = ast.unparse(node), ast.unparse(node.value)
            if whole.startswith(UNSTABLE) or (
                is_private(node.attr) and node.attr not in OF_PYTHON | own_attributes() and base not in modules
            ):
                yield whole
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            if re.fullmatch(r"[\w.:$]+", node.value) and unstable(node.value.replace(":", ".")):
                yield node.value
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in ("getattr", "hasattr", "setattr", "attrgetter"):
            for argument in node.args:
                name = argument.value if isinstance(argument, ast.Constant) else ""
                if isinstance(name, str) and is_private(name) and name not in own_attributes():
                    yield name


def unstable(name: str) -> bool:
    parts = name.split(".")
    of_framework = re.fullmatch(FRAMEWORKS, parts[0]) is not None
    return name.startswith(("__gpu$", *UNSTABLE)) or (of_framework and any(map(is_private, parts)))


@pytest.mark.parametrize(
    "path", [path for path in SOURCES if path not in FILES.values()], ids=lambda path: path.relative_to(ROOT).as_posix()
)
def test_names_that_nobody_promises_stand_in_one_file_a_framework(path):
    assert sorted(of_others(path.read_text())) == []


@pytest.mark.parametrize(
    "text",
    [
        "import torch._dynamo",
        "from torch.distributed import _symmetric_memory",
        "from jax.interpreters import mlir",
        "import jax\njax.experimental.io_callback",
        "import torch\ntorch._C._len_torch_dispatch_stack()",
        "def f(module):\n    return module._parameters",
        "class A:\n    def f(self):\n        return self._parameters",
        "import torch\ngetattr(torch, '_scaled_mm')",
        "import sys\nsys.modules.get('torch._inductor.config')",
        "look_up('torch:_C.DispatchKey', '')",
        "TARGET = '__gpu$xla.gpu.ptx'",
    ],
)
def test_such_a_name_is_found(text):
    assert list(of_others(text))


@pytest.mark.slow
def test_each_file_has_such_names():
    for framework, path in FILES.items():
        assert len(set(of_others(path.read_text()))) > 2, framework


@functools.cache
def without(framework: str) -> dict[str, dict]:
    """Return what private_names.py says, by the name that was taken away."""
    pytest.importorskip(framework)
    run = subprocess.run(
        [sys.executable, private_names.__file__, framework], capture_output=True, text=True, timeout=600, cwd=ROOT
    )
    assert run.returncode == 0, run.stderr
    return {line["path"]: line for line in map(json.loads, run.stdout.splitlines())}


CASES = [(framework, path) for framework in ("torch", "jax") for path in ("", *private_names.paths(framework))]


@pytest.mark.slow
@pytest.mark.parametrize(("framework", "path"), CASES, ids=lambda value: value.replace(":", ".") or "none")
def test_without_a_name_all_is_there_and_the_log_says_what_it_costs(framework, path):
    outcome = without(framework)[path]
    assert "error" not in outcome, outcome
    if not path:
        assert outcome["lines"] == []
        return
    name = path.replace(":", ".")
    version = sys.modules.get(framework, None) or pytest.importorskip(framework)
    said = [line for line in outcome["lines"] if f"{framework} {version.__version__} has no {name}, so " in line]
    assert len(said) >= 1
    if not path.endswith(OF_GPU):
        assert set(outcome["lines"]) == set(said)


ASKED = (
    "_len_torch_dispatch_stack",
    "_len_torch_function_stack",
    "peek_interpreter_stack",
    "_get_tracing_state",
    "_current_level",
)


@pytest.mark.slow
def test_what_cannot_be_asked_is_taken_for_in_force():
    """If cunorm cannot ask whether a mode is in force, it launches nothing directly, which would bypass the mode."""
    direct_without = {path: outcome["direct"] for path, outcome in without("torch").items()}
    assert direct_without[""]
    assert {path for path, direct in direct_without.items() if not direct} == {
        path for path in direct_without if path.endswith(ASKED)
    }


@pytest.mark.slow
def test_where_the_log_says_that_there_is_no_float8_there_is_none():
    for outcome in without("torch").values():
        assert ("FP8 is for plain tensors" in outcome["float8"]) == ("has no FP8" in "".join(outcome["lines"]))


@pytest.mark.slow
def test_without_what_a_primitive_is_made_of_there_is_none():
    primitives_without = {path: outcome["primitives"] for path, outcome in without("jax").items()}
    experimental = {path for path in primitives_without if path.startswith("jax.experimental")}
    assert {path for path, primitives in primitives_without.items() if primitives} == {"", *experimental}


@pytest.mark.parametrize(
    ("function", "module", "costs"),
    [
        (private.nvrtc, "cupy_backends.cuda.libs.nvrtc", "no kernel can be compiled"),
        (private.cublas, "cupy_backends.cuda.libs.cublas", "layer_norm_linear has no products without nvmath-python"),
    ],
    ids=["nvrtc", "cublas"],
)
def test_a_module_that_cupy_no_longer_has(monkeypatch, function, module, costs):
    def import_module(name: str):
        if name == module:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
        return SimpleNamespace(__version__="99.1")

    function.cache_clear()
    monkeypatch.setattr(private, "import_module", import_module)
    with pytest.raises(NotImplementedError, match=rf"cupy 99\.1 has no {module}, so {costs}\. Use cupy 14\.2"):
        function()


def test_products_are_not_tf32_where_cupy_cannot_be_asked(monkeypatch, caplog):
    def resolve(path: str):
        raise ModuleNotFoundError(f"No module named {path!r}", name=path.partition(":")[0])

    private.compute_type.cache_clear()
    monkeypatch.setattr(private, "resolve", resolve)
    monkeypatch.setattr(private, "import_module", lambda name: SimpleNamespace(__version__="99.1"))
    with caplog.at_level(logging.WARNING, "cunorm"):
        compute_type, tf32 = private.compute_type()
    private.compute_type.cache_clear()
    assert compute_type("float32") != tf32
    assert "cupy 99.1 has no cupy._core._routines_linalg.get_compute_type" in caplog.text


def test_a_package_that_is_not_installed_is_not_taken_for_one_without_a_name():
    with pytest.raises(ModuleNotFoundError, match="no_such_package"):
        private.look_up("no_such_package:name", "")


def test_the_page_of_versions_has_those_that_are_tested():
    page = (ROOT / "docs/compatibility.md").read_text()
    rows = re.findall(r"^\| (\w+) \| ([\d.]+) \| ([\d.]+) \|", page, re.MULTILINE)
    assert {package: (oldest, newest) for package, oldest, newest in rows} == private.TESTED


def test_pip_installs_no_older_version():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    asked = [
        *project["dependencies"],
        *(
            requirement
            for name in ("cuda12", "cuda13", "flax", "jax", "torch")
            for requirement in project["optional-dependencies"][name]
        ),
    ]
    lowest = dict(re.findall(r"^([a-z]+)\S*?>=(\d+\.\d+)", "\n".join(asked), re.MULTILINE))
    assert lowest == {package: private.TESTED[package][0] for package in ("numpy", "cupy", "flax", "jax", "torch")}


def test_what_is_missing_raises_where_it_is_used(monkeypatch):
    monkeypatch.setitem(private.TESTED, "json", ("1.0", "2.0"))
    missing = private.look_up("json:_no_such_name", "nothing is read")
    assert not missing
    with pytest.raises(
        NotImplementedError,
        match=r"json 2\.\S+ has no json\._no_such_name, so nothing is read\. Use json 1\.0 to 2\.0\.",
    ):
        missing()


@pytest.mark.parametrize(
    ("version", "says"),
    [("2.0", False), ("2.13.1+cpu", False), ("2.14.0", True), ("3.0.0a1", True), ("unknown", False)],
)
def test_a_version_newer_than_the_tested_ones_is_told_once(monkeypatch, caplog, version, says):
    monkeypatch.setitem(private.TESTED, "fake", ("2.11", "2.13"))
    monkeypatch.setitem(sys.modules, "fake", SimpleNamespace(__version__=version))
    private._check_version.cache_clear()
    with caplog.at_level(logging.WARNING, "cunorm"):
        private.check_version("fake")
        private.check_version("fake")
    lines = [record.getMessage() for record in caplog.records]
    assert lines == ([f"fake {version} is newer than what cunorm was tested with, fake 2.11 to 2.13"] if says else [])
