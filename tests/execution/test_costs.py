"""Attention costs against a count of every pair."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from jaxserve.scheduling.kv_cache.sparsity import Choice, Window
from jaxserve.scheduling.step_costs import TokenChoice, attention_cost

shares = st.lists(st.tuples(st.integers(0, 40), st.integers(1, 20)), min_size=1, max_size=5)
windows = st.lists(st.sampled_from([None, 1, 2, 7, 30, 100]), min_size=1, max_size=4)


def visible(position: int, window: int | None) -> range:
    return range(0 if window is None else max(0, position - window + 1), position + 1)


@given(shares, windows)
def test_every_pair_counts_once(shares: list[tuple[int, int]], windows: list[int | None]) -> None:
    start, num_tokens = np.array(shares).T
    cost = attention_cost(start, num_tokens, windows)
    num_scores = num_kv_tokens = 0
    for window in windows:
        for start, count in shares:
            keys = [visible(position, window) for position in range(start, start + count)]
            num_scores += sum(map(len, keys))
            num_kv_tokens += len(set().union(*keys)) + count  # each read once, new ones written
    assert cost == (num_scores, num_kv_tokens)


@given(shares, windows, st.integers(1, 5))
def test_steps_add_up(shares: list[tuple[int, int]], windows: list[int | None], num_steps: int) -> None:
    start, num_tokens = np.array(shares).T
    steps = [(start + index * num_tokens, num_tokens) for index in range(num_steps)]
    together = attention_cost(*(np.stack(column) for column in zip(*steps, strict=True)), windows)
    assert together == tuple(map(sum, zip(*(attention_cost(*step, windows) for step in steps), strict=True)))
    assert together.num_scores == attention_cost(start, num_tokens * num_steps, windows).num_scores


def test_output_tokens_read_their_budget() -> None:
    """With pages of 16 tokens: a chunk reads all, a token the pages that it sees, and the bounds of all others."""
    start, num_tokens = np.array([0, 1000, 40]), np.array([100, 1, 1])
    windows = [None] * 4 + [64]
    dense = [int((start + 2 * num_tokens)[row]) for row in range(3)]
    sliding = 100 + 100 + 64 + 1 + 41 + 1
    window = attention_cost(start, num_tokens, windows, Window(16, 256, num_sink_pages=1))
    seen = 1001 - (63 - 16) * 16  # page 62 sees 16 pages: page 0 and 48 to 62
    assert window.num_kv_tokens == 4 * (dense[0] + seen + 1 + dense[2]) + sliding
    choice = attention_cost(start, num_tokens, windows, Choice(16, 256))
    chosen = 15 * 16 + 9
    assert choice.num_kv_tokens == 2 * sum(dense) + 2 * (dense[0] + chosen + 62 + 1 + dense[2] + 2) + sliding
    assert choice.num_scores < window.num_scores + 2 * 1001


def test_decoding_rows_read_index_keys_and_chosen_latents() -> None:
    """A quarter of a token's bytes is its index key, which rows within the choice do not read."""
    start, num_tokens = np.array([0, 1000, 40, 900]), np.array([50, 1, 1, 100])
    cost = attention_cost(start, num_tokens, [None] * 2, choice=TokenChoice(100, 0.25, 0.5))
    read = 0.75 * 50 + (75 + 0.25 * 1001) + 0.75 * 41 + 1000
    assert cost.num_kv_tokens == 2 * int(read + num_tokens.sum())
    pairs = [50 * 51 // 2, 1001, 41, sum(range(901, 1001))]
    assert cost.num_scores == 2 * int(pairs[0] + (100 + 0.5 * pairs[1]) + pairs[2] + 1.5 * pairs[3])
