"""Autoscaling on queue depth, compared with a clairvoyant that knows the rate of arrivals, on a day's traffic.

    python scripts/study.py autoscaling --json scripts/results/autoscaling.json

The rate follows a day between a quarter of its mean and 1.75 times the mean, with two bursts; a day is compressed. A
new replica serves after `START_S`. A replica that leaves ends its requests first. `queue` doubles replicas while over
`HIGH` requests wait for each, and takes one away after `CALM` looks without a waiting request at which one replica
fewer would have been busy for less than 80%. `clairvoyant` has the replicas that the arrivals until a new replica could
serve need at 80% load. `fixed` always has the clairvoyant's maximum.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from random import Random

from jaxserve.scheduling.request import Request
from jaxserve.tools.simulator.simulation import Simulation
from jaxserve.tools.simulator.traces import TracedRequest
from studies.fleet import SCHEDULE, TIMES, Figure, capacity, parse

START_S, LOOK_S, HIGH, CALM, BUSY = 5.0, 1.0, 1.0, 5, 0.8
MAX_REPLICAS = 40


def rate_at(now_s: float, day_s: float, mean: float) -> float:
    """Return the arrivals per second at a time of day."""
    rate = mean * (1 - 0.75 * math.cos(2 * math.pi * now_s / day_s))
    return rate * (1.8 if any(at < now_s / day_s < at + 0.02 for at in (0.3, 0.62)) else 1.0)


def day(seed: int, mean: float, day_s: float) -> Iterator[TracedRequest]:
    """Yield a day's requests, by thinning."""
    draw, now_s, highest = Random(seed), 0.0, mean * 1.75 * 1.8
    while (now_s := now_s + draw.expovariate(highest)) < day_s:
        if draw.random() < rate_at(now_s, day_s, mean) / highest:
            yield TracedRequest(now_s, draw.randrange(1, 256), draw.randrange(1, 8))


class Scaled:
    """A balancer over the replicas that serve, each request going to the one with the least load."""

    num_queued = num_queued_tokens = 0

    def __init__(self, kind: str, day_s: float, mean: float, capacity: float, simulation: Simulation) -> None:
        self._kind, self._day_s, self._mean, self._capacity = kind, day_s, mean, capacity
        self._simulation = simulation
        self._size = self.needed(0.0)
        self._looked_s = 0.0
        self._coming: list[float] = []  # times at which new replicas will serve
        self._calm = 0
        self._busy_s = 0.0
        self.replica_s, self.num_changes, self.max_size = 0.0, 0, self._size

    def needed(self, now_s: float) -> int:
        """Return the replicas that suffice until one started now would serve."""
        until = [now_s + START_S * part / 8 for part in range(10)]
        rate = max(rate_at(each, self._day_s, self._mean) for each in until)
        return max(math.ceil(rate / self._capacity / BUSY), 1)

    def add(self, requests: Iterable[Request]) -> None:
        """Give each request to the replica with the least load."""
        self._look()
        serving = self._simulation.replicas[: self._size]
        for request in requests:
            min(serving, key=lambda replica: replica.load).add(request)

    def _look(self) -> None:
        """Change the number of replicas, at intervals."""
        while self._simulation.now_s >= self._looked_s + LOOK_S:
            self._looked_s += LOOK_S
            self._size += sum(at <= self._looked_s for at in self._coming)
            self._coming = [at for at in self._coming if at > self._looked_s]
            self.replica_s += (self._size + len(self._coming)) * LOOK_S
            self.max_size = max(self.max_size, self._size)
            before = self._size + len(self._coming)
            {"queue": self._by_queue, "clairvoyant": self._by_knowledge, "fixed": lambda: None}[self._kind]()
            self.num_changes += before != self._size + len(self._coming)

    def _by_queue(self) -> None:
        serving = self._simulation.replicas[: self._size]
        waiting = sum(replica.view.num_waiting for replica in serving)
        busy_s = sum(window.busy_s for window in self._simulation.totals.timeline.windows)
        load, self._busy_s = (busy_s - self._busy_s) / LOOK_S, busy_s
        self._calm = 0 if waiting or self._size < 2 or load > BUSY * (self._size - 1) else self._calm + 1
        if waiting > HIGH * self._size and not self._coming:
            more = min(self._size, MAX_REPLICAS - self._size)
            self._coming += [self._looked_s + START_S] * more
        elif self._calm >= CALM and not self._coming:
            self._size -= 1
            self._calm = 0

    def _by_knowledge(self) -> None:
        wanted = self.needed(self._looked_s)
        if wanted > self._size + len(self._coming):
            self._coming += [self._looked_s + START_S] * (wanted - self._size - len(self._coming))
        elif wanted < self._size and not self._coming:
            self._size = wanted

    def dispatch(self) -> None:
        """Do nothing: requests wait at replicas."""

    def finish(self, request: Request) -> None:
        """Do nothing: replicas forget their requests."""


def main(argv: Sequence[str]) -> None:
    args = parse(argv, __doc__, seconds=150, replicas=3)
    figure, rate = Figure(args.json), capacity()
    mean, day_s = args.replicas * rate * BUSY, float(args.seconds)
    clairvoyant_s = 0.0
    for kind in ("clairvoyant", "queue", "fixed"):
        found: list[Scaled] = []

        def new(simulation: Simulation, kind: str = kind, found: list[Scaled] = found) -> Scaled:
            found.append(Scaled(kind, day_s, mean, rate, simulation))
            if kind == "fixed":
                found[0]._size = max(found[0].needed(second) for second in range(int(day_s)))
            return found[0]

        totals = Simulation(SCHEDULE, TIMES, MAX_REPLICAS, new_balancer=new).run(day(3, mean, day_s))
        scaled = found[0]
        clairvoyant_s = clairvoyant_s or scaled.replica_s
        figure.add(
            policy=kind,
            replica_s=scaled.replica_s,
            of_clairvoyant=scaled.replica_s / clairvoyant_s,
            max_replicas=scaled.max_size,
            changes=scaled.num_changes,
            ttft_p50_s=totals.ttft_s.percentile(50),
            ttft_p99_s=totals.ttft_s.percentile(99),
            requests=totals.num_ended,
        )
    figure.write(study="autoscaling", seconds=args.seconds, start_s=START_S, mean_requests_per_s=mean)
