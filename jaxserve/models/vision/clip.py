"""CLIP's and SigLIP's encoders: images with a fixed size, learned positions, perhaps a class token."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from jaxserve.errors import ConfigError
from jaxserve.layers.linear import linear
from jaxserve.layers.mlp import ACTIVATIONS
from jaxserve.layers.norm import layer_norm
from jaxserve.models.hf_config import POSITIVE, SIZE, HfConfig, one_of, read_fields
from jaxserve.models.layer_tensors import Rows
from jaxserve.models.params import POSITION_EMBED, Params, ParamSpec
from jaxserve.models.vision import encoder
from jaxserve.models.vision.arch import VisionArch
from jaxserve.models.vision.encoder import Encoder, unfolded, with_unread
from jaxserve.models.vision.inputs import EncoderInputs

_SIZES = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_channels")
_FIELDS = {
    **dict.fromkeys((*_SIZES, "image_size", "patch_size"), SIZE),
    "hidden_act": one_of(ACTIVATIONS),
    "layer_norm_eps": POSITIVE,
}
_DEFAULTS = {
    "hidden_size": 768,
    "intermediate_size": 3072,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "num_channels": 3,
    "image_size": 224,
}
_CLIP = {**_DEFAULTS, "patch_size": 32, "hidden_act": "quick_gelu", "layer_norm_eps": 1e-5}
_SIGLIP = {**_DEFAULTS, "patch_size": 16, "hidden_act": "gelu_pytorch_tanh", "layer_norm_eps": 1e-6}
_NORM = ("weight", "bias")


def _fields(config: HfConfig, class_tokens: int) -> dict[str, Any]:
    """Return VisionArch fields for a `vision_config` with defaults merged in."""
    values = read_fields(config, _FIELDS)
    side = values["patch_size"]
    if values["image_size"] < side:
        raise ConfigError(
            f"vision_config: image_size must be at least patch_size, got {values['image_size']} and {side}"
        )
    return {
        **encoder.read_layers(values, "num_hidden_layers", "num_attention_heads"),
        "ffn_size": values["intermediate_size"],
        "patch_shape": (values["num_channels"], side, side),
        "activation": values["hidden_act"],
        "norm_eps": values["layer_norm_eps"],
        "grid": (values["image_size"] // side,) * 2,
        "class_tokens": class_tokens,
    }


def _specs(arch: VisionArch) -> list[ParamSpec]:
    """Return the encoder's ParamSpecs."""
    D = arch.hidden_size
    assert arch.grid is not None, "images have one size"
    num_positions = arch.grid[0] * arch.grid[1] + arch.class_tokens
    rows = Rows(("vision",), "model.vision_tower.")
    kernel, positions = "embeddings.patch_embedding", ["embeddings.position_embedding.weight"]
    axes = (None,) * (1 + len(arch.patch_shape))
    specs = [
        rows.tensor("patch_kernel", axes, [f"{kernel}.weight"], [D], *arch.patch_shape),
        rows.tensor(POSITION_EMBED, (None, None), positions, [num_positions], D),
    ]
    if arch.class_tokens:
        specs.append(rows.vector("class_embed", None, ["embeddings.class_embedding"], [D], "normal"))
        specs += rows.norm("embed_norm", "pre_layrnorm", D, _NORM)
    else:
        specs.append(rows.vector("patch_bias", None, [f"{kernel}.bias"], [D], "zeros"))
    final_norm = rows.norm("final_norm", "post_layernorm", D, _NORM)
    uncomputed = _layers(arch, range(arch.num_layers, arch.num_stored_layers)) + _head(rows, D)
    uncomputed += [] if arch.has_final_norm else final_norm
    specs[0] = with_unread(specs[0], uncomputed)
    return specs + _layers(arch, range(arch.num_layers)) + (final_norm if arch.has_final_norm else [])


def _head(rows: Rows, hidden_size: int) -> list[ParamSpec]:
    """Return the ParamSpecs for SigLIP's pooling head, which makes one vector per image and is not computed."""
    parts = ("attention.in_proj_", "attention.out_proj.", "layernorm.", "mlp.fc1.", "mlp.fc2.")
    names = ["head.probe", *(f"head.{part}{end}" for part in parts for end in _NORM)]
    return [rows.vector("head", None, names, [hidden_size] * len(names), "zeros")]


def _layers(arch: VisionArch, indices: Iterable[int]) -> list[ParamSpec]:
    """Return some layers' ParamSpecs."""
    D, F, heads, ffn = arch.hidden_size, arch.ffn_size, arch.axis("heads"), arch.axis("ffn")
    qkv, num_heads = [f"self_attn.{part}_proj" for part in "qkv"], (arch.num_heads,) * 3
    specs = []
    for index in indices:
        rows = Rows(("vision", "layers", index), f"model.vision_tower.encoder.layers.{index}.")
        specs += [
            *rows.norm("input_norm", "layer_norm1", D, _NORM),
            rows.matrix("qkv_proj", (heads, None), qkv, [D] * 3, D, heads=num_heads, exact=True),
            rows.vector("qkv_bias", heads, [f"{part}.bias" for part in qkv], [D] * 3, "zeros", heads=num_heads),
            rows.matrix("o_proj", (None, heads), ["self_attn.out_proj"], [D], D, exact=True),
            rows.vector("o_bias", None, ["self_attn.out_proj.bias"], [D], "zeros"),
            *rows.norm("mlp_norm", "layer_norm2", D, _NORM),
            rows.matrix("up_proj", (ffn, None), ["mlp.fc1"], [F], D, exact=True),
            rows.vector("up_bias", ffn, ["mlp.fc1.bias"], [F], "zeros"),
            rows.matrix("down_proj", (None, ffn), ["mlp.fc2"], [D], F, exact=True),
            rows.vector("down_bias", None, ["mlp.fc2.bias"], [D], "zeros"),
        ]
    return specs


def _embed(p: Params, arch: VisionArch, inputs: EncoderInputs) -> Float[Array, "T D"]:
    """Return the first layer's inputs: each image's class token, if there is one, and patches, with positions."""
    assert arch.grid is not None, "images have one size"
    dtype = p[POSITION_EMBED].dtype
    x = linear(jnp.asarray(inputs.patches, dtype), unfolded(p["patch_kernel"]), bias=p.get("patch_bias"))
    x = x.reshape(-1, arch.grid[0] * arch.grid[1], arch.hidden_size)
    if arch.class_tokens:
        first = jnp.broadcast_to(p["class_embed"], (len(x), 1, arch.hidden_size))
        x = jnp.concatenate([first, x], axis=1)
    x = (x + p[POSITION_EMBED][None]).reshape(-1, arch.hidden_size)
    return layer_norm(x, p["embed_norm"], arch.norm_eps) if arch.class_tokens else x


CLIP = Encoder(lambda config: _fields({**_CLIP, **config}, 1), _specs, _embed, layer_norm, encoder.layer)
SIGLIP = Encoder(lambda config: _fields({**_SIGLIP, **config}, 0), _specs, _embed, layer_norm, encoder.layer)


def image_spans(arch: VisionArch, num_tokens: int) -> np.ndarray:
    """Return each token's span [2, T] if all images have the same size."""
    assert arch.grid is not None, "images have one size"
    size = arch.grid[0] * arch.grid[1] + arch.class_tokens
    first = np.arange(num_tokens, dtype=np.int32) // size * size
    return np.stack([first, first + size])
