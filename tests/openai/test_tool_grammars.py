"""Grammars of tool calls: whatever is sampled under them is read as calls that obey their schemas."""

import json
import random
from typing import Any

import jsonschema
import numpy as np
import pytest

from jaxserve.errors import RequestError
from jaxserve.openai.chat_formats import ChatFormat
from jaxserve.openai.deltas import whole_message
from jaxserve.openai.format import CHAT, ParsedRequest, parse_body
from jaxserve.sampling_params import SamplingParams
from jaxserve.structured_output.grammar import GrammarCompiler, TokenConstraint
from jaxserve.text.detokenizer import Detokenizer
from tests.openai.chat_samples import Call, Message, written
from tests.openai.test_tool_calls import FORMATS, TOKENIZERS, format_of

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
    return parse_body(CHAT, body, "m", (), TOKENIZERS[is_special], SamplingParams(), chat_format=form)


def constraint_of(request: ParsedRequest, is_special: bool) -> TokenConstraint:
    form = request.params.structured_outputs
    stops = frozenset(TOKENIZERS[is_special].eos_token_ids)
    return COMPILERS[is_special].constraint(form, allowed_token_ids=None, stop_ids=stops, min_tokens=0)


def read_tokens(request: ParsedRequest, token_ids: list[int], is_special: bool) -> dict[str, Any]:
    detokenizer = Detokenizer(TOKENIZERS[is_special], request.params)
    detokenizer.push(token_ids)
    detokenizer.finish()
    return whole_message(request.form.reader("x")._scanner.scan(detokenizer.text, is_end=True))


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
@pytest.mark.parametrize("is_special", [False, True])
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
    with pytest.raises(RequestError, match="a form of its own"):
        request_of("hermes", True, response_format={"type": "json_object"})
