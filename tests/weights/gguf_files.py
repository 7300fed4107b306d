"""Tiny GGUF files by the gguf package's writer, laid out as llama.cpp's convert_hf_to_gguf.py lays out models."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import transformers
from gguf import GGMLQuantizationType as Type

from tests.checkpoints import build_model
from tests.oracles import torch

# No width is a multiple of 256; on two devices, groups of 32 columns are cut.
SIZES = {"hidden_size": 160, "intermediate_size": 224, "head_dim": 40, "num_attention_heads": 4}
SIZES |= {"num_key_value_heads": 2, "tie_word_embeddings": False}
# All widths are multiples of 256; on two devices, blocks of 256 columns are cut.
WIDE = {**SIZES, "hidden_size": 256, "intermediate_size": 768, "head_dim": 64}
KINDS = {"F32": SIZES, "F16": SIZES, "BF16": SIZES, "Q8_0": SIZES, "Q4_0": SIZES, "Q5_0": SIZES, "Q4_K": WIDE}
KINDS |= {"Q4_1": SIZES, "Q5_1": SIZES, "Q5_K": WIDE, "Q6_K": WIDE, "Q2_K": WIDE, "Q3_K": WIDE}
K_BYTES = {"Q2_K": 84, "Q3_K": 110, "Q4_K": 144, "Q5_K": 176, "Q6_K": 210}  # bytes of a block

NAMES = {
    "mixtral": "llama",
    "qwen2_moe": "qwen2moe",
    "qwen3_moe": "qwen3moe",
    "phi": "phi2",
}  # names of architectures, where others
PERMUTED = ("llama", "mixtral")
Choice = Callable[[str], str]  # function of the name of a matrix that returns its type


def write_gguf(
    path: Path,
    kind: str | Choice,
    seed: int = 0,
    family: str = "llama",
    *,
    metadata: Callable[[gguf.GGUFWriter], object] = lambda _: None,
    change: Callable[[dict[str, Any]], object] = lambda _: None,
    shard_tensors: int = 0,
    **overrides: Any,
) -> transformers.PreTrainedModel:
    """Write a file, and return the model in float32 with the weights that it encodes.

    Args:
        path: the file.
        kind: type of all matrices, or of each.
        seed: seed of the weights.
        family: family of the model.
        metadata: function that writes further metadata.
        change: function that changes the tensors, data and type by name, before they are written.
        shard_tensors: number of tensors of each of several files; 0 for one file.
        overrides: sizes.
    """
    sizes = KINDS[kind] if isinstance(kind, str) else SIZES
    model = build_model(family, seed, **{**sizes, **overrides})
    config, rng = model.config, np.random.default_rng(seed)
    writer = gguf.GGUFWriter(path, NAMES.get(family, family), split_max_tensors=shard_tensors)
    _add_sizes(writer, config)
    ADDED.get(family, lambda *_: None)(writer, config)
    metadata(writer)
    architecture = {arch: key for key, arch in gguf.MODEL_ARCH_NAMES.items()}[NAMES.get(family, family)]
    names = gguf.get_tensor_name_map(architecture, config.num_hidden_layers)
    tensors: dict[str, Any] = {}
    for name, parameter in model.named_parameters():
        if "experts." in name and "shared" not in name:
            tensors |= _experts(name, parameter, kind, rng)
            continue
        own = names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert own is not None
        w = parameter.detach().numpy()
        kept = kind if isinstance(kind, str) else kind(name)
        kept = "F32" if w.ndim == 1 or name.endswith(("mlp.gate.weight", "shared_expert_gate.weight")) else kept
        data, values = encode(w, kept, rng)
        parameter.data = torch.tensor(values)
        if name.endswith("shared_expert_gate.weight"):
            data = data[0]
        if family.startswith("gemma") and name.endswith("norm.weight"):
            data = data + np.float32(1)
        for part, num_heads in (("q_proj", config.num_attention_heads), ("k_proj", config.num_key_value_heads)):
            data = permuted(data, num_heads) if part in name and family in PERMUTED else data
        tensors[own] = data, Type[kept]
    rope = config.rope_parameters
    if rope.get("rope_type") == "llama3":
        tensors["rope_freqs.weight"] = llama3_factors(rope, config.head_dim), Type.F32
    if rope.get("rope_type") == "longrope":
        for which in ("long", "short"):
            tensors[f"rope_factors_{which}.weight"] = np.array(rope[f"{which}_factor"], np.float32), Type.F32
    change(tensors)
    for name, (data, data_kind) in tensors.items():
        writer.add_tensor(name, data, raw_dtype=data_kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return model


def _add_sizes(writer: gguf.GGUFWriter, config: Any) -> None:
    writer.add_vocab_size(config.vocab_size)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    if config.model_type == "phi":
        writer.add_layer_norm_eps(config.layer_norm_eps)
    else:
        writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    writer.add_rope_dimension_count(int(head_dim * (config.rope_parameters.get("partial_rotary_factor") or 1)))
    if config.model_type not in ("phi", "phi3"):
        writer.add_key_length(head_dim)
        writer.add_value_length(head_dim)
    writer.add_eos_token_id(config.eos_token_id)
    rope = config.rope_parameters
    if "full_attention" in rope:
        rope = rope["full_attention"]
    writer.add_rope_freq_base(rope["rope_theta"])
    if rope["rope_type"] in ("linear", "yarn"):
        writer.add_rope_scaling_type(gguf.RopeScalingType(rope["rope_type"]))
        writer.add_rope_scaling_factor(rope["factor"])
    if rope["rope_type"] == "yarn":
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])


def _add_gemma(writer: gguf.GGUFWriter, config: Any) -> None:
    writer.add_sliding_window(config.sliding_window)
    if config.model_type == "gemma2":
        writer.add_attn_logit_softcapping(config.attn_logit_softcapping)
        writer.add_final_logit_softcapping(config.final_logit_softcapping)


def _add_phi(writer: gguf.GGUFWriter, config: Any) -> None:
    writer.add_sliding_window(config.sliding_window or 0)
    writer.add_rope_scaling_orig_ctx_len(config.original_max_position_embeddings)


def _add_experts(writer: gguf.GGUFWriter, config: Any) -> None:
    writer.add_expert_count(getattr(config, "num_local_experts", None) or config.num_experts)
    writer.add_expert_used_count(config.num_experts_per_tok)
    if size := getattr(config, "moe_intermediate_size", None):
        writer.add_expert_feed_forward_length(size)
    if size := getattr(config, "shared_expert_intermediate_size", None):
        writer.add_expert_shared_feed_forward_length(size)


ADDED: dict[str, Callable[[gguf.GGUFWriter, Any], None]] = {
    **dict.fromkeys(("gemma2", "gemma3"), _add_gemma),
    **dict.fromkeys(("mixtral", "qwen2_moe", "qwen3_moe", "olmoe"), _add_experts),
    "phi3": _add_phi,
}


def _experts(name: str, parameter: Any, kind: str | Choice, rng: np.random.Generator) -> dict[str, Any]:
    """Return the tensors of all experts' gate and up, or down, projections, and set what they stand for."""
    kept = kind if isinstance(kind, str) else kind(name)
    matrices = parameter.detach().numpy()
    parts = np.split(matrices, 2, axis=1) if name.endswith("gate_up_proj") else [matrices]
    encoded = [encode(np.ascontiguousarray(part), kept, rng) for part in parts]
    parameter.data = torch.tensor(np.concatenate([values for _, values in encoded], axis=1))
    names, layer = ("gate", "up") if len(parts) == 2 else ("down",), name.split(".")[2]
    return {
        f"blk.{layer}.ffn_{own}_exps.weight": (data, Type[kept]) for own, (data, _) in zip(names, encoded, strict=True)
    }


