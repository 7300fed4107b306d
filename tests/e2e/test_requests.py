"""Refused requests and aborts: the engine goes on serving after them."""

import dataclasses
import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from jaxserve.api.config import EngineConfig
from jaxserve.api.sampling_params import SamplingParams
from jaxserve.assembly.driven import DrivenEngine
from jaxserve.errors import ConfigError, RequestError
from tests.e2e.sizes import SIZES, VOCAB_SIZE
from tests.e2e.workloads import assert_same, busy_step, drain, generate, tokens

Start = Callable[..., DrivenEngine]

PROMPT = tokens(9, "requests")
GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)

NAN = float("nan")
BAD_PARAMS: dict[str, list[Any]] = {
    "n": [0, -1, 1025, 1.0, "2", None, True],
    "temperature": [-0.1, NAN, float("inf"), "hot", None, True, 1e5],
    "top_p": [0, -0.5, 1.1, NAN, None, "1"],
    "top_k": [-2, 2**31, 1.5, None, "5", False],
    "min_p": [-0.1, 1.01, NAN, None],
    "max_tokens": [0, -1, 2**31, 1.0, "16", True],
    "min_tokens": [-1, 17, 2.0, None],
    "stop": ["", [""], [1], b"x", [None], 5, {"a": 1}, ["a", ""], 0, {}, ["a"] * 65, "a" * 4097],
    "stop_token_ids": [[-1], ["1"], [2**31], [1.0], 5, "5", [VOCAB_SIZE], list(range(65)), [True], {}, 0],
    "ignore_eos": [1, None, "yes"],
    "seed": [2**64, -(2**63) - 1, 1.0, "1", True],
    "logprobs": [-2, -1, 21, 2**31, 1.0, True, "1"],
    "prompt_logprobs": [-2, -1, 21, 1.0, True],
    "allowed_token_ids": [[], [-1], [VOCAB_SIZE], [2**31], [1.0], [True], "ab", b"ab", 5, {1: 2}],
    "bad_words": [[""], [" "], "word", [5], 5, 65 * ["a"], ["123456789"]],
    "presence_penalty": [2.1, -2.1, NAN, None, "0"],
    "frequency_penalty": [2.1, -2.1, NAN, None],
    "repetition_penalty": [0, -1, NAN, None, 1e5],
    "logit_bias": [{-1: 0}, {VOCAB_SIZE: 1}, {1: 101}, {1: NAN}, {"a": 1}, {1.5: 1}, [1], dict.fromkeys(range(301), 0)],
    "detokenize": [0, None],
    "skip_special_tokens": [1],
    "truncate_prompt_tokens": [0, -2, 1.0, "4", True, 65],
    "truncation_side": ["both", None, 1, []],
    "best_of": [2],
    "guided_json": ["{}"],
    "temprature": [0.5],
}
BAD_PROMPTS: list[Any] = [
    [],
    [VOCAB_SIZE],
    [-1],
    [3, 2**40],
    list(range(3, 67)),
    "text without a tokenizer",
    b"bytes",
    {},
    {"prompt_token_ids": []},
    {"prompt_token_ids": [1.5]},
    {"prompt_token_ids": [True]},
    {"prompt_token_ids": None},
    {"prompt_token_ids": 7},
    {"prompt_token_ids": {3: 4}},
    {"prompt": 5, "prompt_token_ids": [3]},
    {"cache_salt": "a"},
    {"prompt_token_ids": [3], "multi_modal_data": {"image": b"GIF89a"}},
    {"prompt_token_ids": [3], "multi_modal_data": {"audio": [0.5]}},
    {"prompt_token_ids": [3], "cache_salt": 5},
]


def bad_requests(count: int) -> Iterator[tuple[Any, dict[str, Any]]]:
    """Draw a prompt and parameters, of which at least one is bad."""
    rng = random.Random(0)
    for _ in range(count):
        names = rng.sample(list(BAD_PARAMS), rng.choice([0, 1, 1, 2, 3]))
        good = {"seed": rng.randrange(99), "max_tokens": rng.randrange(1, 17), "temperature": rng.random()}
        fields = good | {name: rng.choice(BAD_PARAMS[name]) for name in names}
        yield (rng.choice(BAD_PROMPTS) if not names or rng.random() < 0.2 else PROMPT), fields


