"""What each sampling parameter promises, through the whole engine."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import transformers
from checkpoints import reference_logits
from conftest import EOS, VOCAB_SIZE

from jaxserve.engine.engine import Engine
from jaxserve.request import SamplingParams
from workloads import assert_same, generate, tokens

Start = Callable[..., Engine]

PROMPT = tokens(9, "features")
GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
SAMPLED = SamplingParams(temperature=1, seed=3, max_tokens=8, ignore_eos=True)


def ids(engine: Engine, params: SamplingParams, prompt: list[int] = PROMPT) -> list[int]:
    return generate(engine, [prompt], params)[0].outputs[0].token_ids


@pytest.mark.parametrize("fields", [{"top_k": 1}, {"top_p": 1e-6}, {"min_p": 1.0}, {"temperature": 1e-9}])
def test_narrow_filters_are_greedy(start: Start, fields: dict[str, float]) -> None:
    assert ids(start(), replace(SAMPLED, **fields)) == ids(start(), GREEDY)


@pytest.mark.parametrize("seed", [0, -2, 2**64 - 1])
def test_extreme_seeds(start: Start, seed: int) -> None:
    assert ids(start(), replace(SAMPLED, seed=seed)) == ids(start(), replace(SAMPLED, seed=seed))


def test_seeds_matter(start: Start) -> None:
    # 2**32 and 2**63 too: all 64 bits of a seed count
    samples = [ids(start(), replace(SAMPLED, seed=seed)) for seed in (0, 1, 2**32, 2**63)]
    assert len({tuple(sample) for sample in samples}) == 4


def test_top_k_and_logit_bias_bound_the_samples(start: Start) -> None:
    allowed = {20, 21, 22}
    bias = {i: -100.0 for i in range(VOCAB_SIZE - 20) if i not in allowed}
    bias |= {20: 0.0}
    params = replace(SAMPLED, n=4, temperature=1.0, logit_bias=bias, top_k=3)
    (output,) = generate(start(), [PROMPT], replace(params, logit_bias=dict.fromkeys(allowed, 100.0)))
    assert {i for o in output.outputs for i in o.token_ids} <= allowed


def test_logit_bias_forbids(start: Start) -> None:
    first = ids(start(), GREEDY)[0]
    assert first not in ids(start(), replace(GREEDY, logit_bias={first: -100}))


def test_logprobs_are_raw(start: Start) -> None:
    """As in vLLM: those of the model, whatever bias, temperature and penalties did to the choice."""
    plain = generate(start(), [PROMPT], replace(GREEDY, logprobs=3, max_tokens=1))[0].outputs[0].logprobs[0]
    forced = {300: 100.0}
    params = replace(SAMPLED, logit_bias=forced, logprobs=3, max_tokens=1, repetition_penalty=1.5, temperature=3)
    biased = generate(start(), [PROMPT], params)[0].outputs[0].logprobs[0]
    assert next(iter(biased)) == 300
    assert list(biased)[1:] == list(plain)[:3]
    for token_id in plain:
        assert biased[token_id].logprob == pytest.approx(plain[token_id].logprob, abs=1e-5)


@pytest.mark.parametrize(
    "fields",
    [{"repetition_penalty": 1.8}, {"frequency_penalty": 2.0}, {"presence_penalty": 2.0}, {"frequency_penalty": -2.0}],
)
def test_penalties_are_their_formulas(
    start: Start, oracle: transformers.PreTrainedModel, fields: dict[str, float]
) -> None:
    """Greedy ids are those of a loop over transformers' logits with the penalties written out."""
    params = replace(GREEDY, max_tokens=14, **fields)
    seen = list(PROMPT)
    for _ in range(params.max_tokens):
        logits = reference_logits(oracle, np.array(seen))[-1].astype(np.float64)
        repeated = np.isin(np.arange(VOCAB_SIZE), seen)
        scale = np.where(repeated, params.repetition_penalty, 1.0)
        logits = np.where(logits > 0, logits / scale, logits * scale)
        counts = np.bincount(seen[len(PROMPT) :], minlength=VOCAB_SIZE)
        logits -= params.frequency_penalty * counts + params.presence_penalty * (counts > 0)
        seen.append(int(logits.argmax()))
    assert ids(start(), params) == seen[len(PROMPT) :]
    assert ids(start(), params) != ids(start(), replace(GREEDY, max_tokens=14)), "the penalty changed something"


