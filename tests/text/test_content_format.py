"""Contents reach a chat template in the form that it reads: lists of parts or text, as transformers passes them."""

from typing import Any

import pytest

from jaxserve.errors import RequestError
from jaxserve.text.chat_template import ChatTemplate

SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}


def header(role: str = "message['role']") -> str:
    return f"{{{{ '<|' + {role} + '|>' }}}}"


LOOP = "{% for part in CONTENT %}{% if part['type'] == 'text' %}{{ part['text'] | trim }};{% endif %}{% endfor %}"


def over_messages(body: str, messages: str = "messages") -> str:
    end = "</s>{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
    return "{% for message in MESSAGES %}".replace("MESSAGES", messages) + header() + body + end


EITHER = "{% if CONTENT is string %}{{ CONTENT }}{% else %}" + LOOP + "{% endif %}"
ALONE = {  # templates that read parts, and lose strings
    "loop": over_messages(LOOP.replace("CONTENT", "message['content']")),
    "attribute": over_messages(LOOP.replace("CONTENT", "message.content")),
    "alias": over_messages("{% set said = message.content %}" + LOOP.replace("CONTENT", "said")),
    "selected": over_messages(
        "{% for part in message['content'] | selectattr('type', 'equalto', 'text') %}{{ part['text'] }}{% endfor %}"
    ),
    "mapped": over_messages("{{ message.content | map(attribute='text') | join('+') }}"),
    "first": over_messages("{{ message.content[0].text }}"),
    "filtered": over_messages("{{ (message.content | last)['text'] }}"),
    "get": over_messages("{% for part in message.get('content') %}{{ part.get('text') }}{% endfor %}"),
    "macro": "{% macro parts(some) %}" + LOOP.replace("CONTENT", "some") + "{% endmacro %}"
    "" + over_messages("{{ parts(message['content']) }}"),
    "whole message": "{% macro turn(m) %}" + LOOP.replace("CONTENT", "m.content") + "{% endmacro %}"
    "" + over_messages("{{ turn(m=message) }}"),
    "namespace": "{% set ns = namespace(rest=messages) %}"
    "" + over_messages(LOOP.replace("CONTENT", "message.content"), "ns.rest"),
    "later namespace": "{% set ns = namespace(rest=[]) %}{% set ns.rest = messages[0:] %}"
    "" + over_messages(LOOP.replace("CONTENT", "message.content"), "ns.rest"),
    "index": "{% for i in range(messages | length) %}{% set message = messages[i] %}"
    "" + LOOP.replace("CONTENT", "message.content") + "{% endfor %}",
    "choice": over_messages(
        "{% set said = message.content if message.content else [] %}" + LOOP.replace("CONTENT", "said")
    ),
}
BOTH = {  # templates that read parts and strings
    "either": over_messages(EITHER.replace("CONTENT", "message['content']")),
    "iterable": over_messages(
        "{% if message.content is iterable and message.content is not string %}"
        "" + LOOP.replace("CONTENT", "message.content") + "{% else %}{{ message.content | trim }}{% endif %}"
    ),
    "macro": "{% macro said(content) %}" + EITHER.replace("CONTENT", "content") + "{% endmacro %}"
    "" + over_messages("{{ said(message.content) | trim }}"),
    "raises": "{% if messages[0].role != 'system' %}{{ raise_exception('no system message') }}{% endif %}"
    "" + over_messages(EITHER.replace("CONTENT", "message.content")),
}
STRINGS = {  # templates that read strings
    "plain": over_messages("{{ message['content'] }}"),
    "sum": over_messages("{{ ' ' + message.content + '' }}"),
    "trimmed": over_messages("{{ message.content | trim }}"),
    "split": over_messages("{% for line in message.content.split('\n') %}{{ line }}|{% endfor %}"),
    "calls": over_messages("{% set calls = message.tool_calls or message.content %}{{ message.content }}"),
    "list of calls": over_messages(
        "{% if message.role == 'calls' %}{% for c in message.content %}{{ c.function }}{% endfor %}"
        "{% else %}{{ message.content }}{% endif %}"
    ),
    "unused macro": "{% macro parts(content) %}{% for p in content %}{{ p.text }}{% endfor %}{% endmacro %}"
    "" + over_messages("{{ message.content }}{{ parts([]) }}"),
}
TEXTS = (("Kim:", "hello"), ("one",), ("", "a", "", " b "), ())


def conversation(*texts: Any) -> list[dict[str, Any]]:
    roles = ("system", "user", "assistant", "user")
    return [{"role": role, "content": text} for role, text in zip(roles, texts, strict=False)]


def parts(*texts: str) -> list[dict[str, str]]:
    return [{"type": "text", "text": text} for text in texts]


def rendered(source: str, messages: list[dict[str, Any]], format_: str = "auto", **variables: Any) -> str:
    return ChatTemplate(source, SPECIAL).render_chat(messages, variables, format_)


def by_transformers(source: str, messages: list[dict[str, Any]], **variables: Any) -> str:
    from transformers.utils.chat_template_utils import render_jinja_template

    (text,), _ = render_jinja_template([messages], chat_template=source, **SPECIAL, **variables)
    return text


def both(source: str, messages: list[dict[str, Any]], given: list[dict[str, Any]], **variables: Any) -> None:
    assert rendered(source, messages, **variables) == by_transformers(source, given, **variables)


