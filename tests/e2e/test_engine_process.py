"""An engine whose core is a process: the outputs are equal, and requests end clearly if the process does."""

import enum
import os
import signal
import sys
import types
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import openai
import pytest

from jaxserve.api.config import EngineConfig
from jaxserve.api.outputs import RequestOutput
from jaxserve.api.sampling_params import SamplingParams
from jaxserve.api.structured_outputs import StructuredOutputsParams
from jaxserve.assembly import client
from jaxserve.assembly.driven import DrivenEngine
from jaxserve.core import link, process_messages
from jaxserve.core.core_thread import MAX_DELTAS
from jaxserve.core.event_log import replay_log
from jaxserve.core.step_chooser import StepChooser
from jaxserve.errors import ConfigError, EngineDiedError, RequestError
from jaxserve.offline.beam_search import BeamSearchParams
from jaxserve.offline.llm import LLM
from tests.e2e.sizes import SIZES
from tests.server.conftest import running
from tests.waiting import until

PATIENCE_S = 60
LONG = SamplingParams(max_tokens=90, ignore_eos=True)
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
FORM = StructuredOutputsParams(regex="[a-c]{3}(x|yz)+", whitespace_pattern=None)
KINDS = {
    "greedy": GREEDY,
    "sampled": SamplingParams(temperature=1, seed=7, max_tokens=12, n=3),
    "penalties": SamplingParams(temperature=1, seed=3, max_tokens=12, repetition_penalty=1.2, logit_bias={40: 3.0}),
    "logprobs": GREEDY.clone({"logprobs": 3}),
    "prompt_logprobs": GREEDY.clone({"prompt_logprobs": 2}),
    "stop ids": SamplingParams(temperature=1, seed=1, max_tokens=40, stop_token_ids=[*range(30, 90)]),
    "stop strings": SamplingParams(temperature=1, seed=2, max_tokens=40, stop=["a", "e", "1"], ignore_eos=True),
    "form": SamplingParams(temperature=1, seed=5, max_tokens=20, structured_outputs=FORM),
}


class Served:
    """The engines whose core is a process, started when they are asked for."""

    def __init__(self, model: Path) -> None:
        self._model, self._llm = str(model), None

    def __call__(self) -> LLM:
        if self._llm is None or self._llm.engine.host.problem is not None:
            self._llm = LLM(self._model, engine_process=True, **SIZES)
        return self._llm

    def close(self) -> None:
        if self._llm is not None:
            pid = process_of(self._llm)
            self._llm.close()
            assert not is_alive(pid), "and it is no zombie"


@pytest.fixture(scope="module")
def served(llama: Path) -> Iterator[Served]:
    """Return a function that returns the shared engine, which it starts again after a test has killed it."""
    served = Served(llama)
    yield served
    served.close()


def process_of(llm: LLM) -> int:
    """Return the number of the core's process."""
    pid: int = llm.engine.host.driver._process.pid
    return pid


