"""`python -m cunorm info`, `compile` and `cache`: what they say, and what they refuse."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import numpy
import pytest
from command_line import STUBS, assert_fails_in_one_line, command, output_of, without_a_home

import cunorm
from cunorm.__main__ import main
from cunorm.commands import info
from cunorm.kernel.cache import cache_directory
from cunorm.kernel.device import INSTALL, INSTALL_LINEAR

KERNEL = "0123456789abcdef0123456789abcdef01234567"


@pytest.mark.slow
def test_info_tells_the_versions_that_are_installed(tmp_path):
    fields = json.loads(output_of(command(tmp_path, "info", "--json")))
    assert fields["cunorm"] == cunorm.__version__
    assert fields["numpy"] == numpy.__version__
    assert fields["python"] == ".".join(map(str, sys.version_info[:3]))


@pytest.mark.slow
def test_info_says_the_same_in_words(tmp_path):
    fields = json.loads(output_of(command(tmp_path, "info", "--json")))
    lines = output_of(command(tmp_path, "info")).splitlines()
    assert [line.split()[0] for line in lines] == list(fields)


BROKEN = [
    pytest.param(
        {"cupy": "absent"}, "driver", "CuPy could not be imported (ImportError: hidden by a test)", id="no CuPy"
    ),
    pytest.param({"cupy": "absent"}, "nvrtc", "ImportError: hidden by a test", id="no NVRTC"),
    pytest.param({"cupy": "broken"}, "gpus", "RuntimeError: failed to load a library)", id="CuPy fails in many lines"),
    pytest.param({"cupy": "unreadable"}, "cuda_runtime", "Permission denied", id="CuPy cannot be read"),
    pytest.param(
        {"environment": {"CUNORM_CACHE_DIR": "/dev/null/cache"}},
        "kernel_cache",
        "NotADirectoryError",
        id="the cache directory cannot be",
    ),
    pytest.param({}, "gpus", "", id="no GPU to be seen"),
]


@pytest.mark.parametrize(("conditions", "field", "reason"), BROKEN)
def test_info_says_why_a_field_cannot_be_had(tmp_path, conditions, field, reason):
    fields = json.loads(output_of(command(tmp_path, "info", "--json", **conditions)))
    assert list(fields[field]) == ["unavailable"]
    assert fields[field]["unavailable"]
    assert reason in fields[field]["unavailable"]


@pytest.mark.parametrize("cupy", STUBS)
def test_info_in_words_survives_a_broken_cupy(tmp_path, cupy):
    assert re.search(r"^gpus +- \(.+\)$", output_of(command(tmp_path, "info", cupy=cupy)), re.MULTILINE)


def test_info_says_how_ranks_exchange_rows_and_why(tmp_path):
    pytest.importorskip("torch")
    fields = json.loads(output_of(command(tmp_path, "info", "--json", cupy="absent")))
    assert fields["exchange"].startswith("torch.distributed (CuPy could not be imported")
    assert list(fields["peer_access"]) == ["unavailable"]


@pytest.mark.parametrize(
    ("reached", "access", "exchange"),
    [
        ({(0, 1), (1, 0)}, "every GPU reaches the memory of every other", "symmetric memory where ub_* ask for it"),
        ({(0, 1)}, "GPU 1 cannot reach GPU 0", "torch.distributed (GPU 1 cannot reach GPU 0)"),
    ],
)
def test_info_of_two_gpus(monkeypatch, reached, access, exchange):
    class Runtime:
        @staticmethod
        def deviceCanAccessPeer(source, peer):  # noqa: N802
            return (source, peer) in reached

    monkeypatch.setattr(info, "_gpus", lambda: [{}, {}])
    monkeypatch.setattr(info, "_runtime", Runtime)
    monkeypatch.setattr(info, "_distribution", lambda name: "")
    assert info.report()["peer_access"] == access
    assert info.report()["exchange"].startswith(exchange)


@pytest.mark.slow
def test_info_counts_the_files_of_the_kernel_cache(tmp_path, kernel_cache):
    cache = json.loads(output_of(command(tmp_path, "info", "--json", environment=kernel_cache.variables)))[
        "kernel_cache"
    ]
    assert cache == {"directory": str(kernel_cache.path), "files": 3, "bytes": 3 + 5 + 9}


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
        ["column_gradients", "backward_streamed", "sum_partials"],
        id="backward, a long row before sm_90",
    ),
]


def compile_arguments(op: str, direction: str, *options: str) -> tuple[str, ...]:
    return ("compile", "--op", op, "--direction", direction, *options)


@pytest.mark.parametrize(("problem", "kernels"), PROBLEMS)
def test_compile_shows_the_plan_without_cupy(tmp_path, problem, kernels):
    output = output_of(command(tmp_path, *compile_arguments(*problem), "--show", "plan", cupy="absent"))
    assert output.startswith(f"{problem[0]} {problem[1]}: ")
    assert re.findall(r"^ +(\w+): grid", output, re.MULTILINE) == kernels


@pytest.mark.slow
@pytest.mark.parametrize(("problem", "kernels"), PROBLEMS)
def test_compile_shows_the_whole_source_without_cupy(tmp_path, problem, kernels):
    output = output_of(command(tmp_path, *compile_arguments(*problem), "--show", "source", cupy="absent"))
    assert re.findall(r"^cunorm_(\w+)\(", output, re.MULTILINE) == kernels
    assert '#include "' not in output


def test_compile_shows_how_a_norm_and_its_product_run(tmp_path):
    product = ("--op", "layer_norm_linear", "--rows", "128", "--cols", "2880", "--out-features", "5120")
    output = output_of(command(tmp_path, "compile", *product, "--dtype", "bfloat16", "--show", "plan", cupy="absent"))
    h200, h100 = output.splitlines()
    assert h200.startswith("H200: split, ")
    assert h100.startswith("H100: overlapped: ")


@pytest.mark.parametrize(
    ("options", "needless"),
    [
        (("--op", "layer_norm", "--direction", "forward", "--rows", "16"), "--rows"),
        (("--op", "rms_norm", "--direction", "forward", "--out-features", "16"), "--out-features"),
        (("--op", "layer_norm_linear", "--direction", "forward"), "--direction"),
    ],
)
def test_compile_refuses_what_would_be_ignored(tmp_path, options, needless):
    result = command(tmp_path, "compile", *options, *DIGITS, "--show", "plan")
    expected = f"--show of {options[1]} does not depend on {needless}: leave {needless} out"
    assert_fails_in_one_line(result, 2, f"{expected} (see python -m cunorm compile --help)")


@pytest.mark.slow
@pytest.mark.parametrize(("problem", "kernels"), PROBLEMS)
def test_compile_shows_registers_without_a_gpu(tmp_path, problem, kernels):
    pytest.importorskip("cupy_backends.cuda.libs.nvrtc")
    output = output_of(command(tmp_path, *compile_arguments(*problem), "--show", "ptxas"))
    _, *rows = (line.split() for line in output.splitlines())
    assert [row[0] for row in rows] == kernels
    for _, registers, _, _, _, seconds in rows:
        assert 0 < int(registers) <= 255
        assert float(seconds) > 0


@pytest.mark.slow
def test_compile_takes_a_dtype_of_its_own_for_weight_and_bias(tmp_path):
    arguments = compile_arguments("layer_norm", "forward", *DIGITS, "--weight-dtype", "bfloat16")
    output = output_of(command(tmp_path, *arguments, "--show", "source"))
    assert "const half* x, const bfloat16* operand_0, const bfloat16* operand_1, half* y" in output


def test_compile_for_registers_without_cupy_says_what_to_install(tmp_path):
    result = command(tmp_path, *compile_arguments("layer_norm", "forward", *DIGITS), "--show", "ptxas", cupy="absent")
    assert_fails_in_one_line(result, 1, "needs CuPy and NVRTC (ImportError: hidden by a test): ", INSTALL)


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
def test_compile_refuses_bad_arguments(tmp_path, change):
    result = command(tmp_path, *compile_arguments("layer_norm", "forward", *DIGITS), "--show", "plan", *change)
    assert_fails_in_one_line(result, 2, f"error: argument {change[0]}: ")


class KernelCache:
    """A directory with two kernel files, one of a killed process, and files that are no kernels."""

    def __init__(self, path: Path):
        self.path = path
        self.variables = {"CUNORM_CACHE_DIR": str(path)}
        path.mkdir()
        (path / f"cunorm_{KERNEL}.cubin").write_bytes(bytes(3))
        (path / f"cunorm_nodes_{KERNEL}.so").write_bytes(bytes(5))
        (path / f"cunorm_{KERNEL}.cubin.{KERNEL[:32]}.tmp").write_bytes(bytes(9))  # a killed process left it
        (path / "notes.txt").write_bytes(bytes(7))
        (path / f"cunorm_{KERNEL}.cubin.backup").write_bytes(bytes(11))
        (path / "deeper").mkdir()
        (path / "deeper" / f"cunorm_{KERNEL}.cubin").write_bytes(bytes(13))


@pytest.fixture
def kernel_cache(tmp_path):
    return KernelCache(tmp_path / "kernel cache")


HOMES = [
    ({"CUNORM_CACHE_DIR": "/a/b", "XDG_CACHE_HOME": "/c"}, "/a/b"),
    ({"CUNORM_CACHE_DIR": "", "XDG_CACHE_HOME": "/c"}, "/c/cunorm"),
    ({"XDG_CACHE_HOME": "relative", "HOME": "/d"}, "/d/.cache/cunorm"),
    ({"HOME": "/d", "CUPY_CACHE_DIR": "/e"}, "/d/.cache/cunorm"),
]


@pytest.mark.parametrize(("variables", "path"), HOMES)
def test_the_cache_is_a_folder_of_cunorms_own(monkeypatch, variables, path):
    for name in ("CUNORM_CACHE_DIR", "XDG_CACHE_HOME", "HOME", "CUPY_CACHE_DIR"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert str(cache_directory()) == path


@pytest.mark.parametrize("action", ["path", "count", "clear"])
def test_cache_says_that_there_is_no_home(monkeypatch, capsys, action):
    without_a_home(monkeypatch)
    assert main(["cache", action]) == 1
    assert capsys.readouterr().err == "cache: this user has no home directory; CUNORM_CACHE_DIR may name a folder\n"


def test_cache_clear_removes_kernels_and_nothing_else(tmp_path, kernel_cache):
    output = output_of(command(tmp_path, "cache", "clear", environment=kernel_cache.variables))
    assert output == f"removed 3 files, 17 bytes, from {kernel_cache.path}\n"
    assert sorted(path.name for path in kernel_cache.path.iterdir()) == [
        f"cunorm_{KERNEL}.cubin.backup",
        "deeper",
        "notes.txt",
    ]
    assert (kernel_cache.path / "deeper" / f"cunorm_{KERNEL}.cubin").exists()


def test_cache_clear_without_a_directory_has_nothing_to_do(tmp_path):
    path = tmp_path / "absent"
    output = output_of(command(tmp_path, "cache", "clear", environment={"CUNORM_CACHE_DIR": str(path)}))
    assert output == f"removed 0 files, 0 bytes, from {path}\n"
    assert not path.exists()


def test_cache_clear_says_what_it_could_not_read(tmp_path):
    result = command(tmp_path, "cache", "clear", environment={"CUNORM_CACHE_DIR": "/dev/null/cache"})
    assert_fails_in_one_line(result, 1, "/dev/null/cache")


@pytest.mark.slow
def test_without_a_command_it_lists_them(tmp_path):
    output = output_of(command(tmp_path))
    assert output == output_of(command(tmp_path, "--help"))
    assert re.findall(r"^    (\w+) ", output, re.MULTILINE) == ["info", "demo", "compile", "tune", "cache"]


def test_its_version(tmp_path):
    assert output_of(command(tmp_path, "--version")) == f"cunorm {cunorm.__version__}\n"


WRITING = [
    ("--help",),
    ("cache", "path"),
    ("cache", "count"),
    ("info",),
    ("demo",),
    (*compile_arguments("layer_norm", "backward", *DIGITS), "--show", "source"),
]


def written_to(tmp_path: Path, output: int, arguments: tuple[str, ...], **variables: str) -> tuple[int, str]:
    """Run a command with `output` as its standard output, and return (exit status, text on stderr)."""
    result = subprocess.run(
        [sys.executable, "-m", "cunorm", *arguments],
        cwd=tmp_path,
        env=os.environ | {"CUDA_VISIBLE_DEVICES": ""} | variables,
        stdout=output,
        stderr=subprocess.PIPE,
        text=True,
    )
    return result.returncode, result.stderr


@pytest.mark.parametrize("unbuffered", ["", "1"], ids=["at its end", "at once"])
@pytest.mark.parametrize("arguments", WRITING, ids=" ".join)
def test_a_reader_that_is_gone_is_no_error(tmp_path, arguments, unbuffered):
    reader, writer = os.pipe()
    os.close(reader)
    assert written_to(tmp_path, writer, arguments, PYTHONUNBUFFERED=unbuffered) == (0, "")
    os.close(writer)


@pytest.mark.slow
@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="there is no /dev/full")
def test_a_disk_that_is_full_is_said_in_one_line(tmp_path):
    with open("/dev/full", "wb") as full:
        status, error = written_to(tmp_path, full.fileno(), ("cache", "path"))
    assert status == 1
    assert re.fullmatch(r"python -m cunorm: .*No space left on device\n", error)


@pytest.mark.parametrize("arguments", WRITING, ids=" ".join)
def test_a_terminal_of_ascii_is_no_error(tmp_path, arguments):
    (tmp_path / "\N{GREEK SMALL LETTER ALPHA}").mkdir()
    variables = {"PYTHONIOENCODING": "ascii", "CUPY_CACHE_DIR": str(tmp_path / "\N{GREEK SMALL LETTER ALPHA}")}
    assert written_to(tmp_path, subprocess.DEVNULL, arguments, **variables) == (0, "")


@pytest.mark.parametrize(
    ("given", "meant"), [("fp16", "float16"), ("half", "float16"), ("BF16", "bfloat16"), ("fp32", "float32")]
)
def test_compile_says_which_dtype_was_meant(tmp_path, given, meant):
    arguments = compile_arguments("layer_norm", "forward", "--cols", "64", "--dtype", given, "--show", "plan")
    assert_fails_in_one_line(command(tmp_path, *arguments), 2, f"got {given!r}: did you mean {meant}?")


def test_compile_names_all_that_is_missing(tmp_path):
    result = command(tmp_path, "compile", "--show", "plan", "--cols", "64")
    assert_fails_in_one_line(result, 2, "--show needs --op, --direction, --dtype (see python -m cunorm compile --help)")


def test_a_plan_says_that_its_rows_are_assumed(tmp_path):
    output = output_of(command(tmp_path, *compile_arguments("layer_norm", "forward", *DIGITS), "--show", "plan"))
    rows = re.match(r"layer_norm forward: (\d+) rows", output)[1]
    assert output.splitlines()[-1].startswith(f"{rows} rows are assumed")


def test_errors_advise_packages_that_an_index_has():
    """Errors name the packages of the extras: no index has cunorm, so `pip install 'cunorm[cuda13]'` would fail."""
    extras = tomllib.loads((Path(cunorm.__file__).parent.parent / "pyproject.toml").read_text())["project"]
    for extra in ("cuda13", "cuda12"):
        for package in extras["optional-dependencies"][extra]:
            assert package == "tqdm" or package in INSTALL.replace("'", "")
        for package in extras["optional-dependencies"][f"linear-{extra.replace('cuda', 'cu')}"]:
            assert package in INSTALL_LINEAR.replace("'", "")


NEXT = [
    ({"cupy": "absent"}, f"for a GPU {INSTALL}; without one: python -m cunorm demo"),
    ({}, "python -m cunorm demo"),
]


@pytest.mark.parametrize(("conditions", "advice"), NEXT, ids=["no CuPy", "no GPU"])
def test_info_ends_with_what_to_do_next(tmp_path, conditions, advice):
    if not conditions:
        pytest.importorskip("cupy_backends.cuda.libs.nvrtc")
    last = output_of(command(tmp_path, "info", **conditions)).splitlines()[-1]
    assert re.fullmatch(rf"next +{re.escape(advice)}.*", last)
