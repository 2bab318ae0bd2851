"""nodes.cpp is compiled once, by one process, and loaded only from where nobody else can write; failures say why."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

import torch_stand_in  # noqa: E402

from cunorm.torch import accelerate, layer_norm  # noqa: E402
from cunorm.torch.norm import nodes, repeats  # noqa: E402

pytestmark = pytest.mark.skipif(shutil.which("c++") is None, reason="no C++ compiler")

COPIES = """#!/bin/sh
while [ "$1" != -o ]; do shift; done
echo compiled >> {count}
sleep 1
cp {built} "$2"
"""


class Compiler:
    """Stand in for the C++ compiler: it hands out the library that the real one has made, and counts its calls."""

    def __init__(self, folder: Path, built: Path):
        self.built, self._count = built, folder / "count"
        program = folder / "compiler"
        program.write_text(COPIES.format(count=self._count, built=built))
        program.chmod(0o755)
        self.variables = {"CXX": str(program), "CUNORM_CACHE_DIR": str(folder / "cache")}

    @property
    def calls(self) -> int:
        return len(self._count.read_text().split()) if self._count.exists() else 0


@pytest.fixture
def compiler(monkeypatch, tmp_path) -> Iterator[Compiler]:
    """Give a process that has loaded nothing an empty cache and a stand-in for the compiler."""
    assert nodes.build() == ""
    compiler = Compiler(tmp_path, nodes.kept_file())
    for name, value in compiler.variables.items():
        monkeypatch.setenv(name, value)
    for name, value in (("_loaded", None), ("_ready", None), ("_look_again_at", 0.0)):
        monkeypatch.setattr(nodes, name, value)
    yield compiler
    monkeypatch.undo()
    nodes._ready, nodes._look_again_at = None, 0.0
    nodes.module()  # launches on a GPU again, if there is one


@pytest.mark.slow
def test_what_is_built_is_loaded(compiler):
    assert nodes.build() == ""
    assert nodes.load() is not None
    assert nodes.build() == ""
    assert compiler.calls == 1


DAMAGES: dict[str, Callable[[bytes], bytes]] = {
    "empty": lambda content: b"",
    "cut short": lambda content: content[: len(content) // 2],
    "a byte of it": lambda content: content[:1000] + bytes([content[1000] ^ 1]) + content[1001:],
}


@pytest.mark.slow
@pytest.mark.parametrize("name", DAMAGES)
def test_a_damaged_file_is_built_again(compiler, name):
    nodes.kept_file().parent.mkdir()
    nodes.kept_file().write_bytes(DAMAGES[name](compiler.built.read_bytes()))
    with pytest.raises(ImportError, match="is damaged"):
        nodes.load()
    assert nodes.build() == ""
    assert compiler.calls == 1


@pytest.mark.slow
def test_a_file_of_another_torch_is_built_again(compiler, tmp_path):
    """The file is whole, but the dynamic linker refuses it."""
    other = tmp_path / "other.cpp"
    other.write_text("void of_another_torch(); void* PyInit_cunorm_nodes() { of_another_torch(); return 0; }")
    library = tmp_path / "other.so"
    subprocess.run(["c++", "-shared", "-fPIC", str(other), "-o", str(library)], check=True)
    content = library.read_bytes()
    nodes.write(nodes.kept_file(), content + nodes.hashlib.sha256(content).digest(), 0o644)
    with pytest.raises(ImportError, match="undefined symbol"):
        nodes.load()
    assert nodes.build() == ""
    assert compiler.calls == 1


@pytest.mark.slow
def test_one_process_builds_and_the_others_wait(compiler):
    program = [sys.executable, "-c", "from cunorm.torch.norm import nodes; print(repr(nodes.build()))"]
    processes = [subprocess.Popen(program, stdout=subprocess.PIPE, text=True) for _ in range(3)]
    assert [process.communicate(timeout=300)[0] for process in processes] == ["''\n"] * 3
    assert compiler.calls == 1


@pytest.mark.slow
def test_whoever_asked_too_early_asks_again(compiler, monkeypatch):
    """Calls that were described without nodes are then described anew."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(nodes, "_functions", lambda: (1, 2, 3, 4, 5))
    monkeypatch.setattr(repeats, "_calls", {"a call": ()})
    assert nodes.module() is None
    build_elsewhere()
    monkeypatch.setattr(nodes, "_look_again_at", 0.0)  # a second later
    assert repeats._calls
    assert nodes.module() is nodes.load()
    assert repeats._calls == {}


