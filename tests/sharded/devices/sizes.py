"""The model and the engine's sizes that all checks of engines share, so that their programs are compiled once."""

from typing import Any

LAYERS = 2
# Of 2 kv heads, so that 8 devices hold each four times.
MODEL: dict[str, Any] = {
    "num_attention_heads": 8,
    "head_dim": 8,
    "num_hidden_layers": LAYERS,
    "attention_bias": True,
    "mlp_bias": True,
}
SIZES: dict[str, Any] = {
    "max_model_len": 64,
    "max_num_seqs": 4,
    "max_num_batched_tokens": 16,
    "page_size": 4,
    "num_pages": 24,  # four busy rows do not fit, so that preemption is common
    "multi_step": 5,
    "compile_ahead": "minimal",
    "forbid_compiles": True,
    "skip_tokenizer_init": True,
}

MIXTURE: dict[str, Any] = {  # sizes of small mixtures of experts, whose heads and experts four devices share
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 8,
    "num_experts": 8,
    "n_group": 4,
    "num_hidden_layers": 2,
}
SHARD_SIZES = SIZES | {  # sizes of engines with experts; where rows are divided, of each share
    "max_num_seqs": 2,
    "max_num_batched_tokens": 8,
    "num_pages": 20,
    "multi_step": 1,
    "count_expert_tokens": True,
}
