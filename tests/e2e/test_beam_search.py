"""Beam search against transformers in float32, and what its steps compute."""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import transformers
from tqdm import tqdm

from jaxserve import LLM, BeamSearchParams
from jaxserve.errors import RequestError
from jaxserve.execution.state import copy_pages
from tests.checkpoints import write_checkpoint
from tests.e2e.sizes import EOS, SIZES, VOCAB_SIZE
from tests.e2e.workloads import tokens
from tests.oracles import torch
from tests.parameters import some_by_default
from tests.soon_compiled import few_programs

PROMPTS = [tokens(n, f"beam {n}") for n in (1, 6, 30)]
MAX_TOKENS = 14
PENALTIES = [0.0, 1.0, 2.5, -1.0]

END_FACTORS = {"gpt2": -3}  # its logit of EOS is negative

Pair = tuple[LLM, transformers.PreTrainedModel]


@pytest.fixture(scope="module", params=some_by_default(["llama", "gemma3", "gpt2", "qwen2"], "llama"))
def pair(request: pytest.FixtureRequest, start: Callable[..., Any], tmp_path_factory: pytest.TempPathFactory) -> Pair:
    """Return an engine over a model that often ends, and that model; Gemma's has sliding windows."""
    path = tmp_path_factory.mktemp(request.param)
    model = write_checkpoint(path, request.param, seed=3, vocab_size=VOCAB_SIZE, bos_token_id=0, eos_token_id=EOS)
    with torch.no_grad():
        model.get_output_embeddings().weight[EOS] *= END_FACTORS.get(request.param, 3)
    model.save_pretrained(path)
    num_pages = SIZES["num_pages"] * (1 if request.param == "llama" else 3)  # windows have pages of their own
    llm = LLM.over(start(model=str(path), num_pages=num_pages))
    return llm, transformers.AutoModelForCausalLM.from_pretrained(path).eval()


def expected(model: transformers.PreTrainedModel, prompt: list[int], **options: Any) -> tuple[Any, Any]:
    """Return the sequences of transformers, without padding, and their scores."""
    found = model.generate(
        torch.tensor([prompt]),
        num_beams=4,
        num_return_sequences=4,
        do_sample=False,
        max_new_tokens=MAX_TOKENS,
        pad_token_id=VOCAB_SIZE - 1,
        return_dict_in_generate=True,
        output_scores=True,
        **options,
    )
    pad = VOCAB_SIZE - 1
    return [[t for t in sequence.tolist() if t != pad] for sequence in found.sequences], found.sequences_scores.numpy()


@pytest.mark.parametrize("length_penalty", PENALTIES)
def test_beams_equal_those_of_transformers(pair: Pair, length_penalty: float) -> None:
    llm, model = pair
    params = BeamSearchParams(beam_width=4, max_tokens=MAX_TOKENS, length_penalty=length_penalty)
    num_ended = 0
    for prompt, output in zip(PROMPTS, llm.beam_search(PROMPTS, params), strict=True):
        sequences, scores = expected(model, prompt, length_penalty=length_penalty, eos_token_id=EOS)
        assert [beam.tokens for beam in output.sequences] == sequences
        lengths = [len(beam.tokens) - len(prompt) for beam in output.sequences]
        own = [b.cum_logprob / n**length_penalty for b, n in zip(output.sequences, lengths, strict=True)]
        np.testing.assert_allclose(own, scores, rtol=1e-5, atol=1e-5)
        for beam, length in zip(output.sequences, lengths, strict=True):
            stops = beam.tokens[-1] == EOS
            assert (beam.finish_reason, beam.stop_reason) == (("stop", EOS) if stops else ("length", None))
            entries = zip(beam.logprobs, beam.tokens[-length:], strict=True)
            assert sum(table[token].logprob for table, token in entries) == pytest.approx(beam.cum_logprob)
            num_ended += stops
    assert num_ended or length_penalty > 1, "some beams end before the limit"


def test_ignore_eos(pair: Pair) -> None:
    llm, model = pair
    params = BeamSearchParams(beam_width=4, max_tokens=MAX_TOKENS, ignore_eos=True)
    (output,) = llm.beam_search(PROMPTS[1], params)
    sequences, _ = expected(model, PROMPTS[1], eos_token_id=None)
    assert [beam.tokens for beam in output.sequences] == sequences


