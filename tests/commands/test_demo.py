"""`python -m cunorm demo`: it says what ran, and refuses what it cannot read in one line."""

from __future__ import annotations

import os
import re

import numpy
import pytest
from command_line import assert_fails_in_one_line, command, output_of

from cunorm.__main__ import main


def errors(output: str) -> dict[str, float]:
    rows = re.findall(r"^(y|dx|dweight|dbias) +(\S+) +\S+$", output, re.MULTILINE)
    return {name: float(error) for name, error in rows}


@pytest.mark.slow
def test_demo_says_that_the_host_path_ran_and_why(tmp_path):
    output = output_of(command(tmp_path, "demo"))
    assert "host path (NumPy): no GPU (" in output
    assert "float16 of shape (1797, 64)" in output
    for direction in ("forward", "backward"):
        assert f"layer_norm {direction}: 1797 rows x 64 cols, on H200 (sm_90, 132 SMs)" in output
        assert re.search(rf"^{direction} +[\d.]+ us +[\d.]+$", output, re.MULTILINE)


@pytest.mark.slow
def test_demo_without_cupy_says_so(tmp_path):
    assert "host path (NumPy): no GPU (CuPy could not be imported" in output_of(
        command(tmp_path, "demo", cupy="absent")
    )


@pytest.mark.slow
def test_demo_shows_the_rounding_of_float16_as_error(tmp_path):
    error_of = errors(output_of(command(tmp_path, "demo")))
    # An error is at most half an ulp of the largest value: y < 8, dx < 2, sums < 256.
    bounds = {"y": 2**-9, "dx": 2**-11, "dweight": 2**-4, "dbias": 2**-4}
    assert error_of.keys() == bounds.keys()
    for name, bound in bounds.items():
        assert 0 < error_of[name] <= 1.01 * bound + 1e-9


@pytest.mark.slow
def test_demo_of_8_bits(tmp_path):
    """With 3 bits of mantissa, rounding one operand makes an error of 0.0265, and rounding both one of 0.0375."""
    output = output_of(command(tmp_path, "demo", "--fp8"))
    assert "layer_norm forward: 1797 rows x 64 cols" in output
    error_of = dict(re.findall(r"^(norm to 8 bits|product after it) +([\d.]+)$", output, re.MULTILINE))
    assert 0.02 < float(error_of["norm to 8 bits"]) < 0.03 < float(error_of["product after it"]) < 0.045


@pytest.mark.slow
def test_demo_draws_a_row(tmp_path):
    pytest.importorskip("matplotlib")
    numpy.save(tmp_path / "x.npy", ARRAYS["float32"])
    output = output_of(
        command(tmp_path, "demo", "--input", str(tmp_path / "x.npy"), "--plot", str(tmp_path / "row.svg"))
    )
    assert f"plot:  {tmp_path / 'row.svg'}" in output
    row = ARRAYS["float32"][0]
    picture = (tmp_path / "row.svg").read_text()
    assert f"mean {row.mean():.4g}" in picture
    assert f"rstd {1 / numpy.sqrt(row.var() + 1e-5):.4g}" in picture


@pytest.mark.parametrize(
    ("file", "without", "message"),
    [
        ("row.svg", True, "demo: --plot needs matplotlib: pip install matplotlib."),
        ("row.txt", False, ".pdf, .png, .svg"),
    ],
)
def test_demo_says_why_it_cannot_draw(capsys, monkeypatch, file, without, message):
    if without:
        monkeypatch.setattr("cunorm.commands.plot_demo.find_spec", lambda _: None)
    else:
        pytest.importorskip("matplotlib")
    assert main(["demo", "--plot", file]) == 2
    assert message in capsys.readouterr().err


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
def test_demo_takes_a_file(tmp_path, name):
    numpy.save(tmp_path / "x.npy", ARRAYS[name])
    output = output_of(command(tmp_path, "demo", "--input", str(tmp_path / "x.npy")))
    assert f"of shape {ARRAYS[name].shape}" in output
    error_of = errors(output)
    assert len(error_of) == 4
    assert all(error < 1e-2 for error in error_of.values())


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
def test_demo_refuses_an_array_that_it_cannot_normalise(tmp_path, name):
    array, fragment = BAD_ARRAYS[name]
    path = tmp_path / "x.npy"
    numpy.save(path, array)
    assert_fails_in_one_line(
        command(tmp_path, "demo", "--input", str(path)), 2, str(path), "float16, float32 or float64", fragment
    )


