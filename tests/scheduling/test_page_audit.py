"""Pages in all tiers after many random operations with faults: none is lost, and no token is wrong."""

import os
import random
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
from simulation import generate_alone, make_request
from tiered import Tiers

from jaxserve.core.events import CacheReset, Recovered, Withdrawn
from jaxserve.scheduling.request import FinishReason, RequestStatus
from tests.parameters import mainly

ROUND = 500  # operations between two audits of all pages
LAYERS = [((None,), None), ((None, 5), None), ((3,), None), ((None,), 4), ((None, 5), 3)]  # windows, and snapshots


class Traffic:
    """Random requests, ends of moves and faults."""

    def __init__(self, seed, **sizes):
        self.random, self.counts = random.Random(seed), Counter()
        self.tiers = Tiers(max_num_seqs=4, max_num_batched_tokens=12, page_size=2, max_steps=3, depth=1, **sizes)
        self.unfinished = []

    def operate(self):
        draw = self.random
        operation = draw.choices(
            [self.add, self.tiers.step, self.end, self.cancel, self.reset, self.withdraw, self.restart],
            [15, 50, 28, 4, 0.4, 1, 0.4],
        )[0]
        self.counts[operation.__name__] += 1
        operation()

    def add(self):
        draw = self.random
        if len(self.unfinished) > 8:
            return
        prompt = [draw.choice([5, 6, 7]), *([1, 2, 3, 4] * 4)[: draw.choice([2, 7, 12, 16])]]
        prompt += [draw.randrange(2) for _ in range(draw.randrange(6))]
        request = make_request(
            str(len(self.tiers.events)),
            prompt,
            draw.randrange(1, 10),
            salt=draw.choice([b"", b"", b"tenant"]),
            priority=draw.choice([0, 0, 1]),
            shares_last_page=draw.random() < 0.5,
        )
        self.unfinished.append(self.tiers.add(request))

    def end(self):
        """End some moves, a tenth of them badly."""
        moves = self.tiers.mover.moves
        if moves:
            indices = self.random.sample(range(len(moves)), self.random.randrange(1, len(moves) + 1))
            self.tiers.end(*indices, ok=self.random.random() < 0.9)

    def cancel(self):
        if self.unfinished:
            self.tiers.finish(self.random.choice(self.unfinished))

    def reset(self):
        self.tiers.scheduler.reset_prefix_cache()
        self.tiers.note(CacheReset())

    def withdraw(self):
        withdrawn = self.tiers.scheduler.withdraw()
        self.tiers.note(Withdrawn())
        for request in withdrawn:
            self.tiers.requests.remove(request)
            self.tiers.add(request)

    def restart(self):
        tiers = self.tiers
        tiers.in_flight.clear()
        for request in self.unfinished:
            request.status, request.finish_reason = RequestStatus.FINISHED, FinishReason.ABORT
        keys = [move.key for move in tiers.mover.moves]
        tiers.scheduler.restart()
        tiers.mover.forget()
        tiers.digest = 0
        tiers.note(Recovered())
        tiers.scheduler.transferred(keys, ok=True)  # they began before

    def audit(self):
        """Check pages now, and all tokens of the requests that have ended since the last audit."""
        self.tiers.scheduler.check_integrity()
        self.check_ended()

    def check_ended(self):
        ended = [request for request in self.unfinished if request.status is RequestStatus.FINISHED]
        self.unfinished = [request for request in self.unfinished if request not in ended]
        self.tiers.requests = [*self.unfinished]
        for request in ended:
            self.counts["preempted"] += bool(request.num_preemptions)
            self.counts["loaded"] += request.cached_tokens.total > request.cached_tokens.device
            if request.finish_reason is not FinishReason.ABORT:
                assert request.output_token_ids == generate_alone(request)[0]


def audit(num_operations, windows=(None,), num_snapshots=None, tier_pages=(12, 40)):
    """Run random traffic, with an audit every `ROUND` operations and a replay at the end; return what happened."""
    sizes = {"num_pages": 26 * len(windows), "windows": windows, "num_snapshots": num_snapshots}
    if num_snapshots is not None:  # snapshots take most of a small tier, from which little is loaded then
        tier_pages = [3 * count for count in tier_pages]
    traffic = Traffic(0, tier_pages=tier_pages, **sizes)
    for _ in range(num_operations // ROUND):
        for _ in range(ROUND):
            traffic.operate()
            if len(traffic.unfinished) > 8:
                traffic.check_ended()
        traffic.audit()
    traffic.tiers.drain()
    traffic.audit()
    assert not traffic.unfinished
    traffic.tiers.replay()
    assert min(traffic.counts.values()) > 0, traffic.counts
    assert traffic.counts["loaded"] > num_operations // 100 or sum(tier_pages) < 10, traffic.counts
    return traffic.counts


def audit_in_process(*args):
    """Run an audit in a process without the suite's type checks, which take four times as long as all else."""
    root = Path(__file__).parents[2]
    program = f"import sys; sys.path.insert(0, 'tests'); from {__name__.split('.')[-1]} import audit; audit(*{args})"
    paths = os.pathsep.join([str(root), str(Path(__file__).parent)])
    subprocess.run([sys.executable, "-c", program], cwd=root, env=os.environ | {"PYTHONPATH": paths}, check=True)


@pytest.mark.parametrize("tier_pages", mainly([(12, 40)], (40,), (1,), (1, 1), (1, 40)))
@pytest.mark.parametrize("layers", mainly([((None,), None)], *LAYERS[1:]))
def test_no_page_is_lost_in_random_traffic_with_faults(layers, tier_pages):
    audit_in_process(2_000, *layers, tier_pages)


@pytest.mark.full
@pytest.mark.exhaustive
@pytest.mark.parametrize("layers", LAYERS)
def test_no_page_is_lost_in_a_hundred_thousand_operations(layers):
    audit_in_process(100_000, *layers)
