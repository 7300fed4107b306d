"""Numpy arrays from torch's tensors, without importing torch."""

import sys
from typing import Any

import jax.numpy as jnp


def from_torch(value: Any) -> Any:
    """Return a torch tensor as a numpy array, and anything else as it is.

    Tensors in host memory are not copied. Their bytes are reinterpreted, since torch converts neither bfloat16 nor the
    8-bit formats to numpy.
    """
    torch = sys.modules.get("torch")
    if torch is None or not isinstance(value, torch.Tensor):
        return value
    dtype = jnp.dtype(str(value.dtype).removeprefix("torch."))
    flat = value.detach().cpu().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().view(dtype).reshape(tuple(value.shape))
