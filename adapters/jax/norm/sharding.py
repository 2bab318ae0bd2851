"""A primitive calls the kernel, each device on its own rows.

XLA would gather what it does not know how to split. Leading axes may be split, alike for all arrays that have them, the
normalised ones may not, and gradients of operands are summed over the devices that hold different rows. Where the type
of an array says how it is split (explicit axes of a mesh) shard_map does it; where XLA decides (automatic axes)
`custom_partitioning` tells it. In the caller's shard_map, and on one device, there is the kernel alone.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache, partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from ...operation import SEED
from ..private import custom_partitioning
from ..xla import call as xla_call
from .formulas import Arrays, Names, Task

Rows = tuple[tuple[str, ...], ...]  # for each leading axis of x the axes of the mesh that split it

# The kinds of arrays that have the leading axes of x; others are for all rows, or for groups of them.
OF_ROWS = ("full", "per_row", "per_block")


def prepared(task: Task, arrays: Arrays) -> dict[str, jax.Array]:
    """Return the arrays in the types that the primitives take.

    In shard_map all of them vary over the same axes of the mesh, so that a weight that devices share gets the sum of
    their gradients. Over explicit axes rows are split as those of x, and columns are not split.
    """
    varying = {name: jax.typeof(array).mat.varying for name, array in arrays.items()}
    axes = frozenset().union(*varying.values())
    arrays = {
        name: jax.lax.pcast(array, tuple(sorted(axes - varying[name])), to="varying") if axes - varying[name] else array
        for name, array in arrays.items()
    }
    sharding = jax.typeof(arrays["x"]).sharding
    if not sharding.mesh.explicit_axes:
        return arrays
    rows = _rows_by_type(task, arrays["x"], arrays["x"].ndim - task.ndim)
    return {
        name: jax.sharding.reshard(array, NamedSharding(sharding.mesh, _spec(task, name, rows)))
        for name, array in arrays.items()
    }


def call(task: Task, names: Names, wanted: Names, *arrays: jax.Array) -> tuple[jax.Array, ...]:
    """Return the arrays `wanted`, computed from those in `names`."""
    x = arrays[_place_of_rows(task, names)]
    leading = x.ndim - task.ndim
    if not leading:
        return xla_call.kernel(task, names, wanted, *arrays)
    mesh = jax.typeof(x).sharding.mesh
    if not mesh.explicit_axes:
        if not custom_partitioning:
            return xla_call.kernel(task, names, wanted, *arrays)
        return _partitioned(task, names, wanted, leading)(*arrays)
    rows = _rows_by_type(task, x, leading)
    return jax.shard_map(
        partial(_of_a_device, task, names, wanted, rows),
        mesh=mesh,
        in_specs=tuple(_spec(task, name, rows) for name in names),
        out_specs=tuple(_spec(task, name, rows) for name in wanted),
        axis_names=set(mesh.explicit_axes),
    )(*arrays)


def _of_a_device(task: Task, names: Names, wanted: Names, rows: Rows, *arrays: jax.Array) -> tuple[jax.Array, ...]:
    """Return the results for the rows that a device holds, and the gradients of operands for all rows."""
    local = xla_call.kernel(task, names, wanted, *arrays)
    results = []
    for name, array in zip(wanted, local, strict=True):
        own = {axis for entry in _own(task, name, rows) for axis in entry}
        others = tuple(axis for entry in rows for axis in entry if axis not in own)
        results.append(_sum(array, others) if others else array)
    return tuple(results)


def _place_of_rows(task: Task, names: Names) -> int:
    """Return the place of an array that has the shape of x."""
    return next(place for place, name in enumerate(names) if task.kind(name) == "full")


def _splits(task: Task) -> bool:
    """Return whether rows may be split. With a seed they may not, as a row draws by its number among all rows."""
    return SEED not in task.operation.operands


def _rows_by_type(task: Task, x: jax.Array, leading: int) -> Rows:
    if not _splits(task):
        return ((),) * leading
    spec = jax.typeof(x).sharding.spec
    return tuple(_axes(entry) for entry in (*spec, *(None,) * leading)[:leading])


def _spec(task: Task, name: str, rows: Rows) -> PartitionSpec:
    return PartitionSpec(*_own(task, name, rows))


def _own(task: Task, name: str, rows: Rows) -> Rows:
    """Return the axes of the mesh that split each leading axis of an array."""
    if task.kind(name) == "group":
        return tuple(entry if axis in task.group_axes else () for axis, entry in enumerate(rows))
    return rows if task.kind(name) in OF_ROWS else ()


@lru_cache(maxsize=4096)
def _partitioned(task: Task, names: Names, wanted: Names, leading: int) -> Any:
    rows = [f"r{i}" for i in range(leading)]
    columns = [f"c{i}" for i in range(task.ndim)]
    of_groups = [row if axis in task.group_axes else f"g{axis}" for axis, row in enumerate(rows)]
    axes = {
        "full": rows + columns,
        "per_row": rows,
        "per_block": [*rows, "b"],
        "column": columns,
        "one": [],
        SEED: ["k"],
    }
    axes["group"] = of_groups + columns

    def factors(name: str) -> str:
        return " ".join(axes[task.kind(name)])

    partitioned = custom_partitioning(partial(xla_call.kernel, task, names, wanted))
    partitioned.def_partition(
        partition=partial(_partition, task, names, wanted, leading),
        sharding_rule=f"{', '.join(map(factors, names))} -> {', '.join(map(factors, wanted))}",
        need_replication_factors=(
            *(() if _splits(task) else rows),
            *columns,
            *(["b"] if "per_block" in map(task.kind, wanted) else ()),
            *(["k"] if SEED in names else ()),
        ),
    )
    return partitioned


def _partition(task: Task, names: Names, wanted: Names, leading: int, mesh: Mesh, arguments, results):
    """Return (mesh, what each device does, shardings of the results, shardings of the arguments)."""
    x = arguments[_place_of_rows(task, names)]
    rows = _row_axes(x, leading, mesh) if _splits(task) else ((),) * leading
    return (
        mesh,
        partial(_of_a_device, task, names, wanted, rows),
        tuple(NamedSharding(mesh, _spec(task, name, rows)) for name in wanted),
        tuple(NamedSharding(mesh, _spec(task, name, rows)) for name in names),
    )


def _row_axes(x: jax.ShapeDtypeStruct, leading: int, mesh: Mesh) -> Rows:
    """Return the axes of the mesh that split each leading axis of x into equal parts.

    Unequal parts would be filled up with rows that do not exist, which would be summed too.
    """
    spec = x.sharding.spec if isinstance(x.sharding, NamedSharding) else ()
    rows = []
    for entry, size in zip((*spec, *(None,) * leading), x.shape[:leading], strict=False):
        axes = _axes(entry)
        parts = math.prod(mesh.shape[axis] for axis in axes)
        rows.append(axes if size % parts == 0 else ())
    return tuple(rows)


def _axes(entry: str | tuple[str, ...] | None) -> tuple[str, ...]:
    """Return the axes of the mesh in an entry of a PartitionSpec."""
    return entry if isinstance(entry, tuple) else () if entry is None else (entry,)


def _sum(gradient: jax.Array, axes: Sequence[str]) -> jax.Array:
    """Sum over devices, each of which has rounded its own part once, in the arithmetic of the norm."""
    wide = jnp.promote_types(gradient.dtype, jnp.float32)
    return jax.lax.psum(gradient.astype(wide), tuple(axes)).astype(gradient.dtype)
