"""Plans of several steps, and rows that wait: the scheduler plans upper bounds and takes what really happened."""

import pytest
from simulation import Loop, generate_alone, make_request, make_scheduler, starts

from jaxserve.api.sampling_params import SamplingParams
from jaxserve.scheduling.request import FinishReason, RequestStatus
from jaxserve.scheduling.step_plan import StepChoice


def lengths(loop):
    return [plan.num_steps for plan in loop.plans]


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_decoding_rows_continue_until_the_last_ends(depth):
    loop = Loop(make_scheduler(), depth, max_steps=4)
    loop.add(make_request("a", range(5), 7), make_request("b", range(3), 14)).drain()
    assert lengths(loop) == [1, 4, 4, 4, 1]
    assert [plan.max_new for plan in loop.plans] == [[1, 1], [4, 4], [2, 4], [4], [1]]
    assert loop.scheduler.num_wasted_tokens == 0


def test_one_step_at_a_time_while_someone_may_join():
    loop = Loop(make_scheduler(max_num_seqs=2, num_pages=4), max_steps=4)
    loop.add(make_request("a", range(8), 6))
    loop.step()
    loop.add(make_request("b", range(10, 15), 9))  # pages are short
    assert [loop.step().num_steps for _ in range(3)] == [1, 1, 1]
    loop.scheduler.finish("b", FinishReason.ABORT)
    assert loop.step().num_steps == 2


def test_several_steps_run_while_no_slot_is_free_and_end_with_the_first_row():
    loop = Loop(make_scheduler(max_num_seqs=2), max_steps=4)
    loop.add(make_request("a", [0], 4), *(make_request(str(i), [i], 6) for i in range(1, 4))).drain()
    assert lengths(loop)[:3] == [1, 3, 1]  # "a" ends, and "2" takes its slot
    assert loop.plans[2].admitted


def test_a_newcomer_waits_for_the_plans_that_were_made():
    loop = Loop(make_scheduler(), depth=1, max_steps=4).add(make_request("a", range(5), 40))
    for _ in range(3):
        loop.step()
    assert lengths(loop) == [1, 4, 4]
    loop.add(make_request("b", range(7), 2))
    assert "b" in starts(loop.step())


@pytest.mark.parametrize("params", [{}, {"stop": "x"}, {"logprobs": 0}])
def test_stop_strings_and_logprobs_of_a_row_cost_the_others_nothing(params):
    loop = Loop(make_scheduler(), max_steps=4)
    special = make_request("a", range(3), 6)
    special.params = SamplingParams(max_tokens=None, **params)
    loop.add(special, make_request("b", range(5), 16)).drain()
    assert lengths(loop) == [1, 4, 4, 4, 3]


def test_no_more_pages_are_taken_than_are_free():
    loop = Loop(make_scheduler(page_size=1, num_pages=16), max_steps=8)
    loop.add(make_request("a", [1, 1], 14), make_request("b", [2, 2], 14))
    loop.step()
    assert loop.step().num_steps == 4  # 12 pages are free, 8 steps need 16
    assert loop.step().num_steps == 2
    assert loop.step().preempted
    loop.drain()


@pytest.mark.parametrize("depth", [0, 1])
def test_a_row_that_stops_leaves_the_others_as_they_are(depth):
    loop = Loop(make_scheduler(page_size=2), depth, max_steps=8)
    output, _ = generate_alone(make_request("a", [1, 2, 3], 20))
    stop = next(i for i in range(2, 8) if output[i] not in output[:i])  # lies within the first plan of several
    ending = make_request("a", [1, 2, 3], 20, stop_ids=frozenset([output[stop]]))
    other = make_request("b", [4, 2, 1], 20)
    loop.add(ending, other).drain()
    assert (ending.finish_reason, ending.output_token_ids) == (FinishReason.STOP, output[: stop + 1])
    assert other.output_token_ids == generate_alone(other)[0]
    assert lengths(loop) == [1, 8, 8, 3]
    assert loop.scheduler.num_wasted_tokens == 0


def test_a_stop_that_the_device_missed_is_found_by_the_host():
    scheduler = make_scheduler()
    request, other = make_request("a", [1], 20, stop_ids=frozenset([7])), make_request("b", [2], 20)
    scheduler.add(request)
    scheduler.add(other)
    scheduler.update(scheduler.schedule(StepChoice(4)), [[5], [5]])
    plan = scheduler.schedule(StepChoice(4))
    sampled = [[5, 7, 5, 6], [5, 5, 5, 6]]
    assert scheduler.update(plan, sampled) == [request]
    assert sampled == [[5, 7], [5, 5, 5, 6]]
    assert (request.output_token_ids, other.output_token_ids) == ([5, 5, 7], [5, 5, 5, 5, 6])
    assert scheduler.num_wasted_tokens == 2
    scheduler.check_integrity()


