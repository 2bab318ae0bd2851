"""The kernels that make operands of products in 8 bits: what changes their text, and the text that calls the templates
of kernels_cu/linear/float8_rows.cu, float8_columns.cu and float8_product.cu."""

from __future__ import annotations

from dataclasses import dataclass

from ..kernel.text import CPP_TYPE, Arithmetic, access, cpp, forward_struct
from ..operation import NORMS, Operation
from ..plan.problem import ITEMSIZE
from ..plan.spec import MAILBOX, RUN_GAP, SHARED_ALIGNMENT, WARP, OtherSpec, RowShape

STREAMED_THREADS = 512
COLUMN_THREADS = 256  # of a CTA of column_totals
REDUCE_LANES, REDUCE_SETS = 8, 32
REDUCE_COLUMNS = 4 * REDUCE_LANES  # of a CTA
TILE_ROWS = 128  # kernels_cu/linear/float8_columns.cu
TILE_WARPS = 8
PADDING = 16  # columns of a product come in multiples of it
PRODUCT_THREADS = 128


def vector_cols_of(dtype: str) -> int:
    return 16 // ITEMSIZE[dtype]


def padded(rows: int) -> int:
    return -(-rows // PADDING) * PADDING


def _load(dtype: str, aligned: bool, cache: str = "kStreamed", lanes: int = WARP) -> str:
    return f"LoadRows<{CPP_TYPE[dtype]}, {vector_cols_of(dtype)}, {lanes}, {access(aligned)}, Cache::{cache}>"


@dataclass(frozen=True)
class CastRows(OtherSpec):
    """Rows in 8 bits; with sums and maxima of the columns, in partial rows, where they are wanted.

    A shape None stands for rows that are streamed, without sums and maxima.
    """

    dtype: str
    format: str  # one of FLOAT8
    cols: int  # 0 where rows are streamed: then the launch says it
    shape: RowShape | None
    rows_per_cta: int
    stages: int
    aligned: bool  # every row of a begins at a multiple of 16 bytes
    bytes_aligned: bool  # and every vector of bytes at one of its size
    given: bool  # one scale for all is known
    power_of_2: bool
    sums: bool
    maxima: bool
    ctas_per_sm: int = 1

    file = "linear/float8_rows.cu"

    @property
    def kernel(self) -> str:  # type: ignore[override]
        return "cast_rows" if self.shape else "cast_rows_streamed"

    def __str__(self) -> str:
        beside = [name for name, there in (("sums", self.sums), ("maxima", self.maxima)) if there]
        shape = (
            f"{self.shape.threads} threads x {self.shape.vectors} vectors a row, cluster {self.shape.cluster}, "
            f"{self.rows_per_cta} rows a CTA"
            if self.shape
            else "streamed"
        )
        return f"{self.kernel} of {self.dtype} to {self.format}, {self.cols} cols, {shape}; {', '.join(beside)}"

    @property
    def threads(self) -> int:
        return self.shape.threads * self.rows_per_cta if self.shape else STREAMED_THREADS

    @property
    def cluster(self) -> int:
        return self.shape.cluster if self.shape else 1

    @property
    def shared_memory(self) -> int:
        if self.shape is None:
            return 0 if self.given else 4 * STREAMED_THREADS // WARP
        slots = self.shape.threads // WARP * self.shape.cluster
        if slots == 1 or self.given:
            return 0
        total = self.rows_per_cta * 2 * (4 * slots + MAILBOX)
        return -(-total // SHARED_ALIGNMENT) * SHARED_ALIGNMENT

    @property
    def dynamic_shared(self) -> int:
        """Places of rows, later totals of the row groups."""
        if self.shape is None:
            return 0
        vectors = self.shape.threads * self.shape.vectors
        place = vectors * 16 + (0 if self.aligned else vectors // WARP * RUN_GAP)
        totals = 4 * vectors * self.shape.vector_cols if self.rows_per_cta > 1 and (self.sums or self.maxima) else 0
        return self.rows_per_cta * max(self.stages * place, totals)

    def parameters(self) -> dict[str, str]:
        types = {"a": f"const {CPP_TYPE[self.dtype]}*"}
        types |= {"given": "const float*"} if self.given else {}
        types |= {"bytes": f"{CPP_TYPE[self.format]}*"}
        types |= {} if self.given else {"scales": "float*"}
        types |= {"sums": "float*"} if self.sums else {}
        types |= {"maxima": f"{CPP_TYPE[self.dtype]}*"} if self.maxima else {}
        return types | {"rows": "int64", "stride": "int64"} | ({} if self.shape else {"cols": "int64"})

    def text(self) -> tuple[str, str]:
        kind, vector_cols = CPP_TYPE[self.dtype], vector_cols_of(self.dtype)
        load = _load(self.dtype, self.aligned)
        store = (
            f"StoreRows<{CPP_TYPE[self.format]}, {vector_cols}, {WARP}, {access(self.bytes_aligned)}, Cache::kStreamed>"
        )
        scales = f"RowScales<{cpp(self.given)}, {cpp(self.power_of_2)}, {CPP_TYPE[self.format]}>"
        scales += "{given, nullptr}" if self.given else "{nullptr, scales}"
        if self.shape is None:
            template = f"cast_rows_streamed<{kind}, {vector_cols}, {STREAMED_THREADS}>"
            return "", f"  {template}({load}{{a, {{stride}}}}, {store}{{bytes, {{cols}}}}, {scales}, rows, cols);\n"
        shape = self.shape
        row = f"RowShape<{self.cols}, {vector_cols}, {shape.threads}, {shape.vectors}, {shape.cluster}>"
        rows = f"SharedRows<{row}, {self.rows_per_cta}, {self.stages}, true, false, Load>"
        whole = -(-self.cols // vector_cols) * vector_cols
        before = f"template <class Load>\nusing Rows = {rows};\n"
        return before, (
            f"  cast_rows<{kind}, {row}, {self.rows_per_cta}, Rows>({load}{{a, {{stride}}}},\n"
            f"      {store}{{bytes, {{{self.cols}}}}}, {scales},\n"
            f"      {_partials(self.dtype, self.sums, self.maxima, whole)}, rows);\n"
        )


def _partials(dtype: str, sums: bool, maxima: bool, width: int | str) -> str:
    given = ("sums" if sums else "nullptr", "maxima" if maxima else "nullptr", str(width))
    return f"Partials<{CPP_TYPE[dtype]}, {vector_cols_of(dtype)}, {cpp(sums)}, {cpp(maxima)}>{{{', '.join(given)}}}"


@dataclass(frozen=True)
class ColumnTotals(OtherSpec):
    """Partial rows of sums and maxima of the columns, nothing else."""

    dtype: str
    aligned: bool
    sums: bool
    maxima: bool

    kernel = "column_totals"
    file = "linear/float8_rows.cu"

    def __str__(self) -> str:
        return f"{self.kernel} of {self.dtype}"

    @property
    def threads(self) -> int:
        return COLUMN_THREADS

    def parameters(self) -> dict[str, str]:
        types = {"a": f"const {CPP_TYPE[self.dtype]}*"}
        types |= {"sums": "float*"} if self.sums else {}
        types |= {"maxima": f"{CPP_TYPE[self.dtype]}*"} if self.maxima else {}
        return types | dict.fromkeys(("rows", "stride", "cols", "width"), "int64")

    def text(self) -> tuple[str, str]:
        template = f"column_totals<{CPP_TYPE[self.dtype]}, {vector_cols_of(self.dtype)}, {COLUMN_THREADS}>"
        load = f"{_load(self.dtype, self.aligned)}{{a, {{stride}}}}"
        return "", f"  {template}({load}, {_partials(self.dtype, self.sums, self.maxima, 'width')}, rows, cols);\n"


@dataclass(frozen=True)
class ReduceColumns(OtherSpec):
    """Adds partial sums and maxima of rows: sums[cols], maxima[cols]."""

    dtype: str  # of the partial rows of maxima
    sum_dtype: str  # of sums
    sums: bool
    maxima: bool

    kernel = "reduce_columns"
    file = "linear/float8_rows.cu"

    def __str__(self) -> str:
        return f"{self.kernel} of {self.dtype}, sums in {self.sum_dtype}"

    @property
    def threads(self) -> int:
        return REDUCE_LANES * REDUCE_SETS

    @property
    def shared_memory(self) -> int:
        return 4 * REDUCE_SETS * REDUCE_COLUMNS

    def parameters(self) -> dict[str, str]:
        types = {"sum_partials": "const float*"} if self.sums else {}
        types |= {"maximum_partials": f"const {CPP_TYPE[self.dtype]}*"} if self.maxima else {}
        types |= {"sums": f"{CPP_TYPE[self.sum_dtype]}*"} if self.sums else {}
        types |= {"maxima": "float*"} if self.maxima else {}
        return types | dict.fromkeys(("groups", "width", "cols"), "int64")

    def text(self) -> tuple[str, str]:
        types = f"{CPP_TYPE[self.dtype]}, {CPP_TYPE[self.sum_dtype]}"
        flags = f"{cpp(self.sums)}, {cpp(self.maxima)}"
        template = f"reduce_columns<{types}, {REDUCE_LANES}, {REDUCE_SETS}, {flags}>"
        present = self.parameters()
        names = ("sum_partials", "maximum_partials", "sums", "maxima")
        given = ", ".join(name if name in present else "nullptr" for name in names)
        return "", f"  {template}({given}, groups, width, cols);\n"


@dataclass(frozen=True)
class CastColumns(OtherSpec):
    """Columns in 8 bits, transposed: of a matrix, or with an operation of the rows that it normalises."""

    dtype: str
    format: str
    aligned: bool
    given: bool  # one scale for all is known
    power_of_2: bool
    column_warps: int  # tiles of so many times eight vectors of columns
    operation: Operation | None = None
    affine: tuple[tuple[str, str], ...] = ()  # (name, dtype) of weight and bias, as far as there are any
    affine_aligned: bool = True
    ctas_per_sm: int = 1

    kernel = "cast_columns"
    file = "linear/float8_columns.cu"

    def __str__(self) -> str:
        of = f", {self.operation.norm}" if self.operation else ""
        return f"{self.kernel} of {self.dtype} to {self.format}{of}, {self.columns} columns a tile"

    @property
    def columns(self) -> int:
        return self.column_warps * 8 * vector_cols_of(self.dtype)

    @property
    def threads(self) -> int:
        return self.column_warps * TILE_WARPS * WARP

    @property
    def shared_memory(self) -> int:
        return self.columns * (TILE_ROWS + 4 + 4 * len(self.affine))

    def parameters(self) -> dict[str, str]:
        types = {"a": f"const {CPP_TYPE[self.dtype]}*"}
        if self.operation:
            types |= {name: f"const {CPP_TYPE[dtype]}*" for name, dtype in self.affine}
            types |= dict.fromkeys(NORMS[self.operation.norm].statistics, "const float*")
        elif not self.given:
            types["maxima"] = "const float*"
        types |= {"given": "const float*"} if self.given else {}
        types |= {"bytes": "uint8*"} | ({} if self.given else {"scales": "float*"})
        return types | dict.fromkeys(("rows", "stride", "cols", "padded", "turns"), "int64")

    def text(self) -> tuple[str, str]:
        kind, present = CPP_TYPE[self.dtype], self.parameters()
        load = _load(self.dtype, self.aligned, lanes=8)
        before = ""
        if self.operation is None:
            source = f"PlainColumns<{load}>{{{{a, {{stride}}}}, {'maxima' if 'maxima' in present else 'nullptr'}}}"
        else:
            before, source = self._normalised(load)
        template = (
            f"cast_columns<{kind}, {CPP_TYPE[self.format]}, {cpp(self.power_of_2)}, {cpp(self.given)}, "
            f"{self.column_warps}>"
        )
        others = [name if name in present else "nullptr" for name in ("scales", "given")]
        return before, f"  {template}({source},\n      bytes, {', '.join(others)}, rows, cols, padded, turns);\n"

    def _normalised(self, load: str) -> tuple[str, str]:
        assert self.operation is not None
        norm = NORMS[self.operation.norm]
        vector_cols = vector_cols_of(self.dtype)
        loads = [
            f"LoadRows<{CPP_TYPE[dtype]}, {vector_cols}, 8, Access::kAligned, Cache::kKept>"
            if self.affine_aligned
            else f"LoadElements<{CPP_TYPE[dtype]}, {vector_cols}, 8>"
            for _, dtype in self.affine
        ]
        values = "{}"
        for name, _ in reversed(self.affine):
            values = (
                f"{{{{{name}, {{0}}}}, {values}}}" if self.affine_aligned else f"{{{{{{{name}, {{0}}}}}}, {values}}}"
            )
        mean = "mean" if norm.subtracts_mean else "nullptr"
        least = 1 if norm.subtracts_mean else 0
        bound = f"square_root(static_cast<float>(cols > 1 ? cols - {least} : 1))"
        source = (
            f"NormalisedColumns<{norm.policy}, {load}, Operation, Matrices<{', '.join(loads)}>>"
            f"{{{{a, {{stride}}}}, Operation{{}}, {values}, {mean}, rstd, {bound}}}"
        )
        arithmetic = Arithmetic(self.operation, self.dtype, self.compute)
        return forward_struct(arithmetic, [], [], [name for name, _ in self.affine], []), source


@dataclass(frozen=True)
class ScaleProduct(OtherSpec):
    """Multiplies a product by the scales of its rows and columns, and adds a bias."""

    dtype: str  # of the product
    y: str
    bias: str | None
    aligned: bool
    columns_aligned: bool

    kernel = "scale_product"
    file = "linear/float8_product.cu"

    def __str__(self) -> str:
        return f"{self.kernel} of {self.dtype} to {self.y}"

    @property
    def threads(self) -> int:
        return PRODUCT_THREADS

    def parameters(self) -> dict[str, str]:
        types = {
            "product": f"const {CPP_TYPE[self.dtype]}*",
            "row_scale": "const float*",
            "column_scale": "const float*",
        }
        types |= {"bias": f"const {CPP_TYPE[self.bias]}*"} if self.bias else {}
        return types | {"y": f"{CPP_TYPE[self.y]}*", "rows": "int64", "cols": "int64"}

    def text(self) -> tuple[str, str]:
        vector_cols = vector_cols_of(self.dtype)
        names = {"column_scale": "float"} | ({"bias": CPP_TYPE[self.bias]} if self.bias else {})
        loads = [
            f"LoadRows<{kind}, {vector_cols}, {WARP}, Access::kAligned, Cache::kKept>"
            if self.columns_aligned
            else f"LoadElements<{kind}, {vector_cols}, {WARP}>"
            for kind in names.values()
        ]
        values = "{}"
        for name in reversed(names):
            values = (
                f"{{{{{name}, {{0}}}}, {values}}}" if self.columns_aligned else f"{{{{{{{name}, {{0}}}}}}, {values}}}"
            )
        of_vector = f"{CPP_TYPE[self.y]}, {vector_cols}, {WARP}, {access(self.aligned)}"
        store = f"StoreRows<{of_vector}, Cache::kStreamed, false, true>"
        return "", (
            f"  scale_product<{PRODUCT_THREADS}>({_load(self.dtype, self.aligned)}{{product, {{cols}}}}, row_scale,\n"
            f"      Matrices<{', '.join(loads)}>{values}, {store}{{y, {{cols}}}}, rows, cols);\n"
        )
