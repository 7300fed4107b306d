"""Rotary position embeddings, and the ways in which checkpoints stretch them to long contexts."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int
from numpy.typing import NDArray

from jaxserve.errors import ConfigError

_Options = Mapping[str, Any]  # numbers, and number lists for LongRoPE


@dataclass(frozen=True)
class RopeConfig:
    """A checkpoint's rotary embeddings, in the terms that Hugging Face's `rope_parameters` uses.

    Attributes:
        theta: base for the wavelengths.
        kind: scaling method: default (none), linear, llama3, longrope, proportional or yarn.
        options: the method's parameters, sorted: numbers or number tuples; `models.hf_config.read_rope` ensures that
            none is missing.
        fraction: fraction of each head that is rotated, its first dimensions.
        interleaved: True for interleaved RoPE (dimensions 2i and 2i + 1 form a pair); False if i and i + R / 2 do, with
            R rotated dimensions.
        query_growth: numbers a and n: a query at position t is multiplied by 1 + a * log(1 + floor(t / n)), as in
            Llama 4; None for no factor.
        axes: for each rotated pair, the axis of the position by which it is rotated, if tokens have several (M-RoPE);
            None if positions are single numbers.
    """

    theta: float = 10000.0
    kind: str = "default"
    options: tuple[tuple[str, Any], ...] = ()
    fraction: float = 1.0
    interleaved: bool = False
    query_growth: tuple[float, float] | None = None
    axes: tuple[int, ...] | None = None

    def rotated(self, head_dim: int) -> int:
        """Return the number of rotated dimensions per head."""
        return int(head_dim * self.fraction)

    def check(self, head_dim: int) -> None:
        """Raise a ConfigError if this rotation does not suit heads with `head_dim` elements."""
        if head_dim % 2:
            raise ConfigError(f"head_dim must be even for rotary embeddings, got {head_dim}")
        num_rotated = self.rotated(head_dim)
        if num_rotated < 2 or num_rotated % 2:
            raise ConfigError(
                f"partial_rotary_factor must rotate an even number of dimensions, got {self.fraction} of head_dim "
                f"{head_dim}"
            )
        factors = {k: v for k, v in self.options if isinstance(v, tuple)}
        if wrong := {name: len(values) for name, values in factors.items() if len(values) != num_rotated // 2}:
            raise ConfigError(f"{', '.join(wrong)} must have {num_rotated // 2} numbers, got {wrong}")

    def frequencies(self, head_dim: int) -> tuple[NDArray[np.float32], float]:
        """Return one inverse frequency per rotated pair, scaled for long contexts, and the factor on cos and sin."""
        dim = self.rotated(head_dim)
        base = np.reciprocal(_periods(self.theta, dim))
        return _SCALINGS[self.kind](base, dict(self.options), self.theta, dim)

    def within(self, max_len: int) -> "RopeConfig":
        """Return the config for sequences up to `max_len` tokens; LongRoPE chooses its factors by this length.

        The choice holds for all positions: keys in the pool are rotated once, and must suit every later query.
        """
        options = dict(self.options)
        if self.kind != "longrope" or max_len > options["original_max_position_embeddings"]:
            return self
        options["long_factor"] = options["short_factor"]
        return replace(self, options=tuple(sorted(options.items())))


def _periods(theta: float, dim: int) -> NDArray[np.float32]:
    """Return `theta ** (i / dim)` for even i below `dim`, one wavelength factor per pair.

    Powers are rounded once: one ulp in a frequency is a visible angle at a far position.
    """
    exponent = np.arange(0, dim, 2, dtype=np.float32) / np.float32(dim)
    return np.power(np.float32(theta), exponent, dtype=np.float64).astype(np.float32)


_Scaling = tuple[NDArray[np.float32], float]


def _default(freq: NDArray[np.float32], _options: _Options, _theta: float, _dim: int) -> _Scaling:
    """Return the frequencies unchanged."""
    return freq, 1.0


def _linear(freq: NDArray[np.float32], options: _Options, _theta: float, _dim: int) -> _Scaling:
    """Divide all frequencies by the factor in `options`: positions are interpolated (Chen et al. 2023)."""
    return freq / np.float32(options["factor"]), 1.0


def _llama3(freq: NDArray[np.float32], options: _Options, _theta: float, _dim: int) -> _Scaling:
    """Divide low frequencies by the factor, keep high ones and blend the frequencies between, as Llama 3.1 does."""
    factor, low, high = options["factor"], options["low_freq_factor"], options["high_freq_factor"]
    turns = options["original_max_position_embeddings"] / (2 * math.pi / freq)
    keep = np.clip((turns - low) / (high - low), 0.0, 1.0)
    return ((1 - keep) * freq / factor + keep * freq).astype(np.float32), 1.0


def _longrope(_freq: NDArray[np.float32], options: _Options, theta: float, dim: int) -> _Scaling:
    """Return frequencies each divided by its own factor, and the factor on cos and sin (Ding et al. 2024)."""
    factor, trained = options["factor"], options["original_max_position_embeddings"]
    default = math.sqrt(1 + math.log(factor) / math.log(trained)) if factor > 1 else 1.0
    scaled = 1 / (np.array(options["long_factor"]) * _periods(theta, dim))
    return scaled.astype(np.float32), options.get("attention_factor", default)


def _yarn(freq: NDArray[np.float32], options: _Options, theta: float, dim: int) -> _Scaling:
    """Return frequencies scaled by YaRN, and the factor on cos and sin (Peng et al. 2023, sections 3.2 to 3.4)."""
    factor, trained = options["factor"], options["original_max_position_embeddings"]

    def dim_of(turns: float) -> float:
        """Return the dimension whose wave turns `turns` times over the trained length."""
        return dim * math.log(trained / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low, high = dim_of(options.get("beta_fast") or 32.0), dim_of(options.get("beta_slow") or 1.0)
    if options.get("truncate", 1.0):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    ramp = np.clip((np.arange(dim // 2, dtype=np.float32) - low) / max(high - low, 1e-3), 0, 1)

    def magnitude(scale: float) -> float:
        """Return YaRN's factor on cosines and sines, for an mscale."""
        return 0.1 * scale * math.log(factor) + 1.0 if factor > 1 else 1.0

    if options.get("mscale") and options.get("mscale_all_dim"):
        default = magnitude(options["mscale"]) / magnitude(options["mscale_all_dim"])
    else:
        default = magnitude(1.0)
    scaled = 1 / (factor * _periods(theta, dim)) * ramp + freq * (1 - ramp)
    return scaled.astype(np.float32), options.get("attention_factor", default)


