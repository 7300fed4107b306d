"""Multimodal families: the images that they take, in addition to their text parts (`registry.TEXT_PARTS`)."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np

from jaxserve.api.schema import FieldType
from jaxserve.errors import ConfigError
from jaxserve.layers.rope import RopeConfig
from jaxserve.models.arch import ArchConfig
from jaxserve.models.hf_config import COUNT, SWITCH, TABLE, read_fields
from jaxserve.models.image_input import ImageInput
from jaxserve.models.layer_spec import AttentionSpec
from jaxserve.models.vision.tower import read_tower

_SECTIONS = FieldType(
    "3 sizes", lambda value: isinstance(value, list) and len(value) == 3 and all(map(COUNT.holds, value))
)


class PositionAxes(NamedTuple):
    """M-RoPE of a family: positions in time, height and width, each of which rotates some pairs.

    Attributes:
        sections: default number of pairs per axis; None if configs must have it.
        interleaved: default of `mrope_interleaved`: True if the axes take turns, False if their pairs are contiguous.
    """

    sections: list[int] | None = None
    interleaved: bool = False

    def apply(self, arch: ArchConfig, text: Mapping[str, Any]) -> ArchConfig:
        """Return the text model with several axes in its rotations, as its config specifies."""
        kinds = {"rope_scaling": TABLE.or_null(), "rope_parameters": TABLE.or_null()}
        tables = read_fields(text, kinds)
        defaults = {"mrope_section": self.sections, "mrope_interleaved": self.interleaved}
        table = {**defaults, **(tables["rope_scaling"] or tables["rope_parameters"] or {})}
        read = read_fields(table, {"mrope_section": _SECTIONS, "mrope_interleaved": SWITCH})
        sections, is_interleaved = read["mrope_section"], read["mrope_interleaved"]

        def turned(attention: AttentionSpec) -> RopeConfig | None:
            """Return the rotation of a layer with axes."""
            if attention.rope is None:
                return None
            num_pairs = attention.rope.rotated(attention.head_dim) // 2
            if num_pairs != sum(sections) and not is_interleaved:
                raise ConfigError(
                    f"config.json: mrope_section must add up to {num_pairs} rotated pairs, got {sections}"
                )
            axes = _pair_axes(sections, num_pairs, interleaved=is_interleaved)
            return dataclasses.replace(attention.rope, axes=axes)

        return arch.with_attention(rope=[None if each.state else turned(each.attention) for each in arch.layers])


def _pair_axes(sections: list[int], num_pairs: int, *, interleaved: bool) -> tuple[int, ...]:
    """Return the axis by which each pair is rotated; interleaved, height and width take every third of the first."""
    if not interleaved:
        return tuple(axis for axis, size in enumerate(sections) for _ in range(size))
    axes = np.zeros(num_pairs, int)
    for axis in (1, 2):
        axes[axis : 3 * sections[axis] : 3] = axis
    return tuple(axes.tolist())


class ImageFamily(NamedTuple):
    """How an architecture takes images.

    Attributes:
        token_id: default id for tokens that take embeddings.
        token_field: field with this id.
        axes: M-RoPE; None if positions are single numbers.
        sees_images: function from the text part's fields and a layer's window to whether an image's tokens see the
            whole image there.
    """

    token_id: int
    token_field: str = "image_token_id"
    axes: PositionAxes | None = None
    sees_images: Callable[[Mapping[str, Any], int | None], bool] = lambda *_: False

    def read(self, config: Mapping[str, Any], arch: ArchConfig, text: Mapping[str, Any]) -> ArchConfig:
        """Return a text model with the images that it takes.

        Args:
            config: content of config.json.
            arch: its text part.
            text: the text part's fields.
        """
        field = {self.token_field: self.token_id, **{k: v for k, v in config.items() if v is not None}}
        token_id = read_fields(field, {self.token_field: COUNT})[self.token_field]
        if token_id >= arch.vocab_size:
            raise ConfigError(
                f"config.json: {self.token_field} must be below vocab_size {arch.vocab_size}, got {token_id}"
            )
        if self.axes is not None:
            arch = self.axes.apply(arch, text)
        arch = arch.with_attention(sees_images=[self.sees_images(text, window) for window in arch.windows])
        pad_id = read_fields({"pad_token_id": None, **text}, {"pad_token_id": COUNT.or_null()})["pad_token_id"] or 0
        images = ImageInput(token_id, read_tower(config), has_axes=self.axes is not None, pad_id=pad_id)
        if images.num_deep_layers >= arch.num_layers:
            raise ConfigError(
                "vision_config: deepstack_visual_indexes must be fewer than num_hidden_layers, got "
                f"{images.num_deep_layers} and {arch.num_layers}"
            )
        return dataclasses.replace(arch, images=images)


def _sees_in_windows(text: Mapping[str, Any], window: int | None) -> bool:
    """Return whether a Gemma 4 layer lets an image's tokens see the whole image: layers with windows may."""
    return text.get("use_bidirectional_attention") == "vision" and window is not None


IMAGE_FAMILIES: Mapping[str, ImageFamily] = {
    "Gemma3ForConditionalGeneration": ImageFamily(262144, "image_token_index", sees_images=lambda *_: True),
    "Gemma4ForConditionalGeneration": ImageFamily(258880, sees_images=_sees_in_windows),
    "LlavaForConditionalGeneration": ImageFamily(32000, "image_token_index"),
    "LlavaOnevisionForConditionalGeneration": ImageFamily(151646, "image_token_index"),
    "Mistral3ForConditionalGeneration": ImageFamily(10, "image_token_index"),
    **dict.fromkeys(
        ("Qwen2VLForConditionalGeneration", "Qwen2_5_VLForConditionalGeneration"),
        ImageFamily(151655, axes=PositionAxes()),
    ),
    **dict.fromkeys(
        ("Qwen3VLForConditionalGeneration", "Qwen3VLMoeForConditionalGeneration"),
        ImageFamily(151655, axes=PositionAxes([24, 20, 20], interleaved=True)),
    ),
    **dict.fromkeys(
        ("Qwen3_5ForConditionalGeneration", "Qwen3_5MoeForConditionalGeneration"),
        ImageFamily(248056, axes=PositionAxes([11, 11, 10], interleaved=True)),
    ),
}
