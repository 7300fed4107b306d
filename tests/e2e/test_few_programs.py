"""The programs of TPUs, which are few: steps are padded more, and nothing else changes."""

from collections.abc import Callable

import pytest

from jaxserve.api.sampling_params import SamplingParams
from jaxserve.api.speculation_config import SpeculationConfig
from jaxserve.assembly.driven import DrivenEngine
from jaxserve.scheduling.step_plan import StepShape
from tests.e2e.workloads import assert_same, generate, tokens
from tests.soon_compiled import few_programs

STEPS = 5


@pytest.mark.long
def test_few_programs_give_the_same_tokens_as_many(start: Callable[..., DrivenEngine]) -> None:
    with few_programs():
        engine = start(max_num_batched_tokens=40, multi_step=STEPS, compile_ahead="all")
    runner = engine.replicas[0].executor
    assert sorted(runner.programs.table) == [(16, 1, 0, 0), (16, STEPS, 0, 0), (40, 1, 0, 0)]  # at most four rows each
    params = SamplingParams(temperature=1, max_tokens=12, ignore_eos=True, seed=5, frequency_penalty=0.5)
    for prompts in ([tokens(9, 0)], [tokens(n, n) for n in (20, 5, 14, 2)]):
        expected = generate(start(), prompts, params)
        dispatches, steps = engine.stats.num_dispatches, engine.stats.num_steps
        for output, wanted in zip(generate(engine, prompts, params), expected, strict=True):
            assert_same(output, wanted)
        assert engine.stats.num_dispatches - dispatches < engine.stats.num_steps - steps, "some dispatches had several"


@pytest.mark.full
def test_more_rows_than_several_steps_have_draft_nevertheless(start: Callable[..., DrivenEngine]) -> None:
    """Only a plain dispatch of at most 16 rows has several steps, so that those of more rows are not measured."""
    look_ups = SpeculationConfig(method="ngram", num_speculative_tokens=2)
    sizes = {"max_num_seqs": 20, "max_num_batched_tokens": 80, "num_pages": 400, "multi_step": "auto"}
    with few_programs():
        engine = start(speculative_config=look_ups, **sizes)
    assert engine.replicas[0].executor.fit(StepShape(20, 2)) is None
    generate(engine, [tokens(4, n) for n in range(20)], SamplingParams(temperature=0, max_tokens=30, ignore_eos=True))
    assert engine.stats.num_draft_rounds > 0
