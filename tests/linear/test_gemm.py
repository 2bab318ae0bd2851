"""How products are passed to cuBLAS. Its stand-in in NumPy reads matrices by columns, as cuBLAS does, without a GPU."""

from __future__ import annotations

import ctypes
import enum
import itertools
import threading
from types import SimpleNamespace
from typing import Any

import ml_dtypes
import numpy
import pytest

pytest.importorskip("cupy", exc_type=ImportError)

from cunorm.kernel.device import H100
from cunorm.linear import gemm
from cunorm.plan import tables

FLOAT32, FLOAT64, E4M3 = 0, 1, 28


class Array(numpy.ndarray):
    """A NumPy array that gives its pointer as CuPy's arrays do."""

    @property
    def data(self):
        return SimpleNamespace(ptr=self.ctypes.data, device_id=0)


def array(values: Any) -> Array:
    return numpy.asarray(values).view(Array)


def at(pointer: int, kind: int, count: int) -> numpy.ndarray:
    real = {FLOAT64: ctypes.c_double, E4M3: ctypes.c_uint8}.get(kind, ctypes.c_float)
    return numpy.ctypeslib.as_array((real * count).from_address(pointer))


def stored(pointer: int, kind: int, rows: int, cols: int, stride: int) -> numpy.ndarray:
    """Return a matrix that is stored by columns, with `stride` elements from one column to the next."""
    assert stride >= rows
    memory = at(pointer, kind, stride * (cols - 1) + rows)
    return numpy.lib.stride_tricks.as_strided(memory, (rows, cols), (memory.itemsize, stride * memory.itemsize))


def transposed(matrix: numpy.ndarray, operation: int) -> numpy.ndarray:
    return matrix.T if operation else matrix


class Cublas:
    CUBLAS_OP_N, CUBLAS_OP_T, CUBLAS_GEMM_DEFAULT = 0, 1, -1
    CUBLAS_COMPUTE_64F, CUBLAS_COMPUTE_32F, CUBLAS_COMPUTE_32F_FAST_TF32 = 70, 68, 77

    def gemmEx(  # noqa: N802
        self, handle, op_a, op_b, m, n, k, alpha, a, a_kind, lda, b, b_kind, ldb, beta, c, kind, ldc, compute, _
    ):
        assert compute == (70 if kind == FLOAT64 else 68)
        a = transposed(stored(a, a_kind, *((k, m) if op_a else (m, k)), lda), op_a)
        b = transposed(stored(b, b_kind, *((n, k) if op_b else (k, n)), ldb), op_b)
        out = stored(c, kind, m, n, ldc)
        factors = at(alpha, kind, 1), at(beta, kind, 1)
        out[...] = factors[0] * (a @ b) + (factors[1] * out if factors[1] else 0)


class Names(enum.IntEnum):
    TRANSA, TRANSB, EPILOGUE, BIAS_POINTER, A_SCALE_MODE, B_SCALE_MODE, A_SCALE_POINTER, B_SCALE_POINTER = range(8)
    FAST_ACCUM = 8


class Limits(enum.IntEnum):
    MAX_WORKSPACE_BYTES, REDUCTION_SCHEME_MASK = 0, 5
    MIN_ALIGNMENT_A_BYTES, MIN_ALIGNMENT_B_BYTES, MIN_ALIGNMENT_C_BYTES, MIN_ALIGNMENT_D_BYTES = range(1, 5)


