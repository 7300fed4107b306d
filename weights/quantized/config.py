"""Parser of `quantization_config`: the schemes of all modules, whichever tool wrote it.

Rules are tried in order: first modules that are left out, then names, patterns of names, classes.
"""

import dataclasses
import fnmatch
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

from jaxserve.weights.errors import CheckpointError
from jaxserve.weights.quantized.scheme import Activation, Elements, Packing, Role, Rule, Scheme, Schemes
from jaxserve.weights.rows import HEADS

_LINEAR = "class:Linear$"
_HEAD = Rule(rf"(.*\.)?({'|'.join(HEADS)})$", None)  # left out by the tools that do not list it
_PLAIN_SCALED: tuple[tuple[Role, str], ...] = (("elements", "weight"), ("scale", "weight_scale"))
_PACKED_SCALED: tuple[tuple[Role, str], ...] = (("elements", "weight_packed"), ("scale", "weight_scale"))
_GLOBAL: tuple[tuple[Role, str], ...] = (("global_scale", "weight_global_scale"),)
_INPUT_GLOBAL: tuple[tuple[Role, str], ...] = (("input_scale", "input_global_scale"),)
_INPUT: tuple[tuple[Role, str], ...] = (("input_scale", "input_scale"),)
_ZERO: tuple[tuple[Role, str], ...] = (("zero", "weight_zero_point"),)
E4M3, E8M0 = "float8_e4m3fn", "float8_e8m0fnu"


def read_schemes(config: Mapping[str, Any]) -> Schemes | None:
    """Return the schemes that a parsed config.json describes; None if it has no quantised modules.

    Those of a multimodal model are the schemes of its text part.

    Raises:
        CheckpointError: a method, or the scheme of some modules, is not supported.
    """
    text = config.get("text_config")
    quantization = config.get("quantization_config") or (isinstance(text, Mapping) and text.get("quantization_config"))
    if not quantization:
        return None
    if not isinstance(quantization, Mapping):
        raise CheckpointError(f"config.json: quantization_config must be an object, got {quantization!r}")
    method = str(quantization.get("quant_method", "?"))
    if method not in _METHODS:
        raise CheckpointError(
            f"the quant_method of a checkpoint must be one of {', '.join(_METHODS)}, got {method!r}; "
            f"use a checkpoint of one of these, or an unquantised one with quantization= of the engine"
        )
    try:
        schemes = _METHODS[method](quantization)
        kv_cache = _has_kv_scales({**quantization, **(quantization.get("quantization") or {})})
        return dataclasses.replace(schemes, kv_cache=kv_cache, is_multimodal=text is not None)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointError(
            f"config.json: quantization_config ({method}) has a fault: {type(error).__name__} {error}"
        ) from error


def _has_kv_scales(config: Mapping[str, Any]) -> bool:
    """Return whether a checkpoint has scales of keys and values, of whatever tool."""
    return bool(config.get("kv_cache_quant_algo") or config.get("kv_cache_scheme"))


def _refuse(what: str, got: object, where: str) -> CheckpointError:
    return CheckpointError(f"{what}, got {got} for {where}; quantise those modules otherwise")


# compressed-tensors


def _compressed_tensors(config: Mapping[str, Any]) -> Schemes:
    for field in ("sparsity_config", "transform_config"):
        if config.get(field) and (config[field].get("format") != "dense" or field == "transform_config"):
            raise CheckpointError(
                f"compressed-tensors must come without a {field}, got {config[field]}; save the model dense"
            )
    if (status := config.get("quantization_status", "compressed")) != "compressed":
        raise CheckpointError(f"the quantization_status of compressed-tensors must be 'compressed', got {status!r}")
    ranked: list[tuple[int, Rule]] = []
    for group in config["config_groups"].values():
        scheme = _compressed_scheme(group, group.get("format") or config.get("format"))
        for target in group["targets"]:
            ranked.append((_rank(target), Rule(_target(target), scheme)))
    ignored = [Rule(_target(name), None) for name in config.get("ignore") or ()]
    rules = [rule for _, rule in sorted(ranked, key=lambda pair: pair[0])]
    return Schemes("compressed-tensors", (*ignored, *rules))


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


