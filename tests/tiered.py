"""A scheduler with lower tiers and a simulated device, whose events are recorded and replayed."""

import json

from simulation import Device, generate_alone, make_request, make_scheduler
from slow_mover import SlowMover

from jaxserve.core.event_log import event_from_json, event_to_json
from jaxserve.core.events import Added, Finished, Scheduled, Transferred, Updated, replay
from jaxserve.scheduling.request import FinishReason
from jaxserve.scheduling.step_plan import StepChoice, StepShape


class Tiers:
    """Scheduler, device and tiers, and the events of the scheduler."""

    def __init__(self, depth=0, max_steps=1, tier_pages=(10_000,), **sizes):
        self.depth, self.max_steps = depth, max_steps
        self.sizes, self.tier_pages = sizes, tier_pages
        self.mover = SlowMover(sizes["page_size"], tier_pages)
        self.scheduler = self.new_scheduler()
        self.device = self.mover.device = Device(self.scheduler.sizes.kv_groups)
        self.in_flight, self.plans, self.requests = [], [], []
        self.events, self.requested = [], []  # one value each per event
        self.digest, self.choice = 0, StepChoice()

    def new_scheduler(self):
        return make_scheduler(max_model_len=64, tiers=self.mover.new_tiers(), **self.sizes)

    def note(self, event):
        self.requested.append(self.scheduler.take_moves())
        self.mover.start_moves(self.requested[-1])
        self.events.append(json.loads(json.dumps(event_to_json(event))))

    def add(self, request):
        event = Added(request)
        self.scheduler.add(request)
        self.note(event)
        self.requests.append(request)
        return request

    def finish(self, request, reason=FinishReason.ABORT):
        if self.scheduler.finish(request.request_id, reason) is not None:
            self.note(Finished(request.request_id, reason))

    def end(self, *indices, ok=True):
        """End moves, which are numbered as they were asked for."""
        ended = [self.mover.end(index, ok=ok) for index in sorted(indices, reverse=True)]
        for well in (False, True):
            if keys := [key for key, each in ended if each is well]:
                self.scheduler.transferred(keys, ok=well)
                self.note(Transferred(keys, well))

    def end_all(self, *, ok=True):
        while self.mover.moves:  # the end of a move may begin a copy
            self.end(*range(len(self.mover.moves)), ok=ok)

    def schedule(self):
        choice = self.choice._replace(max_steps=self.max_steps)
        plan = self.scheduler.schedule(choice)
        self.mover.keep_states(self.scheduler.take_kept_states())
        if plan is not None:
            self.digest = plan.digest(self.digest)
            self.in_flight.append((plan, self.device.run(plan)))
            self.plans.append(plan)
        self.note(Scheduled(choice, None if plan is None else StepShape(plan.num_tokens), self.digest))
        is_idle = plan is None and not self.in_flight and not self.mover.moves
        assert not (is_idle and self.scheduler.has_unfinished()), "idle with runnable work"
        return plan

    def update(self):
        plan, sampled = self.in_flight.pop(0)
        event = Updated([list(token_ids) for token_ids in sampled])
        self.scheduler.update(plan, sampled)
        self.note(event)

    def step(self):
        plan = self.schedule()
        if self.in_flight and (plan is None or len(self.in_flight) > self.depth):
            self.update()
        return plan

    def drain(self, *, ok=True):
        for _ in range(3000):
            if not self.scheduler.has_unfinished() and not self.in_flight:
                break
            if self.step() is None:
                self.end_all(ok=ok)
            self.scheduler.check_integrity()
        assert not self.scheduler.has_unfinished(), "a request is stuck"
        self.end_all(ok=ok)
        self.scheduler.check_integrity()
        assert self.scheduler.num_pages_used == 0
        return self

    def run(self, name, prompt, num_tokens=2, **fields):
        request = self.add(make_request(name, prompt, num_tokens, **fields))
        self.drain()
        assert (request.output_token_ids, request.finish_reason) == generate_alone(request)
        return request

    def replay(self):
        scheduler, requested = self.new_scheduler(), []

        def events():
            for event in self.events:
                yield event_from_json(event)
                requested.append(scheduler.take_moves())

        assert replay(events(), scheduler) == len(self.plans)
        assert requested == self.requested


def new_tiers(**sizes):
    return Tiers(**{"max_num_seqs": 4, "max_num_batched_tokens": 64, "page_size": 4, "num_pages": 12} | sizes)


def flood(tiers):
    """Have every page of the device written by others."""
    for index in range(3):
        tiers.run(f"flood {index}", [90 + index] * 40)
