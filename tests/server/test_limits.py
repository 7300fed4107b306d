"""Rate limits, timeouts and the ladder of degradation, in virtual time."""

import copy
import math
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxserve.errors import ConfigError
from jaxserve.openai.errors import BadRequestError
from jaxserve.server.admission import exceeds_fair_share
from jaxserve.server.auth import Keys
from jaxserve.server.config import ServerConfig
from jaxserve.server.degradation import BAND, DWELL_S, RUNGS, Ladder, threshold
from jaxserve.server.rate_limits import Limits, RateLimits, TokenBucket
from jaxserve.server.request_classes import allowed_priority
from jaxserve.server.timeouts import read_timeouts
from tests.random_runs import examples

ARRIVALS = st.lists(st.tuples(st.floats(0, 40), st.integers(1, 70)), max_size=25)


@settings(deadline=None, max_examples=examples(25))
@given(ARRIVALS, st.integers(1, 60))
def test_a_bucket_is_a_sliding_window_at_all_scales(arrivals: list[tuple[float, int]], size: int) -> None:
    """An amount is given exactly if, for every span that ends now, no more than size and inflow is given in it."""
    bucket, now_s = TokenBucket(size, 0.0), 0.0
    given_at: list[tuple[float, int]] = []
    for gap_s, amount in arrivals:
        now_s += gap_s
        spans = [0.0, *(at_s for at_s, _ in given_at)] if given_at else [now_s]
        slack = min(
            size + (now_s - since_s) * size / 60 - amount - sum(taken for at_s, taken in given_at if at_s >= since_s)
            for since_s in [*spans, now_s]
        )
        wait_s = bucket.take(amount, now_s)
        if abs(slack) > 1e-6:
            assert (wait_s == 0) == (slack > 0)
        if not wait_s:
            given_at.append((now_s, amount))
        elif wait_s < math.inf:
            later = copy.copy(bucket)
            assert later.wait_s(amount, now_s + wait_s * 0.99) > 0 or wait_s < 1e-3
            assert later.wait_s(amount, now_s + wait_s + 1e-6) == 0
        else:
            assert amount > size


def test_tokens_that_were_not_used_come_back_and_others_are_owed() -> None:
    bucket = TokenBucket(60, 0.0)
    assert bucket.take(50, 0.0) == 0
    bucket.settle(50, 20, 0.0)
    assert bucket.content(0.0) == 40
    bucket.settle(0, 70, 0.0)
    assert bucket.wait_s(1, 0.0) == pytest.approx(31)
    bucket.settle(500, 0, 0.0)
    assert bucket.content(0.0) == 60


def test_limits_of_tenants() -> None:
    limits = RateLimits(Limits(2, 100, 4), {"big": Limits(tokens_per_minute=1000)})
    assert limits.take("a", 90, 0.0) is None
    excess = limits.take("a", 20, 0.0)
    assert excess is not None
    assert (excess.kind, excess.most, excess.wait_s) == ("tokens", 100, pytest.approx(6.0))
    assert limits.take("a", 5, 0.0) is None
    assert getattr(limits.excess("a", 0, 0.0), "kind", None) == "requests"
    assert limits.take("big", 900, 0.0) is None
    assert limits.tenant_limits("big") == Limits(2, 1000, 4)
    headers = dict(limits.headers("a", 0.0))
    assert headers[b"x-ratelimit-limit-requests"] == b"2"
    assert headers[b"x-ratelimit-remaining-requests"] == b"0"
    assert headers[b"x-ratelimit-reset-requests"] == b"1m0s"
    assert headers[b"x-ratelimit-remaining-tokens"] == b"5"
    assert RateLimits(Limits()).headers("a", 0.0) == []


