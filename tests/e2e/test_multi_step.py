"""Multi-step decode changes the number of dispatches and nothing else."""

from collections.abc import Callable
from dataclasses import replace
from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given

from jaxserve.api.config import EngineConfig
from jaxserve.api.sampling_params import SamplingParams
from jaxserve.assembly.driven import DrivenEngine
from jaxserve.core import step_chooser
from jaxserve.execution.sampling import LogprobLayout
from jaxserve.offline.llm import LLM
from jaxserve.scheduling.pacer import Pacer
from jaxserve.scheduling.step_time import SEVERAL, SINGLE
from tests.e2e.sizes import ONE_ROW, SIZES
from tests.e2e.workloads import Job, assert_same, busy_step, drain, few_but_rich, generate, jobs, run, tokens

Start = Callable[..., DrivenEngine]

STEPS = 5
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
SAMPLED = replace(GREEDY, temperature=1, top_p=0.95, seed=5)


def counted(
    engine: DrivenEngine, prompts: list[list[int]], params: SamplingParams
) -> tuple[list[Any], tuple[int, int, int]]:
    """Return outputs of a cold run, with its numbers of dispatches, steps and wasted tokens."""
    engine.reset_prefix_cache()
    stats = engine.stats
    before = (stats.num_dispatches, stats.num_steps, stats.num_wasted_tokens)
    outputs = generate(engine, prompts, params)
    after = (stats.num_dispatches, stats.num_steps, stats.num_wasted_tokens)
    return outputs, tuple(b - a for a, b in zip(before, after, strict=True))


class TestAnyWorkload:
    @given(jobs=jobs(aborts=True))
    @few_but_rich
    def test_multi_step_tokens_equal_single_step_tokens(self, start: Start, jobs: list[Job]) -> None:
        whole = [replace(job, abort=None) for job in jobs]
        expected = run(start(), whole)
        for output, wanted, job in zip(run(start(multi_step=STEPS), whole), expected, jobs, strict=True):
            assert_same(output, wanted, job)
        for output, wanted in zip(run(start(multi_step=STEPS), jobs), expected, strict=True):
            for cut, completion in zip(output.outputs, wanted.outputs, strict=True):
                assert cut.token_ids == completion.token_ids[: len(cut.token_ids)]


@pytest.mark.parametrize("step_ahead", [True, False])
@pytest.mark.parametrize(
    "params",
    [
        GREEDY,
        SAMPLED,
        replace(SAMPLED, frequency_penalty=0.5, presence_penalty=0.3, repetition_penalty=1.2),
        replace(SAMPLED, logit_bias={5: 3.0, 7: -100.0}),
        replace(SAMPLED, logprobs=3),
        replace(SAMPLED, ignore_eos=False, min_tokens=8, stop_token_ids=list(range(2, 7))),
    ],
    ids=["greedy", "sampled", "penalties", "bias", "logprobs", "min_tokens"],
)
def test_every_parameter(start: Start, params: SamplingParams, step_ahead: bool) -> None:
    prompts = [tokens(n, f"several {n}") for n in (4, 9, 1)]
    expected, single = counted(start(), prompts, params)
    outputs, several = counted(start(multi_step=STEPS, step_ahead=step_ahead), prompts, params)
    for output, wanted in zip(outputs, expected, strict=True):
        assert_same(output, wanted)
    assert several[0] < single[0] == single[1]


def test_dispatches(start: Start) -> None:
    """One dispatch serves the prompt, two serve 5 tokens each, and one the last token."""
    for prompts in ([tokens(6, 0)], [tokens(3, i) for i in range(4)]):
        _, counts = counted(start(multi_step=STEPS), prompts, GREEDY)
        assert counts == (4, 12, 0)
        _, counts = counted(start(), prompts, GREEDY)
        assert counts == (12, 12, 0)


