"""Each sampling parameter through the whole engine."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import transformers
from checkpoints import reference_logits
from scipy.special import log_softmax

from jaxserve.api.config import EngineConfig
from jaxserve.api.sampling_params import SamplingParams
from jaxserve.assembly.driven import DrivenEngine
from jaxserve.errors import ConfigError, RequestError
from tests.e2e.sizes import EOS, VOCAB_SIZE
from tests.e2e.workloads import Job, assert_same, generate, run, tokens
from tests.oracles import torch

Start = Callable[..., DrivenEngine]

PROMPT = tokens(9, "features")
GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
SAMPLED = SamplingParams(temperature=1, seed=3, max_tokens=8, ignore_eos=True)


def ids(engine: DrivenEngine, params: SamplingParams, prompt: list[int] = PROMPT) -> list[int]:
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
    """Logprobs are the model's, as in vLLM, whatever bias, temperature and penalties did to the choice."""
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
    """Greedy ids equal those of a loop over transformers' logits with the penalties written out."""
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


LETTERS = "qxzjkv"  # no two of them are one token


def letter_ids(engine: DrivenEngine) -> list[int]:
    ids = engine.tokenizer.encode(LETTERS, add_special_tokens=False)
    assert len(set(ids)) == len(LETTERS)
    return ids


class TestForbiddenTokens:
    """allowed_token_ids and bad_words against transformers' logits and its processor of bad words."""

    def test_allowed_token_ids(self, start: Start, oracle: transformers.PreTrainedModel) -> None:
        allowed, seen = [250, 17, 60, 33, 319, 0, 31, 32], list(PROMPT)
        for _ in range(8):
            logits = reference_logits(oracle, np.array(seen))[-1]
            seen.append(max(allowed, key=lambda i: logits[i]))
        params = replace(GREEDY, allowed_token_ids=[*allowed, allowed[0]])
        beside = [replace(GREEDY, logit_bias={5: 0.5}), GREEDY, replace(GREEDY, presence_penalty=1.0)]
        plain = [ids(start(), other) for other in beside]
        outputs = run(start(), [Job(PROMPT, p) for p in (beside[0], params, *beside[1:])])
        assert [o.outputs[0].token_ids for o in outputs] == [plain[0], seen[len(PROMPT) :], *plain[1:]]
        sampled = generate(start(), [PROMPT], replace(SAMPLED, n=4, temperature=3.0, allowed_token_ids=allowed))[0]
        found = {i for o in sampled.outputs for i in o.token_ids}
        assert found <= set(allowed)
        assert len(found) > 4

    @pytest.mark.parametrize("options", [{}, {"step_ahead": False}, {"multi_step": 5}], ids=str)
    def test_bad_words(self, start: Start, oracle: transformers.PreTrainedModel, options: dict[str, Any]) -> None:
        """Four rows do not fit into the pool together, so that preemption occurs as well."""
        engine = start(skip_tokenizer_init=False, **options)
        allowed = letter_ids(engine)
        prompts = [[*tokens(11, "bad"), allowed[0]], *(tokens(n, n) for n in (17, 18, 19))]
        params = replace(GREEDY, max_tokens=16, allowed_token_ids=allowed)
        plain = [o.outputs[0].token_ids for o in generate(engine, prompts, params)]
        words, forbidden = [], []
        for first, output in enumerate(plain):  # each word begins the plain output or occurs in it
            piece = output[first : first + 1 + first]
            words.append("".join(LETTERS[allowed.index(i)] for i in piece))
            forbidden.append(piece)
        words = [*words[1:], LETTERS[allowed.index(plain[0][0])] * 2]
        forbidden = [engine.tokenizer.encode(word, add_special_tokens=False) for word in words]
        assert [len(f) for f in forbidden] == [2, 3, 4, 2]
        outputs = generate(engine, prompts, replace(params, bad_words=words))
        processor = transformers.NoBadWordsLogitsProcessor(forbidden)
        for prompt, output in zip(prompts, outputs, strict=True):
            seen: list[int] = []
            for _ in range(params.max_tokens):
                logits = torch.tensor(reference_logits(oracle, np.array(prompt + seen))[-1:])
                logits = processor(torch.tensor([seen], dtype=torch.long), logits)[0]  # the prompt counts for nothing
                seen.append(max(allowed, key=lambda i: float(logits[i])))
            assert output.outputs[0].token_ids == seen
            text = "".join(LETTERS[allowed.index(i)] for i in seen)
            assert not any(word in text for word in words)
        assert [o.outputs[0].token_ids for o in outputs] != plain
        assert any(o.metrics.num_preemptions for o in outputs)

    def test_nothing_is_left_to_sample(self, start: Start) -> None:
        engine = start(skip_tokenizer_init=False)
        letters = letter_ids(engine)
        for fields in (
            {"allowed_token_ids": [EOS], "min_tokens": 1},
            {"allowed_token_ids": letters, "bad_words": list(LETTERS)},
            {"allowed_token_ids": [EOS, letters[0]], "min_tokens": 1, "bad_words": [LETTERS[0]]},
        ):
            with pytest.raises(RequestError, match="allowed_token_ids must have an id"):
                engine.add_request("none", PROMPT, SamplingParams(**fields))

    def test_bad_words_need_a_tokenizer(self, start: Start) -> None:
        with pytest.raises(RequestError, match="bad_words need a tokenizer"):
            start().add_request("none", PROMPT, SamplingParams(bad_words=["a"]))


