"""Encoder and Projector: a vision tower's functions, as values; encoder layers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int
from numpy.typing import NDArray

from jaxserve.errors import ConfigError
from jaxserve.layers.linear import linear
from jaxserve.layers.mlp import activation_function, is_gated
from jaxserve.layers.norm import Norm, NormFunction
from jaxserve.models.hf_config import POSITIVE, HfConfig, one_of, read_fields
from jaxserve.models.params import Params, ParamSpec, ScannedLayers
from jaxserve.models.vision.arch import VisionArch
from jaxserve.models.vision.inputs import EncoderInputs, Grid, TowerImage
from jaxserve.pallas_kernels.span_attention import SpanInputs, attend


def read_layers(values: HfConfig, layers: str, heads: str, *, has_axes: bool = False) -> dict[str, Any]:
    """Return the VisionArch fields that all families read alike: numbers and sizes of layers and heads.

    Args:
        values: fields of a `vision_config`.
        layers: field with the layer count.
        heads: field with the head count.
        has_axes: True if 2-D RoPE halves each head's two halves.

    Raises:
        ConfigError: the heads do not divide the hidden states.
    """
    hidden, num_heads = values["hidden_size"], values[heads]
    if hidden % num_heads:
        raise ConfigError(f"vision_config: {heads} must divide hidden_size, got {num_heads} and {hidden}")
    if has_axes and hidden // num_heads % 4:
        raise ConfigError(
            f"vision_config: hidden_size must be a multiple of 4 x {heads} for 2-D RoPE, got {hidden} and {num_heads}"
        )
    return {
        "hidden_size": hidden,
        "num_layers": values[layers],
        "num_stored_layers": values[layers],
        "num_heads": num_heads,
        "head_dim": hidden // num_heads,
    }


def read_axial_theta(given: HfConfig | None, default: int | float) -> float:
    """Return the base of 2-D RoPE in a `vision_config`'s `rope_parameters`."""
    rope = {"rope_type": "axial", "rope_theta": default, **(given or {})}
    rope = read_fields(rope, {"rope_type": one_of(("axial", "default")), "rope_theta": POSITIVE})
    return float(rope["rope_theta"])


@dataclass(frozen=True)
class Encoder:
    """The functions with which a vision tower computes hidden states.

    Attributes:
        parse: function from `vision_config` to VisionArch fields; raises ConfigError for unsupported settings.
        specs: function that returns one ParamSpec per tensor.
        operands: function from VisionArch, images and bucket to EncoderInputs fields.
        embed: function from parameters, VisionArch and EncoderInputs to the first layer's inputs [T, D].
        norm: norm function for all layers.
        order: function from VisionArch and an image's grid to the index of each patch, in the encoder's order; None for
            the processor's order.
        layer: one layer: parameters, hidden states [T, D], rope [2, T, half] or None, spans [2, T], `arch` and `norm`.
        rope: function from VisionArch and EncoderInputs to all layers' rope.
    """

    parse: Callable[[HfConfig], dict[str, Any]]
    specs: Callable[[VisionArch], list[ParamSpec]]
    embed: Callable[[Params, VisionArch, EncoderInputs], Float[Array, "T D"]]
    norm: NormFunction
    layer: Callable[..., Float[Array, "T D"]]
    operands: Callable[[VisionArch, Sequence[TowerImage], int], dict[str, Any]] = lambda *_: {}
    rope: Callable[[VisionArch, EncoderInputs], Float[Array, "2 T half"] | None] = lambda *_: None
    order: Callable[[VisionArch, Grid], NDArray[np.int32] | None] = lambda *_: None


@dataclass(frozen=True)
class Projector:
    """The functions with which a vision tower makes embeddings from hidden states.

    Attributes:
        parse: function from a config.json, and the encoder's VisionArch fields, to the other fields; raises ConfigError
            for unsupported settings.
        specs: function that returns one ParamSpec per tensor.
        project: function from parameters, VisionArch, hidden states [T, D] by `VisionArch.feature_layers` and
            EncoderInputs to embeddings [E, out].
        operands: see `Encoder.operands`.
    """

    parse: Callable[[HfConfig, dict[str, Any]], dict[str, Any]]
    specs: Callable[[VisionArch], list[ParamSpec]]
    project: Callable[[Params, VisionArch, Sequence[Array], EncoderInputs], Float[Array, "E out"]]
    operands: Callable[[VisionArch, Sequence[TowerImage], int], dict[str, Any]] = lambda *_: {}


