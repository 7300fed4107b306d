"""The index of a tier, compared with a model that searches all pages, and its eviction rule."""

import math

from hypothesis import given
from hypothesis import strategies as st

from jaxserve.scheduling.kv_cache.pages import STATES
from jaxserve.scheduling.kv_cache.stored_pages import CHANCE, LEARNING, MAX_BIAS, NUM_LEVELS, PageKey, StoredPages

KEYS = [PageKey(index % 2, bytes([index])) for index in range(12)]


class Searching:
    """Pages with their last uses and numbers of uses; `deleted` are remembered, the latest at the end.

    `bias` is how much faster those grow old that at most one request has used.
    """

    def __init__(self, num_pages, keys):
        self.num_pages, self.now = num_pages, 0
        self.used, self.num_uses, self.deleted, self.loads, self.bias = {}, {}, [], [], 0.0
        for key in keys:
            self.use(key, 1)

    def use(self, key, num_uses):
        self.now += 1
        self.used[key], self.num_uses[key] = self.now, num_uses

    def victim(self):
        def age(key):
            num_uses = self.num_uses[key]
            bias = max(self.bias - CHANCE, 0) if num_uses <= 1 else 0
            return (self.now - self.used[key]) / 2 ** (min(num_uses, NUM_LEVELS - 1) - bias)

        ages = {key: age(key) for key in self.used if key not in self.loads}
        return [key for key, each in ages.items() if math.isclose(each, max(ages.values()))]

    def evict(self, key):
        self.deleted = [*self.deleted, (key, self.num_uses[key])][-self.num_pages :]
        self.remove(key)

    def store(self, key):
        num_uses = dict(self.deleted).get(key)
        if num_uses is not None:
            num_alike = sum((each > 1) == (num_uses > 1) for _, each in self.deleted)
            change = max(1, len(self.deleted) / num_alike - 1) * (1 if num_uses > 1 else -1)
            self.bias = min(max(self.bias + LEARNING * change / self.num_pages, 0), MAX_BIAS)
            self.deleted.remove((key, num_uses))
        self.use(key, min(num_uses or 0, NUM_LEVELS - 1))

    def remove(self, key):
        del self.used[key], self.num_uses[key]


@given(
    num_pages=st.integers(1, 6),
    num_found=st.integers(0, 6),
    actions=st.lists(st.tuples(st.sampled_from("ssstttllecr"), st.sampled_from(KEYS)), max_size=80),
)
def test_the_victim_has_the_largest_age_of_all(num_pages, num_found, actions):
    found = KEYS[: min(num_found, num_pages)]
    tier, model, moves = StoredPages("disk", num_pages, found), Searching(num_pages, found), []
    for move, (action, key) in enumerate(actions):
        if action == "s" and key not in tier:
            while not tier.fits(key) and (victim := tier.victim()) is not None:
                assert victim in model.victim()
                tier.evict(victim)
                model.evict(victim)
            if not tier.fits(key):
                assert model.victim() == []
                continue
            tier.store(move, key)
            model.store(key)
        elif action == "t":
            tier.touch(key)
            if key in model.used:
                model.use(key, model.num_uses[key] + 1)
        elif action == "l" and key in tier:
            tier.load(move, key)
            model.loads.append(key)
            moves.append(move)
        elif action == "e" and moves:
            tier.loaded(moves.pop(0))
            model.loads.pop(0)
        elif action == "c" and key in tier:
            tier.delete(key)
            model.remove(key)
        elif action == "r" and key == KEYS[0]:
            tier.clear()
            model.used, model.num_uses, model.deleted, model.bias = {}, {}, [], 0.0
        assert {key for key in KEYS if key in tier} == model.used.keys()
        assert (not tier.fits(KEYS[0])) == (len(model.used) >= num_pages)


def released(tier, *keys):
    """Have a request use pages, which are stored if they are not."""
    for key in keys:
        if key not in tier:
            if not tier.fits(key):
                tier.evict(tier.victim())
            tier.store(0, key)
        tier.touch(key)


def one_shot(count):
    return [PageKey(0, b"other" + index.to_bytes(2, "big")) for index in range(count)]


def test_prompts_that_nobody_continues_do_not_push_out_a_conversation():
    tier, conversation = StoredPages("disk", 20), KEYS[:5]
    for _ in range(3):
        released(tier, *conversation)
    released(tier, *one_shot(40))  # twice its capacity
    assert all(key in tier for key in conversation)


def test_an_old_conversation_leaves_in_the_end():
    tier, conversation = StoredPages("disk", 20), KEYS[:5]
    for _ in range(100):
        released(tier, *conversation)
    released(tier, *one_shot(20 * 2**NUM_LEVELS))
    assert not any(key in tier for key in conversation)


def test_a_page_that_comes_back_counts_its_earlier_uses():
    tier, (key, *others) = StoredPages("disk", 4), KEYS
    for _ in range(NUM_LEVELS):
        released(tier, key)
    tier.evict(key)
    released(tier, key, *others[:3])
    released(tier, *one_shot(6))
    assert key in tier


def test_a_state_takes_the_capacity_of_several_pages():
    tier, state = StoredPages("host", 4, state_pages=3), PageKey(STATES, b"state")
    tier.store(0, KEYS[0])
    assert tier.fits(state)
    tier.store(1, state)
    assert not tier.fits(KEYS[1])
    tier.delete(KEYS[0])
    assert tier.fits(KEYS[1])
    assert not tier.fits(PageKey(STATES, b"other"))
    tier.evict(state)
    assert tier.fits(PageKey(STATES, b"other"))
    assert tier.size(state) == 3
