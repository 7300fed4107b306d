"""Tiny random checkpoints with vision towers, and the embeddings that transformers computes of patches."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import transformers

from jaxserve.models.params import ParamSpec
from jaxserve.models.vision import tower
from jaxserve.weights.rows import hf_shapes
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


def tiled_features(model: Any, images: list[tuple[Any, ...]]) -> list[Any]:
    """Return the embeddings of images in tiles."""
    return model.get_image_features(*tiled_pixels(images)).pooler_output


def tiled_pixels(images: Sequence[tuple[Any, ...]]) -> tuple[Any, Any]:
    """Return the pixels of images in tiles, padded to one number of tiles, and their sizes before preprocessing."""
    grid, _, _ = images[0]
    tiles = [patches.reshape(-1, grid[0] * grid[1], patches.shape[1]) for _, patches, _ in images]
    pixels = [torch.stack([raster_pixels(tile, grid) for tile in each]) for each in tiles]
    most = max(len(each) for each in pixels)
    batch = torch.stack([torch.nn.functional.pad(each, (0,) * 7 + (most - len(each),)) for each in pixels])
    return batch, torch.tensor([size for _, _, size in images])


def sized_features(model: Any, images: list[tuple[Grid, np.ndarray]]) -> list[Any]:
    """Return the embeddings of images padded to one size, which have their sizes with them."""
    pixels = [raster_pixels(patches, grid) for grid, patches in images]
    sizes = torch.tensor([image.shape[1:] for image in pixels])
    batch = torch.zeros((len(pixels), 3, *sizes.amax(dim=0).tolist()))
    for image, (height, width), own in zip(batch, sizes.tolist(), pixels, strict=True):
        image[:, :height, :width] = own
    return model.get_image_features(batch, image_sizes=sizes).pooler_output


def positioned_features(model: Any, images: list[tuple[Grid, np.ndarray]]) -> list[Any]:
    """Return the embeddings of images in padded lists of patches, which have their positions with them."""
    size = max(len(patches) for _, patches in images)
    batch, positions = torch.zeros((len(images), size, images[0][1].shape[1])), torch.full((len(images), size, 2), -1)
    for index, (grid, patches) in enumerate(images):
        batch[index, : len(patches)] = torch.tensor(patches)
        positions[index, : len(patches)] = torch.tensor(np.indices(grid)[::-1].reshape(2, -1).T.copy())
    return model.get_image_features(batch, image_position_ids=positions).pooler_output


def _grids(images: list[tuple[Grid, np.ndarray]]) -> Any:
    """Return the patches of images, and their frames, rows and columns, as the Qwen families take them."""
    patches = torch.tensor(np.concatenate([patches for _, patches in images]))
    return patches, torch.tensor([[1, *grid] for grid, _ in images])


def qwen_features(model: Any, images: list[tuple[Grid, np.ndarray]]) -> list[Any]:
    """Return the embeddings of images, followed by DeepStack's features."""
    output = model.get_image_features(*_grids(images))
    parts = [output.pooler_output, *(getattr(output, "deepstack_features", None) or [])]
    return [torch.cat([torch.cat(list(part)) for part in parts], dim=1)]


def random_tensors(specs: list[ParamSpec]) -> dict[str, np.ndarray]:
    """Return random tensors for specs, by name."""
    rng, tensors = np.random.default_rng(0), {}
    for spec in specs:
        for name, shape in hf_shapes(spec).items():
            noise = rng.standard_normal(shape, np.float32) * np.float32(0.2)
            tensors[name] = noise + np.float32(spec.init == "ones")
            _, _, last = name.rpartition(".")
            if last in _BUFFERS:
                tensors[name] = np.full(shape, _BUFFERS[last], np.float32)
    return tensors


_BUFFERS = {"input_min": -0.75, "input_max": 1.0, "output_min": -0.5, "output_max": 0.4, "std_bias": 0.3}
_BUFFERS["std_scale"] = 1.7


