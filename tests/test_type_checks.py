"""Checks of annotations, by which every test of jaxserve's functions is a test of their types and shapes too."""

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

import beartype
import jax.numpy as jnp
import jaxtyping
import numpy as np
import pytest
from jaxtyping import Float, Int

from jaxserve.api.token_tree import TokenTree
from jaxserve.layers.norm import Norm, rms_norm
from tests import type_checks

check = jaxtyping.jaxtyped(typechecker=beartype.beartype)


def refused(call: Callable[[], Any]) -> None:
    with pytest.raises(jaxtyping.TypeCheckError):
        call()


def test_the_package_is_checked() -> None:
    assert jaxtyping.jaxtyped is type_checks.jaxtyped
    assert rms_norm(jnp.ones((2, 3)), jnp.ones(3), 1e-6).shape == (2, 3)
    refused(lambda: rms_norm(jnp.ones((2, 3)), jnp.ones(4), 1e-6))
    refused(lambda: Norm(jnp.ones(3), "much"))
    refused(lambda: TokenTree.from_paths(3))


def test_sizes_of_a_name_are_equal_among_arguments_and_result() -> None:
    @check
    def first(x: Float[np.ndarray, "T D"], *, ids: Int[np.ndarray, " T"] | None = None) -> Float[np.ndarray, " D"]:
        return x[0] if ids is None else x[:, 0]

    @check
    def inside(x: Float[np.ndarray, " T"], others: list[Float[np.ndarray, " T"]]) -> Float[np.ndarray, " D"]:
        return first(np.ones((len(x) + 1, 5)))

    assert len(first(np.ones((3, 2)))) == 2
    assert len(first(np.ones((3, 3)), ids=np.ones(3, int))) == 3
    assert len(inside(np.ones(7), [np.ones(7)])) == 5, "names of the two functions have nothing to do with each other"
    refused(lambda: first(np.ones((3, 3)), ids=np.ones(2, int)))
    refused(lambda: first(np.ones((3, 2)), ids=np.ones(3, int)))  # the result
    refused(lambda: first(np.ones(3)))
    refused(lambda: first(np.ones((3, 2), int)))
    refused(lambda: inside(np.ones(7), [np.ones(6)]))


def test_arguments_and_results_without_arrays() -> None:
    @check
    def count(a: int, /, b: str = "", *more: int, c: float, **others: bytes) -> Iterator[int]:
        yield a

    @check
    def wrong() -> None:
        return 3

    @check
    def ends() -> NoReturn:
        raise KeyError

    assert list(count(1, "b", 2, c=0.5, d=b"")) == [1]
    refused(lambda: count("a", c=0.5))
    refused(lambda: count(1, "b", "c", c=0.5))
    refused(lambda: count(1, c="c"))
    refused(lambda: count(1, c=0.5, d="d"))
    refused(wrong)
    with pytest.raises(KeyError):
        ends()
    with pytest.raises(TypeError, match="unexpected keyword argument 'd'"):
        wrong(d=1)


@check
@dataclasses.dataclass(frozen=True)
class Pair:
    x: Float[np.ndarray, " D"]
    y: Float[np.ndarray, " D"]
    names: list[str] = dataclasses.field(default_factory=list)
    parent: "Pair | None" = None


@check
@dataclasses.dataclass(frozen=True)
class Words:
    x: str
    y: str


def test_dataclass_fields_are_type_checked() -> None:
    pair = Pair(np.ones(2), np.ones(2))
    assert Pair(np.ones(3), np.ones(3), ["a"], pair).parent is pair
    assert Words("a", "b").y == "b"
    refused(lambda: Pair(np.ones(3), np.ones(2)))
    refused(lambda: Pair(np.ones(2), np.ones(2), [1]))
    refused(lambda: Pair(np.ones(2), np.ones(2), parent=3))
    refused(lambda: Words("a", 3))


def test_functions_inside_others_are_prepared_once() -> None:
    def make(size: int) -> Callable[[Any], Any]:
        @check
        def times(x: Float[np.ndarray, " D"]) -> Float[np.ndarray, " D"]:
            return x * size

        return times

    before = len(type_checks._prepared)
    for size in (2, 3):
        assert make(size)(np.ones(1)) == size
        refused(lambda size=size: make(size)(np.ones((1, 1))))
    assert len(type_checks._prepared) == before + 1


def test_functions_of_one_definition_are_checked_by_their_own_annotations() -> None:
    def make(kind: type) -> Callable[[Any], Any]:
        @check
        @check
        def same(x: kind) -> kind:
            return x

        return same

    for kind, value, other in ((int, 1, "a"), (str, "a", 1)):
        assert make(kind)(value) == value
        refused(lambda kind=kind, other=other: make(kind)(other))


@pytest.mark.usefixtures("no_type_checks")
def test_checks_can_be_switched_off() -> None:
    assert Words("a", 3).y == 3