class CublasLt:
    """A stand-in for nvmath.bindings.cublasLt."""

    MatmulDescAttribute, MatmulPreferenceAttribute = Names, Limits
    Epilogue = enum.IntEnum("Epilogue", {"DEFAULT": 1, "BIAS": 4})
    MatmulMatrixScale = enum.IntEnum("MatmulMatrixScale", {"OUTER_VEC_32F": 3})
    ReductionScheme = enum.IntEnum("ReductionScheme", {"COMPUTE_TYPE": 2})
    MatmulAlgoConfigAttribute = enum.IntEnum("MatmulAlgoConfigAttribute", {"TILE_ID": 1, "STAGES_ID": 6})
    cuBLASLtError = ArithmeticError  # noqa: N815
    offers = 3  # at most so many algorithms; the one at 1234 + i has tile i and 5 stages

    def __init__(self, refuses: tuple[str, ...] = ()):
        self.objects: list[Any] = [None]
        self.algorithms: list[int] = []  # of the products that have run
        self.refuses = [self.Epilogue[name] for name in refuses]

    def _new(self, value: Any) -> int:
        self.objects.append(value)
        return len(self.objects) - 1

    def _destroy(self, made: int) -> None:
        """Destroy an object, which must not have been destroyed before."""
        assert self.objects[made] is not None
        self.objects[made] = None

    matmul_desc_destroy = matrix_layout_destroy = _destroy

    def living(self) -> int:
        """Count the objects that were made and not destroyed, without handles."""
        return sum(made is not None and made != "handle" for made in self.objects)

    def create(self):
        return self._new("handle")

    def matmul_desc_create(self, compute, scale):
        return self._new({})

    def matmul_preference_create(self):
        return self._new({})

    def matmul_preference_destroy(self, preference):
        told = dict(self.objects[preference])
        assert told.pop(Limits.MAX_WORKSPACE_BYTES) == gemm.WORKSPACE
        assert told.pop(Limits.REDUCTION_SCHEME_MASK) == self.ReductionScheme.COMPUTE_TYPE
        assert len(told) == 4
        assert len(set(told.values())) == 1
        self._destroy(preference)

    def matrix_layout_create(self, kind, rows, cols, stride):
        return self._new((kind, rows, cols, stride))

    def get_matmul_desc_attribute_dtype(self, name):
        return numpy.int64

    get_matmul_preference_attribute_dtype = get_matmul_desc_attribute_dtype

    def matmul_desc_set_attribute(self, where, name, pointer, size):
        self.objects[where][name] = ctypes.c_int64.from_address(pointer).value

    matmul_preference_set_attribute = matmul_desc_set_attribute

    @staticmethod
    def MatmulHeuristicResult(count):  # noqa: N802
        class Results(list):
            ptr = 1234

        return Results(SimpleNamespace(ptr=1234 + place, workspace_size=4096) for place in range(count))

    def get_version(self):
        return 130100

    def get_matmul_algo_config_attribute_dtype(self, attribute):
        return numpy.uint16

    def matmul_algo_config_get_attribute(self, algorithm, attribute, pointer, size, written):
        assert size == 2
        ctypes.c_uint16.from_address(pointer).value = {1: algorithm - 1234, 6: 5}[attribute]

    def matmul_algo_get_heuristic(self, handle, descriptor, a, b, c, d, preference, requested, results, count):
        described = self.objects[descriptor]
        assert described[Names.EPILOGUE] == 1 or described[Names.BIAS_POINTER]
        offered = 0 if described[Names.EPILOGUE] in self.refuses else min(requested, self.offers)
        ctypes.c_int32.from_address(count).value = offered

    def matmul(
        self, _, descriptor, alpha, a, a_layout, b, b_layout, beta, c, c_layout, d, d_layout, algorithm, *others
    ):
        self.algorithms.append(algorithm - 1234)
        assert others[1] == 4096
        assert (c, c_layout) == (d, d_layout)
        described = self.objects[descriptor]
        kind = self.objects[a_layout][0]
        stored_b = stored(b, *self.objects[b_layout])
        out = stored(d, *self.objects[d_layout])
        stored_a = stored(a, *self.objects[a_layout])
        if kind == E4M3:
            stored_a, stored_b = (
                matrix.view(ml_dtypes.float8_e4m3fn).astype("float32") for matrix in (stored_a, stored_b)
            )
        product = transposed(stored_a, described[Names.TRANSA]) @ transposed(stored_b, described[Names.TRANSB])
        if kind == E4M3:
            assert (described[Names.TRANSA], described[Names.TRANSB]) == (1, 0), "the only layout that there is"
            assert described[Names.A_SCALE_MODE] == described[Names.B_SCALE_MODE] == 3
            assert described[Names.FAST_ACCUM] == 1
            kind = self.objects[d_layout][0]
            product *= at(described[Names.A_SCALE_POINTER], FLOAT32, len(product))[:, None]
            product *= at(described[Names.B_SCALE_POINTER], FLOAT32, product.shape[1])
        out[...] = at(alpha, kind, 1) * product
        assert not at(beta, kind, 1)
        if described[Names.EPILOGUE] == self.Epilogue.BIAS:
            # The matrix is stored by columns, so the bias adds a number to each of its rows.
            out += at(described[Names.BIAS_POINTER], kind, len(out))[:, None]


