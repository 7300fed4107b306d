"""Bursts, as the scheduler plans them and takes their tokens."""

import pytest
from simulation import Loop, generate_alone, make_request, make_scheduler, starts

from jaxserve.request import FinishReason, SamplingParams


def burst_lengths(loop):
    return [plan.num_steps for plan in loop.plans]


@pytest.mark.parametrize("depth", [0, 1])
def test_rows_in_decode_go_in_bursts_to_the_nearest_end(depth):
    loop = Loop(make_scheduler(), depth, max_steps=4)
    loop.add(make_request("a", range(5), 9), make_request("b", range(3), 14)).drain()
    assert burst_lengths(loop) == [1, 4, 4, 4, 1]
    assert loop.scheduler.num_wasted_tokens == 0


def test_no_burst_while_someone_may_join():
    loop = Loop(make_scheduler(max_num_seqs=2, num_pages=4), max_steps=4)
    loop.add(make_request("a", range(8), 6))
    loop.step()
    loop.add(make_request("b", range(10, 15), 9))  # pages are short
    assert [loop.step().num_steps for _ in range(3)] == [1, 1, 1]
    loop.scheduler.finish("b", FinishReason.ABORT)
    assert loop.step().num_steps == 2


def test_bursts_go_on_while_the_queue_finds_no_slot():
    loop = Loop(make_scheduler(max_num_seqs=1), max_steps=4)
    loop.add(*(make_request(str(i), [i], 5) for i in range(3))).drain()
    assert burst_lengths(loop) == [1, 4] * 3


def test_a_newcomer_waits_for_one_burst():
    loop = Loop(make_scheduler(), depth=1, max_steps=4).add(make_request("a", range(5), 40))
    for _ in range(3):
        loop.step()
    assert burst_lengths(loop) == [1, 4, 4]
    loop.add(make_request("b", range(7), 2))
    assert "b" in starts(loop.step())


@pytest.mark.parametrize("params", [{}, {"stop": "x"}, {"logprobs": 0}])
def test_stop_strings_and_logprobs_of_a_row_keep_nobody_from_multi_step_decode(params):
    loop = Loop(make_scheduler(), max_steps=4)
    special = make_request("a", range(3), 6)
    special.params = SamplingParams(max_tokens=None, **params)
    loop.add(special, make_request("b", range(5), 16)).drain()
    assert burst_lengths(loop) == [1, 4, 1, 4, 4, 2]


def test_a_burst_takes_no_more_pages_than_are_free():
    loop = Loop(make_scheduler(page_size=1, num_pages=16), max_steps=8)
    loop.add(make_request("a", [1, 1], 14), make_request("b", [2, 2], 14))
    loop.step()
    assert loop.step().num_steps == 4  # 12 pages are free, 8 steps need 16
    assert loop.step().num_steps == 2
    assert loop.step().preempted
    loop.drain()


def test_a_stop_ends_the_burst_and_the_others_keep_pages_for_their_next():
    loop = Loop(make_scheduler(page_size=2), max_steps=8)
    output, _ = generate_alone(make_request("a", [1, 2, 3], 20))
    stop = next(i for i in range(2, 8) if output[i] not in output[:i])  # in the middle of the first burst
    ending = make_request("a", [1, 2, 3], 20, stop_ids=frozenset([output[stop]]))
    other = make_request("b", [4, 2, 1], 20)
    loop.add(ending, other)
    loop.step()
    plan = loop.step()
    assert plan.num_steps == 8
    assert (ending.finish_reason, ending.output_token_ids) == (FinishReason.STOP, output[: stop + 1])
    assert len(other.output_token_ids) == stop + 1
    assert other.num_computed_tokens == 3 + stop
    assert (other.num_pending_tokens, len(other.pages)) == (0, 6)
    assert loop.scheduler.num_wasted_tokens == 0
    pages = other.pages[:]
    loop.step()
    assert other.pages[:6] == pages
    loop.drain()
    assert other.output_token_ids == generate_alone(other)[0]


def test_a_stop_that_the_device_missed_is_found_by_the_host():
    scheduler = make_scheduler()
    request, other = make_request("a", [1], 20, stop_ids=frozenset([7])), make_request("b", [2], 20)
    scheduler.add(request)
    scheduler.add(other)
    scheduler.update(scheduler.schedule(4), [5, 5])
    plan = scheduler.schedule(4)
    assert scheduler.update(plan, [5, 5], [7, 5], [5, 5], [6, 6]) == {request: 2, other: 4}
    assert (request.output_token_ids, other.output_token_ids) == ([5, 5, 7], [5, 5, 5, 5, 6])
    assert scheduler.num_wasted_tokens == 2
    scheduler.check_integrity()


