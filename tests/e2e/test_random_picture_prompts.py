"""Random prompts with images in engines of all kinds: the tokens of transformers."""

from typing import Any

import numpy as np
import pytest

from jaxserve.api.sampling_params import SamplingParams
from jaxserve.errors import ConfigError
from tests.e2e.test_pictures import GREEDY, NUM_TOKENS, SERVED, Served, tokens

pytestmark = [pytest.mark.full, pytest.mark.exhaustive]

ENGINES: dict[str, dict[str, Any]] = {
    "plain": {},
    "single tokens": {"max_num_seqs": 1, "max_num_batched_tokens": 1, "encoder_cache_size": 128},
    "small steps": {"max_num_seqs": 3, "max_num_batched_tokens": 7, "encoder_cache_size": 96},
    "speculative": {"speculative_config": '{"method": "ngram", "num_speculative_tokens": 3}'},
    "few pages": {"num_pages": 44, "encoder_cache_size": 128},
    "multi-step": {"multi_step": 4, "page_size": 8, "num_pages": 60},
}
MAX_LEN = 118


def random_prompts(served: Served, rng: np.random.Generator) -> list[Any]:
    """Return up to six prompts with 0 to 4 images, in some of which another one is the prefix, or the whole."""
    pictures = served.pictures
    # In transformers adjacent images would see each other, or be one image to M-RoPE.
    needs_text = served.engine().schedule.sees_images or pictures.has_axes

    def parts(prefix: list[Any]) -> list[Any]:
        made = [*prefix, *([int(rng.integers(1, 9))] if prefix or rng.random() < 0.6 else [])]
        for _ in range(rng.choice([0, 1, 1, 2, 3, 4])):
            made.append(pictures.image(int(rng.integers(0, 6))))
            made += [int(rng.integers(1, 9))] if needs_text or rng.random() < 0.6 else []
        return made or [3]

    shared = parts([]) if rng.random() < 0.5 else []
    lists = [parts(shared) for _ in range(rng.integers(1, 6))]
    prompts = [pictures.prompt(*each) for each in [*lists, *lists[: rng.integers(0, 2)]]]
    return [prompt for prompt in prompts if len(prompt[0]) <= MAX_LEN]


@pytest.fixture(scope="module", params=SERVED)
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Served:
    return Served(tmp_path_factory.mktemp(request.param), request.param)


@pytest.mark.parametrize("kind", ENGINES)
def test_random_prompts_have_the_tokens_of_transformers(served: Served, kind: str) -> None:
    options = dict(ENGINES[kind])
    if kind == "speculative" and served.engine().arch.state is not None:
        with pytest.raises(ConfigError, match="a recurrent state cannot undo rejected drafts"):
            served.engine(**options)
        return
    if served.engine().schedule.sees_images and "max_num_batched_tokens" in options:
        options["max_num_batched_tokens"] = 16  # a step holds an image
    engine, rng = served.engine(**options), np.random.default_rng([*kind.encode()])
    # Gemma 4 in transformers gives a generated image token the embedding of padding.
    image_token = served.pictures.token_id
    params = SamplingParams(**GREEDY, logit_bias={image_token: -100.0})
    for _ in range(4):
        prompts = random_prompts(served, rng)
        outputs = [engine.add_request(str(i), ids, params, images=spans) for i, (ids, spans) in enumerate(prompts)]
        served.finish(engine)
        for (ids, spans), output in zip(prompts, outputs, strict=True):
            assert tokens(output) == served.pictures.greedy(ids, spans, NUM_TOKENS, suppressed=[image_token])[0]
