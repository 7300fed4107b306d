"""Decides what the next step computes. Pure Python: no jax, no clock."""
