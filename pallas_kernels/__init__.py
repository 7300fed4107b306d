"""Kernels for serving language models from JAX, usable on their own: they depend on jax, and on nothing of jaxserve.

Each operation is a package with one public function and several backends (see `op.py`). The tests have a list of cases
and a reference for each.
"""
