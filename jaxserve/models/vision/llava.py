"""LLaVA's projector: an MLP from an encoder's hidden states."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxserve.api import schema
from jaxserve.api.schema import FieldType
from jaxserve.errors import ConfigError
from jaxserve.layers.linear import linear
from jaxserve.layers.mlp import ACTIVATIONS, activation_function
from jaxserve.models.hf_config import SWITCH, HfConfig, one_of, read_fields
from jaxserve.models.layer_tensors import Rows
from jaxserve.models.params import Params, ParamSpec
from jaxserve.models.vision.arch import VisionArch
from jaxserve.models.vision.encoder import Projector
from jaxserve.models.vision.inputs import EncoderInputs

_INDEX = schema.integer()
FEATURE_LAYERS = FieldType(
    "an integer or a list of them",
    lambda value: all(map(_INDEX.holds, value)) and value != [] if isinstance(value, list) else _INDEX.holds(value),
)
_FIELDS = {
    "vision_feature_layer": FEATURE_LAYERS,
    "vision_feature_select_strategy": one_of(("default", "full")),
    "projector_hidden_act": one_of(ACTIVATIONS),
    "multimodal_projector_bias": SWITCH,
}
_DEFAULTS = {
    "vision_feature_layer": -2,
    "vision_feature_select_strategy": "default",
    "projector_hidden_act": "gelu",
    "multimodal_projector_bias": True,
}


def feature_layers(value: Any, num_layers: int) -> tuple[int, ...]:
    """Return `vision_feature_layer` as indices of hidden states; ConfigError if one is out of range."""
    layers = value if isinstance(value, list) else [value]
    if wrong := [layer for layer in layers if not -num_layers - 1 <= layer <= num_layers]:
        raise ConfigError(
            f"vision_feature_layer must be from {-num_layers - 1} to {num_layers}, as vision_config has {num_layers} "
            f"layers, got {wrong}"
        )
    return tuple(layer % (num_layers + 1) for layer in layers)


def _parse(config: HfConfig, encoder: dict[str, Any]) -> dict[str, Any]:
    """Return VisionArch fields for a LLaVA config.json."""
    values = read_fields({**_DEFAULTS, **config}, _FIELDS)
    layers = feature_layers(values["vision_feature_layer"], encoder["num_layers"])
    is_whole = values["vision_feature_select_strategy"] == "full"
    if not is_whole and not encoder.get("class_tokens"):
        raise ConfigError(
            "vision_feature_select_strategy must be full for an encoder without a class token, got default, which "
            "drops the first patch"
        )
    return {
        "feature_layers": layers,
        "num_layers": max(layers),
        "keeps_class": is_whole and bool(encoder.get("class_tokens")),
        "projector_activation": values["projector_hidden_act"],
        "projector_bias": values["multimodal_projector_bias"],
    }


def mlp_specs(arch: VisionArch) -> list[ParamSpec]:
    """Return the ParamSpecs for the projector's MLP."""
    out, size = arch.out_size, arch.hidden_size * len(arch.feature_layers)
    rows, axis = Rows(("vision", "projector"), "model.multi_modal_projector."), arch.out_axis
    specs = [
        rows.matrix("up_proj", (axis, None), ["linear_1"], [out], size, exact=True),
        rows.matrix("down_proj", (None, axis), ["linear_2"], [out], out, exact=True),
    ]
    if arch.projector_bias:
        specs.append(rows.vector("up_bias", axis, ["linear_1.bias"], [out], "zeros"))
        specs.append(rows.vector("down_bias", None, ["linear_2.bias"], [out], "zeros"))
    return specs


def mlp(p: Params, arch: VisionArch, x: Float[Array, "E D"]) -> Float[Array, "E out"]:
    """Apply the projector's MLP."""
    activation = activation_function(arch.projector_activation)
    inner = linear(x, p["up_proj"], bias=p.get("up_bias"), activation=activation)
    return linear(inner, p["down_proj"], bias=p.get("down_bias"), axis=arch.tensor_axis)


def select(arch: VisionArch, x: Float[Array, "T D"]) -> Float[Array, "E D"]:
    """Drop the class tokens, unless they have embeddings."""
    if not arch.class_tokens or arch.keeps_class:
        return x
    assert arch.grid is not None, "only encoders with a fixed grid have class tokens"
    images = x.reshape(-1, arch.grid[0] * arch.grid[1] + arch.class_tokens, x.shape[1])
    return images[:, arch.class_tokens :].reshape(-1, x.shape[1])


def _project(
    p: Params, arch: VisionArch, states: Sequence[Float[Array, "T D"]], _: EncoderInputs
) -> Float[Array, "E out"]:
    """Return one embedding per patch."""
    return mlp(p["projector"], arch, jnp.concatenate([select(arch, x) for x in states], axis=1))


LLAVA = Projector(_parse, mlp_specs, _project)