def encode(w: np.ndarray, kind: str, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Return a matrix as a type stores it, and what it then stands for."""
    data = quantize_k(w, kind, rng) if kind.endswith("_K") else gguf.quants.quantize(w, Type[kind])
    return data, gguf.quants.dequantize(data, Type[kind])


def quantize_k(w: np.ndarray, kind: str, rng: np.random.Generator) -> np.ndarray:
    """Return random blocks of a type that the package only reads; some groups with minima have the scale 0."""
    blocks = rng.integers(0, 256, (len(w), w.shape[1] // 256, K_BYTES[kind]), dtype=np.uint8)
    if kind == "Q2_K":
        blocks[..., 80:82] = halves(rng.uniform(3e-3, 6e-3, blocks.shape[:2]))
        blocks[..., 82:84] = halves(rng.uniform(3e-3, 6e-3, blocks.shape[:2]))
        blocks[:, 0, 0] &= 0xF0  # scale of the first group, whose minimum stays
    elif kind == "Q3_K":
        blocks[..., 108:] = halves(rng.uniform(5e-4, 1e-3, blocks.shape[:2]))
    elif kind != "Q6_K":
        blocks[..., 0:2] = halves(rng.uniform(2e-4, 4e-4, blocks.shape[:2]))
        blocks[..., 2:4] = halves(rng.uniform(1e-3, 4e-3, blocks.shape[:2]))
        blocks[:, 0, 4] &= 0xC0  # scale of the first group, whose minimum stays
    else:
        blocks[..., 208:] = halves(rng.uniform(2e-5, 6e-5, blocks.shape[:2]))
    return blocks.reshape(len(w), -1)


def halves(values: np.ndarray) -> np.ndarray:
    return values.astype(np.float16)[..., None].view(np.uint8)


def permuted(data: np.ndarray, num_heads: int) -> np.ndarray:
    """Return rows in the order of convert_hf_to_gguf.py's `permute`."""
    halved = data.reshape(num_heads, 2, data.shape[0] // num_heads // 2, *data.shape[1:])
    return halved.swapaxes(1, 2).reshape(data.shape)


def llama3_factors(rope: dict[str, Any], head_size: int) -> np.ndarray:
    """Return the factors that convert_hf_to_gguf.py computes."""
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    original, factors = rope["original_max_position_embeddings"], []
    for frequency in rope["rope_theta"] ** (-np.arange(0, head_size, 2) / head_size):
        wavelength = 2 * np.pi / frequency
        smooth = (original / wavelength - low) / (high - low)
        between = 1 / ((1 - smooth) / rope["factor"] + smooth)
        is_short, is_long = wavelength < original / high, wavelength > original / low
        factors.append(1 if is_short else rope["factor"] if is_long else between)
    return np.array(factors, np.float32)


def add_vocabulary(writer: gguf.GGUFWriter, tokens: Sequence[str], merges: Sequence[str]) -> None:
    """Write a byte-level tokenizer with the special tokens 1 and 2."""
    special = (1, 2)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("llama-bpe")
    writer.add_token_list(list(tokens))
    kinds = [gguf.TokenType.CONTROL if i in special else gguf.TokenType.NORMAL for i in range(len(tokens))]
    writer.add_token_types(kinds)
    writer.add_token_merges(list(merges))
    writer.add_bos_token_id(1)
    writer.add_add_bos_token(True)


def fuse_qkv(tensors: dict[str, Any]) -> None:
    """Make one tensor of queries, keys and values, as files of Phi-2's first release have it."""
    for name in [name for name in tensors if ".attn_q." in name]:
        parts = [tensors.pop(name.replace("attn_q", f"attn_{part}")) for part in "qkv"]
        tensors[name.replace("attn_q", "attn_qkv")] = np.concatenate([data for data, _ in parts]), parts[0][1]


def replace(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    """Write another value of a key."""
    del writer.kv_data[0][key]
    add = {str: writer.add_string, int: writer.add_uint32, list: writer.add_array}[type(value)]
    add(key, value)
