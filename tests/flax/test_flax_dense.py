"""LayerNormDense of linen and nnx gives what Flax's norm and then its Dense give, with the same parameters."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy
import pytest

jax = pytest.importorskip("jax", reason="JAX is not installed")
pytest.importorskip("flax", reason="Flax is not installed")

import flax.linen  # noqa: E402
import flax.nnx  # noqa: E402
import jax.numpy as jnp  # noqa: E402
from flax_norms import compiled, with_gradients  # noqa: E402
from jax_arrays import calls, lowered, on_devices  # noqa: E402

import cunorm.flax.linen  # noqa: E402
import cunorm.flax.nnx  # noqa: E402

IN, OUT = 32, 12
frameworks = pytest.mark.parametrize("framework", ["linen", "nnx"])


def ours(framework, options):
    """Return the function of our module that computes y from parameters by name, and x."""

    def by_linen(parameters, x):
        return cunorm.flax.linen.LayerNormDense(OUT, **options).apply({"params": parameters}, x)

    def by_nnx(parameters, x):
        module = cunorm.flax.nnx.LayerNormDense(IN, OUT, rngs=flax.nnx.Rngs(0), **options)
        return filled(module, parameters)(x)

    return by_linen if framework == "linen" else by_nnx


def filled(module, parameters):
    for name, parameter in parameters.items():
        setattr(module, name, flax.nnx.Param(parameter))
    return module


def flaxs(framework, options):
    """Return the function of Flax's two modules. They get 1 + scale where ours is zero-centred."""
    options = dict(options)
    norm = options.pop("normalization", "LayerNorm")
    centred = options.pop("zero_centered_gamma", False)
    common = {name: options[name] for name in ("dtype", "param_dtype") if name in options}
    of_norm = common | {"epsilon": options.get("epsilon", 1e-6), "use_scale": options.get("use_scale", True)}
    if norm == "LayerNorm":
        of_norm["use_bias"] = options.get("use_ln_bias", True)
    of_dense = common | {"use_bias": options.get("use_bias", True)}

    def run(parameters, x):
        scale = {"scale": parameters["scale"] + centred} if "scale" in parameters else {}
        ln = scale | ({"bias": parameters["ln_bias"]} if "ln_bias" in parameters else {})
        dense = {name: parameters[name] for name in ("kernel", "bias") if name in parameters}
        if framework == "linen":
            z = getattr(flax.linen, norm)(**of_norm).apply({"params": ln}, x)
            return flax.linen.Dense(OUT, **of_dense).apply({"params": dense}, z)
        rngs = flax.nnx.Rngs(0)
        z = filled(getattr(flax.nnx, norm)(IN, rngs=rngs, **of_norm), ln)(x)
        return filled(flax.nnx.Linear(IN, OUT, rngs=rngs, **of_dense), dense)(z)

    return run


def given(x_dtype="float32", dtype="float32", leading=(3, 5), **options):
    """Return (parameters, x). No parameter has the neutral value that it would have if it was left out."""
    random = numpy.random.default_rng(0)
    shapes = {"kernel": (IN, OUT), "bias": (OUT,), "scale": (IN,), "ln_bias": (IN,)}
    absent = {name for name in shapes if not options.get(f"use_{name}", True)}
    if options.get("normalization") == "RMSNorm":
        absent.add("ln_bias")
    parameters = {
        name: jnp.asarray(random.standard_normal(shape) * (IN**-0.5 if name == "kernel" else 1), dtype)
        for name, shape in shapes.items()
        if name not in absent
    }
    return parameters, jnp.asarray(random.standard_normal((*leading, IN)) + 0.5, x_dtype)


class Case(NamedTuple):
    x: str = "float32"
    parameters: str = "float32"
    dtype: str | None = None
    options: dict[str, Any] = {}  # noqa: RUF012


