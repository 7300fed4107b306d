"""Sleeping engines have freed weights and pool; awake, they serve as before and compile nothing."""

import gc
import weakref
from collections.abc import Callable
from typing import Any

import jax
import pytest

from jaxserve.api.sampling_params import SamplingParams
from jaxserve.assembly.driven import DrivenEngine
from jaxserve.errors import ConfigError, RequestError
from jaxserve.execution.program_store import compile_counter
from jaxserve.offline.llm import LLM
from tests.e2e.workloads import generate, tokens

Start = Callable[..., DrivenEngine]

PARAMS = SamplingParams(temperature=0.8, seed=5, max_tokens=8, ignore_eos=True)
PROMPTS = [tokens(18, f"sleep {i}") for i in range(3)]


def token_ids(engine: DrivenEngine) -> list[Any]:
    return [output.outputs[0].token_ids for output in generate(engine, PROMPTS, PARAMS)]


def arrays_of(engine: DrivenEngine) -> list[weakref.ref[Any]]:
    runner = engine.replicas[0].executor
    return [weakref.ref(leaf) for leaf in jax.tree.leaves((runner.params, runner.state))]


def test_weights_are_kept_and_all_is_freed_meanwhile(start: Start) -> None:
    engine = start()
    expected = token_ids(engine)
    for _ in range(2):
        alive, compiles = arrays_of(engine), compile_counter.count
        engine.sleep()
        gc.collect()
        assert engine.host.memory.is_sleeping
        assert not any(array() is not None for array in alive)
        with pytest.raises(RequestError, match="call wake_up first"):
            engine.add_request("asleep", PROMPTS[0], PARAMS)
        engine.devices.wake_up()
        assert not engine.host.memory.is_sleeping
        assert token_ids(engine) == expected
        assert compile_counter.count == compiles
    (output,) = generate(engine, PROMPTS[:1], SamplingParams(temperature=0, max_tokens=1))
    assert output.num_cached_tokens > 0
    engine.sleep()
    engine.devices.wake_up()
    (output,) = generate(engine, PROMPTS[:1], SamplingParams(temperature=0, max_tokens=1))
    assert output.num_cached_tokens == 0


def test_weights_that_were_let_go_are_given_anew(start: Start, llama: Any) -> None:
    engine = start()
    expected = token_ids(engine)
    engine.sleep(level=2)
    with pytest.raises(ConfigError, match="must be awake to take weights"):
        engine.update_weights(llama)
    engine.devices.wake_up(tags=["weights"])
    assert engine.host.memory.is_sleeping
    with pytest.raises(RequestError, match="call wake_up first"):
        engine.add_request("half asleep", PROMPTS[0], PARAMS)
    engine.devices.wake_up(tags=["kv_cache"])
    assert not engine.host.memory.is_sleeping
    with pytest.raises(RequestError, match="let them go; update_weights"):
        engine.add_request("without weights", PROMPTS[0], PARAMS)
    engine.update_weights(llama)
    assert token_ids(engine) == expected


def test_weights_may_come_before_the_pool(start: Start, llama: Any) -> None:
    engine = start()
    expected = token_ids(engine)
    engine.sleep(level=2)
    engine.devices.wake_up(tags=["weights"])
    engine.update_weights(llama)
    engine.devices.wake_up(tags=["kv_cache"])
    assert token_ids(engine) == expected


def test_an_unfinished_request_keeps_it_awake(start: Start) -> None:
    engine = start()
    engine.add_request("unfinished", PROMPTS[0], PARAMS)
    engine.step()
    with pytest.raises(RequestError, match="must have ended before sleep, got 1"):
        engine.sleep()
    engine.abort("unfinished")
    engine.sleep()
    engine.devices.wake_up()


WRONG = [
    lambda engine: engine.sleep(level=3),
    lambda engine: engine.devices.wake_up("weights"),
    lambda engine: engine.devices.wake_up(["x"]),
]


@pytest.mark.parametrize("ask", WRONG)
def test_wrong_levels_and_tags(start: Start, ask: Callable[[DrivenEngine], None]) -> None:
    with pytest.raises(ConfigError, match="must be"):
        ask(start())


def test_the_offline_interface_has_it_too(llm: LLM) -> None:
    expected = llm.generate("Good night.", PARAMS, use_tqdm=False)[0].outputs[0].text
    llm.sleep(1)
    llm.sleep(1)
    assert llm.is_sleeping
    with pytest.raises(RequestError, match="awake"):
        llm.generate("Good night.", PARAMS, use_tqdm=False)
    llm.wake_up()
    assert llm.generate("Good night.", PARAMS, use_tqdm=False)[0].outputs[0].text == expected
