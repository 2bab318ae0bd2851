"""What a primitive calls: the kernel, each device on its own rows.

Under jit with sharded arrays XLA would gather what it does not know how to split. `custom_partitioning` tells it: leading
axes may be split, alike for all arrays that have them, the normalised ones may not, and dweight and dbias are summed over
the devices that hold different rows. In shard_map, and on one device, this is the kernel alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache, partial

import jax
import jax.numpy as jnp
from jax.experimental.custom_partitioning import custom_partitioning
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from . import xla_call
from .formulas import Task

Names = tuple[str, ...]

PER_ROW = ("mean", "rstd")
PER_COLUMN = ("weight", "bias", "dweight", "dbias")


def call(task: Task, names: Names, wanted: Names, *arrays: jax.Array) -> tuple[jax.Array, ...]:
    """The arrays `wanted`, of those in `names`."""
    leading = arrays[names.index("x")].ndim - task.ndim
    if not leading:
        return xla_call.kernel(task, names, wanted, *arrays)
    return _partitioned(task, names, wanted, leading)(*arrays)


@lru_cache(maxsize=4096)
def _partitioned(task: Task, names: Names, wanted: Names, leading: int) -> custom_partitioning:
    rows = [f"r{i}" for i in range(leading)]
    columns = [f"c{i}" for i in range(task.ndim)]

    def factors(name: str) -> str:
        return " ".join(rows if name in PER_ROW else columns if name in PER_COLUMN else rows + columns)

    partitioned = custom_partitioning(partial(xla_call.kernel, task, names, wanted))
    partitioned.def_partition(
        partition=partial(_partition, task, names, wanted, leading),
        sharding_rule=f"{', '.join(map(factors, names))} -> {', '.join(map(factors, wanted))}",
        need_replication_factors=tuple(columns),
    )
    return partitioned


def _partition(task: Task, names: Names, wanted: Names, leading: int, mesh: Mesh, arguments, results):
    """(mesh, what each device does, shardings of the results, shardings of the arguments)."""
    x = arguments[names.index("x")]
    rows = _row_axes(x, leading, mesh)
    summed = tuple(axis for axes in rows for axis in axes)

    def of_a_device(*arrays: jax.Array) -> tuple[jax.Array, ...]:
        local = xla_call.kernel(task, names, wanted, *arrays)
        return tuple(
            _sum(array, summed) if name in PER_COLUMN and summed else array
            for name, array in zip(wanted, local, strict=True)
        )

    def sharding(name: str, array: jax.ShapeDtypeStruct) -> NamedSharding:
        spec = () if name in PER_COLUMN else rows
        return NamedSharding(mesh, PartitionSpec(*spec, *(None,) * (len(array.shape) - len(spec))))

    return (
        mesh,
        of_a_device,
        tuple(map(sharding, wanted, results)),
        tuple(map(sharding, names, arguments)),
    )


def _row_axes(x: jax.ShapeDtypeStruct, leading: int, mesh: Mesh) -> list[tuple[str, ...]]:
    """The axes of the mesh that split each leading axis of x; only those that split it into equal parts, as the parts
    of others would be filled up with rows that do not exist, and summed.
    """
    spec = x.sharding.spec if isinstance(x.sharding, NamedSharding) else ()
    rows = []
    for axes, size in zip((*spec, *(None,) * leading), x.shape[:leading], strict=False):
        axes = axes if isinstance(axes, tuple) else () if axes is None else (axes,)
        parts = 1
        for axis in axes:
            parts *= mesh.shape[axis]
        rows.append(axes if size % parts == 0 else ())
    return rows


def _sum(gradient: jax.Array, axes: Sequence[str]) -> jax.Array:
    """Over devices, in the arithmetic of the norm: each has rounded its own part once."""
    wide = jnp.promote_types(gradient.dtype, jnp.float32)
    return jax.lax.psum(gradient.astype(wide), tuple(axes)).astype(gradient.dtype)
