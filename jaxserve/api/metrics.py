"""Step statistics and engine totals. Names end in their units.

A step's wall time runs from the start of its planning, or from the end of the previous step if that was later, until
its result is available. Wall times do not overlap, and idle time belongs to no step.
"""

import dataclasses
from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import zip_longest
from typing import NamedTuple

from jaxserve.api.cached_tokens import NO_CACHED_TOKENS, CachedTokens

# vLLM's bucket bounds for tokens per iteration; a last bucket has no bound.
ITERATION_TOKENS = (1, *(2**power for power in range(3, 15)))


@dataclass(frozen=True, slots=True)
class PeakRates:
    """A device's peak rates: FLOP/s of a large matmul, and bandwidth for an array larger than its caches."""

    flops_per_s: float
    bytes_per_s: float


@dataclass(frozen=True, slots=True)
class TimeSplit:
    """Wall time of one or more steps, split by the device's roofline (Williams et al., 2009).

    Attributes:
        compute_ms: time for the floating-point operations at the peak rate.
        memory_ms: time to read weights, and to read and write keys and values, at the peak rate.
        stall_ms: rest of the wall time: host work, launches, operations below their peak rate. It is 0 if the other two
            exceed the wall time, because a device computes while it reads.
    """

    compute_ms: float
    memory_ms: float
    stall_ms: float

    @property
    def total_ms(self) -> float:
        """Wall time, or `compute_ms + memory_ms` if that is longer."""
        return self.compute_ms + self.memory_ms + self.stall_ms

    @property
    def efficiency(self) -> float:
        """Fraction of the time that computes at the peak rate, in [0, 1]: compute / (compute + memory + stall).

        It is 0 if no time has passed.
        """
        return self.compute_ms / self.total_ms if self.total_ms else 0.0

    @property
    def roofline_share(self) -> float:
        """(compute + memory) / (compute + memory + stall): the fraction that the device's peak rates explain."""
        return 1 - self.stall_ms / self.total_ms if self.total_ms else 0.0


def split_time(wall_ms: float, flops: int, num_bytes: int, peak_rates: PeakRates) -> TimeSplit:
    """Split the wall time in which a device computed `flops` operations, and read or wrote `num_bytes` bytes."""
    compute_ms = flops / peak_rates.flops_per_s * 1e3
    memory_ms = num_bytes / peak_rates.bytes_per_s * 1e3
    return TimeSplit(compute_ms, memory_ms, max(0.0, wall_ms - compute_ms - memory_ms))


class Occupancy(NamedTuple):
    """An engine's requests and pages at one time.

    Attributes:
        num_running: requests with pages and a slot.
        num_waiting: requests without pages and slot, new or preempted.
        num_pages_used: pages that running requests hold.
        num_pages: pages in all pools.
        num_deferred: waiting requests that wait for a prompt with which they share a prefix.
    """

    num_running: int
    num_waiting: int
    num_pages_used: int
    num_pages: int
    num_deferred: int = 0


@dataclass(frozen=True, slots=True)
class Counts:
    """Counts by position; missing ones are zero."""

    values: tuple[int, ...] = ()

    def __add__(self, other: "Counts") -> "Counts":
        return Counts(tuple(a + b for a, b in zip_longest(self.values, other.values, fillvalue=0)))

    def __sub__(self, other: "Counts") -> "Counts":
        return Counts(tuple(a - b for a, b in zip_longest(self.values, other.values, fillvalue=0)))


@dataclass(frozen=True, slots=True)
class LayerCounts:
    """Counts by layer and position; missing ones are zero."""

    layers: tuple[Counts, ...] = ()

    @classmethod
    def from_rows(cls, counts: Iterable[Iterable[int]]) -> "LayerCounts":
        """Return the counts in a matrix, one row per layer."""
        return cls(tuple(Counts(tuple(layer)) for layer in counts))

    def __add__(self, other: "LayerCounts") -> "LayerCounts":
        return LayerCounts(tuple(a + b for a, b in zip_longest(self.layers, other.layers, fillvalue=Counts())))

    def __sub__(self, other: "LayerCounts") -> "LayerCounts":
        return LayerCounts(tuple(a - b for a, b in zip_longest(self.layers, other.layers, fillvalue=Counts())))

    def total(self) -> Counts:
        """Return the sums over all layers, by position."""
        return sum(self.layers, Counts())


