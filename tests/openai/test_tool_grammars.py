"""Grammars of tool calls: whatever is sampled under them is read as calls that obey their schemas."""

import json
import random
from typing import Any

import jsonschema
import numpy as np
import pytest

from jaxserve.api.outputs import CompletionOutput, RequestOutput
from jaxserve.api.sampling_params import SamplingParams
from jaxserve.openai.chat_formats import ChatFormat
from jaxserve.openai.context import BodyContext
from jaxserve.openai.format import CHAT, ParsedRequest, parse_body
from jaxserve.openai.interfaces import INTERFACES
from jaxserve.openai.message_deltas import whole_message
from jaxserve.openai.messages import MESSAGES
from jaxserve.openai.replies import Reply
from jaxserve.openai.responses import RESPONSES
from jaxserve.text.detokenizer import Detokenizer
from jaxserve.text.structured_output.grammar import GrammarCompiler, TokenConstraint
from tests.openai.chat_samples import Call, Message, written
from tests.openai.test_tool_calls import FORMATS, TOKENIZERS, format_of
from tests.parameters import mainly

SCHEMAS: dict[str, dict[str, Any]] = {
    "f": {
        "type": "object",
        "properties": {"a": {"type": "integer", "minimum": 0, "maximum": 99}, "b": {"enum": ["<b>", "x"]}},
        "required": ["a"],
        "additionalProperties": False,
    },
    "g": {"type": "object", "properties": {}, "additionalProperties": False},
}
TOOLS = [
    {"type": "function", "function": {"name": name, "parameters": schema, "strict": True}}
    for name, schema in SCHEMAS.items()
]
NAMED = {"type": "function", "function": {"name": "g"}}
COMPILERS = [GrammarCompiler(each.json_text(), each.vocab_size, frozenset(each.eos_token_ids)) for each in TOKENIZERS]


def request_of(name: str | None, is_special: bool, prompt: str = "x", **fields: Any) -> ParsedRequest:
    body = {"messages": [{"role": "user", "content": prompt}], "tools": TOOLS} | fields
    form = ChatFormat() if name is None else format_of(name)
    return parse_body(CHAT, body, BodyContext("m", (), TOKENIZERS[is_special], SamplingParams(), chat_format=form))


def constraint_of(request: ParsedRequest, is_special: bool) -> TokenConstraint:
    form = request.params.structured_outputs
    stops = frozenset(TOKENIZERS[is_special].eos_token_ids)
    return COMPILERS[is_special].constraint(form, allowed_token_ids=None, stop_ids=stops, min_tokens=0)


def read_tokens(request: ParsedRequest, token_ids: list[int], is_special: bool) -> dict[str, Any]:
    detokenizer = Detokenizer(TOKENIZERS[is_special], request.params)
    detokenizer.push(token_ids)
    detokenizer.finish()
    return whole_message(request.form.reader("x")._scanner.scan(str(detokenizer.visible), is_end=True))


def sampled(request: ParsedRequest, is_special: bool, rng: random.Random) -> list[int] | None:
    """Return the tokens of a message that a model without preferences writes; None if it comes to no end."""
    constraint, token_ids = constraint_of(request, is_special), []
    eos = TOKENIZERS[is_special].eos_token_ids[0]
    for _ in range(200):
        bits = np.unpackbits(constraint.words.view(np.uint8), bitorder="little")
        allowed = np.flatnonzero(bits[: TOKENIZERS[is_special].vocab_size]).tolist()
        assert allowed, constraint.error
        marks = [each for each in allowed if each >= 320]  # else thoughts hardly end
        token_id = eos if eos in allowed and rng.random() < 0.3 else rng.choice(marks or allowed)
        if token_id == eos:
            return token_ids
        token_ids.append(token_id)
        constraint.advance(token_ids)
        if constraint.has_ended:
            assert not constraint.error
            return token_ids
    return None


@pytest.mark.parametrize("name", [*FORMATS, None])
@pytest.mark.parametrize("is_special", mainly([True], False))
@pytest.mark.parametrize(("choice", "parallel"), [("required", True), ("required", False), (NAMED, True)])
def test_forced_calls_obey_their_schemas(name: str | None, is_special: bool, choice: Any, parallel: bool) -> None:
    request = request_of(name, is_special, tool_choice=choice, parallel_tool_calls=parallel)
    rng, num_ended = random.Random(0), 0
    for _ in range(6):
        token_ids = sampled(request, is_special, rng)
        if token_ids is None:
            continue
        num_ended += 1
        message = read_tokens(request, token_ids, is_special)
        calls = message.get("tool_calls", [])
        assert not message["content"]
        assert calls if parallel and choice == "required" else len(calls) == 1
        for call in calls:
            function = call["function"]
            assert function["name"] in (["g"] if choice == NAMED else SCHEMAS)
            jsonschema.validate(json.loads(function["arguments"]), SCHEMAS[function["name"]])
    assert num_ended


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("choice", ["required", "auto"])
def test_what_models_write_is_allowed_if_it_obeys_the_schema(name: str, choice: str) -> None:
    request = request_of(name, True, tool_choice=choice)
    reasoning = "" if name == "llama3_json" else "hm"
    content = "well" if choice == "auto" and name != "llama3_json" else ""
    for arguments, is_valid in (({"a": 1, "b": "<b>"}, True), ({"a": "x"}, False)):
        calls = [Call("f", arguments), Call("g", {})][: 1 if name == "openai" else 2]  # its calls end a reply
        text = written(name, Message(content, reasoning, calls)).replace("[CALL_ID]abcdefghi", "")  # the id is optional
        constraint, token_ids = constraint_of(request, True), TOKENIZERS[True].encode(text, add_special_tokens=False)
        constraint.advance(token_ids)
        assert bool(constraint.error) != is_valid, constraint.error


