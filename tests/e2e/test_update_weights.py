"""New weights in a running engine: tokens equal those of an engine that began with them, and requests go on."""

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import checkpoints
import jax
import numpy as np
import pytest
import safetensors.numpy

from jaxserve import weights
from jaxserve.api.config import EngineConfig
from jaxserve.api.sampling_params import SamplingParams
from jaxserve.assembly.driven import DrivenEngine
from jaxserve.assembly.parameters import build_params
from jaxserve.errors import ConfigError, RequestError
from jaxserve.models import registry
from jaxserve.offline.llm import LLM
from tests.e2e.sizes import EOS, SIZES, VOCAB_SIZE
from tests.e2e.workloads import Job, assert_same, busy_step, generate, run, tokens
from tests.oracles import torch

Start = Callable[..., DrivenEngine]

GREEDY = SamplingParams(temperature=0, max_tokens=9, ignore_eos=True)
PROMPTS = [tokens(20, n) for n in range(3)]
Given = Callable[[Path, DrivenEngine], Any]


@pytest.fixture(scope="module")
def other(llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the model of `llama` with other weights."""
    path = tmp_path_factory.mktemp("other")
    shutil.copytree(llama, path, dirs_exist_ok=True)
    checkpoints.write_checkpoint(path, "llama", seed=1, vocab_size=VOCAB_SIZE, bos_token_id=0, eos_token_id=EOS)
    return path


def from_directory(path: Path, engine: DrivenEngine) -> Any:
    return path


def by_name(path: Path, engine: DrivenEngine) -> Any:
    return safetensors.numpy.load_file(path / "model.safetensors")


def by_name_on_device(path: Path, engine: DrivenEngine) -> Any:
    return {name: jax.numpy.asarray(array) for name, array in by_name(path, engine).items()}


def by_name_in_torch(path: Path, engine: DrivenEngine) -> Any:
    return {name: torch.nn.Parameter(torch.asarray(array)) for name, array in by_name(path, engine).items()}


def loaded_tree(path: Path, engine: DrivenEngine) -> Any:
    return weights.load(path, registry.param_specs(engine.arch))


def served_tree(path: Path, engine: DrivenEngine) -> Any:
    config = EngineConfig(str(path), skip_tokenizer_init=True, quantization=engine.config.quantization, **SIZES)
    return build_params(config, engine.arch)


FORMS = [from_directory, by_name, by_name_on_device, by_name_in_torch, loaded_tree, served_tree]


@pytest.fixture
def swapped(start: Start, llama: Path) -> Any:
    """Yield a starter of engines to update, whose weights are restored afterwards."""
    engines = []

    def swapped(**options: Any) -> DrivenEngine:
        engines.append(start(**options))
        return engines[-1]

    yield swapped
    for engine in engines:
        engine.update_weights(llama)


@pytest.mark.parametrize("quantization", [None, "int8"])
@pytest.mark.parametrize("form", FORMS)
def test_updated_weights_give_the_tokens_of_a_new_engine(
    start: Start, swapped: Start, other: Path, form: Given, quantization: str | None
) -> None:
    options = {} if quantization is None else {"quantization": quantization}
    expected = generate(start(model=str(other), **options), PROMPTS, GREEDY)
    engine = swapped(**options)
    old = generate(engine, PROMPTS, GREEDY)
    assert [o.outputs[0].token_ids for o in old] != [o.outputs[0].token_ids for o in expected]
    engine.update_weights(form(other, engine))
    for output, wanted in zip(generate(engine, PROMPTS, GREEDY), expected, strict=True):
        assert_same(output, wanted)
        assert output.num_cached_tokens == 0
    assert engine.stats.num_compiles == 0


@pytest.mark.long
def test_programs_may_be_compiled_meanwhile(start: Start, llama: Path, other: Path) -> None:
    expected = generate(start(model=str(other)), PROMPTS, GREEDY)
    sizes = SIZES | {"max_num_seqs": 1, "max_num_batched_tokens": 2, "page_size": 8}
    options = sizes | {"compile_ahead": "background", "multi_step": 4, "compilation_cache_dir": None}
    engine = DrivenEngine(EngineConfig(str(llama), skip_tokenizer_init=True, **options))
    for _ in range(5):
        engine.update_weights(llama)
        engine.update_weights(other)
    engine.wait_until_warm()
    for output, wanted in zip(generate(engine, PROMPTS, GREEDY), expected, strict=True):
        assert_same(output, wanted)


def test_arrays_with_the_right_sharding_are_not_copied(swapped: Start, other: Path) -> None:
    engine = swapped()
    given = served_tree(other, engine)
    engine.update_weights(given)
    for new, used in zip(jax.tree.leaves(given), jax.tree.leaves(engine.devices.params), strict=True):
        assert new.unsafe_buffer_pointer() == used.unsafe_buffer_pointer()


def test_arrays_in_another_form_stay_the_callers(swapped: Start, other: Path) -> None:
    engine = swapped()
    given = by_name(other, engine)
    before = {name: array.copy() for name, array in given.items()}
    engine.update_weights(given)
    for name, array in given.items():
        np.testing.assert_array_equal(array, before[name])


@pytest.mark.parametrize("multi_step", [1, 5])
@pytest.mark.parametrize("num_steps", [0, 1, 4, 9])
def test_requests_can_be_finished_first(
    start: Start, swapped: Start, other: Path, num_steps: int, multi_step: int
) -> None:
    engine = swapped(multi_step=multi_step)
    expected = generate(engine, PROMPTS, GREEDY)
    engine.reset_prefix_cache()
    outputs = [engine.add_request(str(n), prompt, GREEDY) for n, prompt in enumerate(PROMPTS)]
    for _ in range(num_steps):
        busy_step(engine)
    engine.update_weights(other, running="finish")
    assert not engine.frontend.has_unfinished()
    engine.step()  # returns what has ended
    for output, wanted in zip(outputs, expected, strict=True):
        assert_same(output, wanted)


@pytest.mark.parametrize("multi_step", [1, 5])
@pytest.mark.parametrize("num_steps", [0, 1, 4, 9])
def test_requests_can_begin_again(start: Start, swapped: Start, other: Path, num_steps: int, multi_step: int) -> None:
    """Rows, queue, samples of which some have ended, penalties and log probabilities go on as if undisturbed."""
    rich = SamplingParams(n=2, temperature=1, seed=3, max_tokens=7, logprobs=2, presence_penalty=1, prompt_logprobs=1)
    jobs = [Job(prompt, params) for prompt in PROMPTS for params in (GREEDY, rich)]
    expected = run(start(model=str(other), multi_step=multi_step), jobs)
    engine = swapped(multi_step=multi_step)
    outputs = [engine.add_request(str(n), job.prompt, job.params) for n, job in enumerate(jobs)]
    for _ in range(num_steps):
        busy_step(engine)
    finished = [output.finished for output in outputs]
    engine.update_weights(other, running="restart")
    while engine.has_unfinished():
        busy_step(engine)
    for output, wanted, was_finished in zip(outputs, expected, finished, strict=True):
        if not was_finished:
            assert_same(output, wanted)
            assert output.metrics.num_restarts == 1


def test_prompt_logprobs_in_flight_come_from_the_old_weights(start: Start, swapped: Start, other: Path) -> None:
    params = replace(GREEDY, prompt_logprobs=1)
    (expected,) = generate(start(model=str(other)), PROMPTS[:1], params)
    engine = swapped()
    output = engine.add_request("0", PROMPTS[0], params)
    busy_step(engine)
    engine.update_weights(other, running="restart")
    while engine.has_unfinished():
        busy_step(engine)
    assert_same(output, expected)


def test_texts_begin_again_with_their_requests(start: Start, llm: LLM, llama: Path, other: Path) -> None:
    params = SamplingParams(temperature=0, max_tokens=12, stop=["never said"])
    beginning = LLM.over(start(model=str(other), skip_tokenizer_init=False))
    expected = beginning.generate("def f(", params, use_tqdm=False)[0]
    output = llm.engine.add_request("again", "def f(", params)
    for _ in range(4):
        llm.engine.step()
    llm.update_weights(other, running="restart")
    assert output.outputs[0].text == ""
    while llm.engine.has_unfinished():
        llm.engine.step()
    assert output.outputs[0].text == expected.outputs[0].text
    llm.update_weights(llama)


def test_a_stream_that_begins_again_says_so(llm: LLM, llama: Path, other: Path) -> None:
    stream = llm.stream("def f(", GREEDY)
    next(stream)
    llm.update_weights(other, running="restart")
    with pytest.raises(RequestError, match="restarted with other weights"):
        next(stream)
    llm.update_weights(llama)


def test_without_a_head_the_embeddings_make_the_logits(start: Start, llama: Path, other: Path) -> None:
    engine = start()
    named = by_name(other, engine)
    del named["lm_head.weight"]
    engine.update_weights(named)
    tied = generate(engine, PROMPTS, GREEDY)
    engine.update_weights(named | {"lm_head.weight": named["model.embed_tokens.weight"]})
    for output, wanted in zip(generate(engine, PROMPTS, GREEDY), tied, strict=True):
        assert_same(output, wanted)
    engine.update_weights(llama)


def test_weights_of_another_model_change_nothing(start: Start, other: Path, tmp_path: Path) -> None:
    engine = start()
    expected = generate(engine, PROMPTS, GREEDY)
    output = engine.add_request("0", PROMPTS[0], GREEDY)
    busy_step(engine)
    named = by_name(other, engine)
    name = "model.norm.weight"
    checkpoints.write_checkpoint(tmp_path, "llama", vocab_size=VOCAB_SIZE + 1)
    served = jax.tree.map(lambda leaf: leaf[..., :1], engine.devices.params)
    for wrong, message in [
        (tmp_path / "absent", "absent"),
        (tmp_path, "of another shape"),
        ({k: v for k, v in named.items() if k != name}, "1 missing"),
        (named | {name: named[name].astype(np.int32)}, "unsupported dtype"),
        (served, "must have the shapes and dtypes of those in use"),
    ]:
        with pytest.raises(ConfigError, match=message):
            engine.update_weights(wrong, running="restart")
    with pytest.raises(ConfigError, match="'finish' or 'restart', got 'stop'"):
        engine.update_weights(other, running="stop")
    while engine.has_unfinished():
        busy_step(engine)
    assert_same(output, expected[0])


def test_weights_that_could_not_be_read_after_all(swapped: Start, other: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = swapped()
    with monkeypatch.context() as patch:
        patch.setattr(weights, "load", lambda *_, **__: (_ for _ in ()).throw(OSError("gone")))
        with pytest.raises(OSError, match="gone"):
            engine.update_weights(other)
    with pytest.raises(RequestError, match="the engine has no weights"):
        engine.add_request("0", PROMPTS[0], GREEDY)
    engine.update_weights(other)
    generate(engine, PROMPTS, GREEDY)