def test_a_step_computes_one_token_per_beam(pair: Pair) -> None:
    llm, _ = pair
    llm.reset_prefix_cache()
    stats, prompt = llm.engine.stats, tokens(30, "counted")
    before = stats.num_tokens
    llm.beam_search(prompt, BeamSearchParams(beam_width=4, max_tokens=9, ignore_eos=True))
    assert stats.num_tokens - before == 30 + 8 * 4


def test_beams_that_do_not_fit_are_computed_again(pair: Pair) -> None:
    llm, _ = pair
    params = BeamSearchParams(beam_width=4, max_tokens=10)
    prompts = [tokens(40, f"many {n}") for n in range(6)]  # 6 x 10 pages of prompts alone
    together = llm.beam_search(prompts, params)
    alone = llm.beam_search(prompts, params, concurrency_limit=1)
    assert [b.tokens for o in together for b in o.sequences] == [b.tokens for o in alone for b in o.sequences]


@pytest.mark.full
def test_without_a_prefix_cache(pair: Pair, start: Callable[..., Any], llm: LLM) -> None:
    params = BeamSearchParams(beam_width=3, max_tokens=6)
    uncached = LLM.over(start(enable_prefix_caching=False))
    for prompt in PROMPTS[:2]:
        own, wanted = (each.beam_search(prompt, params)[0] for each in (uncached, llm))
        assert [beam.tokens for beam in own.sequences] == [beam.tokens for beam in wanted.sequences]
    assert llm.beam_search("a text", params)[0].sequences[0].text is not None


@pytest.mark.usefixtures("no_type_checks")
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"beam_width": 0, "max_tokens": 1}, "beam_width must be an integer"),
        ({"beam_width": 2, "max_tokens": 1, "temperature": 0.5}, "temperature must be 0"),
        ({"beam_width": 11, "max_tokens": 1}, "start the engine with max_logprobs=22"),
        *(
            (
                {"beam_width": 2, "max_tokens": 1, "length_penalty": value},
                "length_penalty must be a number in .-32, 32.",
            )
            for value in ("long", 1e9, math.nan, -math.inf)
        ),
    ],
)
def test_errors(llm: LLM, options: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        llm.beam_search("a", BeamSearchParams(**options))


@pytest.mark.usefixtures("no_type_checks")
def test_arguments_are_checked_at_each_call(llm: LLM) -> None:
    params, lengths = BeamSearchParams(beam_width=2, max_tokens=2), []
    for limit in (0, -1, True, 1.5):
        with pytest.raises(RequestError, match="concurrency_limit must be a positive integer or None"):
            llm.beam_search(["a", "b"], params, concurrency_limit=limit)
    bar = partial(tqdm, disable=True)
    for limit in (1, 2, 5, None):
        lengths.append(len(llm.beam_search(["a", "b", "c"], params, concurrency_limit=limit, use_tqdm=bar)))
    assert lengths == [3] * 4
    with pytest.raises(RequestError, match=r"params must be BeamSearchParams"):
        llm.beam_search("a", {"beam_width": 2})
    params.beam_width = 0
    with pytest.raises(RequestError, match="beam_width must be an integer"):
        llm.beam_search("a", params)


def test_searches_that_exceed_the_pool_are_refused(start: Callable[..., Any], llm: LLM) -> None:
    """Beams of 20 prompt tokens and 5 others fill 6 pages of 4 tokens, as their last token is never computed."""
    with few_programs():
        small, prompts = LLM.over(start(num_pages=6)), [[5], tokens(20, "exact")]
    before = small.engine.stats.num_tokens
    with pytest.raises(RequestError, match=r"prompt 1: a request must fit the page pool: 20 prompt tokens and up to 6"):
        small.beam_search(prompts, BeamSearchParams(beam_width=3, max_tokens=6), concurrency_limit=1)
    assert small.engine.stats.num_tokens == before
    params = BeamSearchParams(beam_width=3, max_tokens=5, ignore_eos=True)
    own, wanted = (each.beam_search(prompts, params) for each in (small, llm))
    assert [[b.tokens for b in o.sequences] for o in own] == [[b.tokens for b in o.sequences] for o in wanted]


def test_pages_are_copied_in_place() -> None:
    pool, copies = jax.ShapeDtypeStruct((2, 200, 4, 4, 8), jnp.float32), jax.ShapeDtypeStruct((2, 8), jnp.int32)
    memory = jax.jit(copy_pages, donate_argnums=0).lower(pool, copies).compile().memory_analysis()
    assert memory.alias_size_in_bytes == 4 * math.prod(pool.shape)
    assert memory.temp_size_in_bytes < memory.alias_size_in_bytes / 10
