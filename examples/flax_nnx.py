"""A Flax nnx model with cunorm's norms is trained under jit; its losses are those of Flax's own norms.

python examples/flax_nnx.py
"""

import jax
import jax.numpy as jnp
from flax import nnx

from cunorm.flax import nnx as cunorm_nnx


class Model(nnx.Module):
    def __init__(self, norm, rngs):
        self.norms = nnx.List([norm(32, rngs=rngs) for _ in range(3)])
        self.layers = nnx.List([nnx.Linear(32, 32, rngs=rngs) for _ in range(3)])
        self.head = nnx.Linear(32, 1, rngs=rngs)

    def __call__(self, x):
        for norm, layer in zip(self.norms, self.layers, strict=True):
            x = x + jax.nn.gelu(layer(norm(x)))
        return self.head(x)


@nnx.jit
def step(model, x, wanted):
    def loss(model):
        return jnp.square(model(x) - wanted).mean()

    value, gradients = nnx.value_and_grad(loss)(model)
    parameters = jax.tree.map(lambda p, g: p - 0.05 * g, nnx.state(model, nnx.Param), gradients)
    nnx.update(model, parameters)
    return value


def losses(norm):
    model = Model(norm, nnx.Rngs(0))
    x = jax.random.normal(jax.random.key(1), (64, 32))
    wanted = x[:, :1] * x[:, 1:2]
    return [float(step(model, x, wanted)) for _ in range(30)]


def main():
    ours, flax = losses(cunorm_nnx.LayerNorm), losses(nnx.LayerNorm)
    for number in range(0, 30, 5):
        print(f"step {number:2}: cunorm {ours[number]:.5f}, Flax {flax[number]:.5f}")
    assert ours[-1] < 0.9 * ours[0]
    assert all(abs(a - b) < 1e-2 * abs(b) for a, b in zip(ours, flax, strict=True))


if __name__ == "__main__":
    main()
