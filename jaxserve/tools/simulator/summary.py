"""A simulation's totals, in constant memory, and their presentation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from jaxserve.api.metrics import co2_g
from jaxserve.tools.simulator.timeline import Figures, Timeline, milliseconds, ratio

if TYPE_CHECKING:
    from jaxserve.scheduling.request import Request
    from jaxserve.scheduling.step_plan import StepPlan

_MAX_GROUPS = 100  # tenants and classes that have figures of their own


class Totals(Figures):
    """A simulation's figures. Those of `Figures` are complete when the run has ended.

    Args:
        num_pages: pages in all pools.

    Attributes:
        timeline: figures by window.
        groups: figures by tenant and class; later groups are counted as the last one, ("others", 0).
        num_too_long: requests longer than max_model_len or the pool.
        num_preemptions: preempted rows.
        num_dispatches: plans.
        num_steps: steps that ran.
        max_pages_used: maximum pages in use.
        first_s: first arrival time.
        last_s: last end time.
    """

    def __init__(self, num_pages: int) -> None:
        super().__init__()
        self.timeline = Timeline()
        self.groups: dict[tuple[str, int], Figures] = {}
        self.num_too_long = self.num_preemptions = self.num_dispatches = self.num_steps = self.max_pages_used = 0
        self.first_s = self.last_s = 0.0
        self._num_pages = num_pages
        self._used: dict[int, int] = {}  # pages in use by replica
        self._num_used = self._num_waiting = self._num_decoding = 0

    def start(self, now_s: int | float) -> None:
        """Begin at the first arrival."""
        self.first_s = now_s
        self.timeline = Timeline(now_s)

    def close(self, now_s: float) -> None:
        """Complete the figures at the last end."""
        self.last_s = now_s
        for window in self.timeline.windows:
            self.merge(window)

    def group(self, tenant: str, priority: int) -> Figures:
        """Return the figures of a tenant's class."""
        key = tenant, priority
        if key not in self.groups and len(self.groups) >= _MAX_GROUPS:
            key = "others", 0
        return self.groups.setdefault(key, Figures())

    def arrived(self, tenant: str, priority: int) -> None:
        """Count a request of the trace."""
        self.timeline.now.num_requests += 1
        self.group(tenant, priority).num_requests += 1

    def refused(self, tenant: str, priority: int) -> None:
        """Count a request that found the queue full."""
        self.timeline.now.num_refused += 1
        self.group(tenant, priority).num_refused += 1

    def queued(self) -> None:
        """Count a request that waits from now on."""
        self._num_waiting += 1

    def planned(self, plan: StepPlan) -> None:
        """Count a plan."""
        self.num_dispatches += 1
        self.num_preemptions += len(plan.preempted)

    def ran(self, starts_s: float, ends_s: Sequence[float]) -> None:
        """Count a dispatch's steps."""
        self.num_steps += len(ends_s)
        self.timeline.busy(starts_s, ends_s[-1])

    def began(self, request: Request, ttft_s: float) -> None:
        """Count a request's first token, and the time to it in seconds."""
        self._num_waiting -= 1
        self._num_decoding += 1
        self.timeline.now.ttft_s.add(ttft_s)
        self.group(request.tenant, request.priority).ttft_s.add(ttft_s)

    def ended_request(self, request: Request, latency_s: float, num_output_tokens: int) -> None:
        """Count a request that has ended, its latency in seconds and its tokens."""
        self._num_decoding -= 1
        self.timeline.now.ended(request, latency_s)
        group = self.group(request.tenant, request.priority)
        group.ended(request, latency_s)
        group.num_output_tokens += num_output_tokens

    def pages_used(self, replica: int, num_pages: int) -> None:
        """Note a replica's pages in use, from now on."""
        self._num_used += num_pages - self._used.get(replica, 0)
        self._used[replica] = num_pages
        self.max_pages_used = max(self.max_pages_used, self._num_used)

    def passed(self, from_s: float, to_s: float) -> None:
        """Note that time has passed since the last change."""
        self.timeline.passed(from_s, to_s, self._num_waiting, self._num_decoding, self._num_used)

    def report(
        self,
        num_replicas: int,
        usd_per_hour: int | float | None = None,
        *,
        max_watts: float | None = None,
        carbon_intensity: int | float | None = None,
    ) -> dict[str, Any]:
        """Return all figures as JSON values; unknown ones are None.

        Args:
            num_replicas: replica count.
            usd_per_hour: hourly price for one replica.
            max_watts: maximum power of one replica's chips.
            carbon_intensity: grams of CO2 per kWh.
        """
        joules = None if max_watts is None else max_watts * self.busy_s
        duration_s = self.last_s - self.first_s
        cost = None if usd_per_hour is None else usd_per_hour * num_replicas * duration_s / 3600
        return {
            "requests": self.num_requests,
            "ended": self.num_ended,
            "refused": self.num_refused,
            "too_long": self.num_too_long,
            "duration_s": duration_s,
            "prompt_tokens": self.num_prompt_tokens,
            "output_tokens": self.num_output_tokens,
            "output_tokens_per_s": ratio(self.num_output_tokens, duration_s),
            "ttft_ms": milliseconds(self.ttft_s),
            "itl_ms": milliseconds(self.itl_s),
            "latency_ms": milliseconds(self.latency_s),
            "hit_rate": ratio(self.num_cached_tokens, self.num_prompt_tokens),
            "kv_use_mean": ratio(self.page_s, duration_s * self._num_pages),
            "kv_use_max": ratio(self.max_pages_used, self._num_pages),
            "busy": ratio(self.busy_s, duration_s * num_replicas),
            "preemptions": self.num_preemptions,
            "steps": self.num_steps,
            "dispatches": self.num_dispatches,
            "usd": cost,
            "max_busy_joules": joules,
            "max_joules_per_output_token": None if joules is None else ratio(joules, self.num_output_tokens),
            "max_busy_co2_g": co2_g(joules, carbon_intensity),
            "usd_per_million_output_tokens": None if cost is None else ratio(cost * 1e6, self.num_output_tokens),
            "window_s": self.timeline.width_s,
            "timeline": self.timeline.report(self._num_pages, num_replicas),
            "groups": [
                {
                    "tenant": tenant,
                    "priority": priority,
                    "requests": each.num_requests,
                    "refused": each.num_refused,
                    "ended": each.num_ended,
                    "prompt_tokens": each.num_prompt_tokens,
                    "output_tokens": each.num_output_tokens,
                    "hit_rate": ratio(each.num_cached_tokens, each.num_prompt_tokens),
                    "ttft_ms": milliseconds(each.ttft_s),
                    "latency_ms": milliseconds(each.latency_s),
                }
                for (tenant, priority), each in sorted(self.groups.items())
            ],
        }


