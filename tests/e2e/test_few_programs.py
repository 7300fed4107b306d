"""The programs of TPUs, which are few: steps are padded more, and nothing else changes."""

from collections.abc import Callable
from dataclasses import replace

import pytest

from jaxserve.engine import build
from jaxserve.engine.engine import Engine
from jaxserve.request import SamplingParams
from tests.e2e.workloads import assert_same, generate, tokens

STEPS = 5


def test_tokens_are_those_of_many_programs(start: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch) -> None:
    def few(*args: object) -> object:
        return replace(schedule(*args), few_programs=True)

    schedule = build.build_schedule
    monkeypatch.setattr(build, "build_schedule", few)
    engine = start(max_num_batched_tokens=40, multi_step=STEPS, compile_ahead="all")
    runner = engine.replicas[0].executor
    assert sorted(runner.programs.steps) == [16, 40]
    assert list(runner.programs.multi_steps) == [16]  # each of at most four rows
    params = SamplingParams(temperature=1, max_tokens=12, ignore_eos=True, seed=5, frequency_penalty=0.5)
    for prompts in ([tokens(9, 0)], [tokens(n, n) for n in (20, 5, 14, 2)]):
        expected = generate(start(max_num_batched_tokens=40), prompts, params)
        dispatches, steps = engine.stats.num_dispatches, engine.stats.num_steps
        for output, wanted in zip(generate(engine, prompts, params), expected, strict=True):
            assert_same(output, wanted)
        assert engine.stats.num_dispatches - dispatches < engine.stats.num_steps - steps, "some dispatches had several"
