"""`python -m cunorm compile --all`."""

from __future__ import annotations

import json
import os
import re

import pytest
from command_line import assert_fails_in_one_line, command, output_of
from nvrtc import needs_nvrtc

from cunorm.commands import compilation, compile, matrix
from cunorm.device import KNOWN

ONE_ROW = ("compile", "--all", "--cols", "100", "--dtype", "bfloat16")
SUMMARY = r"(\d+) kernels compiled for (.+): 0 failures, at most (\d+) registers, ([\d.]+) s\n"


@pytest.fixture
def cache(tmp_path):
    return {"CUPY_CACHE_DIR": str(tmp_path / "cache")}


@needs_nvrtc
def test_all_architectures_without_a_gpu_and_nothing_of_progress(tmp_path, cache):
    """output_of holds standard error to be empty: it is no terminal."""
    output = output_of(command(tmp_path, *ONE_ROW, environment=cache))
    count, architectures, registers, _ = re.fullmatch(SUMMARY, output).groups()
    assert architectures == ", ".join(f"sm_{arch}" for arch in KNOWN)
    assert int(count) == 6 * len(KNOWN)  # for either norm: forward, backward, and one that sums
    assert 0 < int(registers) <= 255


@needs_nvrtc
def test_several_lengths_dtypes_and_architectures(tmp_path, cache):
    options = (
        "--cols",
        "100",
        "300",
        "--dtype",
        "float16",
        "float32",
        "--weight-dtype",
        "float32",
        "--arch",
        "80",
        "90",
    )
    output = output_of(command(tmp_path, "compile", "--all", *options, environment=cache))
    count, architectures, *_ = re.fullmatch(SUMMARY, output).groups()
    assert (int(count), architectures) == ((2 * 2 * 4 + 4) * 2, "sm_80, sm_90")  # those that sum are of any length


@needs_nvrtc
def test_a_second_run_compiles_nothing(tmp_path, cache):
    output_of(command(tmp_path, *ONE_ROW, "--arch", "90", environment=cache))
    (file,) = (tmp_path / "cache").iterdir()
    known = json.loads(file.read_text())
    file.write_text(json.dumps({key: [200 + index, *used[1:]] for index, (key, used) in enumerate(known.items())}))
    output = output_of(command(tmp_path, *ONE_ROW, "--arch", "90", environment=cache))
    assert re.fullmatch(SUMMARY, output)[3] == str(200 + len(known) - 1)


@needs_nvrtc
@pytest.mark.parametrize("content", ["", "{"])
def test_results_that_cannot_be_read_are_made_again(tmp_path, cache, content):
    directory = tmp_path / "cache"
    directory.mkdir()
    (directory / "cunorm_compiled.json").write_text(content)
    assert re.fullmatch(SUMMARY, output_of(command(tmp_path, *ONE_ROW, "--arch", "90", environment=cache)))
    assert len(json.loads((directory / "cunorm_compiled.json").read_text())) == 6


@needs_nvrtc
def test_a_failure_is_in_the_table_and_in_the_exit_status(monkeypatch, capsys, tmp_path):
    monkeypatch.setenv("CUPY_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(compilation, "SHARED_LIMIT", 1000)  # sum_partials takes 1024
    from cunorm.__main__ import main

    assert main([*ONE_ROW, "--arch", "80"]) == 1
    head, *failures, summary = capsys.readouterr().out.splitlines()
    assert head.split()[:3] == ["arch", "kernel", "cols"]
    for fault, spec in zip(failures[::2], failures[1::2], strict=True):
        assert re.fullmatch(r"sm_80 +sum_partials +0 +\d+  uses 1024 bytes of shared memory of 1000", fault)
        assert "SumSpec(" in spec
    assert summary.startswith("6 kernels compiled for sm_80: 2 failures, ")


def test_without_lengths_it_is_the_covering_set():
    arguments = compile.argparse.Namespace(cols=None)
    assert compile._problems(arguments, KNOWN[80]) == matrix.covering(KNOWN[80])


def test_without_cupy_it_says_what_to_install(tmp_path):
    result = command(tmp_path, *ONE_ROW, cupy="absent")
    assert_fails_in_one_line(result, 1, "needs CuPy and NVRTC", "pip install 'cunorm[cuda13]'")


REFUSED = [
    (("--all", "--op", "rms_norm"), "leave --op and --direction out"),
    (("--all", "--dtype", "float16"), "only with --cols"),
    (("--all", "--show", "plan"), "not allowed with argument"),
    ((), "one of the arguments --show --all is required"),
    (("--show", "plan"), "--show needs --op"),
    (
        ("--show", "plan", "--op", "rms_norm", "--direction", "forward", "--cols", "3", "4", "--dtype", "float16"),
        "--show takes one --cols",
    ),
]


@pytest.mark.parametrize(("options", "words"), REFUSED, ids=[" ".join(options) or "none" for options, _ in REFUSED])
def test_arguments_that_do_not_go_together_are_refused(tmp_path, options, words):
    result = command(tmp_path, "compile", *options)
    assert result.returncode == 2
    assert words in result.stderr
    assert "Traceback" not in result.stderr


@pytest.mark.gpu
def test_kernels_of_this_machine_are_in_its_disk_cache(tmp_path, cache):
    """`command` hides the GPUs of the machine; here they must be seen."""
    environment = cache | {"CUDA_VISIBLE_DEVICES": os.environ.get("CUDA_VISIBLE_DEVICES", "0")}
    output = output_of(command(tmp_path, *ONE_ROW, environment=environment))
    count, architectures, *_ = re.fullmatch(SUMMARY, output).groups()
    assert int(count) == 6
    assert architectures.count("sm_") == 1
    cubins = [entry.name for entry in os.scandir(cache["CUPY_CACHE_DIR"]) if entry.name.endswith(".cubin")]
    assert len(cubins) >= 6
