"""llama.cpp's GGUF files: metadata as a config.json, and tensors by their Hugging Face names."""

import dataclasses
import os
import re
from collections.abc import Callable, Iterator, Mapping
from math import inf
from pathlib import Path as FilePath
from typing import Any

import numpy as np

from jaxserve.weights.gguf_blocks import BLOCK_TYPES, BlockTensor, Field, alternating
from jaxserve.weights.gguf_file import AGAIN, FLOATS, GgufFile, GgufTensor, find_file, open_file
from jaxserve.weights.gguf_models import GgufModel, find_model
from jaxserve.weights.quantized.config import GGUF_SCHEMES
from jaxserve.weights.stored_tensor import Part, Tensors

_NEEDED = {
    "block_count": "num_hidden_layers",
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
}
_TOKENS = {"bos_token_id": ("bos",), "eos_token_id": ("eos", "eot")}  # field -> metadata tokens
_EMBEDDING, _ROPE_FACTORS = "token_embd.weight", "rope_freqs.weight"
_LONG_FACTORS, _SHORT_FACTORS = "rope_factors_long.weight", "rope_factors_short.weight"
_ROPE_TENSORS = (_ROPE_FACTORS, _LONG_FACTORS, _SHORT_FACTORS)
_QKV = "qkv_proj"
_DEEP_GEMMAS = {
    "gemma2": 46,
    "gemma3": 62,
}  # layers if queries are scaled otherwise, as in llama.cpp
_EXPERT_SIZES = {
    "moe_intermediate_size": "blk.0.ffn_gate_exps.weight",
    "shared_expert_intermediate_size": "blk.0.ffn_gate_shexp.weight",
}
_EXPERT_DEFAULTS = {  # keys that change results, with the values that absence means
    "expert_weights_scale": (0.0, 1.0),
    "expert_gating_func": (0, 1),
    "expert_group_count": (0, 1),
    "attention.clamp_kqv": (0.0,),
}
# Settings of all Llama 3 models; files have only the resulting factors.
_LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


def has_weights(path: FilePath) -> bool:
    """Return whether the path is a GGUF file, or a directory with the files of one model."""
    return find_file(path) is not None


