"""Serving: engine, caches and servers on top of `k3jax.sampling`. Nothing here yet; see docs/roadmap.md."""
