"""Calls from several threads on one LLM, and its end: all are served as if alone, and no thread is left."""

import asyncio
import gc
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import pytest
import tqdm

from jaxserve.api.sampling_params import SamplingParams
from jaxserve.execution import programs as programs_module
from jaxserve.execution.programs import Programs
from jaxserve.execution.runner import RunningStep
from jaxserve.offline.llm import LLM
from tests.e2e.sizes import ONE_ROW
from tests.e2e.workloads import wait_until_idle
from tests.waiting import until

PARAMS = SamplingParams(temperature=0.8, seed=5, max_tokens=10, ignore_eos=True)
PROMPTS = [f"Thread {i} speaks." for i in range(6)]
PATIENCE_S = 60


def answer(llm: LLM, prompt: str, max_tokens: int = 10) -> list[int]:
    (output,) = llm.generate(prompt, replace(PARAMS, max_tokens=max_tokens), use_tqdm=False)
    return output.outputs[0].token_ids


@pytest.fixture(scope="module")
def alone(llm: LLM) -> dict[str, list[int]]:
    return {prompt: answer(llm, prompt) for prompt in PROMPTS}


def test_threads_are_served_as_if_alone(llm: LLM, alone: dict[str, list[int]]) -> None:
    with ThreadPoolExecutor(len(PROMPTS)) as pool:
        futures = {pool.submit(answer, llm, prompt, n): (prompt, n) for prompt in PROMPTS for n in (3, 10)}
        for future, (prompt, n) in futures.items():
            assert future.result(PATIENCE_S) == alone[prompt][:n]


def test_an_asyncio_loop_with_executors_is_served(llm: LLM, alone: dict[str, list[int]]) -> None:
    async def serve() -> list[list[int]]:
        return await asyncio.gather(*(asyncio.to_thread(answer, llm, prompt) for prompt in PROMPTS))

    assert asyncio.run(asyncio.wait_for(serve(), PATIENCE_S)) == [alone[prompt] for prompt in PROMPTS]


def test_streams_in_threads_and_generate_inside_a_stream(llm: LLM, alone: dict[str, list[int]]) -> None:
    def read(prompt: str) -> list[int]:
        ids = []
        for increment in llm.stream(prompt, PARAMS):
            ids += increment.outputs[0].token_ids
            assert answer(llm, PROMPTS[0], 2) == alone[PROMPTS[0]][:2]
        return ids

    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(read, PROMPTS[:2], timeout=PATIENCE_S)) == [alone[prompt] for prompt in PROMPTS[:2]]


def test_a_short_call_does_not_wait_for_a_long_one(llm: LLM) -> None:
    """The steps of either call serve both, and the finished call returns."""
    steps = [0]
    step = llm.engine.core.step

    def counting(now_s: float) -> None:
        steps[0] += 1
        step(now_s)

    with pytest.MonkeyPatch.context() as patch, ThreadPoolExecutor(1) as pool:
        patch.setattr(llm.engine.core, "step", counting)
        long = pool.submit(answer, llm, PROMPTS[0], 40)
        until(lambda: steps[0] or long.done())
        before = steps[0]
        answer(llm, PROMPTS[1], 2)
        assert steps[0] - before < 20
        long.result(PATIENCE_S)


def test_a_failed_step_is_raised_in_all_threads(llm: LLM, alone: dict[str, list[int]]) -> None:
    both = threading.Barrier(2)
    result = RunningStep.result

    def failing(handle: RunningStep) -> Any:
        if llm.engine.core.num_unfinished < 2:
            return result(handle)
        raise RuntimeError("the device is gone")

    def run(prompt: str) -> list[int]:
        both.wait(PATIENCE_S)
        return answer(llm, prompt, 60)

    with pytest.MonkeyPatch.context() as patch, ThreadPoolExecutor(2) as pool:
        patch.setattr(RunningStep, "result", failing)
        for future in [pool.submit(run, prompt) for prompt in PROMPTS[:2]]:
            with pytest.raises(RuntimeError, match="the device is gone"):
                future.result(PATIENCE_S)
    assert answer(llm, PROMPTS[0]) == alone[PROMPTS[0]]


