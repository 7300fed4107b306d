"""Parser of `quantization_config`: the schemes for all modules, whichever tool wrote it.

Rules are tried in order: first modules that stay unquantised, then names, name patterns and classes.
"""

import dataclasses
import fnmatch
import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Literal

from jaxserve.weights.errors import CheckpointError
from jaxserve.weights.quantized.compressed_tensors import read_compressed_tensors
from jaxserve.weights.quantized.named_tensors import E4M3, E8M0, INPUT, PACKED_SCALED, PLAIN_SCALED, refusal
from jaxserve.weights.quantized.scheme import Activation, Elements, Packing, Rule, Scheme, Schemes, Suffixes
from jaxserve.weights.rows import HEADS

_LINEAR = "class:Linear$"
_HEAD = Rule(rf"(.*\.)?({'|'.join(HEADS)})$", None)  # left out by the tools that do not list it


def read_schemes(config: Mapping[str, Any]) -> Schemes | None:
    """Return the schemes in a parsed config.json; None if it has no quantised modules.

    For a multimodal model these are its text part's schemes.

    Raises:
        CheckpointError: a method, or the scheme for some modules, is not supported.
    """
    text = config.get("text_config")
    holders = [config, text] if isinstance(text, Mapping) else [config]
    found = [holder.get(name) for holder in holders for name in ("quantization_config", "compression_config")]
    quantization = next(filter(None, found), None)
    if not quantization:
        return None
    if not isinstance(quantization, Mapping):
        raise CheckpointError(f"config.json: quantization_config must be an object, got {quantization!r}")
    method = str(quantization.get("quant_method", "?"))
    if method not in METHODS:
        raise CheckpointError(
            f"the quant_method of a checkpoint must be one of {', '.join(METHODS)}, got {method!r}; "
            f"use a checkpoint of one of these, or an unquantised one with quantization= of the engine"
        )
    try:
        schemes = METHODS[method](quantization)
        kv_cache = schemes.kv_cache or _has_kv_scales({**quantization, **(quantization.get("quantization") or {})})
        return dataclasses.replace(schemes, kv_cache=kv_cache, is_multimodal=text is not None)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointError(
            f"config.json: quantization_config ({method}) has a fault: {type(error).__name__} {error}"
        ) from error


def _has_kv_scales(config: Mapping[str, Any]) -> bool:
    """Return whether a checkpoint has scales for keys and values, whichever tool wrote it."""
    return bool(config.get("kv_cache_quant_algo") or config.get("kv_cache_scheme"))


# DeepSeek's fp8, which Qwen, MiniMax and GLM also use


def _fp8(config: Mapping[str, Any]) -> Schemes:
    """Return the schemes in DeepSeek's fp8 format."""
    if (elements := config.get("fmt", "e4m3")) not in ("e4m3", "float8_e4m3fn"):
        raise CheckpointError(f"the fmt of fp8 checkpoints must be 'e4m3', got {elements!r}")
    block, activations = config.get("weight_block_size"), config.get("activation_scheme", "dynamic")
    if activations not in ("dynamic", "static"):
        raise CheckpointError(f"the activation_scheme of fp8 must be 'dynamic' or 'static', got {activations!r}")
    is_dynamic = activations == "dynamic"
    if block is None:
        tensors = PLAIN_SCALED if is_dynamic else (*PLAIN_SCALED, *INPUT)
        scheme = Scheme("fp8", "e4m3", "plain", tensors, activation=Activation("e4m3", None, is_dynamic))
    else:
        block_rows, columns = map(int, block)
        if not is_dynamic:
            raise CheckpointError("the activation_scheme of fp8 by blocks must be 'dynamic', got 'static'")
        blocks: Suffixes = (("elements", "weight"), ("scale", "weight_scale_inv"))
        activation = Activation("e4m3", columns, dynamic=True)
        scheme = Scheme("fp8 by blocks", "e4m3", "plain", blocks, columns, block_rows, activation=activation)
    # DeepSeek-V3's projection for multi-token prediction is unquantised, but in no list.
    names = ["eh_proj", *(config.get("modules_to_not_convert") or ()), *(config.get("ignored_layers") or ())]
    return Schemes("fp8", (*map(_left_out, names), _HEAD, Rule(_LINEAR, scheme)))


