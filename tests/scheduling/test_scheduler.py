"""The scheduler alone, on a simulated device."""

import dataclasses
import random
import time

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from simulation import (
    VOCAB_SIZE,
    Loop,
    generate_alone,
    make_request,
    make_scheduler,
    num_computed,
    rows_of,
    starts,
)

from jaxserve.errors import RequestError
from jaxserve.kv_cache.groups import RELEASED
from jaxserve.request import FinishReason, RequestStatus
from jaxserve.scheduling.policy import Policy
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
        prefill_share=st.integers(1, 6),
        most_unfinished=st.integers(1, 3),
        most_long=st.integers(1, 3),
        long_threshold=st.integers(1, 24),
        long_chunk=st.integers(1, 12),
        most_passed_over=st.sampled_from([0, 1, 3, 100]),
        most_looks=st.sampled_from([0, 1, 3, 100]),
        page_size=st.sampled_from([1, 2, 4]),
        num_pages=st.integers(4, 24),
        depth=st.integers(0, 2),
        max_steps=st.sampled_from([1, 2, 7]),
        max_drafts=st.sampled_from([0, 0, 1, 3]),
        num_spare_tokens=st.sampled_from([0, 0, 1, 6]),
        windows=st.sampled_from([(None,), (None,), (3,), (None, 5), (1, 6), (2, None, 2, None)]),
    )
    def start(
        self,
        max_num_seqs,
        more_budget,
        page_size,
        num_pages,
        depth,
        max_steps,
        max_drafts,
        num_spare_tokens,
        windows,
        **policy_numbers,
    ):
        budget = max_num_seqs + more_budget
        policy_numbers["prefill_share"] = max(1, min(policy_numbers["prefill_share"], budget // 2))
        policy_numbers["most_long"] = min(policy_numbers["most_long"], policy_numbers["most_unfinished"])
        self.policy = dataclasses.replace(Policy.of(budget), **policy_numbers)
        sizes = (max_num_seqs, budget, page_size, num_pages * len(windows))
        self.scheduler = make_scheduler(
            *sizes, max_model_len=40, windows=windows, num_spare_tokens=num_spare_tokens, **policy_numbers
        )
        self.groups = self.scheduler.groups
        self.loop = Loop(self.scheduler, depth, max_steps, max_drafts)
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
    )
    def add(self, prompt, max_tokens, **kwargs):
        request = make_request(str(len(self.requests)), prompt, max_tokens, **kwargs)
        if self.groups.num_pages(request.max_total_tokens - 1) > self.scheduler.num_pages:
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
        active = [
            request
            for request in self.running
            if request.num_tokens < request.max_total_tokens and request.status is not RequestStatus.BLOCKED
        ]
        decodes = [request for request in active if request.num_tokens - request.num_computed_tokens == 1]
        prefills = [request for request in active if request not in decodes]
        num_left = {request: request.num_tokens - request.num_computed_tokens for request in prefills}
        others = [request for request in self.running if request in decodes or request.status is RequestStatus.BLOCKED]
        plan = self.loop.schedule()
        preempted = [request for request in self.running[::-1] if request.status is RequestStatus.WAITING]
        self.check_preempted(preempted, prefills)
        self.running = [request for request in self.running if request not in preempted]
        if plan is not None:
            assert preempted == plan.preempted
            self.check_plan(plan, decodes, [request for request in prefills if request not in preempted], num_left)
            self.check_prefills(plan, num_left, beside_decode=bool(set(others) - set(preempted)))
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
        assert 0 < len(rows) == plan.num_rows <= scheduler.max_num_seqs
        assert len(set(plan.slots)) == len(rows)
        assert min(plan.counts) > 0
        assert plan.num_tokens == sum(plan.counts) <= scheduler.max_num_batched_tokens
        assert not rows.keys() & set(plan.preempted)
        decodes = [request for request in decodes if request not in plan.preempted]
        budget_left = scheduler.max_num_batched_tokens - plan.num_tokens
        self.check_decodes(plan, decodes, budget_left)
        if plan.num_steps > 1 or plan.num_drafts:
            self.check_several_steps(plan, decodes)
        lacks_pages = any(
            request not in rows or rows[request].num_tokens < self.policy.first_share(num_left[request], 1000)
            for request in prefills
        )
        admitted = [row.request for row in rows_of(plan) if row.admitted]
        assert admitted == [request for request in self.waiting if request in admitted], "first come, first served"
        last = self.waiting.index(admitted[-1]) if admitted else 0
        passed_over = [request for request in self.waiting[:last] if request not in admitted]
        assert len(passed_over) <= self.policy.most_passed_over
        # Those that are unfinished now, or may have got their last tokens only after newcomers had been chosen.
        unfinished = [r for r in self.running + admitted if r not in decodes and r.num_computed_tokens]
        assert not passed_over or unfinished, "passed over for nobody"
        assert plan.num_cached_tokens == sum(rows[request].start for request in admitted)
        assert all(rows[request].start == 0 for request in admitted if not request.read_prefix_cache)
        self.waiting = [request for request in self.waiting if request not in admitted]
        self.running += admitted
        assert plan.num_pages_used == len({page for request in self.running for page in request.pages} - {RELEASED})
        if plan.preempted:
            assert not admitted
        elif self.waiting and budget_left and len(self.running) < scheduler.max_num_seqs:
            # Some were unfinished only before they got what was left over.
            long = any(self.policy.is_long(r.num_tokens - rows[r].start - 1) for r in unfinished if r in rows)
            if not lacks_pages and not long and not any(r.num_tokens - r.num_computed_tokens > 1 for r in unfinished):
                self.check_head_must_wait(self.waiting[0], plan)

    def check_prefills(self, plan, num_left, *, beside_decode):
        """Check the share of prompts in a plan: no long one too much beside rows in decode, otherwise all there is."""
        rows = {row.request: row for row in rows_of(plan)}
        left_before = {row.request: row.request.num_tokens - row.start - (row.max_new > 0) for row in rows.values()}
        unfinished = [r for r in self.running if r.num_tokens - r.num_computed_tokens > 1]
        new = [request for request in unfinished if request not in num_left]
        if new:
            assert len(unfinished) <= self.policy.most_unfinished
        is_long = [self.policy.is_long(r.num_tokens - r.num_computed_tokens) for r in unfinished]
        if any(is_long[-len(new) :] if new else ()):
            assert sum(is_long) <= self.policy.most_long
        num_free = self.scheduler.num_pages - plan.num_pages_used
        in_decode = [request for request in self.running if request not in unfinished]
        num_kept = self.groups.size * sum(map(self.scheduler._ledger.can_grow, in_decode))
        for request in unfinished:
            has_pages = num_free >= num_kept + self.groups.size
            num_kept += self.scheduler._ledger.num_pages_kept(request)  # pages kept from younger prompts
            num_tokens = rows[request].num_tokens if request in rows else 0
            long = self.policy.is_long(left_before.get(request, 0))
            assert not (long and beside_decode) or num_tokens <= self.policy.long_chunk
            has_all = long and beside_decode and num_tokens == self.policy.long_chunk
            if plan.num_tokens < self.scheduler.max_num_batched_tokens:
                assert has_all or not has_pages or not num_tokens, "tokens were left over"

    def check_decodes(self, plan, decodes, budget_left):
        rows = {row.request: row for row in rows_of(plan)}
        missing = [request for request in decodes if request not in rows]
        if len(decodes) + len(plan.preempted) <= self.scheduler.max_num_batched_tokens - self.policy.prefill_share:
            assert plan.requests[: len(decodes)] == decodes, "a row in decode missed a step"
        if missing:
            no_page_left = plan.num_pages_used + self.groups.size > self.scheduler.num_pages
            assert not budget_left or no_page_left, "a row in decode missed a step for nothing"
            assert plan.num_prefill_tokens <= self.policy.prefill_share or no_page_left
        assert all(rows[request].num_tokens == 1 for request in decodes if request in rows)
        assert plan.num_decode_tokens == len(decodes) - len(missing)

    def check_several_steps(self, plan, decodes):
        assert plan.num_steps <= self.loop.max_steps
        if not plan.num_drafts:
            assert plan.num_steps == max(plan.max_new)
        assert plan.requests == decodes
        assert not self.waiting or len(self.running) == self.scheduler.max_num_seqs
        for request, most in zip(plan.requests, plan.max_new, strict=True):
            assert most == 1 or not request.waits_for_tokens
            assert request.num_tokens <= request.max_total_tokens
            assert len(request.pages) // self.groups.size * self.groups.page_size >= request.num_computed_tokens

    def check_head_must_wait(self, head, plan):
        num_free = self.scheduler.num_pages - plan.num_pages_used
        pages_short = (self.groups.num_columns(head.num_tokens) + len(self.running)) * self.groups.size > num_free
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


SchedulerMachine.TestCase.settings = settings(max_examples=examples(100), stateful_step_count=50, deadline=None)
TestSchedulerMachine = SchedulerMachine.TestCase


@pytest.mark.parametrize("seed", range(6))
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


def test_the_same_events_give_the_same_plans():
    def record():
        loop = Loop(make_scheduler(num_pages=10, max_num_batched_tokens=12), depth=1)
        loop.add(*(make_request(str(i), range(i + 3), 9) for i in range(8)))
        return [(plan.step_id, starts(plan)) for plan in loop.drain().plans]

    assert record() == record()


def test_step_ids_count_plans():
    loop = Loop(make_scheduler()).add(make_request("a", range(3)))
    assert loop.scheduler.has_unfinished()
    assert [plan.step_id for plan in loop.drain().plans] == [0, 1, 2, 3]
    assert loop.schedule() is None
    assert not loop.scheduler.has_unfinished()


# The budget


def test_a_long_prompt_is_computed_in_chunks_and_samples_at_the_end():
    loop = Loop(make_scheduler(max_num_batched_tokens=16)).add(make_request("a", range(40), 1))
    plans = loop.drain().plans
    assert [starts(plan)["a"] for plan in plans] == [(0, 16), (16, 16), (32, 8)]
    assert [plan.max_new[0] for plan in plans] == [0, 0, 1]
    assert [bool(plan.admitted) for plan in plans] == [True, False, False]


def test_decodes_go_on_while_a_long_prompt_is_computed():
    loop = Loop(make_scheduler(max_num_batched_tokens=16), depth=1).add(make_request("a", range(4), 20))
    loop.step()
    loop.add(make_request("b", range(50, 90), 4), make_request("c", range(9), 40))
    plans = [loop.step() for _ in range(4)]
    assert all(plan.requests[0].request_id == "a" for plan in plans)
    assert [plan.num_decode_tokens for plan in plans] == [1, 2, 2, 2]
    assert [starts(plan).get("b") for plan in plans] == [(0, 8), (8, 8), (16, 8), (24, 14)]
    assert starts(plans[0])["c"] == (4, 5)  # beside the long prompt; its first page is the one of "a"
    assert [request.request_id for request in plans[3].requests] == ["a", "c", "b"]


def in_decode(scheduler, num_rows, max_tokens=200):
    """A loop over rows that are all in decode."""
    loop = Loop(scheduler).add(*(make_request(str(i), [i], max_tokens) for i in range(num_rows)))
    loop.step()
    assert scheduler.num_running == num_rows
    return loop


def test_a_prompt_has_its_share_where_rows_in_decode_could_take_the_whole_budget():
    loop = in_decode(make_scheduler(64, 64, 16, 256), num_rows=63)
    long = make_request("long", [5] * 200, 4)
    loop.add(long)
    before = {request: len(request.output_token_ids) for request in loop.scheduler._ledger.running.values()}
    plans = []
    while not long.output_token_ids:
        plans.append(loop.step())
    assert len(plans) == 200 // 8
    assert all((plan.num_prefill_tokens, plan.num_decode_tokens) == (8, 56) for plan in plans)
    num_new = [len(request.output_token_ids) - before[request] for request in before]
    assert max(num_new) - min(num_new) <= 1, "rows in decode take turns"


def test_what_prompts_leave_of_their_share_goes_to_rows_in_decode():
    loop = in_decode(make_scheduler(64, 64, 16, 256), num_rows=63)
    loop.add(make_request("short", [5] * 3, 4))
    plan = loop.step()
    assert (plan.num_prefill_tokens, plan.num_decode_tokens) == (3, 61)
    assert (plan := loop.step()).num_decode_tokens == 64
    assert starts(plan)["short"] == (3, 1)


def test_rows_in_decode_are_not_held_back_for_prompts_that_find_no_pages():
    loop = in_decode(make_scheduler(32, 32, 4, num_pages=62), num_rows=31, max_tokens=12)
    loop.add(make_request("long", [5] * 100, 4))
    assert loop.step().num_decode_tokens == 31


def test_no_more_requests_run_than_there_are_slots():
    loop = Loop(make_scheduler(max_num_seqs=2)).add(*(make_request(str(i), [i]) for i in range(3)))
    assert list(starts(loop.step())) == ["0", "1"]
    assert (loop.scheduler.num_running, loop.scheduler.num_waiting) == (2, 1)
    loop.scheduler.finish("0", FinishReason.ABORT)
    assert list(starts(loop.step())) == ["1", "2"]


# Prefix sharing


@pytest.mark.parametrize("depth", [0, 1])
def test_requests_submitted_together_compute_their_common_prefix_once(depth):
    loop = Loop(make_scheduler(64, 2048, 16, 1024, 1024), depth)
    prefix = [i % 7 for i in range(512)]
    loop.add(*(make_request(str(i), [*prefix, 10 + i, 10 + i], 2) for i in range(64)))
    plans = loop.drain().plans
    assert plans[0].num_prefill_tokens == 514 + 2 * 63
    assert plans[0].num_cached_tokens == 512 * 63
    assert num_computed(plans) == 512 + 64 * (2 + 1)


def test_siblings_share_the_pages_of_their_prompt():
    loop = Loop(make_scheduler())
    siblings = [make_request(f"a-{i}", range(10), 6) for i in range(4)]
    loop.add(*siblings)
    assert starts(loop.step()) == {"a-0": (0, 10)} | {f"a-{i}": (8, 2) for i in (1, 2, 3)}
    assert all(request.pages[:2] == siblings[0].pages[:2] for request in siblings)
    assert len({request.pages[2] for request in siblings}) == 4
    assert [request.num_cached_tokens for request in siblings] == [0, 8, 8, 8]
    loop.drain()


@pytest.mark.parametrize(("num_prompts", "prompt_len", "max_tokens"), [(64, 100, 16), (24, 250, 6), (8, 33, 4)])
def test_siblings_take_no_more_steps_than_prompts_of_their_own(num_prompts, prompt_len, max_tokens):
    def num_steps(prompts):
        loop = Loop(make_scheduler(256, 512, 16, 4096, 512), depth=1)
        loop.add(*(make_request(str(i), prompt, max_tokens) for i, prompt in enumerate(prompts))).drain()
        return len(loop.plans), num_computed(loop.plans)

    def prompt(first):
        return [first, *range(prompt_len - 1)]

    (shared, num_shared_tokens), (single, num_single_tokens) = (
        num_steps([prompt(i // n) for i in range(2 * num_prompts)]) for n in (2, 1)
    )
    assert shared <= single
    assert num_single_tokens - num_shared_tokens == num_prompts * (prompt_len // 16) * 16


@pytest.mark.parametrize("depth", [0, 1])
def test_siblings_of_a_prompt_in_chunks_compute_it_once(depth):
    loop = Loop(make_scheduler(max_num_batched_tokens=16), depth)
    loop.add(*(make_request(f"a-{i}", range(40), 2) for i in range(3)), make_request("b", range(50, 54), 1)).drain()
    assert starts(loop.plans[0]) == {"a-0": (0, 12), "b": (0, 4)}, "a request with another prompt goes past them"
    assert starts(loop.plans[1]) == {"a-0": (12, 16)}
    assert starts(loop.plans[2]) == {"a-0": (28, 12), "a-1": (36, 4)}
    assert starts(loop.plans[3])["a-2"] == (36, 4)


@pytest.mark.parametrize("num_prompt", [3, 6])
def test_reset_forgets_cached_prefixes_and_what_running_requests_build_on_them(num_prompt):
    loop = Loop(make_scheduler(), depth=1)
    running = make_request("a", range(num_prompt), 20)
    loop.add(running)
    loop.step()
    loop.scheduler.reset_prefix_cache()
    for _ in range(12):
        loop.step()
    loop.add(make_request("b", running.tokens(0, 13), 1))
    assert starts(loop.step())["b"] == (0, 13)
    loop.drain()
    loop.add(make_request("c", running.tokens(0, 13), 1)).drain()
    assert starts(loop.plans[-1]) == {"c": (12, 1)}  # found in "b", which started after the reset


# Preemption


def test_the_last_admitted_gives_way_and_finds_its_pages_again():
    loop = Loop(make_scheduler(max_num_seqs=2, page_size=2, num_pages=8))
    old, young = make_request("old", [1, 1, 1], 12), make_request("young", [2, 2, 2], 12)
    loop.add(old, young, make_request("next", [3], 1))
    while not young.num_preemptions:
        plan = loop.step()
    assert plan.preempted == [young]
    assert list(starts(plan)) == ["old"]
    assert young.status is RequestStatus.WAITING
    assert loop.scheduler.num_waiting == 2
    num_before = num_computed(loop.plans)
    loop.drain()
    order = [request.request_id for plan in loop.plans for request in plan.admitted]
    assert order == ["old", "young", "young", "next"]
    assert (old.output_token_ids, young.output_token_ids) == (generate_alone(old)[0], generate_alone(young)[0])
    assert num_computed(loop.plans) > num_before


def test_a_preempted_request_waits_in_its_place_until_its_tokens_are_known():
    loop = Loop(make_scheduler(page_size=1, num_pages=8), depth=1)
    old, young = make_request("old", [1, 1], 4), make_request("young", [2, 2], 6)
    loop.add(old, young)
    while not young.num_preemptions:
        loop.schedule()
        if len(loop.in_flight) == 2 and not young.num_preemptions:
            loop.update()
    loop.add(make_request("next", [3], 1))
    loop.scheduler.finish("old", FinishReason.ABORT)
    assert young.num_pending_tokens == 1
    assert loop.schedule() is None
    while young.num_pending_tokens:
        assert loop.schedule() is None
        loop.update()
    assert list(starts(loop.schedule())) == ["young", "next"]
    loop.drain()
    assert young.output_token_ids == generate_alone(young)[0]


def test_a_preempted_request_may_get_fewer_tokens_than_planned():
    scheduler = make_scheduler(page_size=1, num_pages=12)
    old, young = make_request("old", [1, 1], 8), make_request("young", [2, 2], 8)
    for request in (old, young):
        scheduler.add(request)
    plans = [scheduler.schedule(), scheduler.schedule(2)]
    while not young.num_preemptions:
        plans.append(scheduler.schedule())
    scheduler.update(plans[0], [[0], [0]])
    assert plans[1].max_new == [2, 2]
    scheduler.update(plans[1], [[0, 0], [0]])
    scheduler.check_integrity()
    assert young.num_pending_tokens == len(plans) - 3


def test_a_preempted_request_may_end_while_it_waits():
    scheduler = make_scheduler(page_size=1, num_pages=8)
    old, young = make_request("old", [1, 1], 6), make_request("young", [2, 2], 6, stop_ids=frozenset([4]))
    for request in (old, young):
        scheduler.add(request)
    plans = [scheduler.schedule()]
    while not young.num_preemptions:
        plans.append(scheduler.schedule())
    assert young.num_pending_tokens == 3
    scheduler.update(plans[0], [[0], [4]])
    assert (young.status, young.output_token_ids) == (RequestStatus.FINISHED, [4])
    scheduler.update(plans[1], [[0], [4]])
    assert scheduler.num_wasted_tokens == 1
    scheduler.check_integrity()


def test_admission_leaves_a_page_to_each_running_row():
    loop = Loop(make_scheduler(page_size=4, num_pages=4))
    loop.add(*(make_request(i, [ord(i)] * 4, 5) for i in "abc"))
    assert list(starts(loop.step())) == ["a", "b"]
    loop.drain()
    assert all(not plan.preempted for plan in loop.plans)


def test_rows_that_cannot_grow_need_no_reserve():
    loop = Loop(make_scheduler(page_size=4, num_pages=4))
    loop.add(*(make_request(i, [ord(i)], 4) for i in "abcd"))
    assert list(starts(loop.step())) == ["a", "b", "c", "d"]


# Ends


def test_the_length_limit_wastes_nothing_however_far_ahead_the_plans_are():
    for depth in (0, 1, 2):
        loop = Loop(make_scheduler(), depth)
        request = make_request("a", range(5), 7)
        loop.add(request).drain()
        assert request.finish_reason is FinishReason.LENGTH
        assert len(request.output_token_ids) == 7
        assert len(loop.plans) == 7
        assert loop.scheduler.num_wasted_tokens == 0


@pytest.mark.parametrize(("min_tokens", "num_output"), [(0, 1), (1, 2), (3, 4), (5, 5)])
def test_the_first_token_that_may_stop_follows_min_tokens(min_tokens, num_output):
    scheduler = make_scheduler()
    request = make_request("a", [1], 5, min_tokens=min_tokens, stop_ids=frozenset([7]))
    scheduler.add(request)
    while scheduler.has_unfinished():
        scheduler.update(scheduler.schedule(), [[7]])
    assert len(request.output_token_ids) == num_output
    assert request.finish_reason is (FinishReason.LENGTH if min_tokens == 5 else FinishReason.STOP)


def test_a_stop_found_one_step_late_wastes_one_token():
    scheduler = make_scheduler(page_size=2)
    request = make_request("a", [1, 2, 3], 20, stop_ids=frozenset([7]))
    scheduler.add(request)
    first, second = scheduler.schedule(), scheduler.schedule()
    assert scheduler.update(first, [[7]]) == [request]
    assert request.finish_reason is FinishReason.STOP
    assert scheduler.num_pages_used == 0
    assert scheduler.update(second, late := [[5]]) == []
    assert late == [[]]
    assert request.output_token_ids == [7]
    assert scheduler.num_wasted_tokens == 1
    scheduler.check_integrity()


def test_finish_ends_a_request_once():
    loop = Loop(make_scheduler(), depth=1)
    request = make_request("a", range(4), 9)
    loop.add(request)
    loop.step()
    loop.step()
    loop.scheduler.finish(request.request_id, FinishReason.STOP)
    loop.scheduler.finish(request.request_id, FinishReason.ABORT)
    assert request.finish_reason is FinishReason.STOP
    assert loop.scheduler.num_pages_used == 0
    loop.drain()
    assert loop.scheduler.num_wasted_tokens == 1


@pytest.mark.parametrize("num_steps", [0, 1, 2])
def test_abort_in_any_state(num_steps):
    loop = Loop(make_scheduler(max_num_batched_tokens=8), depth=1)
    request = make_request("a", range(12), 9)
    loop.add(request)
    for _ in range(num_steps):
        loop.step()
    assert loop.scheduler.finish("a", FinishReason.ABORT) is request
    assert (request.status, request.finish_reason) == (RequestStatus.FINISHED, FinishReason.ABORT)
    assert loop.scheduler.finish("a", FinishReason.ABORT) is None
    assert not loop.scheduler.has_unfinished()
    assert loop.schedule() is None
    loop.drain()


def test_an_id_can_be_used_again_while_steps_of_its_first_owner_are_in_flight():
    loop = Loop(make_scheduler(), depth=1)
    first, second = make_request("a", range(4), 5), make_request("a", range(4, 9), 5)
    loop.add(first)
    loop.step()
    loop.scheduler.finish("a", FinishReason.ABORT)
    loop.add(second).drain()
    assert first.output_token_ids == []
    assert second.output_token_ids == generate_alone(second)[0]


def test_abort_of_an_unknown_id_is_none():
    assert make_scheduler().finish("nobody", FinishReason.ABORT) is None


# Refusals


def test_a_request_that_cannot_fit_the_pool_is_refused_with_the_numbers():
    scheduler = make_scheduler(page_size=4, num_pages=4)
    scheduler.add(make_request("fits", range(10), 7))
    with pytest.raises(RequestError, match=r"10 prompt tokens and up to 8 new ones need 5 pages .* there are 4; lower"):
        scheduler.add(make_request("a", range(10), 8))
    assert scheduler.num_waiting == 1


def test_an_id_in_use_is_refused():
    scheduler = make_scheduler()
    scheduler.add(make_request("a", [1]))
    with pytest.raises(RequestError, match="unique among unfinished requests, got 'a' again"):
        scheduler.add(make_request("a", [1]))


@pytest.mark.parametrize(("prompt_len", "max_tokens"), [(0, 4), (4, 0), (250, 7)])
def test_lengths_out_of_range_are_refused(prompt_len, max_tokens):
    with pytest.raises(RequestError, match="at least 1 token and fewer than max_total_tokens <= max_model_len"):
        make_scheduler().add(make_request("a", range(prompt_len), max_tokens))


def test_plans_must_be_updated_in_order():
    scheduler = make_scheduler()
    scheduler.add(make_request("a", [1]))
    plans = [scheduler.schedule(), scheduler.schedule()]
    scheduler.update(plans[1], [[0]])
    with pytest.raises(AssertionError, match="in order"):
        scheduler.update(plans[0], [[0]])


# Cost


def test_the_length_of_the_queue_costs_schedule_nothing_and_aborts_little():
    def least_s(scheduler):  # seconds of this thread's own time, which a busy machine does not stretch
        times = []
        for _ in range(200):
            begin = time.thread_time()
            plan = scheduler.schedule()
            times.append(time.thread_time() - begin)
            scheduler.update(plan, [[0]] * plan.num_rows)
        return min(times)

    def loaded(num_waiting):
        scheduler = make_scheduler(max_num_seqs=8, page_size=16, num_pages=512)
        for i in range(8 + num_waiting):
            scheduler.add(make_request(str(i), [i % 5], 250))
        return scheduler

    short, long = loaded(10), loaded(30_000)
    assert least_s(long) < 5 * least_s(short)
    ids = [str(i) for i in range(30_008)]
    random.Random(0).shuffle(ids)
    begin = time.thread_time()
    for request_id in ids[:15_000]:
        long.finish(request_id, FinishReason.ABORT)
    half_s = time.thread_time() - begin
    for request_id in ids[15_000:]:
        long.finish(request_id, FinishReason.ABORT)
    assert time.thread_time() - begin < 10 * half_s
    assert not long.has_unfinished()
    long.check_integrity()
