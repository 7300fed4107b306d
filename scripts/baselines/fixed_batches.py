"""Requests with many output lengths for an engine that takes one length per batch."""

from collections.abc import Callable

GenerateBatch = Callable[[list[list[int]], int], list[list[int]]]


def generate_in_batches(
    generate_batch: GenerateBatch, prompts: list[list[int]], output_lens: list[int], batch_size: int
) -> list[list[int]]:
    """Return outputs in prompt order, from batches with similar output lengths; surplus tokens are cut."""
    order = sorted(range(len(prompts)), key=output_lens.__getitem__)
    outputs: list[list[int]] = [[] for _ in prompts]
    for first in range(0, len(order), batch_size):
        batch = order[first : first + batch_size]
        longest = max(output_lens[i] for i in batch)
        for i, ids in zip(batch, generate_batch([prompts[i] for i in batch], longest), strict=True):
            outputs[i] = ids[: output_lens[i]]
    return outputs