CASES = {
    "float32": Case(),
    "bfloat16": Case("bfloat16", "bfloat16"),
    "y is float32 with float32 parameters": Case("bfloat16"),
    "bfloat16 asked for of float32": Case("float32", "float32", "bfloat16"),
    "y is float32 of two kinds of 16 bits": Case("float16", "bfloat16"),
    "float64": Case("float64", "float64"),
    "integers": Case("int32"),
    "epsilon": Case(options={"epsilon": 0.3}),
    "zero-centred": Case(options={"zero_centered_gamma": True}),
    "without biases": Case(options={"use_bias": False, "use_ln_bias": False}),
    "without scale": Case(options={"use_scale": False}),
    "z kept": Case(options={"keep_normalized": True}),
    "RMSNorm": Case(options={"normalization": "RMSNorm", "epsilon": 0.3}),
    "RMSNorm in bfloat16": Case("bfloat16", "float32", "bfloat16", {"normalization": "RMSNorm"}),
}


# Both frameworks treat options alike, so most options are tested with linen only.
CHOSEN = [
    pytest.param(framework, case, id=f"{framework}-{name}")
    for framework in ("linen", "nnx")
    for name, case in CASES.items()
    if framework == "linen" or case.dtype or not case.options
]


@on_devices
@pytest.mark.parametrize(("framework", "case"), CHOSEN)
def test_the_same_results_as_flax(device, framework, case):
    """y and every gradient have Flax's shapes and dtypes, and its values to some roundings of the coarsest format."""
    options = {"param_dtype": case.parameters, "dtype": case.dtype, **case.options}
    wide = "float64" in (case.x, case.parameters)
    transform = with_gradients if case.x != "int32" else lambda f: f
    with jax.enable_x64(wide), jax.default_device(jax.devices(device)[0]), jax.default_matmul_precision("highest"):
        parameters, x = given(case.x, case.parameters, **case.options)
        mine, expected = (compiled(transform(make(framework, options)))(parameters, x) for make in (ours, flaxs))
    assert jax.tree.structure(mine) == jax.tree.structure(expected)
    formats = [case.dtype or case.parameters, case.parameters, "float32" if case.x == "int32" else case.x]
    eps = max(float(jnp.finfo(name).eps) for name in formats)
    room = (64 if eps < 1e-6 else 8) * eps
    for a, b in zip(jax.tree.leaves(mine), jax.tree.leaves(expected), strict=True):
        assert (a.shape, a.dtype, a.weak_type) == (b.shape, b.dtype, b.weak_type)
        a, b = (numpy.asarray(array).astype(numpy.float64) for array in (a, b))
        numpy.testing.assert_allclose(a, b, rtol=0, atol=room * abs(b).max())


PARAMETERS = {
    "all": ({}, ["bias", "kernel", "ln_bias", "scale"]),
    "none": ({"use_bias": False, "use_scale": False, "use_ln_bias": False}, ["kernel"]),
    "RMSNorm": ({"normalization": "RMSNorm"}, ["bias", "kernel", "scale"]),
    "zero-centred": ({"zero_centered_gamma": True, "param_dtype": "bfloat16"}, ["bias", "kernel", "ln_bias", "scale"]),
}


def initial(framework, options):
    if framework == "linen":
        init = cunorm.flax.linen.LayerNormDense(OUT, **options).init
        return compiled(init)(jax.random.key(0), jnp.ones((2, IN)))["params"]
    module = cunorm.flax.nnx.LayerNormDense(IN, OUT, rngs=flax.nnx.Rngs(0), **options)
    return flax.nnx.to_pure_dict(flax.nnx.state(module))


@frameworks
@pytest.mark.parametrize(("options", "names"), PARAMETERS.values(), ids=PARAMETERS)
def test_parameters(framework, options, names):
    parameters = initial(framework, options)
    assert sorted(parameters) == names
    shapes = {"kernel": (IN, OUT), "bias": (OUT,), "scale": (IN,), "ln_bias": (IN,)}
    for name, p in parameters.items():
        assert (p.shape, p.dtype) == (shapes[name], jnp.dtype(options.get("param_dtype", "float32")))
        neutral = {"scale": 0 if options.get("zero_centered_gamma") else 1}.get(name, 0)
        assert (p == neutral).all() == (name != "kernel")
    assert 0.5 * IN**-0.5 < float(parameters["kernel"].astype("float32").std()) < 2 * IN**-0.5


