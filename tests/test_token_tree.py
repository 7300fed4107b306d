"""TokenTree: numbers derived from paths agree with the paths."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxserve.api.token_tree import MAX_NODES, TokenTree
from jaxserve.errors import ConfigError


@st.composite
def trees(draw):
    """Return paths of a tree in any order: each new one extends one that is there by its next rank."""
    paths: list[tuple[int, ...]] = [()]
    for _ in range(draw(st.integers(1, MAX_NODES))):
        parent = draw(st.sampled_from(paths))
        paths.append((*parent, sum(path[:-1] == parent for path in paths if path)))
    return draw(st.permutations(paths[1:]))


@given(paths=trees())
def test_tree_properties_follow_from_the_paths(paths):
    tree = TokenTree.from_paths(str(paths))
    assert tree == TokenTree.from_paths([list(path) for path in paths])
    assert sorted(tree.paths) == sorted(paths)
    nodes = [(), *tree.paths]
    for index, path in enumerate(tree.paths):
        assert nodes[tree.parent[index]] == path[:-1]
        assert tree.rank[index] == path[-1]
        word = int(tree.ancestors[index])
        assert [n for n in range(len(nodes)) if word >> n & 1] == [nodes.index(path[:n]) for n in range(len(path))]
        assert word < 1 << (index + 1), "parents come before their children"
    assert list(tree.depth) == [len(path) for path in nodes]
    for depth in range(tree.num_levels + 1):
        assert tree.num_within[depth] == sum(0 < len(path) <= depth for path in nodes)
    for depth, level in enumerate(tree.levels):
        assert {nodes[n] for n in level} == {path[:-1] for path in paths if len(path) == depth + 1}


@pytest.mark.parametrize(
    "value",
    [
        "",
        "[",
        "7",
        [],
        [()],
        [(1,), (1,)],
        [(0, 0)],
        [(-1,)],
        "[('a',)]",
        "[[[0]]]",
        [(True,)],
        [(i,) for i in range(32)],
    ],
    ids=str,
)
def test_other_values_are_refused(value):
    with pytest.raises(ConfigError, match="token tree must be"):
        TokenTree.from_paths(value)


def test_a_chain_sees_all_before_it():
    tree = TokenTree.from_paths([(0,) * n for n in range(1, MAX_NODES + 1)])
    assert np.array_equal(tree.ancestors, [(1 << n) - 1 for n in range(1, MAX_NODES + 1)])
