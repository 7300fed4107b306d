"""GGUF files of llama.cpp: metadata in the form of a config.json, and tensors by Hugging Face's names."""

import dataclasses
import os
import re
from collections.abc import Callable, Iterator, Mapping
from math import inf
from pathlib import Path as FilePath
from typing import Any

import numpy as np
from jaxserve.weights.gguf_blocks import BLOCK_TYPES, BlockTensor, Field, alternating
from jaxserve.weights.gguf_file import AGAIN, FLOATS, GgufFile, GgufTensor, file_of, open_file
from jaxserve.weights.gguf_models import GgufModel, model_of
from jaxserve.weights.quantized.config import GGUF_SCHEMES
from jaxserve.weights.stored_tensor import Part, Tensors

_NEEDED = {
    "block_count": "num_hidden_layers",
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
}
_TOKENS = {"bos_token_id": ("bos",), "eos_token_id": ("eos", "eot")}  # field -> tokens of the metadata
_EMBEDDING, _ROPE_FACTORS = "token_embd.weight", "rope_freqs.weight"
_LONG_FACTORS, _SHORT_FACTORS = "rope_factors_long.weight", "rope_factors_short.weight"
_ROPE_TENSORS = (_ROPE_FACTORS, _LONG_FACTORS, _SHORT_FACTORS)
_QKV = "qkv_proj"
_DEEP_GEMMAS = {"gemma2": 46, "gemma3": 62}  # layers of the models whose queries are scaled otherwise, as by llama.cpp
_EXPERT_SIZES = {
    "moe_intermediate_size": "blk.0.ffn_gate_exps.weight",
    "shared_expert_intermediate_size": "blk.0.ffn_gate_shexp.weight",
}
_EXPERT_DEFAULTS = {  # values of keys that change results, as they are where a file lacks them
    "expert_weights_scale": (0.0, 1.0),
    "expert_gating_func": (0, 1),
    "expert_group_count": (0, 1),
    "attention.clamp_kqv": (0.0,),
}
# Settings of all Llama 3 models; files have the factors that follow from them instead.
_LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


def has_weights(path: FilePath) -> bool:
    """Return whether there is one file that `open_tensors` reads."""
    return file_of(path) is not None


