"""Several prompts at a time: who starts beside a long one, what each gets of a step, and what pages they take."""

from itertools import count

import pytest
from simulation import Loop, generate_alone, make_request, make_scheduler, starts

from jaxserve.api.config import EngineConfig
from jaxserve.errors import ConfigError
from jaxserve.scheduling.policy import Policy
from jaxserve.scheduling.request import FinishReason, RequestStatus
from jaxserve.scheduling.router import Start
from jaxserve.scheduling.schedule_config import ScheduleConfig, resolve_schedule
from jaxserve.scheduling.step_plan import StepPlan


class Steps:
    """A scheduler of realistic sizes whose device samples token 0; notes in which step each request gets its first."""

    def __init__(self, **sizes):
        defaults = {"max_num_seqs": 256, "max_num_batched_tokens": 2048, "page_size": 16, "num_pages": 20_000}
        self.scheduler = make_scheduler(**{**defaults, "max_model_len": 131_072, **sizes})
        self.first_token, self.plans = {}, []

    def add(self, *requests):
        for request in requests:
            self.scheduler.add(request)
        return self

    def step(self):
        plan = self.scheduler.schedule()
        self.plans.append(plan)
        self.scheduler.update(plan, [[0] * most for most in plan.max_new])
        for request, most in zip(plan.requests, plan.max_new, strict=True):
            if most:
                self.first_token.setdefault(request.request_id, len(self.plans))
        self.scheduler.check_integrity()
        return plan

    def until(self, request_id):
        while request_id not in self.first_token:
            self.step()
        return self.first_token[request_id]


def prompt(first, num_tokens):
    """Tokens that no prompt with another `first` begins with."""
    return [first, *range(1, num_tokens)]


def test_short_prompts_start_beside_a_long_one():
    """Short prompts behind it would get their first tokens after its 32 steps."""
    steps = Steps().add(make_request("long", prompt(0, 64_000), 4))
    steps.add(*(make_request(f"short {i}", prompt(i, 100), 4) for i in range(1, 21)))
    assert max(steps.until(f"short {i}") for i in range(1, 21)) <= 3
    assert steps.until("long") <= 37
    alone = Steps().add(make_request("long", prompt(0, 64_000), 4))
    assert alone.until("long") == 32, "alone it has all of every step"


@pytest.mark.parametrize(("threshold", "chunk"), [(0, 1024), (300, 300)])
def test_a_step_that_rows_in_decode_wait_for_has_no_more_of_a_long_prompt_than_a_chunk(threshold, chunk):
    policy = ScheduleConfig(1, 2048, 1, 1, 1, long_prefill_token_threshold=threshold).policy
    steps = Steps(long_threshold=policy.long_threshold, long_chunk=policy.long_chunk)
    steps.add(make_request("row", [1], 6)).step()
    steps.add(make_request("long", prompt(0, 20_000), 1))
    assert [starts(steps.step())["long"][1] for _ in range(5)] == [chunk] * 5
    assert starts(steps.step())["long"][1] == 2048, "nobody waits for this step"


def test_a_prompt_is_long_by_its_remaining_tokens_in_that_step():
    steps = Steps(max_num_batched_tokens=64, max_num_seqs=8, long_threshold=100, long_chunk=16)
    steps.add(make_request("row", [1], 6)).step()
    steps.add(make_request("long", prompt(0, 110), 1))
    assert starts(steps.step())["long"] == (0, 16)


def test_a_long_prompt_gets_the_budget_that_others_leave():
    steps = Steps().add(make_request("long", prompt(0, 20_000), 1), make_request("short", prompt(1, 100), 1))
    assert starts(steps.step()) == {"long": (0, 1948), "short": (0, 100)}


def test_a_second_long_prompt_starts_as_soon_as_the_first_is_long_no_more():
    """Under a stream of short ones that come behind it, with a slot for each."""
    steps = Steps().add(make_request("first", prompt(1, 20_000), 1), make_request("second", prompt(2, 20_000), 1))
    first, second = steps.scheduler._requests["first"], steps.scheduler._requests["second"]
    for index in count(3):
        steps.add(*(make_request(f"{index}.{i}", prompt(index + 1000 * i, 400), 2) for i in range(4)))
        plan = steps.step()
        if second.status is RequestStatus.RUNNING:
            break
        assert first.num_tokens - first.num_computed_tokens > 2048
        assert plan.num_tokens > 1024, "shorter ones go on meanwhile"
    for more in range(100):
        if "second" in steps.first_token:
            return
        steps.add(*(make_request(f"more {more}.{i}", prompt(more + 1000 * i, 400), 2) for i in range(4)))
        steps.step()
    raise AssertionError("the second long prompt starves")


