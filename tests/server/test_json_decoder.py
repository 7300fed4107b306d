"""Decoder of long bodies: it accepts and returns the same as Python's own."""

import json
import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxserve.openai.errors import BadRequestError
from jaxserve.server import json_body


def random_json(rng: random.Random, depth: int) -> Any:
    kind = rng.randrange(8 if depth else 6)
    text = "".join(rng.choices('ab"\\ {}[],:\n\u00e9\U0001f600', k=rng.randrange(9)))
    scalars = [None, True, rng.randrange(-(10**25), 10**25), rng.randrange(99), rng.uniform(-1e300, 1e300), text]
    if kind < 6:
        return scalars[kind]
    if kind == 6:
        return [random_json(rng, depth - 1) for _ in range(rng.randrange(6))]
    return {str(index) + text: random_json(rng, depth - 1) for index in range(rng.randrange(5))}


@given(seed=st.integers(0, 2**32), indent=st.sampled_from([None, 1]))
def test_long_bodies_are_read_as_short_ones(seed: int, indent: int | None) -> None:
    rng = random.Random(seed)
    content = {"a": random_json(rng, 4), "b": random_json(rng, 3)}
    text = json.dumps(content, indent=indent, ensure_ascii=rng.random() < 0.5)
    assert json_body._Decoder(64).decode(text) == content
    with pytest.raises((ValueError, BadRequestError)):
        json_body._Decoder(64).decode(text[:-1])


@given(st.text(alphabet='[]{},:"0123456789-.e truefalsn\\', max_size=40))
def test_what_is_no_json_is_none_in_long_bodies(text: str) -> None:
    try:
        expected = json.loads(text, parse_constant=json_body._refuse_constant)
    except ValueError:
        with pytest.raises(ValueError):  # noqa: PT011 - of json, in its own words
            json_body._Decoder(64).decode(text)
    else:
        assert json_body._Decoder(64).decode(text) == expected
