"""Chats: a body's messages as prompt tokens, and its tools and output structure as constraints on the next message."""

import dataclasses
import functools
from typing import Any, NamedTuple

from jaxserve.api.sampling_params import SamplingParams
from jaxserve.api.structured_outputs import StructuredOutputsParams
from jaxserve.api.token_ids import TokenIds
from jaxserve.errors import RequestError, brief
from jaxserve.openai.chat_formats import ChatFormat
from jaxserve.openai.context import BodyContext, allow_any
from jaxserve.openai.errors import BadRequestError, Json, error_in
from jaxserve.openai.fields import ANY, OBJECT, SWITCH, TEXT, ObjectFields, each
from jaxserve.openai.tool_grammar import message_grammar
from jaxserve.openai.tools import (
    MessageForm,
    Tools,
    detected_format,
    message_form,
    read_tools,
    single_token_id,
    template_messages,
)
from jaxserve.text.chat_template import RenderedChat
from jaxserve.text.image_chats import SplitChat, encode_chat, is_image, split_images
from jaxserve.text.messages import content_text
from jaxserve.text.tokenizer import Tokenizer

NO_TOOLS = Tools()
RESERVED = {"messages", "chat_template", "tokenize", "tools", "documents"}  # names not allowed in chat_template_kwargs
PROMPT_FIELDS: ObjectFields = {  # fields that make a chat the prompt
    "messages": ANY,
    "chat_template": TEXT,
    **each(OBJECT, "chat_template_kwargs", "mm_processor_kwargs"),
    **each(SWITCH, "add_generation_prompt", "continue_final_message", "add_special_tokens"),
}


class ChatPrompt(NamedTuple):
    """Messages of a chat, rendered and encoded as a prompt.

    Attributes:
        rendered: prompt as text.
        token_ids: prompt as tokens.
        chat_format: format of the model's messages.
        last: role and text of the last message.
        adds_header: True if the prompt ends with a new answer's header; False if the model continues a message.
        honoured: body fields that have had an effect although not all templates read them.
        ignored: fields of its images without effect.
    """

    rendered: RenderedChat
    token_ids: TokenIds
    chat_format: ChatFormat
    last: tuple[str, str]
    adds_header: bool
    honoured: set[str]
    ignored: set[str]


class Chat(NamedTuple):
    """Chat request for the engine.

    Attributes:
        prompt: rendered and encoded messages.
        params: sampling parameters, with the grammar for the next message.
        form: format and tools with which the next message is read.
        role: role of the next message.
        echoed: last message's text if the reply begins with it; otherwise empty.
    """

    prompt: ChatPrompt
    params: SamplingParams
    form: MessageForm
    role: str
    echoed: str


def read_chat(given: Json, context: BodyContext, params: SamplingParams) -> Chat:
    """Render and encode a body's messages, and constrain the next message to the tools and the output structure.

    Args:
        given: fields of the body.
        context: served model and chat options.
        params: sampling parameters from the body.

    Raises:
        BadRequestError: the chat template cannot render them, or a field does not go with the template.
    """
    tokenizer, tools = context.needed_tokenizer("messages"), read_tools(given)
    prompt = read_prompt(given, context, tools)
    shows_reasoning = given.get("include_reasoning", True)
    form = message_form(prompt.chat_format, tools, prompt.rendered.text, tokenizer, shows_reasoning=shows_reasoning)
    if form.hidden and params.skip_special_tokens:  # the scanner hides them instead
        params = dataclasses.replace(params, shown_special_ids=sorted(form.hidden.values()))
    params = _constrained(params, form, tools, tokenizer)
    last_role, last_text = prompt.last
    role = context.response_role if prompt.adds_header else last_role
    echoed = last_text if given.get("echo") and role == last_role else ""
    return Chat(prompt, params, form, role, echoed)


