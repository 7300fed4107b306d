"""Plots for a report. They need matplotlib (the extra `bench`)."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jaxserve.tools.bench.report import median_run, offered_rate
from jaxserve.tools.bench.summary import Json
from jaxserve.tools.figures.plotting import plotted
from jaxserve.tools.figures.tables import number

Axes = Any  # matplotlib.axes.Axes
Numbers = Sequence[float] | Sequence[int]

_INK, _WARM, _SOFT = "#1f4e79", "#c0504d", "#9dbad7"
_PERCENTILE_STYLES = {"p50": "-", "p90": "--", "p99": ":"}
_NUM_BINS = 40
_LEAST_MS = 1e-3  # smallest latency shown, since zero has no logarithm


def draw(report: Json, directory: Path) -> list[Path]:
    """Write all plots for a report into `directory` and return their paths."""
    runs = report["runs"]
    paths = []
    for run in [median_run(runs)] if report["kind"] == "offline" else runs:
        suffix, title = _suffix(run), _title(report, run)
        paths.append(directory / f"latency{suffix}.png")
        with plotted(paths[-1], (10.0, 3.6), title) as figure:
            _draw_latency(figure, run)
        if "timeline" in run:  # unknown for a server
            paths.append(directory / f"timeline{suffix}.png")
            with plotted(paths[-1], (10.0, 6.0), title) as figure:
                _draw_timeline(figure, run, report["schedule"]["num_pages"])
    if report["kind"] == "serve" and len(runs) > 1:
        paths.append(directory / "throughput_latency.png")
        with plotted(paths[-1], (10.0, 4.2), _title(report, None)) as figure:
            _draw_sweep(figure, runs)
    return paths


def _suffix(run: Json) -> str:
    """Return the end of a plot's file name, with the run's rate if it has one."""
    rate = offered_rate(run)
    return "" if rate is None else f"-rate-{rate:g}"


def _title(report: Json, run: Json | None) -> str:
    """Return a plot's title: workload, rate of the run if there is one, model and device or server."""
    rate = None if run is None else offered_rate(run)
    at = "" if rate is None else f" at {rate:g} requests/s"
    if (server := report.get("server")) is not None:
        return f"{report['workload']['name']}{at}: {server['model']} at {server['url']}"
    model, device = report["model"], report["device"]
    name = Path(model["path"]).name
    return f"{report['workload']['name']}{at}: {name} ({model['stored']}) on {device['count']} x {device['kind']}"


def _draw_latency(figure: Any, run: Json) -> None:
    """Draw TTFT, TPOT and ITL histograms for a run."""
    requests, slo = run["requests"], run["goodput"] or {"slo_ttft_ms": None, "slo_tpot_ms": None}
    ttfts = [request["ttft_ms"] for request in requests]
    tpots = [request["tpot_ms"] for request in requests if request["tpot_ms"] is not None]
    itls = [gap for request in requests for gap in request["itls_ms"]]
    ttft, tpot, itl = figure.subplots(1, 3)
    _histogram(ttft, ttfts, run["ttft_ms"], "TTFT (ms)", "requests", slo["slo_ttft_ms"])
    _histogram(tpot, tpots, run["tpot_ms"], "TPOT (ms)", "requests", slo["slo_tpot_ms"])
    _histogram(itl, itls, run["itl_ms"], "ITL (ms)", "arrivals after the first", None)


def _histogram(axes: Axes, values: Numbers, figures: Json, xlabel: str, ylabel: str, slo: float | None) -> None:
    """Draw a latency histogram with lines for percentiles and an SLO.

    The scales are logarithmic, so that rare slow values are visible.

    Args:
        axes: axes to draw on.
        values: latencies in ms.
        figures: their percentiles, by name.
        xlabel: label for latencies.
        ylabel: label for counts.
        slo: limit in ms; None for no limit.
    """
    if values:
        shown = np.maximum(values, _LEAST_MS)
        axes.hist(shown, bins=np.geomspace(shown.min() / 1.2, shown.max() * 1.2, _NUM_BINS + 1), color=_SOFT)
        axes.set_yscale("log")
        axes.set_ylim(bottom=0.7)
        for name, style in _PERCENTILE_STYLES.items():
            axes.axvline(
                figures[name], color=_INK, linestyle=style, linewidth=1.2, label=f"{name} {number(figures[name])}"
            )
        if slo is not None:
            axes.axvline(slo, color=_WARM, linewidth=1.5, label=f"SLO {number(slo)}")
        axes.set_xscale("log")
        _log_ticks(axes.xaxis)
        _log_ticks(axes.yaxis)
        axes.legend(
            loc="lower center",
            bbox_to_anchor=(0.5, 1.0),
            ncols=4,
            handlelength=1.3,
            handletextpad=0.4,
            columnspacing=0.9,
            fontsize=7.5,
            frameon=False,
        )
    _label(axes, xlabel, ylabel)


