"""Prompt tokens that compaction keeps, against golden files of kvpress."""

import json
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.execution.compaction import best_tokens
from jaxserve.scheduling.kv_cache.sparsity import Compaction, Window
from tests.data.attention_weights import attention_weights

GOLDEN = json.loads((Path(__file__).parents[1] / "data" / "kvpress_scores.json").read_text())


@pytest.mark.parametrize("case", GOLDEN["cases"], ids=lambda case: str(case["seed"]))
def test_kept_tokens_are_those_of_kvpress(case: dict) -> None:
    num_tokens, window, num_kept = case["num_tokens"], case["window"], len(case["snapkv"])
    weights = attention_weights(case["seed"], num_tokens, case["num_heads"]).sum(0)
    padded = np.zeros(num_tokens + 7, np.float32)  # keys after the prompt, in its last page
    for name, observed, sparsity in (
        ("snapkv", weights[-window:], Compaction(4, num_kept, window=window)),
        ("observed", weights, Compaction(4, num_kept, observes_all=True, window=0)),
    ):
        padded[:num_tokens] = observed.sum(0)
        kept = best_tokens(jnp.asarray(padded), sparsity, jnp.int32(num_tokens), jnp.int32(num_kept))
        assert kept[:num_kept].tolist() == case[name], name
        assert (kept[num_kept:] >= num_tokens).all()


@pytest.mark.parametrize("case", GOLDEN["cases"], ids=lambda case: str(case["seed"]))
def test_tokens_in_the_window_are_those_of_kvpress(case: dict) -> None:
    num_tokens, num_kept = case["num_tokens"], len(case["streaming_llm"])
    window = Window(1, num_kept + 1, num_sink_pages=4)  # pages of one token, and the new one
    first = 4 + window.num_hidden(num_tokens, num_tokens)
    assert [*range(4), *range(first, num_tokens)] == case["streaming_llm"]
