"""Random checkpoints with small language models' sizes, for measuring."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax.numpy as jnp

from jaxserve import weights
from jaxserve.models.registry import from_hf_config, param_specs

SMALL = {  # 110.9M parameters
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 8192,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "tie_word_embeddings": True,
}
HALF_BILLION = {  # 365.2M parameters: Qwen2.5-0.5B's layers, with a smaller vocabulary
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 8192,
    "hidden_size": 896,
    "intermediate_size": 4864,
    "num_hidden_layers": 24,
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
    "tie_word_embeddings": True,
}


def write_random_model(directory: Path, dtype: str = "float32", sizes: Mapping[str, Any] = SMALL) -> Path:
    """Write the checkpoint without a tokenizer, and return its directory."""
    specs = param_specs(from_hf_config(sizes))
    weights.save(directory, specs, weights.dummy(specs, 0, jnp.dtype(dtype)), sizes)
    return directory
