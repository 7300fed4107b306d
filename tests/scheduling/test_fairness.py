"""Service of tenants in virtual time, against the bound of VTC (arXiv 2401.00588, theorem 4.4)."""

import dataclasses

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from simulation import Loop, counter_of, generate_alone, make_request, make_scheduler

from jaxserve.scheduling.request import Request
from service_suites import SUITES, Client, Run, bound
from tests.random_runs import examples

POOL_TOKENS = 2048

pytestmark = pytest.mark.usefixtures("no_type_checks")  # they would take most of the time


def small(client):
    """The client with requests of a quarter of the length, four times as often, and its times divided by twenty."""
    return dataclasses.replace(
        client,
        rate=4 * client.rate,
        prompt=client.prompt // 4,
        output=client.output // 4,
        on_s=client.on_s / 20,
        off_s=client.off_s / 20,
    )


def served(clients, policy, seconds=8.0):
    """Return a run that has ended, with nothing lost."""
    run = Run(clients, policy, seconds, pool_tokens=POOL_TOKENS).run()
    run.scheduler.check_integrity()
    return run


@pytest.mark.parametrize("suite", SUITES)
def test_tenants_get_equal_service_whatever_they_ask_for(suite):
    clients = [small(client) for client in SUITES[suite]]
    fair, fcfs = served(clients, "vtc"), served(clients, "fcfs")
    assert 0 < fair.gaps.largest <= bound(clients, POOL_TOKENS)
    assert fair.gaps.largest < fcfs.gaps.largest
    assert fair.num_tokens / fair.now_s > 0.95 * fcfs.num_tokens / fcfs.now_s, "it conserves work"


@settings(max_examples=examples(8), deadline=None)
@given(
    clients=st.lists(
        st.builds(
            Client,
            rate=st.floats(1, 30),
            prompt=st.integers(2, 300),
            output=st.integers(1, 200),
            weight=st.sampled_from([0.5, 1.0, 3.0]),
            off_s=st.sampled_from([0.0, 0.0, 1.0]),
            starts_at=st.sampled_from([0.0, 0.3]),
        ),
        min_size=2,
        max_size=4,
    )
)
def test_no_tenants_that_have_requests_waiting_differ_by_more_than_the_bound(clients):
    assert served(clients, "vtc", 4.0).gaps.largest <= bound(clients, POOL_TOKENS)


def test_idling_gives_no_credit():
    loop = Loop(make_scheduler(max_num_seqs=2, max_num_batched_tokens=16))
    busy = [make_request(f"busy {i}", [1, 2], 6, tenant="busy", arrival=i) for i in range(20)]
    loop.add(*busy)
    for _ in range(30):
        loop.step()
    num_before = sum(len(r.output_token_ids) for r in busy)
    late = [make_request(f"late {i}", [3, 2], 6, tenant="late", arrival=100 + i) for i in range(20)]
    loop.add(*late)
    for _ in range(40):
        loop.step()
    num_late = sum(len(r.output_token_ids) for r in late)
    num_busy = sum(len(r.output_token_ids) for r in busy) - num_before
    assert abs(num_late - num_busy) <= 2 * 6, "from then on they take turns"
    loop.drain()
    assert all((r.output_token_ids, r.finish_reason) == generate_alone(r) for r in busy + late)


def test_a_preempted_request_is_charged_once():
    scheduler = make_scheduler(max_num_seqs=2, max_num_batched_tokens=16, num_pages=64)
    loop = Loop(scheduler)
    request = make_request("a", [1] * 10, 8, priority=1, tenant="a")
    other = make_request("b", [2] * 10, 30, priority=1, tenant="b")
    loop.add(request, other)
    for _ in range(3):
        loop.step()
    loop.add(make_request("urgent 1", [3], 3), make_request("urgent 2", [4], 3))
    while request.status.name != "FINISHED":
        before = counter_of(scheduler.shards[0].ledger.waiting, request)
        loop.step()
    assert request.num_preemptions == 1
    assert before == 10 + 2 * 8 - 2, "ten prompt tokens and two for each output token but the last"


def test_who_comes_looks_at_the_rows_of_few_tenants(monkeypatch):
    scheduler = make_scheduler(max_num_seqs=60, max_num_batched_tokens=600, num_pages=600)
    for n in range(70):
        scheduler.add(make_request(str(n), [n] * (1 + n % 5), 50, tenant=str(n)))
    for _ in range(3):
        plan = scheduler.schedule()
        scheduler.update(plan, [[1] * most for most in plan.max_new])
    looks, num_tokens = [], Request.num_tokens.fget
    monkeypatch.setattr(Request, "num_tokens", property(lambda each: looks.append(each) or num_tokens(each)))
    for n in range(70, 80):
        scheduler.add(make_request(str(n), [n], 50, tenant=str(n)))
    assert len(looks) < 10 * 10
    scheduler.check_integrity()
