"""Vision towers by name: config.json to VisionArch, its tensors, and `encode`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float
from numpy.typing import NDArray

from jaxserve.models.hf_config import SIZE, TABLE, HfConfig, one_of, read_field, read_fields
from jaxserve.models.params import Params, ParamSpec
from jaxserve.models.vision import clip, llava
from jaxserve.models.vision.arch import VisionArch
from jaxserve.models.vision.encoder import Encoder, Projector, hidden_states
from jaxserve.models.vision.inputs import EncoderInputs, Grid, Packed, join_patches

ENCODERS: Mapping[str, Encoder] = {  # key: `model_type` in vision_config
    "clip_vision_model": clip.CLIP,
    "siglip_vision_model": clip.SIGLIP,
}
PROJECTORS: Mapping[str, Projector] = {  # key: architecture
    "LlavaForConditionalGeneration": llava.LLAVA,
}
# Prefixes in tensor names.
PREFIXES = tuple(f"model.{part}" for part in ("visual.", "vision_tower.", "multi_modal_projector.", "embed_vision."))
_DEFAULT_ENCODERS = {"LlavaForConditionalGeneration": "clip_vision_model"}


def has_tower(config: HfConfig) -> bool:
    """Return whether a config.json describes a model with a supported vision tower."""
    names = config.get("architectures")
    return isinstance(names, list) and bool(names) and names[0] in PROJECTORS


def read_tower(config: HfConfig) -> VisionArch:
    """Convert a multimodal config.json to its tower's VisionArch.

    Raises:
        ConfigError: a setting in `vision_config` or for the projector is not supported.
    """
    architecture = config["architectures"][0]
    tables = read_fields(config, {"vision_config": TABLE, "text_config": TABLE})
    vision = {"model_type": _DEFAULT_ENCODERS[architecture], **tables["vision_config"]}
    name = read_field(vision, "model_type", one_of(ENCODERS))
    fields = ENCODERS[name].parse(vision)
    fields["out_size"] = read_field({"hidden_size": 4096, **tables["text_config"]}, "hidden_size", SIZE)
    fields |= PROJECTORS[architecture].parse(config, fields)
    return VisionArch(encoder=name, projector=architecture, **fields)


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
    return EncoderInputs(join_patches(arch, [patches for _, patches in images], size), **operands)


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
