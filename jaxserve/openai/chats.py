"""Chats: from the messages of a body to the prompt, and to the form of the message that follows."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

from jaxserve.errors import RequestError, brief
from jaxserve.openai.chat_formats import ChatFormat
from jaxserve.openai.errors import BadRequestError, Json, check_type
from jaxserve.openai.tool_grammar import message_grammar
from jaxserve.openai.tools import (
    MessageForm,
    Tools,
    detected_format,
    message_form,
    read_tools,
    template_messages,
    token_id_of,
)
from jaxserve.request import TokenIds
from jaxserve.sampling_params import SamplingParams
from jaxserve.structured_output.params import StructuredOutputsParams
from jaxserve.text.tokenizer import Tokenizer

RESERVED = {"messages", "chat_template", "tokenize", "tools", "documents"}  # names not allowed in chat_template_kwargs


class Chat(NamedTuple):
    """Chat as the engine takes it.

    Attributes:
        prompt: its messages as tokens.
        params: sampling parameters.
        form: form of the message that follows.
        honoured: fields that have had an effect, though not with every template.
    """

    prompt: TokenIds
    params: SamplingParams
    form: MessageForm
    honoured: set[str]


def read_chat(
    given: Json,
    tokenizer: Tokenizer | None,
    chat_format: ChatFormat | None,
    params: SamplingParams,
    check_prompt: Callable[[str], None],
) -> Chat:
    """Render and encode the messages of a body, and bind the message that follows to the tools.

    Raises:
        BadRequestError: the chat template cannot render them, or a field does not go with the template.
    """
    if tokenizer is None:
        raise BadRequestError("chats need a tokenizer, and the engine runs with skip_tokenizer_init", "messages")
    chat_format = detected_format(tokenizer) if chat_format is None else chat_format
    messages, tools = check_messages(given.get("messages")), read_tools(given)
    messages = template_messages(messages, has_text_arguments=chat_format.text_arguments)
    check_type(given, "chat_template_kwargs", dict)
    variables = dict(given.get("chat_template_kwargs", {}))
    if "add_generation_prompt" in given:
        variables["add_generation_prompt"] = given["add_generation_prompt"]
    if reserved := sorted(variables.keys() & RESERVED):
        raise BadRequestError(f"chat_template_kwargs cannot set {reserved}", "chat_template_kwargs")
    if tools.given:
        variables["tools"] = list(tools.given)
    if "documents" in given:
        variables["documents"] = given["documents"]
    continues = given.get("continue_final_message", False)
    if continues:
        _check_continued(messages, wants_another=variables.setdefault("add_generation_prompt", False))
    effort, known = given.get("reasoning_effort"), tokenizer.chat_variables(has_tools=bool(tools.given))
    asked = {"reasoning_effort": effort} | ({"enable_thinking": False} if effort == "none" else {})
    used = {name: value for name, value in asked.items() if effort is not None and name in known - variables.keys()}
    if unread := sorted(variables.keys() - known - {"add_generation_prompt"}):
        if unread == ["tools"]:
            raise BadRequestError("tools need a model whose chat template has them, and this one's has none", "tools")
        if unread == ["documents"]:
            message = "documents need a model whose chat template has them, and this one's has none"
            raise BadRequestError(message, "documents")
        message = f"chat_template_kwargs must be variables of the chat template, {sorted(known)}, got {brief(unread)}"
        raise BadRequestError(message, "chat_template_kwargs")
    try:
        text = tokenizer.render_chat(messages, variables | used)
    except RequestError as error:
        raise BadRequestError(str(error), "messages") from error
    if continues:
        text = _up_to_the_last(text, messages[-1]["content"])
    check_prompt(text)
    shows_reasoning = given.get("include_reasoning", True)
    form = message_form(chat_format, tools, text, tokenizer, shows_reasoning=shows_reasoning)
    if form.hidden and params.skip_special_tokens:  # the scanner hides them instead
        params = dataclasses.replace(params, shown_special_ids=sorted(form.hidden.values()))
    params = _constrained(params, form, tools, tokenizer)
    prompt = tokenizer.encode(text, add_special_tokens=False)
    return Chat(prompt, params, form, {"reasoning_effort"} if used else set())


def _check_continued(messages: list[Json], *, wants_another: object) -> None:
    """Raise BadRequestError unless the last message can be continued."""
    last = messages[-1] if messages else {}
    content = last.get("content")
    if wants_another or last.get("role") != "assistant" or not isinstance(content, str) or not content.strip():
        message = "continue_final_message needs a last message of the assistant with text, and no add_generation_prompt"
        raise BadRequestError(message, "continue_final_message")


def _up_to_the_last(text: str, content: str) -> str:
    """Return a rendered chat up to the end of the content of its last message."""
    for wanted in (content, content.strip()):  # templates may strip it
        if (start := text.rfind(wanted)) >= 0:
            return text[: start + len(wanted)]
    message = "continue_final_message needs a chat template that writes the last message as it is"
    raise BadRequestError(message, "continue_final_message")


def _constrained(params: SamplingParams, form: MessageForm, tools: Tools, tokenizer: Tokenizer) -> SamplingParams:
    """Return the parameters of a message whose calls are bound by their schemas, or whose answer has a form."""
    if form.chat_format is None:
        return params
    token_id = functools.partial(token_id_of, tokenizer=tokenizer)
    wanted = params.structured_outputs
    grammar = message_grammar(form.chat_format, tools, wanted, in_thought=form.in_thought, token_id=token_id)
    if grammar is None:
        return params
    appends = wanted is not None and wanted.append_forced_tokens
    bound = StructuredOutputsParams(grammar=grammar, append_forced_tokens=appends)
    return dataclasses.replace(params, structured_outputs=bound)


def check_messages(messages: Any) -> list[Json]:
    """Return the messages of a chat; BadRequestError unless all have a role, and a content or calls of tools."""
    if not isinstance(messages, list):
        raise BadRequestError(f"messages must be a list of messages, got {brief(messages)}", "messages")
    for message in messages:
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise BadRequestError(f"every message must be an object with a role, got {brief(message)}", "messages")
        if message.get("content") is None and not message.get("tool_calls") and not message.get("refusal"):
            raise BadRequestError(f"every message must have a content or tool_calls, got {brief(message)}", "messages")
    return [
        message | {"content": message["refusal"]}  # the field of a reply that clients send back
        if message.get("content") is None and isinstance(message.get("refusal"), str)
        else message
        for message in messages
    ]