def test_siblings_of_a_long_prompt_compute_it_once_and_delay_nobody():
    steps = Steps(max_num_batched_tokens=256)
    steps.add(*(make_request(f"a-{i}", prompt(0, 2001), 2) for i in range(64)), make_request("b", prompt(1, 50), 2))
    assert steps.until("b") == 1
    steps.until("a-63")
    assert sum(plan.num_prefill_tokens for plan in steps.plans) == 2001 + 63 * 1 + 50
    assert all(request.num_cached_tokens == 2000 for request in steps.scheduler._requests.values() if request.slot > 0)


def test_a_prompt_that_differs_from_an_unfinished_one_starts_once_the_common_part_is_there():
    steps = Steps(max_num_seqs=8, max_num_batched_tokens=64, long_chunk=16)
    common = prompt(0, 48)
    steps.add(make_request("long", common + prompt(1, 300), 1), make_request("other", [*common, 2, 3], 1))
    assert [starts(steps.step()).get("other") for _ in range(2)] == [None, (48, 2)]


def test_after_a_reset_nobody_waits_for_a_prompt_that_will_not_be_found():
    steps = Steps(max_num_seqs=8, max_num_batched_tokens=64, long_threshold=100, long_chunk=16)
    steps.add(make_request("long", prompt(0, 300), 1)).step()
    steps.scheduler.reset_prefix_cache()
    steps.add(make_request("short", prompt(0, 99), 1))
    assert starts(steps.step())["short"] == (0, 48)


def test_at_the_limit_of_unfinished_prompts_only_requests_that_fit_the_step_start():
    steps = Steps(max_num_seqs=8, max_num_batched_tokens=64, max_unfinished=1)
    steps.add(make_request("long", prompt(0, 400), 1), make_request("too long", prompt(1, 50), 1))
    steps.add(make_request("short", prompt(2, 20), 1))
    assert starts(steps.step()) == {"long": (0, 44), "short": (0, 20)}
    low = Steps(max_num_seqs=8, max_num_batched_tokens=64, max_unfinished=1, long_threshold=10)
    low.add(make_request("long", prompt(0, 400), 1), make_request("long, too", prompt(1, 20), 1))
    assert starts(low.step()) == {"long": (0, 64)}
    two = Steps(max_num_seqs=8, max_num_batched_tokens=64, max_unfinished=2, long_chunk=64)
    two.add(make_request("long", prompt(0, 400), 1), make_request("cut", prompt(1, 50), 1))
    assert starts(two.step()) == {"long": (0, 32), "cut": (0, 32)}


def test_a_prompt_that_is_mostly_cached_is_not_long():
    steps = Steps().add(make_request("before", prompt(0, 10_001), 1))
    steps.until("before")
    steps.add(make_request("long", prompt(1, 10_000), 1), make_request("again", prompt(0, 10_100), 1))
    assert starts(steps.step())["again"] == (10_000, 100)


@pytest.mark.parametrize("num_siblings", [129, pytest.param(1000, marks=pytest.mark.full)])
@pytest.mark.parametrize(
    ("sizes", "num_tokens"),
    [({}, 8000), ({}, 6000), ({"max_num_batched_tokens": 256, "long_threshold": 3000}, 2500)],
    ids=["all of it", "long", "short"],
)
def test_a_short_request_overtakes_any_number_that_share_a_long_prompts_prefix(num_siblings, sizes, num_tokens):
    steps = Steps(**sizes)
    common = prompt(0, 8000)
    steps.add(make_request("first", common, 2)).step()
    siblings = [make_request(f"sibling {i}", common[:num_tokens], 1) for i in range(num_siblings)]
    steps.add(*siblings, make_request("short", prompt(1, 50), 1))
    assert steps.until("short") <= 3, "two plans after it came"
    while any(sibling.status is not RequestStatus.FINISHED for sibling in siblings):
        steps.step()
    assert [request for plan in steps.plans for request in plan.admitted if request in siblings] == siblings
    num_own = num_tokens - (num_tokens - 1) // 16 * 16
    steps.until("first")
    assert sum(plan.num_prefill_tokens for plan in steps.plans) == 8000 + 50 + num_siblings * num_own


