"""Mamba-2 (Dao & Gu 2024, arXiv 2405.21060): a state space model whose state decays by one factor per head and token.

A short convolution over the last tokens makes inputs x of the heads, and B and C of groups of heads. With the time step
dt and the rate A < 0 of a head, a token changes and reads its state S, which `layers/linear_attention.py` computes:

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
    """Inputs of a layer's tokens.

    Attributes:
        mixed: inputs of the convolution: x of all heads, B and C of all groups.
        taps: weights of the convolution, those of the latest token last.
        conv_bias: bias of the convolution; None if it has none.
        time_step: time step of each head.
        log_decay: logarithm of each head's decay.
        skip: factor on x that is added to what each head reads.
    """

    mixed: Float[Array, "T C"]
    taps: Float[Array, "C 1 width"]
    conv_bias: Float[Array, " C"] | None
    time_step: Float32[Array, "T V"]
    log_decay: Float32[Array, "T V"]
    skip: Float32[Array, " V"]


@dataclass(frozen=True)
class Mamba:
    """Sizes of a Mamba-2 layer; those of a device's heads where a model is split.

    Attributes:
        num_groups: groups of heads, which share B and C.
        num_heads: heads, each with a state.
        state_dim: size of B and C, Dk.
        head_dim: size of a head's x, Dv.
        width: tokens that the convolution sees, the latest included.
        time_step_limit: least and greatest time step.
        conv_bias: True if the convolution has a bias.
        proj_bias: True if the projections before and after have one.
        num_shares: number of parts of each group's heads, where a model is split; a device may have several.
    """

    num_groups: int
    num_heads: int
    state_dim: int
    head_dim: int
    width: int
    time_step_limit: tuple[float, float] = (0.0, math.inf)
    conv_bias: bool = True
    proj_bias: bool = False
    num_shares: int = 1

    @property
    def inner_size(self) -> int:
        """Elements of a token's x."""
        return self.num_heads * self.head_dim

    @property
    def group_size(self) -> int:
        """Elements of a token's B, and of its C."""
        return self.num_groups * self.state_dim

    @property
    def token_flops(self) -> int:
        """Operations of a token: its convolution, the decay of S, and two products with S."""
        mixed = 2 * self.group_size + self.inner_size
        return 2 * self.width * mixed + 5 * self.inner_size * self.state_dim

    def local(self, num_devices: int) -> "Mamba":
        """Return the sizes on one of `num_devices`, which has each group that some of its heads belong to.

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
            num_shares=num_parts // self.num_groups,
        )

    def times(self, factor: int) -> "Mamba":
        """Return the sizes with groups and heads multiplied by `factor`."""
        return replace(self, num_groups=self.num_groups * factor, num_heads=self.num_heads * factor)

    def new(self, num_layers: int, num_entries: int) -> MemoryPool:
        """Return a pool of zeros."""
        memory = (num_layers, num_entries, self.num_heads, self.head_dim, self.state_dim)
        window = (num_layers, num_entries, self.width - 1, 2 * self.group_size + self.inner_size)
        return MemoryPool(jnp.zeros(memory, jnp.float32), jnp.zeros(window, jnp.float32))

    def advance(
        self, inputs: MambaInputs, rows: StateRows, pool: MemoryPool, layer: Int[Array, ""]
    ) -> tuple[Float32[Array, "T V Dv"], MemoryPool]:
        """Compute the tokens of a step in one layer; return the outputs of the heads, and the pool."""
        mixed = inputs.mixed.astype(jnp.float32)
        mixed, window = convolve(mixed, inputs.taps, inputs.conv_bias, rows, pool.window, layer)
        x, b, c = jnp.split(mixed, [self.inner_size, self.inner_size + self.group_size], axis=1)
        T = mixed.shape[0]
        x = x.reshape(T, self.num_heads, self.head_dim)
        b, c = (y.reshape(T, self.num_groups, self.state_dim) for y in (b, c))
        heads = Heads(c, b, x * inputs.time_step[:, :, None], inputs.log_decay)
        out, memory = advance(heads, rows, pool.memory, layer)
        return out + x * inputs.skip[None, :, None], MemoryPool(memory, window)
