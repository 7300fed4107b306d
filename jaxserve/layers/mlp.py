"""Feed-forward layers."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float


def swiglu(gate_up: Float[Array, "T F2"]) -> Float[Array, "T F"]:
    """Return SiLU(gate) * up (Shazeer 2020); `gate_up` holds both side by side."""
    gate, up = jnp.split(gate_up, 2, axis=-1)
    return jax.nn.silu(gate) * up


class ClampedSwiglu(NamedTuple):
    """SwiGLU as in gpt-oss, a function: `(up + 1) * gate * sigmoid(alpha * gate)` after clamps.

    Attributes:
        limit: upper bound for gate, and bound for up's absolute value.
        alpha: factor within the sigmoid.
    """

    limit: float
    alpha: float

    def __call__(self, pairs: Float[Array, "T F2"]) -> Float[Array, "T F"]:
        """Return one output per pair of columns: even columns are gates, odd ones the up projection."""
        gate = jnp.minimum(pairs[:, ::2], self.limit)
        up = jnp.clip(pairs[:, 1::2], -self.limit, self.limit)
        return (up + 1) * gate * jax.nn.sigmoid(self.alpha * gate)


def geglu(gate_up: Float[Array, "T F2"]) -> Float[Array, "T F"]:
    """Return GELU(gate) * up (Shazeer 2020) with tanh GELU; `gate_up` holds both side by side."""
    gate, up = jnp.split(gate_up, 2, axis=-1)
    return jax.nn.gelu(gate, approximate=True) * up


def exact_geglu(gate_up: Float[Array, "T F2"]) -> Float[Array, "T F"]:
    """Return GELU(gate) * up (Shazeer 2020); `gate_up` holds both side by side."""
    gate, up = jnp.split(gate_up, 2, axis=-1)
    return jax.nn.gelu(gate, approximate=False) * up


def _quick_gelu(x: Float[Array, "T F"]) -> Float[Array, "T F"]:
    """Return x * sigmoid(1.702 * x), CLIP's approximation of GELU."""
    return x * jax.nn.sigmoid(1.702 * x)


def _relu_squared(x: Float[Array, "T F"]) -> Float[Array, "T F"]:
    """Return the square of ReLU(x)."""
    return jnp.square(jax.nn.relu(x))


_gelu, _tanh_gelu = (partial(jax.nn.gelu, approximate=approximate) for approximate in (False, True))
# Activations without a gate, by their names in config.json; three names mean the same function.
ACTIVATIONS: Mapping[str, Callable[[Array], Array]] = {
    "gelu": _gelu,
    "gelu_fast": _tanh_gelu,
    "gelu_new": _tanh_gelu,
    "gelu_pytorch_tanh": _tanh_gelu,
    "quick_gelu": _quick_gelu,
    "relu2": _relu_squared,
}
_GATED: Mapping[str, Callable[[Array], Array]] = {"swiglu": swiglu, "geglu": geglu, "exact_geglu": exact_geglu}


def is_gated(name: str) -> bool:
    """Return whether an activation multiplies two outputs of the layer before it."""
    return name in _GATED


def activation_function(name: str) -> Callable[[Array], Array]:
    """Return the activation that `MlpSpec.activation` names."""
    return _GATED[name] if name in _GATED else ACTIVATIONS[name]