@pytest.fixture(params=["gemmEx", "cuBLASLt", "cuBLASLt without epilogues"])
def library(request, monkeypatch):
    class Cupy:
        ndarray = Array
        cuda = SimpleNamespace(
            alloc=lambda size: SimpleNamespace(ptr=99),
            get_current_stream=lambda: SimpleNamespace(ptr=7),
            device=SimpleNamespace(get_cublas_handle=lambda: 5),
        )

        def __getattr__(self, name):
            return lambda *arguments: array(getattr(numpy, name)(*arguments))

    lt = None
    if request.param != "gemmEx":
        lt = CublasLt(("BIAS",) if "without" in request.param else ())
    imported = {"nvmath.bindings.cublas": SimpleNamespace(ComputeType=dict.fromkeys(("COMPUTE_32F", "COMPUTE_64F"), 0))}
    monkeypatch.setattr(gemm, "cupy", Cupy())
    monkeypatch.setattr(gemm, "bindings", lambda: lt)
    monkeypatch.setattr(gemm, "import_module", imported.get)
    monkeypatch.setattr(gemm, "uses_tf32", lambda: False)
    monkeypatch.setattr(gemm, "_cublas", Cublas)
    monkeypatch.setattr(gemm, "of_thread", gemm._OfThread())
    gemm._handle.cache_clear()
    yield lt
    gemm._handle.cache_clear()


def laid_out(values: numpy.ndarray, layout: str) -> Array:
    if layout == "transposed":
        return array(numpy.ascontiguousarray(values.T)).T
    if layout == "wider":
        wide = array(numpy.full((len(values), values.shape[1] + 3), numpy.nan, values.dtype))
        wide[:, :-3] = values
        return wide[:, :-3]
    if layout == "backwards":  # cuBLAS cannot read this, so it has to be copied
        return array(values[:, ::-1].copy())[:, ::-1]
    return array(values)


LAYOUTS = ("rows", "transposed", "wider", "backwards")


@pytest.mark.parametrize(("named", "place"), [((), 0), ((0, 5), 0), ((2, 5), 2), ((2, 4), 0), ((7, 5), 0)], ids=str)
def test_an_algorithm_that_a_table_names_is_taken_where_it_is_offered(library, monkeypatch, named, place):
    monkeypatch.setattr(gemm, "measured", lambda kind: named)
    a, b, bias = (array(numpy.random.default_rng(0).standard_normal(shape)) for shape in ((4, 6), (6, 5), (5,)))
    numpy.testing.assert_allclose(gemm.multiply(a, b, bias), a @ b + bias)
    if library is not None:
        assert library.algorithms == ([] if library.refuses else [place])


def test_products_by_every_algorithm_that_is_offered(library):
    if library is None:
        pytest.skip("cuBLAS's own gemmEx has no choice of algorithms")
    a, b, bias = (array(numpy.random.default_rng(0).standard_normal(shape)) for shape in ((4, 6), (6, 5), (5,)))
    y = array(numpy.empty((4, 5)))
    kind, pointers = gemm.described("BIAS", a, b, y, bias)
    products = gemm.offered(kind, pointers[-1])
    assert [*products] == ([] if library.refuses else [(0, 5), (1, 5), (2, 5)])
    for product in products.values():
        y[...] = numpy.nan
        assert product.run(*pointers)
        numpy.testing.assert_allclose(y, a @ b + bias)
    assert library.algorithms == [*range(len(products))]


PLAIN = gemm.Kind(512, 2304, 768, "bfloat16", False, gemm.Operand(False, 768), gemm.Operand(True, 768), "BIAS", 16, 0)


@pytest.mark.parametrize(
    ("kind", "measured"),
    [
        (PLAIN, True),
        (PLAIN._replace(dtype="float16", epilogue="DEFAULT"), True),
        (PLAIN._replace(rows=513), False),
        (PLAIN._replace(cols=2305), False),
        (PLAIN._replace(dtype="float32"), False),
        (PLAIN._replace(dtype="float8_e4m3fn", out="bfloat16"), False),
        (PLAIN._replace(b=gemm.Operand(False, 2304)), False),
        (PLAIN._replace(a=gemm.Operand(True, 512)), False),
    ],
)
def test_a_table_is_for_products_in_16_bits_like_those_measured(monkeypatch, kind, measured):
    table = tables.Table(90, H100.bandwidth / H100.sms, {}).with_algorithm("13.1", 768, 2304, 512, (66, 5))
    monkeypatch.setattr(tables, "tables_of", lambda device: ((None, table),))
    monkeypatch.setattr(gemm.device, "current", lambda device_id: H100)
    monkeypatch.setattr(gemm, "version", lambda: "13.1")
    assert gemm.measured(kind) == ((66, 5) if measured else ())


@pytest.mark.parametrize("layouts", [*itertools.product(LAYOUTS, LAYOUTS)], ids=str)
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("shape", [(5, 7, 3), (1, 4, 6), (6, 1, 4), (4, 6, 1)], ids=str)
def test_products(library, layouts, dtype, shape):
    rows, cols, inner = shape
    random = numpy.random.default_rng(0)
    a, b, bias = (random.standard_normal(s).astype(dtype) for s in ((rows, inner), (inner, cols), (cols,)))
    operands = [laid_out(matrix, layout) for matrix, layout in zip((a, b), layouts, strict=True)]
    close = {"rtol": 1e-5, "atol": 1e-5}
    numpy.testing.assert_allclose(gemm.multiply(*operands), a @ b, **close)
    numpy.testing.assert_allclose(gemm.multiply(*operands, array(bias)), a @ b + bias, **close)


