"""Parser of the `quantization_config` of compressed-tensors."""

import re
from collections.abc import Mapping
from typing import Any, Literal

from jaxserve.weights.errors import CheckpointError
from jaxserve.weights.quantized.named_tensors import E4M3, INPUT, PACKED_SCALED, PLAIN_SCALED, refusal
from jaxserve.weights.quantized.scheme import Activation, Elements, Packing, Role, Rule, Scheme, Schemes

_GLOBAL: tuple[tuple[Role, str], ...] = (("global_scale", "weight_global_scale"),)
_INPUT_GLOBAL: tuple[tuple[Role, str], ...] = (("input_scale", "input_global_scale"),)
_INPUT_ZERO: tuple[tuple[Role, str], ...] = (("input_zero", "input_zero_point"),)
_ORDER: tuple[tuple[Role, str], ...] = (("order", "weight_g_idx"),)
_ZERO: tuple[tuple[Role, str], ...] = (("zero", "weight_zero_point"),)


def read_compressed_tensors(config: Mapping[str, Any]) -> Schemes:
    """Return the schemes of the groups of modules, and of those that are left out."""
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
            ranked.append((_rank(target), Rule(_target(target), scheme)))
    ignored = [Rule(_target(name), None) for name in config.get("ignore") or ()]
    rules = [rule for _, rule in sorted(ranked, key=lambda pair: pair[0])]
    return Schemes("compressed-tensors", (*ignored, *rules), kv_cache=bool(attention))


def _is_attention(group: Mapping[str, Any]) -> bool:
    """Return whether a group quantises keys and values alone, whose scales are not used."""
    named = [re.search(r"attn\$?$|Attention$", target) for target in group["targets"]]
    return group.get("weights") is None and all(named)


def _is_class(target: str) -> bool:
    return target[:1].isupper() and "." not in target


def _rank(target: str) -> int:
    """Return the place of a target: names before patterns before classes, as in compressed-tensors."""
    return 1 if target.startswith("re:") else 2 if _is_class(target) else 0


def _target(target: str) -> str:
    """Return the pattern of a target: a name, `re:` and a pattern, or a class."""
    if target.startswith("re:"):
        return target[len("re:") :]
    return f"class:{re.escape(target)}$" if _is_class(target) else f"{re.escape(target)}$"


def _scheme(group: Mapping[str, Any], form: str | None) -> Scheme:
    weights, inputs = group.get("weights"), group.get("input_activations")
    where = f"{', '.join(group['targets'])} (compressed-tensors {form})"
    if not weights:
        raise refusal("modules other than attention must have quantised weights", "activations alone", where)
    if group.get("output_activations"):
        raise refusal("outputs of products must not be quantised", "output_activations", where)
    bits, kind, group_size = weights["num_bits"], weights["type"], weights.get("group_size") or -1
    strategy = weights.get("strategy") or ("tensor" if group_size == -1 else "group")
    symmetric = weights.get("symmetric", True)
    # "dynamic" was another name of "group"; with the others, groups are consecutive columns.
    has_order = weights.get("actorder") in ("group", "dynamic", True)
    known: dict[tuple[str, str, int], Elements] = {
        ("float-quantized", "float", 8): "e4m3",
        ("naive-quantized", "float", 8): "e4m3",
        ("int-quantized", "int", 8): "int8",
        ("naive-quantized", "int", 8): "int8",
        ("int-quantized", "int", 4): "int4",
        ("pack-quantized", "int", 4): "int4",
        ("pack-quantized", "int", 8): "int8",
        ("nvfp4-pack-quantized", "float", 4): "e2m1",
        ("mxfp4-pack-quantized", "float", 4): "e2m1",
        ("mxfp8-quantized", "float", 8): "e4m3",
    }
    elements = known.get((str(form), kind, bits))
    if elements is None:
        supported = ", ".join(f"{name} of {size} bits ({numbers})" for name, numbers, size in known)
        raise refusal(f"weights must be {supported}", f"{form} of {bits} bits ({kind})", where)
    block_rows = 1
    columns: int | None = None
    if strategy in ("group", "tensor_group"):
        columns = None if group_size == -1 else int(group_size)
    elif strategy == "block":
        sizes = weights["block_structure"]  # old versions write "128x128"
        block_rows, columns = map(int, sizes.split("x") if isinstance(sizes, str) else sizes)
    elif strategy not in ("tensor", "channel"):
        raise refusal("weights must have scales by tensor, channel, group or block", f"strategy {strategy!r}", where)
    is_mx, is_nv = str(form).startswith("mxfp"), form == "nvfp4-pack-quantized"
    if not symmetric and (kind != "int" or strategy not in ("group", "channel")):
        raise refusal("weights with zero points must be integers by channel or group", f"{kind} by {strategy}", where)
    packed = form in ("pack-quantized", "nvfp4-pack-quantized", "mxfp4-pack-quantized")
    packing: Packing = "words" if form == "pack-quantized" else "nibbles" if packed else "plain"
    activation = _activation(inputs, where)
    tensors = PACKED_SCALED if packed else PLAIN_SCALED
    tensors += () if symmetric else _ZERO
    tensors += _GLOBAL if is_nv else ()
    tensors += _ORDER if has_order and columns is not None else ()
    if activation and not activation.dynamic:
        tensors += _INPUT_GLOBAL if activation.elements == "e2m1" else INPUT
        tensors += () if activation.symmetric else _INPUT_ZERO
    return Scheme(
        f"compressed-tensors {form}",
        elements,
        packing,
        tensors,
        columns,
        block_rows,
        scale_dtype="bfloat16" if is_mx else E4M3 if is_nv else "float32",
        divides=is_nv,
        activation=activation,
    )


_ACTIVATIONS: dict[tuple[str, int], Literal["int8", "e4m3", "e2m1"]] = {
    ("int", 8): "int8",
    ("float", 8): "e4m3",
    ("float", 4): "e2m1",
}


def _activation(inputs: Mapping[str, Any] | None, where: str) -> Activation | None:
    if not inputs:
        return None
    elements, symmetric = _ACTIVATIONS.get((inputs["type"], inputs["num_bits"])), inputs.get("symmetric", True)
    group, dynamic = int(inputs.get("group_size") or 0) or None, inputs.get("dynamic", False)
    strategy = inputs.get("strategy") or ("token" if dynamic else "tensor")
    whole = (strategy, dynamic) in (("token", True), ("tensor", False))
    if elements == "int8" and whole:
        return Activation("int8", None, dynamic=dynamic, symmetric=symmetric)
    if elements is not None and symmetric:
        if inputs.get("scale_dtype") == "torch.uint8":
            if elements != "int8" and (strategy, dynamic, group) == ("group", True, 32):
                return Activation(elements, group, dynamic=True, power_of_two=True)
        elif elements == "e4m3" and whole:
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
