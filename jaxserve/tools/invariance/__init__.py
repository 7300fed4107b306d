"""Determinism check: whether a request's tokens depend on batching, caching and so on, on this machine's devices."""
