"""Pixtral's encoder, and Mistral 3's projector, which merges blocks of patches."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from jaxserve.errors import ConfigError
from jaxserve.layers.linear import linear
from jaxserve.layers.norm import rms_norm
from jaxserve.models.hf_config import POSITIVE, SIZE, SWITCH, TABLE, HfConfig, one_of, read_fields
from jaxserve.models.layer_tensors import Rows
from jaxserve.models.params import Params, ParamSpec
from jaxserve.models.vision import encoder, llava
from jaxserve.models.vision.arch import VisionArch
from jaxserve.models.vision.encoder import Encoder, Projector, rope_table, unfolded
from jaxserve.models.vision.inputs import EncoderInputs, Packed, Taps, TowerImage, blocks

_GATED = {"gelu": "exact_geglu", "gelu_pytorch_tanh": "geglu", "silu": "swiglu"}
_SIZES = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_channels", "patch_size")
_FIELDS = {
    **dict.fromkeys(_SIZES, SIZE),
    "hidden_act": one_of(_GATED),
    "rope_parameters": TABLE.or_null(),
    "rope_theta": POSITIVE,
}
_DEFAULTS = {
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "num_channels": 3,
    "patch_size": 16,
    "hidden_act": "gelu",
    "rope_theta": 1e4,
}
_NORM_EPS = 1e-5
_TEXT_EPS = {"mistral": 1e-6, "ministral3": 1e-5}  # decoders' defaults, which the projector's norm shares


def _parse(config: HfConfig) -> dict[str, Any]:
    """Return VisionArch fields for a `vision_config`."""
    values = read_fields({**_DEFAULTS, **config}, _FIELDS)
    side = values["patch_size"]
    return {
        **encoder.read_layers(values, "num_hidden_layers", "num_attention_heads", has_axes=True),
        "ffn_size": values["intermediate_size"],
        "patch_shape": (values["num_channels"], side, side),
        "activation": _GATED[values["hidden_act"]],
        "norm_eps": _NORM_EPS,
        "rope_theta": encoder.read_axial_theta(values["rope_parameters"], values["rope_theta"]),
    }


def _specs(arch: VisionArch) -> list[ParamSpec]:
    """Return the encoder's ParamSpecs."""
    D, axes = arch.hidden_size, (None,) * (1 + len(arch.patch_shape))
    rows = Rows(("vision",), "model.vision_tower.")
    kernel = rows.tensor("patch_kernel", axes, ["patch_conv.weight"], [D], *arch.patch_shape)
    unread = (spec for index in range(arch.num_layers, arch.num_stored_layers) for spec in _layer_specs(arch, index))
    kernel = encoder.with_unread(kernel, unread)
    layers = [spec for index in range(arch.num_layers) for spec in _layer_specs(arch, index)]
    return [kernel, *rows.norm("embed_norm", "ln_pre", D), *layers]


def _layer_specs(arch: VisionArch, index: int) -> list[ParamSpec]:
    """Return one layer's ParamSpecs."""
    D, F, heads, ffn = arch.hidden_size, arch.ffn_size, arch.axis("heads"), arch.axis("ffn")
    rows = Rows(("vision", "layers", index), f"model.vision_tower.transformer.layers.{index}.")
    qkv, gate_up = ([f"attention.{part}_proj" for part in "qkv"], ["feed_forward.gate_proj", "feed_forward.up_proj"])
    is_swiglu = arch.activation == "swiglu"
    return [
        *rows.norm("input_norm", "attention_norm", D),
        rows.matrix("qkv_proj", (heads, None), qkv, [D] * 3, D, heads=(arch.num_heads,) * 3, exact=True),
        rows.matrix("o_proj", (None, heads), ["attention.o_proj"], [D], D, exact=True),
        *rows.norm("mlp_norm", "ffn_norm", D),
        rows.matrix("gate_up_proj", (ffn, None), gate_up, [F, F], D, gated=is_swiglu, exact=True),
        rows.matrix("down_proj", (None, ffn), ["feed_forward.down_proj"], [D], F, exact=True),
    ]