def _left_out(name: str) -> Rule:
    """Return a rule that leaves modules unquantised whose dotted name contains `name`, which may end in a dot."""
    return Rule(rf"(.*\.)?{re.escape(name.strip('.'))}(\..*)?$", None)


# gpt-oss, in which only the experts are quantised


def _mxfp4(config: Mapping[str, Any]) -> Schemes:
    """Return the schemes in gpt-oss' format."""
    tensors: Suffixes = (("elements", "_blocks"), ("scale", "_scales"))
    scheme = Scheme("mxfp4", "e2m1", "nibbles", tensors, 32, scale_dtype=E8M0, stacked=True)
    ignored = [Rule(_glob(name), None) for name in config.get("modules_to_not_convert") or ()]
    return Schemes("mxfp4", (*ignored, Rule(r".*\.experts\.(gate_up|down)_proj$", scheme)))


# ModelOpt


def _modelopt(config: Mapping[str, Any]) -> Schemes:
    """Return the schemes in ModelOpt's formats: one for all modules, or one per listed module."""
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
    """Convert a name with `*` to a pattern for the modules that it matches, and for their submodules."""
    return rf"(?:{fnmatch.translate(name)}|{re.escape(name)}\..*)"


def _modelopt_scheme(algorithm: str, config: Mapping[str, Any], where: str) -> Scheme:
    """Return the scheme for one of ModelOpt's algorithms.

    Args:
        algorithm: `quant_algo`.
        config: settings for all modules, or for one.
        where: modules, for the error.
    """
    algorithm = algorithm.upper()  # ModelOpt writes some names in lower case
    name = f"modelopt {algorithm}"
    if algorithm == "FP8":
        tensors = (*PLAIN_SCALED, *INPUT)
        return Scheme(name, "e4m3", "plain", tensors, activation=Activation("e4m3", None, dynamic=False))
    if algorithm == "FP8_PER_CHANNEL_PER_TOKEN":
        return Scheme(name, "e4m3", "plain", PLAIN_SCALED, activation=Activation("e4m3", None, dynamic=True))
    if algorithm == "FP8_PB_WO":
        return Scheme(name, "e4m3", "plain", PLAIN_SCALED, int(config.get("group_size") or 128), 128)
    if algorithm in ("MXFP4", "MXFP8"):
        elements: Literal["e2m1", "e4m3"] = "e2m1" if algorithm == "MXFP4" else "e4m3"
        packing: Packing = "nibbles" if algorithm == "MXFP4" else "plain"
        groups = (config.get("config_groups") or {}).values()
        are_plain = bool(groups) and all(group.get("input_activations") is None for group in groups)
        inputs = None if are_plain else Activation(elements, 32, dynamic=True, power_of_two=True)
        return Scheme(name, elements, packing, PLAIN_SCALED, 32, scale_dtype="bfloat16", activation=inputs)
    if algorithm in ("NVFP4", "W4A16_NVFP4"):
        group = int(config.get("group_size") or 16)
        inputs = Activation("e2m1", group, dynamic=False) if algorithm == "NVFP4" else None
        tensors = (*PLAIN_SCALED, ("global_scale", "weight_scale_2"), *(INPUT if inputs else ()))
        return Scheme(name, "e2m1", "nibbles", tensors, group, scale_dtype=E4M3, activation=inputs)
    if algorithm in ("W4A16_AWQ", "INT4_AWQ"):
        if config.get("has_zero_point"):
            raise refusal("weights of W4A16_AWQ must come without zero points", "has_zero_point", where)
        tensors = (*PLAIN_SCALED, ("input_factor", "pre_quant_scale"))
        return Scheme(name, "int4", "row_nibbles", tensors, int(config.get("group_size") or 128))
    known = "FP8, FP8_PER_CHANNEL_PER_TOKEN, FP8_PB_WO, MXFP4, MXFP8, NVFP4, W4A16_NVFP4, W4A16_AWQ or MIXED_PRECISION"
    raise refusal(f"the quant_algo of ModelOpt must be {known}", algorithm, where)


