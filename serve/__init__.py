"""Serving on top of `k3jax.sampling`: the engine with its caches, and the servers. Nothing is here yet."""
