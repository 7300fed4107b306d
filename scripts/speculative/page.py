"""Plots for a speculative report, and one HTML page that shows them."""

from __future__ import annotations

import base64
import html
import io
from collections.abc import Callable, Sequence
from dataclasses import dataclass
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
summary { font-weight: 600; cursor: pointer; margin: .8rem 0; }
pre { background: #f7f7f7; padding: .8rem; white-space: pre-wrap; } .d { background: #cfe8cf; } .t { background: #fff; }
"""


@dataclass(frozen=True)
class Plot:
    """A plot with its explanation.

    Attributes:
        caption: heading.
        text: explanation below it.
    """

    caption: str
    text: str
    figure: Figure


def plots(cases: Sequence[Case]) -> dict[str, Plot]:
    """Return all plots by file name."""
    drafting = [case for case in cases if case.drafts]
    return {
        "latency": Plot(
            "Time per token against acceptance",
            "A small point is a prompt, a large one all prompts. Below the dashed line, the time of plain decoding, "
            "drafts pay.",
            _one_axes(lambda ax: _latency(ax, cases)),
        ),
        "positions": Plot(
            "Acceptance by position",
            "Share of the rounds that drafted so many tokens in which the first one was accepted, the first two, ...",
            _one_axes(lambda ax: _positions(ax, drafting)),
        ),
        "tokens": Plot(
            "Tokens per pass of the model against theory",
            "For chains E[n] = (1 - p^(k+1)) / (1 - p) for the tokens that were drafted, with p the probability that a "
            "token is accepted if those before it were. For trees the sum over all nodes of the product of the "
            "acceptances on the path to each, as measured with other trees. On the line the two are equal. "
            "Passes without drafts do not count.",
            _one_axes(lambda ax: _against_theory(ax, drafting)),
        ),
        "pages": Plot(
            "Pressure on the KV pool over time",
            "Pages of keys and values in use; each prompt begins with those of the prompt and ends with all of its "
            "own. Rounds hold pages for the tokens that they may accept.",
            _axes_of_each(cases, "num_pages_used", "pages"),
        ),
        "drafts": Plot(
            "Tokens drafted per round over time",
            "0 where a plain step ran: for a prompt, or because it was expected to be faster.",
            _axes_of_each(drafting, "k", "k"),
        ),
    }


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
    """Draw a value over time, one case below another with the same axes."""
    figure = _figure(0.5 + 0.9 * len(cases))
    all_axes = figure.subplots(len(cases), sharex=True, sharey=True, squeeze=False)[:, 0]
    for axes, case in zip(all_axes, cases, strict=True):
        values = [_step_value(step, name) for step in case.steps]
        axes.step([step["at_s"] for step in case.steps], values, linewidth=1.0, color=_INK)
        axes.set(ylabel=label, ylim=(0, None))
        axes.set_title(case.name, fontsize=9, loc="left", pad=2)
    all_axes[-1].set(xlabel="s")
    return figure


def _latency(axes: Axes, cases: Sequence[Case]) -> None:
    axes.axhline(1e3 / cases[0].tokens_per_s, color="grey", linestyle="--", linewidth=0.8)
    for case in cases:
        [marks] = axes.plot(case.acceptance, 1e3 / case.tokens_per_s, "o", markersize=9, label=case.name)
        each = case.by_prompt()
        times = [1e3 / prompt["tokens_per_s"] for prompt in each]
        axes.plot([prompt["acceptance"] for prompt in each], times, ".", alpha=0.6, color=marks.get_color())
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
    axes.set(xlabel="E[n]", ylabel="tokens per pass")


def _step_value(step: dict[str, Any], name: str) -> float:
    if name != "k":
        return float(step[name])
    return float(step["num_drafted_tokens"] / max(step["num_draft_rounds"], 1))


def table(cases: Sequence[Case]) -> list[tuple[str, ...]]:
    """Return the table rows for all cases, the header first."""
    header = ("", "tokens/s", "of plain", "ms per pass", "pays from", "acceptance", "tokens per pass", "E[n]", "ratio")
    rows = [(*header, "share of tokens")]
    for case in cases:
        speeds = (f"{case.tokens_per_s:.0f}", f"{case.tokens_per_s / cases[0].tokens_per_s:.2f}")
        speeds = (*speeds, f"{case.pass_ms:.2f}", f"{case.pass_ms / cases[0].pass_ms:.2f}" if case.drafts else "")
        drafted = ("",) * 5
        if case.drafts:
            theory = case.summary()["theory"]
            passes = (f"{case.tokens_per_pass:.2f}", f"{theory['expected']:.2f}", f"{theory['ratio']:.2f}")
            drafted = (f"{case.acceptance:.2f}", *passes, f"{case.drafted_share:.2f}")
        rows.append((case.name, *speeds, *drafted))
    return rows


def markdown(rows: Sequence[Sequence[str]]) -> str:
    """Return a Markdown table."""
    header, *others = (f"| {' | '.join(row)} |" for row in rows)
    return "\n".join([header, f"| --- |{' ---: |' * (len(rows[0]) - 1)}", *others])


def write_page(cases: Sequence[Case], settings: dict[str, Any], directory: Path) -> None:
    """Write all plots, and a page with the table, the plots and the tokens marked by their source.

    The page needs no other file.
    """
    parts = ["<!doctype html><html lang=en><meta charset=utf-8><title>Speculative decoding</title>"]
    parts.append(f"<style>{_STYLE}</style><h1>Speculative decoding</h1>")
    parts.append(
        "<p>" + ", ".join(f"{html.escape(str(k))}: {html.escape(str(v))}" for k, v in settings.items()) + "</p>"
    )
    header, *rows = table(cases)
    parts.append("<table>" + _row("th", header) + "".join(_row("td", row) for row in rows) + "</table>")
    parts.append(
        "<p>A pass is a round with drafts, or for plain decoding a step, in dispatches of several. Drafts pay where "
        "a pass yields more tokens than plain steps in its time, the number in &ldquo;pays from&rdquo;.</p>"
        "<p>Tokens per pass, their theory E[n] and the ratio of the two are of passes over drafted tokens, which yield "
        "the given share of all tokens; the others come from plain passes. A random draft must not be accepted.</p>"
    )
    for name, plot in plots(cases).items():
        png = io.BytesIO()
        plot.figure.savefig(png, format="png", dpi=110)
        (directory / f"{name}.png").write_bytes(png.getvalue())
        caption, image = html.escape(plot.caption), base64.b64encode(png.getvalue()).decode()
        parts.append(f"<h2>{caption}</h2><p>{html.escape(plot.text)}</p>")
        parts.append(f'<img alt="{caption}" src="data:image/png;base64,{image}">')
    parts.append(
        '<h2>Who proposed what</h2><p><span class="d">Tokens that were drafted and accepted</span>; all others are '
        "sampled by the model. The text is the same everywhere where tokens are greedy.</p>"
    )
    drafting = [case for case in cases if case.drafts]
    for index, case in enumerate(drafting):
        is_open = "" if index else " open"
        texts = "".join(_tokens(case, tokens) for tokens in case.tokens)
        parts.append(f"<details{is_open}><summary>{html.escape(case.name)}</summary>{texts}</details>")
    (directory / "index.html").write_text("\n".join(parts), encoding="utf-8")


def _row(kind: str, cells: Sequence[str]) -> str:
    return "<tr>" + "".join(f"<{kind}>{html.escape(cell)}</{kind}>" for cell in cells) + "</tr>"


def _tokens(case: Case, tokens: Sequence[tuple[int, bool]]) -> str:
    tokenizer = case.engine.tokenizer
    assert tokenizer is not None, "the engine has a tokenizer"
    spans = [
        f'<span class="{"d" if is_drafted else "t"}">{html.escape(tokenizer.token_text(token_id))}</span>'
        for token_id, is_drafted in tokens
    ]
    return f"<pre>{''.join(spans)}</pre>"
