"""Text tables for a report."""

from collections.abc import Sequence

from jaxserve.tools.bench.report import median_run, offered_rate
from jaxserve.tools.bench.summary import Json
from jaxserve.tools.figures.tables import Row, align, number

_LATENCIES = (("TTFT (ms)", "ttft_ms"), ("TPOT (ms)", "tpot_ms"), ("ITL (ms)", "itl_ms"), ("end to end (ms)", "e2e_ms"))
_STATISTICS = ("mean", "p50", "p90", "p99", "max")


def render(report: Json) -> str:
    """Return a report as readable text."""
    runs = report["runs"]
    blocks = [_header(report)]
    if report["kind"] == "offline" and len(runs) > 1:
        blocks.append(_round_rates(runs))
    if report["kind"] == "serve" and len(runs) > 1:
        blocks.append(align(_sweep(runs), header=True))
    else:
        run = median_run(runs)
        blocks += [align(_figures(run, report)), align(_latencies(run), header=True)]
    return "\n\n".join(blocks)


def _header(report: Json) -> str:
    """Return the lines with workload, model, device or server, and peak rates."""
    load = report["workload"]
    first = (
        f"{report['kind']}, {load['name']}: {load['num_requests']} requests, "
        f"{load['num_prompt_tokens']} prompt and {load['num_output_tokens']} output tokens\n"
    )
    if (server := report.get("server")) is not None:
        return f"{first}{server['model']} at {server['url']}"
    device, model = report["device"], report["model"]
    return first + (
        f"{model['path']} on {device['count']} x {device['kind']} ({device['num_cores']} cores), "
        f"jax {report['versions']['jax']}\n"
        f"computed in {model['dtype']}, weights in {model['stored']}, keys and values in {model['kv_dtype']}\n"
        f"peak rates by which E is counted: {report['peak_rates']['flops_per_s'] / 1e9:.4g} GFLOP/s, "
        f"{report['peak_rates']['bytes_per_s'] / 1e9:.4g} GB/s"
    )


def _round_rates(runs: Sequence[Json]) -> str:
    """Return the line with each round's output rate; it ends by announcing the median round's figures below it."""
    rates = ", ".join(f"{run['output_tok_per_s']:.0f}" for run in runs)
    return f"{len(runs)} rounds of {rates} output tok/s; below, the median one"


def _figures(run: Json, report: Json) -> list[Row]:
    """Return a table row, name and value, for each figure of a run; `report` has the engine's sizes."""
    failed = f", {run['num_failed']} failed" if run["num_failed"] else ""
    rate = offered_rate(run)
    offered = "" if rate is None else f"{rate:g} /s offered, served "
    return [
        ("output", f"{run['output_tok_per_s']:.1f} tok/s"),
        ("prompt and output", f"{run['total_tok_per_s']:.1f} tok/s"),
        ("requests", f"{offered}{run['requests_per_s']:.2f} /s over {run['elapsed_s']:.2f} s{failed}"),
        *(_engine_figures(run, report) if "num_steps" in run else []),
        ("prefix cache", f"{run['cached_prompt_share']:.1%} of prompt tokens"),
        *_goodput_and_cost(run),
    ]


def _engine_figures(run: Json, report: Json) -> list[Row]:
    """Return table rows for the figures about the engine's steps, queue and pages."""
    split = run["time_split_ms"]
    wall_ms = sum(split.values()) or 1.0
    num_pages, used = report["schedule"]["num_pages"], run["page_occupancy"]["max"]
    stall, memory = split["stall_ms"] / wall_ms, split["memory_ms"] / wall_ms
    return [
        ("steps", f"{run['num_steps']} of {run['wall_ms_per_step']:.2f} ms, host {run['host_ms_per_step']:.2f} ms"),
        ("step time", f"E {run['efficiency']:.1%} compute, {memory:.1%} memory, {stall:.1%} stall"),
        ("rows in a step", f"{run['batch_rows']['mean']:.1f} on average, {run['batch_rows']['max']:.0f} at most"),
        ("queue", f"{run['queue_depth']['mean']:.1f} on average, {run['queue_depth']['max']:.0f} at most"),
        ("padding", f"{run['padding_share']:.1%} of computed tokens"),
        ("pages", f"{used:.1%} of {num_pages} in use at most, {run['page_slack_share']:.1%} slack"),
        ("preemptions", str(run["num_preemptions"])),
        ("compiles", str(run["num_compiles"])),
        *_energy(run),
    ]


