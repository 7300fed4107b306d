"""Statistics of steps: sums, differences, and the split of wall time."""

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxserve.api.cached_tokens import CachedTokens
from jaxserve.api.metrics import Counts, EngineStats, LayerCounts, PeakRates, StepStats, TimeSplit, split_time

PEAK_RATES = PeakRates(flops_per_s=2e9, bytes_per_s=1e9)


def a_step(step_id: int, **fields: float) -> StepStats:
    """Return a step whose numbers all differ."""
    kinds = {field.name: float if field.name.endswith("_ms") else int for field in dataclasses.fields(StepStats)}
    del kinds["accepted_per_position"], kinds["expert_tokens"], kinds["cached_tokens"]
    numbers = {name: kind(step_id + index) for index, (name, kind) in enumerate(kinds.items())}
    expert_tokens = LayerCounts.from_rows([(step_id, 4), (5, step_id + 6)][: 1 + step_id])
    counts = Counts((step_id + 3, 2, step_id))
    cached = CachedTokens(step_id + 7, step_id, 3)
    values = {"accepted_per_position": counts, "expert_tokens": expert_tokens, "cached_tokens": cached}
    return StepStats(**numbers | fields | values)


def test_time_is_split_by_the_peak_rates() -> None:
    split = a_step(0, wall_ms=10.0, flops=4_000_000, weight_bytes=2_500_000, kv_bytes=500_000).split(PEAK_RATES)
    assert split == TimeSplit(compute_ms=2.0, memory_ms=3.0, stall_ms=5.0)
    assert split.efficiency == pytest.approx(0.2)
    assert split.roofline_share == pytest.approx(0.5)


def test_a_step_that_overlaps_compute_and_memory_has_no_stall() -> None:
    split = split_time(4.0, 4_000_000, 3_000_000, PEAK_RATES)
    assert split == TimeSplit(compute_ms=2.0, memory_ms=3.0, stall_ms=0.0)
    assert split.efficiency == pytest.approx(0.4)
    assert split.roofline_share == 1


def test_no_time_has_no_efficiency() -> None:
    assert EngineStats().split(PEAK_RATES).efficiency == 0
    assert EngineStats().split(PEAK_RATES).roofline_share == 0


@given(wall_ms=st.floats(0, 1e6), flops=st.integers(0, 10**15), num_bytes=st.integers(0, 10**12))
def test_fractions_stay_in_range(wall_ms: float, flops: int, num_bytes: int) -> None:
    split = split_time(wall_ms, flops, num_bytes, PEAK_RATES)
    assert min(split.compute_ms, split.memory_ms, split.stall_ms) >= 0
    assert 0 <= split.efficiency <= split.roofline_share + 1e-9
    assert split.roofline_share <= 1
    assert split.total_ms >= wall_ms * (1 - 1e-9)


def test_totals_are_sums_and_differences_of_steps() -> None:
    stats = EngineStats()
    stats.add(a_step(0))
    before = dataclasses.replace(stats)
    stats.add(a_step(100))
    added = stats.since(before)
    for field in dataclasses.fields(StepStats):
        if field.name in ("step_id", "num_rows", "num_pages_used", "num_slack_tokens", "num_waiting"):
            continue
        assert getattr(added, field.name) == getattr(a_step(100), field.name)
        assert getattr(stats, field.name) == getattr(a_step(0), field.name) + getattr(a_step(100), field.name)
    assert stats.expert_tokens.total() == Counts((105, 114))
    assert added.num_steps == a_step(100).num_steps  # one or several per dispatch
    assert added.used_page_steps == a_step(100).num_pages_used * a_step(100).num_steps
