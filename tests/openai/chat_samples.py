"""Messages written in each format of tool calls, by small templates like those that are published."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

from jaxserve.text.chat_template import ChatTemplate

THINKING = "{% if m.reasoning %}<think>\n{{ m.reasoning }}</think>\n\n{% endif %}"
TEMPLATES = {
    "hermes": THINKING
    + "{{ m.content }}{% for c in m.calls %}\n<tool_call>\n"
    + '{"name": {{ c.name | tojson }}, "arguments": {{ c.arguments | tojson }}}\n</tool_call>{% endfor %}',
    "llama3_json": "{% if m.calls %}{% for c in m.calls %}{% if not loop.first %}; {% endif %}"
    + '{"name": {{ c.name | tojson }}, "parameters": {{ c.arguments | tojson }}}{% endfor %}'
    + "{% else %}{{ m.content }}{% endif %}{# <|python_tag|> #}",
    "mistral": "{% if m.reasoning %}[THINK]{{ m.reasoning }}[/THINK]{% endif %}{{ m.content }}"
    + "{% if m.calls %}[TOOL_CALLS][{% for c in m.calls %}{% if not loop.first %}, {% endif %}"
    + '{"name": {{ c.name | tojson }}, "arguments": {{ c.arguments | tojson }}}{% endfor %}]{% endif %}',
    "mistral_v13": "{% if m.reasoning %}[THINK]{{ m.reasoning }}[/THINK]{% endif %}{{ m.content }}"
    + "{% for c in m.calls %}[TOOL_CALLS]{{ c.name }}[CALL_ID]abcdefghi[ARGS]{{ c.arguments | tojson }}{% endfor %}",
    "deepseek_v3": THINKING
    + "{{ m.content }}{% if m.calls %}<｜tool▁calls▁begin｜>{% for c in m.calls %}<｜tool▁call▁begin｜>"
    + "function<｜tool▁sep｜>{{ c.name }}\n```json\n{{ c.arguments | tojson }}\n```<｜tool▁call▁end｜>\n{% endfor %}"
    + "<｜tool▁calls▁end｜>{% endif %}",
    "deepseek_v31": THINKING
    + "{{ m.content }}{% if m.calls %}<｜tool▁calls▁begin｜>{% for c in m.calls %}<｜tool▁call▁begin｜>"
    + "{{ c.name }}<｜tool▁sep｜>{{ c.arguments | tojson }}<｜tool▁call▁end｜>{% endfor %}"
    + "<｜tool▁calls▁end｜>{% endif %}",
    "openai": "{% if m.reasoning %}<|channel|>analysis<|message|>{{ m.reasoning }}<|end|><|start|>assistant{% endif %}"
    + "{% if m.content %}<|channel|>{{ 'commentary' if m.calls else 'final' }}<|message|>{{ m.content }}<|end|>"
    + "{% if m.calls %}<|start|>assistant{% endif %}{% endif %}"
    + "{% for c in m.calls %}{% if not loop.first %}<|call|><|start|>assistant{% endif %}"
    + "<|channel|>commentary to=functions.{{ c.name }} <|constrain|>json<|message|>"
    + "{{ c.arguments | tojson }}{% endfor %}",
}
MARKS = {
    *("<tool_call>", "</tool_call>", "<think>", "</think>", "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "[THINK]"),
    *("[/THINK]", "<|python_tag|>", "<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>"),
    *("<｜tool▁call▁end｜>", "<｜tool▁calls▁end｜>", "<|channel|>", "<|message|>", "<|start|>", "<|end|>", "<|call|>"),
    "<|constrain|>",
}


@dataclass
class Call:
    """Call of a tool."""

    name: str
    arguments: dict[str, Any]


@dataclass
class Message:
    """Message of a chat."""

    content: str = ""
    reasoning: str = ""
    calls: list[Call] = field(default_factory=list)


def written(name: str, message: Message) -> str:
    """Return a message as a model with this format writes it."""
    return ChatTemplate(TEMPLATES[name]).render({"m": message})


def read(reply: dict[str, Any]) -> Message:
    """Return the message of a reply in OpenAI's form."""
    calls = [
        Call(call["function"]["name"], json.loads(call["function"]["arguments"]))
        for call in reply.get("tool_calls") or []
    ]
    return Message(reply["content"] or "", reply.get("reasoning") or "", calls)
