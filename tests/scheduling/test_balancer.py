"""Several schedulers behind one queue: what each says of a request, gives back, and is given."""

import random

import pytest
from simulation import Loop, counter_of, generate_alone, make_request, make_scheduler

from jaxserve.scheduling.balancer import MAX_ASKED, Balancer
from jaxserve.scheduling.request import FinishReason, RequestStatus
from jaxserve.scheduling.router import ROW_CHARGE_TOKENS, Start
from tests.parameters import seeds


def random_request(rng, index, prefixes=2):
    system = [rng.randrange(prefixes), *[7] * rng.choice([7, 23])] if prefixes else []
    prompt = system + [rng.randrange(5, 1000) for _ in range(rng.randint(1, 30))]
    return make_request(f"{index}", prompt, rng.randint(1, 20))


@pytest.mark.parametrize("seed", seeds(25))
def test_requests_that_fit_are_started_by_the_next_plan(seed):
    """Unless rows that run need more pages by then."""
    rng = random.Random(seed)
    loop = Loop(make_scheduler(max_num_seqs=5, max_num_batched_tokens=32, num_pages=40), depth=rng.randint(0, 1))
    started = 0
    for index in range(60):
        request = random_request(rng, index, prefixes=0)
        if loop.scheduler.view.could_start(request) is Start.NOW:
            loop.add(request)
            plan = loop.step()
            assert request in plan.admitted or plan.preempted or plan.grown
            started += request in plan.admitted
        else:
            loop.step()
    assert started > 10
    loop.drain()


def test_an_idle_scheduler_can_start_any_request_that_fits():
    for num_prompt in range(1, 256):
        scheduler = make_scheduler(max_num_batched_tokens=8, num_pages=64)
        assert scheduler.view.could_start(make_request("0", range(num_prompt), 256 - num_prompt)) is Start.NOW


def test_a_shared_prefix_lets_many_requests_fit():
    loop = Loop(make_scheduler(num_pages=64, max_num_batched_tokens=256))
    prefix = list(range(1000, 1160))  # 40 of 64 pages
    loop.add(make_request("first", prefix, 30)).step()
    for index in range(4):
        request = make_request(str(index), [*prefix, index], 8, num_shared_tokens=len(prefix))
        assert loop.scheduler.view.could_start(request) is Start.NOW
        loop.add(request)
    loop.step()
    assert loop.scheduler.num_running == 5
    loop.drain()
    assert loop.scheduler.view.could_start(make_request("idle pages count too", [*prefix, 9], 8)) is Start.NOW


def test_load_counts_uncomputed_tokens_and_a_charge_per_request():
    loop = Loop(make_scheduler(max_num_batched_tokens=64))
    assert loop.scheduler.view.load == 0
    loop.add(make_request("0", range(100), 5), make_request("1", range(50), 5))
    assert loop.scheduler.view.load == 150 + 2 * ROW_CHARGE_TOKENS
    loop.step()
    assert loop.scheduler.view.load == 86 + 2 * ROW_CHARGE_TOKENS
    loop.step()  # the rest of the first, and of the second what the budget leaves
    loop.step()
    assert loop.scheduler.view.load == 2 + 2 * ROW_CHARGE_TOKENS, "each has its next token to compute"
    loop.drain()
    assert loop.scheduler.view.load == 0


@pytest.mark.parametrize("seed", seeds(5))
@pytest.mark.parametrize("depth", [0, 1])
def test_withdrawn_requests_continue_on_another_replica(seed, depth):
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


class SimulatedReplica(Loop):
    """A scheduler and its device, as a replica of an engine."""

    @property
    def view(self):
        return self.scheduler.view

    @property
    def load(self):
        return self.scheduler.view.load

    def finish(self, request, reason):
        self.scheduler.finish(request.request_id, reason)

    def withdraw(self):
        return self.scheduler.withdraw()

    def has_work(self):
        return bool(self.in_flight) or self.scheduler.has_unfinished()

    def is_ready(self):
        return True


class Cluster:
    """Replicas behind one queue, stepped in turns; counts what they compute."""

    def __init__(self, count, depth=0, **sizes):
        self.replicas = [SimulatedReplica(make_scheduler(**sizes), depth) for _ in range(count)]
        self.balancer = Balancer(self.replicas, {})
        self.unfinished = {}

    def add(self, requests):
        self.unfinished |= {request.request_id: request for request in requests}
        self.balancer.add(requests)

    def step(self, is_slow=lambda: False):
        self.balancer.dispatch()
        for replica in self.replicas:
            if not (is_slow() and replica.in_flight):
                replica.step()
        for request in [r for r in self.unfinished.values() if r.status is RequestStatus.FINISHED]:
            del self.unfinished[request.request_id]
            self.balancer.finish(request)
        self.balancer.check_integrity(self.unfinished)

    def drain(self):
        while self.unfinished:
            self.step()
        return self

    @property
    def num_prefill_tokens(self):
        return sum(plan.num_prefill_tokens for replica in self.replicas for plan in replica.plans)


