"""torch's calls without gradients run the norm and the product of few rows by the plan that a table names."""

from __future__ import annotations

import numpy
import pytest
from cpu_device import divided, missing
from linear_cpu import EPS, HopperMachine, arrays, case, gpu, know, run

torch = pytest.importorskip("torch")

import torch_stand_in  # noqa: E402

from cunorm.linear import plan as linear_plan  # noqa: E402
from cunorm.plan.tables import OVERLAPPED  # noqa: E402
from cunorm.torch import layer_norm_linear  # noqa: E402
from cunorm.torch.linear import planned  # noqa: E402
from cunorm.torch.norm import gpu as torch_gpu  # noqa: E402

OF = case(3, 768, 136, 1, 4, dtype="float16", ln_weight="float32", ln_bias="float32")
KERNELS = {1: ["one_launch"], OVERLAPPED: ["forward_spread", "product"]}


@pytest.fixture(params=[1])
def launched(monkeypatch, request):
    """Return the memory that kernels may use and the names of those that ran, for a GPU whose table has the product."""
    if missing():
        pytest.skip(missing())
    torch_stand_in.play(monkeypatch)
    memory: dict[int, numpy.ndarray] = {}
    names: list[str] = []
    empty = torch_gpu.empty

    def known_empty(shape, stride, dtype):
        tensor = empty(shape, stride, dtype)
        memory[tensor.data_ptr()] = tensor.numpy()
        if tensor.dtype is torch.float32:  # statistics, a row of each
            memory.update({row.data_ptr(): row.numpy() for row in tensor})
        return tensor

    class Runs:
        @staticmethod
        def run(plan, device_id, stream, arguments, workspace):
            assert (workspace == 0) == (plan.workspace == 0)
            pointers, scalars = divided(plan, arguments)
            names.extend(step.spec.kernel for step in plan.steps)
            HopperMachine().run(plan, scalars, **{name: memory.get(pointer) for name, pointer in pointers.items()})

    monkeypatch.setattr(torch_gpu, "empty", known_empty)
    monkeypatch.setattr(torch_gpu, "properties_of", lambda *_: gpu(OF.sms))
    monkeypatch.setattr(planned, "launch", Runs)
    know(monkeypatch, OF.sms, {768: {136: {8: request.param}}})
    yield memory, names
    linear_plan.chosen.cache_clear()


def tensors(memory):
    """Return x, weight, bias, ln_weight and ln_bias, at multiples of 16 bytes."""
    given = [torch.from_numpy(array.copy()) for array in arrays(OF)]
    memory.update({tensor.data_ptr(): tensor.numpy() for tensor in given})
    return given


def call(x, weight, bias, ln_weight, ln_bias, **options):
    return layer_norm_linear(x, weight, bias, ln_weight, ln_bias, EPS, **options)


@pytest.mark.parametrize(("launched", "way"), [(way, way) for way in KERNELS], indirect=["launched"])
def test_a_call_without_gradients_runs_as_the_table_says(launched, way):
    """A first call and a repeated one have the bits of the kernels."""
    memory, names = launched
    given = tensors(memory)
    expected = run(HopperMachine(), OF._replace(cluster=max(way, 0)), arrays(OF)).y
    for count in (1, 2):
        y = call(*given)
        assert names == KERNELS[way] * count
        assert (y.numpy() == expected).all()


@pytest.mark.parametrize(("launched", "way"), [(way, way) for way in KERNELS], indirect=["launched"])
def test_the_operator_of_compiled_code_runs_as_the_table_says(launched, way):
    """A first call and a repeated one have the bits of the kernels, those of the statistics too."""
    memory, names = launched
    given = tensors(memory)
    expected = run(HopperMachine(), OF._replace(cluster=max(way, 0)), arrays(OF))
    for count in (1, 2):
        y, z, statistics, *_ = torch.ops.cunorm.norm_linear_forward(
            *given, "layer_norm", EPS, torch.float16, returned="nothing"
        )
        assert names == KERNELS[way] * count
        assert (y.numpy() == expected.y).all()
        assert (statistics.numpy() == [expected.mean.ravel(), expected.rstd.ravel()]).all()
        assert z.numel() == 0


SPLIT_OPERATOR = {
    "a gradient is wanted": {"wanted": 1},
    "z is returned": {"returned": "local"},
    "z is kept": {"keep_normalized": True},
}


@pytest.mark.parametrize("name", SPLIT_OPERATOR)
def test_which_operators_are_split(launched, name):
    memory, names = launched
    options = {"returned": "nothing"} | SPLIT_OPERATOR[name]
    torch.ops.cunorm.norm_linear_forward(*tensors(memory), "layer_norm", EPS, torch.float16, **options)
    assert "one_launch" not in names


SPLIT = {
    "a gradient is wanted": lambda given: call(given[0].requires_grad_(), *given[1:]),
    "more rows": lambda given: call(given[0].repeat(65, 1), *given[1:]),
    "SMs are left to others": lambda given: call(*given, sm_margin=1),
}


@pytest.mark.parametrize("name", SPLIT)
def test_what_is_split(launched, name):
    memory, names = launched
    call(*tensors(memory))
    assert names == ["one_launch"]
    names.clear()
    SPLIT[name](tensors(memory))
    assert "one_launch" not in names


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 16, 64])
def test_compiled_code_has_the_bits_of_eager_mode(monkeypatch, rows):
    from cunorm.kernel import launch

    cols, outs = 1024, 3072
    shapes = (rows, cols), (outs, cols), (outs,), (cols,), (cols,)
    given = [torch.randn(shape, device="cuda").bfloat16() for shape in shapes]
    solutions: list[object] = []

    class Recorded:
        @staticmethod
        def run(solution, *arguments):
            solutions.append(solution)
            launch.run(solution, *arguments)

    monkeypatch.setattr(planned, "launch", Recorded)
    with torch.no_grad():
        expected = call(*given)
        in_eager_mode, solutions[:] = list(solutions), []
        for _ in range(2):
            y = torch.compile(call, fullgraph=True)(*given)
            assert (y == expected).all()
    assert solutions == in_eager_mode * 2
    assert in_eager_mode or torch.cuda.get_device_capability() != (9, 0)
