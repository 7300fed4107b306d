"""Energy accounts: distribute a meter's joules over requests and idle time."""

from __future__ import annotations

import logging
import threading
import weakref
from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from jaxserve.api.metrics import Energy
from jaxserve.scheduling.request import RequestStatus

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from jaxserve.api.metrics import EngineStats
    from jaxserve.scheduling.step_plan import StepPlan
    from jaxserve.scheduling.step_time import Rates
    from jaxserve.system.meter import Meter

logger = logging.getLogger(__name__)


class EnergyAccount:
    """Distributes all energy since the previous reading at the end of each step.

    A step's part is the fraction of the time that it took; the rest was idle. A row's part of a step is proportional
    to its predicted time: an equal part of the step's fixed time, and its tokens' time. Replicas share an account: the
    energy between two readings goes to the step that ends with the second one. A meter that cannot be read ends no
    requests: the next reading has the energy.

    Args:
        meter: energy source.
        stats: totals to update.
        now_s: current time, on the steps' clock.
    """

    def __init__(self, meter: Meter, stats: EngineStats, now_s: float) -> None:
        self.meter = meter
        self._stats, self._latest_s, self._latest_j = stats, now_s, meter.read_j()
        self._has_failed = False  # tells whether a warning was logged
        stats.energy = Energy(0.0, 0.0)
        if meter.max_interval_s < float("inf"):  # an idle engine ends no steps
            _read_periodically(meter)

    def step_ended(
        self, plan: StepPlan, num_sampled: NDArray[Any], rates: Rates | None, wall_s: float, now_s: float
    ) -> None:
        """Distribute the energy since the previous reading.

        Args:
            plan: the step's plan.
            num_sampled: tokens sampled by each row.
            rates: component times of steps; None before enough were measured.
            wall_s: duration of the step.
            now_s: its end.
        """
        try:
            now_j = self.meter.read_j()
        except Exception as error:  # NVML has its own error classes
            if not self._has_failed:
                logger.warning("the energy meter cannot be read, and its energy counts later or never: %s", error)
            self._has_failed = True
            return
        joules, seconds = now_j - self._latest_j, now_s - self._latest_s
        self._latest_s, self._latest_j = max(now_s, self._latest_s), now_j
        busy_j = joules * min(wall_s / seconds, 1.0) if seconds > 0 else joules
        weights = _row_weights(plan, num_sampled, rates)
        whole = sum(weights)
        if not whole:  # all of its requests have ended before
            busy_j = 0.0
        else:
            for request, weight in zip(plan.requests, weights, strict=True):
                request.energy_j += busy_j * weight / whole
        energy = self._stats.energy
        self._stats.energy = Energy((energy.requests_j or 0.0) + busy_j, (energy.idle_j or 0.0) + joules - busy_j)


def _row_weights(plan: StepPlan, num_sampled: NDArray[Any], rates: Rates | None) -> Sequence[float]:
    """Return each row's predicted time in a step; 0 if its request has ended before."""
    fixed_s = prefill_s = decode_s = 0.0
    if rates is not None:
        fixed_s = rates.prefill_step_s if plan.num_prefill_tokens else rates.decode_step_s
        prefill_s, decode_s = rates.prefill_token_s, rates.decode_token_s
    if not prefill_s + decode_s:
        prefill_s = decode_s = 1.0
    weights = []
    for request, count, sampled in zip(plan.requests, plan.counts, num_sampled[: plan.num_rows].tolist(), strict=True):
        if request.status is RequestStatus.FINISHED:
            weights.append(0.0)
            continue
        tokens_s = count * prefill_s if count > 1 else max(sampled, 1) * decode_s
        weights.append(fixed_s / plan.num_rows * max(sampled, 1) + tokens_s)
    return weights


def _read_periodically(meter: Meter) -> None:
    """Read a meter in a separate thread, as often as its counters need it, until it is garbage."""
    found, interval_s = weakref.ref(meter), meter.max_interval_s
    ended = threading.Event()
    weakref.finalize(meter, ended.set)

    def read() -> None:
        while not ended.wait(interval_s):
            if (living := found()) is not None:
                with suppress(Exception):  # steps log it
                    living.read_j()
            del living

    threading.Thread(target=read, name="jaxserve-meter", daemon=True).start()
