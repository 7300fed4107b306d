"""Write jaxserve/API.md, the Python API reference, from docstrings: `python scripts/api_reference.py`."""

from __future__ import annotations

import argparse
import ast
import dataclasses
import inspect
import re
import textwrap
import types
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jaxserve
from jaxserve.api.outputs import Logprob, RequestMetrics
from jaxserve.api.vllm_options import markdown_table
from jaxserve.openai.batch_files import BatchSummary, run_batch

TARGET = Path(__file__).resolve().parents[1] / "jaxserve" / "API.md"
CLASSES = (
    jaxserve.LLM,
    jaxserve.SamplingParams,
    jaxserve.StructuredOutputsParams,
    jaxserve.BeamSearchParams,
    jaxserve.PoolingParams,
    jaxserve.LoRARequest,
    jaxserve.RequestOutput,
    jaxserve.CompletionOutput,
    jaxserve.BeamSearchSequence,
    jaxserve.PoolingRequestOutput,
    RequestMetrics,
    Logprob,
    BatchSummary,
    jaxserve.EngineConfig,
    jaxserve.ConfigError,
    jaxserve.RequestError,
)
FUNCTIONS = (run_batch,)
HEAD = """# Python API

Written by `python scripts/api_reference.py` from the docstrings. To change it, change those and run the script again.
The [user guide](README.md) has examples. Names without an import line are imported from `jaxserve`.
"""

VLLM_OPTIONS = """## vLLM's options

`LLM` also accepts these options, with values that match jaxserve's behaviour. Any other option or value is an error.
"""
INTERNAL = {"follow", "text_since"}  # methods that only the engine calls

_SECTION = re.compile(r"^(Args|Attributes|Raises):\n((?: {4}.*\n|\n)+)", re.MULTILINE)
_ENTRY = re.compile(r"^ {4}(\w+): (.*(?:\n {5,}.*)*)", re.MULTILINE)

Sections = Mapping[str, Mapping[str, str]]


def build() -> str:
    """Return the whole reference as Markdown."""
    names = [each.__name__ for each in (*CLASSES, *FUNCTIONS)]
    links = [*(f"[{name}](#{name.lower()})" for name in names), "[vLLM's options](#vllms-options)"]
    classes = (line for cls in CLASSES for line in _describe(cls))
    functions = (line for function in FUNCTIONS for line in _describe_function(function))
    return "\n".join([HEAD, " · ".join(links), "", *classes, *functions, VLLM_OPTIONS, markdown_table(), ""])


def split_docstring(documented: Any) -> tuple[str, Sections]:
    """Return a docstring's text, and its sections' entries by section name.

    Raises:
        ValueError: there is no docstring.
    """
    name = getattr(documented, "__qualname__", documented)
    docs = inspect.getdoc(documented)
    if not docs:
        raise ValueError(f"{name} must have a docstring")
    docs += "\n"
    sections = {
        match[1]: {entry[1]: " ".join(entry[2].split()) for entry in _ENTRY.finditer(match[2])}
        for match in _SECTION.finditer(docs)
    }
    text = _SECTION.sub("", docs)
    return "\n".join(line.rstrip() for line in text.strip().splitlines()), sections


def _describe(cls: type) -> Iterator[str]:
    """Yield the Markdown lines for a class: text, fields and public methods."""
    text, sections = split_docstring(cls)
    yield from (f"## {cls.__name__}", "", *_import_line(cls), text, "")
    if dataclasses.is_dataclass(cls):
        meanings = sections.get("Attributes", {})
        yield from ("| field | default | meaning |", "| --- | --- | --- |")
        for field in dataclasses.fields(cls):
            if field.name not in meanings:
                raise ValueError(f"the Attributes of {cls.__name__} must have {field.name}")
            yield f"| `{field.name}` | {_default(field)} | {_cell(meanings[field.name])} |"
        yield ""
    yield from _lists(sections)
    for node in _public_methods(cls):
        yield from _describe_method(cls, node)


def _describe_function(function: types.FunctionType) -> Iterator[str]:
    """Yield the Markdown lines for a function."""
    text, sections = split_docstring(function)
    (node,) = ast.parse(inspect.getsource(function)).body
    assert isinstance(node, ast.FunctionDef)
    assert node.returns is not None
    signature = f"{node.name}({ast.unparse(node.args)}) -> {ast.unparse(node.returns)}"
    yield from (f"## {function.__name__}", "", *_import_line(function), *_fenced(signature), text, "")
    yield from _lists(sections)


def _import_line(documented: Any) -> Iterator[str]:
    """Yield an import line for names that the package itself does not export."""
    if documented.__name__ not in jaxserve.__all__:
        yield from (f"`from {documented.__module__} import {documented.__name__}`", "")


def _fenced(signature: str) -> Iterator[str]:
    """Yield a signature as a fenced block."""
    yield from ("```", textwrap.fill(signature, 110, subsequent_indent="    ", break_long_words=False), "```", "")


def _describe_method(cls: type, node: ast.FunctionDef) -> Iterator[str]:
    """Yield the Markdown lines for a method or property."""
    text, sections = split_docstring(inspect.getattr_static(cls, node.name))
    returned = ast.unparse(node.returns) if node.returns is not None else "None"
    is_property = any(ast.unparse(decorator) == "property" for decorator in node.decorator_list)
    node.args.args = [argument for argument in node.args.args if argument.arg not in ("self", "cls")]
    signature = f"{node.name}: {returned}" if is_property else f"{node.name}({ast.unparse(node.args)}) -> {returned}"
    yield from (f"### {cls.__name__}.{node.name}", "", *_fenced(signature), text, "")
    yield from _lists(sections)


def _public_methods(cls: type) -> Iterator[ast.FunctionDef]:
    """Yield the definitions of the methods that the reference lists."""
    owners = [cls, *(base for base in cls.__mro__[1:] if base.__module__.startswith("jaxserve.offline."))]
    trees = [ast.parse(textwrap.dedent(inspect.getsource(owner))).body[0] for owner in owners]
    for node in (node for tree in trees if isinstance(tree, ast.ClassDef) for node in tree.body):
        if isinstance(node, ast.FunctionDef) and not (node.name.startswith("_") or node.name in INTERNAL):
            yield node


def _lists(sections: Sections) -> Iterator[str]:
    """Yield the sections after the text, such as Args and Raises, as Markdown lists."""
    for title, entries in sections.items():
        if title != "Attributes":
            yield from (f"{title}:", "", *(f"- `{name}`: {meaning}" for name, meaning in entries.items()), "")


def _default(field: dataclasses.Field[Any]) -> str:
    """Return a field's default as Markdown; "" if it has none."""
    if field.default_factory is not dataclasses.MISSING:
        return f"`{field.default_factory()!r}`" if field.default_factory in (list, dict) else ""
    return "" if field.default is dataclasses.MISSING else f"`{field.default!r}`"


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__).parse_args()
    TARGET.write_text(build())
