"""A program for CUDA, lowered on any machine, has one of XLA's calls of PTX for each launch of the plan."""

from __future__ import annotations

import re
from itertools import product

import pytest

jax = pytest.importorskip("jax")

import jax.numpy as jnp  # noqa: E402
from functions import OPS  # noqa: E402
from jax import export  # noqa: E402
from jax_arrays import PTX_CALL, calls, close, lowered, random  # noqa: E402
from test_jax_functions import ARGNUMS, call  # noqa: E402

from cunorm.commands.compilation import fault  # noqa: E402
from cunorm.jax import layer_norm  # noqa: E402
from cunorm.jax.xla import call as xla_call  # noqa: E402
from cunorm.jax.xla import target as choice  # noqa: E402
from cunorm.kernel import compile, source  # noqa: E402
from cunorm.plan.plain_problems import whole  # noqa: E402
from cunorm.plan.plan import plan  # noqa: E402

pytest.importorskip("cupy_backends", reason="PTX needs NVRTC, which comes with CuPy")

# These give every kind of kernel: a part of a warp, warps, a CTA, clusters of 2 and 4, streamed.
COLUMNS = (33, 1024, 4096, 16384, 65536, 524296)


def target():
    """Return the GPU that programs are lowered for: that of this machine, or else an H200."""
    return choice.for_xla(choice.device("test"))


def expected(op, direction, rows, cols, dtype="float32", weight="float32"):
    """Return the kernel's name, grid, threads and dynamic shared memory of every launch of the core's plan."""
    steps = plan(whole(op, direction, rows, cols, dtype, weight), target()).steps
    return [(source.entry_name(s.spec), s.grid, s.spec.threads, s.dynamic_shared) for s in steps]


def launched(text):
    return [launch[:4] for launch in calls(text)]


def shapes(rows, cols, dtype="float32", weight="float32"):
    parameter = jax.ShapeDtypeStruct((cols,), weight)
    return jax.ShapeDtypeStruct((*rows, cols), dtype), parameter, parameter


def arguments(op, *rest, **options):
    return shapes(*rest, **options)[: 3 if op == "layer_norm" else 2]


def gradient(op):
    def function(*arrays):
        return jax.grad(lambda *a: call(op, *a).astype("float32").sum(), tuple(range(len(arrays))))(*arrays)

    return function


# One norm has every kind of kernel, the other every second.
@pytest.mark.slow
@pytest.mark.parametrize(("cols", "op"), [*product(COLUMNS, OPS[:1]), *product(COLUMNS[::2], OPS[1:])])
@pytest.mark.parametrize("rows", [1, 300])
def test_the_launches_are_those_of_the_plan(op, rows, cols):
    arrays = arguments(op, (rows,), cols, "bfloat16")
    forward = expected(op, "forward", rows, cols, "bfloat16")
    assert launched(lowered(lambda *a: call(op, *a), *arrays)) == forward
    text = lowered(gradient(op), *arrays)
    assert launched(text) == forward + expected(op, "backward", rows, cols, "bfloat16")
    # Beside the launches, the program has only the sum, its gradient and the conversions of the test.
    assert not re.search(r"stablehlo\.(rsqrt|divide|subtract)", text)


@pytest.mark.parametrize("op", OPS)
def test_under_transformations(op):
    """Under vmap one call takes all rows. The body of a scan has one call, and equal layers share one."""
    one_call = expected(op, "forward", 2100, 96)
    x, *parameters = arguments(op, (300, 7), 96)
    unmapped = (None,) * len(parameters)
    assert launched(lowered(jax.vmap(lambda *a: call(op, *a), (0, *unmapped)), x, *parameters)) == one_call
    assert launched(lowered(jax.vmap(lambda *a: call(op, *a), (1, *unmapped), 1), x, *parameters)) == one_call

    def scanned(x, *parameters):
        return jax.lax.scan(lambda carry, _: (call(op, carry, *parameters), None), x, length=5)[0]

    assert launched(lowered(scanned, x, *parameters)) == one_call
    assert launched(lowered(lambda x, *a: call(op, call(op, call(op, x, *a), *a), *a), x, *parameters)) == one_call
    mesh = jax.sharding.Mesh(jax.devices("cpu")[:1], ("data",))
    data, whole = jax.sharding.PartitionSpec("data"), jax.sharding.PartitionSpec()
    mapped = jax.shard_map(
        lambda *a: call(op, *a), mesh=mesh, in_specs=(data, *[whole] * len(parameters)), out_specs=data
    )
    assert launched(lowered(mapped, x, *parameters)) == one_call


@pytest.mark.parametrize(("op", "argnums"), ARGNUMS)
def test_only_the_gradients_that_are_wanted_are_computed(op, argnums):
    arrays = arguments(op, (3000,), 96)  # with fewer rows, weight and bias have a launch of their own
    text = lowered(jax.grad(lambda *a: call(op, *a).sum(), argnums), *arrays)
    forward, backward, *sums = calls(text)
    assert forward.name == "cunorm_forward"
    assert backward.name == ("cunorm_column_gradients" if set(argnums) == {2} else "cunorm_backward")
    assert [launch.name for launch in sums] == (["cunorm_sum_partials"] if set(argnums) & {1, 2} else [])
    # It reads what the gradients need: dbias needs only dy, the others need xhat too, and dx needs weight as well.
    x = rstd = set(argnums) != {2}
    mean = x and op == "layer_norm"
    weight = dx = 0 in argnums
    assert backward.ptx.count(".param .u64") == sum((1, x, rstd, mean, weight, dx, bool(sums)))


