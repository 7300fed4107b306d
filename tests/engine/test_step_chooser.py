"""Choosers of steps: another one makes other plans, and the same tokens."""

from collections.abc import Collection, Sequence
from dataclasses import replace
from pathlib import Path
from random import Random

import pytest

from jaxserve.api.config import EngineConfig
from jaxserve.core.event_log import EventLog, read_log, replay_log
from jaxserve.core.events import Scheduled
from jaxserve.core.step_chooser import StepChooser
from jaxserve.core.step_stats import InFlight
from jaxserve.scheduling.executor_protocol import Executor
from jaxserve.scheduling.request import Request
from jaxserve.scheduling.schedule_config import ScheduleConfig
from jaxserve.scheduling.scheduler import Scheduler
from jaxserve.scheduling.step_plan import StepChoice, Timing
from jaxserve.scheduling.step_time import StepTime
from tests.driven_core import DRAFTING, LARGER, SIZES, Driven


class RandomChooser(StepChooser):
    """Chooses at random within the limits of programs."""

    def __init__(self, config: EngineConfig, scheduler: Scheduler, executor: Executor, step_time: StepTime) -> None:
        super().__init__(config, scheduler, executor, step_time)
        self._random = Random(3)

    def choose(
        self, now_s: float, in_flight: Sequence[InFlight], constrained: Collection[Request]
    ) -> StepChoice | None:
        most = super().choose(now_s, in_flight, constrained)
        if most is None or self._random.random() < 0.2:  # or to wait for a step in flight
            return most if not in_flight else None
        timing = Timing(*(self._random.random() for _ in Timing._fields)) if self._random.random() < 0.5 else None
        may_split = most.may_split and self._random.random() < 0.5
        num_drafts = [self._random.randint(0, num) for num in most.num_drafts]
        if most.num_drafts and not any(num_drafts):
            return StepChoice(1, (), timing)
        return StepChoice(self._random.randint(1, most.max_steps), num_drafts, timing, may_split)


@pytest.mark.usefixtures("no_type_checks")
@pytest.mark.parametrize("sizes", [SIZES, replace(LARGER, targets=DRAFTING.targets), DRAFTING])
def test_another_chooser_makes_other_plans_of_the_same_tokens(tmp_path: Path, sizes: ScheduleConfig) -> None:
    """`drain` compares the tokens of each request with those that it gets alone."""
    choices: dict[str, list[StepChoice]] = {}
    for name, new_chooser in (("usual", StepChooser), ("random", RandomChooser)):
        log = EventLog(tmp_path / name, sizes)
        driven = Driven(sizes=sizes, max_steps=4, records=[log.record], new_chooser=new_chooser)
        draw = Random(7)
        for _ in range(40):
            prompt = [draw.randrange(5) for _ in range(draw.randrange(1, 20))]
            waits = draw.random() < 0.3
            driven.submit(prompt=prompt, max_tokens=draw.randrange(1, 20), priority=3 * waits, waits_for_tokens=waits)
            for _ in range(draw.randrange(4)):
                driven.step()
        driven.drain()
        log.close()
        choices[name] = [event.choice for event in read_log(tmp_path / name).events if isinstance(event, Scheduled)]
        assert replay_log(tmp_path / name) > 40
    assert sizes.max_drafts or {choice.max_steps for choice in choices["random"]} == {1, 2, 3, 4}
    assert len({tuple(choice.num_drafts) for choice in choices["random"]}) > 3 * (sizes.max_drafts > 0)
    assert not sizes.targets or any(choice.timing for choice in choices["random"])
    assert choices["usual"] != choices["random"]
