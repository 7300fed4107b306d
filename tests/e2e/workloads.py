"""Random requests, and a loop that runs them through an engine and checks invariants at every step."""

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

from jaxserve.api.outputs import Logprob, RequestOutput
from jaxserve.api.sampling_params import SamplingParams
from jaxserve.assembly.driven import DrivenEngine
from jaxserve.offline.llm import LLM
from tests.random_runs import examples

TOLERANCE = 1e-4
NUM_SYSTEM_PROMPTS = 3

few_but_rich = settings(
    max_examples=examples(10),
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.large_base_example],
)


@dataclass(frozen=True)
class Job:
    """A request, the step before which it arrives, and the step before which it is aborted if it still runs."""

    prompt: list[int]
    params: SamplingParams = field(default_factory=lambda: SamplingParams(temperature=0))
    arrival: int = 0
    abort: int | None = None
    salt: str | None = None


def tokens(count: int, seed: object, vocab_size: int = 131) -> list[int]:
    """Return `count` random ids from 3 on, without special ones; a longer list of a seed begins with the shorter."""
    rng = random.Random(str(seed))
    return [rng.randrange(3, vocab_size) for _ in range(count)]


@st.composite
def sampling_params(draw: st.DrawFn) -> SamplingParams:
    """Draw all parameters that may change tokens or outputs; a third of the requests stays greedy."""
    max_tokens = draw(st.integers(1, 12))
    fields: dict[str, Any] = {
        "n": draw(st.sampled_from([1, 1, 1, 2, 3])),
        "temperature": draw(st.sampled_from([0, 0.7, 1.5])),
        "seed": draw(st.sampled_from([0, -3, 7, 2**63 + 11])),
        "max_tokens": max_tokens,
        "min_tokens": draw(st.sampled_from([0, 0, min(4, max_tokens)])),
        "ignore_eos": draw(st.booleans()),
        "logprobs": draw(st.sampled_from([None, None, 0, 3])),
        "prompt_logprobs": draw(st.sampled_from([None, None, None, 2])),
    }
    if draw(st.booleans()):
        fields |= {"top_k": draw(st.sampled_from([-1, 1, 5])), "top_p": draw(st.sampled_from([0.3, 0.9, 1]))}
        fields |= {"min_p": draw(st.sampled_from([0, 0.05]))}
    if draw(st.booleans()):
        fields |= {"presence_penalty": draw(st.sampled_from([-1, 0, 1.5])), "frequency_penalty": 0.7}
        fields |= {"repetition_penalty": draw(st.sampled_from([0.8, 1.0, 1.3]))}
    if draw(st.booleans()):
        fields |= {"logit_bias": {i: draw(st.sampled_from([-100, -2, 4])) for i in range(0, 40, 3)}}
    if draw(st.booleans()):
        fields |= {"allowed_token_ids": list(range(draw(st.sampled_from([0, 50])), 131, 2))}
    if draw(st.booleans()):
        fields |= {"stop_token_ids": list(range(draw(st.sampled_from([70, 110])), 131))}
    return SamplingParams(**fields)


@st.composite
def jobs(draw: st.DrawFn, aborts: bool = False) -> list[Job]:
    """Draw up to eight requests of up to 52 tokens that arrive over a dozen steps; most begin like another one."""
    out = []
    for index in range(draw(st.integers(2, 8))):
        params = draw(sampling_params())
        system = tokens(draw(st.sampled_from([0, 7, 16, 27])), draw(st.integers(1, NUM_SYSTEM_PROMPTS)))
        own = tokens(draw(st.integers(1, 13)), draw(st.sampled_from(["same", index])))
        abort = draw(st.none() | st.integers(0, 20)) if aborts else None
        out.append(Job(system + own, params, draw(st.integers(0, 12)), abort, draw(st.sampled_from([None, None, "s"]))))
    return out


