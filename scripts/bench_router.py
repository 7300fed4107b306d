"""Host microseconds per request in the queue before the replicas, by number of replicas and rows.

    python scripts/bench_router.py
    python scripts/bench_router.py --replicas 64 --rows 256 --prompt-tokens 512

Every replica is a scheduler without a device, with that many decoding rows. Between two rounds of requests all replicas
make and update a plan, so that all loads have changed, and the round's requests end. A request takes one call of
`Balancer.add` and one of `dispatch`. Its prompt is hashed before, because computing it needs the hashes too.

`dispatch_us` is the median over all requests, and `single_us` the median for a single replica, which puts each request
into its scheduler's queue without a choice; `route_us` is the difference. `first_us` is the median for the first
request of each round: steps have filled the processor's caches, especially with many rows. `note_us` is the median time
per replica in which a call without a request, after a step on all replicas, notes their changes. Prints one JSON line
per case.
"""

import argparse
import itertools
import json
import platform
import random
import statistics
import time
from collections.abc import Sequence

from jaxserve.api.sampling_params import SamplingParams
from jaxserve.scheduling.balancer import Balancer
from jaxserve.scheduling.request import FinishReason, Request
from jaxserve.scheduling.schedule_config import ScheduleConfig
from jaxserve.scheduling.scheduler import Scheduler
from jaxserve.scheduling.shard_view import ShardView

PAGE_SIZE = 16
MAX_MODEL_LEN = 4096
ROUND = 8  # requests between two steps on all replicas


class SchedulerReplica:
    """A replica whose steps take no time."""

    def __init__(self, num_rows: int) -> None:
        num_pages = (num_rows + 8) * MAX_MODEL_LEN // PAGE_SIZE
        self.scheduler = Scheduler(ScheduleConfig(num_rows + 8, 2048, MAX_MODEL_LEN, PAGE_SIZE, num_pages))

    def add(self, request: Request) -> None:
        self.scheduler.add(request)

    @property
    def view(self) -> ShardView:
        return self.scheduler.view

    @property
    def load(self) -> int:
        return self.scheduler.view.load

    def finish(self, request: Request, reason: FinishReason) -> None:
        self.scheduler.finish(request.request_id, reason)

    def withdraw(self) -> list[Request]:
        return self.scheduler.withdraw()

    def step(self) -> None:
        plan = self.scheduler.schedule()
        if plan is not None:
            self.scheduler.update(plan, [[0] * most for most in plan.max_new])


def new_request(name: str, num_tokens: int, rng: random.Random) -> Request:
    """Return a request that has no prefix in common with others, and does not end by itself."""
    prompt = [rng.randrange(32_000) for _ in range(num_tokens)]
    return Request(name, prompt, SamplingParams(max_tokens=None), seed=0, max_total_tokens=MAX_MODEL_LEN)


class Balanced:
    """Replicas with decoding rows, and the queue in front of them."""

    def __init__(self, num_replicas: int, num_rows: int, rng: random.Random) -> None:
        self.replicas = [SchedulerReplica(num_rows) for _ in range(num_replicas)]
        self.balancer = Balancer(self.replicas, {})
        for index in range(num_replicas * num_rows):
            self.balancer.add([new_request(f"row {index}", 8 + index % 5, rng)])
        while self.balancer.num_queued or any(replica.scheduler.num_waiting for replica in self.replicas):
            self.balancer.dispatch()
            self.step()

    def step(self) -> None:
        """Make and update a plan on each replica."""
        for replica in self.replicas:
            replica.step()

    def time_round(self, requests: Sequence[Request]) -> tuple[int, list[int]]:
        """Step all replicas, then route requests one by one and end them.

        Returns:
            Nanoseconds for noting the steps' changes, and for each request.
        """
        self.step()
        for request in requests:
            self.replicas[0].scheduler.view.prefix(request)
        started = time.perf_counter_ns()
        self.balancer.dispatch()
        noted_ns, times = time.perf_counter_ns() - started, []
        for request in requests:
            started = time.perf_counter_ns()
            self.balancer.add([request])
            self.balancer.dispatch()
            times.append(time.perf_counter_ns() - started)
            assert not self.balancer.num_queued
        for request in requests:
            self.balancer.finish(request, FinishReason.ABORT)
        return noted_ns, times


def measure(num_replicas: int, num_rows: int, prompt_tokens: int, num_requests: int) -> dict[str, float]:
    """Return medians over the routed requests, in microseconds."""
    rng = random.Random(0)
    several, single = Balanced(num_replicas, num_rows, rng), Balanced(1, num_rows, rng)
    note_ns: list[float] = []
    dispatch_ns: list[list[int]] = []
    single_ns: list[list[int]] = []
    for index in range(num_requests // ROUND):
        batch, single_batch = (
            [new_request(f"{i}.{index}", prompt_tokens, rng) for i in range(ROUND)] for _ in range(2)
        )
        noted_ns, times = several.time_round(batch)
        note_ns.append(noted_ns / num_replicas)
        dispatch_ns.append(times)
        single_ns.append(single.time_round(single_batch)[1])
    dispatch, alone = (statistics.median(itertools.chain(*times)) for times in (dispatch_ns, single_ns))
    medians = {
        "route_us": dispatch - alone,
        "dispatch_us": dispatch,
        "single_us": alone,
        "first_us": statistics.median(times[0] for times in dispatch_ns),
        "note_us": statistics.median(note_ns),
    }
    return {name: round(ns / 1e3, 1) for name, ns in medians.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--replicas", type=int, nargs="+", default=[8, 64])
    parser.add_argument("--rows", type=int, nargs="+", default=[16, 256])
    parser.add_argument("--prompt-tokens", type=int, nargs="+", default=[16, 512])
    parser.add_argument("--requests", type=int, default=800)
    args = parser.parse_args()
    versions = {"python": platform.python_version(), "machine": platform.machine()}
    for num_replicas, num_rows, prompt_tokens in itertools.product(args.replicas, args.rows, args.prompt_tokens):
        case = {"replicas": num_replicas, "rows": num_rows, "prompt_tokens": prompt_tokens}
        times = measure(num_replicas, num_rows, prompt_tokens, args.requests)
        print(json.dumps({"bench": "router", **case, "requests": args.requests, **times, **versions}), flush=True)


if __name__ == "__main__":
    main()