def _energy(run: Json) -> list[Row]:
    """Return a table row for the energy, if there is a meter."""
    if (energy := run["energy"]) is None:
        return []
    text = f"{energy['joules']:.4g} J, {energy['joules_per_output_token']:.3g} J per output token"
    return [("energy", text if energy["co2_g"] is None else f"{text}, {energy['co2_g']:.3g} g CO2")]


def _goodput_and_cost(run: Json) -> list[Row]:
    """Return table rows for goodput, if the run has an SLO, and for cost, if it has a price."""
    rows: list[Row] = []
    if (goodput := run["goodput"]) is not None:
        rows.append(("goodput", f"{goodput['requests_per_s']:.2f} /s, {goodput['share']:.1%} {_slo(goodput)}"))
    if (cost := run["cost"]) is not None:
        text = f"{cost['per_million_output_tokens']:.4g} for output, {cost['per_million_tokens']:.4g} for all"
        rows.append(("cost of a million tokens", f"{text}, at {cost['price_per_hour']:g} an hour"))
    return rows


def _slo(goodput: Json) -> str:
    """Return a phrase with the SLO's limits, such as "within TTFT 200 ms and TPOT 50 ms"."""
    limits = (("TTFT", goodput["slo_ttft_ms"]), ("TPOT", goodput["slo_tpot_ms"]))
    return "within " + " and ".join(f"{name} {value:g} ms" for name, value in limits if value is not None)


def _latencies(run: Json) -> list[Row]:
    """Return a header and a row per latency with its mean, percentiles and maximum."""
    rows: list[Row] = [("", *_STATISTICS)]
    entries = [(title, run[key]) for title, key in _LATENCIES]
    entries += [(f"TTFT (ms), picture of {size}", ttfts) for size, ttfts in run.get("ttft_ms_by_picture", {}).items()]
    rows += [(title, *(number(figures[name]) for name in _STATISTICS)) for title, figures in entries]
    return rows


def _sweep(runs: Sequence[Json]) -> list[Row]:
    """Return a header and a row for each run of a sweep over request rates, with latencies as p50/p90/p99."""
    columns = {
        "rate /s": [number(offered_rate(run)) for run in runs],
        "served /s": [number(run["requests_per_s"]) for run in runs],
        "out tok/s": [number(run["output_tok_per_s"]) for run in runs],
    }
    for title, key in _LATENCIES:
        name = title.replace("(ms)", "ms")
        columns[f"{name} p50/p90/p99"] = ["/".join(number(run[key][x]) for x in ("p50", "p90", "p99")) for run in runs]
    if "num_steps" in runs[0]:
        columns["queue"] = [f"{run['queue_depth']['mean']:.1f}" for run in runs]
        columns["rows"] = [f"{run['batch_rows']['mean']:.1f}" for run in runs]
        columns["E"] = [f"{run['efficiency']:.1%}" for run in runs]
    if any(run["num_failed"] for run in runs):
        columns["failed"] = [str(run["num_failed"]) for run in runs]
    if runs[0]["goodput"] is not None:
        columns["goodput /s"] = [number(run["goodput"]["requests_per_s"]) for run in runs]
    if runs[0]["cost"] is not None:
        columns["cost /M out"] = [number(run["cost"]["per_million_output_tokens"]) for run in runs]
    return [tuple(columns), *zip(*columns.values(), strict=True)]
