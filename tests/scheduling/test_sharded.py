"""Rows divided among shards: random traffic on a simulated device with pages of each shard, and who goes where."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from simulation import VOCAB_SIZE, Loop, generate_alone, make_request, num_computed, rows_of

from jaxserve.scheduling.request import FinishReason, Request, RequestStatus
from jaxserve.scheduling.schedule_config import ScheduleConfig
from jaxserve.scheduling.scheduler import Scheduler
from jaxserve.scheduling.step_plan import StepChoice, Timing
from tests.random_runs import examples

REQUESTS = st.lists(
    st.fixed_dictionaries(
        {
            "prompt": st.builds(
                lambda num_common, tail: [1, 2, 3, 4, 3, 2, 1, 0, 1, 1, 2, 2][:num_common] + tail,
                st.integers(0, 12),
                st.lists(st.integers(0, 1), min_size=1, max_size=6),
            ),
            "max_tokens": st.integers(1, 12),
            "stop_ids": st.frozensets(st.integers(0, VOCAB_SIZE - 1), max_size=2),
            "waits_for_tokens": st.sampled_from([False, False, True]),
            "shares_last_page": st.booleans(),
            "priority": st.sampled_from([0, 0, 5]),
        }
    ),
    min_size=1,
    max_size=12,
)


def make(
    num_shards: int, seqs: int = 2, budget: int = 8, num_pages: int = 16, page_size: int = 2, **options: Any
) -> Scheduler:
    """Return a scheduler of shards with these sizes each."""
    sizes = (num_shards * seqs, num_shards * budget, 40, page_size, num_shards * num_pages)
    return Scheduler(ScheduleConfig(*sizes, num_data_shards=num_shards, **options))


def loop_of(scheduler: Scheduler, *args: int, **kwargs: bool) -> Loop:
    count = len(scheduler.shards)
    num_slots, num_pages = scheduler.sizes.max_num_seqs // count, scheduler.sizes.num_pages // count
    return Loop(scheduler, *args, **kwargs, first_page=lambda slot: slot // num_slots * num_pages)


@given(
    requests=REQUESTS,
    arrivals=st.lists(st.integers(0, 6), min_size=12, max_size=12),
    aborted=st.sets(st.integers(0, 11), max_size=2),
    num_shards=st.integers(2, 4),
    seqs=st.integers(1, 3),
    budget=st.integers(3, 10),
    num_pages=st.integers(15, 20),
    depth=st.integers(0, 2),
    max_steps=st.sampled_from([1, 4]),
    may_split=st.booleans(),
)
@settings(max_examples=examples(30), deadline=None)
def test_sharded_outputs_equal_those_of_each_request_alone(
    requests, arrivals, aborted, num_shards, seqs, budget, num_pages, depth, max_steps, may_split
):
    scheduler = make(num_shards, seqs, budget, num_pages)
    loop = loop_of(scheduler, depth, max_steps, may_split=may_split)
    made = [make_request(str(index), **fields) for index, fields in enumerate(requests)]
    for index, request in enumerate(made):
        for _ in range(arrivals[index]):
            if scheduler.has_unfinished() or loop.in_flight:
                loop.step()
        loop.add(request)
        if index in aborted:
            assert scheduler.finish(request.request_id, FinishReason.ABORT) is request
    loop.drain()
    for index, request in enumerate(made):
        assert request.status is RequestStatus.FINISHED
        if index not in aborted:
            assert (request.output_token_ids, request.finish_reason) == generate_alone(request)
    assert scheduler.num_pages_used == 0
    for plan in loop.plans:
        num_tokens = [0] * num_shards
        for row in rows_of(plan):
            num_tokens[row.slot // seqs] += row.num_tokens
        assert max(num_tokens) <= budget
        assert plan.num_even_tokens == num_shards * max(num_tokens), "each shard has as much of the token axis"


def test_requests_go_to_the_least_loaded_shard_or_their_prefix():
    scheduler = make(num_shards=4, seqs=4, budget=64, num_pages=20)
    loop = loop_of(scheduler)
    loop.add(*(make_request(str(index), [index % 5] * 8, 12) for index in range(8)))
    loop.step()
    assert [len(shard.ledger.running) for shard in scheduler.shards] == [2] * 4
    loop.drain()
    loop.add(make_request("first", [4, 3, 2, 1, 0] * 4, 4)).drain()
    [first] = {row.slot // 4 for plan in loop.plans[-1:] for row in rows_of(plan)}
    again = make_request("again", [*[4, 3, 2, 1, 0] * 4, 2], 4)
    loop.add(again).step()
    assert again.slot // 4 == first
    assert loop.plans[-1].num_cached_tokens == 20


def test_simultaneous_prefixes_are_each_computed_once():
    scheduler = make(num_shards=2, seqs=4, budget=64, num_pages=40)
    loop = loop_of(scheduler)
    prefixes = [[4, 3, 2, 1] * 5, [0, 1, 0, 2] * 5]
    loop.add(*(make_request(str(index), [*prefixes[index % 2], 1 + index // 2], 2) for index in range(8))).drain()
    num_prompt_tokens = 2 * 20 + 8  # each prefix, and the last token of each request
    assert num_computed(loop.plans) == num_prompt_tokens + 8, "the second token of each is computed from the first"
    assert {row.slot // 4 for plan in loop.plans for row in rows_of(plan)} == {0, 1}


def test_no_shard_is_idle_while_requests_wait_for_the_one_that_has_their_prefix():
    scheduler = make(num_shards=2, seqs=1, budget=16, num_pages=20)
    loop = loop_of(scheduler)
    long, *short = (make_request(str(index), [0] * 8 + [index], 2 if index else 30) for index in range(5))
    loop.add(long).step()
    loop.add(*short)
    num_steps = 0
    while any(request.status is not RequestStatus.FINISHED for request in short):
        loop.step()
        num_steps += 1
    assert num_steps <= 10, "two tokens of each of the short ones, one after the other on the other shard"
    assert long.status is RequestStatus.RUNNING
    loop.drain()


@pytest.mark.parametrize("num_shards", [2, 4])
def test_shards_share_the_slack_of_the_row_that_is_due_first(num_shards):
    scheduler = make(num_shards, seqs=4, budget=64, num_pages=200, targets=((0, 1.0, 0.1),))
    loop = loop_of(scheduler)
    row = make_request("row", [0], 30)
    loop.add(row)

    def num_prompt_tokens(now_s: float) -> list[int]:
        """Tokens of prompts by shard in the step that begins then, of which a token takes 1 ms."""
        plan = scheduler.schedule(StepChoice(timing=Timing(now_s, 0.01, 0.001, 0.0)))
        loop.in_flight.append((plan, loop.device.run(plan)))
        loop.update()
        counts = [0] * num_shards
        for each in rows_of(plan):
            counts[each.slot // 4] += 0 if each.request is row else each.num_tokens
        return counts

    num_prompt_tokens(0.95)
    loop.add(*(make_request(str(index), [index % 5] * 30, 2, priority=1) for index in range(3 * num_shards)))
    assert num_prompt_tokens(1.0495) == [40 // num_shards] * num_shards, "due at 1.1: 50 ms, of which a step takes 10"
    assert num_prompt_tokens(1.5) == [8] * num_shards, "late: the share that is reserved on each"
    loop.drain()
    assert (row.output_token_ids, row.finish_reason) == generate_alone(row)


def running_of(scheduler: Scheduler) -> list[list[str]]:
    """Ids of the running requests of each shard."""
    return [list(shard.ledger.running) for shard in scheduler.shards]


@pytest.mark.parametrize("has_prefix", [False, True])
def test_higher_classes_come_first_on_any_shard_with_capacity(has_prefix):
    scheduler = make(num_shards=2, seqs=1, budget=64, num_pages=20)
    loop = loop_of(scheduler)
    prefix = [0] * 20
    loop.add(make_request("long", [*prefix, 1], 18)).step()
    loop.add(make_request("short", [1] * 9, 4)).step()
    low, high = ([*prefix, 2], [*prefix, 3]) if has_prefix else ([2] * 9, [3] * 9)
    loop.add(make_request("low", low, 4, priority=5, arrival=1), make_request("high", high, 4, priority=0, arrival=2))
    while not any("high" in ids or "low" in ids for ids in running_of(scheduler)):
        loop.step()
    assert running_of(scheduler) == [["long"], ["high"]]
    loop.drain()


@pytest.mark.parametrize("comes_first", [True, False])
def test_lower_classes_give_way_on_whichever_shard_they_run(comes_first):
    scheduler = make(num_shards=2, seqs=1, budget=64, num_pages=20)
    loop = loop_of(scheduler)
    prefix = [0] * 20
    loop.add(make_request("long", [*prefix, 1], 18)).step()
    low = make_request("low", [1] * 9, 18, priority=5)
    high = make_request("high", [*prefix, 3], 4)
    if comes_first:  # it waits for the shard with its prefix; the other has begun nothing yet
        loop.add(make_request("short", [2] * 9, 1)).step()
        loop.add(low, high).step()
    else:
        loop.add(low).step()
        loop.add(high).step()
    assert running_of(scheduler) == [["long"], ["high"]]
    loop.drain()
    assert (low.output_token_ids, low.finish_reason) == generate_alone(low)


@pytest.mark.parametrize("depth", [0, 1])
def test_a_row_near_its_end_shortens_plans_only_if_its_shard_has_waiting_requests(depth):
    def num_steps(*late: Request) -> list[int]:
        scheduler = make(num_shards=2, seqs=1, budget=16, num_pages=40)
        loop = loop_of(scheduler, depth, max_steps=8)
        loop.add(make_request("short", [0] * 4, 4), make_request("long", [1] * 4, 34)).step()
        loop.add(*late).drain()
        return [plan.num_steps for plan in loop.plans]

    assert num_steps() == [1, 8, 8, 8, 8, 1], "the first token, and 33 more"
    assert max(num_steps(make_request("late", [2] * 4, 2))[:2]) <= 3, "the three tokens that the short one has left"