@pytest.mark.parametrize("how", ["end", "preemption", "reset"])
def test_a_request_waiting_for_a_prompt_continues_without_it(how):
    steps = Steps(max_num_seqs=8, max_num_batched_tokens=64, max_long=2, long_threshold=100, long_chunk=16)
    steps.add(make_request("first", prompt(0, 300), 1), make_request("second", prompt(0, 300), 1)).step()
    assert "second" not in starts(steps.step())
    first, ledger = steps.scheduler._requests["first"], steps.scheduler.shards[0].ledger
    if how == "end":
        steps.scheduler.finish("first", FinishReason.ABORT)
    elif how == "reset":
        steps.scheduler.reset_prefix_cache()
    else:
        ledger.preempt(first, StepPlan(0))
        ledger.dequeue(first)
        steps.scheduler._forget(first)
    assert starts(steps.step())["second"][0] == (0 if how == "reset" else 128)


def test_who_waits_for_a_long_prompt_waits_for_no_other_one():
    """Requests that begin as one that waited itself when they came."""
    steps = Steps(max_num_batched_tokens=256)
    steps.add(make_request("long", prompt(0, 2000), 1), make_request("next", prompt(1, 2000), 1))
    steps.add(*(make_request(f"next {i}", prompt(1, 2000), 1) for i in range(20)))
    steps.add(make_request("last", prompt(2, 100_000), 1))
    for _ in range(30):
        steps.step()
    assert steps.scheduler.num_waiting == 0
    assert [r.request_id for plan in steps.plans for r in plan.admitted][-1] == "last"


def test_a_skipped_request_keeps_its_position():
    steps = Steps(max_num_seqs=8, max_num_batched_tokens=64, max_long=2, long_threshold=100, long_chunk=16)
    steps.add(make_request("first", prompt(0, 300), 1), make_request("early", prompt(0, 300), 1)).step()
    steps.add(*(make_request(f"late {i}", prompt(1 + i, 64), 1) for i in range(40)))
    steps.until("early")
    admitted = [request.request_id for plan in steps.plans for request in plan.admitted]
    num_late = admitted.index("early") - 1
    assert 0 < num_late < 40, "some went on meanwhile, and no more than that"
    assert steps.first_token["early"] <= steps.first_token["first"] + 1
    assert admitted[1 : 1 + num_late] == [f"late {i}" for i in range(num_late)]


def test_a_short_request_overtakes_any_number_of_long_prompts():
    steps = Steps().add(*(make_request(f"long {i}", prompt(i, 9000), 1) for i in range(1000)))
    steps.add(make_request("short", prompt(1000, 10), 1))
    assert steps.until("short") <= 2


def test_a_shorter_request_overtakes_any_number_that_do_not_fit_the_step():
    steps = Steps(max_unfinished=1, num_pages=100_000).add(make_request("long", prompt(0, 100_000), 1))
    steps.add(*(make_request(f"middle {i}", prompt(i, 1100), 1) for i in range(1, 200)))
    steps.add(make_request("short", prompt(1000, 10), 1))
    assert steps.until("short") <= 50


def test_requests_looked_up_in_every_plan_leave_lookups_for_others():
    steps = Steps(max_unfinished=1, max_lookups=4).add(make_request("long", prompt(0, 100_000), 1))
    steps.add(*(make_request(f"middle {i}", prompt(i, 1100), 1) for i in range(1, 11)))
    steps.add(make_request("short", prompt(1000, 10), 1))
    assert steps.until("short") <= 12


def test_who_did_not_fit_the_rest_of_a_step_is_asked_for_the_next():
    steps = Steps(max_unfinished=1).add(make_request("long", prompt(0, 20_000), 1))
    steps.add(make_request("short", prompt(1, 500), 1), make_request("middle", prompt(2, 700), 1))
    assert [starts(steps.step()).keys() - {"long"} for _ in range(2)] == [{"short"}, {"middle"}]


def test_a_prompt_is_long_no_more_when_others_have_computed_enough_of_it():
    """It starts in the first plan for which that is so when its turn comes."""
    steps = Steps().add(make_request("long", prompt(0, 50_000), 1), make_request("early", prompt(1, 2900), 1))
    steps.step()
    steps.add(make_request("late", prompt(1, 960), 1))
    assert [starts(steps.step()).keys() - {"long"} for _ in range(2)] == [{"late"}, {"early"}]


def test_one_long_prompt_is_hashed_in_vain_per_step():
    """Whatever waits that reads no prefix cache, and so is not hashed."""
    unread = make_request("unread", prompt(9, 9000), 1, read_prefix_cache=False)
    first, *others = (make_request(str(i), prompt(i, 9000), 1) for i in range(4))
    steps = Steps().add(first, unread, *others)
    for num_hashed in (2, 3, 4):
        steps.step()
        assert sum(bool(request.page_hashes) for request in steps.scheduler._requests.values()) == num_hashed


