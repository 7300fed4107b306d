"""Look-ups of what followed the last tokens of a sequence, against a search in plain Python."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.spec_decode.ngram import find_continuation

CONTEXT = 48
find = jax.jit(find_continuation, static_argnums=(2, 3, 4))


def searched(tokens: list[int], num_tokens: int, max_ngram: int, min_ngram: int) -> list[int]:
    """Return the tokens behind the longest match; of equal ones that with most tokens behind it, then the latest."""
    for length in range(min(max_ngram, len(tokens) - 1), min_ngram - 1, -1):
        ends = [end for end in range(length, len(tokens)) if tokens[end - length : end] == tokens[-length:]]
        if ends:
            end = max(ends, key=lambda end: (min(len(tokens) - end, num_tokens), end))
            return tokens[end : end + num_tokens]
    return []


@pytest.mark.parametrize(("num_tokens", "max_ngram", "min_ngram"), [(1, 1, 1), (4, 3, 2), (8, 5, 5), (4, 2, 1)])
def test_continuations_are_those_of_a_search(num_tokens: int, max_ngram: int, min_ngram: int) -> None:
    rng = np.random.default_rng(num_tokens)
    history = rng.integers(0, rng.integers(1, 5, (256, 1)), (256, CONTEXT)).astype(np.int32)
    last = rng.integers(0, CONTEXT, 256).astype(np.int32)
    token_ids, count = find(jnp.asarray(history), jnp.asarray(last), num_tokens, max_ngram, min_ngram)
    rows = zip(history.tolist(), last.tolist(), np.asarray(token_ids).tolist(), np.asarray(count).tolist(), strict=True)
    for tokens, end, ids, num_found in rows:
        assert ids[:num_found] == searched(tokens[: end + 1], num_tokens, max_ngram, min_ngram)


@pytest.mark.parametrize("period", [1, 2, 3, 7])
def test_a_run_that_repeats_itself_has_all_tokens_drafted(period: int) -> None:
    tokens = np.resize(np.arange(period), CONTEXT).astype(np.int32)
    last = CONTEXT - 9
    token_ids, count = find(jnp.asarray(tokens[None]), jnp.array([last]), 8, 3, 1)
    assert count.tolist() == [8]
    assert token_ids[0].tolist() == tokens[last + 1 : last + 9].tolist()