def samples(group, n, num_tokens, max_tokens=4):
    prompt = [group * 1000 + i for i in range(num_tokens)]
    return [make_request(f"{group}#{index}", prompt, max_tokens, arrival=group) for index in range(n)]


@pytest.mark.parametrize(
    ("num_prompts", "sizes"),
    [
        (8, {"max_num_seqs": 64, "max_num_batched_tokens": 512}),
        (8, {"max_num_seqs": 64, "max_num_batched_tokens": 64}),  # a prompt takes several steps
        (16, {"max_num_seqs": 16, "max_num_batched_tokens": 512}),  # rows become free one after another
    ],
)
def test_samples_of_a_prompt_compute_it_once(num_prompts, sizes):
    cluster = Cluster(4, num_pages=2048, max_model_len=512, **sizes)
    for group in range(num_prompts):
        cluster.add(samples(group, 8, 401, max_tokens=1 + group % 5))
    cluster.drain()
    once = num_prompts * (401 + 7)  # the last token, which no sample finds cached
    assert cluster.num_prefill_tokens <= 1.1 * once
    loads = [sum(plan.num_tokens for plan in replica.plans) for replica in cluster.replicas]
    assert max(loads) < 2 * min(loads), "the prompts are spread"


@pytest.mark.parametrize("seed", seeds(4))
@pytest.mark.parametrize("depth", [0, 1])
def test_no_replica_idles_while_a_request_waits_that_it_could_start(seed, depth):
    """Whatever arrives when, in small pools: each request ends as if alone, and the counters stay right."""
    rng = random.Random(seed)
    cluster = Cluster(3, depth, max_num_seqs=4, num_pages=24, max_num_batched_tokens=16)
    requests = []
    for index in range(150):
        if rng.random() < 0.4 and len(requests) < 50:
            new = [random_request(rng, f"{index}.{i}") for i in range(rng.choice([1, 1, 3]))]
            for request in new:
                request.arrival = index
            requests += new
            cluster.add(new)
        cluster.step(lambda: rng.random() < 0.3)
        if index % 10 == 9:
            cluster.balancer.dispatch()
            idle = [replica for replica in cluster.replicas if not replica.scheduler.has_unfinished()]
            assert not idle or not cluster.balancer.num_queued
    cluster.drain()
    for request in requests:
        assert (request.output_token_ids, request.finish_reason) == generate_alone(request)


def test_an_idle_replica_takes_requests_that_wait_for_another_replicas_prefix():
    cluster = Cluster(2, num_pages=512, max_num_batched_tokens=16)
    cluster.add(samples(0, 3, 100))
    cluster.step()
    assert all(replica.scheduler.has_unfinished() for replica in cluster.replicas)
    cluster.drain()


def test_a_replica_that_becomes_idle_asks_only_a_few_for_requests():
    cluster = Cluster(3 * MAX_ASKED, max_num_seqs=2, num_pages=64)
    cluster.add([make_request(f"running {index}", [index] * 9, 20) for index in range(3 * MAX_ASKED)])
    cluster.step()
    cluster.add([make_request(f"waiting {index}", [index, 5] * 4, 4, arrival=1) for index in range(3 * MAX_ASKED)])
    cluster.balancer.dispatch()
    asked = []
    for index, replica in enumerate(cluster.replicas):
        assert replica.view.num_waiting == 1
        replica.withdraw = lambda index=index, withdraw=replica.withdraw: asked.append(index) or withdraw()
    cluster.balancer.dispatch()
    assert not asked, "nothing has changed for them"
    first = cluster.unfinished.pop("running 0")
    cluster.balancer.finish(first, FinishReason.ABORT)
    (waiting,) = cluster.replicas[0].withdraw()
    cluster.balancer.finish(cluster.unfinished.pop(waiting.request_id), FinishReason.ABORT)
    asked.clear()
    cluster.balancer.dispatch()
    assert len(asked) == MAX_ASKED
    assert not cluster.replicas[0].view.is_idle
    cluster.drain()


