"""Replies without a server: however a stream is cut, its parts add up to the whole reply."""

import json
import tempfile
from pathlib import Path
from typing import Any

import tiny_tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxserve.api.outputs import CompletionOutput, Logprob, RequestOutput
from jaxserve.api.sampling_params import SamplingParams
from jaxserve.api.stream_events import OutputReader
from jaxserve.openai.context import BodyContext
from jaxserve.openai.format import CHAT, COMPLETIONS, parse_body
from jaxserve.openai.replies import DONE, Reply
from jaxserve.text.loading import load_tokenizer
from tests.random_runs import examples

with tempfile.TemporaryDirectory() as directory:
    files = tiny_tokenizers.write(Path(directory), tiny_tokenizers.byte_level(), chat_template="[bot]")
    tokenizer = load_tokenizer(files)

TEXTS = st.lists(st.sampled_from(["", "a", 'quo"te', "\\", "\n", "東", "😀", "</s>", " "]), min_size=1, max_size=12)


def table(token_id: int) -> dict[int, Logprob]:
    return {token_id: Logprob(-token_id / 8, 1, f"<{token_id}>"), token_id + 1: Logprob(-9.0, 2, f"<{token_id + 1}>")}


@st.composite
def runs(draw: st.DrawFn) -> tuple[dict[str, Any], list[list[list[str]]], list[tuple[int, int]]]:
    """Draw a body, the texts of the tokens of each sample of each prompt, and the order in which they come."""
    num_prompts, n = draw(st.integers(1, 2)), draw(st.integers(1, 3))
    texts = [[draw(TEXTS) for _ in range(n)] for _ in range(num_prompts)]
    order = [(p, i) for p in range(num_prompts) for i in range(n) for _ in texts[p][i]]
    body = {"n": n, "max_tokens": 12, "return_token_ids": draw(st.booleans())}
    return body, texts, draw(st.permutations(order))


def merge(whole: dict[str, Any], part: dict[str, Any]) -> None:
    """Append the part of a choice to what came before."""
    for key, value in part.items():
        if key in ("delta", "logprobs") and isinstance(value, dict):
            if whole.get(key) is None:
                whole[key] = {}
            merge(whole[key], value)
        elif isinstance(value, str) and isinstance(whole.get(key), str) and key not in ("role", "finish_reason"):
            whole[key] += value
        elif isinstance(value, list):
            whole[key] = (whole.get(key) or []) + value
        elif value is not None or key not in whole:
            whole[key] = value


@settings(max_examples=examples(50), deadline=None)
@given(
    runs(),
    st.sampled_from([CHAT, COMPLETIONS]),
    st.booleans(),
    st.booleans(),
    st.lists(st.booleans(), min_size=80, max_size=80),
    st.booleans(),
)
def test_a_stream_adds_up_to_the_whole_reply(  # noqa: PLR0912 - a case for each field
    run: Any, url: str, has_logprobs: bool, echo: bool, cuts: list[bool], continuous: bool
) -> None:
    fields, texts, order = run
    echo = echo and url == COMPLETIONS
    chat = {"messages": [{"role": "user", "content": "x"}]}
    body = fields | ({"prompt": ["p"] * len(texts), "echo": echo} if url == COMPLETIONS else chat)
    if has_logprobs:
        body |= {"logprobs": 1} if url == COMPLETIONS else {"logprobs": True, "top_logprobs": 2}
    options = {"include_usage": True, "continuous_usage_stats": continuous}
    body |= {"stream": True, "stream_options": options}
    if url == CHAT:
        texts, order = texts[:1], [each for each in order if each[0] == 0]
    request = parse_body(url, body, BodyContext("m", (), tokenizer, SamplingParams(), may_stream=True))
    outputs = []
    for number, samples in enumerate(texts):
        completions = [CompletionOutput(i, logprobs=[] if has_logprobs else None) for i in range(len(samples))]
        outputs.append(RequestOutput(str(number), "p", [7, 8], completions))
    if echo and has_logprobs:
        for output in outputs:
            output.prompt_logprobs = [None, table(8)]
    reply = Reply(request, None, response_id="x", created_s=1)
    readers = [OutputReader(output) for output in outputs]
    events: list[bytes] = []
    for (prompt, index), is_cut in zip(order, cuts, strict=False):
        completion = outputs[prompt].outputs[index]
        text = texts[prompt][index][len(completion.token_ids)]
        completion.text += text
        completion.token_ids.append(len(completion.token_ids) + 3)
        if completion.logprobs is not None:
            completion.logprobs = [*completion.logprobs, table(completion.token_ids[-1])]
        if len(completion.token_ids) == len(texts[prompt][index]):
            completion.finish_reason = "length"
        if is_cut:
            events += reply.events(prompt, outputs[prompt], readers[prompt].read())
    for prompt, reader in enumerate(readers):
        events += reply.events(prompt, outputs[prompt], reader.read())
    events += reply.last_events(outputs)
    assert events[-1] == DONE
    chunks = [json.loads(event.removeprefix(b"data: ")) for event in events[:-1]]
    whole = Reply(request, None, response_id="x", created_s=1).body(outputs)
    choices: dict[int, dict[str, Any]] = {}
    for chunk in chunks[:-1]:
        assert all(chunk[key] == whole[key] for key in ("id", "created", "model"))
        for choice in chunk["choices"]:
            merge(choices.setdefault(choice["index"], {}), choice)
    for choice in choices.values():
        if url == COMPLETIONS:
            choice["prompt_logprobs"] = None  # whole replies only
        if url == CHAT:
            choice["message"] = {"refusal": None, "reasoning": None} | choice.pop("delta")
            if choice["logprobs"] is not None:
                choice["logprobs"]["refusal"] = None
    assert sorted(choices.values(), key=lambda each: each["index"]) == whole["choices"]
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"] == whole["usage"]