@dataclass(frozen=True)
class VisionFamily:
    """A family's tiny checkpoint.

    Attributes:
        name: stem of the classes in transformers.
        config: fields of config.json.
        vision: fields of `vision_config`.
        text: fields of `text_config`.
        grids: rows and columns of patches in some images.
        sizes: rows and columns of pixels before preprocessing, and the number of tiles, if images have tiles.
        features: function from a model and images (grid, patches) to each image's embeddings.
    """

    name: str
    vision: dict[str, Any]
    grids: tuple[Grid, ...]
    features: Callable[[Any, list[tuple[Grid, np.ndarray]]], list[Any]]
    config: dict[str, Any] = field(default_factory=dict)
    text: dict[str, Any] = field(default_factory=lambda: TEXT)
    sizes: tuple[tuple[Grid, int], ...] = ()

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
        for name, buffer in model.named_buffers():  # bounds within which most values are, and factors
            _, _, last = name.rpartition(".")
            if last in _BUFFERS:
                buffer.fill_(_BUFFERS[last])
        model.save_pretrained(path)
        return model

    def embeddings(self, model: Any, images: list[tuple[Grid, np.ndarray]]) -> np.ndarray:
        """Return the embeddings of images, one after the other."""
        with torch.no_grad():
            return torch.cat(list(self.features(model, images))).numpy()


QWEN = {"depth": 5, "num_heads": 2, "patch_size": 4}
_QWEN_TOKENS = {"image_token_id": 3, "video_token_id": 4, "vision_start_token_id": 5, "vision_end_token_id": 6}
_QWEN_TEXT = {**checkpoints.SIZES, "rope_parameters": {"rope_type": "default", "mrope_section": [4, 2, 2]}}
_QWEN_GRIDS = ((2, 2), (6, 10), (18, 4), (2, 34), (12, 8))
QWEN2_5 = {**QWEN, "hidden_size": 32, "intermediate_size": 48, "out_hidden_size": 64, "window_size": 24}
QWEN2_5["fullatt_block_indexes"] = [1, 3]
QWEN3 = {**QWEN, "hidden_size": 32, "intermediate_size": 48, "out_hidden_size": 64, "num_position_embeddings": 25}
_PINPOINTS = [[20, 20], [20, 40], [40, 20], [40, 60], [60, 40], [20, 60], [60, 60]]
PIXTRAL = {"model_type": "pixtral", **SIZES, "image_size": 32, "patch_size": 4}
GEMMA4 = {**SIZES, "head_dim": 12, "num_key_value_heads": 2, "patch_size": 4, "position_embedding_size": 16}
_MISTRAL, _MISTRAL_TEXT = {"image_token_index": 5}, {**checkpoints.SIZES, "model_type": "mistral"}
_GEMMA4, _GEMMA4_TEXT = {"audio_config": None}, {**checkpoints.SIZES, "model_type": "gemma4_text"}
_GEMMA4_TEXT |= {"vocab_size_per_layer_input": 131, "hidden_size_per_layer_input": 8}
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
    "llava_pixtral": VisionFamily(
        *("Llava", PIXTRAL, ((3, 5), (1, 2), (4, 4)), sized_features),
        {**_LLAVA, "vision_feature_layer": -1, "vision_feature_select_strategy": "full"},
    ),
    "onevision": VisionFamily(
        *("LlavaOnevision", SIGLIP, ((5, 5),) * 5, tiled_features),
        {"image_grid_pinpoints": _PINPOINTS, "vision_aspect_ratio": "anyres_max_2", "image_token_index": 5},
        sizes=(((20, 20), 2), ((50, 30), 7), ((7, 90), 4), ((31, 60), 7), ((60, 60), 10)),
    ),
    "mistral3": VisionFamily("Mistral3", PIXTRAL, ((2, 6), (4, 4), (6, 2)), sized_features, _MISTRAL, _MISTRAL_TEXT),
    "gemma3": VisionFamily(
        *("Gemma3", SIGLIP | {"image_size": 24}, ((6, 6),) * 2, fixed_size_features),
        *({"mm_tokens_per_image": 9}, {**checkpoints.SIZES, "model_type": "gemma3_text"}),
    ),
    "gemma4": VisionFamily("Gemma4", GEMMA4, ((6, 9), (3, 3), (3, 12)), positioned_features, _GEMMA4, _GEMMA4_TEXT),
    "gemma4_clipped": VisionFamily(
        *("Gemma4", GEMMA4 | {"use_clipped_linears": True, "standardize": True}, ((3, 6),), positioned_features),
        *(_GEMMA4, _GEMMA4_TEXT),
    ),
    "qwen2_vl": VisionFamily(
        *("Qwen2VL", {**QWEN, "embed_dim": 32, "hidden_size": 64, "mlp_ratio": 2}, _QWEN_GRIDS, qwen_features),
        *(_QWEN_TOKENS, _QWEN_TEXT),
    ),
    "qwen2_5_vl": VisionFamily("Qwen2_5_VL", QWEN2_5, _QWEN_GRIDS, qwen_features, _QWEN_TOKENS, _QWEN_TEXT),
    "qwen3_vl": VisionFamily(
        *("Qwen3VL", QWEN3 | {"deepstack_visual_indexes": [0, 2]}, _QWEN_GRIDS, qwen_features),
        *(_QWEN_TOKENS, _QWEN_TEXT),
    ),
    "qwen3_vl_moe": VisionFamily(
        *("Qwen3VLMoe", QWEN3 | {"deepstack_visual_indexes": [0]}, _QWEN_GRIDS, qwen_features),
        *(_QWEN_TOKENS, _QWEN_TEXT | {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}),
    ),
    "qwen3_5": VisionFamily("Qwen3_5", QWEN3, _QWEN_GRIDS, qwen_features, _QWEN_TOKENS, _QWEN_TEXT),
}

