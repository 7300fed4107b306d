"""Figures of a run, computed from its trace: percentiles, rates, goodput, cost. Names end in their units."""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from jaxserve.api.metrics import EngineStats, PeakRates, co2_g
from jaxserve.tools.bench.load import EngineTrace, LoadTrace, RequestTrace

PERCENTILES = (50, 90, 99)

Json = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Slo:
    """Service-level objective: upper limits of TTFT and TPOT; None is no limit.

    A request with a single token always meets the TPOT limit.
    """

    ttft_ms: float | None = None
    tpot_ms: float | None = None

    def is_met_by(self, request: RequestTrace) -> bool:
        """Return whether a request's TTFT and TPOT are within the limits."""
        in_time = self.ttft_ms is None or request.ttft_s * 1e3 <= self.ttft_ms
        return in_time and (self.tpot_ms is None or (request.tpot_s or 0.0) * 1e3 <= self.tpot_ms)


@dataclass(frozen=True, slots=True)
class EngineSizes:
    """Sizes and peak rates of an engine, by which its page occupancy and efficiency are counted, and the grams of CO2
    per kWh of its electricity.
    """

    page_size: int
    num_pages: int
    peak_rates: PeakRates
    carbon_intensity: int | float | None = None


NO_SLO = Slo()


def summarize(
    trace: LoadTrace, *, slo: Slo = NO_SLO, price_per_hour: float | None = None, sizes: EngineSizes | None = None
) -> Json:
    """Return a run's figures as a JSON object.

    Args:
        trace: trace of the run.
        slo: limits that goodput counts.
        price_per_hour: machine price, for the token cost.
        sizes: engine sizes, for figures about its steps; None for a server, whose steps are unknown.
    """
    figures = {
        **_throughput(trace),
        "ttft_ms": percentiles([r.ttft_s * 1e3 for r in trace.requests]),
        "tpot_ms": percentiles([r.tpot_s * 1e3 for r in trace.requests if r.tpot_s is not None]),
        "itl_ms": percentiles([gap * 1e3 for r in trace.requests for gap in r.itls_s]),
        "e2e_ms": percentiles([r.e2e_s * 1e3 for r in trace.requests]),
        "goodput": _goodput(trace, slo),
        "cost": _cost(trace, price_per_hour),
        "requests": [_request(r) for r in trace.requests],
    }
    if by_picture := _by_picture(trace):
        figures["ttft_ms_by_picture"] = by_picture
    if trace.engine is not None and sizes is not None:
        figures |= _steps(trace.engine, sizes) | {"timeline": _timeline(trace.engine)}
    return figures


def percentiles(values: Sequence[float]) -> Json:
    """Return mean, p50, p90, p99 (linearly interpolated) and maximum; nulls if there are no values."""
    names = ["mean", *(f"p{q}" for q in PERCENTILES), "max"]
    if not values:
        return dict.fromkeys(names)
    array = np.asarray(values, np.float64)
    numbers = [array.mean(), *np.percentile(array, PERCENTILES), array.max()]
    return dict(zip(names, map(float, numbers), strict=True))


def _throughput(trace: LoadTrace) -> Json:
    """Return a run's request and token counts, and its rates per second."""
    num_prompt = sum(r.num_prompt_tokens for r in trace.requests)
    num_output = sum(len(r.token_s) for r in trace.requests)
    num_cached = sum(r.num_cached_tokens for r in trace.requests)
    return {
        "elapsed_s": trace.elapsed_s,
        "num_requests": len(trace.requests),
        "num_failed": len(trace.failures),
        "num_prompt_tokens": num_prompt,
        "num_output_tokens": num_output,
        "requests_per_s": len(trace.requests) / trace.elapsed_s,
        "output_tok_per_s": num_output / trace.elapsed_s,
        "total_tok_per_s": (num_prompt + num_output) / trace.elapsed_s,
        "cached_prompt_share": num_cached / num_prompt,
    }


def _by_picture(trace: LoadTrace) -> Json:
    """Return TTFTs by the size of the request's picture, the largest last; {} without pictures."""
    sizes = {r.picture for r in trace.requests if r.picture}
    by_area = sorted(sizes, key=lambda size: math.prod(map(int, size.split(" x "))))
    return {size: percentiles([r.ttft_s * 1e3 for r in trace.requests if r.picture == size]) for size in by_area}