def axial_rope(positions: Int[Array, "P 2"], theta: float, head_dim: int) -> Float[Array, "2 P half"]:
    """Return cosines and sines for 2-D RoPE: the first half of the pairs turns with rows, the second with columns."""
    exponent = np.arange(0, head_dim // 2, 2, dtype=np.float32) / np.float32(head_dim // 2)
    frequencies = np.reciprocal(np.power(np.float32(theta), exponent, dtype=np.float64)).astype(np.float32)
    return rope_table(positions, np.stack([frequencies, frequencies]))


def rope_table(positions: Int[Array, "P 2"], frequencies: Float[Any, "2 pairs"]) -> Float[Array, "2 P half"]:
    """Return cosines and sines for 2-D RoPE, given frequencies for rows and for columns."""
    angles = positions.astype(jnp.float32)[:, :, None] * jnp.asarray(frequencies)[None]
    angles = angles.reshape(len(positions), -1)
    return jnp.stack([jnp.cos(angles), jnp.sin(angles)])


def with_unread(spec: ParamSpec, uncomputed: Iterable[ParamSpec]) -> ParamSpec:
    """Return a spec that lists other tensors as unread, as checkpoints may have them."""
    return replace(spec, unread=tuple(name for each in uncomputed for name in each.hf_names))


def unfolded(kernel: Float[Array, "D *S"]) -> Float[Array, "D S"]:
    """Return a convolution kernel as the matrix that multiplies unfolded patches."""
    return kernel.reshape(len(kernel), -1)


def layer(
    p: Params,
    x: Float[Array, "T D"],
    rope: Float[Array, "2 T half"] | None,
    spans: Int[Array, "2 T"],
    *,
    arch: VisionArch,
    norm: NormFunction,
) -> Float[Array, "T D"]:
    """Apply one pre-norm encoder layer.

    Args:
        p: the layer's parameters.
        x: residual stream.
        rope: cosines and sines that rotate queries and keys; None without RoPE.
        spans: tokens to which each token attends, see `SpanInputs`.
        arch: sizes on this device.
        norm: norm function.
    """
    before_attention, before_mlp = (Norm(p[name], arch.norm_eps, norm) for name in ("input_norm", "mlp_norm"))
    with jax.named_scope("attention"):
        qkv = linear(x, p["qkv_proj"], norm=before_attention, bias=p.get("qkv_bias"))
        q, k, v = (part.reshape(len(x), arch.num_heads, arch.head_dim) for part in jnp.split(qkv, 3, axis=1))
        out = attend(SpanInputs(q, k, v, spans, rope), arch.head_dim**-0.5).reshape(len(x), -1)
        x = linear(out, p["o_proj"], bias=p.get("o_bias"), residual=x, axis=arch.tensor_axis)
    with jax.named_scope("mlp"):
        up, activation = "gate_up" if is_gated(arch.activation) else "up", activation_function(arch.activation)
        inner = linear(x, p[f"{up}_proj"], norm=before_mlp, bias=p.get(f"{up}_bias"), activation=activation)
        return linear(inner, p["down_proj"], bias=p.get("down_bias"), residual=x, axis=arch.tensor_axis)


class TowerState(NamedTuple):
    """Hidden states between two layers, and what all layers read.

    Attributes:
        x: hidden states.
        kept: hidden states in `arch.feature_layers` before the last layer's.
        rope: see `layer`.
        spans: images' spans, then windows' spans.
    """

    x: Float[Array, "T D"]
    kept: Float[Array, "K T D"]
    rope: Float[Array, "2 T half"] | None
    spans: Int[Array, "2 2 T"]


def kept_features(arch: VisionArch) -> list[int]:
    """Return the indices of hidden states that `TowerState.kept` holds."""
    return sorted({*arch.feature_layers} - {arch.num_layers})


def run_layer(
    encoder: Encoder,
    p: Params,
    arch: VisionArch,
    state: TowerState,
    is_windowed: Int[Array, ""],
    kept_as: Int[Array, ""],
) -> TowerState:
    """Return the state after a layer.

    Args:
        encoder: the tower's encoder.
        p: the layer's parameters.
        arch: sizes on this device.
        state: state before it.
        is_windowed: 1 if it attends to windows, otherwise 0.
        kept_as: index in `TowerState.kept` for its hidden states; out of range to keep none.
    """
    x = encoder.layer(p, state.x, state.rope, state.spans[is_windowed], arch=arch, norm=encoder.norm)
    kept = state.kept.at[kept_as].set(x, mode="drop") if len(state.kept) else state.kept
    return state._replace(x=x, kept=kept)


def hidden_states(
    encoder: Encoder,
    layers: Sequence[Params] | ScannedLayers,
    arch: VisionArch,
    x: Float[Array, "T D"],
    rope: Float[Array, "2 T half"] | None,
    spans: tuple[Int[Array, "2 T"], Int[Array, "2 T"]],
) -> list[Float[Array, "T D"]]:
    """Return the hidden states in `arch.feature_layers`.

    Args:
        encoder: the tower's encoder.
        layers: the layers' parameters, perhaps stacked by period.
        arch: sizes on this device.
        x: hidden states before the first layer.
        rope: see `layer`.
        spans: images' spans and windows' spans.
    """
    run = partial(encoder.layer, arch=arch, norm=encoder.norm)
    layer_spans = [spans[is_windowed] for is_windowed in arch.is_windowed]
    found: list[Float[Array, "T D"]] = []
    if not isinstance(layers, ScannedLayers):
        inner, states = jax.jit(run), [x]
        for p, own in zip(layers, layer_spans, strict=True):
            states.append(inner(p, states[-1], rope, own))
        return [states[number] for number in arch.feature_layers]
    period = len(layers.periodic)
    wanted = {number: index for index, number in enumerate(arch.feature_layers)}
    features = jnp.zeros((len(wanted), *x.shape), x.dtype)
    end = arch.num_layers - len(layers.rest)
    # Other layers get an index out of range, so that their updates are dropped.
    kept_as = jnp.array([wanted.get(number, len(wanted)) for number in range(1, end + 1)]).reshape(-1, period)
    features = features if 0 not in wanted else features.at[wanted[0]].set(x)

    def run_period(
        state: tuple[Array, Array], xs: tuple[tuple[Params, ...], Array]
    ) -> tuple[tuple[Array, Array], None]:
        x, features = state
        for kind, p in enumerate(xs[0]):
            x = run(p, x, rope, layer_spans[kind])
            features = features.at[xs[1][kind]].set(x, mode="drop")
        return (x, features), None

    (x, features), _ = lax.scan(run_period, (x, features), (layers.periodic, kept_as))
    for number, p in enumerate(layers.rest, end):
        x = run(p, x, rope, layer_spans[number])
        features = features if number + 1 not in wanted else features.at[wanted[number + 1]].set(x)
    found.extend(features)
    return found