class TestMaxLogprobs:
    """Number of log probabilities that an engine returns."""

    def test_whole_vocabulary(self, start: Start, oracle: transformers.PreTrainedModel) -> None:
        params = replace(GREEDY, max_tokens=3, logprobs=-1, prompt_logprobs=-1)
        whole = generate(start(max_logprobs=-1), [PROMPT], params)[0]
        expected = log_softmax(
            reference_logits(oracle, np.array(PROMPT + whole.outputs[0].token_ids)).astype(np.float64), axis=-1
        )
        entries = [*whole.prompt_logprobs[1:], *whole.outputs[0].logprobs]
        for row, entry in zip(expected, entries, strict=False):
            assert entry.keys() == set(range(VOCAB_SIZE))
            assert [entry[i].logprob for i in range(VOCAB_SIZE)] == pytest.approx(row.tolist(), abs=1e-4)
            by_rank = sorted(entry.values(), key=lambda e: e.rank)
            assert [e.logprob for e in by_rank] == sorted((e.logprob for e in by_rank), reverse=True)
        assert len(entries) == len(PROMPT) + 2

    def test_fewer_than_the_width(self, start: Start) -> None:
        params = replace(GREEDY, logprobs=4, prompt_logprobs=3)
        (narrow,), (wide,) = (generate(start(**options), [PROMPT], params) for options in ({}, {"max_logprobs": -1}))
        assert_same(wide, narrow)
        assert [list(e) for e in wide.outputs[0].logprobs] == [list(e) for e in narrow.outputs[0].logprobs]
        (sampled,) = generate(start(max_logprobs=-1), [PROMPT], replace(GREEDY, logprobs=0))
        assert [list(e) for e in sampled.outputs[0].logprobs] == [[i] for i in sampled.outputs[0].token_ids]

    @pytest.mark.parametrize("asked", [-1, 21, 300, 321, 5000])
    def test_more_than_the_engine_has(self, start: Start, asked: int) -> None:
        for name in ("logprobs", "prompt_logprobs"):
            with pytest.raises(RequestError, match=rf"{name} must be.*start the engine with max_logprobs={asked}$"):
                start().add_request("wide", PROMPT, SamplingParams(**{name: asked}))

    def test_more_than_a_step_selects(self, start: Start) -> None:
        params = replace(GREEDY, logprobs=4, prompt_logprobs=-1)
        (much,), (all_,) = (generate(start(max_logprobs=most), [PROMPT], params) for most in (1500, -1))
        assert_same(much, all_)
        assert start(max_logprobs=1500).schedule.max_logprobs == -1, "the programs of the whole vocabulary"

    @pytest.mark.parametrize("value", [-2, 2.0, True, "20", None])
    def test_bad_width(self, value: object) -> None:
        with pytest.raises(ConfigError, match=r"max_logprobs must be an integer of 0 or more, or -1"):
            EngineConfig(max_logprobs=value)


class TestEnds:
    """Reason and time of a completion's end."""

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
