"""Plans of the scheduler: budget, preemption, ends and refusals of requests, and their cost."""

import random
import time

import pytest
from simulation import Loop, generate_alone, make_request, make_scheduler, num_computed, starts

from jaxserve.errors import RequestError
from jaxserve.scheduling.request import FinishReason, RequestStatus
from jaxserve.scheduling.step_plan import StepChoice


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


def test_decoding_continues_while_a_long_prompt_is_computed():
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


def test_prompts_keep_their_reserve_when_decoding_rows_could_take_the_budget():
    loop = in_decode(make_scheduler(64, 64, 16, 256), num_rows=63)
    long = make_request("long", [5] * 200, 4)
    loop.add(long)
    before = {request: len(request.output_token_ids) for request in loop.scheduler.shards[0].ledger.running.values()}
    plans = []
    while not long.output_token_ids:
        plans.append(loop.step())
    assert len(plans) == 200 // 8
    assert all((plan.num_prefill_tokens, plan.num_decode_tokens) == (8, 56) for plan in plans)
    num_new = [len(request.output_token_ids) - before[request] for request in before]
    assert max(num_new) - min(num_new) <= 1, "rows in decode take turns"


def test_unused_prompt_reserve_goes_to_decoding_rows():
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


def test_a_preempted_request_keeps_its_position_until_its_tokens_are_known():
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
    plans = [scheduler.schedule(), scheduler.schedule(StepChoice(2))]
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

    short, long = loaded(10), loaded(10_000)
    assert least_s(long) < 5 * least_s(short)
    ids = [str(i) for i in range(10_008)]
    random.Random(0).shuffle(ids)
    begin = time.thread_time()
    for request_id in ids[:5_000]:
        long.finish(request_id, FinishReason.ABORT)
    half_s = time.thread_time() - begin
    for request_id in ids[5_000:]:
        long.finish(request_id, FinishReason.ABORT)
    assert time.thread_time() - begin < 10 * half_s
    assert not long.has_unfinished()
    long.check_integrity()


def test_appended_tokens_of_many_rows_take_a_look_at_each_row(monkeypatch):
    scheduler = make_scheduler(max_num_seqs=40, max_num_batched_tokens=400, num_pages=400)
    requests = [make_request(str(n), [n], 50, waits_for_tokens=True, may_be_extended=True) for n in range(40)]
    for request in requests:
        scheduler.add(request)
    plan = scheduler.schedule()
    scheduler.update(plan, [[1] * most for most in plan.max_new])
    for request in requests:
        scheduler.extend(request.request_id, [2, 3, 4])
    ledger, looks = scheduler.shards[0].ledger, []
    can_grow = ledger.can_grow
    monkeypatch.setattr(ledger, "can_grow", lambda request: looks.append(request) or can_grow(request))
    plan = scheduler.schedule()
    assert plan.counts == [4] * 40
    assert len(looks) < 10 * len(requests)
