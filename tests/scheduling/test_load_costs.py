"""Loads that start on arrival, and only if they are faster than computing."""

from simulation import make_request
from tiered import flood, new_tiers

from jaxserve.api.cached_tokens import CachedTokens
from jaxserve.scheduling.request import RequestStatus
from jaxserve.scheduling.step_plan import LoadCosts, StepChoice


def test_a_tier_slower_than_computing_is_not_read():
    """Seven blocks on disk: at 1 ms a token, each takes 4 ms to compute."""
    for page_s, num_cached in ((0.0, 28), (0.0035, 28), (0.0038, 0), (0.004, 0), (1.0, 0)):
        tiers = new_tiers()
        tiers.run("first", range(30))
        flood(tiers)
        tiers.choice = StepChoice(loads=LoadCosts(0.001, [page_s]))
        assert tiers.run("again", range(30)).num_cached_tokens == num_cached, page_s
        tiers.replay()


def test_pages_come_from_the_tiers_that_are_faster_than_computing():
    """The disk has seven blocks, host memory only the first two."""
    cases = ((0.0, 0.0, CachedTokens(host=8, disk=20)), (0.0, 1.0, CachedTokens(host=8)), (1.0, 0.0, CachedTokens()))
    for host_s, disk_s, loaded in cases:
        tiers = new_tiers(tier_pages=(32, 100))
        tiers.run("first", range(30))
        flood(tiers)
        assert tiers.mover.counts["copied"] == 37
        tiers.choice = StepChoice(loads=LoadCosts(0.001, [host_s, disk_s]))
        assert tiers.run("again", range(30)).cached_tokens == loaded
        tiers.replay()


def test_a_load_begins_on_arrival_if_others_do_not_need_the_pages():
    tiers = new_tiers(max_num_seqs=1, num_pages=30)
    tiers.run("first", range(30))
    for index in range(6):
        tiers.run(f"flood {index}", [90 + index] * 40)
    running = tiers.add(make_request("running", [50] * 8, 30))
    tiers.step()
    again = tiers.add(make_request("again", range(30), 2))
    assert again.status is RequestStatus.LOADING
    tiers.end_all()
    assert running.status is not RequestStatus.FINISHED
    tiers.drain()
    assert again.cached_tokens == CachedTokens(disk=28)
    tiers.replay()


def test_an_arrival_is_judged_by_the_last_measured_costs():
    """Plans without waiting requests have no costs; the next request does not read a slow tier because of them."""
    for page_s, status in ((0.0, RequestStatus.LOADING), (1.0, RequestStatus.WAITING)):
        tiers = new_tiers(num_pages=30)
        tiers.run("first", range(30))
        for index in range(6):
            tiers.run(f"flood {index}", [90 + index] * 40)
        tiers.choice = StepChoice(loads=LoadCosts(0.001, [page_s]))
        tiers.add(make_request("running", [50] * 8, 30))
        tiers.step()
        tiers.choice = StepChoice()
        tiers.step()
        again = tiers.add(make_request("again", range(30), 2))
        assert again.status is status
        tiers.drain()
        tiers.replay()
