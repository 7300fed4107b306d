"""Budgets for keys and values in the scheduler: which pages output tokens see, and when the others return."""

import random

import pytest
from simulation import VOCAB_SIZE, Loop, generate_alone, make_request, make_scheduler

from jaxserve.api.sparsity_config import EvictionConfig, read_budget
from jaxserve.errors import ConfigError, RequestError
from jaxserve.scheduling.kv_cache.sparsity import Window, resolve_eviction
from jaxserve.scheduling.step_plan import StepPlan
from tests.parameters import seeds


@pytest.mark.parametrize("seed", seeds(3))
@pytest.mark.parametrize(("depth", "max_steps", "max_drafts"), [(0, 1, 0), (1, 1, 0), (1, 5, 0), (1, 2, 3)])
@pytest.mark.parametrize(
    ("method", "windows"), [("streaming_llm", (None,)), ("streaming_llm", (3, None)), ("snapkv", (None,))]
)
def test_output_tokens_see_what_the_budget_keeps(seed, depth, max_steps, max_drafts, method, windows):
    """The simulated device checks which pages each row sees, also after preemptions and with shared prompts."""
    rng = random.Random(seed)
    page_size, num_sinks = rng.choice([1, 2, 4]), rng.randint(0, 2)
    num_tokens = page_size * (num_sinks + 2) + rng.randint(0, 5)
    eviction = EvictionConfig("streaming_llm", num_tokens, sink_tokens=num_sinks * page_size)
    if method == "snapkv":
        eviction = EvictionConfig(method, num_tokens, window_tokens=1)
    num_pages, max_num_seqs = rng.randint(24, 48) // page_size * len(windows), rng.randint(2, 8)
    budget = max_num_seqs + rng.randint(0, 20)
    scheduler = make_scheduler(max_num_seqs, budget, page_size, num_pages, windows=windows, eviction=eviction)
    loop = Loop(scheduler, depth, max_steps, max_drafts)
    common = [rng.randrange(VOCAB_SIZE) for _ in range(10)]
    requests = [
        make_request(
            str(index),
            common[: rng.randint(1, 10)] + [0] * rng.randint(0, 4),
            rng.randint(1, 20),
            shares_last_page=rng.random() < 0.2,
            waits_for_tokens=rng.random() < 0.2,
        )
        for index in range(30)
    ]
    for request in requests:
        loop.add(request)
        if rng.random() < 0.5:
            loop.step()
    loop.drain()
    assert [(r.output_token_ids, r.finish_reason) for r in requests] == [generate_alone(r) for r in requests]
    assert loop.scheduler.num_pages_used == 0


def test_a_long_output_needs_only_its_prompt_and_its_budget():
    scheduler = make_scheduler(1, 8, 4, 6, max_model_len=400, eviction=EvictionConfig("streaming_llm", 16))
    assert scheduler.sizes.kv_groups.num_pages(390, 20) == 5
    request = make_request("long", [1] * 20, 370)
    loop, most = Loop(scheduler).add(request), 0
    while loop.scheduler.has_unfinished():
        loop.step()
        most = max(most, loop.scheduler.num_pages_used)
    assert most == 5
    assert not request.num_preemptions
    with pytest.raises(RequestError, match="need 7 pages"):
        scheduler.add(make_request("long prompt", [1] * 25, 20))


@pytest.mark.parametrize("num_outputs", [1, 2, 6])
def test_a_preempted_request_continues_in_pages_that_its_prompt_and_its_copy_fill(num_outputs):
    """Its output tokens get the pages that the prompt leaves."""
    scheduler = make_scheduler(1, 64, 4, 7, eviction=EvictionConfig("snapkv", 12, window_tokens=1))
    request = make_request("a", range(16), 10)
    assert scheduler.sizes.kv_groups.num_pages(25, 16) == 7
    loop = Loop(scheduler).add(request)
    while len(request.output_token_ids) < num_outputs:
        loop.step()
    scheduler.shards[0].ledger.preempt(request, StepPlan(0))
    loop.drain()
    assert request.output_token_ids == generate_alone(request)[0]


def test_states_after_output_tokens_are_not_shared():
    """They depend on the prompt's length, as keys and values do; a preempted request computes them among prompts."""
    scheduler = make_scheduler(2, 64, 4, 24, eviction=EvictionConfig("streaming_llm", 12), num_snapshots=4)
    request = make_request("a", range(6), 18)
    loop, store = Loop(scheduler).add(request), scheduler.shards[0].ledger.store
    while len(request.output_token_ids) < 12:
        loop.step()
    scheduler.shards[0].ledger.preempt(request, StepPlan(0))
    loop.drain()
    assert [*store.states.cached] == store.index.hashes(request)[:1]


def test_budgets_that_fit_no_page_are_refused():
    eviction = EvictionConfig("streaming_llm", 40, sink_tokens=17)
    assert resolve_eviction(eviction, 8, 41) == Window(8, 40, 3)
    assert resolve_eviction(eviction, 8, 40) is None
    with pytest.raises(ConfigError, match="at least 64 tokens, 2 pages with the first 17 tokens and 2"):
        resolve_eviction(eviction, 16, 99)
    for value, words in (
        ({"method": "h3", "budget": 9}, "method of kv_eviction must be one of"),
        ({"method": "streaming_llm", "budget": 0}, "budget of kv_eviction must be a positive"),
        ({"method": "streaming_llm"}, "must have a method and a budget, got no budget"),
        ({"method": "streaming_llm", "budget": 64, "sinks": 4}, "unsupported kv_eviction {'sinks': 4}"),
    ):
        with pytest.raises(ConfigError, match=words):
            read_budget(EvictionConfig, value)