def render(report: dict[str, Any]) -> str:
    """Return a report as text."""
    lines = [
        f"requests       {report['ended']:,} of {report['requests']:,} ended, {report['refused']:,} refused, "
        f"{report['too_long']:,} too long",
        f"time           {report['duration_s']:,.1f} s, chips busy {_percent(report['busy'])}",
        f"throughput     {_number(report['output_tokens_per_s'])} output tokens/s",
    ]
    for label, name in (("TTFT", "ttft_ms"), ("ITL", "itl_ms"), ("latency", "latency_ms")):
        each = report[name]
        figures = ", ".join(f"{key} {_number(each[key])}" for key in each)
        lines.append(f"{label:<15}{figures} ms")
    lines += [
        f"prefix cache   {_percent(report['hit_rate'])} of prompt tokens",
        f"KV pool        {_percent(report['kv_use_mean'])} used on average, {_percent(report['kv_use_max'])} at most",
        f"preemptions    {report['preemptions']:,}",
    ]
    if report["usd"] is not None:
        cost = (
            f"${report['usd']:,.2f}, ${_number(report['usd_per_million_output_tokens'], 3)} per million output tokens"
        )
        lines.append(f"cost           {cost}")
    if report["max_busy_joules"] is not None:
        per_token = _number(report["max_joules_per_output_token"], 3)
        energy = f"at most {report['max_busy_joules'] / 3.6e6:,.3f} kWh while busy, {per_token} J per output token"
        grams = report["max_busy_co2_g"]
        lines.append(f"energy         {energy}" + ("" if grams is None else f", {grams:,.1f} g CO2"))
    return "\n".join(lines)


def _percent(fraction: int | float | None) -> str:
    return "-" if fraction is None else f"{100 * fraction:.1f}%"


def _number(value: int | float | None, decimals: int = 1) -> str:
    return "-" if value is None else f"{value:,.{decimals}f}"
