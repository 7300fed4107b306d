"""Smoothing: factors per channel that move from a matrix's inputs to the norm or matrix that computes them.

The model computes the same function, but its weights (AWQ) or activations (SmoothQuant) lose less by rounding.
"""

from collections.abc import Mapping
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from jaxserve.models.family import Fold
from jaxserve.models.params import Params, ParamSpec
from jaxserve.tools.quantizer.grid import Grid
from jaxserve.tools.quantizer.rounding import output_error

_STRENGTHS = tuple(step / 20 for step in range(20))  # exponents that AWQ tries
_SMALLEST, _LARGEST = 1e-4, 1e4  # bounds for factors


class InputStats(NamedTuple):
    """Sums over a matrix's calibration inputs.

    Attributes:
        gram: sum of products for each pair of channels.
        magnitude: sum of magnitudes per channel.
        peak: largest magnitude per channel.
    """

    gram: Float[Array, "in in"]
    magnitude: Float[Array, " in"]
    peak: Float[Array, " in"]

    @classmethod
    def empty(cls, size: int) -> "InputStats":
        """Return the sums over no inputs, for a matrix with `size` input channels."""
        return cls(jnp.zeros((size, size)), jnp.zeros(size), jnp.zeros(size))

    def add(self, x: Float[Array, "T in"]) -> "InputStats":
        """Return the sums with the inputs `x` of T tokens added."""
        x = x.astype(jnp.float32)
        gram = self.gram + jnp.matmul(x.T, x, precision=lax.Precision.HIGHEST)
        size = jnp.abs(x)
        return InputStats(gram, self.magnitude + size.sum(0), jnp.maximum(self.peak, size.max(0)))

    def divided(self, factor: Float[Array, " in"]) -> "InputStats":
        """Return the sums that inputs would have if each channel were divided by its factor."""
        gram = self.gram / factor[:, None] / factor[None, :]
        return InputStats(gram, self.magnitude / jnp.abs(factor), self.peak / jnp.abs(factor))


class Channels(NamedTuple):
    """Channels with a factor each. A key-value head's channels are inputs of all query heads in its group.

    Attributes:
        heads: number of heads with separate channels; 1 for channels without heads.
        group: number of inputs that share a factor.
        size: number of channels per head.
    """

    heads: int
    group: int
    size: int

    @classmethod
    def from_fold(cls, fold: Fold, specs: Mapping[str, ParamSpec]) -> "Channels":
        """Return the channels between a fold's source and target; `specs` are the layer's matrices by name."""
        num_inputs = specs[fold.target].shape[1]
        if fold.part is None:
            return cls(1, 1, num_inputs)
        source = specs[fold.source]
        num_channels, heads = source.hf_rows[fold.part], source.heads[fold.part] if source.heads else 1
        return cls(heads, num_inputs // num_channels, num_channels // heads)

    def split(self, inputs: Float[Array, " in"]) -> Float[Array, "heads group size"]:
        """Arrange a value per input as [heads, group, size], so that inputs with one factor differ in `group` only."""
        return inputs.reshape(self.heads, self.group, self.size)

    def inputs(self, channels: Float[Array, " channels"]) -> Float[Array, " in"]:
        """Return a value per input from a value per channel."""
        shape = (self.heads, self.group, self.size)
        return jnp.broadcast_to(channels.reshape(self.heads, 1, self.size), shape).reshape(-1)


@partial(jax.jit, static_argnames=("channels", "grid"))
def search_factors(
    weight: Float[Array, "out in"], stats: InputStats, channels: Channels, grid: Grid
) -> Float[Array, " channels"]:
    """Return the factor per channel with which rounding a matrix changes its outputs least (AWQ, Lin et al. 2023).

    Factors are powers of a channel's mean input magnitude, scaled to a geometric mean of 1 between the extremes; the
    power 0 changes nothing.
    """
    magnitude = channels.split(stats.magnitude).mean(1).reshape(-1)
    magnitude = jnp.maximum(magnitude / jnp.maximum(magnitude.max(), 1e-30), _SMALLEST)

    def try_strength(best: tuple[Array, Array], strength: Array) -> tuple[tuple[Array, Array], None]:
        """Return the least error and its factors so far, with the factors of an exponent tried, too."""
        factor = magnitude**strength
        factor = jnp.clip(factor / jnp.sqrt(factor.max() * factor.min()), _SMALLEST, _LARGEST)
        inputs = channels.inputs(factor)[None, :]
        scaled = weight * inputs
        error = output_error(weight - grid.rounded(scaled, grid.scales(scaled)) / inputs, stats.gram)
        better = error < best[0]
        return (jnp.where(better, error, best[0]), jnp.where(better, factor, best[1])), None

    start = (jnp.float32(jnp.inf), jnp.ones_like(magnitude))
    (_, factor), _ = lax.scan(try_strength, start, jnp.asarray(_STRENGTHS))
    return factor


@partial(jax.jit, static_argnames=("channels", "strength"))
def balance_factors(
    weight: Float[Array, "out in"], stats: InputStats, channels: Channels, strength: float
) -> Float[Array, " channels"]:
    """Return the factor per channel that divides the difficulty between inputs and weights (SmoothQuant, Xiao 2022).

    A factor is (input peak) ** strength / (weight peak) ** (1 - strength).
    """
    peaks = (channels.split(x).max(1).reshape(-1) for x in (stats.peak, jnp.abs(weight).max(0)))
    inputs, weights = (jnp.maximum(peak, 1e-5) for peak in peaks)
    return jnp.clip(inputs**strength / weights ** (1 - strength), _SMALLEST, _LARGEST)


def fold_factors(
    p: Params,
    fold: Fold,
    specs: Mapping[str, ParamSpec],
    factors: Float[Array, " channels"],
    dtype: Any,
    norm_offset: float,
) -> tuple[Params, Float[Array, " in"]]:
    """Return the layer with its source divided by the factors and its target multiplied, and each input's factor.

    Norms and biases are rounded to `dtype`. A norm's factors follow from its rounded weights, so that rounding changes
    only its bias.

    Args:
        p: the layer's parameters.
        fold: source and target.
        specs: the layer's specs by name.
        factors: wanted factor for each channel.
        dtype: dtype in which norms and biases are stored.
        norm_offset: constant that norms add to their weights.
    """
    source = p[fold.source]
    if fold.part is None:
        weight = source["weight"] if isinstance(source, Mapping) else source
        new = _stored((weight + norm_offset) / factors - norm_offset, dtype)
        usable = (weight + norm_offset != 0) & (new + norm_offset != 0)
        new = jnp.where(usable, new, weight)
        factors = jnp.where(usable, (weight + norm_offset) / jnp.where(usable, new + norm_offset, 1), 1)
        if not isinstance(source, Mapping):
            p = {**p, fold.source: new}
        else:
            bias = _stored(source["bias"] / factors, dtype)
            p = {**p, fold.source: {**source, "weight": new, "bias": bias}}
    else:
        rows = specs[fold.source].hf_rows
        start = sum(rows[: fold.part])
        part = slice(start, start + rows[fold.part])
        p = {**p, fold.source: source.at[part].divide(factors[:, None])}
        if (name := fold.source.removesuffix("_proj") + "_bias") in p:
            p[name] = _stored(p[name].at[part].divide(factors), dtype)
    inputs = Channels.from_fold(fold, specs).inputs(factors)
    return {**p, fold.target: p[fold.target] * inputs[None, :]}, inputs


def _stored(array: Array, dtype: Any) -> Array:
    """Return an array rounded to `dtype`, in its own dtype."""
    return array.astype(dtype).astype(array.dtype)