def read_prompt(given: Json, context: BodyContext, tools: Tools = NO_TOOLS, *, adds_header: bool = True) -> ChatPrompt:
    """Render and encode a body's messages.

    Args:
        given: fields of the body.
        context: served model and chat options.
        tools: the body's tools, which the template shows to the model.
        adds_header: default of `add_generation_prompt` if no message is continued.

    Raises:
        BadRequestError: the chat template cannot render them, or a field does not go with the template.
    """
    tokenizer = context.needed_tokenizer("messages")
    chat_format = detected_format(tokenizer) if context.chat_format is None else context.chat_format
    template, messages = given.get("chat_template"), check_messages(given.get("messages"))
    if template is not None and not context.takes_templates:
        message = "chat_template of requests is not trusted here; leave it out, or start the server with "
        raise BadRequestError(f"{message}--trust-request-chat-template", "chat_template", "unsupported_value")
    split = _split_images(messages, given.get("mm_processor_kwargs", {}), context)
    messages = template_messages([*map(dict, split.messages)], has_text_arguments=chat_format.text_arguments)
    variables = dict(given.get("chat_template_kwargs", {}))
    continues = given.get("continue_final_message", False)
    if "add_generation_prompt" in given:
        variables["add_generation_prompt"] = given["add_generation_prompt"]
    adds_header = bool(variables.setdefault("add_generation_prompt", adds_header and not continues))
    if reserved := sorted(variables.keys() & RESERVED):
        raise BadRequestError(f"chat_template_kwargs cannot set {reserved}", "chat_template_kwargs")
    if tools.given:
        variables["tools"] = list(tools.given)
    if "documents" in given:
        variables["documents"] = given["documents"]
    try:
        effort, known = given.get("reasoning_effort"), tokenizer.chat_variables(template, has_tools=bool(tools.given))
    except RequestError as error:
        raise BadRequestError(str(error), "messages" if template is None else "chat_template") from error
    asked = {"reasoning_effort": effort} | ({"enable_thinking": False} if effort == "none" else {})
    used = {name: value for name, value in asked.items() if effort is not None and name in known - variables.keys()}
    _check_read(variables, known)
    try:
        rendered = tokenizer.render_chat(messages, variables | used, template, continue_final_message=continues)
    except RequestError as error:
        is_about_end = str(error).startswith("continue_final_message")
        raise BadRequestError(str(error), "continue_final_message" if is_about_end else "messages") from error
    context.text_check(given)(rendered.text)
    try:
        token_ids = encode_chat(
            tokenizer,
            rendered,
            context.images,
            split.inputs,
            context.salt(given.get("cache_salt")) or "",
            context.check_len if given.get("truncate_prompt_tokens") is None else allow_any,
            add_special_tokens=given.get("add_special_tokens", False),
        )
    except RequestError as error:
        is_about_option = str(error).startswith("mm_processor_kwargs")
        raise error_in("mm_processor_kwargs" if is_about_option else "messages", error) from error
    last = messages[-1]["role"], content_text(messages[-1].get("content"))
    honoured = {"reasoning_effort"} if used else set[str]()
    return ChatPrompt(rendered, token_ids, chat_format, last, adds_header, honoured, split.ignored)


def _split_images(messages: list[Json], adjusted: Json, context: BodyContext) -> SplitChat:
    """Return messages with stand-ins for images, and the images; BadRequestError if a part for one is malformed."""
    if adjusted and context.images is None:
        message = f"mm_processor_kwargs must be {{}}, as the model takes no images, got {brief(adjusted)}"
        raise BadRequestError(message, "mm_processor_kwargs", "unsupported_value")
    try:
        return split_images(messages, context.images, adjusted)
    except RequestError as error:
        raise error_in("messages", error) from error


def _check_read(variables: Json, known: frozenset[str]) -> None:
    """Raise BadRequestError if a template that reads the `known` variables ignores any of the given ones."""
    unread = sorted(variables.keys() - known - {"add_generation_prompt"})
    if unread and unread[0] in ("tools", "documents") and len(unread) == 1:
        message = (
            f"{unread[0]} need a model whose chat template has them, and this one's has none; "
            "a server or batch started with --chat-template uses another"
        )
        raise BadRequestError(message, unread[0])
    if unread:
        message = f"chat_template_kwargs must be variables of the chat template, {sorted(known)}, got {brief(unread)}"
        raise BadRequestError(message, "chat_template_kwargs")


def _constrained(params: SamplingParams, form: MessageForm, tools: Tools, tokenizer: Tokenizer) -> SamplingParams:
    """Return `params` with one grammar for the whole message: its reasoning, tool calls and structured answer.

    They stay unchanged if the message may be anything, or if all of its text is the answer.
    """
    if form.chat_format is None:
        return params
    token_id = functools.partial(single_token_id, tokenizer=tokenizer)
    wanted = params.structured_outputs
    grammar = message_grammar(form.chat_format, tools, wanted, in_reasoning=form.in_reasoning, token_id=token_id)
    if grammar is None:
        return params
    appends = wanted is not None and wanted.append_forced_tokens
    structure = StructuredOutputsParams(grammar=grammar, append_forced_tokens=appends)
    return dataclasses.replace(params, structured_outputs=structure)


def check_messages(messages: Any) -> list[Json]:
    """Return the messages, refusals as content; BadRequestError unless all have a role, and content or tool calls."""
    if not isinstance(messages, list):
        raise BadRequestError(f"messages must be a list of messages, got {brief(messages)}", "messages")
    for message in messages:
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise BadRequestError(f"every message must be an object with a role, got {brief(message)}", "messages")
        if message.get("content") is None and not message.get("tool_calls") and not message.get("refusal"):
            raise BadRequestError(f"every message must have a content or tool_calls, got {brief(message)}", "messages")
    return [
        message | {"content": message["refusal"]}  # a reply's field that clients send back
        if message.get("content") is None and isinstance(message.get("refusal"), str)
        else message
        for message in messages
    ]


def has_images(body: Json) -> bool:
    """Return whether a body of any interface has a chat with images, which take long to read, however short it is."""
    turns = body.get("messages", body.get("input"))
    contents = [turn.get("content") for turn in turns if isinstance(turn, dict)] if isinstance(turns, list) else []
    return any(is_image(part) for content in contents if isinstance(content, list) for part in content)
