"""Formats of chats: the marks by which models tell thoughts, answers and calls of tools apart. Data alone."""

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
class Marks:
    """Texts that a scanner looks for. None of them begins another.

    Attributes:
        texts: the marks; none where nothing is looked for.
    """

    texts: tuple[str, ...]

    @cached_property
    def whole(self) -> re.Pattern[str]:
        """Expression that finds the first mark."""
        return re.compile("|".join(map(re.escape, self.texts)) or r"(?!)")

    @cached_property
    def begun(self) -> re.Pattern[str]:
        """Expression that finds the first part of a mark at the end of a text."""
        return re.compile("|".join(map(_begun, self.texts)) or r"(?!)")


def _begun(mark: str) -> str:
    pattern = ""
    for character in reversed(mark[:-1]):
        pattern = f"{re.escape(character)}(?:{pattern})?" if pattern else re.escape(character)
    return f"(?:{pattern})\\Z" if pattern else r"(?!)"


@dataclass(frozen=True)
class Thought:
    """Marks around a thought.

    Attributes:
        begin: mark before it, which may be the end of the prompt instead.
        end: mark behind it.
    """

    begin: str
    end: str


@dataclass(frozen=True)
class CallSyntax:
    """One way to write calls: a run of one or more. White space may be anywhere between the parts.

    Attributes:
        begin: mark before a run; empty where an object at the start of a message is a call.
        opening: text behind `begin`, if this is the syntax.
        call_begin: mark before each call of a run.
        head: expression of the text between that and the arguments, with a group `name`. None where each call is an
            object of JSON with the keys `name` and `arguments` (or `parameters`).
        call_end: marks behind the arguments of each call, any of which may be missing.
        separator: text between the calls of a run.
        end: mark behind a run, which may be missing.
        head_marks: marks that a head may have besides those of `written`.
        written: head, `{name}` (in JSON; else `{bare_name}`) and `{arguments}` of a call, as models are trained to.
    """

    begin: str
    opening: str = ""
    call_begin: str = ""
    head: re.Pattern[str] | None = None
    call_end: tuple[str, ...] = ()
    separator: str = ""
    end: str = ""
    head_marks: tuple[str, ...] = ()
    written: str = '{{"name": {name}, "arguments": {arguments}}}'

    @cached_property
    def head_before_null(self) -> re.Pattern[str]:
        """Expression of `head` with null in place of the arguments after it."""
        head = r"(?!)" if self.head is None else self.head.pattern
        return re.compile(rf"{head}(?<=[\s\]>])(?=null(?!\w))")


@dataclass(frozen=True)
class MessageSyntax:
    """Messages with headers, of which one reply has several: gpt-oss's "harmony".

    Attributes:
        begin: mark before a message that is not the first.
        starts: texts with which a header may start.
        head_end: mark behind a header.
        ends: marks behind a message.
        thoughts: channels of thoughts.
        functions: start of a recipient that is a function, before its name.
    """

    begin: str
    starts: tuple[str, ...]
    head_end: str
    ends: tuple[str, ...]
    thoughts: frozenset[str]
    functions: str

    def channel(self, head: str) -> str:
        """Return the channel that a header names; empty if none."""
        found = re.search(r"<\|channel\|>\s*(\w+)", head)
        return found[1] if found else ""

    def recipient(self, head: str) -> str:
        """Return the recipient that a header names; empty if none."""
        found = re.search(r"\bto=([^\s<]+)", head)
        return found[1] if found else ""


