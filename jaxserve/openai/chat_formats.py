"""Chat formats: the delimiters between a model's reasoning, answers and tool calls, as data."""

from __future__ import annotations

import dataclasses
import hashlib
import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

from jaxserve.errors import ConfigError

AUTO, NONE = "auto", "none"


@dataclass(frozen=True)
class Delimiters:
    """Set of delimiters that a scanner looks for; none is a prefix of another.

    Attributes:
        texts: the delimiters; may be empty.
    """

    texts: tuple[str, ...]

    @cached_property
    def pattern(self) -> re.Pattern[str]:
        """Regular expression for any delimiter."""
        return re.compile("|".join(map(re.escape, self.texts)) or r"(?!)")

    @cached_property
    def partial_suffix(self) -> re.Pattern[str]:
        """Regular expression for a cut-off delimiter at a text's end."""
        return re.compile("|".join(map(_prefix_at_end, self.texts)) or r"(?!)")


def _prefix_at_end(delimiter: str) -> str:
    """Return a regular expression for a proper, non-empty prefix of a delimiter at a text's end."""
    pattern = ""
    for character in reversed(delimiter[:-1]):
        pattern = f"{re.escape(character)}(?:{pattern})?" if pattern else re.escape(character)
    return f"(?:{pattern})\\Z" if pattern else r"(?!)"


@dataclass(frozen=True)
class ReasoningDelimiters:
    """Delimiters around a model's reasoning.

    Attributes:
        begin: opening delimiter; the prompt may end with it.
        end: closing delimiter.
    """

    begin: str
    end: str


@dataclass(frozen=True)
class CallSyntax:
    """Syntax for a run of adjacent tool calls in a model's text; white space may be anywhere between its parts.

    Attributes:
        begin: delimiter before a run; empty if an object at the start of a message is a call.
        opening: text after `begin` that selects this syntax.
        call_begin: delimiter before each call.
        head: regular expression for the text before the arguments, with a group `name`. None if each call is a JSON
            object with the keys `name` and `arguments` (or `parameters`).
        call_end: delimiters after each call's arguments; any may be missing.
        separator: text between calls.
        end: delimiter after a run; it may be missing.
        head_delimiters: delimiters that a head may have in addition to those in `written`.
        written: template for a call with `{name}` (as JSON) or `{bare_name}`, and `{arguments}`, as models write it.
    """

    begin: str
    opening: str = ""
    call_begin: str = ""
    head: re.Pattern[str] | None = None
    call_end: tuple[str, ...] = ()
    separator: str = ""
    end: str = ""
    head_delimiters: tuple[str, ...] = ()
    written: str = '{{"name": {name}, "arguments": {arguments}}}'

    @cached_property
    def head_before_null(self) -> re.Pattern[str]:
        """Regular expression for a `head` before `null` instead of arguments."""
        head = r"(?!)" if self.head is None else self.head.pattern
        return re.compile(rf"{head}(?<=[\s\]>])(?=null(?!\w))")


@dataclass(frozen=True)
class MessageSyntax:
    """Syntax of replies that consist of several messages with headers: gpt-oss's "harmony".

    Attributes:
        begin: delimiter before all messages but the first.
        starts: possible beginnings of a header.
        head_end: delimiter after a header.
        ends: delimiters after a message.
        reasoning_channels: names of the channels that have reasoning.
        functions: prefix of recipients that are functions.
    """

    begin: str
    starts: tuple[str, ...]
    head_end: str
    ends: tuple[str, ...]
    reasoning_channels: frozenset[str]
    functions: str

    def channel(self, head: str) -> str:
        """Return the channel in a message header `head`; empty if there is none."""
        found = re.search(r"<\|channel\|>\s*(\w+)", head)
        return found[1] if found else ""

    def recipient(self, head: str) -> str:
        """Return the recipient in a message header `head`; empty if there is none."""
        found = re.search(r"\bto=([^\s<]+)", head)
        return found[1] if found else ""


