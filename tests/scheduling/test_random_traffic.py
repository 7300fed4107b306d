"""Random traffic through the scheduler, on a simulated device."""

import dataclasses
import random

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from simulation import VOCAB_SIZE, Loop, generate_alone, make_request, make_scheduler, rows_of

from jaxserve.errors import RequestError
from jaxserve.scheduling.decode import may_sample_late
from jaxserve.scheduling.kv_cache.groups import RELEASED
from jaxserve.scheduling.request import FinishReason, RequestStatus
from jaxserve.scheduling.schedule_config import ScheduleConfig
from tests.parameters import seeds
from tests.random_runs import examples

PROMPTS = st.builds(
    lambda num_common, tail: [1, 2, 3, 4, 3, 2, 1, 0, 1, 1, 2, 2, 3, 3, 4, 4][:num_common] + tail,
    st.integers(0, 16),
    st.lists(st.integers(0, 1), min_size=1, max_size=8),
)


class SchedulerMachine(RuleBasedStateMachine):
    """Random traffic against a model of the queue: two lists, in order of service and of admission."""

    @initialize(
        max_num_seqs=st.integers(1, 6),
        more_budget=st.just(0) | st.integers(0, 24),
        reserved_prefill_tokens=st.integers(1, 6),
        max_unfinished=st.integers(1, 3),
        max_long=st.integers(1, 3),
        long_threshold=st.integers(1, 24),
        long_chunk=st.integers(1, 12),
        max_skipped=st.sampled_from([0, 1, 3, 100]),
        max_lookups=st.sampled_from([0, 1, 3, 100]),
        page_size=st.sampled_from([1, 2, 4]),
        num_pages=st.integers(4, 24),
        depth=st.integers(0, 2),
        may_split=st.booleans(),
        max_steps=st.sampled_from([1, 2, 7]),
        max_drafts=st.sampled_from([0, 0, 1, 3]),
        num_spare_tokens=st.sampled_from([0, 0, 1, 6]),
        windows=st.sampled_from([(None,), (None,), (3,), (None, 5), (1, 6), (2, None, 2, None)]),
        num_snapshots=st.sampled_from([None, None, 0, 1, 3]),
    )
    def start(
        self,
        max_num_seqs,
        more_budget,
        page_size,
        num_pages,
        depth,
        may_split,
        max_steps,
        max_drafts,
        num_spare_tokens,
        windows,
        num_snapshots,
        **policy_numbers,
    ):
        budget = max_num_seqs + more_budget
        policy_numbers["reserved_prefill_tokens"] = max(1, min(policy_numbers["reserved_prefill_tokens"], budget // 2))
        policy_numbers["max_long"] = min(policy_numbers["max_long"], policy_numbers["max_unfinished"])
        default = ScheduleConfig(max_num_seqs, budget, page_size, page_size, num_pages).policy
        self.policy = dataclasses.replace(default, **policy_numbers)
        sizes = (max_num_seqs, budget, page_size, num_pages * len(windows))
        if num_snapshots is not None:  # states cannot go back
            max_drafts = num_spare_tokens = 0
        layers = {"windows": windows, "num_snapshots": num_snapshots}
        self.scheduler = make_scheduler(
            *sizes, max_model_len=40, **layers, num_spare_tokens=num_spare_tokens, **policy_numbers
        )
        self.groups = self.scheduler.sizes.kv_groups
        self.loop = Loop(self.scheduler, depth, max_steps, max_drafts, may_split=may_split)
        self.requests = []
        self.waiting, self.running = [], []
        self.num_wasted = 0

    @rule(
        prompt=PROMPTS,
        max_tokens=st.integers(1, 12),
        min_tokens=st.integers(0, 3),
        stop_ids=st.frozensets(st.integers(0, VOCAB_SIZE - 1), max_size=2),
        salt=st.sampled_from([b"", b"", b"", b"tenant"]),
        read_prefix_cache=st.sampled_from([True, True, True, False]),
        waits_for_tokens=st.sampled_from([False, False, True]),
        may_be_extended=st.sampled_from([False, False, True]),
        shares_last_page=st.sampled_from([False, True]),
    )
    def add(self, prompt, max_tokens, **kwargs):
        request = make_request(str(len(self.requests)), prompt, max_tokens, **kwargs)
        if self.groups.num_pages(request.max_total_tokens - 1) > self.scheduler.sizes.num_pages:
            with pytest.raises(RequestError, match="fit the page pool"):
                self.scheduler.add(request)
            return
        self.scheduler.add(request)
        self.requests.append(request)
        self.waiting.append(request)

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def abort(self, data):
        request = data.draw(st.sampled_from(self.requests))
        unfinished = request.status is not RequestStatus.FINISHED
        assert self.scheduler.finish(request.request_id, FinishReason.ABORT) is (request if unfinished else None)
        self.forget_finished()

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def finish(self, data):
        request = data.draw(st.sampled_from(self.requests))
        reason = request.finish_reason or FinishReason.STOP
        self.scheduler.finish(request.request_id, FinishReason.STOP)
        assert request.finish_reason is reason
        self.forget_finished()

    @rule()
    def reset_prefix_cache(self):
        self.scheduler.reset_prefix_cache()

    @rule(num_steps=st.integers(1, 4))
    def step(self, num_steps):
        for _ in range(num_steps):
            plan = self.schedule()
            if self.loop.in_flight and (plan is None or len(self.loop.in_flight) > self.loop.depth):
                self.update()

    @precondition(lambda self: self.loop.in_flight)
    @rule()
    def update(self):
        plan, tokens = self.loop.in_flight[0]
        sampled = list(zip(plan.requests, map(list, tokens), strict=True))
        expected = [(request, ids[: self.num_missing(request)]) for request, ids in sampled]
        assert self.loop.update() == {request: len(ids) for request, ids in expected if ids}
        assert all(request.output_token_ids[-len(ids) :] == ids for request, ids in expected if ids)
        self.num_wasted += sum(len(ids) for _, ids in sampled) - sum(len(ids) for _, ids in expected)
        assert self.scheduler.num_wasted_tokens == self.num_wasted
        self.forget_finished()

    @invariant()
    def pages_and_slots_are_conserved(self):
        self.scheduler.check_integrity()
        assert self.scheduler.num_waiting == len(self.waiting)
        assert self.scheduler.num_running == len(self.running)

    def teardown(self):
        if not hasattr(self, "scheduler"):
            return
        for _ in range(2000):
            if not self.scheduler.has_unfinished() and not self.loop.in_flight:
                break
            self.step(1)
        for request in self.requests:
            self.check_output(request)
        self.scheduler.check_integrity()
        assert self.scheduler.num_pages_used == 0

    def num_missing(self, request):
        """Tokens that a request has yet to get."""
        if request.status is RequestStatus.FINISHED:
            return 0
        return len(generate_alone(request)[0]) - len(request.output_token_ids)

    def forget_finished(self):
        self.waiting = [request for request in self.waiting if request.status is not RequestStatus.FINISHED]
        self.running = [request for request in self.running if request.status is not RequestStatus.FINISHED]

    def schedule(self):
        unfinished = [request for request in self.running if request.num_tokens < request.max_total_tokens]
        active = [request for request in unfinished if request.status is not RequestStatus.BLOCKED]
        decodes = [request for request in active if request.num_tokens - request.num_computed_tokens == 1]
        with_late = [request for request in unfinished if request in decodes or may_sample_late(request)]
        prefills = [request for request in active if request not in decodes]
        num_left = {request: request.num_tokens - request.num_computed_tokens for request in prefills}
        others = [request for request in self.running if request in decodes or request.status is RequestStatus.BLOCKED]
        plan = self.loop.schedule()
        preempted = [request for request in self.running[::-1] if request.status is RequestStatus.WAITING]
        self.check_preempted(preempted, prefills)
        self.running = [request for request in self.running if request not in preempted]
        if plan is not None:
            assert preempted == plan.preempted
            assert not plan.is_split or (self.loop.may_split and not prefills and not plan.num_prefill_tokens)
            decodes = with_late if plan.is_split else decodes
            self.check_plan(plan, decodes, [request for request in prefills if request not in preempted], num_left)
            self.check_prefills(plan, num_left, decode_waits=bool(set(others) - set(preempted)))
        self.waiting = preempted[::-1] + self.waiting
        return plan

    def check_preempted(self, preempted, prefills):
        """The last admitted, for rows in decode; for rows in prefill, the last admitted of these."""
        last = self.running[len(self.running) - len(preempted) :]
        if preempted and preempted[::-1] != last:
            survivors = [request for request in self.running if request not in preempted]
            num_last = next(i for i, request in enumerate(self.running[::-1]) if request not in preempted)
            for victim in preempted[num_last:]:
                assert victim in prefills, "rows in decode give way to those in decode alone"
                younger = self.running[self.running.index(victim) + 1 :]
                assert not [request for request in younger if request in prefills and request in survivors]
                assert set(prefills) & set(survivors), "it gave way to an older one"

    def check_plan(self, plan, decodes, prefills, num_left):
        scheduler, rows = self.scheduler, {row.request: row for row in rows_of(plan)}
        assert 0 < len(rows) == plan.num_rows <= scheduler.sizes.max_num_seqs
        assert len(set(plan.slots)) == len(rows)
        assert min(plan.counts) > 0
        assert plan.num_tokens == sum(plan.counts) <= scheduler.sizes.max_num_batched_tokens
        assert not rows.keys() & set(plan.preempted)
        decodes = [request for request in decodes if request not in plan.preempted]
        budget_left = scheduler.sizes.max_num_batched_tokens - plan.num_tokens
        self.check_decodes(plan, decodes, budget_left)
        if plan.num_steps > 1 or plan.num_drafts:
            self.check_several_steps(plan, decodes)
        lacks_pages = any(
            request not in rows or rows[request].num_tokens < self.policy.first_chunk(num_left[request], 1000)
            for request in prefills
        )
        admitted = [row.request for row in rows_of(plan) if row.admitted]
        assert admitted == [request for request in self.waiting if request in admitted], "first come, first served"
        last = self.waiting.index(admitted[-1]) if admitted else 0
        passed_over = [request for request in self.waiting[:last] if request not in admitted]
        assert len(passed_over) <= self.policy.max_skipped
        # Requests that are unfinished now, or may have got their last tokens only after newcomers had been chosen.
        unfinished = [r for r in self.running + admitted if r not in decodes and r.num_computed_tokens]
        assert not passed_over or unfinished, "passed over for nobody"
        assert plan.num_cached_tokens == sum(rows[request].start for request in admitted)
        assert all(rows[request].start == 0 for request in admitted if not request.read_prefix_cache)
        self.waiting = [request for request in self.waiting if request not in admitted]
        self.running += admitted
        assert plan.num_pages_used == len({page for request in self.running for page in request.pages} - {RELEASED})
        if plan.preempted:
            assert not admitted
        elif self.waiting and budget_left and len(self.running) < scheduler.sizes.max_num_seqs:
            # Some were unfinished only before they got what was left over.
            long = any(self.policy.is_long(r.num_tokens - rows[r].start - 1) for r in unfinished if r in rows)
            if not lacks_pages and not long and not any(r.num_tokens - r.num_computed_tokens > 1 for r in unfinished):
                self.check_head_must_wait(self.waiting[0], plan)

    def check_prefills(self, plan, num_left, *, decode_waits):
        """Check the share of prompts in a plan: no long one too much beside rows in decode, otherwise all there is."""
        rows = {row.request: row for row in rows_of(plan)}
        left_before = {row.request: row.request.num_tokens - row.start - (row.max_new > 0) for row in rows.values()}
        unfinished = [r for r in self.running if r.num_tokens - r.num_computed_tokens > 1]
        new = [request for request in unfinished if request not in num_left]
        if new:
            assert len(unfinished) <= self.policy.max_unfinished
        is_long = [self.policy.is_long(r.num_tokens - r.num_computed_tokens) for r in unfinished]
        if any(is_long[-len(new) :] if new else ()):
            assert sum(is_long) <= self.policy.max_long
        num_free = self.scheduler.sizes.num_pages - plan.num_pages_used
        in_decode = [request for request in self.running if request not in unfinished]
        num_kept = self.groups.size * sum(map(self.scheduler.shards[0].ledger.can_grow, in_decode))
        for request in unfinished:
            has_pages = num_free >= num_kept + self.groups.size
            num_kept += self.scheduler.shards[0].ledger.num_pages_kept(request)  # pages kept from younger prompts
            num_tokens = rows[request].num_tokens if request in rows else 0
            long = self.policy.is_long(left_before.get(request, 0))
            assert not (long and decode_waits) or num_tokens <= self.policy.long_chunk
            has_all = long and decode_waits and num_tokens == self.policy.long_chunk
            if plan.num_tokens < self.scheduler.sizes.max_num_batched_tokens:
                assert has_all or not has_pages or not num_tokens, "tokens were left over"

    def check_decodes(self, plan, decodes, budget_left):
        rows = {row.request: row for row in rows_of(plan)}
        missing = [request for request in decodes if request not in rows]
        budget = self.scheduler.sizes.max_num_batched_tokens
        if len(decodes) + len(plan.preempted) <= budget - self.policy.reserved_prefill_tokens:
            assert plan.requests[: len(decodes)] == decodes, "a row in decode missed a step"
        if missing:
            no_page_left = plan.num_pages_used + self.groups.size > self.scheduler.sizes.num_pages
            assert not budget_left or no_page_left, "a row in decode missed a step for nothing"
            assert plan.num_prefill_tokens <= self.policy.reserved_prefill_tokens or no_page_left
        assert all(rows[request].num_tokens == 1 for request in decodes if request in rows)
        assert plan.num_decode_tokens == len(decodes) - len(missing)

    def check_several_steps(self, plan, decodes):
        assert plan.num_steps <= self.loop.max_steps
        if not plan.num_drafts:
            assert plan.num_steps == max(plan.max_new)
        assert plan.requests == decodes
        assert not self.waiting or len(self.running) == self.scheduler.sizes.max_num_seqs
        for request, most in zip(plan.requests, plan.max_new, strict=True):
            assert most == 1 or not request.waits_for_tokens
            assert request.num_tokens <= request.max_total_tokens
            assert len(request.pages) // self.groups.size * self.groups.page_size >= request.num_computed_tokens

    def check_head_must_wait(self, head, plan):
        num_free = self.scheduler.sizes.num_pages - plan.num_pages_used
        pages_short = (self.groups.num_blocks(head.num_tokens) + len(self.running)) * self.groups.size > num_free
        assert head.num_pending_tokens or pages_short, "the head could have run"

    def check_output(self, request):
        output, reason = generate_alone(request)
        assert request.status is RequestStatus.FINISHED
        num_read = len(request.output_token_ids)
        assert request.output_token_ids == output[:num_read]
        if request.finish_reason is FinishReason.LENGTH or num_read == len(output):
            assert request.output_token_ids == output
            assert request.finish_reason is reason
        assert (request.pages, request.slot, request.num_pending_tokens) == ([], -1, 0)


SchedulerMachine.TestCase.settings = settings(max_examples=examples(50), stateful_step_count=50, deadline=None)
TestSchedulerMachine = SchedulerMachine.TestCase


@pytest.mark.parametrize("seed", seeds(2))
@pytest.mark.parametrize(("depth", "max_steps", "max_drafts"), [(0, 1, 0), (1, 1, 0), (0, 5, 0), (1, 5, 0), (1, 2, 3)])
def test_outputs_do_not_depend_on_pool_budget_or_order(seed, depth, max_steps, max_drafts):
    rng = random.Random(seed)
    page_size, num_pages = rng.choice([1, 2, 4, 8]), rng.randint(24, 64)
    max_num_seqs = rng.randint(2, 12)
    scheduler = make_scheduler(max_num_seqs, max_num_seqs + rng.randint(0, 20), page_size, num_pages)
    loop = Loop(scheduler, depth, max_steps, max_drafts)
    common = [rng.randrange(VOCAB_SIZE) for _ in range(10)]
    requests = [
        make_request(str(i), common[: rng.randint(1, 10)] + [0] * rng.randint(0, 4), rng.randint(1, 10))
        for i in range(40)
    ]
    for request in requests:
        loop.add(request)
        if rng.random() < 0.5:
            loop.step()
    loop.drain()
    assert [(r.output_token_ids, r.finish_reason) for r in requests] == [generate_alone(r) for r in requests]
    assert loop.scheduler.num_pages_used == 0