def _steps(trace: EngineTrace, sizes: EngineSizes) -> Json:
    """Return figures about the engine's steps: times per step, padding, occupancy, queue and efficiency."""
    stats, steps = trace.stats, max(1, trace.stats.num_steps)
    split = stats.split(sizes.peak_rates)
    busy = [s for s in trace.steps if s.num_rows]
    return {
        "num_steps": stats.num_steps,
        "wall_ms_per_step": stats.wall_ms / steps,
        "host_ms_per_step": stats.host_ms / steps,
        "padding_share": stats.padding_share,
        "page_slack_share": stats.page_slack_share(sizes.page_size),
        "page_occupancy": _mean_and_max([s.num_pages_used / sizes.num_pages for s in busy]),
        "batch_rows": _mean_and_max([s.num_rows for s in busy]),
        "queue_depth": _mean_and_max([s.num_waiting for s in busy]),
        "num_preemptions": stats.num_preemptions,
        "num_wasted_tokens": stats.num_wasted_tokens,
        "num_compiles": stats.num_compiles,
        "time_split_ms": asdict(split),
        "efficiency": split.efficiency,
        "roofline_share": split.roofline_share,
        "energy": _energy(stats, sizes.carbon_intensity),
    }


def _energy(stats: EngineStats, carbon_intensity: int | float | None) -> Json | None:
    """Return the joules of a run, idle time included, and its grams of CO2; None without a meter."""
    total_j = stats.energy.total_j
    if total_j is None:
        return None
    return {
        "joules": total_j,
        "idle_joules": stats.energy.idle_j,
        "joules_per_output_token": total_j / max(1, stats.num_output_tokens),
        "co2_g": co2_g(total_j, carbon_intensity),
    }


def _mean_and_max(values: Sequence[float] | Sequence[int]) -> Json:
    """Return the values' mean and maximum; zeros without values."""
    return {"mean": float(np.mean(values)), "max": float(max(values))} if values else {"mean": 0.0, "max": 0.0}


def _goodput(trace: LoadTrace, slo: Slo) -> Json | None:
    """Return the rate of requests that met every limit (DistServe, Zhong et al., 2024); None without limits."""
    if slo == NO_SLO:
        return None
    num_met = sum(slo.is_met_by(r) for r in trace.requests)
    return {
        "slo_ttft_ms": slo.ttft_ms,
        "slo_tpot_ms": slo.tpot_ms,
        "share": num_met / (len(trace.requests) + len(trace.failures)),
        "requests_per_s": num_met / trace.elapsed_s,
    }


def _cost(trace: LoadTrace, price_per_hour: float | None) -> Json | None:
    """Return the token cost at this run's throughput, in the price's currency; None without a price."""
    if price_per_hour is None:
        return None
    rates = _throughput(trace)
    price_per_s = price_per_hour / 3600
    return {
        "price_per_hour": price_per_hour,
        "per_million_output_tokens": price_per_s / rates["output_tok_per_s"] * 1e6,
        "per_million_tokens": price_per_s / rates["total_tok_per_s"] * 1e6,
    }


def _timeline(trace: EngineTrace) -> Json:
    """Return the engine's state over time: a list per quantity, with an entry per replica step and idle wait."""
    counts = ("num_rows", "num_tokens", "num_pages_used", "num_waiting")
    times = {"time_s": [round(step.time_s, 6) for step in trace.steps]}
    return times | {name: [getattr(step, name) for step in trace.steps] for name in counts}


def _request(request: RequestTrace) -> Json:
    """Return one request's arrival time, numbers of tokens and latencies."""
    return {
        "arrival_s": request.arrival_s,
        "num_prompt_tokens": request.num_prompt_tokens,
        "num_cached_tokens": request.num_cached_tokens,
        "num_output_tokens": len(request.token_s),
        "ttft_ms": request.ttft_s * 1e3,
        "tpot_ms": None if request.tpot_s is None else request.tpot_s * 1e3,
        "e2e_ms": request.e2e_s * 1e3,
        "itls_ms": [round(gap * 1e3, 4) for gap in request.itls_s],
    }