@pytest.mark.parametrize("name", ALONE)
def test_templates_that_read_parts_get_lists_and_print_strings(name: str) -> None:
    template = ChatTemplate(ALONE[name], SPECIAL)
    assert template.reads_parts
    assert not template.reads_strings
    for texts in TEXTS[:-1]:
        lists = conversation(parts("be kind"), parts(*texts), parts("so"), parts("x", "y"))
        both(ALONE[name], lists, lists, add_generation_prompt=True)
    strings = conversation("be kind", "Hi", "so", "x")
    both(ALONE[name], strings, conversation(*(parts(m["content"]) for m in strings)), add_generation_prompt=False)


@pytest.mark.parametrize("name", BOTH)
def test_templates_that_read_both_get_unchanged_messages(name: str) -> None:
    template = ChatTemplate(BOTH[name], SPECIAL)
    assert template.reads_parts
    assert template.reads_strings
    for texts in TEXTS:
        mixed = conversation("be kind", parts(*texts), "so", parts("x", "y"))
        both(BOTH[name], mixed, mixed, add_generation_prompt=True)


@pytest.mark.parametrize("name", STRINGS)
def test_templates_that_read_strings_get_joined_lines(name: str) -> None:
    assert not ChatTemplate(STRINGS[name], SPECIAL).reads_parts
    for texts in TEXTS:
        lists = conversation(parts("be kind"), parts(*texts), "so", parts("x", "y"))
        lines = conversation("be kind", "\n".join(filter(None, texts)), "so", "x\ny")
        both(STRINGS[name], lists, lines, add_generation_prompt=True)


def test_content_format_option_overrides_detection() -> None:
    shown = "{% for message in messages %}{{ message.content | tojson }}{% endfor %}"
    assert rendered(shown, conversation("a", parts("b", "c")), "string") == '"a""b\\nc"'
    expected = '[{"type": "text", "text": "a"}][{"type": "text", "text": "b"}, {"type": "text", "text": "c"}]'
    assert rendered(shown, conversation("a", parts("b", "c")), "openai") == expected
    assert rendered(BOTH["either"], conversation(parts("b", "c")), "string") == "<|system|>b\nc</s>"
    assert rendered(BOTH["either"], conversation("b"), "openai") == "<|system|>b;</s>"


def test_printed_parts_show_their_text() -> None:
    source = (
        "{% if messages[0].role == 'system' %}{{ 'SYS ' + messages[0].content + '/' ~ messages[0].content | trim }}"
        "{{ messages[0].content.split('n') | join('N') }}{% endif %}"
        "" + ALONE["loop"]
    )
    assert rendered(source, conversation(parts("be ", "kind"))).startswith("SYS be \nkind/be \nkindbe \nkiNd<|system|>")


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        ("{% if message['content'] is none %}-{% else %}{{ 'said ' + message['content'] }}{% endif %}", "-"),
        ("{{ message['content'] | tojson }}", "null"),
        ("{{ message['content'] }}", ""),  # transformers prints None
    ],
)
def test_tool_call_message_without_content(said: str, expected: str) -> None:
    messages = [{"role": "assistant", "content": None, "tool_calls": [{"id": "a"}]}]
    assert rendered(over_messages(said), messages) == f"<|assistant|>{expected}</s>"
    if expected:
        both(over_messages(said), messages, messages)


def test_refusal_and_thinking_parts_become_text() -> None:
    messages: list[dict[str, Any]] = [
        {"role": "user", "content": ["a", {"type": "input_text", "text": "b", "cache_control": None}]},
        {"role": "assistant", "content": [{"type": "refusal", "refusal": "no"}, {"type": "thinking", "thinking": "t"}]},
    ]
    assert rendered(ALONE["loop"], messages) == "<|user|>a;b;</s><|assistant|>no;t;</s>"
    assert rendered(STRINGS["plain"], messages) == "<|user|>a\nb</s><|assistant|>no\nt</s>"
    thinks = over_messages(
        "{% for p in message.content %}{% if p.type == 'thinking' %}[{{ p.thinking }}]{% else %}{{ p.text }}{% endif %}"
        "{% endfor %}"
    )
    assert rendered(thinks, messages) == "<|user|>ab</s><|assistant|>no[t]</s>"


@pytest.mark.parametrize("final", ["It was", "It was ", " It\n", parts("It", "was "), parts("It"), ""])
@pytest.mark.parametrize(
    "source", [STRINGS["plain"], STRINGS["trimmed"], BOTH["either"], BOTH["iterable"], ALONE["loop"]]
)
def test_continued_message_ends_as_in_transformers(source: str, final: Any) -> None:
    template = ChatTemplate(source, SPECIAL)
    messages = conversation("be kind", "Hi", final)
    ours = template.render_chat(messages, {}, continue_final_message=True)
    given = messages
    if not template.reads_parts and isinstance(final, list):
        given = conversation("be kind", "Hi", "\n".join(part["text"] for part in final))
    elif source == ALONE["loop"]:
        given = conversation(*(parts(m["content"]) if isinstance(m["content"], str) else m["content"] for m in given))
    assert ours == by_transformers(source, given, continue_final_message=True)


@pytest.mark.parametrize(
    ("source", "final"), [("{{ messages[0].content }}", "x"), (STRINGS["plain"], None), (ALONE["loop"], [])]
)
def test_continuing_an_unsuitable_message_is_refused(source: str, final: Any) -> None:
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": final, "tool_calls": [{}]}]
    with pytest.raises(RequestError, match=r"^continue_final_message needs a"):
        ChatTemplate(source, SPECIAL).render_chat(messages, {}, continue_final_message=True)
