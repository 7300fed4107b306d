"""Builds a model's image reader from its checkpoint."""

from __future__ import annotations

import json
import logging
from functools import partial
from typing import TYPE_CHECKING

from jaxserve.api.option_values import read_max_images, read_object
from jaxserve.assembly.generation_defaults import read_model_config
from jaxserve.images.families import read_placeholders
from jaxserve.images.loading import ImageSources
from jaxserve.images.processor_files import image_processor, read_processor_files
from jaxserve.images.reader import ImageOptions, ImageReader

if TYPE_CHECKING:
    from jaxserve.api.config import EngineConfig
    from jaxserve.models.arch import ArchConfig
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
    raw = read_model_config(config)
    max_patches = arch.images.tower.buckets[-1]
    new_processor = partial(image_processor, fields, {**raw, **_tiling(processor)}, max_patches=max_patches)
    layout = new_processor({}).layout
    ids = _added_ids(config) if tokenizer is None else tokenizer.vocabulary()
    placeholders = read_placeholders(
        raw,
        processor,
        arch.images.token_id,
        layout,
        ids.get,
        (lambda _: "") if tokenizer is None else tokenizer.token_text,
    )
    options = ImageOptions(
        max_images=read_max_images(config.limit_mm_per_prompt),
        cache_bytes=int(config.mm_processor_cache_gb * 2**30),
        adjusted=read_object("mm_processor_kwargs", config.mm_processor_kwargs),
        sources=ImageSources(config.allowed_media_domains, config.allowed_local_media_path),
    )
    return ImageReader(new_processor, placeholders, options)


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
