"""Prefill and decode apart or together: times on a trace, at several rates, with equal numbers of replicas.

    python scripts/study.py disaggregation --trace splitwise-conv.csv.gz --json scripts/results/disaggregation.json

An 8B model on H100s. Together: all replicas share the engine's balancer. Apart: some replicas compute only prompts and
each first token; its pages move at `GB_PER_S`; then the other replicas decode. They have a prompt's pages, so that
its first step costs as much as a decoding row. The trace has no shared prefixes, or they are ignored.
"""

import argparse
import dataclasses
import heapq
from collections.abc import Sequence
from itertools import islice

from jaxserve.api.config import EngineConfig
from jaxserve.tools.planner.sizes import Sizes
from jaxserve.tools.planner.targets import parse_target
from jaxserve.tools.simulator.distribution import Distribution
from jaxserve.tools.simulator.roofline_times import RooflineTimes
from jaxserve.tools.simulator.simulation import Simulation
from jaxserve.tools.simulator.traces import TracedRequest, read_trace
from studies.fleet import Figure

EFFICIENCY, GB_PER_S = 0.77, 25.0


class DecodeTimes:
    """Step times of replicas that get prompts' pages from others: each row computes one token.

    Args:
        times: times of ordinary steps.
    """

    def __init__(self, times: RooflineTimes) -> None:
        self._times = times

    def steps_s(self, starts: Sequence[int], counts: Sequence[int], num_steps: int = 1) -> list[float]:
        """Return the step times; see `StepTimes`."""
        ends = [start + count - 1 for start, count in zip(starts, counts, strict=True)]
        return self._times.steps_s(ends, [1] * len(counts), num_steps)


def main(argv: Sequence[str]) -> None:
    """Compare on the trace at each speed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", metavar="FILE", help="write the figure to this file")
    parser.add_argument("--trace", metavar="FILE", required=True, help="a trace of requests")
    parser.add_argument("--requests", type=int, default=1500, metavar="INT", help="(default: 1500)")
    parser.add_argument("--speeds", default="1,4,8", metavar="X,...", help="(default: 1,4,8)")
    parser.add_argument("--replicas", type=int, default=4, metavar="INT", help="(default: 4)")
    args = parser.parse_args(argv)
    figure = Figure(args.json)
    sizes = Sizes.resolve(EngineConfig(model="llama-3.1-8b", max_model_len=16384), parse_target("h100"))
    roofline = sizes.roofline()
    times = RooflineTimes(roofline, EFFICIENCY)
    whole = [each._replace(blocks=()) for each in islice(read_trace(args.trace), args.requests)]
    for speed in map(float, args.speeds.split(",")):
        trace = [each._replace(arrival_s=each.arrival_s / speed) for each in whole]
        totals = Simulation(sizes.schedule, times, args.replicas).run(trace)
        figure.add(speed=speed, prefill_replicas=0, **_figures(totals.ttft_s, totals.itl_s, totals.last_s))
        for num_prefill in range(1, args.replicas):
            figure.add(
                speed=speed,
                prefill_replicas=num_prefill,
                **_apart(sizes, times, trace, num_prefill, args.replicas - num_prefill, roofline.kv_token_bytes),
            )
    figure.write(study="disaggregation", trace=args.trace.rpartition("/")[2], requests=len(whole), gb_per_s=GB_PER_S)


def _apart(
    sizes: Sizes,
    times: RooflineTimes,
    trace: Sequence[TracedRequest],
    num_prefill: int,
    num_decode: int,
    token_bytes: int,
) -> dict[str, float]:
    """Return the figures if so many replicas compute prompts and the others decode."""
    firsts: list[tuple[float, int]] = []
    prefill = Simulation(sizes.schedule, times, num_prefill)
    totals = prefill.run(
        [each._replace(output_len=1) for each in trace], None, lambda key, at, _: firsts.append((at, key))
    )
    arriving: list[tuple[float, int, float]] = []
    for at_s, key in firsts:
        if trace[key].output_len > 1:
            moved_s = trace[key].prompt_len * token_bytes / (GB_PER_S * 1e9)
            heapq.heappush(arriving, (at_s + moved_s, key, at_s))
    order = [heapq.heappop(arriving) for _ in range(len(arriving))]
    # A prompt with its first token. Only that token is computed: no budget may delay it.
    schedule = dataclasses.replace(sizes.schedule, max_num_batched_tokens=2**20)
    decode = Simulation(schedule, DecodeTimes(times), num_decode)
    itl_s = Distribution()

    def ended(index: int, first_s: float, last_s: float) -> None:
        itl_s.add(first_s - order[index][2])  # includes the move

    decode_totals = decode.run(
        [
            TracedRequest(at_s, trace[key].prompt_len + 1, trace[key].output_len - 1, tenant=trace[key].tenant)
            for at_s, key, _ in order
        ],
        None,
        ended,
    )
    itl_s.merge(decode_totals.itl_s)
    return _figures(totals.ttft_s, itl_s, decode_totals.last_s)


def _figures(ttft_s: Distribution, itl_s: Distribution, last_s: float) -> dict[str, float]:
    """Return a row's figures."""
    found = {f"ttft_p{percent}_s": ttft_s.percentile(percent) for percent in (50, 99)}
    return found | {f"itl_p{percent}_ms": itl_s.percentile(percent) * 1e3 for percent in (50, 99)} | {"last_s": last_s}
