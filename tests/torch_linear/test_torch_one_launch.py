"""Norm and product of few rows in one launch, as torch's calls without gradients take it."""

from __future__ import annotations

import numpy
import pytest
from cpu_device import divided, missing
from one_launch_cpu import EPS, HopperMachine, arrays, case, gpu, know, run

torch = pytest.importorskip("torch")

import torch_stand_in  # noqa: E402

from cunorm.linear import one_launch as rules  # noqa: E402
from cunorm.torch import layer_norm_linear  # noqa: E402
from cunorm.torch.linear import one_launch  # noqa: E402
from cunorm.torch.norm import gpu as torch_gpu  # noqa: E402

OF = case(3, 768, 136, 1, 4, dtype="float16", ln_weight="float32", ln_bias="float32")


@pytest.fixture
def launched(monkeypatch):
    """The names of the kernels that ran on the CPU machine, for GPUs whose table has the product."""
    if missing():
        pytest.skip(missing())
    torch_stand_in.play(monkeypatch)
    memory: dict[int, numpy.ndarray] = {}
    names: list[str] = []
    empty = torch_gpu.empty

    def known_empty(shape, stride, dtype):
        tensor = empty(shape, stride, dtype)
        memory[tensor.data_ptr()] = tensor.numpy()
        return tensor

    class Runs:
        @staticmethod
        def run(plan, device_id, stream, arguments):
            pointers, scalars = divided(plan, arguments)
            names.extend(step.spec.kernel for step in plan.steps)
            HopperMachine().run(plan, scalars, **{name: memory.get(pointer) for name, pointer in pointers.items()})

    monkeypatch.setattr(torch_gpu, "empty", known_empty)
    monkeypatch.setattr(torch_gpu, "properties_of", lambda *_: gpu(OF.sms))
    monkeypatch.setattr(one_launch, "launch", Runs)
    know(monkeypatch, OF.sms, {768: {136: {8: 1}}})
    yield memory, names
    rules.chosen.cache_clear()


def tensors(memory):
    """x, weight, bias, ln_weight, ln_bias, at multiples of 16 bytes."""
    found = []
    for array in arrays(OF):
        tensor = torch.from_numpy(array.copy())
        memory[tensor.data_ptr()] = tensor.numpy()
        found.append(tensor)
    return found


def call(x, weight, bias, ln_weight, ln_bias, **options):
    return layer_norm_linear(x, weight, bias, ln_weight, ln_bias, EPS, **options)


def test_a_call_without_gradients_is_one_launch(launched):
    """Known from the second on, with the bits of the kernel."""
    memory, names = launched
    given = tensors(memory)
    expected = run(HopperMachine(), OF, arrays(OF)).y
    for count in (1, 2):
        y = call(*given)
        assert names == ["one_launch"] * count
        assert (y.numpy() == expected).all()


SPLIT = {
    "a gradient is wanted": lambda given: call(given[0].requires_grad_(), *given[1:]),
    "more rows": lambda given: call(given[0].repeat(4, 1), *given[1:]),
    "SMs are left to others": lambda given: call(*given, sm_margin=1),
}


@pytest.mark.parametrize("name", SPLIT)
def test_what_is_split(launched, name):
    memory, names = launched
    SPLIT[name](tensors(memory))
    assert "one_launch" not in names
