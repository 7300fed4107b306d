"""The reference of the Python interface is generated from the docstrings."""

import pytest

import api_reference


def test_the_reference_is_up_to_date() -> None:
    message = "run scripts/api_reference.py: jaxserve/API.md must be what the docstrings give"
    assert api_reference.TARGET.read_text() == api_reference.build(), message


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
