"""The Flax modules can replace Flax's own, and compute by Flax's own code where no kernel does what they do."""

from __future__ import annotations

import inspect
import math

import numpy
import pytest

jax = pytest.importorskip("jax", reason="JAX is not installed")
pytest.importorskip("flax", reason="Flax is not installed")

import flax.serialization  # noqa: E402
import jax.numpy as jnp  # noqa: E402
from flax import linen as nn  # noqa: E402
from flax import nnx  # noqa: E402
from flax_norms import (  # noqa: E402
    KINDS,
    LAST_TWO,
    MODULES,
    OPS,
    Kind,
    compiled,
    function,
    kernel_calls,
    kinds,
    with_gradients,
)
from jax_arrays import calls as ptx_calls  # noqa: E402
from jax_arrays import lowered, on_devices  # noqa: E402

norms = pytest.mark.parametrize("norm", OPS)


def random(*shape, dtype="float32", seed=0):
    return jax.random.normal(jax.random.key(seed), shape).astype(dtype)


def assert_same(a, b):
    """Check that two trees have the same bits, dtypes and shapes."""
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        x, y = numpy.asarray(x), numpy.asarray(y)
        assert (x.dtype, x.shape, x.tobytes()) == (y.dtype, y.shape, y.tobytes())


def assert_close(a, b):
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        assert (x.dtype, x.shape) == (y.dtype, y.shape)
        numpy.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-5 * max(1.0, float(abs(y).max())))


# Flax's own module computes what no kernel does: (options, shape and dtype of x, arguments of the call).

FALLBACKS = {
    "mask": ({}, (3, 8), "float32", {"mask": numpy.arange(24).reshape(3, 8) % 5 > 0}),
    "first-axis": ({"reduction_axes": 0}, (3, 8), "float32", {}),
    "middle-axis": ({"reduction_axes": (1,)}, (3, 4, 8), "float32", {}),
    "axes-that-are-not-the-last": ({"reduction_axes": (0, 2)}, (3, 4, 8), "bfloat16", {}),
    "features-beyond-the-row": ({"feature_axes": (-2, -1)}, (3, 4, 8), "float32", {}),
    "features-within-the-row": ({"reduction_axes": (-2, -1)}, (3, 4, 8), "float32", {}),
    "no-axis": ({"reduction_axes": ()}, (3, 8), "float32", {}),
    "no-columns": ({}, (3, 0), "float32", {}),
    "complex-x": ({}, (3, 8), "complex64", {}),
    "complex-parameters": ({"param_dtype": "complex64"}, (3, 8), "float32", {}),
    "complex-y": ({"dtype": "complex64"}, (3, 8), "float32", {}),
    "epsilon-is-an-array": ({"epsilon": jnp.float32(0.1)}, (3, 8), "float32", {}),
    "epsilon-below-zero": ({"epsilon": -1e-3}, (3, 8), "float32", {}),
    "more-axes-than-a-set-keeps-in-order": (
        {"reduction_axes": (7, 8), "feature_axes": (7, 8)},
        (1, 3, 1, 1, 1, 1, 1, 4, 8),
        "float32",
        {},
    ),
}


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        pytest.param(kind, name, id=f"{'-'.join(kind)}-{name}")
        for kind in KINDS
        for name in FALLBACKS
        if kind.norm == "LayerNorm" or name in ("mask", "first-axis")
    ],
)
def test_what_no_kernel_does_is_flaxs_to_the_bit(kind, name):
    options, shape, dtype, call = FALLBACKS[name]
    axes = {axis % len(shape) for axis in numpy.atleast_1d(options.get("feature_axes", -1))}
    features = [shape[axis] for axis in axes]  # in Flax's order
    if kind.framework == "nnx":
        features = [math.prod(features)]
    parameters = {
        name: random(*features, dtype=options.get("param_dtype", "float32"), seed=seed)
        for seed, name in enumerate(kind.names)
    }
    x = random(*shape, dtype=dtype)
    with kernel_calls(kind) as calls:
        assert_same(*(compiled(function(kind, who, options, **call))(parameters, x) for who in ("cunorm", "flax")))
    assert not calls.called


