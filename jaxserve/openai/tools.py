"""Tools of a chat: its functions, the choice among them, and the format of the message that may call them."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from jaxserve.errors import RequestError, brief
from jaxserve.openai.chat_formats import PLAIN_TOOL_CALLS, ChatFormat, chat_format
from jaxserve.openai.message_deltas import DeltaReader
from jaxserve.openai.scanner import Scanner

if TYPE_CHECKING:
    from jaxserve.text.tokenizer import Tokenizer

Json = dict[str, Any]
MAX_TOOLS = 128  # OpenAI's
_NAME = re.compile(r"[a-zA-Z0-9_.-]{1,128}")


@dataclass(frozen=True, slots=True)
class Function:
    """Function that the model may call.

    Attributes:
        name: function name.
        parameters: JSON schema of the arguments.
        is_strict: True if a call's arguments must obey the schema.
    """

    name: str
    parameters: Json
    is_strict: bool


@dataclass(frozen=True, slots=True)
class Tools:
    """Tools of a chat.

    Attributes:
        given: all tools as in the body; templates show them to the model.
        functions: functions that the message may call: all, the ones in `allowed_tools`, or the named one.
        choice: "none", "auto", "required" or "named".
        is_parallel: True if a message may have several calls.
    """

    given: tuple[Json, ...] = ()
    functions: tuple[Function, ...] = ()
    choice: str = "none"
    is_parallel: bool = True

    @property
    def are_forced(self) -> bool:
        """True if the message must consist of tool calls."""
        return self.choice in ("required", "named")


def read_tools(body: Mapping[str, Any]) -> Tools:
    """Return the tools in a chat's body and the choice among them; RequestError unless they have OpenAI's format."""
    given, choice = body.get("tools", []), body.get("tool_choice")
    if not isinstance(given, list) or len(given) > MAX_TOOLS:
        raise RequestError(f"tools must be a list of at most {MAX_TOOLS} tools, got {brief(given)}")
    functions = tuple(map(_function, given))
    names = [function.name for function in functions]
    if repeated := sorted({name for name in names if names.count(name) > 1}):
        raise RequestError(f"tools must have different names, got several of {repeated}")
    is_parallel = body.get("parallel_tool_calls", True)
    if choice is None:
        choice = "auto" if functions else "none"
    if isinstance(choice, dict) and choice.get("type") == "allowed_tools":
        allowed, choice = _allowed(choice, names)
        functions = tuple(function for function in functions if function.name in allowed)
    if isinstance(choice, dict):
        named = choice.get("function")
        name = named.get("name") if isinstance(named, dict) else None
        if choice.get("type") != "function" or name not in names:
            raise RequestError(f"tool_choice must name one of the functions {brief(names)}, got {brief(choice)}")
        chosen = tuple(function for function in functions if function.name == name)
        return Tools(tuple(given), chosen, "named", is_parallel=False)
    if choice not in ("none", "auto", "required"):
        raise RequestError(f'tool_choice must be "none", "auto", "required" or a function, got {brief(choice)}')
    if choice == "required" and not functions:
        raise RequestError('tool_choice "required" needs tools, got none')
    return Tools(tuple(given), functions, choice if functions else "none", is_parallel)


def _allowed(choice: Json, names: Sequence[str]) -> tuple[set[str], str]:
    """Return the functions and the mode in a `tool_choice` of the type "allowed_tools".

    Args:
        choice: the `tool_choice`.
        names: names of all functions.
    """
    given = choice.get("allowed_tools")
    tools, mode = (given.get("tools"), given.get("mode")) if isinstance(given, dict) else (None, None)
    described = [tool.get("function") for tool in tools if isinstance(tool, dict)] if isinstance(tools, list) else []
    allowed = {
        function["name"] for function in described if isinstance(function, dict) and function.get("name") in names
    }
    if mode not in ("auto", "required") or not allowed or len(allowed) != len(tools or ()):
        raise RequestError(
            f'tool_choice of type allowed_tools must have the mode "auto" or "required" and different tools of '
            f"{brief(list(names))}, got {brief(choice)}"
        )
    return allowed, mode


def _function(tool: Any) -> Function:
    """Return the function in an element of a body's `tools`; RequestError unless it has OpenAI's format."""
    function = tool.get("function") if isinstance(tool, dict) else None
    if not isinstance(function, dict) or tool.get("type", "function") != "function":
        raise RequestError(f'tools must be of the form {{"type": "function", "function": {{...}}}}, got {brief(tool)}')
    name, parameters = function.get("name"), function.get("parameters") or {"type": "object", "properties": {}}
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        message = f"tools must have names of 1 to 128 letters, digits, dots, dashes and underscores, got {brief(name)}"
        raise RequestError(message)
    if not isinstance(parameters, dict):
        raise RequestError(f"the parameters of tools must be JSON schemas, which are objects, got {brief(parameters)}")
    is_strict = function.get("strict") or False
    if not isinstance(is_strict, bool):
        raise RequestError(f"strict in tools must be a bool, got {brief(is_strict)}")
    return Function(name, parameters, is_strict)


@dataclass(frozen=True, slots=True)
class MessageForm:
    """Settings with which a chat's generated text is read as a message.

    Attributes:
        chat_format: format of the model's messages; None if all text is the answer.
        tools: tools that the message may call.
        in_reasoning: True if the prompt ends with the opening delimiter of reasoning.
        hidden: delimiters that are special tokens, with their ids.
        shows_reasoning: False to leave reasoning out of replies.
    """

    chat_format: ChatFormat | None = None
    tools: Tools = field(default_factory=Tools)
    in_reasoning: bool = False
    hidden: Mapping[str, int] = field(default_factory=dict)
    shows_reasoning: bool = True

    def reader(self, name: str) -> DeltaReader:
        """Return a new reader for one sample; the ids of its tool calls follow from the unique `name`."""
        if self.chat_format is None:
            return DeltaReader()
        has_calls = self.tools.choice != "none"
        scanner = Scanner(
            self.chat_format,
            functools.partial(self.chat_format.call_id, name),
            in_reasoning=self.in_reasoning,
            names=frozenset(function.name for function in self.tools.functions) if has_calls else None,
            hidden=frozenset(self.hidden),
            is_forced=self.tools.are_forced,
        )
        return DeltaReader(scanner, shows_reasoning=self.shows_reasoning, is_named=self.tools.choice == "named")


def message_form(
    chat_format: ChatFormat, tools: Tools, prompt: str, tokenizer: Tokenizer, *, shows_reasoning: bool
) -> MessageForm:
    """Return the settings for reading the message that follows a prompt.

    Args:
        chat_format: format of the model's messages.
        tools: tools that the message may call.
        prompt: rendered prompt.
        tokenizer: the model's tokenizer.
        shows_reasoning: False to leave reasoning out of replies.

    Raises:
        RequestError: tools may be called, but the model's tool call syntax is unknown.
    """
    has_calls = tools.choice != "none"
    if has_calls and not tools.are_forced and not chat_format.has_calls:
        raise RequestError(
            'tool_choice "auto" needs a model with a known tool call syntax; name it with --tool-call-parser, or '
            'ask for tool_choice "required"'
        )
    if has_calls and not chat_format.has_calls:
        chat_format = replace(chat_format, calls=(PLAIN_TOOL_CALLS,))
    reasoning = chat_format.reasoning
    if not (reasoning or chat_format.messages or has_calls):
        return MessageForm()
    ids = {delimiter: single_token_id(delimiter, tokenizer) for delimiter in sorted(chat_format.delimiters)}
    hidden = {delimiter: i for delimiter, i in ids.items() if i is not None and i in tokenizer.special_ids}
    in_reasoning = reasoning is not None and prompt.rstrip().endswith(reasoning.begin)
    return MessageForm(chat_format, tools, in_reasoning, hidden, shows_reasoning)


@functools.lru_cache(maxsize=256)
def single_token_id(text: str, tokenizer: Tokenizer) -> int | None:
    """Return the id of the token that encodes a whole text; None if the text is several tokens."""
    ids = tokenizer.encode(text, add_special_tokens=False)
    return ids[0] if len(ids) == 1 else None


_chat_format = functools.lru_cache(maxsize=8)(chat_format)


def detected_format(tokenizer: Tokenizer) -> ChatFormat:
    """Return the chat format whose delimiters a tokenizer's chat templates contain."""
    return _chat_format(tuple(tokenizer.chat_template.values()))


