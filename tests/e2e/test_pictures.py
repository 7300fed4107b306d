"""Prompts with images: the tokens and log probabilities of transformers, whatever else is in the batch or cached."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxserve import weights
from jaxserve.api.config import EngineConfig
from jaxserve.api.outputs import RequestOutput
from jaxserve.api.sampling_params import SamplingParams
from jaxserve.assembly.driven import DrivenEngine
from jaxserve.errors import RequestError
from jaxserve.models.vision.tower import read_tower
from tests import checkpoints
from tests.pictures import Pictures
from tests.soon_compiled import few_programs
from tests.vision_checkpoints import FAMILIES

pytestmark = pytest.mark.long

SIZES: dict[str, Any] = {
    "skip_tokenizer_init": True,
    "max_model_len": 128,
    "max_num_seqs": 4,
    "max_num_batched_tokens": 32,
    "page_size": 4,
    "num_pages": 80,
    "multi_step": 1,
    "compile_ahead": "minimal",
    "forbid_compiles": True,
    "encoder_cache_size": 64,
}
NUM_TOKENS = 6
GREEDY: dict[str, Any] = {"max_tokens": NUM_TOKENS, "temperature": 0, "ignore_eos": True, "logprobs": 1}
SERVED = ("llava", "mistral3", "qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_5", "gemma3", "gemma4")

# Text parts that are not Llama's, by family. Some images are larger than Gemma's windows.
_WINDOWS = {"layer_types": ["sliding_attention", "full_attention", "full_attention"]}
TEXT: dict[str, Any] = {
    "gemma3": {"sliding_window": 4, "num_hidden_layers": 3, "head_dim": 16, **_WINDOWS},
    "gemma4": {"sliding_window": 5, "use_bidirectional_attention": "vision"},
    "qwen3_5": {
        "rope_parameters": {"rope_theta": 1e4, "mrope_section": [4, 2, 2], "partial_rotary_factor": 1.0},
        "num_hidden_layers": 3,
        "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    },
}

Run = Callable[..., list[RequestOutput]]


class Served:
    """A tiny checkpoint, the model as transformers runs it, and engines over it."""

    def __init__(self, path: Path, name: str) -> None:
        self.path, self._engines = path, dict[tuple[Any, ...], DrivenEngine]()
        family = FAMILIES[name]
        text = {**family.text, "num_hidden_layers": 3}  # DeepStack's features go to the first
        text = {**checkpoints.build_config(name).to_dict(), **TEXT[name]} if name in TEXT else text
        config = {"image_token_index": 5, "image_token_id": 5} if name.startswith("gemma") else {}
        family = replace(family, text=text, config=family.config | config)
        self.pictures = Pictures(family, family.write(path), read_tower(weights.read_config(path)))

    def engine(self, **options: Any) -> DrivenEngine:
        """Return an engine with these options, without cached pages."""
        key = (*sorted(options.items()),)
        if key not in self._engines:
            self._engines[key] = self.new_engine(**options)
        self._engines[key].reset_prefix_cache()
        return self._engines[key]

    def new_engine(self, **options: Any) -> DrivenEngine:
        """Start an engine with these options."""
        with few_programs():
            return DrivenEngine(EngineConfig(**{"model": str(self.path)} | SIZES | options))

    def add(self, engine: DrivenEngine, request_id: str, prompt: Any, **options: Any) -> RequestOutput:
        """Queue a prompt, for greedy tokens."""
        ids, spans = prompt
        return engine.add_request(request_id, ids, SamplingParams(**GREEDY), images=spans, **options)

    def finish(self, engine: DrivenEngine) -> None:
        """Step until all requests have ended, after checking the engine's pages in each step."""
        while engine.has_unfinished():
            engine.step()
            engine.check_integrity()

    def run(self, prompts: Sequence[Any], engine: DrivenEngine | None = None) -> list[RequestOutput]:
        """Return greedy outputs for prompts that arrive together."""
        engine = engine or self.engine()
        outputs = [self.add(engine, str(index), prompt) for index, prompt in enumerate(prompts)]
        self.finish(engine)
        return outputs

    def check(self, prompt: Any, output: RequestOutput) -> None:
        """Assert that an output is transformers'."""
        token_ids, logprobs = self.pictures.greedy(*prompt, NUM_TOKENS)
        assert list(output.outputs[0].token_ids) == token_ids
        found = output.outputs[0].logprobs
        assert found is not None
        own = [each[token_id].logprob for each, token_id in zip(found, token_ids, strict=True)]
        np.testing.assert_allclose(own, logprobs, rtol=0, atol=1e-4)