def test_a_row_with_fewer_tokens_than_planned_continues_from_there():
    """Some tokens are rejected, as those of a draft: plans behind them stay upper bounds."""
    scheduler, request = make_scheduler(page_size=2), make_request("a", [1], 20)
    scheduler.add(request)
    scheduler.update(scheduler.schedule(StepChoice(4)), [[5]])
    first, second = scheduler.schedule(StepChoice(4)), scheduler.schedule(StepChoice(4))
    assert (first.starts, second.starts) == ([1], [5])
    assert scheduler.update(first, [[6, 6]]) == []
    assert (request.num_computed_tokens, request.num_known_tokens) == (7, 4)
    third = scheduler.schedule(StepChoice(4))
    assert third.starts == [7]
    scheduler.update(second, [[7, 7, 7, 7]])
    scheduler.update(third, [[8]])
    assert (request.num_computed_tokens, request.num_pending_tokens) == (8, 0)
    assert request.output_token_ids == [5, 6, 6, 7, 7, 7, 7, 8]
    scheduler.check_integrity()


def test_more_than_planned_is_a_bug():
    scheduler = make_scheduler()
    scheduler.add(make_request("a", [1], 20))
    with pytest.raises(AssertionError, match="may sample 1 tokens cannot have sampled 2"):
        scheduler.update(scheduler.schedule(StepChoice(4)), [[5, 5]])


def test_any_plan_may_be_made_beside_one_of_several_steps():
    scheduler, request = make_scheduler(), make_request("a", [1], 20, stop_ids=frozenset([7]))
    scheduler.add(request)
    scheduler.update(scheduler.schedule(StepChoice(4)), [[5]])
    first, second = scheduler.schedule(StepChoice(4)), scheduler.schedule(StepChoice(4))
    newcomer = make_request("b", [2], 20)
    scheduler.add(newcomer)
    third = scheduler.schedule(StepChoice(4))
    assert [starts(plan) for plan in (first, second, third)] == [
        {"a": (1, 1)},
        {"a": (5, 1)},
        {"a": (9, 1), "b": (0, 1)},
    ]
    assert scheduler.update(first, [[5, 7]]) == [request]
    assert request.finish_reason is FinishReason.STOP
    assert scheduler.update(second, [[]]) == []  # the row has stopped on the device
    assert scheduler.update(third, [[], [5]]) == []
    assert scheduler.num_wasted_tokens == 0
    scheduler.check_integrity()


def test_tokens_in_flight_of_an_aborted_request_are_dropped():
    loop = Loop(make_scheduler(), depth=1, max_steps=4).add(make_request("a", range(4), 9), make_request("b", [1], 9))
    loop.step()
    assert loop.step().num_steps == 4
    loop.scheduler.finish("a", FinishReason.ABORT)
    loop.scheduler.check_integrity()
    loop.drain()
    assert loop.scheduler.num_wasted_tokens == 4


def test_a_page_is_found_only_when_it_is_computed():
    """The token that ends a sequence is known but not computed, whatever was planned behind it."""
    scheduler, request = make_scheduler(page_size=2), make_request("a", [1], 20, stop_ids=frozenset([7]))
    scheduler.add(request)
    scheduler.update(scheduler.schedule(StepChoice(4)), [[5]])
    first, _ = scheduler.schedule(StepChoice(4)), scheduler.schedule(StepChoice(4))
    scheduler.update(first, [[5, 7]])
    assert (request.finish_reason, request.num_known_tokens) == (FinishReason.STOP, 4)
    scheduler.add(make_request("again", [1, 5, 5, 7, 5], 4))
    assert starts(scheduler.schedule(StepChoice(4))) == {"again": (2, 3)}


@pytest.mark.parametrize("max_steps", [1, 4])
def test_a_row_whose_tokens_must_be_read_goes_every_second_plan_and_the_others_every_plan(max_steps):
    loop = Loop(make_scheduler(), depth=1, max_steps=max_steps)
    slow, fast = make_request("slow", [1, 2], 5, waits_for_tokens=True), make_request("fast", [3, 4], 40)
    loop.add(slow, fast)
    while slow.status is not RequestStatus.FINISHED:
        loop.step()
    assert slow.output_token_ids == generate_alone(slow)[0]
    with_slow = [index for index, plan in enumerate(loop.plans) if slow in plan.requests]
    assert with_slow == [0, 2, 4, 6, 8]
    assert all(fast in plan.requests for plan in loop.plans)
    loop.drain()
    assert fast.output_token_ids == generate_alone(fast)[0]
