"""Parameter trees from checkpoints in any format, or from tensors in memory."""

import logging
import os
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path as FilePath
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from jaxserve.weights.errors import Mismatch
from jaxserve.weights.progress import progress_bar
from jaxserve.weights.quantized import QuantizedPart, Schemes, quantized_view
from jaxserve.weights.rows import (
    FLOATS,
    TEXT_PART,
    VISION_PART,
    Params,
    Shardings,
    TensorRow,
    build_tree,
    hf_shapes,
    other_part,
    sharding_at,
)
from jaxserve.weights.stored_head import HEAD_NAMES, dropped_heads, with_tied_leaves, with_tied_tensors
from jaxserve.weights.stored_tensor import Part, StoredTensor, Tensor, Tensors, host_rows
from jaxserve.weights.stores import find_store
from jaxserve.weights.tree import checkpoint_tensors

logger = logging.getLogger(__name__)

_NUM_READERS = 8
_MASKS = tuple(f".{module}.{mask}" for module in ("attn", "attention") for mask in ("bias", "masked_bias"))
_DRAFT_PROJECTION = "eh_proj.weight"  # name suffix of a tensor that only layers for multi-token prediction have
_DRAFTING = "mtp."  # name prefix of such layers unless they are numbered like the others
# Matrices of one expert, by the name of the tensor [E, rows, in] in which some checkpoints stack them for all experts.
# transformers stacks block scales in this way even if matrices are separate.
_EXPERT_PARTS = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}
_COMPUTED = ("rotary_emb.inv_freq", "embeddings.position_ids", *_MASKS)  # name suffixes

TensorT = TypeVar("TensorT", bound=Tensor)
Transform = Callable[[Any, StoredTensor], Any]  # function of a row and its tensor


def load(
    path: str | os.PathLike[str],
    specs: Sequence[TensorRow],
    dtype: jax.typing.DTypeLike | None = None,
    shardings: Shardings | None = None,
    transform: Transform | None = None,
    *,
    schemes: Schemes | None = None,
    prefix: str | tuple[str, ...] = "",
    rows: Sequence[TensorRow] | None = None,
    use_tqdm: bool = False,
) -> Params:
    """Read a checkpoint into the parameter tree that `specs` describe.

    Tensors are read one after the other, each by several threads, so that the host holds little more than one tensor
    in addition to the result. Names may lack their first component, as in files without a head. Ignored are rotary
    inverse frequencies, causal masks, a head that equals tied embeddings, tensors that `specs` list as `unread`, layers
    that draft tokens, and parts of a multimodal model with no tensor in `specs`.

    Args:
        path: directory with `model.safetensors`, with `model.safetensors.index.json` and its files, or written by
            `convert`; or a GGUF file, or a directory with one.
        specs: one row per tensor in the result.
        dtype: dtype of the result; None keeps the stored dtypes (float32, float16 or bfloat16).
        shardings: function of a row's path, or tree of shardings; each device reads only its own slices.
        transform: function of a row and its tensor that returns the leaf of the tree; by default it places the tensor.
        schemes: schemes if the checkpoint is quantised; without a transform, its matrices are dequantised.
        prefix: prefix of all names in `specs`, or several; other tensors are not read.
        rows: rows of the result, if it has only some of the tensors in `specs`, or other paths.
        use_tqdm: show progress in bytes if stderr is a terminal.

    Raises:
        CheckpointError: files are absent or damaged; tensors are missing, unexpected, of another shape or dtype (all
            named).
    """
    tensors = open_checkpoint(path, specs, schemes, prefix).tensors
    rows = specs if rows is None else rows
    return _build(rows, tensors.__getitem__, dtype, shardings, transform, use_tqdm=use_tqdm)


@dataclass(frozen=True)
class OpenCheckpoint:
    """A checkpoint that is read as needed.

    Attributes:
        tensors: every tensor by its full name, still unread.
    """

    tensors: Tensors

    def load(self, rows: Sequence[TensorRow], dtype: jax.typing.DTypeLike | None = None) -> Params:
        """Return the tree for some rows, whose paths begin at its root, on the default device."""
        return _build(rows, self.tensors.__getitem__, dtype, None, None)


