"""Roofline from data sheets: a lower bound for a step's time, not a measurement."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from jaxserve.api.metrics import PeakRates, split_time
from jaxserve.models.arch import ArchConfig
from jaxserve.models.family import FlopCounts
from jaxserve.models.registry import flop_counts
from jaxserve.models.weight_reads import WeightReads
from jaxserve.scheduling.even_chunks import EvenChunks
from jaxserve.scheduling.schedule_config import ScheduleConfig
from jaxserve.scheduling.step_costs import attention_cost
from jaxserve.tools.planner.program import Collective


@dataclass(frozen=True)
class Roofline:
    """Predicted step times: the longer of memory and compute time at the peak rates, plus the collectives.

    Launch overhead, latencies, host work and kernel inefficiency are not included.

    Attributes:
        arch: one device's part, see `ArchConfig.local`.
        schedule: step sizes.
        peak_rates: peak rates per device.
        link_bytes_per_s: bandwidth from a chip to the others, in one direction.
        num_chips: chips that the model is split over.
        weight_reads: weight bytes that steps read on each device.
        kv_token_bytes: bytes per token in a device's pool, over all layers.
        state_bytes: recurrent states per sequence on a device, which a step reads and writes.
        collectives: collectives per layer.
        collective_tokens: tokens in the step in which `collectives` were counted.
    """

    arch: ArchConfig
    schedule: ScheduleConfig
    peak_rates: PeakRates
    link_bytes_per_s: float
    num_chips: int
    weight_reads: WeightReads
    kv_token_bytes: int
    state_bytes: int
    collectives: tuple[Collective, ...]
    collective_tokens: int

    @cached_property
    def _buckets(self) -> tuple[int, ...]:
        return self.schedule.buckets()

    @cached_property
    def _flop_counts(self) -> FlopCounts:
        return flop_counts(self.arch)

    def decode_ms(self, num_rows: int, context_tokens: int) -> float:
        """Return the time for a decode step with `context_tokens` per row."""
        return self.step_ms([context_tokens - 1] * num_rows, [1] * num_rows)

    def ttft_ms(self, prompt_tokens: int) -> float:
        """Return the time for all prefill steps of a prompt that runs alone."""
        budget = self.schedule.shard_config.max_num_batched_tokens
        starts = range(0, prompt_tokens, budget)
        return sum(self.step_ms([start], [min(budget, prompt_tokens - start)]) for start in starts)

    def step_ms(self, starts: Sequence[int], counts: Sequence[int]) -> float:
        """Return the time for a step in which rows compute `counts` tokens after `starts` earlier ones.

        Rows are dealt to shards in turn, so that the first shard has the most tokens.
        """
        num_shards = self.schedule.num_data_shards
        bucket = min(size for size in self._buckets if size >= num_shards * sum(counts[::num_shards]))
        windows = [layer.window for layer in self.arch.attention_layers]
        choice = self.arch.token_choice
        attention = attention_cost(np.array(starts), np.array(counts), windows, self.schedule.sparsity, choice)
        num_parts = len(self.arch.attention_layers) * num_shards
        kv_bytes = attention.num_kv_tokens * self.kv_token_bytes // num_parts
        num_bytes = self.weight_reads.step(bucket, sum(counts)) + kv_bytes + 2 * len(counts) * self.state_bytes
        flops = self._flop_counts.step(bucket, self.schedule.num_rows(bucket), attention.num_scores)
        split = split_time(0.0, flops, num_bytes, self.peak_rates)
        return max(split.compute_ms, split.memory_ms) + self.exchange_ms(bucket)

    def exchange_ms(self, num_tokens: int) -> float:
        """Return the time for ring exchanges over all links: a chip sends n - 1 of n shards, in an all-reduce twice.

        A reduce-scatter's result is one shard; the other collectives' results are all shards.
        """
        if self.num_chips == 1:
            return 0.0  # exchanges between the devices of one chip are not modelled
        fraction = (self.num_chips - 1) / self.num_chips
        factors = {"all-reduce": 2, "reduce-scatter": self.num_chips}
        sent = sum(factors.get(x.kind, 1) * fraction * x.num_bytes for x in self.collectives)
        return sent * self.arch.num_layers * num_tokens / self.collective_tokens / self.link_bytes_per_s * 1e3


@dataclass(frozen=True)
class StageTimes:
    """Predicted times of pipeline stages, of which each computes another step simultaneously; or of a single stage.

    Attributes:
        rooflines: rooflines of the stages.
    """

    rooflines: Sequence[Roofline]

    def part(self, num_rows: int) -> int:
        """Return the number of rows in a step if `num_rows` rows take turns."""
        return -(-num_rows // len(self.rooflines))

    def decode_ms(self, num_rows: int, context_tokens: int) -> float:
        """Return the time from a row's token to its next one, with `context_tokens` per row.

        The steps of all rows pass through the most expensive stage, and each passes through all stages.
        """
        times = [roofline.decode_ms(self.part(num_rows), context_tokens) for roofline in self.rooflines]
        return max(sum(times), min(num_rows, len(times)) * max(times))

    def ttft_ms(self, prompt_tokens: int) -> float:
        """Return the time for all chunks of a prompt that runs alone."""
        schedule = self.rooflines[0].schedule.shard_config
        chunks, free_ms, start = EvenChunks(schedule, schedule.smallest_chunk), [0.0] * len(self.rooflines), 0
        while start < prompt_tokens:
            num_left = prompt_tokens - start
            num_tokens = min(num_left, schedule.max_num_batched_tokens, chunks.max_tokens(start, num_left, 0))
            end_ms = 0.0
            for stage, roofline in enumerate(self.rooflines):
                end_ms = free_ms[stage] = max(free_ms[stage], end_ms) + roofline.step_ms([start], [num_tokens])
            start += num_tokens
        return free_ms[-1]

    @staticmethod
    def idle(times_ms: Sequence[float]) -> float:
        """Return the fraction of time for which stages wait for the most expensive one, given each stage's time."""
        return 1 - sum(times_ms) / len(times_ms) / max(times_ms)
