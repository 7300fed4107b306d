"""Grammars for messages with forced tool calls, strict schemas or structured answers."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from jaxserve.api.structured_outputs import StructuredOutputsParams
from jaxserve.errors import RequestError
from jaxserve.openai.chat_formats import CallSyntax, ChatFormat, MessageSyntax
from jaxserve.openai.tools import Function, Tools
from jaxserve.text.structured_output.exact_schema import quoted
from jaxserve.text.structured_output.lark import WHITESPACE, form_rules, schema_rules, whitespace_options

_ARGUMENTS = "\0"


def message_grammar(
    chat_format: ChatFormat,
    tools: Tools,
    form: StructuredOutputsParams | None,
    *,
    in_reasoning: bool,
    token_id: Callable[[str], int | None],
) -> str | None:
    """Return a message's grammar in llguidance's variant of Lark; None if the message may be anything.

    Args:
        chat_format: format of the message.
        tools: tools that the message may call. Arguments of forced and of strict tools must obey their schemas.
        form: structure of the answer, which tool calls may replace (or must, if they are forced); None for free text.
        in_reasoning: True if the message begins within reasoning.
        token_id: function that returns a delimiter's token id, or None if the delimiter is not one token.
    """
    if tools.are_forced:
        form = None
    elif form is None:
        is_bound = any(function.is_strict for function in tools.functions) or not tools.is_parallel
        is_bound |= len(tools.functions) < len(tools.given)  # the model sees tools that it may not call
        if tools.choice == "none" or not is_bound:
            return None
    grammar = _Grammar(chat_format.delimiters, token_id)
    try:
        if chat_format.messages is not None:
            grammar.add_headed_messages(chat_format.messages, tools, form)
        else:
            grammar.add_delimited_text(chat_format, tools, form, in_reasoning=in_reasoning)
    except RecursionError:
        raise RequestError("JSON schemas of tools and forms must be nested less deeply") from None
    return grammar.text


class _Grammar:
    """Builder of a message's grammar, to which rules are added.

    Args:
        delimiters: texts that may be single tokens.
        token_id: function that returns a delimiter's token id, or None if the delimiter is not one token.
    """

    def __init__(self, delimiters: frozenset[str], token_id: Callable[[str], int | None]) -> None:
        self._token_id = token_id
        self._delimiters = re.compile("|".join(map(re.escape, sorted(delimiters))) or r"(?!)")
        self._rules: list[str] = []

    @property
    def text(self) -> str:
        """All rules in llguidance's variant of Lark."""
        return "\n".join(["%llguidance {}", *self._rules, r"TEXT: /(.|\n)*/", r"SPACE: /[ \n]{0,4}/", ""])

    def add_delimited_text(
        self, chat_format: ChatFormat, tools: Tools, form: StructuredOutputsParams | None, *, in_reasoning: bool
    ) -> None:
        """Add the rules for a message with delimiters in its text; arguments as in `message_grammar`."""
        reasoning, space = "", ""
        if chat_format.reasoning is not None:
            rest, space = self._up_to("reasoning", chat_format.reasoning.end), "SPACE"
            reasoning = rest if in_reasoning else f"({self._literal(chat_format.reasoning.begin)} {rest})?"
        if form is not None and form.is_json and tools.choice != "none" and not chat_format.calls[0].begin:
            # both begin with a brace, so one schema must cover both, with one call at most
            options = [_call_schema(function, chat_format.calls[0]) for function in tools.functions]
            either = {"anyOf": [_moved(each, f"/anyOf/{i}") for i, each in enumerate([*options, form.schema])]}
            self._rules += schema_rules("form", either, whitespace_options(form))
            tools = replace(tools, choice="none")
        elif form is not None:
            self._rules += form_rules("form", form)
        if tools.choice == "none":
            self._rules.append(f"start: {reasoning} {space} form")
            return
        syntax = chat_format.calls[0]
        calls = self._calls(syntax, tools)
        if tools.are_forced or form is not None:
            again = "" if syntax.separator or syntax.call_begin or not tools.is_parallel else "(SPACE run)*"
            answer = "" if form is None else f"| {space} form"
            self._rules.append(f"start: {reasoning} (SPACE run {again} {answer})")
            self._rules.append(f"run: {self._literal(syntax.begin)} {calls}")
        elif not syntax.begin:
            self._rules.append(f"start: {reasoning} (run | OTHER)")
            self._rules.append(f"run: {calls}")
            self._rules.append(r"OTHER: /([^{](.|\n)*)?/")
        else:
            self._rules.append(f"start: {reasoning} {'run* tail' if tools.is_parallel else '(run | tail)'}")
            self._rules.append(f"run: {self._up_to('before', syntax.begin)} {calls}")
            self._rules.append("tail: TEXT")

    def add_headed_messages(self, syntax: MessageSyntax, tools: Tools, form: StructuredOutputsParams | None) -> None:
        """Add the rules for a reply of messages with headers; arguments as in `message_grammar`."""
        channel, head_end = self._literal("<|channel|>"), self._literal(syntax.head_end)
        again = f'{self._literal(syntax.begin)} "assistant"'
        bodies, constrained = [], f'{self._literal("<|constrain|>")} "json"'
        for number, function in enumerate(tools.functions):
            arguments = self._arguments(number, function, tools)
            recipient = json.dumps(f"commentary to={syntax.functions}{function.name} ")
            bodies.append(f"{channel} {recipient} {constrained} {head_end} {arguments}")
        if bodies:
            self._rules.append(f"call: {' | '.join(bodies)}")
        body = self._up_to("body", syntax.ends[0])
        self._rules.append(f'reasoning: {channel} "analysis" {head_end} {body} {again}')
        self._rules.append(f'preamble: {channel} "commentary" {head_end} {body} {again}')
        if form is None:
            self._rules.append(f'answer: {channel} "final" {head_end} TEXT')
        else:
            self._rules.append(f'answer: {channel} "final" (" " {constrained})? {head_end} form')
            self._rules += form_rules("form", form)
        either = "preamble* (call | answer)" if form is None else "(preamble* call | answer)"
        message = {"none": "answer", "auto": either}.get(tools.choice, "call")
        self._rules.append(f"start: reasoning* {message}")

    def _calls(self, syntax: CallSyntax, tools: Tools) -> str:
        """Add the rule `call`, and return the Lark expression for a run of calls after `syntax.begin`.

        It consists of `syntax.opening`, one call, or more if they may be parallel, and `syntax.end`.
        """
        calls = []
        for number, function in enumerate(tools.functions):
            arguments = self._arguments(number, function, tools)
            text = syntax.written.format(name=json.dumps(function.name), bare_name=function.name, arguments=_ARGUMENTS)
            before, after = text.split(_ARGUMENTS)
            parts = [syntax.call_begin + before, after + "".join(syntax.call_end[-1:])]
            calls.append(f"{self._literal(parts[0])} {arguments} {self._literal(parts[1])}")
        self._rules.append(f"call: {' | '.join(calls)}")
        space = "SPACE" if syntax.call_begin else ""
        again = ""
        if tools.is_parallel and (syntax.separator or syntax.call_begin):
            between = self._literal(f"{syntax.separator} ") if syntax.separator else space
            again = f"({between} call)*"
        return f"{self._literal(syntax.opening)} call {again} {space} {self._literal(syntax.end)}"

    def _arguments(self, number: int, function: Function, tools: Tools) -> str:
        """Add the rule for a function's JSON arguments, and return the rule's name, made unique by `number`."""
        schema: dict[str, Any] = {"type": "object"}
        if function.is_strict or tools.are_forced:
            schema |= function.parameters
        self._rules += schema_rules(f"arguments_{number}", schema, {"whitespace_pattern": WHITESPACE})
        return f"arguments_{number}"

    def _literal(self, text: str) -> str:
        """Return the Lark expression for exactly this text, with delimiters as token ids if they are tokens."""
        parts, start = [], 0
        for found in self._delimiters.finditer(text):
            if (token_id := self._token_id(found.group())) is not None:
                parts += [quoted(text[start : found.start()]), f"<[{token_id}]>"]
                start = found.end()
        parts.append(quoted(text[start:]))
        return " ".join(part for part in parts if part != '""')

    def _up_to(self, name: str, delimiter: str) -> str:
        """Return the Lark expression for any text up to a delimiter; a rule that it needs is called `name`_text."""
        if self._token_id(delimiter) is not None:
            return f"TEXT {self._literal(delimiter)}"
        if not any(rule.startswith(f"{name}_text[lazy]") for rule in self._rules):
            self._rules.append(f"{name}_text[lazy]: TEXT {self._literal(delimiter)}")
        return f"{name}_text"


def _call_schema(function: Function, syntax: CallSyntax) -> dict[str, Any]:
    """Return the JSON schema of a tool call that is written as a JSON object in this syntax."""
    key = "parameters" if '"parameters"' in syntax.written else "arguments"
    arguments = {"type": "object"} | (_moved(function.parameters, f"/properties/{key}") if function.is_strict else {})
    properties = {"name": {"const": function.name}, key: arguments}
    return {"type": "object", "properties": properties, "required": ["name", key], "additionalProperties": False}


def _moved(schema: Any, pointer: str) -> Any:
    """Return a JSON schema whose references stay valid if it is placed at a JSON pointer inside another schema."""
    if isinstance(schema, list):
        return [_moved(each, pointer) for each in schema]
    if not isinstance(schema, dict):
        return schema
    moved = {key: value if key in ("const", "enum") else _moved(value, pointer) for key, value in schema.items()}
    if isinstance(reference := schema.get("$ref"), str) and reference.startswith("#"):
        moved["$ref"] = f"#{pointer}{reference[1:]}"
    return moved
