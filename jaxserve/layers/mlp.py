"""Feed-forward layers."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float


def swiglu(gate_up: Float[Array, "T F2"]) -> Float[Array, "T F"]:
    """Return SiLU(gate) * up, where `gate_up` holds both side by side (Shazeer 2020)."""
    gate, up = jnp.split(gate_up, 2, axis=-1)
    return jax.nn.silu(gate) * up


def geglu(gate_up: Float[Array, "T F2"]) -> Float[Array, "T F"]:
    """Return GELU(gate) * up, where `gate_up` holds both side by side (Shazeer 2020); GELU in its tanh form."""
    gate, up = jnp.split(gate_up, 2, axis=-1)
    return jax.nn.gelu(gate, approximate=True) * up
