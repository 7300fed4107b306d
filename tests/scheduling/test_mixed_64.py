"""Waste of the schedule on the mixed-64 workload: bucket padding and page slack, without a model."""

import json
from pathlib import Path

import pytest

from jaxserve.api.sampling_params import SamplingParams
from jaxserve.scheduling.request import Request
from jaxserve.scheduling.schedule_config import ScheduleConfig
from jaxserve.scheduling.scheduler import Scheduler

WORKLOAD = Path(__file__).parents[2] / "scripts" / "workloads" / "mixed-64.json"
SIZES = ScheduleConfig(max_num_seqs=64, max_num_batched_tokens=512, max_model_len=1024, page_size=16, num_pages=4096)
TOKEN = 7  # the output of every row: nothing here depends on it, because no id ends a request


def build_requests():
    """The workload's requests, each with its own prompt so that no prefix is shared."""
    specs = json.loads(WORKLOAD.read_text())["requests"]
    return [
        Request(
            str(index),
            [index + 1] * spec["prompt_len"],
            SamplingParams(max_tokens=spec["output_len"], temperature=0, ignore_eos=True),
            seed=0,
            max_total_tokens=spec["prompt_len"] + spec["output_len"],
        )
        for index, spec in enumerate(specs)
    ]


def run_all(requests, depth):
    """Sizes of every step with `depth` plans in flight: computed tokens, bucket, pages used, slack positions."""
    scheduler = Scheduler(SIZES)
    for request in requests:
        scheduler.add(request)
    in_flight, steps = [], []
    while scheduler.has_unfinished() or in_flight:
        plan = scheduler.schedule()
        if plan is not None:
            in_flight.append(plan)
            bucket = next(size for size in SIZES.buckets() if size >= plan.num_tokens)
            slack = sum(
                -(start + count) % SIZES.page_size for start, count in zip(plan.starts, plan.counts, strict=True)
            )
            steps.append((plan.num_tokens, bucket, plan.num_pages_used, slack))
        if plan is None or len(in_flight) > depth:
            done = in_flight.pop(0)
            scheduler.update(done, [[TOKEN] * most for most in done.max_new])
    return steps


@pytest.mark.parametrize("depth", [0, 1], ids=["step by step", "one step ahead"])
def test_padding_and_slack(depth):
    requests = build_requests()
    num_tokens, buckets, num_pages, slack = zip(*run_all(requests, depth), strict=True)
    assert [r.num_tokens for r in requests] == [r.max_total_tokens for r in requests]
    assert sum(num_tokens) >= sum(r.max_total_tokens - 1 for r in requests)  # the last token is never computed
    assert sum(buckets) - sum(num_tokens) < 0.20 * sum(num_tokens)
    shares = [s / (pages * SIZES.page_size) for s, pages in zip(slack, num_pages, strict=True)]
    assert sum(shares) / len(shares) < 0.06