def _compressed_scheme(group: Mapping[str, Any], form: str | None) -> Scheme:
    weights, inputs = group["weights"], group.get("input_activations")
    where = f"{', '.join(group['targets'])} (compressed-tensors {form})"
    if group.get("output_activations"):
        raise _refuse("outputs of products must not be quantised", "output_activations", where)
    bits, kind, group_size = weights["num_bits"], weights["type"], weights.get("group_size") or -1
    strategy = weights.get("strategy") or ("tensor" if group_size == -1 else "group")
    symmetric = weights.get("symmetric", True)
    if (order := weights.get("actorder")) in ("group", True):
        raise _refuse("compressed-tensors must have actorder 'static' or none", f"actorder {order!r}", where)
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
        raise _refuse(f"weights must be {supported}", f"{form} of {bits} bits ({kind})", where)
    block_rows = 1
    columns: int | None = None
    if strategy in ("group", "tensor_group"):
        columns = None if group_size == -1 else int(group_size)
    elif strategy == "block":
        sizes = weights["block_structure"]  # old versions write "128x128"
        block_rows, columns = map(int, sizes.split("x") if isinstance(sizes, str) else sizes)
    elif strategy not in ("tensor", "channel"):
        raise _refuse("weights must have scales by tensor, channel, group or block", f"strategy {strategy!r}", where)
    is_mx, is_nv = str(form).startswith("mxfp"), form == "nvfp4-pack-quantized"
    if not symmetric and (kind != "int" or strategy not in ("group", "channel")):
        raise _refuse("weights with zero points must be integers by channel or group", f"{kind} by {strategy}", where)
    packed = form in ("pack-quantized", "nvfp4-pack-quantized", "mxfp4-pack-quantized")
    packing: Packing = "words" if form == "pack-quantized" else "nibbles" if packed else "plain"
    activation = _compressed_activation(inputs, where)
    tensors = _PACKED_SCALED if packed else _PLAIN_SCALED
    tensors += () if symmetric else _ZERO
    tensors += _GLOBAL if is_nv else ()
    if activation and not activation.dynamic:
        tensors += _INPUT_GLOBAL if activation.elements == "e2m1" else _INPUT
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


def _compressed_activation(inputs: Mapping[str, Any] | None, where: str) -> Activation | None:
    if not inputs:
        return None
    found = (inputs["type"], inputs["num_bits"], inputs["strategy"], inputs.get("dynamic", False))
    group, symmetric = int(inputs.get("group_size") or 0) or None, inputs.get("symmetric", True)
    elements: Literal["int8", "e4m3"] = "int8" if inputs["type"] == "int" else "e4m3"
    if symmetric and inputs.get("scale_dtype") != "torch.uint8":
        if found in (("int", 8, "token", True), ("float", 8, "token", True)):
            return Activation(elements, None, dynamic=True)
        if found == ("float", 8, "group", True):
            return Activation("e4m3", group, dynamic=True)
        if found in (("float", 8, "tensor", False), ("int", 8, "tensor", False)):
            return Activation(elements, None, dynamic=False)
        if found[:3] == ("float", 4, "tensor_group") and found[3] == "local":
            return Activation("e2m1", group, dynamic=False)
    raise _refuse(
        "activations must be 8 bits by token (dynamic) or by tensor (static), fp8 by group (dynamic), or NVFP4's",
        dict(inputs),
        where,
    )


# DeepSeek's fp8, also of Qwen, MiniMax and GLM


def _fp8(config: Mapping[str, Any]) -> Schemes:
    if (form := config.get("fmt", "e4m3")) not in ("e4m3", "float8_e4m3fn"):
        raise CheckpointError(f"the fmt of fp8 checkpoints must be 'e4m3', got {form!r}")
    block, activations = config.get("weight_block_size"), config.get("activation_scheme", "dynamic")
    if activations not in ("dynamic", "static"):
        raise CheckpointError(f"the activation_scheme of fp8 must be 'dynamic' or 'static', got {activations!r}")
    is_dynamic = activations == "dynamic"
    if block is None:
        tensors = _PLAIN_SCALED if is_dynamic else (*_PLAIN_SCALED, *_INPUT)
        scheme = Scheme("fp8", "e4m3", "plain", tensors, activation=Activation("e4m3", None, is_dynamic))
    else:
        block_rows, columns = map(int, block)
        if not is_dynamic:
            raise CheckpointError("the activation_scheme of fp8 by blocks must be 'dynamic', got 'static'")
        blocks: tuple[tuple[Role, str], ...] = (("elements", "weight"), ("scale", "weight_scale_inv"))
        activation = Activation("e4m3", columns, dynamic=True)
        scheme = Scheme("fp8 by blocks", "e4m3", "plain", blocks, columns, block_rows, activation=activation)
    # DeepSeek-V3's projection for multi-token prediction is plain, and in no list.
    names = ["eh_proj", *(config.get("modules_to_not_convert") or ()), *(config.get("ignored_layers") or ())]
    return Schemes("fp8", (*map(_left_out, names), _HEAD, Rule(_LINEAR, scheme)))