# GPTQ and AWQ

_INT4_SCALED: Suffixes = (("elements", "qweight"), ("scale", "scales"), ("zero", "qzeros"))


def _gptq(config: Mapping[str, Any]) -> Schemes:
    """Return the schemes in GPTQ's format: exceptional modules first, then all others."""
    version = str(config.get("checkpoint_format") or "gptq")
    if version not in ("gptq", "gptq_v2"):
        raise CheckpointError(f"the checkpoint_format of GPTQ must be 'gptq' or 'gptq_v2', got {version!r}")
    rules = _changed(config, partial(_gptq_scheme, version=version))
    for pattern, changes in (config.get("dynamic") or {}).items():
        scheme = None if pattern.startswith("-:") else _gptq_scheme({**config, **changes}, pattern, version)
        rules.append(Rule(pattern.removeprefix("-:").removeprefix("+:"), scheme))
    head = () if config.get("lm_head") else (_HEAD,)
    names = config.get("modules_to_not_convert") or ()
    common = _inside_blocks(config, _gptq_scheme(config, "all modules", version))
    return Schemes("gptq", (*rules, *map(_left_out, names), *head, *common))


def _inside_blocks(config: Mapping[str, Any], scheme: Scheme) -> list[Rule]:
    """Return the rules for linear modules; if the config lists modules per block, only for these."""
    listed = config.get("modules_in_block_to_quantize")
    if not listed:
        return [Rule(_LINEAR, scheme)]
    names = [name for part in listed for name in ([part] if isinstance(part, str) else part)]
    return [Rule(rf".*\b(?:{'|'.join(map(re.escape, names))})$", scheme)]


def _changed(config: Mapping[str, Any], scheme: Callable[[Mapping[str, Any], str], Scheme]) -> list[Rule]:
    """Return the rules for modules with settings of their own in AutoRound's config: first names, then name patterns.

    Args:
        config: quantization_config.
        scheme: function from a module's settings and name to its scheme.
    """
    names, patterns = list[Rule](), list[Rule]()
    for name, changes in (config.get("extra_config") or {}).items():
        merged = {**config, **changes}
        is_pattern = re.search(r"[^\w.-]", name) is not None
        rule = Rule(
            rf".*?(?:{name})" if is_pattern else f"{re.escape(name)}$",
            None if (merged.get("bits") or 16) >= 16 else scheme(merged, name),
        )
        (patterns if is_pattern else names).append(rule)
    return names + patterns


def _gptq_scheme(config: Mapping[str, Any], where: str, version: str) -> Scheme:
    """Return GPTQ's scheme for these settings; `where` names modules for the error."""
    elements = _int_elements("GPTQ", config, (4, 8), where)
    group = _group(config)
    tensors = (*_INT4_SCALED, ("order", "g_idx")) if config.get("desc_act") and group is not None else _INT4_SCALED
    return Scheme(version, elements, "gptq", tensors, group, zero_offset=0 if version == "gptq_v2" else 1)


def _awq(config: Mapping[str, Any]) -> Schemes:
    """Return the schemes in AWQ's format: exceptional modules first, then all others."""
    version = config.get("version") or config.get("checkpoint_format") or config.get("format") or "gemm"
    if (version := str(version).lower()) != "gemm":
        raise CheckpointError(f"the version of AWQ must be 'gemm', got {version!r}")
    rules = _changed(config, _awq_scheme)
    names = config.get("modules_to_not_convert") or ()
    common = _inside_blocks(config, _awq_scheme(config, "all modules"))
    return Schemes("awq", (*rules, *map(_left_out, names), _HEAD, *common))