@pytest.fixture(scope="module", params=SERVED)
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Served:
    return Served(tmp_path_factory.mktemp(request.param), request.param)


def tokens(output: RequestOutput) -> list[int]:
    return list(output.outputs[0].token_ids)


def num_encoded(engine: DrivenEngine) -> Callable[[], int]:
    """Return a function that counts the images that are encoded from now on."""
    runner: Any = engine.replicas[0].executor
    runs: list[Any] = []
    encode = runner._encode

    def counted(run: Any) -> None:
        runs.extend([run] if run.is_last else [])  # others are parts
        encode(run)

    runner._encode = counted
    return lambda: len(runs)


def test_outputs_are_those_of_transformers(served: Served) -> None:
    """No image, one, several, one at either end; prompts are computed in chunks, mixed with others."""
    image, prompt = served.pictures.image, served.pictures.prompt
    prompts = [prompt(7), prompt(5, image(1), 9), prompt(image(2), 2, image(3), 3), prompt(3, image(4), 1, image(5))]
    prompts.append(prompt(2, image(6), 1, image(7), 1, image(8), 2, image(9), 1))
    for each, output in zip(prompts, served.run(prompts), strict=True):
        served.check(each, output)


def test_prompts_end_in_images_in_steps_of_one_token(served: Served) -> None:
    """The last token of an image, in a step of its own, is sampled from with the image's embedding."""
    if served.engine().schedule.sees_images:
        pytest.skip("a step holds an image whose tokens see each other")
    engine = served.engine(max_num_seqs=1, max_num_batched_tokens=1, multi_step=4, encoder_cache_size=128)
    image, prompt = served.pictures.image, served.pictures.prompt
    prompts = [prompt(5, image(1)), prompt(3, image(2), 2, image(3))]
    for _ in range(2):  # the second time with cached pages
        for each, output in zip(prompts, served.run(prompts, engine), strict=True):
            served.check(each, output)


@pytest.mark.parametrize("served", ["qwen3_vl", "qwen2_5_vl"], indirect=True)
def test_images_encoded_in_parts_have_the_outputs_of_transformers(served: Served) -> None:
    check_parts(served, served.engine())


def check_parts(served: Served, engine: DrivenEngine) -> None:
    """Assert that images in parts have the outputs of transformers. A row decodes in each step between parts."""
    text = served.pictures.prompt(7)
    assert engine.schedule.sizes_in_parts
    image = served.pictures.image
    prompts = [served.pictures.prompt(5, image(11), 9), served.pictures.prompt(3, image(12), 2, image(13), 3)]
    decoding = engine.add_request("text", text[0], SamplingParams(**{**GREEDY, "max_tokens": 60}))
    while not decoding.outputs[0].token_ids:
        engine.step()
    runner: Any = engine.replicas[0].executor
    runner = getattr(runner, "stages", [runner])[0]
    encode, runs = runner._encode, list[Any]()
    runner._encode = lambda run: (runs.append(run), encode(run))
    try:
        outputs = served.run(prompts, engine)
    finally:
        runner._encode = encode
    for each, output in zip(prompts, outputs, strict=True):
        served.check(each, output)
    assert len({run.image.digest for run in runs}) == 3
    assert all(run.layers is not None for run in runs)
    assert len([run for run in runs if run.layers != (0, 0)]) > 3


def test_images_in_tiles_have_the_outputs_of_transformers(tmp_path: Path) -> None:
    """Images of many embeddings, whose number depends on their sizes before preprocessing."""
    served = Served(tmp_path, "onevision")
    engine = served.engine(max_model_len=512, num_pages=400, encoder_cache_size=512)
    image, prompt = served.pictures.image, served.pictures.prompt
    prompts = [prompt(7), prompt(5, image(0), 9), prompt(image(2), 2, image(3), 3)]
    for each, output in zip(prompts, served.run(prompts, engine), strict=True):
        served.check(each, output)


def test_text_is_computed_as_without_images(served: Served) -> None:
    """Log probabilities are equal bit by bit, whether a row next to it has an image or text."""
    prompt, other = served.pictures.prompt(11), served.pictures.prompt(2, served.pictures.image(1), 4)
    beside_text, _ = served.run([prompt, served.pictures.prompt(len(other[0]))], served.engine())
    beside_image, _ = served.run([prompt, other], served.engine())
    assert tokens(beside_text) == tokens(beside_image)
    assert beside_text.outputs[0].logprobs == beside_image.outputs[0].logprobs


