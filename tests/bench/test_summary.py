"""Tests of a run's figures against numpy and against counts by hand."""

import json
import statistics

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxserve.api.metrics import EngineStats, PeakRates
from jaxserve.tools.bench.load import EngineTrace, LoadTrace, RequestTrace, StepSample
from jaxserve.tools.bench.summary import EngineSizes, Slo, percentiles, summarize

SIZES = EngineSizes(page_size=16, num_pages=10, peak_rates=PeakRates(flops_per_s=1e9, bytes_per_s=1e9))
STATS = EngineStats(
    num_steps=4,
    num_tokens=90,
    num_padding_tokens=10,
    num_compiles=2,
    used_page_steps=20,
    slack_token_steps=80,
    wall_ms=20.0,
    host_ms=2.0,
    weight_bytes=3_000_000,
    kv_bytes=2_000_000,
    flops=10_000_000,
)
REQUESTS = [  # ttft 100 ms, TPOT 200 ms; ttft 500 ms, TPOT 50 ms; ttft 200 ms, one token
    RequestTrace(0.0, 60, 0, [0.1, 0.2, 0.5]),
    RequestTrace(1.0, 30, 24, [1.5, 1.55, 1.6]),
    RequestTrace(1.8, 30, 0, [2.0]),
]
STEPS = [StepSample(0.1, 1, 60, 4, 0), StepSample(0.6), StepSample(1.5, 3, 30, 6, 5)]
TRACE = LoadTrace(REQUESTS, 2.0, EngineTrace(STEPS, STATS))


def goodput(**slo: float) -> dict[str, float]:
    return summarize(TRACE, slo=Slo(**slo), sizes=SIZES)["goodput"]


@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=50))
def test_percentiles_are_numpys(values: list[float]) -> None:
    got = percentiles(values)
    assert [got["p50"], got["p90"], got["p99"]] == pytest.approx(np.percentile(values, [50, 90, 99]))
    assert got["p50"] == pytest.approx(statistics.median(values))
    assert got["mean"] == pytest.approx(np.mean(values))
    assert got["max"] == max(values)


def test_percentiles_of_no_values_are_null() -> None:
    assert set(percentiles([]).values()) == {None}


def test_rates_count_the_whole_run() -> None:
    figures = summarize(TRACE, sizes=SIZES)
    assert figures["requests_per_s"] == 1.5
    assert figures["output_tok_per_s"] == 3.5
    assert figures["total_tok_per_s"] == (120 + 7) / 2
    assert figures["cached_prompt_share"] == 0.2
    assert figures["padding_share"] == 0.1
    assert figures["page_slack_share"] == 80 / (20 * 16)
    assert figures["num_compiles"] == 2
    assert figures["ttft_ms"]["max"] == pytest.approx(500)
    assert figures["ttft_ms"]["p50"] == pytest.approx(200)
    assert figures["e2e_ms"]["max"] == pytest.approx(600)
    assert figures["tpot_ms"]["mean"] == pytest.approx(125)  # mean over requests
    assert figures["itl_ms"]["mean"] == pytest.approx(125)  # mean over arrivals, here equally many per request
    assert figures["itl_ms"]["max"] == pytest.approx(300)


def test_step_figures_cover_only_steps_with_rows() -> None:
    figures = summarize(TRACE, sizes=SIZES)
    assert figures["queue_depth"] == {"mean": 2.5, "max": 5.0}
    assert figures["batch_rows"] == {"mean": 2.0, "max": 3.0}
    assert figures["page_occupancy"] == {"mean": pytest.approx(0.5), "max": 0.6}
    assert figures["time_split_ms"] == pytest.approx({"compute_ms": 10, "memory_ms": 5, "stall_ms": 5})
    assert figures["efficiency"] == 0.5
    assert figures["roofline_share"] == 0.75
    assert figures["wall_ms_per_step"] == 5.0


def test_goodput_counts_requests_that_met_every_slo() -> None:
    assert goodput(ttft_ms=200.5) == {"slo_ttft_ms": 200.5, "slo_tpot_ms": None, "share": 2 / 3, "requests_per_s": 1.0}
    assert goodput(tpot_ms=60.0)["share"] == 2 / 3  # an output of a single token always meets it
    assert goodput(ttft_ms=200.5, tpot_ms=60.0)["share"] == 1 / 3
    assert goodput(ttft_ms=600.0, tpot_ms=250.0)["share"] == 1
    assert goodput(ttft_ms=50.0)["requests_per_s"] == 0
    assert summarize(TRACE, sizes=SIZES)["goodput"] is None


def test_cost_of_a_million_tokens() -> None:
    assert summarize(TRACE, sizes=SIZES)["cost"] is None
    cost = summarize(TRACE, price_per_hour=7.2)["cost"]
    hours_per_million = 1e6 / 3.5 / 3600
    assert cost["per_million_output_tokens"] == pytest.approx(7.2 * hours_per_million)
    assert cost["per_million_tokens"] == pytest.approx(7.2 * 1e6 / 63.5 / 3600)


def test_figures_are_json_and_the_traces_are_in_them() -> None:
    figures = summarize(TRACE, sizes=SIZES)
    assert json.loads(json.dumps(figures, allow_nan=False)) == figures
    assert figures["timeline"] == {
        "time_s": [0.1, 0.6, 1.5],
        "num_rows": [1, 0, 3],
        "num_tokens": [60, 0, 30],
        "num_pages_used": [4, 0, 6],
        "num_waiting": [0, 0, 5],
    }
    assert figures["requests"][1] == {
        "arrival_s": 1.0,
        "num_prompt_tokens": 30,
        "num_cached_tokens": 24,
        "num_output_tokens": 3,
        "ttft_ms": 500.0,
        "tpot_ms": pytest.approx(50),
        "e2e_ms": pytest.approx(600),
        "itls_ms": [50.0, 50.0],
    }