@kinds
def test_statistics_over_a_named_axis_are_flaxs_to_the_bit(kind):
    x = random(4, 3, 8)
    parameters = {name: random(8, seed=seed) for seed, name in enumerate(kind.names)}
    with kernel_calls(kind) as calls:
        functions = [with_gradients(function(kind, who, {"axis_name": "batch"})) for who in ("cunorm", "flax")]
        assert_same(*(compiled(jax.vmap(f, (None, 0), axis_name="batch"))(parameters, x) for f in functions))
    assert not calls.called


@norms
def test_integers(norm):
    """linen leaves integers to Flax; nnx promotes them to floats first, so that a kernel runs."""
    x = jnp.arange(24).reshape(3, 8) ** 2
    for framework, covered in (("linen", 0), ("nnx", 1)):
        for options in ({}, {"dtype": "bfloat16", "use_fast_variance": False}):
            kind = Kind(framework, norm)
            parameters = {name: random(8, seed=seed) for seed, name in enumerate(kind.names)}
            with kernel_calls(kind) as calls:
                ours, flaxs = (function(kind, who, options)(parameters, x) for who in ("cunorm", "flax"))
            assert calls.call_count == covered
            if covered:
                assert_close(ours, flaxs)
            else:
                assert_same(ours, flaxs)


@norms
def test_parameters_of_a_dtype_that_the_module_does_not_name(norm):
    """Flax computes the complex parameters of a checkpoint in a module whose parameters should be float32."""
    kind = Kind("linen", norm)
    parameters = {name: jnp.full(8, 1 + 2j) for name in kind.names}
    with kernel_calls(kind) as calls:
        assert_same(*(function(kind, who, {})(parameters, random(3, 8)) for who in ("cunorm", "flax")))
    assert not calls.called


def test_an_nnx_module_reads_x_in_16_bits_where_flax_only_widens_it():
    def by_way_of_8_bits(arrays, dtype=None):
        return tuple(array.astype("float8_e4m3fn").astype("float32") for array in arrays)

    for options, dtype in (({}, jnp.bfloat16), ({"promote_dtype": by_way_of_8_bits}, jnp.float32)):
        module = MODULES["nnx"]["cunorm"].LayerNorm(8, rngs=nnx.Rngs(0), **options)
        with kernel_calls(Kind("nnx", "LayerNorm")) as calls:
            assert module(random(3, 8, dtype="bfloat16")).dtype == jnp.float32
        assert calls.call_args.args[0].dtype == dtype


@pytest.mark.slow
@kinds
def test_what_is_lowered_for_cuda(kind):
    """A program has one kernel forward, and those of the gradients. It has none where Flax computes."""
    pytest.importorskip("cupy", reason="kernels are compiled by CuPy")
    parameters, x = {name: jnp.ones(8) for name in kind.names}, jnp.ones((3, 8))

    def names(options, transformation=lambda f: f):
        program = transformation(function(kind, "cunorm", options))
        return [call.name for call in ptx_calls(lowered(program, parameters, x))]

    assert names({}) == ["cunorm_forward"]
    assert names({}, with_gradients) == ["cunorm_forward", "cunorm_backward_few"]
    assert not names({"reduction_axes": 0}, with_gradients)


# Bad input raises what Flax raises, in Flax's words.

BAD = {
    "a-number": ({}, jnp.float32(1), "float32", 8),
    "an-axis-that-is-not-there": ({"reduction_axes": 2, "feature_axes": 2}, jnp.ones((3, 8)), "float32", 8),
    "y-of-integers": ({"dtype": "int32"}, jnp.ones((3, 8)), "float32", 8),
    "8-bit-y": ({"dtype": "float8_e4m3fn"}, jnp.ones((3, 8)), "float32", 8),
    "8-bit-x": ({}, jnp.ones((3, 8), "float8_e4m3fn"), "float32", 8),
    "parameters-of-another-length": ({}, jnp.ones((3, 8)), "float32", 7),
    "text": ({}, "text", "float32", 8),
    "keys": ({}, jax.random.split(jax.random.key(0), 8), "float32", 8),
    "mask-of-another-shape": ({"mask": jnp.ones((2, 5), bool)}, jnp.ones((3, 8)), "float32", 8),
}


