"""Plots of a report: the roofline with decode attention and the engine, and a heat map of fractions of copy."""

from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from device_report.document import Document, Entry

Axes = Any  # matplotlib's
Sizes = tuple[int, int, str, str]

_MARKERS = {"decode": "o", "mixed": "s", "serve": "^"}
_LABELS = {"decode": "decode attention", "mixed": "mixed attention", "serve": "engine, decoding"}


def draw(document: Document, directory: Path) -> list[str]:
    """Write the plots and return their paths; if there are no figures, return lines with the reasons."""
    if find_spec("matplotlib") is None:
        return ["there are no plots, because they need matplotlib; pip install matplotlib"]
    if document.copy_gb_per_s is None:
        return ["there are no plots, because they need the peak rates: --part peak_rates"]
    directory.mkdir(parents=True, exist_ok=True)
    paths = []
    if document.points(*_MARKERS) and document.gemm_tflop_per_s is not None:
        paths.append(
            _save(directory / f"{document.device}_roofline.png", (9, 6), lambda figure: _roofline(document, figure))
        )
    if panels := _panels(document.points("decode")):
        size = (4.2 * len(panels), 4)
        paths.append(
            _save(directory / f"{document.device}_decode.png", size, lambda figure: _heat_maps(panels, figure))
        )
    return paths


def _save(path: Path, size: tuple[float, float], draw_on: Callable[[Any], None]) -> str:
    from matplotlib.figure import Figure  # noqa: PLC0415 - an extra; without pyplot there is no global state

    figure = Figure(figsize=size, layout="constrained")
    draw_on(figure)
    figure.savefig(path, dpi=120)
    return str(path)


def _roofline(document: Document, figure: Any) -> None:
    """Plot FLOP/s over FLOPs per byte of keys, values and weights, all of which a step must read."""
    axes, copy, gemm = figure.subplots(), document.copy_gb_per_s, document.gemm_tflop_per_s
    assert copy is not None
    assert gemm is not None
    ridge = 1e3 * gemm / copy
    series: dict[tuple[str, str], list[tuple[float, float]]] = {}  # keyed by marker and label
    for p in document.points(*_MARKERS):
        label = ", ".join(filter(None, (_LABELS[p["kind"]], p.get("backend"), p.get("kv_dtype"))))
        series.setdefault((_MARKERS[p["kind"]], label), []).append(_place(p))
    reach = [x for placed in series.values() for x, _ in placed] + [ridge]
    low, high = min(reach) / 3, max(reach) * 3
    roof = [low, ridge, max(high, 3 * ridge)]
    axes.loglog(roof, [min(gemm, x * copy / 1e3) for x in roof], color="black", label="copy bandwidth, matrix product")
    for (marker, label), placed in series.items():
        axes.loglog(*zip(*placed, strict=True), marker, alpha=0.7, label=label)
    axes.set(xlabel="FLOP per byte", ylabel="TFLOP/s", title=_title(document))
    axes.grid(which="both", alpha=0.2)
    axes.legend()


def _place(point: Entry) -> tuple[float, float]:
    """Return FLOPs per byte and TFLOP/s."""
    if point["kind"] == "serve":
        return point["flops"] / (point["weight_bytes"] + point["kv_bytes"]), point["tflop_per_s"]
    return 1e3 * point["tflop_per_s"] / point["kv_gb_per_s"], point["tflop_per_s"]


def _panels(points: list[Entry]) -> dict[Sizes, list[Entry]]:
    """Group points by page size, group, pool dtype and backend."""
    panels: dict[Sizes, list[Entry]] = {}
    for point in points:
        sizes = point["page_size"], point["group"], point["kv_dtype"], point["backend"]
        panels.setdefault(sizes, []).append(point)
    return dict(sorted(panels.items()))


def _heat_maps(panels: dict[Sizes, list[Entry]], figure: Any) -> None:
    columns = figure.subplots(1, len(panels), squeeze=False)[0]
    for axes, ((page_size, group, kv_dtype, backend), points) in zip(columns, panels.items(), strict=True):
        _heat_map(axes, points)
        title = f"decode by {backend}, share of copy:\n{kv_dtype}, pages of {page_size}, group of {group}"
        axes.set_title(title, fontsize=9)


def _heat_map(axes: Axes, points: list[Entry]) -> None:
    """Draw rows over context; unmeasured cells stay white. For narrow pools, also show their speed-up."""
    rows, contexts = (sorted({p[name] for p in points}) for name in ("rows", "context"))
    grid = [[float("nan")] * len(contexts) for _ in rows]
    for p in points:
        y, x = rows.index(p["rows"]), contexts.index(p["context"])
        grid[y][x] = p["fraction_of_copy"]
        text = f"{p['fraction_of_copy']:.0%}" + (f"\n{p['speed_up']:.2f} x" if "speed_up" in p else "")
        axes.text(x, y, text, ha="center", va="center", fontsize=9)
    axes.imshow(grid, vmin=0, vmax=1, cmap="RdYlGn", aspect="auto", origin="lower")
    axes.set_xticks(range(len(contexts)), contexts)
    axes.set_yticks(range(len(rows)), rows)
    axes.set(xlabel="context", ylabel="rows")


def _title(document: Document) -> str:
    devices = {content["machine"]["device"] for _, _, content in document.stages() if content["machine"]["device"]}
    return f"{'dry run, ' if document.dry_run else ''}{', '.join(sorted(devices))}"
