"""A request's tokens depend only on its prompt and parameters: not on other requests nor on how it is run."""

import itertools
from collections.abc import Callable
from dataclasses import replace
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxserve.api.outputs import RequestOutput
from jaxserve.api.sampling_params import SamplingParams
from jaxserve.assembly.driven import DrivenEngine
from tests.e2e.workloads import Job, assert_same, busy_step, drain, few_but_rich, generate, jobs, run, run_alone, tokens

Start = Callable[..., DrivenEngine]

SAMPLED = SamplingParams(temperature=1, top_p=0.95, seed=5, max_tokens=10, ignore_eos=True, frequency_penalty=0.5)
GREEDY = SamplingParams(temperature=0, max_tokens=10, ignore_eos=True)


@pytest.fixture(scope="session")
def alone(start: Start) -> Callable[[Job], RequestOutput]:
    """Run a job undisturbed: cold, alone, its prompt in one piece, one step after the other."""
    engine = start(max_num_batched_tokens=64, step_ahead=False)
    return lambda job: run_alone(engine, job)


class TestAnyWorkload:
    """Batches, chunks, prefix hits, preemptions, late arrivals and step-ahead all at once."""

    @given(jobs=jobs())
    @few_but_rich
    def test_batched_tokens_equal_those_of_each_request_alone(
        self, start: Start, alone: Callable[[Job], RequestOutput], jobs: list[Job]
    ) -> None:
        expected = [alone(job) for job in jobs]
        for options in ({}, {"step_ahead": False}, {"enable_prefix_caching": False}):
            engine = start(**options)
            for output, wanted, job in zip(run(engine, jobs), expected, jobs, strict=True):
                assert_same(output, wanted, (options, job))

    @given(jobs=jobs(), order=st.randoms(use_true_random=False))
    @few_but_rich
    def test_order_of_arrival_changes_nothing(self, start: Start, jobs: list[Job], order: Random) -> None:
        engine = start()
        expected = list(zip(jobs, run(engine, jobs), strict=True))
        order.shuffle(expected)
        shuffled = [replace(job, arrival=order.randrange(12)) for job, _ in expected]
        for output, (job, wanted) in zip(run(engine, shuffled), expected, strict=True):
            assert_same(output, wanted, job)

    @given(jobs=jobs(aborts=True))
    @few_but_rich
    def test_aborts_leave_the_others_alone(
        self, start: Start, alone: Callable[[Job], RequestOutput], jobs: list[Job]
    ) -> None:
        outputs = run(start(), jobs)
        for output, job in zip(outputs, jobs, strict=True):
            wanted = alone(job)
            if any(o.finish_reason == "abort" for o in output.outputs):
                for cut, whole in zip(output.outputs, wanted.outputs, strict=True):
                    assert cut.token_ids == whole.token_ids[: len(cut.token_ids)]
            else:
                assert_same(output, wanted, job)


# Each invariant by itself; the engine's own counts confirm that the intended case did happen.

BOTH = pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])


@BOTH
def test_batched_requests_give_the_same_tokens_as_alone(start: Start, params: SamplingParams) -> None:
    engine, prompts = start(), [tokens(n, n) for n in (1, 3, 5, 2)]
    single = [generate(engine, [prompt], params)[0] for prompt in prompts]
    engine.reset_prefix_cache()
    steps = engine.stats.num_steps
    for output, wanted in zip(generate(engine, prompts, params), single, strict=True):
        assert_same(output, wanted)
    assert engine.stats.num_steps - steps == 10, "all four ran in the same steps"


@BOTH
def test_chunked_is_whole(start: Start, params: SamplingParams) -> None:
    prompt = tokens(50, "chunks")
    (whole,) = generate(start(max_num_batched_tokens=64), [prompt], params)
    engine = start()
    steps = engine.stats.num_steps
    (chunked,) = generate(engine, [prompt], params)
    assert engine.stats.num_steps - steps == 4 + 9
    assert_same(chunked, whole)


@BOTH
def test_prefix_cached_is_cold(start: Start, params: SamplingParams) -> None:
    engine, prompt = start(), tokens(41, "cached")
    (cold,) = generate(engine, [prompt], params)
    (warm,) = generate(engine, [prompt], params)
    assert (cold.num_cached_tokens, warm.num_cached_tokens) == (0, 40)
    assert_same(warm, cold)


def test_outputs_are_cached_too(start: Start) -> None:
    engine, prompt = start(), tokens(10, "turns")
    (first,) = generate(engine, [prompt], GREEDY)
    second_prompt = prompt + first.outputs[0].token_ids + tokens(3, "turn 2")
    (second,) = generate(engine, [second_prompt], GREEDY)
    assert second.num_cached_tokens == 16  # 19 of 20 tokens were computed: 4 whole pages
    engine.reset_prefix_cache()
    assert_same(generate(engine, [second_prompt], GREEDY)[0], second)


@BOTH
def test_preempted_is_undisturbed(start: Start, alone: Callable[[Job], RequestOutput], params: SamplingParams) -> None:
    batch = [Job(tokens(20, i), replace(params, max_tokens=25)) for i in range(4)]
    engine = start()
    preemptions = engine.stats.num_preemptions
    outputs = run(engine, batch)
    assert engine.stats.num_preemptions > preemptions
    assert sum(output.metrics.num_preemptions for output in outputs) == engine.stats.num_preemptions - preemptions
    for output, job in zip(outputs, batch, strict=True):
        assert_same(output, alone(job))


@BOTH
def test_step_ahead_is_the_plain_loop(start: Start, params: SamplingParams) -> None:
    prompts = [tokens(n, n) for n in (4, 9, 1)]
    ahead, plain = start(), start(step_ahead=False)
    for output, wanted in zip(generate(ahead, prompts, params), generate(plain, prompts, params), strict=True):
        assert_same(output, wanted)


