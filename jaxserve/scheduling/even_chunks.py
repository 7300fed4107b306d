"""EvenChunks: limits the prompt tokens in each step so that pipeline stages take equally long for all steps.

The last stage idles until a prompt's first chunk has passed all others, and the first stage while its last chunk passes
them. S stages thus lose the time that S - 1 chunks take, and the longest if chunks differ: many chunks of equal time
lose less than few of equal length, as later chunks attend to more tokens. Times are not measured, but counted from
FLOPs in multiples of the time that a token takes without attention.
"""

from __future__ import annotations

import sys
from bisect import bisect_right
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from jaxserve.scheduling.schedule_config import ScheduleConfig

CHUNKS_PER_STAGE = 16  # chunks from waiting prompts, for each stage but one, so that these idle a 16th of the time


class EvenChunks:
    """Chunk sizes for a pipeline.

    Args:
        sizes: step sizes; with one stage, chunks are not limited.
        smallest: minimum time of a chunk in tokens, as shorter ones are hardly faster; it also has half as many tokens.
    """

    def __init__(self, sizes: ScheduleConfig, smallest: int) -> None:
        self._num_fills, self._smallest = CHUNKS_PER_STAGE * (sizes.row_turns - 1), smallest
        self._score_costs, self._buckets = sizes.score_costs, sizes.buckets()

    def max_tokens(self, start: int, num_left: int, num_others: int) -> int:
        """Return the maximum prompt tokens in a step.

        The step then fills a program without padding, if one has about this size.

        Args:
            start: tokens before the step in the prompt computed first.
            num_left: tokens that all prompts have left.
            num_others: other tokens in the step.
        """
        if not self._num_fills:
            return sys.maxsize
        limit = max(num_left / self._num_fills, self._smallest)
        low, high, before = (self._smallest + 1) // 2, self._buckets[-1], self._time(start)
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if self._time(start + middle) - before <= limit else (low, middle - 1)
        bucket = self._buckets[max(bisect_right(self._buckets, low + num_others) - 1, 0)] - num_others
        return bucket if bucket > low // 2 else low

    def _time(self, num_tokens: int) -> float:
        """Return the time to compute the first `num_tokens` tokens of a prompt."""
        time = float(num_tokens)
        for window, cost in self._score_costs:
            unseen = 0 if window is None else max(num_tokens - window, 0)
            time += cost * (num_tokens * (num_tokens + 1) - unseen * (unseen + 1)) / 2
        return time
