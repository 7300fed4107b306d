"""Text in and out: stop strings, streams, chat, and a script written for vLLM."""

import _thread
import contextlib
import io
import json
import shutil
import signal
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import transformers
from hypothesis import given
from hypothesis import strategies as st
from tqdm import tqdm

from jaxserve.api.outputs import RequestOutput
from jaxserve.api.sampling_params import SamplingParams
from jaxserve.errors import ConfigError, RequestError
from jaxserve.offline.llm import LLM
from tests.e2e.sizes import SIZES
from tests.e2e.workloads import few_but_rich, tokens, wait_until_idle
from tests.soon_compiled import as_shipped

PROMPT = "Once upon a time"
SAMPLED = SamplingParams(temperature=1.5, seed=3, max_tokens=24, ignore_eos=True)


def generate(
    llm: LLM, prompts: Sequence[object], params: SamplingParams | Sequence[SamplingParams]
) -> list[RequestOutput]:
    return llm.generate(prompts, params, use_tqdm=False)


@pytest.fixture(scope="module")
def ascii_only(llm: LLM) -> dict[int, float]:
    """Return a bias after which only printable ASCII is generated."""
    texts = {i: llm.engine.tokenizer.decode([i], skip_special_tokens=False) for i in range(320)}
    return {i: -100.0 for i, text in texts.items() if not (text.isascii() and text.isprintable())}


class TestStopStrings:
    def test_any_place_of_the_text(self, llm: LLM, ascii_only: dict[int, float]) -> None:
        """The output and its tokens end with the stop string, wherever that begins and ends."""
        params = replace(SAMPLED, logit_bias=ascii_only)
        (whole,) = generate(llm, [PROMPT], params)
        text, ids = whole.outputs[0].text, whole.outputs[0].token_ids
        assert llm.engine.tokenizer.decode(ids) == text
        num_straddling = 0
        for start in range(0, len(text) - 4, 5):
            for length in (1, 2, 5, 9):
                stop = text[start : start + length]
                (output,) = generate(llm, [PROMPT], replace(params, stop=["never there", stop]))
                end = output.outputs[0]
                at = text.index(stop)
                assert (end.finish_reason, end.stop_reason, end.text) == ("stop", stop, text[:at])
                assert end.token_ids == ids[: len(end.token_ids)]
                cut = [len(llm.engine.tokenizer.decode(ids[:n])) for n in (len(end.token_ids) - 1, len(end.token_ids))]
                assert cut[0] < at + len(stop) <= cut[1], "no token too many or too few"
                num_straddling += cut[0] > at
        assert num_straddling > 3

    def test_may_stay_in_the_text(self, llm: LLM, ascii_only: dict[int, float]) -> None:
        params = replace(SAMPLED, logit_bias=ascii_only)
        text = generate(llm, [PROMPT], params)[0].outputs[0].text
        (output,) = generate(llm, [PROMPT], replace(params, stop=text[4:7], include_stop_str_in_output=True))
        assert output.outputs[0].text == text[: text.index(text[4:7]) + 3]

    def test_not_before_min_tokens(self, llm: LLM, ascii_only: dict[int, float]) -> None:
        params = replace(SAMPLED, logit_bias=ascii_only)
        whole = generate(llm, [PROMPT], params)[0].outputs[0]
        (output,) = generate(llm, [PROMPT], replace(params, stop=whole.text[0], min_tokens=6))
        assert output.outputs[0].token_ids[:6] == whole.token_ids[:6]

    def test_stop_in_the_last_token_allowed(self, llm: LLM, ascii_only: dict[int, float]) -> None:
        params = replace(SAMPLED, logit_bias=ascii_only, max_tokens=4)
        whole = generate(llm, [PROMPT], params)[0].outputs[0]
        last = llm.engine.tokenizer.decode(whole.token_ids[-1:])
        if last not in whole.text[: -len(last)]:
            (output,) = generate(llm, [PROMPT], replace(params, stop=last))
            assert (output.outputs[0].finish_reason, output.outputs[0].stop_reason) == ("stop", last)
        assert whole.finish_reason == "length"

    def test_each_sample_stops_by_itself(self, llm: LLM, ascii_only: dict[int, float]) -> None:
        params = replace(SAMPLED, logit_bias=ascii_only, n=3)
        whole = generate(llm, [PROMPT], params)[0].outputs
        stop = whole[1].text[2:4]
        (output,) = generate(llm, [PROMPT], replace(params, stop=stop))
        for end, full in zip(output.outputs, whole, strict=True):
            assert end.text == full.text.partition(stop)[0]
            assert end.finish_reason == ("stop" if stop in full.text else "length")

    def test_eos_leaves_no_text(self, llm: LLM) -> None:
        params = SamplingParams(temperature=0, logit_bias={1: 100}, skip_special_tokens=False)
        assert generate(llm, [PROMPT], params)[0].outputs[0].text == ""
        kept = replace(params, include_stop_str_in_output=True)
        assert generate(llm, [PROMPT], kept)[0].outputs[0].text == "</s>"

    def test_without_detokenize_there_is_no_text(self, llm: LLM) -> None:
        (output,) = generate(llm, [PROMPT], replace(SAMPLED, detokenize=False))
        assert output.outputs[0].text == ""
        assert len(output.outputs[0].token_ids) == 24


