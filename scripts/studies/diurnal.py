"""Fleets with up to 10,000 replicas with the engine's balancer, on a day's traffic: the cost to simulate a request.

    python scripts/study.py diurnal --fleets 10000x50000 --json scripts/results/diurnal.json
    python scripts/study.py diurnal --fleets 10000x400000

Arrivals follow a day between a quarter and 1.75 times their mean rate, half the sustainable one. The day
is compressed until REPLICAS get REQUESTS. Prompts begin with system prompts, so that the router looks for prefixes too.
Each fleet is simulated in a new process, whose processor time and peak memory are reported: both grow with the
replicas, and with the requests.
"""

import math
import multiprocessing
import resource
import time
from collections.abc import Iterator, Sequence
from random import Random
from typing import Any

from jaxserve.tools.simulator.simulation import Simulation
from jaxserve.tools.simulator.traces import TracedRequest
from studies.fleet import SCHEDULE, TIMES, Figure, capacity, parse

LOAD = 0.5  # mean arrivals as a fraction of the sustainable ones
BLOCK = 16  # tokens per block id
PREFIX_BLOCKS = 16
MAX_PROMPT, MAX_OUTPUT = 256, 128
FLEETS = "8x12000 8x40000 1000x10000 10000x100000"


def day(seed: int, mean: float, count: int, num_prefixes: int) -> Iterator[TracedRequest]:
    """Yield a day's requests, one by one.

    Args:
        seed: random seed.
        mean: mean arrivals per second.
        count: expected request count.
        num_prefixes: system prompt count.
    """
    draw, day_s, now_s, own = Random(seed), count / mean, 0.0, num_prefixes * PREFIX_BLOCKS
    while (now_s := now_s + draw.expovariate(1.75 * mean)) < day_s:
        if 1.75 * draw.random() >= 1 - 0.75 * math.cos(2 * math.pi * now_s / day_s):
            continue
        family, length = draw.randrange(num_prefixes), draw.randrange(1, MAX_PROMPT)
        first = family * PREFIX_BLOCKS
        blocks = [*range(first, first + PREFIX_BLOCKS), *range(own, own + -(-length // BLOCK))]
        own = blocks[-1] + 1
        yield TracedRequest(now_s, PREFIX_BLOCKS * BLOCK + length, draw.randrange(1, MAX_OUTPUT), blocks, BLOCK)


def serve(num_replicas: int, num_requests: int) -> dict[str, Any]:
    """Return the figures of a fleet that serves a day."""
    rate = capacity(prompt_len=MAX_PROMPT, output_len=MAX_OUTPUT)
    started_s = time.process_time()
    simulation = Simulation(SCHEDULE, TIMES, num_replicas)
    totals = simulation.run(day(4, LOAD * rate * num_replicas, num_requests, max(num_replicas // 4, 4)))
    cpu_s, report = time.process_time() - started_s, totals.report(num_replicas)
    return {
        "replicas": num_replicas,
        "requests": totals.num_requests,
        "simulated_s": report["duration_s"],
        "cpu_s": cpu_s,
        "cpu_us_per_request": 1e6 * cpu_s / totals.num_requests,
        "dispatches_per_request": totals.num_dispatches / totals.num_requests,
        "peak_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
        "busy": report["busy"],
        "hit_rate": report["hit_rate"],
        "ttft_p50_s": totals.ttft_s.percentile(50),
        "ttft_p99_s": totals.ttft_s.percentile(99),
        "preemptions": totals.num_preemptions,
    }


def main(argv: Sequence[str]) -> None:
    """Serve a day with each fleet."""
    args = parse(argv, __doc__, fleets=FLEETS)
    figure = Figure(args.json)
    for fleet in args.fleets.split():
        sizes = [int(number) for number in fleet.split("x")]
        with multiprocessing.get_context("spawn").Pool(1) as pool:
            figure.add(**pool.apply(serve, sizes))
    figure.write(study="diurnal", load=LOAD, max_prompt=MAX_PROMPT, max_output=MAX_OUTPUT)
