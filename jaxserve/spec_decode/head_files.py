"""Draft-head checkpoints, in the layouts in which they are published."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.flax import load_file  # numpy has no bfloat16

from jaxserve.api.schema import FieldType
from jaxserve.errors import ConfigError, brief
from jaxserve.models import draft_head
from jaxserve.models.arch import ArchConfig
from jaxserve.models.hf_config import TABLE, read_fields
from jaxserve.models.params import Params, ParamSpec
from jaxserve.spec_decode.draft_layer import LayerHead
from jaxserve.weights import assemble
from jaxserve.weights.errors import CheckpointError
from jaxserve.weights.json_file import read_object

_LAYER = r"(?:model\.)?(?:midlayer|layers\.\d+|mtp_layers\.\d+)\."
_RENAMED = (  # pattern of a published name, name under which it is read
    (rf"{_LAYER}(?:enorm|token_layernorm)\.weight", "embedding_norm"),
    (rf"{_LAYER}(?:hnorm|hidden_layernorm|hidden_norm)\.weight", "feature_norm"),
    (rf"{_LAYER}(?:eh_proj|input_proj)\.weight", "proj"),
    (rf"{_LAYER}(?:shared_head\.norm|final_layernorm)\.weight|norm\.weight", "final_norm"),
    (rf"(?:{_LAYER}|model\.)?embed_tokens\.weight", "embed"),
    (rf"{_LAYER}shared_head\.head\.weight|lm_head\.weight", "lm_head"),
    (r"fc\.weight", "fc"),
    (r"fc_norm\.(\d+)\.weight", r"fc_norm.\1"),
    (r"input_norm\.weight", "fc_norm.0"),
    (rf"{_LAYER}(.+)", r"model.layers.0.\1"),
)
_IGNORED = re.compile(r"t2d|verifier_.+|rotary_emb\.inv_freq")
_HIDDEN_FIRST = re.compile(r"model\.mtp_layers\.")  # MiMo's projection takes the hidden state first
_MEDUSA_BLOCK = re.compile(r"(?:blocks\.)?(\d+)\.(?:layers\.)?(\d+)\.(?:linear\.)?weight")


def read_config(directory: Path) -> dict[str, Any]:
    """Read the config.json in a draft head's directory; ConfigError if there is none."""
    try:
        return read_object(directory / "config.json")
    except CheckpointError as error:
        raise ConfigError(f"a draft head must be a directory with a config.json, got {directory}: {error}") from error


def read_tensors(directory: Path) -> dict[str, jax.Array]:
    """Read all tensors in a head's directory; ConfigError if there are none or a file is damaged."""
    files = sorted(directory.glob("*.safetensors"))
    if not files:
        pickled = [path.name for path in (*directory.glob("*.pt"), *directory.glob("*.bin"))]
        hint = f", got only {pickled}: convert them, torch.load then safetensors.torch.save_file" if pickled else ""
        raise ConfigError(f"a draft head must have a .safetensors file in {directory}{hint}")
    try:
        return {name: tensor for path in files for name, tensor in load_file(str(path)).items()}
    except (SafetensorError, OSError) as error:
        raise ConfigError(f"the .safetensors files of a draft head must be whole, in {directory}: {error}") from error


def load_medusa(directory: Path, arch: ArchConfig, dtype: DTypeLike) -> Params:
    """Load Medusa heads for the model `arch`, as parameters for `medusa.Medusa`.

    Two file layouts are read: the original one (`{head}.{layer}.linear.weight` and `.bias`; `{head}.{layers}.weight`
    for the logits) and vLLM's (`blocks.{head}.layers.{layer}.weight`; `lm_heads.{head}.weight`). Heads without logits
    matrices use the model's.

    Raises:
        ConfigError: there are no heads, or they do not fit the model.
    """
    tensors = read_tensors(directory)
    D, V = arch.hidden_size, arch.vocab_size
    if "token_map" in tensors:
        raise ConfigError(f"Medusa heads must cover the whole vocabulary, got a token_map in {directory}")
    name_by_layer: dict[tuple[int, int], str] = {}
    for name, tensor in tensors.items():
        match = _MEDUSA_BLOCK.fullmatch(name)
        if match and tensor.shape == (D, D):
            name_by_layer[int(match[1]), int(match[2])] = name
    specs = []
    for (head, layer), name in sorted(name_by_layer.items()):
        specs.append(_replicated(name, ("blocks", head, layer, "weight"), D, D))
        bias = name.removesuffix("weight") + "bias"
        if bias in tensors:
            specs.append(_replicated(bias, ("blocks", head, layer, "bias"), D))
    num_layers = Counter(head for head, _ in name_by_layer)
    num_heads = len(num_layers)
    if not num_heads:
        shapes = brief({name: tensor.shape for name, tensor in tensors.items()})
        raise ConfigError(f"Medusa heads for this model must have matrices of {(D, D)}, got {shapes}")
    if name_by_layer.keys() != {(head, layer) for head in range(num_heads) for layer in range(num_layers[head])}:
        raise ConfigError(f"Medusa heads and their layers must count from 0, got {sorted(name_by_layer.values())}")
    blocks = {spec.hf_names[0] for spec in specs}
    rest = sorted(name for name in tensors if name not in blocks)
    if rest:
        names = _lm_heads(num_heads, rest)
        specs += [_replicated(name, ("lm_heads", head), V, D) for head, name in enumerate(names)]
    try:
        params = assemble(tensors, specs, dtype)
    except CheckpointError as error:
        raise ConfigError(f"Medusa heads in {directory} must fit the model: {error}") from error
    return {"lm_heads": []} | params


