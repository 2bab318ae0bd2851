"""The transformer of bench/flax_models.py, small: with Flax's norms and with ours it has one curve of losses."""

from __future__ import annotations

import pytest

jax = pytest.importorskip("jax", reason="JAX is not installed")
pytest.importorskip("flax", reason="Flax is not installed")

from bench.flax_models import Size, most_apart, train  # noqa: E402

SMALL = Size(layers=1, width=32, heads=2, vocabulary=48, batch=2, sequence=8)
STEPS = 8


@pytest.fixture(autouse=True)
def quick_compilation():
    """Compiling is nearly all of the time."""
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("norm", "framework", "dtype", "room"),
    [("LayerNorm", "linen", "float32", 1e-5), ("RMSNorm", "nnx", "bfloat16", 1e-2)],
)
def test_losses_lie_on_each_other(norm, framework, dtype, room):
    ours, flaxs = (train(norm, framework, dtype, who, SMALL, STEPS).losses for who in ("cunorm", "flax"))
    assert flaxs[-1] < 0.95 * flaxs[0]
    assert most_apart(flaxs, ours) < room
