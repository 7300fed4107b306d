"""Observer: request metrics under vLLM's names and with its buckets, for Prometheus."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping
from itertools import accumulate, zip_longest
from typing import TYPE_CHECKING, Any

from prometheus_client import CollectorRegistry, Histogram, disable_created_metrics, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from jaxserve.api.metrics import ITERATION_TOKENS, Counter, Gauge, Vector, vllm_metrics
from jaxserve.server.buckets import ITL_S, PREEMPTIONS, REQUEST_S, SAMPLES, TTFT_S, token_buckets

if TYPE_CHECKING:
    from jaxserve.assembly.engine import Engine
    from jaxserve.core.growing_outputs import RequestGroup

_SLEEP_STATES = ("awake", "weights_offloaded", "discard_all")
_FINISH_REASONS = ("stop", "length", "abort", "error", "repetition")
_REJECTIONS = ("queue_full", "queue_tokens", "wait", "extras", "shed", "key_limit", "rate_limit", "draining")


_NEVER_COUNTED = (  # there are no caches but the pools, and no prompts but text
    *("vllm:external_prefix_cache_queries", "vllm:external_prefix_cache_hits"),
    *("vllm:mm_cache_queries", "vllm:mm_cache_hits"),
)
FRESH_S = 0.02  # lifetime of an estimate


class Observer(Collector):
    """Metrics for an engine and its requests.

    Args:
        engine: the engine.
        model_name: value for the label `model_name`.

    Attributes:
        wait_estimator: estimates of waits.
        degradations: counts by degradation step.
        rejections: requests that were not admitted, by reason.
    """

    def __init__(self, engine: Engine, model_name: str) -> None:
        self._engine = engine
        self._labels = {"model_name": model_name, "engine": "0"}
        self.degradations: Mapping[str, int] = {}
        self.wait_estimator = engine.host.wait_estimator
        self._estimated_at_s, self._estimate_s = -math.inf, 0.0
        self.rejections = dict.fromkeys(_REJECTIONS, 0)
        self._finished = dict.fromkeys(_FINISH_REASONS, 0)
        self._last_s: dict[str, tuple[int, float]] = {}  # number of tokens and time, by request id
        self._registry = CollectorRegistry()
        self._registry.register(self)
        disable_created_metrics()
        tokens = token_buckets(engine.schedule.max_model_len)
        labels: dict[str, Any] = {"labelnames": list(self._labels), "registry": self._registry}
        self._histograms = {
            name: Histogram(f"vllm:{name}", text, buckets=buckets, **labels).labels(**self._labels)
            for name, text, buckets in (
                ("time_to_first_token_seconds", "Time to first token.", TTFT_S),
                ("inter_token_latency_seconds", "Time between two tokens.", ITL_S),
                ("request_time_per_output_token_seconds", "Mean time per token of a request.", ITL_S),
                ("e2e_request_latency_seconds", "Time from arrival to end of a request.", REQUEST_S),
                ("request_queue_time_seconds", "Time of a request in the queue.", REQUEST_S),
                ("request_inference_time_seconds", "Time of a request from its first step on.", REQUEST_S),
                (
                    "request_prefill_time_seconds",
                    "Time of a request from its first step to its first token.",
                    REQUEST_S,
                ),
                ("request_decode_time_seconds", "Time of a request from its first token to its last.", REQUEST_S),
                ("request_prompt_tokens", "Prompt tokens of a request.", tokens),
                ("request_generation_tokens", "Generated tokens of a request.", tokens),
                ("request_max_num_generation_tokens", "Generated tokens of a request's longest sample.", tokens),
                ("request_params_n", "Samples of a request.", SAMPLES),
                ("request_params_max_tokens", "Most tokens of a request.", tokens),
                ("request_prefill_kv_computed_tokens", "Prompt tokens that were not cached.", tokens),
                ("request_num_preemptions", "Preemptions of a request.", PREEMPTIONS),
            )
        }

    def note(self, group: RequestGroup) -> None:
        """Count a request's new tokens. Called on the frontend's thread whenever there are any."""
        output = group.output
        metrics = output.metrics
        num_tokens, now_s = metrics.num_output_tokens, metrics.last_token_s
        before = self._last_s.get(group.request_id)
        if now_s is not None and (before is None or num_tokens > before[0]):
            if before is None:
                self._histograms["time_to_first_token_seconds"].observe(metrics.ttft_s or 0.0)
            else:
                num_new, latency = num_tokens - before[0], self._histograms["inter_token_latency_seconds"]
                for _ in range(num_new):
                    latency.observe((now_s - before[1]) / num_new)
            self._last_s[group.request_id] = num_tokens, now_s
        if output.finished:
            self._last_s.pop(group.request_id, None)
            self._note_end(group)

    def _note_end(self, group: RequestGroup) -> None:
        output, params = group.output, group.params
        add = self._add
        num_prompt_tokens = len(output.prompt_token_ids)
        add("request_prompt_tokens", num_prompt_tokens)
        add("request_params_n", params.n)
        add("request_params_max_tokens", params.max_tokens)
        add("request_prefill_kv_computed_tokens", num_prompt_tokens - output.num_cached_tokens)
        add("request_max_num_generation_tokens", max(c.metrics.num_output_tokens for c in output.outputs))
        for completion in output.outputs:
            m = completion.metrics
            reason = "abort" if completion.finish_reason is None else completion.finish_reason
            self._finished["error" if reason == "abort" and group.error is not None else reason] += 1
            add("request_generation_tokens", m.num_output_tokens)
            self.wait_estimator.lengths.ended(m.num_output_tokens, at_limit=reason == "length")
            add("request_num_preemptions", m.num_preemptions)
            if m.finished_s is None:
                continue
            add("e2e_request_latency_seconds", m.total_s)
            add("request_time_per_output_token_seconds", m.tpot_s)
            add("request_queue_time_seconds", m.queue_s)
            add("request_prefill_time_seconds", m.prefill_s)
            if m.scheduled_s is not None:
                add("request_inference_time_seconds", m.finished_s - m.scheduled_s)
            if m.first_token_s is not None and m.last_token_s is not None:
                add("request_decode_time_seconds", m.last_token_s - m.first_token_s)

    def _add(self, name: str, value: float | int | None) -> None:
        if value is not None:
            self._histograms[name].observe(value)

    def reject(self, reason: str) -> None:
        """Count a request that was not admitted."""
        self.rejections[reason] = self.rejections.get(reason, 0) + 1

    def estimated_wait_s(self) -> float:
        """Return the time until a request that came now would start."""
        now_s = time.monotonic()
        if now_s - self._estimated_at_s > FRESH_S:  # each reply may ask, and an estimate takes milliseconds
            wait = self.wait_estimator.wait()
            self._estimated_at_s, self._estimate_s = now_s, 0.0 if wait is None else float(wait.start_s)
        return self._estimate_s

    def collect(self) -> Iterator[Metric]:
        """Yield all metrics."""
        own, by_model = self._labels, {"model_name": self._labels["model_name"]}
        for metric in vllm_metrics(self._engine.stats, self._engine.occupancy):
            match metric:
                case Gauge(name, value):
                    yield _family(GaugeMetricFamily, name, own, value)
                case Counter(name, value):
                    yield _family(CounterMetricFamily, name, own, value)
                case Vector(name, by_position):
                    yield _counters(name, own, "position", {str(i): value for i, value in enumerate(by_position)})
        yield from self._gauges()
        stats = self._engine.stats
        sources = {
            "local_compute": stats.num_prefill_tokens,
            "local_cache_hit": stats.num_cached_tokens,
            "external_kv_transfer": 0,  # there is no cache but the pools
        }
        yield _counters("vllm:prompt_tokens_by_source", own, "source", sources)
        places = dict.fromkeys(("device", "host", "p2p", "disk", "external_unspecified"), 0)
        places["device"] = stats.num_cached_tokens
        yield _counters("vllm:prompt_tokens_cached_by_source", own, "source", places)
        yield _counters("vllm:request_success", own, "finished_reason", self._finished)
        yield _counters("vllm:admission_rejections", by_model, "reason", self.rejections)
        yield _counters("jaxserve:degradations", by_model, "rung", self.degradations)
        for name in _NEVER_COUNTED:
            yield _family(CounterMetricFamily, name, own, 0)
        if expert_tokens := stats.expert_tokens.total().values:
            by_expert = {str(expert): count for expert, count in enumerate(expert_tokens)}
            yield _counters("jaxserve:expert_tokens", own, "expert", by_expert)
        names, values = list(own), list(own.values())
        steps = HistogramMetricFamily("vllm:iteration_tokens_total", "Tokens of a step.", labels=names)
        counts = zip_longest((*ITERATION_TOKENS, math.inf), stats.iterations_by_tokens.values, fillvalue=0)
        ends, totals = zip(*counts, strict=True)
        buckets = zip(map(floatToGoString, ends), accumulate(totals), strict=True)
        steps.add_metric(values, list(buckets), stats.num_iteration_tokens)
        yield steps

    def _gauges(self) -> Iterator[Metric]:
        """Yield the gauges that `vllm_metrics` lacks."""
        labels, occupancy, schedule = self._labels, self._engine.occupancy, self._engine.schedule
        yield _family(GaugeMetricFamily, "jaxserve:estimated_wait_seconds", labels, self.estimated_wait_s())
        num_deferred = min(occupancy.num_deferred, occupancy.num_waiting)
        waiting = {"capacity": occupancy.num_waiting - num_deferred, "deferred": num_deferred}
        yield _gauges("vllm:num_requests_waiting_by_reason", labels, "reason", waiting)
        state = self._engine.host.memory.sleep_state
        states = {name: int(name == state) for name in _SLEEP_STATES}
        yield _gauges("vllm:engine_sleep_state", labels, "sleep_state", states)
        config, longest = self._engine.config, schedule.max_model_len
        concurrency = schedule.num_pages / max(schedule.kv_groups.num_pages(longest), 1)
        info = {
            "block_size": str(schedule.page_size),
            "num_gpu_blocks": str(schedule.num_pages),
            "num_cpu_blocks": "None",
            "num_gpu_blocks_override": str(config.num_pages),
            "cache_dtype": config.kv_cache_dtype,
            "enable_prefix_caching": str(config.enable_prefix_caching),
            "gpu_memory_utilization": str(config.gpu_memory_utilization),
            "kv_cache_size_tokens": str(int(concurrency * longest)),  # vLLM counts requests with full length
            "kv_cache_max_concurrency": str(concurrency),
        }
        yield _family(GaugeMetricFamily, "vllm:cache_config_info", {**labels, **info}, 1)

    def text(self) -> bytes:
        """Return all metrics in Prometheus' text format."""
        return generate_latest(self._registry)


def _family(
    family: type[GaugeMetricFamily | CounterMetricFamily],
    name: str,
    labels: Mapping[str, str],
    values: float | int | Mapping[str, float | int],
    label: str = "",
) -> Metric:
    """Return a metric with one value, or with one for each value of a further label."""
    text = name.partition(":")[2].replace("_", " ").capitalize() + "."
    made = family(name, text, labels=[*labels, label] if label else [*labels])
    for value, number in values.items() if isinstance(values, Mapping) else (("", values),):
        made.add_metric([*labels.values(), value] if label else [*labels.values()], number)
    return made


def _gauges(name: str, labels: Mapping[str, str], label: str, by_value: Mapping[str, float | int]) -> Metric:
    return _family(GaugeMetricFamily, name, labels, by_value, label)


def _counters(name: str, labels: Mapping[str, str], label: str, by_value: Mapping[str, float | int]) -> Metric:
    return _family(CounterMetricFamily, name, labels, by_value, label)