def _draw_timeline(figure: Any, run: Json, num_pages: int) -> None:
    """Draw the rows in a step, the fraction of `num_pages` in use and the waiting requests of a run over time."""
    timeline = run["timeline"]
    rows, pages, queue = figure.subplots(3, 1, sharex=True)
    _steps(rows, timeline["time_s"], timeline["num_rows"], "rows in the step")
    _steps(
        pages, timeline["time_s"], [100 * used / num_pages for used in timeline["num_pages_used"]], "pages in use (%)"
    )
    _steps(queue, timeline["time_s"], timeline["num_waiting"], "requests waiting", color=_WARM)
    for axes in (rows, queue):
        axes.yaxis.get_major_locator().set_params(integer=True)
    queue.set_xlabel("time (s)", fontsize=9)
    queue.set_xlim(0, run["elapsed_s"])


def _steps(axes: Axes, times: Sequence[float], values: Numbers, ylabel: str, color: str = _INK) -> None:
    """Draw a step plot in which each value holds back to the previous sample: samples are taken when a step ends."""
    times, values = [0.0, *times], [*values[:1], *values]
    axes.fill_between(times, values, step="pre", color=color, alpha=0.15, linewidth=0)
    axes.step(times, values, where="pre", color=color, linewidth=1)
    axes.set_ylim(0, max([*values, 1]) * 1.08)
    _label(axes, "", ylabel)


def _draw_sweep(figure: Any, runs: Sequence[Json]) -> None:
    """Draw TTFT and TPOT over output throughput, with a point per run, which has a rate of its own."""
    runs = sorted(runs, key=lambda run: float(run["rate_per_s"]))
    for axes, key, name in zip(figure.subplots(1, 2), ("ttft_ms", "tpot_ms"), ("TTFT", "TPOT"), strict=True):
        if runs[0][key]["p50"] is not None:  # None for outputs of a single token
            _curve(axes, runs, key)
        _label(axes, "output throughput (tok/s)", f"{name} (ms)")


def _curve(axes: Axes, runs: Sequence[Json], key: str) -> None:
    """Draw a line per percentile of a latency over throughput, labelled at its end, with the rate above each point.

    Args:
        axes: axes to draw on.
        runs: runs at ascending rates.
        key: latency to draw, "ttft_ms" or "tpot_ms".
    """
    throughput = [run["output_tok_per_s"] for run in runs]
    for name, style in _PERCENTILE_STYLES.items():
        latency = [run[key][name] for run in runs]
        axes.plot(throughput, latency, style, color=_INK, marker="o", markersize=4)
        _note(axes, name, (throughput[-1], latency[-1]), (8, 0), _INK, "left")
    for run, x in zip(runs, throughput, strict=True):
        _note(axes, f"{float(run['rate_per_s']):g}/s", (x, run[key]["p99"]), (0, 7), _WARM, "center")
    axes.set_yscale("log")
    axes.margins(x=0.12, y=0.15)
    _log_ticks(axes.yaxis)
    axes.set_xlim(left=0)


def _log_ticks(axis: Any) -> None:
    """Label a logarithmic axis with as many plain numbers as fit."""
    from matplotlib.ticker import LogLocator, NullLocator  # noqa: PLC0415 - an extra, needed only for plots

    low, high = axis.get_view_interval()
    axis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0) if high < 300 * low else (1.0,)))
    axis.set_minor_locator(NullLocator())
    axis.set_major_formatter(lambda value, _position: number(value))


def _note(
    axes: Axes, text: str, point: tuple[float, float], offset: tuple[int, int], color: str, alignment: str
) -> None:
    axes.annotate(text, point, offset, textcoords="offset points", ha=alignment, va="center", fontsize=8, color=color)


def _label(axes: Axes, xlabel: str, ylabel: str) -> None:
    """Set axes labels, and the style for ticks, grid and spines."""
    axes.set_xlabel(xlabel, fontsize=9)
    axes.set_ylabel(ylabel, fontsize=9)
    axes.tick_params(which="both", labelsize=8)
    axes.grid(which="both", alpha=0.2)
    axes.spines[["top", "right"]].set_visible(False)
