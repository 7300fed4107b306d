"""The roofline of a step on chips by their data sheets: what cannot be faster, not what was measured."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from jaxserve.config import ScheduleConfig
from jaxserve.engine.costs import attention_cost
from jaxserve.metrics import PeakRates, split_time
from jaxserve.models.arch import ArchConfig
from jaxserve.models.registry import flop_counts
from jaxserve.planner.program import Collective


@dataclass(frozen=True)
class Roofline:
    """Prediction of steps: the longer of reading and computing at the peak rates, then the exchanges between the chips.

    Launches, latencies, host work and whatever a kernel leaves unused come on top.

    Attributes:
        arch: what one device has of the model.
        schedule: sizes of steps.
        peak_rates: rates of one device.
        link_bytes_per_s: from a chip to the others, in one direction.
        num_chips: that the model is split over.
        matrix_bytes: of weights that every step reads, on one device.
        embedding_row_bytes: of what each token of a step reads besides.
        kv_token_bytes: of one token in the pool of one device, all layers.
        collectives: of one layer.
        collective_tokens: of the step that these were counted in.
    """

    arch: ArchConfig
    schedule: ScheduleConfig
    peak_rates: PeakRates
    link_bytes_per_s: float
    num_chips: int
    matrix_bytes: int
    embedding_row_bytes: int
    kv_token_bytes: int
    collectives: tuple[Collective, ...]
    collective_tokens: int

    def decode_ms(self, num_rows: int, context_tokens: int) -> float:
        """A step in which every row has one token, after so many others."""
        return self.step_ms([context_tokens - 1] * num_rows, [1] * num_rows)

    def ttft_ms(self, prompt_tokens: int) -> float:
        """All steps of a prompt that is alone."""
        budget = self.schedule.max_num_batched_tokens
        starts = range(0, prompt_tokens, budget)
        return sum(self.step_ms([start], [min(budget, prompt_tokens - start)]) for start in starts)

    def step_ms(self, starts: Sequence[int], counts: Sequence[int]) -> float:
        """A step whose rows compute so many tokens, after so many others."""
        bucket = min(size for size in self.schedule.buckets() if size >= sum(counts))
        attention = attention_cost(np.array(starts), np.array(counts), self.arch.windows)
        kv_bytes = attention.num_kv_tokens * self.kv_token_bytes // self.arch.num_layers
        num_bytes = self.matrix_bytes + bucket * self.embedding_row_bytes + kv_bytes
        flops = flop_counts(self.arch).step(bucket, self.schedule.num_rows(bucket), attention.num_scores)
        split = split_time(0.0, flops, num_bytes, self.peak_rates)
        return max(split.compute_ms, split.memory_ms) + self._exchange_ms(bucket)

    def _exchange_ms(self, num_tokens: int) -> float:
        """Of rings over all links: each chip sends all parts but one, of a sum twice."""
        if self.num_chips == 1:
            return 0.0  # parts of a chip meet within it
        share = (self.num_chips - 1) / self.num_chips
        sent = sum((2 if x.kind == "all-reduce" else 1) * share * x.num_bytes for x in self.collectives)
        return sent * self.arch.num_layers * num_tokens / self.collective_tokens / self.link_bytes_per_s * 1e3