def open_checkpoint(
    path: str | os.PathLike[str],
    specs: Sequence[TensorRow],
    schemes: Schemes | None = None,
    prefix: str | tuple[str, ...] = "",
) -> OpenCheckpoint:
    """Open the checkpoint that has the tensors in `specs`, and only these if all their names begin with `prefix`.

    Quantised matrices have the names that `specs` give to unquantised ones.

    Raises:
        CheckpointError: see `load`.
    """
    stored = with_tied_tensors(specs, _with_full_names(specs, stored_tensors(path)))
    wanted = {name: tensor for name, tensor in stored.items() if name.startswith(prefix)}
    tensors = quantized_view(schemes, wanted, specs, path)
    advice = "check that config.json belongs to these weights, and has their quantization_config if they are quantised"
    _check(path, specs, tensors, advice)
    return OpenCheckpoint(tensors)


def assemble(
    tree: Mapping[str, Any],
    specs: Sequence[TensorRow],
    dtype: jax.typing.DTypeLike | None = None,
    shardings: Shardings | None = None,
    transform: Transform | None = None,
    *,
    schemes: Schemes | None = None,
    rows: Sequence[TensorRow] | None = None,
) -> Params:
    """Build the tree that `load` returns from tensors in memory instead of files; each passes through host memory.

    Args:
        tree: tensors by their checkpoint names, or a tree such as `load` returns without `transform`.
        specs: see `load`.
        dtype: see `load`.
        shardings: see `load`.
        transform: see `load`.
        schemes: see `load`; `tree` then has a quantised checkpoint's tensors by name.
        rows: see `load`.

    Raises:
        CheckpointError: tensors are missing, unexpected, of another shape or dtype (all named).
    """
    advice = "give them under the names of the checkpoint, or as the tree that weights.load returns"
    if any(isinstance(value, Mapping | Sequence) for value in tree.values()):
        tensors: Mapping[str, Tensor] = checkpoint_tensors(specs, with_tied_leaves(specs, dict(tree), advice), advice)
    else:
        tensors = with_tied_tensors(specs, _with_full_names(specs, tree))
        tensors = quantized_view(schemes, tensors, specs, "the weights")
        _check("the weights", specs, tensors, advice)

    def read(name: str) -> Part:
        """Return a tensor copied to host memory."""
        tensor = tensors[name]
        return tensor.on_host(_on_host) if isinstance(tensor, QuantizedPart) else _on_host(tensor)

    return _build(specs if rows is None else rows, read, dtype, shardings, transform)


def _build(
    specs: Sequence[TensorRow],
    open_tensor: Callable[[str], Part],
    dtype: jax.typing.DTypeLike | None,
    shardings: Shardings | None,
    transform: Transform | None,
    *,
    use_tqdm: bool = False,
) -> Params:
    """Build the parameter tree, one tensor after the other.

    Args:
        specs: one row per tensor.
        open_tensor: function that returns a checkpoint tensor by name, still unread.
        dtype: see `load`.
        shardings: see `load`.
        transform: see `load`.
        use_tqdm: see `load`.
    """
    previous: list[Any] = []

    def leaf(row: TensorRow) -> Any:
        """Read one tensor and return its parameter."""
        parts = _parts(row, open_tensor)
        tensor = StoredTensor(parts, _dtype_of(parts, dtype), sharding_at(shardings, row.path), readers)
        array = tensor.place() if transform is None else transform(row, tensor)
        # Transfers to a device are asynchronous: unless awaited, they keep host buffers alive.
        jax.block_until_ready(previous)
        previous[:] = [array]
        bar.update(sum(part.nbytes for part in parts))
        return array

    total_bytes = sum(part.nbytes for row in specs for part in _parts(row, open_tensor)) if use_tqdm else 0
    with ThreadPoolExecutor(_NUM_READERS) as readers, progress_bar(total_bytes, "Loading", use_tqdm) as bar:
        return build_tree(specs, leaf)