def test_limits_behind_keys(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    own = "requests_per_minute=60 max_open_requests=2"
    file.write_text(f"acme:k1 {own}\nacme:k2 {own}\nb:k3\n")
    assert Keys.read((), file).limits == {"acme": Limits(60, None, 2)}
    assert Keys.read((), file).tenant([(b"x-api-key", b"k2")]) == "acme"
    for text in ("a:k1 x=1", "a:k1 requests_per_minute=-1", "a:k1 requests_per_minute=1\na:k2"):
        file.write_text(text)
        with pytest.raises(ConfigError):
            Keys.read((), file)


def test_timeouts_are_read_from_what_clients_and_gateways_send() -> None:
    assert read_timeouts([], {}, streams=True) == (math.inf, math.inf)
    assert read_timeouts([(b"x-stainless-read-timeout", b"600")], {}, streams=False) == (600, 600)
    assert read_timeouts([(b"x-stainless-read-timeout", b"600")], {}, streams=True) == (math.inf, 600)
    both = [(b"x-litellm-timeout", b"20"), (b"x-envoy-expected-rq-timeout-ms", b"15000")]
    assert read_timeouts([*both, (b"x-litellm-stream-timeout", b"3")], {}, streams=True) == (15, 3)
    assert read_timeouts([(b"x-litellm-timeout", b"soon")], {}, streams=True) == (math.inf, math.inf)
    assert read_timeouts(both, {"timeout": 2}, streams=True) == (2, 2)
    for wrong in (0, -1, "1", True, math.nan):
        with pytest.raises(BadRequestError):
            read_timeouts([], {"timeout": wrong}, streams=True)


@given(st.lists(st.tuples(st.floats(0, 1.5), st.floats(0.01, 2)), max_size=60))
def test_the_ladder_follows_the_load_with_hysteresis(course: list[tuple[float, float]]) -> None:
    ladder, now_s, heights = Ladder(), 0.0, [0]
    fell_s = -math.inf
    for load, gap_s in course:
        now_s += gap_s
        ladder.update(load, now_s)
        assert ladder.on == list(RUNGS[: ladder.height])  # rungs in their order
        assert ladder.height >= sum(load >= threshold(index) for index in range(len(RUNGS)))  # the ladder rises at once
        if ladder.height < heights[-1]:
            assert ladder.height == heights[-1] - 1
            assert load <= threshold(heights[-1] - 1) - BAND
            assert now_s - fell_s >= DWELL_S
            fell_s = now_s
        heights.append(ladder.height)
    for _ in range(40):  # and ends where there is none
        now_s += DWELL_S
        ladder.update(0.0, now_s)
    assert not ladder.on


def test_rungs_are_off_by_option() -> None:
    ladder = Ladder(ServerConfig(degradation=["coalesce", "shed"]).enabled_degradation)
    ladder.update(2.0, 0.0)
    assert ladder.on == ["coalesce", "shed"]
    assert not ladder.has("extras")
    assert ladder.num_climbs["extras"] == 0
    assert not ServerConfig(degradation=["none"]).enabled_degradation
    with pytest.raises(ConfigError, match="degradation"):
        ServerConfig(degradation=["all"])


@pytest.mark.parametrize("name", ["body_timeout_s", "send_timeout_s", "stuck_after_s", "shutdown_timeout_s"])
def test_times_may_be_infinite(name: str) -> None:
    assert getattr(ServerConfig(**{name: math.inf}), name) == math.inf
    for wrong in (-math.inf, -1.0, math.nan):
        with pytest.raises(ConfigError, match=f"^{name} must be a"):
            ServerConfig(**{name: wrong})


def test_targets_of_classes() -> None:
    assert ServerConfig(admission_ttft_ms=["500", "1=2000"]).ttft_targets_s == {None: 0.5, 1: 2.0}
    for wrong in ("x", "1=", "-5"):
        with pytest.raises(ConfigError, match="admission_ttft_ms"):
            ServerConfig(admission_ttft_ms=[wrong])


def test_shares_of_tenants() -> None:
    assert not exceeds_fair_share({"a": 9}, "a")
    assert exceeds_fair_share({"a": 9, "b": 1}, "a")
    assert not exceeds_fair_share({"a": 9, "b": 1}, "b")
    assert not exceeds_fair_share({"a": 9}, "new")


def test_priorities_are_a_range_of_the_key(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("plain:k1\nurgent:k2 min_priority=-2 max_priority=3\nbatch:k3 min_priority=5 max_priority=9\n")
    limits = RateLimits(Limits(), Keys.read((), file).limits)
    allowed = {"plain": [0], "urgent": [-2, 0, 3], "batch": [5, 9]}
    refused = {"plain": [-1, 1, -(10**6)], "urgent": [-3, 4], "batch": [0, 4, 10]}
    for tenant, priorities in allowed.items():
        assert [allowed_priority(each, limits.tenant_limits(tenant)) for each in priorities] == priorities
        for priority in refused[tenant]:
            with pytest.raises(BadRequestError, match="priority must be in"):
                allowed_priority(priority, limits.tenant_limits(tenant))
    assert [allowed_priority(None, limits.tenant_limits(tenant)) for tenant in allowed] == [None, None, 5]
    for text in ("min_priority=1", "max_priority=-1", "min_priority=x", "min_priority=--1", f"max_priority={10**12}"):
        file.write_text(f"a:k1 {text}\n")
        with pytest.raises(ConfigError):
            Keys.read((), file)