def _awq_scheme(config: Mapping[str, Any], where: str) -> Scheme:
    """Return AWQ's scheme for these settings; `where` names modules for the error."""
    return Scheme("awq", _int_elements("AWQ", config, (4,), where), "awq", _INT4_SCALED, _group(config))


def _auto_round(config: Mapping[str, Any]) -> Schemes:
    """Return the schemes in AutoRound's format, which packs elements as GPTQ or AWQ does."""
    packing = str(config.get("packing_format", ""))
    if packing not in ("auto_round:auto_gptq", "auto_round:auto_awq"):
        raise CheckpointError(
            f"the packing_format of auto-round must be 'auto_round:auto_gptq' or 'auto_round:auto_awq', got {packing!r}"
        )
    schemes = _gptq(config) if packing.endswith("gptq") else _awq(config)
    return dataclasses.replace(schemes, method="auto-round")


def _int_elements(tool: str, config: Mapping[str, Any], allowed: Sequence[int], where: str) -> Elements:
    """Return the element type for a tool's number of bits; CheckpointError if it is not among `allowed`."""
    bits = config.get("bits", config.get("w_bit", 4))
    if bits not in allowed:
        raise refusal(f"weights of {tool} must have {' or '.join(map(str, allowed))} bits", f"{bits} bits", where)
    return "int4" if bits == 4 else "int8"


def _group(config: Mapping[str, Any]) -> int | None:
    """Return the number of columns that share a scale; None for all."""
    size = int(config.get("group_size", config.get("q_group_size", 128)))
    return None if size == -1 else size


# GGUF, whose types `gguf_store` records

_MINIMUM: Suffixes = (("minimum", "weight_minimum"),)
GGUF_SCHEMES: Mapping[str, Scheme] = {
    "Q8_0": Scheme("gguf Q8_0", "int8", "plain", PLAIN_SCALED, 32, scale_dtype="float16"),
    "Q4_0": Scheme("gguf Q4_0", "int4", "nibbles", PACKED_SCALED, 32, scale_dtype="float16"),
    "Q5_0": Scheme("gguf Q5_0", "int8", "plain", PLAIN_SCALED, 32, scale_dtype="float16"),
    "Q4_1": Scheme("gguf Q4_1", "int4", "nibbles", (*PACKED_SCALED, *_MINIMUM), 32),
    "Q5_1": Scheme("gguf Q5_1", "int8", "plain", (*PLAIN_SCALED, *_MINIMUM), 32),
    "Q2_K": Scheme("gguf Q2_K", "int4", "nibbles", (*PACKED_SCALED, *_MINIMUM), 16),
    "Q3_K": Scheme("gguf Q3_K", "int4", "nibbles", PACKED_SCALED, 16),
    "Q4_K": Scheme("gguf Q4_K", "int4", "nibbles", (*PACKED_SCALED, *_MINIMUM), 32),
    "Q5_K": Scheme("gguf Q5_K", "int8", "plain", (*PLAIN_SCALED, *_MINIMUM), 32),
    "Q6_K": Scheme("gguf Q6_K", "int8", "plain", PLAIN_SCALED, 16),
}


def _gguf(config: Mapping[str, Any]) -> Schemes:
    """Return the schemes for modules that `gguf_store` lists by type."""
    rules = []
    for type_name, names in config["types"].items():
        if type_name not in GGUF_SCHEMES:
            raise CheckpointError(f"the types of GGUF must be of {', '.join(GGUF_SCHEMES)}, got {type_name!r}")
        patterns = (re.escape(name).replace(r"\*", r"\d+") for name in names)  # * stands for the expert index
        rules.append(Rule(f"(?:{'|'.join(patterns)})$", GGUF_SCHEMES[type_name]))
    return Schemes("gguf", tuple(rules))


METHODS: dict[str, Callable[[Mapping[str, Any]], Schemes]] = {
    "compressed-tensors": read_compressed_tensors,
    "fp8": _fp8,
    "mxfp4": _mxfp4,
    "modelopt": _modelopt,
    "gptq": _gptq,
    "awq": _awq,
    "auto-round": _auto_round,
    "gguf": _gguf,
}
