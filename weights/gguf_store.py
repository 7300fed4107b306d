"""GGUF files of llama.cpp: metadata in the form of a config.json, and tensors by Hugging Face's names."""

import os
import re
from collections.abc import Callable
from math import inf
from pathlib import Path as FilePath
from typing import Any

import numpy as np

from jaxserve.weights.gguf_blocks import BLOCK_TYPES, BlockTensor, Field, alternating
from jaxserve.weights.gguf_file import AGAIN, FLOATS, GgufFile, GgufTensor, file_of, open_file
from jaxserve.weights.quantized.config import GGUF_SCHEMES
from jaxserve.weights.stored_tensor import HeldTensor, Part, Tensors

_ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}
_ALTERNATING = ("llama",)  # architectures whose rows of queries and keys the converter has reordered
_NEEDED = {
    "block_count": "num_hidden_layers",
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
}
_TOKENS = {"bos_token_id": ("bos",), "eos_token_id": ("eos", "eot")}  # field -> tokens of the metadata
_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_EMBEDDING, _ROPE_FACTORS = "token_embd.weight", "rope_freqs.weight"
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
    if file.architecture not in _ARCHITECTURES:
        raise file.fault(f"be of an architecture in {sorted(_ARCHITECTURES)}", file.architecture)
    if file.get("expert_count"):
        raise file.fault("be of a model without experts", f"{file.get('expert_count')} of them")
    if _EMBEDDING not in file.tensors:
        raise file.fault(f"hold {_EMBEDDING}", f"{len(file.tensors)} other tensors", AGAIN)
    config: dict[str, Any] = {
        "architectures": [_ARCHITECTURES[file.architecture]],
        "model_type": file.architecture,
        "vocab_size": file.tensors[_EMBEDDING].shape[0],
        "attention_bias": "blk.0.attn_output.bias" in file.tensors,
        "mlp_bias": "blk.0.ffn_up.bias" in file.tensors,
        **{field: _number(file, key, int) for key, field in _NEEDED.items()},
        "rms_norm_eps": _number(file, "attention.layer_norm_rms_epsilon", float),
    }
    if config["num_hidden_layers"] > len(file.tensors):
        raise file.fault(f"hold {config['num_hidden_layers']} layers", f"{len(file.tensors)} tensors", AGAIN)
    config["num_key_value_heads"] = _number(file, "attention.head_count_kv", int, config["num_attention_heads"])
    config["head_dim"] = head_size = _head_size(file)
    config["rope_parameters"] = _rope(file, head_size)
    config["partial_rotary_factor"] = _number(file, "rope.dimension_count", int, head_size) / head_size
    for field, tokens in _TOKENS.items():
        ids = [file.metadata.get(f"tokenizer.ggml.{token}_token_id") for token in tokens]
        known = list(dict.fromkeys(token_id for token_id in ids if token_id is not None))
        config[field] = known[0] if len(known) == 1 else known or None
    kinds = [t.kind for t in file.tensors.values() if len(t.shape) == 2 and t.kind in FLOATS]
    stored = [FLOATS[kind].name for kind in FLOATS if kind in kinds]
    config["dtype"] = stored[0] if stored else "bfloat16"  # activations of models whose matrices are all quantised
    if modules := _quantised(file):
        config["quantization_config"] = {"quant_method": "gguf", "types": modules}
    return config


def open_tensors(path: FilePath) -> Tensors:
    """Return every tensor by name, still unread: those of a quantised matrix by the suffixes of its scheme."""
    file = open_file(path)
    head_size = _head_size(file) if file.architecture in _ALTERNATING else None
    tensors: dict[str, Part] = {}
    for name, tensor in file.tensors.items():
        if name != _ROPE_FACTORS:
            is_rotated = re.fullmatch(r"blk\.\d+\.attn_[qk]\.(weight|bias)", name)
            own = head_size if is_rotated else None
            if own is not None and tensor.shape[0] % own:
                raise file.fault(f"have heads of {own} rows in {name}", f"{tensor.shape[0]} rows", AGAIN)
            tensors |= _parts(_hf_name(name), tensor, own)
    return tensors


def _parts(name: str, tensor: GgufTensor, head_size: int | None) -> dict[str, Part]:
    """Return a tensor by its names: itself, or what its blocks hold."""
    if tensor.kind in FLOATS:
        floats = tensor.floats()
        if head_size is None:
            return {name: floats}
        if floats.ndim == 1:
            return {name: HeldTensor(np.array(floats)[alternating(np.arange(len(floats)), head_size)])}
        dtype = floats.dtype
        blocks = floats.view(np.uint8).reshape(*floats.shape, dtype.itemsize)
        return {name: BlockTensor.of(blocks, Field(1, dtype, lambda block: block.view(dtype)), head_size)}
    kind = BLOCK_TYPES[tensor.kind]
    blocks = tensor.data.reshape(len(tensor.data), -1, kind.num_bytes)
    module = name.removesuffix(".weight")
    return {
        f"{module}.{suffix}": BlockTensor.of(blocks, kind.fields[role], head_size)
        for role, suffix in GGUF_SCHEMES[tensor.kind].tensors
    }


def _hf_name(name: str) -> str:
    """Return the name of a tensor in Hugging Face's models; the same if it has none."""
    match = re.fullmatch(r"(?:blk\.(\d+)\.)?(\w+)\.(weight|bias)", name)
    if match is None or match[2] not in _NAMES:
        return name
    layer = "" if match[1] is None else f"model.layers.{match[1]}."
    return f"{layer}{_NAMES[match[2]]}.{match[3]}"


def _quantised(file: GgufFile) -> dict[str, list[str]]:
    """Return the names of the modules of each quantised type."""
    modules: dict[str, list[str]] = {}
    for name, tensor in sorted(file.tensors.items()):
        if tensor.kind not in FLOATS:
            modules.setdefault(tensor.kind, []).append(_hf_name(name).removesuffix(".weight"))
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