def read_config(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Return what a config.json of the same model would hold, from the metadata and the names of tensors.

    Raises:
        CheckpointError: the file is damaged, or the model is not supported.
    """
    file = open_file(path)
    model = model_of(file)
    if _EMBEDDING not in file.tensors:
        raise file.fault(f"hold {_EMBEDDING}", f"{len(file.tensors)} other tensors", AGAIN)
    config: dict[str, Any] = {
        "architectures": [model.architecture],
        "model_type": model.model_type,
        **model.facts,
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
    kinds = [tensor.kind for tensor in matrices]
    stored = [FLOATS[kind].name for kind in FLOATS if kind in kinds]
    config["dtype"] = stored[0] if stored else "bfloat16"  # activations of models whose matrices are all quantised
    if modules := _quantised(file, model):
        config["quantization_config"] = {"quant_method": "gguf", "types": modules}
    return config


def open_tensors(path: FilePath) -> Tensors:
    """Return every tensor by name, still unread: those of a quantised matrix by the suffixes of its scheme."""
    file = open_file(path)
    model = model_of(file)
    head_size = _head_size(file) if model.is_alternating else None
    tensors: dict[str, Part] = {}
    for name, tensor in file.tensors.items():
        if name not in _ROPE_TENSORS:
            is_rotated = re.fullmatch(r"blk\.\d+\.attn_[qk]\.(weight|bias)", name)
            own = head_size if is_rotated else None
            if own is not None and tensor.shape[0] % own:
                raise file.fault(f"have heads of {own} rows in {name}", f"{tensor.shape[0]} rows", AGAIN)
            for hf_name, each in _each_matrix(file, model, name):
                tensors |= _parts(hf_name, each, own)
            if model.norm_offset and name.endswith("norm.weight") and tensor.kind in FLOATS:
                tensors[model.hf_name(name)] = np.asarray(tensor.floats(), np.float32) - model.norm_offset
    return tensors


def _each_matrix(file: GgufFile, model: GgufModel, name: str) -> Iterator[tuple[str, GgufTensor]]:
    """Yield a tensor by Hugging Face's name, or each of those that it has there; a gate of shared experts as matrix."""
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
    """Return a tensor by its names: itself, or what its blocks hold."""
    if tensor.kind in FLOATS:
        floats = tensor.floats()
        if head_size is None:
            return {name: floats}
        if floats.ndim == 1:
            return {name: np.array(floats)[alternating(np.arange(len(floats)), head_size)]}
        dtype = floats.dtype
        blocks = floats.view(np.uint8).reshape(*floats.shape, dtype.itemsize)
        return {name: BlockTensor.from_blocks(blocks, Field(1, dtype, lambda block: block.view(dtype)), head_size)}
    kind = BLOCK_TYPES[tensor.kind]
    blocks = tensor.data.reshape(len(tensor.data), -1, kind.num_bytes)
    module = name.removesuffix(".weight")
    return {
        f"{module}.{suffix}": BlockTensor.from_blocks(blocks, kind.fields[role], head_size)
        for role, suffix in GGUF_SCHEMES[tensor.kind].tensors
    }


def _quantised(file: GgufFile, model: GgufModel) -> dict[str, list[str]]:
    """Return the names of the modules of each quantised type."""
    modules: dict[str, list[str]] = {}
    for name, tensor in sorted(file.tensors.items()):
        if tensor.kind not in FLOATS:
            module = model.hf_name(name).removesuffix(".weight")
            parts = [f"{part}_proj" for part in "qkv"] if model.splits_qkv else [_QKV]
            names = [module.replace(_QKV, part) for part in parts] if _QKV in module else [module]
            modules.setdefault(tensor.kind, []).extend(names)
    return modules


# Metadata


def _number(file: GgufFile, key: str, kind: Callable[[Any], Any], default: Any = None) -> Any:
    value = file.get(key)
    if value is None and default is not None:
        return default
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < inf:
        raise file.fault(f"have a positive {file.architecture}.{key} in its metadata", value, AGAIN)
    return kind(value)


def _head_size(file: GgufFile) -> int:
    sizes = _number(file, "embedding_length", int), _number(file, "attention.head_count", int)
    size = int(_number(file, "attention.key_length", int, sizes[0] // sizes[1]))
    if (other := file.get("attention.value_length")) not in (None, size):
        raise file.fault("have keys and values of one size", f"{size} and {other}")
    if size <= 0 or size % 2:
        raise file.fault("have heads of an even size", size)
    return size


def _gemma(file: GgufFile, config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of Gemma 2 and 3, of which files leave out those that follow from the sizes."""
    own, theta = file.architecture, _number(file, "rope.freq_base_swa", float, 10000.0)
    is_deep = config["num_hidden_layers"] == _DEEP_GEMMAS[own]
    scalar = config["hidden_size"] // config["num_attention_heads"] if is_deep else config["head_dim"]
    fields: dict[str, Any] = {"query_pre_attn_scalar": scalar}
    if own == "gemma2":
        fields["attn_logit_softcapping"] = _number(file, "attn_logit_softcapping", float, 50.0)
        fields["final_logit_softcapping"] = _number(file, "final_logit_softcapping", float, 30.0)
    else:
        local = {"rope_type": "default", "rope_theta": theta}
        fields["rope_parameters"] = {"full_attention": config["rope_parameters"], "sliding_attention": local}
        if file.get("final_logit_softcapping"):
            fields["final_logit_softcapping"] = _number(file, "final_logit_softcapping", float)
    fields["sliding_window"] = _number(file, "attention.sliding_window", int, 4096)
    pattern = file.metadata.get(f"{own}.attention.sliding_window_pattern")
    if isinstance(pattern, list):  # of each layer, whether it has a window
        fields["layer_types"] = ["sliding_attention" if each else "full_attention" for each in pattern]
    elif pattern is not None:
        fields["sliding_window_pattern"] = _number(file, "attention.sliding_window_pattern", int)
    return fields


def _phi(file: GgufFile, config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the window of Phi-3, and its LongRoPE, of which a file holds the factors as tensors."""
    window = file.get("attention.sliding_window") or None
    original = _number(file, "rope.scaling.original_context_length", int, config["max_position_embeddings"])
    fields: dict[str, Any] = {"sliding_window": window, "original_max_position_embeddings": original}
    if _LONG_FACTORS in file.tensors or _SHORT_FACTORS in file.tensors:
        rope = {"rope_type": "longrope", "rope_theta": config["rope_parameters"]["rope_theta"]}
        for field, name in (("long_factor", _LONG_FACTORS), ("short_factor", _SHORT_FACTORS)):
            tensor = file.tensors.get(name)
            if tensor is None or tensor.kind != "F32" or len(tensor.shape) != 1:
                raise file.fault(f"have a vector of float32 in {name}", tensor and f"{tensor.kind} {tensor.shape}")
            rope[field] = tensor.floats().tolist()
        if file.get("rope.scaling.attn_factor") is not None:
            rope["attention_factor"] = _number(file, "rope.scaling.attn_factor", float)
        fields["rope_parameters"] = {**rope, "original_max_position_embeddings": original}
    return fields


def _experts(file: GgufFile) -> dict[str, Any]:
    """Return the fields of models with experts, whose sizes are those of the tensors: early files have no others."""
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
    theta = _number(file, "rope.freq_base", float, 10000.0)
    kind = file.get("rope.scaling.type") or "none"
    factor = _number(file, "rope.scaling.factor", float, file.get("rope.scale_linear") or 1.0)
    if _ROPE_FACTORS in file.tensors:
        return _llama3_rope(file, head_size, theta)
    if kind == "none" and not file.get("rope.scale_linear"):
        return {"rope_type": "default", "rope_theta": theta}
    rope = {"rope_theta": theta, "factor": factor}
    if original := file.get("rope.scaling.original_context_length"):
        rope["original_max_position_embeddings"] = original
    if kind in ("none", "linear"):
        return {"rope_type": "linear", **rope}
    others = {key: file.get(f"rope.scaling.{key}") for key in ("yarn_ext_factor", "yarn_log_multiplier")}
    if kind != "yarn" or any(value is not None for value in others.values()):
        wrong = {key: value for key, value in others.items() if value is not None}
        raise file.fault("scale RoPE by 'linear' or 'yarn' without further factors", f"{kind!r} {wrong or ''}".strip())
    for field in ("beta_fast", "beta_slow"):
        if (value := file.get(f"rope.scaling.yarn_{field}")) is not None:
            rope[field] = value
    own = 0.1 * float(np.log(factor)) + 1
    # The converter writes transformers' factor, which replaces YaRN's own; the other one multiplies it.
    attention = _number(file, "rope.scaling.yarn_attn_factor", float, own)
    attention *= _number(file, "rope.scaling.attn_factor", float, 1.0)
    if attention != own:
        rope["attention_factor"] = attention
    return {"rope_type": "yarn", **rope}


def _llama3_rope(file: GgufFile, head_size: int, theta: float) -> dict[str, Any]:
    """Return the scaling of Llama 3, of which a file holds the factor of each frequency."""
    tensor = file.tensors[_ROPE_FACTORS]
    if tensor.kind != "F32" or tensor.shape != (head_size // 2,):
        raise file.fault(f"have {head_size // 2} float32 in {_ROPE_FACTORS}", f"{tensor.kind} {list(tensor.shape)}")
    found = np.array(tensor.floats(), np.float64)
    factor, low, high = max(1.0, float(found.max())), _LLAMA3["low_freq_factor"], _LLAMA3["high_freq_factor"]
    original = _number(file, "rope.scaling.original_context_length", int, _LLAMA3["original_max_position_embeddings"])
    turns = original * theta ** (-np.arange(0, head_size, 2) / head_size) / (2 * np.pi)
    # `turns` are those of each frequency in the original length.
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