@frameworks
def test_initializers(framework):
    inits = {
        f"{name}_init": flax.linen.initializers.constant(value)
        for name, value in (("kernel", 2), ("bias", 3), ("scale", 4), ("ln_bias", 5))
    }
    parameters = initial(framework, inits)
    assert {name: float(p.ravel()[0]) for name, p in parameters.items()} == {
        "kernel": 2,
        "bias": 3,
        "scale": 4,
        "ln_bias": 5,
    }


@pytest.mark.slow
def test_partitioning():
    """The annotations of an initializer reach its parameter."""
    linen = flax.linen.with_partitioning(flax.linen.initializers.lecun_normal(), (None, "model"))
    variables = cunorm.flax.linen.LayerNormDense(OUT, kernel_init=linen).init(jax.random.key(0), jnp.ones((2, IN)))
    spec = flax.linen.get_partition_spec(variables)["params"]["kernel"]
    assert spec == jax.sharding.PartitionSpec(None, "model")
    y = cunorm.flax.linen.LayerNormDense(OUT, kernel_init=linen).apply(variables, jnp.ones((2, IN)))
    assert y.shape == (2, OUT)
    mesh = jax.sharding.Mesh(jax.devices("cpu")[:1], ("model",))
    with jax.set_mesh(mesh):
        init = flax.nnx.with_partitioning(flax.nnx.initializers.lecun_normal(), (None, "model"))
        module = cunorm.flax.nnx.LayerNormDense(IN, OUT, kernel_init=init, rngs=flax.nnx.Rngs(0))
        spec = flax.nnx.get_partition_spec(flax.nnx.state(module))["kernel"].get_value()
    assert spec == jax.sharding.PartitionSpec(None, "model")


def test_metadata_of_nnx():
    """Each nnx.Param gets its own metadata."""
    names = ("kernel", "bias", "scale", "ln_bias")
    metadata = {f"{name}_metadata": {"label": name} for name in names}
    module = cunorm.flax.nnx.LayerNormDense(IN, OUT, rngs=flax.nnx.Rngs(0), **metadata)
    assert [getattr(module, name).label for name in names] == list(names)


@frameworks
def test_out_sharding(framework):
    """y gets the sharding asked for where rows of x and columns of kernel are split over the same explicit axis."""
    mesh = jax.sharding.Mesh(jax.devices("cpu")[:1], ("model",), axis_types=(jax.sharding.AxisType.Explicit,))
    rows, columns = (jax.sharding.PartitionSpec(*axes) for axes in (("model", None), (None, "model")))
    with jax.set_mesh(mesh):
        parameters = {"kernel": jax.device_put(jnp.ones((IN, OUT)), jax.NamedSharding(mesh, columns))}
        x = jax.device_put(jnp.ones((2, IN)), jax.NamedSharding(mesh, rows))
        plain = {"use_bias": False, "use_scale": False, "use_ln_bias": False}
        if framework == "linen":
            module = cunorm.flax.linen.LayerNormDense(OUT, **plain)
            y = module.apply({"params": parameters}, x, out_sharding=columns)
        else:
            module = filled(cunorm.flax.nnx.LayerNormDense(IN, OUT, rngs=flax.nnx.Rngs(0), **plain), parameters)
            y = module(x, out_sharding=columns)
    assert jax.typeof(y).sharding.spec == columns


@pytest.mark.slow
def test_an_nnx_module_under_its_transformations():
    module = cunorm.flax.nnx.LayerNormDense(IN, OUT, rngs=flax.nnx.Rngs(0))
    _, x = given()

    @flax.nnx.jit
    def gradients(module, x):
        return flax.nnx.grad(lambda module, x: jnp.sin(module(x)).sum())(module, x)

    of_module = flax.nnx.to_pure_dict(gradients(module, x))
    parameters = flax.nnx.to_pure_dict(flax.nnx.state(module))
    expected = jax.grad(lambda p: jnp.sin(flaxs("nnx", {})(p, x)).sum())(parameters)
    assert sorted(of_module) == sorted(expected)
    for name, gradient in of_module.items():
        numpy.testing.assert_allclose(gradient, expected[name], rtol=1e-4, atol=1e-4)
    graph, state = flax.nnx.split(module)
    numpy.testing.assert_array_equal(flax.nnx.merge(graph, state)(x), module(x))