def test_demo_of_8_bits_refuses_what_has_no_norm_to_them(tmp_path):
    numpy.save(tmp_path / "x.npy", numpy.ones((2, 3)))
    assert_fails_in_one_line(
        command(tmp_path, "demo", "--fp8", "--input", str(tmp_path / "x.npy")), 2, "--fp8 needs", "float64"
    )


@pytest.mark.slow
def test_demo_of_two_ranks(tmp_path):
    """Sums are rounded to 16 bits, so that each error is at most a few units of 2^-11."""
    pytest.importorskip("torch")
    output = output_of(command(tmp_path, "demo", "--ranks", "2"))
    assert "2 processes, on the CPU (gloo)" in output
    assert "torch.distributed alone (tensors on cpu have no symmetric memory)" in output
    assert "LayerNormLinear(64, 192) over 898 of 1796 rows a rank" in output
    error_of = dict(re.findall(r"^(y|d\w+) +(\S+)$", output, re.MULTILINE))
    assert list(error_of) == ["y", "dx", "dlayer_norm_weight", "dlayer_norm_bias", "dweight", "dbias"]
    assert all(0 < float(error) < 4 * 2**-11 for error in error_of.values()), error_of


@pytest.mark.slow
def test_demo_of_ranks_with_any_number_of_columns(tmp_path):
    pytest.importorskip("torch")
    numpy.save(tmp_path / "x.npy", numpy.random.default_rng(0).standard_normal((6, 33)))
    output = output_of(command(tmp_path, "demo", "--ranks", "2", "--input", str(tmp_path / "x.npy")))
    assert "LayerNormLinear(33, 100) over 3 of 6 rows a rank" in output


@pytest.mark.parametrize(("ranks", "fragment"), [("1", "--ranks must be 2 or more; got 1"), ("1798", "has 1797")])
def test_demo_refuses_ranks(tmp_path, ranks, fragment):
    pytest.importorskip("torch")
    assert_fails_in_one_line(command(tmp_path, "demo", "--ranks", ranks), 2, fragment)


def npy(header: str) -> bytes:
    """Return the beginning of a .npy file."""
    return b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header.encode()


BAD_FILES = {
    "text": b"1.0 2.0 3.0\n",
    "empty": b"",
    "a truncated array": npy("{'descr': '<f4', 'fortran_order': False, 'shape': (2, 2), }"),
    "20 TiB": npy("{'descr': '<f8', 'fortran_order': False, 'shape': (2748779069440,), }"),
    "more than an index can count": npy(f"{{'descr': '<f8', 'fortran_order': False, 'shape': ({10**30},), }}"),
    "a bool for a length": npy("{'descr': '<f8', 'fortran_order': False, 'shape': (True,), }"),
    "half a header": npy("{'descr': '<f4', 'shape': ("),
    "a header that is nested too deep": npy("-" * 9000 + "1"),
    "a zip archive": b"PK\x03\x04" + bytes(40),
}


@pytest.mark.parametrize("name", BAD_FILES)
def test_demo_refuses_a_file_that_is_no_array(tmp_path, name):
    path = tmp_path / "x.npy"
    path.write_bytes(BAD_FILES[name])
    assert_fails_in_one_line(command(tmp_path, "demo", "--input", str(path)), 2, ".npy", str(path))


@pytest.mark.parametrize(
    ("path", "fragment"), [("missing.npy", "No such file"), (".", "Is a directory"), ("", "Is a directory")]
)
def test_demo_refuses_what_is_no_file(tmp_path, path, fragment):
    assert_fails_in_one_line(command(tmp_path, "demo", "--input", path), 2, fragment)


@pytest.mark.gpu
def test_demo_runs_on_the_gpu_where_there_is_one(tmp_path):
    output = output_of(
        command(tmp_path, "demo", environment={"CUDA_VISIBLE_DEVICES": os.environ.get("CUDA_VISIBLE_DEVICES", "0")})
    )
    assert "GPU (CUDA kernels through CuPy)" in output
    assert "host path" not in output
    error_of = errors(output)
    assert error_of["y"] <= 1.01 * 2**-8
    assert error_of["dx"] <= 1.01 * 2**-10
