"""Random checkpoint with a small language model's sizes, for measuring."""

from pathlib import Path

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


def write_random_model(directory: Path, dtype: str = "float32") -> Path:
    """Write the checkpoint without a tokenizer, and return its directory."""
    specs = param_specs(from_hf_config(SMALL))
    weights.save(directory, specs, weights.dummy(specs, 0, jnp.dtype(dtype)), SMALL)
    return directory
