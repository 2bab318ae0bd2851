"""Matrix products of CuPy arrays: cuBLASLt with a bias in its epilogue.

nvmath-python's bindings reach cuBLASLt. Where they are missing, and where cuBLASLt has no such epilogue (float64), the
product is cuBLAS's gemmEx through CuPy, and the bias is what it adds to. What cuBLASLt runs is asked once for each kind
of product and kept: the algorithm that a table of measurements names, or else cuBLASLt's first guess.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from functools import cache, lru_cache
from importlib import import_module
from typing import Any, NamedTuple

import cupy
import numpy

from .. import logs, private
from ..kernel import device
from ..kernel.device import INSTALL_LINEAR
from ..plan import tables

WORKSPACE = 32 << 20  # bytes that an algorithm may take: what NVIDIA recommends for sm_90
KINDS = 4096  # kept at most, by each thread
CUDA_TYPE = {"float32": 0, "float64": 1, "float16": 2, "bfloat16": 14, "float8_e4m3fn": 28}  # cudaDataType_t
GUESSES = 16  # of cuBLASLt, of which a table may name one
OUTER_VECTOR = "OUTER_VEC_32F"  # a scale for each row of a and each column of b


class Operand(NamedTuple):
    """A matrix as cuBLAS knows it. If it is `transposed` its columns are contiguous, not its rows."""

    transposed: bool
    stride: int  # elements from one contiguous row (column) to the next


class Kind(NamedTuple):
    """The form of products that run in the same way: out (rows, cols) = a (rows, inner) b (inner, cols)."""

    rows: int
    cols: int
    inner: int
    dtype: str
    tf32: bool
    a: Operand
    b: Operand
    epilogue: str  # "DEFAULT", or "BIAS": a vector of cols is added
    alignment: int  # of every pointer, bytes
    device_id: int
    out: str = ""  # dtype of out where a and b are bytes in 8 bits with scales; else that of a and b


def multiply(a: cupy.ndarray, b: cupy.ndarray, bias: cupy.ndarray | None = None) -> cupy.ndarray:
    """Return a b + bias, where bias is one row, all of one dtype. float32 is TF32 where CuPy is set so."""
    out = cupy.empty((a.shape[0], b.shape[1]), a.dtype)
    if not _run("DEFAULT" if bias is None else "BIAS", a, b, out, bias):
        if bias is not None:
            out[...] = bias
        _plain(a, b, out, 0 if bias is None else 1)
    return out


def multiply_rows(
    a: cupy.ndarray, b: cupy.ndarray, scales: tuple[cupy.ndarray, cupy.ndarray], bias: cupy.ndarray | None, dtype: Any
) -> cupy.ndarray:
    """Return a bᵀ + bias of bytes in e4m3, each row of a and of b times its scale.

    cuBLASLt adds no float32 bias to such a product. RuntimeError where it has none.
    """
    out = cupy.empty((len(a), len(b)), dtype)
    if 0 in out.shape:
        return out
    in_epilogue = bias is not None and out.dtype != numpy.float32
    _scaled_rows(a, b.T, out, scales, bias if in_epilogue else None)
    if bias is not None and not in_epilogue:
        out += bias
    return out


def uses_tf32() -> bool:
    """Return whether CuPy computes float32 products in TF32, by `set_compute_type` or CUPY_TF32 in the environment."""
    compute_type, tf32 = private.compute_type()
    return compute_type(numpy.dtype("float32")) == tf32


@cache
def bindings() -> Any:
    """Return nvmath-python's module of cuBLASLt, None where it is not installed or finds no library."""
    try:
        module = import_module("nvmath.bindings.cublasLt")
        module.get_version()  # loads the library
        return module
    except (ImportError, RuntimeError) as error:
        logs.fell_back("layer_norm_linear", "products are CuPy's gemmEx, and the bias is added beside them", str(error))
        return None


