"""Decentralised choice of replicas against the age of the information: 99th percentiles of times to first token.

    python scripts/study.py decentralised --json scripts/results/decentralised.json

Policies: `random`; `jsq`, the shortest queue as it was at the last update, which every router sees alike; `two`, the
shorter of two random ones as they were then; `gossip`, a router per ten replicas, which learn from each other the loads
that another one knew when both met last: their information is log2(routers) updates older; `steal`, random choice,
after which an idle replica takes a request from a random one; and `central`, the engine's balancer, which sees
everything.
"""

from collections.abc import Iterable, Sequence
from functools import partial
from math import ceil, log2
from random import Random

from jaxserve.scheduling.request import Request
from jaxserve.scheduling.step_time import Rates
from jaxserve.tools.simulator.simulation import Simulation
from jaxserve.tools.simulator.step_times import FittedTimes
from studies.fleet import SCHEDULE, TIMES, Figure, arrivals, capacity, parse

AGES_S = (0.001, 0.01, 0.1, 1.0, 10.0)
POLICIES = ("central", "random", "steal", "two", "gossip", "jsq")
LOAD = 0.85
PROBES = 2  # replicas that an idle one asks


class StaleChoice:
    """A balancer that gives each request to a replica immediately, by loads that are up to `age_s` old."""

    num_queued = num_queued_tokens = 0

    def __init__(self, kind: str, age_s: float, simulation: Simulation) -> None:
        self._kind, self._age_s, self._simulation = kind, age_s, simulation
        self._draw = Random(5)
        self._known: list[list[int]] = []  # loads at the latest updates, the oldest first
        self._updated_s = float("-inf")
        num_routers = max(len(simulation.replicas) // 10, 2)
        self._num_rounds = ceil(log2(num_routers)) if kind == "gossip" else 1

    def add(self, requests: Iterable[Request]) -> None:
        """Choose a replica for each request."""
        for request in requests:
            self._simulation.replicas[self._choose()].add(request)

    def _choose(self) -> int:
        replicas, draw = self._simulation.replicas, self._draw
        if self._kind in ("random", "steal"):
            return draw.randrange(len(replicas))
        now_s = self._simulation.now_s
        if now_s >= self._updated_s + self._age_s:
            self._updated_s = now_s
            self._known = [*self._known[1 - self._num_rounds :], [replica.load for replica in replicas]]
            if self._num_rounds == 1:
                del self._known[:-1]
            self._shortest = min(self._known[0])
        loads = self._known[0]
        if self._kind == "two":
            return min(draw.randrange(len(loads)), draw.randrange(len(loads)), key=loads.__getitem__)
        if self._kind == "gossip":  # a router knows a sample: all routers together would herd
            return min((draw.randrange(len(loads)) for _ in range(10)), key=loads.__getitem__)
        start = draw.randrange(len(loads))  # ties are broken at random
        return next(i % len(loads) for i in range(start, start + len(loads)) if loads[i % len(loads)] == self._shortest)

    def dispatch(self) -> None:
        """Let idle replicas take requests from others."""

    def finish(self, request: Request) -> None:
        """Let the replica of a request, if it idles, take another one."""
        if self._kind != "steal":
            return
        replicas = self._simulation.replicas
        for index in self._idle(request):
            for _ in range(PROBES):
                victim = replicas[self._draw.randrange(len(replicas))]
                if victim.view.num_waiting:
                    stolen, *others = victim.withdraw()
                    for other in others:
                        victim.add(other)
                    replicas[index].add(stolen)
                    break

    def _idle(self, request: Request) -> list[int]:
        """Return the replica whose step has ended, if it has no request left."""
        index = self._simulation.ending
        return [index] if self._simulation.replicas[index].view.is_idle else []


def main(argv: Sequence[str]) -> None:
    """Simulate all fleets, policies and ages."""
    args = parse(argv, __doc__, requests=6000, largest=1000)
    times = FittedTimes(Rates(*[20 * value for value in TIMES.rates[:4]]))
    figure, rate = Figure(args.json), capacity() / 20
    for count in (10, 100, 1000, 10_000):
        requests = max(args.requests, 3 * count)
        seconds = requests / (LOAD * rate * count)
        for kind in POLICIES if count <= args.largest else ():
            ages = [age_s for age_s in AGES_S if age_s < seconds] if kind in ("two", "gossip", "jsq") else [0.0]
            for age_s in ages:
                new_balancer = None if kind == "central" else partial(StaleChoice, kind, age_s)
                simulation = Simulation(SCHEDULE, times, count, new_balancer=new_balancer)
                ttft_s = simulation.run(arrivals(2, LOAD * rate * count, requests)).ttft_s
                p50_s, p99_s = ttft_s.percentile(50), ttft_s.percentile(99)
                figure.add(replicas=count, policy=kind, age_s=age_s, requests=requests, p50_s=p50_s, p99_s=p99_s)
    figure.write(study="decentralised", load=LOAD, capacity_per_replica=rate)
