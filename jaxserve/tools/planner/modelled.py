"""Executor that simulates steps: each takes the time that a roofline predicts, on a simulated clock.

A page mover simulates the copies from a lower tier on the same clock.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from jaxserve.models.registry import flop_counts
from jaxserve.scheduling.executor_protocol import StepResult
from jaxserve.scheduling.kv_cache.stored_pages import StoredPages
from jaxserve.scheduling.kv_cache.transfers import EndedMoves, Move, Requested
from jaxserve.scheduling.step_costs import Costs
from jaxserve.scheduling.step_plan import StepPlan, StepShape, cheapest
from jaxserve.tools.planner.speed import Roofline

TOKEN = 0  # token that every row samples


@dataclass(slots=True)
class ModelledStep:
    """Simulated step, whose end is known when it is launched.

    Attributes:
        executor: executor whose clock it advances.
        launched_s: simulated launch time.
        ended_s: simulated end time.
        max_new: tokens that each row samples.
        num_compiles: 0, as nothing is compiled.
    """

    executor: "ModelledExecutor"
    launched_s: float
    ended_s: float
    max_new: list[int]
    num_compiles: int = 0

    def is_ready(self) -> bool:
        """Return whether the simulated clock has reached `ended_s`."""
        return self.ended_s <= self.executor.now_s

    def result(self) -> StepResult:
        """Advance the clock to the end of the step and return its tokens."""
        self.executor.now_s = max(self.executor.now_s, self.ended_s)
        tokens = np.full((len(self.max_new), max(*self.max_new, 1)), TOKEN, np.int32)
        return StepResult(tokens, np.array(self.max_new, np.int32), self.ended_s)


class ModelledExecutor:
    """`Executor` of one replica that runs the real scheduler on devices simulated from their data sheet.

    Copies between pipeline stages take no time.

    Args:
        rooflines: the rooflines of the model's pipeline stages on their devices.

    Attributes:
        schedule: sizes of steps and pool.
        costs: costs of steps.
        now_s: simulated time; host work does not advance it.
        busy_s: time for which each stage has computed.
    """

    def __init__(self, *rooflines: Roofline) -> None:
        roofline = rooflines[0]
        self.schedule = roofline.schedule
        self.now_s = 0.0
        self._rooflines = rooflines
        self.busy_s = [0.0] * len(rooflines)
        self._sampled_s = [0.0] * self.schedule.max_num_seqs  # slot -> end of the latest step that has sampled
        weight_bytes, flops = roofline.weight_reads.step, flop_counts(roofline.arch).step
        self.costs = Costs(roofline.kv_token_bytes, weight_bytes, flops)
        self._programs = [StepShape(size) for size in self.schedule.buckets()]
        self._free_s = [0.0] * len(rooflines)  # stage -> end of the last step launched

    def fit(self, step: StepShape) -> StepShape | None:
        """Return the program for a step of one round; the roofline does not model the gain from more rounds."""
        return cheapest(self._programs, step)

    def launch(self, plan: StepPlan, program: StepShape) -> ModelledStep:
        """Launch a step, which starts on each stage as soon as the previous step has left it.

        On the first stage it also waits for its rows' latest tokens.
        """
        end_s = max([self.now_s, *(self._sampled_s[slot] for slot in plan.slots)])
        for stage, roofline in enumerate(self._rooflines):
            step_s = roofline.step_ms(plan.starts, plan.counts) / 1e3
            end_s = self._free_s[stage] = max(self._free_s[stage], end_s) + step_s
            self.busy_s[stage] += step_s
        for slot, max_new in zip(plan.slots, plan.max_new, strict=True):
            if max_new:
                self._sampled_s[slot] = end_s
        return ModelledStep(self, self.now_s, end_s, plan.max_new)

    def sample(self, step: ModelledStep) -> int:
        """Raise AssertionError: no plan needs a separate launch for sampling."""
        raise AssertionError("no plan is split")

    def restore_state(self) -> bool:
        """Return False: no device state was lost, so there is nothing to restore."""
        return False

    def close(self) -> None:
        pass


class ModelledMover:
    """`PageMover` over a simulated tier: each load takes the same time, one after another; stores take none.

    Args:
        executor: executor with the clock.
        num_pages: capacity of the tier.
        page_s: time to load a page.
    """

    def __init__(self, executor: ModelledExecutor, num_pages: int, page_s: float) -> None:
        self._executor, self._num_pages, self._page_s = executor, num_pages, page_s
        self._loading: deque[tuple[float, int]] = deque()  # end time and key of each load, in order
        self._ended: list[EndedMoves] = []

    def new_tiers(self) -> list[StoredPages]:
        """Return the scheduler's index of the tier."""
        return [StoredPages("disk", self._num_pages, outlives_device=True)]

    def page_s(self) -> list[float]:
        """Return the time to load a page from each tier."""
        return [self._page_s]

    @property
    def next_end_s(self) -> float | None:
        """Time at which the next load ends; None if there is none."""
        return self._loading[0][0] if self._loading else None

    def keep_states(self, kept: Sequence[tuple[int, int]]) -> None:
        """Copy states in no time."""

    def start_moves(self, requested: Requested) -> None:
        """Start the moves that the scheduler has requested."""
        if requested.forgotten:
            self._ended.append(EndedMoves([move.key for move in requested.forgotten], ok=False))
        moves = [each for each in requested.work if isinstance(each, Move)]
        if stored := [move.key for move in moves if not move.is_load]:
            self._ended.append(EndedMoves(stored, ok=True))
        for move in moves:
            if move.is_load:
                start_s = max(self._executor.now_s, self._loading[-1][0] if self._loading else 0.0)
                self._loading.append((start_s + self._page_s, move.key))

    def take_ended(self) -> list[EndedMoves]:
        """Return the moves that have ended since the last call."""
        ended, self._ended = self._ended, []
        loaded = []
        while self._loading and self._loading[0][0] <= self._executor.now_s:
            loaded.append(self._loading.popleft()[1])
        return [*ended, EndedMoves(loaded, ok=True)] if loaded else ended

    def sync(self) -> bool:
        """Return True: nothing is written."""
        return True

    def forget(self) -> None:
        """Forget all moves."""
        self._loading.clear()
        self._ended = []

    def close(self) -> None:
        pass