@pytest.mark.parametrize("shape", [(0, 4, 3), (3, 4, 0), (3, 0, 4)], ids=str)
def test_nothing_to_multiply(library, shape):
    rows, cols, inner = shape
    a, b, bias = (array(numpy.ones(s, "float32")) for s in ((rows, inner), (inner, cols), (cols,)))
    numpy.testing.assert_array_equal(gemm.multiply(a, b, bias), a @ b + bias)
    numpy.testing.assert_array_equal(gemm.multiply(a, b), a @ b)


def test_rows_in_8_bits(library):
    """Each row has its scale, and a float32 bias is added after the product. Without cuBLASLt it is refused."""
    random = numpy.random.default_rng(0)
    a, b = (random.standard_normal(shape).astype(ml_dtypes.float8_e4m3fn) for shape in ((5, 32), (48, 32)))
    scales = tuple(random.random(size).astype("float32") for size in (5, 48))
    bias = random.standard_normal(48).astype("float32")
    given = array(a.view("uint8")), array(b.view("uint8")), tuple(map(array, scales))
    if library is None:
        with pytest.raises(
            RuntimeError, match=r"needs cuBLASLt of CUDA 12\.9 or later through nvmath-python, which is not"
        ):
            gemm.multiply_rows(*given, None, numpy.float32)
        return
    expected = (a.astype("float32") @ b.astype("float32").T) * scales[0][:, None] * scales[1]
    for added in (None, bias):
        y = gemm.multiply_rows(*given, None if added is None else array(added), numpy.float32)
        numpy.testing.assert_allclose(y, expected + (0 if added is None else added), rtol=1e-5, atol=1e-5)


def test_no_product_of_8_bits_is_said(library, monkeypatch):
    if library is None:
        pytest.skip("there is no cuBLASLt")
    library.refuses = [library.Epilogue.DEFAULT]
    zeros = array(numpy.zeros((16, 16), "uint8"))
    ones = array(numpy.ones(16, "float32"))
    with pytest.raises(RuntimeError, match=r"no product of \(16, 16\) and \(16, 16\) in 8 bits with scales by row"):
        gemm.multiply_rows(zeros, zeros, (ones, ones), None, numpy.float32)


def multiply_many(counts: Any) -> None:
    """Check a product for each number of rows, whatever became of earlier descriptors."""
    b = numpy.arange(6.0).reshape(3, 2)
    for rows in counts:
        a = numpy.full((rows, 3), float(rows))
        numpy.testing.assert_array_equal(gemm.multiply(array(a), array(b)), a @ b)


OF_A_KIND = 4  # objects of a kind of product: a descriptor and three layouts


def test_descriptors_are_destroyed_when_their_kind_is_dropped(library, monkeypatch):
    if library is None:
        pytest.skip("there is no cuBLASLt")
    monkeypatch.setattr(gemm, "KINDS", 8)
    monkeypatch.setattr(gemm, "of_thread", gemm._OfThread())
    multiply_many([*range(1, 101), *range(1, 101)])
    assert library.living() == 8 * OF_A_KIND
    gemm.of_thread.prepared.cache_clear()
    assert library.living() == 0


def test_descriptors_of_a_thread_end_with_it(library):
    """A thread's descriptors serve no other thread, and only its own end destroys them."""
    if library is None:
        pytest.skip("there is no cuBLASLt")
    multiply_many(range(1, 4))
    failures = []

    def run() -> None:
        try:
            multiply_many(range(1, 6))
            assert library.living() == (3 + 5) * OF_A_KIND
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    del thread, run
    assert not failures
    assert library.living() == 3 * OF_A_KIND
    multiply_many(range(1, 4))


def test_what_was_made_before_an_error_is_destroyed(library, monkeypatch):
    if library is None:
        pytest.skip("there is no cuBLASLt")
    create, calls = library.matrix_layout_create, []

    def fails_the_third_time(*arguments):
        calls.append(1)
        if len(calls) == 3:
            raise ArithmeticError("no memory")
        return create(*arguments)

    monkeypatch.setattr(library, "matrix_layout_create", fails_the_third_time)
    with pytest.raises(ArithmeticError, match="no memory"):
        multiply_many([2])
    assert library.living() == 0
