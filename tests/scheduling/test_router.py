"""Choice of a replica for a request: against a scan of all replicas, and its cost."""

import random
import time
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxserve.scheduling import router as module
from jaxserve.scheduling.router import (
    CLOSED_CHARGE_TOKENS,
    MAX_SKIPPED,
    NO_PREFIX,
    ROW_CHARGE_TOKENS,
    Prefix,
    Router,
    Start,
    sample_depths,
)
from tests.random_runs import examples


def prefix_of(*blocks: int) -> Prefix:
    """Return the leading parts of a prompt in blocks of 16 tokens."""
    return Prefix.from_hashes([repr(blocks[: depth + 1]).encode() for depth in range(len(blocks))], 16)


def new_router(*loads: int) -> Router:
    router = Router(len(loads))
    for replica, load in enumerate(loads):
        router.set_load(replica, load, is_open=True)
    return router


def test_depths_are_few_and_dense() -> None:
    assert sample_depths(0) == []
    assert sample_depths(5) == [1, 2, 3, 4, 5]
    for num_blocks in range(40):
        depths = sample_depths(num_blocks)
        expected = [16 * depth for depth in depths], [bytes([depth - 1]) for depth in depths]
        assert tuple(map(list, Prefix.from_hashes([bytes([block]) for block in range(num_blocks)], 16))) == expected
    for num_blocks in range(1, 5000):
        depths = sample_depths(num_blocks)
        assert depths[-1] == num_blocks
        assert len(depths) <= 40
        assert all(later <= max(earlier * 1.25, earlier + 1) for earlier, later in pairwise(depths))


@settings(max_examples=examples(40), deadline=None)
@given(data=st.data(), num_replicas=st.integers(1, 6))
def test_the_cheapest_replica_is_chosen(data: st.DataObject, num_replicas: int) -> None:
    """The choice equals that of a scan, over any order of loads, notes and losses."""
    router = Router(num_replicas)
    loads, is_open = [0] * num_replicas, [False] * num_replicas
    held: list[dict[bytes, int]] = [{} for _ in range(num_replicas)]
    blocks = st.lists(st.integers(0, 1), max_size=6)
    for _ in range(data.draw(st.integers(1, 25))):
        replica = data.draw(st.integers(0, num_replicas - 1))
        match data.draw(st.sampled_from(["load", "load", "load", "note", "note", "forget", "close"])):
            case "load":
                loads[replica], is_open[replica] = data.draw(st.integers(0, 400)), data.draw(st.booleans())
                router.set_load(replica, loads[replica], is_open=is_open[replica])
            case "note":
                prefix = prefix_of(*data.draw(blocks))
                router.note(replica, prefix)
                held[replica] |= {prefix_hash: tokens for tokens, prefix_hash in zip(*prefix, strict=True)}
            case "forget":
                router.forget(replica)
                held[replica].clear()
            case "close":
                is_open[replica] = False
                router.close(replica)
    prefix = prefix_of(*data.draw(blocks))
    shared = [max((tokens for tokens, key in zip(*prefix, strict=True) if key in table), default=0) for table in held]
    costs = [
        load - 2 * tokens + (0 if opened else CLOSED_CHARGE_TOKENS)
        for load, tokens, opened in zip(loads, shared, is_open, strict=True)
    ]
    route, open_route = router.choose(prefix), router.choose(prefix, only_open=True)
    if not any(is_open):
        assert route is open_route is None
        return
    eligible = [i for i in range(num_replicas) if is_open[i] or shared[i]]
    assert costs[route.replica] == min(costs[i] for i in eligible)
    assert (route.is_open, route.num_shared_tokens) == (is_open[route.replica], shared[route.replica])
    assert is_open[open_route.replica]
    assert costs[open_route.replica] == min(cost for cost, opened in zip(costs, is_open, strict=True) if opened)


@pytest.mark.parametrize("num_replicas", [1, 32, 33, 200])
def test_of_many_replicas_the_first_with_the_least_load_is_chosen(num_replicas: int) -> None:
    """The index of loads finds what a scan finds, whatever opens, closes, grows or shrinks."""
    rng, router, loads = random.Random(num_replicas), Router(num_replicas), [module._CLOSED] * num_replicas
    for _ in range(3000):
        replica = rng.randrange(num_replicas)
        if rng.random() < 0.2:
            loads[replica] = module._CLOSED
            router.close(replica)
        else:
            loads[replica] = rng.randrange(30)
            router.set_load(replica, loads[replica], is_open=True)
        if rng.random() < 0.5:
            route, least = router.choose(NO_PREFIX), min(loads)
            assert (route and route.replica) == (loads.index(least) if least < module._CLOSED else None)


