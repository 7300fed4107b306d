"""Step statistics, written while the device runs a later step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from jaxserve.api.metrics import Counts, EngineStats, LayerCounts, StepStats
from jaxserve.scheduling.executor_protocol import Executor, RoundCounts, StepHandle
from jaxserve.scheduling.step_costs import attention_cost
from jaxserve.scheduling.step_plan import StepPlan
from jaxserve.scheduling.step_time import StepTime

if TYPE_CHECKING:
    from jaxserve.core.energy import EnergyAccount
    from jaxserve.models.arch import ArchConfig


@dataclass(slots=True)
class InFlight:
    """A step from its dispatch on."""

    plan: StepPlan
    handle: StepHandle
    bucket: int
    planned_s: float  # start of its planning
    is_scout: bool = False  # only a few rows draft, to measure acceptance

    @property
    def host_s(self) -> float:
        """Seconds for planning, packing and dispatch."""
        return self.handle.launched_s - self.planned_s


class _Ended(NamedTuple):
    """A step that has ended, with its measurements, until its statistics are written."""

    step: InFlight
    num_sampled: NDArray[np.int64]  # [R]: tokens
    device_s: float  # time on the device, from dispatch or the end of the previous step
    wall_s: float  # the same from the start of its planning
    end_s: float
    rounds: RoundCounts | None
    expert_tokens: NDArray[np.int32] | None


class StepStatsWriter:
    """Totals and per-step statistics: `ended` records times, `write` computes the sums later.

    Args:
        arch: sizes of the model shard on one device.
        executor: executor that ran the steps.
        stats: totals since start, updated by others too.
        energy: distributes energy over requests; None without a meter.

    Attributes:
        stats: totals since start.
        last_step: latest statistics.
        last_end_s: last step's end on the executor's clock.
        step_time: measured step times.
    """

    def __init__(
        self, arch: ArchConfig, executor: Executor, stats: EngineStats, energy: EnergyAccount | None = None
    ) -> None:
        self.stats = stats
        self.last_step: StepStats | None = None
        self.last_end_s = 0.0
        flops = executor.costs.flops
        self.step_time = StepTime(row_factor=flops(1, 1, 0) / flops(1, 0, 0))
        self._arch, self._executor, self._energy = arch, executor, energy
        self._device_free_s = 0.0
        self._unwritten: list[_Ended] = []

    def ended(
        self,
        step: InFlight,
        num_sampled: NDArray[Any],
        now_s: float,
        rounds: RoundCounts | None = None,
        expert_tokens: NDArray[np.int32] | None = None,
    ) -> None:
        """Record the end of a step; `write` computes its statistics later.

        Args:
            step: step that has ended.
            num_sampled: number of tokens sampled by each row.
            now_s: time of its end.
            rounds: token counts per row and round of a step with drafts.
            expert_tokens: tokens per MoE layer and expert; None if not counted.
        """
        free_s, self._device_free_s = self._device_free_s, max(now_s, self._device_free_s)
        device_s = max(now_s - max(step.handle.launched_s, free_s), 0.0)
        wall_s = max(now_s - max(step.planned_s, free_s), 0.0)
        if self._energy is not None:
            self._energy.step_ended(step.plan, num_sampled, self.step_time.rates(), wall_s, now_s)
        self._unwritten.append(_Ended(step, num_sampled, device_s, wall_s, now_s, rounds, expert_tokens))

    @property
    def is_metered(self) -> bool:
        """True if requests get their energy."""
        return self._energy is not None

    def write(self, num_waiting: int) -> list[StepStats]:
        """Compute the statistics of all steps ended since the last call, add them to the totals, and return them.

        Args:
            num_waiting: number of waiting requests, part of the statistics.
        """
        ended, self._unwritten = self._unwritten, []
        written = []
        for step in ended:
            statistics = self._statistics(step, num_waiting)
            self.stats.add(statistics)
            self.step_time.ended(
                step.wall_s,
                num_prefill_tokens=statistics.num_prefill_tokens,
                num_rows=step.step.plan.num_decode_tokens,
                num_steps=statistics.num_steps,
                num_sampled=None if statistics.num_prefill_tokens else int(step.num_sampled.sum()),
                num_cached_tokens=statistics.num_cached_tokens,
            )
            self.last_step, self.last_end_s = statistics, step.end_s
            written.append(statistics)
        return written

    def _statistics(self, ended: _Ended, num_waiting: int) -> StepStats:
        """Return a step's statistics, with the bytes and FLOPs that its plan and sampled tokens imply."""
        step, num_sampled, device_s, wall_s, _, rounds, expert_tokens = ended
        plan, bucket, arch, costs = step.plan, step.bucket, self._arch, self._executor.costs
        page_size, num_axis_tokens = self._executor.schedule.page_size, bucket
        if rounds is None:
            work = _work(plan, num_sampled, page_size)
        else:
            work = _speculative_work(plan, rounds, page_size)
            num_axis_tokens *= self._executor.schedule.max_nodes + 1
        windows, sparsity = [layer.window for layer in arch.attention_layers], self._executor.schedule.sparsity
        attention = attention_cost(work.start, work.num_tokens, windows, sparsity, arch.token_choice)
        num_rows, num_steps = self._executor.schedule.num_rows(bucket), work.num_steps
        num_tokens, num_shares = int(work.num_tokens.sum()), len(arch.attention_layers) * arch.num_data_shards
        return StepStats(
            step_id=plan.step_id,
            num_steps=num_steps,
            num_rows=plan.num_rows,
            num_tokens=num_tokens,
            num_padding_tokens=num_axis_tokens * num_steps - num_tokens,
            num_prefill_tokens=plan.num_prefill_tokens,
            num_decode_tokens=num_tokens - plan.num_prefill_tokens,
            cached_tokens=plan.cached_tokens,
            num_sought_tokens=plan.num_sought_tokens,
            num_preemptions=len(plan.preempted),
            num_pages_used=plan.num_pages_used,
            num_slack_tokens=work.num_slack_tokens * self._executor.schedule.kv_groups.size,
            num_waiting=num_waiting,
            host_ms=step.host_s * 1e3,
            device_ms=device_s * 1e3,
            wall_ms=wall_s * 1e3,
            weight_bytes=costs.weight_bytes(num_axis_tokens, -(-num_tokens // num_steps)) * num_steps,
            kv_bytes=attention.num_kv_tokens * costs.kv_token_bytes // num_shares,
            flops=costs.flops(num_axis_tokens * num_steps, num_rows * num_steps, attention.num_scores),
            num_drafted_tokens=0 if rounds is None else int(rounds.drafted.sum()),
            num_accepted_tokens=0 if rounds is None else int(rounds.accepted.sum()),
            num_draft_rounds=0 if rounds is None else int((rounds.drafted > 0).sum()),
            accepted_per_position=Counts() if rounds is None else _by_position(rounds.accepted),
            expert_tokens=LayerCounts() if expert_tokens is None else LayerCounts.from_rows(expert_tokens.tolist()),
            num_encoder_inputs=sum(run.is_last for run in plan.encoder_runs),
            num_encoder_output_tokens=sum(len(run.rows) for run in plan.encoder_runs if run.is_last),
        )


def _by_position(accepted: NDArray[np.int32]) -> Counts:
    """Return the number of rounds that accepted the drafted token at each position, from accepted tokens per round."""
    return Counts(tuple(int((accepted > position).sum()) for position in range(accepted.max(initial=0))))


class _Work(NamedTuple):
    """The model's work in a step: computed tokens per row, with further entries for each later round of a row."""

    start: NDArray[np.int64]  # tokens before the computed ones, per row, and per row and round after the first
    num_tokens: NDArray[np.int64]  # computed tokens
    num_steps: int  # rounds
    num_slack_tokens: int  # unused positions in all last pages


def _speculative_work(plan: StepPlan, rounds: RoundCounts, page_size: int) -> _Work:
    """Return the model's work in a step with drafts, without the proposer's.

    Args:
        plan: plan of the step.
        rounds: token counts per row and round.
        page_size: tokens per page.
    """
    num_rows = plan.num_rows
    drafted, sampled = rounds.drafted[:num_rows], rounds.sampled[:num_rows]
    before = np.cumsum(sampled, axis=1) - sampled
    takes_part = sampled > 0
    starts = np.array(plan.starts, np.int64)[:, None] + before  # an upper bound, like the plan's
    end = np.array(plan.starts, np.int64) + sampled.sum(axis=1)
    slack = int((-end % page_size).sum())
    num_rounds = max(int(takes_part.any(axis=0).sum()), 1)
    return _Work(starts[takes_part], (drafted + 1)[takes_part].astype(np.int64), num_rounds, slack)


def _work(plan: StepPlan, num_sampled: NDArray[Any], page_size: int) -> _Work:
    """Return the model's work in a step without drafts.

    Args:
        plan: plan of the step.
        num_sampled: number of tokens sampled by each row.
        page_size: tokens per page.
    """
    start, count = np.array(plan.starts, np.int64), np.array(plan.counts, np.int64)
    # A row that had stopped before has computed nothing.
    count = np.where((num_sampled == 0) & (np.array(plan.max_new) > 0), 0, count)
    end, num_steps = start + count, max(int(num_sampled.max()), 1)
    slack = int((-(end + np.maximum(num_sampled, 1) - 1) % page_size).sum())
    if num_steps > 1:
        rounds = np.arange(1, num_steps)[:, None]
        later = rounds < num_sampled  # [rounds, R]
        start = np.concatenate([start, (start + rounds)[later]])
        count = np.concatenate([count, np.ones(len(start) - len(count), np.int64)])
    return _Work(start, count, num_steps, slack)
