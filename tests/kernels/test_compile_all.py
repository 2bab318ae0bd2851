"""`python -m cunorm compile --all`: what it compiles, keeps and prints, and what it refuses."""

from __future__ import annotations

import json
import os
import re
from dataclasses import replace

import pytest
from command_line import assert_fails_in_one_line, command, output_of
from nvrtc import needs_nvrtc

from cunorm.__main__ import main
from cunorm.commands import compilation, compile
from cunorm.kernel.device import INSTALL, KNOWN, known

ONE_ROW = ("--cols", "100", "--dtype", "bfloat16")
SUMMARY = r"(\d+) kernels compiled for (.+): 0 failures, at most (\d+) registers, ([\d.]+) s\n"


def kernels(*architectures: int) -> int:
    """Return the number of kernels for ONE_ROW, with every norm and number of rows, in both directions."""
    arguments = compile.argparse.Namespace(cols=[100], dtype=["bfloat16"], weight_dtype=None)
    devices = [KNOWN[arch] for arch in architectures]
    return sum(len(compile.kernels_of(compile._problems(arguments), device)) for device in devices)


@pytest.fixture
def cache(tmp_path):
    return {"CUNORM_CACHE_DIR": str(tmp_path / "cache")}


@pytest.fixture
def compiled(monkeypatch, capsys, cache):
    """Run `compile --all` in this process, with rms_norm and many rows only: three kernels for a length and dtype."""
    monkeypatch.setenv(*next(iter(cache.items())))
    monkeypatch.setattr(compile, "OPS", ("rms_norm",))
    monkeypatch.setattr(compile, "NUMBERS_OF_ROWS", [compile.ROWS])

    def run(*options: str) -> tuple[str, str, str, str]:
        assert main(["compile", "--all", *options]) == 0
        output, errors = capsys.readouterr()
        assert errors == "", "there is no progress bar where standard error is no terminal"
        return re.fullmatch(SUMMARY, output).groups()

    return run


@needs_nvrtc
@pytest.mark.slow
def test_all_architectures_without_a_gpu(compiled, monkeypatch):
    monkeypatch.setattr(compile, "why_no_gpu", lambda: "hidden by a test")
    count, architectures, registers, _ = compiled("--cols", "100", "--dtype", "bfloat16")
    assert architectures == ", ".join(f"sm_{arch}" for arch in KNOWN)
    assert int(count) == kernels(*KNOWN) == 3 * len(KNOWN)  # forward, backward, and one that adds up partial rows
    assert 0 < int(registers) <= 255


@needs_nvrtc
@pytest.mark.slow
def test_several_lengths_dtypes_and_architectures(compiled, cache, tmp_path):
    options = ("--cols", "100", "300", "--dtype", "float16", "float32", "--weight-dtype", "float32")
    count, architectures, *_ = compiled(*options, "--arch", "80", "90")
    # Two more kernels add up partial rows, one for each dtype. The last one is an H100's only: backward of 300 columns
    # of float32.
    assert (int(count), architectures) == ((2 * 2 * 2 + 2) * 2 + 1, "sm_80, sm_90")
    kept = [entry for entry in os.scandir(cache["CUNORM_CACHE_DIR"]) if entry.name.endswith(".cubin")]
    assert len(kept) == int(count)
    size = sum(entry.stat().st_size for entry in kept)
    counted = output_of(command(tmp_path, "cache", "count", environment=cache))
    assert counted == f"{count} kernels, {size:,} bytes; 1 other files\n"


@pytest.mark.slow
@needs_nvrtc
def test_a_second_run_compiles_nothing(compiled, tmp_path):
    compiled(*ONE_ROW, "--arch", "90")
    file = tmp_path / "cache" / "cunorm_compiled.json"
    known = json.loads(file.read_text())
    file.write_text(json.dumps({key: [200 + index, *used[1:]] for index, (key, used) in enumerate(known.items())}))
    _, _, registers, _ = compiled(*ONE_ROW, "--arch", "90")
    assert registers == str(200 + len(known) - 1)


@pytest.mark.slow
@needs_nvrtc
def test_a_kernel_that_is_gone_is_compiled_again(compiled, tmp_path):
    """It is compiled again though the cache knows what ptxas said of it."""
    compiled(*ONE_ROW, "--arch", "90")
    kept = sorted((tmp_path / "cache").glob("*.cubin"))
    kept[0].unlink()
    compiled(*ONE_ROW, "--arch", "90")
    assert sorted((tmp_path / "cache").glob("*.cubin")) == kept


@pytest.mark.slow
@needs_nvrtc
@pytest.mark.parametrize("content", ["", "{"])
def test_results_that_cannot_be_read_are_made_again(compiled, tmp_path, content):
    directory = tmp_path / "cache"
    directory.mkdir()
    (directory / "cunorm_compiled.json").write_text(content)
    compiled(*ONE_ROW, "--arch", "90")
    assert len(json.loads((directory / "cunorm_compiled.json").read_text())) == kernels(90) == 3


