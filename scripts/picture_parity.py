"""Compare images with transformers: random tiny models of each family, with 0, 1 and 4 images in a prompt.

    python scripts/picture_parity.py                                # needs the test extra
    python scripts/picture_parity.py --families llava qwen3_vl --json out.json

The first row has the largest difference between embeddings of images, the others the largest difference in log
probabilities of greedy tokens, and whether these are the same. The prompts are one batch, computed in chunks; "cached"
is the prompt with 4 images again. A dash is for towers whose decoder is not served with images.
"""

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from jaxserve import weights
from jaxserve.models.params import matrix_transform
from jaxserve.models.vision import tower

ROOT = Path(__file__).parent.parent
TOLERANCE = 1e-4
IMAGES = (0, 1, 4)
ROWS = ("embeddings", *(f"{count} image{'' if count == 1 else 's'}" for count in IMAGES), "cached")
Results = dict[str, dict[str, Any]]


def compare(name: str, directory: Path) -> Results:
    """Return the results by row."""
    from tests.e2e.test_pictures import NUM_TOKENS, SERVED, Served, tokens  # noqa: PLC0415 - the oracle needs torch
    from tests.vision_checkpoints import FAMILIES  # noqa: PLC0415 - the oracle needs torch

    if name not in SERVED:
        return {ROWS[0]: {"max_error": compare_embeddings(FAMILIES[name].write(directory), name, directory)}}
    served = Served(directory, name)
    pictures = served.pictures
    results: Results = {ROWS[0]: {"max_error": compare_embeddings(pictures.model, name, directory)}}
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


def table(results: dict[str, Results]) -> str:
    """Return the results as text, a row per family."""

    def cell(found: dict[str, Any] | None) -> str:
        if found is None:
            return "-"
        return f"{found['max_error']:.0e}{'' if found.get('same_ids', True) else ', other ids'}"

    rows = [["", *ROWS], *([name, *(cell(found.get(row)) for row in ROWS)] for name, found in results.items())]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)


def main() -> int:
    sys.path.insert(0, str(ROOT))
    from tests.vision_checkpoints import FAMILIES  # noqa: PLC0415 - the oracle needs torch

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--families", nargs="+", choices=FAMILIES, default=list(FAMILIES))
    parser.add_argument("--json", type=Path, help="file for the results")
    args = parser.parse_args()
    results = {}
    for name in args.families:
        with tempfile.TemporaryDirectory() as directory:
            results[name] = compare(name, Path(directory))
    found = [each for rows in results.values() for each in rows.values()]
    is_equal = all(each.get("same_ids", True) and each["max_error"] < TOLERANCE for each in found)
    text = json.dumps({"bench": "picture_parity", "tolerance": TOLERANCE, "families": results})
    if args.json is not None:
        args.json.write_text(text + "\n")
    print(table(results))
    print(text)
    return 0 if is_equal else 1


if __name__ == "__main__":
    sys.exit(main())
