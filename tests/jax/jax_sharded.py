"""Functions on several devices; `python jax_sharded.py cpu` runs all checks and prints what it checked.

The devices of a CPU need a process of their own. Rows are sharded, and weight and bias are on every device. No rows may
be gathered.
"""

from __future__ import annotations

import os
import re
import sys
from collections import Counter
from contextlib import nullcontext

DEVICES = 4

if __name__ == "__main__":
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count={DEVICES}"

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy  # noqa: E402
from functions import OPS  # noqa: E402
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec  # noqa: E402
from jax_arrays import calls, close, random  # noqa: E402
from test_float8 import GRANULARITIES  # noqa: E402
from test_float8 import check as check_bytes  # noqa: E402
from test_jax_functions import call, plain  # noqa: E402

from cunorm import fuse  # noqa: E402
from cunorm.jax import add_layer_norm, add_rms_norm, layer_norm_fp8_forward  # noqa: E402

ROWS, COLS = 16, 256
COLLECTIVES = ("all-gather", "all-to-all", "collective-permute", "all-reduce", "reduce-scatter")


def loss(function):
    return lambda *arrays: jnp.sin(function(*arrays)).sum()


def both(op):
    return [lambda *a, f=f: f(op, *a) for f in (call, plain)]


def arguments(op):
    """Return NumPy arrays, which are on no device yet."""
    arrays = (random(ROWS, 5, COLS), random(COLS), random(COLS, seed=1))
    return [numpy.asarray(array) for array in arrays[: 3 if op == "layer_norm" else 2]]


def collectives(compiled) -> dict[str, int]:
    """Count the arrays that each kind of collective is handed, whether it is asynchronous or joins several of them."""
    counts = Counter()
    for kind, operands in re.findall(rf"\b({'|'.join(COLLECTIVES)})(?:-start)?\(([^)]*)\)", compiled.as_text()):
        counts[kind] += operands.count("%")
    return dict(counts)


def check_sharded(op: str, mesh: Mesh, spec: PartitionSpec, context: bool = True) -> None:
    """Check that forward communicates nothing, and backward only sums the gradients of weight and bias.

    With `context` the mesh is set, as programs may do; else only the arrays know of it.
    """
    mine, expected = both(op)
    x, *parameters = arguments(op)
    argnums = tuple(range(1 + len(parameters)))
    y_expected = jax.device_get(expected(x, *parameters))
    gradients_expected = jax.device_get(jax.grad(loss(expected), argnums)(x, *parameters))
    sharded = [jax.device_put(x, NamedSharding(mesh, spec))]
    sharded += [jax.device_put(parameter, NamedSharding(mesh, PartitionSpec())) for parameter in parameters]
    with jax.set_mesh(mesh) if context else nullcontext():
        forward = jax.jit(mine).lower(*sharded).compile()
        assert not collectives(forward), collectives(forward)
        y = forward(*sharded)
        assert y.sharding.is_equivalent_to(sharded[0].sharding, x.ndim), y.sharding
        close(jax.device_get(y), y_expected)
        gradients = jax.jit(jax.grad(loss(mine), argnums)).lower(*sharded).compile()
        assert collectives(gradients).keys() == {"all-reduce"}, collectives(gradients)
        result = gradients(*sharded)
        assert result[0].sharding.is_equivalent_to(sharded[0].sharding, x.ndim)
        assert all(gradient.sharding.is_fully_replicated for gradient in result[1:])
        of_x = jax.jit(jax.grad(loss(mine))).lower(*sharded).compile()
        assert not collectives(of_x), collectives(of_x)
    close(jax.device_get(result), gradients_expected, atol=1e-4)


def check_columns_sharded(mesh: Mesh) -> None:
    """Check the values where columns are split, which no kernel can do: XLA gathers the rows first."""
    mine, expected = both("layer_norm")
    x, weight, bias = arguments("layer_norm")
    sharded = jax.device_put(x, NamedSharding(mesh, PartitionSpec(None, None, mesh.axis_names[0])))
    compiled = jax.jit(jax.grad(loss(mine), (0, 1, 2))).lower(sharded, weight, bias).compile()
    close(jax.device_get(compiled(sharded, weight, bias)), jax.grad(loss(expected), (0, 1, 2))(x, weight, bias))


def check_rows_that_do_not_divide(mesh: Mesh) -> None:
    """Check 7 rows on several devices in a program: the rows that fill up the last part must not reach dweight."""
    mine, expected = both("layer_norm")
    x, weight, bias = arguments("layer_norm")

    def run(function):
        def f(x, weight, bias):
            part = jax.lax.with_sharding_constraint(x[:7] * 1.5, NamedSharding(mesh, PartitionSpec(mesh.axis_names[0])))
            return jnp.sin(function(part, weight, bias)).sum()

        return jax.jit(jax.grad(f, (0, 1, 2)))

    result = run(mine)(x, weight, bias)
    assert all(jnp.isfinite(gradient).all() for gradient in result)

    def unsharded(x, weight, bias):
        return jnp.sin(expected(x[:7] * 1.5, weight, bias)).sum()

    close(jax.device_get(result), jax.device_get(jax.grad(unsharded, (0, 1, 2))(x, weight, bias)))