@settings(max_examples=examples(25), deadline=None)
@given(data=st.data(), num_replicas=st.integers(1, 4), num_jobs=st.integers(0, 100))
def test_a_queue_is_assigned_in_its_order(data: st.DataObject, num_replicas: int, num_jobs: int) -> None:
    """Jobs that wait for a replica count in its load only within the call; replicas with room serve those behind."""
    room = [data.draw(st.integers(0, 20)) for _ in range(num_replicas)]
    router, loads = Router(num_replicas), [data.draw(st.integers(0, 400)) for _ in range(num_replicas)]
    for replica, load in enumerate(loads):
        router.note(replica, prefix_of(replica, 7, 7, 7))
        router.set_load(replica, load, is_open=room[replica] > 0)
    prefixes = [prefix_of(data.draw(st.integers(0, 5)), 7, 7, 7) for _ in range(num_jobs)]
    sizes = [data.draw(st.integers(1, 3)) for _ in range(num_jobs)]
    held = data.draw(st.frozensets(st.integers(0, 99), max_size=9))  # jobs that no open replica would start first
    passed_over: list[int] = []
    seen: list[int] = []
    for job, route in router.assign(
        range(num_jobs),
        prefixes.__getitem__,
        lambda job, route: (
            Start.LATER if job in held else Start.NOW if sizes[job] <= room[route.replica] else Start.FULL
        ),
        lambda *_: 50,
    ):
        seen.append(job)
        if not route.is_open:
            passed_over.append(route.replica)
            assert router._waiting_loads[route.replica] == 50 * passed_over.count(route.replica)
            continue
        assert job not in held
        costs = [
            load + 50 * passed_over.count(replica) - 2 * (route.num_shared_tokens if replica == route.replica else 0)
            for replica, load in enumerate(loads)
        ]
        assert costs[route.replica] <= min(cost for cost, opened in zip(costs, router._is_open, strict=True) if opened)
        room[route.replica] -= sizes[job]
        assert room[route.replica] >= 0
        loads[route.replica] += 50
        router.set_load(route.replica, loads[route.replica], is_open=room[route.replica] > 0)
    assert seen == list(range(len(seen)))
    assert len(passed_over) <= MAX_SKIPPED
    assert router._loads == loads
    assert not any(router._waiting_loads)
    assert [load for load, opened in zip(loads, router._is_open, strict=True) if opened] == [
        load for load in router._open_loads if load != module._CLOSED
    ]
    assert len(seen) == num_jobs or router.choose(NO_PREFIX, only_open=True) is None


def test_siblings_stay_together_until_load_exceeds_the_saved_tokens() -> None:
    router = new_router(0, 0)
    prefix, counts, loads = prefix_of(*range(32)), [0, 0], [0, 0]
    for _ in range(200):
        route = router.choose(prefix)
        num_tokens = 512 - route.num_shared_tokens + ROW_CHARGE_TOKENS
        router.note(route.replica, prefix)
        loads[route.replica] += num_tokens
        router.set_load(route.replica, loads[route.replica], is_open=True)
        counts[route.replica] += 1
        if counts[1] == 1:
            first = counts[0]
    assert 20 < first < 60
    assert abs(counts[0] - counts[1]) <= first


def test_remembered_prefixes_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_MAX_PREFIXES", 100)
    router = new_router(*[0] * 20)
    for index in range(50):
        router.note(index % 20, prefix_of(index, *range(9)))
        router.note(index % 20, prefix_of(-1))
    assert 90 < len(router._holders) <= 100
    assert len(router._holders[prefix_of(-1).hashes[0]]) == 8


@pytest.mark.parametrize("num_replicas", [2, 64, 10_000])
def test_a_choice_takes_less_than_a_fifth_of_a_millisecond(num_replicas: int) -> None:
    rng = random.Random(0)
    loads = [rng.randrange(1000) for _ in range(num_replicas)]
    router = new_router(*loads)
    prefixes = [prefix_of(*(rng.randrange(2) for _ in range(60))) for _ in range(200)]
    start_s = time.process_time()
    for prefix in prefixes:
        route = router.choose(prefix)
        router.note(route.replica, prefix)
        loads[route.replica] += 1000
        router.set_load(route.replica, loads[route.replica], is_open=True)
    assert (time.process_time() - start_s) / len(prefixes) < 2e-4