def template_messages(messages: Sequence[Json], *, has_text_arguments: bool) -> list[Json]:
    """Return messages as templates read them: call arguments as objects, reasoning under all names in use.

    Args:
        messages: messages as clients send them.
        has_text_arguments: True to leave call arguments as JSON text.

    Raises:
        RequestError: tool calls lack OpenAI's format.
    """
    return [_template_message(message, has_text_arguments) for message in messages]


def _template_message(message: Json, has_text_arguments: bool) -> Json:
    """Return one message as templates read it; see `template_messages`."""
    if message["role"] != "assistant":
        return message
    reasoning = message.get("reasoning") or message.get("reasoning_content")
    if isinstance(reasoning, str):
        message = message | {"reasoning": reasoning, "reasoning_content": reasoning, "thinking": reasoning}
    calls = message.get("tool_calls")
    if not calls:
        return {name: value for name, value in message.items() if name != "tool_calls"}
    if not isinstance(calls, list):
        raise RequestError(f"tool_calls in messages must be a list, got {brief(calls)}")
    return message | {"tool_calls": [_template_call(call, has_text_arguments) for call in calls]}


def _template_call(call: Any, has_text_arguments: bool) -> Json:
    """Return one element of a message's `tool_calls` as templates read it; see `template_messages`."""
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise RequestError(f"tool_calls in messages must have a function with a name, got {brief(call)}")
    arguments = function.get("arguments") or "{}"
    if not has_text_arguments and isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except ValueError as error:
            message = f"arguments of tool_calls in messages must be JSON, got {brief(arguments)}: {error}"
            raise RequestError(message) from None
    return call | {"function": function | {"arguments": arguments}}
