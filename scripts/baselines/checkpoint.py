"""Random-weight Llama checkpoints for the measured table, written by transformers."""

from pathlib import Path
from typing import Any

SHAPES: dict[str, dict[str, Any]] = {
    "tiny": {  # 15.2M parameters
        "hidden_size": 256,
        "intermediate_size": 1536,
        "num_hidden_layers": 8,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "tie_word_embeddings": False,
    },
    "small": {  # 110.9M parameters
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "tie_word_embeddings": True,
    },
}


def make_checkpoint(shape: str, directory: Path) -> int:
    """Write a float32 checkpoint of the named shape, without a tokenizer; return its parameter count. Needs torch."""
    import torch  # noqa: PLC0415 - only here, and heavy
    from transformers import LlamaConfig, LlamaForCausalLM  # noqa: PLC0415

    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(vocab_size=8192, max_position_embeddings=2048, **SHAPES[shape]))
    model.save_pretrained(directory)
    return sum(parameter.numel() for parameter in model.parameters())
