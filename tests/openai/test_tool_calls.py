"""Calls of tools and thoughts in chats: however a text is cut, its deltas add up to the message that was meant."""

import json
import random
import re
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import tiny_tokenizers
from hypothesis import example, given, settings
from hypothesis import strategies as st
from openai.lib.streaming._deltas import accumulate_delta
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from jaxserve.api.outputs import CompletionOutput, Logprob, RequestOutput
from jaxserve.api.sampling_params import SamplingParams
from jaxserve.api.stream_events import OutputReader
from jaxserve.errors import ConfigError, RequestError
from jaxserve.openai.chat_formats import REASONING_FORMATS, TOOL_CALL_FORMATS, ChatFormat, Delimiters, chat_format
from jaxserve.openai.context import BodyContext
from jaxserve.openai.format import CHAT, ParsedRequest, parse_body
from jaxserve.openai.message_deltas import MessageDelta, whole_message
from jaxserve.openai.replies import DONE, Reply
from jaxserve.openai.responses import response_to_chat
from jaxserve.openai.scanner import Scanner
from jaxserve.openai.tools import read_tools
from jaxserve.text.detokenizer import Detokenizer
from jaxserve.text.loading import load_tokenizer
from jaxserve.text.tokenizer import Tokenizer
from tests.openai.chat_samples import MARKS, TEMPLATES, Call, Message, read, written
from tests.random_runs import examples

NAMES = ["f", "get_weather", "a.b-c"]
FORMATS = sorted(TEMPLATES)
PROMPT = "{% for m in messages %}{{ m.content }}{% endfor %}{# {{ tools }} #}{% if tools %}{% endif %}"


def tools(**fields: Any) -> list[dict[str, Any]]:
    return [{"type": "function", "function": {"name": name, **fields}} for name in NAMES]


def format_of(name: str) -> ChatFormat:
    return chat_format([TEMPLATES[name]])


def _tokenizer(special: bool) -> Tokenizer:
    backend = tiny_tokenizers.byte_level()
    if special:
        backend.add_special_tokens(sorted(MARKS))
    else:
        backend.add_tokens(sorted(MARKS))
    with tempfile.TemporaryDirectory() as directory:
        return load_tokenizer(tiny_tokenizers.write(Path(directory), backend, chat_template=PROMPT, eos_token="</s>"))


TOKENIZERS = [_tokenizer(special) for special in (False, True)]

MARKED = st.sampled_from(
    [*sorted(MARKS), "```", "{", "}", '"', "\\", "[", "]", ";", ",", ":", "\n", "東", "😀", "\\u00e9"]
)
WORDS = st.sampled_from(["a", "b c", " ", "<", "<|", "<tool", "1", "é", "x\n", "[TOOL"])
ARGUMENTS = st.dictionaries(
    st.one_of(WORDS, MARKED),
    st.recursive(
        st.one_of(WORDS, MARKED, st.integers(), st.none(), st.booleans(), st.text(max_size=3)), st.lists, max_leaves=4
    ),
    max_size=3,
)
PLAIN = st.lists(st.sampled_from(["a", "b c", " d", "<", "\ne", "1 < 2", "é"]), max_size=4).map("".join).map(str.strip)


@st.composite
def messages(draw: st.DrawFn, name: str) -> Message:
    calls = [Call(draw(st.sampled_from(NAMES)), draw(ARGUMENTS)) for _ in range(draw(st.integers(0, 3)))]
    reasoning = "" if name == "llama3_json" else draw(PLAIN)
    content = "" if name == "llama3_json" and calls else draw(PLAIN)
    return Message(content, reasoning, calls)


def scan(
    form: ChatFormat, pieces: Iterable[str], *, has_tools: bool = True, in_reasoning: bool = False
) -> list[MessageDelta]:
    names = frozenset(NAMES) if has_tools else None
    scanner = Scanner(form, lambda number: f"id{number}", names=names, in_reasoning=in_reasoning)
    deltas = [delta for piece in pieces for delta in scanner.scan(piece, is_end=False)]
    return deltas + scanner.scan("", is_end=True)


@pytest.mark.parametrize("name", FORMATS)
def test_what_a_template_writes_is_read_again(name: str) -> None:
    @settings(max_examples=examples(8), deadline=None)
    @given(messages(name))
    def check(message: Message) -> None:
        found = read(whole_message(scan(format_of(name), [written(name, message)])))
        found.content, found.reasoning = found.content.strip(), found.reasoning.strip()
        assert found == message

    check()


