"""Vision towers by name: config.json to VisionArch, its tensors, and `encode`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float
from numpy.typing import NDArray

from jaxserve.models.hf_config import SIZE, TABLE, HfConfig, one_of, read_field, read_fields
from jaxserve.models.params import Params, ParamSpec
from jaxserve.models.vision import clip, gemma, llava, pixtral, qwen
from jaxserve.models.vision.arch import VisionArch
from jaxserve.models.vision.encoder import Encoder, Projector, hidden_states
from jaxserve.models.vision.inputs import EncoderInputs, Grid, Packed, join_patches

ENCODERS: Mapping[str, Encoder] = {
    "clip": clip.CLIP,
    "siglip": clip.SIGLIP,
    "pixtral": pixtral.PIXTRAL,
    "gemma4": gemma.GEMMA4_ENCODER,
    "qwen2_vl": qwen.QWEN2_VL,
    "qwen2_5_vl": qwen.QWEN2_5_VL,
    "qwen3_vl": qwen.QWEN3_VL,
}
PROJECTORS: Mapping[str, Projector] = {
    "llava": llava.LLAVA,
    "mistral3": pixtral.MISTRAL3,
    "gemma3": gemma.GEMMA3,
    "gemma4": gemma.GEMMA4,
    "merger": qwen.MERGER,
    "rms_merger": qwen.RMS_MERGER,
}


class _Family(NamedTuple):
    """Towers in an architecture.

    Attributes:
        projector: key in PROJECTORS.
        encoders: keys in ENCODERS, by `model_type` in vision_config; the first one is the default.
        has_any_type: True if there is one encoder, whatever `model_type` is.
    """

    projector: str
    encoders: Mapping[str, str]
    has_any_type: bool = False


def _one(projector: str, encoder: str) -> _Family:
    """Return the family with one encoder, whose `model_type` differs between versions."""
    return _Family(projector, {encoder: encoder}, has_any_type=True)


_FAMILIES: Mapping[str, _Family] = {
    "LlavaForConditionalGeneration": _Family(
        "llava", {"clip_vision_model": "clip", "siglip_vision_model": "siglip", "pixtral": "pixtral"}
    ),
    "Mistral3ForConditionalGeneration": _Family("mistral3", {"pixtral": "pixtral"}),
    "Gemma3ForConditionalGeneration": _Family("gemma3", {"siglip_vision_model": "siglip"}),
    "Gemma4ForConditionalGeneration": _one("gemma4", "gemma4"),
    "Qwen2VLForConditionalGeneration": _one("merger", "qwen2_vl"),
    "Qwen2_5_VLForConditionalGeneration": _one("rms_merger", "qwen2_5_vl"),
    "Qwen3VLForConditionalGeneration": _one("merger", "qwen3_vl"),
    "Qwen3VLMoeForConditionalGeneration": _one("merger", "qwen3_vl"),
    "Qwen3_5ForConditionalGeneration": _one("merger", "qwen3_vl"),
    "Qwen3_5MoeForConditionalGeneration": _one("merger", "qwen3_vl"),
}
# Prefixes in tensor names.
PREFIXES = tuple(f"model.{part}" for part in ("visual.", "vision_tower.", "multi_modal_projector.", "embed_vision."))


def has_tower(config: HfConfig) -> bool:
    """Return whether a config.json describes a model with a supported vision tower."""
    names = config.get("architectures")
    return isinstance(names, list) and bool(names) and names[0] in _FAMILIES


def read_tower(config: HfConfig) -> VisionArch:
    """Convert a multimodal config.json to its tower's VisionArch.

    Raises:
        ConfigError: a setting in `vision_config` or for the projector is not supported.
    """
    family = _FAMILIES[config["architectures"][0]]
    tables = read_fields({"text_config": config, **config}, {"vision_config": TABLE, "text_config": TABLE})
    vision, text = tables["vision_config"], tables["text_config"]
    default = next(iter(family.encoders))
    kind = default if family.has_any_type else vision.get("model_type", default)
    encoder = family.encoders[read_field({"model_type": kind}, "model_type", one_of(family.encoders))]
    fields = {**ENCODERS[encoder].parse(vision), "out_size": read_field(text, "hidden_size", SIZE.or_null()) or 4096}
    fields |= PROJECTORS[family.projector].parse(config, fields)
    return VisionArch(encoder=encoder, projector=family.projector, **fields)


def tower_specs(arch: VisionArch) -> list[ParamSpec]:
    """Return a tower's ParamSpecs; their paths begin with "vision"."""
    return ENCODERS[arch.encoder].specs(arch) + PROJECTORS[arch.projector].specs(arch)


def pack(
    arch: VisionArch, images: Sequence[tuple[Grid, NDArray[np.float32]]], num_patches: int | None = None
) -> EncoderInputs:
    """Pack images for one call to `encode`, whose embeddings follow each other in the same order.

    Args:
        arch: the tower.
        images: each image's grid and patches [P, S].
        num_patches: patches with padding, in `arch.buckets`; by default the smallest bucket.

    Raises:
        ConfigError: the images have more patches than the largest bucket.
    """
    grids = [grid for grid, _ in images]
    size = num_patches or arch.bucket(int(Packed.join(grids).starts[-1]))
    operands = ENCODERS[arch.encoder].operands(arch, grids, size)
    operands |= PROJECTORS[arch.projector].operands(arch, grids, size)
    orders = [ENCODERS[arch.encoder].order(arch, grid) for grid in grids]
    return EncoderInputs(join_patches(arch, [patches for _, patches in images], orders, size), **operands)


def encode(params: Params, arch: VisionArch, inputs: EncoderInputs) -> Float[Array, "E out"]:
    """Return the packed images' embeddings, then arbitrary rows for padding.

    With DeepStack each row holds the embedding, then the features for each of the decoder's first layers.

    Args:
        params: the tower's parameters, the tree under "vision"; one device's if `arch` has one device's sizes.
        arch: the tower's sizes.
        inputs: images from `pack`.
    """
    encoder, projector = ENCODERS[arch.encoder], PROJECTORS[arch.projector]
    with jax.named_scope("embed"):
        x = encoder.embed(params, arch, inputs)
    spans = clip.image_spans(arch, len(x)) if inputs.spans is None else inputs.spans
    windows = spans if inputs.windows is None else inputs.windows
    rope = encoder.rope(arch, inputs)
    states = hidden_states(encoder, params["layers"], arch, x, rope, (jnp.asarray(spans), jnp.asarray(windows)))
    with jax.named_scope("project"):
        return projector.project(params, arch, states, inputs)