def test_the_text_has_pointers_alone():
    """The parameters of a kernel are the arguments' buffers, then the results'; numbers stand in the text."""
    text = lowered(lambda x, w, b: layer_norm(x, None, w, b, eps=0.3), *shapes((300,), 96))
    (launch,) = calls(text)
    parameters = re.search(
        r"\.entry cunorm_forward\((.*?)\)", launch.ptx.replace("\\0A", "\n").replace("\\09", " "), re.S
    )
    kinds = re.findall(r"\.param \.(\w+)", parameters[1])
    assert kinds == ["u64"] * 4
    other = lowered(lambda x, w, b: layer_norm(x, None, w, b, eps=0.4), *shapes((300,), 96))
    assert calls(other)[0].ptx != launch.ptx


@pytest.mark.parametrize("direction", ["forward", "backward"])
@pytest.mark.parametrize("cols", [1024, 4096, 131072])
def test_a_text_with_numbers_in_it_spills_no_register(direction, cols):
    """Literals tell the compiler more than arguments do, and these kernels once spilled registers with them."""
    problem = whole("layer_norm", direction, 16384, cols, "bfloat16", "bfloat16")
    wanted = ("y",) if direction == "forward" else problem.wanted
    for launch in xla_call.launches(plan(problem, target()), {"eps": 1e-5}, wanted):
        spec = launch.step.spec
        assert not fault(spec, compile.compile_for(spec, target().arch, launch.baked))


def test_no_weight_no_pointer():
    (launch,) = calls(lowered(layer_norm, shapes((300,), 96)[0]))
    assert launch.ptx.count(".param .u64") == 2


def test_no_rows_no_launch():
    assert not calls(lowered(lambda *a: call("layer_norm", *a), *shapes((0,), 96)))
    assert not calls(lowered(gradient("layer_norm"), *shapes((0,), 96)))


def test_no_cluster_of_sixteen():
    """A cluster of sixteen needs an attribute that XLA does not set, so 262144 columns go another way."""
    assert any(step.spec.cluster == 16 for step in _backward_of_262144(choice.device("test")))
    assert all(step.spec.cluster <= 8 for step in _backward_of_262144(target()))


def _backward_of_262144(device):
    return plan(whole("layer_norm", "backward", 64, 262144, "bfloat16", "bfloat16"), device).steps


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
@pytest.mark.parametrize("y_dtype", ["float16", "float64"])
def test_dtypes(dtype, y_dtype):
    with jax.enable_x64(True):
        text = lowered(lambda *a: call("layer_norm", *a, dtype=y_dtype), *shapes((30,), 96, dtype, "float64"))
    assert len(calls(text)) == 1


@pytest.mark.slow
def test_an_exported_program_runs_anywhere():
    x, weight, bias = random(4, 96), random(96), random(96, seed=1)

    def function(*arrays):
        return jax.value_and_grad(lambda *a: jnp.sin(call("layer_norm", *a)).sum(), (0, 1, 2))(*arrays)

    allowed = [export.DisabledSafetyCheck.custom_call(PTX_CALL)]
    exported = export.export(jax.jit(function), platforms=("cuda", "cpu"), disabled_checks=allowed)(x, weight, bias)
    close(exported.call(x, weight, bias), function(x, weight, bias))
    backward = expected("layer_norm", "backward", 4, 96)
    assert launched(exported.mlir_module()) == expected("layer_norm", "forward", 4, 96) + backward
    with pytest.raises(ValueError, match=re.escape(PTX_CALL)):
        export.export(jax.jit(function), platforms=("cuda",))(x, weight, bias)


def test_without_a_gpu_the_architecture_is_what_the_variable_says(monkeypatch):
    monkeypatch.setattr(choice, "gpu", lambda: None)
    x = shapes((300,), 96)[0]
    assert ".target sm_90" in calls(lowered(lambda x: layer_norm(x, eps=1e-4), x))[0].ptx
    monkeypatch.setenv(choice.ARCH_VARIABLE, "80")
    assert ".target sm_80" in calls(lowered(lambda x: layer_norm(x, eps=2e-4), x))[0].ptx
    monkeypatch.setenv(choice.ARCH_VARIABLE, "81")
    with pytest.raises(ValueError, match="CUNORM_XLA_ARCH must be one of 75, 80"):
        lowered(lambda x: layer_norm(x, eps=3e-4), x)


def test_the_other_way_in_when_forced(monkeypatch):
    monkeypatch.setenv(choice.CALL_VARIABLE, "callback")
    monkeypatch.setattr(choice, "gpu", lambda: None)
    text = lowered(lambda *a: call("layer_norm", *a), *shapes((301,), 96))
    assert "xla_buffer_python_gpu_callback" in text
    assert not calls(text)


def test_literals_keep_every_bit():
    assert float.fromhex(xla_call._literal(1e-5, "double")) == 1e-5
    assert xla_call._literal(1e-5, "float") == "0x1.4f8b580000000p-17f"