VALUES: list[tuple[str, str]] = [  # the arguments' mark, and the arguments
    (json.dumps('{"a": "\\u00e9\\"}", "b": [1]}'), '{"a": "\\u00e9\\"}", "b": [1]}'),
    (json.dumps(json.dumps({"x": "{" * 2000})), json.dumps({"x": "{" * 2000})),  # longer than any head
    ('"東 \\ud83d\\ude00"', "東 😀"),  # not JSON at all, but what the model says
    ('""', "{}"),
    ("null", "{}"),
    ('"null"', "{}"),
    ("{}", "{}"),
]
HEADS = {  # calls without objects around them
    "mistral_v13": "[TOOL_CALLS]f[ARGS]{}",
    "deepseek_v3": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\n{}\n```"
    "<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    "deepseek_v31": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>{}<｜tool▁call▁end｜>"
    "<｜tool▁calls▁end｜>",
    "openai": "<|channel|>commentary to=functions.f <|constrain|>json<|message|>{}<|call|>",
}
OBJECTS = [
    '{"name": "f", "arguments": %s}',
    '{"name": "f", "parameters": %s}',
    '{"parameters": %s, "name": "f", "id": 5}',
    '{"type": "function", "function": {"name": "f", "arguments": %s}}',
    '{"id": "1", "function": {"parameters": %s, "name": "f"}, "type": "function"}',
    '{"function": "f", "arguments": %s}',
]
AROUND = {"hermes": "<tool_call>\n{}\n</tool_call>", "llama3_json": "<|python_tag|>{}", "mistral": "[TOOL_CALLS] [{}]"}
WRITTEN = [(name, text.replace("{}", "%s")) for name, text in HEADS.items()]
WRITTEN += [(name, text.replace("{}", each)) for name, text in AROUND.items() for each in OBJECTS]
WRITTEN += [("llama3_json", each) for each in OBJECTS]


@pytest.mark.parametrize(("name", "text"), WRITTEN)
def test_arguments_are_objects_their_text_or_nothing(name: str, text: str) -> None:
    """Granite 4 and others write arguments as a string of JSON, which is read once, or null if there are none."""
    form = format_of(name)
    for value, arguments in VALUES:
        whole = whole_message(scan(form, [text.replace("%s", value)]))
        function = {"name": "f", "arguments": arguments}
        assert [each["function"] for each in whole["tool_calls"]] == [function]
        assert whole["content"] is None
        twice = text.replace("%s", value) + ("; " if name == "llama3_json" else "") + text.replace("%s", value)
        if name not in ("openai", "mistral") and not (name == "llama3_json" and "<|" in text):
            assert [each["function"] for each in whole_message(scan(form, [twice]))["tool_calls"]] == [function] * 2
        if len(value) < 100:
            full = text.replace("%s", value)
            for cut in range(len(full) + 1):
                assert whole_message(scan(form, [full[:cut], full[cut:]])) == whole
            assert whole_message(scan(form, full)) == whole


SAMPLE = Message(
    "Hello, 東京 <b>", "so\n<hm>", [Call("f", {"a": '</tool_call>"}]\\', "é": [{}, {"x": 1}]}), Call("a.b-c", {})]
)


STEP = 211  # characters between the ends of texts


@pytest.mark.parametrize("name", FORMATS)
def test_no_cut_in_two_changes_a_message(name: str) -> None:
    form, text = format_of(name), written(name, SAMPLE)
    for end in range(0, len(text) + 1, STEP):  # truncated anywhere
        part = text[:end] if end + STEP <= len(text) else text + "\nand more"
        whole = whole_message(scan(form, [part]))
        for cut in range(len(part) + 1):
            assert whole_message(scan(form, [part[:cut], part[cut:]])) == whole
        assert whole_message(scan(form, part)) == whole


PIECES = st.one_of(
    MARKED,
    WORDS,
    st.sampled_from(['{"name": "f", ', '"arguments": {}', '"parameters": {"a": 1}', "}", "functions.f", "analysis"]),
    st.sampled_from(["<|channel|>commentary to=functions.f<|message|>", '{"name": "f"}', "f[ARGS]{", "final"]),
)


@settings(max_examples=examples(40), deadline=None)
@given(st.sampled_from(FORMATS), st.lists(PIECES, max_size=12), st.booleans(), st.booleans(), st.data())
def test_no_cut_changes_how_any_text_is_read(
    name: str, pieces: list[str], has_tools: bool, in_reasoning: bool, data: st.DataObject
) -> None:
    text, form = "".join(pieces), format_of(name)
    options = {"has_tools": has_tools, "in_reasoning": in_reasoning}
    whole = whole_message(scan(form, [text], **options))
    assert whole_message(scan(form, text, **options)) == whole
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=5)))
    parts = [text[start:stop] for start, stop in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    assert whole_message(scan(form, parts, **options)) == whole


@settings(max_examples=examples(30), deadline=None)
@given(
    st.sampled_from([name for name in FORMATS if name != "openai"]),  # its headers may have any words
    st.lists(
        st.one_of(MARKED, st.sampled_from(["w0", "w1", "w2 w3", '{"name": "f", "arguments": {', "w4}"])), max_size=12
    ),
)
@example("mistral", ["[TOOL_CALLS]", "w0 w1"])
@example("hermes", ["<tool_call>", '{"name": w1', "</tool_call>"])
def test_no_word_is_lost_though_calls_are_malformed(name: str, pieces: list[str]) -> None:
    text = "".join(pieces).replace("[CALL_ID]", "")
    message = whole_message(scan(format_of(name), [text]))
    found = " ".join(
        [message.get("reasoning", ""), message["content"] or ""]
        + [call["function"]["name"] + call["function"]["arguments"] for call in message.get("tool_calls", [])]
    )
    # keys of a call's object beside its name and arguments are no text
    words = re.findall(r"w\d", re.sub(r'"[^"]*w\d[^"]*"', "", text))
    assert all(found.count(word) >= words.count(word) for word in words)


def outputs_of(text: list[list[int]], request: ParsedRequest, tokenizer: Tokenizer) -> tuple[RequestOutput, Any]:
    """Return an output without tokens, and the function that gives the next token to one of its samples."""
    completions = [
        CompletionOutput(i, logprobs=[] if request.params.logprobs is not None else None) for i in range(len(text))
    ]
    output = RequestOutput("0", None, [1, 2], completions)
    detokenizers = [Detokenizer(tokenizer, request.params) for _ in text]

    def advance(index: int) -> None:
        completion, detokenizer = completions[index], detokenizers[index]
        token_id = text[index][len(completion.token_ids)]
        detokenizer.push([token_id])
        completion.token_ids.append(token_id)
        if completion.logprobs is not None:
            completion.logprobs = [*completion.logprobs, {token_id: Logprob(-token_id / 8, 1, f"<{token_id}>")}]
        if len(completion.token_ids) == len(text[index]):
            detokenizer.finish()
            completion.finish_reason = "length" if index == 1 else "stop"
        completion.text = str(detokenizer.visible)

    return output, advance


@settings(max_examples=examples(20), deadline=None)
@given(st.data(), st.sampled_from(FORMATS), st.booleans(), st.booleans(), st.integers(1, 3))
def test_a_stream_adds_up_to_the_whole_reply(
    data: st.DataObject, name: str, is_special: bool, has_logprobs: bool, n: int
) -> None:
    tokenizer = TOKENIZERS[is_special]
    body: dict[str, Any] = {"messages": [{"role": "user", "content": "x"}], "n": n, "tools": tools(), "stream": True}
    body |= {
        "logprobs": has_logprobs,
        "stream_options": {"include_usage": True},
        "return_token_ids": data.draw(st.booleans()),
    }
    body |= {"include_reasoning": data.draw(st.sampled_from([True, True, False]))}
    request = parse_body(
        CHAT, body, BodyContext("m", (), tokenizer, SamplingParams(), may_stream=True, chat_format=format_of(name))
    )
    texts, meant = [], []
    for _ in range(n):
        meant.append(data.draw(messages(name)))
        ids = tokenizer.encode(written(name, meant[-1]), add_special_tokens=False) or [5]
        texts.append(ids[: data.draw(st.integers(1, len(ids)))] if data.draw(st.booleans()) else ids)
    output, advance = outputs_of(texts, request, tokenizer)
    reader, events, reply = OutputReader(output), [], Reply(request, tokenizer, response_id="x", created_s=1)
    rng = random.Random(data.draw(st.integers(0, 2**32)))  # a draw for each token would take too long
    order = [index for index, ids in enumerate(texts) for _ in ids]
    rng.shuffle(order)
    density = rng.random()
    for index in order:
        advance(index)
        if rng.random() < density:
            events += reply.events(0, output, reader.read())
    events += [*reply.events(0, output, reader.read()), *reply.last_events([output])]
    assert events.pop() == DONE
    whole = Reply(request, tokenizer, response_id="x", created_s=1).body([output])
    ChatCompletion.model_validate(whole)
    check_stream([json.loads(event.removeprefix(b"data: ")) for event in events], whole)
    for index, choice in enumerate(whole["choices"]):
        calls = choice["message"].get("tool_calls", [])
        has_calls = bool(calls) and all(is_json(call["function"]["arguments"]) for call in calls)
        assert choice["finish_reason"] == ("length" if index == 1 else "tool_calls" if has_calls else "stop")
        if name != "llama3_json" and len(texts[index]) == len(tokenizer.encode(written(name, meant[index]), False)):
            assert [each.name for each in read(choice["message"]).calls] == [each.name for each in meant[index].calls]


def is_json(text: str) -> bool:
    try:
        json.loads(text)
    except ValueError:
        return False
    return True


def check_stream(chunks: list[dict[str, Any]], whole: dict[str, Any]) -> None:
    """Check the chunks of a stream against the whole reply, with the accumulator of OpenAI's client."""
    choices: dict[int, dict[Any, Any]] = {}
    for chunk in chunks:
        ChatCompletionChunk.model_validate(chunk)
        for choice in chunk["choices"]:
            index = choice["index"]
            assert ("role" in choice["delta"]) == (index not in choices)  # the first chunk and no other
            logprobs, token_ids = (choice.pop("logprobs") or {}).get("content", []), choice.pop("token_ids")
            before = choices.setdefault(index, {"index": index, "logprobs": [], "token_ids": []})
            choices[index] = accumulate_delta(before, choice)
            before["logprobs"] += logprobs
            before["token_ids"] += token_ids or []
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"] == whole["usage"]
    assert sorted(choices) == list(range(len(whole["choices"])))
    for choice in whole["choices"]:
        found, message = choices[choice["index"]], choice["message"]
        calls = found["delta"].pop("tool_calls", [])
        assert [call.pop("index") for call in calls] == list(range(len(calls)))
        assert calls == message.get("tool_calls", [])  # so ids, types and names came once
        assert found["delta"]["content"] == (message["content"] or "")
        assert found["delta"].get("reasoning") == message["reasoning"]
        assert found["finish_reason"] == choice["finish_reason"]
        assert found["token_ids"] == (choice["token_ids"] or [])
        assert found["logprobs"] == (choice["logprobs"] or {}).get("content", [])


def parsed(template: str = "hermes", **fields: Any) -> ParsedRequest:
    body = {"messages": [{"role": "user", "content": "x"}]} | fields
    return parse_body(
        CHAT, body, BodyContext("m", (), TOKENIZERS[0], SamplingParams(), chat_format=format_of(template))
    )


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"tools": {}}, "tools must be a list"),
        ({"tools": [{}]}, "tools must be of the form"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "must have names"),
        ({"tools": tools() + tools()}, "different names"),
        ({"tools": tools(parameters=[1])}, "must be JSON schemas"),
        ({"tools": tools(strict=1)}, "must be a bool"),
        ({"tools": tools(), "tool_choice": "any"}, "tool_choice must be"),
        ({"tools": tools(), "tool_choice": {"type": "function", "function": {"name": "z"}}}, "must name one of"),
        ({"tool_choice": "required"}, "needs tools"),
        ({"tools": tools(), "parallel_tool_calls": "yes"}, "parallel_tool_calls must be a bool"),
        ({"functions": []}, "functions is now tools"),
        ({"include_reasoning": 1}, "include_reasoning must be a bool"),
        (
            {"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}]},
            "be JSON",
        ),
        ({"messages": [{"role": "assistant", "tool_calls": [{"type": "function"}]}]}, "a function with a name"),
    ],
)
def test_errors_name_the_field(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        parsed(**fields)


def test_a_model_without_known_calls_cannot_choose_tools() -> None:
    body = {"messages": [{"role": "user", "content": "x"}], "tools": tools()}
    with pytest.raises(RequestError, match="tool-call-parser"):
        parse_body(CHAT, body, BodyContext("m", (), TOKENIZERS[0], SamplingParams()))


def test_a_message_with_calls_reaches_the_template_as_objects() -> None:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
    template = (
        "{% for m in messages %}{{ m.reasoning_content }}|{{ m.tool_calls and m.tool_calls[0].function.arguments.a }}"
    )
    template += "{% endfor %}{{ reasoning_effort }}"
    backend = tiny_tokenizers.byte_level()
    with tempfile.TemporaryDirectory() as directory:
        tokenizer = load_tokenizer(tiny_tokenizers.write(Path(directory), backend, chat_template=template))
    body = {"messages": [{"role": "assistant", "content": None, "reasoning": "hm", "tool_calls": [call]}]}
    body |= {"reasoning_effort": "low"}
    request = parse_body(CHAT, body, BodyContext("m", (), tokenizer, SamplingParams()))
    assert tokenizer.decode(request.prompts[0]) == "hm|1low"
    assert request.ignored == ()


@pytest.mark.parametrize(
    ("prompt", "in_reasoning"), [("<think>\n", True), ("<think>\n\n</think>\n", False), ("", False)]
)
def test_a_prompt_that_ends_in_a_thought_begins_one(prompt: str, in_reasoning: bool) -> None:
    body = {"messages": [{"role": "user", "content": prompt}]}
    request = parse_body(
        CHAT, body, BodyContext("m", (), TOKENIZERS[0], SamplingParams(), chat_format=REASONING_FORMATS["qwen3"])
    )
    assert request.form.in_reasoning == in_reasoning


def test_no_mark_begins_another() -> None:
    for form in [*TOOL_CALL_FORMATS.values(), *REASONING_FORMATS.values()]:
        assert not [(a, b) for a in form.delimiters for b in form.delimiters if a != b and b.startswith(a)]
        marks = Delimiters(tuple(form.delimiters))
        for mark in form.delimiters:
            assert all(marks.partial_suffix.search(f"x{mark[:end]}").start() == 1 for end in range(1, len(mark)))


def test_formats_are_found_in_templates() -> None:
    assert {
        name: format_of(name).calls == TOOL_CALL_FORMATS[name].calls for name in TOOL_CALL_FORMATS
    } == dict.fromkeys(TOOL_CALL_FORMATS, True)
    assert format_of("hermes").reasoning == REASONING_FORMATS["qwen3"].reasoning
    assert chat_format(["plain"]) == ChatFormat()
    assert chat_format([TEMPLATES["hermes"]], "none", "none") == ChatFormat()
    with pytest.raises(ConfigError, match="tool_call_parser must be one of"):
        chat_format([], "hermez")


@pytest.mark.parametrize("mode", ["auto", "required"])
def test_allowed_tools(mode: str) -> None:
    tools = [{"type": "function", "function": {"name": name}} for name in ("f", "g", "h")]
    choice = {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": [tools[2], tools[0]]}}
    found = read_tools({"tools": tools, "tool_choice": choice})
    assert (found.choice, [function.name for function in found.functions]) == (mode, ["f", "h"])
    assert list(found.given) == tools, "the model is shown all of them"
    body: dict[str, Any] = {
        "input": "x",
        "tools": [{"type": "function", "name": name, "parameters": {}} for name in ("f", "g", "h")],
        "tool_choice": {"type": "allowed_tools", "mode": mode, "tools": [{"type": "function", "name": "h"}]},
    }
    of_response = read_tools(response_to_chat(body).chat)
    assert (of_response.choice, [function.name for function in of_response.functions]) == (mode, ["h"])
    body["tools"].append({"type": "web_search"})
    body["tool_choice"]["tools"].append({"type": "web_search"})
    translated = response_to_chat(body)
    assert read_tools(translated.chat) == of_response
    assert translated.ignored == {"tools.web_search", "tool_choice.web_search"}
    body["tool_choice"]["tools"] = [{"type": "web_search"}]
    if mode == "auto":
        assert read_tools(response_to_chat(body).chat).choice == "none"
    else:
        with pytest.raises(RequestError, match="allowed_tools must have the mode"):
            read_tools(response_to_chat(body).chat)
    for wrong in (
        {"mode": "none", "tools": tools},
        {"mode": mode, "tools": []},
        {"mode": mode, "tools": [{"type": "x"}]},
    ):
        with pytest.raises(RequestError, match="allowed_tools must have the mode"):
            read_tools({"tools": tools, "tool_choice": {"type": "allowed_tools", "allowed_tools": wrong}})
