"""Stability: queues at 0.95 and 1.05 of the sustainable load, with and without a limit for the queue.

    python scripts/study.py stability --requests 100000 --json scripts/results/stability.json

Also counts the moments at which a replica idles while a request waits that it could start: work conservation.
"""

from collections.abc import Sequence

from jaxserve.tools.simulator.simulation import Limits, Simulation
from studies.fleet import SCHEDULE, TIMES, Figure, arrivals, capacity, parse

REPLICAS = 2
SAMPLES = 10


def main(argv: Sequence[str]) -> None:
    args = parse(argv, __doc__, requests=100_000)
    figure, rate = Figure(args.json), capacity()
    for load, limits_of_queue in ((0.95, (None,)), (1.05, (100, None))):
        for limit in limits_of_queue:
            count = args.requests if limit or load < 1 else args.requests // 5  # the unlimited queue only grows
            limits = Limits(max_queued_requests=limit)
            simulation = Simulation(SCHEDULE, TIMES, REPLICAS, limits=limits)
            queues: list[int] = []
            idle_while_waiting = 0

            def look(now: Simulation, queues: list[int] = queues) -> None:
                nonlocal idle_while_waiting
                queues.append(now.num_waiting)
                # The arrival itself is routed after this call: requests that waited before count.
                if queues[-1] > 1 and any(replica.view.is_idle for replica in now.replicas):
                    idle_while_waiting += 1

            totals = simulation.run(arrivals(1, load * rate * REPLICAS, count), look)
            part = max(len(queues) // SAMPLES, 1)
            means = [sum(queues[i : i + part]) / part for i in range(0, part * SAMPLES, part)]
            figure.add(
                load=load,
                max_queued_requests=limit,
                requests=count,
                refused=totals.num_refused / count,
                max_queue=max(queues),
                mean_queue_by_tenth=[round(mean, 1) for mean in means],
                ttft_p99_s=totals.ttft_s.percentile(99),
                busy=totals.busy_s / REPLICAS / (totals.last_s - totals.first_s),
                idle_while_waiting=idle_while_waiting,
            )
    figure.write(study="stability", replicas=REPLICAS, capacity_per_replica=rate, requests=args.requests)