@pytest.mark.parametrize("name", BAD)
@kinds
def test_bad_input(kind, name):
    options, x, dtype, features = BAD[name]
    parameters = {name: jnp.ones(features, dtype) for name in kind.names}
    options = dict(options)
    call = {"mask": options.pop("mask")} if "mask" in options else {}
    ours, flaxs = (error(function(kind, who, options, **call), parameters, x) for who in ("cunorm", "flax"))
    assert ours == flaxs


def error(f, *args):
    with pytest.raises(Exception) as raised:  # noqa: PT011
        f(*args)
    return raised.type, str(raised.value).partition(" into shape")[0]  # Flax reshapes parameters to x's rank


# Same constructors, same variables, same names.


@kinds
def test_constructor_call_and_name(kind):
    ours, flaxs = kind.cls("cunorm"), kind.cls("flax")
    assert issubclass(ours, flaxs)
    assert ours.__name__ == flaxs.__name__  # linen names variables after it
    assert inspect.signature(ours) == inspect.signature(flaxs)
    parameters = [inspect.signature(cls.__call__).parameters.values() for cls in (ours, flaxs)]
    assert [(p.name, p.kind, p.default) for p in parameters[0]] == [(p.name, p.kind, p.default) for p in parameters[1]]


OPTIONS = {
    "defaults": {},
    "16-bits": {"param_dtype": "bfloat16"},
    "no-scale": {"use_scale": False},
    "complex": {"param_dtype": "complex64"},
    "two-axes": LAST_TWO,
    "initializers": {"scale_init": nn.initializers.normal(), "bias_init": nn.initializers.uniform()},
    "flax's-way": {"feature_axes": (-2, -1)},
}


@pytest.mark.slow
@pytest.mark.parametrize("name", OPTIONS)
@norms
def test_linen_variables_go_both_ways(norm, name):
    kind = Kind("linen", norm)
    options = {key: value for key, value in OPTIONS[name].items() if key != "bias_init" or norm == "LayerNorm"}

    def model(who):
        class Model(nn.Module):
            @nn.compact
            def __call__(self, x):
                return kind.cls(who)(**options)(nn.Dense(8)(x))

        return Model()

    x = random(3, 5, 8)
    ours, flaxs = (model(who).init(jax.random.key(1), x) for who in ("cunorm", "flax"))
    assert_same(ours, flaxs)
    assert_close(model("cunorm").apply(flaxs, x), model("flax").apply(ours, x))
    restored = flax.serialization.from_bytes(ours, flax.serialization.to_bytes(flaxs))
    assert_same(restored, ours)
    model("cunorm").apply(restored, x)  # restored has NumPy arrays


@norms
def test_linen_metadata_of_parameters(norm):
    options = {"scale_init": nn.with_partitioning(nn.initializers.ones, ("columns",))}
    modules = [Kind("linen", norm).cls(who)(**options) for who in ("cunorm", "flax")]
    ours, flaxs = (module.init(jax.random.key(0), random(3, 8)) for module in modules)
    assert_same(ours, flaxs)
    assert nn.get_partition_spec(ours) == nn.get_partition_spec(flaxs)
    assert_close(*(module.apply(ours, random(3, 8)) for module in modules))


@pytest.mark.parametrize("name", OPTIONS)
@norms
def test_nnx_state_goes_both_ways(norm, name):
    kind = Kind("nnx", norm)
    options = {key: value for key, value in OPTIONS[name].items() if key != "bias_init" or norm == "LayerNorm"}
    features, x = (40 if "feature_axes" in options else 8), random(3, 5, 8)
    ours, flaxs = (kind.cls(who)(features, rngs=nnx.Rngs(1), **options) for who in ("cunorm", "flax"))
    assert_same(nnx.state(ours), nnx.state(flaxs))
    state = jax.tree.map(lambda a: a + 0.5, nnx.state(flaxs))
    nnx.update(ours, state)
    nnx.update(flaxs, nnx.state(ours))
    assert_same(nnx.state(flaxs), state)
    assert_close(ours(x), flaxs(x))


