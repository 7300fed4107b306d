"""Counts: totals of a router, and their metrics."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

if TYPE_CHECKING:
    from jaxserve.routing.replicas import Replica, Replicas


class Counts(Collector):
    """Totals of a router.

    Args:
        replicas: its replicas.

    Attributes:
        num_moved: streams that have continued on another replica, once per move.
        num_failed: requests that no replica could serve.
        num_transferred: prompts that a producer has computed for another replica.
    """

    def __init__(self, replicas: Replicas) -> None:
        self.num_moved = self.num_failed = self.num_transferred = 0
        self._replicas = replicas
        self._attempts: Counter[tuple[str, str]] = Counter()  # replica and outcome -> count
        self._registry = CollectorRegistry()
        self._registry.register(self)

    def answered(self, replica: Replica) -> None:
        """Count a request that a replica has served to its end."""
        self._attempts[replica.url, "answered"] += 1

    def refused(self, replica: Replica) -> None:
        """Count a request that a replica has not taken."""
        self._attempts[replica.url, "refused"] += 1

    def lost(self, replica: Replica) -> None:
        """Count a request whose replica was unreachable or has died."""
        self._attempts[replica.url, "lost"] += 1

    def silent(self, replica: Replica) -> None:
        """Count a request whose replica has sent nothing for too long."""
        self._attempts[replica.url, "silent"] += 1

    def collect(self) -> Iterator[Metric]:
        """Yield all metrics."""
        attempts = CounterMetricFamily("jaxserve:router_attempts", "Requests by outcome.", None, ["replica", "outcome"])
        for labels, count in self._attempts.items():
            attempts.add_metric(labels, count)
        yield attempts
        yield CounterMetricFamily("jaxserve:router_moved_streams", "Streams continued on a replica.", self.num_moved)
        text = "Prompts computed by a producer."
        yield CounterMetricFamily("jaxserve:router_transferred_prompts", text, self.num_transferred)
        yield CounterMetricFamily("jaxserve:router_failed_requests", "Requests that failed.", self.num_failed)
        ready = GaugeMetricFamily("jaxserve:router_replica_ready", "1 if it gets requests.", None, ["replica"])
        running = GaugeMetricFamily("jaxserve:router_requests", "Requests that it serves.", None, ["replica"])
        loads = GaugeMetricFamily("jaxserve:router_load_tokens", "Load in tokens.", None, ["replica"])
        for replica in self._replicas.all:
            ready.add_metric([replica.url], replica.problem is None)
            running.add_metric([replica.url], replica.num_requests)
            loads.add_metric([replica.url], max(replica.load, replica.report.num_tokens))
        yield from (ready, running, loads)

    def text(self) -> bytes:
        """Return all metrics in Prometheus' text format."""
        return generate_latest(self._registry)
