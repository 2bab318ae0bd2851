"""The models of bench/flax_models.py, made small, have the same losses with Flax's norms and with ours."""

from __future__ import annotations

import pytest

jax = pytest.importorskip("jax", reason="JAX is not installed")
pytest.importorskip("flax", reason="Flax is not installed")

from bench.flax_models import Size, Trained, launches, most_apart  # noqa: E402

SMALL = Size(layers=1, width=32, hidden=64, heads=2, vocabulary=48, batch=2, sequence=8)
STEPS = 12


@pytest.fixture(autouse=True)
def quick_compilation():
    """Let XLA optimise nothing, because compiling is nearly all of the time."""
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "framework", "dtype", "room"),
    [
        ("gpt", "linen", "float32", 1e-5),
        ("vit", "nnx", "float32", 1e-5),
        ("llama", "linen", "float32", 1e-5),
        ("llama", "nnx", "bfloat16", 1e-2),
    ],
)
def test_losses_lie_on_each_other(model, framework, dtype, room):
    ours, flaxs = (Trained(model, framework, dtype, who, SMALL).losses(STEPS) for who in ("cunorm", "flax"))
    assert flaxs[-1] < 0.95 * flaxs[0]
    assert most_apart(flaxs, ours) < room


def test_launches_of_a_program():
    """An operation inside a fusion is no launch of its own; one in a command buffer is."""
    program = """
HloModule step

%region (a: f32[], b: f32[]) -> f32[] {
  ROOT %add = f32[] add(%a, %b)
}

%fused_computation (p: f32[8]) -> f32[] {
  %copy.1 = f32[8] copy(%p)
  ROOT %reduce.1 = f32[] reduce(%copy.1, %zero), dimensions={0}, to_apply=%region
}

%command_buffer (p: f32[8]) -> f32[8] {
  %fusion = f32[] fusion(%p), kind=kInput, calls=%fused_computation
  ROOT %gemm = f32[8] custom-call(%p), custom_call_target="__cublas$gemm"
}

ENTRY %main (p: f32[8]) -> f32[8] {
  %copy = f32[8] copy(%p)
  ROOT %call = f32[8] call(%copy), to_apply=%command_buffer
}
"""
    assert launches(program) == 3
