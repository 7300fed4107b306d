"""Padding of steps, and the number of programs that it takes."""

import dataclasses

import hypothesis.strategies as st
import pytest
from hypothesis import example, given

from jaxserve.api.config import MAX_STEPS, EngineConfig
from jaxserve.execution.packer import BatchPacker
from jaxserve.scheduling.policy import reserved_prefill_tokens
from jaxserve.scheduling.schedule_config import (
    MAX_STEP_TOKENS,
    MULTI_STEP_ROWS,
    ScheduleConfig,
    default_batch,
    resolve_schedule,
)
from jaxserve.scheduling.step_plan import StepShape, cheapest

MAX_PROGRAMS = 16  # programs on an accelerator, where each may take half a minute


def schedule(seqs: int, budget: int, *, few: bool) -> ScheduleConfig:
    return ScheduleConfig(seqs, budget, max_model_len=1024, page_size=16, num_pages=64, few_programs=few)


def several_rounds(sizes: ScheduleConfig, max_steps: int) -> list[int]:
    """Return the tokens of the programs of several rounds."""
    return [shape.num_tokens for shape in sizes.shapes(max_steps) if shape.num_rounds > 1]


def padding(sizes: ScheduleConfig, num_tokens: int) -> tuple[int, float]:
    """Tokens, and the share of those computed."""
    bucket = next(size for size in sizes.buckets() if size >= num_tokens)
    return bucket - num_tokens, 1 - num_tokens / bucket


@given(budget=st.integers(1, 20_000), few=st.booleans())
def test_every_step_has_a_bucket(budget: int, few: bool) -> None:
    buckets = schedule(1, budget, few=few).buckets()
    assert buckets[0] >= 1
    assert buckets[-1] == budget
    assert list(buckets) == sorted(set(buckets))


@given(seqs=st.integers(1, 130), few=st.booleans())
def test_split_plans_of_every_number_of_rows_have_a_layout(seqs: int, few: bool) -> None:
    sizes = dataclasses.replace(schedule(seqs, 256, few=few), has_split_steps=True)
    packer = BatchPacker(sizes, base_seed=0, vocab_size=100)
    late = [shape.num_tokens for shape in sizes.shapes() if shape.samples_late]
    assert late[-1] == seqs
    assert all(packer.layouts[bucket, False].num_rows == bucket for bucket in late)


@given(data=st.data(), budget=st.integers(1, 20_000))
def test_steps_are_padded_by_a_quarter_at_most(data: st.DataObject, budget: int) -> None:
    num_tokens = data.draw(st.integers(1, budget))
    count, share = padding(schedule(1, budget, few=False), num_tokens)
    assert share <= 0.25
    assert count == 0 or num_tokens > 8


@given(data=st.data(), budget=st.integers(1, 20_000))
def test_few_programs_pad_long_steps_by_a_third_at_most(data: st.DataObject, budget: int) -> None:
    """Short ones by less than their bucket of 16, or by three quarters."""
    num_tokens = data.draw(st.integers(1, budget))
    count, share = padding(schedule(1, budget, few=True), num_tokens)
    if num_tokens > 256:
        assert share < 1 / 3
    elif num_tokens > 16:
        assert share < 3 / 4
    else:
        assert count < 16


@pytest.mark.parametrize("platform", ["tpu", "gpu", "cuda"])
def test_programs_of_an_accelerator_are_few_by_default(platform: str) -> None:
    config = EngineConfig()
    sizes = resolve_schedule(config, max_position=131_072, platform=platform, page_size=16, num_pages=10_000)
    assert sizes.buckets() == (16, 64, 256, 384, 512, 768, 1024, 1536, 2048)
    assert several_rounds(sizes, config.max_steps) == [16]
    assert sizes.num_programs(config.max_steps) == 2 + 9 + 1 <= MAX_PROGRAMS
    larger = resolve_schedule(
        EngineConfig(max_num_batched_tokens=8192), max_position=131_072, platform=platform, page_size=16, num_pages=9
    )
    assert larger.num_programs(config.max_steps) <= MAX_PROGRAMS


