"""Vision towers by name: config.json to VisionArch, its tensors, and `encode`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import prod
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxserve.models.hf_config import SIZE, TABLE, HfConfig, one_of, read_field, read_fields
from jaxserve.models.params import Params, ParamSpec, stack_layers
from jaxserve.models.vision import clip, gemma, llava, onevision, pixtral, qwen
from jaxserve.models.vision.arch import VisionArch
from jaxserve.models.vision.encoder import Encoder, Projector, TowerState, hidden_states, kept_features
from jaxserve.models.vision.encoder import run_layer as encoder_layer
from jaxserve.models.vision.inputs import EncoderInputs, TowerImage, join_patches

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
    "onevision": onevision.ONEVISION,
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
    "LlavaOnevisionForConditionalGeneration": _Family("onevision", {"siglip_vision_model": "siglip"}),
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
_PARTS = ("visual.", "vision_tower.", "multi_modal_projector.", "embed_vision.", "image_newline")
# Prefixes in tensor names.
PREFIXES = tuple(f"model.{part}" for part in _PARTS)


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


def num_flops(arch: VisionArch, num_patches: int) -> int:
    """Return the FLOPs of a program for `num_patches` patches; a multiply-add counts as two.

    The projector's matrices count once for each patch, an upper bound.
    """
    weights = sum(prod(spec.shape) for spec in tower_specs(arch) if spec.is_matrix)
    image = num_patches if arch.grid is None else arch.grid[0] * arch.grid[1]
    window = image if arch.window is None else (arch.window * arch.merge_size) ** 2
    keys = sum(min(window, image) if is_windowed else image for is_windowed in arch.is_windowed)
    return num_patches * (2 * weights + 4 * keys * arch.num_heads * arch.head_dim)


def stacked(params: Params, arch: VisionArch, stack: Callable[..., Any] = lambda *arrays: jnp.stack(arrays)) -> Params:
    """Return a tower's parameters with its layers stacked for a scan, as on TPUs, if there are two periods or more.

    Args:
        params: the tower's parameters, with a list of layers.
        arch: the tower's sizes.
        stack: function that stacks equal layers' arrays; see `stack_layers`.
    """
    return stack_layers(params, arch.period, stack) if 2 * arch.period <= arch.num_layers else params


def pack(
    arch: VisionArch, images: Sequence[TowerImage | tuple[Any, ...]], num_patches: int | None = None
) -> EncoderInputs:
    """Pack images for one call to `encode`, whose embeddings follow each other in the same order.

    Args:
        arch: the tower.
        images: images, or the fields of TowerImage.
        num_patches: patches with padding, in `arch.buckets`; by default the smallest bucket.

    Raises:
        ConfigError: the images have more patches than the largest bucket.
    """
    encoder, packed = ENCODERS[arch.encoder], [TowerImage(*image) for image in images]
    size = num_patches or arch.bucket(sum(image.num_patches for image in packed))
    operands = encoder.operands(arch, packed, size) | PROJECTORS[arch.projector].operands(arch, packed, size)
    orders = [encoder.order(arch, image.grid) for image in packed]
    return EncoderInputs(join_patches(arch, packed, orders, size), **operands)


def encode(params: Params, arch: VisionArch, inputs: EncoderInputs) -> Float[Array, "E out"]:
    """Return the packed images' embeddings, then arbitrary rows for padding.

    With DeepStack each row holds the embedding, then the features for each of the decoder's first layers.

    Args:
        params: the tower's parameters, the tree under "vision"; one device's if `arch` has one device's sizes.
        arch: the tower's sizes.
        inputs: images from `pack`.
    """
    encoder, state = ENCODERS[arch.encoder], begin(params, arch, inputs)
    spans = state.spans[0], state.spans[1]
    states = hidden_states(encoder, params["layers"], arch, state.x, state.rope, spans)
    return _project(params, arch, states, inputs)


def begin(params: Params, arch: VisionArch, inputs: EncoderInputs) -> TowerState:
    """Return the state before the first layer; arguments as for `encode`."""
    encoder = ENCODERS[arch.encoder]
    with jax.named_scope("embed"):
        x = encoder.embed(params, arch, inputs)
    spans = clip.image_spans(arch, len(x)) if inputs.spans is None else inputs.spans
    windows = spans if inputs.windows is None else inputs.windows
    numbers = kept_features(arch)
    kept = jnp.zeros((len(numbers), *x.shape), x.dtype)
    if numbers[:1] == [0]:
        kept = kept.at[0].set(x)
    return TowerState(x, kept, encoder.rope(arch, inputs), jnp.stack([jnp.asarray(spans), jnp.asarray(windows)]))


def run_layer(params: Params, arch: VisionArch, state: TowerState, layer: Int[Array, " 2"]) -> TowerState:
    """Return the state after a layer.

    Args:
        params: the layer's parameters.
        arch: the tower's sizes.
        state: the state before it.
        layer: numbers from `layer_numbers`.
    """
    return encoder_layer(ENCODERS[arch.encoder], params, arch, state, layer[0], layer[1])


def layer_numbers(arch: VisionArch, index: int) -> list[int]:
    """Return whether a layer has windows, and the index in `TowerState.kept` for its hidden states, if any."""
    numbers = kept_features(arch)
    kept_as = numbers.index(index + 1) if index + 1 in numbers else len(numbers)
    return [int(arch.is_windowed[index]), kept_as]


def finish(params: Params, arch: VisionArch, state: TowerState, inputs: EncoderInputs) -> Float[Array, "E out"]:
    """Return embeddings from the state after the last layer; arguments as for `encode`, but without patches."""
    kept = dict(zip(kept_features(arch), state.kept, strict=True)) | {arch.num_layers: state.x}
    return _project(params, arch, [kept[number] for number in arch.feature_layers], inputs)


def _project(
    params: Params, arch: VisionArch, states: Sequence[Float[Array, "P D"]], inputs: EncoderInputs
) -> Float[Array, "E out"]:
    """Return embeddings from the hidden states in `arch.feature_layers`."""
    with jax.named_scope("project"):
        return PROJECTORS[arch.projector].project(params, arch, states, inputs)
