"""Prompt images: loaded, preprocessed and given tokens. Pure numpy and Pillow: no jax."""
