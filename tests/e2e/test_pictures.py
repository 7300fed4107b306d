"""Prompts with images: the tokens and log probabilities of transformers, whatever else is in the batch or cached."""

from collections.abc import Callable, Sequence
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
SERVED = ("llava",)

Run = Callable[..., list[RequestOutput]]


class Served:
    """A tiny checkpoint, the model as transformers runs it, and engines over it."""

    def __init__(self, path: Path, name: str) -> None:
        self.path, self._engines = path, dict[tuple[Any, ...], DrivenEngine]()
        model = FAMILIES[name].write(path)
        self.pictures = Pictures(FAMILIES[name], model, read_tower(weights.read_config(path)))

    def engine(self, **options: Any) -> DrivenEngine:
        """Return an engine with these options, without cached pages."""
        key = (*sorted(options.items()),)
        if key not in self._engines:
            with few_programs():
                self._engines[key] = DrivenEngine(EngineConfig(str(self.path), **SIZES | options))
        self._engines[key].reset_prefix_cache()
        return self._engines[key]

    def run(self, prompts: Sequence[Any], engine: DrivenEngine | None = None, **given: Any) -> list[RequestOutput]:
        """Return greedy outputs for prompts that arrive together, after checking the engine's pages in each step."""
        engine = engine or self.engine()
        params = SamplingParams(
            **{"max_tokens": NUM_TOKENS, "temperature": 0, "ignore_eos": True, "logprobs": 1} | given
        )
        outputs = []
        for index, (ids, spans) in enumerate(prompts):
            outputs.append(engine.add_request(str(index), ids, params, images=spans))
        while engine.has_unfinished():
            engine.step()
            engine.check_integrity()
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
    """Return a function that counts the encoder runs from now on."""
    runner: Any = engine.replicas[0].executor
    runs: list[Any] = []
    encode = runner._encode

    def counted(run: Any) -> None:
        runs.append(run)
        encode(run)

    runner._encode = counted
    return lambda: len(runs)


def test_outputs_are_those_of_transformers(served: Served) -> None:
    """No image, one, several, one at either end; prompts are computed in chunks, mixed with others."""
    image, prompt = served.pictures.image, served.pictures.prompt
    prompts = [
        prompt(7),
        prompt(5, image(1), 9),
        prompt(image(2), image(3), 3, image(4)),
        prompt(3, image(5), image(6)),
    ]
    for each, output in zip(prompts, served.run(prompts), strict=True):
        served.check(each, output)


def test_text_is_computed_as_without_images(served: Served) -> None:
    """Log probabilities are equal bit by bit."""
    prompt = served.pictures.prompt(11)
    [alone] = served.run([prompt], served.engine())
    mixed, _ = served.run([prompt, served.pictures.prompt(2, served.pictures.image(1), 4)], served.engine())
    assert tokens(alone) == tokens(mixed)
    assert alone.outputs[0].logprobs == mixed.outputs[0].logprobs


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
    engine, first, second = served.engine(), served.pictures.image(2), served.pictures.image(2 + len(FAMILIES))
    one, other = (served.pictures.prompt(9, image, 5) for image in (first, second))
    if one[0] != other[0]:
        other = one[0], [type(one[1][0])(second, one[1][0].start, one[1][0].tokens)]
    served.run([one], engine)
    [output] = served.run([other], engine)
    assert output.num_cached_tokens == 8
    served.check(other, output)
    [output] = served.run([one], engine)
    assert output.num_cached_tokens > 8
    served.check(one, output)


def test_preempted_rows_continue(served: Served) -> None:
    """The pool holds not all rows, and the encoder cache not all images."""
    image, prompt = served.pictures.image, served.pictures.prompt
    prompts = [prompt(4 + index, image(index), 3, image(index + 1), 2) for index in range(4)]
    engine = served.engine(num_pages=34)
    outputs = served.run(prompts, engine)
    assert engine.stats.num_preemptions
    for each, output in zip(prompts, outputs, strict=True):
        served.check(each, output)


def test_images_beyond_the_encoder_cache_are_refused(served: Served) -> None:
    engine = served.engine(encoder_cache_size=16)
    if served.pictures.image(1).num_embeddings > 16:
        with pytest.raises(RequestError, match="at most 16 tokens, the size of the encoder cache, got"):
            served.run([served.pictures.prompt(3, served.pictures.image(1))], engine)
