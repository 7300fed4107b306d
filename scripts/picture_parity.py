"""Compare images with transformers: random tiny models of each family, with 0, 1 and 4 images in a prompt.

    python scripts/picture_parity.py                                # needs the test extra
    python scripts/picture_parity.py --families llava qwen3_vl --json out.json

The first row has the largest difference between embeddings of images, the others the largest difference in log
probabilities of greedy tokens, and whether these are the same. The prompts are one batch, computed in chunks; "cached"
is the prompt with 4 images again. A dash is for towers whose decoder is not served with images.
"""

import sys
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

import parity
from jaxserve import weights
from jaxserve.models.params import matrix_transform
from jaxserve.models.vision import tower

ROOT = Path(__file__).parent.parent
TOLERANCE = 1e-4
IMAGES = (0, 1, 4)
ROWS = ("embeddings", *(f"{count} image{'' if count == 1 else 's'}" for count in IMAGES), "cached")


def compare(name: str, directory: Path) -> parity.Results:
    """Return the results by row."""
    from tests.e2e.test_pictures import NUM_TOKENS, SERVED, Served, tokens  # noqa: PLC0415 - the oracle needs torch
    from tests.vision_checkpoints import FAMILIES  # noqa: PLC0415 - the oracle needs torch

    if name not in SERVED:
        return {ROWS[0]: {"max_error": compare_embeddings(FAMILIES[name].write(directory), name, directory)}}
    served = Served(directory, name)
    pictures = served.pictures
    results: parity.Results = {ROWS[0]: {"max_error": compare_embeddings(pictures.model, name, directory)}}
    grids = sorted(pictures.family.grids, key=lambda grid: grid[0] * grid[1])
    prompts = []
    for count in IMAGES:
        parts = [part for seed in range(count) for part in (pictures.image(seed, grids[seed % 2]), 3)]
        prompts.append(pictures.prompt(5, *parts))
    engine = served.engine()
    outputs = [*served.run(prompts, engine), *served.run(prompts[-1:], engine)]
    for row, prompt, output in zip(ROWS[1:], [*prompts, prompts[-1]], outputs, strict=True):
        ids, expected = pictures.greedy(*prompt, NUM_TOKENS)
        tables = output.outputs[0].logprobs or []
        errors = [
            abs(table[i].logprob - own) for table, i, own in zip(tables, ids, expected, strict=True) if i in table
        ]
        results[row] = {"max_error": float(max(errors, default=np.inf)), "same_ids": tokens(output) == ids}
    return results


def compare_embeddings(model: Any, name: str, directory: Path) -> float:
    """Return the largest difference between embeddings of images with odd grids."""
    from tests.models.test_vision_towers import encode, random_images  # noqa: PLC0415 - the oracle needs torch
    from tests.vision_checkpoints import FAMILIES  # noqa: PLC0415 - the oracle needs torch

    family, arch = FAMILIES[name], tower.read_tower(weights.read_config(directory))
    specs = tower.tower_specs(arch)
    transform = matrix_transform(specs)
    params = weights.load(directory, specs, jnp.float32, transform=transform, prefix=tower.PREFIXES)["vision"]
    images = random_images(arch, family.grids, family.sizes)
    size = None if arch.grid is None else sum(len(patches) for _, patches, *_ in images)
    expected = family.embeddings(model, images)
    found = np.asarray(encode(params, arch, tower.pack(arch, images, size)))[: len(expected)]
    return float(np.abs(found - expected).max())


def table(results: dict[str, parity.Results]) -> str:
    """Return the results as text, a row per family."""
    rows = [[name, *(parity.cell(found.get(row)) for row in ROWS)] for name, found in results.items()]
    return parity.aligned([["", *ROWS], *rows])


def main() -> int:
    sys.path.insert(0, str(ROOT))
    from tests.vision_checkpoints import FAMILIES  # noqa: PLC0415 - the oracle needs torch

    return parity.run("picture_parity", __doc__, FAMILIES, compare, table, TOLERANCE)


if __name__ == "__main__":
    sys.exit(main())
