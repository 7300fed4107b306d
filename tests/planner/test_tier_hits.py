"""Hits of eviction rules in a tier, and the bound that no rule can exceed."""

from hypothesis import given
from hypothesis import strategies as st

from agentic_cache import Turn
from tier_hits import RULES, Visit, bound, hits, visits

VISITS = st.lists(
    st.builds(
        lambda first, length: Visit([*range(first, first + length)], length, True),
        st.sampled_from([0, 10, 20]),
        st.integers(1, 8),
    ),
    min_size=1,
    max_size=30,
)


@given(visited=VISITS, capacity=st.integers(1, 12))
def test_no_rule_finds_more_than_the_bound(visited: list[Visit], capacity: int) -> None:
    limit = bound(visited, capacity)
    for new in RULES.values():
        assert hits(visited, new(capacity)) <= limit


@given(visited=VISITS)
def test_all_rules_find_everything_in_a_tier_that_holds_everything(visited: list[Visit]) -> None:
    everything = bound(visited, 30)
    assert {hits(visited, new(30)) for new in RULES.values()} == {everything}


def test_conversations_survive_a_flood_of_other_prompts() -> None:
    flood = [Visit([100 * number + page for page in range(20)], 20, False) for number in range(1, 40)]
    chat = Visit([*range(10)], 10, True)
    visited = [
        chat,
        chat,
        chat,
        *(visit for pair in zip(flood[::2], flood[1::2], strict=False) for visit in (*pair, chat)),
    ]
    found = {name: hits(visited, new(40)) for name, new in RULES.items()}
    assert found["LRU"] < 0.2
    assert found["jaxserve"] > 0.9


def test_pages_are_equal_as_long_as_all_tokens_before_them_are() -> None:
    """Two sessions after one system prompt; the second turn's prompt continues the first one's answer."""
    later = Turn([(0, 10), (1, 13)], 1, 1.0)
    first = Turn([(0, 10), (1, 4)], 5, 0.0, later=later)
    one, two, three = visits([first, Turn([(0, 10), (2, 10)], 1, 0.5)], 4)
    assert (len(one.pages), one.num_prompt, len(two.pages), three.num_prompt) == (4, 3, 5, 5)
    assert one.pages == three.pages[:4]
    assert [a == b for a, b in zip(one.pages, two.pages, strict=False)] == [True, True, False, False]