@dataclass(frozen=True)
class ChatFormat:
    """Format of a model's messages: the delimiters of reasoning, tool calls and answers.

    Attributes:
        reasoning: delimiters around reasoning; None if there are none.
        calls: tool call syntaxes that are understood; grammars make the model write the first.
        messages: syntax of messages with headers, which covers reasoning and tool calls; None for other models.
        text_arguments: True if the chat template reads a call's arguments as JSON text, not as an object.
        short_ids: True for call ids with nine letters and digits, which Mistral's templates require.
    """

    reasoning: ReasoningDelimiters | None = None
    calls: tuple[CallSyntax, ...] = ()
    messages: MessageSyntax | None = None
    text_arguments: bool = False
    short_ids: bool = False

    @property
    def has_calls(self) -> bool:
        """True if the model can write tool calls."""
        return bool(self.calls or self.messages)

    @cached_property
    def delimiters(self) -> frozenset[str]:
        """All delimiters of the format."""
        found: set[str] = set()
        if self.reasoning is not None:
            found |= {self.reasoning.begin, self.reasoning.end}
        for call in self.calls:
            found |= {call.begin, call.call_begin, *call.call_end, call.end, *call.head_delimiters}
            found |= {*_DELIMITER.findall(call.written)}
        if self.messages is not None:
            found |= {self.messages.begin, self.messages.head_end, *self.messages.ends, "<|channel|>", "<|constrain|>"}
        return frozenset(delimiter for delimiter in found if len(delimiter) > 2)

    def call_id(self, name: str, number: int) -> str:
        """Return the id of a message's tool call from the message's unique `name` and the call's index `number`."""
        digest = hashlib.blake2b(f"{name}-{number}".encode(), digest_size=12).hexdigest()
        return digest[:9] if self.short_ids else f"call_{digest}"


_DELIMITER = re.compile(r"<｜[^｜]+｜>|\[[A-Z_]+\]")

_HERMES = CallSyntax("<tool_call>", end="</tool_call>", written='\n{{"name": {name}, "arguments": {arguments}}}\n')
_LLAMA_WRITTEN = '{{"name": {name}, "parameters": {arguments}}}'
_LLAMA = (  # an object at the start is a call; grammars ask for that
    CallSyntax("", separator=";", written=_LLAMA_WRITTEN),
    CallSyntax("<|python_tag|>", separator=";", written=_LLAMA_WRITTEN),
)
_MISTRAL = (
    CallSyntax("[TOOL_CALLS]", opening="[", separator=",", end="]"),
    CallSyntax(
        "[TOOL_CALLS]",
        head=re.compile(r"\s*(?P<name>[^\s\[\]{}]+)\s*(?:\[CALL_ID\]\w+)?\s*(?:\[ARGS\])?\s*"),
        head_delimiters=("[CALL_ID]",),
        written="{bare_name}[ARGS]{arguments}",
    ),
)
_DEEPSEEK_V3 = CallSyntax(
    "<｜tool▁calls▁begin｜>",
    call_begin="<｜tool▁call▁begin｜>",
    head=re.compile(
        r"\s*(?:function\s*<｜tool▁sep｜>\s*)?(?P<name>[^\s<>{}]+)\s*(?:<｜tool▁sep｜>)?\s*(?:```(?:json)?)?\s*"
    ),
    call_end=("```", "<｜tool▁call▁end｜>"),
    end="<｜tool▁calls▁end｜>",
    written="function<｜tool▁sep｜>{bare_name}\n```json\n{arguments}\n```",
)
_DEEPSEEK_V31 = dataclasses.replace(_DEEPSEEK_V3, written="{bare_name}<｜tool▁sep｜>{arguments}")
_HARMONY = MessageSyntax(
    begin="<|start|>",
    starts=("<|start|>", "<|channel|>", "to="),
    head_end="<|message|>",
    ends=("<|end|>", "<|call|>", "<|return|>", "<|start|>", "<|channel|>"),
    reasoning_channels=frozenset({"analysis"}),
    functions="functions.",
)