def _replicated(name: str, path: tuple[str | int, ...], *shape: int) -> ParamSpec:
    """Return the specification of a parameter at `path` that each device holds whole, as the tensor `name` has it."""
    return ParamSpec(path, shape, (None,) * len(shape), (name,), shape[:1])


def _lm_heads(num_heads: int, names: Sequence[str]) -> list[str]:
    """Return the tensor name of each Medusa head's logits matrix, out of these names."""
    by_head = {int(match[1]): name for name in names if (match := re.match(r"(?:lm_heads\.)?(\d+)\.", name))}
    if sorted(by_head) != list(range(num_heads)) or len(names) != num_heads:
        raise ConfigError(f"Medusa heads must have one matrix for the logits each, or none, got {list(names)}")
    return [by_head[head] for head in range(num_heads)]


def load_draft_layer(
    directory: Path,
    method: Literal["eagle3", "mtp"],
    target: ArchConfig,
    dtype: DTypeLike,
    transform_of: Callable[[Sequence[ParamSpec]], Callable[[Any, Any], Any]],
) -> tuple[Params, LayerHead]:
    """Load an EAGLE-3 or MTP head for the model `target`, as the parameters of `draft_layer.DraftLayer`.

    Layouts: EAGLE's (`midlayer.`), the speculators library's, DeepSeek's (`enorm`, `eh_proj`) and MiMo's.

    Args:
        directory: directory with config.json and .safetensors files.
        method: "eagle3" or "mtp".
        target: whole model sizes.
        dtype: parameter dtype.
        transform_of: function from tensor specs to their conversion; see `weights.load`.

    Raises:
        ConfigError: the head is damaged or not supported, or does not fit the model.
    """
    config = read_config(directory)
    tensors = _renamed(directory, config)
    layer = {name.removeprefix("model.layers.0.") for name in tensors if name.startswith("model.layers.0.")}
    num_layers = draft_head.own_sizes(config).get("num_hidden_layers", 1)
    if method == "eagle3" and num_layers != 1:
        raise ConfigError(f"an EAGLE-3 head must have one layer, got {num_layers} in {directory}")
    arch = draft_head.read_arch(config, layer, target.vocab_size)
    head = LayerHead("mtp", arch)
    if method == "mtp":  # copies of the model's
        tensors = {name: tensor for name, tensor in tensors.items() if name not in ("embed", "lm_head")}
    else:
        tensors["embedding_norm"] = tensors.pop("model.layers.0.input_layernorm.weight", None)
        head = LayerHead(
            "eagle3",
            arch,
            _feature_layers(config, target),
            norms_residual=bool(config.get("norm_before_residual", False)),
            norms_output=bool(config.get("norm_output", False)),
        )
    tensors = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    offsets = tensors.pop("d2t", None)
    if arch.hidden_size != target.hidden_size and not {"embed", "lm_head"} <= set(tensors):
        raise ConfigError(
            f"a head that shares embedding or logits must be as wide as the model, got hidden_size {arch.hidden_size} "
            f"and {target.hidden_size} in {directory}"
        )
    if offsets is not None and ("lm_head" not in tensors or offsets.ndim != 1):
        raise ConfigError(f"a head must have d2t as a vector, together with an lm_head of its own, in {directory}")
    specs = layer_specs(head, target, tensors, None if offsets is None else len(offsets))
    try:
        params = assemble(tensors, specs, dtype, transform=transform_of(specs))
    except CheckpointError as error:
        raise ConfigError(f"the head in {directory} must fit the model: {error}") from error
    if offsets is not None:
        params["outputs"] = _outputs(np.asarray(offsets), target.vocab_size, directory)
    return params, head