@dataclass(frozen=True)
class ChatFormat:
    """Format of a model's messages.

    Attributes:
        thought: marks of thoughts; None where there are none.
        calls: ways to write calls; the first is the one that grammars ask for.
        messages: messages with headers, which have thoughts and calls of their own.
        text_arguments: True if the template reads the arguments of calls as text, not as objects.
        short_ids: True for ids of calls of nine letters and digits, which Mistral's templates insist on.
    """

    thought: Thought | None = None
    calls: tuple[CallSyntax, ...] = ()
    messages: MessageSyntax | None = None
    text_arguments: bool = False
    short_ids: bool = False

    @property
    def has_calls(self) -> bool:
        """True if there is a way to write calls."""
        return bool(self.calls or self.messages)

    @cached_property
    def marks(self) -> frozenset[str]:
        """All marks: texts that are not the user's where they are special tokens."""
        found: set[str] = set()
        if self.thought is not None:
            found |= {self.thought.begin, self.thought.end}
        for call in self.calls:
            found |= {call.begin, call.call_begin, *call.call_end, call.end, *call.head_marks}
            found |= {*_MARK.findall(call.written)}
        if self.messages is not None:
            found |= {self.messages.begin, self.messages.head_end, *self.messages.ends, "<|channel|>", "<|constrain|>"}
        return frozenset(mark for mark in found if len(mark) > 2)

    def call_id(self, name: str, number: int) -> str:
        """Return the id of a call.

        Args:
            name: name of the message, unique among all.
            number: place of the call in it.
        """
        digest = hashlib.blake2b(f"{name}-{number}".encode(), digest_size=12).hexdigest()
        return digest[:9] if self.short_ids else f"call_{digest}"


_MARK = re.compile(r"<｜[^｜]+｜>|\[[A-Z_]+\]")

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
        head_marks=("[CALL_ID]",),
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
    thoughts=frozenset({"analysis"}),
    functions="functions.",
)

CALLS: dict[str, ChatFormat] = {  # under the names of vLLM's parsers
    "hermes": ChatFormat(calls=(_HERMES,)),
    "llama3_json": ChatFormat(calls=_LLAMA),
    "mistral": ChatFormat(calls=_MISTRAL, short_ids=True),
    "deepseek_v3": ChatFormat(calls=(_DEEPSEEK_V3,), text_arguments=True),
    "deepseek_v31": ChatFormat(calls=(_DEEPSEEK_V31,), text_arguments=True),
    "openai": ChatFormat(messages=_HARMONY),
}
THOUGHTS: dict[str, ChatFormat] = {
    "deepseek_r1": ChatFormat(Thought("<think>", "</think>")),
    "qwen3": ChatFormat(Thought("<think>", "</think>")),
    "mistral": ChatFormat(Thought("[THINK]", "[/THINK]")),
    "openai_gptoss": ChatFormat(messages=_HARMONY),
}
# the calls that an engine asks for by a grammar where the model has no format of its own
PLAIN_CALLS = CallSyntax("", opening="[", separator=",", end="]")


def chat_format(templates: Iterable[str], tool_call_parser: str = AUTO, reasoning_parser: str = AUTO) -> ChatFormat:
    """Return the format of a model's messages.

    Args:
        templates: sources of its chat templates, which show the marks.
        tool_call_parser: name of the way to write calls, "auto" or "none".
        reasoning_parser: name of the way to write thoughts, "auto" or "none".

    Raises:
        ConfigError: there is no format of this name.
    """
    text = "\n".join(templates)
    if tool_call_parser == AUTO:
        tool_call_parser = _calls_of(text)
    if reasoning_parser == AUTO:
        reasoning_parser = _thoughts_of(text)
    calls = _named("tool_call_parser", tool_call_parser, CALLS)
    thought = _named("reasoning_parser", reasoning_parser, THOUGHTS)
    if calls.calls == _MISTRAL and "[ARGS]" in text:  # the layout of newer models
        calls = dataclasses.replace(calls, calls=_MISTRAL[::-1])
    return dataclasses.replace(calls, thought=thought.thought, messages=calls.messages or thought.messages)


def _named(option: str, name: str, known: dict[str, ChatFormat]) -> ChatFormat:
    if name == NONE:
        return ChatFormat()
    if name not in known:
        raise ConfigError(f"{option} must be one of {[AUTO, NONE, *known]}, got {name!r}")
    return known[name]


def _calls_of(template: str) -> str:
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


def _thoughts_of(template: str) -> str:
    if "<|channel|>" in template:
        return "openai_gptoss"
    if "[THINK]" in template:
        return "mistral"
    return "deepseek_r1" if "</think>" in template else NONE