def test_images_are_encoded_once(served: Served) -> None:
    """The same content is one run in several requests, twice in a prompt, and again if pages are lost."""
    engine, image = served.engine(), served.pictures.image(1)
    count = num_encoded(engine)
    prompts = [served.pictures.prompt(3, image, 2, image, 1), served.pictures.prompt(4, image, 1)]
    served.run(prompts, engine)
    assert count() == 1
    for each, output in zip(prompts, served.run(prompts, engine), strict=True):
        served.check(each, output)
        assert output.num_cached_tokens
    assert count() == 1


def test_cached_pages_belong_to_their_images(served: Served) -> None:
    """Equal ids with other images share no pages from the first image on."""
    engine, image = served.engine(), served.pictures.image
    one, other = (served.pictures.prompt(9, image(seed, served.pictures.family.grids[-1]), 5) for seed in (2, 3))
    assert one[0] == other[0]
    served.run([one], engine)
    [output] = served.run([other], engine)
    has_states = engine.arch.state is not None  # snapshots are kept at few positions
    assert output.num_cached_tokens == (0 if has_states else 8)
    served.check(other, output)
    [output] = served.run([one], engine)
    assert output.num_cached_tokens > 8 or has_states
    served.check(one, output)


def test_preempted_rows_continue(served: Served) -> None:
    """A request of a higher class takes the pages of another, which computes its images' tokens again."""
    image, prompt = served.pictures.image, served.pictures.prompt
    low, high = prompt(14, image(1), 3, image(2), 2), prompt(3, image(3), 2)
    longest = max(len(low[0]), len(high[0])) + NUM_TOKENS
    groups = served.engine().schedule.kv_groups
    num_pages = groups.num_pages(longest, longest) + 2 * groups.size
    engine = served.engine(num_pages=num_pages, scheduling_policy="priority")
    before = engine.stats.num_preemptions
    outputs = [served.add(engine, "low", low, priority=1)]
    while not outputs[0].outputs[0].token_ids:
        engine.step()
    outputs.append(served.add(engine, "high", high))
    served.finish(engine)
    assert engine.stats.num_preemptions > before
    for each, output in zip((low, high), outputs, strict=True):
        served.check(each, output)


@pytest.mark.parametrize("served", ["llava"], indirect=True)
def test_images_beyond_the_encoder_cache_are_refused(served: Served) -> None:
    """Other requests are served meanwhile; images of another model are refused, too."""
    engine, image = served.engine(encoder_cache_size=16), served.pictures.image(1)
    assert image.num_embeddings == 25
    wrong = replace(image, patches=image.patches[:, :-1])
    text = served.pictures.prompt(7)
    output = served.add(engine, "text", text)
    with pytest.raises(RequestError, match="at most 16 tokens, the size of the encoder cache, got 25"):
        served.add(engine, "large", served.pictures.prompt(3, image))
    with pytest.raises(RequestError, match="must be prepared for this model, with 48 values per patch"):
        served.add(engine, "wrong", served.pictures.prompt(3, wrong))
    served.finish(engine)
    served.check(text, output)


OPTIONS: dict[str, dict[str, Any]] = {
    "multi_step": {"multi_step": 4},
    "speculation": {"speculative_config": '{"method": "ngram", "num_speculative_tokens": 3}'},
    "process": {"engine_process": True, "forbid_compiles": False},
}


@pytest.mark.parametrize("served", ["qwen2_5_vl"], indirect=True)
@pytest.mark.parametrize("name", OPTIONS)
def test_options_change_no_output(served: Served, name: str) -> None:
    """Steps of several tokens, drafted tokens, and a core in a process of its own; then again with cached pages."""
    image, prompt = served.pictures.image, served.pictures.prompt
    prompts = [prompt(7), prompt(5, image(1), 9), prompt(3, image(2), 2, image(3), 3)]
    engine = served.engine(**OPTIONS[name])
    for number in range(2):
        outputs = [served.add(engine, f"{number} {index}", each) for index, each in enumerate(prompts)]
        while engine.has_unfinished():
            engine.step()
        for each, output in zip(prompts, outputs, strict=True):
            served.check(each, output)
            assert bool(output.num_cached_tokens) == bool(number)
    if name == "process":
        engine.close()