def test_step_ahead_has_the_next_step_under_way(start: Start) -> None:
    engine = start()
    engine.add_request("a", tokens(3, 0), GREEDY)
    assert engine.step() == []
    for count in range(1, 10):
        (output,) = engine.step()
        assert len(output.outputs[0].token_ids) == count
        assert len(engine.replicas[0].in_flight) == 1
    assert engine.step()[0].finished


def test_a_stop_seen_late_wastes_one_token_and_counts_it(start: Start) -> None:
    prompt = tokens(6, "stop")
    stop = generate(start(), [prompt], GREEDY)[0].outputs[0].token_ids[4]
    params = SamplingParams(temperature=0, max_tokens=10, stop_token_ids=[stop], ignore_eos=True)
    wasted, outputs = {}, {}
    for ahead in (True, False):
        engine = start(step_ahead=ahead)
        before = engine.stats.num_wasted_tokens
        outputs[ahead] = generate(engine, [prompt], params)[0]
        wasted[ahead] = engine.stats.num_wasted_tokens - before
    assert_same(outputs[True], outputs[False])
    assert wasted == {True: 1, False: 0}


def test_a_length_limit_wastes_nothing(start: Start) -> None:
    engine = start()
    before = engine.stats.num_wasted_tokens
    generate(engine, [tokens(5, i) for i in range(7)], GREEDY)
    assert engine.stats.num_wasted_tokens == before


@pytest.mark.parametrize("step_ahead", [True, False])
def test_steps_are_full_while_requests_wait(start: Start, monkeypatch: pytest.MonkeyPatch, step_ahead: bool) -> None:
    engine, plans = start(step_ahead=step_ahead), []
    schedule = engine.replicas[0].scheduler.schedule
    monkeypatch.setattr(
        engine.replicas[0].scheduler,
        "schedule",
        lambda *args, **options: plans.append(schedule(*args, **options)) or plans[-1],
    )
    for index in range(8):
        engine.add_request(str(index), tokens(3, index), SamplingParams(temperature=0, max_tokens=5, ignore_eos=True))
    while engine.has_unfinished():
        busy_step(engine)
    sizes = [(plan.num_rows, plan.num_tokens) for plan in plans if plan is not None]
    assert sizes == 2 * ([(4, 12)] + 4 * [(4, 4)])


@pytest.mark.parametrize("budget", [16, 64])  # the prefix in chunks, or with budget left for others beside it
def test_shared_prefix_is_computed_once(start: Start, budget: int) -> None:
    engine, prefix = start(max_num_batched_tokens=budget), tokens(32, "shared")
    prefill = engine.stats.num_prefill_tokens
    params = SamplingParams(temperature=0, max_tokens=1, logprobs=2)
    outputs = generate(engine, [[*prefix, 3 + i, 4] for i in range(64)], params)
    assert engine.stats.num_prefill_tokens - prefill == 32 + 64 * 2
    assert [output.num_cached_tokens for output in outputs] == [0] + 63 * [32]
    for output in outputs[1:4]:  # requests that ran beside the first with a budget of 64
        assert_same(output, run_alone(engine, Job(output.prompt_token_ids, params)))


def test_samples_share_their_prompt_even_without_a_prefix_cache(start: Start) -> None:
    engine, prompt = start(enable_prefix_caching=False), tokens(34, "n")
    params = SamplingParams(n=4, seed=1, max_tokens=3, ignore_eos=True)
    for _ in range(2):  # the second run finds nothing of the first
        prefill = engine.stats.num_prefill_tokens
        engine.add_request("a", prompt, params)
        most = 0
        while engine.has_unfinished():
            busy_step(engine)
            most = max(most, engine.occupancy.num_pages_used)
        assert most == 8 + 4
        assert engine.stats.num_prefill_tokens - prefill == 32 + 4 * 2


def test_samples_differ_and_repeat(start: Start) -> None:
    engine = start()
    params = SamplingParams(n=4, temperature=1.5, seed=9, max_tokens=8, ignore_eos=True)
    first, second = (generate(engine, [tokens(5, "n")], params)[0] for _ in range(2))
    assert_same(first, second)
    for a, b in itertools.combinations(first.outputs, 2):
        assert a.token_ids != b.token_ids


def test_requests_without_seed_differ(start: Start) -> None:
    params = SamplingParams(temperature=1.5, max_tokens=8, ignore_eos=True)
    first, second = (o.outputs[0].token_ids for o in generate(start(), 2 * [tokens(5, "seedless")], params))
    assert first != second


def test_cache_salt_isolates(start: Start) -> None:
    engine, prompt = start(), tokens(17, "salt")

    def cached(salt: str | None) -> int:
        return run(engine, [Job(prompt, GREEDY, salt=salt)])[0].num_cached_tokens

    assert [cached(salt) for salt in ("a", "b", None, "", "a", "b", None)] == [0, 0, 0, 16, 16, 16, 16]
    (output,) = generate_salted(engine, {"prompt_token_ids": prompt, "cache_salt": "c"})
    assert output.num_cached_tokens == 0


def test_disabled_prefix_cache_shares_nothing(start: Start) -> None:
    engine = start(enable_prefix_caching=False)
    outputs = generate(engine, 6 * [tokens(17, "off")], GREEDY)
    assert [output.num_cached_tokens for output in outputs] == 6 * [0]


def generate_salted(engine: DrivenEngine, prompt: dict[str, object]) -> list[RequestOutput]:
    engine.add_request("salted", prompt, GREEDY)
    outputs: list[RequestOutput] = []
    while engine.has_unfinished():
        outputs = busy_step(engine)
    drain(engine)
    return outputs
