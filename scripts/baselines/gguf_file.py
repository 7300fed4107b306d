"""Write a Llama checkpoint as a float32 GGUF file without a vocabulary: llama.cpp's own converter needs a tokenizer."""

import json
from pathlib import Path

import numpy as np
from gguf import GGUFWriter
from safetensors.numpy import load_file

_TENSORS = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}


def write_gguf(checkpoint: Path, path: Path) -> Path:
    """Write the checkpoint's only shard to `path`, unless it exists."""
    if path.exists():
        return path
    path.parent.mkdir(parents=True, exist_ok=True)
    config = json.loads((checkpoint / "config.json").read_text())
    if config["model_type"] != "llama" or config["rope_parameters"]["rope_type"] != "default":
        raise ValueError(f"the checkpoint must be a Llama with plain rotary positions, got {config['model_type']}")
    partial = path.with_suffix(".partial")
    writer = GGUFWriter(partial, "llama")
    _add_config(writer, config)
    weights = {name: w.astype(np.float32) for name, w in load_file(checkpoint / "model.safetensors").items()}
    writer.add_tensor("token_embd.weight", weights["model.embed_tokens.weight"])
    writer.add_tensor("output_norm.weight", weights["model.norm.weight"])
    writer.add_tensor("output.weight", weights.get("lm_head.weight", weights["model.embed_tokens.weight"]))
    num_heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    for layer in range(config["num_hidden_layers"]):
        for theirs, ours in _TENSORS.items():
            weight = weights[f"model.layers.{layer}.{theirs}.weight"]
            weight = _interleave(weight, num_heads[ours]) if ours in num_heads else weight
            writer.add_tensor(f"blk.{layer}.{ours}.weight", weight)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return partial.rename(path)


def _add_config(writer: GGUFWriter, config: dict) -> None:
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
    writer.add_rope_dimension_count(config["head_dim"])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_tokenizer_model("no_vocab")


def _interleave(weight: np.ndarray, num_heads: int) -> np.ndarray:
    """Reorder rows [heads, 2, H/2] to [heads, H/2, 2]: llama.cpp uses interleaved RoPE, transformers rotates halves."""
    halves = weight.reshape(num_heads, 2, -1, weight.shape[1])
    return np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(weight.shape)  # [out, in]
