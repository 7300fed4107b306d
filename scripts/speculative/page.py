"""Plots of a speculative report, and one HTML page that shows them."""

from __future__ import annotations

import base64
import html
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from speculative.runs import Case

Axes = Any  # matplotlib.axes.Axes
Figure = Any  # matplotlib.figure.Figure
_INK = "#1f4e79"
_STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; max-width: 62rem; margin: 2rem auto; padding: 0 1rem; color: #222; }
table { border-collapse: collapse; } td, th { padding: .2rem .8rem; text-align: right; border-bottom: 1px solid #ddd; }
td:first-child, th:first-child { text-align: left; } img { max-width: 100%; }
pre { background: #f7f7f7; padding: .8rem; white-space: pre-wrap; } .d { background: #cfe8cf; } .t { background: #fff; }
"""


def draw(cases: Sequence[Case], directory: Path) -> dict[str, Path]:
    """Draw all plots into a directory; return their files by caption."""
    drafting = [case for case in cases if case.drafts]
    one, each = _one_axes, _axes_of_each
    figures: dict[str, tuple[str, Figure]] = {
        "latency": ("Time per token against acceptance", one(lambda ax: _latency(ax, cases))),
        "positions": (
            "Share of rounds in which each drafted token is accepted",
            one(lambda ax: _positions(ax, drafting)),
        ),
        "tokens": ("Tokens per pass of the model against E[n]", one(lambda ax: _against_theory(ax, drafting))),
        "pages": ("KV pages in use", each(cases, "num_pages_used", "pages")),
        "drafts": ("Tokens drafted per round", each(drafting, "k", "drafted")),
    }
    for name, (_, figure) in figures.items():
        figure.savefig(directory / f"{name}.png", dpi=110)
    return {caption: directory / f"{name}.png" for name, (caption, _) in figures.items()}


def _figure(height: float) -> Figure:
    from matplotlib import figure  # noqa: PLC0415 - an extra; without pyplot there is no global state

    return figure.Figure(figsize=(9.0, height), layout="constrained")


def _one_axes(draw_on: Callable[[Axes], None]) -> Figure:
    figure = _figure(3.6)
    axes = figure.subplots()
    draw_on(axes)
    axes.legend(fontsize=8, loc="center left", bbox_to_anchor=(1.01, 0.5))
    return figure


def _axes_of_each(cases: Sequence[Case], name: str, label: str) -> Figure:
    """Draw a number over time, the cases below each other with the same axes."""
    figure = _figure(0.5 + 0.9 * len(cases))
    all_axes = figure.subplots(len(cases), sharex=True, sharey=True, squeeze=False)[:, 0]
    for axes, case in zip(all_axes, cases, strict=True):
        values = [_of_step(step, name) for step in case.steps]
        axes.step([step["at_s"] for step in case.steps], values, linewidth=1.0, color=_INK)
        axes.set(ylabel=label, ylim=(0, None))
        axes.set_title(case.name, fontsize=9, loc="left", pad=2)
    all_axes[-1].set(xlabel="s")
    return figure


def _latency(axes: Axes, cases: Sequence[Case]) -> None:
    for case in cases:
        axes.plot(case.acceptance, 1e3 / case.tokens_per_s, "o", label=case.name)
    axes.set(xlabel="acceptance", ylabel="ms per token", ylim=(0, None))


def _positions(axes: Axes, cases: Sequence[Case]) -> None:
    for case in cases:
        shares = case.summary()["accepted_by_position"]
        axes.plot(range(1, len(shares) + 1), shares, "o-", label=case.name)
    axes.set(xlabel="position", ylabel="share of rounds that drafted it", ylim=(0, 1.02))
    axes.xaxis.get_major_locator().set_params(integer=True)


def _against_theory(axes: Axes, cases: Sequence[Case]) -> None:
    most = 1.0
    for case in cases:
        expected = case.summary()["theory"]["expected"]
        axes.plot(expected, case.tokens_per_pass, "o", label=case.name)
        most = max(most, expected, case.tokens_per_pass)
    axes.plot([1, most], [1, most], color="grey", linewidth=0.8)
    axes.set(xlabel="mean of (1 - p^(k+1)) / (1 - p)", ylabel="tokens per pass")


def _of_step(step: dict[str, Any], name: str) -> float:
    if name != "k":
        return float(step[name])
    return float(step["num_drafted_tokens"] / max(step["num_draft_rounds"], 1))


def write_page(cases: Sequence[Case], plots: dict[str, Path], facts: dict[str, Any], path: Path) -> None:
    """Write a page with the table, the plots and the tokens by who proposed them; it needs no other file."""
    parts = [f"<!doctype html><meta charset=utf-8><title>Speculative decoding</title><style>{_STYLE}</style>"]
    parts.append("<h1>Speculative decoding</h1>")
    parts.append("<p>" + ", ".join(f"{html.escape(str(k))} {html.escape(str(v))}" for k, v in facts.items()) + "</p>")
    header = ("", "tokens/s", "of plain", "acceptance", "tokens per pass", "E[n]", "rounds")
    parts.append("<table><tr>" + "".join(f"<th>{name}</th>" for name in header) + "</tr>")
    plain = cases[0].tokens_per_s
    for case in cases:
        expected = case.summary()["theory"].get("expected")
        drafted = (
            (f"{case.acceptance:.2f}", f"{case.tokens_per_pass:.2f}", f"{expected:.2f}") if expected else ("",) * 3
        )
        cells = (case.name, f"{case.tokens_per_s:.0f}", f"{case.tokens_per_s / plain:.2f}", *drafted, len(case.drafts))
        parts.append("<tr>" + "".join(f"<td>{cell}</td>" for cell in cells) + "</tr>")
    parts.append("</table>")
    for caption, file in plots.items():
        image = base64.b64encode(file.read_bytes()).decode()
        parts.append(
            f'<h2>{html.escape(caption)}</h2><img alt="{html.escape(caption)}" src="data:image/png;base64,{image}">'
        )
    parts.append('<h2>Who proposed what</h2><p><span class="d">drafted and accepted</span>, the rest by the model</p>')
    for case in cases:
        if case.drafts:
            parts.append(
                f"<h3>{html.escape(case.name)}</h3>" + "".join(_tokens(case, tokens) for tokens in case.tokens)
            )
    path.write_text("\n".join(parts), encoding="utf-8")


def _tokens(case: Case, tokens: Sequence[tuple[int, bool]]) -> str:
    tokenizer = case.engine.tokenizer
    assert tokenizer is not None, "the engine has a tokenizer"
    spans = [
        f'<span class="{"d" if is_drafted else "t"}">{html.escape(tokenizer.token_text(token_id))}</span>'
        for token_id, is_drafted in tokens
    ]
    return f"<pre>{''.join(spans)}</pre>"
