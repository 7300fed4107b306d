"""Write kvpress_scores.json: tokens that kvpress keeps, given attention weights; needs `pip install kvpress==0.5.5`.

Attention weights are numpy's for a seed, so that the file holds only sizes and results. kvpress chooses per head,
jaxserve by the mean of these scores over heads. kvpress needs an older transformers, hence an environment of its own:
`python tests/data/kvpress_scores.py`.
"""

import json
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from attention_weights import attention_weights
from kvpress import ObservedAttentionPress, SnapKVPress, StreamingLLMPress

CASES = ((0, 40, 2, 2, 8, 20), (1, 97, 1, 4, 16, 33), (2, 64, 4, 1, 5, 12))  # seed, tokens, K, G, window, kept


def kept(press: Any, num_kv_heads: int, num_groups: int, weights: np.ndarray, num_kept: int) -> list[int]:
    """Return the tokens with the highest mean scores of a press."""
    num_tokens = weights.shape[-1]
    module = SimpleNamespace(config=SimpleNamespace(num_attention_heads=num_groups * num_kv_heads))
    module.config.num_key_value_heads = num_kv_heads
    keys = torch.zeros(1, num_kv_heads, num_tokens, 4)
    scores = press.score(module, torch.zeros(1, num_tokens, 4), keys, keys, torch.tensor(weights)[None], {})
    best = scores[0].double().mean(0).topk(num_kept).indices
    return sorted(best.tolist())


def main() -> None:
    """Write the file next to this script."""
    cases = []
    for seed, num_tokens, K, G, window, num_kept in CASES:
        weights = attention_weights(seed, num_tokens, K * G)
        presses = {
            "snapkv": SnapKVPress(window_size=window, kernel_size=5),
            "observed": ObservedAttentionPress(),
            "streaming_llm": StreamingLLMPress(compression_ratio=1 - num_kept / num_tokens - 1e-9),
        }
        found = {name: kept(press, K, G, weights, num_kept) for name, press in presses.items()}
        cases.append({"seed": seed, "num_tokens": num_tokens, "num_heads": K * G, "window": window, **found})
    content = {"kvpress": version("kvpress"), "cases": cases}
    Path(__file__).with_suffix(".json").write_text(json.dumps(content) + "\n")


if __name__ == "__main__":
    main()
