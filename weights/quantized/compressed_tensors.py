"""Parser of compressed-tensors' `quantization_config`."""

import re
from collections.abc import Mapping
from typing import Any, Literal

from jaxserve.weights.errors import CheckpointError
from jaxserve.weights.quantized.named_tensors import E4M3, INPUT, PACKED_SCALED, PLAIN_SCALED, refusal
from jaxserve.weights.quantized.scheme import Activation, Elements, Packing, Rule, Scheme, Schemes, Suffixes

# Format, type and bits -> elements, their packing, and the scale dtype.
_FORMATS: dict[tuple[str, str, int], tuple[Elements, Packing, str]] = {
    ("float-quantized", "float", 8): ("e4m3", "plain", "float32"),
    ("naive-quantized", "float", 8): ("e4m3", "plain", "float32"),
    ("int-quantized", "int", 8): ("int8", "plain", "float32"),
    ("naive-quantized", "int", 8): ("int8", "plain", "float32"),
    ("int-quantized", "int", 4): ("int4", "plain", "float32"),
    ("pack-quantized", "int", 4): ("int4", "words", "float32"),
    ("pack-quantized", "int", 8): ("int8", "words", "float32"),
    ("nvfp4-pack-quantized", "float", 4): ("e2m1", "nibbles", E4M3),
    ("mxfp4-pack-quantized", "float", 4): ("e2m1", "nibbles", "bfloat16"),
    ("mxfp8-quantized", "float", 8): ("e4m3", "plain", "bfloat16"),
}
_ACTIVATIONS: dict[tuple[str, int], Literal["int8", "e4m3", "e2m1"]] = {
    ("int", 8): "int8",
    ("float", 8): "e4m3",
    ("float", 4): "e2m1",
}
_GLOBAL: Suffixes = (("global_scale", "weight_global_scale"),)
_INPUT_GLOBAL: Suffixes = (("input_scale", "input_global_scale"),)
_INPUT_ZERO: Suffixes = (("input_zero", "input_zero_point"),)
_ORDER: Suffixes = (("order", "weight_g_idx"),)
_ZERO: Suffixes = (("zero", "weight_zero_point"),)


def read_compressed_tensors(config: Mapping[str, Any]) -> Schemes:
    """Return the schemes for the module groups; ignored modules have none."""
    for field in ("sparsity_config", "transform_config"):
        if config.get(field) and (config[field].get("format") != "dense" or field == "transform_config"):
            raise CheckpointError(
                f"compressed-tensors must come without a {field}, got {config[field]}; save the model dense"
            )
    ranked: list[tuple[int, Rule]] = []
    groups = list(config["config_groups"].values())
    attention = [group for group in groups if _is_attention(group)]
    for group in groups:
        if group in attention:
            continue
        scheme = _scheme(group, group.get("format") or config.get("format"))
        for target in group["targets"]:
            ranked.append((_rank(target), Rule(_pattern(target), scheme)))
    ignored = [Rule(_pattern(name), None) for name in config.get("ignore") or ()]
    rules = [rule for _, rule in sorted(ranked, key=lambda pair: pair[0])]
    return Schemes("compressed-tensors", (*ignored, *rules), kv_cache=bool(attention))


def _is_attention(group: Mapping[str, Any]) -> bool:
    """Return whether a group quantises only keys and values, whose scales are not used."""
    named = [re.search(r"attn\$?$|Attention$", target) for target in group["targets"]]
    return group.get("weights") is None and all(named)


def _is_class(target: str) -> bool:
    """Return whether a target is a class name, such as Linear."""
    return target[:1].isupper() and "." not in target


def _rank(target: str) -> int:
    """Return a target's precedence, as in compressed-tensors: names before patterns before classes."""
    return 1 if target.startswith("re:") else 2 if _is_class(target) else 0


def _pattern(target: str) -> str:
    """Convert a target to a pattern for `Rule`: it is a name, `re:` and a pattern, or a class."""
    if target.startswith("re:"):
        return target[len("re:") :]
    return f"class:{re.escape(target)}$" if _is_class(target) else f"{re.escape(target)}$"