# Pages


def test_a_prefill_short_of_pages_takes_the_free_ones_and_waits_for_decoding_rows():
    loop = Loop(make_scheduler(max_num_seqs=4, max_num_batched_tokens=16, page_size=4, num_pages=16))
    row, long = make_request("row", [1] * 18, 11), make_request("long", [2] * 50, 4)
    loop.add(row).step()
    loop.add(long)
    shares = []
    while row.status is not RequestStatus.FINISHED:
        plan = loop.step()
        assert not plan.preempted
        shares.append(starts(plan).get("long", (0, 0))[1])
    assert shares[:-1] == [14, 8, 8, 6, 0, 0, 0, 0, 0, 0]
    loop.drain()
    assert not long.num_preemptions


def test_of_two_prompts_without_pages_the_younger_gives_way():
    loop = Loop(make_scheduler(max_num_seqs=4, max_num_batched_tokens=12, page_size=2, num_pages=25, max_long=2))
    row, old, young = make_request("row", [1], 20), make_request("old", [2] * 30, 4), make_request("young", [3] * 39, 4)
    loop.add(row).step()
    loop.add(old, young)
    while not (preempted := loop.step().preempted):
        pass
    assert preempted == [young]
    assert starts(loop.plans[-1]) == {"row": (5, 1), "old": (28, 2)}, "no row in decode needs a page"
    loop.drain()
    assert not old.num_preemptions
    for request in (row, old, young):
        assert request.output_token_ids == generate_alone(request)[0]


def test_a_newcomer_leaves_an_unfinished_prompt_its_pages():
    loop = Loop(make_scheduler(max_num_seqs=4, max_num_batched_tokens=16, page_size=4, num_pages=16))
    loop.add(make_request("old", [2] * 50, 4), *(make_request(str(i), [3 + i] * 6, 8) for i in range(3)))
    plans = [loop.step() for _ in range(10)]
    assert [request.request_id for plan in plans for request in plan.admitted] == ["old", "0", "1"]
    assert plans[8].admitted, "not before the old prompt has all its pages"
    assert all(not plan.preempted for plan in plans)
    loop.drain()


def test_nobody_starts_while_a_running_prompt_lacks_pages():
    loop = Loop(make_scheduler(max_num_seqs=8, max_num_batched_tokens=16, page_size=4, num_pages=16))
    loop.add(make_request("row", [1], 28)).step()
    loop.add(make_request("long", [2] * 50, 4))
    for index in range(40):
        loop.add(make_request(f"short {index}", [3 + index], 1))
        plan = loop.step()
        long = loop.scheduler._requests.get("long")
        if long is None or long.num_computed_tokens >= 50:
            break
        if "long" not in starts(plan):
            assert not plan.admitted
    else:
        raise AssertionError("the oldest prompt starves")
    loop.drain()


# What replicas say of a request


def test_short_prompts_start_alongside_a_long_one():
    steps = Steps().add(make_request("long", prompt(0, 20_000), 1))
    steps.step()
    short, long = make_request("short", prompt(1, 100), 1), make_request("another", prompt(2, 20_000), 1)
    sibling = make_request("sibling", prompt(0, 20_000), 1)
    answers = [steps.scheduler.view.could_start(request) for request in (short, long, sibling)]
    assert answers == [Start.NOW, Start.LATER, Start.LATER]
    steps.add(sibling, long, short)
    assert [request.request_id for request in steps.step().admitted] == ["short"]


# Options


def test_the_policy_follows_from_the_options():
    def policy(**options):
        config = EngineConfig(max_num_seqs=8, max_num_batched_tokens=64, **options)
        return resolve_schedule(config, max_position=128, platform="cpu", page_size=16, num_pages=8).policy

    assert policy() == policy(long_prefill_token_threshold=None) == Policy(8, 2, 1, 64, 32)
    options = {"max_num_partial_prefills": 4, "max_long_partial_prefills": 3, "long_prefill_token_threshold": 20}
    assert policy(**options) == Policy(8, 4, 3, 20, 20)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_num_partial_prefills": 0}, "max_num_partial_prefills must be a positive integer"),
        ({"max_long_partial_prefills": 3}, "at most max_num_partial_prefills, got 3 and 2"),
        ({"long_prefill_token_threshold": -1}, "long_prefill_token_threshold must be an integer of 0 or more"),
        ({"long_prefill_token_threshold": True}, "long_prefill_token_threshold must be an integer of 0 or more"),
    ],
)
def test_options_out_of_range_are_refused(options, message):
    with pytest.raises(ConfigError, match=message):
        EngineConfig(**options)