def test_a_reset_cache_attracts_nobody():
    cluster = Cluster(2, num_pages=512, max_num_batched_tokens=512)
    balancer, request = cluster.balancer, make_request("as before", range(100), 2)
    cluster.add(samples(0, 1, 100))
    cluster.drain()
    (warm,) = [replica for replica in cluster.replicas if replica.plans]
    for is_reset in (False, True):
        cluster.add([make_request(f"other {is_reset}", [9, 9], 2)])
        balancer.dispatch()
        route = balancer._router.choose(balancer._prefix(request))
        assert route.num_shared_tokens == (0 if is_reset else 96)
        assert is_reset or cluster.replicas[route.replica] is warm
        cluster.drain()
        warm.scheduler.reset_prefix_cache()


def test_a_request_costs_its_router_the_same_however_many_rows_run():
    """Counted by what is looked at: the requests that a replica has."""
    looks = []
    for num_rows in (4, 64):
        cluster = Cluster(2, max_num_seqs=80, num_pages=2048, max_num_batched_tokens=2048)
        cluster.add([make_request(str(i), [i, 1, 2], 50) for i in range(2 * num_rows)])
        cluster.step()
        for replica in cluster.replicas:
            ledger = replica.scheduler.shards[0].ledger
            ledger.running = CountedDict(ledger.running)
        CountedDict.num_lookups = 0
        cluster.add([make_request("new", [9, 9], 2)])
        cluster.balancer.dispatch()
        looks.append(CountedDict.num_lookups)
    assert looks == [0, 0]


class CountedDict(dict):
    num_lookups = 0

    def values(self):
        CountedDict.num_lookups += 1
        return super().values()

    def __iter__(self):
        CountedDict.num_lookups += 1
        return super().__iter__()


# The order of the queue


def test_a_higher_class_starts_first_and_lower_ones_give_way_on_whichever_replica_they_run():
    cluster = Cluster(2, max_num_seqs=1, num_pages=64)
    first = make_request("first", [1] * 9, 40)
    low = make_request("low", [2] * 9, 40, priority=5, arrival=1)
    cluster.add([first, low])
    cluster.step()
    waiting = [make_request(f"low {index}", [3, index], 4, priority=5, arrival=2 + index) for index in range(3)]
    high = make_request("high", [*[1] * 9, 4], 4, arrival=9)
    cluster.add([*waiting, high])
    cluster.step()
    assert high.status is RequestStatus.RUNNING
    assert low.num_preemptions == 1
    assert first.status is RequestStatus.RUNNING
    assert all(request.status is RequestStatus.WAITING for request in (low, *waiting))
    cluster.drain()
    for request in (first, low, high, *waiting):
        assert (request.output_token_ids, request.finish_reason) == generate_alone(request)


@pytest.mark.parametrize("num_pages", [64, 13])
def test_tenants_of_one_class_have_equal_service_in_all_replicas_together(num_pages):
    """With few pages, requests are preempted and taken back, and no tenant is charged for that."""
    cluster = Cluster(2, max_num_seqs=2, num_pages=num_pages, max_num_batched_tokens=32)
    many = [make_request(f"many {index}", [1, index] * 4, 8, tenant="many", arrival=index) for index in range(40)]
    few = [make_request(f"few {index}", [2, index] * 4, 8, tenant="few", arrival=100 + index) for index in range(8)]
    cluster.add(many)
    for _ in range(20):
        cluster.step()
    num_before = sum(bool(request.output_token_ids) for request in many)
    cluster.add(few)
    while any(request in cluster.unfinished.values() for request in few):
        cluster.step()
    num_more = sum(bool(request.output_token_ids) for request in many) - num_before
    assert 4 <= num_more <= 12, "as many as those of the other tenant, but for what runs"
    cluster.drain()
    assert all(request.output_token_ids == generate_alone(request)[0] for request in many + few)


def test_requests_taken_back_cost_nothing():
    balancer = Balancer([SimulatedReplica(make_scheduler(max_num_seqs=1)) for _ in range(2)], {})
    requests = [make_request(str(index), [index] * 8, 4, arrival=index) for index in range(2)]
    balancer.add(requests)
    balancer.dispatch()
    assert counter_of(balancer._queue, requests[0]) == 16
    returned = balancer._take_back([0, 1])
    assert [request.request_id for request in returned] == ["0", "1"] == [each.request_id for each in balancer.queued]
    assert counter_of(balancer._queue, requests[0]) == 0
    balancer.dispatch()
    balancer.check_integrity(["0", "1"])