def is_alive(pid: int) -> bool:
    """Return whether there is a process, even a zombie."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def facts(output: RequestOutput) -> list[Any]:
    """Return what must be equal of an output."""
    rows = [output.prompt_token_ids, output.prompt, output.finished, ids_of(output.prompt_logprobs)]
    for each in output.outputs:
        m = each.metrics
        rows += [each.text, each.token_ids, each.finish_reason, each.stop_reason, ids_of(each.logprobs)]
        rows += [m.num_output_tokens, m.num_preemptions, m.num_cached_tokens]
        times = [m.arrival_s, m.scheduled_s, m.first_token_s, m.last_token_s, m.finished_s]
        assert None not in times
        assert times == sorted(times)
    return rows


def ids_of(logprobs: Any) -> Any:
    """Return ids and ranks of log probabilities."""
    if logprobs is None:
        return None
    return [row and [(token, entry.rank, entry.decoded_token) for token, entry in row.items()] for row in logprobs]


def values_of(output: RequestOutput) -> list[float]:
    """Return log probabilities."""
    tables = [output.prompt_logprobs, *(each.logprobs for each in output.outputs)]
    return [entry.logprob for table in tables if table for row in table if row for entry in row.values()]


@pytest.mark.parametrize("kind", KINDS)
def test_outputs_equal_those_of_a_core_in_this_process(llm: LLM, served: Served, kind: str) -> None:
    llm.reset_prefix_cache()
    assert served().reset_prefix_cache()
    prompts, params = ["Once upon a time", [5, 6, 7] * 9, "x"], KINDS[kind]
    expected, found = (each.generate(prompts, params, use_tqdm=False) for each in (llm, served()))
    assert [facts(output) for output in found] == [facts(output) for output in expected]
    for a, b in zip(found, expected, strict=True):
        np.testing.assert_allclose(values_of(a), values_of(b), atol=2e-4)
    with served()._threads.paused() as engine:  # stop strings have reached the core by then
        assert engine.occupancy.num_pages_used == 0
        engine.check_integrity()


def test_beams_equal_those_of_a_core_in_this_process(llm: LLM, served: Served) -> None:
    params = BeamSearchParams(beam_width=3, max_tokens=4)
    expected, found = (each.beam_search(["Once upon"], params)[0].sequences for each in (llm, served()))
    assert [beam.tokens for beam in found] == [beam.tokens for beam in expected]


def test_a_stream_that_is_closed_leaves_nothing(served: Served) -> None:
    parts = served().stream("Once", LONG)
    text = next(parts).outputs[0].text + next(parts).outputs[0].text
    parts.close()
    assert text
    with served()._threads.paused() as engine:
        assert not engine.frontend.has_unfinished()
        assert engine.occupancy.num_pages_used == 0
    before, stats = served().engine.stats.num_output_tokens, served().engine.stats
    served().generate("Once", GREEDY, use_tqdm=False)
    assert stats.num_output_tokens - before == 12
    assert stats.num_sampled_tokens >= stats.num_output_tokens


def test_the_core_is_never_far_ahead_of_stop_strings(served: Served) -> None:
    engine = served().engine
    before = engine.stats.num_sampled_tokens
    first = served().generate("Once", LONG.clone({"seed": 1}), use_tqdm=False)[0].outputs[0]
    stop = served().engine.tokenizer.decode(first.token_ids[:3])[-1:]
    wasted = engine.stats.num_sampled_tokens - before - 90
    served().generate("Once", LONG.clone({"seed": 1, "stop": [stop]}), use_tqdm=False)
    with served()._threads.paused():
        assert engine.stats.num_wasted_tokens - wasted < 90
    assert MAX_DELTAS < 90


def test_weights_and_sleep(llm: LLM, served: Served, llama: Path) -> None:
    again = served()
    (before,) = again.generate("Once", GREEDY, use_tqdm=False)
    arrays = {name: np.asarray(array) * 0.5 for name, array in named(llama).items()}
    again.update_weights(arrays)
    llm.update_weights(arrays)
    (changed,), (expected,) = (each.generate("Once", GREEDY, use_tqdm=False) for each in (again, llm))
    assert changed.outputs[0].token_ids == expected.outputs[0].token_ids
    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(again.generate, ["Once"] * 60, GREEDY.clone({"max_tokens": 50}), False)
        until(again.engine.frontend.has_unfinished)
        again.update_weights(str(llama), running="restart")
        outputs = [output.outputs[0] for output in future.result(PATIENCE_S)]
    llm.update_weights(str(llama))
    restarted = [output.token_ids[:12] for output in outputs if output.metrics.num_restarts]
    assert restarted
    assert all(token_ids == before.outputs[0].token_ids for token_ids in restarted)
    with pytest.raises(ConfigError, match="unknown"):
        again.update_weights({"unknown": np.zeros(3)})
    with pytest.raises(RequestError, match="can be sent"):
        again.update_weights({"unknown": lambda: 0})
    with ThreadPoolExecutor(1) as pool:  # beside another one, which is served
        future = pool.submit(again.generate, "Once", GREEDY, False)
        odd = again.engine.reader.read("odd", "x", GREEDY)
        odd.requests[0].salt = memoryview(b"no bytes")
        with pytest.raises(RequestError, match="can be sent"):
            again._threads.submit([odd], lambda _: None)
        assert future.result(PATIENCE_S)[0].outputs[0].finish_reason == "length"
    again.sleep(1)
    assert again.is_sleeping
    with pytest.raises(RequestError, match="awake"):
        again.generate("Once", GREEDY, use_tqdm=False)
    again.wake_up()
    assert again.generate("Once", GREEDY, use_tqdm=False)[0].outputs[0].token_ids == before.outputs[0].token_ids
    with pytest.raises(ConfigError, match="engine_process=False"):
        _ = again.params


def named(path: Path) -> dict[str, Any]:
    """Return the tensors of a checkpoint by their names."""
    from safetensors.numpy import load_file

    return {name: array for file in path.glob("*.safetensors") for name, array in load_file(file).items()}


def test_a_chat_is_streamed_over_http(llm: LLM, served: Served) -> None:
    with running(served().engine, served_model_name=["tiny"]) as server:
        client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
        messages: Any = [{"role": "user", "content": "Say more"}]
        parts = list(
            client.chat.completions.create(
                model="tiny", messages=messages, max_tokens=9, temperature=0, stream=True, logprobs=True
            )
        )
        (expected,) = llm.chat(messages, SamplingParams(temperature=0, max_tokens=9), use_tqdm=False)
        assert "".join(part.choices[0].delta.content or "" for part in parts) == expected.outputs[0].text
        assert parts[-1].choices[0].finish_reason == expected.outputs[0].finish_reason
        until(lambda: server.client.get("/ready").status_code == 200)
        assert server.client.get("/health").status_code == 200
        metrics = server.client.get("/metrics").text
        assert 'vllm:num_requests_running{engine="0",model_name="tiny"} 0.0' in metrics
        assert (
            "endpoint-load-metrics"
            in server.client.get("/load", headers={"endpoint-load-metrics-format": "JSON"}).headers
        )


def test_a_driven_engine_has_statistics_of_its_steps(llama: Path, served: Served) -> None:
    """`jaxserve bench` drives engines; here over the process of the others."""
    engine = DrivenEngine.__new__(DrivenEngine)
    vars(engine).update(vars(served().engine), _progressed={})
    engine.host.driver.steps.clear()  # earlier requests, driven by threads, have left some
    output, num_rows = engine.add_request("a", [1, 2, 3], GREEDY), 0
    while engine.has_unfinished():
        engine.step()
        num_rows += sum(step.num_rows for step in engine.last_steps)
    assert len(output.outputs[0].token_ids) == 12
    assert num_rows >= 12
    assert engine.describe_device().platform == "cpu"


def test_the_status_is_small(served: Served) -> None:
    served().generate("Once", GREEDY, use_tqdm=False)
    driver = served().engine.host.driver
    message = process_messages.FromCore([], driver.status, process_messages.stats_values(driver.stats), [])
    assert len(process_messages.pickle.dumps(message, 5)) < 1000
    for _ in range(3):
        served().engine.host.wait_estimator.wait()
    assert driver._news.qsize() <= 1


def test_start_errors_of_the_core_are_raised_here(llama: Path) -> None:
    errors = []
    for engine_process in (False, True):
        with pytest.raises(ConfigError) as error:
            LLM(str(llama), attention_backend="none", engine_process=engine_process, **SIZES)
        errors.append(str(error.value))
    assert errors[0] == errors[1]


@pytest.mark.parametrize("options", [{"executors": []}, {"new_chooser": type("OtherChooser", (StepChooser,), {})}])
def test_parts_of_this_process_are_refused(llama: Path, options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="engine_process must be False"):
        DrivenEngine(EngineConfig(str(llama), engine_process=True), **options)


@pytest.mark.full
@pytest.mark.parametrize(
    "options",
    [
        {"data_parallel_size": 2},
        {"speculative_config": "the model itself"},
        {"event_log": "log"},
        {"multi_step": 4, "compile_ahead": "all"},
        {"hf_overrides": lambda config: config},
    ],
    ids=str,
)
def test_options_have_the_same_effect_in_a_process(
    llm: LLM, llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]
) -> None:
    monkeypatch.setenv("XLA_FLAGS", "--xla_force_host_platform_device_count=2")  # the core process needs it
    own = {"event_log": str(tmp_path / "log")}
    own["speculative_config"] = {
        "method": "draft_model",
        "num_speculative_tokens": 3,
        "model": str(llama),
        "adaptive": False,
    }
    options = {name: own.get(name, value) for name, value in options.items()}
    prompts = ["Once upon a time", [5, 6, 7, 5, 6, 7] * 3, "x", "y"]
    expected = llm.generate(prompts, GREEDY, use_tqdm=False)
    with LLM(str(llama), engine_process=True, **SIZES | options) as other:
        found = other.generate(prompts, GREEDY, use_tqdm=False)
        assert other.engine.stats.num_compiles == 0
        assert (other.engine.stats.num_draft_rounds > 0) is ("speculative_config" in options)
        assert {metric.name for metric in other.get_metrics()} == {metric.name for metric in llm.get_metrics()}
    assert [output.outputs[0].token_ids for output in found] == [output.outputs[0].token_ids for output in expected]
    if "event_log" in options:
        assert replay_log(options["event_log"]) > 12


@pytest.mark.full
def test_vectors_equal_those_of_a_core_in_this_process(llama: Path) -> None:
    prompts, vectors = ["Once upon a time", [5, 6, 7], "x"], []
    for engine_process in (False, True):
        with LLM(str(llama), convert="embed", engine_process=engine_process, **SIZES) as engine:
            vectors.append([output.outputs.embedding for output in engine.embed(prompts, use_tqdm=False)])
            scores = engine.score("Once", ["Once", "x"], use_tqdm=False)
            assert scores[0].outputs.score == pytest.approx(1, abs=1e-5)
    np.testing.assert_allclose(vectors[0], vectors[1], atol=1e-5)


@pytest.mark.full
def test_calls_of_many_threads_with_forms_and_cancels(served: Served) -> None:
    """Cancels may come while a constraint is still being made."""
    llm = served()

    def call(index: int) -> int:
        form = StructuredOutputsParams(regex=f"[a-c]{{{index % 5 + 1}}}(x|yz)+")
        params = SamplingParams(temperature=1, seed=index, max_tokens=20, structured_outputs=form)
        parts = llm.stream("Once", params)
        for count, _ in enumerate(parts):
            if count == index % 4 and index % 2:
                parts.close()
                return 0
        return 1

    with ThreadPoolExecutor(24) as pool:
        assert sum(pool.map(call, range(96), timeout=PATIENCE_S)) >= 48
    with llm._threads.paused() as engine:
        assert not engine.frontend.has_unfinished()
        assert engine.occupancy.num_pages_used == 0
        engine.check_integrity()


def test_values_of_the_users_own_classes_are_sent(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """The core's process does not have the user's program; what only this process can read ends one request."""

    class Params(SamplingParams):
        pass

    class Text(str):
        __slots__ = ()

    class Id(enum.IntEnum):
        A = 5

    own = Params(temperature=0, max_tokens=12, stop=[Text("~")], bad_words=[Text("b")], logit_bias={Id.A: 1.0})
    plain = SamplingParams(temperature=0, max_tokens=12, stop=["~"], bad_words=["b"], logit_bias={5: 1.0})
    outputs = [served().generate([[3, 5, 7]], params, use_tqdm=False)[0].outputs[0] for params in (own, plain)]
    assert outputs[0].token_ids == outputs[1].token_ids
    kind = type("Text", (str,), {"__module__": "only_here"})
    module = types.ModuleType("only_here")
    vars(module).update(Text=kind)
    monkeypatch.setitem(sys.modules, "only_here", module)
    with pytest.raises(RuntimeError, match="only_here"):
        served().generate("Once", plain.clone({"stop": [kind("~")]}), use_tqdm=False)
    with pytest.raises(ModuleNotFoundError, match="only_here"):
        served().update_weights({kind("a"): np.zeros(2)})
    assert served().generate([[3, 5, 7]], plain, use_tqdm=False)[0].outputs[0].token_ids == outputs[1].token_ids


def test_a_stopped_process_blocks_no_caller(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    for module, name in ((client, "CLOSE_S"), (client, "ESTIMATE_S"), (link, "END_S")):
        monkeypatch.setattr(module, name, 0.1)
    llm = served()
    os.kill(process_of(llm), signal.SIGSTOP)
    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(llm.generate, "Once", LONG, False)
        until(llm.engine.frontend.has_unfinished)
        assert [llm.engine.host.wait_estimator.wait(), llm.engine.host.wait_estimator.wait()] == [None, None]
        assert len(llm.engine.host.driver._replies) == 1
        llm.close()
        with pytest.raises(EngineDiedError):
            future.result(PATIENCE_S)
    assert not is_alive(process_of(llm))


def test_requests_end_with_the_process_of_the_core(served: Served) -> None:
    llm = served()
    with running(llm.engine, served_model_name=["tiny"]) as server:
        body = {"model": "tiny", "prompt": "Once", "max_tokens": 50, "ignore_eos": True, "stream": True}
        os.kill(process_of(llm), signal.SIGSTOP)  # no token comes
        try:
            with httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=PATIENCE_S) as reply:
                assert reply.status_code == 200
                until(llm.engine.frontend.has_unfinished)
                os.kill(process_of(llm), signal.SIGKILL)
                rest = "\n".join(reply.iter_lines())
        finally:
            llm.engine.host.driver._process.kill()
        assert "SIGKILL" in rest
        assert "engine_died" in rest
        health = server.client.get("/health")
        assert (health.status_code, "SIGKILL" in health.text) == (503, True)
        again = server.client.post("/v1/completions", json=body | {"stream": False})
        assert (again.status_code, again.json()["error"]["code"]) == (500, "engine_died")
        metrics = server.client.get("/metrics").text
        assert 'vllm:num_requests_running{engine="0",model_name="tiny"} 0.0' in metrics
        assert (llm.engine.host.num_waiting, llm.engine.host.wait_estimator.num_waiting_tokens()) == (0, 0)
    with pytest.raises(EngineDiedError, match="SIGKILL"):
        llm.generate("Once", GREEDY, use_tqdm=False)
    llm.close()
    assert not is_alive(process_of(llm))
