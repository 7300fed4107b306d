"""Description of each tensor by the caller, and the parameter tree built from it."""

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeVar, runtime_checkable

import ml_dtypes
import numpy as np
from jax.sharding import Sharding

FLOATS = {np.dtype(np.float32), np.dtype(np.float16), np.dtype(ml_dtypes.bfloat16)}  # dtypes of weights
TEXT_PART = "language_model."  # part of a name in multimodal checkpoints that names of text models lack
HEADS = ("lm_head", "embed_out")  # modules that compute logits, which tied embeddings replace
Path = tuple[str | int, ...]
Params = dict[str, Any]  # nested dicts and lists; strings of a path are keys, integers are indices
Shardings = Callable[[Path], Sharding] | Params


@runtime_checkable
class TensorRow(Protocol):
    """One tensor of a model."""

    @property
    def path(self) -> Path:
        """Place in the parameter tree, e.g. ("layers", 3, "qkv_proj")."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape in the parameter tree."""

    @property
    def hf_names(self) -> tuple[str, ...]:
        """Names of the Hugging Face tensors that are concatenated along axis 0 to make it.

        A name that is repeated stands for consecutive rows of that tensor.
        """

    @property
    def hf_rows(self) -> tuple[int, ...]:
        """Rows from each of those tensors."""

    @property
    def transposed(self) -> bool:
        """True if the Hugging Face tensors are matrices [in, out], to be transposed."""

    @property
    def stacked(self) -> bool:
        """True if tensors are [matrices, ...]; a name then stands for a matrix, or for as many parts of its rows.

        If it is repeated more often than there are matrices, these are parts of equally many rows.
        """

    @property
    def num_matrices(self) -> int:
        """Number of matrices of equal shape that follow each other along axis 0."""

    @property
    def is_matrix(self) -> bool:
        """True if the tensor is a matrix; only matrices are quantised."""

    @property
    def init(self) -> str:
        """Random initial value: "normal", "ones" or "zeros"."""

    @property
    def unread(self) -> tuple[str, ...]:
        """Names of Hugging Face tensors that may be there too, and have no part in this model."""


RowT = TypeVar("RowT", bound=TensorRow)


def build_tree(rows: Sequence[RowT], leaf: Callable[[RowT], Any]) -> Params:
    """Return the nested parameter tree with leaves `leaf(row)`; rows of a list come in order of their index."""
    tree: Params = {}
    for row in rows:
        node: Any = tree
        for key, below in zip(row.path, row.path[1:], strict=False):
            node = _child(node, key, [] if isinstance(below, int) else {})
        _child(node, row.path[-1], leaf(row))
    return tree


def _child(node: Any, key: Any, new: Any) -> Any:
    if isinstance(node, list):
        if key == len(node):
            node.append(new)
        return node[key]
    return node.setdefault(key, new)


def leaf_at(tree: Any, path: Path) -> Any:
    """Return the leaf under `path`; KeyError, IndexError or TypeError if there is none."""
    for key in path:
        tree = tree[key]
    return tree


def sharding_at(shardings: Shardings | None, path: Path) -> Sharding | None:
    """Return the sharding of one tensor, from a function of its path or a tree shaped like the parameters."""
    if shardings is None:
        return None
    return shardings(path) if callable(shardings) else leaf_at(shardings, path)


def hf_shapes(row: TensorRow) -> dict[str, tuple[int, ...]]:
    """Return names and shapes of the checkpoint tensors of a row."""
    shapes = {name: (num_rows, *row.shape[1:]) for name, num_rows in hf_row_counts(row).items()}
    if row.transposed:
        shapes = {name: shape[::-1] for name, shape in shapes.items()}
    if row.stacked:
        count, split = row.num_matrices, 1 if row.transposed else 0
        shapes = {
            name: (count, *(size // count if dim == split else size for dim, size in enumerate(shape)))
            for name, shape in shapes.items()
        }
    return shapes


def hf_row_counts(row: TensorRow) -> Counter[str]:
    """Return how many rows of a parameter each of its checkpoint tensors has, in their order."""
    counts: Counter[str] = Counter()
    for name, num_rows in zip(row.hf_names, row.hf_rows, strict=True):
        counts[name] += num_rows
    return counts
