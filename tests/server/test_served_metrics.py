"""Metrics by vLLM's names, and the dashboard that queries them."""

import json
import re
from collections.abc import Iterator
from importlib import resources
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from jaxserve.api.metrics import LayerCounts
from tests.server.conftest import Running, running
from tests.server.hashed_engine import SIZES, hashed_engine, write_model

OWN = ("model_name", "engine")
SECONDS = "0.3 0.5 0.8 1 1.5 2 2.5 5 10 15 20 30 40 50 60 120 240 480 960 1920 7680"
TTFT = "0.001 0.005 0.01 0.02 0.04 0.06 0.08 0.1 0.25 0.5 0.75 1 2.5 5 7.5 10 20 40 80 160 640 2560"
ITL = "0.01 0.025 0.05 0.075 0.1 0.15 0.2 0.3 0.4 0.5 0.75 1 2.5 5 7.5 10 20 40 80"
TOKENS = "1 2 5 10 20 50 100 200"  # up to max_model_len

# vLLM 0.33's metrics of an engine without LoRA, connectors and images: type, labels, buckets.
VLLM: dict[str, tuple[str, tuple[str, ...], str]] = {
    "num_requests_running": ("gauge", OWN, ""),
    "num_requests_waiting": ("gauge", OWN, ""),
    "num_requests_waiting_by_reason": ("gauge", (*OWN, "reason"), ""),
    "engine_sleep_state": ("gauge", (*OWN, "sleep_state"), ""),
    "kv_cache_usage_perc": ("gauge", OWN, ""),
    "prefix_cache_queries": ("counter", OWN, ""),
    "prefix_cache_hits": ("counter", OWN, ""),
    "external_prefix_cache_queries": ("counter", OWN, ""),
    "external_prefix_cache_hits": ("counter", OWN, ""),
    "num_preemptions": ("counter", OWN, ""),
    "prompt_tokens": ("counter", OWN, ""),
    "prompt_tokens_by_source": ("counter", (*OWN, "source"), ""),
    "prompt_tokens_cached": ("counter", OWN, ""),
    "prompt_tokens_cached_by_source": ("counter", (*OWN, "source"), ""),
    "mm_cache_queries": ("counter", OWN, ""),
    "mm_cache_hits": ("counter", OWN, ""),
    "generation_tokens": ("counter", OWN, ""),
    "request_success": ("counter", (*OWN, "finished_reason"), ""),
    "admission_rejections": ("counter", ("model_name", "reason"), ""),
    "spec_decode_num_drafts": ("counter", OWN, ""),
    "spec_decode_num_draft_tokens": ("counter", OWN, ""),
    "spec_decode_num_accepted_tokens": ("counter", OWN, ""),
    "spec_decode_num_accepted_tokens_per_pos": ("counter", (*OWN, "position"), ""),
    "request_prompt_tokens": ("histogram", OWN, TOKENS),
    "request_generation_tokens": ("histogram", OWN, TOKENS),
    "iteration_tokens_total": ("histogram", OWN, "1 8 16 32 64 128 256 512 1024 2048 4096 8192 16384"),
    "request_max_num_generation_tokens": ("histogram", OWN, TOKENS),
    "request_params_n": ("histogram", OWN, "1 2 5 10 20"),
    "request_params_max_tokens": ("histogram", OWN, TOKENS),
    "request_prefill_kv_computed_tokens": ("histogram", OWN, TOKENS),
    "request_num_preemptions": ("histogram", OWN, "1 2 3 4 5 10 20"),
    "time_to_first_token_seconds": ("histogram", OWN, TTFT),
    "inter_token_latency_seconds": ("histogram", OWN, ITL),
    "request_time_per_output_token_seconds": ("histogram", OWN, ITL),
    "e2e_request_latency_seconds": ("histogram", OWN, SECONDS),
    "request_queue_time_seconds": ("histogram", OWN, SECONDS),
    "request_inference_time_seconds": ("histogram", OWN, SECONDS),
    "request_prefill_time_seconds": ("histogram", OWN, SECONDS),
    "request_decode_time_seconds": ("histogram", OWN, SECONDS),
}
NAME = re.compile(r"\b(?:vllm|jaxserve):[a-z0-9_]+")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    engine = hashed_engine(write_model(tmp_path_factory.mktemp("model")))
    with running(engine, served_model_name=["tiny"]) as server:
        yield server