def test_a_stream_that_is_collected_inside_a_step_is_aborted_later(
    llm: LLM, alone: dict[str, list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    step, streams = llm.engine.core.step, [llm.stream(PROMPTS[1], replace(PARAMS, max_tokens=40))]
    next(streams[0])

    def dropping(now_s: float) -> None:
        streams.clear()
        step(now_s)

    monkeypatch.setattr(llm.engine.core, "step", dropping)
    assert answer(llm, PROMPTS[0]) == alone[PROMPTS[0]]
    assert not streams
    wait_until_idle(llm)


# The end of an LLM


def arrays_of(llm: LLM) -> list[weakref.ref[Any]]:
    runner = llm.engine.replicas[0].executor
    return [weakref.ref(leaf) for leaf in jax.tree.leaves((runner.params, runner.state))]


def close(llm: LLM) -> None:
    llm.close()


def leave(llm: LLM) -> None:
    with llm:
        pass


@pytest.mark.parametrize("end", [close, leave, lambda _: None], ids=["close", "with", "del"])
def test_a_closed_engine_frees_its_arrays_while_programs_compile(
    llama: Path, monkeypatch: pytest.MonkeyPatch, end: Callable[[LLM], None]
) -> None:
    compiling, go_on, made = threading.Event(), threading.Event(), []
    get = Programs._get

    def get_slowly(programs: Programs, name: str, lower: Callable[[], Any]) -> Any:
        made.append(name)
        if len(made) > 7:  # the state, admit, set_slot, set_masks, copy_pages and two steps are waited for
            compiling.set()
            assert go_on.wait(PATIENCE_S)
        return get(programs, name, lower)

    monkeypatch.setattr(Programs, "_get", get_slowly)
    monkeypatch.setattr(programs_module, "_SHORT_RUN_S", 0.0)
    threads = set(threading.enumerate())
    llm = LLM(str(llama), **ONE_ROW | {"max_num_batched_tokens": 3, "compile_ahead": "background", "multi_step": 3})
    # tqdm begins a thread of its own with the first bar of a process
    (compiler,) = {each for each in set(threading.enumerate()) - threads if not isinstance(each, tqdm.TMonitor)}
    assert compiling.wait(PATIENCE_S)
    alive = arrays_of(llm)
    gc.disable()  # no cycle collector may be needed
    try:
        end(llm)
        del llm
        assert not any(array() is not None for array in alive)
    finally:
        gc.enable()
        go_on.set()
    compiler.join(PATIENCE_S)
    assert not compiler.is_alive()
    assert len(made) == 8, "the program at hand is the last"


@pytest.mark.long
def test_an_abandoned_one_with_adapters_is_freed_without_the_cycle_collector(llama: Path) -> None:
    llm = LLM(str(llama), **ONE_ROW, enable_lora=True)
    alive = arrays_of(llm)
    gc.disable()
    try:
        del llm
        assert not any(array() is not None for array in alive)
    finally:
        gc.enable()


def test_whatever_is_asked_of_a_closed_one_is_an_error(llama: Path) -> None:
    with LLM(str(llama), **ONE_ROW) as llm:
        answer(llm, "short", 2)
        params = llm.params
    llm.close()
    for ask in (
        lambda: answer(llm, "short", 2),
        lambda: next(llm.stream("short", PARAMS)),
        lambda: llm.chat([{"role": "user", "content": "hi"}]),
        lambda: llm.update_weights(params),
        llm.reset_prefix_cache,
        lambda: llm.params,
        lambda: llm.is_sleeping,
        llm.sleep,
        llm.wake_up,
    ):
        with pytest.raises(RuntimeError, match="closed"):
            ask()