def _renamed(directory: Path, config: dict[str, Any]) -> dict[str, Any]:
    """Read a draft head's tensors and rename them from any known layout to ours, by the patterns in `_RENAMED`.

    If the projection's inputs are in the other order (hidden state before embedding), its column halves are swapped.
    """
    tensors: dict[str, Any] = {}
    for name, tensor in read_tensors(directory).items():
        if _IGNORED.fullmatch(name):
            continue
        pattern, new = next((row for row in _RENAMED if re.fullmatch(row[0], name)), (re.escape(name), name))
        new = re.sub(pattern, new, name)
        if new in tensors:
            raise ConfigError(f"a head must have one layer, got {name} beside another of its kind in {directory}")
        is_swapped = new == "proj" and (_HIDDEN_FIRST.match(name) or config.get("mtp_hidden_states_first"))
        tensors[new] = jnp.roll(tensor, tensor.shape[-1] // 2, axis=-1) if is_swapped else tensor
    return tensors


def _feature_layers(config: dict[str, Any], target: ArchConfig) -> tuple[int, ...]:
    """Return the layers whose inputs an EAGLE-3 head reads: from its config, by default the paper's three."""
    n = target.num_layers
    name, ids = "eagle_aux_hidden_state_layer_ids", FieldType("a list", lambda value: isinstance(value, list)).or_null()
    nested = read_fields(config, {"eagle_config": TABLE.or_null()})["eagle_config"] or {}
    named = read_fields(config, {name: ids})[name] or read_fields(nested, {name: ids})[name]
    layers = tuple(named or (2, n // 2, n - 3))
    if len(set(layers)) != len(layers) or not all(isinstance(i, int) and 0 <= i <= n for i in layers):
        raise ConfigError(
            f"eagle_aux_hidden_state_layer_ids of an EAGLE-3 head must be distinct numbers in [0, {n}], got {layers}"
        )
    return layers


def layer_specs(
    head: LayerHead, target: ArchConfig, tensors: Mapping[str, Any], num_outputs: int | None = None
) -> list[ParamSpec]:
    """Return the specification of each of a draft layer's tensors.

    Args:
        head: layer method and sizes.
        target: whole model sizes.
        tensors: checkpoint tensors by name; feature norms, `embed` and `lm_head` are optional.
        num_outputs: draft vocabulary size; None for the model's whole vocabulary.
    """
    arch = head.arch
    D, V = arch.hidden_size, target.vocab_size

    specs = draft_head.param_specs(arch, wide=head.method == "eagle3")
    specs += [_replicated(name, (name,), D) for name in ("embedding_norm", "feature_norm", "final_norm")]
    if "embed" in tensors:
        specs.append(_replicated("embed", ("embed",), V, D))
    if "lm_head" in tensors:
        specs.append(_replicated("lm_head", ("lm_head",), V if num_outputs is None else num_outputs, D))
    if head.method == "mtp":
        return [*specs, _replicated("proj", ("proj",), D, 2 * D)]
    inner = len(head.feature_layers) * target.hidden_size
    norms = sorted(name for name in tensors if name.startswith("fc_norm."))
    specs += [_replicated(name, ("fc_norm", index), inner // len(norms)) for index, name in enumerate(norms)]
    return [*specs, _replicated("fc", ("fc",), D, inner)]


def _outputs(offsets: NDArray[np.integer], vocab_size: int, directory: Path) -> jax.Array:
    """Return the draft id for each of the model's token ids, -1 if there is none.

    Args:
        offsets: model id minus draft id, by draft id.
        vocab_size: size of the model's vocabulary.
        directory: directory of the head, for errors.
    """
    draft_ids = np.arange(len(offsets))
    ids = draft_ids + offsets
    if len(np.unique(ids)) != len(ids) or ids.min() < 0 or ids.max() >= vocab_size:
        raise ConfigError(
            f"d2t of a head must give each draft token another one of the model's, got {ids} in {directory}"
        )
    outputs = np.full(vocab_size, -1, np.int32)
    outputs[ids] = draft_ids
    return jnp.asarray(outputs)