def _parts(row: TensorRow, open_tensor: Callable[[str], Part]) -> list[Part]:
    """Return the parts of checkpoint tensors that a parameter consists of, in the order of its rows.

    Args:
        row: the parameter.
        open_tensor: function that returns a checkpoint tensor by name, still unread.
    """
    tensors = {name: open_tensor(name) for name in dict.fromkeys(row.hf_names)}
    if row.transposed and not row.stacked:
        tensors = {name: tensor.T for name, tensor in tensors.items()}
    num_parts = len(row.hf_names) // (len(tensors) * row.num_matrices)  # parts per matrix, if stacked
    taken: Counter[str] = Counter()
    parts = []
    for name, num_rows in zip(row.hf_names, row.hf_rows, strict=True):
        if not row.stacked:
            parts.append(tensors[name][taken[name] : taken[name] + num_rows])
            taken[name] += num_rows
            continue
        index, part = divmod(taken[name], num_parts)
        matrix = tensors[name][index]
        rows = matrix if num_parts == 1 else matrix[part * num_rows : (part + 1) * num_rows]
        parts.append(rows.T if row.transposed else rows)
        taken[name] += 1
    return parts


def _on_host(tensor: Tensor) -> NDArray[Any]:
    """Return a tensor as a numpy array."""
    return host_rows(tensor, slice(None)) if isinstance(tensor, jax.Array) else np.asarray(tensor)


def check(path: str | os.PathLike[str], specs: Sequence[TensorRow], schemes: Schemes | None = None) -> None:
    """Raise CheckpointError unless a checkpoint has the tensors in `specs`, according to names and headers."""
    open_checkpoint(path, specs, schemes)


def stored_tensors(path: str | os.PathLike[str]) -> Tensors:
    """Return every stored tensor by its name in the file, still unread."""
    return find_store(FilePath(path)).open_tensors(FilePath(path))


def draft_layers(path: str | os.PathLike[str]) -> tuple[str, ...]:
    """Return the name prefixes of a checkpoint's layers for multi-token prediction.

    Raises:
        CheckpointError: files are absent or damaged.
    """
    return _draft_layers(_with_full_names([], stored_tensors(path)))


def _with_full_names(specs: Sequence[TensorRow], tensors: Mapping[str, TensorT]) -> dict[str, TensorT]:
    """Return tensors by the names in `specs`, given tensors by their names in the file.

    Files without a head, such as GPT-2's, lack the first component; multimodal models have one more.
    """
    parts = {other_part(name) for row in specs for name in row.hf_names}

    def whole(name: str) -> str:
        """Return a name without the components that only some versions of multimodal models have."""
        name = name.replace(TEXT_PART, "", 1).replace(VISION_PART, ".", 1)
        return f"model.{name}" if f"model.{other_part(name)}" in parts else name

    tensors = {whole(name): tensor for name, tensor in tensors.items()}
    tensors = _with_separate_experts({name for row in specs for name in row.hf_names}, tensors)
    names = {name.partition(".")[2]: name for row in specs for name in row.hf_names if name not in tensors}
    return _with_matrix_axes(specs, {names.get(name, name): tensor for name, tensor in tensors.items()})


def _with_matrix_axes(specs: Sequence[TensorRow], tensors: dict[str, TensorT]) -> dict[str, TensorT]:
    """Return tensors, with stacked matrices transposed if files store them transposed, and scalars as vectors.

    Published checkpoints of some models do, unlike checkpoints that transformers writes for the same models.
    """
    for row in specs:
        for name in row.hf_names if len(row.shape) == 1 else ():
            scalar: Any = tensors.get(name)
            if scalar is not None and tuple(scalar.shape) == ():
                tensors[name] = scalar.reshape(1)
        for name, (count, *sides) in hf_shapes(row).items() if row.stacked else ():
            tensor: Any = tensors.get(name)
            if tensor is not None and tuple(tensor.shape) == (count, *sides[::-1]) and sides != sides[::-1]:
                tensors[name] = tensor.swapaxes(1, 2)
    return tensors