def _proportional(freq: NDArray[np.float32], options: _Options, _theta: float, dim: int) -> _Scaling:
    """Rotate only the first pairs: return their frequencies as if all pairs were rotated, and 0 for the others."""
    num_rotated = int(options.get("partial_rotary_factor", 1.0) * dim // 2)
    rotated = np.where(np.arange(dim // 2) < num_rotated, freq, 0) / np.float32(options.get("factor", 1.0))
    return rotated.astype(np.float32), 1.0


_SCALINGS: dict[str, Callable[[NDArray[np.float32], _Options, float, int], _Scaling]] = {
    "default": _default,
    "linear": _linear,
    "llama3": _llama3,
    "longrope": _longrope,
    "proportional": _proportional,
    "yarn": _yarn,
}


Positions = Int[Array, " T"] | Int[Array, "T axes"]  # one number per token, or one for each axis


def rope_table(positions: Positions, config: RopeConfig, head_dim: int) -> Float[Array, "2 T half"]:
    """Return cosines and sines in float32, for every token and each pair in `pair_halves` order."""
    freq, factor = config.frequencies(head_dim)
    turned = positions.astype(jnp.float32)
    by_pair = turned[:, None] if turned.ndim == 1 else turned[:, np.array(config.axes)]
    angles = by_pair * jnp.asarray(freq)[None, :]
    table = jnp.stack([jnp.cos(angles), jnp.sin(angles)]) * factor
    unrotated = head_dim // 2 - len(freq)
    if unrotated == 0:
        return table
    identity = jnp.broadcast_to(jnp.array([1.0, 0.0])[:, None, None], (2, len(positions), unrotated))
    return jnp.concatenate([table, identity], axis=2)


class Rotation(NamedTuple):
    """Rotation for a layer's queries and keys.

    Attributes:
        table: cosines and sines, see `rope_table`.
        query_factor: factor on each token's queries; None for no factor.
    """

    table: Float[Array, "2 T half"]
    query_factor: Float[Array, " T"] | None = None


def rotation(positions: Positions, config: RopeConfig | None, head_dim: int) -> Rotation | None:
    """Return the rotation of T tokens in layers with this config; None without a config.

    Positions have several axes only if the config has `axes`.
    """
    if config is None:
        return None
    table = rope_table(positions, config, head_dim)
    if config.query_growth is None:
        return Rotation(table)
    growth, num_positions = config.query_growth
    turns = jnp.floor(positions.astype(jnp.float32) / num_positions)
    return Rotation(table, 1 + growth * jnp.log1p(turns))


def pair_halves(x: Float[Array, "T heads H"], config: RopeConfig | None) -> Float[Array, "T heads H"]:
    """Reorder head dimensions so that attention rotates dimension i with i + H / 2.

    Rotated pairs come first in both halves. Scores stay the same, as queries and keys have the same order.

    Args:
        x: queries or keys, after norms over heads.
        config: rotation of any layer that has one; None if no layer has.
    """
    head_dim = x.shape[2]
    num_rotated = head_dim if config is None else config.rotated(head_dim)
    if config is None or (num_rotated == head_dim and not config.interleaved):
        return x
    rotated, rest = jnp.split(x, [num_rotated], axis=2)
    halves = (rotated[:, :, 0::2], rotated[:, :, 1::2]) if config.interleaved else jnp.split(rotated, 2, axis=2)
    both = zip(halves, jnp.split(rest, 2, axis=2), strict=True)
    return jnp.concatenate([part for half in both for part in half], axis=2)
