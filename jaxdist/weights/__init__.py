"""Where weights come from, and what is asked of them. `weights.source` imports no jax."""
