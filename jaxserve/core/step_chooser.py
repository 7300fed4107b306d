"""StepChooser: chooses the limits of the next plan. Only here do measured times matter; they never affect tokens."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

import numpy as np

from jaxserve.api.config import MAX_STEPS
from jaxserve.scheduling.executor_protocol import Executor, StepResult
from jaxserve.scheduling.pacer import DISPATCH_S, Pacer
from jaxserve.scheduling.step_plan import StepChoice, StepPlan, StepShape, Timing

if TYPE_CHECKING:
    from jaxserve.api.config import EngineConfig
    from jaxserve.core.step_stats import InFlight
    from jaxserve.scheduling.request import Request
    from jaxserve.scheduling.scheduler import Scheduler
    from jaxserve.scheduling.step_time import StepTime

TWO_ROUNDS = 2  # minimum rounds of every multi-step program


class StepChooser:
    """Chooses the limits of each plan, and learns from steps that have ended. The tokens do not depend on the choice.

    Args:
        config: engine options.
        scheduler: source of running rows.
        executor: source of programs.
        step_time: measured step times.

    Attributes:
        may_draft: False to disable drafts.
    """

    def __init__(self, config: EngineConfig, scheduler: Scheduler, executor: Executor, step_time: StepTime) -> None:
        speculation, schedule = config.speculation, executor.schedule
        self.may_draft = True
        self._scheduler, self._executor, self._step_time = scheduler, executor, step_time
        self._max_in_flight = 1 + schedule.row_turns if config.step_ahead else 1
        self._max_drafts, self._max_logprobs = schedule.max_drafts, schedule.max_logprobs
        is_timed = config.multi_step == "auto"
        self._max_steps = MAX_STEPS if is_timed else int(config.multi_step)
        self._pacer = Pacer(
            step_time,
            schedule.max_drafts,
            schedule.max_num_seqs,
            adaptive=speculation is not None and speculation.adaptive,
            dispatch_s=DISPATCH_S if is_timed else math.inf,
        )

    def may_launch(self, in_flight: Sequence[InFlight], constrained: Collection[Request]) -> bool:
        """Return whether a step may start before those in flight are read.

        Args:
            in_flight: steps in flight, oldest first.
            constrained: unfinished requests with a constraint.
        """
        scheduler = self._scheduler
        if in_flight and constrained and len(scheduler.rows.waiting_slots) == scheduler.num_running:
            can_split = self._may_split(constrained) and not any(request.may_be_extended for request in constrained)
            if not can_split:  # one step with all rows is faster than two with part of the rows each
                return False
        return len(in_flight) < self._max_in_flight

    def choose(
        self, now_s: float, in_flight: Sequence[InFlight], constrained: Collection[Request]
    ) -> StepChoice | None:
        """Return the limits of the next plan; None if no step may start yet.

        Args:
            now_s: current time.
            in_flight: steps in flight, oldest first.
            constrained: unfinished requests with a constraint.
        """
        if not self.may_launch(in_flight, constrained):
            return None
        num_drafts, max_rounds = self._choose_rounds()
        may_split = not num_drafts and self._may_split(constrained)
        return StepChoice(1 if may_split else max_rounds, num_drafts, self._timing(now_s, in_flight), may_split)

    def launched(self, plan: StepPlan) -> bool:
        """Record the plan made with the latest choice; return whether its dispatch is a scout (see `Pacer`)."""
        return not plan.num_prefill_tokens and self._pacer.launched(max(plan.num_drafts, default=0), plan.num_steps)

    def ended(self, step: InFlight, result: StepResult) -> None:
        """Pass the duration and accepted drafts of a step that has ended to the pacer, which learns from them."""
        plan, rounds, num_tokens = step.plan, result.rounds, result.num_tokens[: step.plan.num_rows]
        program = self._program(plan.num_rows, plan.num_even_rows, has_drafts=bool(plan.num_drafts) or self.may_draft)
        if self._max_drafts and plan.admitted:
            self._pacer.acceptance.admit([r.slot for r in plan.admitted if r.slot >= 0])
        if plan.num_prefill_tokens or plan.is_split or program is None:
            self._pacer.pause()
            return
        num_rounds, max_drafts = int(num_tokens.max()), max(plan.num_drafts, default=0)
        mean, is_scout = float(num_rounds), step.is_scout
        if rounds is not None:
            num_rounds = int(rounds.sampled[: plan.num_rows].any(axis=0).sum())
            own = [row for row, request in enumerate(plan.requests) if request.slot == plan.slots[row]]
            slots = [plan.slots[row] for row in own]
            self._pacer.acceptance.add(slots, rounds.wanted[own], rounds.accepted[own])
            mean = float((num_tokens[np.array(plan.num_drafts) > 0] if is_scout else num_tokens).mean())
        self._pacer.ended(program, max_drafts, plan.num_steps, num_rounds, mean, result.ended_s, is_scout=is_scout)

    def pause(self) -> None:
        """Discard the end time of the latest step, so that the time until the next end is not measured."""
        self._pacer.pause()

    def _may_split(self, constrained: Collection[Request]) -> bool:
        """Return whether the next plan may be split, so that constrained rows can compute a token that the host has not
        read yet.
        """
        if not constrained or self._max_in_flight == 1 or not self._scheduler.rows.has_split:
            return False
        return self._executor.fit(StepShape(self._scheduler.rows.num_even, samples_late=True)) is not None

    def _program(self, num_rows: int, num_even_rows: int, *, has_drafts: bool) -> StepShape | None:
        """Return the program under whose name dispatches of decoding rows are timed; None if there is none.

        Args:
            num_rows: decoding rows.
            num_even_rows: rows if each shard had as many as the fullest.
            has_drafts: True to prefer a program with drafts.
        """
        program = self._executor.fit(StepShape(num_rows, has_drafts=True)) if self._max_drafts and has_drafts else None
        return program or self._executor.fit(StepShape(num_even_rows, TWO_ROUNDS))

    def _choose_rounds(self) -> tuple[Sequence[int], int]:
        """Return the number of tokens to draft by slot (empty for none), and the maximum rounds or steps."""
        rows, num_running = self._scheduler.rows, self._scheduler.num_running
        program = self._program(num_running, rows.num_even, has_drafts=self.may_draft)
        if program is None or not num_running or self._has_whole_logprobs():
            return (), 1
        slots = rows.slots if program.has_drafts else []
        several = self._executor.fit(StepShape(rows.num_even, TWO_ROUNDS)) if slots else program
        max_steps = min(self._max_steps, several.num_rounds) if several else 1
        wanted, max_rounds = self._pacer.choose(program, slots, max_steps)
        if slots and wanted.any():
            by_slot = np.zeros(self._executor.schedule.max_num_seqs, np.int64)
            by_slot[slots] = wanted
            by_slot[rows.waiting_slots] = 0
            if by_slot.any():
                return by_slot.tolist(), max_rounds
        return (), min(max_rounds, max_steps)

    def _has_whole_logprobs(self) -> bool:
        """Return whether a request may want logprobs for the whole vocabulary, which allow one step at a time."""
        return self._max_logprobs < 0 and self._scheduler.rows.wants_logprobs

    def _timing(self, now_s: float, in_flight: Sequence[InFlight]) -> Timing | None:
        """Return the predicted times of the next step after those in flight; None without latency targets, or before
        any step was measured.
        """
        rates = self._step_time.rates() if self._scheduler.policy.targets else None
        if rates is None:
            return None
        starts_s = now_s
        if in_flight:
            plan = in_flight[-1].plan
            step_s = plan.num_steps * rates.step_s(plan.num_prefill_tokens, plan.num_decode_tokens)
            starts_s = max(now_s, in_flight[-1].handle.launched_s + step_s)
        return Timing(starts_s, rates.prefill_step_s, rates.prefill_token_s, rates.decode_token_s)
