"""Observer: request metrics under vLLM's names and with its buckets, for Prometheus."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from functools import partial
from itertools import accumulate, zip_longest
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Histogram, disable_created_metrics, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from jaxserve.api.metrics import ITERATION_TOKENS, Counter, Gauge, Vector, co2_g, vllm_metrics

if TYPE_CHECKING:
    from jaxserve.assembly.engine import Engine
    from jaxserve.core.growing_outputs import RequestGroup
    from jaxserve.scheduling.wait_estimate import Wait

_SLEEP_STATES = ("awake", "weights_offloaded", "discard_all")
_FINISH_REASONS = ("stop", "length", "abort", "error", "repetition")
_REJECTIONS = ("queue_full", "queue_tokens", "wait", "extras", "shed", "key_limit", "rate_limit", "draining")
FRESH_S = 0.02  # lifetime of an estimate
_TYPICAL_TOKENS = 1024  # length of a prompt that states an engine's speed
MAX_CLASSES = 64  # classes whose estimates are kept

# Upper bounds of the histograms' buckets, as vLLM's metrics have them.
# fmt: off
_TTFT_S = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0,
           160.0, 640.0, 2560.0)
_ITL_S = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0)
_REQUEST_S = (0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0,
              960.0, 1920.0, 7680.0)
# fmt: on
_SAMPLES = (1.0, 2.0, 5.0, 10.0, 20.0)
_PREEMPTIONS = (1.0, 2.0, 3.0, 4.0, 5.0, 10.0, 20.0)
_TIMES = {  # histograms of times, with their help and bounds
    "time_to_first_token_seconds": ("Time to first token.", _TTFT_S),
    "inter_token_latency_seconds": ("Time between two tokens.", _ITL_S),
    "request_time_per_output_token_seconds": ("Mean time per token of a request.", _ITL_S),
    "e2e_request_latency_seconds": ("Time from arrival to end of a request.", _REQUEST_S),
    "request_queue_time_seconds": ("Time of a request in the queue.", _REQUEST_S),
    "request_inference_time_seconds": ("Time of a request from its first step on.", _REQUEST_S),
    "request_prefill_time_seconds": ("Time of a request from its first step to its first token.", _REQUEST_S),
    "request_decode_time_seconds": ("Time of a request from its first token to its last.", _REQUEST_S),
}
_COUNTS = {
    "request_params_n": ("Samples of a request.", _SAMPLES),
    "request_num_preemptions": ("Preemptions of a request.", _PREEMPTIONS),
}
_TOKENS = {  # histograms of tokens, whose bounds depend on max_model_len
    "request_prompt_tokens": "Prompt tokens of a request.",
    "request_generation_tokens": "Generated tokens of a request.",
    "request_max_num_generation_tokens": "Generated tokens of a request's longest sample.",
    "request_params_max_tokens": "Most tokens of a request.",
    "request_prefill_kv_computed_tokens": "Prompt tokens that were not cached.",
}


class Observer(Collector):
    """Metrics for an engine and its requests.

    Args:
        engine: the engine.
        model_name: value for the label `model_name`.

    Attributes:
        wait_estimator: estimates of waits.
        degradations: times that each rung of the degradation ladder has come on.
        rejections: requests that were not admitted, by reason.
    """

    def __init__(self, engine: Engine, model_name: str) -> None:
        self._engine = engine
        self._labels = {"model_name": model_name, "engine": "0"}
        self.degradations: Mapping[str, int] = {}
        self.wait_estimator = engine.host.wait_estimator
        self._waits: dict[int | None, tuple[float, Wait | None]] = {}  # times and estimates by class
        self.rejections = dict.fromkeys(_REJECTIONS, 0)
        self._finished = dict.fromkeys(_FINISH_REASONS, 0)
        self._last_s: dict[str, tuple[int, float]] = {}  # number of tokens and time, by request id
        self._registry = CollectorRegistry()
        self._registry.register(self)
        disable_created_metrics()
        tokens = _token_bounds(engine.schedule.max_model_len)
        tables = {**_TIMES, **_COUNTS, **{name: (text, tokens) for name, text in _TOKENS.items()}}
        self._histograms = {
            name: Histogram(f"vllm:{name}", text, [*self._labels], buckets=bounds, registry=self._registry).labels(
                **self._labels
            )
            for name, (text, bounds) in tables.items()
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
        """Count a request that has ended, and its samples."""
        output, params, num_prompt_tokens = group.output, group.params, len(group.output.prompt_token_ids)
        self._add(
            request_prompt_tokens=num_prompt_tokens,
            request_params_n=params.n,
            request_params_max_tokens=params.max_tokens,
            request_prefill_kv_computed_tokens=num_prompt_tokens - output.num_cached_tokens,
            request_max_num_generation_tokens=max(c.metrics.num_output_tokens for c in output.outputs),
        )
        for completion in output.outputs:
            m = completion.metrics
            reason = "abort" if completion.finish_reason is None else completion.finish_reason
            self._finished["error" if reason == "abort" and group.error is not None else reason] += 1
            self.wait_estimator.lengths.ended(m.num_output_tokens, at_limit=reason == "length")
            self._add(request_generation_tokens=m.num_output_tokens, request_num_preemptions=m.num_preemptions)
            if m.finished_s is not None:
                self._add(
                    e2e_request_latency_seconds=m.total_s,
                    request_time_per_output_token_seconds=m.tpot_s,
                    request_queue_time_seconds=m.queue_s,
                    request_prefill_time_seconds=m.prefill_s,
                    request_inference_time_seconds=seconds_between(m.scheduled_s, m.finished_s),
                    request_decode_time_seconds=seconds_between(m.first_token_s, m.last_token_s),
                )

    def _add(self, **values: float | int | None) -> None:
        """Add each value to the histogram of its name; None is left out."""
        for name, value in values.items():
            if value is not None:
                self._histograms[name].observe(value)

    def reject(self, reason: str) -> None:
        """Count a request that was not admitted, by the reason."""
        self.rejections[reason] = self.rejections.get(reason, 0) + 1

    def wait(self, priority: int | None = None) -> Wait | None:
        """Return how long a short request of a class would wait if it came now; None before steps were measured.

        Args:
            priority: the class; None if it neither overtakes nor preempts others.
        """
        now_s = time.monotonic()
        at_s, wait = self._waits.get(priority, (-math.inf, None))
        if now_s - at_s > FRESH_S:  # each reply may ask, and an estimate takes milliseconds
            wait = self.wait_estimator.wait(1, priority)
            if len(self._waits) >= MAX_CLASSES:  # clients may choose any number
                self._waits.clear()
            self._waits[priority] = now_s, wait
        return wait

    def estimated_wait_s(self) -> float:
        """Return the time until a request that came now would start; 0 if that is unknown."""
        wait = self.wait()
        return 0.0 if wait is None else float(wait.start_s)

    def load(self) -> dict[str, int | float | str]:
        """Return the work in the engine, its time per prompt token if steps were measured, and its role."""
        found: dict[str, int | float | str] = {
            "num_running": self._engine.occupancy.num_running,
            "num_waiting_tokens": self.wait_estimator.num_waiting_tokens(),
        }
        if self._engine.config.kv_store is not None:
            found["kv_role"] = self._engine.config.kv_role
        if seconds := self.wait_estimator.prefill_s(_TYPICAL_TOKENS):
            found["prompt_token_s"] = seconds / _TYPICAL_TOKENS
        return found

    def collect(self) -> Iterator[Metric]:
        """Yield all metrics."""
        own, by_model, stats = self._labels, {"model_name": self._labels["model_name"]}, self._engine.stats
        gauge, counter = partial(_family, GaugeMetricFamily, own), partial(_family, CounterMetricFamily, own)
        for metric in vllm_metrics(stats, self._engine.occupancy):
            match metric:
                case Gauge(name, value):
                    yield gauge(name, {"": value})
                case Counter(name, value):
                    yield counter(name, {"": value})
                case Vector(name, by_position):
                    yield counter(name, {str(i): value for i, value in enumerate(by_position)}, "position")
        yield from self._gauges()
        sources = {
            "local_compute": stats.num_prefill_tokens,
            "local_cache_hit": stats.cached_tokens.device,
            "external_kv_transfer": stats.cached_tokens.loaded,
        }
        yield counter("vllm:prompt_tokens_by_source", sources, "source")
        places = dict.fromkeys(("device", "host", "p2p", "disk", "external_unspecified"), 0)
        places |= asdict(stats.cached_tokens)
        places["external_unspecified"] = places.pop("store")  # vLLM's name
        yield counter("vllm:prompt_tokens_cached_by_source", places, "source")
        yield counter("vllm:request_success", self._finished, "finished_reason")
        yield _family(CounterMetricFamily, by_model, "vllm:admission_rejections", self.rejections, "reason")
        yield _family(CounterMetricFamily, by_model, "jaxserve:degradations", self.degradations, "rung")
        moved = {
            "loaded": stats.num_loaded_pages,
            "stored": stats.num_stored_pages,
            "dropped": stats.num_dropped_pages,
            "corrupt": stats.num_corrupt_pages,
        }
        yield counter("jaxserve:kv_offloading_pages", moved, "outcome")
        images = self._engine.reader.images
        if (energy := stats.energy).requests_j is not None and energy.idle_j is not None:
            joules = {"requests": energy.requests_j, "idle": energy.idle_j}
            yield counter("jaxserve:energy_joules", joules, "use")
            if (intensity := self._engine.config.carbon_intensity) is not None:
                grams = {use: co2_g(value, intensity) or 0.0 for use, value in joules.items()}
                yield counter("jaxserve:co2_grams", grams, "use")
        queries, hits = (0, 0) if images is None else (images.cache.num_queries, images.cache.num_hits)
        yield counter("vllm:mm_cache_queries", {"": queries})
        yield counter("vllm:mm_cache_hits", {"": hits})
        if images is not None:
            yield counter("jaxserve:encoder_inputs", {"": stats.num_encoder_inputs})
            yield counter("jaxserve:encoder_output_tokens", {"": stats.num_encoder_output_tokens})
        if expert_tokens := stats.expert_tokens.total().values:
            by_expert = {str(expert): count for expert, count in enumerate(expert_tokens)}
            yield counter("jaxserve:expert_tokens", by_expert, "expert")
        steps = HistogramMetricFamily("vllm:iteration_tokens_total", "Tokens of a step.", labels=[*own])
        counts = zip_longest((*ITERATION_TOKENS, math.inf), stats.iterations_by_tokens.values, fillvalue=0)
        ends, totals = zip(*counts, strict=True)
        buckets = zip(map(floatToGoString, ends), accumulate(totals), strict=True)
        steps.add_metric([*own.values()], list(buckets), stats.num_iteration_tokens)
        yield steps

    def _gauges(self) -> Iterator[Metric]:
        """Yield gauges about waits, sleep and the cache configuration, which `vllm_metrics` lacks."""
        labels, occupancy, schedule = self._labels, self._engine.occupancy, self._engine.schedule
        gauge = partial(_family, GaugeMetricFamily, labels)
        yield gauge("jaxserve:estimated_wait_seconds", {"": self.estimated_wait_s()})
        if (images := self._engine.reader.images) is not None:
            yield gauge("jaxserve:prepared_image_bytes", {"": images.living.num_bytes})
        num_deferred = min(occupancy.num_deferred, occupancy.num_waiting)
        waiting = {"capacity": occupancy.num_waiting - num_deferred, "deferred": num_deferred}
        yield gauge("vllm:num_requests_waiting_by_reason", waiting, "reason")
        state = self._engine.host.memory.sleep_state
        yield gauge("vllm:engine_sleep_state", {name: int(name == state) for name in _SLEEP_STATES}, "sleep_state")
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
        yield _family(GaugeMetricFamily, {**labels, **info}, "vllm:cache_config_info", {"": 1})
        if config.enable_lora:
            in_use = zip(("running", "waiting"), self._engine.host.adapters_in_use(), strict=True)
            names = {f"{state}_lora_adapters": ",".join(self._engine.adapters.names(each)) for state, each in in_use}
            lora = {"max_lora": str(config.max_loras), **names}
            yield _family(GaugeMetricFamily, {**labels, **lora}, "vllm:lora_requests_info", {"": time.time()})

    def text(self) -> bytes:
        """Return all metrics in Prometheus' text format."""
        return generate_latest(self._registry)


def _family(
    family: type[GaugeMetricFamily | CounterMetricFamily],
    labels: Mapping[str, str],
    name: str,
    values: Mapping[str, float | int],
    label: str = "",
) -> Metric:
    """Return a metric with the given values.

    Args:
        family: type of the metric.
        labels: labels that all values have.
        name: name of the metric, from which its help is derived.
        values: values by a further label's value; a single one, under any key, without a further label.
        label: name of the further label; "" for none.
    """
    text = name.partition(":")[2].replace("_", " ").capitalize() + "."
    metric = family(name, text, labels=[*labels, label] if label else [*labels])
    for value, number in values.items():
        metric.add_metric([*labels.values(), value] if label else [*labels.values()], number)
    return metric


def seconds_between(start_s: float | None, end_s: float | None) -> float | None:
    """Return the time from start to end; None if one of them is unknown."""
    return None if start_s is None or end_s is None else end_s - start_s


def _token_bounds(max_tokens: int) -> tuple[float, ...]:
    """Return 1, 2, 5, 10, 20, 50 and so on up to `max_tokens`."""
    values = (float(step * 10**power) for power in range(len(str(max_tokens))) for step in (1, 2, 5))
    return tuple(value for value in values if value <= max_tokens)
