"""Tiny random checkpoints with vision towers, and the embeddings that transformers computes of patches."""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import transformers

from tests import checkpoints
from tests.oracles import torch

Grid = tuple[int, int]
TEXT = {**checkpoints.SIZES, "model_type": "llama"}
SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 2}
CLIP = {"model_type": "clip_vision_model", **SIZES, "image_size": 20, "patch_size": 4, "projection_dim": 8}
SIGLIP = {"model_type": "siglip_vision_model", **SIZES, "image_size": 20, "patch_size": 4, "vision_use_head": False}


def raster_pixels(patches: np.ndarray, grid: Grid, channels: int = 3) -> Any:
    """Return the pixels [C, height, width] of an image whose patches are in raster order."""
    side = round((patches.shape[1] / channels) ** 0.5)
    pixels = patches.reshape(*grid, channels, side, side).transpose(2, 0, 3, 1, 4)
    return torch.tensor(np.ascontiguousarray(pixels.reshape(channels, grid[0] * side, grid[1] * side)))


def fixed_size_features(model: Any, images: list[tuple[Grid, np.ndarray]]) -> list[Any]:
    """Return the embeddings of images of one size."""
    pixels = torch.stack([raster_pixels(patches, grid) for grid, patches in images])
    return model.get_image_features(pixels).pooler_output


@dataclass(frozen=True)
class VisionFamily:
    """A family's tiny checkpoint.

    Attributes:
        name: stem of the classes in transformers.
        config: fields of config.json.
        vision: fields of `vision_config`.
        text: fields of `text_config`.
        grids: rows and columns of patches in some images.
        features: function from a model and images (grid, patches) to each image's embeddings.
    """

    name: str
    vision: dict[str, Any]
    grids: tuple[Grid, ...]
    features: Callable[[Any, list[tuple[Grid, np.ndarray]]], list[Any]]
    config: dict[str, Any] = field(default_factory=dict)
    text: dict[str, Any] = field(default_factory=lambda: TEXT)

    @property
    def hf_config(self) -> transformers.PretrainedConfig:
        """The checkpoint's config."""
        config_class = getattr(transformers, f"{self.name}Config")
        return config_class(text_config=self.text, vision_config=self.vision, **self.config)

    def config_dict(self) -> dict[str, Any]:
        """Return the content of config.json."""
        return {**self.hf_config.to_dict(), "architectures": [f"{self.name}ForConditionalGeneration"]}

    def write(self, path: Path) -> transformers.PreTrainedModel:
        """Write a random checkpoint and return its model."""
        config = self.hf_config
        model_class = getattr(transformers, f"{self.name}ForConditionalGeneration")
        model = model_class._from_config(config, dtype=torch.float32).eval()
        checkpoints.randomize(model)
        model.save_pretrained(path)
        return model

    def embeddings(self, model: Any, images: list[tuple[Grid, np.ndarray]]) -> np.ndarray:
        """Return the embeddings of images, one after the other."""
        with torch.no_grad():
            return torch.cat(list(self.features(model, images))).numpy()


_LLAVA = {"image_token_index": 5, "image_seq_length": 25}
FAMILIES = {
    "llava": VisionFamily("Llava", CLIP, ((5, 5),) * 3, fixed_size_features, _LLAVA),
    "llava_layers": VisionFamily(
        *("Llava", CLIP, ((5, 5),), fixed_size_features),
        {**_LLAVA, "vision_feature_layer": [-1, 0, 2], "vision_feature_select_strategy": "full"},
    ),
    "llava_siglip": VisionFamily(
        *("Llava", SIGLIP, ((5, 5),) * 2, fixed_size_features),
        {**_LLAVA, "vision_feature_layer": -1, "vision_feature_select_strategy": "full"},
    ),
}