@norms
def test_nnx_metadata_of_parameters(norm):
    modules = [
        Kind("nnx", norm).cls(who)(8, rngs=nnx.Rngs(0), scale_metadata={"note": "kept"}) for who in ("cunorm", "flax")
    ]
    assert [module.scale.get_metadata()["note"] for module in modules] == ["kept", "kept"]


# Under the transformations of both frameworks, results and gradients are those of Flax's modules. They do not
# see which norm it is, so each framework has one.


def spread(parameter):
    return parameter + jnp.arange(parameter.size).reshape(parameter.shape) / parameter.size


class Scanned(nn.Module):
    norm: type

    @nn.compact
    def __call__(self, x):
        def body(module, x, _):
            return x + module(x), None

        layers = nn.scan(body, variable_axes={"params": 0}, split_rngs={"params": True}, length=3)
        return layers(self.norm(), x, None)[0]


LINEN = {
    "plain": lambda norm: norm(),
    "jit": lambda norm: nn.jit(norm)(),
    "remat": lambda norm: nn.remat(norm)(),
    "scan": Scanned,
    "vmap": lambda norm: nn.vmap(norm, variable_axes={"params": None}, split_rngs={"params": False})(),
    "vmap-with-parameters": lambda norm: nn.vmap(norm, variable_axes={"params": 0}, split_rngs={"params": True})(),
    "remat-of-vmap": lambda norm: nn.remat(
        nn.vmap(norm, variable_axes={"params": 0}, split_rngs={"params": True}, in_axes=1, out_axes=1)
    )(),
}


@pytest.mark.slow
@on_devices
@pytest.mark.parametrize("transformation", LINEN)
def test_linen_transformations(device, transformation):
    kind, results = Kind("linen", "LayerNorm"), []
    with jax.default_device(jax.devices(device)[0]):
        x = random(4, 5, 8)
        for who in ("cunorm", "flax"):
            module = LINEN[transformation](kind.cls(who))
            variables = module.init(jax.random.key(0), x)
            variables = jax.tree.map(spread, variables)
            with kernel_calls(kind) as calls:
                f = with_gradients(lambda variables, x, module=module: jnp.sin(module.apply(variables, x)))
                results.append(compiled(f)(variables, x))
            assert calls.called == (who == "cunorm")
    assert_close(*results)


def stacked(norm):
    """Return three modules in one, with stacked parameters."""
    return nnx.vmap(lambda rngs: norm(8, rngs=rngs), in_axes=0)(nnx.Rngs(0).split(3))


def by_vmap(norm):
    return stacked(norm), nnx.vmap(lambda module, x: module(x), in_axes=(0, None))


def by_scan(norm):
    step = nnx.scan(lambda x, module: x + module(x), in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
    return stacked(norm), lambda module, x: step(x, module)


def merged(module, x):
    graph, state = nnx.split(module)
    return jax.jit(lambda state, x: nnx.merge(graph, state)(x))(state, x)


def single(transformation):
    return lambda norm: (norm(8, rngs=nnx.Rngs(0)), transformation)


NNX = {
    "plain": single(lambda module, x: module(x)),
    "jit": single(nnx.jit(lambda module, x: module(x))),
    "split-and-merge": single(merged),
    "remat": single(nnx.remat(lambda module, x: module(x))),
    "vmap-over-x": single(nnx.vmap(lambda module, x: module(x), in_axes=(None, 0))),
    "vmap-over-modules": by_vmap,
    "scan-over-modules": by_scan,
}


@on_devices
@pytest.mark.parametrize("transformation", NNX)
@pytest.mark.slow
def test_nnx_transformations(device, transformation):
    kind, results = Kind("nnx", "RMSNorm"), []
    with jax.default_device(jax.devices(device)[0]):
        x = random(4, 5, 8)
        for who in ("cunorm", "flax"):
            module, f = NNX[transformation](kind.cls(who))
            nnx.update(module, jax.tree.map(spread, nnx.state(module)))
            with kernel_calls(kind) as calls:
                loss = nnx.value_and_grad(lambda module, x, f=f: jnp.sin(f(module, x)).sum(), argnums=(0, 1))
                value, (gradients, dx) = loss(module, x)
            assert calls.called == (who == "cunorm")
            results.append((value, jax.tree.leaves(gradients), dx))
    assert_close(*results)
