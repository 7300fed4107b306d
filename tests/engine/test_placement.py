"""What a scheduler says of a request before it gets it, and gives back: for engines that have several."""

import random

import pytest
from simulation import Loop, generate_alone, make_request, make_scheduler

from jaxserve.request import RequestStatus


def random_request(rng, index, prefixes=2):
    system = [rng.randrange(prefixes), *[7] * rng.choice([7, 23])] if prefixes else []
    prompt = system + [rng.randrange(5, 1000) for _ in range(rng.randint(1, 30))]
    return make_request(f"{index}", prompt, rng.randint(1, 20))


@pytest.mark.parametrize("seed", range(100))
def test_what_has_room_is_started_by_the_next_plan(seed):
    """Unless rows that run need more pages by then, or it waits a step for a prefix that this one computes."""
    rng = random.Random(seed)
    loop = Loop(make_scheduler(max_num_seqs=5, max_num_batched_tokens=32, num_pages=40), depth=rng.randint(0, 1))
    started = 0
    for index in range(60):
        request = random_request(rng, index, prefixes=0)
        if loop.scheduler.has_room(request):
            loop.add(request)
            plan = loop.step()
            assert request in plan.admitted or plan.preempted
            started += request in plan.admitted
        else:
            loop.step()
    assert started > 10
    loop.drain()


def test_an_idle_scheduler_has_room_for_whatever_fits():
    for num_prompt in range(1, 256):
        scheduler = make_scheduler(max_num_batched_tokens=8, num_pages=64)
        assert scheduler.has_room(make_request("0", range(num_prompt), 256 - num_prompt))


def test_a_shared_prefix_is_room_for_many():
    loop = Loop(make_scheduler(num_pages=64, max_num_batched_tokens=256))
    prefix = list(range(1000, 1160))  # 40 of 64 pages
    loop.add(make_request("first", prefix, 30)).step()
    for index in range(4):
        request = make_request(str(index), [*prefix, index], 8)
        assert loop.scheduler.has_room(request)
        loop.add(request)
    loop.step()
    assert loop.scheduler.num_running == 5
    loop.drain()
    assert loop.scheduler.has_room(make_request("idle pages count too", [*prefix, 9], 8))


def test_less_is_to_be_done_where_the_prefix_is_cached_and_few_rows_run():
    cold, warm, busy = (make_scheduler() for _ in range(3))
    prefix = list(range(1000, 1032))
    Loop(warm).add(make_request("before", prefix, 2)).drain()
    busy_loop = Loop(busy).add(make_request("before", prefix, 2)).drain()
    busy_loop.add(*(make_request(str(index), [index], 9) for index in range(3))).step()
    request = make_request("0", [*prefix, 1, 2], 5)
    works = [scheduler.work_before(request) for scheduler in (warm, cold, busy)]
    assert works[0] == 2
    assert works[1] == 34
    assert works[0] < works[2]


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("depth", [0, 1])
def test_requests_go_on_elsewhere_as_if_they_had_been_there(seed, depth):
    """Preempted ones among them. None is lost, and none is taken while tokens of it are on the device."""
    rng = random.Random(seed)
    loops = [Loop(make_scheduler(max_num_seqs=4, num_pages=20), depth, max_steps=rng.choice([1, 4])) for _ in range(2)]
    requests, num_moved = [], 0
    for index in range(120):
        if rng.random() < 0.5 and len(requests) < 40:
            requests.append(random_request(rng, index))
            rng.choice(loops).add(requests[-1])
        for loop, other in (loops, loops[::-1]):
            for request in loop.scheduler.withdraw() if rng.random() < 0.3 else ():
                assert request.status is RequestStatus.WAITING
                assert not request.num_pending_tokens
                num_moved += 1
                other.add(request)
            loop.step()
    for loop in loops:
        loop.drain()
    assert num_moved
    for request in requests:
        assert (request.output_token_ids, request.finish_reason) == generate_alone(request)
