"""Numbers that doubles cannot hold, in JSON schemas: outputs obey them exactly, as Python's numbers say."""

import json
from decimal import Decimal
from typing import Any

import jsonschema
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxserve.api.structured_outputs import StructuredOutputsParams
from jaxserve.errors import RequestError
from jaxserve.text.structured_output.exact_schema import has_inexact_numbers
from jaxserve.text.structured_output.lark import WHITESPACE, form_rules, schema_rules
from tests.openai.test_tool_calls import TOKENIZERS
from tests.openai.test_tool_grammars import COMPILERS
from tests.random_runs import examples

llguidance = pytest.importorskip("llguidance")
BIG = 2**53
TOKENIZER = llguidance.LLTokenizer(
    TOKENIZERS[0].json_text(), n_vocab=TOKENIZERS[0].vocab_size, eos_token=list(TOKENIZERS[0].eos_token_ids)
)


def matcher_of(rules: list[str]) -> Any:
    matcher = llguidance.LLMatcher(TOKENIZER, "\n".join(["%llguidance {}", *rules, ""]), log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    return matcher


def schema_matcher(schema: dict[str, Any]) -> Any:
    return matcher_of(schema_rules("start", schema, {"whitespace_pattern": WHITESPACE}))


def accepts(matcher: Any, text: str) -> bool:
    matcher = matcher.deep_copy()
    return bool(matcher.consume_tokens(TOKENIZERS[0].encode(text, add_special_tokens=False)) and matcher.is_accepting())


OBEYS = {
    "minimum": lambda value, bound: value >= bound,
    "maximum": lambda value, bound: value <= bound,
    "exclusiveMinimum": lambda value, bound: value > bound,
    "exclusiveMaximum": lambda value, bound: value < bound,
}
BOUNDS = st.one_of(
    st.sampled_from([BIG + 1, -BIG - 1, 2**63, -(2**63), 2**64 - 1, 10**40 + 7, 1e16, 1e22, 1e90, 5e-90, 0.1 + 0.2]),
    st.integers(-(10**30), 10**30),
    st.floats(-1e30, 1e30).filter(lambda value: abs(value) > 1e-30),
    st.floats(0.001, 10),
)


def exact(value: float) -> Decimal:
    return Decimal(repr(value)) if isinstance(value, float) else Decimal(value)


@settings(max_examples=examples(30), deadline=None)
@given(st.sampled_from(sorted(OBEYS)), BOUNDS, st.booleans(), st.data())
def test_bounds(keyword: str, bound: float, is_integer: bool, data: st.DataObject) -> None:
    schema = {"type": "integer" if is_integer else "number", keyword: bound}
    if not has_inexact_numbers(schema):
        return
    matcher, least = schema_matcher(schema), Decimal(1).scaleb(exact(bound).as_tuple().exponent)
    with_bound = [exact(bound) + least * step for step in (0, 1, -1, 10, -10)] if exact(bound).adjusted() < 27 else []
    for number in [*with_bound, *map(Decimal, data.draw(st.lists(st.integers(), max_size=3)))]:
        if is_integer and number != number.to_integral_value():
            continue
        text = format(number, "f")
        text = text.rstrip("0").rstrip(".") if "." in text else text
        if text != "-0":
            assert accepts(matcher, text) == OBEYS[keyword](number, exact(bound)), text


SCHEMAS: list[tuple[Any, list[str]]] = [  # schemas, and what is about as right; the oracle says whether it is
    ({"const": BIG + 1}, [f"{BIG + 1}", f"{BIG}", f"{BIG + 2}"]),
    ({"const": 0.1 + 0.2}, ["0.30000000000000004", "0.3"]),
    (
        {"enum": [BIG + 1, 5, "x", None, [BIG + 3], {"a": BIG + 5}]},
        [f"{BIG}", "5", '"x"', "null", f"[{BIG + 3}]", "[]"],
    ),
    ({"enum": [2**64 - 1, "x", 0.5], "type": ["integer", "string"]}, [f"{2**64 - 1}", f"{2**64}", '"x"', "0.5"]),
    (
        {"type": ["integer", "null"], "minimum": BIG + 1, "maximum": BIG + 3},
        ["null", f"{BIG}", f"{BIG + 3}", f"{BIG + 4}"],
    ),
    ({"type": "array", "items": {"const": BIG + 1}, "minItems": 1, "maxItems": 2}, ["[]", f"[{BIG + 1}]", f"[{BIG}]"]),
    (
        {"type": "object", "properties": {"id": {"const": BIG + 1}, "s": {"type": "string"}}, "required": ["id"]},
        [f'{{"id": {BIG + 1}}}', f'{{"id":{BIG + 1}, "s": "y"}}', f'{{"id": {BIG}}}', '{"s": "y"}'],
    ),
    (
        {
            "type": "object",
            "properties": {
                "a": {"minimum": 0},
                "b": {"type": "integer", "maximum": 2**64 - 1},
                "c": {"const": BIG + 1},
            },
            "additionalProperties": False,
        },
        ["{}", '{"a": 1}', f'{{"b": {2**64 - 1}}}', f'{{"b": {2**64}}}', f'{{"a": 1, "c": {BIG + 1}}}', '{"d": 1}'],
    ),
    (
        {
            "$defs": {
                "n": {
                    "type": "object",
                    "properties": {
                        "v": {"const": BIG + 1},
                        "w": {"anyOf": [{"$ref": "#/$defs/n"}, {"$ref": "#/$defs/m"}]},
                    },
                    "required": ["v", "w"],
                    "additionalProperties": False,
                },
                "m": {"type": "null"},
            },
            "allOf": [{"$ref": "#/$defs/n"}],
        },
        [f'{{"v": {BIG + 1}, "w": {{"v": {v}, "w": null}}}}' for v in (BIG, BIG + 1)],
    ),
]


@pytest.mark.parametrize(("schema", "texts"), SCHEMAS)
def test_schemas(schema: Any, texts: list[str]) -> None:
    matcher = schema_matcher(schema)
    found = [accepts(matcher, text) for text in texts]
    assert found == [jsonschema.Draft202012Validator(schema).is_valid(json.loads(text)) for text in texts]
    assert any(found)


@pytest.mark.parametrize(
    ("schema", "words"),
    [
        ({"type": "integer", "multipleOf": BIG + 1}, "multipleOf"),
        ({"type": "integer", "minimum": BIG + 1, "multipleOf": 3}, "multipleOf"),
        ({"type": "object", "properties": {"a": {"const": BIG + 1}}, "minProperties": 1}, "minProperties"),
        ({"oneOf": [{"const": BIG + 1}, {"type": "string"}]}, "oneOf"),
        ({"const": float("inf")}, "const"),
        ({"type": "integer", "minimum": float("inf")}, "minimum"),
        ({"type": "number", "minimum": 5e-324}, "minimum"),
        ({"type": "integer", "maximum": 10**200}, "maximum"),
        (
            {"type": "object", "properties": {"a": {"const": BIG + 1}, "b": False}, "required": ["b"]},
            "some value obeys",
        ),
        ({"$ref": "#/$defs/x", "$defs": {"y": {"const": BIG + 1}}}, "references to what is there"),
    ],
)
def test_unsupported_schema_keywords_are_named(schema: Any, words: str) -> None:
    with pytest.raises(RequestError, match=words):
        schema_matcher(schema)


def test_numbers_in_schema_text_keep_all_digits() -> None:
    for written, wrong in (("1.00000000000000000001", "1"), ("9007199254740993.5", "9007199254740993")):
        form = StructuredOutputsParams(json=f'{{"const": {written}, "default": {written}}}')
        matcher = matcher_of(form_rules("start", form))
        assert (accepts(matcher, written), accepts(matcher, wrong)) == (True, False)
    with pytest.raises(RequestError, match="at most 100 places"):
        form_rules("start", StructuredOutputsParams(json='{"const": 1e999999999}'))


def ends(form: StructuredOutputsParams, text: str) -> bool:
    """Return whether an output may be a text, as the compiler says."""
    stops = frozenset(TOKENIZERS[0].eos_token_ids)
    constraint = COMPILERS[0].constraint(form, allowed_token_ids=None, stop_ids=stops, min_tokens=0)
    constraint.advance(TOKENIZERS[0].encode(text, add_special_tokens=False))
    allowed = np.unpackbits(constraint.words.view(np.uint8), bitorder="little")
    return not constraint.error and (constraint.has_ended or bool(allowed[min(stops)]))


@pytest.mark.parametrize(
    "schema", [True, "true", {}, {"anyOf": [True, False]}, {"type": ["integer", "array"], "items": False}]
)
def test_boolean_schemas_work(schema: Any) -> None:
    assert ends(StructuredOutputsParams(json=schema), "12")
    assert ends(StructuredOutputsParams(json=schema), "[]")


@pytest.mark.parametrize(
    "schema",
    [False, "false", {"anyOf": [False]}, {"allOf": [True, False]}, {"properties": {"a": False}, "required": ["a"]}],
)
def test_unsatisfiable_schemas_are_refused(schema: Any) -> None:
    if isinstance(schema, dict) and "properties" in schema:
        schema = schema | {"type": "object"}
    with pytest.raises(RequestError, match="some value obeys"):
        ends(StructuredOutputsParams(json=schema), "1")


def test_generated_numbers_obey_exact_bounds() -> None:
    form = StructuredOutputsParams(
        json={"type": "object", "properties": {"id": {"const": BIG + 1}}, "required": ["id"]}
    )
    assert ends(form, f'{{"id": {BIG + 1}}}')
    assert not ends(form, f'{{"id": {BIG}}}')
    with pytest.raises(RequestError, match="without the keywords"):
        ends(StructuredOutputsParams(json={"not": {"type": "string"}}), "1")
