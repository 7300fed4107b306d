"""Eviction under hints, against a naive search, and in a page store."""

import math
import random

from hypothesis import given, settings
from hypothesis import strategies as st
from simulation import Loop, make_request, make_scheduler

from jaxserve.api.reuse_hint import NOT_AGAIN, ReuseHint
from jaxserve.scheduling.kv_cache.turns import ReuseOrder, Turn
from tests.random_runs import examples

HINTS = st.builds(ReuseHint, st.just("g"), st.sampled_from([0.0, 3.0, 20.0, NOT_AGAIN]), st.sampled_from([5.0, 30.0]))


class Naive:
    """The rule without any index: a list with all pages as they were released."""

    def __init__(self):
        self.released = []  # page, turn or None
        self.replaced = []

    def add(self, page, turn):
        (self.replaced if turn is not None and turn.due_s == math.inf else self.released).append((page, turn))

    def first(self, now_s):
        expired = [(turn.until_s, page) for page, turn in self.released if turn is not None and turn.until_s < now_s]
        if expired:  # seen now, and without a hint from now on: the latest that ended goes first
            last = {}
            for until_s, page in expired:
                last.setdefault(until_s, []).append(page)
            order = [page for until_s in sorted(last, reverse=True) for page in last[until_s]]
            self.released = [(page, turn) for page, turn in self.released if page not in order]
            self.released = [(page, None) for page in order] + self.released
        if self.replaced:
            return self.replaced[0][0]
        plain = [page for page, turn in self.released if turn is None]
        if plain:
            return plain[0]
        distance = max(abs(turn.due_s - now_s) for _, turn in self.released)
        return next(page for page, turn in self.released if abs(turn.due_s - now_s) == distance)

    def remove(self, page):
        self.released = [each for each in self.released if each[0] != page]
        self.replaced = [each for each in self.replaced if each[0] != page]


@settings(max_examples=examples(200))
@given(hints=st.lists(st.none() | HINTS, min_size=1, max_size=12), seed=st.integers(0, 2**32))
def test_the_page_that_is_needed_last_goes_first(hints, seed):
    rng, order, naive = random.Random(seed), ReuseOrder(), Naive()
    pages, now_s, turns = iter(range(1000)), 0.0, {}
    for hint in hints:
        now_s += rng.choice([0.7, 1.9, 6.3])
        turn = None if hint is None else Turn(hint, now_s + rng.random() / 100)  # no two at the same time
        for page in [next(pages) for _ in range(rng.randint(1, 3))]:
            turns[page] = turn
            order.add(page, turn)
            naive.add(page, turn)
        for _ in range(rng.randint(0, 2)):
            if not order:
                break
            first = order.first(now_s)
            assert first == naive.first(now_s)
            assert sorted(order) == sorted([page for page, _ in naive.released + naive.replaced])
            page = first if rng.random() < 0.7 else rng.choice(list(order))
            order.remove(page, turns[page])
            naive.remove(page)
    while order:
        page = order.first(now_s)
        assert page == naive.first(now_s)
        order.remove(page, turns[page])
        naive.remove(page)


class Pool:
    """Scheduler with 16 pages for 4 tokens each, whose clock the test sets."""

    def __init__(self):
        self.loop = Loop(make_scheduler(num_pages=16, page_size=4, max_model_len=64))
        self.number = 0

    def run(self, prompt, hint=None, at_s=0.0, num_tokens=1, tenant=""):
        self.number += 1
        request = make_request(str(self.number), prompt, num_tokens, reuse=hint, arrival_s=at_s, tenant=tenant)
        self.loop.add(request).drain()
        return request

    def cached(self, prompt):
        store = self.loop.scheduler.shards[0].ledger.store
        return len(store.index.match(make_request("look", prompt))) * 4


def test_a_hint_outlives_other_prompts_while_it_counts():
    pool, mine = Pool(), list(range(33))
    pool.run(mine, ReuseHint("a"))
    for index in range(6):
        pool.run([40 + index] * 20, at_s=200.0)
    assert pool.cached(mine) == 32
    pool.run([60] * 5, at_s=301.0)  # the hint is too old
    for index in range(4):
        pool.run([70 + index] * 20, at_s=301.0)
    assert pool.cached(mine) == 0


def test_without_a_hint_the_least_recently_used_goes_first():
    pool, mine = Pool(), list(range(33))
    pool.run(mine)
    for index in range(4):
        pool.run([40 + index] * 20)
    assert pool.cached(mine) == 0


def test_a_turn_that_continues_replaces_the_output_of_the_one_before():
    """The reasoning of the first turn is not sent back."""
    pool, first = Pool(), list(range(16))
    turn = pool.run(first, ReuseHint("a"), num_tokens=13)
    later = [*first, 90, 91, 92, 93, 94, 95, 96, 97, 98]
    pool.run(later, ReuseHint("a"))
    other = [50] * 17
    pool.run(other, ReuseHint("b"))
    assert pool.cached([*first, *turn.output_token_ids]) == 28
    pool.run([60] * 21)
    assert pool.cached(later) == 24
    assert pool.cached(other) == 16
    assert pool.cached([*first, *turn.output_token_ids]) == 16


def test_a_branch_replaces_nothing():
    """Subagents have the name of their session, and other prompts."""
    pool, first = Pool(), list(range(16))
    pool.run(first, ReuseHint("a"), num_tokens=9)
    pool.run([80, *first], ReuseHint("a"))
    order = pool.loop.scheduler.shards[0].ledger.store.order
    assert not order._evictable[""]._replaced


def test_the_end_of_one_session_spares_what_others_use():
    pool, system = Pool(), list(range(16))
    pool.run([*system, *[70] * 8], ReuseHint("a"))
    pool.run([*system, *[71] * 8], ReuseHint("b"))
    pool.run([*system, *[70] * 12], ReuseHint("a", NOT_AGAIN))
    pool.run([50] * 37)
    assert pool.cached([*system, *[70] * 12]) == 16
    assert pool.cached([*system, *[71] * 8]) == 20


def test_hints_of_one_tenant_do_not_touch_anothers_pages():
    pool, mine = Pool(), list(range(25))
    pool.run(mine, tenant="quiet")
    for index in range(8):
        pool.run([40 + index] * 17, ReuseHint(str(index)), tenant="loud")
    assert pool.cached(mine) == 24