TOOL_CALL_FORMATS: dict[str, ChatFormat] = {  # keys are vLLM's parser names
    "hermes": ChatFormat(calls=(_HERMES,)),
    "llama3_json": ChatFormat(calls=_LLAMA),
    "mistral": ChatFormat(calls=_MISTRAL, short_ids=True),
    "deepseek_v3": ChatFormat(calls=(_DEEPSEEK_V3,), text_arguments=True),
    "deepseek_v31": ChatFormat(calls=(_DEEPSEEK_V31,), text_arguments=True),
    "openai": ChatFormat(messages=_HARMONY),
}
REASONING_FORMATS: dict[str, ChatFormat] = {
    "deepseek_r1": ChatFormat(ReasoningDelimiters("<think>", "</think>")),
    "qwen3": ChatFormat(ReasoningDelimiters("<think>", "</think>")),
    "mistral": ChatFormat(ReasoningDelimiters("[THINK]", "[/THINK]")),
    "openai_gptoss": ChatFormat(messages=_HARMONY),
}
PLAIN_TOOL_CALLS = CallSyntax("", opening="[", separator=",", end="]")  # syntax for forced calls if the model has none


def chat_format(templates: Iterable[str], tool_call_parser: str = AUTO, reasoning_parser: str = AUTO) -> ChatFormat:
    """Return the format of a model's messages, as named or as detected in its chat templates.

    Args:
        templates: sources of the chat templates, which contain the delimiters.
        tool_call_parser: name of a tool call format, "auto" or "none".
        reasoning_parser: name of a reasoning format, "auto" or "none".

    Raises:
        ConfigError: a format is unknown.
    """
    text = "\n".join(templates)
    if tool_call_parser == AUTO:
        tool_call_parser = _detect_tool_call_parser(text)
    if reasoning_parser == AUTO:
        reasoning_parser = _detect_reasoning_parser(text)
    calls = _find_format("tool_call_parser", tool_call_parser, TOOL_CALL_FORMATS)
    reasoning = _find_format("reasoning_parser", reasoning_parser, REASONING_FORMATS)
    if calls.calls == _MISTRAL and "[ARGS]" in text:  # the layout of newer models
        calls = dataclasses.replace(calls, calls=_MISTRAL[::-1])
    return dataclasses.replace(calls, reasoning=reasoning.reasoning, messages=calls.messages or reasoning.messages)


def _find_format(option: str, name: str, known: dict[str, ChatFormat]) -> ChatFormat:
    """Return the `known` format that an option names; an empty format for "none"."""
    if name == NONE:
        return ChatFormat()
    if name not in known:
        raise ConfigError(f"{option} must be one of {[AUTO, NONE, *known]}, got {name!r}")
    return known[name]


def _detect_tool_call_parser(template: str) -> str:
    """Return the name of the tool call format whose delimiters a chat template contains; "none" without any."""
    if "<|channel|>" in template:
        return "openai"
    if "<｜tool▁calls▁begin｜>" in template:
        return "deepseek_v3" if "```json" in template else "deepseek_v31"
    if "[TOOL_CALLS]" in template:
        return "mistral"
    if "<tool_call>" in template:
        return NONE if "<function=" in template else "hermes"  # the former is XML
    if "<|python_tag|>" in template or "<|start_header_id|>" in template:
        return "llama3_json"
    return NONE


def _detect_reasoning_parser(template: str) -> str:
    """Return the name of the reasoning format whose delimiters a chat template contains; "none" without any."""
    if "<|channel|>" in template:
        return "openai_gptoss"
    if "[THINK]" in template:
        return "mistral"
    return "deepseek_r1" if "</think>" in template else NONE
