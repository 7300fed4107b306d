"""Prompts with images for tiny multimodal checkpoints, and greedy tokens that transformers generates for them."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import transformers

from jaxserve.images.prepared import ImageSpan, PreparedImage
from tests.oracles import torch
from tests.vision_checkpoints import Grid, VisionFamily, raster_pixels


def fixed_size(images: Sequence[tuple[Grid, np.ndarray]]) -> dict[str, Any]:
    """Return the arguments of a model for images of one size."""
    return {"pixel_values": torch.stack([raster_pixels(patches, grid) for grid, patches in images])}


GIVEN = {"Llava": fixed_size}  # arguments of a model for images, by stem of its class


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
        grid = grid or self.family.grids[seed % len(self.family.grids)]
        size = grid[0] * grid[1], self.tower.patch_size
        patches = np.random.default_rng(seed).standard_normal(size).astype(np.float32)
        return PreparedImage(bytes([seed]) * 16, patches, grid, self.tower.num_embeddings(grid))

    def prompt(self, *parts: PreparedImage | int) -> tuple[list[int], list[ImageSpan]]:
        """Return token ids and images of a prompt: for each part an image, or this number of random tokens."""
        ids: list[int] = []
        spans: list[ImageSpan] = []
        rng = np.random.default_rng(len(parts))
        for part in parts:
            if isinstance(part, PreparedImage):
                spans.append(ImageSpan(part, len(ids), np.arange(part.num_embeddings, dtype=np.int32)))
                ids += [self.token_id] * part.num_embeddings
            else:
                ids += rng.integers(20, 100, part).tolist()
        return ids, spans

    def greedy(self, ids: Sequence[int], spans: Sequence[ImageSpan], num_tokens: int) -> tuple[list[int], list[float]]:
        """Return the tokens that transformers generates greedily, without end, and their log probabilities."""
        given = GIVEN[self.family.name]([(span.image.grid, span.image.patches) for span in spans]) if spans else {}
        ids, out, logprobs = list(ids), list[int](), list[float]()
        for _ in range(num_tokens):
            with torch.no_grad():
                logits = self.model(input_ids=torch.tensor([ids]), **given).logits[0, -1]
            found = torch.log_softmax(logits.double(), -1)
            out.append(int(found.argmax()))
            logprobs.append(float(found.max()))
            ids.append(out[-1])
        return out, logprobs
