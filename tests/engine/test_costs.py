"""Attention costs against a count of every pair."""

from hypothesis import given
from hypothesis import strategies as st

from jaxserve.engine.costs import attention_cost
from jaxserve.engine.scheduler import ScheduledRow
from jaxserve.request import Request, SamplingParams

shares = st.lists(st.tuples(st.integers(0, 40), st.integers(1, 20)), min_size=1, max_size=5)
windows = st.lists(st.sampled_from([None, 1, 2, 7, 30, 100]), min_size=1, max_size=4)


def row(start: int, num_tokens: int) -> ScheduledRow:
    request = Request("r", [0], SamplingParams(), seed=0, max_total_tokens=99)
    return ScheduledRow(request, slot=0, start=start, num_tokens=num_tokens, samples=True, admitted=False)


def visible(position: int, window: int | None) -> range:
    return range(0 if window is None else max(0, position - window + 1), position + 1)


@given(shares, windows)
def test_every_pair_counts_once(shares: list[tuple[int, int]], windows: list[int | None]) -> None:
    cost = attention_cost([row(*share) for share in shares], windows)
    num_scores = num_kv_tokens = 0
    for window in windows:
        for start, count in shares:
            keys = [visible(position, window) for position in range(start, start + count)]
            num_scores += sum(map(len, keys))
            num_kv_tokens += len(set().union(*keys)) + count  # each read once, new ones written
    assert cost == (num_scores, num_kv_tokens)
