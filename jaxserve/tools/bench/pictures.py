"""Pictures of workloads: synthetic pixels in common sizes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from jaxserve.errors import ConfigError
from jaxserve.tools.bench.workloads import LOWEST_ID, Workload

_PIXELS = 4  # random stream

BenchPrompt = list[int] | Mapping[str, Any]


def check_pictures(workload: Workload, token_id: int | None, model: str) -> None:
    """Raise ConfigError if a workload has pictures, and the model takes none."""
    if token_id is None and any(request.picture is not None for request in workload.requests):
        raise ConfigError(f"the workload {workload.name} needs a model that takes images, got {model}")


def with_pictures(
    workload: Workload, prompts: Sequence[list[int]], token_id: int | None, draw: int = 0
) -> list[BenchPrompt]:
    """Return prompts with their pictures after the first token; no other token is a placeholder.

    Args:
        workload: the prompts' workload.
        prompts: token ids.
        token_id: the model's placeholder; None if it takes no images.
        draw: number of the run, so that no run finds the pictures of another one in a cache.
    """
    if token_id is None:
        return list(prompts)
    other = token_id - 1 if token_id > LOWEST_ID else token_id + 1
    made: list[BenchPrompt] = []
    for index, (request, prompt) in enumerate(zip(workload.requests, prompts, strict=True)):
        plain = [other if each == token_id else each for each in prompt]
        if request.picture is None:
            made.append(plain)
            continue
        rng = np.random.default_rng([workload.seed, _PIXELS, draw, index])
        pixels = rng.integers(0, 256, (*request.picture, 3), np.uint8)
        ids = [*plain[:1], token_id, *plain[1:]]
        made.append({"prompt_token_ids": ids, "multi_modal_data": {"image": pixels}})
    return made