def test_multi_step_statistics_equal_single_step_statistics(start: Start) -> None:
    names = ("num_steps", "num_tokens", "num_decode_tokens", "kv_bytes")
    totals = []
    for multi_step in (1, STEPS):
        engine = start(multi_step=multi_step)
        before = [getattr(engine.stats, name) for name in names]
        generate(engine, [tokens(6, 0)], GREEDY)
        totals.append([getattr(engine.stats, name) - b for name, b in zip(names, before, strict=True)])
    assert totals[0] == totals[1]


def test_a_row_stops_on_the_device_and_the_others_continue(start: Start) -> None:
    prompts = [tokens(6, "stop"), tokens(4, "other")]
    free = generate(start(), prompts, GREEDY)
    ids = free[0].outputs[0].token_ids
    index, stop = next((i, token) for i, token in enumerate(ids) if 2 <= i < STEPS and token not in ids[:i])
    both = [replace(GREEDY, stop_token_ids=[stop]), replace(GREEDY, stop_token_ids=[310])]
    engine = start(multi_step=STEPS)
    before = (engine.stats.num_steps, engine.stats.num_wasted_tokens)
    stopped, other = (engine.add_request(str(i), *request) for i, request in enumerate(zip(prompts, both, strict=True)))
    while not stopped.finished:
        busy_step(engine)
    assert stopped.outputs[0].token_ids == ids[: index + 1]
    assert len(other.outputs[0].token_ids) == 1 + STEPS > index + 1
    while not other.finished:
        busy_step(engine)
    drain(engine)
    assert_same(other, free[1])
    assert (engine.stats.num_steps - before[0], engine.stats.num_wasted_tokens - before[1]) == (GREEDY.max_tokens, 0)


def test_more_stop_ids_than_an_admission_carries(start: Start) -> None:
    prompt = tokens(6, "stop")
    ids = generate(start(), [prompt], GREEDY)[0].outputs[0].token_ids
    params = replace(GREEDY, stop_token_ids=sorted({*range(300, 320), ids[2]}))
    (single,) = generate(start(), [prompt], params)
    (output,) = generate(start(multi_step=STEPS), [prompt], params)
    assert_same(output, single)
    assert output.outputs[0].finish_reason == "stop"


def test_a_newcomer_waits_for_planned_steps(start: Start) -> None:
    engine = start(multi_step=STEPS)
    first = engine.add_request("first", tokens(3, 0), replace(GREEDY, max_tokens=40))
    while len(first.outputs[0].token_ids) < 2:
        busy_step(engine)
    newcomer = engine.add_request("newcomer", tokens(5, 1), replace(GREEDY, max_tokens=1))
    known = len(first.outputs[0].token_ids)
    while not newcomer.finished:
        busy_step(engine)
    assert len(first.outputs[0].token_ids) - known <= STEPS + 2  # the dispatch in flight, then the newcomer's own step
    engine.abort("first")
    drain(engine)


def test_a_dispatch_is_in_flight_while_the_caller_reads_the_one_before(start: Start) -> None:
    engine = start(multi_step=STEPS)
    output = engine.add_request("a", tokens(3, 0), replace(GREEDY, max_tokens=21))
    engine.step()
    for count in (1, 6, 11, 16):
        engine.step()
        assert len(output.outputs[0].token_ids) == count
        assert [step.plan.num_steps for step in engine.replicas[0].in_flight] == [STEPS]
    engine.step()
    assert output.finished