def _scheme(group: Mapping[str, Any], format_name: str | None) -> Scheme:
    """Return the scheme for a group in `config_groups`; CheckpointError if it is not supported.

    Args:
        group: weights, activations and targets.
        format_name: the group's or the checkpoint's format.
    """
    weights, inputs = group.get("weights"), group.get("input_activations")
    where = f"{', '.join(group['targets'])} (compressed-tensors {format_name})"
    if not weights:
        raise refusal("modules other than attention must have quantised weights", "only activations", where)
    if group.get("output_activations"):
        raise refusal("outputs of linear layers must not be quantised", "output_activations", where)
    bits, number_type = weights["num_bits"], weights["type"]
    if (known := _FORMATS.get((str(format_name), number_type, bits))) is None:
        supported = ", ".join(f"{name} of {size} bits ({numbers})" for name, numbers, size in _FORMATS)
        raise refusal(f"weights must be {supported}", f"{format_name} of {bits} bits ({number_type})", where)
    elements, packing, scale_dtype = known
    group_size = weights.get("group_size") or -1
    strategy = weights.get("strategy") or ("tensor" if group_size == -1 else "group")
    block_rows, columns = _scale_block(strategy, group_size, weights, where)
    symmetric = weights.get("symmetric", True)
    if not symmetric and (number_type != "int" or strategy not in ("group", "channel")):
        raise refusal(
            "weights with zero points must be integers by channel or group", f"{number_type} by {strategy}", where
        )
    # "dynamic" was another name for "group"; with the others, groups are consecutive columns.
    has_order = weights.get("actorder") in ("group", "dynamic", True) and columns is not None
    activation = _activation(inputs, where)
    tensors = PLAIN_SCALED if packing == "plain" else PACKED_SCALED
    tensors += () if symmetric else _ZERO
    tensors += _GLOBAL if scale_dtype == E4M3 else ()
    tensors += _ORDER if has_order else ()
    if activation and not activation.dynamic:
        tensors += _INPUT_GLOBAL if activation.elements == "e2m1" else INPUT
        tensors += () if activation.symmetric else _INPUT_ZERO
    return Scheme(
        f"compressed-tensors {format_name}",
        elements,
        packing,
        tensors,
        columns,
        block_rows,
        scale_dtype=scale_dtype,
        divides=scale_dtype == E4M3,
        activation=activation,
    )


def _scale_block(strategy: str, group_size: int, weights: Mapping[str, Any], where: str) -> tuple[int, int | None]:
    """Return the number of rows and of columns that share a scale; None for all columns.

    Args:
        strategy: "tensor", "channel", "group", "tensor_group" or "block".
        group_size: columns per group; -1 for all.
        weights: the group's weight settings.
        where: modules, for the error.
    """
    if strategy in ("group", "tensor_group"):
        return 1, None if group_size == -1 else int(group_size)
    if strategy == "block":
        sizes = weights["block_structure"]  # old versions write "128x128"
        rows, columns = map(int, sizes.split("x") if isinstance(sizes, str) else sizes)
        return rows, columns
    if strategy in ("tensor", "channel"):
        return 1, None
    raise refusal("weights must have scales by tensor, channel, group or block", f"strategy {strategy!r}", where)


def _activation(inputs: Mapping[str, Any] | None, where: str) -> Activation | None:
    """Return the activation scheme in `input_activations`, None without one; `where` names modules for the error."""
    if not inputs:
        return None
    elements, symmetric = _ACTIVATIONS.get((inputs["type"], inputs["num_bits"])), inputs.get("symmetric", True)
    group, dynamic = int(inputs.get("group_size") or 0) or None, inputs.get("dynamic", False)
    strategy = inputs.get("strategy") or ("token" if dynamic else "tensor")
    ungrouped = (strategy, dynamic) in (("token", True), ("tensor", False))
    if elements == "int8" and ungrouped:
        return Activation("int8", None, dynamic=dynamic, symmetric=symmetric)
    if elements is not None and symmetric:
        if inputs.get("scale_dtype") == "torch.uint8":
            if elements != "int8" and (strategy, dynamic, group) == ("group", True, 32):
                return Activation(elements, group, dynamic=True, power_of_two=True)
        elif elements == "e4m3" and ungrouped:
            return Activation("e4m3", None, dynamic=dynamic)
        elif (elements, strategy, dynamic) == ("e4m3", "group", True):
            return Activation("e4m3", group, dynamic=True)
        elif (elements, strategy, dynamic) == ("e2m1", "tensor_group", "local"):
            return Activation("e2m1", group, dynamic=False)
    raise refusal(
        "activations must be 8 bits by token (dynamic) or by tensor (static), fp8 by group (dynamic), or those of "
        "NVFP4, MXFP4 or MXFP8",
        dict(inputs),
        where,
    )
