"""How callers describe tensors, as `TensorRow`, and the parameter tree built from such rows."""

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeVar, runtime_checkable

import ml_dtypes
import numpy as np
from jax.sharding import Sharding

FLOATS = {np.dtype(np.float32), np.dtype(np.float16), np.dtype(ml_dtypes.bfloat16)}  # weight dtypes
TEXT_PART = "language_model."  # name component in multimodal checkpoints that text models lack
VISION_PART = ".vision_model."  # name component that some versions of a vision tower have
# Name prefixes in multimodal checkpoints, with or without `model.`, for encoders and projectors of other inputs.
_OTHER_PARTS = (
    *("visual.", "vision_tower.", "vision_model.", "multi_modal_projector."),
    *("audio_tower.", "embed_vision.", "embed_audio.", "image_newline"),
)
HEADS = ("lm_head", "embed_out")  # modules that compute logits unless embeddings are tied
Path = tuple[str | int, ...]
Params = dict[str, Any]  # nested dicts and lists: strings in a path are keys, integers are indices
Shardings = Callable[[Path], Sharding] | Params


@runtime_checkable
class TensorRow(Protocol):
    """Description of one model tensor, assembled from one or several Hugging Face checkpoint tensors."""

    @property
    def path(self) -> Path:
        """Path in the parameter tree, e.g. ("layers", 3, "qkv_proj")."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape in the parameter tree."""

    @property
    def hf_names(self) -> tuple[str, ...]:
        """Names of the Hugging Face tensors that are concatenated along axis 0.

        If a name is repeated, each occurrence takes the tensor's next rows, as many as `hf_rows` specifies.
        """

    @property
    def hf_rows(self) -> tuple[int, ...]:
        """Number of rows for each name in `hf_names`."""

    @property
    def transposed(self) -> bool:
        """True if the Hugging Face tensors are [in, out] and need a transpose."""

    @property
    def stacked(self) -> bool:
        """True if the Hugging Face tensors are [matrices, ...]; each occurrence of a name then takes the next matrix.

        If a name occurs k times per matrix, each occurrence takes the next k-th of that matrix's rows.
        """

    @property
    def num_matrices(self) -> int:
        """Number of matrices of equal shape that are concatenated along axis 0."""

    @property
    def is_matrix(self) -> bool:
        """True if the tensor is a matrix; only matrices are quantised."""

    @property
    def init(self) -> str:
        """Random initial value: "normal", "ones" or "zeros"."""

    @property
    def unread(self) -> tuple[str, ...]:
        """Names of Hugging Face tensors that may exist too, but are not used."""


RowT = TypeVar("RowT", bound=TensorRow)


def build_tree(rows: Sequence[RowT], leaf: Callable[[RowT], Any]) -> Params:
    """Return the nested parameter tree with leaves `leaf(row)`; list items must come in index order."""
    tree: Params = {}
    for row in rows:
        node: Any = tree
        for key, below in zip(row.path, row.path[1:], strict=False):
            node = _child(node, key, [] if isinstance(below, int) else {})
        _child(node, row.path[-1], leaf(row))
    return tree


def _child(node: Any, key: Any, new: Any) -> Any:
    """Return the child of a list or dict under `key`, adding `new` if there is none."""
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
    """Return one tensor's sharding, from a function of its path or a tree shaped like the parameters."""
    if shardings is None:
        return None
    return shardings(path) if callable(shardings) else leaf_at(shardings, path)


def hf_shapes(row: TensorRow) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the checkpoint tensors that make one model tensor, by name."""
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
    """Return the number of a model tensor's rows that each checkpoint tensor holds, by name."""
    counts: Counter[str] = Counter()
    for name, num_rows in zip(row.hf_names, row.hf_rows, strict=True):
        counts[name] += num_rows
    return counts


def other_part(name: str) -> str | None:
    """Return a tensor's name prefix if it is outside a multimodal model's text part."""
    first = "model." if name.startswith("model.") else ""
    return next((first + part for part in _OTHER_PARTS if name.removeprefix(first).startswith(part)), None)