def check_shard_map(op: str, mesh: Mesh, check_vma: bool) -> None:
    """Check the gradient of a mapped function, and with check_vma a gradient taken inside."""
    mine, expected = both(op)
    arrays = arguments(op)
    argnums = tuple(range(len(arrays)))
    data, whole = PartitionSpec(mesh.axis_names[0]), PartitionSpec()
    specs = (data, *[whole] * (len(arrays) - 1))
    reference = jax.grad(loss(expected), argnums)(*arrays)
    mapped = jax.shard_map(mine, mesh=mesh, in_specs=specs, out_specs=data, check_vma=check_vma)
    close(jax.device_get(jax.jit(jax.grad(loss(mapped), argnums))(*arrays)), jax.device_get(reference), atol=1e-4)
    if check_vma:
        inside = jax.shard_map(jax.grad(loss(mine), argnums), mesh=mesh, in_specs=specs, out_specs=specs)
        close(jax.device_get(jax.jit(inside)(*arrays)), jax.device_get(reference), atol=1e-4)


def check_lowering_of_shard_map(mesh: Mesh) -> None:
    """Check that every device launches for its own share of 2000 rows."""
    from cunorm.kernel import device
    from cunorm.plan import plain_problems, plan

    x, weight = numpy.ones((2000, COLS), numpy.float32), numpy.ones(COLS, numpy.float32)
    data, whole = PartitionSpec(mesh.axis_names[0]), PartitionSpec()
    mapped = jax.shard_map(lambda x, w: call("rms_norm", x, w), mesh=mesh, in_specs=(data, whole), out_specs=data)
    text = jax.jit(mapped).trace(x, weight).lower(lowering_platforms=("cuda",)).as_text()
    (launch,) = calls(text)
    problem = plain_problems.whole("rms_norm", "forward", 2000 // mesh.size, COLS, "float32", "float32")
    (step,) = plan.plan(problem, device.KNOWN[90]).steps
    assert launch.grid == step.grid, launch.grid


def check_float8(mesh: Mesh, spec: PartitionSpec, granularity: str | int) -> None:
    """Check that FP8 output communicates nothing: a scale belongs to a row, or is known beforehand."""
    x, weight, bias = arguments("layer_norm")
    sharded = [jax.device_put(x, NamedSharding(mesh, spec))]
    sharded += [jax.device_put(parameter, NamedSharding(mesh, PartitionSpec())) for parameter in (weight, bias)]

    def function(x, weight, bias):
        return layer_norm_fp8_forward(x, None, weight, bias, granularity=granularity)

    with jax.set_mesh(mesh):
        compiled = jax.jit(function).lower(*sharded).compile()
        assert not collectives(compiled), collectives(compiled)
        y_bytes, scale, y = compiled(*sharded)
    for array in (y_bytes, y, scale)[: 2 if granularity == "tensor" else 3]:
        assert array.sharding.is_equivalent_to(NamedSharding(mesh, spec), array.ndim), array.sharding
    check_bytes(
        numpy.asarray(y).reshape(-1, COLS),
        numpy.asarray(y_bytes).view("uint8").reshape(-1, COLS),
        numpy.asarray(scale),
        granularity,
        "e4m3",
    )


def check_fused(mesh: Mesh, spec: PartitionSpec) -> None:
    """Check add_layer_norm: forward communicates nothing; backward only sums the gradients of weight and bias."""
    x, *parameters = arguments("layer_norm")
    arrays = (x, x * 2 + 1, *parameters)
    specs = (spec, spec, *[PartitionSpec()] * len(parameters))
    shardings = [NamedSharding(mesh, spec_of_array) for spec_of_array in specs]
    sharded = [jax.device_put(array, sharding) for array, sharding in zip(arrays, shardings, strict=True)]

    def both(*arrays):
        y, s = add_layer_norm(*arrays)
        return jnp.sin(y).sum() + (s**2).sum()

    def expected(x, residual, *parameters):
        s = x + residual
        return jnp.sin(plain("layer_norm", s, *parameters)).sum() + (s**2).sum()

    argnums = tuple(range(len(arrays)))
    with jax.set_mesh(mesh):
        forward = jax.jit(add_layer_norm).lower(*sharded).compile()
        assert not collectives(forward), collectives(forward)
        gradients = jax.jit(jax.grad(both, argnums)).lower(*sharded).compile()
        assert collectives(gradients).keys() == {"all-reduce"}, collectives(gradients)
        results = gradients(*sharded)
        of_s = jax.jit(jax.grad(lambda *a: add_layer_norm(*a)[1].sum()))(*sharded)
        assert (of_s == 1).all()
        for gradient, array in zip((of_s, *results), sharded[:1] + sharded, strict=True):
            assert gradient.sharding.is_equivalent_to(array.sharding, array.ndim), gradient.sharding
    close(jax.device_get(results), jax.device_get(jax.grad(expected, argnums)(*arrays)), atol=1e-4)


def check_groups(mesh: Mesh, shape: tuple[int, ...], of_scale: PartitionSpec, summed: bool) -> None:
    """Check that gradients of vectors for samples stay with their samples, and those for tokens are summed."""
    modulated = fuse("layer_norm", epilogue=lambda xhat, scale, shift: xhat * scale + shift)
    x, scale = random(ROWS, 5, COLS), random(*shape)
    specs = (PartitionSpec("data"), of_scale)
    arrays = [numpy.asarray(array) for array in (x, scale)]
    sharded = [jax.device_put(array, NamedSharding(mesh, spec)) for array, spec in zip(arrays, specs, strict=True)]

    def loss_of(function):
        return lambda x, scale: jnp.sin(function(x, scale)).sum()

    with jax.set_mesh(mesh):
        mine = jax.jit(jax.grad(loss_of(lambda x, scale: modulated(x, scale=scale, shift=scale)), (0, 1)))
        compiled = mine.lower(*sharded).compile()
        assert collectives(compiled).keys() == ({"all-reduce"} if summed else set()), collectives(compiled)
        results = compiled(*sharded)
        for gradient, array in zip(results, sharded, strict=True):
            assert gradient.sharding.is_equivalent_to(array.sharding, array.ndim), gradient.sharding
    expected = jax.grad(loss_of(lambda x, scale: plain("layer_norm", x) * scale + scale), (0, 1))(*arrays)
    close(jax.device_get(results), jax.device_get(expected), atol=1e-4)


def check_dropout(mesh: Mesh) -> None:
    """Check that the same elements are dropped however x is split: they follow from a row's number among all."""
    x, weight = (jnp.asarray(numpy.random.default_rng(0).standard_normal(shape), "float32") for shape in ((8, 64), 64))
    seed = jnp.asarray([1, 2], "uint32")

    def step(x, weight, seed):
        results, pull = jax.vjp(lambda *arrays: add_rms_norm(*arrays, dropout_p=0.3, seed=seed), x, x, weight)
        return results, pull(results)

    expected = jax.tree.leaves(jax.jit(step)(x, weight, seed))
    split = jax.device_put(x, NamedSharding(mesh, PartitionSpec(mesh.axis_names[0])))
    with jax.set_mesh(mesh):
        actual = jax.tree.leaves(jax.jit(step)(split, weight, seed))
    for array, expected_array in zip(actual, expected, strict=True):
        numpy.testing.assert_allclose(numpy.asarray(array), numpy.asarray(expected_array), rtol=1e-4, atol=1e-5)


def main(platform: str) -> None:
    devices = jax.devices(platform)
    meshes = {
        "auto": Mesh(devices, ("data",)),
        "explicit": Mesh(devices, ("data",), axis_types=(AxisType.Explicit,)),
    }
    for (kind, mesh), op in ((item, op) for item in meshes.items() for op in OPS):
        check_sharded(op, mesh, PartitionSpec("data"), context=op == "layer_norm")
        print(f"{op}: rows sharded over {len(devices)} devices, {kind} axes")
    square = Mesh([devices[:2], devices[2:]] if len(devices) == DEVICES else [devices], ("data", "sequence"))
    check_sharded("layer_norm", square, PartitionSpec(("data", "sequence")))
    print("layer_norm: rows sharded over two axes of the mesh")
    for (kind, mesh), granularity in ((item, by) for item in meshes.items() for by in GRANULARITIES):
        check_float8(mesh, PartitionSpec("data"), granularity)
        print(f"FP8 output with scales by {granularity}: rows sharded, {kind} axes")
    for kind, mesh in meshes.items():
        check_fused(mesh, PartitionSpec("data"))
        check_groups(mesh, (ROWS, 1, COLS), PartitionSpec("data"), summed=False)
        check_groups(mesh, (5, COLS), PartitionSpec(), summed=True)
        check_dropout(mesh)
        print(f"add_layer_norm, vectors for groups of rows: rows sharded, {kind} axes")
    for mesh in meshes.values():
        check_columns_sharded(mesh)
    print("columns sharded")
    check_rows_that_do_not_divide(meshes["auto"])
    print("rows that do not divide")
    for op in OPS:
        for check_vma in (True, False):
            check_shard_map(op, meshes["auto"], check_vma)
    print("shard_map")
    if platform == "cpu":
        check_lowering_of_shard_map(meshes["auto"])
        print("lowering of shard_map")


if __name__ == "__main__":
    main(*sys.argv[1:])