def _with_separate_experts(expected: Set[str], tensors: Mapping[str, TensorT]) -> dict[str, TensorT]:
    """Split tensors that stack all experts into views of each expert's matrices, if the model expects these.

    Args:
        expected: tensor names that the model expects.
        tensors: the checkpoint's tensors by name.
    """
    found: dict[str, TensorT] = {}
    for name, tensor in tensors.items():
        module, _, last = name.rpartition(".")
        stack = last.removesuffix("_scale_inv")
        parts, suffix = _EXPERT_PARTS.get(stack, ()), "weight" if stack == last else "weight_scale_inv"
        is_separate = bool(parts) and f"{module}.0.{parts[0]}.weight" in expected and name not in expected
        if not is_separate or not isinstance(tensor, np.ndarray | jax.Array) or tensor.ndim != 3:
            found[name] = tensor
            continue
        num_rows = tensor.shape[1] // len(parts)
        for expert in range(len(tensor)):
            for index, part in enumerate(parts):
                matrix: Any = tensor[expert, index * num_rows : (index + 1) * num_rows]
                found[f"{module}.{expert}.{part}.{suffix}"] = matrix
    return found


def _check(where: object, specs: Sequence[TensorRow], tensors: Mapping[str, Tensor], advice: str) -> None:
    """Raise a CheckpointError unless `tensors` are the tensors in `specs`; log the others that are ignored.

    Args:
        where: path of the checkpoint, for messages.
        specs: the model's rows.
        tensors: the checkpoint's tensors by name.
        advice: remedy, for messages.
    """
    expected = {name: shape for row in specs for name, shape in hf_shapes(row).items()}
    shared = [name for name in expected if name in tensors]
    drafting = _draft_layers([name for name in tensors if name not in expected])
    unread = {name for row in specs for name in row.unread}
    dropped = dropped_heads(specs, tensors)
    ignored = {*expected, *unread, *(name for name in HEAD_NAMES if name not in dropped)}
    if drafting:
        logger.info("%s: layers that draft tokens are not part of the model: %s", where, ", ".join(drafting))
    read = {other_part(name) for name in expected}
    if others := sorted({part for name in tensors if (part := other_part(name)) is not None} - read):
        logger.info("%s: only the text part is served; these parts are not read: %s", where, ", ".join(others))
    Mismatch(
        missing=[name for name in expected if name not in tensors],
        unexpected=[
            f"{name}, which differs from the tied embeddings" if name in dropped else name
            for name in tensors
            if not (name in ignored or name.endswith(_COMPUTED) or name.startswith((*drafting, *others)))
        ],
        misshapen=[
            f"{name} {tensors[name].shape} instead of {expected[name]}"
            for name in shared
            if tensors[name].shape != expected[name]
        ],
        mistyped=[f"{name} {tensors[name].dtype}" for name in shared if tensors[name].dtype not in FLOATS],
    ).raise_if_any(where, advice)


def _draft_layers(names: Iterable[str]) -> tuple[str, ...]:
    """Return the name prefixes of layers for multi-token prediction, which transformers ignores too."""
    names = list(names)
    numbered = {name.removesuffix(_DRAFT_PROJECTION) for name in names if name.endswith(_DRAFT_PROJECTION)}
    return tuple(sorted(numbered | {_DRAFTING for name in names if name.startswith(_DRAFTING)}))


def _dtype_of(parts: Sequence[Part], dtype: jax.typing.DTypeLike | None) -> np.dtype:
    """Return the result's dtype: `dtype`, or the common dtype of the parts."""
    return jnp.dtype(jnp.result_type(*(part.dtype for part in parts)) if dtype is None else dtype)