def _embed(p: Params, arch: VisionArch, inputs: EncoderInputs) -> Float[Array, "P D"]:
    """Return the first layer's inputs."""
    x = linear(jnp.asarray(inputs.patches, p["patch_kernel"].dtype), unfolded(p["patch_kernel"]))
    return rms_norm(x, p["embed_norm"], arch.norm_eps)


def raster_operands(_: VisionArch, images: Sequence[TowerImage], num_patches: int) -> dict[str, Any]:
    """Return spans and positions of patches in raster order."""
    packed, positions = Packed.join(images), np.zeros((num_patches, 2), np.int32)
    for start, end, image in packed.images():
        positions[start:end] = np.moveaxis(np.indices(image.grid, dtype=np.int32), 0, -1).reshape(-1, 2)
    return {"spans": packed.spans(num_patches), "positions": positions}


def _rope(arch: VisionArch, inputs: EncoderInputs) -> Float[Array, "2 P half"]:
    """Return all layers' cosines and sines: rows have the even frequencies, columns the odd ones."""
    assert arch.rope_theta is not None, "the tower has RoPE"
    exponent = np.arange(0, arch.head_dim, 2, dtype=np.float32) / np.float32(arch.head_dim)
    frequencies = np.reciprocal(np.power(arch.rope_theta, exponent.astype(np.float64))).astype(np.float32)
    return rope_table(jnp.asarray(inputs.positions), np.stack([frequencies[0::2], frequencies[1::2]]))


PIXTRAL = Encoder(_parse, _specs, _embed, rms_norm, encoder.layer, operands=raster_operands, rope=_rope)


def _parse_projector(config: HfConfig, fields: dict[str, Any]) -> dict[str, Any]:
    """Return VisionArch fields for Mistral 3's projector."""
    defaults = {"vision_feature_layer": -1, "multimodal_projector_bias": False, "spatial_merge_size": 2}
    own = {"multimodal_projector_bias": SWITCH, "spatial_merge_size": SIZE}
    values = read_fields({**defaults, **config}, own)
    # Mistral 3 has no strategy by which class tokens are selected, as its encoder has none.
    config = {**defaults, **config, "vision_feature_select_strategy": "full"}
    shared = llava.LLAVA.parse(config, fields)
    if len(shared["feature_layers"]) > 1:
        raise ConfigError(f"vision_feature_layer must be one layer, got {config['vision_feature_layer']}")
    text = config["text_config"]
    eps = {"rms_norm_eps": _TEXT_EPS.get(text.get("model_type"), 1e-6), **text}
    return {
        **shared,
        "merge_size": values["spatial_merge_size"],
        "projector_eps": read_fields(eps, {"rms_norm_eps": POSITIVE})["rms_norm_eps"],
    }


def _projector_specs(arch: VisionArch) -> list[ParamSpec]:
    """Return the projector's ParamSpecs."""
    rows, D = Rows(("vision", "projector"), "model.multi_modal_projector."), arch.hidden_size
    inner = D * arch.merge_size**2
    return [
        *rows.norm("norm", "norm", D),
        rows.matrix("merger", (None, None), ["patch_merger.merging_layer"], [D], inner, exact=True),
        *llava.mlp_specs(arch),
    ]


def merged_blocks(arch: VisionArch, images: Sequence[TowerImage], num_patches: int) -> dict[str, Any]:
    """Return the patches that each embedding merges."""
    return {"outputs": Taps(blocks(images, arch.merge_size, arch.max_embeddings(num_patches)))}


def _project(
    p: Params, arch: VisionArch, states: Sequence[Float[Array, "P D"]], inputs: EncoderInputs
) -> Float[Array, "E out"]:
    """Return an embedding per block of patches."""
    assert inputs.outputs is not None, "blocks are packed"
    p = p["projector"]
    x = rms_norm(states[0], p["norm"], arch.projector_eps)[inputs.outputs.index]
    x = jnp.swapaxes(x, 1, 2).reshape(len(x), -1)  # the matrix has each channel's patches together
    return llava.mlp(p, arch, linear(x, p["merger"]))


MISTRAL3 = Projector(_parse_projector, _projector_specs, _project, merged_blocks)