def _left_out(name: str) -> Rule:
    """Return the rule for modules that have a name, begin with it or contain it between dots."""
    return Rule(rf"(.*\.)?{re.escape(name)}(\..*)?$", None)


# gpt-oss, whose experts alone are quantised


def _mxfp4(config: Mapping[str, Any]) -> Schemes:
    tensors: tuple[tuple[Role, str], ...] = (("elements", "_blocks"), ("scale", "_scales"))
    scheme = Scheme("mxfp4", "e2m1", "nibbles", tensors, 32, scale_dtype=E8M0, stacked=True)
    ignored = [Rule(_glob(name), None) for name in config.get("modules_to_not_convert") or ()]
    return Schemes("mxfp4", (*ignored, Rule(r".*\.experts\.(gate_up|down)_proj$", scheme)))


# ModelOpt


def _modelopt(config: Mapping[str, Any]) -> Schemes:
    config = {**config, **(config.get("quantization") or {})}
    names = [*(config.get("exclude_modules") or ()), *(config.get("ignore") or ())]
    ignored = [Rule(_glob(name), None) for name in names]
    algorithm, rules = config.get("quant_algo"), list[Rule]()
    if algorithm == "MIXED_PRECISION":
        layers = config["quantized_layers"].items()
        rules = [
            Rule(f"{re.escape(name)}$", _modelopt_scheme(str(layer["quant_algo"]), layer, name))
            for name, layer in layers
        ]
    elif algorithm is not None or not _has_kv_scales(config):
        rules = [Rule(_LINEAR, _modelopt_scheme(str(algorithm), config, "all modules"))]
    return Schemes("modelopt", (*ignored, *rules))


def _glob(name: str) -> str:
    """Return the pattern of a name with `*`, and of the modules inside those that it names."""
    return rf"(?:{fnmatch.translate(name)}|{re.escape(name)}\..*)"


def _modelopt_scheme(algorithm: str, config: Mapping[str, Any], where: str) -> Scheme:
    name = f"modelopt {algorithm}"
    if algorithm == "FP8":
        tensors = (*_PLAIN_SCALED, *_INPUT)
        return Scheme(name, "e4m3", "plain", tensors, activation=Activation("e4m3", None, dynamic=False))
    if algorithm in ("NVFP4", "W4A16_NVFP4"):
        group = int(config.get("group_size") or 16)
        activation = Activation("e2m1", group, dynamic=False) if algorithm == "NVFP4" else None
        second: tuple[tuple[Role, str], ...] = (("global_scale", "weight_scale_2"),)
        tensors = (*_PLAIN_SCALED, *second, *(_INPUT if activation else ()))
        return Scheme(name, "e2m1", "nibbles", tensors, group, scale_dtype=E4M3, activation=activation)
    if algorithm in ("W4A16_AWQ", "INT4_AWQ"):
        if config.get("has_zero_point"):
            raise _refuse("weights of W4A16_AWQ must come without zero points", "has_zero_point", where)
        tensors = (*_PLAIN_SCALED, ("input_factor", "pre_quant_scale"))
        return Scheme(name, "int4", "row_nibbles", tensors, int(config.get("group_size") or 128))
    known = "FP8, NVFP4, W4A16_NVFP4, W4A16_AWQ or MIXED_PRECISION"
    raise _refuse(f"the quant_algo of ModelOpt must be {known}", algorithm, where)


# GPTQ and AWQ


def _gptq(config: Mapping[str, Any]) -> Schemes:
    form = str(config.get("checkpoint_format") or "gptq")
    if form not in ("gptq", "gptq_v2"):
        raise CheckpointError(f"the checkpoint_format of GPTQ must be 'gptq' or 'gptq_v2', got {form!r}")
    rules = []
    for pattern, changes in (config.get("dynamic") or {}).items():
        scheme = None if pattern.startswith("-:") else _gptq_scheme({**config, **changes}, form, pattern)
        rules.append(Rule(pattern.removeprefix("-:").removeprefix("+:"), scheme))
    head = () if config.get("lm_head") else (_HEAD,)
    names = config.get("modules_to_not_convert") or ()
    rules += [*map(_left_out, names), *head, Rule(_LINEAR, _gptq_scheme(config, form, "all modules"))]
    return Schemes("gptq", tuple(rules))


