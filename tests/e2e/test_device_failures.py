"""Programs that fail on the device after their dispatch: later requests are served as by a new engine."""

from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.api.sampling_params import SamplingParams
from jaxserve.assembly.driven import DrivenEngine
from jaxserve.execution.runner import RunningStep
from jaxserve.pallas_kernels import native
from jaxserve.scheduling.step_plan import StepPlan, StepShape
from tests.e2e.workloads import generate, tokens

Start = Callable[..., DrivenEngine]

PROMPTS = [tokens(4, f"device failures {i}") for i in range(3)]
PARAMS = SamplingParams(temperature=0.8, seed=5, max_tokens=8, ignore_eos=True)
NO_FORMATS = {"weight_format": np.int64(0), "input_format": np.int64(0)}
ERROR = "must give y"  # message of the custom call about its operands' shapes

pytestmark = pytest.mark.skipif(native.unavailable() is not None, reason="needs a custom call that returns an error")


@jax.jit
def fail(arrays: Any) -> Any:
    """Return the arrays of a program whose custom call returns an error: each of them holds that error."""
    shape = jax.ShapeDtypeStruct((1, 1), jnp.float32)
    operands = [*[jnp.zeros((1,))] * 7, jnp.zeros(0, jnp.int32)]
    zero = jax.ffi.ffi_call(native.LINEAR, shape)(*operands, eps=np.float32(0), **NO_FORMATS)[0, 0]
    return jax.tree.map(lambda x: x ^ (zero > 0) if x.dtype == bool else x + zero.astype(x.dtype), arrays)


class Failing:
    """An engine whose `call`-th step fails on the device."""

    def __init__(self, engine: DrivenEngine, patch: pytest.MonkeyPatch, call: int) -> None:
        self.runner, self.call, self.calls = engine.replicas[0].executor, call, 0
        self.launch = self.runner.launch
        patch.setattr(self.runner, "launch", self.launch_and_fail)
        patch.setattr(engine.replicas[0], "_forbid_compiles", False)

    def launch_and_fail(self, plan: StepPlan, program: StepShape) -> RunningStep:
        handle = self.launch(plan, program)
        self.calls += 1
        if self.calls == self.call:
            self.runner.state, handle.output = fail((self.runner.state, handle.output))
        return handle


@pytest.fixture
def engine(start: Start, request: pytest.FixtureRequest) -> Iterator[DrivenEngine]:
    engine = start(**getattr(request, "param", {}))
    yield engine
    engine.stats.num_compiles = 0


@pytest.fixture
def expected(engine: DrivenEngine) -> list[Any]:
    return token_ids(engine)


def token_ids(engine: DrivenEngine) -> list[Any]:
    engine.reset_prefix_cache()
    return [output.outputs[0].token_ids for output in generate(engine, PROMPTS, PARAMS)]


WAYS = [
    pytest.param({"step_ahead": False}, id="alone"),
    pytest.param({}, id="ahead"),
    pytest.param({"multi_step": 5}, id="multi_step", marks=pytest.mark.long),
]


@pytest.mark.parametrize("call", [1, 2, 5])
@pytest.mark.parametrize("engine", WAYS, indirect=True)
def test_a_failed_step_ends_its_requests_and_spoils_no_later_one(
    engine: DrivenEngine, expected: list[Any], monkeypatch: pytest.MonkeyPatch, call: int
) -> None:
    if engine.config.max_steps > 1:
        call = min(call, 2)
    with monkeypatch.context() as patch:
        failing = Failing(engine, patch, call)
        with pytest.raises(jax.errors.JaxRuntimeError, match=ERROR):
            generate(engine, PROMPTS, PARAMS)
        assert failing.calls >= call
    assert not engine.has_unfinished()
    engine.check_integrity()
    assert token_ids(engine) == expected
    assert token_ids(engine) == expected


def test_an_unawaited_failed_step_does_not_fail_the_next_request(
    engine: DrivenEngine, expected: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last step runs ahead of the stop that ends its only request."""
    stopping = SamplingParams(temperature=0, max_tokens=8, stop_token_ids=None)
    (free,) = generate(engine, PROMPTS[:1], stopping)
    tokens = free.outputs[0].token_ids
    last = next(index for index in range(2, 7) if tokens[index] not in tokens[:index])
    stopping.stop_token_ids = [tokens[last]]
    engine.reset_prefix_cache()
    with monkeypatch.context() as patch:
        failing = Failing(engine, patch, last + 2)
        (stopped,) = generate(engine, PROMPTS[:1], stopping)
        assert failing.calls == last + 2
        assert stopped.outputs[0].finish_reason == "stop"
        assert [output.outputs[0].token_ids for output in generate(engine, PROMPTS, PARAMS)] == expected
    engine.check_integrity()


def test_an_aborted_requests_failure_does_not_fail_the_next_one(
    engine: DrivenEngine, expected: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine.reset_prefix_cache()
    with monkeypatch.context() as patch:
        failing = Failing(engine, patch, 2)
        engine.add_request("aborted", PROMPTS[0], PARAMS)
        while failing.calls < 2:
            engine.step()
        engine.abort("aborted")
        assert [output.outputs[0].token_ids for output in generate(engine, PROMPTS, PARAMS)] == expected
    engine.check_integrity()


def test_close_does_not_raise_after_a_failure(
    engine: DrivenEngine, engines: dict[Any, DrivenEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    for key in [key for key, shared in engines.items() if shared is engine]:
        del engines[key]  # other tests must not use it
    with monkeypatch.context() as patch:
        failing = Failing(engine, patch, 2)
        engine.add_request("last", PROMPTS[0], PARAMS)
        while failing.calls < 2:
            engine.step()
        engine.abort("last")
        engine.close()