def test_slots_remember_nothing_of_earlier_requests(start: Start) -> None:
    engine = start()
    fresh = generate(engine, [tokens(5, i) for i in range(4)], replace(SAMPLED, presence_penalty=1.0))
    loud = replace(SAMPLED, repetition_penalty=3.0, logit_bias=dict.fromkeys(range(100), -50.0), min_tokens=5)
    generate(engine, [tokens(6, i) for i in range(4)], loud)
    again = generate(engine, [tokens(5, i) for i in range(4)], replace(SAMPLED, presence_penalty=1.0))
    plain = generate(engine, [tokens(5, i) for i in range(4)], SAMPLED)
    for a, b, c in zip(fresh, again, plain, strict=True):
        assert_same(b, a)
        assert a.outputs[0].token_ids[0] == c.outputs[0].token_ids[0], "nothing to penalise yet"


class TestEnds:
    """Why and when a completion ends."""

    def always(self, token_id: int) -> SamplingParams:
        return SamplingParams(temperature=0, max_tokens=6, logit_bias={token_id: 100})

    def test_eos(self, start: Start) -> None:
        (output,) = generate(start(), [PROMPT], self.always(EOS))
        end = output.outputs[0]
        assert (end.token_ids, end.finish_reason, end.stop_reason) == ([EOS], "stop", None)

    def test_ignore_eos(self, start: Start) -> None:
        (output,) = generate(start(), [PROMPT], replace(self.always(EOS), ignore_eos=True))
        end = output.outputs[0]
        assert (end.token_ids, end.finish_reason, end.stop_reason) == (6 * [EOS], "length", None)

    def test_stop_token_ids(self, start: Start) -> None:
        (output,) = generate(start(), [PROMPT], replace(self.always(77), stop_token_ids=[5, 77]))
        end = output.outputs[0]
        assert (end.token_ids, end.finish_reason, end.stop_reason) == ([77], "stop", 77)

    def test_eos_as_a_stop_token_id_ends_even_where_eos_is_ignored(self, start: Start) -> None:
        params = replace(self.always(EOS), stop_token_ids=[EOS], ignore_eos=True)
        end = generate(start(), [PROMPT], params)[0].outputs[0]
        assert (end.token_ids, end.finish_reason, end.stop_reason) == ([EOS], "stop", EOS)

    @pytest.mark.parametrize("stop", [EOS, 77])
    @pytest.mark.parametrize("min_tokens", [1, 3, 6])
    def test_min_tokens_keeps_stops_out(self, start: Start, stop: int, min_tokens: int) -> None:
        params = replace(self.always(stop), stop_token_ids=[77], min_tokens=min_tokens)
        end = generate(start(), [PROMPT], params)[0].outputs[0]
        assert not {EOS, 77} & set(end.token_ids[:min_tokens])
        if min_tokens < 6:
            assert (end.token_ids[min_tokens:], end.finish_reason) == ([stop], "stop")
        else:
            assert (len(end.token_ids), end.finish_reason) == (6, "length")

    def test_samples_end_each_by_itself(self, start: Start) -> None:
        params = replace(SAMPLED, n=4, max_tokens=12, stop_token_ids=list(range(100, 160)), temperature=1.5)
        (output,) = generate(start(), [PROMPT], params)
        assert len({len(o.token_ids) for o in output.outputs}) > 1
        for end in output.outputs:
            stopped = 100 <= end.token_ids[-1] < 160
            assert end.finish_reason == ("stop" if stopped else "length")
            assert not any(100 <= i < 160 for i in end.token_ids[:-1])

    def test_max_tokens(self, start: Start) -> None:
        assert [len(ids(start(), replace(GREEDY, max_tokens=n))) for n in (1, 2, 7)] == [1, 2, 7]

    @pytest.mark.parametrize("max_tokens", [None, 1000])
    @pytest.mark.parametrize("num_prompt", [1, 50, 63])
    def test_max_model_len(self, start: Start, max_tokens: int | None, num_prompt: int) -> None:
        params = replace(GREEDY, max_tokens=max_tokens)
        end = generate(start(), [tokens(num_prompt, 0)], params)[0].outputs[0]
        assert (len(end.token_ids), end.finish_reason) == (64 - num_prompt, "length")
