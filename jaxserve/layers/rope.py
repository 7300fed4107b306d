"""Rotary position embeddings, and the ways in which checkpoints stretch them to long contexts."""

import math
from collections.abc import Callable
from dataclasses import dataclass

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int
from numpy.typing import NDArray


@dataclass(frozen=True)
class RopeConfig:
    """Rotary embeddings of a checkpoint, in the terms of Hugging Face's `rope_parameters`.

    Attributes:
        theta: base of the wavelengths.
        kind: method that stretches positions: default (none), linear, llama3 or yarn.
        options: sorted parameters of that method; `models.hf_config.read_rope` ensures that none is missing.
    """

    theta: float = 10000.0
    kind: str = "default"
    options: tuple[tuple[str, float], ...] = ()

    def frequencies(self, head_dim: int) -> tuple[NDArray[np.float32], float]:
        """Return inverse frequencies [head_dim / 2] and the factor on cos and sin."""
        base = np.reciprocal(_periods(self.theta, head_dim))
        return _SCALINGS[self.kind](base, dict(self.options), self.theta, head_dim)


def _periods(theta: float, dim: int) -> NDArray[np.float32]:
    """Return powers of theta, rounded once: an ulp of frequency is a visible angle at a far position."""
    exponent = np.arange(0, dim, 2, dtype=np.float32) / np.float32(dim)
    return np.power(np.float32(theta), exponent, dtype=np.float64).astype(np.float32)


_Scaling = tuple[NDArray[np.float32], float]


def _default(freq: NDArray[np.float32], _options: dict[str, float], _theta: float, _dim: int) -> _Scaling:
    return freq, 1.0


def _linear(freq: NDArray[np.float32], options: dict[str, float], _theta: float, _dim: int) -> _Scaling:
    """Interpolate positions (Chen et al. 2023)."""
    return freq / np.float32(options["factor"]), 1.0


def _llama3(freq: NDArray[np.float32], options: dict[str, float], _theta: float, _dim: int) -> _Scaling:
    """Stretch long waves, keep short ones and blend those between, as Llama 3.1 does."""
    factor, low, high = options["factor"], options["low_freq_factor"], options["high_freq_factor"]
    turns = options["original_max_position_embeddings"] / (2 * math.pi / freq)
    keep = np.clip((turns - low) / (high - low), 0.0, 1.0)
    return ((1 - keep) * freq / factor + keep * freq).astype(np.float32), 1.0


def _yarn(freq: NDArray[np.float32], options: dict[str, float], theta: float, dim: int) -> _Scaling:
    """Scale frequencies by YaRN (Peng et al. 2023), sections 3.2 to 3.4."""
    factor, trained = options["factor"], options["original_max_position_embeddings"]

    def dim_of(turns: float) -> float:
        return dim * math.log(trained / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low, high = dim_of(options.get("beta_fast") or 32.0), dim_of(options.get("beta_slow") or 1.0)
    if options.get("truncate", 1.0):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    ramp = np.clip((np.arange(dim // 2, dtype=np.float32) - low) / max(high - low, 1e-3), 0, 1)

    def magnitude(scale: float) -> float:
        return 0.1 * scale * math.log(factor) + 1.0 if factor > 1 else 1.0

    if options.get("mscale") and options.get("mscale_all_dim"):
        default = magnitude(options["mscale"]) / magnitude(options["mscale_all_dim"])
    else:
        default = magnitude(1.0)
    scaled = 1 / (factor * _periods(theta, dim)) * ramp + freq * (1 - ramp)
    return scaled.astype(np.float32), options.get("attention_factor", default)


_SCALINGS: dict[str, Callable[[NDArray[np.float32], dict[str, float], float, int], _Scaling]] = {
    "default": _default,
    "linear": _linear,
    "llama3": _llama3,
    "yarn": _yarn,
}


def rope_table(positions: Int[Array, " T"], config: RopeConfig, head_dim: int) -> Float[Array, "2 T half"]:
    """Return cosines and sines of every token's angles, in float32."""
    freq, factor = config.frequencies(head_dim)
    angles = positions.astype(jnp.float32)[:, None] * jnp.asarray(freq)[None, :]
    return jnp.stack([jnp.cos(angles), jnp.sin(angles)]) * factor
