"""Classes of requests: who goes first, who gives way, and that nobody's tokens change by it."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from simulation import Loop, generate_alone, make_request, make_scheduler, starts

from jaxserve.scheduling.request import RequestStatus
from tests.random_runs import examples

ARRIVALS = st.lists(
    st.tuples(
        st.integers(0, 3),  # steps since the arrival before
        st.integers(0, 2),  # priority
        st.sampled_from("abc"),  # tenant
        st.lists(st.integers(0, 1), min_size=1, max_size=20),
        st.integers(1, 10),
    ),
    min_size=1,
    max_size=14,
)


@settings(max_examples=examples(20), deadline=None)
@given(
    arrivals=ARRIVALS,
    max_num_seqs=st.integers(1, 4),
    more_budget=st.integers(0, 12),
    num_pages=st.integers(10, 24),
    depth=st.integers(0, 2),
    max_steps=st.sampled_from([1, 4]),
    windows=st.sampled_from([(None,), (3,), (None, 5)]),
)
def test_whatever_comes_in_whatever_class_all_end_with_their_tokens(
    arrivals, max_num_seqs, more_budget, num_pages, depth, max_steps, windows
):
    scheduler = make_scheduler(
        max_num_seqs, max_num_seqs + more_budget, 3, num_pages * len(windows), max_model_len=40, windows=windows
    )
    loop, requests = Loop(scheduler, depth, max_steps), []
    for index, (num_steps, priority, tenant, prompt, max_tokens) in enumerate(arrivals):
        for _ in range(num_steps):
            check_order(loop.step(), requests)
        request = make_request(
            str(index), prompt, max_tokens, priority=priority, tenant=tenant, arrival=index, stop_ids=frozenset([4])
        )
        requests.append(request)
        scheduler.add(request)
    for _ in range(2000):
        if not scheduler.has_unfinished():
            break
        check_order(loop.step(), requests)
    assert all((r.output_token_ids, r.finish_reason) == generate_alone(r) for r in requests)


def check_order(plan, requests):
    """Check that prompts are in the order of their classes, and that whoever gives way does so to a higher one."""
    if plan is None:
        return
    prompts = [r.priority for r, count in zip(plan.requests, plan.counts, strict=True) if count > 1]
    assert prompts == sorted(prompts)
    if plan.preempted and plan.admitted:
        assert max(r.priority for r in plan.admitted) < min(r.priority for r in plan.preempted)
    started = [r for r in plan.admitted if r.status is RequestStatus.RUNNING]
    assert not set(started) & set(plan.preempted), "a request that gives way does not start again in the same plan"


@pytest.mark.parametrize("full", ["slots", "pages"])
@pytest.mark.parametrize("depth", [0, 1])
@settings(max_examples=examples(12), deadline=None)
@given(num_prompt=st.integers(1, 60), num_running=st.integers(1, 4), num_before=st.integers(0, 6))
def test_an_urgent_arrival_gets_its_first_token_a_step_after_its_own_prefill_at_most(
    full, depth, num_prompt, num_running, num_before
):
    budget, page_size = 16, 4
    num_slots = num_running if full == "slots" else 8
    num_pages = 200 if full == "slots" else max(num_running * 6, -(-(num_prompt + 5) // page_size) + 1)
    scheduler = make_scheduler(num_slots, budget, page_size, num_pages)
    loop = Loop(scheduler, depth)
    low = [make_request(f"low {i}", [i, 1, 2, 3] * 3, 12, priority=5) for i in range(num_running + 3)]
    loop.add(*low)
    for _ in range(num_before):
        loop.step()
    urgent = make_request("urgent", [4] * num_prompt, 4, priority=-1)
    loop.add(urgent)
    num_own = -(-num_prompt // (budget - num_slots))
    if num_prompt > scheduler.policy.long_threshold:  # beside rows in decode, in chunks
        num_own = -(-num_prompt // min(scheduler.policy.long_chunk, budget - num_slots))
    first = next(n for n in range(1, 100) if samples_for(loop.step(), urgent))
    assert first <= num_own + 1
    loop.drain()
    assert all((r.output_token_ids, r.finish_reason) == generate_alone(r) for r in [*low, urgent])


def samples_for(plan, request):
    """Return whether a plan samples a token of a request."""
    rows = zip(plan.requests, plan.max_new, strict=True)
    return any(other is request and most for other, most in rows)


def test_the_last_admitted_of_the_lowest_class_is_preempted_and_resumes_first():
    scheduler = make_scheduler(max_num_seqs=3, max_num_batched_tokens=16)
    loop = Loop(scheduler)
    requests = {name: make_request(name, [i, 1], 6, priority=p) for i, (name, p) in enumerate([("b", 2), ("c", 3)])}
    requests["d"] = make_request("d", [3, 1], 6, priority=3)
    loop.add(*requests.values()).step()
    loop.add(make_request("e", [4, 1], 2, priority=3), make_request("a", [4, 1], 2, priority=1))
    plan = loop.step()
    assert [request.request_id for request in plan.preempted] == ["d"]
    assert [request.request_id for request in plan.admitted] == ["a"]
    while requests["d"].status is RequestStatus.WAITING:
        plan = loop.step()
    assert "e" not in starts(plan), "it came after the one that has run"
    loop.drain()
    assert all((r.output_token_ids, r.finish_reason) == generate_alone(r) for r in requests.values())


def test_no_row_is_preempted_in_vain():
    scheduler = make_scheduler(max_num_seqs=8, max_num_batched_tokens=64, page_size=4, num_pages=16)
    loop = Loop(scheduler)
    loop.add(make_request("same", [1] * 40, 8, priority=0), make_request("lower", [2] * 4, 4, priority=1)).step()
    loop.add(make_request("large", [3] * 40, 4, priority=0))
    assert not loop.step().preempted
    loop.drain()


def test_an_urgent_prompt_goes_before_unfinished_ones_of_a_lower_class():
    loop = Loop(make_scheduler(max_num_seqs=8, max_num_batched_tokens=32, page_size=4, num_pages=128))
    loop.add(make_request("long", [1, 2] * 60, 4, priority=1)).step()
    loop.add(make_request("urgent", [3] * 20, 4, priority=0))
    plan = loop.step()
    assert starts(plan) == {"urgent": (0, 20), "long": (32, 12)}
    assert not plan.preempted, "what is left of the step goes to the other one"


def test_a_row_preempted_twice_before_a_token_is_read_keeps_its_shared_page():
    loop = Loop(make_scheduler(max_num_seqs=1, max_num_batched_tokens=3, page_size=2, num_pages=15), depth=2)
    requests = [
        make_request(str(index), [0] * num_prompt, num_output, priority=priority, shares_last_page=shares)
        for index, (num_prompt, num_output, shares, priority) in enumerate(
            [(1, 5, True, 5), (1, 2, False, 0), (2, 6, True, 5), (2, 3, True, 5), (3, 3, False, 0)]
        )
    ]
    for request, num_steps in zip(requests, (3, 3, 0, 2, 3), strict=True):
        for _ in range(num_steps):
            if loop.scheduler.has_unfinished() or loop.in_flight:
                loop.step()
        loop.add(request)
    loop.drain()
    assert max(request.num_preemptions for request in requests) == 2
    for request in requests:
        assert (request.output_token_ids, request.finish_reason) == generate_alone(request)


def test_simultaneous_starts_count_lower_class_rows_once(monkeypatch):
    scheduler = make_scheduler(max_num_seqs=30, max_num_batched_tokens=600, num_pages=300)
    for n in range(30):
        scheduler.add(make_request(f"low {n}", [n], 50, priority=1))
    plan = scheduler.schedule()
    scheduler.update(plan, [[1] * most for most in plan.max_new])
    for n in range(30):
        scheduler.add(make_request(f"high {n}", [n], 50))
    ledger, counts = scheduler.shards[0].ledger, []
    num_pages_short = ledger.num_pages_short

    def counting(num_steps, *rows):
        counts.append(len(*rows or [ledger.running]))
        return num_pages_short(num_steps, *rows)

    monkeypatch.setattr(ledger, "num_pages_short", counting)
    plan = scheduler.schedule()
    assert len(plan.preempted) == len(plan.admitted) == 30
    assert sum(counts) <= 3 * 30


def test_nobody_gives_way_to_a_request_that_waits_for_its_adapter():
    scheduler = make_scheduler(max_num_seqs=2, max_loras=1)
    for name, adapter in (("adapted", "a"), ("base", "")):
        scheduler.add(make_request(name, [1, 2, 3], 12, priority=1, adapter=adapter))
    plans = []
    while scheduler.has_unfinished():
        plans.append(plan := scheduler.schedule())
        scheduler.update(plan, [[1] * most for most in plan.max_new])
        if len(plans) == 3:
            scheduler.add(make_request("high", [7, 8, 9], 4, adapter="b"))
    assert not any(plan.preempted for plan in plans)
    assert starts(plans[2]).keys() == {"adapted", "base"}
    assert "high" in starts(plans[-1])