@dataclass(frozen=True, slots=True)
class Energy:
    """Joules by use, as distributed from a meter's readings; None without a meter.

    Attributes:
        requests_j: energy of steps, the sum over requests.
        idle_j: energy of the time between steps.
    """

    requests_j: float | None = None
    idle_j: float | None = None

    def __sub__(self, other: "Energy") -> "Energy":
        if self.requests_j is None or self.idle_j is None:
            return self
        return Energy(self.requests_j - (other.requests_j or 0.0), self.idle_j - (other.idle_j or 0.0))

    @property
    def total_j(self) -> float | None:
        """Energy of the meter's readings."""
        return None if self.requests_j is None or self.idle_j is None else self.requests_j + self.idle_j


def co2_g(joules: float | None, carbon_intensity: int | float | None) -> float | None:
    """Return the grams of CO2 for an energy, given grams per kWh; None if either is unknown."""
    return None if joules is None or carbon_intensity is None else joules / 3.6e6 * carbon_intensity


@dataclass(frozen=True, slots=True)
class StepStats:
    """Statistics for one dispatch with one or more steps; bytes and FLOPs are per device."""

    step_id: int
    num_steps: int  # steps that ran
    num_rows: int
    num_tokens: int  # computed for requests
    num_padding_tokens: int  # padding up to the bucket size
    num_prefill_tokens: int
    num_decode_tokens: int
    cached_tokens: CachedTokens  # tokens that admissions of this step found in the prefix cache
    num_sought_tokens: int  # their tokens that lower tiers, if there are any, were searched for
    num_preemptions: int
    num_pages_used: int
    num_slack_tokens: int  # unused positions in allocated pages
    num_waiting: int
    host_ms: float  # schedule, pack and dispatch
    device_ms: float  # time from dispatch, or the end of the previous step, to result
    wall_ms: float  # see the module's docstring; at most host_ms + device_ms
    weight_bytes: int  # read by the step
    kv_bytes: int  # read and written by the step
    flops: int  # matmuls' and attention's, padding included
    num_draft_rounds: int = 0  # rounds with drafts, counted per row
    num_drafted_tokens: int = 0
    num_accepted_tokens: int = 0  # drafted tokens that were accepted
    accepted_per_position: Counts = Counts()  # accepted tokens by draft position
    expert_tokens: LayerCounts = LayerCounts()  # tokens per expert; empty unless `count_expert_tokens` is on
    num_encoder_inputs: int = 0  # images that the vision tower encoded for the step
    num_encoder_output_tokens: int = 0  # their embeddings

    @property
    def num_cached_tokens(self) -> int:
        """Number of tokens that admissions of this step found in the prefix cache, in any tier."""
        return self.cached_tokens.total

    def split(self, peak_rates: PeakRates) -> TimeSplit:
        """Split the step's wall time by the device's peak rates."""
        return split_time(self.wall_ms, self.flops, self.weight_bytes + self.kv_bytes, peak_rates)


