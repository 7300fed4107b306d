"""Parameters of structured outputs, without llguidance."""

import sys
from typing import Any

import pytest

from jaxserve.api import structured_outputs as module
from jaxserve.api.sampling_params import SamplingParams
from jaxserve.api.structured_outputs import StructuredOutputsParams
from jaxserve.errors import RequestError
from jaxserve.text.structured_output.grammar import GrammarCompiler


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({}, "exactly one"),
        ({"regex": "a", "choice": ["b"]}, "exactly one"),
        ({"regex": ""}, "regex must be"),
        ({"grammar": 5}, "grammar must be"),
        ({"choice": "ab"}, "choice must be"),
        ({"choice": ["a", 5]}, "choice must be"),
        ({"json": "{"}, "json must be"),
        ({"json": {"a": object()}}, "json must be"),
        ({"json": [1]}, "json must be"),
        ({"json_object": True, "disable_any_whitespace": 3}, "disable_any_whitespace must be"),
        ({"regex": "a" * (module.MAX_GRAMMAR_CHARS + 1)}, "at most"),
        ({"structural_tag": "x"}, "unsupported fields"),
    ],
)
@pytest.mark.usefixtures("no_type_checks")
def test_wrong_values(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        SamplingParams(structured_outputs=fields)


@pytest.mark.usefixtures("no_type_checks")
def test_accepted_values() -> None:
    params = SamplingParams(structured_outputs={"json": '{"type": "integer"}', "regex": None})
    assert params.structured_outputs == StructuredOutputsParams(json='{"type": "integer"}')
    assert params.clone() == params
    assert params.clone().structured_outputs is not params.structured_outputs
    with pytest.raises(RequestError, match="must be StructuredOutputsParams or a dict, got 5"):
        SamplingParams(structured_outputs=5)


def test_missing_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(RequestError, match=r"need llguidance, but: .*; install the extra structured"):
        GrammarCompiler("{}", 8, frozenset({0}))
