"""Numbers of random examples per test: few in the default run, many with `pytest -m full`."""

import hypothesis

DEFAULT, FULL = "default", "full"
FACTOR = 4  # ratio of many to few


def choose(profile: str) -> None:
    """Set the profile for all tests that are collected from now on."""
    for name, factor in ((DEFAULT, 1), (FULL, FACTOR)):
        hypothesis.settings.register_profile(name, max_examples=50 * factor, deadline=None)
    hypothesis.settings.load_profile(profile)


def are_full() -> bool:
    """Return whether tests marked as full are selected."""
    return hypothesis.settings.get_current_profile_name() == FULL


def examples(few: int) -> int:
    """Return `max_examples` for a test that tries `few` by default, for `@settings(max_examples=examples(25))`."""
    return few * (FACTOR if are_full() else 1)
