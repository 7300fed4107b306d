"""Prompts that begin alike: their common pages are computed once."""

import pytest
from simulation import Loop, make_request, make_scheduler, num_computed, starts

from jaxserve.scheduling.request import FinishReason


@pytest.mark.parametrize("depth", [0, 1])
def test_requests_submitted_together_compute_their_common_prefix_once(depth):
    loop = Loop(make_scheduler(64, 2048, 16, 1024, 1024), depth)
    prefix = [i % 7 for i in range(512)]
    loop.add(*(make_request(str(i), [*prefix, 10 + i, 10 + i], 2) for i in range(64)))
    plans = loop.drain().plans
    assert plans[0].num_prefill_tokens == 514 + 2 * 63
    assert plans[0].num_cached_tokens == 512 * 63
    assert num_computed(plans) == 512 + 64 * (2 + 1)


def test_siblings_share_the_pages_of_their_prompt():
    loop = Loop(make_scheduler())
    siblings = [make_request(f"a-{i}", range(10), 6) for i in range(4)]
    loop.add(*siblings)
    assert starts(loop.step()) == {"a-0": (0, 10)} | {f"a-{i}": (8, 2) for i in (1, 2, 3)}
    assert all(request.pages[:2] == siblings[0].pages[:2] for request in siblings)
    assert len({request.pages[2] for request in siblings}) == 4
    assert [request.num_cached_tokens for request in siblings] == [0, 8, 8, 8]
    loop.drain()


@pytest.mark.parametrize(
    ("num_prompts", "prompt_len", "max_tokens"),
    [(24, 250, 6), (8, 33, 4), pytest.param(64, 100, 16, marks=pytest.mark.full)],
)
def test_siblings_take_no_more_steps_than_prompts_of_their_own(num_prompts, prompt_len, max_tokens):
    def num_steps(prompts):
        loop = Loop(make_scheduler(256, 512, 16, 4096, 512), depth=1)
        loop.add(*(make_request(str(i), prompt, max_tokens) for i, prompt in enumerate(prompts))).drain()
        return len(loop.plans), num_computed(loop.plans)

    def prompt(first):
        return [first, *range(prompt_len - 1)]

    (shared, num_shared_tokens), (single, num_single_tokens) = (
        num_steps([prompt(i // n) for i in range(2 * num_prompts)]) for n in (2, 1)
    )
    assert shared <= single
    assert num_single_tokens - num_shared_tokens == num_prompts * (prompt_len // 16) * 16


@pytest.mark.parametrize("depth", [0, 1])
def test_siblings_of_a_prompt_in_chunks_compute_it_once(depth):
    loop = Loop(make_scheduler(max_num_batched_tokens=16), depth)
    loop.add(*(make_request(f"a-{i}", range(40), 2) for i in range(3)), make_request("b", range(50, 54), 1)).drain()
    assert starts(loop.plans[0]) == {"a-0": (0, 12), "b": (0, 4)}, "a request with another prompt goes past them"
    assert starts(loop.plans[1]) == {"a-0": (12, 16)}
    assert starts(loop.plans[2]) == {"a-0": (28, 12), "a-1": (36, 4)}
    assert starts(loop.plans[3])["a-2"] == (36, 4)


@pytest.mark.parametrize("num_prompt", [3, 6])
def test_reset_forgets_cached_prefixes_and_their_extensions(num_prompt):
    loop = Loop(make_scheduler(), depth=1)
    running = make_request("a", range(num_prompt), 20)
    loop.add(running)
    loop.step()
    loop.scheduler.reset_prefix_cache()
    for _ in range(12):
        loop.step()
    loop.add(make_request("b", running.tokens(0, 13), 1))
    assert starts(loop.step())["b"] == (0, 13)
    loop.drain()
    loop.add(make_request("c", running.tokens(0, 13), 1)).drain()
    assert starts(loop.plans[-1]) == {"c": (12, 1)}  # found in "b", which started after the reset


@pytest.mark.parametrize(
    ("slot", "depth"),
    [(0, 0), (3, 1), *(pytest.param(*other, marks=pytest.mark.full) for other in ((0, 1), (1, 0), (7, 1)))],
)
@pytest.mark.parametrize("num_prompt", [3, 60, 64, 70])
def test_outputs_are_found_up_to_64_tokens_late_and_whole_when_their_request_has_ended(num_prompt, slot, depth):
    loop = Loop(make_scheduler(9, num_pages=1024), depth)
    running = make_request("a", range(num_prompt), 180)
    loop.add(*(make_request(str(i), [90 + i], 230) for i in range(slot))).step()
    loop.add(running)
    while running.num_known_tokens < 150:
        loop.step()
    meanwhile = make_request("b", running.tokens(0, 150), 1)
    loop.add(meanwhile).step()
    assert running.slot == slot
    assert 149 - 64 <= meanwhile.num_cached_tokens < 149
    num_known = running.num_known_tokens
    loop.scheduler.finish("a", FinishReason.ABORT)
    afterwards = make_request("c", running.tokens(0, num_known), 1)
    loop.add(afterwards).drain()
    assert afterwards.num_cached_tokens == (num_known - 1) // 4 * 4
    loop.scheduler.check_integrity()


def test_outputs_of_rows_that_began_together_are_registered_in_turn():
    loop = Loop(make_scheduler(16, num_pages=1024))
    rows = [make_request(str(i), [90 + i], 230) for i in range(16)]
    loop.add(*rows)
    registered = []
    for _ in range(129):
        before = [row.num_registered_blocks for row in rows]
        loop.step()
        registered.append(sum(row.num_registered_blocks > n for row, n in zip(rows, before, strict=True)))
    assert sum(row.num_registered_blocks for row in rows) > 16 * 16
    assert max(registered) == 1


def test_pages_that_appended_tokens_fill_are_found():
    scheduler = make_scheduler(num_pages=256)
    running = make_request("a", range(3), 180, waits_for_tokens=True, may_be_extended=True)
    scheduler.add(running)

    def go_on(num_tokens):
        while running.num_known_tokens < num_tokens:
            plan = scheduler.schedule()
            scheduler.update(plan, [[len(plan.requests)] * most for most in plan.max_new])

    go_on(62)
    scheduler.extend("a", [1, 2, 3, 4, 5])
    go_on(80)
    meanwhile = make_request("b", running.tokens(0, 80), 1)
    scheduler.add(meanwhile)
    scheduler.schedule()
    assert meanwhile.num_cached_tokens >= 64


@pytest.mark.parametrize("prompt_len", [15, 16, 17, 18, 20, 21, 32, 33, 34])
def test_chunked_prompts_leave_a_snapshot_after_their_last_page(prompt_len):
    """The last chunk may begin behind that page."""
    loop = Loop(make_scheduler(max_num_batched_tokens=16, page_size=4, num_snapshots=2))
    again = make_request("again", range(prompt_len), 2)
    loop.add(make_request("first", range(prompt_len), 2)).drain().add(again).drain()
    assert again.num_cached_tokens == (prompt_len - 1) // 4 * 4
    loop.scheduler.check_integrity()
