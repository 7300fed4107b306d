"""Energy and latency over caps of the batch: joules per output token against the time between tokens.

    python scripts/study.py energy --json scripts/results/energy-frontier.json

An 8B model on one H100 serves requests that are all there from the start, with steps of at most so many rows. Energy is
the chip's maximum power times the time that it is busy: an upper bound, and the same for every step.
"""

import dataclasses
from collections.abc import Sequence
from random import Random

from jaxserve.api.config import EngineConfig
from jaxserve.tools.planner.sizes import Sizes
from jaxserve.tools.planner.targets import parse_target
from jaxserve.tools.simulator.roofline_times import RooflineTimes
from jaxserve.tools.simulator.simulation import Simulation
from jaxserve.tools.simulator.traces import TracedRequest
from studies.fleet import Figure, parse

EFFICIENCY = 0.77


def main(argv: Sequence[str]) -> None:
    """Serve the same requests with each cap."""
    args = parse(argv, __doc__, requests=192)
    figure, target = Figure(args.json), parse_target("h100")
    sizes = Sizes.resolve(EngineConfig(model="llama-3.1-8b", max_model_len=4096), target)
    times, draw = RooflineTimes(sizes.roofline(), EFFICIENCY), Random(1)
    trace = [TracedRequest(0.0, draw.randrange(256, 1024), draw.randrange(64, 256)) for _ in range(args.requests)]
    assert target.sheet is not None
    for rows in (1, 2, 4, 8, 16, 32, 64, 128):
        schedule = dataclasses.replace(sizes.schedule, max_num_seqs=rows)
        totals = Simulation(schedule, times).run(trace[: max(4 * rows, 16)])
        report = totals.report(1, max_watts=target.sheet.watts)
        figure.add(
            max_num_seqs=rows,
            requests=totals.num_ended,
            itl_p50_ms=report["itl_ms"]["p50"],
            itl_p99_ms=report["itl_ms"]["p99"],
            output_tokens_per_s=report["output_tokens_per_s"],
            max_joules_per_output_token=report["max_joules_per_output_token"],
        )
    figure.write(study="energy", model="llama-3.1-8b", target="h100", efficiency=EFFICIENCY)
