"""Chat templates: Jinja templates that come with a model, rendered in the same sandbox as in `transformers`."""

import datetime as dt
import json
import time
from collections.abc import Mapping, Sequence
from typing import Any

from jaxserve.errors import RequestError, brief

Message = Mapping[str, Any]

RENDER_TIMEOUT_S = 5.0  # a template of a model can loop for ever


class ChatTemplate:
    """Jinja chat template in the same environment as in `transformers`.

    Attributes:
        variables: names that the template reads and does not set.

    Raises:
        RequestError: the source is not a valid template.
    """

    def __init__(self, source: str) -> None:
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
            _check_time_in_loops(tree)
            self._template = jinja2.Template.from_code(environment, environment.compile(tree), environment.globals)
        except jinja2.TemplateError as error:
            raise RequestError(f"the chat template must be valid Jinja, but: {error}") from error
        self.variables = frozenset(names - environment.globals.keys())

    def render(self, variables: dict[str, Any]) -> str:
        """Return the prompt; RequestError if the template fails on these variables."""
        end_s = time.monotonic() + RENDER_TIMEOUT_S

        def check_time() -> None:
            if time.monotonic() > end_s:
                raise RequestError(f"the chat template must render within {RENDER_TIMEOUT_S:g} s, and takes longer")

        try:
            return self._template.render(variables | {_CHECK: check_time})
        except self._errors as error:
            raise RequestError(f"the chat template refused the messages: {error}") from error


_CHECK = "jaxserve_check_time"


def _check_time_in_loops(tree: Any) -> None:
    """Have a template check the time in every turn of a loop and in every call of a macro."""
    import jinja2.nodes as nodes  # noqa: PLC0415, PLR0402

    for node in list(tree.find_all((nodes.For, nodes.Macro))):
        call = nodes.Call(nodes.Name(_CHECK, "load"), [], [], None, None)
        statement = nodes.ExprStmt(call).set_lineno(node.lineno, override=True)
        node.body.insert(0, statement.set_environment(tree.environment))


def _generation_tag() -> Any:
    """Return the extension for `{% generation %}` blocks, which mark training targets and have no effect in serving."""
    import jinja2.ext  # noqa: PLC0415
    import jinja2.nodes  # noqa: PLC0415

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
    # jinja2's own filter escapes HTML, on which no model was trained
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_template_error(message: str) -> None:
    import jinja2  # noqa: PLC0415

    raise jinja2.TemplateError(message)


def _strftime_now(form: str) -> str:
    return dt.datetime.now().strftime(form)


def plain_messages(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Return copies of messages without None values, which templates would print, and with text parts joined.

    Raises:
        RequestError: not a list of dicts, a message without role or content, or a content that is not text.
    """
    is_list = isinstance(messages, Sequence) and not isinstance(messages, str | bytes)
    if not is_list or not messages or not all(isinstance(m, Mapping) for m in messages):
        raise RequestError(f"messages must be a non-empty list of dicts with role and content, got {brief(messages)}")
    return [_plain(message) for message in messages]


def _plain(message: Message) -> dict[str, Any]:
    given = {name: value for name, value in message.items() if value is not None}
    if not isinstance(given.get("role"), str):
        raise RequestError(f"a message must have a role, which is a string, got {brief(dict(message))}")
    if "content" in given:
        given["content"] = _joined(given["content"])
    elif given["role"] != "assistant" or not given.keys() - {"role", "name"}:  # an assistant may have called tools
        raise RequestError(f"a message must have content, a string or a list of text parts, got {brief(dict(message))}")
    return given


def _joined(content: object) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, Sequence) or isinstance(content, bytes):
        raise RequestError(f"a message's content must be a string or a list of text parts, got {brief(content)}")
    for part in content:
        if not isinstance(part, Mapping) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            raise RequestError(
                f'content parts must be {{"type": "text", "text": str}}, as only text is read, got {brief(part)}; '
                "leave out images, audio and files"
            )
    return "\n".join(part["text"] for part in content)
