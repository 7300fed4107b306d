"""The reference of the Python interface is generated from the docstrings."""

import ast
import importlib
import re
from pathlib import Path

import pytest

import api_reference
import jaxserve


def test_the_reference_is_up_to_date() -> None:
    message = "run scripts/api_reference.py: jaxserve/API.md must be what the docstrings give"
    assert api_reference.TARGET.read_text() == api_reference.build(), message


def test_every_function_and_class_that_it_names_is_documented_or_can_be_imported() -> None:
    text = api_reference.TARGET.read_text()
    documented = set(re.findall(r"^#+ (?:\w+\.)?(\w+)$", text, re.MULTILINE))
    documented |= set(re.findall(r"^(?:\||-) `(\w+)`", text, re.MULTILINE))  # fields and arguments
    files = Path(jaxserve.__file__).parent.rglob("*.py")
    bodies = [node for file in files for node in ast.parse(file.read_text()).body]
    defined = {node.name for node in bodies if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    named = set(re.findall(r"`(\w+)(?:\(\))?`", text)) & defined
    assert "run_batch" in named
    assert named - documented == set()
    imports = re.findall(r"^`from (jaxserve[\w.]+) import (\w+)`$", text, re.MULTILINE)
    assert ("jaxserve.openai.batch_files", "run_batch") in imports
    for module, name in imports:
        assert name in documented
        assert hasattr(importlib.import_module(module), name)
    for name in (each.__name__ for each in (*api_reference.CLASSES, *api_reference.FUNCTIONS)):
        assert hasattr(jaxserve, name) or name in {imported for _, imported in imports}


def test_docstrings_have_text_and_sections() -> None:
    def documented() -> None:
        """Do something.

        More of it.

        Args:
            first: one thing,
                and more.
            second: another.

        Raises:
            ValueError: it went wrong.
        """

    text, sections = api_reference.split_docstring(documented)
    assert text == "Do something.\n\nMore of it."
    args = {"first": "one thing, and more.", "second": "another."}
    assert sections == {"Args": args, "Raises": {"ValueError": "it went wrong."}}
    with pytest.raises(ValueError, match="must have a docstring"):
        api_reference.split_docstring(lambda: None)
