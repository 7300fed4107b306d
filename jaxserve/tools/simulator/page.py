"""One HTML page of a simulation, or of two side by side. Plots need matplotlib (the extra `bench`)."""

from __future__ import annotations

import base64
import html
import io
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxserve.errors import ConfigError

if TYPE_CHECKING:
    import os

Axes = Any  # matplotlib.axes.Axes
Report = dict[str, Any]

_PERCENTILES = {"p50": "-", "p90": "--", "p99": ":"}
_INK, _WARM = "#1f4e79", "#c0504d"
_STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; max-width: 72rem; margin: 2rem auto; padding: 0 1rem; color: #222;
       background: #fff; }
table { border-collapse: collapse; } td, th { padding: .2rem .8rem; text-align: right; border-bottom: 1px solid #ddd; }
td:first-child, th:first-child { text-align: left; } img { max-width: 100%; } h2 { margin-top: 2rem; }
"""
_ROWS = (  # label, path to the value, factor
    ("requests", ("requests",), 1),
    ("requests that ended", ("ended",), 1),
    ("refused", ("refused",), 1),
    ("too long", ("too_long",), 1),
    ("time, s", ("duration_s",), 1),
    ("output tokens/s", ("output_tokens_per_s",), 1),
    *(
        (f"{label} {percent}, ms", (name, percent), 1)
        for label, name in (("TTFT", "ttft_ms"), ("ITL", "itl_ms"), ("latency", "latency_ms"))
        for percent in _PERCENTILES
    ),
    ("prompt tokens from the prefix cache, %", ("hit_rate",), 100),
    ("KV pool in use, mean, %", ("kv_use_mean",), 100),
    ("KV pool in use, maximum, %", ("kv_use_max",), 100),
    ("chips busy, %", ("busy",), 100),
    ("preemptions", ("preemptions",), 1),
    ("cost, $", ("usd",), 1),
    ("$ per million output tokens", ("usd_per_million_output_tokens",), 1),
    ("energy while busy at most, kWh", ("max_busy_joules",), 1 / 3.6e6),
    ("J per output token at most", ("max_joules_per_output_token",), 1),
    ("CO2 at most, g", ("max_busy_co2_g",), 1),
)
_GROUP_ROWS = (
    ("requests", ("requests",), 1),
    ("refused", ("refused",), 1),
    ("output tokens", ("output_tokens",), 1),
    ("cached prompt tokens, %", ("hit_rate",), 100),
    ("TTFT p50, ms", ("ttft_ms", "p50"), 1),
    ("TTFT p99, ms", ("ttft_ms", "p99"), 1),
    ("latency p50, ms", ("latency_ms", "p50"), 1),
    ("latency p99, ms", ("latency_ms", "p99"), 1),
)

_NEEDED = {"model", "target", "replicas", "trace", "timeline", "window_s", "groups", *(path[0] for _, path, _ in _ROWS)}


def read_report(path: str | os.PathLike[str]) -> Report:
    """Return the figures of an earlier run.

    Raises:
        ConfigError: the file is not the output of `jaxserve simulate --json`.
    """
    try:
        report = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot read {path}: {error}") from error
    if not isinstance(report, dict) or not report.keys() >= _NEEDED:
        raise ConfigError(f"{path} must be the output of `jaxserve simulate --json`")
    return report


def write_page(path: str | os.PathLike[str], reports: Sequence[Report]) -> None:
    """Write a page that needs no other file; several runs have a column each.

    Raises:
        ConfigError: the file cannot be written.
    """
    names = [_name(report) for report in reports]
    parts = ["<!doctype html><html lang=en><meta charset=utf-8><title>Simulation</title>"]
    parts.append(f"<style>{_STYLE}</style><h1>Simulation</h1>")
    parts.append(_table(["", *names], [[label, *cells] for label, cells in _cells(_ROWS, reports)]))
    for caption, text, draw in _PLOTS:
        parts.append(f"<h2>{html.escape(caption)}</h2><p>{html.escape(text)}</p>{_plot(caption, names, reports, draw)}")
    parts.append("<h2>Tenants and classes</h2><p>A class is the priority; lower numbers go first.</p>")
    for name, report in zip(names, reports, strict=True):
        rows = [
            [
                f"{group['tenant'] or '(none)'}, {group['priority']}",
                *(cell for _, [cell] in _cells(_GROUP_ROWS, [group])),
            ]
            for group in report["groups"]
        ]
        header = ["tenant, class", *(label for label, *_ in _GROUP_ROWS)]
        parts.append(f"<h3>{html.escape(name)}</h3>{_table(header, rows)}")
    try:
        Path(path).write_text("\n".join(parts), encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error}") from error


def _name(report: Report) -> str:
    replicas = report["replicas"]
    return f"{report['model']}, {replicas} x {report['target']}, {Path(report['trace']).name}"


def _cells(rows: Sequence[tuple[Any, ...]], reports: Sequence[Report]) -> list[tuple[str, list[str]]]:
    """Return labels and a cell for each report, by report."""
    found = []
    for label, path, factor in rows:
        values = []
        for report in reports:
            value: Any = report
            for name in path:
                value = value[name]
            values.append(value)
        cells = ["-" if value is None else _number(value * factor) for value in values]
        found.append((label, cells))
    return found


def _number(value: int | float) -> str:
    """Return all digits before the point, and three in all."""
    return f"{value:,.0f}" if abs(value) >= 100 or isinstance(value, int) else f"{value:.3g}"


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    def line(kind: str, cells: Sequence[str]) -> str:
        return "<tr>" + "".join(f"<{kind}>{html.escape(cell)}</{kind}>" for cell in cells) + "</tr>"

    return "<table>" + line("th", header) + "".join(line("td", row) for row in rows) + "</table>"


def _plot(caption: str, names: Sequence[str], reports: Sequence[Report], draw: Callable[[Axes, Report], None]) -> str:
    """Return a plot as an image, with equal vertical axes for all reports."""
    from matplotlib.figure import Figure  # noqa: PLC0415 - an extra; without pyplot there is no global state

    figure = Figure(figsize=(11.0, 3.0), layout="constrained")
    all_axes = figure.subplots(1, len(reports), sharey=True, squeeze=False)[0]
    for axes, name, report in zip(all_axes, names, reports, strict=True):
        draw(axes, report)
        axes.set(xlabel="s")
        axes.set_title(name, fontsize=9, loc="left", parse_math=False)
        if axes.get_legend_handles_labels()[0]:
            axes.legend(fontsize=8)
    image = io.BytesIO()
    figure.savefig(image, format="svg")
    data = base64.b64encode(image.getvalue()).decode()
    return f'<img alt="{html.escape(caption)}" src="data:image/svg+xml;base64,{data}">'


def _over_time(axes: Axes, report: Report, values: Sequence[float | None], **style: Any) -> None:
    windows, width_s = report["timeline"], report["window_s"]
    starts_s = [window["start_s"] for window in windows]
    shown = [float("nan") if value is None else value for value in values]
    axes.step([*starts_s, starts_s[-1] + width_s], [*shown, shown[-1]], where="post", linewidth=1.1, **style)


def _queue(axes: Axes, report: Report) -> None:
    for name, color in (("waiting", _WARM), ("decoding", _INK)):
        _over_time(axes, report, [window[name] for window in report["timeline"]], label=name, color=color)
    axes.set(ylabel="requests", ylim=(0, None))


def _shares(axes: Axes, report: Report) -> None:
    for name, label, color in (
        ("kv_use", "KV pool in use", _INK),
        ("hit_rate", "prompt tokens from the prefix cache", "#5a9a5a"),
        ("busy", "chips busy", "#999999"),
    ):
        values = [window[name] for window in report["timeline"]]
        shown = [None if value is None else 100 * value for value in values]
        _over_time(axes, report, shown, label=label, color=color)
    axes.set(ylabel="%", ylim=(0, 105))


def _latency(name: str) -> Callable[[Axes, Report], None]:
    def draw(axes: Axes, report: Report) -> None:
        for percent, line in _PERCENTILES.items():
            values = [window[name][percent] for window in report["timeline"]]
            _over_time(axes, report, values, label=percent, linestyle=line, color=_INK)
        axes.set(ylabel="ms", yscale="log")

    return draw


def _rates(axes: Axes, report: Report) -> None:
    for name, label, color in (("requests_per_s", "requests", _INK), ("refused_per_s", "refused", _WARM)):
        _over_time(axes, report, [window[name] for window in report["timeline"]], label=label, color=color)
    axes.set(ylabel="1/s", ylim=(0, None))


def _throughput(axes: Axes, report: Report) -> None:
    _over_time(axes, report, [window["output_tokens_per_s"] for window in report["timeline"]], color=_INK)
    axes.set(ylabel="tokens/s", ylim=(0, None))


def _costs(axes: Axes, report: Report) -> None:
    """Draw what the run has cost until then, in shares of its end."""
    windows, width_s = report["timeline"], report["window_s"]
    num_windows = len(windows)
    busy = [window["busy"] for window in windows]
    if report["max_busy_joules"] is not None and sum(busy):
        joules, total = [], 0.0
        for share in busy:
            total += share
            joules.append(total / sum(busy) * report["max_busy_joules"] / 3.6e6)
        _over_time(axes, report, joules, label="kWh, at most", color=_WARM)
    if report["usd"] is not None:
        usd_per_s = report["usd"] / max(report["duration_s"], 1e-9)
        spent = [min((index + 1) * width_s, report["duration_s"]) * usd_per_s for index in range(num_windows)]
        _over_time(axes, report, spent, label="$", color=_INK)
    axes.set(ylim=(0, None))


_PLOTS: tuple[tuple[str, str, Callable[[Axes, Report], None]], ...] = (
    ("Arrivals", "Requests that arrived, and those refused because the queue was full.", _rates),
    ("Queue", "Requests without a token, and requests that have some, on average in each window.", _queue),
    ("Use", "KV pool, prefix cache and chips. Windows in which no request ended have no hits.", _shares),
    ("Time to first token", "Percentiles of the requests whose first token came in the window.", _latency("ttft_ms")),
    ("Time between tokens", "Percentiles of the tokens that came in the window.", _latency("itl_ms")),
    ("Throughput", "Output tokens of all replicas.", _throughput),
    (
        "Cost and energy",
        "Until then: dollars, if prices are given, and the chips' maximum power while busy, if it is known.",
        _costs,
    ),
)