class TestStream:
    @given(
        seed=st.integers(0, 2**32),
        n=st.integers(1, 3),
        stop=st.sampled_from([None, ["e"], ["on", "a"]]),
        logprobs=st.sampled_from([None, 1]),
    )
    @few_but_rich
    def test_increments_make_the_output(
        self, llm: LLM, seed: int, n: int, stop: list[str] | None, logprobs: int | None
    ) -> None:
        params = replace(SAMPLED, seed=seed, n=n, stop=stop, logprobs=logprobs)
        (whole,) = generate(llm, [PROMPT], params)
        parts = list(llm.stream(PROMPT, params))
        assert [part.finished for part in parts] == [False] * (len(parts) - 1) + [True]
        for index, full in enumerate(whole.outputs):
            pieces = [part.outputs[index] for part in parts]
            assert "".join(piece.text for piece in pieces) == full.text
            assert [i for piece in pieces for i in piece.token_ids] == full.token_ids
            assert pieces[-1].finish_reason == full.finish_reason
            if logprobs is not None:
                assert [list(e) for piece in pieces for e in piece.logprobs] == [list(e) for e in full.logprobs]

    def test_no_character_is_split(self, llm: LLM) -> None:
        """A character whose bytes are in three tokens appears whole, and never as U+FFFD."""
        character = llm.engine.tokenizer.encode("\u4eac", add_special_tokens=False)  # three bytes
        forced = dict.fromkeys(character, 100.0)
        params = replace(SAMPLED, logit_bias=forced, max_tokens=40, temperature=2.0)
        pieces = [part.outputs[0].text for part in llm.stream(PROMPT, params)]
        (whole,) = generate(llm, [PROMPT], params)
        assert "\u4eac" in whole.outputs[0].text
        assert "".join(pieces) == whole.outputs[0].text
        assert whole.outputs[0].text == bytes_of(llm, whole.outputs[0].token_ids).decode(errors="replace")

    @pytest.mark.parametrize("num_parts", [0, 1, 3])
    def test_closing_it_aborts_the_request(self, llm: LLM, num_parts: int) -> None:
        parts = llm.stream(PROMPT, replace(SAMPLED, n=2))
        for _ in range(num_parts):
            next(parts)
        parts.close()
        wait_until_idle(llm)
        llm.engine.check_integrity()

    def test_closing_an_engine_does_not_affect_another(self, llm: LLM) -> None:
        other = replace(SAMPLED, seed=8)
        whole = generate(llm, [PROMPT], other)[0].outputs[0].text
        closed, going = llm.stream("A" * 30, replace(SAMPLED, n=2)), llm.stream(PROMPT, other)
        text = next(going).outputs[0].text
        next(closed)
        text += next(going).outputs[0].text
        closed.close()
        assert text + "".join(part.outputs[0].text for part in going) == whole

    def test_streams_and_calls_interleave(self, llm: LLM) -> None:
        """A driver that steps the engine for one stream advances the others too; none of them loses anything."""
        params = [replace(SAMPLED, seed=seed, max_tokens=4 + 6 * seed) for seed in range(3)]
        whole = [generate(llm, [PROMPT], p)[0].outputs[0] for p in params]
        long, short = llm.stream(PROMPT, params[2]), llm.stream(PROMPT, params[0])
        parts = [next(long)], [next(short)]  # on a busy machine the first one of the short stream may be the whole
        assert generate(llm, [PROMPT], params[1])[0].outputs[0].text == whole[1].text
        for some, stream in zip(parts, (long, short), strict=True):
            some += list(stream)
        assert ["".join(each.outputs[0].text for each in some) for some in parts] == [whole[2].text, whole[0].text]
        assert parts[1][-1].finished
        assert parts[1][-1].outputs[0].finish_reason == "length"

    def test_bad_requests_are_refused(self, llm: LLM) -> None:
        with pytest.raises(RequestError, match="logit_bias"):
            list(llm.stream(PROMPT, SamplingParams(logit_bias={10_000: 1})))

    @pytest.mark.usefixtures("no_type_checks")
    @pytest.mark.parametrize("params", [{}, {"max_tokens": 3}, 5])
    def test_wrong_arguments_are_refused(self, llm: LLM, params: Any) -> None:
        with pytest.raises(RequestError, match="must be SamplingParams"):
            list(llm.stream(PROMPT, params))