@pytest.mark.slow
@frameworks
def test_what_is_lowered_for_cuda(framework):
    """Forward has one kernel, backward computes z again unless it is kept, and `precision` reaches the products."""
    pytest.importorskip("cupy_backends", reason="PTX needs NVRTC, which comes with CuPy")
    parameters, x = given(leading=(300,))

    def names(transform, **options):
        text = lowered(transform(ours(framework, options)), parameters, x)
        assert ("HIGHEST" in text) == ("precision" in options)
        return [call.name.removeprefix("cunorm_") for call in calls(text)]

    assert names(lambda f: f, precision="highest") == ["forward"]
    assert names(with_gradients) == ["forward", "forward", "backward_few"]
    assert names(with_gradients, keep_normalized=True) == ["forward", "backward_few"]


BAD_OPTIONS = [
    ("no features", {"features": 0}, ValueError, "features must be 1 or more; got 0"),
    ("features of text", {"features": "12"}, TypeError, "features must be an int; got str"),
    ("true features", {"features": True}, TypeError, "features must be an int; got bool"),
    ("unknown norm", {"normalization": "BatchNorm"}, ValueError, "normalization must be 'LayerNorm' or 'RMSNorm'"),
    (
        "nothing to centre",
        {"zero_centered_gamma": True, "use_scale": False},
        ValueError,
        "zero_centered_gamma=True needs a scale; got use_scale=False",
    ),
]


@frameworks
@pytest.mark.parametrize(("what", "options", "error", "phrase"), BAD_OPTIONS, ids=[case[0] for case in BAD_OPTIONS])
def test_bad_options(framework, what, options, error, phrase):
    """The error comes when the module is made."""
    options = dict(options)
    features = options.pop("features", OUT)
    sizes = (features,) if framework == "linen" else (IN, features)
    options |= {} if framework == "linen" else {"rngs": flax.nnx.Rngs(0)}
    with pytest.raises(error, match=phrase) as caught:
        getattr(cunorm.flax, framework).LayerNormDense(*sizes, **options)
    assert str(caught.value).startswith("LayerNormDense: ")


def test_bad_in_features():
    with pytest.raises(ValueError, match="LayerNormDense: in_features must be 1 or more; got -1"):
        cunorm.flax.nnx.LayerNormDense(-1, OUT, rngs=flax.nnx.Rngs(0))


BAD_CALLS = [
    ("a number", {}, jnp.float32(1), ValueError, r"x must have a last axis of 1 element or more; got x of shape \(\)"),
    ("no columns", {}, jnp.ones((3, 0)), ValueError, r"x must have a last axis .* got x of shape \(3, 0\)"),
    ("complex", {}, jnp.ones((3, IN), complex), TypeError, "x must have dtype float16, .*; got complex64"),
    ("negative epsilon", {"epsilon": -1.0}, jnp.ones((3, IN)), ValueError, "eps must be finite and not negative"),
]


@frameworks
@pytest.mark.parametrize(("what", "options", "x", "error", "phrase"), BAD_CALLS, ids=[case[0] for case in BAD_CALLS])
def test_bad_calls(framework, what, options, x, error, phrase):
    with pytest.raises(error, match=phrase) as caught:
        ours(framework, options)(given()[0], x)
    assert str(caught.value).startswith("LayerNormDense: ")


def test_x_of_another_length():
    """Our nnx module refuses such an x itself; linen finds it by the shapes of its parameters."""
    parameters, x = given()
    with pytest.raises(ValueError, match="LayerNormDense: the last axis of x must have the length 32 of a column"):
        ours("nnx", {})(parameters, x[..., 1:])
    with pytest.raises(flax.errors.ScopeParamShapeError, match="kernel"):
        ours("linen", {})(parameters, x[..., 1:])
