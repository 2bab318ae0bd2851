"""LayerNorm and RMSNorm for Flax, on cunorm.jax."""
