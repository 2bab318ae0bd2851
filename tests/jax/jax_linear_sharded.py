"""layer_norm_linear on several devices: `python jax_linear_sharded.py cpu`, and on GPUs. Prints what it checked."""

from __future__ import annotations

import os
import sys
from contextlib import nullcontext

if __name__ == "__main__":
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=4"

import jax
import jax.numpy as jnp
import numpy
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jax_arrays import close
from jax_sharded import collectives
from test_jax_linear import arguments, both, compiled, gradient

ROWS = 16
DATA_PARALLEL = (P("data"), P(), P(), P(), P())
COLUMN_PARALLEL = (P("data"), P(None, "model"), P("model"), P(), P())


def given(op):
    """Return NumPy arrays, which are on no device yet."""
    return [numpy.asarray(array) for array in arguments("cpu", ROWS, 5, op=op)]


def check_sharded(op: str, mesh: Mesh, specs: tuple[P, ...], y_spec: P, context: bool) -> None:
    """Check that forward communicates nothing, backward only sums, and each gradient is split as its array is."""
    mine, expected = both(op)
    arrays = given(op)
    sharded = [jax.device_put(a, NamedSharding(mesh, spec)) for a, spec in zip(arrays, specs, strict=False)]
    with jax.set_mesh(mesh) if context else nullcontext():
        forward = compiled(mine).lower(*sharded).compile()
        assert not collectives(forward), collectives(forward)
        y = forward(*sharded)
        assert y.sharding.is_equivalent_to(NamedSharding(mesh, y_spec), y.ndim), y.sharding
        backward = compiled(gradient(mine)).lower(*sharded).compile()
        assert collectives(backward).keys() == {"all-reduce"}, collectives(backward)
        gradients = backward(*sharded)
    for darray, array in zip(gradients, sharded, strict=True):
        assert darray.sharding.is_equivalent_to(array.sharding, darray.ndim), (darray.shape, darray.sharding)
    close(jax.device_get(y), jax.device_get(compiled(expected)(*arrays)), 5e-4, 1e-4)
    close(jax.device_get(gradients), jax.device_get(compiled(gradient(expected))(*arrays)), 5e-4, 1e-4)


def check_rows_gathered(op: str, mesh: Mesh, explicit: bool) -> None:
    """Split rows of x and columns of kernel over one axis: each pass gathers z once, and z's gradient is summed."""
    mine, expected = both(op)
    arrays = given(op)
    specs = (P("model"), P(None, "model"), P("model"), P(), P())
    sharded = [jax.device_put(a, NamedSharding(mesh, spec)) for a, spec in zip(arrays, specs, strict=False)]
    of_y = NamedSharding(mesh, P(None, None, "model"))

    def run(*arrays):
        if explicit:
            return mine(*arrays, out_sharding=of_y)
        return jax.lax.with_sharding_constraint(mine(*arrays), of_y)

    with jax.set_mesh(mesh):
        forward = compiled(run).lower(*sharded).compile()
        assert collectives(forward) == {"all-gather": 1}, collectives(forward)
        y = forward(*sharded)
        assert y.sharding.is_equivalent_to(of_y, y.ndim), y.sharding
        in_shardings = tuple(a.sharding for a in sharded)
        backward = jax.jit(gradient(run), out_shardings=in_shardings).lower(*sharded).compile()
        kinds = collectives(backward)
        assert kinds.pop("all-gather") == 2, kinds
        assert set(kinds) <= {"all-reduce", "reduce-scatter"}, kinds
        gradients = backward(*sharded)
    close(jax.device_get(y), jax.device_get(compiled(expected)(*arrays)), 5e-4, 1e-4)
    close(jax.device_get(gradients), jax.device_get(compiled(gradient(expected))(*arrays)), 5e-4, 1e-4)


def check_kernel_split_along_in(mesh: Mesh) -> None:
    """Check only the values: how this is communicated is XLA's choice."""
    mine, expected = both("layer_norm")
    arrays = given("layer_norm")
    specs = (P("data"), P("model"), P(), P(), P())
    sharded = [jax.device_put(a, NamedSharding(mesh, spec)) for a, spec in zip(arrays, specs, strict=True)]
    gradients = jax.device_get(compiled(gradient(mine))(*sharded))
    close(gradients, jax.device_get(compiled(gradient(expected))(*arrays)), 5e-4, 1e-4)


def check_shard_map(op: str, mesh: Mesh, check_vma: bool) -> None:
    """Split rows, and columns of kernel: check the gradient of the mapped function, and one taken inside it."""
    mine, expected = both(op)
    arrays = given(op)
    specs = COLUMN_PARALLEL[: len(arrays)]
    mapped = jax.shard_map(mine, mesh=mesh, in_specs=specs, out_specs=P("data", None, "model"), check_vma=check_vma)
    reference = jax.device_get(compiled(gradient(expected))(*arrays))
    close(jax.device_get(compiled(gradient(mapped))(*arrays)), reference, 5e-4, 1e-4)
    if check_vma:
        inside = jax.shard_map(gradient(mine), mesh=mesh, in_specs=specs, out_specs=specs)
        close(jax.device_get(compiled(inside)(*arrays)), reference, 5e-4, 1e-4)


def check_functions_of_cunorm(mesh: Mesh) -> None:
    """Check cunorm.layer_norm_linear_backward with sharded rows."""
    import cunorm

    x, kernel, bias, *ln = given("layer_norm")
    dy = numpy.cos(numpy.arange(ROWS * 5 * len(bias), dtype=numpy.float32)).reshape(ROWS, 5, -1)

    def run(x, dy):
        weight = jnp.asarray(kernel.T)
        _, mean, rstd = cunorm.layer_norm_linear_forward(x, weight, bias, *ln)
        return cunorm.layer_norm_linear_backward(dy, x, mean, rstd, weight, *ln, eps=1e-5)

    data = NamedSharding(mesh, P("data"))
    with jax.set_mesh(mesh):
        gradients = compiled(run)(jax.device_put(x, data), jax.device_put(dy, data))
    close(jax.device_get(gradients), jax.device_get(compiled(run)(x, dy)), 5e-4, 1e-4)


def main(platform: str) -> None:
    devices = numpy.array(jax.devices(platform))
    grid = devices.reshape(2, -1)
    for kind, types in (("auto", AxisType.Auto), ("explicit", AxisType.Explicit)):
        line = Mesh(devices, ("data",), axis_types=(types,))
        square = Mesh(grid, ("data", "model"), axis_types=(types, types))
        check_sharded("rms_norm", line, DATA_PARALLEL, P("data"), context=True)
        check_sharded("layer_norm", square, COLUMN_PARALLEL, P("data", None, "model"), context=kind == "explicit")
        print(f"rows, then rows and columns of kernel, over {devices.size} devices, {kind} axes")
    check_functions_of_cunorm(line)
    for types in (AxisType.Auto, AxisType.Explicit):
        line = Mesh(devices, ("model",), axis_types=(types,))
        for op in ("layer_norm", "rms_norm"):
            check_rows_gathered(op, line, types is AxisType.Explicit)
    print("rows and columns of kernel over one axis")
    automatic = Mesh(grid, ("data", "model"))
    check_kernel_split_along_in(automatic)
    print("kernel split along in")
    for op, check_vma in (("layer_norm", True), ("rms_norm", False)):
        check_shard_map(op, automatic, check_vma)
    print("shard_map")


if __name__ == "__main__":
    jax.config.update("jax_default_matmul_precision", "highest")
    main(*sys.argv[1:])