def _operand(matrix: cupy.ndarray) -> tuple[cupy.ndarray, Operand]:
    rows, cols = matrix.shape
    first, second = (stride // matrix.itemsize for stride in matrix.strides)
    if (second == 1 or cols == 1) and (first >= cols or rows == 1):
        return matrix, Operand(False, max(first, cols) if rows > 1 else cols)
    if (first == 1 or rows == 1) and (second >= rows or cols == 1):
        return matrix, Operand(True, max(second, rows) if cols > 1 else rows)
    return cupy.ascontiguousarray(matrix), Operand(False, cols)


def _run(epilogue: str, a: cupy.ndarray, b: cupy.ndarray, out: cupy.ndarray, bias: cupy.ndarray | None) -> bool:
    """Run a product by cuBLASLt and return whether that was possible."""
    if bindings() is None or 0 in (*a.shape, *b.shape):
        return False
    kind, pointers = described(epilogue, a, b, out, bias)
    return of_thread.prepared(kind).run(*pointers)


def described(
    epilogue: str, a: cupy.ndarray, b: cupy.ndarray, out: cupy.ndarray, bias: cupy.ndarray | None
) -> tuple[Kind, tuple[int, int, int, int]]:
    """Return the kind of a product, and the pointers of a, b, out and bias."""
    a, a_operand = _operand(a)
    b, b_operand = _operand(b)
    pointers = (a.data.ptr, b.data.ptr, out.data.ptr, 0 if bias is None else bias.data.ptr)
    alignment = alignment_of(pointers[0] | pointers[1] | pointers[2] | pointers[3])
    tf32 = a.dtype == numpy.float32 and uses_tf32()
    rows, cols = out.shape
    kind = Kind(rows, cols, a.shape[1], a.dtype.name, tf32, a_operand, b_operand, epilogue, alignment, a.data.device_id)
    return kind, pointers


def kind_of_rows(
    rows: int, cols: int, inner: int, dtype: str, has_bias: bool, alignment: int, device_id: int, out: str = ""
) -> Kind:
    """Return the kind of a bᵀ + bias, where the rows of a and b are contiguous, and nothing is in TF32."""
    operands, epilogue = (Operand(False, inner), Operand(True, inner)), "BIAS" if has_bias else "DEFAULT"
    return Kind(rows, cols, inner, dtype, False, *operands, epilogue, alignment, device_id, out)


def alignment_of(together: int) -> int:
    """Return the bytes, 256 at most, that addresses are multiples of, which are joined by |."""
    return min(256, together & -together)


def _scaled_rows(a, b, out, scales, bias) -> None:
    lt = bindings()
    if lt is None or not hasattr(lt, "MatmulMatrixScale"):
        raise RuntimeError(
            "layer_norm_linear: fp8='row' needs cuBLASLt of CUDA 12.9 or later through nvmath-python, which "
            f"{'is not installed' if lt is None else 'is too old'}. {INSTALL_LINEAR}; or leave fp8=None."
        )
    pointers = [array.data.ptr for array in (a, b, out, *scales)] + [0 if bias is None else bias.data.ptr]
    left, right, to, left_scales, right_scales, added = pointers
    (rows, cols), inner, alignment = out.shape, a.shape[1], alignment_of(left | right | to | added)
    kind = kind_of_rows(
        rows, cols, inner, "float8_e4m3fn", bias is not None, alignment, a.data.device_id, out.dtype.name
    )
    if not of_thread.prepared(kind).run(left, right, to, added, (left_scales, right_scales)):
        raise RuntimeError(
            f"layer_norm_linear: fp8='row': this cuBLASLt has no product of ({rows}, {inner}) and ({cols}, {inner}) in "
            "8 bits with scales by row on this GPU; it needs CUDA 12.9 or later and compute capability 9.0 or later. "
            "Leave fp8=None."
        )


def _plain(a: cupy.ndarray, b: cupy.ndarray, out: cupy.ndarray, beta: int) -> None:
    """Compute out = a b + beta out by gemmEx."""
    if 0 in out.shape:
        return
    if a.shape[1] == 0:
        if beta == 0:  # what was there may be NaN, of which 0 times is NaN
            out.fill(0)
        return
    cublas = _cublas()
    a, a_operand = _operand(a)
    b, b_operand = _operand(b)
    wide = a.dtype == numpy.float64
    if wide:
        compute = cublas.CUBLAS_COMPUTE_64F
    elif a.dtype == numpy.float32 and uses_tf32():
        compute = cublas.CUBLAS_COMPUTE_32F_FAST_TF32
    else:
        compute = cublas.CUBLAS_COMPUTE_32F
    factors = numpy.array([1, beta], numpy.float64 if wide else numpy.float32)
    kind = CUDA_TYPE[a.dtype.name]
    rows, cols = out.shape
    cublas.gemmEx(
        cupy.cuda.device.get_cublas_handle(),
        cublas.CUBLAS_OP_T if b_operand.transposed else cublas.CUBLAS_OP_N,
        cublas.CUBLAS_OP_T if a_operand.transposed else cublas.CUBLAS_OP_N,
        cols,
        rows,
        a.shape[1],
        factors.ctypes.data,
        b.data.ptr,
        kind,
        b_operand.stride,
        a.data.ptr,
        kind,
        a_operand.stride,
        factors.ctypes.data + factors.itemsize,
        out.data.ptr,
        kind,
        cols,
        compute,
        cublas.CUBLAS_GEMM_DEFAULT,
    )


@cache
def _cublas() -> Any:
    try:
        return private.cublas()
    except ImportError as error:
        raise ImportError(
            f"layer_norm_linear: products need cuBLAS; it could not be loaded ({error}). {INSTALL_LINEAR}."
        ) from error


class Prepared:
    """A kind of product. cuBLAS stores matrices by columns: it computes outᵀ = bᵀ aᵀ.

    Its descriptor and layouts are destroyed with it, though what they described may still be under way on the GPU:
    cuBLASLt reads them on the host, when the product is asked for.
    """

    def __init__(self, kind: Kind):
        lt, cublas = bindings(), import_module("nvmath.bindings.cublas")
        self.kind = kind
        wide = kind.dtype == "float64"
        compute = "COMPUTE_64F" if wide else "COMPUTE_32F_FAST_TF32" if kind.tf32 else "COMPUTE_32F"
        self.dtype = CUDA_TYPE[kind.dtype]
        scale = CUDA_TYPE["float64" if wide else "float32"]
        descriptor = lt.matmul_desc_create(cublas.ComputeType[compute], scale)
        self.descriptor = self._destroyed_with_it(lt.matmul_desc_destroy, descriptor)
        self._describe("TRANSA", int(kind.b.transposed))
        self._describe("TRANSB", int(kind.a.transposed))
        self._describe("EPILOGUE", int(lt.Epilogue[kind.epilogue]))
        self.b = self._layout(kind.inner, kind.cols, kind.b)
        self.a = self._layout(kind.rows, kind.inner, kind.a)
        self.out = self._layout(kind.rows, kind.cols, Operand(False, kind.cols), kind.out)
        if kind.out:  # in fast accumulation, as is usual in a forward pass
            mode = int(lt.MatmulMatrixScale[OUTER_VECTOR])
            for attribute, value in (("A_SCALE_MODE", mode), ("B_SCALE_MODE", mode), ("FAST_ACCUM", 1)):
                self._describe(attribute, value)
        self.bias = numpy.zeros(1, numpy.int64)
        self.bias_address = self.bias.ctypes.data
        self.bias_attribute = int(lt.MatmulDescAttribute.BIAS_POINTER)
        self.factors = numpy.array([1, 0], numpy.float64 if wide else numpy.float32)
        self.one = self.factors.ctypes.data
        self.zero = self.one + self.factors.itemsize
        self.algorithm: Any = None  # asked for with the first call's pointer in the descriptor
        self.workspace = 0

    def _describe(self, attribute: str, value: int) -> None:
        lt = bindings()
        name = lt.MatmulDescAttribute[attribute]
        word = numpy.array([value], lt.get_matmul_desc_attribute_dtype(name))
        lt.matmul_desc_set_attribute(self.descriptor, name, word.ctypes.data, word.itemsize)

    def _layout(self, rows: int, cols: int, operand: Operand, dtype: str = "") -> int:
        """Describe a matrix by columns to cuBLASLt; one with contiguous rows is the other way round."""
        lt = bindings()
        shape = (rows, cols) if operand.transposed else (cols, rows)
        layout = lt.matrix_layout_create(CUDA_TYPE[dtype] if dtype else self.dtype, *shape, operand.stride)
        return self._destroyed_with_it(lt.matrix_layout_destroy, layout)

    def _destroyed_with_it(self, destroy: Callable[[int], None], made: int) -> int:
        weakref.finalize(self, destroy, made).atexit = False  # cuBLASLt may be gone by then
        return made

    def guesses(self, count: int) -> list[Any]:
        """Return the algorithms that cuBLASLt offers, the one that it takes for the fastest first."""
        lt = bindings()
        preference = lt.matmul_preference_create()
        # Parts of a sum are added up before they are rounded.
        limits = {"MAX_WORKSPACE_BYTES": WORKSPACE, "REDUCTION_SCHEME_MASK": int(lt.ReductionScheme.COMPUTE_TYPE)}
        limits |= {f"MIN_ALIGNMENT_{operand}_BYTES": self.kind.alignment for operand in "ABCD"}
        for name, limit in limits.items():
            attribute = lt.MatmulPreferenceAttribute[name]
            word = numpy.array([limit], lt.get_matmul_preference_attribute_dtype(attribute))
            lt.matmul_preference_set_attribute(preference, attribute, word.ctypes.data, word.itemsize)
        results, offered = lt.MatmulHeuristicResult(count), numpy.zeros(1, numpy.int32)
        layouts = (self.b, self.a, self.out, self.out)
        try:
            lt.matmul_algo_get_heuristic(
                _handle(self.kind.device_id),
                self.descriptor,
                *layouts,
                preference,
                count,
                results.ptr,
                offered.ctypes.data,
            )
        except lt.cuBLASLtError:
            return []
        finally:
            lt.matmul_preference_destroy(preference)
        return [results[place] for place in range(offered[0])]

    def with_bias(self, bias: int) -> Prepared:
        """Let the product add the vector at this pointer, if it adds one."""
        if self.kind.epilogue != "DEFAULT":
            self.bias[0] = bias
            bindings().matmul_desc_set_attribute(self.descriptor, self.bias_attribute, self.bias_address, 8)
        return self

    def use(self, guess: Any) -> None:
        """Run by an algorithm that was offered; None: there is none."""
        self.algorithm = guess or False
        self.workspace = guess.workspace_size if guess else 0

    def _choose(self) -> Any:
        """Return the algorithm that was measured to be the fastest, else the first guess; None if there is none."""
        algorithm = measured(self.kind)
        offered = self.guesses(GUESSES if algorithm else 1)
        named = [guess for guess in offered if algorithm and configuration(guess) == algorithm]
        return next(iter(named + offered), None)

    def run(self, a: int, b: int, out: int, bias: int, scales: tuple[int, int] | None = None) -> bool:
        """Run on CuPy's current stream, and return whether cuBLASLt could."""
        if not self.is_there(bias, scales):
            return False
        workspace = cupy.cuda.alloc(self.workspace)
        self.launch(a, b, out, workspace.ptr, cupy.cuda.get_current_stream().ptr)
        return True

    def is_there(self, bias: int, scales: tuple[int, int] | None = None) -> bool:
        """Say what the product adds and multiplies with, and return whether cuBLASLt has it."""
        if scales is not None:
            self._describe("B_SCALE_POINTER", scales[0])
            self._describe("A_SCALE_POINTER", scales[1])
        self.with_bias(bias)
        if self.algorithm is None:
            self.use(self._choose())
        return bool(self.algorithm)

    def launch(self, a: int, b: int, out: int, workspace: int, stream: int) -> None:
        """Run a product that is there, with `self.workspace` bytes at `workspace`."""
        bindings().matmul(
            _handle(self.kind.device_id),
            self.descriptor,
            self.one,
            b,
            self.b,
            a,
            self.a,
            self.zero,
            out,
            self.out,
            out,
            self.out,
            self.algorithm.ptr,  # an algorithm is the first thing in a result
            workspace,
            self.workspace,
            stream,
        )


def configuration(guess: Any) -> tables.Algorithm:
    """Return the attributes that tell an algorithm from all others of this version of cuBLAS."""
    lt = bindings()
    values = []
    for attribute in lt.MatmulAlgoConfigAttribute:
        word = numpy.zeros(1, lt.get_matmul_algo_config_attribute_dtype(attribute))
        written = numpy.zeros(1, numpy.int64)
        lt.matmul_algo_config_get_attribute(guess.ptr, attribute, word.ctypes.data, word.itemsize, written.ctypes.data)
        values.append(int(word[0]))
    return tuple(values)


def measured(kind: Kind) -> tables.Algorithm:
    """Return the algorithm that a table names for a product z weightᵀ in 16 bits; empty if none does."""
    if kind.out or kind.dtype not in ("float16", "bfloat16") or kind.a.transposed or not kind.b.transposed:
        return ()
    return tables.algorithm(device.current(kind.device_id), version(), kind.inner, kind.cols, kind.rows)


def offered(kind: Kind, bias: int) -> dict[tables.Algorithm, Prepared]:
    """Return the product by each of cuBLASLt's guesses, the first one first. `bias` is a pointer."""
    products: dict[tables.Algorithm, Prepared] = {}
    for guess in Prepared(kind).with_bias(bias).guesses(GUESSES):
        product = products.setdefault(configuration(guess), Prepared(kind))
        product.use(guess)
    return products


@cache
def version() -> str:
    """Return the version of cuBLAS, by which tables name its algorithms."""
    number = bindings().get_version()
    return f"{number // 10000}.{number // 100 % 100}"


class _OfThread(threading.local):
    """The products of a thread, as a descriptor holds pointers of a call. Python calls __init__ in every thread."""

    def __init__(self) -> None:
        self.prepared = lru_cache(maxsize=KINDS)(Prepared)


of_thread = _OfThread()


@cache
def _handle(device_id: int) -> int:
    """Return the handle of the current device, which serves all threads."""
    return bindings().create()
