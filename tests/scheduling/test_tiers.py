"""The life of a page where there is a tier below device memory: a slow one that fails and ends moves in any order."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from simulation import VOCAB_SIZE, Loop, generate_alone, make_request, make_scheduler, num_computed
from tiered import Tiers, flood, new_tiers

from jaxserve.api.cached_tokens import CachedTokens
from jaxserve.core.events import (
    CacheReset,
    Recovered,
    Withdrawn,
)
from jaxserve.scheduling.request import FinishReason, RequestStatus
from jaxserve.scheduling.step_plan import StepPlan
from tests.random_runs import examples

PROMPTS = st.builds(
    lambda first, num_common, tail: [first, *[1, 2, 3, 4, 3, 2, 1, 0, 1, 1, 2, 2, 3, 3, 4, 4][:num_common], *tail],
    st.sampled_from([5, 6, 7]),
    st.sampled_from([2, 7, 12, 15, 16]),
    st.lists(st.integers(0, 1), max_size=4),
)


class TierMachine(RuleBasedStateMachine):
    """Random traffic, moves that end late, in any order, well or not, and whatever else may happen meanwhile."""

    @initialize(
        max_num_seqs=st.integers(1, 5),
        more_budget=st.integers(0, 16),
        page_size=st.sampled_from([1, 2, 4]),
        num_pool_tokens=st.integers(32, 60),
        tier_pages=st.sampled_from([(2,), (100,), (100,), (5, 100), (100, 5)]),
        depth=st.integers(0, 2),
        max_steps=st.sampled_from([1, 1, 3]),
        windows=st.sampled_from([(None,), (None,), (3,), (None, 5), (2, None, 2, None)]),
        num_snapshots=st.sampled_from([None, None, None, 3]),
    )
    def start(self, max_num_seqs, more_budget, num_pool_tokens, windows, **sizes):
        budget = max_num_seqs + more_budget
        sizes |= {"num_pages": num_pool_tokens // sizes["page_size"] * len(windows), "windows": windows}
        self.tiers = Tiers(max_num_seqs=max_num_seqs, max_num_batched_tokens=budget, **sizes)

    @rule(
        prompts=st.lists(PROMPTS, min_size=1, max_size=3),
        max_tokens=st.integers(1, 10),
        stop_ids=st.frozensets(st.integers(0, VOCAB_SIZE - 1), max_size=1),
        salt=st.sampled_from([b"", b"", b"", b"tenant"]),
        tenant=st.sampled_from(["", "a"]),
        priority=st.sampled_from([0, 0, 1]),
        read_prefix_cache=st.sampled_from([True, True, True, False]),
        waits_for_tokens=st.sampled_from([False, False, True]),
        shares_last_page=st.sampled_from([False, True]),
        num_steps=st.integers(0, 8),
    )
    def add(self, prompts, max_tokens, num_steps, **fields):
        for prompt in prompts:
            request = make_request(str(len(self.tiers.requests)), prompt, max_tokens, **fields)
            if (
                self.tiers.scheduler.sizes.kv_groups.num_pages(request.max_total_tokens - 1)
                <= self.tiers.scheduler.sizes.num_pages
            ):
                self.tiers.add(request)
        self.step(num_steps)

    @precondition(lambda self: self.tiers.mover.counts["stored"])
    @rule(data=st.data(), tail=st.lists(st.integers(0, 1), max_size=4))
    def add_again(self, data, tail):
        """A request that goes on from one before, parts of which may have been evicted."""
        before = data.draw(st.sampled_from(self.tiers.requests)) if self.tiers.requests else None
        if before is not None and before.num_known_tokens < 28:
            self.add([before.tokens(0, before.num_known_tokens) + tail], 3, 1, salt=before.salt)

    @rule(num_steps=st.integers(1, 12))
    def step(self, num_steps):
        for _ in range(num_steps):
            self.tiers.step()

    @precondition(lambda self: self.tiers.mover.moves)
    @rule(data=st.data(), ok=st.sampled_from([True, True, True, False]))
    def end(self, data, ok):
        indices = range(len(self.tiers.mover.moves))
        self.tiers.end(*data.draw(st.sets(st.sampled_from(indices), min_size=1)), ok=ok)

    @precondition(lambda self: self.tiers.mover.moves)
    @rule(ok=st.sampled_from([True, True, False]))
    def end_all(self, ok):
        self.tiers.end_all(ok=ok)

    @precondition(lambda self: self.unfinished)
    @rule(data=st.data())
    def finish(self, data):
        loading = [request for request in self.unfinished if request.status is RequestStatus.LOADING]
        self.tiers.finish(data.draw(st.sampled_from(loading or self.unfinished)))

    @rule(what=st.sampled_from(["reset", "withdraw", "restart", *[""] * 6]))
    def disturb(self, what):
        tiers, scheduler = self.tiers, self.tiers.scheduler
        if what == "reset":
            scheduler.reset_prefix_cache()
            tiers.note(CacheReset())
        elif what == "withdraw":
            withdrawn = scheduler.withdraw()
            assert not any(request.num_kept_tokens or request.has_failed for request in withdrawn), "not in the log"
            tiers.note(Withdrawn())
            for request in withdrawn:
                tiers.requests.remove(request)
                tiers.add(request)
        elif what == "restart":
            tiers.in_flight.clear()
            for request in self.unfinished:
                request.status, request.finish_reason = RequestStatus.FINISHED, FinishReason.ABORT
            keys = [move.key for move in tiers.mover.moves]
            scheduler.restart()
            tiers.mover.forget()
            tiers.digest = 0
            tiers.note(Recovered())
            scheduler.transferred(keys, ok=True)  # they began before

    @property
    def unfinished(self):
        return [request for request in self.tiers.requests if request.status is not RequestStatus.FINISHED]

    @invariant()
    def nothing_is_lost(self):
        self.tiers.scheduler.check_integrity()

    def teardown(self):
        if not hasattr(self, "tiers"):
            return
        self.tiers.drain()
        for request in self.tiers.requests:
            output, _ = generate_alone(request)
            assert request.status is RequestStatus.FINISHED
            if request.finish_reason is not FinishReason.ABORT:
                assert request.output_token_ids == output
        self.tiers.replay()


TierMachine.TestCase.settings = settings(max_examples=examples(25), stateful_step_count=60, deadline=None)
TestTierMachine = TierMachine.TestCase


def test_evicted_pages_are_loaded_again():
    tiers = new_tiers()
    tiers.run("first", range(30))
    flood(tiers)
    again = tiers.add(make_request("again", range(30), 2))
    assert tiers.schedule() is None
    assert again.status is RequestStatus.LOADING
    assert [move.is_load for move in tiers.mover.moves] == [True] * 7
    tiers.end(*range(6))
    assert tiers.schedule() is None
    tiers.end(0)
    assert again.status is RequestStatus.WAITING
    tiers.drain()
    assert again.cached_tokens == CachedTokens(disk=28)
    tiers.replay()
    half = tiers.run("half", [*range(18), 99, 98])
    assert half.cached_tokens == CachedTokens(device=16)
    (plan,) = [plan for plan in tiers.plans if again in plan.admitted]
    assert (plan.cached_tokens, plan.num_sought_tokens) == (CachedTokens(disk=28), 30)
    (plan,) = [plan for plan in tiers.plans if half in plan.admitted]
    assert (plan.cached_tokens, plan.num_sought_tokens) == (CachedTokens(device=16), 4)


def test_cached_tokens_are_counted_by_the_tier_that_had_them():
    """Two blocks are in device memory, five are loaded, and the last load fails."""
    tiers = new_tiers()
    tiers.run("first", range(30))
    flood(tiers)
    tiers.run("start", range(9))
    loaded = tiers.mover.counts["loads"]
    again = tiers.add(make_request("again", range(30), 2))
    tiers.schedule()
    assert tiers.mover.counts["loads"] == loaded + 5
    tiers.end(4, ok=False)
    tiers.drain()
    assert again.cached_tokens == CachedTokens(device=8, disk=16)
    assert tiers.run("more", range(30)).cached_tokens == CachedTokens(device=28)


def test_other_requests_continue_while_one_loads():
    tiers = new_tiers(num_pages=24)
    tiers.run("first", range(30))
    for index in range(6):
        tiers.run(f"flood {index}", [90 + index] * 40)
    again = tiers.add(make_request("again", range(30), 2))
    other = tiers.add(make_request("other", range(50, 60), 2))
    while other.status is not RequestStatus.FINISHED:
        tiers.step()
        tiers.scheduler.check_integrity()
    assert again.status is RequestStatus.LOADING
    tiers.drain()


def test_pages_that_fail_to_load_are_computed():
    tiers = new_tiers()
    tiers.run("first", range(30))
    flood(tiers)
    again = tiers.add(make_request("again", range(30), 2))
    tiers.schedule()
    tiers.end(3, ok=False)
    tiers.end_all()
    tiers.drain()
    assert again.num_cached_tokens == 12
    assert again.output_token_ids == generate_alone(again)[0]


def test_a_request_loads_only_once_in_vain():
    """Whatever the tier says then."""
    tiers = new_tiers()
    tiers.run("first", range(30))
    flood(tiers)
    vars(tiers.scheduler._transfers)["_delete"] = lambda number, content, stored_by: None
    again = tiers.add(make_request("again", range(30), 2))
    tiers.schedule()
    assert again.status is RequestStatus.LOADING
    tiers.end_all(ok=False)
    assert again in tiers.schedule().requests
    tiers.drain()


def test_two_requests_wait_for_one_load():
    tiers = new_tiers()
    tiers.run("first", range(30))
    flood(tiers)
    twins = [tiers.add(make_request(name, range(30), 2)) for name in ("a", "b")]
    tiers.schedule()
    assert [twin.status for twin in twins] == [RequestStatus.LOADING] * 2
    assert tiers.mover.counts["loads"] == 7
    tiers.finish(twins[0])
    tiers.drain()
    assert twins[1].num_cached_tokens == 28


def test_pages_loaded_for_an_ended_request_are_cached():
    tiers = new_tiers()
    tiers.run("first", range(30))
    flood(tiers)
    again = tiers.add(make_request("again", range(30), 2))
    tiers.schedule()
    tiers.finish(again)
    tiers.scheduler.check_integrity()
    assert (again.pages, tiers.scheduler.num_pages_used) == ([], 7)
    tiers.end(0, ok=False)
    tiers.end_all()
    tiers.scheduler.check_integrity()
    assert tiers.scheduler.num_pages_used == 0
    assert tiers.run("third", range(30)).num_cached_tokens == 0
    assert tiers.mover.counts["loads"] == 7


def test_pages_of_other_weights_are_not_found_in_any_tier():
    tiers = new_tiers()
    tiers.run("first", range(30))
    flood(tiers)
    again = tiers.add(make_request("again", range(30), 2))
    tiers.schedule()
    tiers.scheduler.reset_prefix_cache()
    tiers.end_all()
    tiers.drain()
    assert again.num_cached_tokens == 0


@pytest.mark.parametrize(("depth", "max_steps"), [(0, 1), (1, 1), (2, 3)])
@pytest.mark.parametrize("page_size", [1, 4])
@pytest.mark.parametrize(("windows", "num_snapshots"), [((None,), None), ((None, 6), None), ((None,), 8)])
def test_swapped_requests_compute_nothing_again(depth, max_steps, page_size, windows, num_snapshots):
    """Rows that outgrow the pool give way, with plans in flight before their last page is full."""
    sizes = {"page_size": page_size, "num_pages": (64 // page_size + 1) * len(windows), "windows": windows}
    tiers = new_tiers(depth=depth, max_steps=max_steps, num_snapshots=num_snapshots, **sizes)
    requests = [tiers.add(make_request(str(i), [10 + i] * (5 + i % 4), 30)) for i in range(8)]
    tiers.drain()
    num_swapped = sum(request.num_preemptions for request in requests)
    assert num_swapped > 3
    assert tiers.device.num_computed == sum(each.max_total_tokens - 1 for each in requests)
    assert [request.output_token_ids for request in requests] == [generate_alone(request)[0] for request in requests]
    assert tiers.mover.counts["loaded"] > 3
    assert (tiers.mover.counts["kept"] > 3) == (num_snapshots is not None)
    tiers.replay()


def test_a_beam_starts_without_the_last_page_of_a_swapped_request_if_a_copy_of_it_does_not_fit():
    """The only state is the one after that page, so that the full pages before it are computed again."""
    tiers = Tiers(page_size=2, num_pages=7, num_snapshots=1, tier_pages=(40,))
    other = tiers.add(make_request("other", [9, 9], 5))
    tiers.step()
    swapped = tiers.add(make_request("swapped", [1, 2, 3, 4, 5, 6], 4))
    tiers.step()
    tiers.step()
    tiers.end_all()
    tiers.scheduler.shards[0].ledger.preempt(swapped, StepPlan(0))
    tiers.finish(swapped)
    tiers.end_all()
    beam = tiers.add(make_request("beam", [*swapped.tokens(0, 7), 8], 3, shares_last_page=True))
    tiers.step()
    assert (beam.status, beam.num_cached_tokens) == (RequestStatus.RUNNING, 0)
    tiers.drain()
    assert [each.output_token_ids for each in (other, beam)] == [generate_alone(each)[0] for each in (other, beam)]


def test_without_a_tier_preempted_requests_recompute_evicted_pages():
    loop = Loop(make_scheduler(4, 64, 4, 16, 64))
    requests = [make_request(str(i), [10 + i] * 6, 30) for i in range(8)]
    loop.add(*requests).drain()
    assert num_computed(loop.plans) > sum(request.max_total_tokens - 1 for request in requests)


@pytest.mark.parametrize("ok", [True, False])
@pytest.mark.parametrize("num_steps", range(4))
def test_a_swapped_request_can_be_cancelled_at_any_time(num_steps, ok):
    tiers = new_tiers(num_pages=16)
    requests = [tiers.add(make_request(str(i), [10 + i] * 6, 30)) for i in range(4)]
    while not any(request.num_preemptions for request in requests):
        tiers.step()
    swapped = next(request for request in requests if request.num_preemptions)
    for _ in range(num_steps):
        tiers.end_all(ok=ok)
        tiers.step()
    tiers.finish(swapped)
    tiers.scheduler.check_integrity()
    assert swapped.pages == []
    tiers.drain()
    assert all(request.output_token_ids == generate_alone(request)[0] for request in requests if request is not swapped)


def test_a_swapped_request_that_is_withdrawn_is_a_new_one_elsewhere():
    tiers = new_tiers(num_pages=16)
    requests = [tiers.add(make_request(str(i), [10 + i] * 6, 30)) for i in range(4)]
    while not any(request.num_kept_tokens for request in requests):
        tiers.step()
    withdrawn = tiers.scheduler.withdraw()
    assert withdrawn
    assert {(request.num_kept_tokens, request.status) for request in withdrawn} == {(0, RequestStatus.WAITING)}
