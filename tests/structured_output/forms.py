"""Forms of outputs for tests: JSON schemas and regular expressions, by hand and at random."""

import random
from typing import Any

Schema = dict[str, Any]


def record(**properties: Schema) -> Schema:
    """Return the schema of an object with these properties, all of them required and no others."""
    return {"type": "object", "properties": properties, "required": list(properties), "additionalProperties": False}


INTEGER, BOOLEAN, NULL = {"type": "integer"}, {"type": "boolean"}, {"type": "null"}
SHORT = {"type": "string", "maxLength": 8}
DIGIT = {"type": "integer", "minimum": 0, "maximum": 9}

SCHEMAS: list[Schema] = [
    record(a=DIGIT),
    record(a=DIGIT, b=BOOLEAN),
    record(a=record(b=record(c=DIGIT))),
    record(name=SHORT, age={"type": "integer", "minimum": 18, "maximum": 120}),
    record(kind={"enum": ["red", "green", "blue"]}),
    record(kind={"enum": ["x", 5, None, True]}),
    record(kind={"const": "fixed"}, n=DIGIT),
    {"type": "array", "items": DIGIT, "minItems": 2, "maxItems": 4},
    {"type": "array", "items": BOOLEAN, "maxItems": 3},
    {"type": "array", "prefixItems": [DIGIT, BOOLEAN], "items": False, "minItems": 2},
    {"type": "array", "items": record(x=DIGIT), "minItems": 1, "maxItems": 2},
    {"type": "integer", "minimum": -5, "maximum": 5},
    {"type": "integer", "exclusiveMinimum": 100, "exclusiveMaximum": 110},
    {"type": "number", "minimum": 0, "maximum": 1},
    {"anyOf": [DIGIT, NULL]},
    {"anyOf": [record(a=DIGIT), record(b=BOOLEAN)]},
    {"oneOf": [record(a=DIGIT), {"type": "array", "items": DIGIT, "maxItems": 2}]},
    record(a={"type": ["integer", "null"], "minimum": 0, "maximum": 99}),
    record(code={"type": "string", "pattern": "^[A-Z]{3}-[0-9]{2}$"}),
    record(word={"type": "string", "minLength": 2, "maxLength": 5}),
    record(date={"type": "string", "format": "date"}),
    record(time={"type": "string", "format": "time"}),
    record(id={"type": "string", "format": "uuid"}),
    record(ip={"type": "string", "format": "ipv4"}),
    {"$defs": {"p": record(x=DIGIT, y=DIGIT)}, **record(a={"$ref": "#/$defs/p"}, b={"$ref": "#/$defs/p"})},
    {"type": "object", "properties": {"a": DIGIT, "b": BOOLEAN}, "required": ["a"], "additionalProperties": False},
    {"allOf": [{"type": "object", "properties": {"a": DIGIT}}, {"required": ["a"], "maxProperties": 2}]},
    {"enum": ["a", "b", 1, [1, 2], {"x": 1}]},
    {"const": {"a": [1, 2, 3]}},
    BOOLEAN,
    record(a=record(tags={"type": "array", "items": {"enum": ["u", "v"]}, "maxItems": 3}), b={"anyOf": [SHORT, NULL]}),
]

REGEXES = [
    r"[a-c]{3,7}",
    r"yes|no|maybe",
    r"\d{3}-\d{4}",
    r"(ab)+c?",
    r"[A-Z][a-z]{2,5} [A-Z][a-z]{2,5}",
    r"0x[0-9a-f]{4,8}",
    r"(GET|POST) /[a-z/]{1,12}",
    r"\[(\d{1,2}, ){0,3}\d{1,2}\]",
    r"[^x]{4}x",
    r"-?\d+\.\d{2}",
    r"<b>[a-z ]*</b>",
    r"([01]\d|2[0-3]):[0-5]\d",
    r"é{2,4}ü?",
    r"\w+@\w+\.(com|org)",
    r"a.b\.c",
]


def random_schema(rng: random.Random, depth: int = 0) -> Schema:
    """Return a schema that jsonschema and llguidance both know."""
    leaf = [
        lambda: {"type": "integer", "minimum": (low := rng.randint(-50, 50)), "maximum": low + rng.randint(0, 200)},
        lambda: {"enum": rng.sample(["a", "bc", 1, 2.5, None, True, "ü", 'q"'], rng.randint(1, 4))},
        lambda: {"type": "string", "minLength": (low := rng.randint(0, 3)), "maxLength": low + rng.randint(0, 6)},
        lambda: {"type": "string", "pattern": rng.choice(["^[a-f]{2,4}$", "^x+y$", "^(a|b)[0-9]?$"])},
        lambda: dict(BOOLEAN),
        lambda: {"anyOf": [{"type": "integer", "minimum": 0, "maximum": 9}, NULL]},
    ]
    if depth == 3 or (depth and rng.random() < 0.5):
        return rng.choice(leaf)()
    kind = rng.randrange(3)
    if kind == 0:
        low = rng.randint(0, 2)
        return {
            "type": "array",
            "items": random_schema(rng, depth + 1),
            "minItems": low,
            "maxItems": low + rng.randint(0, 2),
        }
    if kind == 1:
        return {"anyOf": [random_schema(rng, depth + 1) for _ in range(rng.randint(1, 3))]}
    names = rng.sample(["a", "b", "name", "n1", "x y"], rng.randint(1, 4))
    properties = {name: random_schema(rng, depth + 1) for name in names}
    required = [name for name in names if rng.random() < 0.7]
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}


def random_regex(rng: random.Random) -> str:
    """Return a regular expression that means the same in Python and Rust."""
    pieces = [r"[a-f]{1,4}", r"\d{2}", "(x|yz)", "q*w", "[^a-z]?", "(foo|bar)+", r"\.", " ", "(-[0-9])?", "é"]
    return "".join(rng.choices(pieces, k=rng.randint(2, 6)))
