"""Pipeline: an executor with several stages, each with some of the model's layers on its own devices.

The host dispatches a step's programs stage by stage and waits for none of them. Each stage's devices receive the hidden
states from the previous stage, and all stages the sampled tokens from the last one: one copy per stage and step. While
a stage computes a step, the others compute earlier and later steps. `ScheduleConfig.row_turns` gives plans different
rows, so that no step waits for the previous step's tokens.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

import jax
from jax.sharding import Sharding

from jaxserve.execution.program_store import compile_counter
from jaxserve.execution.runner import Runner, RunningStep
from jaxserve.execution.stage_step import stage_state_arrays, with_stage_arrays
from jaxserve.layers.sharding import replicated
from jaxserve.scheduling.step_costs import Costs
from jaxserve.scheduling.step_plan import StepPlan, StepShape, cheapest


class _Sampled(NamedTuple):
    """A step's sampled tokens, on the devices of all stages but the last.

    Attributes:
        slots: slots of the rows that sample.
        by_stage: arrays for `take_sampled`, by stage.
    """

    slots: frozenset[int]
    by_stage: Sequence[jax.Array]


class Pipeline:
    """Runners that together run plans, one per stage.

    Args:
        stages: at least two runners; the first one embeds tokens and the last one samples.

    Attributes:
        stages: the runners.
        schedule: sizes of steps and page pool, the same in all stages.
        costs: costs per step in the stage that reads the most weight bytes.
    """

    def __init__(self, stages: Sequence[Runner]) -> None:
        self.stages, self._last = tuple(stages), stages[-1]
        self.schedule = self._last.schedule
        self.costs = _largest_costs(stages)
        self._shardings = [_replicated(stage) for stage in stages]
        self._sampled: deque[_Sampled] = deque()  # sampled tokens that other stages lack, oldest first

    def fit(self, step: StepShape) -> StepShape | None:
        """Return the shape of the cheapest program that all stages have compiled and that can run a step."""
        program = self._last.fit(step)
        tables = [stage.programs.table for stage in self.stages]
        if program is None or all(program in table for table in tables):
            return program
        return cheapest(set.intersection(*map(set, tables)), step)

    def launch(self, plan: StepPlan, program: StepShape) -> RunningStep:
        """Dispatch a step on all stages, and start the download; see `Executor`."""
        compiles, upload = compile_counter.count, self._last.packer.pack(plan, program.num_tokens)
        self._take_sampled(plan)
        before: tuple[jax.Array, ...] = ()
        # Only the last stage has these tables. The first one has the histories too, which it may draft by.
        uploads = [upload._replace(masks=()), *[upload._replace(slot_rows=(), masks=())] * (len(self.stages) - 2)]
        for stage, sharding, own in zip(self.stages[:-1], self._shardings[1:], uploads, strict=True):
            before = jax.device_put(stage.run(plan, program, own, *before), sharding)
        if self.schedule.pools:  # no row has another token
            return self._last.started(plan, self._last.run(plan, program, upload, *before), compiles)
        output, sampled = self._last.run(plan, program, upload, *before)
        step = self._last.started(plan, output, compiles)
        slots = frozenset(slot for slot, max_new in zip(plan.slots, plan.max_new, strict=True) if max_new)
        if slots:
            others = self._shardings[:-1]
            self._sampled.append(_Sampled(slots, jax.device_put([sampled] * len(others), others)))
        return step

    def _take_sampled(self, plan: StepPlan) -> None:
        """Pass sampled tokens to the other stages before a plan computes their sequences or uses their slots again.

        Also pass the tokens that exist by the time when the first stage begins the plan.
        """
        slots = set(plan.slots)
        last = max((i for i, each in enumerate(self._sampled) if not slots.isdisjoint(each.slots)), default=-1)
        count = max(last + 1, len(self._sampled) + 1 - len(self.stages))
        for _ in range(count):
            for stage, sampled in zip(self.stages, self._sampled.popleft().by_stage, strict=False):
                assert stage.state is not None, "a pipeline that sleeps runs no plans"
                take = stage.programs.writers["take_sampled"]
                stage.state = with_stage_arrays(stage.state, take(stage_state_arrays(stage.state), sampled))

    def sample(self, step: RunningStep) -> int:
        """Refuse to sample: plans are never split."""
        raise AssertionError("plans over several stages are not split")

    def restore_state(self) -> bool:
        """Wait for all stages; if a failed step has destroyed the state of one, empty all and return True."""
        num_lost = sum(not stage.is_sound() for stage in self.stages)  # waits for each of them
        if not num_lost:
            return False
        self._sampled.clear()
        for stage in self.stages:
            stage.state = stage.programs.new_state()
        return True

    def close(self) -> None:
        """Wait for the steps in flight, failed or not, and free the memory of all stages."""
        self._sampled.clear()
        for stage in self.stages:
            stage.close()


def _replicated(stage: Runner) -> Sharding:
    """Return the sharding of arrays that all devices of a stage have."""
    assert stage.mesh is not None, "each stage has a mesh"
    return replicated(stage.mesh)


def _largest_costs(stages: Sequence[Runner]) -> Costs:
    """Return the costs per step in the stage that reads the most weight bytes."""
    return max((stage.costs for stage in stages), key=lambda costs: costs.weight_bytes(1, 1))