def run(engine: DrivenEngine, jobs: Sequence[Job]) -> list[RequestOutput]:
    """Run all jobs to their end; return the outputs in their order."""
    outputs: dict[int, RequestOutput] = {}
    step = 0
    while len(outputs) < len(jobs):
        for index, job in enumerate(jobs):
            if job.arrival == step:
                engine.add_request(str(index), job.prompt, job.params, cache_salt=job.salt)
            if job.abort is not None and max(job.abort, job.arrival) == step:
                aborted = engine.abort(str(index))
                assert (aborted is None) == (index in outputs)
                outputs[index] = aborted or outputs[index]
        for output in busy_step(engine):
            if output.finished:
                outputs[int(output.request_id)] = output
        step += 1
    drain(engine)
    return [outputs[index] for index in range(len(jobs))]


def busy_step(engine: DrivenEngine) -> list[RequestOutput]:
    """Run one step, which must dispatch or collect something if there is anything to do."""
    unfinished, before = engine.has_unfinished(), _work(engine)
    outputs = engine.step()
    assert not unfinished or _work(engine) != before, "the engine idles while requests are unfinished"
    engine.check_integrity()
    return outputs


def wait_until_idle(llm: LLM) -> None:
    """Wait until the threads of an LLM have ended cancelled requests."""
    with llm._threads.paused() as engine:
        assert not engine.frontend.has_unfinished()
        engine.check_integrity()


def drain(engine: DrivenEngine) -> None:
    """Collect steps still in flight for requests that ended early; then every page must be back."""
    engine.step()
    assert not engine.has_unfinished()
    assert engine.occupancy.num_pages_used == 0


def run_alone(engine: DrivenEngine, job: Job) -> RequestOutput:
    """Run one job with nothing before it, beside it or in the cache."""
    engine.reset_prefix_cache()
    (output,) = run(engine, [Job(job.prompt, job.params, salt=job.salt)])
    return output


def generate(engine: DrivenEngine, prompts: Sequence[Sequence[int]], params: SamplingParams) -> list[RequestOutput]:
    """Run prompts that arrive together."""
    return run(engine, [Job(list(prompt), params) for prompt in prompts])


def assert_same(got: RequestOutput, expected: RequestOutput, what: object = "") -> None:
    """Check for equal tokens and endings, and for log probabilities within tolerance."""
    for a, b in zip(got.outputs, expected.outputs, strict=True):
        assert a.token_ids == b.token_ids, what
        assert (a.finish_reason, a.stop_reason) == (b.finish_reason, b.stop_reason), what
        assert_close(a.logprobs, b.logprobs)
    assert_close(got.prompt_logprobs, expected.prompt_logprobs)


def assert_bitwise(got: RequestOutput, expected: RequestOutput) -> None:
    """Check for equal tokens and endings, and for the same bits in all log probabilities."""
    assert_same(got, expected)
    for a, b in zip(got.outputs, expected.outputs, strict=True):
        assert a.logprobs == b.logprobs
    assert got.prompt_logprobs == expected.prompt_logprobs


def assert_close(
    got: Sequence[dict[int, Logprob] | None] | None, expected: Sequence[dict[int, Logprob] | None] | None
) -> None:
    """Check log probabilities of the tokens themselves, and of all others that both sides name."""
    assert (got is None) == (expected is None)
    for a, b in zip(got or (), expected or (), strict=True):
        assert (a is None) == (b is None)
        if a is not None and b is not None:
            assert next(iter(a)) == next(iter(b))
            shared = a.keys() & b.keys()
            assert len(shared) >= len(b) - 1, "ties aside, the most likely tokens are the same"
            np.testing.assert_allclose(
                [a[i].logprob for i in shared], [b[i].logprob for i in shared], atol=TOLERANCE, rtol=0
            )


def _work(engine: DrivenEngine) -> list[tuple[int, int]]:
    return [(core.scheduler._last_updated_step_id, len(core.in_flight)) for core in engine.replicas]
