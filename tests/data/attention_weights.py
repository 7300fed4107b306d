"""Random attention weights; kvpress_scores.json has the tokens that kvpress keeps, given these."""

import numpy as np


def attention_weights(seed: int, num_tokens: int, num_heads: int) -> np.ndarray:
    """Return random causal attention weights, [heads, tokens, tokens]."""
    scores = 3 * np.random.default_rng(seed).standard_normal((num_heads, num_tokens, num_tokens))
    weights = np.exp(scores) * np.tri(num_tokens)
    return weights / weights.sum(-1, keepdims=True)