def test_programs_of_a_cpu_run_several_steps_and_single_ones() -> None:
    config = EngineConfig()
    sizes = resolve_schedule(config, max_position=1024, platform="cpu", page_size=16, num_pages=64)
    assert not sizes.few_programs
    assert sizes.num_programs(config.max_steps) == 2 + len(sizes.buckets()) == 26
    assert sizes.shapes() == tuple(StepShape(size) for size in sizes.buckets())


@given(budget=st.integers(256, 1 << 20))
def test_doubling_the_step_adds_two_programs_on_accelerators(budget: int) -> None:
    once, twice = (len(schedule(1, size, few=True).buckets()) for size in (budget, 2 * budget))
    assert twice == once + 2


@pytest.mark.parametrize("on_cpu", [False, True])
@given(seqs=st.none() | st.integers(1, 5000), budget=st.none() | st.integers(1, 5000))
def test_the_default_budget_reserves_prompt_tokens_alongside_all_rows(
    on_cpu: bool, seqs: int | None, budget: int | None
) -> None:
    given_both = seqs is not None and budget is not None
    rows, tokens = default_batch(EngineConfig(max_num_seqs=seqs, max_num_batched_tokens=budget), on_cpu=on_cpu)
    assert (seqs or rows, budget or tokens) == (rows, tokens)
    assert given_both or rows == 1 or rows <= tokens - reserved_prefill_tokens(tokens)


@pytest.mark.parametrize("few", [False, True])
@given(seqs=st.integers(1, 300), budget=st.integers(300, 3000))
@example(seqs=3, budget=300)
def test_rows_that_may_go_several_steps(few: bool, seqs: int, budget: int) -> None:
    sizes = schedule(seqs, budget, few=few)
    several = several_rounds(sizes, MAX_STEPS)
    assert several == [*sizes.buckets()[: len(several)]]
    assert (
        1
        <= max(several)
        <= (min(seqs, MULTI_STEP_ROWS) if few and seqs >= MULTI_STEP_ROWS else max(seqs, MULTI_STEP_ROWS))
    )
    assert all(1 < sizes.max_steps(size, MAX_STEPS) <= MAX_STEP_TOKENS // sizes.num_rows(size) for size in several)
    assert several_rounds(sizes, 1) == []


@given(data=st.data(), few=st.booleans(), seqs=st.integers(1, 130), max_steps=st.integers(1, 64))
def test_the_cheapest_program_of_every_step_holds_it(data: st.DataObject, few: bool, seqs: int, max_steps: int) -> None:
    """None holds it with fewer tokens, and of those with as many tokens none with fewer rounds."""
    sizes = dataclasses.replace(schedule(seqs, 256, few=few), has_split_steps=True, max_drafts=3)
    shapes = sizes.shapes(max_steps)
    kind = data.draw(st.sampled_from(shapes))
    step = kind._replace(
        num_tokens=data.draw(st.integers(1, kind.num_tokens)), num_rounds=data.draw(st.integers(1, kind.num_rounds))
    )
    found = cheapest(shapes, step)
    assert found is not None
    assert found.holds(step)
    assert found <= kind
    assert not any(shape.holds(step) for shape in shapes if shape < found)
    assert cheapest(shapes, step._replace(num_tokens=257)) is None


@given(max_model_len=st.integers(1, 1 << 20), num_pages=st.integers(1, 1 << 20))
def test_buckets_depend_only_on_the_step_budget(max_model_len: int, num_pages: int) -> None:
    """Neither what the pool holds nor how long a request is makes another program."""
    sizes = schedule(8, 2048, few=True)
    other = dataclasses.replace(sizes, max_model_len=max_model_len, num_pages=num_pages)
    assert other.buckets() == sizes.buckets()
    assert other.shapes(2) == sizes.shapes(2)
