"""Deadlines of tokens: what rows in decode can wait for is what prompts get."""

import pytest
from simulation import Loop, generate_alone, make_request, make_scheduler, starts

from jaxserve.api.config import EngineConfig
from jaxserve.errors import ConfigError
from jaxserve.scheduling.step_plan import StepChoice, Timing
from service_suites import SUITES, TARGETS, Run

pytestmark = pytest.mark.usefixtures("no_type_checks")


@pytest.mark.parametrize("policy", ["deadlines", "deadlines+vtc"])
def test_tokens_meet_deadlines_alongside_prompts_if_steps_take_as_measured(policy):
    run = Run(SUITES["overload"], policy, 20.0).run()
    plain = Run(SUITES["overload"], "fcfs", 20.0).run()
    # Slack that a row has saved makes a step longer, so that single intervals may exceed the target.
    assert sum(run.itl_s) / len(run.itl_s) <= TARGETS[0][2]
    assert run.num_tokens / run.now_s > 0.9 * plain.num_tokens / plain.now_s


def test_slack_turns_into_tokens_of_prompts():
    scheduler = make_scheduler(max_num_seqs=8, max_num_batched_tokens=64, targets=((0, 1.0, 0.1),))
    loop = Loop(scheduler)
    row = make_request("row", [1], 20)
    loop.add(row)

    def step(now_s):
        plan = scheduler.schedule(StepChoice(timing=Timing(now_s, 0.01, 0.001, 0.0)))
        loop.in_flight.append((plan, loop.device.run(plan)))
        loop.update()
        return starts(plan)

    step(0.95)
    long = make_request("long", [2] * 200, 2, priority=1)
    loop.add(long)
    assert step(1.0695)["long"] == (0, 20), "due at 1.1: 30 ms left, of which a step takes 10"
    assert step(1.30)["long"] == (20, 8), "late: the share that is reserved"
    assert step(0.50)["long"][1] == 32, "early: a chunk of a long prompt, as without targets"
    loop.drain()
    assert (row.output_token_ids, row.finish_reason) == generate_alone(row)
    assert (long.output_token_ids, long.finish_reason) == generate_alone(long)


def test_options_are_times_or_times_by_class():
    for wrong in ({"target_ttft_ms": 100}, {"target_itl_ms": -1}, {"target_itl_ms": "soon"}):
        with pytest.raises(ConfigError, match="target_"):
            EngineConfig(**wrong)
    EngineConfig(target_ttft_ms='{"0": 500}', target_itl_ms={0: 50, 1: 200})
    EngineConfig(target_itl_ms="50")
