"""Gated DeltaNet (Yang et al. 2024, arXiv 2412.06464): linear attention whose state decays and is corrected.

A short convolution over the last tokens makes queries q, keys k and values v. These update and read each value head's
memory by the delta rule: see `layers/linear_attention.py`.
"""

from dataclasses import dataclass, replace
from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Float32, Int

from jaxserve.errors import ConfigError
from jaxserve.layers.linear_attention import Heads, MemoryPool, advance
from jaxserve.layers.short_convolution import convolve
from jaxserve.layers.state_forms import StateRows

_EPS = 1e-6  # epsilon in query and key norms


class DeltaInputs(NamedTuple):
    """Inputs of the layer, per token.

    Attributes:
        mixed: convolution inputs: queries and keys for all key heads, values for all value heads.
        taps: convolution weights, the latest token's last.
        log_decay: logarithm of each head's decay.
        rate: rate at which each head's memory is corrected.
    """

    mixed: Float[Array, "T C"]
    taps: Float[Array, "C 1 width"]
    log_decay: Float32[Array, "T V"]
    rate: Float32[Array, "T V"]


@dataclass(frozen=True)
class GatedDelta:
    """Sizes of a Gated DeltaNet layer: for one device's heads if the model is split.

    Attributes:
        num_key_heads: query and key heads; each serves the same number of value heads.
        num_value_heads: value heads, each with a memory.
        key_dim: query and key size, Dk.
        value_dim: value size, Dv.
        width: tokens that the convolution sees, the latest included.
        is_grouped: True if both projections' rows are grouped by key head, each with its value heads' rows; False if
            queries, keys, values and gates follow each other.
    """

    num_key_heads: int
    num_value_heads: int
    key_dim: int
    value_dim: int
    width: int
    is_grouped: bool = False

    @property
    def key_size(self) -> int:
        """Elements in a token's queries; its keys have the same number."""
        return self.num_key_heads * self.key_dim

    @property
    def value_size(self) -> int:
        """Elements in a token's values."""
        return self.num_value_heads * self.value_dim

    @property
    def token_flops(self) -> int:
        """Operations per token: the convolution, the decay of S, and three multiplications with S."""
        mixed = 2 * self.key_size + self.value_size
        return 2 * self.width * mixed + 7 * self.num_value_heads * self.key_dim * self.value_dim

    def local(self, num_devices: int) -> "GatedDelta":
        """Return the sizes on one device among `num_devices`.
        Raises:
            ConfigError: `num_devices` does not divide the key heads.
        """
        if self.num_key_heads % num_devices:
            raise ConfigError(
                f"tensor_parallel_size must divide linear_num_key_heads, got {num_devices} and {self.num_key_heads}; "
                f"set it to a divisor of {self.num_key_heads}",
                about=("tensor_parallel_size",),
            )
        return replace(
            self,
            num_key_heads=self.num_key_heads // num_devices,
            num_value_heads=self.num_value_heads // num_devices,
        )

    def times(self, factor: int) -> "GatedDelta":
        """Return the sizes with `factor` times as many heads."""
        return replace(self, num_key_heads=self.num_key_heads * factor, num_value_heads=self.num_value_heads * factor)

    def new(self, num_layers: int, num_entries: int) -> MemoryPool:
        """Return a zeroed pool."""
        memory = (num_layers, num_entries, self.num_value_heads, self.value_dim, self.key_dim)
        window = (num_layers, num_entries, self.width - 1, 2 * self.key_size + self.value_size)
        return MemoryPool(jnp.zeros(memory, jnp.float32), jnp.zeros(window, jnp.float32))

    def advance(
        self, inputs: DeltaInputs, rows: StateRows, pool: MemoryPool, layer: Int[Array, ""]
    ) -> tuple[Float32[Array, "T V Dv"], MemoryPool]:
        """Compute a step's tokens in one layer; return the heads' outputs and the updated pool."""
        mixed, window = convolve(inputs.mixed.astype(jnp.float32), inputs.taps, None, rows, pool.window, layer)
        q, k, v = jnp.split(mixed, [self.key_size, 2 * self.key_size], axis=1)
        T = mixed.shape[0]
        q, k = (_unit(x.reshape(T, self.num_key_heads, self.key_dim)) for x in (q, k))
        v = v.reshape(T, self.num_value_heads, self.value_dim)
        heads = Heads(q * self.key_dim**-0.5, k, v, inputs.log_decay, inputs.rate)
        out, memory = advance(heads, rows, pool.memory, layer)
        return out, MemoryPool(memory, window)


def _unit(x: Float32[Array, "T K Dk"]) -> Float32[Array, "T K Dk"]:
    """Scale the vectors along the last axis to length 1."""
    return x * lax.rsqrt(jnp.sum(jnp.square(x), axis=-1, keepdims=True) + _EPS)