@dataclass(slots=True)
class EngineStats:
    """Totals since start."""

    num_steps: int = 0
    num_dispatches: int = 0  # fewer than steps if a dispatch has several
    num_tokens: int = 0
    num_padding_tokens: int = 0
    num_prefill_tokens: int = 0
    num_decode_tokens: int = 0
    cached_tokens: CachedTokens = NO_CACHED_TOKENS  # tokens found in the prefix cache, by tier
    num_sought_tokens: int = 0  # tokens that lower tiers were searched for
    num_preemptions: int = 0
    num_loaded_pages: int = 0  # pages copied from lower tiers to the pool
    num_stored_pages: int = 0  # pages copied to a lower tier, once for each
    num_dropped_pages: int = 0  # pages not stored, as the disk was too slow
    num_corrupt_pages: int = 0  # pages on disk that failed their checksum
    num_sampled_tokens: int = 0
    num_output_tokens: int = 0  # tokens returned to users
    num_finished: int = 0
    num_compiles: int = 0  # compilations after warm-up, normally 0
    used_page_steps: int = 0  # sum over steps of pages used
    slack_token_steps: int = 0  # sum over steps of allocated positions that held nothing
    host_ms: float = 0.0
    device_ms: float = 0.0
    wall_ms: float = 0.0
    weight_bytes: int = 0
    kv_bytes: int = 0
    flops: int = 0
    num_draft_rounds: int = 0  # rounds with drafts, counted per row
    num_drafted_tokens: int = 0
    num_accepted_tokens: int = 0  # drafted tokens that were accepted
    accepted_per_position: Counts = Counts()  # accepted tokens by draft position
    expert_tokens: LayerCounts = LayerCounts()  # tokens per expert; empty unless `count_expert_tokens` is on
    num_encoder_inputs: int = 0  # images that the vision tower encoded, again if they had left the encoder cache
    num_encoder_output_tokens: int = 0  # their embeddings
    # Steps with outputs, by the bucket of ITERATION_TOKENS for the tokens that requests got in them and the prompt
    # tokens computed for their first ones, as vLLM counts; and the sum of these tokens.
    iterations_by_tokens: Counts = Counts()
    num_iteration_tokens: int = 0
    energy: Energy = Energy()

    def add(self, step: StepStats) -> None:
        """Add one dispatch's statistics to the totals."""
        self.num_dispatches += 1
        self.used_page_steps += step.num_pages_used * step.num_steps
        self.slack_token_steps += step.num_slack_tokens * step.num_steps
        for name in _SUMMED:
            setattr(self, name, getattr(self, name) + getattr(step, name))

    def add_iterations(self, num_tokens: Iterable[int]) -> None:
        """Count steps with outputs, given the tokens of each, by bucket; steps without tokens do not count."""
        for count in num_tokens:
            if count:
                bucket = bisect_left(ITERATION_TOKENS, count)
                self.iterations_by_tokens += Counts((0,) * bucket + (1,))
                self.num_iteration_tokens += count

    def since(self, earlier: "EngineStats") -> "EngineStats":
        """Return the difference to `earlier`, a copy of these totals from `dataclasses.replace(stats)`."""
        names = [field.name for field in dataclasses.fields(self)]
        return EngineStats(**{name: getattr(self, name) - getattr(earlier, name) for name in names})

    def split(self, peak_rates: PeakRates) -> TimeSplit:
        """Split the wall time since start by the device's peak rates."""
        return split_time(self.wall_ms, self.flops, self.weight_bytes + self.kv_bytes, peak_rates)

    @property
    def num_cached_tokens(self) -> int:
        """Number of tokens found in the prefix cache, in any tier."""
        return self.cached_tokens.total

    @property
    def num_wasted_tokens(self) -> int:
        """Number of tokens that were sampled but not returned, after a late stop or an abort."""
        return self.num_sampled_tokens - self.num_output_tokens

    @property
    def acceptance_rate(self) -> float:
        """Fraction of drafted tokens that were accepted."""
        return self.num_accepted_tokens / max(1, self.num_drafted_tokens)

    @property
    def padding_share(self) -> float:
        """Fraction of computed tokens that are padding."""
        return self.num_padding_tokens / max(1, self.num_tokens + self.num_padding_tokens)

    def page_slack_share(self, page_size: int) -> float:
        """Return the fraction of allocated positions that are unused, averaged over steps."""
        return self.slack_token_steps / max(1, self.used_page_steps * page_size)


_SUMMED = tuple({f.name for f in dataclasses.fields(StepStats)} & {f.name for f in dataclasses.fields(EngineStats)})


@dataclass(frozen=True, slots=True)
class Metric:
    """A number under vLLM's metric name."""

    name: str


@dataclass(frozen=True, slots=True)
class Counter(Metric):
    """Total since start."""

    value: int


@dataclass(frozen=True, slots=True)
class Gauge(Metric):
    """Value now."""

    value: float


@dataclass(frozen=True, slots=True)
class Vector(Metric):
    """Totals since start by position."""

    values: list[int]


def vllm_metrics(stats: EngineStats, occupancy: Occupancy) -> list[Metric]:
    """Return an engine's metrics under vLLM's names."""
    return [
        Gauge("vllm:num_requests_running", float(occupancy.num_running)),
        Gauge("vllm:num_requests_waiting", float(occupancy.num_waiting)),
        Gauge("vllm:kv_cache_usage_perc", occupancy.num_pages_used / max(occupancy.num_pages, 1)),
        Counter("vllm:num_preemptions", stats.num_preemptions),
        Counter("vllm:prompt_tokens", stats.num_prefill_tokens + stats.num_cached_tokens),
        Counter("vllm:prompt_tokens_cached", stats.num_cached_tokens),
        Counter("vllm:generation_tokens", stats.num_output_tokens),
        Counter("vllm:prefix_cache_queries", stats.num_prefill_tokens + stats.num_cached_tokens),
        Counter("vllm:prefix_cache_hits", stats.cached_tokens.device),
        Counter("vllm:external_prefix_cache_queries", stats.num_sought_tokens),
        Counter("vllm:external_prefix_cache_hits", stats.cached_tokens.loaded),
        Counter("vllm:spec_decode_num_drafts", stats.num_draft_rounds),
        Counter("vllm:spec_decode_num_draft_tokens", stats.num_drafted_tokens),
        Counter("vllm:spec_decode_num_accepted_tokens", stats.num_accepted_tokens),
        Vector("vllm:spec_decode_num_accepted_tokens_per_pos", list(stats.accepted_per_position.values)),
    ]
