"""Prompts with images for tiny multimodal checkpoints, and greedy tokens that transformers generates for them."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import transformers

from jaxserve.images.prepared import ImageSpan, PreparedImage
from tests.oracles import torch
from tests.vision_checkpoints import Grid, VisionFamily, raster_pixels, tiled_pixels


def fixed_size(images: Sequence[tuple[Grid, np.ndarray]]) -> dict[str, Any]:
    """Return the arguments of a model for images of one size."""
    return {"pixel_values": torch.stack([raster_pixels(patches, grid) for grid, patches in images])}


def sized(images: Sequence[tuple[Grid, np.ndarray]]) -> dict[str, Any]:
    """Return the arguments of a model for images that are padded to one size."""
    pixels = [raster_pixels(patches, grid) for grid, patches in images]
    sizes = torch.tensor([image.shape[1:] for image in pixels])
    batch = torch.zeros((len(pixels), 3, *sizes.amax(dim=0).tolist()))
    for image, (height, width), own in zip(batch, sizes.tolist(), pixels, strict=True):
        image[:, :height, :width] = own
    return {"pixel_values": batch, "image_sizes": sizes}


def unfolded(images: Sequence[tuple[Grid, np.ndarray]]) -> dict[str, Any]:
    """Return the arguments of a model that takes patches."""
    patches = torch.tensor(np.concatenate([patches for _, patches in images]))
    return {"pixel_values": patches, "image_grid_thw": torch.tensor([[1, *grid] for grid, _ in images])}


def positioned(images: Sequence[tuple[Grid, np.ndarray]]) -> dict[str, Any]:
    """Return the arguments of a model that takes padded lists of patches, with their positions."""
    size = max(len(patches) for _, patches in images)
    batch, positions = torch.zeros((len(images), size, images[0][1].shape[1])), torch.full((len(images), size, 2), -1)
    for index, (grid, patches) in enumerate(images):
        batch[index, : len(patches)] = torch.tensor(patches)
        positions[index, : len(patches)] = torch.tensor(np.indices(grid)[::-1].reshape(2, -1).T.copy())
    return {"pixel_values": batch, "image_position_ids": positions}


def tiled(images: Sequence[tuple[Any, ...]]) -> dict[str, Any]:
    """Return the arguments of a model for images in tiles, with their sizes before preprocessing."""
    batch, sizes = tiled_pixels(images)
    return {"pixel_values": batch, "image_sizes": sizes}


# Arguments of a model for images, by stem of its class
GIVEN: dict[str, Callable[[Any], dict[str, Any]]] = {
    "LlavaOnevision": tiled,
    "Llava": fixed_size,
    "Mistral3": sized,
    "Gemma3": fixed_size,
    "Gemma4": positioned,
}
_TYPES = {"Gemma3": "token_type_ids", "Gemma4": "mm_token_type_ids"}  # argument with 1 for tokens of images
GIVEN |= dict.fromkeys(("Qwen2VL", "Qwen2_5_VL", "Qwen3VL", "Qwen3VLMoe", "Qwen3_5", "Qwen3_5Moe"), unfolded)


@dataclass
class Pictures:
    """A family's model in transformers, and its prompts.

    Attributes:
        family: the checkpoint's family.
        model: the model as transformers runs it.
        tower: its vision tower's sizes.
    """

    family: VisionFamily
    model: transformers.PreTrainedModel
    tower: Any

    @property
    def token_id(self) -> int:
        """Id of the tokens that take images' embeddings."""
        config = self.family.config
        return int(config.get("image_token_id", config.get("image_token_index")))

    def image(self, seed: int, grid: tuple[int, int] | None = None) -> PreparedImage:
        """Return a random image, whose content depends on the seed."""
        if self.family.sizes:
            return self._tiled_image(seed)
        grid = grid or self.family.grids[seed % len(self.family.grids)]
        size = grid[0] * grid[1], self.tower.patch_size
        patches = np.random.default_rng(seed).standard_normal(size).astype(np.float32)
        return PreparedImage(bytes([seed]) * 16, patches, grid, self.tower.num_embeddings(grid))

    def _tiled_image(self, seed: int) -> PreparedImage:
        """Return a random image in tiles."""
        size, num_tiles = self.family.sizes[seed % len(self.family.sizes)]
        grid = self.family.grids[0]
        shape = grid[0] * grid[1] * num_tiles, self.tower.patch_size
        patches = np.random.default_rng(seed).standard_normal(shape).astype(np.float32)
        return PreparedImage(bytes([seed]) * 16, patches, grid, self.tower.tiles.num_embeddings(grid, size), size)

    @property
    def has_axes(self) -> bool:
        """True if tokens have positions on several axes."""
        return GIVEN[self.family.name] is unfolded

    def prompt(self, *parts: PreparedImage | int) -> tuple[list[int], list[ImageSpan]]:
        """Return token ids and images of a prompt: for each part an image, or this number of random tokens."""
        ids: list[int] = []
        spans: list[ImageSpan] = []
        rng = np.random.default_rng([part for part in parts if isinstance(part, int)])
        for part in parts:
            if isinstance(part, PreparedImage):
                spans.append(ImageSpan(part, len(ids), np.arange(part.num_embeddings, dtype=np.int32)))
                ids += [self.token_id] * part.num_embeddings
            else:
                ids += rng.integers(20, 100, part).tolist()
        return ids, spans

    def _given(self, spans: Sequence[ImageSpan]) -> list[tuple[Any, ...]]:
        """Return grids and patches, and sizes of images in tiles."""
        images = [(span.image.grid, span.image.patches, span.image.size) for span in spans]
        return images if self.family.sizes else [(grid, patches) for grid, patches, _ in images]

    def greedy(
        self, ids: Sequence[int], spans: Sequence[ImageSpan], num_tokens: int, *, suppressed: Sequence[int] = ()
    ) -> tuple[list[int], list[float]]:
        """Return the tokens that transformers generates greedily, without end, and their log probabilities."""
        if self.has_axes and ids[-1] == self.token_id and num_tokens > 1:
            # `generate` takes the type of the last token for all later ones, whose positions are then an image's.
            [first], [logprob] = self.greedy(ids, spans, 1, suppressed=suppressed)
            later, logprobs = self.greedy([*ids, first], spans, num_tokens - 1, suppressed=suppressed)
            return [first, *later], [logprob, *logprobs]
        given = GIVEN[self.family.name](self._given(spans)) if spans else {}
        tokens = torch.tensor([list(ids)])
        if self.has_axes or self.family.name in _TYPES:
            given[_TYPES.get(self.family.name, "mm_token_type_ids")] = (tokens == self.token_id).int()
        options = {"max_new_tokens": num_tokens, "do_sample": False, "eos_token_id": -1, "pad_token_id": 0}
        options |= {"suppress_tokens": [*suppressed]} if suppressed else {}
        with torch.no_grad():
            out = self.model.generate(
                input_ids=tokens, **given, **options, output_logits=True, return_dict_in_generate=True
            )
        logprobs = torch.log_softmax(torch.cat(out.logits).double(), -1).amax(-1)
        return out.sequences[0, len(ids) :].tolist(), logprobs.tolist()
