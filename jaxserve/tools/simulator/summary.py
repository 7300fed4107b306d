"""A simulation's totals, in constant memory, and their presentation."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from jaxserve.api.metrics import co2_g
from jaxserve.tools.simulator.distribution import Distribution

if TYPE_CHECKING:
    from jaxserve.scheduling.request import Request
    from jaxserve.scheduling.step_plan import StepPlan

_PERCENTS = (50, 90, 99)


class Totals:
    """A simulation's figures.

    Args:
        num_pages: pages in all pools.

    Attributes:
        ttft_s: times from arrival to first token.
        itl_s: times between a request's consecutive tokens.
        latency_s: times from arrival to last token.
        num_requests: requests in the trace.
        num_refused: requests refused because the queue was full.
        num_too_long: requests longer than max_model_len or the pool.
        num_ended: requests that ended.
        num_prompt_tokens: prompt tokens in requests that ended.
        num_output_tokens: sampled tokens.
        num_cached_tokens: prompt tokens found in the prefix cache.
        num_preemptions: preempted rows.
        num_dispatches: plans.
        num_steps: steps that ran.
        max_pages_used: maximum pages in use.
        first_s: first arrival time.
        last_s: last end time.
        busy_s: device time in which a step ran, summed over replicas.
    """

    def __init__(self, num_pages: int) -> None:
        self.ttft_s, self.itl_s, self.latency_s = Distribution(), Distribution(), Distribution()
        self.num_requests = self.num_refused = self.num_too_long = self.num_ended = 0
        self.num_prompt_tokens = self.num_output_tokens = self.num_cached_tokens = 0
        self.num_preemptions = self.num_dispatches = self.num_steps = self.max_pages_used = 0
        self.first_s = self.last_s = self.busy_s = 0.0
        self._num_pages = num_pages
        self._page_s = 0.0  # pages in use times seconds
        self._used: dict[int, int] = {}  # pages in use by replica
        self._num_used = 0

    def planned(self, plan: StepPlan) -> None:
        """Count a plan."""
        self.num_dispatches += 1
        self.num_preemptions += len(plan.preempted)

    def ended(self, request: Request, latency_s: float) -> None:
        """Count a request that has ended, and its latency in seconds."""
        self.num_ended += 1
        self.num_prompt_tokens += request.num_prompt_tokens
        self.num_cached_tokens += request.num_cached_tokens
        self.latency_s.add(latency_s)

    def pages_used(self, replica: int, num_pages: int) -> None:
        """Note a replica's pages in use, from now on."""
        self._num_used += num_pages - self._used.get(replica, 0)
        self._used[replica] = num_pages
        self.max_pages_used = max(self.max_pages_used, self._num_used)

    def passed(self, seconds: float) -> None:
        """Note that time has passed since the last change."""
        self._page_s += self._num_used * seconds

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
            "output_tokens_per_s": _ratio(self.num_output_tokens, duration_s),
            "ttft_ms": _figures(self.ttft_s),
            "itl_ms": _figures(self.itl_s),
            "latency_ms": _figures(self.latency_s),
            "hit_rate": _ratio(self.num_cached_tokens, self.num_prompt_tokens),
            "kv_use_mean": _ratio(self._page_s, duration_s * self._num_pages),
            "kv_use_max": _ratio(self.max_pages_used, self._num_pages),
            "busy": _ratio(self.busy_s, duration_s * num_replicas),
            "preemptions": self.num_preemptions,
            "steps": self.num_steps,
            "dispatches": self.num_dispatches,
            "usd": cost,
            "max_busy_joules": joules,
            "max_joules_per_output_token": None if joules is None else _ratio(joules, self.num_output_tokens),
            "max_busy_co2_g": co2_g(joules, carbon_intensity),
            "usd_per_million_output_tokens": None if cost is None else _ratio(cost * 1e6, self.num_output_tokens),
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


def _figures(values: Distribution) -> dict[str, float | None]:
    """Return the mean and percentiles in milliseconds; None without values."""
    if not values.count:
        return {"mean": None, **{f"p{percent}": None for percent in _PERCENTS}}
    percentiles = {f"p{percent}": values.percentile(percent) * 1e3 for percent in _PERCENTS}
    return {"mean": values.mean * 1e3, **percentiles}


def _ratio(numerator: int | float, denominator: int | float) -> float | None:
    return numerator / denominator if denominator else None


def _percent(fraction: int | float | None) -> str:
    return "-" if fraction is None else f"{100 * fraction:.1f}%"


def _number(value: int | float | None, decimals: int = 1) -> str:
    return "-" if value is None else f"{value:,.{decimals}f}"
