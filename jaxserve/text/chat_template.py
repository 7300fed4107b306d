"""Chat templates: Jinja templates that come with a model, rendered in the same sandbox as in `transformers`."""

import datetime as dt
import json
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import cached_property
from typing import Any, NamedTuple

from jaxserve.errors import RequestError
from jaxserve.text.content_format import reads_parts
from jaxserve.text.messages import Message, Parts, plain_messages

RENDER_TIMEOUT_S = 5.0  # a model's template can loop forever


class RenderedChat(NamedTuple):
    """Chat that is rendered as a prompt.

    Attributes:
        text: prompt.
        marked: prompt with other characters in special tokens that the client has written, see `LiteralText.mark`.
    """

    text: str
    marked: str


class ChatTemplate:
    """Compiled Jinja chat template, in the same environment as in `transformers`.

    Args:
        source: Jinja source.
        defaults: variables that every chat has, such as `bos_token`.

    Attributes:
        variables: names that the template reads, but does not set.
        reads_parts: True if it reads message contents as lists of parts.
        sought: strings that it may search for in other strings.

    Raises:
        RequestError: the source is not a valid template.
    """

    def __init__(self, source: str, defaults: Mapping[str, Any] | None = None) -> None:
        self._source, self._defaults = source, dict(defaults or {})
        # imported here: it takes 0.06 s, and only chats need it
        import jinja2.meta  # noqa: PLC0415
        import jinja2.sandbox  # noqa: PLC0415

        python = (TypeError, ValueError, LookupError, ArithmeticError, AttributeError, RecursionError)
        self._errors = (jinja2.TemplateError, *python)
        environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_generation_tag(), "jinja2.ext.loopcontrols"]
        )
        environment.filters["tojson"] = _to_json
        environment.globals |= {"raise_exception": _raise_template_error, "strftime_now": _strftime_now}
        try:
            tree = environment.parse(source)
            names = jinja2.meta.find_undeclared_variables(tree)
            self.reads_parts = reads_parts(tree)
            self.sought = _sought(tree)
            _check_time_in_loops(tree)
            self._template = jinja2.Template.from_code(environment, environment.compile(tree), environment.globals)
        except jinja2.TemplateError as error:
            raise RequestError(f"the chat template must be valid Jinja, but: {error}") from error
        self.variables = frozenset(names - environment.globals.keys())

    @cached_property
    def reads_strings(self) -> bool:
        """True if the template prints message contents that are strings; templates that only read parts do not."""
        text = "content-of-a-message"
        for roles in (("user",), ("system", "user")):
            for content, are_strings in ((text, True), (Parts([{"type": "text", "text": text}]), False)):
                messages = [{"role": role, "content": content} for role in roles]
                with suppress(RequestError):
                    if text in self.render(self._defaults | {"messages": messages}):
                        return are_strings
        return True

    def render_chat(
        self,
        messages: Sequence[Message],
        variables: Mapping[str, Any],
        content_format: str = "auto",
        *,
        continue_final_message: bool = False,
    ) -> str:
        """Render a chat's messages, and return the prompt.

        Args:
            messages: dicts with role and content.
            variables: further template variables.
            content_format: "string" joins lists of parts to text, "openai" makes each content a list, "auto" keeps
                lists if the template reads lists, and strings if it reads strings.
            continue_final_message: True to end the prompt with the last message's content, so that the model
                continues it.

        Raises:
            RequestError: the template fails on these variables.
        """
        lists = content_format == "openai" or (content_format == "auto" and self.reads_parts)
        strings = not lists or (content_format == "auto" and self.reads_strings)
        thinking = lists and "thinking" in self._source
        plain = plain_messages(messages, lists=lists, strings=strings, thinking=thinking)
        given = self._defaults | dict(variables)
        if not continue_final_message:
            return self._render_messages(plain, given)
        if given.get("add_generation_prompt"):
            raise RequestError("continue_final_message needs add_generation_prompt to be False, got True")
        final = _mark_end(plain[-1])
        return _before_end(self._render_messages(plain, given), final)

    def _render_messages(self, messages: Sequence[Message], variables: dict[str, Any]) -> str:
        """Render messages; if the template refuses those without content, try them with None as content."""
        try:
            return self.render(variables | {"messages": messages})
        except RequestError:
            if all("content" in message for message in messages):
                raise
        # Some templates check that a message with tool calls has no content; most would print None.
        whole = [{"content": None, **message} for message in messages]
        return self.render(variables | {"messages": whole})

    def render(self, variables: Mapping[str, Any]) -> str:
        """Return the rendered template; RequestError if it fails on these variables, or takes too long."""
        end_s = time.monotonic() + RENDER_TIMEOUT_S

        def check_time() -> None:
            if time.monotonic() > end_s:
                raise RequestError(f"the chat template must render within {RENDER_TIMEOUT_S:g} s, and takes longer")

        try:
            return self._template.render(dict(variables) | {_CHECK: check_time})
        except self._errors as error:
            raise RequestError(f"the chat template refused the messages: {error}") from error


