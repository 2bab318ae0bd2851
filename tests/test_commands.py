"""`python -m cunorm ...` as a user calls it: in a process of its own, away from the checkout, mostly without a GPU."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy
import pytest

import cunorm

NO_GPU = {"CUDA_VISIBLE_DEVICES": ""}
STUBS = {
    "absent": "raise ImportError('hidden by a test')",
    "broken": "raise RuntimeError('\\n=====\\nfailed to load a library\\nand much more')",
    "unreadable": "raise OSError(13, 'Permission denied', '/somewhere')",
}
KERNEL = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture
def command(tmp_path):
    """Call a command; `cupy` names the stub that stands before CuPy, `environment` adds variables."""

    def call(*arguments: str, cupy: str | None = None, environment: dict[str, str] | None = None):
        variables = os.environ | NO_GPU | (environment or {})
        if cupy:
            for package in ("cupy", "cupy_backends"):
                stub = tmp_path / "stubs" / package / "__init__.py"
                stub.parent.mkdir(parents=True)
                stub.write_text(STUBS[cupy])
            variables["PYTHONPATH"] = os.pathsep.join(
                filter(None, [str(tmp_path / "stubs"), variables.get("PYTHONPATH")])
            )
        away = tmp_path / "away"
        away.mkdir(exist_ok=True)
        return subprocess.run(
            [sys.executable, "-m", "cunorm", *arguments], cwd=away, env=variables, capture_output=True, text=True
        )

    return call


def succeeds(result) -> str:
    assert (result.returncode, result.stderr) == (0, "")
    return result.stdout


def fails_in_one_line(result, status: int, *fragments: str) -> None:
    assert result.returncode == status
    assert result.stdout == ""
    assert result.stderr.count("\n") == 1
    for fragment in fragments:
        assert fragment in result.stderr


# info


def test_info_tells_the_versions_that_are_installed(command):
    fields = json.loads(succeeds(command("info", "--json")))
    assert fields["cunorm"] == cunorm.__version__
    assert fields["numpy"] == numpy.__version__
    assert fields["python"] == ".".join(map(str, sys.version_info[:3]))


def test_info_says_the_same_in_words(command):
    fields = json.loads(succeeds(command("info", "--json")))
    lines = succeeds(command("info")).splitlines()
    assert [line.split()[0] for line in lines] == list(fields)


BROKEN = [
    pytest.param(
        {"cupy": "absent"}, "driver", "CuPy could not be imported (ImportError: hidden by a test)", id="no CuPy"
    ),
    pytest.param({"cupy": "absent"}, "nvrtc", "ImportError: hidden by a test", id="no NVRTC"),
    pytest.param({"cupy": "broken"}, "gpus", "RuntimeError: failed to load a library)", id="CuPy fails in many lines"),
    pytest.param({"cupy": "unreadable"}, "cuda_runtime", "Permission denied", id="CuPy cannot be read"),
    pytest.param(
        {"environment": {"CUPY_CACHE_DIR": "/dev/null/cache"}},
        "kernel_cache",
        "NotADirectoryError",
        id="the cache directory cannot be",
    ),
    pytest.param({}, "gpus", "", id="no GPU to be seen"),
]


@pytest.mark.parametrize(("conditions", "field", "reason"), BROKEN)
def test_info_says_why_a_field_cannot_be_had(command, conditions, field, reason):
    fields = json.loads(succeeds(command("info", "--json", **conditions)))
    assert list(fields[field]) == ["unavailable"]
    assert fields[field]["unavailable"]
    assert reason in fields[field]["unavailable"]


@pytest.mark.parametrize("cupy", STUBS)
def test_info_in_words_survives_a_broken_cupy(command, cupy):
    assert re.search(r"^gpus +- \(.+\)$", succeeds(command("info", cupy=cupy)), re.MULTILINE)


def test_info_counts_the_files_of_the_kernel_cache(command, kernel_cache):
    cache = json.loads(succeeds(command("info", "--json", environment=kernel_cache.variables)))["kernel_cache"]
    assert cache == {"directory": str(kernel_cache.path), "files": 2, "bytes": 3 + 5}


# demo


def errors(output: str) -> dict[str, float]:
    rows = re.findall(r"^(y|dx|dweight|dbias) +(\S+) +\S+$", output, re.MULTILINE)
    return {name: float(error) for name, error in rows}


def test_demo_says_that_the_host_path_ran_and_why(command):
    output = succeeds(command("demo"))
    assert "host path (NumPy): no GPU (" in output
    assert "float16 of shape (1797, 64)" in output
    for direction in ("forward", "backward"):
        assert f"layer_norm {direction}: 1797 rows x 64 cols, float16 -> float16, on H200" in output
        assert re.search(rf"^{direction} +[\d.]+ us +[\d.]+$", output, re.MULTILINE)


def test_demo_without_cupy_says_so(command):
    assert "host path (NumPy): no GPU (CuPy could not be imported" in succeeds(command("demo", cupy="absent"))


def test_demo_shows_the_rounding_of_float16_as_error(command):
    found = errors(succeeds(command("demo")))
    # Half a unit in the last place of the largest value: y < 8, dx < 2, sums < 256.
    bounds = {"y": 2**-9, "dx": 2**-11, "dweight": 2**-4, "dbias": 2**-4}
    assert found.keys() == bounds.keys()
    for name, bound in bounds.items():
        assert 0 < found[name] <= 1.01 * bound + 1e-9


ARRAYS = {
    "float32": numpy.random.default_rng(1).standard_normal((5, 7), dtype="float32"),
    "one axis": numpy.linspace(0, 1, 9, dtype="float16"),
    "three axes": numpy.linspace(-1, 1, 24, dtype="float32").reshape(2, 3, 4),
    "columns first": numpy.asfortranarray(numpy.arange(12, dtype="float32").reshape(3, 4)),
    "bytes of the other order": numpy.arange(12.0).reshape(3, 4).astype(">f8"),
    "a row with NaN": numpy.array([[1, 2, numpy.nan], [3, 5, 4]], "float32"),
    "a row with infinity": numpy.array([[1, 2, numpy.inf], [3, 5, 4]], "float32"),
}


@pytest.mark.parametrize("name", ARRAYS)
def test_demo_takes_a_file(command, tmp_path, name):
    numpy.save(tmp_path / "x.npy", ARRAYS[name])
    output = succeeds(command("demo", "--input", str(tmp_path / "x.npy")))
    assert f"of shape {ARRAYS[name].shape}" in output
    found = errors(output)
    assert len(found) == 4
    assert all(error < 1e-2 for error in found.values())


BAD_ARRAYS = {
    "integers": (numpy.arange(6), "int64"),
    "complex numbers": (numpy.zeros((2, 2), complex), "complex128"),
    "strings": (numpy.array(["a"]), "str"),
    "objects": (numpy.array([None]), "pickle"),
    "no axis": (numpy.array(1.0), "()"),
    "no elements": (numpy.zeros((3, 0)), "(3, 0)"),
    "no rows": (numpy.zeros((0, 3)), "(0, 3)"),
}


@pytest.mark.parametrize("name", BAD_ARRAYS)
def test_demo_refuses_an_array_that_it_cannot_normalise(command, tmp_path, name):
    array, fragment = BAD_ARRAYS[name]
    path = tmp_path / "x.npy"
    numpy.save(path, array)
    fails_in_one_line(command("demo", "--input", str(path)), 2, str(path), "float16, float32 or float64", fragment)


BAD_FILES = {
    "text": b"1.0 2.0 3.0\n",
    "empty": b"",
    "a truncated array": b"\x93NUMPY\x01\x00v\x00{'descr': '<f4', 'fortran_order': False, 'shape': (2, 2), }".ljust(127)
    + b"\n",
    "a zip archive": b"PK\x03\x04" + bytes(40),
}


@pytest.mark.parametrize("name", BAD_FILES)
def test_demo_refuses_a_file_that_is_no_array(command, tmp_path, name):
    path = tmp_path / "x.npy"
    path.write_bytes(BAD_FILES[name])
    fails_in_one_line(command("demo", "--input", str(path)), 2, ".npy", str(path))


@pytest.mark.parametrize(
    ("path", "fragment"), [("missing.npy", "No such file"), (".", "Is a directory"), ("", "Is a directory")]
)
def test_demo_refuses_what_is_no_file(command, path, fragment):
    fails_in_one_line(command("demo", "--input", path), 2, fragment)


@pytest.mark.gpu
def test_demo_runs_on_the_gpu_where_there_is_one(command):
    output = succeeds(
        command("demo", environment={"CUDA_VISIBLE_DEVICES": os.environ.get("CUDA_VISIBLE_DEVICES", "0")})
    )
    assert "GPU (CUDA kernels through CuPy)" in output
    assert "host path" not in output
    found = errors(output)
    assert found["y"] <= 1.01 * 2**-8
    assert found["dx"] <= 1.01 * 2**-10


# compile

DIGITS = ("--cols", "64", "--dtype", "float16")
LONG = ("--cols", "65536", "--dtype", "float32", "--arch", "80")
PROBLEMS = [
    pytest.param(("layer_norm", "forward", *DIGITS), ["forward"], id="forward"),
    pytest.param(("rms_norm", "forward", *DIGITS), ["forward"], id="rms_norm forward"),
    pytest.param(("layer_norm", "backward", *DIGITS), ["backward", "sum_partials"], id="backward"),
    pytest.param(("rms_norm", "backward", *DIGITS), ["backward", "sum_partials"], id="rms_norm backward"),
    pytest.param(("layer_norm", "forward", *LONG), ["forward_streamed"], id="forward, a long row before sm_90"),
    pytest.param(
        ("layer_norm", "backward", *LONG),
        ["backward_streamed", "weight_gradient_partials", "sum_partials"],
        id="backward, a long row before sm_90",
    ),
]


def compile_arguments(op: str, direction: str, *options: str) -> tuple[str, ...]:
    return ("compile", "--op", op, "--direction", direction, *options)


@pytest.mark.parametrize(("problem", "kernels"), PROBLEMS)
def test_compile_shows_the_plan_without_cupy(command, problem, kernels):
    output = succeeds(command(*compile_arguments(*problem), "--show", "plan", cupy="absent"))
    assert output.startswith(f"{problem[0]} {problem[1]}: ")
    assert re.findall(r"^ +(\w+): grid", output, re.MULTILINE) == kernels


@pytest.mark.parametrize(("problem", "kernels"), PROBLEMS)
def test_compile_shows_the_whole_source_without_cupy(command, problem, kernels):
    output = succeeds(command(*compile_arguments(*problem), "--show", "source", cupy="absent"))
    assert re.findall(r"^cunorm_(\w+)\(", output, re.MULTILINE) == kernels
    assert '#include "' not in output


@pytest.mark.parametrize(("problem", "kernels"), PROBLEMS)
def test_compile_shows_registers_without_a_gpu(command, problem, kernels):
    pytest.importorskip("cupy_backends.cuda.libs.nvrtc")
    output = succeeds(command(*compile_arguments(*problem), "--show", "ptxas"))
    _, *rows = (line.split() for line in output.splitlines())
    assert [row[0] for row in rows] == kernels
    for _, registers, _, _, _, seconds in rows:
        assert 0 < int(registers) <= 255
        assert float(seconds) > 0


def test_compile_takes_a_dtype_of_its_own_for_weight_and_bias(command):
    arguments = compile_arguments("layer_norm", "forward", *DIGITS, "--weight-dtype", "bfloat16")
    output = succeeds(command(*arguments, "--show", "source"))
    assert "const half* x, half* y, const bfloat16* weight, const bfloat16* bias" in output


def test_compile_for_registers_without_cupy_says_what_to_install(command):
    result = command(*compile_arguments("layer_norm", "forward", *DIGITS), "--show", "ptxas", cupy="absent")
    fails_in_one_line(result, 1, "needs CuPy and NVRTC", "pip install 'cunorm[cuda13]'")


@pytest.mark.parametrize(
    "change",
    [
        ("--cols", "0"),
        ("--cols", "-1"),
        ("--cols", "many"),
        ("--dtype", "int8"),
        ("--weight-dtype", "fp8"),
        ("--arch", "70"),
    ],
    ids=" ".join,
)
def test_compile_refuses_bad_arguments(command, change):
    result = command(*compile_arguments("layer_norm", "forward", *DIGITS), "--show", "plan", *change)
    assert result.returncode == 2
    assert f"error: argument {change[0]}: " in result.stderr
    assert "Traceback" not in result.stderr


# cache


class KernelCache:
    """A directory with two kernel files and others that are not."""

    def __init__(self, path: Path):
        self.path = path
        self.variables = {"CUPY_CACHE_DIR": str(path)}
        path.mkdir()
        (path / f"{KERNEL}.cubin").write_bytes(bytes(3))
        (path / f"{KERNEL}.cubin.cu").write_bytes(bytes(5))
        (path / "notes.txt").write_bytes(bytes(7))
        (path / f"{KERNEL}.cubin.backup").write_bytes(bytes(11))
        (path / "deeper").mkdir()
        (path / "deeper" / f"{KERNEL}.cubin").write_bytes(bytes(13))


@pytest.fixture
def kernel_cache(tmp_path):
    return KernelCache(tmp_path / "kernel cache")


def test_cache_path_is_what_cupy_uses(command, tmp_path):
    assert succeeds(command("cache", "path", environment={"CUPY_CACHE_DIR": "/a/b"})) == "/a/b\n"
    home = {"HOME": str(tmp_path)}
    variables = {name: value for name, value in os.environ.items() if name != "CUPY_CACHE_DIR"} | home
    result = subprocess.run(
        [sys.executable, "-m", "cunorm", "cache", "path"], cwd=tmp_path, env=variables, capture_output=True, text=True
    )
    assert succeeds(result) == f"{tmp_path}/.cupy/kernel_cache\n"


def test_cache_clear_removes_kernels_and_nothing_else(command, kernel_cache):
    output = succeeds(command("cache", "clear", environment=kernel_cache.variables))
    assert output == f"removed 2 files, 8 bytes, from {kernel_cache.path}\n"
    assert sorted(path.name for path in kernel_cache.path.iterdir()) == [
        f"{KERNEL}.cubin.backup",
        "deeper",
        "notes.txt",
    ]
    assert (kernel_cache.path / "deeper" / f"{KERNEL}.cubin").exists()


def test_cache_clear_without_a_directory_has_nothing_to_do(command, tmp_path):
    path = tmp_path / "absent"
    output = succeeds(command("cache", "clear", environment={"CUPY_CACHE_DIR": str(path)}))
    assert output == f"removed 0 files, 0 bytes, from {path}\n"
    assert not path.exists()


def test_cache_clear_says_what_it_could_not_read(command):
    result = command("cache", "clear", environment={"CUPY_CACHE_DIR": "/dev/null/cache"})
    fails_in_one_line(result, 1, "/dev/null/cache")


# the command itself


def test_a_command_must_be_named(command):
    result = command()
    assert result.returncode == 2
    assert "arguments are required: command" in result.stderr


def test_a_reader_that_is_gone_is_no_error(tmp_path):
    reader, writer = os.pipe()
    os.close(reader)
    result = subprocess.run(
        [sys.executable, "-m", "cunorm", "cache", "path"],
        cwd=tmp_path,
        stdout=writer,
        stderr=subprocess.PIPE,
        text=True,
    )
    os.close(writer)
    assert (result.returncode, result.stderr) == (0, "")