def bytes_of(llm: LLM, token_ids: Sequence[int]) -> bytes:
    table = llm.engine.tokenizer.byte_table
    assert table is not None
    return b"".join(table[i] for i in token_ids)


class TestCalls:
    def test_forms_of_prompts(self, llm: LLM) -> None:
        ids = llm.engine.tokenizer.encode(PROMPT)
        forms = [PROMPT, ids, {"prompt": PROMPT}, {"prompt_token_ids": ids}]
        outputs = generate(llm, forms, SAMPLED)
        for form, output in zip(forms, outputs, strict=True):
            assert output.prompt_token_ids == ids
            assert output.prompt == (PROMPT if form in (PROMPT, {"prompt": PROMPT}) else None)
            assert output.outputs[0].text == outputs[0].outputs[0].text
            (single,) = llm.generate(form, SAMPLED, use_tqdm=False)
            assert single.outputs[0].token_ids == output.outputs[0].token_ids

    def test_one_params_each(self, llm: LLM) -> None:
        lengths = [3, 1, 7, 2, 5]
        prompts = [tokens(4, n) for n in lengths]
        outputs = generate(llm, prompts, [replace(SAMPLED, max_tokens=n) for n in lengths])
        assert [len(output.outputs[0].token_ids) for output in outputs] == lengths
        assert [output.prompt_token_ids for output in outputs] == prompts
        with pytest.raises(RequestError, match="one for all or one per prompt, got 2 for 1"):
            generate(llm, [PROMPT], [SAMPLED, SAMPLED])

    def test_no_prompts(self, llm: LLM) -> None:
        assert generate(llm, [], SAMPLED) == []

    def test_one_bad_prompt_starts_none(self, llm: LLM) -> None:
        with pytest.raises(RequestError, match=r"prompt 1: .* at least 1 token, got 0; begin it with"):
            generate(llm, [PROMPT, []], SAMPLED)
        assert not llm.engine.frontend.has_unfinished()
        assert len(generate(llm, [PROMPT], SAMPLED)) == 1

    @pytest.mark.parametrize(
        ("args", "message"),
        [
            ((5,), "prompts must be text, token ids, a dict, or such prompts in order.*, got 5"),
            ((None,), "prompts must be text"),
            ((b"a",), "prompts must be text"),
            (([[3], None],), "prompt 1: a prompt must be"),
            (("a", {"max_tokens": 3}), r"must be SamplingParams\(...\), or a list of them, got {'max_tokens': 3}"),
            ((["a"], [{"max_tokens": 3}]), "must be SamplingParams"),
            (("a", 5), "must be SamplingParams"),
        ],
        ids=str,
    )
    @pytest.mark.usefixtures("no_type_checks")
    def test_wrong_arguments_of_generate(self, llm: LLM, args: tuple[Any, ...], message: str) -> None:
        with pytest.raises(RequestError, match=message):
            llm.generate(*args, use_tqdm=False)

    @pytest.mark.parametrize(
        "messages",
        [[5], 5, "Hi", {"role": "user", "content": "Hi"}, [[]], [[5]], [None], [{"role": "user", "content": "Hi"}, []]],
    )
    @pytest.mark.usefixtures("no_type_checks")
    def test_wrong_arguments_of_chat(self, llm: LLM, messages: Any) -> None:
        with pytest.raises(RequestError, match="messages must be a"):
            llm.chat(messages, use_tqdm=False)

    @pytest.mark.usefixtures("no_type_checks")
    @pytest.mark.parametrize(
        ("variables", "message"),
        [
            (5, "must be a dict, got 5"),
            ({"self": 1}, r"no variables \['self'\]"),
            ({"a": 1, 2: 3}, r"no variables \[2, 'a'\]"),
        ],
    )
    def test_wrong_variables_of_a_chat(self, llm: LLM, variables: Any, message: str) -> None:
        with pytest.raises(RequestError, match=message):
            llm.chat([{"role": "user", "content": "a"}], chat_template_kwargs=variables)

    def test_a_callable_makes_the_progress_bar(self, llm: LLM) -> None:
        out = io.StringIO()
        outputs = llm.generate([PROMPT, "two"], SAMPLED, use_tqdm=partial(tqdm, file=out, ascii=True, colour="RED"))
        assert len(outputs) == 2
        assert "Generating: 100%" in out.getvalue()
        assert "2/2" in out.getvalue()

    def test_the_prefix_cache_can_be_emptied(self, llm: LLM) -> None:
        prompt = tokens(20, "cached")
        cached = [generate(llm, [prompt], SAMPLED)[0].num_cached_tokens for _ in range(2)]
        assert llm.reset_prefix_cache() is True
        cached.append(generate(llm, [prompt], SAMPLED)[0].num_cached_tokens)
        assert cached == [0, 16, 0]

    def test_the_tokenizer_is_hugging_faces(self, llm: LLM) -> None:
        tokenizer = llm.get_tokenizer()
        assert isinstance(tokenizer, transformers.PreTrainedTokenizerFast)
        assert llm.get_tokenizer() is tokenizer
        ids = tokenizer(PROMPT)["input_ids"]
        assert generate(llm, [PROMPT], SAMPLED)[0].prompt_token_ids == ids
        assert tokenizer.decode([*ids, 1]) == PROMPT + "</s>"
        chat = [{"role": "user", "content": "a"}]
        text = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
        assert llm.chat(chat, SAMPLED, use_tqdm=False)[0].prompt == text

    def test_an_interrupted_call_leaves_nothing_behind(self, llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
        step, calls = llm.engine.core.step, []

        def interrupting(now_s: float) -> None:
            calls.append(1)
            if len(calls) == 5:
                _thread.interrupt_main()
            step(now_s)

        monkeypatch.setattr(llm.engine.core, "step", interrupting)
        handler = signal.signal(signal.SIGINT, signal.default_int_handler)  # shells ignore it in background jobs
        try:
            with pytest.raises(KeyboardInterrupt):
                generate(llm, [PROMPT, "two"], replace(SAMPLED, max_tokens=50))
        finally:
            signal.signal(signal.SIGINT, handler)
        wait_until_idle(llm)

    def test_chat_renders_the_template(self, llm: LLM) -> None:
        chats = [
            [{"role": "user", "content": "a"}],
            [{"role": "system", "content": "b"}, {"role": "user", "content": "c"}],
        ]
        outputs = llm.chat(chats, SAMPLED, use_tqdm=False)
        texts = ["[user] a\n[bot] ", "[system] b\n[user] c\n[bot] "]
        assert [output.prompt for output in outputs] == texts
        for output, plain in zip(outputs, generate(llm, texts, SAMPLED), strict=True):
            assert output.outputs[0].text == plain.outputs[0].text
        (single,) = llm.chat(chats[0], SAMPLED, use_tqdm=False)
        assert single.outputs[0].text == outputs[0].outputs[0].text


# From vLLM's documentation (offline inference: basic, chat, prompt caching, logprobs), except model and sizes.
VLLM_SCRIPT = """
from vllm import LLM, SamplingParams

# Sample prompts.
prompts = [
    "Hello, my name is",
    "The president of the United States is",
    "The capital of France is",
    "The future of AI is",
]
# Create a sampling params object.
sampling_params = SamplingParams(temperature=0.8, top_p=0.95)

# Create an LLM.
llm = LLM(model=MODEL, max_model_len=128, max_num_seqs=1, max_num_batched_tokens=1, enable_prefix_caching=True,
          trust_remote_code=False, enforce_eager=True, block_size=16, swap_space=4, load_format="auto", seed=None,
          disable_log_stats=True, tokenizer_mode="auto", revision=None, max_logprobs=20, enable_chunked_prefill=True)
# Generate texts from the prompts. The output is a list of RequestOutput objects
# that contain the prompt, generated text, and other information.
outputs = llm.generate(prompts, sampling_params)
# Print the outputs.
print("\\nGenerated Outputs:\\n" + "-" * 60)
for output in outputs:
    prompt = output.prompt
    generated_text = output.outputs[0].text
    print(f"Prompt:    {prompt!r}")
    print(f"Output:    {generated_text!r}")
    print("-" * 60)

# Chat
conversation = [
    {"role": "system", "content": "Be helpful"},
    {"role": "user", "content": "Hello"},
    {"role": "assistant", "content": "Hi"},
    {"role": "user", "content": "Tell me"},
]
outputs += llm.chat(conversation, sampling_params, use_tqdm=False)
outputs += llm.chat([conversation for _ in range(2)], sampling_params=sampling_params, use_tqdm=True)

# Log probabilities, token ids, stops
params = SamplingParams(n=2, temperature=0.7, top_k=20, min_p=0.01, seed=42, max_tokens=8, min_tokens=2, stop=["\\n"],
                        stop_token_ids=[1], logprobs=2, prompt_logprobs=1, repetition_penalty=1.1)
outputs += llm.generate({"prompt_token_ids": [5, 6, 7]}, params)
for completion in outputs[-1].outputs:
    for token_id, position in zip(completion.token_ids, completion.logprobs):
        assert position[token_id].logprob <= 0 and position[token_id].rank >= 1
        assert isinstance(position[token_id].decoded_token, str)
    print(completion.index, completion.cumulative_logprob, completion.finish_reason, completion.stop_reason)
assert outputs[-1].prompt_logprobs[0] is None and len(outputs[-1].prompt_logprobs) == 3
assert all(output.finished and output.request_id and output.num_cached_tokens >= 0 for output in outputs)
tokenizer = llm.get_tokenizer()
assert tokenizer.encode(prompts[0]) == tokenizer(prompts[0]).input_ids == outputs[0].prompt_token_ids
assert tokenizer.decode(tokenizer.convert_tokens_to_ids(["</s>"])) == tokenizer.eos_token
assert len(tokenizer.apply_chat_template(conversation, add_generation_prompt=True)["input_ids"]) > 0
llm.reset_prefix_cache()
"""


def test_a_script_written_for_vllm_runs_with_its_import_changed(llama: Path) -> None:
    printed = io.StringIO()
    names = {"MODEL": str(llama), "__name__": "__main__"}
    with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(io.StringIO()):
        exec(VLLM_SCRIPT.replace("from vllm import", "from jaxserve import"), names)
    assert len(names["outputs"]) == 4 + 1 + 2 + 1
    assert printed.getvalue().count("Output:") == 4
    assert names["llm"].engine.stats.num_compiles == 0


def test_llm_takes_engine_options(llama: Path) -> None:
    with as_shipped(), pytest.raises(RequestError, match="needs a tokenizer"):
        LLM(str(llama), **SIZES, skip_tokenizer_init=True).generate(PROMPT)
    with pytest.raises(ConfigError, match="enable_prompt_embeds must be False, got True"):
        LLM(str(llama), enforce_eager=True, enable_prompt_embeds=True)


def test_default_sampling_params_are_the_checkpoints(llama: Path, tmp_path: Path) -> None:
    checkpoint = tmp_path / "model"
    shutil.copytree(llama, checkpoint)
    recommended = {"temperature": 0.3, "top_k": 7, "max_new_tokens": 5, "eos_token_id": [1, 5], "do_sample": True}
    (checkpoint / "generation_config.json").write_text(json.dumps(recommended))
    with as_shipped():  # the programs of `llm`
        llm = LLM(str(checkpoint), **SIZES)
    params = llm.get_default_sampling_params()
    assert params == SamplingParams(temperature=0.3, top_k=7, max_tokens=5)
    (output,) = generate(llm, [PROMPT], replace(params, logit_bias={5: 100.0}))
    assert (output.outputs[0].token_ids, output.outputs[0].finish_reason) == ([5], "stop")
    assert len(llm.generate(PROMPT, use_tqdm=False)[0].outputs[0].token_ids) <= 5
    (checkpoint / "generation_config.json").write_text('{"top_p": 3}')
    with pytest.raises(ConfigError, match=r"generation_config.json.*top_p"):
        LLM(str(checkpoint), **SIZES)