@pytest.mark.slow
@needs_nvrtc
def test_a_failure_is_in_the_table_and_in_the_exit_status(monkeypatch, capsys, compiled):
    monkeypatch.setattr(compilation, "SHARED_LIMIT", 1000)  # sum_partials takes 1024
    assert main(["compile", "--all", *ONE_ROW, "--arch", "80"]) == 1
    head, fault, spec, summary = capsys.readouterr().out.splitlines()
    assert head.split()[:3] == ["arch", "kernel", "cols"]
    assert re.fullmatch(r"sm_80 +sum_partials +- +\d+  uses 1024 bytes of shared memory of 1000", fault)
    assert "sum_partials of " in spec
    assert summary.startswith("3 kernels compiled for sm_80: 1 failures, ")


@pytest.mark.slow
@needs_nvrtc
def test_a_cache_for_calls_holds_kernels_for_any_number_of_rows():
    """The cache has the kernels that plans choose for few rows, for many, and for numbers between."""
    arguments = compile.argparse.Namespace(cols=[100, 4096], dtype=["bfloat16"], weight_dtype=None)
    problems = compile._problems(arguments)
    kept = set(compile.kernels_of(problems, KNOWN[90]))
    for rows in (*range(1, 65), *range(65, 200, 8), 131, 132, 133, 600, 1000, 3000, 70000):
        assert kept >= set(compile.kernels_of([replace(problem, rows=rows) for problem in problems], KNOWN[90])), rows


@pytest.mark.slow
@needs_nvrtc
def test_an_architecture_has_the_kernels_of_each_gpu_that_is_known(monkeypatch):
    """An H100 and an H200 have different kernels for 1600 columns, and both are compiled."""
    asked = []
    monkeypatch.setattr(compile, "compile_all", lambda work, _: asked.extend(work) or [])
    assert main(["compile", "--all", "--cols", "1600", "--dtype", "bfloat16", "--arch", "90"]) == 0
    arguments = compile.argparse.Namespace(cols=[1600], dtype=["bfloat16"], weight_dtype=None)
    needed = [set(compile.kernels_of(compile._problems(arguments), device)) for device in known(90)]
    assert needed[0] != needed[1]
    assert len(asked) == len(set(asked))
    assert {spec for spec, _ in asked} == needed[0] | needed[1]


def test_without_cupy_it_says_what_to_install(tmp_path):
    result = command(tmp_path, "compile", "--all", *ONE_ROW, cupy="absent")
    assert_fails_in_one_line(result, 1, "needs CuPy and NVRTC (ImportError: hidden by a test): ", INSTALL)


def test_what_it_needs_is_asked_before_kernels_are_planned(monkeypatch, capsys):
    """A missing compiler is reported first, because all plans take minutes."""
    monkeypatch.setattr(compile, "why_no_compiler", lambda: "none is here")
    monkeypatch.setattr(compile, "_problems", lambda *_: pytest.fail("kernels were planned"))
    assert main(["compile", "--all", *ONE_ROW]) == 1
    assert capsys.readouterr().err == f"compile: needs CuPy and NVRTC (none is here): {INSTALL}.\n"


def test_another_import_that_fails_is_not_said_to_be_cupy(monkeypatch):
    def broken(*_):
        raise ImportError("something else")

    monkeypatch.setattr(compile, "why_no_compiler", lambda: None)
    monkeypatch.setattr(compile, "_problems", broken)
    with pytest.raises(ImportError, match="something else"):
        main(["compile", "--all", *ONE_ROW, "--arch", "80"])


REFUSED = [
    (("--all", "--op", "rms_norm"), "leave --op, --direction, --rows and --out-features out"),
    (("--all", "--dtype", "float16"), "--all needs --cols, the lengths of rows to compile for"),
    (("--all", "--show", "plan"), "not allowed with argument"),
    ((), "it needs --show (plan, source or ptxas), --op, --direction, --cols, --dtype; or --all"),
    (("--cols", "64"), "it needs --show (plan, source or ptxas), --op, --direction, --dtype; or --all"),
    (("--show", "plan"), "--show needs --op, --direction, --cols, --dtype"),
    (
        ("--show", "plan", "--op", "rms_norm", "--direction", "forward", "--cols", "3", "4", "--dtype", "float16"),
        "--show takes one --cols",
    ),
]


@pytest.mark.parametrize(("options", "words"), REFUSED, ids=[" ".join(options) or "none" for options, _ in REFUSED])
def test_arguments_that_do_not_go_together_are_refused(tmp_path, options, words):
    result = command(tmp_path, "compile", *options)
    assert_fails_in_one_line(result, 2, words)


@pytest.mark.gpu
def test_kernels_of_this_machine_are_in_its_disk_cache(tmp_path, cache):
    """`command` hides the GPUs of the machine; here they must be seen."""
    environment = cache | {"CUDA_VISIBLE_DEVICES": os.environ.get("CUDA_VISIBLE_DEVICES", "0")}
    output = output_of(command(tmp_path, "compile", "--all", *ONE_ROW, environment=environment))
    count, architectures, *_ = re.fullmatch(SUMMARY, output).groups()
    assert architectures.count("sm_") == 1
    cubins = [entry.name for entry in os.scandir(cache["CUNORM_CACHE_DIR"]) if entry.name.endswith(".cubin")]
    assert len(cubins) == int(count) > 0
