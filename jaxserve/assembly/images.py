"""Builds a model's image reader from its checkpoint."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING

from jaxserve.api.option_values import read_max_images, read_object
from jaxserve.assembly.generation_defaults import read_model_config
from jaxserve.errors import ConfigError, brief
from jaxserve.images.families import read_placeholders
from jaxserve.images.layouts import FixedLayout, Layout
from jaxserve.images.loading import ImageSources
from jaxserve.images.processor import ImageProcessor
from jaxserve.images.processor_files import image_processor, read_processor_files
from jaxserve.images.reader import ImageOptions, ImageReader

if TYPE_CHECKING:
    from jaxserve.api.config import EngineConfig
    from jaxserve.models.arch import ArchConfig
    from jaxserve.models.vision.arch import VisionArch
    from jaxserve.text.tokenizer import Tokenizer

logger = logging.getLogger(__name__)


def build_image_reader(config: EngineConfig, arch: ArchConfig, tokenizer: Tokenizer | None) -> ImageReader | None:
    """Return a model's image reader; None if it takes no images, or if its preprocessing is unknown.

    Args:
        config: model and options.
        arch: sizes of the model.
        tokenizer: None if prompts are token ids.

    Raises:
        ConfigError: the checkpoint's image processor is not supported.
    """
    if arch.images is None:
        return None
    fields, processor = read_processor_files(config.model_path)
    if not fields:
        logger.warning(
            "%s has no preprocessor_config.json, so that prompts cannot have images; copy the original checkpoint's",
            config.model_path,
        )
        return None
    raw, tower = read_model_config(config), arch.images.tower
    # Saved configs lack values that are transformers' defaults; the tower has them.
    vision = {**(raw.get("vision_config") or {}), "patch_size": tower.patch_shape[-1]}
    sizes = {**raw, **_tiling(processor), "vision_config": vision, "spatial_merge_size": tower.merge_size}

    def new_processor(adjusted: Mapping[str, object]) -> ImageProcessor:
        made = image_processor(fields, sizes, adjusted, max_patches=tower.buckets[-1])
        _check_tower(made.layout, tower, "mm_processor_kwargs" if adjusted else "preprocessor_config.json")
        return made

    layout = new_processor({}).layout
    ids = _added_ids(config) if tokenizer is None else tokenizer.vocabulary()
    placeholders = read_placeholders(
        raw,
        processor,
        arch.images.token_id,
        layout,
        ids.get,
        (lambda _: "") if tokenizer is None else tokenizer.token_text,
        None if tokenizer is None else partial(tokenizer.encode, add_special_tokens=False),
    )
    options = ImageOptions(
        max_images=read_max_images(config.limit_mm_per_prompt),
        cache_bytes=int(config.mm_processor_cache_gb * 2**30),
        adjusted=read_object("mm_processor_kwargs", config.mm_processor_kwargs),
        sources=ImageSources(config.allowed_media_domains, config.allowed_local_media_path),
    )
    return ImageReader(new_processor, placeholders, options)


def _check_tower(layout: Layout, tower: VisionArch, where: str) -> None:
    """Raise ConfigError, naming `where`, if the image processor and the tower differ in patches or embeddings."""
    side = tower.patch_shape[-1]
    if layout.patch_size != side:
        raise ConfigError(f"{where} must have the tower's patch_size {side}, got {layout.patch_size}")
    if tower.tiles is not None:
        for name in ("tile_size", "pinpoints", "max_tiles"):
            expected, found = getattr(tower.tiles, name), getattr(layout, name, None)
            if found != expected:
                raise ConfigError(f"{where} must have the {name} of config.json, {brief(expected)}, got {brief(found)}")
        return
    grid = tower.grid or (4 * tower.merge_size, 2 * tower.merge_size)
    if isinstance(layout, FixedLayout) and layout.grid != grid:
        raise ConfigError(f"{where} must make {grid} patches, as the tower takes, got {layout.grid}")
    made, taken = tower.num_embeddings(grid), layout.num_embeddings(grid, grid)
    if made != taken:
        raise ConfigError(f"{where} must count the tower's {made} embeddings for {grid} patches, got {taken}")


def _tiling(processor: dict[str, object]) -> dict[str, object]:
    """Return the processor_config.json fields that take precedence over the model's."""
    return {name: processor[name] for name in ("vision_aspect_ratio",) if processor.get(name) is not None}


def _added_ids(config: EngineConfig) -> dict[str, int]:
    """Return added tokens' ids by text, from tokenizer.json; {} without such a file."""
    path = config.tokenizer_path / "tokenizer.json"
    if not path.is_file():
        return {}
    added = json.loads(path.read_text(encoding="utf-8")).get("added_tokens", [])
    return {token["content"]: token["id"] for token in added}