_QWEN2_5_7B = {"depth": 32, "hidden_size": 1280, "intermediate_size": 3420, "out_hidden_size": 3584}
_SO400M = {"hidden_size": 1152, "intermediate_size": 4304, "num_hidden_layers": 27, "num_attention_heads": 16}
_PIXTRAL_400M = {"num_hidden_layers": 24, "hidden_size": 1024, "intermediate_size": 4096, "patch_size": 14}
PUBLISHED: dict[str, tuple[str, dict[str, Any], int]] = {  # vision_config, and the decoder's hidden size
    "llava-1.5-7b": (
        "Llava",
        {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 24, "num_attention_heads": 16}
        | {"image_size": 336, "patch_size": 14},
        4096,
    ),
    "qwen2.5-vl-7b": ("Qwen2_5_VL", _QWEN2_5_7B, 3584),
    "qwen3-vl-4b": (
        "Qwen3VL",
        {"depth": 24, "hidden_size": 1024, "intermediate_size": 4096, "deepstack_visual_indexes": [5, 11, 17]}
        | {"out_hidden_size": 2560},
        2560,
    ),
    "mistral-small-3.1-24b": ("Mistral3", _PIXTRAL_400M | {"hidden_act": "silu"}, 5120),
    "gemma-3-4b": ("Gemma3", _SO400M | {"image_size": 896, "patch_size": 14, "vision_use_head": False}, 2560),
    "gemma-4-e2b": ("Gemma4", {"use_clipped_linears": True}, 1536),
    "llava-onevision-7b": (
        "LlavaOnevision",
        _SO400M | {"num_hidden_layers": 26, "image_size": 384, "patch_size": 14, "vision_use_head": False},
        3584,
    ),
}


def published(name):
    """Return the arch of a published model's tower."""
    stem, vision, hidden_size = PUBLISHED[name]
    text = {"text_config": {"hidden_size": hidden_size}, "hidden_size": hidden_size}
    return tower.read_tower({"architectures": [f"{stem}ForConditionalGeneration"], "vision_config": vision, **text})
