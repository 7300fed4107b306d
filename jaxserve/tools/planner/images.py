"""Images in a plan: the vision tower's weights, and an image's cost in embeddings, text tokens and time."""

from dataclasses import dataclass

from jaxserve.assembly.memory import tree_bytes
from jaxserve.models.params import VISION
from jaxserve.models.vision.tower import num_flops
from jaxserve.tools.planner.sizes import Sizes


@dataclass(frozen=True)
class ImageCost:
    """Cost for an image that fills a tower program.

    Attributes:
        patches: patches, with padding.
        embeddings: maximum embedding count; each is a prompt token with keys and values.
        text_tokens: text tokens that take as many FLOPs as the tower, counted in the step's budget.
        encode_ms: time in the tower that the data sheet allows; None on a CPU.
    """

    patches: int
    embeddings: int
    text_tokens: int
    encode_ms: float | None


@dataclass(frozen=True)
class ImagePlan:
    """A model's vision tower on a target.

    Attributes:
        tower_bytes: weight bytes per chip for the tower.
        costs: image costs, by tower program.
    """

    tower_bytes: int
    costs: tuple[ImageCost, ...]


def plan_images(sizes: Sizes) -> ImagePlan | None:
    """Return the plan for images; None if the model, or its stage, has no tower."""
    images = sizes.local.images
    if images is None or VISION not in sizes.params:
        return None
    tower, tower_bytes, sheet = images.tower, tree_bytes(sizes.params[VISION]), sizes.target.sheet
    share = 1 / sizes.target.devices_per_chip

    def encode_ms(num_patches: int) -> float | None:
        if sheet is None:
            return None
        compute_s = num_flops(tower, num_patches) / (share * sheet.flops_per_s[sizes.dtype.name])
        return 1e3 * max(compute_s, tower_bytes / (share * sheet.bytes_per_s))

    costs = tuple(
        ImageCost(size, tower.max_embeddings(size), tokens, encode_ms(size))
        for size, tokens in sizes.schedule.encoder_costs
    )
    return ImagePlan(tower_bytes * sizes.target.devices_per_chip, costs)
