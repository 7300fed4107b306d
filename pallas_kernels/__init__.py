"""Kernels for serving language models from JAX, usable on their own: they depend on jax, and on nothing of jaxserve.

Each operation is a package with one public function, a reference anyone can check, a list of cases, and its backends.
"""