def read_config(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Return the equivalent of config.json for a GGUF file, from its metadata and tensor names.

    Raises:
        CheckpointError: the file is damaged, or the model is not supported.
    """
    file = open_file(path)
    model = find_model(file)
    if _EMBEDDING not in file.tensors:
        raise file.fault(f"hold {_EMBEDDING}", f"{len(file.tensors)} other tensors", AGAIN)
    config: dict[str, Any] = {
        "architectures": [model.architecture],
        "model_type": model.model_type,
        **model.constants,
        "vocab_size": file.tensors[_EMBEDDING].shape[0],
        "attention_bias": "blk.0.attn_output.bias" in file.tensors,
        "mlp_bias": "blk.0.ffn_up.bias" in file.tensors,
        **{field: _number(file, key, int) for key, field in _NEEDED.items()},
        model.epsilon[1]: _number(file, model.epsilon[0], float),
    }
    if config["num_hidden_layers"] > len(file.tensors):
        raise file.fault(f"hold {config['num_hidden_layers']} layers", f"{len(file.tensors)} tensors", AGAIN)
    config["num_key_value_heads"] = _number(file, "attention.head_count_kv", int, config["num_attention_heads"])
    config["head_dim"] = head_size = _head_size(file)
    config["rope_parameters"] = _rope(file, head_size)
    config |= _gemma(file, config) if model.norm_offset else {}
    config |= _phi(file, config) if model.model_type == "phi3" else {}
    config |= _experts(file) if file.get("expert_count") else {}
    config["partial_rotary_factor"] = _number(file, "rope.dimension_count", int, head_size) / head_size
    for field, tokens in _TOKENS.items():
        ids = [file.metadata.get(f"tokenizer.ggml.{token}_token_id") for token in tokens]
        known = list(dict.fromkeys(token_id for token_id in ids if token_id is not None))
        config[field] = known[0] if len(known) == 1 else known or None
    matrices = [tensor for name, tensor in file.tensors.items() if len(tensor.shape) > 1 and "ffn_gate_inp" not in name]
    types = {tensor.type for tensor in matrices}
    # Activations are bfloat16 if all matrices are quantised.
    config["dtype"] = next((dtype.name for name, dtype in FLOATS.items() if name in types), "bfloat16")
    if modules := _quantised(file, model):
        config["quantization_config"] = {"quant_method": "gguf", "types": modules}
    return config


def open_tensors(path: FilePath) -> Tensors:
    """Return the tensors by Hugging Face name, still unread; a quantised matrix has one per suffix of its scheme."""
    file = open_file(path)
    model = find_model(file)
    head_size = _head_size(file) if model.is_interleaved else None
    tensors: dict[str, Part] = {}
    for name, tensor in file.tensors.items():
        if name not in _ROPE_TENSORS:
            is_rotated = re.fullmatch(r"blk\.\d+\.attn_[qk]\.(weight|bias)", name)
            head_rows = head_size if is_rotated else None
            if head_rows is not None and tensor.shape[0] % head_rows:
                raise file.fault(f"have heads of {head_rows} rows in {name}", f"{tensor.shape[0]} rows", AGAIN)
            for hf_name, each in _each_matrix(file, model, name):
                tensors |= _parts(hf_name, each, head_rows)
            if model.norm_offset and name.endswith("norm.weight") and tensor.type in FLOATS:
                tensors[model.hf_name(name)] = np.asarray(tensor.floats(), np.float32) - model.norm_offset
    return tensors


def _each_matrix(file: GgufFile, model: GgufModel, name: str) -> Iterator[tuple[str, GgufTensor]]:
    """Yield a tensor by its Hugging Face name, split into experts or into queries, keys and values if it fuses them."""
    tensor, hf_name = file.tensors[name], model.hf_name(name)
    if "*" in hf_name and len(tensor.shape) == 3:
        for expert in range(tensor.shape[0]):
            matrix = dataclasses.replace(tensor, shape=tensor.shape[1:], data=tensor.data[expert])
            yield hf_name.replace("*", str(expert)), matrix
    elif model.splits_qkv and _QKV in hf_name:
        size, num_heads = _head_size(file), _number(file, "attention.head_count", int)
        num_kv_heads, start = _number(file, "attention.head_count_kv", int, num_heads), 0
        for part, num_rows in zip("qkv", (size * n for n in (num_heads, num_kv_heads, num_kv_heads)), strict=True):
            rows = tensor.data[start : start + num_rows]
            shape, start = (len(rows), *tensor.shape[1:]), start + num_rows
            yield hf_name.replace(_QKV, f"{part}_proj"), dataclasses.replace(tensor, shape=shape, data=rows)
    elif hf_name.endswith("shared_expert_gate.weight") and len(tensor.shape) == 1:
        yield hf_name, dataclasses.replace(tensor, shape=(1, *tensor.shape))
    else:
        yield hf_name, tensor


def _parts(name: str, tensor: GgufTensor, head_size: int | None) -> dict[str, Part]:
    """Return a float tensor by its Hugging Face name, or a quantised one as several tensors: elements, scales, ...

    Args:
        name: Hugging Face name.
        tensor: tensor in the file.
        head_size: rows per head if the file interleaves each head's halves; None if rows are in order.
    """
    if tensor.type in FLOATS:
        floats = tensor.floats()
        if head_size is None:
            return {name: floats}
        if floats.ndim == 1:
            return {name: np.array(floats)[alternating(np.arange(len(floats)), head_size)]}
        dtype = floats.dtype
        blocks = floats.view(np.uint8).reshape(*floats.shape, dtype.itemsize)
        return {name: BlockTensor.from_blocks(blocks, Field(1, dtype, lambda block: block.view(dtype)), head_size)}
    block_type = BLOCK_TYPES[tensor.type]
    blocks = tensor.data.reshape(len(tensor.data), -1, block_type.num_bytes)
    module = name.removesuffix(".weight")
    return {
        f"{module}.{suffix}": BlockTensor.from_blocks(blocks, block_type.fields[role], head_size)
        for role, suffix in GGUF_SCHEMES[tensor.type].tensors
    }


def _quantised(file: GgufFile, model: GgufModel) -> dict[str, list[str]]:
    """Return the names of quantised modules by GGUF type."""
    modules: dict[str, list[str]] = {}
    for name, tensor in sorted(file.tensors.items()):
        if tensor.type not in FLOATS:
            module = model.hf_name(name).removesuffix(".weight")
            parts = [f"{part}_proj" for part in "qkv"] if model.splits_qkv else [_QKV]
            names = [module.replace(_QKV, part) for part in parts] if _QKV in module else [module]
            modules.setdefault(tensor.type, []).extend(names)
    return modules


# Metadata


def _number(file: GgufFile, key: str, convert: Callable[[Any], Any], default: Any = None) -> Any:
    """Return the positive number under the architecture's metadata key, converted by `convert`.

    If the key is absent, return `default`.

    Raises:
        CheckpointError: the value is not a positive number, or the key is absent and there is no default.
    """
    value = file.get(key)
    if value is None and default is not None:
        return default
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < inf:
        raise file.fault(f"have a positive {file.architecture}.{key} in its metadata", value, AGAIN)
    return convert(value)


def _head_size(file: GgufFile) -> int:
    """Return the head size; CheckpointError if it is odd, or keys and values have heads of different sizes."""
    sizes = _number(file, "embedding_length", int), _number(file, "attention.head_count", int)
    size = int(_number(file, "attention.key_length", int, sizes[0] // sizes[1]))
    if (other := file.get("attention.value_length")) not in (None, size):
        raise file.fault("have keys and values of one size", f"{size} and {other}")
    if size <= 0 or size % 2:
        raise file.fault("have heads of an even size", size)
    return size


def _gemma(file: GgufFile, config: Mapping[str, Any]) -> dict[str, Any]:
    """Return config.json fields for Gemma 2 and 3; some are not in the file, but follow from the sizes."""
    name, theta = file.architecture, _number(file, "rope.freq_base_swa", float, 10000.0)
    is_deep = config["num_hidden_layers"] == _DEEP_GEMMAS[name]
    scalar = config["hidden_size"] // config["num_attention_heads"] if is_deep else config["head_dim"]
    fields: dict[str, Any] = {"query_pre_attn_scalar": scalar}
    if name == "gemma2":
        fields["attn_logit_softcapping"] = _number(file, "attn_logit_softcapping", float, 50.0)
        fields["final_logit_softcapping"] = _number(file, "final_logit_softcapping", float, 30.0)
    else:
        local = {"rope_type": "default", "rope_theta": theta}
        fields["rope_parameters"] = {"full_attention": config["rope_parameters"], "sliding_attention": local}
        if file.get("final_logit_softcapping"):
            fields["final_logit_softcapping"] = _number(file, "final_logit_softcapping", float)
    fields["sliding_window"] = _number(file, "attention.sliding_window", int, 4096)
    pattern = file.metadata.get(f"{name}.attention.sliding_window_pattern")
    if isinstance(pattern, list):  # per layer: whether it has a window
        fields["layer_types"] = ["sliding_attention" if each else "full_attention" for each in pattern]
    elif pattern is not None:
        fields["sliding_window_pattern"] = _number(file, "attention.sliding_window_pattern", int)
    return fields


def _phi(file: GgufFile, config: Mapping[str, Any]) -> dict[str, Any]:
    """Return config.json fields for Phi-3: its window, and LongRoPE, whose factors are tensors in the file."""
    window = file.get("attention.sliding_window") or None
    original = _number(file, "rope.scaling.original_context_length", int, config["max_position_embeddings"])
    fields: dict[str, Any] = {"sliding_window": window, "original_max_position_embeddings": original}
    if _LONG_FACTORS in file.tensors or _SHORT_FACTORS in file.tensors:
        rope = {"rope_type": "longrope", "rope_theta": config["rope_parameters"]["rope_theta"]}
        for field, name in (("long_factor", _LONG_FACTORS), ("short_factor", _SHORT_FACTORS)):
            tensor = file.tensors.get(name)
            if tensor is None or tensor.type != "F32" or len(tensor.shape) != 1:
                raise file.fault(f"have a vector of float32 in {name}", tensor and f"{tensor.type} {tensor.shape}")
            rope[field] = tensor.floats().tolist()
        if file.get("rope.scaling.attn_factor") is not None:
            rope["attention_factor"] = _number(file, "rope.scaling.attn_factor", float)
        fields["rope_parameters"] = {**rope, "original_max_position_embeddings": original}
    return fields


def _experts(file: GgufFile) -> dict[str, Any]:
    """Return config.json fields for MoE models; sizes come from the tensors, as early files have no keys for them."""
    for key, allowed in _EXPERT_DEFAULTS.items():
        if (value := file.get(key)) not in (None, *allowed):
            raise file.fault(f"have {file.architecture}.{key} {' or '.join(map(str, allowed))}, or none", value)
    fields = {
        "num_experts": _number(file, "expert_count", int),
        "num_experts_per_tok": _number(file, "expert_used_count", int),
    }
    for field, name in _EXPERT_SIZES.items():
        if (tensor := file.tensors.get(name)) is not None and len(tensor.shape) > 1:
            fields[field] = tensor.shape[-2]
    return fields


def _rope(file: GgufFile, head_size: int) -> dict[str, Any]:
    """Return config.json's `rope_parameters`, from metadata and the tensors with frequency factors."""
    theta = _number(file, "rope.freq_base", float, 10000.0)
    scaling = file.get("rope.scaling.type") or "none"
    factor = _number(file, "rope.scaling.factor", float, file.get("rope.scale_linear") or 1.0)
    if _ROPE_FACTORS in file.tensors:
        return _llama3_rope(file, head_size, theta)
    if scaling == "none" and not file.get("rope.scale_linear"):
        return {"rope_type": "default", "rope_theta": theta}
    rope = {"rope_theta": theta, "factor": factor}
    if original := file.get("rope.scaling.original_context_length"):
        rope["original_max_position_embeddings"] = original
    if scaling in ("none", "linear"):
        return {"rope_type": "linear", **rope}
    others = {key: file.get(f"rope.scaling.{key}") for key in ("yarn_ext_factor", "yarn_log_multiplier")}
    if scaling != "yarn" or any(value is not None for value in others.values()):
        wrong = {key: value for key, value in others.items() if value is not None}
        raise file.fault(
            "scale RoPE by 'linear' or 'yarn' without further factors", f"{scaling!r} {wrong or ''}".strip()
        )
    for field in ("beta_fast", "beta_slow"):
        if (value := file.get(f"rope.scaling.yarn_{field}")) is not None:
            rope[field] = value
    default = 0.1 * float(np.log(factor)) + 1
    # The converter writes transformers' factor, which replaces YaRN's default; the other key scales it.
    attention = _number(file, "rope.scaling.yarn_attn_factor", float, default)
    attention *= _number(file, "rope.scaling.attn_factor", float, 1.0)
    if attention != default:
        rope["attention_factor"] = attention
    return {"rope_type": "yarn", **rope}


def _llama3_rope(file: GgufFile, head_size: int, theta: float) -> dict[str, Any]:
    """Return Llama 3's RoPE scaling, derived from the factor that the file holds for each frequency."""
    tensor = file.tensors[_ROPE_FACTORS]
    if tensor.type != "F32" or tensor.shape != (head_size // 2,):
        raise file.fault(f"have {head_size // 2} float32 in {_ROPE_FACTORS}", f"{tensor.type} {list(tensor.shape)}")
    found = np.array(tensor.floats(), np.float64)
    factor, low, high = max(1.0, float(found.max())), _LLAMA3["low_freq_factor"], _LLAMA3["high_freq_factor"]
    original = _number(file, "rope.scaling.original_context_length", int, _LLAMA3["original_max_position_embeddings"])
    # Turns of each frequency over the original context.
    turns = original * theta ** (-np.arange(0, head_size, 2) / head_size) / (2 * np.pi)
    smooth = np.clip((turns - low) / (high - low), 0, 1)
    if not np.allclose(found, 1 / ((1 - smooth) / factor + smooth), rtol=1e-4):
        raise file.fault(f"have the factors of Llama 3's RoPE in {_ROPE_FACTORS}", np.array2string(found, threshold=8))
    return {
        "rope_type": "llama3",
        "rope_theta": theta,
        "factor": factor,
        **_LLAMA3,
        "original_max_position_embeddings": original,
    }
