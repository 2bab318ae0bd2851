"""LayerNorm and RMSNorm for Flax, on cunorm.jax: `cunorm.flax.linen` and `cunorm.flax.nnx`."""
