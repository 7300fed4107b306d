"""Observer: times and counts of requests, under vLLM's names and with its buckets, for Prometheus."""

from __future__ import annotations

import time
from bisect import bisect_left
from collections import deque
from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from jaxserve.metrics import Counter, Gauge, Vector, vllm_metrics

if TYPE_CHECKING:
    from jaxserve.engine.engine import Engine
    from jaxserve.engine.outputs import RequestGroup

_TTFT_S: tuple[float, ...] = (
    0.001,
    0.005,
    0.01,
    0.02,
    0.04,
    0.06,
    0.08,
    0.1,
    0.25,
    0.5,
    0.75,
    1.0,
    2.5,
    5.0,
    7.5,
    10.0,
)
_TTFT_S += (20.0, 40.0, 80.0, 160.0, 640.0, 2560.0)
_ITL_S = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0)
_REQUEST_S: tuple[float, ...] = (
    0.3,
    0.5,
    0.8,
    1.0,
    1.5,
    2.0,
    2.5,
    5.0,
    10.0,
    15.0,
    20.0,
    30.0,
    40.0,
    50.0,
    60.0,
    120.0,
    240.0,
    480.0,
)
_REQUEST_S += (960.0, 1920.0, 7680.0)
_TOKENS = tuple(float(step * 10**power) for power in range(6) for step in (1, 2, 5))
_NUM_RATED = 64  # finished requests whose rate foretells the wait of those in the queue


class _Histogram:
    """Counts by bucket. It takes a number several times at once, in a fraction of a microsecond."""

    def __init__(self, name: str, text: str, bounds: Sequence[float]) -> None:
        self._name, self._text, self._bounds = name, text, list(bounds)
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def add(self, value: float | int, times: int = 1) -> None:
        self._counts[bisect_left(self._bounds, value)] += times
        self._sum += value * times

    def family(self, labels: dict[str, str]) -> Metric:
        family = HistogramMetricFamily(self._name, self._text, labels=list(labels))
        bounds = [*map(repr, self._bounds), "+Inf"]
        buckets = list(zip(bounds, accumulate(self._counts), strict=True))
        family.add_metric(list(labels.values()), buckets, self._sum)
        return family


