"""Checkpoint that continues repetitions: each token is followed by the same one as before."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from synthetic import random_model

TINY = {  # knows 40 tokens
    "vocab_size": 40,
    "hidden_size": 128,
    "intermediate_size": 8,
    "num_hidden_layers": 4,
    "num_attention_heads": 1,
    "num_key_value_heads": 1,
    "head_dim": 128,
    "rope_theta": 1e9,
    "max_position_embeddings": 512,
}
HALF_BILLION = random_model.HALF_BILLION | {  # knows 20 tokens
    "head_dim": 64,
    "rope_theta": 1e12,
    "max_position_embeddings": 4096,
}


def num_codes(sizes: Mapping[str, Any]) -> int:
    """Return the number of tokens that the model knows, from 0 on: their codes take the slow pairs of a head."""
    return int(sizes["head_dim"] * 5 // 16)


def write_copying_model(directory: Path, sizes: Mapping[str, Any] = TINY) -> Path:
    """Write a Llama in float32 without a tokenizer, and return its directory.

    A head of the second layer copies each token's predecessor, and one of the third finds a token's successor:
    induction heads ([Olsson et al. 2022](https://arxiv.org/abs/2209.11895)). All else is zero, which takes as long as
    other values. Codes are one-hot.
    """
    N, H, D = num_codes(sizes), sizes["head_dim"], sizes["hidden_size"]
    current, previous, constant, following = 0, N, 2 * N, 2 * N + 1  # offsets in hidden states
    codes = np.eye(N, dtype=np.float32)
    embed, head = np.zeros((2, sizes["vocab_size"], D), np.float32)
    embed[:N, current : current + N] = codes
    embed[:N, constant] = 1
    head[:N, following : following + N] = codes
    arrays = {"model.embed_tokens.weight": embed, "lm_head.weight": head, "model.norm.weight": np.ones(D)}
    speeds = sizes["rope_theta"] ** (-np.arange(H // 2) / (H // 2))
    slow = H // 2 - N + np.arange(N)
    num_queries, num_keys = (sizes[f"num_{name}_heads"] * H for name in ("attention", "key_value"))
    for layer in range(sizes["num_hidden_layers"]):
        q, (k, v) = np.zeros((num_queries, D), np.float32), np.zeros((2, num_keys, D), np.float32)
        o = np.zeros((D, num_queries), np.float32)
        if layer == 1:  # all keys are alike; queries are turned back by one position
            k[: H // 2, constant] = 1
            q[: H // 2, constant], q[H // 2 : H, constant] = 40 * np.cos(speeds), -40 * np.sin(speeds)
            v[:N, current : current + N] = codes
            o[previous : previous + N, :N] = codes
        if layer == 2:
            q[slow, current : current + N] = 100 * codes
            k[slow, previous : previous + N] = codes
            v[:N, current : current + N] = codes
            o[following : following + N, :N] = codes
        block = {"self_attn.q_proj": q, "self_attn.k_proj": k, "self_attn.v_proj": v, "self_attn.o_proj": o}
        inner = sizes["intermediate_size"]
        block |= {f"mlp.{name}_proj": np.zeros((inner, D)) for name in ("gate", "up")}
        block |= {"mlp.down_proj": np.zeros((D, inner))}
        block |= {name: np.ones(D) for name in ("input_layernorm", "post_attention_layernorm")}
        arrays |= {f"model.layers.{layer}.{name}.weight": array for name, array in block.items()}
    directory.mkdir(parents=True, exist_ok=True)
    save_file(
        {name: np.ascontiguousarray(x, np.float32) for name, x in arrays.items()}, directory / "model.safetensors"
    )
    config = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", **sizes}
    config |= {"rms_norm_eps": 1e-6, "tie_word_embeddings": False, "torch_dtype": "float32", "hidden_act": "silu"}
    (directory / "config.json").write_text(json.dumps(config))
    return directory
