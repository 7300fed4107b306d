"""Mamba-2 (Dao & Gu 2024, arXiv 2405.21060): a state space model whose state decays by one factor per head and token.

A short convolution over the last tokens makes each head's input x, and B and C for each head group. With a head's time
step dt and rate A < 0, a token updates and reads the head's state S; `layers/linear_attention.py` computes this:

    S <- exp(dt A) S + dt x B^T;  out = S C + D x
"""

import math
from dataclasses import dataclass, replace
from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Int

from jaxserve.errors import ConfigError
from jaxserve.layers.linear_attention import Heads, MemoryPool, advance
from jaxserve.layers.short_convolution import convolve
from jaxserve.layers.state_forms import StateRows


class MambaInputs(NamedTuple):
    """Inputs of the layer, per token.

    Attributes:
        mixed: convolution inputs: x for all heads, B and C for all groups.
        taps: convolution weights, the latest token's last.
        conv_bias: convolution bias, or None.
        time_step: time step by head.
        log_decay: logarithm of each head's decay.
        skip: D: each head's output is S C + D x.
    """

    mixed: Float[Array, "T C"]
    taps: Float[Array, "C 1 width"]
    conv_bias: Float[Array, " C"] | None
    time_step: Float32[Array, "T V"]
    log_decay: Float32[Array, "T V"]
    skip: Float32[Array, " V"]


@dataclass(frozen=True)
class Mamba:
    """Sizes of a Mamba-2 layer: for one device's heads if the model is split.

    Attributes:
        num_groups: head groups; the heads in a group share B and C.
        num_heads: heads, each with a state.
        state_dim: size of B and C, Dk.
        head_dim: size of x per head, Dv.
        width: tokens that the convolution sees, the latest included.
        time_step_limit: minimum and maximum time step.
        conv_bias: True if the convolution has a bias.
        proj_bias: True if the projections before and after have one.
        num_group_shards: number of shards into which tensor parallelism divides each group's heads; a device may hold
            several.
    """

    num_groups: int
    num_heads: int
    state_dim: int
    head_dim: int
    width: int
    time_step_limit: tuple[float, float] = (0.0, math.inf)
    conv_bias: bool = True
    proj_bias: bool = False
    num_group_shards: int = 1

    @property
    def inner_size(self) -> int:
        """Elements in a token's x."""
        return self.num_heads * self.head_dim

    @property
    def group_size(self) -> int:
        """Elements in a token's B; its C has the same number."""
        return self.num_groups * self.state_dim

    @property
    def token_flops(self) -> int:
        """Operations per token: the convolution, the decay of S, and two multiplications with S."""
        mixed = 2 * self.group_size + self.inner_size
        return 2 * self.width * mixed + 5 * self.inner_size * self.state_dim

    def local(self, num_devices: int) -> "Mamba":
        """Return the sizes on one device among `num_devices`: it has every group to which any of its heads belongs.

        Raises:
            ConfigError: `num_devices` does not divide the heads.
        """
        if self.num_heads % num_devices:
            raise ConfigError(
                f"tensor_parallel_size must divide mamba_n_heads, got {num_devices} and {self.num_heads}; "
                f"set it to a divisor of {self.num_heads}",
                about=("tensor_parallel_size",),
            )
        num_parts = math.lcm(self.num_groups, num_devices)
        return replace(
            self,
            num_groups=num_parts // num_devices,
            num_heads=self.num_heads // num_devices,
            num_group_shards=num_parts // self.num_groups,
        )

    def times(self, factor: int) -> "Mamba":
        """Return the sizes with `factor` times as many groups and heads."""
        return replace(self, num_groups=self.num_groups * factor, num_heads=self.num_heads * factor)

    def new(self, num_layers: int, num_entries: int) -> MemoryPool:
        """Return a zeroed pool."""
        memory = (num_layers, num_entries, self.num_heads, self.head_dim, self.state_dim)
        window = (num_layers, num_entries, self.width - 1, 2 * self.group_size + self.inner_size)
        return MemoryPool(jnp.zeros(memory, jnp.float32), jnp.zeros(window, jnp.float32))

    def advance(
        self, inputs: MambaInputs, rows: StateRows, pool: MemoryPool, layer: Int[Array, ""]
    ) -> tuple[Float32[Array, "T V Dv"], MemoryPool]:
        """Compute a step's tokens in one layer; return the heads' outputs and the updated pool."""
        mixed = inputs.mixed.astype(jnp.float32)
        mixed, window = convolve(mixed, inputs.taps, inputs.conv_bias, rows, pool.window, layer)
        x, b, c = jnp.split(mixed, [self.inner_size, self.inner_size + self.group_size], axis=1)
        T = mixed.shape[0]
        x = x.reshape(T, self.num_heads, self.head_dim)
        b, c = (y.reshape(T, self.num_groups, self.state_dim) for y in (b, c))
        heads = Heads(c, b, x * inputs.time_step[:, :, None], inputs.log_decay)
        out, memory = advance(heads, rows, pool.memory, layer)
        return out + x * inputs.skip[None, :, None], MemoryPool(memory, window)