class Observer(Collector):
    """Metrics of an engine and of its requests.

    Args:
        engine: the engine.
        model_name: value of the label `model_name`.

    Attributes:
        rejections: requests that were not admitted, by reason.
    """

    def __init__(self, engine: Engine, model_name: str) -> None:
        self._engine = engine
        self._labels = {"model_name": model_name, "engine": "0"}
        self.rejections: dict[str, int] = {}
        self._finished: dict[str, int] = dict.fromkeys(("stop", "length", "abort"), 0)
        self._last_s: dict[str, tuple[int, float]] = {}  # tokens and time of the last news, by request id
        self._ended_s: deque[float] = deque(maxlen=_NUM_RATED)
        seconds = "in seconds"
        self._ttft = _Histogram("vllm:time_to_first_token_seconds", f"Time to first token {seconds}.", _TTFT_S)
        self._itl = _Histogram("vllm:inter_token_latency_seconds", f"Time between tokens {seconds}.", _ITL_S)
        tpot = "vllm:request_time_per_output_token_seconds"
        self._tpot = _Histogram(tpot, f"Mean time per output token of a request {seconds}.", _ITL_S)
        self._e2e = _Histogram("vllm:e2e_request_latency_seconds", f"Time of a request {seconds}.", _REQUEST_S)
        self._parts = {
            part: _Histogram(f"vllm:request_{part}_time_seconds", f"Time of a request in {part} {seconds}.", _REQUEST_S)
            for part in ("queue", "inference", "prefill", "decode")
        }
        self._counts = {
            name: _Histogram(f"vllm:{name}", text, _TOKENS)
            for name, text in (
                ("request_prompt_tokens", "Prompt tokens of a request."),
                ("request_generation_tokens", "Generated tokens of a request."),
                ("request_params_n", "Samples of a request."),
                ("request_params_max_tokens", "Most tokens of a request."),
                ("request_num_preemptions", "Preemptions of a request."),
            )
        }
        self._registry = CollectorRegistry()
        self._registry.register(self)

    def note(self, group: RequestGroup) -> None:
        """Count what a request has got. Called on the frontend's thread whenever there is news."""
        output = group.output
        metrics = output.metrics
        num_tokens, now_s = metrics.num_output_tokens, metrics.last_token_s
        before = self._last_s.get(group.request_id)
        if now_s is not None and (before is None or num_tokens > before[0]):
            if before is None:
                self._ttft.add(metrics.ttft_s or 0.0)
            else:
                self._itl.add((now_s - before[1]) / (num_tokens - before[0]), num_tokens - before[0])
            self._last_s[group.request_id] = num_tokens, now_s
        if output.finished:
            self._last_s.pop(group.request_id, None)
            self._note_end(group)

    def _note_end(self, group: RequestGroup) -> None:
        output, params = group.output, group.params
        self._ended_s.append(time.monotonic())
        self._counts["request_prompt_tokens"].add(len(output.prompt_token_ids))
        self._counts["request_params_n"].add(params.n)
        if params.max_tokens is not None:
            self._counts["request_params_max_tokens"].add(params.max_tokens)
        for completion in output.outputs:
            m = completion.metrics
            self._finished[completion.finish_reason or "abort"] += 1
            self._counts["request_generation_tokens"].add(m.num_output_tokens)
            self._counts["request_num_preemptions"].add(m.num_preemptions)
            if m.finished_s is None:
                continue
            self._e2e.add(m.finished_s - m.arrival_s)
            if m.tpot_s is not None:
                self._tpot.add(m.tpot_s)
            if m.queue_s is not None:
                self._parts["queue"].add(m.queue_s)
            if m.scheduled_s is not None:
                self._parts["inference"].add(m.finished_s - m.scheduled_s)
            if m.prefill_s is not None:
                self._parts["prefill"].add(m.prefill_s)
            if m.first_token_s is not None and m.last_token_s is not None:
                self._parts["decode"].add(m.last_token_s - m.first_token_s)

    def reject(self, reason: str) -> None:
        """Count a request that was not admitted."""
        self.rejections[reason] = self.rejections.get(reason, 0) + 1

    def estimated_wait_s(self) -> float:
        """Return the time until a request that came now would start, by the rate at which others have ended."""
        num_waiting = self._engine.core.num_waiting + len(self._engine.core.inbox)
        if not num_waiting or len(self._ended_s) < 2:
            return 0.0
        span_s = max(time.monotonic() - self._ended_s[0], 1e-3)
        return num_waiting * span_s / len(self._ended_s)

    def collect(self) -> Iterator[Metric]:
        """Yield all metrics."""
        names, values = list(self._labels), list(self._labels.values())
        for metric in vllm_metrics(self._engine.stats, self._engine.occupancy):
            family: Metric
            match metric:
                case Gauge(name, value):
                    family = GaugeMetricFamily(name, _described(name), labels=names)
                    family.add_metric(values, value)
                case Counter(name, value):
                    family = CounterMetricFamily(name, _described(name), labels=names)
                    family.add_metric(values, value)
                case Vector(name, by_position):
                    family = CounterMetricFamily(name, _described(name), labels=[*names, "position"])
                    for position, value in enumerate(by_position):
                        family.add_metric([*values, str(position)], value)
                case _:
                    continue
            yield family
        wait = GaugeMetricFamily("jaxserve:estimated_wait_seconds", "Wait of a request that came now.", labels=names)
        wait.add_metric(values, self.estimated_wait_s())
        yield wait
        schedule = self._engine.schedule
        info = {"block_size": str(schedule.page_size), "num_gpu_blocks": str(schedule.num_pages)}
        cache = GaugeMetricFamily("vllm:cache_config_info", "Sizes of the KV pool.", labels=[*names, *info])
        cache.add_metric([*values, *info.values()], 1)
        yield cache
        for name, label, counts in (
            ("vllm:request_success", "finished_reason", self._finished),
            ("vllm:admission_rejections", "reason", self.rejections),
        ):
            total = CounterMetricFamily(name, _described(name), labels=[*names, label])
            for key, count in counts.items():
                total.add_metric([*values, key], count)
            yield total
        for histogram in (self._ttft, self._itl, self._tpot, self._e2e, *self._parts.values(), *self._counts.values()):
            yield histogram.family(self._labels)

    def text(self) -> bytes:
        """Return all metrics in Prometheus' text format."""
        return generate_latest(self._registry)


def _described(name: str) -> str:
    return name.partition(":")[2].replace("_", " ").capitalize() + "."
