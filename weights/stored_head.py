"""The LM head in a checkpoint's files, which may exist although config.json ties it, or be absent."""

import logging
from collections.abc import Collection, Mapping, Sequence
from typing import Any, TypeVar

import jax
import numpy as np
from numpy.typing import NDArray

from jaxserve.weights.errors import Mismatch
from jaxserve.weights.mapped_array import read
from jaxserve.weights.rows import HEADS, TEXT_PART, Params, TensorRow
from jaxserve.weights.stored_tensor import Tensor, host_rows

logger = logging.getLogger(__name__)

_SWITCH = "tie_word_embeddings"
_GENERATORS = ("ForCausalLM", "LMHeadModel", "ForConditionalGeneration")  # suffixes of architectures with logits
_EMBEDDINGS = ("model.embed_tokens", "transformer.wte", "gpt_neox.embed_in", "embed_tokens", "wte", "embed_in")
_BLOCK_BYTES = 4 << 20
_EMBED, _HEAD = "embed", "lm_head"  # names in parameter trees
HEAD_NAMES = tuple(f"{module}.weight" for module in HEADS)

TensorT = TypeVar("TensorT", bound=Tensor)


def with_stored_switch(config: Mapping[str, Any], tensors: Mapping[str, Tensor], where: object) -> dict[str, Any]:
    """Return config.json with `tie_word_embeddings` according to the stored tensors, as in transformers.

    A stored head is used if it differs from the embeddings; without one logits come from the embeddings. If the config
    says false, even an equal head stays separate: weight updates may make them differ.

    Args:
        config: content of config.json.
        tensors: every stored tensor by its name in the file.
        where: path of the checkpoint, for warnings.
    """
    names = config.get("architectures")
    if not (isinstance(names, list) and names and isinstance(names[0], str) and names[0].endswith(_GENERATORS)):
        return dict(config)
    head, embeddings = _module(tensors, HEADS), _module(tensors, _EMBEDDINGS)
    if not head and not embeddings:
        return dict(config)
    text = config.get("text_config")
    given = {**(text if isinstance(text, Mapping) else {}), **config}.get(_SWITCH)
    if given not in (True, False, None):
        return dict(config)
    is_tied = not head or not embeddings or (given is not False and _are_equal(head, embeddings))
    if given is True and not is_tied:
        logger.warning(
            "%s: %s is true, but the stored head differs from the embeddings, so the head is used; set it to false",
            *(where, _SWITCH),
        )
    if given is False and is_tied:
        logger.warning(
            "%s: %s is false, but no head is stored, so the embeddings compute the logits; set it to true",
            *(where, _SWITCH),
        )
    new: dict[str, Any] = {**config, _SWITCH: is_tied}
    if isinstance(text, Mapping):
        new["text_config"] = {**text, _SWITCH: is_tied}
    return new


def with_tied_tensors(specs: Sequence[TensorRow], tensors: Mapping[str, TensorT]) -> dict[str, TensorT]:
    """Return `tensors`, with the embeddings or the head added if `specs` want it and it is missing.

    Missing embeddings are taken from a stored head; a missing head from the embeddings, if `specs` want both.
    """
    found = dict(tensors)
    names = {row.path[0]: row.hf_names[0] for row in specs if row.path in ((_EMBED,), (_HEAD,))}
    embed, head = names.get(_EMBED), names.get(_HEAD)
    if embed is None:
        return found
    if embed not in found:
        if (stored := next((name for name in HEAD_NAMES if name in found), None)) is not None:
            found[embed] = found[stored]
    elif head is not None and not any(name.startswith(f"{head.removesuffix('weight')}") for name in found):
        logger.warning("there is no %s among the weights, so the embeddings compute the logits", head)
        found[head] = found[embed]
    return found


def with_tied_leaves(specs: Sequence[TensorRow], tree: Params, advice: str) -> Params:
    """Return a parameter tree, with the embeddings also as the head if `specs` want both.

    Raises:
        CheckpointError: `specs` have no head, but the tree has one that differs from the embeddings.
    """
    expected, embed = {row.path[0] for row in specs}, tree.get(_EMBED)
    if embed is None or (_HEAD in expected) == (_HEAD in tree):
        return tree
    if _HEAD in expected:
        return {**tree, _HEAD: embed}
    head = tree[_HEAD]
    differing = [] if _is_equal(head, embed) else [f"{_HEAD}, which differs from the tied embeddings"]
    Mismatch(unexpected=differing).raise_if_any("the weights", advice)
    return tree


def dropped_heads(specs: Sequence[TensorRow], tensors: Mapping[str, Tensor]) -> list[str]:
    """Return the names of stored heads that are not in `specs` although they differ from the embeddings."""
    expected = {name for row in specs for name in (*row.hf_names, *row.unread)}
    embed = next((tensors.get(row.hf_names[0]) for row in specs if row.path == (_EMBED,)), None)
    left_out = [name for name in HEAD_NAMES if name in tensors and name not in expected]
    return [name for name in left_out if embed is None or not _is_equal(tensors[name], embed)]


def _module(tensors: Mapping[str, TensorT], modules: Collection[str]) -> dict[str, TensorT]:
    """Return the tensors in a module, by the last component of their names, without biases.

    Args:
        tensors: every stored tensor by name.
        modules: names that the module may have.
    """
    found = {}
    for full, tensor in tensors.items():
        module, _, name = full.replace(TEXT_PART, "", 1).rpartition(".")
        if module in modules and name != "bias":
            found[name] = tensor
    return found


def _are_equal(head: Mapping[str, Tensor], embeddings: Mapping[str, Tensor]) -> bool:
    """Return whether two modules hold the same matrix; a quantised and an unquantised one differ."""
    return head.keys() == embeddings.keys() and all(_is_equal(head[name], embeddings[name]) for name in head)


def _is_equal(one: Tensor, other: Tensor) -> bool:
    """Return whether two tensors have the same values; a few rows at a time are in memory."""
    if one is other:
        return True
    if tuple(one.shape) != tuple(other.shape):
        return False
    if not one.shape:
        return bool(np.array_equal(np.asarray(one), np.asarray(other)))
    step = max(1, _BLOCK_BYTES * one.shape[0] // max(1, one.nbytes))
    blocks = (slice(start, start + step) for start in range(0, one.shape[0], step))
    return all(np.array_equal(_rows(one, rows), _rows(other, rows)) for rows in blocks)


def _rows(tensor: Any, rows: slice) -> NDArray[Any]:
    """Return a copy of some rows in host memory."""
    if isinstance(tensor, jax.Array):
        return host_rows(tensor, rows)
    return read(tensor[rows])