def _gptq_scheme(config: Mapping[str, Any], form: str, where: str) -> Scheme:
    elements = _int_elements("GPTQ", config, (4, 8), where)
    tensors: tuple[tuple[Role, str], ...] = (("elements", "qweight"), ("scale", "scales"), ("zero", "qzeros"))
    group = _group(config)
    if config.get("desc_act") and group is not None:
        tensors += (("order", "g_idx"),)
    return Scheme(form, elements, "gptq", tensors, group, zero_offset=0 if form == "gptq_v2" else 1)


def _awq(config: Mapping[str, Any]) -> Schemes:
    if (version := str(config.get("version", "gemm")).lower()) != "gemm":
        raise CheckpointError(f"the version of AWQ must be 'gemm', got {version!r}")
    tensors: tuple[tuple[Role, str], ...] = (("elements", "qweight"), ("scale", "scales"), ("zero", "qzeros"))
    scheme = Scheme("awq", _int_elements("AWQ", config, (4,), "all modules"), "awq", tensors, _group(config))
    names = config.get("modules_to_not_convert") or ()
    return Schemes("awq", (*map(_left_out, names), _HEAD, Rule(_LINEAR, scheme)))


def _auto_round(config: Mapping[str, Any]) -> Schemes:
    packing = str(config.get("packing_format", ""))
    if packing not in ("auto_round:auto_gptq", "auto_round:auto_awq"):
        raise CheckpointError(
            f"the packing_format of auto-round must be 'auto_round:auto_gptq' or 'auto_round:auto_awq', got {packing!r}"
        )
    if config.get("extra_config"):
        raise CheckpointError("auto-round must quantise all modules alike, got an extra_config")
    return _gptq(config) if packing.endswith("gptq") else _awq(config)


def _int_elements(tool: str, config: Mapping[str, Any], allowed: Sequence[int], where: str) -> Elements:
    bits = config.get("bits", config.get("w_bit", 4))
    if bits not in allowed:
        raise _refuse(f"weights of {tool} must have {' or '.join(map(str, allowed))} bits", f"{bits} bits", where)
    return "int4" if bits == 4 else "int8"


def _group(config: Mapping[str, Any]) -> int | None:
    size = int(config.get("group_size", config.get("q_group_size", 128)))
    return None if size == -1 else size


# GGUF, whose types are recorded by `gguf_store`

_MINIMUM: tuple[tuple[Role, str], ...] = (("minimum", "weight_minimum"),)
GGUF_SCHEMES: Mapping[str, Scheme] = {
    "Q8_0": Scheme("gguf Q8_0", "int8", "plain", _PLAIN_SCALED, 32, scale_dtype="float16"),
    "Q4_0": Scheme("gguf Q4_0", "int4", "nibbles", _PACKED_SCALED, 32, scale_dtype="float16"),
    "Q5_0": Scheme("gguf Q5_0", "int8", "plain", _PLAIN_SCALED, 32, scale_dtype="float16"),
    "Q4_K": Scheme("gguf Q4_K", "int4", "nibbles", (*_PACKED_SCALED, *_MINIMUM), 32),
    "Q6_K": Scheme("gguf Q6_K", "int8", "plain", _PLAIN_SCALED, 16),
}


def _gguf(config: Mapping[str, Any]) -> Schemes:
    rules = []
    for kind, names in config["types"].items():
        if kind not in GGUF_SCHEMES:
            raise CheckpointError(f"the types of GGUF must be of {', '.join(GGUF_SCHEMES)}, got {kind!r}")
        rules.append(Rule(f"(?:{'|'.join(map(re.escape, names))})$", GGUF_SCHEMES[kind]))
    return Schemes("gguf", tuple(rules))


_METHODS: dict[str, Callable[[Mapping[str, Any]], Schemes]] = {
    "compressed-tensors": _compressed_tensors,
    "fp8": _fp8,
    "mxfp4": _mxfp4,
    "modelopt": _modelopt,
    "gptq": _gptq,
    "awq": _awq,
    "auto-round": _auto_round,
    "gguf": _gguf,
}