@pytest.fixture
def in_background(compiler, monkeypatch) -> Compiler:
    """Let the process be one that has started no build yet and is allowed to."""
    for variable in ("CUNORM_NODES", "LOCAL_RANK"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setattr(nodes, "_was_started", False)
    return compiler


@pytest.mark.slow
def test_the_first_call_that_wants_a_gradient_builds_in_the_background(in_background, monkeypatch, caplog):
    """The build happens once, in a process of its own, with one line in the log, and leaves the file.

    A call may be known already, from a pass of evaluation.
    """
    torch_stand_in.play(monkeypatch)
    torch_stand_in.forget(monkeypatch)
    caplog.set_level("INFO", "cunorm")
    with torch.no_grad():
        for requires_grad in (False, True):
            layer_norm(torch.ones(2, 8, requires_grad=requires_grad), (8,))
    assert not nodes._was_started
    for rows in (2, 3):
        layer_norm(torch.ones(rows, 8, requires_grad=True), (8,))
    assert sum("in the background" in line for line in caplog.messages) == 1
    give_up_at = time.monotonic() + 120
    while not nodes.kept_file().exists():
        assert time.monotonic() < give_up_at, "nothing was built"
        time.sleep(0.1)
    assert nodes.load() is not None
    assert in_background.calls == 1


FORBIDDEN = {
    "forbidden": {"CUNORM_NODES": "0"},
    "another rank of this machine": {"LOCAL_RANK": "1"},
    "no compiler": {"CXX": "no-such-compiler"},
}


@pytest.mark.parametrize("name", FORBIDDEN)
def test_nothing_is_built_in_the_background(in_background, monkeypatch, name):
    for variable, value in FORBIDDEN[name].items():
        monkeypatch.setenv(variable, value)
    monkeypatch.setattr(subprocess, "Popen", lambda *_, **__: pytest.fail("a process was started"))
    nodes.build_in_background()
    assert in_background.calls == 0


def build_elsewhere() -> None:
    program = [sys.executable, "-c", "from cunorm.torch.norm import nodes; assert nodes.build() == ''"]
    subprocess.run(program, check=True, env=os.environ | {"CUDA_VISIBLE_DEVICES": ""})


def shared_folder() -> None:
    nodes.kept_file().parent.chmod(0o775)


def shared_file() -> None:
    nodes.kept_file().chmod(0o666)


def link_to_a_shared_folder() -> None:
    file = nodes.kept_file()
    elsewhere = file.parent.parent / "elsewhere"
    elsewhere.mkdir()
    elsewhere.chmod(0o777)
    file.replace(elsewhere / file.name)
    file.symlink_to(elsewhere / file.name)


def file_of_another_user() -> None:
    if os.geteuid():
        pytest.skip("only root gives files away")
    os.chown(nodes.kept_file(), 12345, 12345)


UNSAFE = [shared_folder, shared_file, link_to_a_shared_folder, file_of_another_user]


@pytest.mark.slow
@pytest.mark.parametrize("change", UNSAFE, ids=lambda change: change.__name__)
def test_what_others_may_write_is_not_loaded(compiler, monkeypatch, change):
    assert nodes.build() == ""
    monkeypatch.setattr(nodes, "_loaded", None)
    change()
    with pytest.raises(ImportError, match="nobody else may write"):
        nodes.load()
    if change is shared_folder:  # a file in it would be no safer
        assert "mode 775" in nodes.build()
        assert compiler.calls == 1
    else:
        assert nodes.build() == ""
        assert compiler.calls == 2


@pytest.mark.slow
def test_files_are_safe_whatever_the_umask(compiler):
    before = os.umask(0)
    try:
        assert nodes.build() == ""
    finally:
        os.umask(before)


FAILURES = {
    "no compiler": ({"CXX": "no-such-compiler"}, "no-such-compiler could not be run"),
    "it fails": ({"CXX": "false"}, "false failed: 1"),
    "no folder": ({"CUNORM_CACHE_DIR": "/dev/null/cache"}, "/dev/null/cache"),
}


@pytest.mark.parametrize("name", FAILURES)
def test_why_it_failed_stands_in_the_report(compiler, monkeypatch, name):
    variables, reason = FAILURES[name]
    for variable, value in variables.items():
        monkeypatch.setenv(variable, value)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    report = accelerate(torch.nn.Sequential(torch.nn.LayerNorm(8)))
    assert reason in report.without_nodes
    assert f"autograd's nodes are Python's, which costs the host time: {report.without_nodes}" in str(report)


@pytest.mark.slow
def test_a_driver_that_lacks_a_function_is_a_reason(compiler, monkeypatch):
    def missing() -> None:
        raise ImportError("libcuda.so.1: undefined symbol: cuLaunchKernelEx")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(nodes, "_functions", missing)
    assert "cuLaunchKernelEx" in nodes.build()
    assert nodes.module() is None