def families(server: Running) -> dict[str, Any]:
    """Return the metrics as Prometheus's own parser reads them."""
    return {family.name: family for family in text_string_to_metric_families(server.client.get("/metrics").text)}


def values(server: Running, name: str, **labels: str) -> float:
    """Return the sum of a metric's samples with these labels."""
    family = families(server)[re.sub("_(total|bucket|sum|count)$", "", name) if name.endswith("_total") else name]
    samples = [s for s in family.samples if s.name == name and labels.items() <= s.labels.items()]
    return sum(sample.value for sample in samples)


def test_names_labels_and_buckets_are_vllms(server: Running) -> None:
    server.client.post("/v1/completions", json={"prompt": "a b c", "max_tokens": 20, "n": 2, "ignore_eos": True})
    found = families(server)
    for name, (kind, labels, buckets) in VLLM.items():
        family = found[f"vllm:{name}"]
        assert family.type == kind, name
        for sample in family.samples:
            assert set(sample.labels) == {*labels, *(("le",) if sample.name.endswith("_bucket") else ())}, name
        bounds = [float(sample.labels["le"]) for sample in family.samples if sample.name.endswith("_bucket")]
        assert bounds == ([*map(float, buckets.split()), float("inf")] if buckets else []), name
    info, schedule = found["vllm:cache_config_info"].samples[0].labels, server.engine.schedule
    assert (int(info["block_size"]), int(info["num_gpu_blocks"])) == (schedule.page_size, schedule.num_pages)
    per_request = -(-schedule.max_model_len // schedule.page_size)
    assert float(info["kv_cache_max_concurrency"]) == schedule.num_pages / per_request
    assert int(info["kv_cache_size_tokens"]) == int(schedule.num_pages / per_request * schedule.max_model_len)
    labels = {label for family in found.values() for sample in family.samples for label in sample.labels}
    assert not any("tenant" in label or "key" in label for label in labels)


def test_metrics_count_what_requests_did(server: Running) -> None:
    names = ("generation_tokens", "prompt_tokens", "prefix_cache_hits", "prompt_tokens_cached")
    before = {name: values(server, f"vllm:{name}_total") for name in names}
    body = {"prompt": [7] * 33, "max_tokens": 10, "ignore_eos": True}
    for _ in range(2):
        server.client.post("/v1/completions", json=body)
    after = {name: values(server, f"vllm:{name}_total") for name in names}
    assert after["generation_tokens"] - before["generation_tokens"] == 20
    assert after["prompt_tokens"] - before["prompt_tokens"] == 66
    assert after["prefix_cache_hits"] - before["prefix_cache_hits"] == 32
    assert after["prompt_tokens_cached"] - before["prompt_tokens_cached"] == 32
    total = values(server, "vllm:prompt_tokens_total")
    assert values(server, "vllm:prompt_tokens_by_source_total") == total
    assert values(server, "vllm:engine_sleep_state", sleep_state="awake") == 1
    finished = values(server, "vllm:request_success_total", finished_reason="length")
    samples = {s.name: s.value for s in families(server)["vllm:e2e_request_latency_seconds"].samples}
    assert samples["vllm:e2e_request_latency_seconds_count"] == finished


def test_an_iteration_has_the_tokens_that_requests_get_in_it(server: Running) -> None:
    """Count as vLLM does: a prompt with its first token, but for cached tokens, and no steps without outputs."""

    def iterations() -> tuple[float, float]:
        samples = {s.name: s.value for s in families(server)["vllm:iteration_tokens_total"].samples}
        return samples["vllm:iteration_tokens_total_sum"], samples["vllm:iteration_tokens_total_count"]

    names = ("generation_tokens", "prompt_tokens", "prompt_tokens_cached")
    for body, num_iterations in (
        ({"prompt": [5] * 80, "max_tokens": 7}, 7),  # a prompt of several steps
        ({"prompt": [5] * 80, "max_tokens": 1}, 1),
        ({"prompt": [6] * 9, "max_tokens": 20, "n": 2}, None),
    ):
        before, counts = iterations(), {name: values(server, f"vllm:{name}_total") for name in names}
        server.client.post("/v1/completions", json=body | {"ignore_eos": True})
        total, count = (now - then for now, then in zip(iterations(), before, strict=True))
        generated, prompt, cached = (values(server, f"vllm:{name}_total") - counts[name] for name in names)
        assert total == generated + prompt - cached
        assert count == (num_iterations or count) <= generated


def test_tokens_of_experts_are_summed_over_layers(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "jaxserve:expert_tokens" not in families(server), "which are not counted"
    monkeypatch.setattr(server.engine.stats, "expert_tokens", LayerCounts.from_rows([(3, 0, 5), (1, 7, 0)]))
    assert [values(server, "jaxserve:expert_tokens_total", expert=str(n)) for n in range(3)] == [4, 7, 5]


def queries() -> list[str]:
    """Return all queries of the dashboard."""
    board = json.loads(resources.files("jaxserve.server").joinpath("grafana.json").read_text())
    panels = [panel for panel in board["panels"] if panel["type"] != "row"]
    assert len(panels) > 20
    return [target["expr"] for panel in panels for target in panel["targets"]]


def test_every_metric_of_the_dashboard_exists(server: Running) -> None:
    samples = [sample for family in families(server).values() for sample in family.samples]
    names = {sample.name for sample in samples}
    names |= {
        f"vllm:spec_decode_num_accepted_tokens_per_pos{end}" for end in ("_total", "")
    }  # has samples once drafting
    labels = {label for sample in samples for label in sample.labels} | {"position"}
    subjects = set()
    for query in queries():
        used = NAME.findall(query)
        assert used, query
        assert set(used) <= names, set(used) - names
        subjects |= set(used)
        wanted = re.findall(r"(?:by|ignoring)\s*\(([^)]*)\)", query) + re.findall(r"[{,]\s*(\w+)\s*[=!]", query)
        assert {name.strip() for group in wanted for name in group.split(",")} <= labels, query
        assert query.count("(") == query.count(")")
    text = " ".join(subjects)
    for subject in ("generation_tokens", "time_to_first", "inter_token", "kv_cache", "waiting", "wait_seconds"):
        assert subject in text
    for subject in ("queue_time", "rejections", "preemptions", "spec_decode"):
        assert subject in text


@pytest.mark.parametrize("form", ["TEXT", "json"])
def test_load_is_in_a_header_of_a_reply(server: Running, form: str) -> None:
    headers = {"endpoint-load-metrics-format": form}
    body: dict[str, Any] = {"prompt": "a", "max_tokens": 2}
    for stream in (False, True):
        reply = server.client.post("/v1/completions", json=body | {"stream": stream}, headers=headers)
        kind, _, report = reply.headers["endpoint-load-metrics"].partition(" ")
        assert kind == form.upper()
        if kind == "JSON":
            metrics = json.loads(report)["named_metrics"]
        else:
            metrics = dict(item.removeprefix("named_metrics.").split("=") for item in report.split(", "))
        wanted = {"kv_cache_usage_perc", "num_requests_waiting", "num_requests_running", "estimated_wait_seconds"}
        assert metrics.keys() == wanted
        assert 0 <= float(metrics["kv_cache_usage_perc"]) <= 1
    assert "endpoint-load-metrics" not in server.client.post("/v1/completions", json=body).headers


def test_load_is_told_to_no_stranger(tmp_path: Path) -> None:
    with running(hashed_engine(write_model(tmp_path)), api_key=["secret"]) as server:
        reply = server.client.get("/v1/models", headers={"endpoint-load-metrics-format": "TEXT"})
        assert reply.status_code == 401
        assert "endpoint-load-metrics" not in reply.headers


def test_pages_in_the_metrics_are_those_of_the_engine(server: Running) -> None:
    info = families(server)["vllm:cache_config_info"].samples[0].labels
    assert (info["block_size"], info["num_gpu_blocks"]) == (str(SIZES["page_size"]), str(SIZES["num_pages"]))