_END = "END_OF_THE_CONTINUED_MESSAGE "  # ends in a space, so that it shows whether the template strips contents


def _mark_end(message: dict[str, Any]) -> str:
    """Append `_END` to the last text in a message's content; return that text without it."""
    content = message.get("content")
    texts = [part for part in content if isinstance(part.get("text"), str)] if isinstance(content, Parts) else []
    if texts:
        text: str = texts[-1]["text"]
        texts[-1]["text"] = text + _END
    elif isinstance(content, str):
        text = content
        message["content"] = text + _END
    else:
        raise RequestError("continue_final_message needs a last message with text, got none")
    return text


def _before_end(rendered: str, text: str) -> str:
    """Return the part of a rendered chat before `_END`, which comes after the last message's `text`.

    Without `_END`, or if the template has changed the text, raise RequestError.
    """
    end = rendered.rfind(_END.strip())
    if end < 0 or text.strip() not in rendered:
        raise RequestError("continue_final_message needs a chat template that writes the last message as it is")
    return rendered[:end] if rendered.startswith(_END, end) else rendered[:end].rstrip()


_CHECK = "jaxserve_check_time"


def _check_time_in_loops(tree: Any) -> None:
    """Insert a call to the function `_CHECK` into each loop and macro of a template's syntax tree."""
    import jinja2.nodes as nodes  # noqa: PLC0415, PLR0402 - only chats need it

    for node in list(tree.find_all((nodes.For, nodes.Macro))):
        call = nodes.Call(nodes.Name(_CHECK, "load"), [], [], None, None)
        statement = nodes.ExprStmt(call).set_lineno(node.lineno, override=True)
        node.body.insert(0, statement.set_environment(tree.environment))


def _sought(tree: Any) -> frozenset[str]:
    """Return the strings in a syntax tree's comparisons, calls, filters and tests."""
    import jinja2.nodes as nodes  # noqa: PLC0415, PLR0402 - only chats need it

    searches = tree.find_all((nodes.Compare, nodes.Call, nodes.Filter, nodes.Test))
    constants = (constant.value for search in searches for constant in search.find_all(nodes.Const))
    return frozenset(value for value in constants if isinstance(value, str) and value)


def _generation_tag() -> Any:
    """Return the Jinja extension for `{% generation %}` blocks: their content is rendered as if they were absent.

    They delimit training targets.
    """
    import jinja2.ext  # noqa: PLC0415 - only chats need it
    import jinja2.nodes  # noqa: PLC0415 - only chats need it

    class GenerationTag(jinja2.ext.Extension):
        tags = {"generation"}  # noqa: RUF012 - jinja2's own declaration

        def parse(self, parser: Any) -> Any:
            lineno = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return jinja2.nodes.Scope(body, lineno=lineno)

    return GenerationTag


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Return a value as JSON: jinja2's own filter escapes HTML, on which no model was trained."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_template_error(message: str) -> None:
    """Raise the error with which a template refuses messages: its function `raise_exception`."""
    import jinja2  # noqa: PLC0415

    raise jinja2.TemplateError(message)


def _strftime_now(time_format: str) -> str:
    """Return the current local time in a format of `strftime`."""
    return dt.datetime.now().strftime(time_format)