@pytest.mark.parametrize("name", FORMATS)
def test_plain_answers_are_free_where_tools_may_be_left(name: str) -> None:
    text = written(name, Message("well, 1 < 2")).removesuffix("<|end|>")  # its last message has a token that stops
    constraint = constraint_of(request_of(name, True), True)
    constraint.advance(TOKENIZERS[True].encode(text, add_special_tokens=False))
    assert not constraint.error


def test_only_what_must_be_bound_is_bound() -> None:
    loose = [{"type": "function", "function": {"name": "f", "parameters": SCHEMAS["f"]}}]
    assert request_of("hermes", True, tools=loose).params.structured_outputs is None
    assert request_of("hermes", True, tool_choice="none").params.structured_outputs is None
    assert request_of("hermes", True, tools=loose, parallel_tool_calls=False).params.structured_outputs is not None


@pytest.mark.parametrize("name", FORMATS)
def test_tools_that_are_not_allowed_cannot_be_called(name: str) -> None:
    loose = [{"type": "function", "function": {"name": name}} for name in "fg"]
    choice = {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": loose[1:]}}
    request = request_of(name, True, tools=loose, tool_choice=choice)
    content = "" if name == "llama3_json" else "well"
    for called, is_allowed in (("f", False), ("g", True)):
        (text, *_) = messages_of(name, content, [Call(called, {"x": 1})])
        assert ends(request, text, True) == is_allowed
    (text, *_) = messages_of(name, "well", [])
    assert ends(request, text, True)


FORM = {"type": "object", "properties": {"x": {"enum": [1, "<b>"]}}, "required": ["x"], "additionalProperties": False}
FORMAT = {"type": "json_schema", "json_schema": {"name": "x", "schema": FORM}}
ANSWER = '{"x":1}'
REFERRING = {"type": "object", "properties": {"a": {"$ref": "#/$defs/n"}}, "$defs": {"n": {"const": 5}}}
OTHER = REFERRING | {"$defs": {"n": {"const": 6}}, "additionalProperties": False}
LOOSE = [{"type": "function", "function": {"name": "f", "parameters": SCHEMAS["f"]}}]


def ends(request: ParsedRequest, text: str, is_special: bool) -> bool:
    """Return whether a message may be a text."""
    constraint = constraint_of(request, is_special)
    constraint.advance(TOKENIZERS[is_special].encode(text, add_special_tokens=False))
    eos = TOKENIZERS[is_special].eos_token_ids[0]
    return not constraint.error and (constraint.has_ended or bool(constraint.words[eos // 32] >> eos % 32 & 1))


def messages_of(name: str, content: str, calls: list[Call]) -> list[str]:
    """Return a message with and without a thought before it, as the grammar has it: without ends and ids."""
    found = []
    for reasoning in ("", "hm") if name != "llama3_json" else ("",):
        text = written(name, Message(content, reasoning, calls)).removesuffix("<|end|>")
        found.append(text.replace("[CALL_ID]abcdefghi", ""))
    return found


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("is_special", [False, True])
def test_a_form_prevents_no_calls_and_calls_no_form(name: str, is_special: bool) -> None:
    free = request_of(name, is_special, tools=LOOSE, response_format=FORMAT)
    strict = request_of(name, is_special, response_format=FORMAT, parallel_tool_calls=False)
    without = request_of(name, is_special, tool_choice="none", response_format=FORMAT)
    forced = request_of(name, is_special, tool_choice="required", response_format=FORMAT)
    call, bad = [Call("f", {"a": 1})], [Call("f", {"a": "y"})]
    for text in messages_of(name, ANSWER, []):
        found = [ends(each, text, is_special) for each in (free, strict, without, forced)]
        assert found == [True, True, True, False], text
    for text in messages_of(name, "", call):
        found = [ends(each, text, is_special) for each in (free, strict, without, forced)]
        assert found == [True, True, False, True], text
    for text in messages_of(name, "", bad):  # the schemas of tools bind those that are strict or forced
        found = [ends(each, text, is_special) for each in (free, strict, without, forced)]
        assert found == [True, False, False, False], text
    for text in messages_of(name, '{"x":2}', []) + messages_of(name, "well", []):
        assert not any(ends(each, text, is_special) for each in (free, strict, without, forced)), text
    if name not in ("openai", "llama3_json"):  # the former's calls end a reply; the latter has one at most beside forms
        for text in messages_of(name, "", call * 2):
            assert [ends(each, text, is_special) for each in (free, strict)] == [True, False], text


def test_references_of_forms_and_tools_stay_their_own() -> None:
    tools = [{"type": "function", "function": {"name": "f", "strict": True, "parameters": REFERRING}}]
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": OTHER}}
    request = request_of("llama3_json", False, tools=tools, response_format=form)
    for text in ('{"a": 6}', '{"name": "f", "parameters": {"a": 5}}'):
        assert ends(request, text, False)
        assert not ends(request, text.replace("5", "7").replace("6", "5"), False)


@pytest.mark.parametrize("name", FORMATS)
def test_a_sample_is_calls_or_has_the_form(name: str) -> None:
    request, rng, kinds = request_of(name, True, response_format=FORMAT), random.Random(0), set()
    for _ in range(12):
        if (token_ids := sampled(request, True, rng)) is None:
            continue
        message = read_tokens(request, token_ids, True)
        for call in message.get("tool_calls", []):
            jsonschema.validate(json.loads(call["function"]["arguments"]), SCHEMAS[call["function"]["name"]])
        if not message.get("tool_calls"):
            jsonschema.validate(json.loads(message["content"]), FORM)
        kinds.add("tool_calls" in message)
    assert kinds


@pytest.mark.parametrize(
    ("form", "right", "wrong"),
    [
        ({"response_format": {"type": "json_object"}}, '{"any": [1]}', "[1]"),
        ({"structured_outputs": {"json": True}}, "[1]", "well"),
        ({"structured_outputs": {"json": json.dumps(FORM), "disable_any_whitespace": True}}, ANSWER, '{"x": 1}'),
        ({"structured_outputs": {"regex": r"a/b\/c|\d{2}\n"}}, "a/b/c", "a/b"),
        ({"structured_outputs": {"regex": "x\ny"}}, "x\ny", "xy"),
        ({"structured_outputs": {"choice": ['y"e\\s', "no|"]}}, 'y"e\\s', "no"),
        ({"structured_outputs": {"grammar": 'start: "a" item+ "}"\nitem: /[0-9{]/ | "(" item ")"'}}, "a1(2)}", "a}"),
    ],
)
def test_every_form_is_for_the_text_after_the_thought(form: dict[str, Any], right: str, wrong: str) -> None:
    for fields in ({}, {"tool_choice": "none"}, {"tools": [], "tool_choice": None}):
        for prompt, before in (("x", ""), ("x", "<think>hm</think>\n\n"), ("<think>\n", "hm</think>")):
            request = request_of("hermes", False, prompt, **form, **fields)
            assert ends(request, before + right, False)
            assert not ends(request, before + wrong, False)
            completion = CompletionOutput(0, before + right, [5], finish_reason="stop")
            body = Reply(request, None, response_id="x", created_s=1).body(
                [RequestOutput("0", None, [1], [completion])]
            )
            assert body["choices"][0]["message"]["content"] == right


def test_the_same_form_and_tools_of_every_interface() -> None:
    function = {"name": "f", "parameters": SCHEMAS["f"], "strict": True}
    named = {"name": "x", "schema": FORM}
    chat = {"messages": [{"role": "user", "content": "x"}], "tools": [{"type": "function", "function": function}]}
    response = {"input": "x", "tools": [{"type": "function"} | function]}
    tool = {"name": "f", "input_schema": SCHEMAS["f"], "strict": True}
    message = {"messages": chat["messages"], "tools": [tool], "max_tokens": 9}
    message["output_config"] = {"format": {"type": "json_schema", "schema": FORM}}
    response["text"] = {"format": {"type": "json_schema"} | named}
    bodies = {CHAT: chat | {"response_format": FORMAT}, RESPONSES: response, MESSAGES: message}
    grammars = set()
    context = BodyContext("m", (), TOKENIZERS[0], may_stream=True, chat_format=format_of("hermes"))
    for path, body in bodies.items():
        for each in (body, body | {"stream": True}):  # lines of batch files are read like the former
            request = INTERFACES[path].read(each, lambda url, chat: parse_body(url, chat, context))
            grammars.add(request.params.structured_outputs.grammar)
    assert len(grammars) == 1


@pytest.mark.parametrize("name", FORMATS)
def test_large_integers_of_arguments_and_forms_are_exact(name: str) -> None:
    number = {"type": "object", "properties": {"a": {"const": 2**53 + 1}}, "required": ["a"]}
    tools = [{"type": "function", "function": {"name": "f", "strict": True, "parameters": number}}]
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": number | {"additionalProperties": False}}}
    request = request_of(name, True, tools=tools, response_format=form)
    for value in (2**53, 2**53 + 1):
        for message in (Message(calls=[Call("f", {"a": value})]), Message(json.dumps({"a": value}))):
            text = written(name, message).removesuffix("<|end|>").replace("[CALL_ID]abcdefghi", "")
            assert ends(request, text, True) == (value > 2**53), text
