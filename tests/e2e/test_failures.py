"""Steps that break off at any point: what follows is as from a new engine, and nothing hangs or leaks."""

import gc
import weakref
from collections.abc import Callable
from operator import attrgetter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxserve.api.sampling_params import SamplingParams
from jaxserve.assembly.driven import DrivenEngine
from jaxserve.core.growing_outputs import RequestGroup
from jaxserve.execution.runner import RunningStep
from jaxserve.offline.llm import LLM
from tests.e2e.sizes import ONE_ROW, SIZES
from tests.e2e.workloads import generate, tokens
from tests.parameters import mainly
from tests.soon_compiled import few_programs

Start = Callable[..., DrivenEngine]

PROMPTS = [tokens(18, f"failures {i}") for i in range(3)]
PARAMS = SamplingParams(temperature=0.8, seed=5, max_tokens=8, ignore_eos=True, presence_penalty=0.3)
SHORT = [prompt[:4] for prompt in PROMPTS]  # one step each; the following prompts may take several
STEPS = pytest.mark.parametrize(("multi_step", "prompts"), [(1, PROMPTS), (5, SHORT)], ids=["single", "multi-step"])


def failing(method: Callable[..., Any], call: int, error: Exception, *, after: bool) -> Callable[..., Any]:
    """Return `method`, except that its `call`-th call raises, before or after doing its work."""
    calls = 0

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == call and not after:
            raise error
        result = method(*args, **kwargs)
        if calls == call:
            raise error
        return result

    return wrapped


@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize(
    "part",
    [
        "scheduler.schedule",
        "executor.packer.pack",
        "executor.launch",
        "executor.programs.writers.set_slot",
        "scheduler.update",
    ],
)
@pytest.mark.parametrize("error", [ValueError("a defect"), MemoryError("device")])
@STEPS
def test_a_broken_step_ends_its_requests_and_spoils_no_later_one(
    start: Start,
    monkeypatch: pytest.MonkeyPatch,
    part: str,
    after: bool,
    error: Exception,
    multi_step: int,
    prompts: list[list[int]],
) -> None:
    engine = start(multi_step=multi_step)
    expected = [o.outputs[0].token_ids for o in generate(engine, prompts, PARAMS)]
    engine.reset_prefix_cache()
    owner, _, name = part.rpartition(".")
    with monkeypatch.context() as patch:
        target = attrgetter(owner)(engine.replicas[0])
        if isinstance(target, dict):
            patch.setitem(target, name, failing(target[name], 2, error, after=after))
        else:
            patch.setattr(target, name, failing(getattr(target, name), 2, error, after=after))
        with pytest.raises(type(error)):
            generate(engine, prompts, PARAMS)
    assert not engine.has_unfinished()
    engine.check_integrity()
    assert [o.outputs[0].token_ids for o in generate(engine, prompts, PARAMS)] == expected


@STEPS
def test_an_error_of_the_device_ends_its_requests_and_spoils_no_later_one(
    start: Start, monkeypatch: pytest.MonkeyPatch, multi_step: int, prompts: list[list[int]]
) -> None:
    engine = start(multi_step=multi_step)
    expected = [o.outputs[0].token_ids for o in generate(engine, prompts, PARAMS)]
    engine.reset_prefix_cache()
    with monkeypatch.context() as patch:
        patch.setattr(RunningStep, "result", failing(RunningStep.result, 2, RuntimeError("out of memory"), after=False))
        with pytest.raises(RuntimeError, match="out of memory"):
            generate(engine, prompts, PARAMS)
    assert engine.replicas[0].chooser._pacer._last is None, "no step's time counts from before the failure"
    assert not engine.has_unfinished()
    assert [o.outputs[0].token_ids for o in generate(engine, prompts, PARAMS)] == expected


@STEPS
def test_an_error_between_the_last_token_and_its_delivery_leaves_no_request_open(
    start: Start, monkeypatch: pytest.MonkeyPatch, multi_step: int, prompts: list[list[int]]
) -> None:
    engine = start(multi_step=multi_step)
    one_token = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)
    expected = [o.outputs[0].token_ids for o in generate(engine, prompts, PARAMS)]
    with monkeypatch.context() as patch:
        patch.setattr(RequestGroup, "append", failing(RequestGroup.append, 1, ValueError("a defect"), after=False))
        with pytest.raises(ValueError, match="defect"):
            generate(engine, prompts, one_token)
    assert not engine.has_unfinished()
    assert [o.outputs[0].token_ids for o in generate(engine, prompts, PARAMS)] == expected


def test_extreme_but_valid_values_are_served(start: Start) -> None:
    engine = start()
    params = SamplingParams(
        max_tokens=None,
        min_tokens=2**31 - 1,
        top_k=2**31 - 1,
        seed=2**64 - 1,
        temperature=10_000,
        repetition_penalty=1e-30,
        frequency_penalty=-2,
        logit_bias={0: -100, 1: 100.0},
        min_p=1e-38,
        top_p=1e-30,
    )
    (output,) = generate(engine, [PROMPTS[0]], params)
    assert len(output.outputs[0].token_ids) == SIZES["max_model_len"] - len(PROMPTS[0])
    assert output.outputs[0].finish_reason == "length"


def test_parameters_may_be_numpy_scalars_and_change_before_use(start: Start) -> None:
    engine = start()
    params = SamplingParams(temperature=np.float32(0.5), seed=np.int64(3), max_tokens=np.int32(4), ignore_eos=True)
    assert (type(params.temperature), type(params.seed), type(params.max_tokens)) == (float, int, int)
    params.max_tokens = 6
    output = engine.add_request("a", PROMPTS[0], params)
    params.max_tokens = 2  # too late for this request
    while engine.has_unfinished():
        engine.step()
    assert len(output.outputs[0].token_ids) == 6


def test_without_max_tokens_the_pool_is_the_limit(start: Start) -> None:
    with few_programs():
        engine = start(num_pages=6)
    (output,) = generate(engine, [tokens(5, "short")], SamplingParams(max_tokens=None, ignore_eos=True))
    assert len(output.outputs[0].token_ids) == 6 * SIZES["page_size"] + 1 - 5


@pytest.mark.parametrize("compile_ahead", mainly(["background"], "minimal"))
@pytest.mark.long
def test_a_dropped_engine_leaves_no_memory_behind(llama: Path, compile_ahead: str) -> None:
    options = ONE_ROW | {"compile_ahead": compile_ahead, "max_num_batched_tokens": 3, "multi_step": 2}
    llm = LLM(str(llama), skip_tokenizer_init=True, **options)
    llm.engine.wait_until_warm()
    alive = weakref.ref(llm.engine.replicas[0].executor)
    del llm
    gc.collect()
    assert alive() is None