class TestRefusals:
    def test_ten_thousand_bad_requests_harm_nothing(self, start: Start) -> None:
        engine = start()
        expected = generate(engine, [PROMPT], GREEDY)[0]
        engine.add_request("good", PROMPT, GREEDY)
        steps = engine.stats.num_steps
        for index, (prompt, fields) in enumerate(bad_requests(10_000)):
            with pytest.raises(RequestError, match=r"\w+ .+"):
                engine.add_request(f"bad {index}", prompt, SamplingParams(**fields))
        assert engine.stats.num_steps == steps
        outputs = []
        while engine.has_unfinished():
            outputs = busy_step(engine)
        drain(engine)
        assert [output.request_id for output in outputs] == ["good"]
        assert_same(outputs[0], expected)

    @pytest.mark.parametrize(
        ("prompt", "options", "said"),
        [
            (
                [3, 4, 999_999_999, 5],
                {},
                "prompt must be in [0, V), got 999999999 at index 2; that is out of vocabulary",
            ),
            ([-1], {}, "prompt must be in [0, V), got -1 at index 0;"),
            ([3, 10**6, 4, -2, 10**7], {}, "prompt must be in [0, V), got 1000000 at index 1 and 2 more;"),
            (PROMPT, {"stop_token_ids": [3, VOCAB_SIZE]}, f"stop_token_ids must be in [0, V), got {VOCAB_SIZE}"),
            (PROMPT, {"logit_bias": {3: 1, VOCAB_SIZE: 1}}, f"logit_bias must be in [0, V), got {VOCAB_SIZE};"),
        ],
    )
    def test_an_id_outside_the_vocabulary_is_named(
        self, start: Start, prompt: list[int], options: dict[str, Any], said: str
    ) -> None:
        with pytest.raises(RequestError) as caught:
            start().add_request("a", prompt, SamplingParams(**options))
        assert said.replace("V", str(VOCAB_SIZE)) in str(caught.value)

    def test_a_prompt_must_be_shorter_than_the_model(self, start: Start) -> None:
        with pytest.raises(RequestError, match=r"has 64 input tokens, .* at most 63 .* or raise max_model_len"):
            start().add_request("a", tokens(64, 0), GREEDY)

    def test_outputs_cut_at_the_model_length_are_warned_of_once(
        self, start: Start, caplog: pytest.LogCaptureFixture
    ) -> None:
        engine = start()
        engine.reader._has_warned_of_length = False  # earlier tests, which share the engine, sent some
        for prompt_len, max_tokens in ((58, 6), (60, 6), (61, 6)):
            output = generate(engine, [tokens(prompt_len, 0)], replace(GREEDY, max_tokens=max_tokens))[0].outputs[0]
            assert (len(output.token_ids), output.finish_reason) == (min(max_tokens, 64 - prompt_len), "length")
        (message,) = [record.message for record in caplog.records if record.levelname == "WARNING"]
        assert message.startswith("a prompt of 60 tokens and max_tokens=6 exceed max_model_len=64: the output ends")

    def test_a_longer_prompt_can_be_truncated(self, start: Start) -> None:
        engine, prompt = start(), tokens(100, "long")
        for wanted, kept in ((5, 5), (63, 63), (-1, 64 - GREEDY.max_tokens), (None, None)):
            params = replace(GREEDY, truncate_prompt_tokens=wanted)
            first = replace(params, truncation_side="right")
            if kept is None:
                with pytest.raises(RequestError, match=r"length is 64 tokens.* has 100 input tokens"):
                    engine.add_request("a", prompt, params)
            else:
                output = engine.add_request("a", prompt, params)
                assert output.prompt_token_ids == prompt[-kept:]
                engine.abort("a")
                assert engine.add_request("a", prompt, first).prompt_token_ids == prompt[:kept]
                engine.abort("a")
        drain(engine)

    def test_a_request_must_fit_the_pool(self, start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
        # The largest request of these sizes needs 16 pages, so the pool shrinks on the host alone.
        engine = start()
        scheduler = engine.replicas[0].scheduler
        monkeypatch.setattr(scheduler, "_shard_sizes", dataclasses.replace(scheduler.sizes, num_pages=12))
        with pytest.raises(RequestError, match=r"40 prompt tokens and up to 24 new ones need 16 .* there are 12;"):
            engine.add_request("a", tokens(40, 0), SamplingParams(max_tokens=None))

    def test_an_id_in_use(self, start: Start) -> None:
        engine = start()
        engine.add_request("a", PROMPT, GREEDY)
        with pytest.raises(RequestError, match="request_id must be unique"):
            engine.add_request("a", PROMPT, GREEDY)
        assert engine.abort("a") is not None
        engine.add_request("a", PROMPT, GREEDY)  # the id is free again
        engine.abort("a")

    def test_stop_strings_need_a_tokenizer(self, start: Start) -> None:
        with pytest.raises(RequestError, match="stop strings need a tokenizer"):
            start().add_request("a", PROMPT, SamplingParams(stop="x"))

    @pytest.mark.parametrize(
        "options",
        [
            {"enforce_eager": True},
            {"max_num_seq": 4},
            {"dtype": "int8"},
            {"kv_cache_dtype": "fp8_e5m2"},
            {"tensor_parallel_size": 99},
            {"max_num_seqs": 0},
            {"page_size": -1},
            {"num_pages": 1.5},
            {"max_model_len": "64"},
            {"gpu_memory_utilization": 1.5},
            {"seed": -1},
            {"step_ahead": 1},
            {"compile_ahead": "later"},
            {"max_num_seqs": 8, "max_num_batched_tokens": 4},
            {"max_model_len": 100_000},
            {"attention_backend": "flash"},
            {"linear_backend": "mosaic_gpu"},
            {"model": "/no/such/model"},
            {"tokenizer": "/no/such/tokenizer", "skip_tokenizer_init": False},
        ],
        ids=str,
    )
    def test_unusable_engine_options(self, llama: Path, options: dict[str, Any]) -> None:
        with pytest.raises(ConfigError, match=next(iter(options)).removeprefix("attention_")):
            DrivenEngine(EngineConfig(**{"model": str(llama), "skip_tokenizer_init": True} | SIZES | options))


class TestAborts:
    def test_unknown(self, start: Start) -> None:
        assert start().abort("nobody") is None

    @pytest.mark.parametrize("num_steps", range(9))
    def test_at_any_step(self, start: Start, num_steps: int) -> None:
        """Aborts come while waiting, between two chunks, with the first token in flight, and later."""
        engine = start()
        wanted = generate(engine, [PROMPT], GREEDY)[0]
        victim = tokens(40, "victim")
        whole = generate(engine, [victim], GREEDY)[0]
        engine.reset_prefix_cache()
        engine.add_request("victim", victim, GREEDY)
        engine.add_request("other", PROMPT, GREEDY)
        last = {}
        for _ in range(num_steps):
            last.update({o.request_id: o for o in busy_step(engine)})
        output = engine.abort("victim")
        assert output.finished
        assert output.outputs[0].finish_reason == "abort"
        assert output.outputs[0].token_ids == whole.outputs[0].token_ids[: len(output.outputs[0].token_ids)]
        assert engine.abort("victim") is None
        last.pop("victim", None)
        while engine.has_unfinished():
            last.update({o.request_id: o for o in busy_step(engine)})
        drain(engine)
        assert last.keys() == {"other"}
        assert_same(last["other"], wanted)

    @pytest.mark.parametrize("num_steps", [0, 1, 3, 6])
    def test_all_samples_of_a_request(self, start: Start, num_steps: int) -> None:
        engine = start()
        engine.add_request("a", PROMPT, SamplingParams(n=6, seed=1, max_tokens=20, min_tokens=2))
        for _ in range(num_steps):
            busy_step(engine)
        output = engine.abort("a")
        assert len(output.outputs) == 6
        assert all(o.finish_reason is not None for o in output.outputs)
        assert not engine.has_unfinished()
        drain(engine)

    def test_computed_pages_stay_in_the_cache(self, start: Start) -> None:
        engine = start()
        (cold,) = generate(engine, [tokens(30, "a")], GREEDY)
        engine.reset_prefix_cache()
        engine.add_request("a", tokens(30, "a"), GREEDY)
        busy_step(engine)
        engine.abort("a")
        (warm,) = generate(engine, [tokens(30, "a")], GREEDY)
        assert warm.num_cached_tokens == 16
        assert_same(warm, cold)


def test_prompt_logprobs_ignore_an_aborted_request_with_the_same_id(start: Start) -> None:
    engine, params = start(), SamplingParams(temperature=0, max_tokens=2, prompt_logprobs=1)
    old, new = tokens(12, "old"), tokens(12, "new")
    (expected,) = generate(engine, [new], params)
    engine.add_request("a", old, params)
    busy_step(engine)
    engine.abort("a")
    output = engine.add_request("a", new, params)
    while engine.has_unfinished():
        busy_step(engine)
    assert_same(output, expected)


def test_metrics_are_in_order(start: Start) -> None:
    (output,) = generate(start(), [PROMPT], GREEDY)
    m = output.metrics
    assert m.arrival_s <= m.scheduled_s <= m.first_token_s <= m.last_token_s <= m.finished_s
    assert m.num_output_tokens == 6
    assert m.queue_s + m.prefill_s == pytest.approx(m.ttft_s)
    assert m.tpot_s == pytest.approx((m.last_token_s - m.first_token_s) / 5)
    assert m.total_s >= m.ttft_s


def test_step_stats_add_up(start: Start) -> None:
    engine, prompts = start(), [tokens(n, n) for n in (21, 3, 9)]
    before = engine.stats.num_prefill_tokens, engine.stats.num_decode_tokens, engine.stats.num_finished
    generate(engine, prompts, GREEDY)
    after = engine.stats.num_prefill_tokens, engine.stats.num_decode_tokens, engine.stats.num_finished
    assert [b - a for a, b in zip(before, after, strict=True)] == [33, 3 * 5, 3]
    assert engine.stats.num_tokens == engine.stats.num_prefill_tokens + engine.stats.num_decode_tokens