def test_text_streams_in_clumps(llama: Path, llm: LLM, engines: dict[Any, DrivenEngine]) -> None:
    several = LLM.over(DrivenEngine(EngineConfig(str(llama), **SIZES | {"multi_step": STEPS})))
    engines[("llm of several steps", True),] = several.engine
    params = SamplingParams(temperature=0.9, seed=2, max_tokens=12, ignore_eos=True)
    increments = [increment.outputs[0] for increment in several.stream("Once upon", params)]
    ends = list(accumulate(len(increment.token_ids) for increment in increments))
    assert ends[-1] == 12
    assert {1, 6, 11, 12}.issuperset(ends), "a slow reader gets several clumps at once, never a part of one"
    (whole,) = llm.generate("Once upon", params, use_tqdm=False)
    assert "".join(increment.text for increment in increments) == whole.outputs[0].text
    shorter = [replace(params, max_tokens=count) for count in (1, 4)]
    first, fourth = (output.outputs[0].text for output in llm.generate(["Once upon"] * 2, shorter, use_tqdm=False))
    params = replace(params, stop=[fourth[len(first) :]])
    (expected,) = llm.generate("Once upon", params, use_tqdm=False)
    stats = several.engine.stats
    before = (stats.num_dispatches, stats.num_output_tokens, stats.num_wasted_tokens)
    stopped = several.engine.add_request("0", "Once upon", params)
    while several.engine.has_unfinished():
        several.engine.step()
    drain(several.engine)
    assert_same(stopped, expected)
    assert stopped.outputs[0].finish_reason == "stop"
    assert stopped.outputs[0].text == expected.outputs[0].text
    num_tokens = len(expected.outputs[0].token_ids)
    assert 1 < num_tokens < 1 + STEPS, "the stop string ends in the middle of the first dispatch of several"
    assert stats.num_dispatches - before[0] < num_tokens
    assert stats.num_output_tokens - before[1] == num_tokens
    assert stats.num_wasted_tokens - before[2] >= 1 + STEPS - num_tokens


@pytest.mark.long
def test_measured_steps(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both ways are tried; whichever wins, the tokens are those of single steps."""
    monkeypatch.setattr(step_chooser, "DISPATCH_S", 10.0)  # however slow the machine is
    monkeypatch.setattr(Pacer, "_num_rounds", lambda _, program, kind, most, limit_s: 1 if kind == SINGLE else 5)
    params = replace(SAMPLED, max_tokens=60)
    (expected,) = generate(start(), [tokens(3, 0)], params)
    engine = start(**ONE_ROW | {"multi_step": "auto", "compile_ahead": "all", "max_num_batched_tokens": 2})
    before = engine.stats.num_dispatches
    for _ in range(3):
        (output,) = generate(engine, [tokens(3, 0)], params)
        assert_same(output, expected)
    assert engine.stats.num_dispatches - before < 3 * 60
    [times] = engine.replicas[0].step_stats.step_time._dispatches.values()
    assert {kind for kind, samples in times.kinds.items() if samples.num} == {SINGLE, SEVERAL}


@pytest.mark.long
def test_whole_vocabulary_logprobs_limit_dispatches_to_one_step(start: Start) -> None:
    """Every program has room; a dispatch has several steps unless a request asks for such log probabilities."""
    few, whole = start(multi_step=5), start(multi_step=5, max_logprobs=-1)
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    outputs, num_bytes = [], []
    for engine in (few, whole):
        for logprobs in (None, 2):
            engine.reset_prefix_cache()
            (output,) = generate(engine, [[5, 6, 7]], replace(params, logprobs=logprobs))
            outputs.append(output.outputs[0].token_ids)
        table = engine.replicas[0].executor.programs.table
        shape, (program,) = next((shape, programs) for shape, programs in table.items() if shape.num_rounds > 1)
        layout = engine.replicas[0].executor.packer.layouts[shape.num_tokens, False]
        words = LogprobLayout.from_sizes(engine.config.max_logprobs, engine.arch.vocab_size).num_words
        step_bytes = 4 * (layout.num_rows + layout.num_tokens) * words
        memory = program.memory_analysis()
        num_bytes.append((memory.output_size_in_bytes - memory.alias_size_in_bytes) / step_bytes)
    assert outputs == 4 * outputs[:1]
    assert num_bytes[0] > 3, "rows of five steps, tokens of one"
    assert num_bytes[1] < 1.2
