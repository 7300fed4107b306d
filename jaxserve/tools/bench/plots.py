"""Plots for a report. They need matplotlib (the extra `bench`)."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jaxserve.tools.bench.report import median_run, offered_rate
from jaxserve.tools.bench.summary import Json
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
    shown = [median_run(runs)] if report["kind"] == "offline" else runs
    paths = []
    for run in shown:
        suffix = _suffix(run)
        paths.append(_save(directory / f"latency{suffix}.png", (10.0, 3.6), _title(report, run), _draw_latency(run)))
        if "timeline" in run:  # unknown for a server
            timeline = _draw_timeline(run, report)
            paths.append(_save(directory / f"timeline{suffix}.png", (10.0, 6.0), _title(report, run), timeline))
    if report["kind"] == "serve" and len(runs) > 1:
        title = _title(report, None)
        paths.append(_save(directory / "throughput_latency.png", (10.0, 4.2), title, _draw_sweep(runs)))
    return paths


def _save(path: Path, size: tuple[float, float], title: str, draw_on: Callable[[Any], None]) -> Path:
    from matplotlib.figure import Figure  # noqa: PLC0415 - an extra; without pyplot there is no global state

    figure = Figure(figsize=size, layout="constrained")
    figure.suptitle(title, fontsize=10)
    draw_on(figure)
    figure.savefig(path, dpi=120)
    return path


def _suffix(run: Json) -> str:
    rate = offered_rate(run)
    return "" if rate is None else f"-rate-{rate:g}"


def _title(report: Json, run: Json | None) -> str:
    rate = None if run is None else offered_rate(run)
    at = "" if rate is None else f" at {rate:g} requests/s"
    if (server := report.get("server")) is not None:
        return f"{report['workload']['name']}{at}: {server['model']} at {server['url']}"
    model, device = report["model"], report["device"]
    name = Path(model["path"]).name
    return f"{report['workload']['name']}{at}: {name} ({model['stored']}) on {device['count']} x {device['kind']}"


def _draw_latency(run: Json) -> Callable[[Any], None]:
    requests, promised = run["requests"], run["goodput"] or {"slo_ttft_ms": None, "slo_tpot_ms": None}
    ttfts = [request["ttft_ms"] for request in requests]
    tpots = [request["tpot_ms"] for request in requests if request["tpot_ms"] is not None]
    itls = [gap for request in requests for gap in request["itls_ms"]]

    def draw_on(figure: Any) -> None:
        ttft, tpot, itl = figure.subplots(1, 3)
        _histogram(ttft, ttfts, run["ttft_ms"], "TTFT (ms)", "requests", promised["slo_ttft_ms"])
        _histogram(tpot, tpots, run["tpot_ms"], "TPOT (ms)", "requests", promised["slo_tpot_ms"])
        _histogram(itl, itls, run["itl_ms"], "ITL (ms)", "arrivals after the first", None)

    return draw_on


def _histogram(axes: Axes, values: Numbers, figures: Json, xlabel: str, ylabel: str, promised: float | None) -> None:
    """Draw percentiles, and counts on logarithmic scales so that rare slow values are visible."""
    if values:
        shown = np.maximum(values, _LEAST_MS)
        axes.hist(shown, bins=np.geomspace(shown.min() / 1.2, shown.max() * 1.2, _NUM_BINS + 1), color=_SOFT)
        axes.set_yscale("log")
        axes.set_ylim(bottom=0.7)
        for name, style in _PERCENTILE_STYLES.items():
            axes.axvline(
                figures[name], color=_INK, linestyle=style, linewidth=1.2, label=f"{name} {number(figures[name])}"
            )
        if promised is not None:
            axes.axvline(promised, color=_WARM, linewidth=1.5, label=f"promised {number(promised)}")
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


def _draw_timeline(run: Json, report: Json) -> Callable[[Any], None]:
    timeline, num_pages = run["timeline"], report["schedule"]["num_pages"]
    occupancy = [100 * used / num_pages for used in timeline["num_pages_used"]]

    def draw_on(figure: Any) -> None:
        rows, pages, queue = figure.subplots(3, 1, sharex=True)
        _steps(rows, timeline["time_s"], timeline["num_rows"], "rows in the step")
        _steps(pages, timeline["time_s"], occupancy, "pages in use (%)")
        _steps(queue, timeline["time_s"], timeline["num_waiting"], "requests waiting", color=_WARM)
        for axes in (rows, queue):
            axes.yaxis.get_major_locator().set_params(integer=True)
        queue.set_xlabel("time (s)", fontsize=9)
        queue.set_xlim(0, run["elapsed_s"])

    return draw_on


def _steps(axes: Axes, times: Sequence[float], values: Numbers, ylabel: str, color: str = _INK) -> None:
    """Draw a step plot in which each value holds back to the previous sample: samples are taken when a step ends."""
    times, values = [0.0, *times], [*values[:1], *values]
    axes.fill_between(times, values, step="pre", color=color, alpha=0.15, linewidth=0)
    axes.step(times, values, where="pre", color=color, linewidth=1)
    axes.set_ylim(0, max([*values, 1]) * 1.08)
    _label(axes, "", ylabel)


def _draw_sweep(runs: Sequence[Json]) -> Callable[[Any], None]:
    runs = sorted(runs, key=lambda run: float(run["rate_per_s"]))

    def draw_on(figure: Any) -> None:
        for axes, key, name in zip(figure.subplots(1, 2), ("ttft_ms", "tpot_ms"), ("TTFT", "TPOT"), strict=True):
            if runs[0][key]["p50"] is not None:  # None for outputs of a single token
                _curve(axes, runs, key)
            _label(axes, "output throughput (tok/s)", f"{name} (ms)")

    return draw_on


def _curve(axes: Axes, runs: Sequence[Json], key: str) -> None:
    """Draw a line per percentile through the rates, labelled at its end; rates are written above their points."""
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
    axes.set_xlabel(xlabel, fontsize=9)
    axes.set_ylabel(ylabel, fontsize=9)
    axes.tick_params(which="both", labelsize=8)
    axes.grid(which="both", alpha=0.2)
    axes.spines[["top", "right"]].set_visible(False)