def test_abort_during_a_burst():
    loop = Loop(make_scheduler(), depth=1, max_steps=4).add(make_request("a", range(4), 9), make_request("b", [1], 9))
    loop.step()
    assert loop.step().num_steps == 4
    loop.scheduler.finish("a", FinishReason.ABORT)
    loop.scheduler.check_integrity()
    loop.drain()
    assert loop.scheduler.num_wasted_tokens == 4


def in_a_burst():
    scheduler, request = make_scheduler(page_size=2), make_request("a", [1], 20, stop_ids=frozenset([7]))
    scheduler.add(request)
    scheduler.update(scheduler.schedule(4), [5])
    return scheduler, request, scheduler.schedule(4)


def test_a_burst_is_planned_beside_a_burst():
    scheduler, request, first = in_a_burst()
    assert not scheduler.must_update_first(4)
    second = scheduler.schedule(4)
    assert (first.starts, first.follows_burst, second.starts, second.follows_burst) == ([1], False, [5], True)
    assert scheduler.update(first, *[[5]] * 4) == scheduler.update(second, *[[6]] * 4) == {request: 4}
    assert not scheduler.schedule(4).follows_burst


def test_nothing_else_is_planned_beside_a_burst():
    scheduler, _, plan = in_a_burst()
    scheduler.add(make_request("b", [2], 20))
    assert scheduler.must_update_first(4)
    with pytest.raises(AssertionError, match="must be updated before"):
        scheduler.schedule(4)
    for num_steps in (0, 5):
        with pytest.raises(AssertionError, match=f"4 steps cannot have run as {num_steps}"):
            scheduler.update(plan, *[[5]] * num_steps)
    scheduler.finish("a", FinishReason.ABORT)
    assert not scheduler.must_update_first(4)
    assert starts(scheduler.schedule(4)) == {"b": (0, 1)}


def test_bursts_behind_one_that_ended_early_come_to_nothing():
    scheduler, other = make_scheduler(page_size=2), make_request("b", [2], 20)
    scheduler.add(make_request("a", [1], 20, stop_ids=frozenset([7])))
    scheduler.add(other)
    scheduler.update(scheduler.schedule(4), [5, 5])
    first, second, third = (scheduler.schedule(4) for _ in range(3))
    pages = other.pages[:]
    assert (other.num_computed_tokens, len(pages)) == (13, 7)
    assert scheduler.update(first, [5, 5], [7, 5])[other] == 2
    assert (first.num_steps, second.num_steps, third.num_steps) == (4, 0, 0)
    assert (other.num_computed_tokens, other.num_pending_tokens) == (3, 0)
    scheduler.check_integrity()
    assert not scheduler.must_update_first(4)
    fourth = scheduler.schedule(4)
    assert (starts(fourth), fourth.num_steps, fourth.follows_burst) == ({"b": (3, 1)}, 4, False)
    assert other.pages == pages
    assert scheduler.update(second) == scheduler.update(third) == {}
    assert scheduler.update(fourth, *[[6]] * 4) == {other: 4}
    assert scheduler.num_wasted_tokens == 0


def test_bursts_left_behind_by_an_abort_come_to_nothing_too():
    """As after an interrupt: what follows them must not be harmed, whatever the device made of them."""
    scheduler, _, first = in_a_burst()
    second = scheduler.schedule(4)
    scheduler.finish("a", FinishReason.ABORT)
    newcomer = make_request("b", [2], 20)
    scheduler.add(newcomer)
    third = scheduler.schedule(4)
    assert (starts(third), third.follows_burst) == ({"b": (0, 1)}, False)
    assert scheduler.update(first, [5], [7]) == {}  # the device found the stop id
    assert scheduler.update(second) == {}
    assert scheduler.update(third, [5]) == {newcomer: 1}
    fourth = scheduler.schedule(4)
    assert (fourth.num_steps, fourth.follows_burst) == (4, False)
    scheduler.check_integrity()


def test_a_page_is_found_only_when_it_is_computed():
    """The token that ends a burst is known but not computed by it, nor by the one behind it."""
    scheduler, request, first = in_a_burst()
    scheduler.schedule(4)
    scheduler.update(first, [5], [7])
    assert (request.finish_reason, request.num_known_tokens) == (FinishReason.STOP, 4)
    scheduler.add(make_request("again", [1, 5, 5, 7, 5], 4))
    assert starts(scheduler.schedule(4)) == {"again": (2, 3)}
