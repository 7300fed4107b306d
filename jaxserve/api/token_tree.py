"""TokenTree: the shape for drafting a tree."""

from __future__ import annotations

import ast
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from jaxserve.errors import ConfigError

MAX_NODES = 31  # 32 with the last known token: a node's ancestors are the bits of a word


@dataclass(frozen=True)
class TokenTree:
    """Alternative continuations that are drafted together, level by level; node 0 is the last known token.

    Attributes:
        paths: path to each other node, by ranks: (0, 1) is the second most likely token after the most likely one.
            Shorter paths first.
    """

    paths: tuple[tuple[int, ...], ...]

    @classmethod
    def from_paths(cls, value: str | Iterable[Iterable[int]]) -> TokenTree:
        """Return the tree with these paths in any order: a list of tuples, or a string as in vLLM and Medusa.

        Raises:
            ConfigError: the paths do not form one tree with at most 31 nodes.
        """
        wanted = (
            f"a list of up to {MAX_NODES} different paths of ranks, each with its beginnings, such as [(0,), (0, 0)]"
        )
        try:
            given: Any = ast.literal_eval(value) if isinstance(value, str) else value
            paths = sorted((tuple(path) for path in given), key=lambda path: (len(path), path))
            known = {(), *paths}
        except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError) as error:
            raise ConfigError(f"a token tree must be {wanted}, got {value!r}") from error
        is_tree = all(path and path[:-1] in known for path in paths) and len(known) == len(paths) + 1
        ranks = [rank for path in paths for rank in path]
        if not is_tree or not all(type(rank) is int and 0 <= rank < MAX_NODES for rank in ranks):
            raise ConfigError(f"a token tree must be {wanted}, got {value!r}")
        if not 1 <= len(paths) <= MAX_NODES:
            raise ConfigError(f"a token tree must be {wanted}, got {len(paths)} paths")
        return cls(tuple(paths))

    @property
    def num_nodes(self) -> int:
        """Number N of nodes without node 0."""
        return len(self.paths)

    @property
    def num_levels(self) -> int:
        """Length of the longest path."""
        return len(self.paths[-1])

    @cached_property
    def depth(self) -> tuple[int, ...]:
        """Path length to each node, node 0 first."""
        return (0, *map(len, self.paths))

    @cached_property
    def rank(self) -> tuple[int, ...]:
        """Each node's rank among its parent's candidates, 0 for the most likely one; without node 0."""
        return tuple(path[-1] for path in self.paths)

    @cached_property
    def parent(self) -> tuple[int, ...]:
        """Each node's parent, without node 0."""
        index = {(): 0} | {path: node for node, path in enumerate(self.paths, 1)}
        return tuple(index[path[:-1]] for path in self.paths)

    @cached_property
    def ancestors(self) -> tuple[int, ...]:
        """Bit set of the nodes on the path to each node, without node 0."""
        words = [0]
        for parent in self.parent:
            words.append(words[parent] | 1 << parent)
        return tuple(words[1:])

    @cached_property
    def num_within(self) -> tuple[int, ...]:
        """Number of nodes in the first n levels, for each n from 0, without node 0."""
        return tuple(sum(0 < depth <= level for depth in self.depth) for level in range(self.num_levels + 1))

    @cached_property
    def levels(self) -> tuple[tuple[int, ...], ...]:
        """Nodes with children by level, except the last; each level is padded with its first node to equal numbers."""
        parents = sorted(set(self.parent))
        inner = [[node for node in parents if self.depth[node] == level] for level in range(self.num_levels)]
        width = max(map(len, inner))
        return tuple(tuple(nodes + nodes[:1] * (width - len(nodes))) for nodes in inner)
