"""Shapes that reach every kernel, for tests that run the kernels' text on the CPU."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from cpu_functions import FEW_SMS, MANY_SMS, MANY_WITHOUT_CLUSTERS, SMALL, WITHOUT_CLUSTERS
from problems import problem

from cunorm.kernel.device import Device
from cunorm.plan.problem import Operands, Problem
from cunorm.plan.resources import dynamic_shared
from cunorm.plan.spec import KernelSpec, SumSpec
from cunorm.plan.steps import Step


class Shape(NamedTuple):
    rows: int
    cols: int
    dtype: str
    device: Device
    reason: str
    parameters: str | None = None  # the dtype of weight and bias, if it is not that of x


PARAMETERS = {"forward": ("weight", "bias"), "backward": ("weight",)}
SHAPES = (
    Shape(3, 1, "float32", SMALL, "a row is its own mean"),
    Shape(8, 2, "float64", SMALL, "xhat is +-1, and dx cancels"),
    Shape(300, 7, "bfloat16", SMALL, "one lane a row, less than a vector; several turns of full CTAs"),
    Shape(8, 31, "float16", SMALL, "two lanes a row, in the backward pass four"),
    Shape(320, 33, "float32", SMALL, "odd: rows begin at every alignment"),
    Shape(3, 127, "bfloat16", SMALL, "eight lanes or sixteen"),
    Shape(8, 128, "float16", SMALL, "whole vectors"),
    Shape(1, 129, "float64", SMALL, "a last vector of one column"),
    Shape(8, 50, "float16", SMALL, "a lane of seven vectors a row, or four lanes"),
    Shape(8, 64, "bfloat16", SMALL, "four lanes a row"),
    Shape(8, 250, "float16", SMALL, "sixteen lanes a row"),
    Shape(20, 250, "bfloat16", MANY_SMS, "whole columns beside dx"),
    Shape(45, 500, "float16", SMALL, "a warp a row, odd vectors; partial rows of two warps"),
    Shape(2, 321, "bfloat16", MANY_SMS, "a thread for every vector, eight lanes to a vector's turn, threads to spare"),
    Shape(3, 1152, "bfloat16", MANY_SMS, "a thread for every vector, a warp to a vector's turn"),
    Shape(2, 500, "float16", SMALL, "gradients of two warps"),
    Shape(40, 768, "float16", SMALL, "a warp a row; partial rows of four warps"),
    Shape(4000, 24, "bfloat16", SMALL, "several turns in registers"),
    Shape(1003, 40, "float32", SMALL, "two lanes a row: a warp copies its rows to a ring together"),
    Shape(3, 1000, "bfloat16", SMALL, "whole vectors that fill no warp"),
    Shape(12, 1024, "float32", SMALL, "a full shape; a ring of rows"),
    Shape(40, 1024, "float16", SMALL, "gradients of four times two warps"),
    Shape(3, 1034, "bfloat16", SMALL, "rows begin at multiples of 4 bytes"),
    Shape(3, 1036, "float16", SMALL, "rows begin at multiples of 8 bytes"),
    Shape(3, 1037, "bfloat16", SMALL, "rows begin at multiples of 2 bytes; shifted vectors stay in registers"),
    Shape(3, 2300, "bfloat16", SMALL, "three vectors of 96 threads"),
    Shape(3, 2500, "bfloat16", SMALL, "five vectors of 64 threads, RMSNorm two of 160"),
    Shape(3, 5300, "bfloat16", SMALL, "three vectors of 224 threads"),
    Shape(20, 5000, "bfloat16", MANY_SMS, "a CTA a row, all rows at once"),
    Shape(3, 10240, "bfloat16", SMALL, "a full shape of five vectors"),
    Shape(6, 16393, "bfloat16", FEW_SMS, "partial rows of clusters, the last vector holds one column"),
    Shape(33, 16400, "float32", MANY_WITHOUT_CLUSTERS, "a warp adds up the partial rows of its columns"),
    Shape(3, 20488, "bfloat16", MANY_SMS, "six vectors by two threads, in a cluster of 8"),
    Shape(18, 20488, "bfloat16", MANY_SMS, "LayerNorm: six vectors a thread, in a cluster of 2"),
    Shape(9, 10248, "bfloat16", MANY_SMS, "three vectors by two threads, in a cluster of 8"),
    Shape(20, 8192, "bfloat16", MANY_SMS, "LayerNorm of few whole rows: in a cluster of 4, in registers"),
    Shape(310, 2568, "bfloat16", MANY_SMS, "LayerNorm of three vectors a thread: all rows at once, without turns"),
    Shape(280, 1536, "float32", MANY_SMS, "more partial rows than a CTA of sum_partials reads at once"),
    Shape(8, 3840, "bfloat16", SMALL, "a CTA a row"),
    Shape(8, 4096, "float32", SMALL, "a full shape"),
    Shape(5, 3201, "float64", SMALL, "cluster of 2 in the backward pass, odd"),
    Shape(5, 6001, "float32", SMALL, "three vectors a thread in the backward pass, odd"),
    Shape(8, 4601, "bfloat16", SMALL, "six warps of three vectors or nine of two in the backward pass, odd"),
    Shape(8, 4992, "float16", SMALL, "ten warps of two vectors in the backward pass, RMSNorm by two rows of a CTA"),
    Shape(8, 8191, "float16", SMALL, "a CTA a row, odd"),
    Shape(3, 8192, "bfloat16", SMALL, "a full shape, backward by halves of two rows on a multiprocessor"),
    Shape(7, 12288, "float16", SMALL, "backward by two CTAs, of LayerNorm by half of one row on a multiprocessor"),
    Shape(9, 10240, "bfloat16", SMALL, "backward by two CTAs with three places"),
    Shape(7, 9001, "bfloat16", SMALL, "backward by eight warps of five vectors that keep the row, odd"),
    Shape(3, 12345, "float16", SMALL, "RMSNorm backward by ten warps of five vectors that keep the row, odd"),
    Shape(3, 20003, "bfloat16", SMALL, "five vectors a thread of clusters of 2 in the backward pass, odd"),
    Shape(3, 10501, "bfloat16", SMALL, "RMSNorm backward by nine warps of five vectors that keep the row, odd"),
    Shape(3, 2601, "float64", SMALL, "three vectors a thread and three places in the backward pass, odd"),
    Shape(3, 3970, "float64", SMALL, "the longest rows of 64 registers, forward"),
    Shape(3, 5999, "float64", SMALL, "six vectors a thread, backward cluster of 2, odd"),
    Shape(3, 7001, "float64", SMALL, "seven vectors a thread, backward cluster of 4, odd"),
    Shape(2, 30001, "float64", SMALL, "five vectors a thread in a cluster of 8 in the backward pass, odd"),
    Shape(2, 60001, "float64", SMALL, "five vectors a thread in a cluster of 16 in the backward pass, odd"),
    Shape(2, 32767, "float64", SMALL, "four vectors a thread in the backward pass, odd"),
    Shape(2, 32768, "float64", SMALL, "a full shape in the backward pass"),
    Shape(2, 65535, "float64", SMALL, "four vectors a thread in a cluster of 16 in the backward pass, odd"),
    Shape(2, 65536, "float64", SMALL, "a full shape in a cluster of 16 in the backward pass"),
    Shape(8, 8192, "float64", SMALL, "cluster of 4 in the backward pass"),
    Shape(3, 16385, "bfloat16", SMALL, "the last vector of the row holds one column"),
    Shape(3, 16393, "bfloat16", MANY_SMS, "five vectors by two threads of clusters, the last vector holds one column"),
    Shape(5, 16384, "float32", SMALL, "a cluster takes its third row in a set of slots used before"),
    Shape(5, 12002, "float64", SMALL, "cluster of 2, backward of 4"),
    Shape(5, 12001, "float64", SMALL, "cluster of 8, backward of 4, odd"),
    Shape(3, 32768, "bfloat16", SMALL, "the longest row that one CTA holds, forward"),
    Shape(9, 32768, "float16", SMALL, "many rows of LayerNorm: two CTAs of a row on an SM, with the bits of one"),
    Shape(10, 28680, "bfloat16", SMALL, "many rows of LayerNorm beside wide weight and bias: three places", "float32"),
    Shape(30, 1280, "bfloat16", SMALL, "a warp's rows in three places beside wide weight and bias", "float32"),
    Shape(216, 1280, "bfloat16", SMALL, "many rows in a ring beside wide weight and bias", "float32"),
    Shape(54, 5000, "bfloat16", SMALL, "many rows beside a wide weight, a hundred and sixty threads", "float32"),
    Shape(4, 65537, "float16", SMALL, "four vectors a thread of clusters of 8 and 16, backward of 8, odd"),
    Shape(3, 57353, "bfloat16", SMALL, "backward of 8 with four vectors a thread, odd"),
    Shape(3, 32771, "float64", SMALL, "cluster of 8, backward of 16 with three vectors a thread, odd"),
    Shape(3, 65538, "float64", SMALL, "cluster of 16 in the forward pass, backward streamed"),
    Shape(5, 16388, "float32", SMALL, "cluster of 4 instead of 2 beside wide weight and bias", "float64"),
    Shape(3, 32777, "float32", SMALL, "of 8, odd; backward of 8 too", "float64"),
    Shape(3, 262144, "float32", SMALL, "a full shape whose next row takes the place of the present one, backward"),
    Shape(3, 200000, "float32", SMALL, "the same of a shape that is not full"),
    Shape(2, 65540, "float32", SMALL, "of 16 instead of 8; backward of 16 too", "float64"),
    Shape(3, 8201, "float64", WITHOUT_CLUSTERS, "streamed, odd; gradients of one group"),
    Shape(33, 32792, "float32", MANY_WITHOUT_CLUSTERS, "streamed, whole vectors, several partial rows"),
    Shape(1, 32777, "bfloat16", WITHOUT_CLUSTERS, "streamed, odd"),
    Shape(17, 131081, "float16", MANY_WITHOUT_CLUSTERS, "a thread adds up the partial rows of its columns alone"),
)
SHAPES_BY_NAME = {
    f"{shape.rows}x{shape.cols}-{shape.dtype}{'' if shape.device.clusters else '-without clusters'}": shape
    for shape in SHAPES
}
# Other shapes reach the kernels that RMSNorm has for these.
FOR_LAYER_NORM_ALONE = (
    "10x28680-bfloat16",
    "18x20488-bfloat16",
    "20x250-bfloat16",
    "20x5000-bfloat16",
    "20x8192-bfloat16",
    "216x1280-bfloat16",
    "310x2568-bfloat16",
    "3x1036-float16",
    "3x1037-bfloat16",
    "3x127-bfloat16",
    "3x20003-bfloat16",
    "3x2601-float64",
    "3x32768-bfloat16",
    "3x65538-float64",
    "40x1024-float16",
    "4x65537-float16",
    "54x5000-bfloat16",
    "5x16384-float32",
    "5x6001-float32",
    "6x16393-bfloat16",
    "7x9001-bfloat16",
    "8x128-float16",
    "8x250-float16",
    "8x4096-float32",
    "8x64-bfloat16",
    "8x8191-float16",
    "9x10240-bfloat16",
    "9x32768-float16",
)


def problems(direction: str, op: str = "layer_norm") -> list[tuple[Problem, Device]]:
    arrays = PARAMETERS[direction] if op == "layer_norm" else ("weight",)
    return [
        (problem(direction, rows, cols, dtype, op, **dict.fromkeys(arrays, parameters or dtype)), device)
        for rows, cols, dtype, device, _, parameters in SHAPES
    ]


def turns(rows: int, step: Step) -> int:
    """Return how many rows a thread takes one after the other."""
    return rows * step.spec.shape.cluster // (step.grid[0] * step.spec.rows_per_cta)


def weight_waits(spec: KernelSpec) -> bool:
    """Return whether the weight waits in shared memory."""
    return dynamic_shared(spec) > dynamic_shared(replace(spec, operands=Operands({*spec.operands} - {*spec.columns})))


def holder(spec: KernelSpec) -> str:
    """Return what holds a row."""
    threads = spec.lanes if isinstance(spec, SumSpec) else spec.shape.threads
    if spec.cluster > 1:
        return "cluster"
    if spec.rows_per_cta == 1:
        return "CTA"
    return "part of a warp" if threads < 32 else "warp" if threads == 32 else "warps"
